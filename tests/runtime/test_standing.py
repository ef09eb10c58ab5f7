"""Threads that read the next call of their caller themselves."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import Future, RpcBackendOptions, RpcCancelled, Worker, async_execution, batched
from aiorpc.testing import cluster
from tests import scripts

from .waiting import LIMIT, until


class Events:
    """What handlers of this module wait for, and say."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()
        self.told = threading.Event()


_events: dict[str, Events] = {}


@pytest.fixture
def events() -> Iterator[Events]:
    _events["it"] = Events()
    yield _events["it"]
    _events["it"].released.set()


@pytest.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    """Two workers, of which the second one serves the first with a thread that stands by."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as made, asyncio.timeout(LIMIT):
        for _ in range(20):  # the first ones name the function, and ask the loop to share its reading
            await made[0].call("worker1", double, 1)
            await idle(made[1])
        yield made


async def idle(worker: Worker) -> None:
    """Wait until its threads wait, standing by or not."""
    pool = worker._node.engine.pool
    await until(lambda: pool.idle == pool.threads)


def double(x: Any) -> Any:
    return 2 * x


async def double_on_the_loop(x: Any) -> Any:
    return 2 * x


@async_execution
def double_later(x: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(2 * x)
    return future


@batched(max_size=4, max_wait=0.0)
def double_all(xs: list[int]) -> list[int]:
    return [2 * x for x in xs]


def count_to(n: int) -> Iterator[int]:
    yield from range(n)


def fail(text: str) -> None:
    raise ValueError(text)


def unsendable() -> Any:
    return threading.Lock()


def hold() -> bool:
    """Wait to be released; whether the caller has given up by then."""
    events = _events["it"]
    events.entered.set()
    while not events.released.wait(0.002):
        if aiorpc.cancelled():
            events.told.set()
            return True
    return False


def release() -> None:
    _events["it"].released.set()


class Box:
    def double(self, x: int) -> int:
        return 2 * x

    async def double_on_the_loop(self, x: int) -> int:
        return 2 * x


@pytest.mark.parametrize("seed", range(3))
async def test_calls_of_all_kinds_in_turn(workers: list[Worker], seed: int) -> None:
    """Whoever reads them, each is answered as it should be: alone, and several at once."""
    dice = random.Random(seed)
    caller = workers[0]
    box = caller.remote("worker1", Box)
    sent = torch.ones(70_000)

    async def once(x: int) -> None:
        kind = dice.randrange(10)
        if kind < 4:
            function = (double, double_later, double_all, double_on_the_loop)[kind]
            assert await caller.call("worker1", function, x) == 2 * x
        elif kind == 4:
            assert await box.rpc_async().double(x) == 2 * x
        elif kind == 5:
            assert await box.rpc_async().double_on_the_loop(x) == 2 * x
        elif kind == 6:
            assert [item async for item in caller.stream("worker1", count_to, 3)] == [0, 1, 2]
        elif kind == 7:
            assert torch.equal(await caller.call("worker1", double, sent), 2 * sent)
        elif kind == 8:
            with pytest.raises(ValueError, match="wrong"):
                await caller.call("worker1", fail, "wrong")
        else:
            with pytest.raises(aiorpc.RpcError, match="serialised"):
                await caller.call("worker1", unsendable)

    for number in range(150):
        if dice.random() < 0.2:
            await asyncio.gather(*(once(number) for _ in range(5)))
        else:
            await once(number)
        if dice.random() < 0.5:
            await idle(workers[1])
    assert not workers[1].pending_calls()


async def test_the_caller_gives_up(workers: list[Worker], events: Events) -> None:
    """The loop hears of it while the handler runs, whose call a thread has read."""
    await idle(workers[1])
    call = workers[0].call("worker1", hold)
    await until(events.entered.is_set)
    assert call.cancel()
    await until(events.told.is_set)
    with pytest.raises(RpcCancelled):
        await call


async def test_a_call_beside_one_that_waits_for_it(workers: list[Worker], events: Events) -> None:
    """Nothing of what the caller says meanwhile waits for the handler."""
    for _ in range(10):
        events.entered.clear()
        events.released.clear()
        await idle(workers[1])
        call = workers[0].call("worker1", hold)
        await until(events.entered.is_set)
        await workers[0].call("worker1", release)
        assert await call is False


async def test_blocking_callers_need_no_loop(workers: list[Worker]) -> None:
    """A thread that waits reads the answer, another one reads the call: both loops could as well be blocked."""
    caller, callee = workers

    def calls() -> list[int]:
        return [aiorpc.rpc_sync("worker1", double, (number,)) for number in range(200)]

    assert await scripts.run(caller, calls) == [2 * number for number in range(200)]
    await idle(callee)


async def test_one_thread_serves_one_call_at_a_time() -> None:
    """With a single thread, and calls that come over two connections, no two handlers run at once."""
    running: list[int] = []
    most: list[int] = []

    options = RpcBackendOptions(num_worker_threads=1)
    async with cluster(3, options=options) as (one, two, server), asyncio.timeout(LIMIT):
        _lists[0], _lists[1] = running, most

        async def many(caller: Worker) -> None:
            for _ in range(100):
                await caller.call(server.name, alone)

        await asyncio.gather(many(one), many(two))
    assert len(most) >= 200 and max(most) == 1


_lists: dict[int, list[int]] = {}


def alone() -> None:
    running, most = _lists[0], _lists[1]
    running.append(1)
    most.append(len(running))
    running.pop()
