"""Cancelling a call: who can, and what it does at the callee."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc
from aiorpc import RpcBackendOptions, RpcCancelled, Worker
from aiorpc.callbacks import block_observer
from tests.runtime.waiting import LIMIT, until, until_no_references


class Flags:
    """What handlers saw, for the test."""

    def __init__(self) -> None:
        self.decoding = threading.Event()
        self.entered = threading.Event()
        self.cancelled = threading.Event()
        self.release = threading.Event()
        self.finished = threading.Event()


_flags: dict[str, Flags] = {}


@pytest.fixture
def flags() -> Iterator[Flags]:
    _flags["it"] = Flags()
    yield _flags["it"]
    _flags["it"].release.set()


async def coroutine() -> str:
    flags = _flags["it"]
    flags.entered.set()
    try:
        await until(flags.release.is_set)
    except asyncio.CancelledError:
        flags.cancelled.set()
        raise
    flags.finished.set()
    return "done"


def thread() -> str:
    flags = _flags["it"]
    flags.entered.set()
    while not flags.release.wait(0.002):
        if aiorpc.cancelled():
            flags.cancelled.set()
            aiorpc.check_cancelled()
    flags.finished.set()
    return "done"


async def relay(to: str) -> str:
    result: str = await aiorpc.call(to, coroutine)
    return result


async def test_cancelling_the_future_cancels_the_coroutine(pair: list[Worker], flags: Flags) -> None:
    """The handler's task is cancelled; the Future raises RpcCancelled; nothing is pending at either end."""
    call = pair[0].call("worker1", coroutine)
    await until(flags.entered.is_set)
    assert call.cancel("not needed")
    assert call.cancelled() and call.done() and not call.cancel()
    with pytest.raises(RpcCancelled, match=r"coroutine.*'worker1'.*not needed"):
        await call
    await until(flags.cancelled.is_set)
    await until(lambda: not pair[0].pending_calls() and not pair[1].pending_calls())
    assert pair[1].statistics().calls_cancelled == 1


async def test_a_thread_can_ask_whether_its_caller_has_given_up(pair: list[Worker], flags: Flags) -> None:
    """aiorpc.cancelled() turns true in the running thread, check_cancelled() raises there."""
    call = pair[0].call("worker1", thread)
    await until(flags.entered.is_set)
    call.cancel()
    await until(flags.cancelled.is_set)
    await until(lambda: pair[1].statistics().threads_idle == pair[1].statistics().threads)
    assert not flags.finished.is_set()


def block_in_call() -> None:
    aiorpc.rpc_sync("worker0", coroutine)


def block_in_group() -> None:
    aiorpc.group(["worker0"]).rpc_sync(coroutine)


def block_in_stream() -> None:
    with aiorpc.stream("worker0", one_and_then_wait) as items:
        for _ in items:
            pass


async def one_and_then_wait() -> AsyncIterator[int]:
    yield 1
    await coroutine()


def block_in_subscription() -> None:
    _flags["it"].entered.set()
    try:
        with aiorpc.subscribe("what-nobody-publishes") as versions:
            next(versions)
    finally:
        _flags["it"].cancelled.set()


BLOCKED = {each.__name__: each for each in (block_in_call, block_in_group, block_in_stream, block_in_subscription)}
_ended: list[Any] = []


def wait_in(what: str) -> None:
    """Waits, and once more as it ends."""
    try:
        BLOCKED[what]()
    except BaseException as error:
        _ended.append(error)
        _ended.append(aiorpc.rpc_sync("worker0", len, args=("abc",)))
        raise


def generate_in(what: str) -> Iterator[int]:
    wait_in(what)
    yield 1


@pytest.mark.parametrize("what", BLOCKED)
@pytest.mark.parametrize("handler", [wait_in, generate_in])
async def test_a_thread_that_waits_hears_that_its_caller_has_given_up(
    pair: list[Worker], flags: Flags, what: str, handler: Callable[[str], Any]
) -> None:
    """Once, as a coroutine is cancelled once: what it waits for is called off, what it waits for behind that is not."""
    _ended.clear()
    if handler is generate_in:
        reading = asyncio.ensure_future(anext(pair[0].stream("worker1", handler, what)))
    else:
        reading = asyncio.ensure_future(pair[0].call("worker1", handler, what))
    await until(flags.entered.is_set)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    if handler is generate_in:
        del reading  # and the stream with it, which ends it
    await until(lambda: len(_ended) == 2)
    error, answer = _ended
    assert type(error) is RpcCancelled and "has given up" in str(error) and answer == 3
    await until(flags.cancelled.is_set)
    await until(lambda: pair[1].statistics().threads_idle == pair[1].statistics().threads)
    await until(lambda: not any(worker.pending_calls() for worker in pair))


async def test_the_result_of_a_thread_that_goes_on_is_dropped(pair: list[Worker], flags: Flags) -> None:
    """A thread that does not ask runs to its end; nobody gets its result, and no late answer is sent."""
    call = pair[0].call("worker1", hold)
    await until(flags.entered.is_set)
    call.cancel()
    await until(lambda: pair[1].statistics().calls_cancelled == 1)
    flags.release.set()
    await until(flags.finished.is_set)
    assert await pair[0].call("worker1", len, "abc") == 3
    assert call.cancelled() and pair[0].statistics().late_answers == 0


