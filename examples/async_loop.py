"""Calls in an asyncio program: many at once, with a time limit, and given up.

python examples/async_loop.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile

import aiorpc as rpc


async def work(seconds: float, name: str) -> str:
    """Stands for real work. When its call is cancelled, it is cancelled like any task: clean up in finally."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        print(f"  helper: {name!r} was given up, stopping")
        raise
    return name


async def use() -> None:
    # A call starts at once and returns a Future: these three take the time of the longest.
    print("gathered:", await asyncio.gather(*(rpc.call("helper", work, 0.05 * i, f"call {i}") for i in range(3))))

    # A time limit of the caller's own: when it passes, the call is cancelled on both sides.
    try:
        async with asyncio.timeout(0.2):
            await rpc.call("helper", work, 30, "too long")
    except TimeoutError:
        print("asyncio.timeout: gave up")

    # A deadline that travels with the call, and with the calls that it makes in turn.
    try:
        await rpc.peer("helper", timeout=0.2).call(work, 30, "past its deadline")
    except rpc.RpcTimeout as error:
        print("deadline:", error)

    call = rpc.call("helper", work, 30, "not needed")
    call.cancel()
    try:
        await call
    except rpc.RpcCancelled:
        print("cancelled: the function may have run in part, or not at all")


async def worker(name: str, rank: int, meeting_point: str) -> None:
    async with rpc.init(name, rank=rank, world_size=2, init_method=meeting_point):
        if name == "main":
            await use()
        # Leaving the block serves the calls of others until they leave, too.


def serve(meeting_point: str) -> None:
    asyncio.run(worker("helper", 1, meeting_point))


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/meet"
        helper = spawn.Process(target=serve, args=(meeting_point,), daemon=True)
        helper.start()
        asyncio.run(worker("main", 0, meeting_point))
        helper.join(timeout=30)
