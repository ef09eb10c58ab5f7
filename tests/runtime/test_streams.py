"""Streams: items in order, back-pressure, errors, and what stops a producer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import PeerLost, RpcBackendOptions, RpcTimeout, RpcUsageError, Worker
from aiorpc.testing import cluster
from tests.runtime.bad_member import say, serving, values_of
from tests.runtime.waiting import until, until_no_references


class Producer:
    """Generators that note how far they got and whether they were closed; shared by both sides of a test."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = threading.Event()
        self.go_on = threading.Event()

    def count(self, limit: int = 1_000_000) -> Iterator[int]:
        try:
            for number in range(limit):
                self.made = number + 1
                yield number
        finally:
            self.closed.set()

    async def count_async(self, limit: int = 1_000_000) -> AsyncIterator[int]:
        try:
            for number in range(limit):
                self.made = number + 1
                yield number
        finally:
            self.closed.set()


_producers: dict[str, Producer] = {}


def plain(key: str, limit: int = 1_000_000) -> Iterator[int]:
    yield from _producers[key].count(limit)


async def asynchronous(key: str, limit: int = 1_000_000) -> AsyncIterator[int]:
    async for number in _producers[key].count_async(limit):
        yield number


@pytest.fixture
def producer() -> Iterator[Producer]:
    _producers["it"] = Producer()
    yield _producers["it"]
    del _producers["it"]


async def stubborn(key: str) -> AsyncIterator[int]:
    producer = _producers[key]
    try:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
            producer.made += 1
            yield producer.made
    finally:
        producer.closed.set()


def fail_after(count: int) -> Iterator[int]:
    yield from range(count)
    raise KeyError("after", count)


