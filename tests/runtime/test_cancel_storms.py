"""Everything that can be awaited is cut off at random moments, in random ways: nothing stays, and nothing is lost.

Every worker does everything to every other one, several things at once, and what each of them waits for is cancelled
now and then: by its own task, by another thread, by a timeout, by a sibling that failed, once or several times. What
was not cut off is right; what was ends with nothing but that; and behind it all counts are what they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

import aiorpc as rpc
from aiorpc.nn import RemoteModule
from aiorpc.optim import DistributedOptimizer
from aiorpc.testing import cluster
from tests.runtime.inside import act_as
from tests.runtime.waiting import until, until_no_references

T = TypeVar("T")
NAMES = ("worker0", "worker1", "worker2")
PATIENCE = 20.0  # seconds for one thing that is done


@dataclass
class Storm:
    """What all workers know of one storm: what runs in handlers, and what becomes of the items of queues."""

    running: Counter[str] = field(default_factory=Counter)
    put: set[tuple[str, int]] = field(default_factory=set)  # items whose put has returned
    begun: set[tuple[str, int]] = field(default_factory=set)  # those that were to be put
    got: list[tuple[str, int]] = field(default_factory=list)
    queues: dict[str, rpc.Queue[Any]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 60)))
    cut: int = 0
    whole: int = 0


STORMS: list[Storm] = []
LOCK = threading.Lock()


@dataclass
class Doing:
    """What one step needs. to, third: workers, which may be the same. me: who takes it."""

    me: str
    to: str
    third: str
    random: random.Random

    def size(self) -> int:
        return self.random.choice((10, 3000, 70_000, 300_000))

    def number(self) -> int:
        return self.random.randrange(1000)


@contextlib.contextmanager
def counted_running(what: str) -> Iterator[None]:
    running = STORMS[-1].running
    with LOCK:
        running[what] += 1
    try:
        yield
    finally:
        with LOCK:
            running[what] -= 1


# --- handlers ---------------------------------------------------------------------------------------------------------


async def one_more(x: Any) -> Any:
    with counted_running("one_more"):
        await asyncio.sleep(random.choice((0, 0, 0.001)))
        return x + 1


def two_more(x: Any) -> Any:
    return x + 2


def full(size: int, value: float) -> torch.Tensor:
    return torch.full((size,), value)


async def by_way_of(to: str, x: int) -> int:
    with counted_running("by_way_of"):
        got: int = await rpc.call(to, one_more, x)
        return got


def blocks_by_way_of(to: str, x: int) -> int:
    with counted_running("blocks_by_way_of"):
        got: int = rpc.rpc_sync(to, one_more, args=(x,))
        return got


@rpc.async_execution
def later(to: str, x: int) -> rpc.Future[int]:
    return rpc.call(to, one_more, x).then(lambda future: future.value() + 1)


def takes_items(owner: str) -> None:
    """What it has got it has finished, whether or not anybody hears of that."""
    with counted_running("takes_items"):
        queue = rpc.queue(f"of-{owner}", owner=owner)
        for _ in range(3):
            try:
                item, _ = queue.get(timeout=0.05).wait()
            except rpc.RpcTimeout:
                return
            STORMS[-1].got.append(item)
            queue.task_done().wait()


def blocks_in_streams(to: str) -> int:
    with counted_running("blocks_in_streams"):
        with rpc.stream(to, acount, 5, 10) as stream:
            seen = [int(item[0]) for item in stream]
        assert seen == list(range(len(seen)))
        return len(seen) + sum(1 for _ in rpc.group(list(NAMES)).map(one_more, range(3)))


async def doze() -> None:
    with counted_running("doze"):
        await asyncio.sleep(1000)


async def acount(count: int, size: int) -> AsyncIterator[torch.Tensor]:
    with counted_running("acount"):
        for number in range(count):
            if number % 3 == 0:
                await asyncio.sleep(0)
            yield full(size, number)


def tcount(count: int, size: int) -> Iterator[torch.Tensor]:
    with counted_running("tcount"):
        for number in range(count):
            yield full(size, number)


async def relayed(to: str, count: int) -> AsyncIterator[int]:
    with counted_running("relayed"):
        async with rpc.stream(to, acount, count, 3) as stream:
            async for item in stream:
                yield int(item[0])


async def value_of(ref: Any) -> Any:
    return await ref


@rpc.batched(max_size=4, max_wait=0.003)
def doubled(rows: list[int]) -> list[int]:
    return [2 * row for row in rows]


@rpc.batched(max_size=3, max_wait=0.003)
async def tripled(rows: list[int]) -> list[int]:
    with counted_running("tripled"):
        await asyncio.sleep(0.001)
        return [3 * row for row in rows]


class Total:
    def __init__(self, start: int) -> None:
        self.value = start

    def get(self) -> int:
        return self.value

    async def plus(self, x: int) -> int:
        await asyncio.sleep(0)
        return self.value + x

    async def numbers(self, count: int) -> AsyncIterator[int]:
        with counted_running("numbers"):
            for number in range(count):
                yield self.value + number


# --- ways to cut something off ----------------------------------------------------------------------------------------


class Failed(Exception):
    """Of a sibling."""


async def a_moment(chance: random.Random) -> None:
    """Some turns of the loop, or up to some milliseconds."""
    if chance.random() < 0.4:
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(chance.expovariate(1 / chance.choice((0.003, 0.03))))


def ended(task: asyncio.Task[Any], cancelled: bool) -> bool:
    """Whether it was cut off. cancelled: whether `cancel` has said that it would be."""
    if task.cancelled():
        return True
    task.result()  # raises what it has ended with
    assert not cancelled, f"{task} has swallowed its cancellation"
    return False


async def by_cancel(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    task = asyncio.ensure_future(step)
    await a_moment(chance)
    cancelled = task.cancel()
    await asyncio.wait((task,))
    return ended(task, cancelled)


async def by_many_cancels(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    task = asyncio.ensure_future(step)
    await a_moment(chance)
    cancelled = task.cancel()
    for _ in range(chance.randrange(1, 4)):
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait((task,))
    return ended(task, cancelled)


async def by_thread(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    task, loop = asyncio.ensure_future(step), asyncio.get_running_loop()
    delay = chance.expovariate(1 / chance.choice((0.003, 0.03)))

    def cut() -> None:
        time.sleep(delay)
        loop.call_soon_threadsafe(task.cancel)

    thread = threading.Thread(target=cut)
    thread.start()
    await asyncio.wait((task,))
    while thread.is_alive():  # noqa: ASYNC110  # nothing announces its end
        await asyncio.sleep(0.001)
    thread.join()
    return ended(task, False)


async def by_timeout(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    async def run() -> None:
        try:
            async with asyncio.timeout(chance.choice((0, 1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2))):
                await step
        finally:
            step.close()

    try:
        await run()
    except TimeoutError as error:
        assert type(error) is TimeoutError, error
        return True
    return False


async def by_wait_for(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    try:
        await asyncio.wait_for(step, chance.choice((1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)))
    except TimeoutError as error:
        assert type(error) is TimeoutError, error
        return True
    return False


async def by_sibling(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    async def fail() -> None:
        await a_moment(chance)
        raise Failed

    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(step)
            group.create_task(fail())
    except ExceptionGroup as error:
        assert [type(each) for each in error.exceptions] == [Failed], error
    return ended(task, False)


async def by_gather(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    async def fail() -> None:
        await a_moment(chance)
        raise Failed

    task = asyncio.ensure_future(step)
    with contextlib.suppress(Failed):
        await asyncio.gather(task, fail())
    cancelled = task.cancel()
    await asyncio.wait((task,))
    return ended(task, cancelled)


async def and_goes_on(step: Coroutine[Any, Any, T], chance: random.Random) -> bool:
    """Its task takes the cancellation back and does something else."""

    async def run() -> bool:
        was_cut = False
        try:
            await step
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            while task.uncancel():
                pass
            was_cut = True
        finally:
            step.close()
        assert await rpc.call(chance.choice(NAMES), one_more, 1) == 2
        return was_cut

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    await a_moment(chance)
    if inspect.getcoroutinestate(step) != inspect.CORO_CLOSED:  # else it would be what comes behind that
        task.cancel()
    return await task


WAYS = (by_cancel, by_many_cancels, by_thread, by_timeout, by_wait_for, by_sibling, by_gather, and_goes_on)


async def turn(awaitable: Callable[[], Awaitable[T]], chance: random.Random) -> list[T]:
    """One turn of an iterator, which is cancelled until it is not: nothing must be lost by that."""

    async def one() -> T:
        return await awaitable()

    while True:
        task = asyncio.ensure_future(one())
        try:
            if chance.random() < 0.3:
                await a_moment(chance)
                task.cancel()
            await asyncio.wait((task,))
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()
        if not task.cancelled():
            try:
                return [task.result()]
            except StopAsyncIteration:
                return []


# --- steps ------------------------------------------------------------------------------------------------------------


async def call(do: Doing) -> None:
    x = do.number()
    assert await rpc.call(do.to, one_more, x) == x + 1
    assert await rpc.call(do.to, two_more, x) == x + 2
    assert await rpc.call(do.to, by_way_of, do.third, x) == x + 1
    assert await rpc.call(do.to, blocks_by_way_of, do.third, x) == x + 1
    assert await rpc.call(do.to, later, do.third, x) == x + 2


async def call_that_never_ends(do: Doing) -> None:
    with pytest.raises(rpc.RpcTimeout):
        await rpc.peer(do.to, timeout=0.02).call(doze)
    with pytest.raises(rpc.RpcCancelled):
        future = rpc.call(do.to, doze)
        thread = threading.Thread(target=future.cancel)
        thread.start()
        try:
            await future
        finally:
            thread.join()


async def call_with_retries(do: Doing) -> None:
    x = do.number()
    assert await rpc.peer(do.to, retries=2).call(one_more, x) == x + 1
    assert await rpc.peer(do.to, retries=2, idempotent=True).call(one_more, x) == x + 1


async def send_tensors(do: Doing) -> None:
    size, x = do.size(), do.number()
    results = await asyncio.gather(*(rpc.call(do.to, one_more, full(size, x)) for _ in range(3)))
    assert all(bool((each == x + 1).all()) and len(each) == size for each in results)


async def read_a_stream(do: Doing) -> None:
    count, size, seen = do.random.randrange(1, 20), do.random.choice((10, 3000, 40_000)), 0
    async with rpc.stream(do.to, do.random.choice((acount, tcount)), count, size) as stream:
        while item := await turn(partial(anext, stream), do.random):
            assert item[0][0] == seen and len(item[0]) == size, (item, seen)
            seen += 1
    assert seen == count


async def leave_a_stream(do: Doing) -> None:
    stream = rpc.stream(do.to, do.random.choice((acount, tcount)), 100_000, 10)
    async for item in stream:
        if item[0] == 3:
            break
    if do.random.random() < 0.5:
        await stream.aclose()


async def read_a_relayed_stream(do: Doing) -> None:
    count = do.random.randrange(1, 20)
    assert [item async for item in rpc.stream(do.to, relayed, do.third, count)] == list(range(count))


async def hold_references(do: Doing) -> None:
    x, size = do.number(), do.size()
    total = rpc.remote(do.to, Total, x)
    assert await total.rpc_async().get() == x
    assert await total.remote().plus(1) == x + 1
    assert [item async for item in total.stream().numbers(3)] == [x, x + 1, x + 2]
    tensor = rpc.remote(do.to, full, size, x)
    assert len(await rpc.call(do.third, value_of, tensor)) == size
    assert (await total).value == x


async def call_an_object(do: Doing) -> None:
    handle = rpc.peer(do.to).object("total")
    assert await handle.get() == 7
    assert await handle.plus(1) == 8
    assert [item async for item in handle.stream().numbers(3)] == [7, 8, 9]
    assert await handle.remote().plus(2) == 9
    name = f"own-{next(STORMS[-1].numbers)}"
    with rpc.serve(name, Total(3)):
        assert await rpc.peer(do.me).object(name).get() == 3


async def call_a_group(do: Doing) -> None:
    x, size = do.number(), do.size()
    group = rpc.group(list(NAMES))
    assert all(len(value) == size for value in (await group.call(one_more, full(size, x))).values())
    assert {name: outcome.result() async for name, outcome in group.call(one_more, x)} == dict.fromkeys(NAMES, x + 1)
    assert len((await rpc.group(list(NAMES), quorum=1).call(one_more, x)).answers) >= 1
    assert await group.any(one_more, x) == x + 1
    made = group.remote(Total, x)
    assert (await made.rpc_async().plus(1)).values() == [x + 1] * 3
    assert [each.value for each in (await made).values()] == [x] * 3


async def map_over_a_group(do: Doing) -> None:
    count, seen = do.random.randrange(1, 20), 0

    async def items() -> AsyncIterator[int]:
        for number in range(count):
            await asyncio.sleep(0)
            yield number

    source = items() if do.random.random() < 0.5 else range(count)
    async with rpc.group(list(NAMES)).map(one_more, source) as results:
        while item := await turn(partial(anext, results), do.random):
            assert item == [seen + 1]
            seen += 1
    assert seen == count


async def stream_from_a_group(do: Doing) -> None:
    count = do.random.randrange(1, 12)
    seen = dict.fromkeys(NAMES, 0)
    async with rpc.group(list(NAMES)).stream(acount, count, 10) as stream:
        while item := await turn(partial(anext, stream), do.random):
            name, tensor = item[0]
            assert tensor[0] == seen[name]
            seen[name] += 1
    assert seen == dict.fromkeys(NAMES, count)


async def come_to_a_barrier(do: Doing) -> None:
    """Nobody else comes to this one, so it is for the time to end it."""
    tag = f"{do.me} {next(STORMS[-1].numbers)}"
    if do.random.random() < 0.3:
        await rpc.group([do.me]).barrier(tag)
    else:
        with pytest.raises(rpc.RpcTimeout):
            await rpc.group(list(NAMES), timeout=0.02).barrier(tag)


async def put(do: Doing) -> None:
    storm, size = STORMS[-1], do.random.choice((1, 3000, 70_000))
    queue = rpc.queue(f"of-{do.to}", owner=do.to)

    async def one() -> None:
        item = (do.to, next(storm.numbers))
        storm.begun.add(item)
        if do.random.random() < 0.2:
            with contextlib.suppress(rpc.QueueFull):
                await queue.put_nowait((item, full(size, item[1] % 1000)))
                storm.put.add(item)
        else:
            with contextlib.suppress(rpc.RpcTimeout):
                await queue.put((item, full(size, item[1] % 1000)), timeout=do.random.choice((0, 0, 0.003)) or PATIENCE)
                storm.put.add(item)

    for _ in range(do.random.randrange(1, 4)):
        await one()
    await asyncio.gather(*(one() for _ in range(do.random.randrange(3))))


async def get(do: Doing) -> None:
    storm, queue = STORMS[-1], rpc.queue(f"of-{do.to}", owner=do.to)

    async def one() -> None:
        way = do.random.randrange(4)
        found: list[Any] = []
        try:
            if way == 0:
                found = [await queue.get_nowait()]
            elif way == 1:
                found = await queue.get_many(5, timeout=0.01)
            else:
                found = [await queue.get(timeout=do.random.choice((0.003, 0.05)))]
        except (rpc.RpcTimeout, rpc.QueueEmpty):
            return
        storm.got += [item for item, _ in found]
        for item, tensor in found:
            assert bool((tensor == item[1] % 1000).all())
        await queue.task_done(len(found))

    for _ in range(do.random.randrange(1, 4)):
        await one()
    await asyncio.gather(*(one() for _ in range(do.random.randrange(3))))
    await queue.qsize()


async def have_items_taken(do: Doing) -> None:
    await rpc.call(do.to, takes_items, do.third)


async def block_in_threads(do: Doing) -> None:
    assert await rpc.call(do.to, blocks_in_streams, do.third) == 8


async def join_a_queue(do: Doing) -> None:
    with contextlib.suppress(rpc.RpcTimeout):
        await rpc.queue(f"of-{do.to}", owner=do.to).join(timeout=0.01)


async def have_a_queue_of_its_own(do: Doing) -> None:
    """It is shut down, or closed, while somebody waits."""
    with rpc.Queue[Any](f"own-{next(STORMS[-1].numbers)}", maxsize=1) as queue:
        await queue.put(1)
        waits = asyncio.ensure_future(_drain(queue))
        try:
            with contextlib.suppress(rpc.QueueShutDown):
                await asyncio.gather(*(_put(queue, each) for each in range(3)))
            await queue.shutdown(immediate=do.random.random() < 0.5)
            await waits
        finally:
            waits.cancel()
            await asyncio.wait((waits,))


async def _put(queue: rpc.Queue[Any], item: Any) -> None:
    await queue.put(item)  # here: a Future of its own that nobody has begun to await would not be given up


async def _drain(queue: rpc.Queue[Any]) -> None:
    with contextlib.suppress(rpc.QueueShutDown):
        while True:
            await queue.get()


async def fill_batches(do: Doing) -> None:
    calls = [rpc.call(do.to, doubled, i) for i in range(6)] + [rpc.call(do.to, tripled, i) for i in range(4)]
    assert await asyncio.gather(*calls) == [2 * i for i in range(6)] + [3 * i for i in range(4)]


async def ask_for_gradients(do: Doing) -> None:
    leaf, factor = torch.ones(do.random.choice((3, 70_000)), requires_grad=True), float(do.number())
    async with rpc.autograd.context() as context:
        there = await rpc.call(do.to, torch.mul, leaf, factor)
        further = await rpc.call(do.third, torch.mul, there, 2.0)
        await context.backward([further.sum()])
        assert bool((context.gradients()[leaf] == 2 * factor).all())


async def train(do: Doing) -> None:
    module = await RemoteModule.create(f"{do.to}/cpu", torch.nn.Linear, (2, 1))
    parameters = await module.remote_parameters_async()
    optimizer = await DistributedOptimizer.create(torch.optim.SGD, parameters, lr=0.1)
    async with rpc.autograd.context() as context:
        await context.backward([(await module.forward_async(torch.ones(1, 2))).sum()])
        await optimizer.step(context)
    async with rpc.autograd.context() as context:
        await optimizer.backward_and_step(context, [(await module.forward_async(torch.ones(1, 2))).sum()])
    await module.state_dict_async()


async def publish(do: Doing) -> None:
    number = next(STORMS[-1].numbers)
    published = await rpc.publish(f"by-{do.me}", {"n": torch.tensor(float(number)), "all": full(100_000, number)})
    delivery = await published.delivered(timeout=do.random.choice((0.01, 0.1)))
    assert delivery.version == published.version


async def publish_something_else(do: Doing) -> None:
    name = f"once-{next(STORMS[-1].numbers)}"
    await rpc.publish(name, full(10, 1))
    await rpc.unpublish(name)


async def read_versions(do: Doing) -> None:
    newest = 0
    async with rpc.subscribe(f"by-{do.to}", timeout=0.05) as versions:
        for _ in range(3):
            try:
                (version,) = await turn(partial(anext, versions), do.random)
            except rpc.RpcTimeout:
                continue
            assert version.version > newest
            newest = version.version
            assert bool((version.value["all"] == version.value["n"]).all())


async def wait_for_somebody(do: Doing) -> None:
    assert (await rpc.wait_for(do.to)).name == do.to
    with pytest.raises(rpc.RpcError):
        await rpc.wait_for("nobody", timeout=0.01)


STEPS = (
    call,
    call_that_never_ends,
    call_with_retries,
    send_tensors,
    read_a_stream,
    leave_a_stream,
    read_a_relayed_stream,
    hold_references,
    call_an_object,
    call_a_group,
    map_over_a_group,
    stream_from_a_group,
    come_to_a_barrier,
    put,
    get,
    put,
    get,
    have_items_taken,
    have_items_taken,
    block_in_threads,
    join_a_queue,
    have_a_queue_of_its_own,
    fill_batches,
    ask_for_gradients,
    train,
    publish,
    publish_something_else,
    read_versions,
    wait_for_somebody,
)


# --- a storm ----------------------------------------------------------------------------------------------------------


async def do_all(name: str, seed: int, rounds: int) -> None:
    """Handler of each worker, for itself: all steps, several at once, of which most are cut off."""
    storm, chance = STORMS[-1], random.Random(f"{seed} {name}")
    steps = list(STEPS) * rounds
    chance.shuffle(steps)

    async def take_steps() -> None:
        while steps:
            step, way = steps.pop(), chance.choice(WAYS)
            do = Doing(name, chance.choice(NAMES), chance.choice(NAMES), random.Random(chance.random()))
            try:
                async with asyncio.timeout(PATIENCE):
                    was_cut = await way(step(do), random.Random(chance.random()))
            except BaseException as error:
                error.add_note(f"{step.__name__} of {name} at {do.to} and {do.third}, {way.__name__}")
                raise
            storm.cut += was_cut
            storm.whole += not was_cut

    await asyncio.gather(*(take_steps() for _ in range(4)))


async def begin(name: str) -> None:
    """Handler of each worker, for itself."""
    STORMS[-1].queues[name] = rpc.Queue(f"of-{name}", maxsize=8)
    rpc.serve("total", Total(7))
    await rpc.publish(f"by-{name}", {"n": torch.tensor(-1.0), "all": full(100_000, -1)})


async def finish(name: str) -> None:
    """Handler of each worker, for itself, once nobody is cut off any more."""
    storm = STORMS[-1]
    queue = storm.queues[name]
    with contextlib.suppress(rpc.QueueEmpty):
        while True:
            item, _ = await queue.get_nowait()
            storm.got.append(item)
            await queue.task_done()
    await rpc.unpublish(f"by-{name}")


async def check_that_all_is_well(worker: rpc.Worker) -> None:
    for name in NAMES:
        assert await worker.call(name, one_more, 1) == 2
        assert [int(item[0]) async for item in worker.stream(name, tcount, 3, 10)] == [0, 1, 2]


def what_is_left(worker: rpc.Worker) -> dict[str, Any]:
    """Of all that a worker may hold for a while."""
    gc.collect()
    node, found = worker._node, worker.statistics()
    names = ("calls_pending", "calls_running", "shared_lent", "shared_leases", "jobs_queued")
    references = ("references_held", "references_pending")
    left: dict[str, Any] = {name: getattr(found, name) for name in (*names, *references) if getattr(found, name)}
    left |= {f"pending at {peer.name}": len(peer.pending.calls) for peer in node.peers.all() if peer.pending.calls}
    left |= {f"streams of {peer.name}": len(peer.pending.streams) for peer in node.peers.all() if peer.pending.streams}
    more = {
        "calls with retries": node.retries.calls,
        "prefetchers": node.publications.prefetchers,
        "what waits on a loop": node.engine.kept,
        "contexts that others were not told of": node.gradients.farewells,
    }
    return left | {name: len(held) for name, held in more.items() if held}


async def run(kind: str, seed: int, rounds: int) -> None:
    storm, outside = Storm(), kind == "outside"
    STORMS.append(storm)
    untold: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: untold.append(context))
    # What the test itself does on the loop, as collecting garbage, is none of the workers' doing.
    options = rpc.RpcBackendOptions(rpc_timeout=PATIENCE, lag_warning=0.0, **KINDS[kind])

    async def do_all_here(worker: rpc.Worker) -> None:
        act_as(worker)
        await do_all(worker.name, seed, rounds)

    async with cluster(len(NAMES), options=options) as workers:
        own = [worker.peer(worker.name, timeout=0.0) for worker in workers]
        await asyncio.gather(*(peer.call(begin, name) for peer, name in zip(own, NAMES, strict=True)))
        owned = [worker.statistics().references_owned for worker in workers]
        tasks = len(asyncio.all_tasks())
        if outside:
            await asyncio.gather(*map(do_all_here, workers))
        else:
            alls = (peer.call(do_all, name, seed, rounds) for peer, name in zip(own, NAMES, strict=True))
            await asyncio.gather(*alls)
        # What was cut off may be in the traceback of its error, and that in a cycle.
        await until(lambda: gc.collect() >= 0 and not +storm.running)
        await asyncio.gather(*(peer.call(finish, name) for peer, name in zip(own, NAMES, strict=True)))
        for worker in workers:
            await until(lambda: not what_is_left(worker))  # noqa: B023  # awaited in the same turn
        await until(lambda: [worker.statistics().references_owned for worker in workers] == owned)
        for worker in workers:
            await check_that_all_is_well(worker)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        for queue in storm.queues.values():
            queue.close()
        await until_no_references(workers)
    twice = [item for item, count in Counter(storm.got).items() if count > 1]
    assert not twice, f"got more than once: {twice}"
    assert storm.put <= set(storm.got), f"lost: {storm.put - set(storm.got)}"
    assert set(storm.got) <= storm.begun
    assert storm.cut > 0 < storm.whole
    assert not untold


#: By what it is called: the options of all workers. Outside: not in handlers, on the loops of the workers.
KINDS: dict[str, dict[str, Any]] = {
    "unix": {},
    "tcp": {"transports": ("tcp",), "min_bulk_bytes": 1, "stream_window": 1},
    "apart": {"dedicated_loop": True, "shared_memory": 0},
    "outside": {"dedicated_loop": True},
}


@pytest.fixture
def all_is_imported() -> None:
    """The first optimizer of a process makes torch import much; a handler that does so is not over with its caller."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)


async def play(kind: str, seeds: range, rounds: int, log: pytest.LogCaptureFixture) -> None:
    for seed in seeds:
        try:
            await run(kind, seed, rounds)
            told = [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]
            assert not told, "something is said of what nobody wants any more"
        except BaseException as error:
            error.add_note(f"{kind}, seed {seed}")
            raise


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.usefixtures("all_is_imported")
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_lost_or_left_by_what_is_cut_off(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is awaited, on the loop of its worker or on another one; and all go on to work and to leave."""
    await play(kind, range(1), 1, caplog)


@pytest.mark.long
@pytest.mark.time_limit(240)
@pytest.mark.usefixtures("all_is_imported")
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_lost_or_left_by_longer_storms(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same, more often."""
    await play(kind, range(1, 16), 3, caplog)
