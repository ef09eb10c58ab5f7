"""Threads that wait for an answer: who reads it, who runs what, and what ends the wait."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import torch

from aiorpc import (
    Future,
    RpcBackendOptions,
    RpcCancelled,
    RpcTimeout,
    Worker,
    rpc_async,
    rpc_sync,
)
from aiorpc.collecting import wait_all
from aiorpc.errors import RpcError, WouldBlockLoop
from aiorpc.events import CallEvent, CallOutcome
from aiorpc.testing import cluster
from tests import scripts

from .waiting import LIMIT, until

BUSY = 5.0  # seconds: far longer than any of these waits


@pytest.fixture
async def awake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    """Two workers on loops of their own, whose waiting threads do not sleep, and have called each other before."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # with a single core none stays awake
    options = RpcBackendOptions(dedicated_loop=True, busy_wait=BUSY)
    async with cluster(2, options=options) as workers, asyncio.timeout(LIMIT):
        for worker, other in (workers, workers[::-1]):
            # The first call connects; the first that has to wait after it asks the loop to share its reading.
            while not is_shared(worker._node.peers.find(other.name)):
                await scripts.run(worker, rpc_sync, other.name, echo, (0,))
        # A handler's thread that is not back yet counts as a job, beside which no thread stays awake.
        await until(
            lambda: all(worker._node.engine.pool.idle == worker._node.engine.pool.threads for worker in workers)
        )
        yield workers


def is_shared(peer: Any) -> bool:
    """Whether its answers may be read by other threads than the loop's."""
    return peer.connection is not None and peer.connection._reader.epoll is not None


def is_awake(worker: Worker) -> bool:
    """Whether a thread stays awake for an answer. Without taking the lock to see: who came just then would sleep."""
    return "unlocked" not in repr(worker._node.engine.pool._awake)


@pytest.fixture
def readers(awake: list[Worker]) -> list[int]:
    """The thread that read each answer of worker0."""
    return watch_readers(awake[0])


def watch_readers(worker: Worker) -> list[int]:
    """Gets the thread that reads each answer, from now on."""
    found: list[int] = []

    class Spy:
        def started(self, call: CallEvent) -> None:
            pass

        queued = running = started

        def ended(self, call: CallEvent, outcome: CallOutcome) -> None:
            if call.side == "made" and call.answer_bytes:
                found.append(threading.get_ident())

    worker.observe_calls(Spy())
    return found


def echo(value: Any) -> Any:
    """Handler."""
    return value


released = threading.Event()


def echo_once_released(value: Any) -> Any:
    """Handler."""
    assert released.wait(LIMIT)
    return value


def double(value: Any) -> Any:
    """Handler."""
    return value * 2


def fail() -> None:
    """Handler."""
    raise ZeroDivisionError("on purpose")


async def forever() -> None:
    """Handler: ends when it is cancelled."""
    await asyncio.Event().wait()


TRIES = 200  # within one process the loop is often quicker than the thread that waits


def read_by_itself(readers: list[int], call: Callable[[], None]) -> bool:
    """Whether this thread reads an answer that it waits for, in one of many tries."""
    for _ in range(TRIES):
        call()
        if readers[-1] == threading.get_ident():
            return True
    return False


@pytest.mark.parametrize("value", [7, "text", [1, {"a": 2}], torch.arange(4.0), torch.arange(8192.0)], ids=str)
async def test_a_waiting_thread_reads_its_answer(awake: list[Worker], readers: list[int], value: Any) -> None:
    """Of whatever kind, as long as it is short."""

    def call() -> None:
        result = rpc_sync("worker1", echo, (value,))
        assert torch.equal(result, value) if isinstance(value, torch.Tensor) else result == value

    assert await scripts.run(awake[0], read_by_itself, readers, call)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_long_answer(awake: list[Worker], readers: list[int], shared: bool) -> None:
    """In shared memory it is as any other; in pieces the loop reads it. What comes after it is as before."""
    long: Any = torch.arange(200_000.0) if shared else bytes(800_000)

    def call() -> None:
        answer = rpc_sync("worker1", echo, (long,))
        assert torch.equal(answer, long) if shared else answer == long

    assert await scripts.run(awake[0], read_by_itself, readers, call) == shared
    assert await scripts.run(awake[0], read_by_itself, readers, partial(rpc_sync, "worker1", echo, (1,)))


