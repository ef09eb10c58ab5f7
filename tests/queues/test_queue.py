"""Queues: the manners of asyncio.Queue between workers, what is waited for and given up, and what is lost and told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import (
    PeerLost,
    QueueEmpty,
    QueueFull,
    QueueShutDown,
    RpcBackendOptions,
    RpcTimeout,
    RRef,
    Worker,
    WorkerClosed,
)
from aiorpc.errors import ItemLost, ProtocolError, UnknownWorker
from aiorpc.options import SHARE_SIZE
from aiorpc.protocol.messages import ObjectMethod
from aiorpc.queues.client import Client
from aiorpc.queues.items import (
    At,
    GoneItem,
    Kept,
    KeptItem,
    KeptItems,
    Put,
    Taken,
    to_wire,
)
from aiorpc.queues.packing import hand_over
from aiorpc.queues.served import ServedQueue
from aiorpc.runtime.calls.current import current_node
from aiorpc.runtime.calls.declared import pack
from aiorpc.runtime.calls.values import Results
from aiorpc.testing import Faults, cluster
from aiorpc.types import QueueHandle
from tests.runtime.waiting import until, until_no_references
from tests.unlooked import unlooked_at

LONG = 30.0
LARGE = 100_000  # bytes: stays with its producer


def iter_nothing() -> Iterator[Any]:
    yield from ()


@contextlib.contextmanager
def acting(worker: Worker) -> Iterator[None]:
    """Verbs act for that worker of several in this process."""
    token = current_node.set(worker._node)
    try:
        yield
    finally:
        current_node.reset(token)


def make(worker: Worker, name: str = "q", maxsize: int = 0) -> rpc.Queue[Any]:
    with acting(worker):
        return rpc.Queue(name, maxsize)


def handle(worker: Worker, name: str = "q", owner: str = "worker0", timeout: float | None = LONG) -> QueueHandle[Any]:
    with acting(worker):
        return rpc.queue(name, owner=owner, timeout=timeout)


async def put_all(queue: QueueHandle[Any], items: Sequence[Any]) -> None:
    await asyncio.gather(*(queue.put(item) for item in items))


async def taken(client: Client, count: int) -> list[Taken]:
    """So many items from the owner of a queue, as that has given them."""
    items = client._items(await client.ask("take_items", True, 1, count, pack([])), None)
    assert isinstance(items, list)
    return items


def written(*items: Any) -> tuple[Any, ...]:
    """Items as the last arguments of a call of a queue."""
    sent, references = to_wire(items)
    return (pack(sent), *references)


async def served(worker: Worker, method: str) -> None:
    """Until a call of that method of the queue is under way at its owner."""

    def under_way() -> bool:
        calls = [call for service in worker._node.services for call in list(service.calls.values())]
        return any(call.function.endswith(method) for call in calls)

    await until(under_way)


async def test_items_come_out_in_the_order_in_which_they_were_put(trio: list[Worker]) -> None:
    """Small ones and large ones, as they were when they were put, from any worker to any other."""
    owned = make(trio[0])
    queues = [owned, handle(trio[1]), handle(trio[2])]
    items = [1, "two", {"three": torch.arange(3)}, (4.0, [None]), torch.ones(LARGE), [torch.zeros(LARGE)] * 2]
    for putter in queues:
        for getter in queues:
            await put_all(putter, items)
            assert await getter.qsize() == len(items)
            one, two, three, four = [await getter.get() for _ in range(4)]
            assert (one, two, four) == (1, "two", (4.0, [None])) and three["three"].tolist() == [0, 1, 2]
            three["three"][0] = 5  # what arrives belongs to its receiver
            ones, zeros = await getter.get_many(10)
            assert ones.sum() == LARGE
            ones[0] = 7
            assert zeros[0] is zeros[1] and zeros[0].sum() == 0
            assert await getter.empty()
            del three, ones, zeros
    await until_no_references(trio)


async def test_an_item_is_what_it_was_when_it_was_put(pair: list[Worker]) -> None:
    """What its producer does to it then is not seen; but with copy=False, where it stays with the producer, it is."""
    make(pair[0])
    mine, other = handle(pair[1]), handle(pair[0])
    small, large, kept = torch.ones(4), torch.ones(LARGE), torch.ones(LARGE)
    await put_all(mine, [small, large])
    await mine.put(kept, copy=False)
    for each in (small, large, kept):
        each.zero_()
    assert [int(each[0]) for each in await other.get_many(3)] == [1, 1, 0]


async def test_large_items_wait_in_shared_memory(pair: list[Worker]) -> None:
    """They are copied once, as they are put, and used where they lie; that memory is free when nobody has it."""
    queue, other = make(pair[0]), handle(pair[1])
    memory = pair[1]._node.memory
    item = torch.arange(2 * SHARE_SIZE, dtype=torch.uint8)
    expected = item.clone()
    async with asyncio.timeout(LONG):
        while not memory.keeper.keeps:  # until there is some
            await other.put(item)
            await queue.get()
            await asyncio.sleep(0.005)
    await until(lambda: not memory.arena.used)
    sent = pair[1].statistics().channels["shared memory"].sent
    await asyncio.gather(*(other.put(item) for _ in range(3)))
    item.zero_()
    assert memory.arena.blocks == 3
    got = await queue.get_many(3)
    assert memory.arena.blocks == 3 == memory.leases
    assert pair[1].statistics().channels["shared memory"].sent == sent + 3
    assert all(torch.equal(each, expected) for each in got)
    await until_no_references(pair)
    got[0].zero_()
    assert torch.equal(got[1], expected)
    del got
    await until(lambda: not memory.arena.used and not memory.keeper.keeps)


async def test_only_items_are_handed_over(pair: list[Worker]) -> None:
    """Numbers that name no item of a queue, or no value at all, are refused; nothing else of the worker is given."""
    make(pair[0])
    producer, consumer = handle(pair[1]), pair[0]._node.peers.find("worker1")
    await producer.put(torch.ones(LARGE))
    with acting(pair[1]):
        other = RRef(torch.ones(3))
    (item,) = (rref for rref in pair[1]._node.references._values if rref != other._rref)
    _, number, key = item
    _, others_number, others_key = other._rref
    for refused in [(number, key, 1), (others_number, others_key, 0)]:
        with pytest.raises(rpc.RpcUsageError, match="hand_over is for items of queues"):
            await consumer.call(hand_over, (pack([refused]),), None, LONG)
    for undeclared in [(number,), (number, key), (number, key, True), ("a", "b", "c"), (number, key, -1)]:
        with pytest.raises(rpc.errors.ProtocolError, match="Expected `"):
            await consumer.call(hand_over, (pack([undeclared]),), None, LONG)
    with pytest.raises(rpc.RpcError, match="names no value of this worker"):
        await consumer.call(hand_over, (pack([(number, key + 1, 0)]),), None, LONG)
    assert len(await consumer.call(hand_over, (pack([(number, key, 0)]),), None, LONG)) == 2


async def test_references_travel_in_items(trio: list[Worker]) -> None:
    """Such an item stays with its producer; whoever gets it has a reference of its own."""
    make(trio[0])
    ref = trio[1].remote("worker0", dict, a=1)
    await handle(trio[1]).put({"ref": ref})
    got = await handle(trio[2]).get()
    assert await got["ref"] == {"a": 1}
    del ref, got
    await until_no_references(trio)


async def test_a_full_queue_makes_its_producers_wait(trio: list[Worker]) -> None:
    """As long as there is no room; each item is put once, in its order."""
    queue = make(trio[0], maxsize=2)
    mine, other = handle(trio[1]), handle(trio[2])
    puts = [mine.put(number) for number in range(10)]
    await until(lambda: puts[1].done())
    assert await queue.full() and await queue.qsize() == 2 and not puts[2].done()
    with pytest.raises(QueueFull, match="queue 'q' of worker 'worker0' is full"):
        await mine.put_nowait(99)
    with pytest.raises(asyncio.QueueFull):
        await queue.put_nowait(99)
    assert [await other.get() for _ in range(10)] == [*range(10)]
    await asyncio.gather(*puts)
    await mine.put_nowait(11)
    assert await other.get_nowait() == 11
    with pytest.raises(asyncio.QueueEmpty) as raised:
        await other.get_nowait()
    assert isinstance(raised.value, QueueEmpty)


async def test_what_is_refused_at_once_leaves_nothing_behind(pair: list[Worker]) -> None:
    """Neither the item of a `put_nowait` at a full queue, nor who has asked an empty one with `get_nowait`."""
    queue, mine = make(pair[0], maxsize=1), handle(pair[1])
    for _ in range(3):
        with pytest.raises(QueueEmpty):
            await mine.get_nowait()
    assert not queue._served._getters
    await mine.put("first")
    for item in ("small", torch.ones(LARGE)):
        with pytest.raises(QueueFull):
            await mine.put_nowait(item)
    assert not queue._served._putters
    await until_no_references(pair)
    assert await mine.get() == "first" and await queue.empty()


async def test_who_waits_longer_than_its_timeout_takes_nothing(pair: list[Worker]) -> None:
    """What comes later stays for others; a put whose time is up is not in the queue."""
    queue = make(pair[0], maxsize=1)
    mine = handle(pair[1])
    with pytest.raises(RpcTimeout, match=r"queue 'q' of worker 'worker0' has had no item for 0\.05 s") as raised:
        await mine.get(timeout=0.05)
    assert (raised.value.worker, raised.value.function, raised.value.seconds) == ("worker0", "q.get", 0.05)
    await queue.put("first")
    assert "or worker 'worker0' is busy or stopped" in str(raised.value)
    with pytest.raises(TimeoutError, match=r"has been full for 0\.05 s, or worker 'worker0' is busy or stopped"):
        await mine.put("late", timeout=0.05)
    with pytest.raises(TimeoutError, match=r"has been full for 0\.05 s$"):  # the owner itself knows
        await queue.put("late", timeout=0.05)
    assert await queue.get() == "first"
    await queue.put("second")
    assert await mine.get() == "second"
    assert await queue.empty()
    await until(lambda: not queue._served._waiting)


async def test_a_timeout_says_that_the_owner_was_not_reached(free: list[Worker]) -> None:
    """It is not known whether its queue is full or has no item, as no worker of that name has joined."""
    nobody = handle(free[1], owner="nobody", timeout=0.05)
    for verb, future in (("get", nobody.get()), ("put", nobody.put(1))):
        with pytest.raises(RpcTimeout, match=r"queue 'q' of worker 'nobody' has not answered for 0\.05 s") as raised:
            await future
        assert "no worker of that name has joined" in str(raised.value)
        assert (raised.value.worker, raised.value.function) == ("nobody", f"q.{verb}")


async def test_a_lost_owner_is_told_without_the_lines_of_the_runtime(pair: list[Worker]) -> None:
    """One call puts and takes for several callers: it was made by none of them."""
    await make(pair[1], "full", maxsize=1).put(0)
    waiting = [handle(pair[0], "full", "worker1").put(number) for number in (1, 2)]
    await served(pair[1], "put_items")
    with Faults(pair[0]) as faults:
        await faults.kill("worker1")
        for each in waiting:
            with pytest.raises(PeerLost, match=r"^worker1 .* was lost: ") as raised:
                await each
            assert "made at" not in str(raised.value)
    with pytest.raises(UnknownWorker, match="'nobody'") as unknown:
        await handle(pair[0], "full", owner="nobody").get()
    assert "__notes__" not in vars(unknown.value)


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_a_call_that_comes_behind_the_word_that_ends_it_waits_for_nothing(pair: list[Worker], verb: str) -> None:
    """As one with many items may, which are read in the background: what was given up does not happen later."""
    queue = make(pair[1], maxsize=1)
    if verb == "put":
        await queue.put("first")
    theirs = handle(pair[0], owner="worker1")
    with Faults(pair[0]) as faults:
        late = faults.delay(0.1, "call", when=lambda message: message.name.endswith("_items"))
        with pytest.raises(RpcTimeout):
            await (theirs.put("second", timeout=0.02) if verb == "put" else theirs.get(timeout=0.02))
        await until(lambda: late.count == 1 and pair[0].is_idle())
    if verb == "put":
        assert await queue.get() == "first" and await queue.empty()
    else:
        await queue.put("third")
        assert await queue.qsize() == 1


@pytest.mark.parametrize(
    ("verb", "item"),
    [
        ("get", None),
        ("put", 1),
        ("get_nowait", None),
        ("put_nowait", 1),
        ("put", torch.ones(LARGE)),
        ("put_nowait", torch.ones(LARGE)),
    ],
    ids=["get", "put", "get_nowait", "put_nowait", "put large", "put_nowait large"],
)
async def test_who_leaves_does_not_wait_for_an_owner_that_nobody_waits_for(verb: str, item: Any) -> None:
    """Its name was never seen; what was to be put or got there was given up, and nothing of it was sent."""
    options = RpcBackendOptions(rpc_timeout=LONG, newcomer_grace=100 * LONG)
    async with cluster(1, dynamic=True, options=options) as (worker,):
        nobody = handle(worker, owner="nobody")
        args = (item,) if verb.startswith("put") else ()
        if verb.endswith("nowait"):
            future = getattr(nobody, verb)(*args)
            waits = asyncio.ensure_future(future)
            await until(lambda: future._waiters and not worker._node.is_idle())
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
        else:
            with pytest.raises(RpcTimeout):
                await getattr(nobody, verb)(*args, timeout=0.05)
        async with asyncio.timeout(LONG):
            await worker.shutdown()


@pytest.mark.parametrize("verb", ["put", "put_nowait"])
async def test_large_items_wait_for_an_owner_that_has_not_joined(verb: str) -> None:
    """As small ones do, with which they keep their order; also with those that are put as it comes."""
    store = HashStore()
    served_later = ServedQueue("q", 0, "owner", 1 << 20)
    options = RpcBackendOptions(rpc_timeout=LONG, newcomer_grace=100 * LONG)
    async with cluster(1, dynamic=True, store=store, options=options) as (worker,):
        mine = handle(worker, owner="owner")
        put = getattr(mine, verb)
        sizes = [1, LARGE, 1, 3_000_000, 1, 9_000_000, 1]
        items = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
        puts = [put(item) for item in items]
        await until(lambda: not worker._node.is_idle())
        late = [asyncio.ensure_future(put(torch.full((1,), number))) for number in range(len(items), len(items) + 3)]
        owner = Worker("owner", store=store)
        owner.serve("q", served_later)
        async with owner:
            await asyncio.gather(*puts, *late)
            got: list[torch.Tensor] = []
            while len(got) < len(puts) + len(late):
                got += await mine.get_many(32)
            assert [int(item[0]) for item in got] == list(range(len(got)))
            assert [len(item) for item in got] == [*sizes, 1, 1, 1]
            assert not mine._client()._probing
            del got
            await until_no_references([worker, owner])


async def test_large_items_for_an_owner_that_does_not_come_fail_as_small_ones() -> None:
    """Whether nobody comes, or whoever comes has no queue of that name, or one that was shut down."""
    store = HashStore()
    large = torch.ones(LARGE)
    options = RpcBackendOptions(rpc_timeout=LONG, newcomer_grace=0.2)
    async with cluster(1, dynamic=True, store=store, options=options) as (worker,):
        nobody = handle(worker, owner="nobody")
        for put in (nobody.put(large), nobody.put_nowait(large)):
            with pytest.raises(UnknownWorker, match=r"no worker 'nobody' .*newcomer_grace"):
                await put
        with pytest.raises(RpcTimeout, match="no worker of that name has joined"):
            await handle(worker, owner="another").put(large, timeout=0.05)
    options = RpcBackendOptions(rpc_timeout=LONG, newcomer_grace=100 * LONG)
    async with cluster(1, dynamic=True, store=store, options=options) as (worker,):
        ended, missing = handle(worker, "ended", "owner"), handle(worker, "missing", "owner")
        expected: list[tuple[QueueHandle[Any], type[Exception]]] = [
            (ended, QueueShutDown),
            (missing, rpc.errors.UnknownObject),
        ]
        puts = [(put, error) for queue, error in expected for put in (queue.put(large), queue.put_nowait(large))]
        served_later = ServedQueue("ended", 0, "owner", 1 << 20)
        await served_later.shut_down(False)
        owner = Worker("owner", store=store)
        owner.serve("ended", served_later)
        async with owner:
            for put, error in puts:
                with pytest.raises(error, match="queue"):
                    await put
            assert await ended.empty()


async def test_a_cancelled_get_leaves_the_item_to_others(trio: list[Worker]) -> None:
    """Whatever the moment: before an item is there, with one under way, and with one that has just come."""
    queue = make(trio[0])
    mine, other = handle(trio[1]), handle(trio[2])
    for number in range(30):
        size = LARGE if number % 3 == 2 else 1
        task = asyncio.ensure_future(asyncio.wait_for(mine.get(), LONG))
        for _ in range(number % 10):
            await asyncio.sleep(0)
        put = queue.put(torch.full((size,), number))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await put
        try:
            got = await task
        except asyncio.CancelledError:
            got = await other.get()
        assert int(got[0]) == number
    assert await queue.empty()
    await until(lambda: not queue._served._waiting)
    del got, put, task
    await until_no_references(trio)


async def awaited(future: rpc.Future[Any]) -> Any:
    return await future


async def test_a_cancelled_put_is_in_the_queue_or_is_not(pair: list[Worker]) -> None:
    """Those before and behind it are, once each."""
    queue = make(pair[0], maxsize=1)
    mine = handle(pair[1])
    await mine.put("here")
    puts = [mine.put(number) for number in range(5)]
    await served(pair[0], "put_items")
    assert puts[2].cancel() and puts[0].cancel()
    assert await queue.get() == "here"
    assert [await queue.get() for _ in range(3)] == [1, 3, 4]
    with pytest.raises(rpc.RpcCancelled):
        await puts[2]
    assert await queue.empty()


async def test_a_put_that_fails_and_that_nobody_awaits_is_logged(
    pair: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """With the line that has made it, as a call is."""
    make(pair[0], maxsize=1)
    mine = handle(pair[1])
    await mine.put(1)
    for put in (mine.put_nowait(2), mine.put(3, timeout=0.01)):
        await until(put.done)
    del put
    with pytest.raises(QueueFull):
        await mine.put_nowait(4)

    logged = partial(unlooked_at, caplog)

    await until(lambda: len(logged()) == 2)
    for line, error in zip(sorted(logged()), ("QueueFull", "RpcTimeout"), strict=True):
        assert line.startswith(f"put() on queue 'q' of worker 'worker0' (made at {__file__}:") and error in line


async def test_blocking_forms_wait_in_threads(pair: list[Worker]) -> None:
    """`wait()` of what the methods return; one that has waited in vain takes no item later."""
    make(pair[0])
    mine = handle(pair[1])

    def work() -> list[Any]:
        mine.put(1).wait()
        mine.put(2).wait(timeout=LONG)
        got = [mine.get().wait(), *mine.get_many(5).wait()]
        with pytest.raises(RpcTimeout):
            mine.get().wait(timeout=0.05)
        mine.put(3).wait()
        return [*got, mine.get().wait()]

    assert await asyncio.to_thread(work) == [1, 2, 3]
    with pytest.raises(rpc.errors.WouldBlockLoop):
        mine.get().wait()


async def test_join_waits_until_all_is_finished(pair: list[Worker]) -> None:
    """By whichever worker; task_done() more often than there were items is an error."""
    queue = make(pair[0])
    mine = handle(pair[1])
    await queue.join()
    await put_all(mine, [1, 2, 3])
    joins = [queue.join(), mine.join()]
    with pytest.raises(RpcTimeout, match=r"^3 items of queue 'q' of worker 'worker0' are not done after 0.05 s"):
        await queue.join(timeout=0.05)
    await mine.get_many(3)
    await mine.task_done(2)
    with pytest.raises(RpcTimeout, match=r"^1 item of queue 'q' of worker 'worker0' is not done after 0.05 s"):
        await asyncio.to_thread(queue.join(timeout=0.05).wait)
    with pytest.raises(
        RpcTimeout, match=r"^some of the items of queue 'q' of .* are not done after .*, or worker 'worker0'.* busy"
    ):
        await mine.join(timeout=0.05)
    assert not any(join.done() for join in joins)
    await queue.task_done()
    for join in joins:
        await join
    with pytest.raises(ValueError, match="called too many times"):
        await mine.task_done()
    for bad in (0, -1, "1"):
        with pytest.raises(rpc.RpcUsageError, match="number of items"):
            await mine.task_done(bad)  # type: ignore[arg-type]  # on purpose


async def test_what_others_have_finished_is_not_lost_with_who_got_it(free: list[Worker]) -> None:
    """task_done() counts for whoever got the items, so who joins waits for those alone that are still worked on."""
    queue = make(free[0])
    gets, works = handle(free[1]), handle(free[2])
    await put_all(queue, [1, 2, 3])
    await gets.get_many(3)
    await queue.task_done(2)
    await queue.task_done()
    await queue.join()
    await put_all(queue, [4, 5, 6, 7])
    await works.get_many(3)
    join = queue.join()
    async with contextlib.aclosing(free[0]._node.events.listen()) as news:
        await free[1].shutdown()
        await anext(news)
    await works.task_done(2)
    assert not join.done()
    assert await works.get() == 7
    await works.task_done(2)
    await join
    await queue.join()


async def test_shutdown_lets_go_of_all_who_wait(trio: list[Worker]) -> None:
    """Producers at once, consumers as soon as nothing is left."""
    queue = make(trio[0], maxsize=1)
    mine, other = handle(trio[1]), handle(trio[2])
    await mine.put(1)
    put = mine.put(2)
    await served(trio[0], "put_items")
    await other.shutdown()
    with pytest.raises(QueueShutDown, match="takes no more items"):
        await put
    with pytest.raises(QueueShutDown):
        await queue.put_nowait(3)
    assert await other.get() == 1
    for get in (other.get(), queue.get_nowait(), mine.get_many(2)):
        with pytest.raises(QueueShutDown, match="has no more items"):
            await get
    if hasattr(asyncio, "QueueShutDown"):
        assert issubclass(QueueShutDown, asyncio.QueueShutDown)


async def test_shutdown_at_once_drops_what_there_is(pair: list[Worker]) -> None:
    """Who waits for an item hears of it, and so does who joins."""
    queue = make(pair[0])
    mine = handle(pair[1])
    get = asyncio.ensure_future(mine.get())
    await served(pair[0], "take_items")
    await queue.shutdown(immediate=True)
    with pytest.raises(QueueShutDown):
        await get
    other = make(pair[0], "other")
    await handle(pair[1], "other").put(torch.ones(LARGE))
    join = other.join()
    await other.shutdown(immediate=True)
    await join
    await until_no_references(pair)


ENDED = threading.Semaphore(0)  # for each handler below that has waited


def take_one() -> Any:
    try:
        return rpc.queue("q", owner="worker0").get().wait()
    finally:
        ENDED.release()


def put_one() -> None:
    try:
        rpc.queue("q", owner="worker0").put(2).wait()
    finally:
        ENDED.release()


async def test_who_waits_in_a_thread_waits_no_longer_than_its_caller(pair: list[Worker]) -> None:
    """What is got behind the deadline would be lost with the result; and nobody hears of what is put then."""
    queue, caller = make(pair[0], maxsize=1), pair[0].peer("worker1", timeout=0.1)
    with pytest.raises(RpcTimeout):
        await caller.call(take_one)
    assert await asyncio.to_thread(ENDED.acquire, timeout=LONG)
    await queue.put(1)
    with pytest.raises(RpcTimeout):
        await caller.call(put_one)
    assert await asyncio.to_thread(ENDED.acquire, timeout=LONG)
    assert await queue.get_many(5) == [1] and await queue.empty()


async def test_a_queue_that_is_closed_is_not_there_any_more(pair: list[Worker]) -> None:
    """Whoever waits is told, then whoever asks; its name can be taken again."""
    with make(pair[0]) as queue:
        get = asyncio.ensure_future(handle(pair[1]).get())
        await served(pair[0], "take_items")
    with pytest.raises(QueueShutDown):
        await get
    with pytest.raises(
        rpc.errors.UnknownObject, match=r"worker 'worker0' has no queue 'q'\. .* rpc\.Queue\('q'\)"
    ) as raised:
        await handle(pair[1]).put(1)
    assert (raised.value.worker, raised.value.name) == ("worker0", "q")
    queue.close()
    with make(pair[0]):
        await handle(pair[1]).put(1)
        assert await handle(pair[1]).get() == 1


@pytest.mark.parametrize("verb", ["get", "qsize", "empty", "full", "task_done", "join", "shutdown", "put_nowait"])
async def test_all_methods_say_how_a_queue_is_made_that_is_not_there(verb: str, pair: list[Worker]) -> None:
    """To its owner and to others; a task, a thread and a callback hear the same."""
    text = r"^worker 'worker0' has no queue 'q'; it serves 'other'\. There it has to be made: rpc\.Queue\('q'\)"
    make(pair[0], "other")
    for worker in pair:
        mine = handle(worker)
        args = (1,) if verb.startswith("put") else ()
        with pytest.raises(rpc.errors.UnknownObject, match=text) as raised:
            await getattr(mine, verb)(*args)
        assert (raised.value.worker, raised.value.name, raised.value.names) == ("worker0", "q", ("other",))
        with pytest.raises(rpc.errors.UnknownObject, match=text):
            await asyncio.to_thread(getattr(mine, verb)(*args).wait)
        heard = await getattr(mine, verb)(*args).then(lambda done: repr(done.exception()))
        assert "has no queue 'q'" in heard


async def test_who_asks_a_queue_can_give_up(pair: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    """The owner hears of it, and of what nobody looks at the line that has asked is logged, once."""
    queue = make(pair[0])
    mine = handle(pair[1])
    await mine.put(1)
    join = mine.join()
    await until(lambda: len(queue._served._joiners) == 1)
    assert "join_items on worker 'worker0' (made at" in join._describe()
    join.cancel()
    with pytest.raises(rpc.RpcCancelled):
        await join
    await until(lambda: not queue._served._joiners)
    with pytest.raises(RpcTimeout, match=r"^some of the items of queue 'q' of worker 'worker0' are not done") as caught:
        await mine.join(timeout=0.05)
    assert (caught.value.worker, caught.value.function, caught.value.seconds) == ("worker0", "q.join", 0.05)
    done = mine.task_done(5)
    await until(done.done)
    del done

    logged = partial(unlooked_at, caplog)

    await until(logged)
    (line,) = logged()
    assert f"(made at {__file__}:" in line and "too many times" in line


@pytest.mark.parametrize("way", ["left", "left at once", "killed"])
async def test_what_is_in_a_queue_goes_with_its_worker(way: str) -> None:
    """Whoever keeps the handle of the queue keeps neither its items nor the memory that these have."""
    async with cluster(2, dynamic=True) as (owner, other):
        with acting(owner):
            queue: rpc.Queue[Any] = rpc.Queue("samples")
            await queue.put(torch.ones(LARGE))
        item = weakref.ref(queue._served._items[0].reference)  # without which nobody has the value
        if way == "killed":
            await Faults(other).kill("worker0")
        else:
            await owner.shutdown(graceful=way == "left")
        await until(lambda: gc.collect() and item() is None)
    del queue


async def test_bad_input_is_refused_before_anything_is_sent(pair: list[Worker]) -> None:
    """Names, sizes, counts, timeouts, and items that cannot travel."""
    bad: list[Any] = [-1, 1.5, True, None]
    for maxsize in bad:
        with pytest.raises(rpc.RpcUsageError, match="maxsize of queue 'q'"):
            make(pair[0], maxsize=maxsize)
    with pytest.raises(rpc.RpcUsageError, match="Object name must"):
        make(pair[0], "a queue")
    make(pair[0])
    with pytest.raises(
        rpc.RpcUsageError, match=r"has a queue.* of the name 'q' already.*rpc\.queue\('q', owner='worker0'\)"
    ):
        make(pair[0])
    with pytest.raises(rpc.RpcUsageError, match="Worker name must"):
        handle(pair[0], owner="no worker")
    mine = handle(pair[1])
    sent = pair[1].statistics().calls_made
    with pytest.raises(rpc.errors.SerializationError, match="generator"):
        mine.put(iter_nothing())
    with pytest.raises(rpc.errors.SerializationError):
        mine.put([torch.ones(LARGE), asyncio.get_running_loop()])
    counts: list[Any] = [0, -1, 1.0, True]
    for count in counts:
        with pytest.raises(rpc.RpcUsageError, match="get_many"):
            mine.get_many(count)
    with pytest.raises(rpc.RpcUsageError, match="timeout"):
        mine.get(timeout=-1)
    assert pair[1].statistics().calls_made == sent
    with pytest.raises(rpc.errors.UnknownWorker):
        await handle(pair[1], owner="nobody").put(1)
    with pytest.raises(rpc.errors.NotInitialized):
        rpc.queue("q", owner="worker0")


async def test_a_handle_travels_to_other_workers(trio: list[Worker]) -> None:
    """As an argument; there it acts for the worker that it has come to."""
    queue = make(trio[0])
    await trio[0].call("worker1", produce, queue, 3)
    assert await trio[0].call("worker2", consume, queue, 3) == [0, 1, 2]
    assert type(pickle.loads(pickle.dumps(queue))) is QueueHandle


async def produce(queue: QueueHandle[Any], count: int) -> None:
    await put_all(queue, range(count))


async def consume(queue: QueueHandle[Any], count: int) -> list[Any]:
    return [await queue.get() for _ in range(count)]


@pytest.fixture
async def free() -> AsyncIterator[list[Worker]]:
    """Three workers that meet in a group without a size."""
    async with cluster(3, dynamic=True, options=RpcBackendOptions(rpc_timeout=LONG)) as workers:
        yield workers


async def test_a_producer_that_dies_takes_along_what_it_kept(free: list[Worker]) -> None:
    """The consumer is told who it was, and the queue goes on; small items have travelled, and are there."""
    queue = make(free[0])
    other = handle(free[2])
    await put_all(handle(free[1]), ["small", torch.ones(LARGE), torch.ones(LARGE), "last"])
    await free[1]._drop()
    await until(lambda: "worker1" not in [info.name for info in free[0].worker_infos()])
    await until(lambda: "worker1" not in [info.name for info in free[2].worker_infos()])
    assert await other.get_many(10) == ["small", "last"]
    with pytest.raises(
        ItemLost, match=r"2 items of queue 'q' of worker 'worker0' went with worker 'worker1'"
    ) as raised:
        await other.get()
    assert (raised.value.queue, raised.value.worker, raised.value.count) == ("q", "worker1", 2)
    await queue.put("next")
    assert await other.get() == "next"
    await other.task_done(3)
    await queue.join()


async def test_what_a_producer_has_kept_that_the_consumer_alone_has_lost_comes_by_the_owner(
    free: list[Worker],
) -> None:
    """The network between the two is broken, and both live: whoever gets it takes nothing away from others."""
    queue, consumer = make(free[0]), handle(free[2])
    reference = free[1].remote("worker0", dict, a=1)
    await put_all(handle(free[1]), [torch.ones(LARGE), "small", {"reference": reference}, torch.zeros(LARGE)])
    free[2]._node.group.on_lost(free[1]._node.engine.record, "the network between them is broken")
    await until(lambda: 2 in free[1]._node.group.lost)
    assert (await consumer.get_nowait()).sum() == LARGE
    small, referring = await consumer.get_many(2)
    assert small == "small" and await referring["reference"] == {"a": 1}
    await free[1]._drop()
    await until(lambda: 1 in free[0]._node.group.lost)
    with pytest.raises(ItemLost, match="went with worker 'worker1'"):
        await consumer.get()
    del reference, referring
    await consumer.task_done(3)
    await queue.join()
    await until_no_references([free[0], free[2]])


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_one_worker_may_wait_so_often(verb: str) -> None:
    """At one queue, whatever makes the calls: one more is refused, with the option as the reason; others' are not."""
    options = [RpcBackendOptions(max_queued_calls=2), RpcBackendOptions(), RpcBackendOptions()]
    async with cluster(3, options=options) as workers:
        queue = make(workers[0], maxsize=1)
        if verb == "put":
            await queue.put("first")
        waiting = [begin(handle(workers[1]), verb) for _ in range(2)]
        await until(lambda: calls_of(workers) == 2)
        with pytest.raises(rpc.Overloaded, match=r"2 calls of worker 'worker1' wait at queue 'q'.*max_queued_calls"):
            await begin(handle(workers[1]), verb)
        other = begin(handle(workers[2]), verb)
        assert await handle(workers[1]).qsize() == (verb == "put")
        waiting.pop().cancel()
        await until(lambda: calls_of(workers) == 1)
        waiting.append(begin(handle(workers[1]), verb))
        await until(lambda: calls_of(workers) == 2)
        for _ in range(3):
            await (queue.get() if verb == "put" else queue.put("item"))
        await asyncio.gather(*waiting, other)


