"""The other verbs of groups: the least busy member, many items, streams, references, barriers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import (
    NotAllowed,
    Overloaded,
    PeerLeft,
    PeerLost,
    RpcBackendOptions,
    RpcTimeout,
    RpcUsageError,
    Worker,
    exposed,
)
from aiorpc.errors import GroupError, ProtocolError, SerializationError, UnknownWorker, WouldBlockLoop
from aiorpc.runtime.calls.declared import pack
from aiorpc.runtime.fanout import barriers as barriers_module
from aiorpc.runtime.fanout.barriers import come_to_barrier
from aiorpc.testing import Faults, cluster
from tests.runtime.test_returning import lose, place
from tests.runtime.waiting import until, until_no_references, wait_until

_gates: dict[str, asyncio.Event] = {}
_begun: list[str] = []
_closed: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for kept in (_gates, _begun, _closed):
        kept.clear()


@pytest.fixture
async def four() -> AsyncIterator[list[Worker]]:
    async with cluster(4) as workers:
        yield workers


def iter_nothing() -> Iterator[int]:
    yield from ()


async def name_of(value: Any = None) -> tuple[str, Any]:
    return aiorpc.current().name, value


async def held(value: Any = None) -> tuple[str, Any]:
    """Waits for the gate of its worker, if there is one."""
    name = aiorpc.current().name
    _begun.append(name)
    if name in _gates:
        await _gates[name].wait()
    return name, value


# --- any --------------------------------------------------------------------------------------------------------------


async def test_any_goes_to_the_least_busy_member(four: list[Worker]) -> None:
    """Equals take turns; who has much to do is left out, and who is gone."""
    group = four[0].group(["worker1", "worker2", "worker3"])
    assert Counter([(await group.any(name_of))[0] for _ in range(6)]) == {"worker1": 2, "worker2": 2, "worker3": 2}
    _gates["worker2"] = asyncio.Event()
    calls = [four[0].call("worker2", held) for _ in range(3)]
    assert {(await group.any(name_of))[0] for _ in range(6)} == {"worker1", "worker3"}
    _gates["worker2"].set()
    await asyncio.gather(*calls)
    await four[3]._drop()
    await until(lambda: len(four[0].worker_infos()) == 3)
    assert {(await group.any(name_of))[0] for _ in range(6)} == {"worker1", "worker2"}


async def test_any_with_retries_tries_another_member(four: list[Worker]) -> None:
    """Each try chooses anew."""
    group = four[0].group("worker[123]", retries=3, backoff=0.01)
    with Faults(four[0]) as faults:
        faults.fail("call", times=2, error=Overloaded("full"))
        name, value = await group.any(name_of, 7)
    assert (name in ("worker1", "worker2", "worker3"), value) == (True, 7)


# --- map --------------------------------------------------------------------------------------------------------------


async def test_map_gives_results_in_the_order_of_items(four: list[Worker]) -> None:
    """However long each takes; all members have some of them."""
    results = [result async for result in four[0].group("worker[123]").map(held, range(20))]
    assert [value for _, value in results] == list(range(20))
    assert {name for name, _ in results} == {"worker1", "worker2", "worker3"}


async def test_map_takes_items_as_results_are_taken(four: list[Worker]) -> None:
    """At most two items for each member are ahead; a slow member gets no more than that."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1_000_000):
            taken.append(number)
            yield number

    _gates.update((name, asyncio.Event()) for name in ("worker1", "worker2"))
    results = four[0].group(["worker1", "worker2"]).map(held, items())
    first = asyncio.ensure_future(anext(results))
    await until(lambda: len(_begun) == 4)
    assert Counter(_begun) == {"worker1": 2, "worker2": 2}
    assert len(taken) <= 5
    for gate in _gates.values():
        gate.set()
    assert (await first)[1] == 0
    assert [(await anext(results))[1] for _ in range(5)] == [1, 2, 3, 4, 5]
    await results.aclose()
    assert len(taken) <= 6 + 5


