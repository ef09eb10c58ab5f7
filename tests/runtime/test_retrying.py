"""Calls with retries: what is tried again, what is not, one deadline, and idempotent calls, which run once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

import aiorpc
from aiorpc import (
    NotAllowed,
    Overloaded,
    PeerLeft,
    PeerLost,
    RpcBackendOptions,
    RpcCancelled,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    Worker,
    WorkerClosed,
)
from aiorpc.protocol.retries import Backoff
from aiorpc.runtime.caller.retrying import RetryOptions
from aiorpc.runtime.calls.functions import describe
from aiorpc.testing import Faults, cluster
from tests.limits import busy
from tests.runtime.waiting import until
from tests.scripts import run
from tests.unlooked import unlooked_at

QUICK = (0.001, 0.01)
PAUSED = (10_000.0, 10_000.0)  # a test ends such a pause itself
RUNS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def counts() -> None:
    RUNS.clear()


@pytest.fixture
def store() -> Store:
    return HashStore()


def ran(key: str) -> int:
    RUNS[key] += 1
    return RUNS[key]


async def ran_later(key: str) -> int:
    return ran(key)


def where(key: str = "where") -> str:
    ran(key)
    return aiorpc.current().name


def raises(error: Exception) -> None:
    ran("raises")
    raise error


async def for_ever() -> None:
    ran("for ever")
    await asyncio.Event().wait()


async def nested(retries: int) -> Any:
    """A call with retries, to nobody, as part of this one."""
    peer = aiorpc.current().peer("nobody", timeout=0, retries=retries, backoff=QUICK)
    return await peer.call(where)


async def die(workers: list[Worker]) -> None:
    """The second worker is lost, and the first one, which is connected to it, sees that."""
    assert await workers[0].call("worker1", where, "last words") == "worker1"
    await workers[1]._drop()


# --- what is tried again ----------------------------------------------------------------------------------------------


async def test_without_failures_it_is_one_call(pair: list[Worker]) -> None:
    """It gives the value, awaited or in a thread, and runs once."""
    peer = pair[0].peer("worker1", retries=3)
    assert await peer.call(ran, "a") == 1 and RUNS["a"] == 1
    future = peer.call(torch.add, torch.ones(3), other=torch.ones(3))
    assert (await future).tolist() == [2.0] * 3 and future.done() and not pair[0].statistics().calls_retried
    assert await run(pair[0], lambda: peer.call(ran_later, "b").wait()) == 1
    assert await asyncio.gather(*(peer.call(ran, "c") for _ in range(50))) is not None and RUNS["c"] == 50
    assert "3 retries" in repr(peer)


async def test_a_newcomer_of_the_same_name_gets_the_next_try(store: Store) -> None:
    """The worker dies with the call; the call ends with the answer of the one that comes in its place."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        first = await aiorpc.init("server", store=store)
        call = worker.peer("server", retries=1000, backoff=(0.01, 0.05)).call(for_ever)
        other = worker.peer("server", retries=1000, backoff=(0.01, 0.05)).call(where, "other")
        await until(lambda: RUNS["for ever"])
        assert await other == "server"
        await first._drop()
        with_reference = worker.peer("server", retries=1000, backoff=(0.01, 0.05)).call(str, worker.remote(0, dict))
        async with aiorpc.init("server", store=store):
            await until(lambda: RUNS["for ever"] == 2)
            assert "RRef" in await with_reference
            assert worker.statistics().calls_retried >= 1 and not call.done()
            call.cancel()
            with pytest.raises(RpcCancelled):
                await call


async def test_a_worker_that_has_left_and_comes_back(store: Store) -> None:
    """Calls made in between find it when it is there."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        async with aiorpc.init("server", store=store):
            peer = worker.peer("server", retries=1000, backoff=(0.01, 0.05))
            assert await peer.call(where) == "server"
        calls = [peer.call(where) for _ in range(5)]
        async with aiorpc.init("server", store=store):
            assert await asyncio.gather(*calls) == ["server"] * 5


async def test_overload_at_the_callee_is_waited_out(store: Store) -> None:
    """A call that was not run because too many were there is made again, as often as it takes."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_queued_calls=1)]
    async with cluster(2, store=store, options=options) as workers:
        held = workers[0].call("worker1", for_ever)
        await until(lambda: RUNS["for ever"])
        with pytest.raises(Overloaded):
            await workers[0].call("worker1", ran, "a")
        calls = [workers[0].peer("worker1", retries=500, backoff=(0.01, 0.02)).call(ran, "a") for _ in range(3)]
        await until(lambda: workers[0].statistics().calls_retried >= 3)
        assert not RUNS["a"] and not any(call.done() for call in calls)
        held.cancel()
        assert sorted(await asyncio.gather(*calls)) == [1, 2, 3]
        with pytest.raises(RpcCancelled):
            await held


