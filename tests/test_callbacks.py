"""Callbacks of Futures: their order, their threads, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from typing import Any

import pytest

from aiorpc import sites
from aiorpc.collecting import collect_all
from aiorpc.futures import Future
from tests.settling import (
    LONG,
    pending,
    running,
    wait_until,
)


def test_callbacks_run_in_order() -> None:
    """Callbacks run in the order of registration, in the settling thread when that runs no loop."""
    future = pending()
    ran: list[tuple[int, int]] = []
    for number in range(5):
        future.add_done_callback(lambda _, number=number: ran.append((number, threading.get_ident())))  # type: ignore[misc]  # a default that it is never called without
    future.set_result(None)
    assert ran == [(number, threading.get_ident()) for number in range(5)]
    future.add_done_callback(lambda done: ran.append((99, 0)))
    assert ran[-1] == (99, 0)


def test_a_callback_that_raises_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each line has a traceback: of what one line of the program makes some are logged, and the last says so."""
    raised: list[Future[Any]] = []

    def broken(done: Future[Any]) -> None:
        raised.append(done)
        raise ValueError("callback")

    for _ in range(100):
        future: Future[int] = Future()
        future._site = (test_a_callback_that_raises_again_and_again_does_not_fill_the_log.__code__, 0)
        future.add_done_callback(broken)
        future.set_result(1)
    said = [record.getMessage() for record in caplog.records]
    assert len(raised) == 100 and len(said) == sites.LINES
    assert ["not logged" in each for each in said] == [False] * (sites.LINES - 1) + [True]


@pytest.mark.parametrize("error", [ValueError("callback"), SystemExit(3), asyncio.CancelledError()])
def test_raising_callback_is_logged_and_stops_nobody(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """What a callback raises is logged; the settler and the other callbacks go on."""

    def broken(_: Future[Any]) -> None:
        raise error

    future = pending()
    ran: list[int] = []
    future.add_done_callback(broken)
    future.add_done_callback(lambda done: ran.append(done.value()))
    with caplog.at_level(logging.ERROR, "aiorpc"):
        future.set_result(1)
    assert ran == [1]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["add_done_callback", "then"])
def test_ctrl_c_in_a_callback_of_the_main_thread_goes_on(
    method: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends what the main thread does, be that to settle or to register; Future and other callbacks are whole."""

    def interrupted(_: Future[Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    future = pending()
    ran = threading.Event()
    children: list[Future[Any]] = []
    if late:
        future.set_result(1)
        with pytest.raises(KeyboardInterrupt):
            getattr(future, method)(interrupted)
    else:
        children.append(getattr(future, method)(interrupted))
        future.add_done_callback(lambda _: ran.set())
        with pytest.raises(KeyboardInterrupt):
            future.set_result(1)
        assert ran.wait(LONG)
        if method == "then":
            assert isinstance(children[0].exception(), KeyboardInterrupt)
    assert future.value() == 1 and future._waiters == 0
    assert not caplog.records


@pytest.mark.parametrize("method", ["add_done_callback", "then"])
def test_callbacks_must_be_callable(method: str) -> None:
    """What cannot be called is refused when it is given."""
    with pytest.raises(TypeError, match="not callable"):
        getattr(pending(), method)(None)


async def test_callbacks_never_run_on_a_loop_thread() -> None:
    """Settled on a loop, or registered on one after that: the callback runs elsewhere, off any loop, and may block."""
    other = pending()

    def blocking(_: Future[Any]) -> tuple[int, Any]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return threading.get_ident(), other.wait(LONG)

    early, done = pending(asyncio.get_running_loop()), pending()
    first = early.then(blocking)
    early.set_result(None)
    done.set_result(None)
    second = done.then(blocking)
    await asyncio.sleep(0)
    assert not first.done()
    other.set_result("free")
    async with asyncio.timeout(LONG):
        results = [await first, await second]
    assert [value for _, value in results] == ["free", "free"]
    assert threading.get_ident() not in [thread for thread, _ in results]


def test_then_passes_errors_on() -> None:
    """The callback sees the parent's error; what it raises, even what is no Exception, fails the child."""
    parent = pending()
    seen = parent.then(lambda done: type(done.exception()))
    raised = parent.then(lambda done: done.value())

    def leave(_: Future[Any]) -> None:
        raise SystemExit(3)

    left = parent.then(leave)
    error = ValueError("no")
    parent.set_exception(error)
    assert seen.wait(LONG) is ValueError
    assert raised.exception() is error
    assert isinstance(left.exception(), SystemExit)


@pytest.mark.parametrize("waits", ["thread", "task"])
def test_a_chain_may_be_longer_than_a_stack_is_deep(waits: str) -> None:
    """Whoever waits for the last one is told; the texts that say what each stands for do not grow with the chain."""
    first = last = pending()
    for number in range(3000):
        last = last.then(lambda done: done.value() + 1)
        if number % 10 == 0:
            last = collect_all([last]).then(lambda done: done.value()[0].value())
    assert len(last._describe()) < 1000

    async def wait() -> int:
        value: int = await last
        return value

    with running(lambda: asyncio.run(wait()) if waits == "task" else last.wait(LONG)) as result:
        wait_until(lambda: last._waiters == 1)
        first.set_result(0)
        assert last.wait(LONG) == 3000
    assert result == [3000]


def test_callbacks_deep_within_others_run_in_order() -> None:
    """Those of one Future run one after the other there, too."""
    first = last = pending()
    for _ in range(100):
        last = last.then(lambda done: done.value())
    ran: list[int] = []
    for number in range(5):
        last.add_done_callback(lambda _, number=number: ran.append(number))  # type: ignore[misc]  # as above
    first.set_result(0)
    wait_until(lambda: len(ran) >= 5)
    assert ran == [*range(5)]


def test_cancelled_child_does_not_stop_its_parent() -> None:
    """Cancelling what `then` gave leaves the parent alone, and the callback's late result is dropped."""
    parent = pending()
    child = parent.then(lambda done: done.value())
    assert child.cancel()
    assert not parent.done()
    parent.set_result(1)
    assert child.cancelled()