async def test_map_takes_an_asynchronous_iterable(four: list[Worker]) -> None:
    """A result is there although the next item is not."""
    more = asyncio.Event()

    async def items() -> AsyncIterator[int]:
        yield 1
        await more.wait()
        yield 2

    results = four[0].group("worker[12]").map(name_of, items())
    assert (await anext(results))[1] == 1
    more.set()
    assert [value async for _, value in results] == [2]


async def fail_for(value: int, bad: int = 3) -> int:
    if value == bad:
        raise ValueError(value)
    return value


async def test_map_raises_an_error_in_the_place_of_its_item(four: list[Worker]) -> None:
    """Of the function, of the items, and of a member that is lost; what is under way is called off."""
    seen = []
    with pytest.raises(ValueError, match="3"):
        async for result in four[0].group("worker[12]").map(fail_for, range(9)):
            seen.append(result)
    assert seen == [0, 1, 2]

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("items")

    with pytest.raises(KeyError, match="items"):
        [result async for result in four[0].group("worker[12]").map(fail_for, broken())]
    with pytest.raises(RpcUsageError, match="iterable"):
        await anext(four[0].group("*").map(fail_for, 5))  # type: ignore[call-overload]  # that is the point
    with pytest.raises(UnknownWorker):
        await anext(four[0].group("x").map(fail_for, [1]))


async def test_a_map_that_is_left_calls_off_what_is_under_way(four: list[Worker]) -> None:
    """Nothing runs on."""
    _gates["worker2"] = asyncio.Event()
    async for _, value in four[0].group(["worker1", "worker2"]).map(held, range(100)):
        if value >= 0:
            break
        raise AssertionError
    gc.collect()
    await until(lambda: not any(worker.pending_calls() for worker in four))


async def test_a_map_hands_the_items_of_a_lost_member_to_others(four: list[Worker]) -> None:
    """With retries; each item has its result once."""
    _gates["worker3"] = asyncio.Event()
    group = four[0].group(["worker1", "worker2", "worker3"], retries=5, backoff=0.01)
    results = group.map(held, range(12))
    first = asyncio.ensure_future(anext(results))
    await until(lambda: "worker3" in _begun)
    await four[3]._drop()
    values = [await first, *[result async for result in results]]
    assert [value for _, value in values] == list(range(12))
    assert {name for name, _ in values} == {"worker1", "worker2"}


async def test_a_thread_that_may_block_maps_by_for(four: list[Worker]) -> None:
    """In the order of items, and no more ahead than for a task; items are got in that thread."""
    group, threads, taken = four[0].group(["worker1", "worker2"]), set[int](), list[int]()

    def items() -> Iterator[int]:
        for number in range(30):
            threads.add(threading.get_ident())
            taken.append(number)
            yield number

    def use() -> tuple[int, list[Any], int]:
        results = group.map(name_of, items())
        first = next(results)
        return threading.get_ident(), [first, *results], len(taken)

    ident, results, _ = await asyncio.to_thread(use)
    assert [value for _, value in results] == list(range(30))
    assert threads == {ident}

    def ahead() -> int:
        taken.clear()
        with group.map(held, items()) as results:
            next(results)
            return len(taken)

    assert await asyncio.to_thread(ahead) <= 5  # two for each member, and the one that was given
    await until(lambda: not four[0].pending_calls())

    def taken_before_and_after_another() -> tuple[int, int]:
        taken.clear()
        with group.map(name_of, items()) as results:
            next(results)
            wait_until(lambda: not four[0].pending_calls())
            before = len(taken)
            next(results)
            return before, len(taken)

    before, after = await asyncio.to_thread(taken_before_and_after_another)
    # One for each that is given, although results are there that could be given first. Answers may be quicker than the
    # thread takes items: then there were fewer before, and it makes up for them.
    assert before < after <= 6 and before <= 5
    assert before < 5 or after == 6