def begin(queue: QueueHandle[Any], verb: str) -> asyncio.Future[Any]:
    return asyncio.ensure_future(queue.put("item") if verb == "put" else queue.get())


def calls_of(workers: Sequence[Worker]) -> int:
    """How many of worker1 are served by worker0."""
    services = workers[0]._node.services
    return sum(len(service.calls) for service in services if service.record.name == "worker1")


@pytest.mark.parametrize("limit", ["max_pending_calls", "max_queued_calls", "max_call_rate"])
async def test_items_are_fetched_where_calls_are_too_many(limit: str) -> None:
    """Where the consumer makes no further call, and where the producer takes none, items come all the same."""
    limits = {"max_pending_calls": RpcBackendOptions(max_pending_calls=1)}
    limits["max_queued_calls"] = RpcBackendOptions(max_queued_calls=1)
    limits["max_call_rate"] = RpcBackendOptions(max_call_rate=0.01)
    options = [RpcBackendOptions() for _ in range(3)]
    options[2 if limit == "max_pending_calls" else 1] = limits[limit]
    async with cluster(3, options=options) as workers:
        make(workers[0])
        consumer = handle(workers[2])
        await put_all(handle(workers[1]), [torch.ones(LARGE) for _ in range(2)])
        stays = workers[2].call("worker1", stay)
        await until(lambda: any(service.calls for service in workers[1]._node.services))
        with pytest.raises(rpc.Overloaded):
            await workers[2].call("worker1", abs, 1)
        for _ in range(2):
            assert (await consumer.get()).sum() == LARGE
        stays.cancel()


