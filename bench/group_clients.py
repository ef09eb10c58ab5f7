"""What the caller of a group of workers measures: one call to all members, and the ways without a group beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch

from . import functions
from .sides import RpcModule
from .stats import percentile

WARM_UP, GROWTH = 4, 0.3  # calls of each kind, and seconds between them, before large tensors are timed


def loop_of_calls(rpc: RpcModule, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of a loop of rpc_async to all, and wait_all: as programs of torch's RPC do it."""
    samples: list[int] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        before = time.perf_counter_ns()
        torch.futures.wait_all([rpc.rpc_async(name, functions.noop) for name in names])  # type: ignore[misc]  # both sides' are torch's
        samples.append(time.perf_counter_ns() - before)
    return {"p50": percentile(samples, 50) / 1e3, "samples": float(len(samples))}


async def large_in_turn(rpc: Any, names: Sequence[str], size: int, seconds: float) -> dict[str, float]:
    """Microseconds of one call to all members with a tensor of so many bytes, and of as many calls with it; in turn."""
    sent = functions.sink, torch.ones(size // 4)
    by_group, by_calls = partial(_by_group, rpc.group(names), *sent), partial(_by_calls, rpc, names, *sent)
    for _ in range(WARM_UP):  # the memory that they share grows while they wait
        await by_calls()
        await by_group()
        await asyncio.sleep(GROWTH)
    return await _timed({"group": by_group, "calls": by_calls}, seconds)


async def alone(rpc: Any, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of one call to all members, one after the other with nothing else in between: as `loop_of_calls`."""
    return await _timed({"group": partial(_by_group, rpc.group(names), functions.noop)}, seconds)


async def in_turn(rpc: Any, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of one call to all members, and of as many calls under way at once. Both in turn, each with the
    processor time of the thread that makes it.
    """
    by_group = partial(_by_group, rpc.group(names), functions.noop)
    return await _timed({"group": by_group, "calls": partial(_by_calls, rpc, names, functions.noop)}, seconds)


async def one_by_one(rpc: Any, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of as many calls, one after the other. Not in turn with one to all: for the time of these calls
    each member sleeps, which whatever comes next would bear.
    """

    async def by_calls() -> None:
        for name in names:
            await rpc.call(name, functions.noop)

    return await _timed({"one by one": by_calls}, seconds)


async def _by_group(group: Any, function: Callable[..., Any], *args: Any) -> None:
    (await group.call(function, *args)).values()


async def _by_calls(rpc: Any, names: Sequence[str], function: Callable[..., Any], *args: Any) -> None:
    await asyncio.gather(*[rpc.call(name, function, *args) for name in names])


async def _timed(kinds: dict[str, Callable[[], Awaitable[None]]], seconds: float) -> dict[str, float]:
    """The median of each kind, and that of the processor time of this thread; all kinds in turn, at least once."""
    samples: dict[str, list[int]] = {kind: [] for kind in kinds}
    spent: dict[str, list[int]] = {kind: [] for kind in kinds}
    end = time.perf_counter() + seconds
    while not all(samples.values()) or time.perf_counter() < end:
        for kind, call in kinds.items():
            before, processor = time.perf_counter_ns(), time.thread_time_ns()
            await call()
            spent[kind].append(time.thread_time_ns() - processor)
            samples[kind].append(time.perf_counter_ns() - before)
    found = {kind: percentile(each, 50) / 1e3 for kind, each in samples.items()}
    return found | {f"{kind} processor": percentile(each, 50) / 1e3 for kind, each in spent.items()}
