"""A model in two stages on two workers, with batches cut into micro-batches: both stages compute at once.

    python -m aiorpc.examples.pipeline                      # 1, 2, 4 and 8 micro-batches, one after the other
    python -m aiorpc.examples.pipeline --micro 1 4 --num-steps 30 --picture pipeline.png
    torchrun --standalone --nproc-per-node 3 -m aiorpc.examples.pipeline

This is the idea of PyTorch's tutorial "Distributed Pipeline Parallelism Using RPC"
(https://docs.pytorch.org/tutorials/intermediate/dist_pipeline_parallel_tutorial.html), in the async style. A third
process has the data and drives. For each micro-batch it has a task: the first stage leaves its result where it is, the
second one fetches it from there, and the backward pass goes back the same way, while other micro-batches are under
way. All gradients of a batch are added up in one autograd context, then `DistributedOptimizer` updates both stages.

The loss is the same for any number of micro-batches, up to rounding. The seconds are not: with one, a stage always
waits for the other. What micro-batches gain depends on free cores (one for each stage; each process computes with one
thread), and each costs two calls and a backward pass of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import aiorpc as rpc
from aiorpc import autograd
from aiorpc.optim import DistributedOptimizer

from ._shared.launch import Place, launch
from ._shared.program import CommandLine, figure
from ._shared.progress import Steps
from ._shared.resnet import NUM_CLASSES, images

__all__ = ["Settings", "Stage", "main", "role", "run"]

NAMES = ("master", "stage1", "stage2")
PRELOAD = ("rich.progress", "aiorpc.optim", "aiorpc.examples._shared.resnet")
#: Pictures of 3 x 16 x 16.
SIZE = 16
MOMENTUM = 0.9


@dataclass(frozen=True)
class Settings:
    """What can be chosen for a run. micro: numbers of micro-batches to compare. width, depth: of a stage's layers."""

    micro: tuple[int, ...] = (1, 2, 4, 8)
    num_steps: int = 12
    batch_size: int = 512
    width: int = 768
    depth: int = 3
    lr: float = 0.02
    seed: int = 543
    show: bool = True
    timeout: float = 600.0


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer that keeps the size of what goes through it and a ReLU (He et al., 2015): deep stacks learn at once."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


class Stage:
    """One half of the model, number 0 or 1, at the worker that has its parameters."""

    def __init__(self, number: int, settings: Settings) -> None:
        inputs = settings.width if number else 3 * SIZE * SIZE
        outputs = NUM_CLASSES if number else settings.width
        widths = [inputs, *[settings.width] * (settings.depth - 1), outputs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed + number)  # the same layers in any process
            layers = [linear(before, after) for before, after in itertools.pairwise(widths)]
        # No ReLU behind the last layer of all, whose results are scores.
        activated = [layer for each in layers for layer in (each, nn.ReLU())]
        self._layers = nn.Sequential(*(activated[:-1] if number else activated))
        self._computing = threading.Lock()

    def forward(self, x: Tensor | rpc.RRef[Tensor]) -> Tensor:
        """From (n, inputs) to (n, outputs). x: the tensor, or where it is."""
        here = x.to_here() if isinstance(x, rpc.RRef) else x
        # One micro-batch after the other: side by side, all would be done only when the last one is.
        with self._computing:
            result: Tensor = self._layers(here)
            return result

    def parameters(self) -> list[nn.Parameter]:
        """Its parameters, where they are."""
        return list(self._layers.parameters())

    def parameter_refs(self) -> list[rpc.RRef[nn.Parameter]]:
        """References to its parameters, which stay here."""
        return [rpc.RRef(each) for each in self.parameters()]


