"""RRefs in the running system: values, passing them on, errors, and that the owner frees in time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

import aiorpc
from aiorpc import (
    PeerLeft,
    PeerLost,
    RpcBackendOptions,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    RRef,
    Worker,
    WorkerClosed,
)
from aiorpc.protocol.reference_messages import LENT, PassedReference
from aiorpc.testing import Faults, cluster
from tests.runtime.inside import act_as, act_no_more
from tests.runtime.waiting import LIMIT, until, until_no_references


class Thing:
    """A value that can be watched."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()

    def __init__(self, value: Any = 0) -> None:
        self.value = value
        Thing.alive.add(self)

    def get(self) -> Any:
        return self.value

    def add(self, x: int) -> int:
        self.value += x
        return int(self.value)

    def sum_with(self, x: torch.Tensor) -> float:
        return float(x.sum()) + float(self.value)

    def sums_with(self, x: torch.Tensor) -> Iterator[float]:
        yield self.sum_with(x)

    def take(self, tensor: torch.Tensor) -> int:
        return len(tensor)

    def items(self, tensor: torch.Tensor) -> Iterator[int]:
        yield self.value
        yield len(tensor)

    def __reduce__(self) -> Any:
        return Thing, (self.value,)


class Gate:
    """Holds handlers until the test lets them go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.kept: list[Any] = []


_gates: dict[str, Gate] = {}


@pytest.fixture
def gate() -> Gate:
    _gates["it"] = Gate()
    return _gates["it"]


@pytest.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    """Three workers; after the test no reference may be left on any of them."""
    async with cluster(3) as workers:
        yield workers
        _gates.clear()
        gc.collect()  # the tracebacks of errors that a test caught hold its locals
        await until_no_references(workers)
    assert not Thing.alive


def slow_thing(value: Any) -> Thing:
    assert _gates["it"].open.wait(30)
    return Thing(value)


def make(value: Any) -> RRef[Thing]:
    return RRef(Thing(value))


def failing() -> Thing:
    raise KeyError("no thing")


def slow_failing() -> Thing:
    assert _gates["it"].open.wait(30)
    raise KeyError("no thing")


def read(rref: RRef[Thing]) -> Any:
    return rref.to_here().value


async def read_async(rref: RRef[Thing]) -> Any:
    return (await rref).value


def call_on(rref: RRef[Thing], x: int) -> Any:
    return rref.rpc_sync().add(x)


def read_all(box: dict[str, Any]) -> list[Any]:
    return [rref.to_here().value for rref in box["list"]] + [box["one"].to_here().value]


def local(rref: RRef[Thing]) -> tuple[bool, Any]:
    return rref.is_owner(), rref.local_value().value


def same_object(rref: RRef[Thing], x: int) -> int:
    return rref.local_value().add(x)


def keep(rref: RRef[Thing]) -> None:
    _gates["it"].kept.append(rref)


def forward(rref: RRef[Thing], to: str) -> Any:
    return aiorpc.rpc_sync(to, read, (rref,))


def give_back(rref: RRef[Thing]) -> RRef[Thing]:
    return rref


def remote_of(to: str, value: Any) -> RRef[Thing]:
    return aiorpc.remote(to, Thing, value)


# --- values -----------------------------------------------------------------------------------------------------------


async def test_remote_returns_at_once(workers: list[Worker], gate: Gate) -> None:
    """The RRef is there before the value; owner and name are known, and it can be awaited and blocked for."""
    rref = workers[0].remote("worker1", slow_thing, 4)
    assert (rref.owner(), rref.owner_name(), rref.is_owner()) == (workers[1].info, "worker1", False)
    assert not rref.confirmed_by_owner()
    gate.open.set()
    assert (await rref).value == 4
    assert (await asyncio.to_thread(rref.to_here)).value == 4
    await until(rref.confirmed_by_owner)


async def test_both_forms_of_remote(workers: list[Worker]) -> None:
    """remote(to, func, *args) and torch's remote(to, func, args=(...)); a lone tuple or list is torch's args."""
    token = act_as(workers[0])
    one, two = aiorpc.remote("worker1", divmod, 7, 2), aiorpc.remote("worker1", divmod, (7, 2))
    three = aiorpc.remote("worker1", divmod, args=[7, 2])  # type: ignore[call-overload]
    four = aiorpc.remote("worker1", dict, args=(), kwargs={"a": 1}, timeout=5)
    five = aiorpc.peer("worker1").remote(sum, (1, 2))
    assert [await rref for rref in (one, two, three, four, five)] == [(3, 1), (3, 1), (3, 1), {"a": 1}, 3]
    act_no_more(token)


def _given(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        (((1,), {"k": 2}), {}, ((1,), {"k": 2})),
        (((1,), {"k": 2}, 5), {}, ((1,), {"k": 2})),
        (((1,),), {"kwargs": {"k": 2}, "timeout": 5.0}, ((1,), {"k": 2})),
        ((), {"args": None, "kwargs": None}, ((), {})),
        ((), {"timeout": 5}, ((), {})),
        ((), {}, ((), {})),
        ((None,), {}, ((None,), {})),
        (((1,), 2), {}, (((1,), 2), {})),
        (((1,), {}, "x"), {}, (((1,), {}, "x"), {})),
        (((1,), {}, 5, 6), {}, (((1,), {}, 5, 6), {})),
        (((1,), {}), {"args": 3}, (((1,), {}), {"args": 3})),
        ((1,), {"timeout": 5}, ((1,), {"timeout": 5})),
        ((), {"args": 1}, ((), {"args": 1})),
        ((), {"args": (1,), "more": 2}, ((), {"args": (1,), "more": 2})),
    ],
)
async def test_which_form_of_remote_is_meant(
    workers: list[Worker], args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Any
) -> None:
    """torch's form where everything that follows the function is of the kinds that torch takes there."""
    token = act_as(workers[0])
    assert await aiorpc.remote("worker1", _given, *args, **kwargs) == wanted
    act_no_more(token)