async def test_a_blocking_map_raises_in_its_place_and_calls_off_the_rest(four: list[Worker]) -> None:
    """An error of an item, and one of the items themselves, behind the results before it."""
    group = four[0].group("worker[12]")

    def broken() -> Iterator[int]:
        yield from (1, 2)
        raise LookupError("items")

    def use(found: list[Any], items: Iterator[int]) -> None:
        for result in group.map(fail_for, items):
            found.append(result)

    found: list[Any] = []
    with pytest.raises(LookupError, match="items"):
        await asyncio.to_thread(use, found, broken())
    assert len(found) == 2
    for name in ("worker1", "worker2"):
        _gates[name] = asyncio.Event()

    def leave() -> None:
        results = group.map(held, itertools.count())
        with contextlib.suppress(RpcTimeout):
            for _ in four[0].group("worker[12]", timeout=0.2).map(held, itertools.count()):
                pass
        results.close()
        assert list(results) == []

    await asyncio.to_thread(leave)
    await until(lambda: not four[0].pending_calls())


async def test_a_map_is_taken_in_one_way_and_not_blocking_on_the_loop(four: list[Worker]) -> None:
    """Each refusal says what to do instead."""
    group = four[0].group("*")
    with pytest.raises(WouldBlockLoop, match="async for"):
        list(group.map(name_of, [1]))

    async def items() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(RpcUsageError, match="by `async for`, too"):
        await asyncio.to_thread(next, group.map(name_of, items()))
    async with group.map(name_of, [1, 2]) as results:
        assert (await anext(results))[1] == 1
        with pytest.raises(RpcUsageError, match="already"):
            await asyncio.to_thread(next, results)
    results = group.map(name_of, [1, 2])
    assert (await asyncio.to_thread(next, results))[1] == 1
    with pytest.raises(RpcUsageError, match="already"):
        await anext(results)


# --- stream -----------------------------------------------------------------------------------------------------------


async def count(limit: int, *bad: str) -> AsyncIterator[int]:
    name = aiorpc.current().name
    try:
        for number in range(limit):
            if name in bad and number == 2:
                raise ValueError(name)
            yield number
    finally:
        _closed.append(name)


async def test_the_items_of_all_members_come_with_their_names(four: list[Worker]) -> None:
    """Those of one member in their order."""
    items: dict[str, list[int]] = {}
    async for name, item in four[0].group("worker*").stream(count, 30):
        items.setdefault(name, []).append(item)
    assert items == {worker.name: list(range(30)) for worker in four}


async def test_a_stream_that_fails_does_not_end_the_others(four: list[Worker]) -> None:
    """Who failed is told behind the last item."""
    seen: Counter[str] = Counter()
    with pytest.raises(GroupError, match="1 of 3 streams") as caught:
        async for name, _ in four[0].group("worker[123]").stream(count, 10, "worker2"):
            seen[name] += 1
    assert seen == {"worker1": 10, "worker2": 2, "worker3": 10}
    assert caught.value.failed == ("worker2",)


async def test_a_thread_that_may_block_takes_streams_by_for(four: list[Worker]) -> None:
    """The errors, too; and leaving the loop, or the block, stops the producers."""

    def use() -> tuple[Counter[str], GroupError]:
        seen: Counter[str] = Counter()
        with pytest.raises(GroupError, match="1 of 3 streams") as caught:
            for name, _ in four[0].group("worker[123]").stream(count, 10, "worker2"):
                seen[name] += 1
        return seen, caught.value

    seen, error = await asyncio.to_thread(use)
    assert seen == {"worker1": 10, "worker2": 2, "worker3": 10}
    assert error.failed == ("worker2",)
    _closed.clear()

    def leave() -> None:
        with four[0].group("worker[12]").stream(count, 1_000_000) as items:
            for _, number in items:
                if number == 100:
                    break
        for _ in four[0].group("worker3").stream(count, 1_000_000):
            break
        gc.collect()

    await asyncio.to_thread(leave)
    await until(lambda: sorted(_closed) == ["worker1", "worker2", "worker3"])
    with pytest.raises(WouldBlockLoop, match="async for"):
        list(four[0].group("worker3").stream(count, 1))