async def test_overload_at_the_caller_is_waited_out(store: Store) -> None:
    """It is not raised at once, as it is without retries."""
    async with cluster(2, store=store, options=RpcBackendOptions(max_pending_calls=1)) as workers:
        held = workers[0].call("worker1", for_ever)
        with pytest.raises(Overloaded):
            workers[0].call("worker1", ran, "a")
        call = workers[0].peer("worker1", retries=500, backoff=(0.01, 0.02)).call(ran, "a")
        await until(lambda: workers[0].statistics().calls_retried >= 2)
        held.cancel()
        assert await call == 1 and RUNS["a"] == 1
        with pytest.raises(RpcCancelled):
            await held


# --- what is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), Overloaded("of mine"), PeerLost("of mine"), PeerLeft("mine")])
async def test_what_the_function_raises_is_its_answer(pair: list[Worker], error: Exception) -> None:
    """Also where it is an error that would be a reason, had it come from the runtime: the function was run."""
    with pytest.raises(type(error), match=str(error)):
        await pair[0].peer("worker1", retries=5, backoff=QUICK).call(raises, error)
    assert RUNS["raises"] == 1 and not pair[0].statistics().calls_retried


async def test_bad_input_is_raised_at_once(pair: list[Worker]) -> None:
    """Where it is without retries; nothing is sent and nothing is tried again."""
    peer: Any = pair[0].peer("worker1", retries=5)
    with pytest.raises(TypeError, match="cannot be serialised"):
        peer.call(ran, threading.Lock())
    with pytest.raises(RpcUsageError, match="not callable"):
        peer.call("ran")
    with pytest.raises(RpcUsageError, match="takes no argument 'timeout'"):
        peer.call(ran, "a", timeout=3)
    assert not pair[0].statistics().calls_retried


async def test_what_is_not_allowed_stays_so(store: Store) -> None:
    """NotAllowed comes with the first try."""
    async with cluster(2, store=store, options=[RpcBackendOptions(), RpcBackendOptions(allow=[])]) as workers:
        with pytest.raises(NotAllowed):
            await workers[0].peer("worker1", retries=5, backoff=QUICK).call(ran, "a")
        assert not workers[0].statistics().calls_retried


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"retries": -1}, "retries"),
        ({"retries": 2, "backoff": -1}, "backoff"),
        ({"retries": 2, "idempotent": 1}, "idempotent must be"),
        ({"idempotent": True}, "give retries="),
    ],
)
async def test_options_that_cannot_be(pair: list[Worker], given: dict[str, Any], text: str) -> None:
    """Refused when the handle is made."""
    with pytest.raises(RpcUsageError, match=text):
        pair[0].peer("worker1", **given)


async def test_streams_and_references_are_not_tried_again(pair: list[Worker]) -> None:
    """The error says to use a handle without retries."""
    peer = pair[0].peer("worker1", retries=2)
    for verb in (peer.stream, peer.remote):
        with pytest.raises(RpcUsageError, match=rf"{verb.__name__}\(\) is not tried again.*without retries"):
            verb(ran, "a")  # type: ignore[arg-type]


async def test_no_retries_in_a_context_of_autograd(pair: list[Worker]) -> None:
    """The first try has its place in the graph."""

    async def body() -> None:
        async with aiorpc.autograd.context():
            with pytest.raises(RpcUsageError, match="autograd"):
                aiorpc.peer("worker1", retries=2).call(ran, "a")

    await pair[0].call("worker0", body)
    assert not RUNS["a"]


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_the_last_error_is_raised_with_how_often_it_was_tried(store: Store) -> None:
    """A note says it; the error names the line of the program."""
    async with cluster(2, store=store) as workers:
        await die(workers)
        with pytest.raises(PeerLost, match=r"where.*test_retrying\.py") as caught:
            await workers[0].peer("worker1", retries=3, backoff=QUICK).call(where)
        assert any("it was tried 4 times" in note for note in caught.value.__notes__)
        assert workers[0].statistics().calls_retried == 3


