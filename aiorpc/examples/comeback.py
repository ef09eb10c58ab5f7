"""A parameter server that is killed in the middle, comes back under its name, and goes on from its checkpoint.

    python -m aiorpc.examples.comeback --steps 20 --kill-at 10
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 -m aiorpc.examples.comeback --checkpoint server.pt

Two workers in a group of fixed size, a trainer and a server, which the launcher starts (`python -m aiorpc.run`). It
starts the server again as it ends early. The checkpoint is kept. The new process joins with the arguments of the old
one, and the trainer makes a new reference, because the old one is lost.

On several hosts the checkpoint has to be a file that they share. A launcher that starts both workers again (torchrun)
needs it, too: both go on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import aiorpc as rpc
from aiorpc import run

from ._shared.launch import Place, place_from_environment

RATE = 0.2
TARGET = torch.tensor([1.0, -2.0, 3.0])


class Server:
    """The parameter, and its number of steps. It is saved after each step: a new process can go on."""

    step: int
    weight: torch.Tensor

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.weight, self.step = torch.zeros(3), 0
        if self._path.exists():
            self.weight, self.step = torch.load(path)
            print(f"the server goes on after step {self.step}", flush=True)

    def state(self) -> tuple[int, torch.Tensor]:
        """How many steps were made, and the parameter."""
        return self.step, self.weight.clone()

    def apply(self, step: int, gradient: torch.Tensor) -> None:
        """Make that step, if it was not made before: the answer to a call may be lost although the call has run."""
        if step != self.step + 1:
            return
        self.weight, self.step = self.weight - RATE * gradient, step
        draft = self._path.with_suffix(".new")
        torch.save((self.weight, self.step), draft)
        draft.rename(self._path)  # a killed process leaves the old file or the new one


async def train(worker: rpc.Worker, checkpoint: str, steps: int, kill_at: int) -> torch.Tensor:
    """So many steps; the server's process is killed once, in the middle."""
    news = worker.events()
    server: Any = worker.remote("server", Server, checkpoint)
    made = 0
    while True:
        try:
            made, weight = await server.rpc_async().state()
            if made >= steps:
                return torch.as_tensor(weight)
            if made == kill_at:
                kill_at = -1
                await worker.call("server", signal.raise_signal, signal.SIGKILL)  # there is no answer
            await server.rpc_async().apply(made + 1, 2 * (weight - TARGET))
        except rpc.PeerLost:
            print(f"step {made}: lost the server", flush=True)
            async for event in news:
                if isinstance(event, rpc.events.WorkerReplaced):
                    break  # another process has its name
            server = worker.remote("server", Server, checkpoint)


async def main(place: Place, steps: int, kill_at: int, checkpoint: str) -> None:
    """What a worker does: rank 0 trains, and rank 1 serves from the end of the block until all are done."""
    if place.rank != 0:
        async with rpc.init("server"):
            return
    with tempfile.TemporaryDirectory() as folder:
        async with rpc.init("trainer") as worker:
            before = await worker.call("server", os.getpid)
            weight = await train(worker, checkpoint or f"{folder}/server.pt", steps, kill_at)
            after = await worker.call("server", os.getpid)
        where = "another process" if before != after else "the same process"
        print(f"{steps} steps, the last in {where}; the error is {float((weight - TARGET).abs().max()):.4f}")


if __name__ == "__main__":
    what = "A parameter server that is killed in the middle, and goes on from its checkpoint in another process."
    parser: argparse.ArgumentParser = argparse.ArgumentParser(
        prog="python -m aiorpc.examples.comeback", description=what
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=10, help="after so many steps; -1: never")
    parser.add_argument("--checkpoint", default="", help="a file, kept at the end; by default a temporary one")
    given: argparse.Namespace = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    here: Place | None = place_from_environment()
    if here is None:
        options: list[str] = ["--workers", "2", "--restart", "on-failure", "--max-restarts", "1"]
        sys.exit(run.main([*options, "-m", "aiorpc.examples.comeback", *sys.argv[1:]]))
    if here.world_size != 2:
        parser.error(f"it needs 2 workers, and the launcher started {here.world_size}")
    if given.checkpoint and Path(given.checkpoint).exists():
        given.kill_at = -1  # that was done before both were started again
    asyncio.run(main(here, given.steps, given.kill_at, given.checkpoint))
