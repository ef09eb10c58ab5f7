"""Where handlers, threads and tasks stand, as a worker reports it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiorpc.observability.making import report_of
from aiorpc.observability.report import SeenCall
from aiorpc.observability.stacks import all_stacks
from aiorpc.testing import cluster
from tests.processes.workers import until

_lock = threading.Lock()
_rlock = threading.RLock()
_semaphore = threading.Semaphore(0)
_event = threading.Event()
_condition = threading.Condition()


def enter() -> None:
    with _lock:
        pass


def enter_second() -> None:
    with open("/dev/null", encoding="utf-8"), _lock:
        pass


def enter_again() -> None:
    with _rlock:
        pass


def acquire() -> None:
    _lock.acquire()
    _lock.release()


def acquire_in_time() -> None:
    if _lock.acquire(timeout=60.0):
        _lock.release()


def enter_semaphore() -> None:
    with _semaphore:
        pass


def acquire_semaphore() -> None:
    _semaphore.acquire()


def wait() -> None:
    _event.wait()


def wait_within() -> None:
    with open("/dev/null", encoding="utf-8"):
        _event.wait()


def wait_for_condition() -> None:
    with _condition:
        _condition.wait_for(_event.is_set)


class Asynchronous:
    """The same with asyncio, on the loop that serves it."""

    lock: asyncio.Lock
    event: asyncio.Event


async def enter_async() -> None:
    async with Asynchronous.lock:
        pass


async def acquire_async() -> None:
    await asyncio.wait_for(Asynchronous.lock.acquire(), 60.0)
    Asynchronous.lock.release()


async def wait_async() -> None:
    await Asynchronous.event.wait()


async def sleep_async() -> None:
    while not Asynchronous.event.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.5)


async def stream() -> AsyncIterator[int]:
    while not Asynchronous.event.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    yield 1


AT_LOCK = (enter, enter_second, enter_again, acquire, acquire_in_time, enter_semaphore, acquire_semaphore, enter_async)
NOT_AT_LOCK = (wait, wait_within, wait_for_condition, wait_async, sleep_async)


@pytest.mark.parametrize("handler", AT_LOCK + NOT_AT_LOCK, ids=lambda each: each.__name__)
async def test_a_handler_at_a_lock_is_told_from_one_that_waits(handler: Callable[[], Any]) -> None:
    """Of `threading` and of `asyncio`, by `with` and by `acquire`; and its line is its own."""
    Asynchronous.lock, Asynchronous.event = asyncio.Lock(), asyncio.Event()
    _event.clear()
    async with cluster(2) as (caller, worker):
        _lock.acquire()
        _rlock.acquire()
        await Asynchronous.lock.acquire()
        call = caller.call("worker1", handler)

        def standing() -> SeenCall | None:
            served = [each for each in report_of(worker._node).calls if each.side == "served"]
            return next((each for each in served if any(handler.__name__ in line for line in each.stands_at)), None)

        try:
            await until(lambda: (seen := standing()) is not None and seen.at_lock == (handler in AT_LOCK))
            seen = standing()
            assert seen is not None and seen.state == "running"
            assert any(line.startswith(f"{__file__}:") for line in seen.stands_at)
            assert not any("/aiorpc/runtime/" in line or "_bootstrap" in line for line in seen.stands_at)
            assert f"serves {__name__}:{handler.__name__} for worker0" in all_stacks([caller._node, worker._node])
        finally:
            _lock.release()
            _rlock.release()
            Asynchronous.lock.release()
            _semaphore.release()
            _event.set()
            Asynchronous.event.set()
            with _condition:
                _condition.notify_all()
            await call
        if _semaphore.acquire(blocking=False):
            pass


async def test_a_generator_stands_where_it_awaits() -> None:
    """And not where the runtime awaits it."""
    Asynchronous.event = asyncio.Event()
    async with cluster(2) as (caller, worker):
        items = caller.stream("worker1", stream)
        taking = asyncio.ensure_future(anext(items))

        def standing() -> list[str]:
            return [line for each in report_of(worker._node).calls for line in each.stands_at]

        await until(lambda: any(line.startswith(__file__) and line.endswith(" in stream") for line in standing()))
        Asynchronous.event.set()
        assert await taking == 1
        await items.aclose()


async def test_stacks_have_the_calls_of_the_program() -> None:
    """And what each handler waits for."""
    _event.clear()
    async with cluster(2) as (caller, worker):
        call = caller.call("worker1", wait)
        try:
            await until(lambda: "for worker0" in all_stacks([worker._node]))
            text = await asyncio.to_thread(all_stacks, [caller._node, worker._node])
            assert "the program\n    waits for" in text
            assert f"{__name__}:wait on worker 'worker1', since" in text and f", made at {__file__}:" in text
            assert "thread MainThread" in text and "task Task-" in text
        finally:
            _event.set()
            await call