async def test_all_tries_have_one_deadline(store: Store) -> None:
    """No pause is begun that would outlast it; a call that hangs has what is left."""
    async with cluster(2, store=store) as workers:
        peer = workers[0].peer("worker1", timeout=0.3, retries=1000, backoff=(0.02, 0.05))
        began = time.monotonic()
        with pytest.raises(RpcTimeout):
            await peer.call(for_ever)
        assert time.monotonic() - began < 5 * busy() and RUNS["for ever"] == 1
        with Faults(workers[0]) as faults:
            faults.fail("call", times=2, error=Overloaded("full"))
            with pytest.raises(RpcTimeout, match=r"set timeout \(0\.3 s\)") as caught:
                await peer.call(for_ever)
        assert caught.value.seconds == 0.3 and caught.value.worker == "worker1"  # not what the last try had
        await die(workers)
        began = time.monotonic()
        with pytest.raises(PeerLost):
            await peer.call(where)
        assert time.monotonic() - began < 5 * busy()


async def test_a_nested_call_has_the_rest_of_its_callers_time(store: Store) -> None:
    """Also if it has no limit of its own: its tries end with that."""
    async with cluster(2, dynamic=True, store=store) as workers:
        with pytest.raises(RpcTimeout):
            await workers[0].peer("worker1", timeout=0.3).call(nested, 1000)
        await until(lambda: all(worker.is_idle() for worker in workers))


async def test_cancelling_ends_the_try_under_way(pair: list[Worker]) -> None:
    """The callee is told, as of any call; so it is if the task that awaits is cancelled."""
    peer = pair[0].peer("worker1", retries=5)
    call = peer.call(for_ever)
    await until(lambda: RUNS["for ever"])
    assert call.cancel() and not call.cancel()
    with pytest.raises(RpcCancelled):
        await call
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(peer.call(for_ever), 0.05)
    await until(lambda: pair[1].statistics().calls_running == 0)


async def test_cancelling_and_leaving_in_a_pause(store: Store) -> None:
    """No try follows; the worker does not leave gracefully as long as a call waits for its next try."""
    async with cluster(2, store=store) as workers:
        await die(workers)
        peer = workers[0].peer("worker1", timeout=0, retries=3, backoff=(1000, 1000))
        calls = [peer.call(where) for _ in range(3)]
        await until(lambda: workers[0].statistics().calls_retried == 3)
        assert not workers[0].is_idle()
        calls[0].cancel()
        with pytest.raises(RpcCancelled):
            await calls[0]
        await workers[0].shutdown(graceful=False)
        for call in calls[1:]:
            with pytest.raises(WorkerClosed, match=r"next try of .*where"):
                await call


async def test_a_call_that_is_in_a_pause_is_pending(store: Store) -> None:
    """It is named where one looks what a worker waits for, with the worker, the rest of its time and its line."""
    async with cluster(2, store=store) as workers:
        await die(workers)
        no_limit = workers[0].peer("worker1", timeout=0, retries=3, backoff=PAUSED).call(ran, "a")
        await until(lambda: workers[0].statistics().calls_retried == 1)
        bounded = workers[0].peer("worker1", timeout=50_000, retries=3, backoff=PAUSED).call(where)
        await until(lambda: workers[0].statistics().calls_retried == 2)
        first, second = workers[0].pending_calls()
        assert (first.direction, first.worker, first.function) == ("made", "worker1", describe(ran))
        assert (second.direction, second.worker, second.function) == ("made", "worker1", describe(where))
        assert first.deadline is None and second.deadline is not None
        assert 0 < second.deadline <= 50_000 and "test_retrying.py" in second.made_at
        assert describe(where) in workers[0]._node.describe_pending()
        for call in (no_limit, bounded):
            call.cancel()
            with pytest.raises(RpcCancelled):
                await call
        assert not workers[0].pending_calls()


async def test_a_failure_that_nobody_looked_at_is_logged_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """For the call, with the line that made it, and not for each try."""
    async with cluster(2, store=store) as workers:
        await die(workers)
        peer = workers[0].peer("worker1", retries=2, backoff=QUICK)
        call = peer.call(where)
        await until(call.done)
        del call

        lines = partial(unlooked_at, caplog)

        await until(lines)
        (line,) = lines()
        assert "test_retrying.py" in line and line.count("nobody looked") == 1
        assert all(record.levelno < logging.CRITICAL for record in caplog.records)
        caplog.clear()


