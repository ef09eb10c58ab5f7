"""Calls to several workers: outcomes in the order of members, as they come, quorums, losses, and what is refused."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import (
    NotAllowed,
    PeerLost,
    RpcBackendOptions,
    RpcCancelled,
    RpcTimeout,
    RpcUsageError,
    RRef,
    Worker,
)
from aiorpc.errors import GroupError, SerializationError, UnknownWorker
from aiorpc.testing import Faults, cluster
from aiorpc.types import Outcome
from tests.runtime.waiting import until, until_no_references

_stopped: list[str] = []
_caller: list[Worker] = []


async def name_of() -> str:
    return aiorpc.current().name


async def with_name(value: Any, *, key: str = "") -> Any:
    return aiorpc.current().name, value, key


async def fail_at(*names: str) -> str:
    """Raises on the workers of these names."""
    name = aiorpc.current().name
    if name in names:
        raise ValueError(name)
    return name


async def hang_at(*names: str) -> str:
    """Never returns on the workers of these names."""
    name = aiorpc.current().name
    if name in names:
        try:
            await asyncio.Event().wait()
        finally:
            _stopped.append(name)
    return name


@pytest.fixture(autouse=True)
def _forget() -> None:
    _stopped.clear()
    _caller.clear()


@pytest.fixture
async def four() -> AsyncIterator[list[Worker]]:
    """Four workers, the last two of which are actors."""
    async with cluster(4, roles=["", "learner", "actor", "actor"]) as workers:
        yield workers


async def test_outcomes_are_in_the_order_of_members(four: list[Worker]) -> None:
    """By id for a pattern and for a role, as they stand in a list; and each is found by its name."""
    me = four[0]
    assert (await me.group("worker*").call(name_of)).values() == ["worker0", "worker1", "worker2", "worker3"]
    assert (await me.group(role="actor").call(name_of)).values() == ["worker2", "worker3"]
    assert (await me.group("*[13]", role="actor").call(name_of)).values() == ["worker3"]
    outcomes = await me.group(["worker3", 1]).call(with_name, 5, key="k")
    assert outcomes.values() == [("worker3", 5, "k"), ("worker1", 5, "k")]
    assert outcomes["worker1"] == outcomes[1] == Outcome("worker1", ("worker1", 5, "k"), None, True)
    assert (len(outcomes), outcomes.errors, outcomes.lost, outcomes.missing) == (2, {}, (), ())
    with pytest.raises(KeyError):
        outcomes["worker2"]


async def test_an_error_of_one_member_is_its_outcome(four: list[Worker]) -> None:
    """The others have their values; only who wants all values gets the errors, as a group."""
    outcomes = await four[0].group("worker*").call(fail_at, "worker1", "worker2")
    assert outcomes.answers == {"worker0": "worker0", "worker3": "worker3"}
    assert list(outcomes.errors) == ["worker1", "worker2"]
    with pytest.raises(ValueError, match="worker1"):
        outcomes["worker1"].result()
    with pytest.raises(GroupError, match="2 of 4 members gave no value") as caught:
        outcomes.values()
    assert [str(each) for each in caught.value.exceptions] == ["worker1", "worker2"]
    assert (caught.value.failed, caught.value.lost, caught.value.missing) == (("worker1", "worker2"), (), ())


async def test_outcomes_come_as_they_are_there(four: list[Worker]) -> None:
    """``async for`` does not wait for the slowest; leaving the loop calls off what is under way."""
    call = four[0].group("worker*").call(hang_at, "worker0")
    seen = []
    async for name, outcome in call:
        seen.append((name, outcome.result()))
        if len(seen) == 3:
            break
    assert sorted(seen) == [(name, name) for name in ("worker1", "worker2", "worker3")]
    await until(lambda: _stopped == ["worker0"])
    assert call.cancelled()


async def test_iterating_ends_with_what_awaiting_raises(four: list[Worker]) -> None:
    """A quorum that cannot be had is told behind the outcomes that there are."""
    seen = []
    with pytest.raises(GroupError):
        async for name, _ in four[0].group("worker*", quorum=4).call(fail_at, "worker1"):
            seen.append(name)
    assert "worker1" in seen


async def test_a_quorum_does_not_wait_for_the_rest(four: list[Worker]) -> None:
    """So many values are enough; the rest is called off, and missing."""
    outcomes = await four[0].group("worker*", quorum=0.5).call(hang_at, "worker1", "worker3")
    assert outcomes.answers == {"worker0": "worker0", "worker2": "worker2"}
    assert outcomes.missing == ("worker1", "worker3")
    assert type(outcomes["worker1"].error) is RpcCancelled
    assert "enough others had answered" in str(outcomes["worker1"].error)
    await until(lambda: sorted(_stopped) == ["worker1", "worker3"])


async def test_a_quorum_that_cannot_be_had_fails_at_once(four: list[Worker]) -> None:
    """Nobody waits for members that cannot help any more."""
    _caller.append(four[0])
    with pytest.raises(GroupError, match="where 3 values are wanted") as caught:
        await four[0].group("worker[123]", quorum=3).call(fail_at_or_hang, "worker2", "worker3")
    assert (caught.value.failed, caught.value.missing) == (("worker2",), ("worker3",))
    missing = [str(error) for error in caught.value.exceptions if isinstance(error, RpcCancelled)]
    assert len(missing) == 1 and "too many others had failed" in missing[0]
    await until(lambda: _stopped == ["worker3"])


async def fail_at_or_hang(fails: str, hangs: str) -> str:
    """The one that fails does so when the caller has the third one's value, which would be missing else."""
    if await hang_at(hangs) == fails:
        await until(lambda: sum(call.direction == "made" for call in _caller[0].pending_calls()) == 2)
    return await fail_at(fails)