async def test_a_member_whose_item_is_late_fails_alone(four: list[Worker]) -> None:
    """Behind what the others bring, and its producer is stopped."""
    _gates["worker1"], _gates["worker2"] = asyncio.Event(), asyncio.Event()
    stream = four[0].group("worker[12]", timeout=0.05).stream(gated, 10)
    with pytest.raises(GroupError, match="2 of 2 streams") as caught:
        await anext(stream)
    assert caught.value.missing == ("worker1", "worker2")
    for error in caught.value.exceptions:
        assert isinstance(error, RpcTimeout)
        assert re.match(r"no item of the stream of .*gated.* within 0\.05 s", str(error))
    await until(lambda: sorted(_closed) == ["worker1", "worker2"])
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def gated(limit: int, bad: str = "") -> AsyncIterator[int]:
    """Waits for the gate of its worker before each item and before its end."""
    name = aiorpc.current().name
    try:
        for number in range(limit):
            await _gates[name].wait()
            _gates[name].clear()
            yield number
        await _gates[name].wait()
        if name == bad:
            raise ValueError(name)
    finally:
        _closed.append(name)


async def cancelled_turn(given: AsyncIterator[Any]) -> None:
    """A turn that is cancelled while it waits; another task is refused meanwhile."""
    turn = asyncio.ensure_future(anext(given))
    try:
        await asyncio.sleep(0)
        with pytest.raises(RpcUsageError, match="one consumer"):
            await anext(given)
        assert not turn.done()
    finally:
        turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn


async def test_a_turn_that_is_cancelled_at_any_moment_takes_nothing(four: list[Worker]) -> None:
    """However far it has come: all items arrive once, and the end behind them."""
    group = four[0].group("worker[12]")

    async def patient(given: AsyncIterator[Any]) -> list[Any]:
        found: list[Any] = []
        for steps in itertools.count():
            turn = asyncio.ensure_future(anext(given))
            for _ in range(steps % 7):
                await asyncio.sleep(0)
            turn.cancel()
            try:
                found.append(await turn)
            except asyncio.CancelledError:
                continue
            except StopAsyncIteration:
                return found
        raise AssertionError

    items = await patient(group.stream(count, 40))
    for name in ("worker1", "worker2"):
        assert [number for each, number in items if each == name] == list(range(40))
    assert [value for _, value in await patient(group.map(name_of, range(40)))] == list(range(40))


@pytest.mark.parametrize("verb", ["stream", "map"])
@pytest.mark.parametrize("way", ["close", "drop", "close while another waits"])
async def test_what_had_a_cancelled_turn_lets_go_of_all(four: list[Worker], verb: str, way: str) -> None:
    """Producers stop and calls are called off, as without one."""
    _gates.update((name, asyncio.Event()) for name in ("worker1", "worker2"))
    group = four[0].group("worker[12]")
    given: Any = group.stream(gated, 3) if verb == "stream" else group.map(held, range(3))
    await cancelled_turn(given)
    await until(lambda: len(four[0].pending_calls()) == (2 if verb == "stream" else 3))
    if way == "drop":
        del given
        gc.collect()
    elif way == "close":
        await given.aclose()
    else:
        turn = asyncio.ensure_future(anext(given))
        await asyncio.sleep(0)
        await asyncio.gather(given.aclose(), given.aclose())
        with pytest.raises(StopAsyncIteration):
            await turn
    await until(lambda: not any(worker.pending_calls() for worker in four))
    if way != "drop":
        with pytest.raises(StopAsyncIteration):
            await anext(given)