async def test_a_copy_is_fetched_and_the_owner_has_the_value_itself(workers: list[Worker]) -> None:
    """to_here gives a copy on users and the object itself on the owner; local_value is for the owner alone."""
    rref = workers[0].remote("worker1", Thing, 1)
    assert await workers[0].call("worker1", same_object, rref, 5) == 6
    first, second = await rref, await rref
    assert first is not second and first.value == 6
    with pytest.raises(RpcUsageError, match=r"[cC]all it on owner"):
        rref.local_value()
    del first, second


async def test_a_reference_to_a_value_made_here(workers: list[Worker]) -> None:
    """RRef(value) is owned here, confirmed from the beginning, and readable everywhere."""
    token = act_as(workers[0])
    thing = Thing(3)
    rref = RRef(thing)
    assert rref.is_owner() and rref.confirmed_by_owner() and rref.local_value() is thing
    assert await rref is thing and rref.to_here() is thing
    assert await workers[0].call("worker1", read, rref) == 3
    assert await workers[0].call("worker2", forward, rref, "worker1") == 3
    assert await rref.rpc_async().get() == 3
    act_no_more(token)
    del thing


async def test_to_here_with_a_timeout(workers: list[Worker], gate: Gate) -> None:
    """RpcTimeout after the seconds given, at users and at the owner; the value comes all the same."""
    rref = workers[0].remote("worker1", slow_thing, 2)
    own = workers[0].remote("worker0", slow_thing, 3)
    for reference in (rref, own):
        with pytest.raises(RpcTimeout):
            await asyncio.to_thread(reference.to_here, 0.02)
    gate.open.set()
    assert (await rref).value == 2 and (await own).value == 3


async def test_blocking_for_a_value_on_the_loop_is_refused(workers: list[Worker], gate: Gate) -> None:
    """The error names `await rref`; a value that is there at its owner may be had."""
    rref, own = workers[0].remote("worker1", slow_thing, 2), workers[0].remote("worker0", slow_thing, 3)
    for reference in (rref, own):
        with pytest.raises(aiorpc.errors.WouldBlockLoop, match="await"):
            reference.to_here()
    gate.open.set()
    await rref
    await own
    assert own.to_here().value == 3


