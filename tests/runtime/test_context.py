"""What code knows about where it runs: the worker, the caller, the call; and events of the group."""

from __future__ import annotations

import asyncio
import decimal
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
import torch
import uvloop
from torch.distributed import HashStore

import aiorpc
from aiorpc import RpcBackendOptions, Worker, WorkerClosed, WorkerInfo
from aiorpc.errors import NotInitialized
from aiorpc.events import WorkerJoined, WorkerLeft
from aiorpc.testing import cluster
from tests.runtime.waiting import LIMIT, until


def who() -> tuple[str, WorkerInfo]:
    return aiorpc.current().name, aiorpc.caller()


async def who_async() -> tuple[str, WorkerInfo]:
    await asyncio.sleep(0)
    return aiorpc.current().name, aiorpc.caller()


def who_generator() -> Any:
    yield aiorpc.current().name, aiorpc.caller()


async def who_async_generator() -> Any:
    yield aiorpc.current().name, aiorpc.caller()


@aiorpc.async_execution
def who_deferred() -> Any:
    future: aiorpc.Future[Any] = aiorpc.Future()
    future.set_result((aiorpc.current().name, aiorpc.caller()))
    return future


class Asker:
    def who(self) -> tuple[str, WorkerInfo]:
        return aiorpc.current().name, aiorpc.caller()


async def from_a_task() -> tuple[str, WorkerInfo]:
    return await asyncio.create_task(who_async())


def from_a_thread() -> str:
    seen: list[str] = []

    def run() -> None:
        try:
            seen.append(aiorpc.current().name)
        except NotInitialized as error:
            seen.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("handler", [who, who_async, who_deferred, from_a_task])
async def test_a_handler_knows_its_worker_and_its_caller(trio: list[Worker], handler: Any) -> None:
    """caller() is name and id of the worker that made this call; current() the worker that serves it."""
    for worker in trio:
        assert await worker.call("worker1", handler) == ("worker1", worker.info)


async def test_generators_and_methods_know_them_too(trio: list[Worker]) -> None:
    """Streams of both kinds, and methods through a reference from a third worker."""
    for generator in (who_generator, who_async_generator):
        assert [item async for item in trio[2].stream("worker0", generator)] == [("worker0", trio[2].info)]
    asker = trio[0].remote("worker1", Asker)
    assert await asker.rpc_async().who() == ("worker1", trio[0].info)


async def test_the_caller_of_a_nested_call_is_the_worker_in_between(trio: list[Worker]) -> None:
    """Each hop has its own caller."""

    async def hop(to: str) -> Any:
        return await aiorpc.call(to, who)

    assert await trio[0].call("worker1", hop, "worker2") == ("worker2", trio[1].info)


async def test_calls_at_the_same_time_do_not_mix(trio: list[Worker]) -> None:
    """Many handlers of different callers on the same loop and threads each see their own."""
    handlers = (who, who_async)
    calls = [(worker, worker.call("worker1", handler)) for _ in range(30) for worker in trio for handler in handlers]
    for worker, call in calls:
        assert await call == ("worker1", worker.info)


user: ContextVar[str] = ContextVar("user", default="nobody")


def log_in(name: str) -> None:
    user.set(name)
    decimal.getcontext().prec = 3


def log_in_and_count(name: str) -> Iterator[int]:
    log_in(name)
    yield 1
    assert user.get() == name, "it goes on in the context in which it began"


def seen() -> tuple[str, int]:
    return user.get(), decimal.getcontext().prec


async def seen_on_the_loop() -> tuple[str, int]:
    return seen()


@pytest.mark.parametrize("log", [log_in, log_in_and_count])
async def test_what_a_handler_sets_in_its_context_is_of_its_call_alone(trio: list[Worker], log: Any) -> None:
    """Whichever thread runs the next one, and whoever reads it: a thread that stands by starts coroutines, too."""
    usual = ("nobody", decimal.getcontext().prec)
    for _ in range(20):
        for _ in range(2):
            if log is log_in:
                await trio[0].call("worker1", log, "alice")
            else:
                assert [item async for item in trio[0].stream("worker1", log, "alice")] == [1]
        assert await trio[0].call("worker1", seen_on_the_loop) == usual
        assert await trio[2].call("worker1", seen) == usual


def without_gradients() -> bool:
    torch.set_grad_enabled(False)
    return torch.is_grad_enabled()


def count_without_gradients() -> Iterator[bool]:
    yield without_gradients()


@aiorpc.batched(max_size=1)
def batch_without_gradients(values: list[int]) -> list[bool]:
    return [without_gradients() for _ in values]