async def test_leaving_a_stream_stops_all_producers(four: list[Worker]) -> None:
    """By the end of the block, and by dropping the stream; a producer stops while nobody takes items."""
    async with four[0].group("worker[12]").stream(count, 1_000_000) as items:
        async for _, number in items:
            if number == 100:
                break
    await until(lambda: sorted(_closed) == ["worker1", "worker2"])
    async for _ in four[0].group("worker3").stream(count, 1_000_000):
        break
    gc.collect()
    await until(lambda: "worker3" in _closed)
    with pytest.raises(RpcUsageError, match="retries"):
        four[0].group("worker3", retries=1).stream(count, 1)


# --- references -------------------------------------------------------------------------------------------------------


class Total:
    def __init__(self, start: int) -> None:
        if start < 0 and aiorpc.current().name == "worker2":
            raise ValueError(start)
        self.value = start

    def add(self, amount: Any) -> Any:
        self.value = self.value + amount
        return self.value

    def __call__(self) -> str:
        return aiorpc.current().name


async def test_references_on_each_member_are_called_together(four: list[Worker]) -> None:
    """Methods, methods whose results stay there, and the values themselves."""
    refs = four[0].group("worker[123]").remote(Total, 5)
    assert (await refs.rpc_async().add(2)).values() == [7, 7, 7]
    assert (await refs.rpc_async()()).values() == ["worker1", "worker2", "worker3"]
    assert (await refs["worker2"].rpc_async().add(1)) == 8
    assert (await refs.rpc_async().add(0)).answers == {"worker1": 7, "worker2": 8, "worker3": 7}
    results = refs.remote().add(10)
    assert (await results).values() == [17, 18, 17]
    assert [ref.owner_name() for ref in refs] == ["worker1", "worker2", "worker3"]
    assert await asyncio.to_thread(_add_blocking, refs) == [17, 18, 17]
    assert (await asyncio.to_thread(results.to_here)).values() == [17, 18, 17]
    with pytest.raises(KeyError):
        refs["worker9"]
    with pytest.raises(aiorpc.errors.WouldBlockLoop):
        refs.rpc_sync().add(0)
    with pytest.raises(SerializationError, match="argument 0"):
        refs.rpc_async().add(iter_nothing())
    del refs, results
    await until_no_references(four)


def _add_blocking(refs: aiorpc.types.RRefGroup[Any]) -> list[int]:
    return refs.rpc_sync().add(0).values()


# --- named objects ----------------------------------------------------------------------------------------------------


class Shelf(Total):
    def up_to(self, limit: int) -> Iterator[int]:
        yield from range(limit)

    def count(self) -> int:
        return int(self.value)


async def test_objects_of_one_name_are_called_together(four: list[Worker]) -> None:
    """In all manners; a member that serves none says so, and a large argument is one for all."""
    for worker in four[1:]:
        worker.serve("shelf", Shelf(worker.id))
    shelves = four[0].group("worker[123]").object("shelf")
    assert (await shelves.add(10)).values() == [11, 12, 13]
    assert (await shelves.rpc_async().count()).values() == [11, 12, 13]
    assert (await shelves.count()).values() == [11, 12, 13]
    assert (await shelves()).values() == ["worker1", "worker2", "worker3"]
    assert (await shelves.remote().add(1)).values() == [12, 13, 14]
    assert sorted([item async for item in shelves.stream().up_to(2)]) == [(w.name, n) for w in four[1:] for n in (0, 1)]
    assert await asyncio.to_thread(lambda: shelves.rpc_sync().add(0).values()) == [12, 13, 14]
    outcomes = await four[0].group("worker*").object("shelf").count()
    assert list(outcomes.answers) == ["worker1", "worker2", "worker3"]
    assert type(outcomes["worker0"].error) is aiorpc.errors.UnknownObject
    assert [int(each[0]) for each in (await shelves.add(torch.ones(600_000))).values()] == [13, 14, 15]
    tried = four[0].group("worker[123]", retries=2, backoff=0.01).object("shelf")
    assert (await tried()).values() == ["worker1", "worker2", "worker3"]
    with pytest.raises(AttributeError, match="private"):
        shelves._secret()
    with pytest.raises(RpcUsageError, match="name"):
        four[0].group("*").object("")
    with pytest.raises(aiorpc.errors.WouldBlockLoop):
        shelves.rpc_sync().count()