# --- idempotent calls -------------------------------------------------------------------------------------------------


async def big(key: str, size: int) -> torch.Tensor:
    """A result for whose bytes there may be no room."""
    return torch.full((size,), float(ran(key)))


def crowd(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """There is no room for answers to the worker's callers, until what this returns is called."""
    (service,) = worker._node.services
    backlog = service._backlog
    monkeypatch.setattr(backlog, "limit", -1)
    return lambda: monkeypatch.undo()


async def test_a_result_that_was_dropped_is_given_again(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """The callee has run the call and had no room for the answer: with idempotent calls it comes with another try."""
    assert await pair[0].call("worker1", where) == "worker1"
    make_room = crowd(pair[1], monkeypatch)
    with pytest.raises(Overloaded, match="dropped"):
        await pair[0].peer("worker1", retries=5, backoff=QUICK).call(big, "plain", 10)
    assert RUNS["plain"] == 1 and pair[0].statistics().calls_retried == 0
    once = pair[0].peer("worker1", retries=1000, backoff=(0.01, 0.02), idempotent=True)
    calls = [once.call(big, "once", 10), once.call(raises, ValueError("first")), once.call(ran, "plain")]
    await until(lambda: pair[0].statistics().calls_retried >= 6)
    assert RUNS["once"] == RUNS["raises"] == 1
    make_room()
    assert (await calls[0]).tolist() == [1.0] * 10 and await calls[2] == 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="first"):
        await calls[1]  # type: ignore[misc]
    assert RUNS["once"] == RUNS["raises"] == 1 and RUNS["plain"] == 2


async def test_calls_of_one_number_run_once(pair: list[Worker]) -> None:
    """Whatever the connection carries twice: one that comes while the first runs has the same answer."""
    await pair[0].call("worker1", where)
    from aiorpc.runtime.calls.options import CallOptions

    peer = pair[0]._node.peers.find("worker1")
    site = (test_calls_of_one_number_run_once.__code__, 0)

    def send(number: int, before: int, function: Callable[..., Any], *args: Any) -> Any:
        return peer.call(function, args, None, 30.0, options=CallOptions(site=site, once=(number, before)))

    gate: asyncio.Event = asyncio.Event()
    both = [send(7, before, wait_for_gate, "gate") for before in range(2)]
    GATES["gate"] = (asyncio.get_running_loop(), gate)
    await until(lambda: RUNS["gate"])
    gate.set()
    assert await asyncio.gather(*both) == [1, 1] and await send(7, 2, wait_for_gate, "gate") == 1
    assert RUNS["gate"] == 1
    # Another number is another call, and so is the same number of another caller.
    assert await send(8, 0, ran, "gate") == 2
    assert await pair[1].call("worker1", ran, "gate") == 3
    # The first is given up: one that waits for its answer is told that it may come again.
    first, second = send(9, 0, for_ever), send(9, 1, for_ever)
    await until(lambda: RUNS["for ever"])
    first.cancel()
    with pytest.raises(Overloaded, match="not run"):
        await second
    assert second.again and await send(9, 2, ran, "gate") == 4
    with pytest.raises(RpcCancelled):
        await first


GATES: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}


async def wait_for_gate(key: str) -> int:
    count = ran(key)
    await until(lambda: key in GATES)
    await GATES[key][1].wait()
    return count


async def test_what_is_forgotten_is_refused(store: Store) -> None:
    """Nobody knows any more whether it has run: an error says so, with the option."""
    from aiorpc.runtime.calls.options import CallOptions

    options = [RpcBackendOptions(), RpcBackendOptions(max_remembered_answers=2, max_remembered_bytes=1000)]
    async with cluster(2, store=store, options=options) as workers:
        peer = workers[0]._node.peers.find("worker1")
        site = (test_what_is_forgotten_is_refused.__code__, 0)

        def send(number: int, before: int, function: Callable[..., Any], *args: Any) -> Any:
            return peer.call(function, args, None, 30.0, options=CallOptions(site=site, once=(number, before)))

        assert [await send(number, 0, ran, "a") for number in range(4)] == [1, 2, 3, 4]
        (service,) = workers[1]._node.services
        assert len(service._answers.remembered) == 2
        with pytest.raises(RpcError, match=r"forgotten.*max_remembered_answers"):
            await send(1, 1, ran, "a")
        assert await send(3, 1, ran, "a") == 4 and await send(9, 1, ran, "a") == 5 and RUNS["a"] == 5
        assert await send(0, 0, ran, "a") == 6  # a first try is run, whatever its number
        for number, function, text in ((20, lots, "max_remembered_bytes"), (21, refers, "references")):
            assert await send(number, 0, function) is not None
            with pytest.raises(RpcError, match=f"was run.*{text}"):
                await send(number, 1, function)
        assert RUNS["lots"] == RUNS["refers"] == 1


