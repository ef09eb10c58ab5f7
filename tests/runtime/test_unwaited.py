"""Outcomes of handlers whose callers wait no longer: errors are logged and counted, what is stopped is named."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aiorpc
from aiorpc import RpcBackendOptions, RpcCancelled, RpcTimeout, RRef, Worker
from aiorpc.sites import spates
from aiorpc.testing import Faults, cluster
from tests.runtime.waiting import LIMIT, until, wait_until


class Gate:
    """Where handlers wait, and what they say."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.ended: list[Any] = []
        self.readers: list[asyncio.Future[Any]] = []


_gates: list[Gate] = []


@pytest.fixture
def gate(caplog: pytest.LogCaptureFixture) -> Iterator[Gate]:
    caplog.set_level(logging.INFO, "aiorpc")
    spates._logged.clear()  # other tests have logged the same
    gate = Gate()
    _gates.append(gate)
    yield gate
    gate.open.set()
    _gates.clear()


def fails() -> None:
    gate = _gates[0]
    gate.entered.set()
    gate.open.wait(LIMIT)
    raise ValueError("its own error")


async def fails_later() -> None:
    gate = _gates[0]
    gate.entered.set()
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("its own error")


def finds_its_argument_freed() -> None:
    """As `RRef.local_value` of a reference of which the caller has let go."""
    _gates[0].entered.set()
    _gates[0].open.wait(LIMIT)
    raise aiorpc.RpcError("reference (1, 6) names no value of this worker; it was freed")


def waits_in_a_call(to: str) -> str:
    gate = _gates[0]
    try:
        aiorpc.rpc_sync(to, holds)
    except BaseException as error:
        gate.ended.append(error)
        raise
    gate.ended.append("went on")
    return "value"


def holds() -> None:
    _gates[0].entered.set()
    wait_until(_gates[0].open.is_set)


async def waits() -> None:
    _gates[0].entered.set()
    await asyncio.Event().wait()


async def yields() -> AsyncIterator[int]:
    yield 1
    await waits()


def yields_in_a_thread() -> Iterator[int]:
    yield 1
    _gates[0].entered.set()
    while True:
        yield 2


async def begin_to_read(rref: RRef[Any]) -> None:
    async def read() -> Any:
        return await rref

    _gates[0].readers.append(asyncio.ensure_future(read()))


def lines(caplog: pytest.LogCaptureFixture, what: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if what in record.getMessage()]


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@pytest.mark.parametrize("handler", [fails, fails_later])
async def test_the_error_of_a_handler_whose_caller_has_given_up_is_told_once(
    pair: list[Worker], gate: Gate, caplog: pytest.LogCaptureFixture, how: str, handler: Any
) -> None:
    """In the callee's log, with the function, the caller, why no one waits, and its traceback; and it is counted."""
    call = pair[0].peer("worker1", timeout=0 if how == "cancelled" else 0.1).call(handler)
    await until(gate.entered.is_set)
    if how == "cancelled":
        call.cancel()
    with pytest.raises(RpcCancelled if how == "cancelled" else RpcTimeout):
        await call
    await until(lambda: pair[1].statistics().calls_cancelled == 1)
    gate.open.set()
    await until(lambda: pair[1].statistics().calls_failed == 1)
    await until(lambda: lines(caplog, "no one waits"))
    (record,) = lines(caplog, "no one waits")
    assert record.levelno == logging.ERROR and record.exc_info
    said = record.getMessage()
    assert handler.__name__ in said and "worker1" in said and "worker0" in said and "its own error" in said
    assert ("has cancelled it" if how == "cancelled" else "the time that its caller had for it was up") in said


async def test_a_reference_that_the_caller_freed_is_no_error_of_the_handler(
    pair: list[Worker], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that gives up lets go of its arguments, too: the handler was stopped, and nothing failed."""
    call = pair[0].peer("worker1", timeout=0).call(finds_its_argument_freed)
    await until(gate.entered.is_set)
    call.cancel()
    await until(lambda: pair[1].statistics().calls_cancelled == 1)
    gate.open.set()
    await until(lambda: lines(caplog, "was stopped"))
    assert not lines(caplog, "no one waits")


async def test_the_error_of_a_handler_whose_caller_has_died_is_told_once(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it was cancelled."""
    async with cluster(3, dynamic=True) as workers:
        call = workers[0].call("worker1", fails)
        await until(gate.entered.is_set)
        await Faults(workers[2]).kill("worker0")
        await until(lambda: workers[1].statistics().calls_cancelled == 1)
        gate.open.set()
        await until(lambda: lines(caplog, "its own error"))
        (record,) = lines(caplog, "its own error")
        assert "its caller is gone" in record.getMessage() and workers[1].statistics().calls_failed == 1
        await asyncio.gather(call, return_exceptions=True)


async def test_errors_that_no_one_waits_for_do_not_fill_the_log(
    pair: list[Worker], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """All are counted, and the first ones logged: a caller that gives up again and again writes no log of ours."""
    for count in range(1, 21):
        gate.entered.clear()
        call = pair[0].call("worker1", fails_later)
        await until(gate.entered.is_set)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: pair[1].statistics().calls_failed == count)  # noqa: B023  # it is awaited here
    assert 1 <= len(lines(caplog, "its own error")) <= 10


@pytest.mark.parametrize(
    ("how", "why", "level"),
    [
        ("cancelled", "its caller has cancelled it", logging.INFO),
        ("timed out", "the time that its caller had for it was up", logging.INFO),
        ("died", "its caller is gone", logging.WARNING),
    ],
)
@pytest.mark.parametrize("handler", [waits, waits_in_a_call])
async def test_the_log_of_the_callee_names_a_handler_that_was_stopped(
    gate: Gate, caplog: pytest.LogCaptureFixture, handler: Any, how: str, why: str, level: int
) -> None:
    """Once, with the function, the caller and the reason: a coroutine, or a thread that waits in a call of its own."""
    async with cluster(3, dynamic=True) as workers:
        arguments = ("worker2",) if handler is waits_in_a_call else ()
        call = workers[0].peer("worker1", timeout=0.3 if how == "timed out" else 0).call(handler, *arguments)
        await until(gate.entered.is_set)
        if how == "cancelled":
            call.cancel()
        elif how == "died":
            await Faults(workers[2]).kill("worker0")
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: lines(caplog, "was stopped"))
        gate.open.set()
        await until(lambda: not workers[1].pending_calls() and not workers[2].pending_calls())
    (record,) = [each for each in lines(caplog, "was stopped") if handler.__name__ in each.getMessage()]
    assert record.levelno == level
    assert "worker1" in record.getMessage() and "worker0" in record.getMessage() and why in record.getMessage()


