"""Two workers: one calls functions of the other, first blocking, then with await.

python examples/hello.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile

import torch

import aiorpc as rpc


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A plain function: it runs in a thread of the worker that was called, and may block."""
    return a + b


async def add_soon(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A coroutine function: it runs on the loop of the worker that was called, and may await."""
    await asyncio.sleep(0.01)
    return a + b


def serve(meeting_point: str) -> None:
    """The worker that is called. It has no work of its own: shutdown() serves until the caller is done, too."""
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting_point))
    rpc.shutdown()


def call_blocking(meeting_point: str) -> None:
    """The names and signatures of torch.distributed.rpc."""
    rpc.init_rpc("caller", rank=0, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting_point))
    print("blocking:", rpc.rpc_sync("server", add, args=(torch.ones(2), torch.ones(2))))
    futures = [rpc.rpc_async("server", torch.mul, args=(torch.ones(2), i)) for i in range(3)]
    print("three at once:", [future.wait().tolist() for future in futures])
    rpc.shutdown()


async def call_awaiting(meeting_point: str) -> None:
    async with rpc.init("caller", rank=0, world_size=2, init_method=meeting_point):
        print("awaited:", await rpc.call("server", add_soon, torch.ones(2), torch.ones(2)))


def with_server(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # A file where both meet. Across machines it would be tcp://host:port, or env:// under torchrun.
        meeting_point = f"file://{folder}/meet"
        # spawn, not fork: torch has threads, and a process that was forked with them may hang.
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(meeting_point,), daemon=True)
        server.start()
        if name == "blocking":
            call_blocking(meeting_point)
        else:
            asyncio.run(call_awaiting(meeting_point))
        server.join(timeout=30)


if __name__ == "__main__":
    with_server("blocking")
    with_server("awaiting")
