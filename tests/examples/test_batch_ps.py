"""batch_ps, small: the loss falls, batched and not, alone and under torchrun."""

from __future__ import annotations

from typing import Any

import pytest

from tests.examples.programs import run_all

pytestmark = pytest.mark.slow
MODULE = "aiorpc.examples.batch_ps"
LIMIT = 90.0  # seconds for programs that take about ten
SMALL: dict[str, Any] = {
    "model": "resnet18", "world_size": 3, "num_steps": 8, "batch_size": 8, "image_size": 32, "lr": 0.03,
    "show": False, "timeout": LIMIT,
}  # fmt: skip
# Unbatched, the order in which gradients come in decides on each loss: after more steps the fall is clear in any order.
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "batched again": {"num_steps": 2},
    "unbatched": {"batch": False, "num_steps": 12},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All variants, by name, one after the other in one program."""
    settings = [{**SMALL, **variant} for variant in VARIANTS.values()]
    found = run_all(MODULE, settings, tmp_path_factory.mktemp("anywhere"), timeout=2 * LIMIT).results
    return dict(zip(VARIANTS, found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["batched", "unbatched"])
def test_the_loss_falls(results: dict[str, dict[str, Any]], name: str) -> None:
    """Two trainers teach one model: the last steps are better than the first ones."""
    losses = results[name]["losses"]
    assert len(losses) == {**SMALL, **VARIANTS[name]}["num_steps"]
    assert sum(losses[-2:]) / 2 < sum(losses[:2]) / 2 - 0.2
    assert results[name]["samples_per_s"] > 0


@pytest.mark.long
def test_a_seed_gives_the_same_losses_again(results: dict[str, dict[str, Any]]) -> None:
    """Batched: gradients are averaged in the trainers' order, whatever order they came in."""
    assert results["batched again"]["losses"] == pytest.approx(results["batched"]["losses"][:2], rel=1e-6)
