"""The same file on every machine: torchrun says who is who and where to meet.

One machine:       torchrun --standalone --nproc-per-node 3 examples/torchrun.py
Two machines, each torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
                            examples/torchrun.py
"""

from __future__ import annotations

import asyncio
import os
import socket

import torch

import aiorpc as rpc


async def where_are_you() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


class Counter:
    """An object that lives on one worker and is used from others."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    async def add(self, value: torch.Tensor) -> torch.Tensor:
        self.total += value
        return self.total.clone()


async def lead(world_size: int) -> None:
    others = [f"worker{rank}" for rank in range(1, world_size)]
    places = await asyncio.gather(*(rpc.call(name, where_are_you) for name in others))
    for name, place in zip(others, places, strict=True):
        print(f"{name} runs on {place}")
    counter = rpc.remote(others[0], Counter)
    await asyncio.gather(*(counter.rpc_async().add(torch.ones(2)) for _ in range(10)))
    print("counted:", await counter.rpc_async().add(torch.zeros(2)))


async def main() -> None:
    # Nothing to say: rank, world size and the place to meet come from the environment that torchrun made.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    async with rpc.init(f"worker{rank}"):
        if rank == 0:
            await lead(world_size)
        # Leaving the block serves the calls of others until all have left.


if __name__ == "__main__":
    asyncio.run(main())
