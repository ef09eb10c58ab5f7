"""A parameter server that several trainers train at once, each as fast as it can.

    python -m aiorpc.examples.parameter_server              # a server and three trainers
    python -m aiorpc.examples.parameter_server --world-size 3 --num-steps 200 --picture ps.png
    torchrun --standalone --nproc-per-node 4 -m aiorpc.examples.parameter_server

This is the program of PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework"
(https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html): the server has the model, a small
convolutional network. A trainer sends it pictures and gets scores; its loss goes back through that call
(`autograd.backward`), and its `DistributedOptimizer` makes the server update the parameters. Each trainer's steps have
autograd contexts of their own, so their gradients never mix. No trainer waits for another: compare ``batch_ps``, where
one step takes the gradients of all trainers. The pictures are synthetic (digits of 5 x 7 points, moved about, under
noise): nothing has to be downloaded. Accuracy is measured on pictures that no trainer sees. The order of the trainers'
steps depends on the machine, so two runs are similar, but not equal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aiorpc as rpc
from aiorpc import autograd
from aiorpc.optim import DistributedOptimizer

from ._shared.launch import Place, launch
from ._shared.program import CommandLine, figure
from ._shared.progress import Steps, bar

__all__ = ["ParameterServer", "Settings", "digits", "main", "role", "run"]

PRELOAD = ("rich.progress", "aiorpc.optim")
#: Height and width of a picture.
SIZE = 10
#: Each digit in 7 rows of 5 points.
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
#: Standard deviation of the noise; a point is 1, the paper 0.
NOISE = 0.2
#: Pictures for measuring accuracy, and their reader.
HELD_OUT, NOBODY = 500, -1


@dataclass(frozen=True)
class Settings:
    """What can be chosen for a run. num_steps: of each trainer. batch_size: pictures of one trainer's step.

    check_every: steps of all trainers, on average, between two looks at the accuracy.
    """

    world_size: int = 4
    num_steps: int = 200
    batch_size: int = 32
    lr: float = 0.05
    check_every: int = 20
    seed: int = 543
    show: bool = True
    timeout: float = 600.0


def worker_name(rank: int) -> str:
    return "server" if rank == 0 else f"trainer{rank}"


def digits(seed: int, reader: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of pictures (N, 1, SIZE, SIZE) and the digits on them (N,); each reader sees others."""
    glyphs = torch.tensor([[[float(point) for point in row] for row in glyph.split()] for glyph in GLYPHS])
    height, width = glyphs.shape[1:]
    own = torch.Generator().manual_seed(1000 * seed + reader + 1)
    while True:
        labels = torch.randint(len(GLYPHS), (batch_size,), generator=own)
        pictures = NOISE * torch.randn(batch_size, 1, SIZE, SIZE, generator=own)
        tops = torch.randint(SIZE - height + 1, (batch_size,), generator=own).tolist()
        lefts = torch.randint(SIZE - width + 1, (batch_size,), generator=own).tolist()
        for picture, label, top, left in zip(pictures, labels.tolist(), tops, lefts, strict=True):
            picture[0, top : top + height, left : left + width] += glyphs[label]
        yield pictures, labels


def network() -> nn.Sequential:
    """From pictures (N, 1, SIZE, SIZE) to a score for each digit (N, 10)."""
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 4) ** 2, len(GLYPHS)),
    )
    for name, parameter in layers.named_parameters():
        # As for layers with ReLUs between them (He et al., 2015): it learns from the first steps on.
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return layers