async def stay(*_: Any) -> None:
    await asyncio.Event().wait()


async def test_an_item_that_its_producer_cannot_hand_over_is_lost(pair: list[Worker]) -> None:
    """It would be in the way of those behind it for ever. Its producer is not said to be gone."""
    queue, other = make(pair[0]), handle(pair[1])
    item: list[Any] = [torch.ones(LARGE)]
    await other.put(item, copy=False)
    item.append(iter_nothing())
    await other.put("next")
    with pytest.raises(ItemLost, match=r"is lost, as worker 'worker1', .* cannot hand it over: .*generator") as raised:
        await queue.get()
    assert (raised.value.worker, raised.value.count) == ("worker1", 1)
    assert await queue.get() == "next"
    await queue.task_done()
    await queue.join()


async def test_what_a_consumer_has_got_goes_with_it(free: list[Worker]) -> None:
    """An item that it was given is given to nobody else, and who joins is told; what it waits for stays."""
    queue = make(free[0])
    doomed = handle(free[2])
    await put_all(queue, [1, 2])
    assert await doomed.get() == 1
    await doomed.get()
    waits = asyncio.ensure_future(doomed.get())
    await served(free[0], "take_items")
    join = queue.join()
    await free[2]._drop()
    with pytest.raises(rpc.RpcError):
        await waits
    with pytest.raises(ItemLost, match=r"2 items of queue 'q' on worker 'worker0' were got by worker 'worker2'"):
        await join
    await queue.join()
    await queue.put(3)
    assert await handle(free[1]).get() == 3