async def test_a_timeout_names_who_is_missing(four: list[Worker]) -> None:
    """With a timeout a member that is late is missing; the others have answered."""
    outcomes = await four[0].group("worker*", timeout=0.3).call(hang_at, "worker2")
    assert outcomes.missing == ("worker2",)
    assert type(outcomes["worker2"].error) is RpcTimeout
    assert len(outcomes.answers) == 3


async def test_cancelling_calls_off_all_members(four: list[Worker]) -> None:
    """The task that waits is cancelled: every callee is told to stop."""
    names = ("worker0", "worker1", "worker2", "worker3")
    task = asyncio.ensure_future(_awaited(lambda: four[0].group("worker*").call(hang_at, *names)))
    await until(lambda: sum(call.direction == "served" for worker in four for call in worker.pending_calls()) == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: sorted(_stopped) == sorted(names))


async def _awaited(make: Callable[[], aiorpc.types.GroupCall[Any]]) -> aiorpc.types.Outcomes[Any]:
    return await make()


async def test_a_member_that_is_lost_is_named(four: list[Worker]) -> None:
    """Its outcome says so, and so does the group of errors; a group by pattern goes on without it."""
    call = four[0].group("worker*").call(hang_at, "worker3")
    await until(lambda: four[3].pending_calls() != [])
    await four[3]._drop()
    outcomes = await call
    assert (outcomes.lost, len(outcomes.answers)) == (("worker3",), 3)
    assert type(outcomes["worker3"].error) is PeerLost
    with pytest.raises(GroupError) as caught:
        outcomes.values()
    assert caught.value.lost == ("worker3",)
    assert (await four[0].group("worker*").call(name_of)).values() == ["worker0", "worker1", "worker2"]
    assert (await four[0].group(["worker1", "worker3"]).call(name_of)).lost == ("worker3",)