@pytest.mark.parametrize("generator", [yields, yields_in_a_thread])
async def test_a_stream_whose_consumer_wants_no_more_leaves_no_line(
    pair: list[Worker], gate: Gate, caplog: pytest.LogCaptureFixture, generator: Any
) -> None:
    """That is how streams end; nothing was stopped in its midst."""
    async with pair[0].stream("worker1", generator) as items:
        assert await anext(items) == 1
        await until(gate.entered.is_set)
    await until(lambda: not pair[1].pending_calls())
    assert not lines(caplog, "was stopped")


@pytest.mark.parametrize("generator", [yields, yields_in_a_thread])
async def test_a_stream_whose_consumer_has_died_is_named(
    gate: Gate, caplog: pytest.LogCaptureFixture, generator: Any
) -> None:
    """It is stopped, as nobody takes its items."""
    async with cluster(3, dynamic=True) as workers:
        items = workers[0].stream("worker1", generator)
        assert await anext(items) == 1
        await Faults(workers[2]).kill("worker0")
        await until(lambda: lines(caplog, "was stopped"))
        assert "its caller is gone" in lines(caplog, "was stopped")[0].getMessage()
        await items.aclose()


@pytest.mark.parametrize("killed", [False, True], ids=["left", "killed"])
async def test_what_remote_has_begun_goes_on_when_its_caller_is_gone(gate: Gate, killed: bool) -> None:
    """Also within a call of its own, and whoever else has the reference gets the value."""
    async with cluster(3, dynamic=True) as workers:
        rref = workers[0].remote("worker1", waits_in_a_call, "worker2")
        await workers[0].call("worker2", begin_to_read, rref)
        del rref
        await until(gate.entered.is_set)
        if killed:
            await Faults(workers[2]).kill("worker0")
        else:
            await workers[0].shutdown(graceful=False)
        await until(lambda: not any(each.record.name == "worker0" for each in workers[1]._node.services))
        assert workers[1].statistics().calls_running == 2  # the creation, and the wait for its value
        assert "worker0" in {each.worker for each in workers[1].pending_calls()}
        gate.open.set()
        assert await asyncio.wait_for(gate.readers[0], LIMIT) == "value"
        assert gate.ended == ["went on"]
        await until(lambda: workers[1].statistics().calls_running == 0)


async def test_a_handler_that_goes_on_can_tell_that_its_caller_is_gone(gate: Gate) -> None:
    """`cancelled` says so to a handler that `remote` has begun, and its calls do not inherit the caller's time."""
    async with cluster(3, dynamic=True) as workers:
        rref = workers[0].remote("worker1", until_cancelled)
        await until(gate.entered.is_set)
        await Faults(workers[2]).kill("worker0")
        await until(lambda: gate.ended)
        assert gate.ended == [None]
        del rref


def until_cancelled() -> None:
    gate = _gates[0]
    gate.entered.set()
    wait_until(aiorpc.cancelled)
    gate.ended.append(aiorpc.deadline())


async def test_the_error_of_what_remote_has_begun_is_told_where_its_caller_is_gone(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, and to whoever else has the reference."""
    async with cluster(3, dynamic=True) as workers:
        rref = workers[0].remote("worker1", fails)
        await workers[0].call("worker2", begin_to_read, rref)
        del rref
        await until(gate.entered.is_set)
        await Faults(workers[2]).kill("worker0")
        await until(lambda: not any(each.record.name == "worker0" for each in workers[1]._node.services))
        gate.open.set()
        with pytest.raises(ValueError, match="its own error"):
            await asyncio.wait_for(gate.readers[0], LIMIT)
        await until(lambda: lines(caplog, "no one waits"))
        assert "its caller is gone" in lines(caplog, "no one waits")[0].getMessage()


async def test_of_what_goes_on_without_its_caller_there_is_no_more_than_one_caller_may_have(gate: Gate) -> None:
    """What members that come and go leave behind is bounded by `max_queued_calls`; what is too much is stopped."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_queued_calls=3), RpcBackendOptions(), RpcBackendOptions()]
    async with cluster(4, options=options, dynamic=True) as workers:
        begun = [workers[each].remote("worker1", waits) for each in (0, 0, 2, 2)]
        await until(lambda: workers[1].statistics().calls_running == 4)
        for each in (0, 2):
            await workers[each].shutdown(graceful=False)
        await until(lambda: workers[1].statistics().calls_running == 3)
        await workers[1].shutdown(graceful=False)
        del begun
