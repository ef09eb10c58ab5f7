"""rnn, small: perplexity falls, as it does for the same model in one process, alone and under torchrun."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiorpc.examples.rnn import Decoder, Embedding, Recurrent, Settings, State, loss_of, read_text
from tests.examples.programs import Ran, is_png, matches, run_all

pytestmark = pytest.mark.slow
MODULE = "aiorpc.examples.rnn"
LIMIT = 90.0  # seconds for programs that take about ten
SMALL: dict[str, Any] = {"epochs": 6, "hidden": 64, "sample": 40, "show": False, "timeout": LIMIT}
SPOKEN = (
    r"epoch   1   perplexity +\d+\.\d\d .*",
    r"epoch   2   perplexity +\d+\.\d\d .*",
    r"2,885 letters, 53 different ones: 16 steps in \d+\.\d s, \d+\.\d ms each; perplexity .* -> .*",
    r"it writes: Alice .*",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run, its first epoch once more, and the program as it is on the command line."""
    options = ("--epochs", "2", "--hidden", "32", "--sample", "20", "--picture", "new/r.png")
    folder = tmp_path_factory.mktemp("anywhere")
    return run_all(MODULE, [SMALL, {**SMALL, "epochs": 1}], folder, *options, timeout=2 * LIMIT)


@pytest.fixture(scope="module")
def results(ran: Ran) -> list[dict[str, Any]]:
    return ran.results


def losses_in_one_process(settings: Settings) -> list[float]:
    """The same training, with torch alone."""
    text = read_text(settings)
    letters = len(text.alphabet)
    with torch.random.fork_rng(devices=[]):
        embedding, recurrent, decoder = Embedding(letters, settings), Recurrent(settings), Decoder(letters, settings)
    parameters = [*embedding.parameters(), *recurrent.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=settings.lr)
    losses = []
    for _ in range(settings.epochs):
        state: State | None = None
        for batch, following in text.pieces(settings.length, settings.batch):
            output, state = recurrent(embedding(batch), state)
            loss = loss_of(decoder(output), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.long
def test_perplexity_falls(results: list[dict[str, Any]]) -> None:
    """From nearly all letters to a few, and the model writes as many as it was asked for."""
    losses, perplexities = results[0]["losses"], results[0]["perplexities"]
    assert len(losses) == 6 * 8 and len(perplexities) == 6
    assert sum(losses[-8:]) / 8 < sum(losses[:8]) / 8 - 0.8
    assert perplexities[-1] < perplexities[0] / 2
    assert results[0]["written"].startswith("Alice ") and len(results[0]["written"]) == 6 + 40


@pytest.mark.long
def test_losses_are_those_of_the_model_in_one_process(results: list[dict[str, Any]]) -> None:
    """Gradients and Adam's steps across three workers are what torch computes without them."""
    settings = Settings(**{**SMALL, "epochs": 2})
    assert results[0]["losses"][:16] == pytest.approx(losses_in_one_process(settings), rel=1e-3)


@pytest.mark.long
def test_a_seed_gives_the_same_losses_again(results: list[dict[str, Any]]) -> None:
    """Nothing depends on when calls arrive."""
    assert results[1]["losses"] == pytest.approx(results[0]["losses"][:8], rel=1e-6)


@pytest.mark.long
def test_it_shows_progress_and_draws(ran: Ran) -> None:
    """A line for each epoch, what came out, a picture, and nothing on stderr."""
    assert ran.outcome.err == ""
    assert matches(ran.outcome.out, (*SPOKEN, r"wrote new/r\.png")), ran.outcome.out
    assert is_png(ran.folder / "new" / "r.png")
