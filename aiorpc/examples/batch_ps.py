"""A parameter server that updates its model in batches: one step with the gradients of all trainers.

    python -m aiorpc.examples.batch_ps                      # ResNet-50, a server and three trainers
    python -m aiorpc.examples.batch_ps --model resnet18 --image-size 32 --num-steps 20
    python -m aiorpc.examples.batch_ps --no-batch           # a step for each trainer's gradients alone
    torchrun --standalone --nproc-per-node 4 -m aiorpc.examples.batch_ps

The images are synthetic (a pattern for each of 30 classes, under noise): nothing has to be downloaded, and the loss can
fall. With the same seed and batches, a run gives the same losses again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

import aiorpc as rpc

from ._shared import ps
from ._shared.launch import launch
from ._shared.program import CommandLine
from ._shared.ps import Settings
from ._shared.resnet import MODELS

__all__ = ["ParameterServer", "Settings", "main", "rpc", "run"]

# Not this module: multiprocessing runs it again, as the main module of each child.
PRELOAD = ("rich.progress", "aiorpc.examples._shared.ps")


class ParameterServer(ps.ServerBase):
    """The server whose batched answers are Futures: a waiting trainer holds no thread here."""

    @rpc.functions.async_execution
    def update_and_fetch_model(self, trainer: int, gradients: list[Tensor], loss: float) -> Future[list[Tensor]]:
        return super().update_and_fetch_model(trainer, gradients, loss)


def run(settings: Settings) -> dict[str, object] | None:
    """Train once and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised or was not done in ``settings.timeout`` seconds.
    """
    names = [ps.worker_name(rank) for rank in range(settings.world_size)]
    return launch(ps.role, settings, names, timeout=settings.timeout, preload=PRELOAD)


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell."""
    trainers = f"{result['trainers']} trainer{'s' if result['trainers'] > 1 else ''}"
    return [
        f"{result['model']} ({result['parameters'] / 1e6:.1f} M parameters), {trainers}, "
        f"{'batched' if result['batch'] else 'unbatched'}: {result['samples_per_s']:.1f} samples/s; "
        f"loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}"
    ]


def command_line() -> CommandLine[Settings]:
    """The command line."""
    made = CommandLine(
        "batch_ps", "A parameter server that updates its model once for the gradients of all trainers.", Settings()
    )
    made.option("model", choices=sorted(MODELS))
    made.option("world_size", "one server, the rest trainers", least=2, why="a server and a trainer")
    made.option("num_steps", "steps of each trainer", least=1)
    made.option("batch_size", "images in a trainer's step", least=2, why="they are normalised over the batch")
    made.option("image_size", "pixels of a side", least=1)
    made.option("lr", "learning rate")
    made.add_argument(
        "--no-batch", dest="batch", action="store_false", help="a step for each trainer's gradients alone"
    )
    made.common_options()
    made.option("backend_module", argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    return command_line().main(argv, run, lines)


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import batch_ps

    sys.exit(batch_ps.main())