def hold() -> None:
    _flags["it"].entered.set()
    _flags["it"].release.wait(30)
    _flags["it"].finished.set()


async def test_a_cancelled_waiter_cancels_the_call_it_alone_waits_for(pair: list[Worker], flags: Flags) -> None:
    """A cancelled task sees CancelledError, and the callee is told."""

    async def wait() -> None:
        await pair[0].call("worker1", coroutine)

    task = asyncio.ensure_future(wait())
    await until(flags.entered.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(flags.cancelled.is_set)


class Held:
    """Its pickling lasts until the test goes on."""

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        hold()
        return object, ()


def refer() -> list[object]:
    return [aiorpc.RRef(object()), Held()]


async def test_an_answer_that_meets_its_cancellation_takes_its_references_along(
    pair: list[Worker], flags: Flags
) -> None:
    """A thread finds that the call was taken out just as it has its answer ready: it is sent all the same, as the
    caller has to take the reference in it. Else the owner would keep the value for ever."""
    call = pair[0].call("worker1", refer)
    await until(flags.entered.is_set)
    call.cancel()
    await until(lambda: pair[1].statistics().calls_cancelled)
    flags.release.set()
    await until_no_references(pair)


async def test_another_waiter_keeps_the_call_alive(pair: list[Worker], flags: Flags) -> None:
    """Only when the last waiter gives up the call is cancelled."""
    call = pair[0].call("worker1", coroutine)

    async def wait() -> str:
        result: str = await call
        return result

    first, second = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
    await until(flags.entered.is_set)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not call.done()
    flags.release.set()
    assert await second == "done" and not flags.cancelled.is_set()


class Blocks:
    """Is told that a thread blocks."""

    def __init__(self) -> None:
        self.entered = threading.Event()

    def enter_blocked(self) -> None:
        self.entered.set()

    def exit_blocked(self) -> None: ...


async def test_a_blocked_thread_is_a_waiter_too(pair: list[Worker], flags: Flags) -> None:
    """A task that gives up does not take the call away from a thread that waits for it."""
    blocks = Blocks()
    call = pair[0].call("worker1", coroutine)
    token = block_observer.set(blocks)
    blocked = asyncio.ensure_future(asyncio.to_thread(call.wait))
    block_observer.reset(token)
    await until(flags.entered.is_set)
    await until(blocks.entered.is_set)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_wait(call), 0.01)
    assert not call.done()
    flags.release.set()
    assert await blocked == "done"


async def _wait(call: aiorpc.Future[str]) -> str:
    return await call


async def _begun(worker: Worker, flags: Flags) -> aiorpc.Future[str]:
    """A call whose handler runs: one that is given up before that is cancelled without it."""
    flags.entered.clear()
    flags.cancelled.clear()
    call = worker.call("worker1", coroutine)
    await until(flags.entered.is_set)
    return call


async def test_wait_for_timeout_shield_and_task_group(pair: list[Worker], flags: Flags) -> None:
    """asyncio's own tools work on calls: those that give up cancel, shield does not."""
    call = await _begun(pair[0], flags)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 0.02)
    await until(flags.cancelled.is_set)

    call = await _begun(pair[0], flags)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await call
    await until(flags.cancelled.is_set)

    flags.cancelled.clear()
    call = pair[0].call("worker1", coroutine)
    inner = asyncio.ensure_future(_wait(call))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(inner), 0.02)
    flags.release.set()
    assert await inner == "done"

    flags.release.clear()
    flags.cancelled.clear()
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(_wait(pair[0].call("worker1", coroutine)))
            group.create_task(_wait(pair[0].call("worker1", int, "x")))  # type: ignore[call-overload]
    assert [type(error) for error in caught.value.exceptions] == [ValueError]
    await until(flags.cancelled.is_set)


async def test_cancelling_reaches_nested_calls(trio: list[Worker], flags: Flags) -> None:
    """The handler that is cancelled gives up its own call, and so on down the chain."""
    call = trio[0].call("worker1", relay, "worker2")
    await until(flags.entered.is_set)
    call.cancel()
    await until(flags.cancelled.is_set)
    await until(lambda: not any(worker.pending_calls() for worker in trio))


async def test_cancelling_a_call_leaves_others_alone(pair: list[Worker], flags: Flags) -> None:
    """Of many calls on a connection only the one that was cancelled ends."""
    calls = [pair[0].call("worker1", coroutine) for _ in range(10)]
    await until(flags.entered.is_set)
    for call in calls[::2]:
        call.cancel()
    await until(lambda: pair[1].statistics().calls_cancelled == 5)
    flags.release.set()
    assert await asyncio.gather(*calls[1::2]) == ["done"] * 5