@pytest.mark.parametrize("function", [without_gradients, count_without_gradients, batch_without_gradients])
async def test_a_handler_that_turns_gradients_off_does_so_for_its_call_alone(trio: list[Worker], function: Any) -> None:
    """torch keeps that for the thread, and the next handler of the thread would compute without them."""
    for _ in range(20):
        if function is count_without_gradients:
            assert [item async for item in trio[0].stream("worker1", function)] == [False]
        else:
            arguments = [1] if function is batch_without_gradients else []
            assert await trio[0].call("worker1", function, *arguments) is False
        assert await trio[2].call("worker1", torch.is_grad_enabled)


async def test_what_a_callback_sets_in_its_context_stays_in_no_thread(trio: list[Worker]) -> None:
    """The pool that runs it runs handlers, too."""

    def callback(done: Any) -> tuple[str, int]:
        log_in("alice")
        value: tuple[str, int] = done.value()
        return value

    for _ in range(20):
        child = trio[0].call("worker1", seen).then(callback)
        assert (await child)[0] == "nobody"
        assert (await trio[2].call("worker0", seen))[0] == "nobody"


async def test_the_context_of_who_calls_is_none_of_what_arrives_meanwhile() -> None:
    """A thread of the program's own reads and writes for the loop; what the loop does next is not on its behalf."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as (worker, other):

        def calls() -> None:
            user.set("alice")
            for _ in range(50):
                assert worker.call(other.name, seen).wait()[0] == "nobody"

        around = [asyncio.to_thread(calls) for _ in range(2)]
        turns = [other.call(worker.name, seen_on_the_loop) for _ in range(50)]
        await asyncio.gather(*around)
        assert {name for name, _ in await asyncio.gather(*turns)} == {"nobody"}


async def test_several_workers_and_no_context_raise(pair: list[Worker]) -> None:
    """The module's verbs say which workers there are, and what to use instead."""
    verbs: list[Callable[[], object]] = [
        lambda: aiorpc.call("worker1", len, "a"),
        lambda: aiorpc.remote("worker1", list),
        aiorpc.current,
    ]
    for verb in verbs:
        with pytest.raises(NotInitialized, match=r"worker0, worker1.*worker\.call"):
            verb()
    with pytest.raises(NotInitialized):
        aiorpc.get_worker_info()
    assert await pair[0].call("worker1", from_a_thread) == "NotInitialized"


async def test_no_worker_at_all() -> None:
    """The error says what to do first."""
    with pytest.raises(NotInitialized, match=r"async with aiorpc\.init"):
        aiorpc.call("worker1", len, "a")


async def test_inside_async_with_its_worker_is_current() -> None:
    """Also for tasks and threads that asyncio starts there; outside it is not any more."""
    store = HashStore()
    async with aiorpc.init("a", store=store) as a, aiorpc.init("b", store=store) as b:
        assert aiorpc.current() is b
        assert await asyncio.create_task(_current()) is b
        assert await asyncio.to_thread(aiorpc.current) is b
        assert await aiorpc.call("a", who) == ("a", b.info)
        await b.shutdown(graceful=False)
        assert aiorpc.current() is a


async def _current() -> Worker:
    return aiorpc.current()


class Late:
    """What goes on after its worker has gone: what each verb said."""

    begun, go, over = threading.Event(), threading.Event(), threading.Event()
    said: ClassVar[list[Any]] = []


def verbs_when_told() -> None:
    """Handler, in a thread, which nobody can end."""
    Late.begun.set()
    Late.go.wait(LIMIT)
    try_verbs()


async def verbs_in_a_task() -> None:
    """Handler that leaves a task of its own behind."""

    async def wait() -> None:
        await until(Late.go.is_set)
        try_verbs()

    Late.said.append(asyncio.create_task(wait()))
    Late.begun.set()


def try_verbs() -> None:
    verbs: list[Callable[[], object]] = [
        lambda: aiorpc.call("second", len, "abc"),
        lambda: aiorpc.remote("second", list),
        lambda: aiorpc.serve("late", []),
        aiorpc.get_worker_info,
    ]
    for verb in verbs:
        try:
            Late.said.append(verb())
        except WorkerClosed as error:
            Late.said.append(str(error))
    Late.over.set()


@pytest.mark.parametrize("handler", [verbs_when_told, verbs_in_a_task])
async def test_what_outlives_its_worker_does_not_act_for_the_next_one(handler: Any) -> None:
    """A handler that goes on, or what it has begun: it hears that its worker has shut down."""
    for event in (Late.begun, Late.go, Late.over):
        event.clear()
    Late.said.clear()
    first = await aiorpc.init("first", rank=0, world_size=1, store=HashStore())
    call = first.call("first", handler)
    await until(Late.begun.is_set)
    if handler is verbs_in_a_task:
        await call
    await first.shutdown(graceful=False)
    call._mark_seen()
    async with aiorpc.init("second", rank=0, world_size=1, store=HashStore()) as second:
        Late.go.set()
        await until(Late.over.is_set)
        assert aiorpc.current() is second
        assert await aiorpc.call("second", len, "abc") == 3
    said = [each for each in Late.said if not isinstance(each, asyncio.Task)]
    assert said == ["worker 'first' has shut down; it makes no more calls"] * 4


