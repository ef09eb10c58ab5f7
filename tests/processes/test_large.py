"""Much at once: large tensors, many tensors, many calls, many threads, and memory that does not grow with them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.limits import busy

from . import bodies
from .workers import group

MIB = 1 << 20
GIB = 1 << 30
HUGE = 2 * GIB + 4099  # no power of two, and positions in it do not fit 31 bits
HUGE_NEEDS = 12 * GIB  # the caller's, the callee's and the copy under way, and room for the rest of the machine


async def test_tensors_of_64_megabytes_travel_both_ways() -> None:
    """As argument and as result, from either side, while small calls go on."""
    async with group(2) as _:
        tensor = torch.arange(16 * MIB, dtype=torch.float32).reshape(4096, 4096)
        there = rpc.call("w1", bodies.echo, tensor)
        small = [rpc.call("w1", bodies.aadd, n, 1) for n in range(20)]
        back = rpc.call("w1", bodies.call_back, "w0", tensor.t())
        assert torch.equal(await there, tensor)
        assert [await call for call in small] == list(range(1, 21))
        assert torch.equal(await back, tensor.t())


async def test_thousand_calls_of_eight_threads_are_under_way_at_once() -> None:
    """No call is answered before all have arrived, so none waits for another; each gets its own answer."""
    async with group(2) as (worker, _):

        def call_from(thread: int) -> list[tuple[int, int]]:
            calls = [worker.call("w1", bodies.gather, (thread, n), 1000) for n in range(125)]
            return [call.wait() for call in calls]

        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            answers = await asyncio.gather(*(loop.run_in_executor(threads, call_from, n) for n in range(8)))
        assert answers == [[(thread, n) for n in range(125)] for thread in range(8)]
        assert worker.statistics().calls_pending == 0


async def test_thousand_blocking_calls_of_eight_threads() -> None:
    """`rpc_sync` from eight threads at once, with tensors: nothing is mixed up, in order in each thread."""
    async with group(2) as _:

        def call_from(thread: int) -> list[float]:
            values = (torch.full((n + 1,), float(thread)) for n in range(125))
            return [float(rpc.rpc_sync("w1", bodies.add, args=(value, 1)).sum()) for value in values]

        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            sums = await asyncio.gather(*(loop.run_in_executor(threads, call_from, n) for n in range(8)))
        assert sums == [[(thread + 1.0) * (n + 1) for n in range(125)] for thread in range(8)]


def live_objects() -> int:
    """What the collector of this process knows, after a collection."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.long
async def test_memory_is_flat_over_20000_calls() -> None:
    """Neither side grows with the calls it made or served, whatever they carry and however they end."""
    async with group(2) as _:
        await mixed_calls(4000)
        before = [*await sizes(bodies.resident), *await sizes(live_objects)]
        await mixed_calls(20_000)
        after = [*await sizes(bodies.resident), *await sizes(live_objects)]
        resident, objects = [
            [late - early for early, late in zip(before, after, strict=True)][i : i + 2] for i in (0, 2)
        ]
        # A kilobyte leaked by each call would be 20 MB, one object 20,000.
        assert max(resident) < 12 * MIB, resident
        assert max(objects) < 2000, objects


async def sizes(measure: Callable[[], int]) -> torch.Tensor:
    """What it says in this process and in that of w1."""
    return torch.tensor([measure(), await rpc.call("w1", measure)])


async def mixed_calls(count: int) -> None:
    """Calls of threads and tasks with numbers, text and tensors, some of which fail, 250 at a time."""
    tensor = torch.ones(2, 2)
    for _ in range(count // 250):
        calls: list[rpc.Future[Any]] = []
        for n in range(50):
            calls += [
                rpc.call("w1", bodies.aadd, n, 1),
                rpc.call("w1", bodies.aadd, "text", str(n)),
                rpc.call("w1", bodies.aadd, tensor, tensor),
                rpc.call("w1", bodies.add, n, 1),
                rpc.call("w1", bodies.aadd, n, "no number"),
            ]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, TypeError) for result in done) == 50


def available_memory() -> int:
    """Bytes that can be had without swapping; 0 where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable")), 0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(
    available_memory() < HUGE_NEEDS,
    reason=f"tensors over 2 GB need {HUGE_NEEDS / GIB:g} GiB of free memory; there are {available_memory() / GIB:.1f}",
)
async def test_tensor_over_two_gigabytes() -> None:
    """As argument over a unix socket, as result over TCP: each byte beyond the 2^31st is where it was."""
    marks = {0: 1, 2**31 - 1: 2, 2**31: 3, 2**31 + 1: 4, HUGE - 1: 5}
    patience = 60 * busy()
    async with group(2, transports=("unix",), rpc_timeout=patience) as _:
        tensor = bodies.marked(HUGE, marks)
        assert await rpc.call("w1", bodies.marks_of, tensor, list(marks)) == (HUGE, marks)
        del tensor
    async with group(2, transports=("tcp",), rpc_timeout=patience) as _:
        result = await rpc.call("w1", bodies.marked, HUGE, marks)
        assert bodies.marks_of(result, list(marks)) == (HUGE, marks)
