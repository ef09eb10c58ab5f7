"""batch_ps, small: the loss falls, batched and not, alone and under torchrun."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiorpc.examples._shared.progress import Steps
from aiorpc.examples._shared.ps import ServerBase, Settings
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


def test_an_update_is_one_step_with_the_average() -> None:
    """The server steps once, when all have reported, by the mean of their gradients times the learning rate."""
    settings = Settings(model="resnet18", lr=0.5)
    server = ServerBase(2, settings, Steps("steps", 1, show=False))
    before = server.get_model()["0.0.weight"]
    shapes = [each.shape for each in server.parameters]
    first = server.update_and_fetch_model(1, [torch.full(shape, 1.0) for shape in shapes], 1.0)
    assert not first.done()
    second = server.update_and_fetch_model(2, [torch.full(shape, 3.0) for shape in shapes], 3.0)
    assert second is first and first.done()
    assert torch.allclose(first.value()[0], before - 0.5 * 2.0)
    assert server.step_losses() == [2.0]