async def test_proxies_make_no_hidden_round_trip(workers: list[Worker], gate: Gate) -> None:
    """rpc_async() and remote() on a value that does not exist yet return at once; the calls run when it does."""
    rref = workers[0].remote("worker1", slow_thing, 1)
    call, ref = rref.rpc_async().add(1), rref.remote().add(1)
    assert not call.done()
    gate.open.set()
    assert sorted([await call, await ref]) == [2, 3]


async def test_a_proxy_has_a_timeout(workers: list[Worker], gate: Gate) -> None:
    """rpc_async(timeout) bounds the calls made through it."""
    rref = workers[0].remote("worker1", slow_thing, 1)
    with pytest.raises(RpcTimeout):
        await rref.rpc_async(0.02).add(1)
    gate.open.set()
    await rref


# --- passing them on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [read, read_async])
async def test_third_workers_read_what_they_are_passed(workers: list[Worker], reader: Any) -> None:
    """Passed on once and over several hops."""
    rref = workers[0].remote("worker1", Thing, 5)
    assert await workers[0].call("worker2", reader, rref) == 5
    assert await workers[0].call("worker2", forward, rref, "worker0") == 5
    assert await workers[0].call("worker2", call_on, rref, 1) == 6


async def test_references_in_containers(workers: list[Worker]) -> None:
    """Inside lists, dicts, objects and partial arguments; several, and the same one twice."""
    one, two = workers[0].remote("worker1", Thing, 1), workers[0].remote("worker2", Thing, 2)
    assert await workers[0].call("worker2", read_all, {"list": [one, two, one], "one": two}) == [1, 2, 1, 2]
    holder = workers[0].remote("worker1", Thing, {"inner": one})
    inner = (await holder).value["inner"]
    assert (await inner).value == 1


async def test_a_reference_comes_back_to_its_owner(workers: list[Worker]) -> None:
    """The owner gets the value itself, from its creator and from a third worker."""
    rref = workers[0].remote("worker1", Thing, 7)
    assert await workers[0].call("worker1", local, rref) == (True, 7)
    assert await workers[0].call("worker2", send_home, rref, "worker1") == (True, 7)


def send_home(rref: RRef[Thing], to: str) -> Any:
    return aiorpc.rpc_sync(to, local, (rref,))


async def test_references_as_results(workers: list[Worker]) -> None:
    """A handler may return what it made, what it was given, and a reference to a third worker's value."""
    made = await workers[0].call("worker1", make, 3)
    assert made.owner_name() == "worker1" and (await made).value == 3
    back = await workers[0].call("worker2", give_back, made)
    assert back.owner_name() == "worker1" and (await back).value == 3
    third = await workers[0].call("worker1", remote_of, "worker2", 9)
    assert third.owner_name() == "worker2" and (await third).value == 9
    own = await workers[0].call("worker1", remote_of, "worker0", 10)
    assert own.is_owner() and (await own).value == 10


async def test_passing_on_before_the_value_exists(workers: list[Worker], gate: Gate) -> None:
    """Users on all workers, the owner included, wait for it; the creator may have dropped it by then."""
    rref = workers[0].remote("worker1", slow_thing, 6)
    calls = [workers[0].call(f"worker{to}", kind, rref) for to in range(3) for kind in (read, read_async)]
    del rref
    gc.collect()
    await until(lambda: workers[1]._node.references.counts().forks >= 1)
    gate.open.set()
    assert await asyncio.gather(*calls) == [6] * 6


