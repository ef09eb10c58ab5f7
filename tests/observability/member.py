"""A worker in a process of its own, which a test kills: ``python -m tests.observability.member NAME MEET``.

It reads the weights that another worker publishes, and puts items into its queue until the queue is full.
"""

from __future__ import annotations

import asyncio
import sys

import aiorpc as rpc


async def live(name: str, meet: str) -> None:
    """Join, and do so until the process is killed."""
    async with rpc.init(name, role="actor", init_method=meet), rpc.subscribe("policy", timeout=0) as versions:
        print("joined", flush=True)
        samples = rpc.queue("samples", owner="learner", timeout=0)
        async for version in versions:
            await samples.put(version.version)


if __name__ == "__main__":
    asyncio.run(live(*sys.argv[1:]))
