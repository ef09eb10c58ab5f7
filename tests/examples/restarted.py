"""A program for torchrun, run by tests: one of its workers kills itself before the end, and all are started again.

Each counts its steps in a file of its own, and goes on from there. Run by
`torchrun --max-restarts N -m tests.examples.restarted FOLDER STEPS KILL_AT`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiorpc as rpc


class Steps:
    """What one worker keeps: how many steps it has made, as the file says."""

    path = Path()

    @classmethod
    def made(cls) -> int:
        """So far; 0 if there is no file."""
        return int(cls.path.read_text()) if cls.path.exists() else 0

    @classmethod
    def make(cls, kill_at: int) -> int:
        """One more; the process ends before one of them."""
        made = cls.made()
        if made == kill_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        draft = cls.path.with_suffix(".new")
        draft.write_text(str(made + 1))
        draft.rename(cls.path)
        return made + 1


def make_step(kill_at: int) -> int:
    """Handler."""
    return Steps.make(kill_at)


def steps_made() -> int:
    """Handler."""
    return Steps.made()


async def main(folder: str, steps: int, kill_at: int) -> None:
    """Rank 0 has rank 1 make the steps; all others serve."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Steps.path = Path(folder, f"steps{rank}")
    async with rpc.init(f"w{rank}", rank=rank, world_size=size):
        if rank == 0:
            before = made = await rpc.call("w1", steps_made)
            while made < steps:
                made = await rpc.call("w1", make_step, kill_at)
            restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
            print(f"{made} steps, from {before} on, after {restarts} restarts", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
