"""Many callers, one call of the model: batched inference.

python examples/batching.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile

import torch

import aiorpc as rpc


@rpc.batched(max_size=32, max_wait=0.005)
def predict(images: list[torch.Tensor]) -> list[torch.Tensor]:
    """Called once for up to 32 callers, and no later than 5 ms after the first of them.

    Each parameter is the list of what the callers gave for it; each gets its own element of the list returned here.
    """
    print(f"  server: one run for {len(images)} callers")
    return list(torch.stack(images).mean(dim=1))


async def use() -> None:
    # Each call is written as if it were alone; that they share a run is the server's affair.
    calls = [rpc.call("server", predict, torch.full((8,), float(i))) for i in range(64)]
    means = await asyncio.gather(*calls)
    print("means:", [round(mean.item()) for mean in means])


async def worker(name: str, rank: int, meeting_point: str) -> None:
    async with rpc.init(name, rank=rank, world_size=2, init_method=meeting_point):
        if name == "client":
            await use()
        # Leaving the block serves the calls of others until they leave, too.


def serve(meeting_point: str) -> None:
    asyncio.run(worker("server", 1, meeting_point))


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/meet"
        server = spawn.Process(target=serve, args=(meeting_point,), daemon=True)
        server.start()
        asyncio.run(worker("client", 0, meeting_point))
        server.join(timeout=30)
