"""What a client process measures with ``await``: aiorpc's own verbs, which torch.distributed.rpc cannot match."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from . import functions
from .bulk_clients import AGAIN_CALLS, payloads
from .clients import WARM_UP_CALLS, arguments, check_echo
from .sides import SERVER
from .stats import summary
from .ticker import Ticker

ALONE_SECONDS = 0.2


async def latency(
    rpc: Any, function: Callable[..., Any], seconds: float, elements: int | None = None
) -> dict[str, float]:
    """Microseconds of one awaited call after another."""
    clock, call, args = time.perf_counter_ns, rpc.call, arguments(elements)
    for _ in range(WARM_UP_CALLS):
        check_echo(function, args, await call(SERVER, function, *args))
    samples: list[int] = []
    end = clock() + int(seconds * 1e9)
    after = 0
    while after < end:
        before = clock()
        await call(SERVER, function, *args)
        after = clock()
        samples.append(after - before)
    return summary(samples)


async def in_flight(rpc: Any, function: Callable[..., Any], seconds: float, window: int) -> dict[str, float]:
    """Calls per second when ``window`` coroutines each await one call after another."""
    begin = time.perf_counter()
    end = begin + seconds
    counts = await asyncio.gather(*(_caller(rpc.call, function, end) for _ in range(window)))
    return {"rate": sum(counts) / (time.perf_counter() - begin), "samples": float(sum(counts))}


async def _caller(call: Callable[..., Any], function: Callable[..., Any], end: float) -> int:
    calls = 0
    while time.perf_counter() < end:
        await call(SERVER, function)
        calls += 1
    return calls


async def loop_lag(rpc: Any, size: int, seconds: float, least: int, warm_up: int = AGAIN_CALLS) -> dict[str, float]:
    """The largest lag of both ends' loops in milliseconds while tensors are sent, and of this one while none is.

    warm_up: sends before that. `least` sends are watched at least.
    """
    call, (tensor,) = rpc.call, payloads(size)
    for _ in range(warm_up):
        await call(SERVER, functions.sink, tensor)
    ticker = Ticker()
    await asyncio.sleep(ALONE_SECONDS)
    alone = await ticker.stop()
    await call(SERVER, functions.start_ticker)
    ticker = Ticker()
    end = time.perf_counter() + seconds
    sends = 0
    while sends < least or time.perf_counter() < end:
        await call(SERVER, functions.sink, tensor)
        sends += 1
    caller, callee = await ticker.stop(), await call(SERVER, functions.stop_ticker)
    return {"caller": caller * 1e3, "callee": callee * 1e3, "alone": alone * 1e3, "samples": float(sends)}
