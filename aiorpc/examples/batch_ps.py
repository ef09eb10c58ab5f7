"""A parameter server that updates its model in batches: one step with the gradients of all trainers.

    python -m aiorpc.examples.batch_ps                      # ResNet-50, a server and three trainers
    python -m aiorpc.examples.batch_ps --model resnet18 --image-size 32 --num-steps 20
    python -m aiorpc.examples.batch_ps --no-batch           # a step for each trainer's gradients alone
    torchrun --standalone --nproc-per-node 4 -m aiorpc.examples.batch_ps

The images are made up (a pattern for each of 30 classes, under noise), so that nothing has to be downloaded and the
loss has something to fall on. With the same seed and batches, a run gives the same losses again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

import aiorpc as rpc

from . import _ps
from ._launch import WorkerFailed, launch
from ._ps import Settings
from ._resnet import MODELS

__all__ = ["ParameterServer", "Settings", "main", "rpc", "run"]

# Not this module: multiprocessing runs it again, as the main module of each child.
PRELOAD = ("rich.progress", "aiorpc.examples._ps")


class ParameterServer(_ps.ServerBase):
    """The server whose batched answers are Futures: a waiting trainer holds no thread here."""

    @rpc.functions.async_execution
    def update_and_fetch_model(self, trainer: int, gradients: list[Tensor], loss: float) -> Future[list[Tensor]]:
        return super().update_and_fetch_model(trainer, gradients, loss)


def run(settings: Settings) -> dict[str, Any] | None:
    """Train once and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised or was not done in ``settings.timeout`` seconds.
    """
    names = [_ps.worker_name(rank) for rank in range(settings.world_size)]
    result: dict[str, Any] | None = launch(_ps.role, settings, names, timeout=settings.timeout, preload=PRELOAD)
    return result


def parser() -> argparse.ArgumentParser:
    """The command line."""
    default = Settings()
    made = argparse.ArgumentParser(
        prog="python -m aiorpc.examples.batch_ps",
        description="A parameter server that updates its model once for the gradients of all trainers.",
    )
    made.add_argument("--model", choices=sorted(MODELS), default=default.model)
    made.add_argument("--world-size", type=int, default=default.world_size, help="one server, the rest trainers")
    made.add_argument("--num-steps", type=int, default=default.num_steps, help="steps of each trainer")
    made.add_argument("--batch-size", type=int, default=default.batch_size, help="images in a trainer's step")
    made.add_argument("--image-size", type=int, default=default.image_size, help="pixels of a side")
    made.add_argument("--lr", type=float, default=default.lr, help="learning rate")
    made.add_argument("--no-batch", action="store_true", help="a step for each trainer's gradients alone")
    made.add_argument("--seed", type=int, default=default.seed)
    made.add_argument("--timeout", type=float, default=default.timeout, help="seconds for the whole run")
    made.add_argument("--backend-module", default=default.backend_module, help=argparse.SUPPRESS)
    return made


def settings_from(arguments: argparse.Namespace) -> Settings:
    return Settings(
        model=arguments.model,
        world_size=arguments.world_size,
        num_steps=arguments.num_steps,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        lr=arguments.lr,
        batch=not arguments.no_batch,
        seed=arguments.seed,
        timeout=arguments.timeout,
        backend_module=arguments.backend_module,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.world_size < 2:
        commands.error("--world-size must be at least 2: a server and a trainer")
    if arguments.num_steps < 1:
        commands.error("--num-steps must be at least 1")
    if arguments.batch_size < 2:
        commands.error("--batch-size must be at least 2: they are normalised over the batch")
    try:
        result = run(settings_from(arguments))
    except WorkerFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if result is not None:
        trainers = f"{result['trainers']} trainer{'s' if result['trainers'] > 1 else ''}"
        print(
            f"{result['model']} ({result['parameters'] / 1e6:.1f} M parameters), {trainers}, "
            f"{'batched' if result['batch'] else 'unbatched'}: {result['samples_per_s']:.1f} samples/s; "
            f"loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}"
        )
    return 0


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import batch_ps

    sys.exit(batch_ps.main())