async def test_many_references_between_all_workers(workers: list[Worker]) -> None:
    """Hundreds made, passed around and dropped in no particular order."""
    rrefs = [workers[i % 3].remote(f"worker{(i + 1) % 3}", Thing, i) for i in range(150)]
    calls = [workers[i % 3].call(f"worker{(i + 2) % 3}", read, rref) for i, rref in enumerate(rrefs)]
    del rrefs
    assert await asyncio.gather(*calls) == list(range(150))


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_an_error_of_the_construction_reaches_every_user(workers: list[Worker], gate: Gate) -> None:
    """The creator, third workers, the owner, and calls through proxies all get it."""
    rref = workers[0].remote("worker1", slow_failing)
    calls = [workers[0].call(f"worker{to}", read, rref) for to in range(3)]
    calls += [workers[0].call("worker2", call_on, rref, 1), rref.rpc_async().get()]
    gate.open.set()
    for call in calls:
        with pytest.raises(KeyError, match="no thing"):
            await call
    for _ in range(2):
        with pytest.raises(KeyError, match="no thing"):
            await rref
    with pytest.raises(KeyError, match="no thing"):
        await asyncio.to_thread(rref.to_here)


async def test_a_reference_whose_construction_failed_can_be_passed_on(workers: list[Worker]) -> None:
    """Who is passed it later gets the error too."""
    rref = workers[0].remote("worker1", failing)
    with pytest.raises(KeyError):
        await rref
    with pytest.raises(KeyError, match="no thing"):
        await workers[0].call("worker2", read, rref)


async def test_a_construction_that_timed_out(workers: list[Worker], gate: Gate) -> None:
    """The reference raises RpcTimeout from then on; the owner frees what came of it."""
    rref = workers[0].peer("worker1", timeout=0.03).remote(slow_thing, 1)
    await until(lambda: workers[0].statistics().calls_timed_out == 1)
    for _ in range(2):
        with pytest.raises(RpcTimeout, match="slow_thing"):
            await rref
    with pytest.raises(RpcTimeout, match="slow_thing"):
        rref.rpc_async().get()
    gate.open.set()


async def never_made() -> Thing:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("late", [0.0, 0.1])
@pytest.mark.parametrize("owner", ["worker1", "worker0"])
async def test_who_waits_for_a_construction_that_times_out_gets_that_error(
    workers: list[Worker], owner: str, late: float
) -> None:
    """The creator, also by methods and where it is the owner, and a third worker: the first time they ask, and later.

    Also where the owner does not know that the time is up, as the call has come late.
    """

    async def fetch() -> Any:
        return await rref

    with Faults(workers[0]) as faults:
        faults.delay(late, "remote", times=1)
        rref = workers[0].peer(owner, timeout=0.2).remote(never_made)
        calls = [workers[0].call("worker2", read_async, rref), rref.rpc_async().get()]
        outcomes = await asyncio.gather(fetch(), *calls, return_exceptions=True)
    outcomes += await asyncio.gather(fetch(), return_exceptions=True)
    for error in outcomes:
        assert isinstance(error, RpcTimeout), repr(error)
        assert (error.worker, error.seconds) == (owner, 0.2) and error.function.endswith("never_made")
        assert "set timeout (0.2 s)" in str(error)


async def test_a_failed_construction_leaves_nothing_to_the_garbage_collector(workers: list[Worker]) -> None:
    """Once the user's locals are gone so are the references, at the creator and at those that were passed them."""

    async def use() -> None:
        rref = workers[0].remote("worker1", failing)
        with contextlib.suppress(KeyError):
            await workers[0].call("worker2", read, rref)

    gc.collect()
    gc.disable()
    try:
        await use()
        await until_no_references(workers)
    finally:
        gc.enable()


async def test_arguments_that_cannot_travel_raise_at_once(workers: list[Worker]) -> None:
    """No reference is made, and those among the arguments are given back."""
    other = workers[0].remote("worker2", Thing, 1)
    with pytest.raises(aiorpc.errors.SerializationError, match="argument 1"):
        workers[0].remote("worker1", divmod, other, threading.Lock())
    with pytest.raises(aiorpc.errors.SerializationError, match="argument 1"):
        workers[0].call("worker1", divmod, other, threading.Lock())
    assert (await other).value == 1


async def test_a_result_that_cannot_be_fetched(workers: list[Worker]) -> None:
    """A value that does not pickle is fine where it is; only fetching it is an error."""
    rref = workers[0].remote("worker1", threading.Lock)
    with pytest.raises(aiorpc.errors.SerializationError, match="the result of to_here"):
        await rref
    assert await rref.rpc_async().locked() is False