async def test_an_owner_that_dies_takes_the_queue_along(free: list[Worker]) -> None:
    """All who wait hear of it; who takes its name and makes the queue anew is found by the same handle."""
    make(free[0], maxsize=1)
    mine = handle(free[1])
    await mine.put(torch.ones(LARGE))
    waits = [mine.put(torch.ones(LARGE)), handle(free[2], "q").join()]
    await served(free[0], "put_items")
    await free[0]._drop()
    for each in waits:
        with pytest.raises(rpc.PeerLost):
            await each
    del waits, each
    await until_no_references(free[1:])


async def test_rights_and_values_without_pickle_hold_for_queues() -> None:
    """A rule says who may put, get, look and shut down; where nothing is pickled and no rule is given, all may."""
    learner = RpcBackendOptions(allow={"actor": ["queue/q:put"], "other": ["queue/*:[!s]*"], "": "*"})
    options = [learner, RpcBackendOptions(allow=[]), RpcBackendOptions()]
    async with cluster(3, options=options, roles=["", "actor", "other"]) as workers:
        make(workers[0])
        await handle(workers[1]).put(torch.ones(LARGE))
        with pytest.raises(rpc.NotAllowed, match="may not do queue/q:get on"):
            await handle(workers[1]).get()
        assert (await handle(workers[2]).get()).sum() == LARGE
        for who, verb in ((workers[1], "qsize"), (workers[1], "shutdown"), (workers[2], "shutdown")):
            with pytest.raises(rpc.NotAllowed, match="queue/q:"):
                await getattr(handle(who), verb)()
        assert await handle(workers[2]).empty()
    async with cluster(2, options=RpcBackendOptions(serialization="safe")) as workers:
        make(workers[0])
        mine = handle(workers[1])
        await put_all(mine, [{"x": torch.ones(2)}, torch.ones(LARGE)])
        small, large = await handle(workers[0]).get_many(2)
        assert small["x"].sum() == 2 and large.sum() == LARGE
        with pytest.raises(rpc.errors.SerializationError):
            mine.put(HashStore())


