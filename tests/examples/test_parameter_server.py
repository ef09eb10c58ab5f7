"""parameter_server, small: accuracy rises with one trainer and with two, alone and under torchrun."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from aiorpc.examples.parameter_server import Settings, digits, network
from tests.examples.programs import Ran, is_png, matches, run_all

pytestmark = pytest.mark.slow
MODULE = "aiorpc.examples.parameter_server"
LIMIT = 90.0  # seconds for programs that take about ten
SMALL: dict[str, Any] = {"batch_size": 16, "show": False, "timeout": LIMIT}
# As many steps in all, so that learning is the same but for the order in which gradients come.
VARIANTS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 2, "num_steps": 360},
    "two": {"world_size": 3, "num_steps": 180},
    "few": {"world_size": 2, "num_steps": 6, "check_every": 4},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All variants, one after the other, and the program as it is on the command line."""
    options = ("--world-size", "3", "--num-steps", "4", "--check-every", "2", "--picture", "new/p.png")
    settings = [{**SMALL, **variant} for variant in VARIANTS.values()]
    return run_all(MODULE, settings, tmp_path_factory.mktemp("anywhere"), *options, timeout=2 * LIMIT)


@pytest.fixture(scope="module")
def results(ran: Ran) -> dict[str, dict[str, Any]]:
    """By the names of the variants."""
    return dict(zip(VARIANTS, ran.results, strict=True))


def losses_in_one_process(settings: Settings) -> list[float]:
    """What one trainer's losses are, with torch alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    losses = []
    for pictures, labels in itertools.islice(digits(settings.seed, 1, settings.batch_size), settings.num_steps):
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("name", ["one", "two"])
def test_accuracy_rises(results: dict[str, dict[str, Any]], name: str) -> None:
    """From guessing to knowing most digits, on pictures that no trainer has seen; and the loss falls."""
    result = results[name]
    assert len(result["losses"]) == 360
    late = result["accuracies"][-4:]
    assert result["accuracies"][0] < 0.25 and sum(late) / 4 > 0.5
    assert sum(result["losses"][-20:]) / 20 < sum(result["losses"][:20]) / 20 - 0.5
    assert result["trainers"] == {"one": 1, "two": 2}[name]


@pytest.mark.long
def test_a_single_trainer_learns_as_in_one_process(results: dict[str, dict[str, Any]]) -> None:
    """Gradients and steps across two workers are what torch computes without them."""
    settings = Settings(**{**SMALL, **VARIANTS["one"], "num_steps": 40})
    assert results["one"]["losses"][:40] == pytest.approx(losses_in_one_process(settings), rel=1e-3)


@pytest.mark.long
def test_it_shows_progress_and_draws(ran: Ran) -> None:
    """A line for each look, what came out, a picture, and nothing on stderr."""
    assert ran.outcome.err == ""
    expected = (
        r"    4 steps   loss +\d+\.\d{3}   accuracy +\d+\.\d% .*",
        r"    8 steps   loss +\d+\.\d{3}   accuracy +\d+\.\d% .*",
        r"2 trainers, 8 steps in \d+\.\d s: [\d,]+ pictures/s; accuracy \d+\.\d% -> \d+\.\d%",
        r"wrote new/p\.png",
    )
    assert matches(ran.outcome.out, expected), ran.outcome.out
    assert is_png(ran.folder / "new" / "p.png")