async def test_a_loop_of_its_own_is_the_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop in a thread, as scripts have it, is uvloop's where that is installed, else asyncio's."""
    for available, kind in ((True, uvloop.Loop), (False, asyncio.SelectorEventLoop)):
        if not available:
            monkeypatch.setitem(sys.modules, "uvloop", None)
        async with cluster(1, options=RpcBackendOptions(dedicated_loop=True)) as (worker,):
            assert type(worker.loop) is kind and worker.loop is not asyncio.get_running_loop()
            assert await worker.call("worker0", abs, -3) == 3


async def test_futures_and_references_carry_their_worker(pair: list[Worker]) -> None:
    """They work in threads that know no worker, though the process has several."""
    rref = pair[0].remote("worker1", Asker)
    seen: list[Any] = []

    def run() -> None:
        seen.append(rref.rpc_sync().who())
        seen.append(isinstance(rref.to_here(), Asker))

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert seen == [("worker1", pair[0].info), True]


# --- events -----------------------------------------------------------------------------------------------------------


async def test_events_of_workers_that_join_and_leave() -> None:
    """Every member hears of both, in order; the iteration ends when its own worker shuts down."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        await until(lambda: all(len(worker.worker_infos()) == 2 for worker in workers))
        heard: list[list[Any]] = [[], []]

        async def listen(index: int) -> None:
            async for event in workers[index].events():
                heard[index].append(event)

        tasks = [asyncio.ensure_future(listen(index)) for index in range(2)]
        await until(lambda: all(worker._node.events.listeners for worker in workers))
        async with aiorpc.init("late", store=store) as late:
            info = late.info
            await until(lambda: all(heard))
        await until(lambda: all(len(events) == 2 for events in heard))
        assert heard == [[WorkerJoined(info), WorkerLeft(info)]] * 2
        await asyncio.gather(*(worker.shutdown() for worker in workers))
        await asyncio.wait_for(asyncio.gather(*tasks), 5)


async def test_a_listener_may_stop(pair: list[Worker]) -> None:
    """Closing it takes the listener off the list, and so does dropping it; a wait that is cancelled does not."""
    listeners = []
    news = pair[0].events()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(news), 0.01)
    listeners.append(pair[0]._node.events.listeners)
    await news.aclose()
    listeners.append(pair[0]._node.events.listeners)
    assert [event async for event in news] == []
    dropped = pair[0].events()
    listeners.append(pair[0]._node.events.listeners)
    del dropped
    gc.collect()
    listeners.append(pair[0]._node.events.listeners)
    assert listeners == [1, 0, 1, 0]


async def test_events_before_the_first_look_are_kept() -> None:
    """Events come from the moment of the call on, in order, the end behind them, on whichever loop they are read."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (worker,):
        news = worker.events()
        async with aiorpc.init("late", store=store) as late:
            info = late.info
            await until(lambda: len(worker.worker_infos()) == 2)
        await until(lambda: len(worker.worker_infos()) == 1)

    async def read() -> list[Any]:
        return [event async for event in news]

    assert await asyncio.to_thread(asyncio.run, read()) == [WorkerJoined(info), WorkerLeft(info)]


async def test_the_switch_interval_is_the_shortest_that_a_worker_of_the_process_asks_for() -> None:
    """While workers live; whoever leaves last gives back what was there before, unless the program has set it since."""
    before = sys.getswitchinterval()
    store = HashStore()

    def make(name: str, interval: float | None) -> Worker:
        options = RpcBackendOptions(switch_interval=interval)
        return Worker(name, store=store, options=options)

    first, second, third = make("first", 0.004), make("second", 0.001), make("third", None)
    try:
        seen = [sys.getswitchinterval()]
        for worker in (first, second, third):
            await worker.start()
            seen.append(sys.getswitchinterval())
        for worker in (second, first, third):
            await worker.shutdown(graceful=False)
            seen.append(sys.getswitchinterval())
        assert seen == [before, 0.004, 0.001, 0.001, 0.004, before, before]
        async with cluster(1):
            assert sys.getswitchinterval() == RpcBackendOptions().switch_interval
            sys.setswitchinterval(0.003)
        assert sys.getswitchinterval() == 0.003, "the program has set it since"
    finally:
        sys.setswitchinterval(before)
