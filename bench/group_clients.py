"""What the caller of a group of workers measures: one call to all members, and the ways without a group beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from . import functions
from .sides import RpcModule
from .stats import percentile


def loop_of_calls(rpc: RpcModule, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of a loop of rpc_async to all, and wait_all: as programs of torch's RPC do it."""
    samples: list[int] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        before = time.perf_counter_ns()
        torch.futures.wait_all([rpc.rpc_async(name, functions.noop) for name in names])  # type: ignore[misc]  # both sides' are torch's
        samples.append(time.perf_counter_ns() - before)
    return {"p50": percentile(samples, 50) / 1e3, "samples": float(len(samples))}


async def in_turn(rpc: Any, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of one call to all members; and of as many calls, under way at once, and one after the other.

    All three in turn, each with the processor time of the thread that makes it.
    """
    group = rpc.group(names)

    async def by_group() -> None:
        (await group.call(functions.noop)).values()

    async def by_calls() -> None:
        await asyncio.gather(*[rpc.call(name, functions.noop) for name in names])

    async def one_by_one() -> None:
        for name in names:
            await rpc.call(name, functions.noop)

    kinds: dict[str, Callable[[], Awaitable[None]]] = {"group": by_group, "calls": by_calls, "one by one": one_by_one}
    samples: dict[str, list[int]] = {kind: [] for kind in kinds}
    spent: dict[str, list[int]] = {kind: [] for kind in kinds}
    end = time.perf_counter() + seconds
    while not samples["one by one"] or time.perf_counter() < end:
        for kind, call in kinds.items():
            before, processor = time.perf_counter_ns(), time.thread_time_ns()
            await call()
            spent[kind].append(time.thread_time_ns() - processor)
            samples[kind].append(time.perf_counter_ns() - before)
    found = {kind: percentile(each, 50) / 1e3 for kind, each in samples.items()}
    return found | {f"{kind} processor": percentile(each, 50) / 1e3 for kind, each in spent.items()}