async def test_a_call_that_is_cancelled_at_once(pair: list[Worker], flags: Flags) -> None:
    """Before its frame has left, or before the handler's first step: it never runs to its end, nothing is left."""
    for _ in range(20):
        pair[0].call("worker1", coroutine).cancel()
        pair[0].call("worker1", thread).cancel()
    assert await pair[0].call("worker1", len, "abc") == 3
    await until(lambda: not pair[0].pending_calls() and not pair[1].pending_calls())
    assert not flags.finished.is_set()


class Long:
    """Takes long to unpickle: until the flags say `release`."""

    def __init__(self) -> None:
        self.text = "x" * 200_000

    def __setstate__(self, state: dict[str, str]) -> None:
        self.text = state["text"]
        _flags["it"].decoding.set()
        assert _flags["it"].release.wait(30)


async def take_long(value: Long) -> None:
    await coroutine()


async def yield_long(value: Long) -> AsyncIterator[str]:
    yield await coroutine()


async def test_a_call_that_is_cancelled_while_its_arguments_arrive(pair: list[Worker], flags: Flags) -> None:
    """Long ones are unpickled in a thread: a coroutine whose caller gives up meanwhile never begins."""
    call = pair[0].call("worker1", take_long, Long())
    await until(flags.decoding.is_set)
    call.cancel()
    await _never_begins(pair, flags)


async def test_a_stream_that_is_left_while_its_arguments_arrive(pair: list[Worker], flags: Flags) -> None:
    """As a call: its generator never begins."""
    stream = pair[0].stream("worker1", yield_long, Long())
    await until(flags.decoding.is_set)
    await stream.aclose()
    await _never_begins(pair, flags)


async def _never_begins(pair: list[Worker], flags: Flags) -> None:
    callee = pair[1]
    await until(lambda: callee.statistics().calls_cancelled == 1)
    flags.release.set()
    await until(lambda: callee._node.engine.background.idle == callee._node.engine.background.threads)
    assert await pair[0].call("worker1", len, "abc") == 3
    assert not flags.entered.is_set() and callee.is_idle()


async def test_cancelling_a_finished_call_does_nothing(pair: list[Worker]) -> None:
    """False, and the value stays."""
    call = pair[0].call("worker1", len, "abc")
    assert await call == 3
    assert not call.cancel()
    assert call.value() == 3 and not call.cancelled()


async def test_giving_up_on_a_value_does_not_spoil_it(pair: list[Worker], flags: Flags) -> None:
    """Who waits for an RRef's value does not own it: a waiter that gives up, at the owner too, leaves it alone."""
    rref = pair[0].remote("worker0", coroutine)
    other = pair[0].remote("worker1", coroutine)
    for reference in (rref, other):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reference, 0.02)
    assert not flags.cancelled.is_set()
    flags.release.set()
    assert await rref == "done" and await other == "done"


async def test_cancelled_is_for_handlers(pair: list[Worker]) -> None:
    """Outside of a handler there is no caller to ask about."""
    for ask in (aiorpc.cancelled, aiorpc.check_cancelled, aiorpc.caller, aiorpc.deadline):
        with pytest.raises(aiorpc.RpcUsageError, match="only a handler"):
            ask()


async def test_a_caller_that_has_its_answer_has_not_given_up(pair: list[Worker]) -> None:
    """What a handler leaves running is its own: the deadline of the call is over with the call."""
    assert await pair[0].peer("worker1", timeout=0.2).call(leave_something_running) == "answered"
    assert await pair[0].call("worker1", what_was_left) == (False, None)


left: list[asyncio.Task[tuple[bool, float | None]]] = []


async def leave_something_running() -> str:
    async def goes_on() -> tuple[bool, float | None]:
        await asyncio.sleep(0.4)
        return aiorpc.cancelled(), aiorpc.deadline()

    left.append(asyncio.create_task(goes_on()))
    return "answered"


async def what_was_left() -> tuple[bool, float | None]:
    return await left.pop()


class Patient:
    def wait(self) -> str:
        return thread()


BLOCKING: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: aiorpc.rpc_sync("alone", thread),
    "a method of a reference": lambda: aiorpc.RRef(Patient()).rpc_sync().wait(),
    "a method of an object": lambda: aiorpc.peer("alone").object("patient").rpc_sync().wait(),
    "a group": lambda: aiorpc.group(["alone"]).rpc_sync(thread),
    "an object of each member": lambda: aiorpc.group(["alone"]).object("patient").rpc_sync().wait(),
}


@pytest.mark.parametrize("verb", BLOCKING)
def test_who_is_interrupted_in_a_blocking_verb_has_called_it_off(
    verb: str, flags: Flags, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has its Future: else nobody could, and a failure would be logged as one that nobody has looked at."""
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet")
    aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)

    def interrupt() -> None:
        flags.entered.wait(LIMIT)
        signal.pthread_kill(main, signal.SIGINT)

    main, interrupter = threading.get_ident(), threading.Thread(target=interrupt)
    try:
        with aiorpc.serve("patient", Patient()):
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                BLOCKING[verb]()
            assert flags.cancelled.wait(LIMIT)
    finally:
        interrupter.join()
        aiorpc.shutdown()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