async def test_a_reference_does_not_pickle_by_itself(workers: list[Worker]) -> None:
    """Outside of a call there is nobody to count it."""
    rref = workers[0].remote("worker1", Thing, 1)
    with pytest.raises(RpcUsageError, match="Can not pickle rref"):
        pickle.dumps(rref)
    await rref


# --- lent to the owner ------------------------------------------------------------------------------------------------


def wait_with(rref: RRef[Thing]) -> int:
    assert _gates["it"].open.wait(30)
    return int(rref.local_value().value)


async def test_a_call_lends_a_reference_to_its_owner(workers: list[Worker], gate: Gate) -> None:
    """G18: nobody counts it, as the call keeps it until there is an answer, and no longer."""
    rref = workers[0].remote("worker1", Thing, 3)
    await rref
    call = workers[0].call("worker1", wait_with, rref)
    del rref
    gc.collect()
    await until(lambda: len(workers[1].pending_calls()) == 1)
    here, there = workers[0]._node.references.counts(), workers[1]._node.references.counts()
    assert (here.users, here.pins, there.forks) == (1, 0, 1)
    gate.open.set()
    assert await call == 3
    await until(lambda: not Thing.alive)
    assert not workers[0]._node.peers.find("worker1").pending.lent


async def test_calls_on_a_reference_of_a_lost_owner_fail_for_who_waits_for_them() -> None:
    """As calls by name do; and so for one that was being created, whose error is then told by that."""
    async with cluster(2) as workers:
        reference = workers[0].remote("worker1", Thing, 1)
        await reference.rpc_async().get()
        made_too_late = workers[0].remote("worker1", asyncio.sleep, 1000)
        await workers[1]._drop()
        await until(lambda: workers[0]._node.peers.by_id(1).gone is not None)
        for each in (reference, made_too_late):
            call, made, items = each.rpc_async().get(), each.remote().get(), each.stream().get()
            for waits in (call, made, anext(items)):
                with pytest.raises(PeerLost):
                    await waits
            with pytest.raises(PeerLost):
                await asyncio.to_thread(each.rpc_sync().get)


async def test_a_call_that_was_given_up_lends_no_longer(workers: list[Worker], gate: Gate) -> None:
    """The handler that runs all the same has its value; one that begins later finds none."""
    rref = workers[0].remote("worker1", Thing, 3)
    await rref
    call = workers[0].call("worker1", wait_with, rref)
    await until(lambda: len(workers[1].pending_calls()) == 1)
    name = rref._rref
    call.cancel()
    del rref
    await until(lambda: gc.collect() < 0 or workers[1]._node.references.counts().forks == 0)
    gate.open.set()
    (late,) = workers[1]._node.references.load([PassedReference(name, 1, LENT, 0)], 0)
    with pytest.raises(RpcError, match="names no value of this worker; it was freed"):
        late.local_value()
    with pytest.raises(RpcUsageError, match="does not exist"):
        workers[1].call("worker2", read, late)


# --- references of other workers --------------------------------------------------------------------------------------


# --- the end of a value -----------------------------------------------------------------------------------------------


async def test_the_owner_frees_when_the_last_holder_is_gone(workers: list[Worker], gate: Gate) -> None:
    """And not before: other workers and the owner itself may still hold it."""
    rref = workers[0].remote("worker1", Thing, 1)
    await workers[0].call("worker2", keep, rref)
    await workers[0].call("worker1", keep, rref)
    watch = weakref.ref(gate.kept[1].local_value())
    del rref
    gc.collect()
    await until(lambda: workers[0]._node.references.counts().users == 0)
    gate.kept.pop()
    gc.collect()
    assert await workers[2].call("worker2", read, gate.kept[0]) == 1 and watch() is not None
    gate.kept.clear()
    await until(lambda: watch() is None)


async def sum_by_group(worker: Worker, x: torch.Tensor) -> float:
    outcomes = await worker.group(["worker1"]).remote(Thing, 1).rpc_async().sum_with(x)
    return float(outcomes["worker1"].result())


