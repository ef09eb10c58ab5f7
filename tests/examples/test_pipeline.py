"""pipeline, small: any number of micro-batches learns as the model in one process does, alone and under torchrun."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from aiorpc.examples._shared.resnet import images
from aiorpc.examples.pipeline import MOMENTUM, SIZE, Settings, Stage
from tests.examples.programs import Ran, is_png, matches, run_all

pytestmark = pytest.mark.slow
MODULE = "aiorpc.examples.pipeline"
LIMIT = 90.0  # seconds for programs that take about ten
# 60 pictures in 8 parts: the last one is smaller than the others.
SMALL: dict[str, Any] = {
    "micro": (1, 2, 8), "num_steps": 8, "batch_size": 60, "width": 64, "depth": 2, "show": False, "timeout": LIMIT,
}  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One run with all numbers of micro-batches, and the program as it is on the command line."""
    options = ("--micro", "1", "3", "--num-steps", "2", "--batch-size", "6", "--width", "8", "--depth", "1")
    folder = tmp_path_factory.mktemp("anywhere")
    return run_all(MODULE, [SMALL], folder, *options, "--picture", "new/p.png", timeout=2 * LIMIT)


@pytest.fixture(scope="module")
def result(ran: Ran) -> dict[str, Any]:
    return ran.results[0]


def losses_in_one_process(settings: Settings) -> list[float]:
    """The same training, with torch alone and whole batches."""
    stages = [Stage(number, settings) for number in (0, 1)]
    parameters = [each for stage in stages for each in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=settings.lr, momentum=MOMENTUM)
    losses = []
    for pictures, labels in itertools.islice(images(settings.seed, 0, settings.batch_size, SIZE), settings.num_steps):
        loss = torch.nn.functional.cross_entropy(stages[1].forward(stages[0].forward(pictures.flatten(1))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("place", range(3))
def test_the_loss_falls(result: dict[str, Any], place: int) -> None:
    """With any number of micro-batches, and all take some time."""
    one = result["runs"][place]
    assert one["micro"] == SMALL["micro"][place] and len(one["losses"]) == len(one["seconds"]) == 8
    assert one["losses"][-1] < one["losses"][0] - 1.0
    assert one["s_per_batch"] > 0


@pytest.mark.long
@pytest.mark.parametrize("place", range(3))
def test_losses_are_those_of_the_model_in_one_process(result: dict[str, Any], place: int) -> None:
    """Gradients of all micro-batches add up, in one context, to those of the batch."""
    assert result["runs"][place]["losses"] == pytest.approx(losses_in_one_process(Settings(**SMALL)), rel=1e-3)


@pytest.mark.long
def test_it_shows_progress_and_draws(ran: Ran) -> None:
    """A line for each step, one for each number, a picture, and nothing on stderr."""
    assert ran.outcome.err == ""
    expected = (
        *(
            rf"micro-batches  {micro}   step   {step}   loss +\d+\.\d{{4}}   \d+\.\d{{3}} s"
            for micro in (1, 3)
            for step in (1, 2)
        ),
        r" 1 micro-batch  : +\d+\.\d ms for a batch of 6 \(1\.00x\); loss .* -> .*",
        r" 3 micro-batches: +\d+\.\d ms for a batch of 6 \(\d+\.\d\dx\); loss .* -> .*",
        r"wrote new/p\.png",
    )
    assert matches(ran.outcome.out, expected), ran.outcome.out
    assert is_png(ran.folder / "new" / "p.png")