async def fill(worker: Worker) -> None:
    """The second worker answers more idempotent calls of that one than it remembers if that is one."""
    for number in range(3):
        assert await worker.peer("worker1", retries=1, idempotent=True).call(ran, f"newer {number}") == 1


@pytest.mark.parametrize("at", ["caller", "callee"])
async def test_what_was_refused_before_it_ran_is_not_forgotten(store: Store, at: str) -> None:
    """Overloaded says that nothing was run: the call is run when it comes again, however many were answered since."""
    few = RpcBackendOptions(max_pending_calls=1) if at == "caller" else RpcBackendOptions()
    options = [few, RpcBackendOptions(max_queued_calls=1, max_remembered_answers=1)]
    async with cluster(2, store=store, options=options) as workers:
        assert await workers[0].call("worker1", where) == "worker1"
        await until(lambda: workers[0]._node.peers.find("worker1").refusal() is None)  # what else it said is sent
        held = workers[0].call("worker1", for_ever)
        await until(lambda: RUNS["for ever"])
        call = workers[0].peer("worker1", timeout=0, retries=9, backoff=PAUSED, idempotent=True).call(ran, "a")
        await until(lambda: workers[0]._node.retries.paused)
        assert "a" not in RUNS
        (paused,) = workers[0]._node.retries.paused
        held.cancel()
        await until(lambda: workers[0]._node.peers.find("worker1").refusal() is None and workers[1].is_idle())
        await fill(workers[0])
        paused.pause_over()
        assert await call == 1 and RUNS["a"] == 1
        with pytest.raises(RpcCancelled):
            await held


@pytest.mark.parametrize("refused_before", [False, True])
async def test_what_ran_and_was_dropped_is_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch, refused_before: bool
) -> None:
    """Overloaded says too that there was no room for the answer: that call is not run again, whatever comes later."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_queued_calls=1, max_remembered_answers=1)]
    async with cluster(2, store=store, options=options) as workers:
        assert await workers[0].call("worker1", where) == "worker1"
        held = workers[0].call("worker1", for_ever)
        await until(lambda: RUNS["for ever"])
        if not refused_before:
            held.cancel()
            await until(workers[1].is_idle)
        make_room = crowd(workers[1], monkeypatch)
        call = workers[0].peer("worker1", timeout=0, retries=9, backoff=PAUSED, idempotent=True).call(big, "a", 10)
        if refused_before:
            await until(lambda: workers[0]._node.retries.paused)
            held.cancel()
            await until(workers[1].is_idle)
            (paused,) = workers[0]._node.retries.paused
            paused.pause_over()
        await until(lambda: RUNS["a"] and workers[0]._node.retries.paused)
        (paused,) = workers[0]._node.retries.paused

        async def try_in_vain() -> None:
            before = workers[0].statistics().calls_retried
            paused.pause_over()
            await until(lambda: workers[0].statistics().calls_retried > before and workers[0]._node.retries.paused)

        await try_in_vain()  # there is no room to send it what is kept
        make_room()
        await fill(workers[0])
        other = workers[0].call("worker1", for_ever)
        await until(lambda: RUNS["for ever"] == 2)
        await try_in_vain()  # it is refused before anybody looks for its answer
        other.cancel()
        await until(workers[1].is_idle)
        paused.pause_over()
        with pytest.raises(RpcError, match=r"forgotten.*max_remembered_answers"):
            await call
        assert RUNS["a"] == 1
        with pytest.raises(RpcCancelled):
            await held


async def test_what_another_worker_may_have_run_is_no_try_of_this_one(store: Store) -> None:
    """The one that takes the place of a lost one runs the call, however many it has answered before that comes."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        first = await aiorpc.init("worker1", store=store)
        once = worker.peer("worker1", timeout=0, retries=9, backoff=PAUSED, idempotent=True)
        call = once.call(ran_first_for_ever, "a")
        await until(lambda: RUNS["a"])
        await first._drop()
        await until(lambda: worker._node.retries.paused)
        (paused,) = worker._node.retries.paused
        paused.pause_over()  # while nobody is there
        await until(lambda: worker.statistics().calls_retried == 2 and worker._node.retries.paused)
        async with aiorpc.init("worker1", store=store, options=RpcBackendOptions(max_remembered_answers=1)):
            await fill(worker)
            paused.pause_over()
            assert await call == 2