async def test_a_group_by_pattern_follows_who_comes_and_goes() -> None:
    """In a group without a size."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        group = workers[0].group(role="actor")
        with pytest.raises(UnknownWorker, match="no worker is in the group"):
            group.call(name_of)
        async with aiorpc.Worker("late", store=store, role="actor") as late:
            await until(lambda: len(workers[0].worker_infos()) == 3)
            assert (await group.call(name_of)).values() == ["late"]
            assert group.members == [late.info]
        await until(lambda: len(workers[0].worker_infos()) == 2)
        with pytest.raises(UnknownWorker):
            group.call(name_of)


class Unserialisable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


@pytest.mark.parametrize(
    ("attempt", "kind", "text"),
    [
        pytest.param(lambda me: me.group([]), RpcUsageError, "at least one member", id="empty"),
        pytest.param(lambda me: me.group(), RpcUsageError, "takes a pattern", id="nothing"),
        pytest.param(lambda me: me.group(""), RpcUsageError, "empty pattern", id="empty pattern"),
        pytest.param(lambda me: me.group(["worker1", 1]), RpcUsageError, "twice", id="twice"),
        pytest.param(lambda me: me.group(1), RpcUsageError, r"group\(\[1\]\)", id="rank"),
        pytest.param(lambda me: me.group(["worker1"], role="a"), RpcUsageError, "role=", id="list and role"),
        pytest.param(lambda me: me.group(["worker1", "x"]), UnknownWorker, "'x'", id="unknown"),
        pytest.param(lambda me: me.group("x*").call(name_of), UnknownWorker, "nothing was sent", id="fits nobody"),
        pytest.param(lambda me: me.group(role="b").call(name_of), UnknownWorker, "role 'b'", id="no such role"),
        pytest.param(lambda me: me.group("*", quorum=0), RpcUsageError, "quorum", id="quorum 0"),
        pytest.param(lambda me: me.group("*", quorum=1.5), RpcUsageError, "quorum", id="quorum 1.5"),
        pytest.param(lambda me: me.group("*", quorum=True), RpcUsageError, "quorum", id="quorum True"),
        pytest.param(lambda me: me.group("*", quorum=4).call(name_of), RpcUsageError, "more than", id="large quorum"),
        pytest.param(lambda me: me.group(["worker1"], quorum=2), RpcUsageError, "more than", id="large for a list"),
        pytest.param(lambda me: me.group("*").call(3), RpcUsageError, "not callable", id="no function"),
        pytest.param(lambda me: me.group("*").call(name_of, timeout=1), RpcUsageError, "rpc.group", id="keyword"),
        pytest.param(lambda me: me.group("*").call(name_of, quorum=1), RpcUsageError, "rpc.group", id="its keyword"),
        pytest.param(
            lambda me: me.group("*").call(with_name, Unserialisable()), SerializationError, "argument 0", id="pickle"
        ),
        pytest.param(
            lambda me: me.group("*").call(with_name, 1, key=Unserialisable()), SerializationError, "'key'", id="named"
        ),
        pytest.param(lambda me: me.group("*").rpc_sync(name_of), aiorpc.errors.WouldBlockLoop, "await", id="blocking"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_sent(
    trio: list[Worker], attempt: Callable[[Worker], Any], kind: type[Exception], text: str
) -> None:
    """The error says what to do, and no worker has heard of it."""
    with pytest.raises(kind, match=text):
        attempt(trio[0])
    assert all(worker.statistics().calls_made == 0 for worker in trio)


async def test_references_go_to_each_member(four: list[Worker]) -> None:
    """What is bound to one receiver is written for each of them, and nothing stays referred to."""

    async def body() -> list[int]:
        ref = RRef([7])
        return (await aiorpc.group("worker[123]").call(first_of, ref)).values()

    assert await four[0].call("worker0", body) == [7, 7, 7]
    await until_no_references(four)


async def first_of(ref: RRef[list[int]]) -> int:
    return (await ref)[0]


async def test_tensors_arrive_apart(four: list[Worker]) -> None:
    """Small, of medium size, and so large that they go by memory that is shared: each member has its own."""
    for size in (10, 3_000, 600_000):
        sent = torch.arange(size, dtype=torch.float32)
        for _ in range(3):
            got = (await four[0].group("worker*").call(add_own_number, sent)).values()
            assert [int(each[0]) for each in got] == [0, 1, 2, 3]
            assert all(torch.equal(each - each[0], sent) for each in got)
        assert sent[0] == 0


def add_own_number(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(aiorpc.current().id)


async def test_faults_hit_the_calls_of_members_as_others(four: list[Worker]) -> None:
    """Dropped, delayed and refused, by receiver and by function."""
    group = four[0].group("worker*", timeout=0.5)
    await group.call(name_of)
    with Faults(four[0]) as faults:
        dropped = faults.drop("call", to="worker1", function=name_of, times=1)
        faults.delay(0.05, "call", to="worker2", times=1)
        faults.fail("call", to="worker3", times=1)
        outcomes = await group.call(name_of)
    assert dropped.count == 1
    assert list(outcomes.answers) == ["worker0", "worker2"]
    assert outcomes.missing == ("worker1", "worker3")
    assert (await group.call(name_of)).values() == [worker.name for worker in four]


async def test_too_many_calls_are_refused_for_the_member_that_has_them() -> None:
    """The others are called."""
    async with cluster(3, options=RpcBackendOptions(max_pending_calls=2)) as workers:
        held = [workers[0].call("worker2", hang_at, "worker2") for _ in range(2)]
        outcomes = await workers[0].group("worker*").call(name_of)
        assert list(outcomes.answers) == ["worker0", "worker1"]
        assert type(outcomes["worker2"].error) is aiorpc.Overloaded
        for call in held:
            call.cancel()


@pytest.mark.parametrize("looks", ["not", "at one", "as they come", "quorum"])
async def test_an_error_that_nobody_looks_at_is_logged(
    four: list[Worker], looks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the line that made the call; a look at any outcome is enough, and a quorum says that some may fail."""
    if looks == "quorum":
        await four[0].group("worker*", quorum=3).call(fail_at, "worker1")
    elif looks == "as they come":
        async for _ in four[0].group("worker*").call(fail_at, "worker1"):
            pass
    else:
        outcomes = await four[0].group("worker*").call(fail_at, "worker1")
        assert looks == "not" or outcomes["worker0"].value == "worker0"
        del outcomes
    gc.collect()
    logged = [record.getMessage() for record in caplog.records if "nobody looked" in record.getMessage()]
    assert len(logged) == (looks == "not"), logged
    assert not logged or ("test_group_calls.py" in logged[0] and "'worker1': ValueError" in logged[0])


async def pass_on(pattern: str) -> aiorpc.types.Outcomes[Any]:
    return await aiorpc.group(pattern).call(fail_at, "worker2")