async def test_an_item_that_would_be_longer_than_anything_may_be_is_refused() -> None:
    """It is kept in one piece, which nobody could fetch, though each of its tensors may be sent by itself."""
    options = RpcBackendOptions(max_tensor_bytes=1 << 20)
    async with cluster(2, options=options) as workers:
        queue, mine = make(workers[0]), handle(workers[1])
        item = [torch.ones(600_000, dtype=torch.uint8) for _ in range(2)]
        with pytest.raises(
            rpc.errors.SerializationError, match=r"an item for queue 'q' .* too large.*max_tensor_bytes"
        ):
            mine.put(item)
        await mine.put(item, copy=False)
        assert all(map(torch.equal, await queue.get(), item))


async def test_nonsense_is_refused_by_the_owner(pair: list[Worker]) -> None:
    """Whatever a worker sends in place of what handles send; the queue is as it was."""
    queue = make(pair[0])
    peer = pair[1]._node.peers.find("worker0")
    current_node.set(pair[1]._node)
    nonsense: list[tuple[str, tuple[Any, ...]]] = [
        ("put_items", (True, 1, *written())),
        ("put_items", (True, 1, pack([At(0, 0)]))),
        ("put_items", (True, 1, pack([At(1, 0)]), RRef(1))),
        ("return_items", (bytes(16), *written(b"never taken"))),
        ("return_items", (bytes(17), *written(b"never taken"))),
        ("return_items", (b"", *written())),
    ]
    undeclared: list[tuple[str, tuple[Any, ...]]] = [
        ("put_items", (True, 1, *written(b"x" * 100_000))),
        ("put_items", (True, 1)),
        ("put_items", (True, 1, pack([[0, 0, 16]]), RRef(1))),
        ("put_items", (True, 1, pack([[0, 0, -1]]), RRef(1))),
        ("put_items", (True, 1, pack([GoneItem("worker2")]))),
        ("put_items", (True, 1, pack(["text"]))),
        ("put_items", (True, 1, b"")),
        ("put_items", (1, 1, *written(b""))),
        ("take_items", (True, 1, 0, pack([]))),
        ("take_items", (True, 1, 1 << 40, pack([]))),
        ("take_items", (True, "1", 1, pack([]))),
        ("take_items", (True, 1, 1, pack(["worker1"]))),
        ("take_items", (True, 1, 1)),
        ("return_items", (bytes(16), pack([5]))),
        ("withdraw", ([1],)),
        ("withdraw", (-1,)),
        ("finish_items", (-1,)),
        ("shut_down", ()),
    ]
    for args, expected in ((nonsense, rpc.RpcUsageError), (undeclared, rpc.errors.ProtocolError)):
        for method, said in args:
            with pytest.raises(expected):
                await peer.call(ObjectMethod("q", method), said, None, LONG)
    assert await queue.qsize() == 0
    await peer.call(ObjectMethod("q", "put_items"), (True, 1, *written(b"no item")), None, LONG)
    await handle(pair[1]).put("an item")
    with pytest.raises(ItemLost, match="cannot be read here"):
        await queue.get()
    assert await queue.get() == "an item"
    await queue.task_done()
    for reference, place in (
        (pair[1]._node.references.refer_to(5), 0),
        (pair[1]._node.references.refer_to(KeptItems([KeptItem(None)])), 1),
    ):
        await peer.call(ObjectMethod("q", "put_items"), (True, 1, *written(Kept(reference, place))), None, LONG)
        with pytest.raises(ItemLost, match=r"worker 'worker1', .* cannot hand it over.*this is none"):
            await queue.get()
    await queue.join()