async def sum_by_stream(worker: Worker, x: torch.Tensor) -> float:
    found: list[float] = [each async for each in worker.remote("worker1", Thing, 1).stream().sums_with(x)]
    return found[0]


@pytest.mark.parametrize(
    "sum_with",
    [
        lambda worker, x: worker.remote("worker1", Thing, 1).rpc_async().sum_with(x),
        lambda worker, x: worker.remote("worker1", Thing, 1).remote().sum_with(x),
        sum_by_stream,
        sum_by_group,
    ],
    ids=["call", "remote", "stream", "group"],
)
async def test_a_method_with_long_arguments_finds_the_value_whose_handle_has_died(
    workers: list[Worker], sum_with: Callable[..., Awaitable[float]]
) -> None:
    """The word that it has died is short, and would be there first."""
    await workers[0].call("worker1", torch.ones, 1)
    x = torch.ones(4_000_000)
    for _ in range(3):
        assert await asyncio.wait_for(sum_with(workers[0], x), LIMIT / 2) == 4_000_001


@pytest.mark.parametrize("size", [1, 3_000_000])
async def test_the_owner_calls_a_value_that_nobody_else_holds(workers: list[Worker], size: int) -> None:
    """The handle may be dropped at once: the value is there until the call has ended, however long that takes."""
    argument = torch.ones(size)
    token = act_as(workers[0])
    for _ in range(5):
        assert await RRef(Thing(3)).rpc_async().take(argument) == size
        assert await RRef(Thing(3)).remote().take(argument) == size
        assert [item async for item in RRef(Thing(3)).stream().items(argument)] == [3, size]
        assert (await workers[0].group(["worker0"]).remote(Thing, 3).rpc_async().take(argument)).values() == [size]
    act_no_more(token)


async def test_references_dropped_in_other_threads(apart: list[Worker]) -> None:
    """Handles may die anywhere."""

    def script(worker: Worker) -> int:
        rrefs = [worker.remote("worker1", Thing, i) for i in range(50)]
        return sum(rref.rpc_sync().get() for rref in rrefs)

    assert await asyncio.gather(*(asyncio.to_thread(script, worker) for worker in apart)) == [sum(range(50))] * 3
    await until_no_references(apart)


async def test_arguments_of_calls_that_do_not_run_are_released(workers: list[Worker]) -> None:
    """A function that is not there, a wrong verb, an error in unpickling: references among the arguments go back."""
    rref = workers[0].remote("worker2", Thing, 1)
    for call in (
        workers[0].call("worker1", generator, rref),
        workers[0].call("worker1", read, rref, Explodes()),  # type: ignore[call-overload]
        workers[0].call("worker1", BecomesFive(), rref),
        workers[0].call("worker1", read_async, rref, Explodes()),  # type: ignore[call-overload]
    ):
        with pytest.raises((RpcError, TypeError, ZeroDivisionError)):
            await call
    call = workers[0].call("worker1", read, rref)
    call.cancel()
    assert (await rref).value == 1


def generator(rref: RRef[Thing]) -> Any:
    yield rref


class BecomesFive:
    """Can be called here, and not where it arrives."""

    def __call__(self, rref: RRef[Thing]) -> None: ...

    def __reduce__(self) -> Any:
        return int, (5,)


class Explodes:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


async def test_what_remains_at_shutdown_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """With owner, type and the line that made it, at the owner and at the user; in the report and in the log."""
    async with cluster(2) as workers:
        token = act_as(workers[1])
        own = RRef(Thing(2))
        act_no_more(token)
        rref = workers[0].remote("worker1", Thing, 1)
        await rref
        with caplog.at_level(logging.INFO, "aiorpc"):
            user, owner = await asyncio.gather(*(worker.shutdown() for worker in workers))
    (held,) = user.references
    assert (held.role, held.owner) == ("user", "worker1") and __file__ in held.made_at
    assert {(leak.owner, leak.type) for leak in owner.references} == {("worker1", "Thing")}
    assert [__file__ in leak.made_at for leak in owner.references if leak.role == "owner"] == [True]
    logged = [record.message for record in caplog.records if "still referred to at shutdown" in record.message]
    assert len(logged) == len(user.references + owner.references)
    del own, rref