@dataclass(frozen=True)
class Pipeline:
    """Both stages and their optimizer, as the master sees them."""

    first: rpc.RRef[Stage]
    second: rpc.RRef[Stage]
    optimizer: DistributedOptimizer

    @classmethod
    async def create(cls, settings: Settings) -> Pipeline:
        """Make the stages at their workers."""
        first, second = (rpc.remote(NAMES[1 + number], Stage, args=(number, settings)) for number in (0, 1))
        refs = await asyncio.gather(*(stage.rpc_async().parameter_refs() for stage in (first, second)))
        optimizer = await DistributedOptimizer.create(
            torch.optim.SGD, [*refs[0], *refs[1]], lr=settings.lr, momentum=MOMENTUM
        )
        return cls(first, second, optimizer)

    async def train(self, pictures: Tensor, labels: Tensor, micro: int) -> float:
        """One step with a batch, cut into that many micro-batches; returns its mean loss."""
        size = -(-len(labels) // micro)
        async with autograd.context() as ctx:
            pairs = zip(pictures.split(size), labels.split(size), strict=True)
            losses = await asyncio.gather(*(self._train_part(ctx, *pair, len(labels)) for pair in pairs))
            await self.optimizer.step(ctx)
        return sum(losses)

    async def _train_part(self, ctx: autograd.Context, pictures: Tensor, labels: Tensor, whole: int) -> float:
        """Forward and backward of one micro-batch: adds its gradients to the context. whole: size of the batch."""
        hidden = self.first.remote().forward(pictures)
        scores = await self.second.rpc_async().forward(hidden)
        # Small enough for the loop. Divided by the whole batch: the parts add up to its mean.
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum") / whole
        await ctx.backward([loss])
        return loss.item()


async def train(settings: Settings, micro: int) -> dict[str, object]:
    """Train new stages with that many micro-batches; all numbers of them see the same batches."""
    pipeline = await Pipeline.create(settings)
    batches = images(settings.seed, 0, settings.batch_size, SIZE)
    losses: list[float] = []
    seconds: list[float] = []
    with Steps(f"{micro} micro-batches", settings.num_steps, show=settings.show) as progress:
        for step in range(1, settings.num_steps + 1):
            pictures, labels = next(batches)
            started = time.perf_counter()
            losses.append(await pipeline.train(pictures.flatten(1), labels, micro))
            seconds.append(time.perf_counter() - started)
            progress.done(f"micro-batches {micro:2d}   step {step:3d}   loss {losses[-1]:7.4f}   {seconds[-1]:.3f} s")
    return {"micro": micro, "losses": losses, "seconds": seconds, "s_per_batch": median(seconds[1:] or seconds)}


async def drive(settings: Settings) -> dict[str, object]:
    """All numbers of micro-batches, one after the other."""
    return {
        "program": "pipeline",
        **asdict(settings),
        "runs": [await train(settings, micro) for micro in settings.micro],
    }


async def _main(place: Place, settings: Settings) -> dict[str, object] | None:
    async with rpc.init(NAMES[place.rank], rank=place.rank, world_size=place.world_size):
        # Stages have nothing to start: leaving serves until the master is done.
        return await drive(settings) if place.rank == 0 else None


def role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 has the data and drives, the others have a stage each."""
    return asyncio.run(_main(place, settings))


def run(settings: Settings) -> dict[str, object] | None:
    """Train with all numbers and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised or was not done in ``settings.timeout`` seconds.
    """
    return launch(role, settings, NAMES, timeout=settings.timeout, preload=PRELOAD)


# --- the program ------------------------------------------------------------------------------------------------------


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell: a line for each number of micro-batches."""
    slowest = result["runs"][0]["s_per_batch"]
    return [
        f"{each['micro']:2d} micro-batch{'es' if each['micro'] > 1 else '  '}: {1e3 * each['s_per_batch']:7.1f} ms "
        f"for a batch of {result['batch_size']} ({slowest / each['s_per_batch']:.2f}x); "
        f"loss {each['losses'][0]:.3f} -> {each['losses'][-1]:.3f}"
        for each in result["runs"]
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the losses, and milliseconds for a batch, into a PNG file at ``path``. result: as ``run`` returns it."""
    runs = result["runs"]
    names, taken = [str(each["micro"]) for each in runs], [1e3 * each["s_per_batch"] for each in runs]
    with figure(path, 8.0, 3.6) as page:
        loss, speed = page.subplots(1, 2, width_ratios=(3, 2))
        for number, each in enumerate(runs):
            # The curves lie on each other: what comes first is drawn wider.
            steps = range(1, len(each["losses"]) + 1)
            loss.plot(steps, each["losses"], linewidth=1.5 + 2.5 * (len(runs) - 1 - number), label=str(each["micro"]))
        loss.legend(frameon=False, title="micro-batches")
        loss.set(xlabel="step", ylabel="loss")
        loss.set_ylim(bottom=0)
        loss.set_title("pipeline: two stages on two workers", fontsize=10)
        speed.bar_label(speed.bar(names, taken, color="#1f6fb4", width=0.6), fmt="%.0f", padding=2)
        speed.set(xlabel="micro-batches", ylabel=f"ms for a batch of {result['batch_size']}")
        speed.margins(y=0.12)


def command_line() -> CommandLine[Settings]:
    """The command line."""
    made = CommandLine(
        "pipeline", "A model in two stages on two workers, with batches cut into micro-batches.", Settings()
    )
    made.option("micro", "numbers of micro-batches to compare")
    made.option("num_steps", "batches for each of these numbers", least=1)
    made.option("batch_size", "pictures in a batch", least=1)
    made.option("width", "width of the layers", least=1)
    made.option("depth", "layers of a stage", least=1)
    made.option("lr", "learning rate")
    made.common_options(picture="losses and speed")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    commands = command_line()

    def check(settings: Settings) -> None:
        if not all(1 <= micro <= settings.batch_size for micro in settings.micro):
            commands.error("--micro must be at least 1, and at most --batch-size")
        commands.need_workers(len(NAMES))

    return commands.main(argv, run, lines, draw, check)


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import pipeline

    sys.exit(pipeline.main())
