"""The option ``stall_warning``: the worker logs once what is wrong with its group."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import pytest

import aiorpc as rpc
from aiorpc.testing import cluster
from tests.processes.workers import group, until

from . import troubles

LIMIT = 30.0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "stall_warning" in each.getMessage()]


def sleep(seconds: float) -> None:
    time.sleep(seconds)


_queues: list[rpc.Queue[int]] = []


async def make_queue() -> None:
    _queues[:] = [rpc.Queue("jobs")]


async def count() -> AsyncIterator[int]:
    for number in range(10):
        await asyncio.sleep(0.3)
        yield number


@pytest.mark.slow
async def test_a_deadlock_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """With what `diagnose` says: its workers, functions and lines."""
    async with group(3, stall_warning=1.0) as (_, _children):
        calls = [rpc.call("w1", troubles.hold, "w2"), rpc.call("w2", troubles.hold, "w1")]
        await until(lambda: warnings(caplog))
        await asyncio.sleep(2.0)
        for each in calls:
            each.cancel()
    (text,) = warnings(caplog)
    assert text.startswith("worker w0: 2 calls have waited for more than 1 s (stall_warning). The oldest is")
    assert "deadlock: 2 workers wait in a circle: w1 -> w2 -> w1" in text
    assert f"it waits for a lock at {troubles.__file__}:" in text


async def test_calls_that_wait_without_a_trouble_are_drawn(caplog: pytest.LogCaptureFixture) -> None:
    """Again after all have ended, and others wait; streams do not count."""
    options = rpc.RpcBackendOptions(stall_warning=0.3)
    async with cluster(2, options=options) as (worker0, _):
        async for _ in worker0.stream("worker1", count):
            pass
        await worker0.call("worker0", make_queue)
        getting = asyncio.ensure_future(worker0.queue("jobs", owner="worker0").get())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(getting, 1.0)
        assert warnings(caplog) == []
        for number in (1, 2):
            calls = [worker0.call("worker1", sleep, 2.5) for _ in range(2)]
            await asyncio.gather(*calls)
            await until(lambda: len(warnings(caplog)) == number)  # noqa: B023
            await asyncio.sleep(0.5)
    for text in warnings(caplog):
        assert text.startswith("worker worker0: 2 calls have waited for more than 0.3 s")
        assert "nothing found (workers: 2" in text and "it stands at" in text


async def test_by_default_nothing_watches() -> None:
    """No thread is there without the option, and none after the worker's end."""
    async with cluster(1):
        assert not [each for each in threading.enumerate() if each.name.startswith("aiorpc-stalls")]
    async with cluster(1, options=rpc.RpcBackendOptions(stall_warning=1.0)):
        assert [each for each in threading.enumerate() if each.name.startswith("aiorpc-stalls")]
    await until(lambda: not [each for each in threading.enumerate() if each.name.startswith("aiorpc-stalls")])


@pytest.mark.parametrize("value", [-1.0, float("inf"), "soon"])
def test_seconds_that_make_no_sense_are_refused(value: object) -> None:
    """As for other durations."""
    with pytest.raises(rpc.RpcUsageError, match="stall_warning"):
        rpc.RpcBackendOptions(stall_warning=value)  # type: ignore[arg-type]
