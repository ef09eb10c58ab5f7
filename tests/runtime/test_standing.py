"""Threads that read the next call of their caller themselves."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import Future, RpcBackendOptions, RpcCancelled, Worker, async_execution, batched
from aiorpc.protocol.frames import Frame
from aiorpc.runtime.callee.standing import Standing
from aiorpc.runtime.calls.current import current_node
from aiorpc.runtime.engine.wakeup import WakeUp
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
def read(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that a thread has read: whether it took what it read."""
    seen: list[bool] = []
    original = Standing._take_all

    def take(self: Standing, frames: list[Frame]) -> bool:
        seen.append(original(self, frames))
        return seen[-1]

    monkeypatch.setattr(Standing, "_take_all", take)
    return seen


@pytest.fixture
async def workers(read: list[bool]) -> AsyncIterator[list[Worker]]:
    """Two workers, of which the second one serves the first with a thread that stands by."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as made, asyncio.timeout(LIMIT):
        # The first call names the function, the next one asks the loop to share its reading.
        while not (read and read[-1]):
            await made[0].call("worker1", double, 1)
            await idle(made[1])
        read.clear()
        yield made


async def idle(worker: Worker) -> None:
    """Wait until its threads wait, standing by or not."""
    pool = worker._node.engine.pool
    await until(lambda: pool.idle == pool.threads)


async def most_are_taken(worker: Worker, read: list[bool], call: Callable[[int], Awaitable[None]]) -> None:
    """A thread takes most of what threads read of these calls, and reads ten of a hundred at least.

    A thread counts as idle shortly before it stands by, and until then the loop reads: on a busy machine more often.
    """
    for number in range(100):
        await idle(worker)
        await call(number)
        if sum(read) >= 10 and 2 * sum(read) >= len(read):
            return
    pytest.fail(f"read by threads: {read}")


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


def double_in(rref: aiorpc.RRef[Box], x: Any) -> Any:
    return rref.local_value().double(x)


class Box:
    def double(self, x: int) -> int:
        return 2 * x

    async def double_on_the_loop(self, x: int) -> int:
        return 2 * x


@pytest.mark.parametrize("function", [double, double_later, double_all])
async def test_calls_that_run_in_threads_are_read_by_them(
    workers: list[Worker], read: list[bool], function: Any
) -> None:
    """Plain functions, those that answer later, and batches."""
    assert await workers[0].call("worker1", function, 1) == 2  # the first one names the function, which is for the loop

    async def call(number: int) -> None:
        assert await workers[0].call("worker1", function, number) == 2 * number

    await most_are_taken(workers[1], read, call)


async def test_those_of_a_worker_that_waits_in_shutdown(read: list[bool]) -> None:
    """It has asked the leader all the time whether it may leave, which is no reason for the leader's loop to read."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as made, asyncio.timeout(LIMIT):
        leaving = asyncio.create_task(made[1].shutdown())
        await until(lambda: made[0]._node.group.departure.entered)

        async def call(number: int) -> None:
            assert await made[1].call("worker0", double, number) == 2 * number

        await most_are_taken(made[0], read, call)
        await asyncio.gather(leaving, made[0].shutdown())


async def test_methods_of_a_reference(workers: list[Worker], read: list[bool]) -> None:
    """Those that are `def` as well."""
    box = workers[0].remote("worker1", Box)

    async def call(number: int) -> None:
        assert await box.rpc_async().double(number) == 2 * number

    await most_are_taken(workers[1], read, call)


async def test_lent_references_and_the_end_of_a_context(workers: list[Worker], read: list[bool]) -> None:
    """As in a training step: the first call brings the end of the context before, and a reference to its owner."""
    current_node.set(workers[0]._node)
    box = workers[0].remote("worker1", Box)
    await box

    async def call(number: int) -> None:
        async with aiorpc.autograd.context():
            y = await workers[0].call("worker1", double_in, box, torch.full((2, 2), float(number), requires_grad=True))
            assert y.sum().item() == 8 * number

    await most_are_taken(workers[1], read, call)
    assert len(workers[1]._node.gradients) <= 1


@pytest.mark.parametrize("size", [10, 100_000, 1_000_000])
async def test_tensors_of_any_size(workers: list[Worker], read: list[bool], size: int) -> None:
    """Those in shared memory are read so, too, once that is mapped; and memory that is given back comes along."""
    tensor = torch.arange(size)
    for number in range(100):
        await idle(workers[1])
        assert torch.equal(await workers[0].call("worker1", double, tensor), 2 * tensor)
        # The loop maps memory. Each time that a thread has left a call to it, threads are passed by for longer.
        if number >= 19 and True in read:
            break
    assert True in read


async def test_a_caller_of_other_calls_is_given_up_for_a_while(workers: list[Worker], read: list[bool]) -> None:
    """What a thread has read and cannot take costs a change of threads, so the next ones are the loop's."""
    for number in range(100):
        await workers[0].call("worker1", double, number)
        await idle(workers[1])
        assert await workers[0].call("worker1", double_on_the_loop, number) == 2 * number
    # A thread counts as idle shortly before it stands by: if the loop is told of a call in between, the thread takes
    # the next one, and giving up begins anew. After those that it could not take 1, 3, 7 ... calls for threads are left
    # to the loop, and there were a hundred of them.
    left = given_up = 0
    for taken in read:
        given_up += 0 if taken else left
        left = 0 if taken else 2 * left + 1
    assert given_up <= 100, read