# --- barrier ----------------------------------------------------------------------------------------------------------


async def test_members_wait_for_each_other(four: list[Worker]) -> None:
    """Nobody goes on before all have come, time after time; other tags are other barriers."""
    passed: list[tuple[int, str]] = []

    async def come(worker: Worker, round_: int) -> None:
        await worker.group("worker*").barrier()
        passed.append((round_, worker.name))

    for round_ in range(3):
        early = [asyncio.ensure_future(come(worker, round_)) for worker in four[1:]]
        await until(lambda: sum(len(each.arrived) for each in four[0]._node.barriers._barriers.values()) == 3)
        assert len(passed) == 4 * round_
        await come(four[0], round_)
        await asyncio.gather(*early)
    other = [worker.group("worker[12]").barrier("other") for worker in four[1:3]]
    await asyncio.gather(*other)
    assert not four[0]._node.barriers._barriers


async def test_a_barrier_names_who_has_not_come(four: list[Worker]) -> None:
    """After the timeout of the group; who was there has left it, and may come again."""
    waiting = [worker.group("worker*", timeout=0.3).barrier() for worker in four[1:3]]
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [RpcTimeout, RpcTimeout]
    assert "worker0, worker3 had not come" in "".join(map(str, errors))
    await until(lambda: not four[0]._node.barriers._barriers)
    await asyncio.gather(*(worker.group("worker*").barrier() for worker in four))


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_barrier_ends_with_a_member(four: list[Worker], graceful: bool) -> None:
    """Who waits is told at once who will not come, whether it died or left; also who comes later."""
    waiting = [asyncio.ensure_future(_awaited(worker.group(["worker0", "worker1", "worker3"]))) for worker in four[:2]]
    await until(lambda: sum(len(each.arrived) for each in four[0]._node.barriers._barriers.values()) == 2)
    if graceful:
        await four[3].shutdown(graceful=False)
    else:
        await four[3]._drop()
    for each in waiting:
        with pytest.raises(PeerLeft if graceful else PeerLost, match="worker3") as failure:
            await each
        if isinstance(error := failure.value, PeerLost):
            assert (error.worker, error.rank, error.pid) == ("worker3", 3, os.getpid())
            assert error.host and error.cause
    with pytest.raises((PeerLeft, PeerLost)):
        await four[1].group(["worker0", "worker1", "worker3"]).barrier()


@pytest.mark.parametrize("rank", [2, 0])
async def test_who_has_taken_the_place_of_a_lost_member_comes_to_barriers(rank: int) -> None:
    """Of all, by names and by ranks; and the loss of that one is told there by its rank."""
    async with place() as (workers, here):
        others = [each for each in workers if each.id != rank]
        await lose(workers[rank], *others)
        newcomer = await here.come_back(rank)
        for everybody in ("worker*", [0, 1, 2], ["worker0", "worker1", "worker2"]):
            await asyncio.gather(*(each.group(everybody).barrier() for each in (*others, newcomer)))
        waiting = [asyncio.ensure_future(_awaited(each.group([0, 1, 2]))) for each in others]
        await newcomer._drop()
        for each in waiting:
            with pytest.raises(PeerLost) as failure:
                await each
            assert (failure.value.worker, failure.value.rank) == (f"worker{rank}", rank)


async def _awaited(group: aiorpc.types.PeerGroup) -> None:
    await group.barrier()