async def test_a_clean_shutdown_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No reference is left, nothing is logged."""
    with caplog.at_level(logging.INFO, "aiorpc"):
        async with cluster(2) as workers:
            rref = workers[0].remote("worker1", Thing, 1)
            await rref
            del rref
            await until_no_references(workers)
            reports = await asyncio.gather(*(worker.shutdown() for worker in workers))
    assert all(report == aiorpc.types.ShutdownReport() for report in reports)
    assert not caplog.records


@pytest.mark.parametrize("made", ["by RRef", "by remote", "by remote, unanswered"])
@pytest.mark.parametrize("verb", ["to_here", "local_value", "await"])
async def test_values_of_a_worker_that_has_shut_down(made: str, verb: str) -> None:
    """Its own references raise at once, in threads and when awaited: the values are gone, and nobody brings them.

    Whether the call that made one was answered before is nothing to whoever asks for the value.
    """
    async with cluster(1, options=RpcBackendOptions(rpc_timeout=0)) as (worker,):
        if made == "by RRef":
            rref = await worker.call("worker0", RRef, 1)
        else:
            rref = worker.remote("worker0", int, 1)
        if "unanswered" not in made:
            assert await rref == 1
        await worker.shutdown(graceful=False)
        with pytest.raises(WorkerClosed, match="worker 'worker0', which owns the value, shut down"):
            await asyncio.wait_for(rref if verb == "await" else asyncio.to_thread(getattr(rref, verb)), LIMIT)


async def test_references_of_a_worker_that_left(workers: list[Worker]) -> None:
    """Its handles are dropped; handles of its values raise."""
    async with cluster(2, options=RpcBackendOptions(rpc_timeout=30)) as others:
        mine = others[0].remote("worker1", Thing, 1)
        theirs = others[1].remote("worker0", Thing, 2)
        await mine
        await theirs
        await others[1].shutdown(graceful=False)
        await until(lambda: others[0]._node.references.counts().owned == 0)
        with pytest.raises(RpcError, match="worker1"):
            await mine
    del mine, theirs
    gc.collect()


def test_text_names_both_ids_and_the_owner() -> None:
    """str is torch's form, repr adds the owner's name and the line."""

    async def body() -> None:
        async with cluster(2) as workers:
            rref = workers[0].remote("worker1", Thing, 1)
            assert str(rref).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=")
            assert "ForkId" in str(rref) and "owned by worker1" in repr(rref) and __file__ in repr(rref)
            await rref
            del rref
            await until_no_references(workers)

    asyncio.run(body())


async def for_ever() -> None:
    await asyncio.Event().wait()


async def begin_to_read(rref: RRef[Any]) -> None:
    """It goes on when whoever has passed the reference is gone."""

    async def read_it() -> Any:
        return await rref

    WAITING.append(asyncio.ensure_future(read_it()))


WAITING: list[asyncio.Future[Any]] = []


@pytest.mark.parametrize("killed", [False, True], ids=["left", "killed"])
async def test_who_waits_for_a_value_hears_that_its_owner_is_gone(killed: bool) -> None:
    """Where the owner goes before there is a value, a third worker is told that, and of nobody else."""
    WAITING.clear()
    async with cluster(3, dynamic=True) as others:
        # Whichever of its connections the owner closes first, somebody waits for a value who still has one to it.
        for creator, reader in ((0, 2), (2, 0)):
            rref = others[creator].remote("worker1", for_ever)
            await others[creator].call(f"worker{reader}", begin_to_read, rref)
            del rref
        await until(lambda: len(others[1].pending_calls()) == 2 * len(WAITING))
        if killed:
            await Faults(others[2]).kill("worker1")
        else:
            await others[1].shutdown(graceful=False)
        for waiting in WAITING:
            with pytest.raises(PeerLost if killed else PeerLeft, match="worker1") as failure:
                await asyncio.wait_for(waiting, LIMIT)
            assert not isinstance(failure.value, PeerLost) or failure.value.worker == "worker1"
            del failure
    WAITING.clear()