@pytest.mark.parametrize("seed", range(3))
async def test_calls_of_all_kinds_in_turn(workers: list[Worker], read: list[bool], seed: int) -> None:
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
    assert read
    assert not workers[1].pending_calls()


async def test_the_caller_gives_up(workers: list[Worker], read: list[bool], events: Events) -> None:
    """The loop hears of it while the handler runs, whose call a thread has read."""
    while not (read and read[-1]):
        events.entered.clear()
        events.released.clear()
        await idle(workers[1])
        read.clear()
        call = workers[0].call("worker1", hold)
        await until(events.entered.is_set)
        if not (read and read[-1]):
            events.released.set()
            assert await call is False
    assert call.cancel()
    await until(events.told.is_set)
    with pytest.raises(RpcCancelled):
        await call


async def test_a_call_beside_one_that_waits_for_it(workers: list[Worker], read: list[bool], events: Events) -> None:
    """Nothing of what the caller says meanwhile waits for the handler."""
    for _ in range(10):
        events.entered.clear()
        events.released.clear()
        await idle(workers[1])
        call = workers[0].call("worker1", hold)
        await until(events.entered.is_set)
        await workers[0].call("worker1", release)
        assert await call is False
    assert True in read


async def test_blocking_callers_need_no_loop(workers: list[Worker], read: list[bool]) -> None:
    """A thread that waits reads the answer, another one reads the call: both loops could as well be blocked."""
    caller, callee = workers

    def calls() -> list[int]:
        return [aiorpc.rpc_sync("worker1", double, (number,)) for number in range(200)]

    assert await scripts.run(caller, calls) == [2 * number for number in range(200)]
    assert True in read
    await idle(callee)


async def test_one_thread_serves_one_call_at_a_time(read: list[bool]) -> None:
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
        while True not in read:
            await one.call(server.name, alone)
            await idle(server)
    assert len(most) >= 200 and max(most) == 1


_lists: dict[int, list[int]] = {}


def alone() -> None:
    running, most = _lists[0], _lists[1]
    running.append(1)
    most.append(len(running))
    running.pop()


@pytest.mark.parametrize("grace", [0.0, 1.0])
async def test_no_thread_tries_to_where_none_may_read(monkeypatch: pytest.MonkeyPatch, grace: float) -> None:
    """With a session or TLS who reads may have to write. Over TCP without them threads stand by as elsewhere."""
    made: list[WakeUp | None] = []
    make = WakeUp.make

    def count() -> WakeUp | None:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(WakeUp, "make", count)
    options = RpcBackendOptions(dedicated_loop=True, transports=("tcp",), reconnect_grace=grace)
    async with cluster(2, options=options) as workers, asyncio.timeout(LIMIT):
        for number in range(5):
            assert await workers[0].call("worker1", double, number) == 2 * number
            await idle(workers[1])
        assert bool(made) is not bool(grace)


class Read:
    """A connection of which somebody has read."""

    def __init__(self) -> None:
        self.bytes_received = 0
        self.on_stood: Callable[[list[Frame]], bool] | None = None

    def attach(self, _: object) -> bool:
        return True

    def read_once(self) -> None: ...

    def leave_to_loop(self) -> None: ...

    def keep_from_loop(self) -> bool:
        return True


def test_a_thread_looks_behind_calls_that_it_has_read_alone() -> None:
    """Not behind one that the loop has read; that more came while it ran is a failure."""
    connection: Any = Read()
    nobody: Any = None
    standing = Standing(nobody, nobody, connection)
    standing.running, standing._taken, connection.bytes_received, standing._read = 5, 5, 100, 100
    assert standing.keep()
    standing.running = 6
    assert not standing.keep()
    assert standing.back_off.worth()
    standing.running, connection.bytes_received = 5, 120
    assert not standing.keep()
    assert not standing.back_off.worth()


def is_free() -> bool:
    """Handler: whether its thread is to stand by for nobody yet."""
    node = current_node.get()
    assert node is not None
    return node.engine.pool.lookout.stance.source is None


async def test_nothing_is_kept_from_the_loop_while_a_handler_runs(workers: list[Worker], read: list[bool]) -> None:
    """It may wait for what its caller says meanwhile; its thread stands by behind the handler alone."""

    async def call(_: int) -> None:
        assert await workers[0].call("worker1", is_free)

    await most_are_taken(workers[1], read, call)


@pytest.mark.usefixtures("events")
async def test_a_caller_that_makes_one_call_after_the_other_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, read: list[bool]
) -> None:
    """The thread that has run its call keeps what comes from the loop from the answer on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    kept: list[bool] = []
    original = Standing.keep

    def keep(self: Standing) -> bool:
        kept.append(original(self))
        return kept[-1]

    monkeypatch.setattr(Standing, "keep", keep)
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as made, asyncio.timeout(LIMIT):
        while not any(kept):
            assert await made[0].call("worker1", double, 1) == 2
            await idle(made[1])
