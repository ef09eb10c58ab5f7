"""A program for Slurm, run by tests: its job is cancelled while calls are under way, which rank 1 serves."""

from __future__ import annotations

import asyncio
import os

import aiorpc as rpc

CALLS = 20
SECONDS = 3.0  # that each call takes, far below KillWait


async def work(number: int) -> int:
    """Handler: slow; says when it is done."""
    if number == CALLS - 1:
        print("all accepted", flush=True)
    await asyncio.sleep(SECONDS)
    print(f"served {number}", flush=True)
    return number


async def main() -> None:
    """Serve, or make all calls at once."""
    rank = int(os.environ["SLURM_PROCID"])
    async with rpc.init(f"w{rank}"):
        if rank == 0:
            answers = await asyncio.gather(*(rpc.call("w1", work, number) for number in range(CALLS)))
            print(f"answers {len(answers)}", flush=True)


if __name__ == "__main__":
    # By its real name, not __main__: functions travel to the other worker by name.
    from tests.cluster import drained

    asyncio.run(drained.main())