async def test_outcomes_travel(four: list[Worker]) -> None:
    """A handler may return them, and raise the error that is made of them."""
    outcomes = await four[0].call("worker1", pass_on, "worker[23]")
    assert (outcomes.answers, list(outcomes.errors)) == ({"worker3": "worker3"}, ["worker2"])
    with pytest.raises(GroupError, match="1 of 2") as caught:
        await four[0].call("worker1", pass_on_all, "worker[23]")
    assert (caught.value.failed, [type(each) for each in caught.value.exceptions]) == (("worker2",), [ValueError])


async def pass_on_all(pattern: str) -> list[Any]:
    return (await pass_on(pattern)).values()


_kept: dict[str, list[torch.Tensor]] = {}


def keep(tensor: torch.Tensor) -> None:
    """Write to it, and keep it."""
    tensor[0] = aiorpc.current().id
    _kept.setdefault(aiorpc.current().name, []).append(tensor)


async def test_a_large_tensor_lies_in_shared_memory_once(four: list[Worker]) -> None:
    """However many members have it; what each writes is its own, and the last one gives the memory back."""
    me, group, size = four[0], four[0].group("worker[123]"), 2 << 20
    memory = me._node.memory

    try:
        for _ in range(100):  # until the memory is there, and all have mapped it
            (await group.call(keep, torch.zeros(size))).values()
            if memory.leases == 3:
                break
            _kept.clear()
            await until(lambda: memory.leases == 0)
        _kept.clear()
        await until(lambda: memory.arena.blocks == 0)
        sent = torch.arange(size, dtype=torch.float32)
        (await group.call(keep, sent)).values()
        assert (memory.arena.blocks, memory.leases) == (1, 3)
        assert size * 4 <= memory.arena.used < size * 5
        assert [int(_kept[f"worker{number}"][0][0]) for number in (1, 2, 3)] == [1, 2, 3]
        assert all(torch.equal(tensor[1:], sent[1:]) for tensors in _kept.values() for tensor in tensors)
        for number in (1, 2, 3):
            assert memory.arena.blocks == 1
            del _kept[f"worker{number}"]
            await until(lambda: memory.leases == 3 - number)  # noqa: B023  # called at once
        assert (memory.arena.blocks, memory.arena.used) == (0, 0)
    finally:
        _kept.clear()


async def test_retries_hold_for_each_member(four: list[Worker]) -> None:
    """The options of `peer` are those of the call to each member."""
    with Faults(four[0]) as faults:
        faults.fail("call", to="worker2", times=1, error=aiorpc.Overloaded("full"))
        outcomes = await four[0].group("worker*", retries=2, backoff=0.01).call(name_of)
    assert outcomes.values() == [worker.name for worker in four]


async def test_blocking_forms_have_torchs_names(four: list[Worker]) -> None:
    """In threads that run no loop."""
    group = four[0].group("worker*")

    def body() -> None:
        assert group.rpc_sync(with_name, (1,), {"key": "k"})["worker1"].value == ("worker1", 1, "k")
        assert group.rpc_async(name_of).wait().values() == [worker.name for worker in four]
        assert group.rpc_sync(hang_at, ("worker1",), timeout=0.3).missing == ("worker1",)
        assert len(group.rpc_sync(hang_at, ("worker1",), quorum=3).answers) == 3

    await asyncio.to_thread(body)


async def test_a_nested_call_has_the_rest_of_the_time(four: list[Worker]) -> None:
    """A group called in a handler inherits the deadline of the call that is served."""

    async def body() -> tuple[str, ...]:
        outcomes = await aiorpc.group("worker[23]").call(time_left)
        assert all(left < 20.0 for left in outcomes.values())
        return tuple(outcomes.answers)

    assert await four[0].peer("worker1", timeout=20.0).call(body) == ("worker2", "worker3")


async def time_left() -> float:
    return aiorpc.deadline() or 0.0


async def test_rights_hold_for_each_member() -> None:
    """A member that does not run it for this caller says so; the others answer."""
    closed = RpcBackendOptions(allow=[])
    async with cluster(3, options=[RpcBackendOptions(), RpcBackendOptions(), closed]) as workers:
        outcomes = await workers[0].group("worker[12]").call(name_of)
    assert list(outcomes.answers) == ["worker1"]
    assert type(outcomes["worker2"].error) is NotAllowed


async def test_without_pickles() -> None:
    """In a group with safe serialization the same holds, and functions by value are refused."""
    async with cluster(3, options=RpcBackendOptions(serialization="safe", allow="*")) as workers:
        group = workers[0].group("worker*")
        assert len((await group.call(with_name, {"a": torch.ones(3)})).values()) == 3
        with pytest.raises(SerializationError, match="by value"):
            group.call(lambda: 1)
