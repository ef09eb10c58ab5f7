"""Results one by one, as they are made: a generator on one worker, async for on the other.

python examples/streams.py
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Iterator

import torch

import aiorpc as rpc


async def tokens(count: int) -> AsyncIterator[str]:
    """An async generator runs on its worker's loop."""
    try:
        for i in range(count):
            await asyncio.sleep(0.01)
            yield f"token{i}"
    finally:
        # Reached at the end, and also when the consumer stops early: nothing is left running.
        print("  producer: done")


def batches(count: int) -> Iterator[torch.Tensor]:
    """A plain generator runs in a thread. It is only asked for more when the consumer has taken what was sent."""
    for i in range(count):
        yield torch.full((2,), i)


async def use() -> None:
    async for token in rpc.stream("producer", tokens, 3):
        print(token)

    # Closing the stream stops the producer; aclosing does it however the block is left.
    async with contextlib.aclosing(rpc.stream("producer", tokens, 1_000_000)) as stream:
        async for token in stream:
            if token == "token2":
                print("enough")
                break

    total = torch.zeros(2)
    async for batch in rpc.stream("producer", batches, 100):
        total += batch
    print("sum of 100 tensors:", total)


async def worker(name: str, rank: int, meeting_point: str) -> None:
    async with rpc.init(name, rank=rank, world_size=2, init_method=meeting_point):
        if name == "consumer":
            await use()
        # Leaving the block serves the calls of others until they leave, too.


def serve(meeting_point: str) -> None:
    asyncio.run(worker("producer", 1, meeting_point))


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/meet"
        producer = spawn.Process(target=serve, args=(meeting_point,), daemon=True)
        producer.start()
        asyncio.run(worker("consumer", 0, meeting_point))
        producer.join(timeout=30)