async def fail_after_async(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number
    raise KeyError("after", count)


def tensors(count: int) -> Iterator[torch.Tensor]:
    buffer = torch.zeros(4)
    for number in range(count):
        buffer.fill_(number)  # the same memory each time: an item is what it was when it was yielded
        yield buffer


async def stall(event_free: bool = True) -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


def unpicklable(count: int) -> Iterator[Any]:
    yield from range(count)
    yield threading.Lock()


def nothing() -> Iterator[int]:
    return iter(())


def empty() -> Iterator[int]:
    yield from ()


class Source:
    """Streamed through methods."""

    def numbers(self, count: int) -> Iterator[int]:
        yield from range(count)

    @classmethod
    async def letters(cls, text: str) -> AsyncIterator[str]:
        for letter in text:
            yield letter


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_items_arrive_in_order_and_the_loop_ends(pair: list[Worker], producer: Producer, kind: Any) -> None:
    """Async and plain generators deliver all of their items in order, also many times the window."""
    assert [n async for n in pair[0].stream("worker1", kind, "it", 200)] == list(range(200))
    assert producer.closed.is_set()
    await until(lambda: pair[1].is_idle())


async def test_generators_of_all_forms(pair: list[Worker]) -> None:
    """Methods, class methods, closures, and generators without items; also to oneself."""

    def local() -> Iterator[int]:
        yield 7

    assert [n async for n in pair[0].stream("worker1", Source().numbers, 3)] == [0, 1, 2]
    assert [c async for c in pair[0].stream("worker1", Source.letters, text="abc")] == ["a", "b", "c"]
    assert [n async for n in pair[0].stream("worker1", local)] == [7]
    assert [n async for n in pair[0].stream("worker1", empty)] == []
    assert [n async for n in pair[0].stream("worker0", Source().numbers, 2)] == [0, 1]
    assert [n async for n in pair[0].peer("worker1").stream(Source().numbers, 2)] == [0, 1]


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_the_producer_stops_while_its_consumer_does(producer: Producer, kind: Any) -> None:
    """Without anybody taking items at most a window of them is made."""
    async with cluster(2, options=RpcBackendOptions(stream_window=4)) as workers:
        stream = workers[0].stream("worker1", kind, "it")
        assert await anext(stream) == 0
        await until(lambda: producer.made >= 4)
        for number in range(1, 50):
            assert await anext(stream) == number
            assert producer.made <= number + 1 + 4
        await stream.aclose()
        await until(producer.closed.is_set)


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_leaving_the_loop_stops_the_producer(pair: list[Worker], producer: Producer, kind: Any) -> None:
    """``break`` is enough: the generator is closed at the callee, and nothing is pending at either end."""
    async for number in pair[0].stream("worker1", kind, "it"):
        if number == 3:
            break
    gc.collect()
    await until(producer.closed.is_set)
    await until(lambda: not pair[0].pending_calls() and not pair[1].pending_calls())


async def test_a_generator_that_goes_on_when_it_is_cancelled_is_closed(pair: list[Worker], producer: Producer) -> None:
    """It takes the cancellation for something else, and makes one more item; nobody asks it for a further one."""

    async with pair[0].stream("worker1", stubborn, "it") as stream:
        assert await anext(stream) == 1
    await until(producer.closed.is_set)
    await until(lambda: not pair[1]._node.engine.tasks.alive)


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_cancelling_the_consumer_stops_the_producer(pair: list[Worker], producer: Producer, kind: Any) -> None:
    """A task that is cancelled in its loop, or an error in its body, ends the generator."""

    async def consume() -> None:
        async with pair[0].stream("worker1", kind, "it") as items:
            async for _ in items:
                pass

    task = asyncio.ensure_future(consume())
    await until(lambda: producer.made > 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(producer.closed.is_set)


@pytest.mark.parametrize("kind", [fail_after, fail_after_async])
@pytest.mark.parametrize("count", [0, 1, 40])
async def test_errors_arrive_in_their_place(pair: list[Worker], kind: Any, count: int) -> None:
    """The generator's own error is raised after all the items before it, and then the stream is over."""
    stream = pair[0].stream("worker1", kind, count)
    seen = []
    with pytest.raises(KeyError) as caught:
        async for item in stream:
            seen.append(item)
    assert seen == list(range(count)) and caught.value.args == ("after", count)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


class Large:
    """What a consumer holds."""


@pytest.mark.parametrize("way", ["task", "thread"])
async def test_a_consumer_whose_stream_fails_is_freed_without_the_collector(apart: list[Worker], way: str) -> None:
    """All that its frame held goes at once: no reference cycle stays behind the error."""
    held: list[weakref.ref[Large]] = []

    async def take() -> None:
        large = Large()
        held.append(weakref.ref(large))
        async for _ in apart[0].stream("worker1", fail_after, 1):
            pass

    def take_here() -> None:
        large = Large()
        held.append(weakref.ref(large))
        for _ in apart[0].stream("worker1", fail_after, 1):
            pass

    def fails() -> None:
        with contextlib.suppress(KeyError):
            take_here()

    gc.collect()
    gc.disable()
    try:
        if way == "thread":
            await asyncio.to_thread(fails)
        else:
            with contextlib.suppress(KeyError):
                await take()
        await until(lambda: held[0]() is None)  # the loop of the worker may be in the midst of its turn
    finally:
        gc.enable()


async def test_an_item_that_cannot_be_serialised_ends_the_stream_with_an_error(pair: list[Worker]) -> None:
    """Items before it arrive; the error names the item's type and the function."""
    seen = []
    with pytest.raises(aiorpc.errors.SerializationError, match=r"an item of .*unpicklable.*lock"):
        async for item in pair[0].stream("worker1", unpicklable, 3):
            seen.append(item)
    assert seen == [0, 1, 2]


async def test_arguments_that_cannot_be_serialised_raise_at_once(pair: list[Worker]) -> None:
    """The stream is not opened."""
    with pytest.raises(aiorpc.errors.SerializationError, match="argument 0"):
        pair[0].stream("worker1", plain, threading.Lock())  # type: ignore[arg-type]


async def test_items_are_snapshots_of_their_tensors(pair: list[Worker]) -> None:
    """A generator may reuse its buffer for the next item; each item is the receiver's own."""
    items = [item async for item in pair[0].stream("worker1", tensors, 40)]
    assert [item.tolist() for item in items] == [[n] * 4 for n in range(40)]


async def test_references_in_items(trio: list[Worker]) -> None:
    """RRefs travel in items; those in items that nobody took are released."""
    seen = []
    async for rref in trio[0].stream("worker1", references, 10):
        seen.append(await rref)
    assert seen == list(range(10))
    del rref
    await take_the_first_of_some(trio[0])
    gc.collect()
    await until_no_references(trio)


async def take_the_first_of_some(worker: Worker) -> None:
    before = worker.statistics().messages_received
    stream = worker.stream("worker1", references, 10)
    assert await (await anext(stream)) == 0
    await until(lambda: worker.statistics().messages_received > before + 4)
    await stream.aclose()


async def references(count: int) -> AsyncIterator[Any]:
    for number in range(count):
        yield aiorpc.RRef(number)


async def test_the_timeout_bounds_the_wait_for_each_item(pair: list[Worker]) -> None:
    """RpcTimeout names function, worker and seconds; the producer is stopped."""
    stream = pair[0].peer("worker1", timeout=0.05).stream(stall)
    await until(lambda: stream._ready)  # connecting and the first item may take longer on a busy machine
    assert await anext(stream) == 1
    with pytest.raises(RpcTimeout, match=r"stall.*'worker1'.*0\.05 s") as caught:
        await anext(stream)
    assert (caught.value.worker, caught.value.seconds) == ("worker1", 0.05)
    await until(lambda: not pair[1].pending_calls())


async def test_a_cancelled_wait_takes_no_item(pair: list[Worker], producer: Producer) -> None:
    """Giving up on one ``anext`` leaves the stream usable, with no item lost."""
    stream = pair[0].stream("worker1", gated, "it")
    for number in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await anext(stream)
        producer.go_on.set()
        assert await anext(stream) == number
    await stream.aclose()


async def gated(key: str) -> AsyncIterator[int]:
    for number in range(10):
        await until(_producers[key].go_on.is_set)
        _producers[key].go_on.clear()
        yield number


async def test_a_thread_takes_items_by_a_plain_loop(pair: list[Worker], producer: Producer) -> None:
    """It blocks there, raises the producer's error in its place, and stops the producer where it is left early."""

    def take() -> tuple[list[int], list[int]]:
        some = list[int]()
        with pair[0].stream("worker1", slow, "it") as stream:
            for item in stream:
                some.append(item)
                if item == 2:
                    break
        every = list[int]()
        with pytest.raises(ValueError, match="after two"):
            every.extend(pair[0].stream("worker1", fails_after_two))
        return some, every

    with pytest.raises(aiorpc.errors.WouldBlockLoop, match="async for"):
        iter(pair[0].stream("worker1", slow, "it"))
    some, every = await asyncio.to_thread(take)
    assert (some, every) == ([0, 1, 2], [0, 1])
    await until(lambda: not pair[1].pending_calls())


def slow(_: str) -> Iterator[int]:
    yield from range(1000)


def fails_after_two() -> Iterator[int]:
    yield 0
    yield 1
    raise ValueError("after two")


async def test_a_stream_has_one_consumer(pair: list[Worker]) -> None:
    """A second task that waits for an item is refused; the first goes on."""
    stream = pair[0].stream("worker1", stall)
    assert await anext(stream) == 1
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RpcUsageError, match="one consumer"):
        await anext(stream)
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()


def collected(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return list(function(*args))

    return wrapper


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@collected
def squares(count: int) -> Any:
    for number in range(count):
        yield number**2


@passed_on
def cubes(count: int) -> Iterator[int]:
    for number in range(count):
        yield number**3


@passed_on
async def cubes_async(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number**3


async def test_a_wrapper_of_a_generator_function_may_give_items_or_one_result(pair: list[Worker]) -> None:
    """What it returns says which verb is right, and so does the error for the other one."""
    caller = pair[0]
    assert await caller.call("worker1", squares, 4) == [0, 1, 4, 9]
    with pytest.raises(RpcUsageError, match=r"squares wraps .* returned a list.*: use aiorpc.call"):
        await anext(caller.stream("worker1", squares, 4))
    for function in (cubes, cubes_async):
        assert [item async for item in caller.stream("worker1", function, 3)] == [0, 1, 8]
        with pytest.raises(RpcUsageError, match="is a generator function"):
            await caller.call("worker1", function, 3)
    plain_iterator: Any = functools.wraps(squares)(lambda count: iter(range(count)))  # it has no `close`
    assert [item async for item in caller.stream("worker1", plain_iterator, 3)] == [0, 1, 2]


async def test_the_wrong_verb_says_which_to_use(pair: list[Worker]) -> None:
    """call of a generator function and stream of another are refused with the verb to use."""
    with pytest.raises(RpcUsageError, match=r"aiorpc\.stream"):
        await pair[0].call("worker1", empty)
    with pytest.raises(RpcUsageError, match=r"aiorpc\.call"):
        await anext(pair[0].stream("worker1", nothing))


async def test_a_waiting_producer_holds_no_place_in_the_pool(producer: Producer) -> None:
    """Plain generators that wait for credit do not keep calls from running, even with one thread."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=1, stream_window=2)) as workers:
        streams = [workers[0].stream("worker1", Source().numbers, 100) for _ in range(5)]
        for stream in streams:
            assert await anext(stream) == 0
        assert await workers[0].call("worker1", len, "abc") == 3
        for stream in streams:
            await stream.aclose()


async def test_many_streams_between_workers_on_their_own_loops(apart: list[Worker]) -> None:
    """Streams may be consumed on a loop that is not their worker's."""

    async def consume(worker: Worker, to: str) -> int:
        return sum([n async for n in worker.stream(to, Source().numbers, 50)])

    totals = await asyncio.gather(*(consume(a, b.name) for a in apart for b in apart))
    assert totals == [sum(range(50))] * 9


async def test_a_closed_stream_is_over(pair: list[Worker], producer: Producer) -> None:
    """aclose may be called twice; afterwards there are no items."""
    stream = pair[0].stream("worker1", asynchronous, "it")
    assert await anext(stream) == 0
    await stream.aclose()
    await stream.aclose()
    assert [item async for item in stream] == []


async def test_a_producer_whose_worker_leaves_ends_the_stream_with_an_error(producer: Producer) -> None:
    """The consumer does not wait for ever."""
    async with cluster(2) as workers:
        stream = workers[0].stream("worker1", stall)
        assert await anext(stream) == 1
        await workers[1].shutdown(graceful=False)
        with pytest.raises(aiorpc.PeerLeft, match="worker1"):
            await anext(stream)


async def test_items_that_were_not_asked_for_end_the_connection() -> None:
    """A producer that sends beyond its credit would fill the memory of its consumer; the stream says who it was."""
    async with cluster(2, options=RpcBackendOptions(stream_window=4)) as workers:
        stream = workers[0].stream("worker1", stall)
        assert await anext(stream) == 1
        connection = serving(workers[1], "worker0")
        (number,) = [call for each in workers[1]._node.services for call in each.calls]
        for item in range(3):
            say(connection, "ITEM", number, [values_of([item])])
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        for item in range(1000):
            say(connection, "ITEM", number, [values_of([item])])
        with pytest.raises(PeerLost, match=r"worker1.*beyond the 4 that were asked for"):
            for _ in range(1000):
                await anext(stream)
