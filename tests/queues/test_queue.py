"""Queues: the manners of asyncio.Queue between workers, what is waited for and given up, and what is lost and told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import (
    Overloaded,
    PeerLeft,
    PeerLost,
    QueueEmpty,
    QueueFull,
    QueueShutDown,
    RpcBackendOptions,
    RpcTimeout,
    RRef,
    Worker,
    WorkerClosed,
    futures,
)
from aiorpc.errors import ItemLost, ProtocolError, UnknownWorker
from aiorpc.options import SHARE_SIZE
from aiorpc.protocol.messages import ObjectMethod
from aiorpc.queues import calls, packing, waiting
from aiorpc.queues.calls import Calls
from aiorpc.queues.client import Client
from aiorpc.queues.items import KEPT_BYTES, KEPT_ITEMS, KeptItem, KeptItems, Taken
from aiorpc.queues.packing import hand_over
from aiorpc.queues.served import HERE, ServedQueue
from aiorpc.queues.waiting import GetFuture
from aiorpc.runtime.callee.answers import Answers
from aiorpc.runtime.caller import reworded
from aiorpc.runtime.calls.current import current_node
from aiorpc.runtime.calls.values import Results, encode
from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.runtime.links.distribution import LOOP_COPY
from aiorpc.testing import Faults, cluster
from aiorpc.types import QueueHandle
from tests.runtime.joining import unheard_of
from tests.runtime.observers import standing_still
from tests.runtime.waiting import until, until_no_references
from tests.transport.ends import interrupted
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
    items, error = client._items(await client.ask("take_items", True, 1, count), None)
    assert error is None
    return items


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


@pytest.mark.parametrize("copy", [True, False])
async def test_the_loop_lends_what_lies_in_shared_memory(
    copy: bool, pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many items at once are handed over without a thread, unless they have to be copied for it."""
    queue, other = make(pair[0]), handle(pair[1])
    memory = pair[1]._node.memory
    items = [torch.full((LOOP_COPY // 2,), number, dtype=torch.uint8) for number in range(6)]

    async def together() -> list[torch.Tensor]:
        await asyncio.gather(*(other.put(item, copy=copy) for item in items))
        return await queue.get_many(6)

    async with asyncio.timeout(LONG):
        while memory.arena.blocks < 6:  # until there is memory for all
            got = await together()
            await asyncio.sleep(0.005)
    del got
    await until(lambda: not memory.arena.used)
    in_threads: list[str] = []
    answer = Answers._answer_buffers

    def noted(self: Answers, *about: Any) -> None:
        in_threads.append(threading.current_thread().name)
        answer(self, *about)

    monkeypatch.setattr(Answers, "_answer_buffers", noted)
    got = await together()
    assert all(map(torch.equal, got, items)) and memory.arena.blocks == 6 == memory.leases
    assert bool(in_threads) is not copy


@pytest.mark.parametrize("copy", [True, False])
async def test_items_that_are_put_together_have_a_reference_together(pair: list[Worker], copy: bool) -> None:
    """As far as their number and their bytes allow; each is got once, and all are there as long as any is wanted."""
    queue, other = make(pair[0]), handle(pair[1])
    values = pair[1]._node.references._values
    small = [torch.full((LARGE,), number, dtype=torch.uint8) for number in range(KEPT_ITEMS + 2)]
    large = [torch.full((KEPT_BYTES // 2,), number, dtype=torch.uint8) for number in range(4)]
    await asyncio.gather(*(other.put(item, copy=copy) for item in [*small, "between", *large]))
    kept = [len(future.value()) for future in values.values()]
    assert kept == [KEPT_ITEMS, 3, 1, 1, 1]
    first, *others = [await queue.get() for _ in small]
    assert torch.equal(first, small[0]) and all(map(torch.equal, others, small[1:]))
    assert await queue.get() == "between"
    got = await queue.get_many(9)
    assert len(got) == 4 and all(map(torch.equal, got, large))
    del first, others, got
    await until_no_references(pair)


async def test_sixteen_items_of_a_megabyte_have_two_references(pair: list[Worker]) -> None:
    """What is packed with each of them has room beside the bytes of eight."""
    queue, other = make(pair[0]), handle(pair[1])
    items = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(16)]
    await put_all(other, items)
    assert [len(future.value()) for future in pair[1]._node.references._values.values()] == [8, 8]
    assert len(await queue.get_many(16)) == 16
    await until_no_references(pair)


async def test_an_item_is_fetched_without_passing_its_reference(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who fetches it holds the reference meanwhile; the worker that has put it is handed none, which it would count."""
    make(trio[0])
    producer, consumer = handle(trio[1]), handle(trio[2])
    loaded: list[Any] = []
    references = trio[1]._node.references
    load = references.load

    def note(*args: Any) -> Any:
        loaded.append(args)
        return load(*args)

    monkeypatch.setattr(references, "load", note)
    await put_all(producer, [torch.full((LARGE,), number) for number in range(3)])
    got = await consumer.get_many(3)
    assert [int(each[0]) for each in got] == [0, 1, 2] and not loaded
    await until_no_references(trio)


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
    for wanted in [(number,), (number, key), (number, key, 1), (number, key, -1)]:
        with pytest.raises(rpc.RpcUsageError, match="hand_over is for items of queues"):
            await consumer.call(hand_over, wanted, None, LONG)
    for undeclared in [(number, key, True), ("a", "b", "c")]:
        with pytest.raises(rpc.errors.ProtocolError, match="Expected `int`, got"):
            await consumer.call(hand_over, undeclared, None, LONG)
    with pytest.raises(rpc.RpcUsageError, match="hand_over is for items of queues"):
        await consumer.call(hand_over, (others_number, others_key, 0), None, LONG)
    with pytest.raises(rpc.RpcError, match="names no value of this worker"):
        await consumer.call(hand_over, (number, key + 1, 0), None, LONG)
    assert len(await consumer.call(hand_over, (number, key, 0), None, LONG)) == 3


async def test_what_may_be_on_a_device_is_kept_by_the_thread_that_puts_it(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams are those that the tensors are ready on. So it is with whatever is put by itself."""
    queue, other = make(pair[0]), handle(pair[1])
    references = pair[1]._node.references
    refer_to, threads = references.refer_to, []

    def note(value: Any) -> Any:
        threads.append(threading.get_ident())
        return refer_to(value)

    monkeypatch.setattr(references, "refer_to", note)

    def put(item: Any) -> None:
        other.put(item).wait()

    with acting(pair[1]):
        items = [[RRef(1)], torch.ones(KEPT_BYTES, dtype=torch.uint8)]
    for item in items:
        await asyncio.to_thread(put, item)
        await queue.get()
    assert len(threads) == 2 and threading.get_ident() not in threads


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


async def test_a_put_that_settles_does_not_wait_for_those_behind_it(pair: list[Worker]) -> None:
    """Several are sent together; the queue has room for one."""
    make(pair[0], maxsize=1)
    mine, other = handle(pair[1]), handle(pair[0])
    puts = [mine.put(number) for number in range(50)]
    for number, put in enumerate(puts):
        await put
        assert await other.get() == number


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


async def test_a_timeout_does_not_take_a_silent_owner_for_an_empty_or_a_full_queue(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected and does not answer: the text leaves that open, and says how to find out."""
    queue, mine = make(pair[0]), handle(pair[1])
    await mine.put("an item")
    goes_on = asyncio.Event()

    async def nothing_put(self: ServedQueue, *_: Any) -> int:
        await goes_on.wait()
        return 0

    async def nothing_taken(self: ServedQueue, *_: Any) -> Results:
        await goes_on.wait()
        return Results((HERE, None))

    with monkeypatch.context() as patched:
        patched.setattr(ServedQueue, "put_items", nothing_put)
        patched.setattr(ServedQueue, "take_items", nothing_taken)
        for verb, future in (("get", mine.get(timeout=0.05)), ("put", mine.put(1, timeout=0.05))):
            with pytest.raises(RpcTimeout) as raised:
                await future
            assert "or worker 'worker0' is busy or stopped, as it is connected and has not" in str(raised.value)
            assert "`await rpc.queue('q', owner='worker0').qsize()`" in str(raised.value)
            assert (raised.value.worker, raised.value.function) == ("worker0", f"q.{verb}")
        goes_on.set()
        await until(pair[1]._node.is_idle)
    assert await mine.get() == "an item" and await queue.empty()


async def test_what_is_not_to_wait_does_not_wait_for_ever_for_an_owner_that_is_silent(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the handle bounds it, as it does all else; the item that comes later stays in the queue."""
    queue, mine = make(pair[0]), handle(pair[1], timeout=0.05)
    await queue.put("an item")
    goes_on, take = asyncio.Event(), ServedQueue.take_items

    async def nothing_put(self: ServedQueue, *_: Any) -> int:
        await goes_on.wait()
        return 0

    async def taken_late(self: ServedQueue, *said: Any) -> Results:
        await goes_on.wait()
        return await take(self, *said)

    with monkeypatch.context() as patched:
        patched.setattr(ServedQueue, "put_items", nothing_put)
        patched.setattr(ServedQueue, "take_items", taken_late)
        for verb, future in (("get", mine.get_nowait()), ("put", mine.put_nowait(1))):
            with pytest.raises(RpcTimeout, match=r"has not answered for 0\.05 s: worker 'worker0' is busy") as raised:
                await asyncio.wait_for(future, LONG)
            assert (raised.value.worker, raised.value.function) == ("worker0", f"q.{verb}")
        goes_on.set()
        await until(pair[1]._node.is_idle)
        await until(lambda: queue._served._items)
    assert await queue.get() == "an item" and await queue.empty()


async def test_who_has_given_up_leaves_also_where_the_owner_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits a while for the answer, with which items may come that go back; an owner that is stopped gives none."""
    options = [RpcBackendOptions(dedicated_loop=True), RpcBackendOptions()]
    async with cluster(2, dynamic=True, options=options) as (owner, other):
        make(owner)
        mine = handle(other, timeout=0.05)
        assert await handle(other).empty()
        other._node.engine.bounds = Bounds(given_up=0.05)
        monkeypatch.setattr(other._node.engine, "default_timeout", 0.05)
        with standing_still(owner):
            futures = [mine.get(timeout=0.05), mine.put(1, timeout=0.05), mine.get_nowait(), mine.put_nowait(2)]
            for error in await asyncio.gather(*futures, return_exceptions=True):
                assert isinstance(error, RpcTimeout)
            assert other.pending_calls()
            assert await asyncio.wait_for(other.shutdown(), LONG) == rpc.types.ShutdownReport()


async def test_a_timeout_says_that_the_owner_was_not_reached(free: list[Worker]) -> None:
    """It is not known whether its queue is full or has no item, as no worker of that name has joined."""
    nobody = handle(free[1], owner="nobody", timeout=0.05)
    for verb, future in (("get", nobody.get()), ("put", nobody.put(1))):
        with pytest.raises(RpcTimeout, match=r"queue 'q' of worker 'nobody' has not answered for 0\.05 s") as raised:
            await future
        assert "no worker of that name has joined" in str(raised.value)
        assert (raised.value.worker, raised.value.function) == ("nobody", f"q.{verb}")


async def test_a_timeout_tells_of_the_owner_that_was_lost(free: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name has had a worker, and whether another one has taken it is still looked for as the time is up."""
    make(free[0])
    mine = handle(free[1], timeout=0.05)
    await mine.put(1, timeout=LONG)
    await free[0]._drop()
    await until(lambda: free[1]._node.peers._peers["worker0"].gone is not None)
    looks, found = free[1]._node.rendezvous.members, threading.Event()

    def look_for_long() -> Any:
        found.wait(LONG)
        return looks()

    monkeypatch.setattr(free[1]._node.rendezvous, "members", look_for_long)
    try:
        for future in (mine.put(1), mine.put(torch.ones(LARGE)), mine.get()):
            with pytest.raises(RpcTimeout, match=r"has not answered for 0\.05 s: worker0 .* was lost: .*not known yet"):
                await future
    finally:
        found.set()


@pytest.mark.parametrize("silent", [False, True])
async def test_all_who_wait_to_put_hear_at_once_that_the_owner_is_away(
    silent: bool, free: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those alone whose items were under way: nobody is asked for the others, who would wait for that once more."""
    make(free[0], maxsize=1)
    mine = handle(free[1], owner="nobody" if silent else "worker0", timeout=0)
    if silent:  # the store, so that nobody can be found
        mine._client()._most = 1

        def cannot_look() -> Any:
            raise rpc.errors.StoreGone("the store has gone")

        monkeypatch.setattr(free[1]._node.rendezvous, "members", cannot_look)
        puts = [mine.put(number) for number in range(5)]
    else:
        await mine.put(0)
        first = mine.put(1)
        await served(free[0], "put_items")
        puts = [first, *(mine.put(number) for number in range(2, 6))]
        await free[0]._drop()
    errors = await asyncio.gather(*puts, return_exceptions=True)
    assert type(errors[0]) is (rpc.errors.RendezvousError if silent else PeerLost)
    assert all(error is errors[0] for error in errors), "another call was made for some of them"


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


@pytest.mark.parametrize("large", [False, True])
async def test_what_nobody_has_given_up_waits_on_for_the_owner(large: bool) -> None:
    """Though what was to be sent together with it is taken back: that is neither in the queue, nor takes an item."""
    items = [torch.full((LARGE if large else 1,), number) for number in range(3)]
    store = HashStore()
    served_later = ServedQueue("q", 0, "owner", 1 << 20)
    async with cluster(1, dynamic=True, store=store, options=RpcBackendOptions(rpc_timeout=LONG)) as (worker,):
        mine = handle(worker, owner="owner")
        puts = [mine.put(item, timeout=0.05 if number == 1 else LONG) for number, item in enumerate(items)]
        gets = [asyncio.ensure_future(mine.get(timeout=0.05 if number == 0 else LONG)) for number in range(2)]
        for given_up in (puts.pop(1), gets.pop(0)):
            with pytest.raises(RpcTimeout):
                await given_up
        again = asyncio.ensure_future(mine.get())
        owner = Worker("owner", store=store)
        owner.serve("q", served_later)
        async with owner:
            await asyncio.gather(*puts)
            assert [int((await get)[0]) for get in (gets[0], again)] == [0, 2]
            assert await mine.empty()


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
            assert not mine._client()._asking
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


async def test_a_timeout_names_the_producer_that_did_not_hand_over(
    free: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was an item, which goes back into the queue when it comes."""
    make(free[0])
    await handle(free[1]).put(torch.ones(LARGE))
    mine = handle(free[2])
    held: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(Calls, "fetch", lambda *call: held.append(call))
        timeout = 0.05
        while not held:  # the time has to be long enough for the item to be taken
            with pytest.raises(RpcTimeout) as raised:
                await mine.get(timeout=timeout)
            timeout *= 2
    assert "'worker1' did not hand over within" in str(raised.value)
    assert (raised.value.worker, raised.value.function) == ("worker1", "q.get")
    (call,) = held
    Calls.fetch(*call)
    assert (await mine.get()).sum() == LARGE


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


@pytest.fixture
def at_settling(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[GetFuture], object]]:
    """What is done to a `get` that has just been given its items, before anybody who waits for it runs."""
    todo: list[Callable[[GetFuture], object]] = []
    finish_with = GetFuture.finish_with

    def noted(self: GetFuture, value: Any, items: Sequence[Any]) -> bool:
        given = finish_with(self, value, items)
        while todo:
            todo.pop()(self)
        return given

    monkeypatch.setattr(GetFuture, "finish_with", noted)
    return todo


async def awaited(future: rpc.Future[Any]) -> Any:
    return await future


@pytest.mark.parametrize("count", [1, 2])
async def test_who_is_cancelled_as_the_item_comes_leaves_no_value_behind(
    pair: list[Worker], at_settling: list[Callable[[GetFuture], object]], count: int
) -> None:
    """The item goes back into the queue once all tasks are cancelled, and the Future does not give it any more."""
    queue, mine = make(pair[0]), handle(pair[1])
    get = mine.get()
    tasks = [asyncio.ensure_future(awaited(get)) for _ in range(count)]
    await until(lambda: get._waiters == count)
    at_settling.append(lambda _: [task.cancel() for task in tasks])
    await queue.put(count)
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
    for look in (get.value, super(rpc.Future, get).value):
        with pytest.raises(rpc.RpcCancelled, match="went back into the queue"):
            look()
    with pytest.raises(rpc.RpcCancelled):
        await get
    assert get.cancelled() and await mine.get() == count


@pytest.mark.parametrize("other", ["task", "thread", "callback", "value"])
async def test_an_item_that_somebody_else_takes_does_not_go_back(
    other: str, pair: list[Worker], at_settling: list[Callable[[GetFuture], object]]
) -> None:
    """A task is cancelled as the item comes, and another task waits for it, or a thread, or a callback; or has it."""
    queue, mine = make(pair[0]), handle(pair[1])
    get, called = mine.get(), asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(awaited(get))
    await until(lambda: get._waiters == 1)
    at_settling.append(lambda _: task.cancel())
    taken: asyncio.Future[Any]
    if other == "task":
        taken = asyncio.ensure_future(awaited(get))
    elif other == "thread":
        taken = asyncio.ensure_future(asyncio.to_thread(get.wait))
    else:
        taken = called
        loop = asyncio.get_running_loop()
        if other == "callback":
            get.add_done_callback(lambda done: loop.call_soon_threadsafe(called.set_result, done.value()))
        else:
            at_settling.append(lambda get: called.set_result(get.value()))
    await until(lambda: other == "value" or get._waiters == 2)
    await queue.put("first")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await taken == "first" == get.value()
    await queue.put("second")
    assert await mine.get() == "second"


async def test_a_thread_whose_time_is_up_leaves_the_get_to_those_who_still_wait(pair: list[Worker]) -> None:
    """It is given up when nobody waits for it any more."""
    queue, mine = make(pair[0]), handle(pair[1])
    get = mine.get()
    task = asyncio.ensure_future(awaited(get))
    await until(lambda: get._waiters == 1)
    with pytest.raises(RpcTimeout):
        await asyncio.to_thread(get.wait, 0.01)
    assert not get.done()
    await queue.put("here")
    assert await task == "here"


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


async def test_what_a_thread_gives_up_before_the_loop_has_begun_it_is_not_put(pair: list[Worker]) -> None:
    """Whether it was to wait for room or not."""
    queue, mine = make(pair[0]), handle(pair[1])

    def give_up() -> list[bool]:
        return [put.cancel() for put in (mine.put(1), mine.put_nowait(2))]

    thread = threading.Thread(target=lambda: given_up.extend(give_up()))
    given_up: list[bool] = []
    thread.start()
    thread.join(LONG)  # the loop, which is this thread's, begins nothing meanwhile
    assert given_up == [True, True]
    await mine.put(3)
    assert await queue.get_many(3) == [3]


async def test_what_was_given_up_is_not_kept_behind_a_get_that_waits(pair: list[Worker]) -> None:
    """Somebody may wait without a limit, while others look now and then."""
    make(pair[0])
    mine = handle(pair[1])
    waits = asyncio.ensure_future(mine.get(timeout=0))
    await served(pair[0], "take_items")
    given_up = weakref.WeakSet[Any]()
    for _ in range(3):
        look = mine.get(timeout=0.01)
        given_up.add(look)
        with pytest.raises(RpcTimeout):
            await look
        del look

    def are_gone() -> bool:
        gc.collect()
        return not given_up

    await until(are_gone)
    await mine.put("here")
    assert await waits == "here"


@pytest.mark.parametrize("verb", ["put", "put_nowait", "get"])
async def test_who_puts_or_gets_as_its_worker_ends_hears_of_it(
    verb: str, pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the worker's loop has stopped between the look whether it is open and what was to be done there."""
    ending = await Worker("ending", store=HashStore(), options=RpcBackendOptions(dedicated_loop=True))
    mine = handle(ending, owner="ending")
    client = mine._client()
    run_on_loop = client.node.engine.run_on_loop

    def end_first(function: Callable[..., object], *args: Any) -> None:
        asyncio.run(ending.shutdown())
        run_on_loop(function, *args)

    def use() -> str:
        future = mine.get() if verb == "get" else getattr(mine, verb)(1)
        try:
            future.wait(LONG)
        except rpc.WorkerClosed as error:
            return str(error)
        return "nothing"

    monkeypatch.setattr(client.node.engine, "run_on_loop", end_first)
    assert "shut down" in await asyncio.to_thread(use)


async def test_who_may_not_wait_at_all_gives_up_what_it_puts(pair: list[Worker]) -> None:
    """`asyncio.timeout(0)` begins to wait, and so it ends it; `asyncio.wait_for` with 0 never does."""
    make(pair[0], maxsize=1)
    mine = handle(pair[1])
    await mine.put("there")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await mine.put("given up")
    assert await mine.get() == "there"
    with pytest.raises(QueueEmpty):
        await mine.get_nowait()


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
    async with contextlib.aclosing(free[0]._node.news.listen()) as news:
        await free[1].shutdown()
        await anext(news)
    await works.task_done(2)
    assert not join.done()
    assert await works.get() == 7
    await works.task_done(2)
    await join
    await queue.join()


async def test_who_joins_is_told_of_the_last_workers_that_took_items_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many, as a queue that nobody joins must not remember all that ever came and went."""
    monkeypatch.setattr("aiorpc.queues.served.MOST_TOLD", 2)
    async with cluster(4, dynamic=True) as workers:
        queue = make(workers[0])
        for worker in workers[1:]:
            await queue.put(1)
            await handle(worker).get()
        join = queue.join()
        for worker in workers[1:]:
            await worker.shutdown()
        told = set()
        for each in (join, queue.join()):
            with pytest.raises(ItemLost) as raised:
                await each
            told.add(raised.value.worker)
        assert told == {"worker2", "worker3"}
        await queue.join()


@pytest.mark.parametrize("way", ["cancelled as it is sent", "cancelled as it comes", "late"])
async def test_a_loss_that_nobody_has_heard_is_told_once_more(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joined was there no more as the owner told it; what was heard is told once."""
    tell = ServedQueue.join_items

    @functools.wraps(tell)
    async def join_items(self: ServedQueue, *args: Any) -> None:
        try:
            await tell(self, *args)
        except ItemLost:
            if way == "cancelled as it is sent":
                waits.cancel()
            elif way == "late":
                with contextlib.suppress(asyncio.CancelledError):
                    await until(joined.done)
            raise

    async def hear(join: Any) -> None:
        await join

    def give_up(_: Any) -> None:
        waits.cancel()

    monkeypatch.setattr(ServedQueue, "join_items", join_items)
    async with cluster(3, dynamic=True) as workers:
        queue, mine, taker = make(workers[0]), handle(workers[1]), handle(workers[2])
        await queue.put(1)
        await taker.get()
        joined = mine.join(timeout=0.5 if way == "late" else LONG)
        waits = asyncio.ensure_future(hear(joined))
        if way == "cancelled as it comes":
            joined._when_settled(give_up)
        await until(lambda: len(queue._served._joiners) == 1)
        queue._served._on_gone(workers[2].info)
        with pytest.raises(RpcTimeout if way == "late" else asyncio.CancelledError):
            await waits
        monkeypatch.undo()
        await until(lambda: queue._served._taken_along)
        with pytest.raises(ItemLost, match=r"1 items of queue 'q' .* got by worker 'worker2'"):
            await mine.join()
        await mine.join()


async def test_an_owner_that_leaves_waits_for_nobody_who_joins() -> None:
    """As it waits for nobody who puts and gets: in a group without a size it would stay for as long as they wait."""
    async with cluster(2, dynamic=True) as workers:
        make(workers[0])
        mine = handle(workers[1])
        await mine.put(1)
        join = mine.join(timeout=0)
        await served(workers[0], "join_items")
        async with asyncio.timeout(LONG):
            assert not (await workers[0].shutdown()).timed_out
        with pytest.raises(PeerLeft):
            await join


async def test_as_many_join_as_may_wait() -> None:
    """Of one worker, with those that put and get."""
    async with cluster(2, options=RpcBackendOptions(max_queued_calls=2)) as workers:
        queue = make(workers[0])
        mine = handle(workers[1])
        await mine.put(1)
        joins = [mine.join() for _ in range(2)]
        await until(lambda: len(queue._served._joiners) == 2)
        with pytest.raises(Overloaded, match=r"2 calls of worker 'worker1' wait at queue 'q'"):
            await mine.join()
        assert await mine.get() == 1
        await mine.task_done()
        await asyncio.gather(*joins)
        await mine.join()


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


async def test_what_comes_back_after_shutdown_at_once_is_dropped(pair: list[Worker]) -> None:
    """It is not there to be got, and nobody who joins waits for it."""
    queue, mine = make(pair[0]), handle(pair[1])
    await put_all(queue, ["first", "second", "third"])
    peer = pair[1]._node.peers.find("worker0")
    _, tickets, _, *items = await peer.call(ObjectMethod("q", "take_items"), (True, 1, 2), None, LONG)
    join = mine.join()
    await served(pair[0], "join_items")
    await queue.shutdown(immediate=True)
    await peer.call(ObjectMethod("q", "return_items"), (tickets, *items), None, LONG)
    await join
    assert await queue.empty()
    with pytest.raises(QueueShutDown):
        await mine.get()


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


async def test_who_joins_a_queue_whose_owner_has_not_come_is_told_so(free: list[Worker]) -> None:
    """It is not known then whether there are items."""
    with pytest.raises(RpcTimeout, match=r"^queue 'q' of worker 'late' has not answered for 0.05 s: no worker of that"):
        await handle(free[0], owner="late").join(timeout=0.05)


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


@pytest.mark.parametrize("got", [0, 1])
async def test_a_queue_that_is_closed_lets_go_of_those_who_join(pair: list[Worker], got: int) -> None:
    """What was got can be finished no more; what was not got is gone, and nobody waits for that."""
    with make(pair[0]) as queue:
        mine = handle(pair[1])
        await put_all(queue, [1, 2])
        for _ in range(got):
            await mine.get()
        joins = [queue.join(timeout=0), mine.join(timeout=0)]
        await until(lambda: len(queue._served._joiners) == 2)
    await until(lambda: all(join.done() for join in joins))
    for join in joins:
        if got:
            with pytest.raises(QueueShutDown, match=r"was closed before all was finished.*1 of its items"):
                await join
        else:
            await join


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


async def test_items_of_a_producer_that_was_never_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there; and if it cannot be found any more, its name is told, which the owner of the queue knows."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers, unheard_of("late", store) as late:
        make(workers[0])
        mine = handle(workers[1])
        await put_all(handle(late), [torch.ones(LARGE), torch.ones(LARGE)])
        with monkeypatch.context() as patched:
            patched.setattr(workers[1]._node.rendezvous, "members", list)  # as once it is off the list
            with pytest.raises(ItemLost, match=r"an item of queue 'q' .* went with worker 'late'") as raised:
                await mine.get()
        assert raised.value.worker == "late"
        assert (await mine.get()).sum() == LARGE
        await mine.task_done()
        await mine.join()
        await until_no_references([*workers, late])


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


async def test_a_loss_that_is_told_as_its_waiter_is_cancelled_is_told_to_the_next_one(free: list[Worker]) -> None:
    """Once, as an item that comes in that moment is given once."""
    make(free[0])
    other = handle(free[2])
    await put_all(handle(free[1]), [torch.ones(LARGE)])
    await free[1].shutdown()
    get = other.get()

    async def wait() -> None:
        await get

    waiting = asyncio.ensure_future(wait())
    while not get.done():  # noqa: ASYNC110  # in that turn of the loop
        await asyncio.sleep(0)
    assert waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(rpc.RpcCancelled, match="cancelled as a loss was told"):
        await get
    with pytest.raises(ItemLost, match="went with worker 'worker1'"):
        await other.get()
    with pytest.raises(rpc.QueueEmpty):
        await other.get_nowait()


async def test_a_producer_that_leaves_takes_along_what_it_kept(free: list[Worker]) -> None:
    """In good order or not makes no difference; it is told at once, also by `get_nowait`."""
    queue = make(free[0])
    other = handle(free[2])
    await put_all(handle(free[1]), [torch.ones(LARGE), torch.ones(LARGE)])
    await free[1].shutdown()
    with pytest.raises(ItemLost, match="went with worker 'worker1'"):
        await other.get_nowait()
    with pytest.raises(ItemLost, match="went with worker 'worker1'"):
        await queue.get()
    await queue.join()
    await until_no_references([free[0], free[2]])


async def test_an_item_that_cannot_be_taken_where_it_is_got_is_lost_for_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its producer, which has handed it over, is not said to have failed."""
    size, empty = 2_000_003, numpy.empty

    def allocate(size_of: Any, *args: Any, **options: Any) -> Any:
        if isinstance(size_of, int) and size < size_of < size + 4096:
            raise MemoryError("no room here")
        return empty(size_of, *args, **options)

    async with cluster(3, options=RpcBackendOptions(shared_memory=0, transports=("tcp",))) as workers:
        queue, mine = make(workers[0]), handle(workers[2])
        item = torch.ones(size, dtype=torch.uint8)
        await handle(workers[1]).put([item])
        assert torch.equal((await mine.get())[0], item)
        link = workers[2]._node.peers.find("worker1").link
        await until(lambda: link is not None and link.pipe is not None)  # behind the frames, where one alone fails
        await put_all(handle(workers[1]), [[item], "next"])
        with monkeypatch.context() as patched:
            patched.setattr(numpy, "empty", allocate)
            assert await mine.get_many(2) == ["next"]
            with pytest.raises(ItemLost) as raised:
                await mine.get()
        text = str(raised.value)
        assert "worker 'worker1' has handed it over, and worker 'worker2' cannot take it: " in text
        assert "no room here" in text and "cannot hand it over" not in text
        assert (raised.value.worker, raised.value.count) == ("worker1", 1)
        await queue.task_done(2)
        await queue.join()


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


async def test_who_waits_in_vain_for_a_producer_hears_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the time of the call for the item is over, and not that of the `get`: the item goes back, which it is told."""
    options = [RpcBackendOptions(), RpcBackendOptions(), RpcBackendOptions(rpc_timeout=0.2)]
    async with cluster(3, options=options) as workers:
        make(workers[0])
        await handle(workers[1]).put(torch.ones(LARGE))
        mine = handle(workers[2])
        with monkeypatch.context() as patched:
            patched.setattr(calls, "hand_over", stay)
            with pytest.raises(RpcTimeout) as raised:
                await mine.get()
        text = str(raised.value)
        assert "worker 'worker1' did not hand over within 0.2 s (rpc_timeout) what was taken from queue 'q'" in text
        assert "of worker 'worker0'" in text and "A later `get` finds it" in text and "stay" not in text
        assert (raised.value.worker, raised.value.function, raised.value.seconds) == ("worker1", "q.get", 0.2)
        assert (await handle(workers[0]).get()).sum() == LARGE
        await until_no_references(workers)


@pytest.mark.parametrize("error", [rpc.Overloaded("not now"), RpcTimeout("not in time")])
async def test_an_item_that_is_not_handed_over_now_stays_in_the_queue(
    error: Exception, trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its producer lives; `get` raises why, and `get_many` gives what there is. Later somebody gets it."""
    queue, mine = make(trio[0]), handle(trio[2])
    await put_all(handle(trio[1]), [torch.ones(LARGE), "small"])

    def refuse(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(packing, "kept_of", refuse)
        with pytest.raises(type(error), match="not"):
            await mine.get()
        with pytest.raises(type(error), match="not"):
            await queue.get_nowait()
        assert await mine.get_many(2) == ["small"]
    assert (await handle(trio[1]).get()).sum() == LARGE
    await queue.task_done(2)
    await queue.join()
    await until_no_references(trio)


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


async def test_an_item_that_cannot_be_handed_over_takes_no_other_along(trio: list[Worker]) -> None:
    """Those that are fetched together with it from the same producer are got all the same."""
    queue, other, mine = make(trio[0]), handle(trio[1]), handle(trio[2])
    broken: list[Any] = [torch.ones(LARGE)]
    await other.put(torch.full((LARGE,), 2.0))
    await other.put(broken, copy=False)
    broken.append(iter_nothing())
    await other.put(torch.full((LARGE,), 3.0))
    assert [int(each[0]) for each in await mine.get_many(5)] == [2, 3]
    with pytest.raises(ItemLost, match=r"an item of .* is lost, as worker 'worker1', .*generator") as raised:
        await mine.get()
    assert (raised.value.worker, raised.value.count) == ("worker1", 1)
    await queue.task_done(2)
    await queue.join()
    await until_no_references(trio)


async def test_a_loss_is_not_told_to_a_get_that_was_given_up(pair: list[Worker]) -> None:
    """Before it began: the next one hears of it."""
    queue, other = make(pair[0]), handle(pair[1])
    broken: list[Any] = [torch.ones(LARGE)]
    await other.put(broken, copy=False)
    broken.append(iter_nothing())
    await other.put("here")
    assert await queue.get_many(2) == ["here"]
    given_up = queue.get()
    assert given_up.cancel()
    with pytest.raises(rpc.RpcCancelled):
        await given_up
    with pytest.raises(ItemLost):
        await queue.get()


async def test_items_that_an_owner_does_not_take_back_now_are_given_back_later(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that has too many calls loses none."""
    queue, mine = make(pair[0]), handle(pair[1])
    return_items = ServedQueue.return_items
    tries: list[Any] = []

    async def refuse_first(self: ServedQueue, *said: Any) -> None:
        tries.append(said)
        if len(tries) < 3:
            raise rpc.Overloaded("not now")
        await return_items(self, *said)

    monkeypatch.setattr(ServedQueue, "return_items", refuse_first)
    await queue.put("here")
    client = mine._client()
    client.node.engine.call_on_loop(client.put_back, await taken(client, 1))
    assert await mine.get() == "here" and len(tries) == 3


async def test_what_was_put_back_or_finished_is_not_told_again_where_its_answer_finds_no_room(
    pair: list[Worker],
) -> None:
    """An owner that has done it says so: else an item would be there twice, or would count as finished twice."""
    queue, mine = make(pair[0]), handle(pair[1])
    for each in range(3):
        await queue.put(each)
    client = mine._client()
    _, second = await taken(client, 2)
    (service,) = [each for each in pair[0]._node.services if each.record.name == "worker1"]
    service._backlog.limit = -1  # whatever is said to that one is too much
    with pytest.raises(rpc.Overloaded):
        await mine.qsize()
    await client.ask("return_items", second.ticket, second.item)
    await mine.task_done()
    assert (await queue.qsize(), queue._unfinished()) == (2, 2)
    assert [await queue.get(), await queue.get()] == [1, 2]


async def test_who_joins_is_told_of_a_loss_although_little_else_is_told(free: list[Worker]) -> None:
    """Nobody else would be: the next one who joins hears nothing of it."""
    queue, mine, other = make(free[0]), handle(free[1]), handle(free[2])
    await queue.put("here")
    assert await other.get() == "here"
    await free[2]._drop()
    await until(lambda: not queue._unfinished())
    (service,) = [each for each in free[0]._node.services if each.record.name == "worker1"]
    service._backlog.limit = -1  # whatever is said to that one is too much
    with pytest.raises(ItemLost, match="worker2"):
        await mine.join()


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


async def test_the_same_handle_finds_the_queue_of_a_worker_that_takes_the_name() -> None:
    """As any object with a name."""
    store = HashStore()
    async with Worker("user", store=store) as user:
        for item in ("first", "second"):
            async with Worker("owner", store=store) as owner:
                make(owner)
                mine = handle(user, owner="owner")
                await mine.put(item)
                assert await mine.get() == item


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


async def test_who_may_only_put_or_only_get_gives_up_as_others_do() -> None:
    """What ends it needs no rule of its own: what was given up is not put later, and no item is lost."""
    allow = {"actor": "queue/q:put", "reader": "queue/q:get", "": "*"}
    options = RpcBackendOptions(allow=allow)
    async with cluster(4, options=options, roles=["", "actor", "reader", "other"]) as workers:
        queue = make(workers[0], maxsize=1)
        puts, gets = handle(workers[1]), handle(workers[2])
        with pytest.raises(RpcTimeout, match="has had no item"):
            await gets.get(timeout=0.05)
        await until(lambda: not queue._served._waiting)
        await puts.put("first")
        with pytest.raises(RpcTimeout, match="has been full"):
            await puts.put("late", timeout=0.05)
        await until(lambda: not queue._served._waiting)
        assert await gets.get() == "first"
        await puts.put("second")
        client = gets._client()
        client.node.engine.call_on_loop(client.put_back, await taken(client, 1))  # as if cancelled as it came
        assert await gets.get() == "second"
        await gets.task_done(2)
        await queue.join()
        other = handle(workers[3])
        for who, method in ((puts, "return_items"), (puts, "finish_items"), (other, "tell_again"), (other, "withdraw")):
            with pytest.raises(rpc.NotAllowed, match="queue/q:"):
                await who._client().ask(method, 1)


LOCK = threading.Lock()


def main_function() -> int:
    """Of the main module, as far as pickles see it."""
    return 42


def with_lock() -> bool:
    """As that; it cannot travel by value."""
    return LOCK.locked()


class Weighted:
    """As those; its tensor travels with it, where it goes by value."""

    weights = torch.full((2_000,), 2.0)

    def __init__(self) -> None:
        self.mine = torch.full((LARGE,), 3.0)


@pytest.fixture
async def scripts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    """Three workers in a group without a size, of which "other" says that it runs another main module."""
    module = sys.modules["__main__"]
    each: Any
    for each in (main_function, with_lock, Weighted):
        monkeypatch.setattr(each, "__module__", "__main__")
        monkeypatch.setattr(module, each.__name__, each, raising=False)
    store, options = HashStore(), RpcBackendOptions(rpc_timeout=LONG)
    async with (
        rpc.init("first", store=store, options=options) as first,
        rpc.init("twin", store=store, options=options) as twin,
    ):
        monkeypatch.setattr("aiorpc.runtime.life.main_identity", lambda: "file:another")
        async with rpc.init("other", store=store, options=options) as other:
            yield [first, twin, other]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("owner", ["twin", "other"])
async def test_what_the_main_module_defines_goes_by_name_where_that_is_run_and_else_by_value(
    owner: str, kept: bool, scripts: list[Worker]
) -> None:
    """Whoever gets the item, and whatever the owner of its queue runs."""
    first, twin, other = scripts
    make(twin if owner == "twin" else other)
    item = (main_function, torch.ones(LARGE if kept else 1))
    for reader in scripts:
        await handle(first, owner=owner).put(item)
        function, tensor = await handle(reader, owner=owner).get()
        assert (function is main_function) == (reader is not other)
        assert function() == 42 and torch.equal(tensor, item[1])


async def test_a_class_that_travels_by_value_brings_its_own_tensors(scripts: list[Worker]) -> None:
    """The forms of its instance have other tensors then, and each has its own in the item."""
    first, twin, other = scripts
    make(twin)
    for reader in (twin, other):
        await handle(first, owner="twin").put(Weighted())
        got = await handle(reader, owner="twin").get()
        assert torch.equal(got.mine, torch.full((LARGE,), 3.0)) and torch.equal(got.weights, torch.full((2_000,), 2.0))


async def test_what_cannot_travel_by_value_is_for_those_with_the_same_main_module(scripts: list[Worker]) -> None:
    """Another one is told why it cannot read the item; a queue whose owner is such a one does not take it."""
    first, twin, other = scripts
    make(twin)
    make(other, "elsewhere")
    mine = handle(first, owner="twin")
    await put_all(mine, [with_lock, with_lock])
    assert await handle(first, owner="twin").get() is with_lock
    with pytest.raises(ItemLost, match=r"runs another main module.*by value the item \(a function\).*lock"):
        await handle(other, owner="twin").get()
    with pytest.raises(
        rpc.errors.SerializationError, match=r"an item for queue 'elsewhere' of worker 'other' \(a function\)"
    ):
        handle(first, "elsewhere", "other").put(with_lock)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was encoded as an item of a queue, once for each time."""
    times: list[Any] = []

    def note(kind: Any, head: Any, values: list[Any], *args: Any, **options: Any) -> Any:
        times.extend(values)
        return encode(kind, head, values, *args, **options)

    monkeypatch.setattr("aiorpc.queues.packing.encode", note)
    return times


async def test_only_what_names_the_main_module_is_packed_twice(scripts: list[Worker], encoded: list[Any]) -> None:
    """All other items cost what they cost before; tensors are in an item once, whatever else is in it."""
    first, twin, _ = scripts
    queue = make(twin)
    plain = [1, {"a": [2.0]}, torch.ones(3), [torch.ones(LARGE)], threading.Thread, torch.device("cpu")]
    await put_all(handle(first, owner="twin"), plain)
    assert len(encoded) == len(plain)
    assert [type(each) for each in await queue.get_many(len(plain))] == [*map(type, plain)]
    await handle(first, owner="twin").put("load_main")
    assert await queue.get() == "load_main"
    await handle(first, owner="twin").put([main_function, torch.ones(LARGE)])
    (kept,) = [future.value() for future in first._node.references._values.values()]
    assert kept[0].size < 1.1 * 4 * LARGE
    await queue.get()


@pytest.mark.parametrize("other", ["one script", "another script"])
async def test_in_a_group_of_fixed_size_it_depends_on_its_members(
    other: str, encoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of them run the same main module nobody needs what it defines by value."""
    mains = iter(["one script", other])
    monkeypatch.setattr("aiorpc.runtime.life.main_identity", lambda: next(mains))
    monkeypatch.setattr(main_function, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "main_function", main_function, raising=False)
    async with cluster(2) as workers:
        queue = make(workers[0])
        await handle(workers[1]).put(main_function)
        assert len(encoded) == (1 if other == "one script" else 2)
        assert (await queue.get() is main_function) == (other == "one script")


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
        ("put_items", (True, 1, b"x" * 100_000)),
        ("put_items", (True, 1)),
        ("take_items", (True, 1, 0)),
        ("take_items", (True, 1, 1 << 40)),
        ("put_items", (True, 1, 0)),
        ("put_items", (True, 1, RRef(1), 16)),
        ("put_items", (True, 1, RRef(1), -1)),
        ("put_items", (True, 1, b"", RRef(1))),
        ("return_items", (bytes(16), b"never taken")),
        ("return_items", (bytes(16), 5)),
        ("return_items", (bytes(17), b"never taken")),
        ("return_items", (b"",)),
        ("finish_items", (-1,)),
    ]
    undeclared: list[tuple[str, tuple[Any, ...]]] = [
        ("put_items", (True, 1, "text")),
        ("put_items", (1, 1, b"")),
        ("take_items", (True, "1", 1)),
        ("take_items", (True, 1, 1, "worker1")),
        ("withdraw", ([1],)),
        ("shut_down", ()),
    ]
    for args, expected in ((nonsense, rpc.RpcUsageError), (undeclared, rpc.errors.ProtocolError)):
        for method, said in args:
            with pytest.raises(expected):
                await peer.call(ObjectMethod("q", method), said, None, LONG)
    assert await queue.qsize() == 0
    await peer.call(ObjectMethod("q", "put_items"), (True, 1, b"no item"), None, LONG)
    await handle(pair[1]).put("an item")
    with pytest.raises(ItemLost, match="cannot be read here"):
        await queue.get()
    assert await queue.get() == "an item"
    await queue.task_done()
    for reference, place in (
        (pair[1]._node.references.refer_to(5), 0),
        (pair[1]._node.references.refer_to(KeptItems([KeptItem(None)])), 1),
    ):
        await peer.call(ObjectMethod("q", "put_items"), (True, 1, reference, place), None, LONG)
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
        await mine._client().ask(back, bytes(16), b"forged")
    first, second, _, large = items = await taken(mine._client(), 4)
    reference = large.item.reference
    forged = [
        (first.ticket, b"forged"),
        (second.ticket, first.item),
        (second.ticket[:8] + first.ticket[8:], first.item),
        (b"\xff" * 8 + first.ticket[8:], first.item),
        (2 * first.ticket, first.item, first.item),
        (large.ticket, reference, large.item.place + 1),
        (large.ticket, kept, 0),
        (large.ticket, first.item),
        (first.ticket, reference, 0),
        (first.ticket + bytes(16), first.item, second.item),
        (bytes(16), first.item),
    ]
    for said in forged:
        with pytest.raises(rpc.RpcUsageError, match="not given to worker 'worker1'"):
            await mine._client().ask(back, *said)
    assert await queue.empty()
    await mine._client().ask(back, first.ticket, first.item)
    with pytest.raises(rpc.RpcUsageError, match="is back already"):
        await mine._client().ask(back, first.ticket, first.item)
    assert await other.get() == 1 and await queue.empty()
    with pytest.raises(rpc.RpcUsageError, match="not given to worker 'worker2'"):
        await other._client().ask(back, second.ticket, second.item)
    mine._client().node.engine.call_on_loop(mine._client().put_back, items[1:])
    assert [await other.get(), await other.get(), (await other.get()).sum()] == [2, 3, LARGE]
    await other.task_done(4)
    with pytest.raises(rpc.RpcUsageError, match="items are put back"):
        await other._client().ask(back, first.ticket, first.item)
    await queue.join()


async def test_only_its_own_items_are_said_to_be_kept_by_a_producer(trio: list[Worker]) -> None:
    """A worker that names what another one keeps puts nothing: that other one would be said to have put it."""
    queue, mine, other = make(trio[0]), handle(trio[1]), handle(trio[2])
    await mine.put(torch.ones(LARGE))
    (large,) = await taken(other._client(), 1)
    with pytest.raises(rpc.RpcUsageError, match="takes items as"):
        await other._client().ask("put_items", True, 1, large.item.reference, large.item.place)
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
    assert await good.call(ObjectMethod("q", "put_items"), (True, 7, b"item"), None, LONG) == 0
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


# --- signal handlers that raise ---------------------------------------------------------------------------------------


async def test_a_get_in_which_a_signal_handler_raises_loses_no_item(pair: list[Worker]) -> None:
    """Wherever it does: also when the item has come, and is about to be returned."""
    make(pair[0])
    other = handle(pair[1])
    got: list[int] = []
    places: list[str] = []
    while True:
        await other.put(len(places))
        take = partial(lambda: got.append(other.get().wait()))
        place = await asyncio.to_thread(interrupted, take, len(places), waiting.__file__, signals=True)
        if not got:
            got.append(await other.get())
        assert got == [len(places)], place
        got.clear()
        if place is None:
            break
        places.append(place)
    assert any(place.startswith("_take") for place in places), "it was not interrupted as the item was there"


@pytest.mark.parametrize("outcome", [Results((7,)), PeerLost("gone")], ids=["value", "error"])
async def test_an_interrupted_answer_is_told_once(pair: list[Worker], outcome: Any) -> None:
    """The thread that reads it may be interrupted anywhere; whoever put or takes items hears of it, and only once."""
    make(pair[0])
    told: list[Any] = []
    pending = pair[1]._node.peers.find("worker0").pending
    value, error = (None, outcome) if isinstance(outcome, Exception) else (outcome, None)

    async def play(at: int) -> str | None:
        made = Calls(pair[1]._node, "q", "worker0")
        made.call("take_items", True, at + 1, (1,), lambda *said: told.append(said))
        (call,) = [each for each in pending.calls.values() if each.function.endswith("take_items")]
        answer = partial(call._settle, value, error)
        place = await asyncio.to_thread(interrupted, answer, at, calls.__file__, futures.__file__)
        answer()  # if it had not begun
        await until(lambda: bool(told))
        await asyncio.sleep(0)
        assert told == [(value, error)], place
        told.clear()
        pending.cancel(call.call_id)
        return place

    at = 0
    while (place := await play(at)) is not None:
        at += 1
        assert "_ended" in place or at < 400
    assert at > 50, "it was not interrupted"


async def test_a_join_whose_answer_is_interrupted_ends(pair: list[Worker]) -> None:
    """With the answer, or as one that was cancelled."""
    make(pair[0])
    other = handle(pair[1])
    await other.put(1)
    at = 0
    while True:
        joined = other.join()
        (call,) = joined._sources
        answer = partial(call._settle, None)
        place = await asyncio.to_thread(interrupted, answer, at, reworded.__file__, futures.__file__)
        answer()  # if it had not begun
        assert joined.done(), place
        joined._mark_seen()
        pair[1]._node.peers.find("worker0").pending.cancel(call.call_id)  # type: ignore[attr-defined]  # it is one of a call
        if place is None:
            break
        at += 1
    assert at > 50, "it was not interrupted"


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