class ParameterServer:
    """Has the model. Handlers run in several threads at once.

    trainers: their number. progress: gets each measurement of accuracy.
    """

    def __init__(self, trainers: int, settings: Settings, progress: Steps) -> None:
        torch.manual_seed(settings.seed)
        self._network = network()
        self._between = trainers * settings.check_every
        self._progress = progress
        self._pictures, self._labels = next(digits(settings.seed, NOBODY, HELD_OUT))
        self._lock = threading.Lock()  # for the network
        self._noting = threading.Lock()  # for what follows
        self.losses: list[float] = []  # of all trainers, in the order in which they came
        self.accuracies: list[float] = []

    def forward(self, pictures: Tensor) -> Tensor:
        """Scores (N, 10) of pictures (N, 1, SIZE, SIZE)."""
        # With copies of the parameters, which their gradients go back through: before this trainer's backward pass
        # begins, another's step may have changed the parameters, and torch refuses to compute with what was changed.
        # functional_call puts them into the module while it runs, so one at a time.
        with self._lock:
            copies = {name: each.clone() for name, each in self._network.named_parameters()}
            scores: Tensor = torch.func.functional_call(self._network, copies, (pictures,))
            return scores

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, where they are."""
        return list(self._network.parameters())

    def parameter_refs(self) -> list[rpc.RRef[nn.Parameter]]:
        """References to the parameters, which stay here."""
        return [rpc.RRef(each) for each in self.parameters()]

    def note(self, loss: float) -> None:
        """A trainer has made a step."""
        with self._noting:
            self.losses.append(loss)
            if len(self.losses) % self._between == 0:
                self._look()

    def _look(self) -> None:
        self.accuracies.append(now := self.accuracy())
        recent = self.losses[-self._between :]
        mean = sum(recent) / len(recent)
        self._progress.done(f"{len(self.losses):5d} steps   loss {mean:6.3f}   accuracy {now:6.1%} {bar(now)}")

    def accuracy(self) -> float:
        """The share of the held-out pictures that it knows."""
        with torch.no_grad():
            right = self.forward(self._pictures).argmax(dim=1) == self._labels
        return float(right.double().mean())


def run_trainer(server: rpc.RRef[ParameterServer], trainer: int, settings: Settings) -> None:
    """The work of one trainer, called on its worker by the server."""
    proxy = server.rpc_sync()
    optimizer = DistributedOptimizer(torch.optim.SGD, proxy.parameter_refs(), lr=settings.lr)
    batches = digits(settings.seed, trainer, settings.batch_size)
    for _ in range(settings.num_steps):
        pictures, labels = next(batches)
        with autograd.context() as context_id:
            loss = nn.functional.cross_entropy(proxy.forward(pictures), labels)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        proxy.note(loss.item())


def run_server(place: Place, settings: Settings) -> dict[str, object]:
    """Make the server, let all trainers work, and return the result."""
    trainers = range(1, place.world_size)
    looks = settings.num_steps // settings.check_every
    with Steps("looks", looks, show=settings.show) as progress:
        server = ParameterServer(len(trainers), settings, progress)
        before, reference = server.accuracy(), rpc.RRef(server)
        started = time.perf_counter()
        rpc.wait_all(
            [
                rpc.rpc_async(worker_name(rank), run_trainer, args=(reference, rank, settings), timeout=0)
                for rank in trainers
            ]
        )
        seconds = time.perf_counter() - started
    return {
        "program": "parameter_server",
        **asdict(settings),
        "world_size": place.world_size,
        "trainers": len(trainers),
        "seconds": seconds,
        "samples_per_s": len(server.losses) * settings.batch_size / seconds,
        "losses": server.losses,
        "accuracies": [before, *server.accuracies],
        "accuracy": server.accuracy(),
    }


def role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 is the server and directs the others."""
    rpc.init_rpc(worker_name(place.rank), rank=place.rank, world_size=place.world_size)
    result = run_server(place, settings) if place.rank == 0 else None
    rpc.shutdown()
    return result


def run(settings: Settings) -> dict[str, object] | None:
    """Train once and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised or was not done in ``settings.timeout`` seconds.
    """
    names = [worker_name(rank) for rank in range(settings.world_size)]
    return launch(role, settings, names, timeout=settings.timeout, preload=PRELOAD)


# --- the program ------------------------------------------------------------------------------------------------------


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell."""
    count = result["trainers"]
    return [
        f"{count} trainer{'s' if count > 1 else ''}, {len(result['losses'])} steps in {result['seconds']:.1f} s: "
        f"{result['samples_per_s']:,.0f} pictures/s; "
        f"accuracy {result['accuracies'][0]:.1%} -> {result['accuracy']:.1%}"
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw loss and accuracy over the steps into a PNG file at ``path``. result: as ``run`` returns it."""
    losses, count = result["losses"], result["trainers"]
    between = count * result["check_every"]
    looks = [between * number for number in range(len(result["accuracies"]))]
    with figure(path, 7.0, 5.0, grid=True) as page:
        loss, accuracy = page.subplots(2, 1, sharex=True)
        loss.plot(range(1, len(losses) + 1), losses, color="#1f6fb4", linewidth=0.8)
        loss.set(ylabel="loss (of one trainer's step)")
        accuracy.plot(looks, [100 * each for each in result["accuracies"]], color="#c9602c", marker="o", markersize=3)
        accuracy.set(xlabel="steps of all trainers", ylabel="held-out accuracy (%)")
        accuracy.set_ylim(0, 100)
        loss.set_ylim(bottom=0)
        loss.set_title(f"parameter_server: {count} trainer{'s' if count > 1 else ''} at once", fontsize=10)


def command_line() -> CommandLine[Settings]:
    """The command line."""
    made = CommandLine("parameter_server", "A parameter server that several trainers train at once.", Settings())
    made.option("world_size", "one server, the rest trainers", least=2, why="a server and a trainer")
    made.option("num_steps", "steps of each trainer", least=1)
    made.option("batch_size", "pictures in a trainer's step", least=1)
    made.option("lr", "learning rate")
    made.option("check_every", "steps between looks at accuracy", least=1)
    made.common_options(picture="loss and accuracy")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    return command_line().main(argv, run, lines, draw)


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import parameter_server

    sys.exit(parameter_server.main())