async def test_who_may_come_to_a_barrier_is_said_by_a_rule() -> None:
    """Of the member where all wait, by the tag; who may not come hears so at once, and is not counted."""
    allow = {"actor": "barrier/epoch-*:come", "other": [exposed], "": "*"}
    async with cluster(3, options=RpcBackendOptions(allow=allow), roles=["", "actor", "other"]) as workers:
        first = workers[0].group(["worker0", "worker1"]).barrier("epoch-1")
        await workers[1].group(["worker0", "worker1"]).barrier("epoch-1")
        await first
        for worker, tag in ((workers[1], ""), (workers[2], "epoch-1")):
            with pytest.raises(NotAllowed, match=f"barrier/{tag}:come on worker 'worker0'"):
                await worker.group("worker*").barrier(tag)
        assert not workers[0]._node.barriers._barriers


async def test_who_gives_up_is_taken_back_from_the_barrier(four: list[Worker]) -> None:
    """So the others do not go on without it."""
    first = four[1].group("worker*").barrier()
    await until(lambda: len(four[0]._node.barriers._barriers) == 1)
    first.cancel()
    await until(lambda: not four[0]._node.barriers._barriers)


async def test_barriers_refuse_what_cannot_be(four: list[Worker]) -> None:
    """Who is no member, a tag that is none, the same barrier twice at once, and whatever a peer may send."""
    with pytest.raises(RpcUsageError, match="no member"):
        four[0].group("worker[123]").barrier()
    with pytest.raises(RpcUsageError, match="tag"):
        four[0].group("worker*").barrier("x" * 1000)
    first = four[1].group("worker*").barrier()
    await until(lambda: len(four[0]._node.barriers._barriers) == 1)
    with pytest.raises(RpcUsageError, match="already"):
        await four[1].group("worker*").barrier()
    first.cancel()
    for undeclared in [
        (1, pack([0, 1]), 1.0),
        ("", (0, 1), 1.0),
        ("", pack([0, "1"]), 1.0),
        ("", pack([]), 1.0),
        ("", pack([0, 1]), -1.0),
        ("", pack([0, 1]), float("nan")),
    ]:
        with pytest.raises(ProtocolError, match="come_to_barrier of the runtime"):
            await four[1].call("worker0", come_to_barrier, *undeclared)  # type: ignore[call-overload]
    with pytest.raises(RpcUsageError, match="at the member with the lowest id"):
        await four[1].call("worker0", come_to_barrier, "", pack([2, 3]), 1.0)  # type: ignore[call-overload]


async def test_each_member_waits_at_so_many_barriers(four: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes to ever more of them is refused there, and takes no room from others."""
    monkeypatch.setattr(barriers_module, "_MOST", 3)
    waiting = [four[1].group("worker*").barrier(str(number)) for number in range(3)]
    with pytest.raises(Overloaded, match="worker 'worker1' waits at 3 barriers of worker 'worker0' already"):
        await four[1].group("worker*").barrier("one more")
    others = [
        worker.group("worker[023]").barrier(str(number)) for number in range(3) for worker in (four[0], *four[2:])
    ]
    await asyncio.gather(*others)
    coming = [worker.group("worker*").barrier(str(number)) for number in range(3) for worker in (four[0], *four[2:])]
    await asyncio.gather(*waiting, *coming)
    assert not four[0]._node.barriers._barriers and not four[0]._node.barriers._waits


async def test_a_barrier_with_a_member_that_has_not_joined_says_how_to_wait_for_it() -> None:
    """Who comes early to a group without a size has no reference to send, and is told of none."""
    async with cluster(1, dynamic=True) as (worker,):
        with pytest.raises(UnknownWorker, match=r"'late' has not joined yet.* rpc\.wait_for\('late'\)`") as caught:
            worker.group(["worker0", "late"]).barrier()
        assert "reference" not in str(caught.value)


async def test_barriers_without_pickles() -> None:
    """In a group with safe serialization, which runs nothing for anybody."""
    options = RpcBackendOptions(serialization="safe", allow=["barrier/*:come"])
    async with cluster(2, options=options) as workers:
        await asyncio.gather(*(worker.group("*").barrier() for worker in workers))
