"""A parameter server that is killed in the middle, comes back under its name, and goes on from its checkpoint.

    python -m aiorpc.examples.comeback --steps 20 --kill-at 10

Two workers in a group of fixed size: this process trains, and starts a second one that runs the server; like a
supervisor it starts the server again if it ends early. The checkpoint is kept. The new process joins with the arguments
of the old one, and the trainer makes a new reference, because the old one is lost.
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

from ._shared.program import exit_code

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


async def serve(meet: str) -> None:
    """The server's process: it serves from the end of the block until all are done."""
    async with rpc.init("server", rank=1, world_size=2, init_method=meet):
        pass


async def supervise(meet: str) -> None:
    """Run the server's process, and start it again until it ends in good order."""
    while True:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aiorpc.examples.comeback", "--serve", meet
        )
        try:
            if not await process.wait():
                return
        finally:
            if process.returncode is None:  # this program is interrupted, and the server would stay
                process.kill()
                await process.wait()


async def train(worker: rpc.Worker, checkpoint: str, steps: int, kill_at: int) -> torch.Tensor:
    """So many steps; the server's process is killed once, in the middle."""
    news = worker.events()
    server: Any = worker.remote("server", Server, checkpoint)
    made = 0
    while True:
        try:
            made, weight = await server.rpc_async().state()
            if made == steps:
                return torch.as_tensor(weight)
            if made == kill_at:
                kill_at = -1
                os.kill(await worker.call("server", os.getpid), signal.SIGKILL)
            await server.rpc_async().apply(made + 1, 2 * (weight - TARGET))
        except rpc.PeerLost:
            print(f"step {made}: lost the server", flush=True)
            async for event in news:
                if isinstance(event, rpc.events.WorkerReplaced):
                    break  # another process has its name
            server = worker.remote("server", Server, checkpoint)


async def main(steps: int, kill_at: int) -> None:
    """Train, with a supervised server."""
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/meet"
        supervisor = asyncio.create_task(supervise(meet))
        async with rpc.init("trainer", rank=0, world_size=2, init_method=meet) as worker:
            before = await worker.call("server", os.getpid)
            weight = await train(worker, f"{folder}/server.pt", steps, kill_at)
            after = await worker.call("server", os.getpid)
        await supervisor
        where = "another process" if before != after else "the same process"
        print(f"{steps} steps, the last in {where}; the error is {float((weight - TARGET).abs().max()):.4f}")


if __name__ == "__main__":
    what = "A parameter server that is killed in the middle, and goes on from its checkpoint in another process."
    parser: argparse.ArgumentParser = argparse.ArgumentParser(
        prog="python -m aiorpc.examples.comeback", description=what
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=10, help="after so many steps; -1: never")
    parser.add_argument("--serve", metavar="MEET", default="", help=argparse.SUPPRESS)
    given: argparse.Namespace = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    sys.exit(exit_code(lambda: asyncio.run(serve(given.serve) if given.serve else main(given.steps, given.kill_at))))