async def test_what_another_member_may_have_run_is_no_try_of_this_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group, whose members are asked in turn: each knows of the tries that came to it, and of no others."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_remembered_answers=1), RpcBackendOptions()]
    async with cluster(3, store=store, options=options) as workers:
        assert await workers[0].call("worker2", where) == "worker2"
        make_room = crowd(workers[2], monkeypatch)
        turns = iter(["worker2", "worker1"])
        retries, site = workers[0]._node.retries, (fill.__code__, 0)
        once = RetryOptions(9, Backoff(*PAUSED), idempotent=True, wait=False)
        call = retries.call(lambda: next(turns), ran_later, ("a",), {}, 0, once, site)
        await until(lambda: RUNS["a"] and retries.paused)
        (paused,) = retries.paused
        await fill(workers[0])
        paused.pause_over()
        assert await call == 2
        make_room()


async def ran_first_for_ever(key: str) -> int:
    if ran(key) == 1:
        await asyncio.Event().wait()
    return RUNS[key]


async def test_the_calls_that_are_known_not_to_have_run_are_bounded(store: Store) -> None:
    """Beyond eight for each answer that may be kept the first are refused, as calls with forgotten answers are."""
    from aiorpc.runtime.calls.options import CallOptions

    options = [RpcBackendOptions(), RpcBackendOptions(max_queued_calls=1, max_remembered_answers=1)]
    async with cluster(2, store=store, options=options) as workers:
        peer = workers[0]._node.peers.find("worker1")
        site = (test_the_calls_that_are_known_not_to_have_run_are_bounded.__code__, 0)

        def send(number: int, before: int) -> Any:
            return peer.call(ran, ("a",), None, 30.0, options=CallOptions(site=site, once=(number, before)))

        held = workers[0].call("worker1", for_ever)
        await until(lambda: RUNS["for ever"])
        for number in (*range(1, 41), 33, 41):  # of 33 to 40 the first one comes once more, and so the second one goes
            with pytest.raises(Overloaded, match="not run"):
                await send(number, 0)
        held.cancel()
        await until(workers[1].is_idle)
        assert [await send(number, 0) for number in (50, 51)] == [1, 2]
        with pytest.raises(RpcError, match="forgotten"):
            await send(34, 1)
        assert [await send(number, 1) for number in (41, 33)] == [3, 4]
        with pytest.raises(RpcError, match="forgotten"):
            await send(41, 2)
        with pytest.raises(RpcCancelled):
            await held


def lots() -> bytes:
    ran("lots")
    return bytes(2000)


def refers() -> Any:
    ran("refers")
    return aiorpc.RRef(1)


async def test_the_answer_is_the_first_one(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the handler has returned may change after that; tensors, too."""
    await pair[0].call("worker1", where)
    make_room = crowd(pair[1], monkeypatch)
    call = pair[0].peer("worker1", retries=1000, backoff=(0.01, 0.02), idempotent=True).call(changes)
    await until(lambda: pair[0].statistics().calls_retried >= 2)
    VALUES[-1][0].fill_(9.0)
    VALUES[-1][1].append(9)
    make_room()
    tensor, items = await call
    assert tensor.tolist() == [1.0] * 100 and items == [1] and RUNS["changes"] == 1


VALUES: list[tuple[torch.Tensor, list[int]]] = []


def changes() -> Any:
    ran("changes")
    VALUES.append((torch.ones(100), [1]))
    return VALUES[-1]


@pytest.mark.random
@pytest.mark.slow
async def test_calls_under_faults_end_well(store: Store) -> None:
    """Calls fail on their way at random, and workers come and go: each call ends with its value."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        peer = worker.peer("server", timeout=120, retries=1000, backoff=(0.01, 0.05))
        calls: list[Any] = []
        for _ in range(3):
            server = await aiorpc.init("server", store=store)
            calls += [peer.call(where) for _ in range(30)]
            assert await calls[-1] == "server"
            await server._drop()
            calls += [peer.call(where) for _ in range(30)]
        async with aiorpc.init("server", store=store):
            assert await asyncio.gather(*calls) == ["server"] * 180