async def test_errors_come_the_same_way(awake: list[Worker], readers: list[int]) -> None:
    """The handler's own error, raised in the thread that has read it."""

    def call() -> None:
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            rpc_sync("worker1", fail)

    assert await scripts.run(awake[0], read_by_itself, readers, call)


async def test_all_of_several_are_waited_for(awake: list[Worker]) -> None:
    """Whichever answer comes first, whoever reads it."""

    def body() -> list[int]:
        return wait_all([rpc_async("worker1", double, (n,)) for n in range(50)])

    for _ in range(20):
        assert await scripts.run(awake[0], body) == [2 * n for n in range(50)]


async def test_many_threads_wait_at_once(awake: list[Worker]) -> None:
    """One of them stays awake at a time; none gets another's answer, and the loop's own calls go on beside them."""

    def body(seed: int) -> None:
        for n in range(100):
            assert rpc_sync("worker1", echo, ((seed, n),)) == (seed, n)

    async def beside() -> None:
        for n in range(100):
            assert await awake[0].call("worker1", echo, n) == n

    await asyncio.gather(beside(), *(scripts.run(awake[0], body, seed) for seed in range(6)))


async def test_callbacks_do_not_run_in_the_thread_that_waits(awake: list[Worker]) -> None:
    """One that blocks until the waiting thread goes on would wait for ever."""
    gone_on = threading.Event()
    seen: list[bool] = []

    def body() -> None:
        released.clear()
        future = rpc_async("worker1", echo_once_released, (1,))
        future.add_done_callback(lambda _: seen.append(gone_on.wait(LIMIT)))
        child = future.then(lambda done: (gone_on.wait(LIMIT), done.value() + 1)[1])
        released.set()
        assert future.wait() == 1
        gone_on.set()
        assert child.wait() == 2

    await scripts.run(awake[0], body)
    assert seen == [True]


class Asking:
    """Unpickled, it asks the worker that it comes from."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return rpc_sync, ("worker1", echo, ("asked",))


def make_asking() -> Asking:
    """Handler."""
    return Asking()


async def test_unpickling_an_answer_may_call_where_a_thread_waits(awake: list[Worker], readers: list[int]) -> None:
    """Nothing is held while it is unpickled. On the loop such a call is refused, as ever."""

    def call() -> None:
        try:
            assert rpc_sync("worker1", make_asking, timeout=LIMIT) == "asked"  # type: ignore[comparison-overlap]
        except RpcError as error:
            assert isinstance(error.__cause__, WouldBlockLoop), error

    assert await scripts.run(awake[0], read_by_itself, readers, call)


async def test_a_wait_ends_at_its_timeout_and_at_the_deadline(awake: list[Worker]) -> None:
    """The one leaves the call alone, the other ends it."""

    def body() -> Future[Any]:
        future = rpc_async("worker1", forever)
        with pytest.raises(RpcTimeout, match=r"waited 0\.05 s"):
            future.wait(0.05)
        assert not future.done()
        with pytest.raises(RpcTimeout, match="set timeout"):
            rpc_sync("worker1", forever, timeout=0.05)
        return future

    future = await scripts.run(awake[0], body)
    future.cancel()


def wait_awake(future: Future[Any], seconds: float = BUSY / 20) -> Any:
    """Wait until it settles: again and again, as a thread that finds another one at work sleeps for that wait."""
    while True:
        try:
            return future.wait(seconds)
        except RpcTimeout:
            if future.done():
                raise


async def test_cancelling_ends_a_wait_that_is_awake(awake: list[Worker]) -> None:
    """From another thread; the answer that comes later disturbs nobody."""
    future = await scripts.run(awake[0], partial(rpc_async, "worker1", forever))
    waiting = asyncio.ensure_future(scripts.run(awake[0], wait_awake, future))
    await until(partial(is_awake, awake[0]))
    future.cancel()
    with pytest.raises(RpcCancelled):
        await waiting
    assert await scripts.run(awake[0], rpc_sync, "worker1", echo, (1,)) == 1
