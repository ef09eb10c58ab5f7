"""What the workers of the queue's measurements run: one owns the queue, one puts, one gets. All of it is awaited."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import cycle
from typing import Any

import torch

MB = 1 << 20
ITEM = {"reward": 1.0, "done": False, "step": 7}  # a small one
_END = "end"


async def own(rpc: Any, *, small: int, large: int) -> None:
    """In the owner: make the queues, with so many items at most."""
    rpc.Queue("small", small)
    rpc.Queue("large", large)


async def small(rpc: Any, *, seconds: float, under_way: int) -> dict[str, float]:
    """Small items for so many seconds. under_way: how many `put`s at a time, and how many items a `get` may bring."""
    queue = rpc.queue("small", owner="owner", timeout=0)
    if rpc.current().name == "producer":
        await _produce(queue, [ITEM], seconds, under_way)
        return {}
    return await _consume(queue, under_way)


async def large(rpc: Any, *, seconds: float, under_way: int, copy: bool) -> dict[str, float]:
    """Tensors of 1 MB through the queue, as many at a time. copy: as of `put`."""
    queue = rpc.queue("large", owner="owner", timeout=0)
    if rpc.current().name == "producer":
        await _produce(queue, _tensors(under_way), seconds, under_way, copy)
        return {}
    return await _consume(queue, under_way)


def _tensors(under_way: int) -> list[torch.Tensor]:
    """So many that none is in a message twice: it would be sent once."""
    return [torch.ones(MB, dtype=torch.uint8) for _ in range(4 * under_way)]


async def _produce(queue: Any, items: list[Any], seconds: float, under_way: int, copy: bool = True) -> None:
    until = time.monotonic() + seconds
    puts: deque[Any] = deque()
    item = cycle(items)
    while time.monotonic() < until:
        puts.append(queue.put(next(item), copy=copy))
        if len(puts) >= under_way:
            await puts.popleft()
    await asyncio.gather(*puts)
    await queue.put(_END)


async def _consume(queue: Any, most: int) -> dict[str, float]:
    count = 0
    begin = 0.0
    while True:
        items = await queue.get_many(most) if most > 1 else [await queue.get()]
        begin = begin or time.monotonic()
        count += len(items)
        if isinstance(items[-1], str):
            return {"rate": (count - 1) / (time.monotonic() - begin)}


async def take(item: torch.Tensor) -> None:
    """What the bare send calls."""


async def send(rpc: Any, *, seconds: float, under_way: int) -> dict[str, float]:
    """In the producer: the same tensors to the consumer by calls, as many at a time."""
    item = cycle(_tensors(under_way))
    calls: deque[Any] = deque()
    count = 0
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        calls.append(rpc.call("consumer", take, next(item)))
        if len(calls) >= under_way:
            await calls.popleft()
            count += 1
    await asyncio.gather(*calls)
    return {"rate": (count + len(calls)) / (time.monotonic() - begin)}