class Strange:
    """It stands in for a queue, and gives what no queue does."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def put_items(self, *said: Any) -> Any:
        return self.answer

    def take_items(self, *said: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("many", [True, False])
async def test_answers_that_are_none_end_who_waits(pair: list[Worker], many: bool) -> None:
    """Of an owner that says whatever it likes: who waits hears that, and the handle goes on."""
    tensor = torch.ones(3)
    pair[0].serve("q", Strange(Results((tensor, None)) if many else tensor))
    queue = handle(pair[1])
    for wait in (
        lambda: queue.put(1),
        lambda: queue.put_nowait(1),
        lambda: queue.put_nowait(torch.ones(LARGE)),
        lambda: queue.get(),
        lambda: queue.get_nowait(),
    ):
        with pytest.raises(ProtocolError, match="'q' of worker 'worker0'"):
            await asyncio.wait_for(wait(), LONG)


async def test_only_what_was_taken_is_put_back(trio: list[Worker]) -> None:
    """By the worker that has taken it, as it is and once: one that may take items puts none of its own making."""
    queue, mine, other = make(trio[0]), handle(trio[1]), handle(trio[2])
    await put_all(queue, [1, 2, 3, torch.ones(LARGE)])
    kept = trio[1]._node.references.refer_to(KeptItems([KeptItem(None, "forged"), KeptItem(None)]))
    back = "return_items"
    with pytest.raises(rpc.RpcUsageError, match=r"1 items are put back, and worker 'worker1' has 0 of"):
        await mine._client().ask(back, bytes(16), *written(b"forged"))
    first, second, _, large = items = await taken(mine._client(), 4)
    reference = large.item.reference
    forged = [
        (first.ticket, b"forged"),
        (second.ticket, first.item),
        (second.ticket[:8] + first.ticket[8:], first.item),
        (b"\xff" * 8 + first.ticket[8:], first.item),
        (2 * first.ticket, first.item, first.item),
        (large.ticket, Kept(reference, large.item.place + 1)),
        (large.ticket, Kept(kept, 0)),
        (large.ticket, first.item),
        (first.ticket, Kept(reference, 0)),
        (first.ticket + bytes(16), first.item, second.item),
        (bytes(16), first.item),
    ]
    for tickets, *said in forged:
        with pytest.raises(rpc.RpcUsageError, match="not given to worker 'worker1'"):
            await mine._client().ask(back, tickets, *written(*said))
    assert await queue.empty()
    await mine._client().ask(back, first.ticket, *written(first.item))
    with pytest.raises(rpc.RpcUsageError, match="is back already"):
        await mine._client().ask(back, first.ticket, *written(first.item))
    assert await other.get() == 1 and await queue.empty()
    with pytest.raises(rpc.RpcUsageError, match="not given to worker 'worker2'"):
        await other._client().ask(back, second.ticket, *written(second.item))
    mine._client().node.engine.call_on_loop(mine._client().put_back, items[1:])
    assert [await other.get(), await other.get(), (await other.get()).sum()] == [2, 3, LARGE]
    await other.task_done(4)
    with pytest.raises(rpc.RpcUsageError, match="items are put back"):
        await other._client().ask(back, first.ticket, *written(first.item))
    await queue.join()


async def test_only_its_own_items_are_said_to_be_kept_by_a_producer(trio: list[Worker]) -> None:
    """A worker that names what another one keeps puts nothing: that other one would be said to have put it."""
    queue, mine, other = make(trio[0]), handle(trio[1]), handle(trio[2])
    await mine.put(torch.ones(LARGE))
    (large,) = await taken(other._client(), 1)
    with pytest.raises(rpc.RpcUsageError, match="takes items as"):
        await other._client().ask("put_items", True, 1, *written(large.item))
    assert await queue.empty()
    other._client().node.engine.call_on_loop(other._client().put_back, [large])
    assert (await queue.get()).sum() == LARGE


async def test_no_other_name_leads_to_a_queue() -> None:
    """Neither the name of its class, whose methods are no functions of their own, nor a reference, nor `object/`."""
    allow = {"all": ["*:*", "object/*:*", rpc.exposed], "": "*"}
    async with cluster(2, options=RpcBackendOptions(allow=allow), roles=["", "all"]) as workers:
        queue = make(workers[0])
        await queue.put("an item")
        peer = workers[1]._node.peers.find("worker0")
        for method in ("put_items", "take_items", "return_items", "withdraw", "qsize", "shut_down", "unfinished"):
            with pytest.raises(rpc.NotAllowed, match="queue/q"):
                await peer.call(ObjectMethod("q", method), (), None, LONG)
        with pytest.raises(rpc.NotAllowed, match="qsize"):
            await workers[1].remote("worker0", ServedQueue, "q", 0, "worker0", 1 << 20).rpc_async().qsize()
        assert await queue.get() == "an item"


async def test_who_has_few_rights_finishes_what_it_has_got() -> None:
    """And not what others have got, unless it may shut the queue down: that ends their items as well."""
    allow = {"reader": "queue/q:get", "boss": ["queue/q:get", "queue/q:shutdown"], "": "*"}
    async with cluster(3, options=RpcBackendOptions(allow=allow), roles=["", "reader", "boss"]) as workers:
        queue, reader, boss = make(workers[0]), handle(workers[1]), handle(workers[2])
        await put_all(queue, [1, 2, 3])
        assert [await queue.get(), await reader.get()] == [1, 2]
        with pytest.raises(ValueError, match=r"'worker1' has got 1 items of queue 'q' .*\(queue/q:shutdown\)"):
            await reader.task_done(2)
        await reader.task_done()
        assert queue._unfinished() == 2
        await boss.task_done(1)
        assert queue._unfinished() == 1


async def test_words_of_one_worker_drop_none_of_another(trio: list[Worker]) -> None:
    """A call that was given up before it came does not come to pass, whatever others give up meanwhile."""
    queue = make(trio[0])
    good, bad = (worker._node.peers.find("worker0") for worker in trio[1:])
    await good.call(ObjectMethod("q", "withdraw"), (7,), None, LONG)
    await asyncio.gather(*(bad.call(ObjectMethod("q", "withdraw"), (number,), None, LONG) for number in range(1, 2000)))
    assert await good.call(ObjectMethod("q", "put_items"), (True, 7, *written(b"item")), None, LONG) == pack(Put(0))
    assert await queue.empty()


_taken: list[Any] = []


def take_in_a_thread() -> None:
    _taken.append(rpc.queue("q", owner="worker0").get(timeout=0).wait())


async def test_a_get_in_a_thread_whose_caller_has_given_up_takes_no_item(trio: list[Worker]) -> None:
    """As one that is awaited: whoever gets next has it."""
    queue = make(trio[0])
    call = trio[2].call("worker1", take_in_a_thread)
    await served(trio[0], "take_items")
    call.cancel()
    await until(lambda: trio[1].statistics().threads_idle == trio[1].statistics().threads)
    await queue.put(7)
    assert await handle(trio[2]).get() == 7 and not _taken


async def test_a_queue_whose_worker_has_gone_is_none_of_the_next_one() -> None:
    """Who holds it still, and puts, hears so, also where a worker of the same name has a queue of that name."""
    first = await rpc.init("w", rank=0, world_size=1, store=HashStore())
    old: rpc.Queue[Any] = rpc.Queue("q")
    await first.shutdown()
    async with rpc.init("w", rank=0, world_size=1, store=HashStore()):
        new: rpc.Queue[Any] = rpc.Queue("q")
        for use in (lambda: old.put(1), lambda: old.put_nowait(1), lambda: old.get(), lambda: old.qsize()):
            with pytest.raises(WorkerClosed, match="'w' has shut down"):
                await use()
        assert await new.qsize() == 0
