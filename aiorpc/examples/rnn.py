"""A language model whose layers live on three workers, trained on a page of text.

    python -m aiorpc.examples.rnn                           # starts its own workers
    python -m aiorpc.examples.rnn --epochs 40 --picture rnn.png
    python -m aiorpc.examples.rnn --text book.txt           # learn from another text
    torchrun --standalone --nproc-per-node 3 -m aiorpc.examples.rnn

This is the model of PyTorch's tutorial "Getting Started with Distributed RPC Framework"
(https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html): the trainer has the LSTM, one worker the embedding
before it and another the decoder behind it. A training step is an autograd context: two blocking calls in the forward
pass, one backward pass over all three workers, one step of `DistributedOptimizer`, which updates each parameter where
it lives. Gradients and the state of Adam never leave their worker.

It reads letters, not words: the first page of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, public domain;
it comes with the package) is enough to learn from. Perplexity is measured on this text: the number of letters among
which the model effectively guesses the next one. With the same seed a run gives the same losses again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aiorpc as rpc
from aiorpc import autograd
from aiorpc.optim import DistributedOptimizer

from ._shared.launch import Place, launch
from ._shared.program import CommandLine, figure
from ._shared.progress import Steps, bar

__all__ = ["Settings", "main", "role", "run"]

NAMES = ("trainer", "embedding", "decoder")
PRELOAD = ("rich.progress", "aiorpc.optim")
#: How many letters of the text the model is given, to write on from there.
BEGINNING = 6

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """The settings of a run. text: a file; "": the text of the package.

    length: letters that gradients go back through. batch: places in the text that are read side by side. embedding,
    hidden: width of a letter's vector, and of the LSTM. sample: letters that the model writes when it has learned.
    """

    epochs: int = 25
    text: str = ""
    length: int = 24
    batch: int = 16
    embedding: int = 32
    hidden: int = 128
    lr: float = 0.01
    sample: int = 160
    seed: int = 543
    show: bool = True
    timeout: float = 600.0


# --- the text ---------------------------------------------------------------------------------------------------------


class Text:
    """A text as numbers. alphabet: its letters, in order; a letter's number is its place."""

    def __init__(self, text: str) -> None:
        self.alphabet: str = "".join(sorted(set(text)))
        self.numbers: Tensor = torch.tensor([self.alphabet.index(letter) for letter in text])

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(self.alphabet[number] for number in numbers)

    def pieces(self, length: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch: letters (at most length, batch) and those that follow them, of the same shape.

        Column i of each piece goes on where column i of the one before has ended.
        """
        rows = (len(self.numbers) - 1) // batch
        letters = self.numbers[: rows * batch].view(batch, rows).t()
        following = self.numbers[1 : rows * batch + 1].view(batch, rows).t()
        for start in range(0, rows, length):
            yield letters[start : start + length].contiguous(), following[start : start + length].contiguous()


def read_text(settings: Settings) -> Text:
    shipped = resources.files("aiorpc.examples").joinpath("data", "alice.txt")
    text = (Path(settings.text) if settings.text else shipped).read_text(encoding="utf-8")
    if len(text) <= settings.batch:
        raise ValueError(f"a text of {len(text)} letters cannot be read in {settings.batch} places at once")
    return Text(text)


# --- the model --------------------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """A part of the model, at the worker that has its parameters."""

    def __init__(self, number: int, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(settings.seed + number)

    def parameter_refs(self) -> list[rpc.RRef[torch.nn.Parameter]]:
        """References to its parameters, which stay here."""
        return [rpc.RRef(each) for each in self.parameters()]


class Embedding(Layers):
    """From letters (n, batch) to vectors (n, batch, embedding)."""

    def __init__(self, letters: int, settings: Settings) -> None:
        super().__init__(1, settings)
        self.table: torch.nn.Embedding = torch.nn.Embedding(letters, settings.embedding)

    def forward(self, letters: Tensor) -> Tensor:
        vectors: Tensor = self.table(letters)
        return vectors


class Recurrent(Layers):
    """From vectors (n, batch, embedding) and the state to (n, batch, hidden) and the next state."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(0, settings)
        self.lstm: torch.nn.LSTM = torch.nn.LSTM(settings.embedding, settings.hidden)

    def forward(self, vectors: Tensor, state: State | None) -> tuple[Tensor, State]:
        output, (hidden, cell) = self.lstm(vectors, state)
        # Truncated: the next piece goes on from here, its gradients do not go back here.
        return output, (hidden.detach(), cell.detach())


class Decoder(Layers):
    """From (n, batch, hidden) to a score for each letter (n, batch, letters)."""

    def __init__(self, letters: int, settings: Settings) -> None:
        super().__init__(2, settings)
        self.linear: torch.nn.Linear = torch.nn.Linear(settings.hidden, letters)

    def forward(self, output: Tensor) -> Tensor:
        scores: Tensor = self.linear(output)
        return scores


class LanguageModel:
    """The whole model, as the trainer sees it."""

    def __init__(self, letters: int, settings: Settings) -> None:
        self.embedding: rpc.RRef[Embedding] = rpc.remote("embedding", Embedding, args=(letters, settings))
        self.recurrent: Recurrent = Recurrent(settings)
        self.decoder: rpc.RRef[Decoder] = rpc.remote("decoder", Decoder, args=(letters, settings))

    def __call__(self, letters: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Scores (n, batch, letters) of what follows each of the letters (n, batch), and the state after them."""
        vectors = self.embedding.rpc_sync().forward(letters)
        output, state = self.recurrent(vectors, state)
        return self.decoder.rpc_sync().forward(output), state

    def parameter_refs(self) -> list[rpc.RRef[torch.nn.Parameter]]:
        """Of all parameters, wherever they live."""
        remote = [part.rpc_sync().parameter_refs() for part in (self.embedding, self.decoder)]
        return [*self.recurrent.parameter_refs(), *remote[0], *remote[1]]

    @torch.no_grad()
    def write(self, text: Text, length: int, seed: int) -> str:
        """Go on from the beginning of the text: each letter is drawn by its probability."""
        generator = torch.Generator().manual_seed(seed)
        numbers: list[int] = text.numbers[:BEGINNING].tolist()
        scores, state = self(torch.tensor(numbers).unsqueeze(1), None)
        for _ in range(length):
            numbers.append(int(torch.multinomial(scores[-1, 0].softmax(dim=0), 1, generator=generator)))
            scores, state = self(torch.tensor([numbers[-1:]]), state)
        return text.decode(numbers)


# --- training ---------------------------------------------------------------------------------------------------------


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def train_epoch(model: LanguageModel, optimizer: DistributedOptimizer, text: Text, settings: Settings) -> list[float]:
    """The loss of each step."""
    state: State | None = None
    losses = []
    for letters, following in text.pieces(settings.length, settings.batch):
        with autograd.context() as context_id:
            scores, state = model(letters, state)
            loss = loss_of(scores, following)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def perplexity(losses: Sequence[float]) -> float:
    """Infinite if it is more than any number, as where the learning rate is far too high."""
    try:
        return math.exp(sum(losses) / len(losses))
    except OverflowError:
        return math.inf


def drive(settings: Settings) -> dict[str, object]:
    """Make the model, train it and let it write."""
    text = read_text(settings)
    model = LanguageModel(len(text.alphabet), settings)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_refs(), lr=settings.lr)
    losses: list[float] = []
    perplexities: list[float] = []
    started = time.perf_counter()
    with Steps("epochs", settings.epochs, show=settings.show) as progress:
        for epoch in range(1, settings.epochs + 1):
            losses += (of_epoch := train_epoch(model, optimizer, text, settings))
            perplexities.append(now := perplexity(of_epoch))
            share = bar(math.log(now) / math.log(len(text.alphabet)))
            progress.done(f"epoch {epoch:3d}   perplexity {now:6.2f} {share}")
    return {
        "program": "rnn",
        **asdict(settings),
        "letters": len(text.alphabet),
        "size": len(text.numbers),
        "seconds": time.perf_counter() - started,
        "losses": losses,
        "perplexities": perplexities,
        "written": model.write(text, settings.sample, settings.seed),
    }


def role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 has the LSTM and trains, the others have the embedding and the decoder."""
    rpc.init_rpc(NAMES[place.rank], rank=place.rank, world_size=place.world_size)
    result = drive(settings) if place.rank == 0 else None
    rpc.shutdown()
    return result


def run(settings: Settings) -> dict[str, object] | None:
    """Train once and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised or was not done in ``settings.timeout`` seconds.
    """
    return launch(role, settings, NAMES, timeout=settings.timeout, preload=PRELOAD)


# --- the program ------------------------------------------------------------------------------------------------------


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell."""
    first, last = result["perplexities"][0], result["perplexities"][-1]
    steps, seconds = len(result["losses"]), result["seconds"]
    return [
        f"{result['size']:,} letters, {result['letters']} different ones: {steps:,} steps in "
        f"{seconds:.1f} s, {1e3 * seconds / steps:.1f} ms each; perplexity {first:.2f} -> {last:.2f}",
        "it writes: " + " ".join(result["written"].split()),
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the loss over the steps into a PNG file at ``path``. result: as ``run`` returns it."""
    losses, perplexities = result["losses"], result["perplexities"]
    each = len(losses) / len(perplexities)
    epochs = [each * (number + 0.5) for number in range(len(perplexities))]
    means = [math.log(value) for value in perplexities]
    with figure(path, 7.0, 4.0, grid=True) as page:
        axes = page.add_subplot()
        axes.plot(range(1, len(losses) + 1), losses, color="#1f6fb4", linewidth=0.8, alpha=0.5, label="step")
        axes.plot(epochs, means, color="#c9602c", marker="o", markersize=3, linewidth=2, label="mean of an epoch")
        axes.set(xlabel="step", ylabel="loss (nats for each letter)")
        axes.set_ylim(bottom=0)
        by_the_side = axes.secondary_yaxis("right")
        marks = [value for value in (1, 2, 5, 10, 20, 50, 100) if math.log(value) <= axes.get_ylim()[1]]
        by_the_side.set_yticks([math.log(value) for value in marks], labels=[str(value) for value in marks])
        by_the_side.set_ylabel("perplexity")
        axes.legend(frameon=False)
        axes.set_title("rnn: embedding, LSTM and decoder on three workers", fontsize=10)


def command_line() -> CommandLine[Settings]:
    """The command line."""
    made = CommandLine(
        "rnn", "A language model whose layers live on three workers, trained on a page of text.", Settings()
    )
    made.option("epochs", "how often the text is read", least=1)
    made.option("text", "learn from this file (UTF-8)", metavar="FILE")
    made.option("length", "letters that gradients go back through", least=1)
    made.option("batch", "places of the text read side by side", least=1)
    made.option("embedding", "width of a letter's vector", least=1)
    made.option("hidden", "width of the LSTM", least=1)
    made.option("lr", "learning rate")
    made.option("sample", "letters that it writes at the end")
    made.common_options(picture="the loss")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    commands = command_line()

    def check(settings: Settings) -> None:
        if settings.text and not Path(settings.text).is_file():
            commands.error(f"--text: there is no file {settings.text}")
        try:
            read_text(settings)
        except (ValueError, OSError) as error:
            commands.error(f"--text: cannot read {settings.text or 'the text that comes along'}: {error}")
        if settings.sample < 0:
            commands.error("--sample must not be negative")
        commands.need_workers(len(NAMES))

    return commands.main(argv, run, lines, draw, check)


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import rnn

    sys.exit(rnn.main())
