"""Every transition of a Future, every race of two settlers, and every way to wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import pytest
import torch

from aiorpc import futures as futures_module
from aiorpc.errors import RpcCancelled, RpcTimeout, RpcUsageError, WorkerClosed, WouldBlockLoop
from aiorpc.futures import Future, block_observer, collect_all, is_future, outcome, wait_all, when_done
from tests.conftest import LoopFactory
from tests.runtime import hostile
from tests.transport.ends import interrupted, meanwhile

# Long enough that only a hang reaches it.
LONG = 20.0
MOST = 3000  # instructions: more than any of this takes

SETTLERS: dict[str, Callable[[Future[Any]], object]] = {
    "set_result": lambda future: future.set_result(1),
    "set_exception": lambda future: future.set_exception(ValueError("no")),
    "cancel": lambda future: future.cancel(),
    "answer": lambda future: future.settle(2),
    "failure": lambda future: future.settle(None, KeyError("lost")),
}


def pending(loop: asyncio.AbstractEventLoop | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.loop = loop
    return future


def settled(value: Any = None, error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
    return future


def see(future: Future[Any]) -> tuple[str, object]:
    """How the Future ended: name of the error's type or "value", and its text or the value."""
    value, error = outcome(future)
    return ("value", value) if error is None else (type(error).__name__, str(error))


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; fail after LONG seconds."""
    limit = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    """The same on a loop."""
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110  # nothing announces these conditions
            await asyncio.sleep(0.001)


@contextmanager
def running(target: Callable[..., object], *args: object) -> Iterator[list[Any]]:
    """Run `target` in a thread meanwhile; what it returned or raised is in the list once the block is left."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(target(*args))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        thread.join(LONG)
        assert not thread.is_alive()


def all_at_once(*jobs: Callable[[], object]) -> list[Any]:
    """Start the jobs in one thread each, as nearly together as can be; what they returned or raised."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        barrier.wait(LONG)
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result(LONG) for done in [pool.submit(run, job) for job in jobs]]


# --- transitions ------------------------------------------------------------------------------------------------------


def test_new_future_is_pending() -> None:
    """Before anybody settles it: not done, no value, no error, and asking for either says so."""
    future = pending()
    assert not future.done()
    assert not future.cancelled()
    with pytest.raises(RpcUsageError, match="not complete yet"):
        future.value()
    with pytest.raises(RpcUsageError, match="not complete yet"):
        future.exception()
    assert "pending" in repr(future)
    assert is_future(future)


def test_set_result_completes() -> None:
    """set_result moves it from pending to a value that every accessor shows."""
    value = object()
    future = settled(value)
    assert future.done()
    assert not future.cancelled()
    assert future.wait() is value
    assert future.value() is value
    assert future.exception() is None
    assert "done" in repr(future)


def test_set_exception_completes() -> None:
    """set_exception moves it from pending to an error that is raised at every waiter."""
    error = ValueError("no")
    future = settled(error=error)
    assert future.done()
    assert not future.cancelled()
    assert future.exception() is error
    for look in (future.wait, future.value):
        with pytest.raises(ValueError, match="no") as caught:
            look()
        assert caught.value is error
    assert "failed" in repr(future)


def test_set_exception_takes_exceptions_only() -> None:
    """What is no Exception is refused as torch refuses it, and the Future stays pending."""
    future = pending()
    for wrong in ("text", KeyboardInterrupt(), ValueError):
        with pytest.raises(AssertionError, match="not an Exception"):
            future.set_exception(wrong)  # type: ignore[arg-type]  # misuse
    assert not future.done()


def test_cancel_completes_with_rpc_cancelled() -> None:
    """cancel moves it from pending to RpcCancelled, with the reason, and tells whoever stands behind it once."""
    told: list[Future[Any]] = []

    class Told(Future[Any]):
        def _on_cancel(self) -> None:
            told.append(self)

    future = Told()
    assert future.cancel("enough")
    assert future.done()
    assert future.cancelled()
    assert isinstance(future.exception(), RpcCancelled)
    with pytest.raises(RpcCancelled, match="was cancelled: enough"):
        future.wait()
    assert not future.cancel()
    assert told == [future]


@pytest.mark.parametrize("first", SETTLERS)
@pytest.mark.parametrize("second", SETTLERS)
def test_settled_future_stays_as_it_is(first: str, second: str) -> None:
    """From VALUE and ERROR there is no way out: each later settler loses, set_* say so, the others return False."""
    future = pending()
    SETTLERS[first](future)
    before = see(future)
    if second.startswith("set_"):
        with pytest.raises(RpcUsageError, match="can only be marked completed once"):
            SETTLERS[second](future)
    else:
        assert SETTLERS[second](future) is False
    assert see(future) == before


@pytest.mark.parametrize("first", SETTLERS)
@pytest.mark.parametrize("second", SETTLERS)
def test_one_of_two_racing_settlers_wins(first: str, second: str) -> None:
    """However two settlers race, one wins, the other learns that it lost, and all who look see the winner's outcome."""
    alone = {name: _outcome_of(name) for name in (first, second)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            future = pending()
            seen: list[tuple[str, object]] = []
            future.add_done_callback(lambda done, seen=seen: seen.append(see(done)))  # type: ignore[misc]  # bound now
            results = all_at_once(partial(SETTLERS[first], future), partial(SETTLERS[second], future))
            lost = [result is False or isinstance(result, RpcUsageError) for result in results]
            assert sorted(lost) == [False, True]
            winner = first if lost[1] else second
            assert seen == [alone[winner]]
            assert see(future) == alone[winner]
    finally:
        sys.setswitchinterval(interval)


def _outcome_of(name: str) -> tuple[str, object]:
    future = pending()
    SETTLERS[name](future)
    return see(future)


def test_many_settlers_many_waiters() -> None:
    """Sixteen settlers and eight waiters at once: one settler wins, and every waiter sees its value."""
    for _ in range(20):
        future = pending()
        settlers = [partial(future.settle, number) for number in range(16)]
        results = all_at_once(*settlers, *[partial(future.wait, LONG)] * 8)
        assert results[:16].count(True) == 1
        assert set(results[16:]) == {results.index(True)}


def test_callbacks_registered_during_the_settling_run_once() -> None:
    """A callback added while another thread settles runs exactly once, whoever finds it."""

    def race() -> None:
        future = pending()
        ran: list[int] = []

        def register(number: int) -> None:
            future.add_done_callback(lambda _: ran.append(number))

        all_at_once(partial(future.set_result, None), *(partial(register, number) for number in range(7)))
        wait_until(lambda: len(ran) >= 7)
        assert sorted(ran) == list(range(7))

    for _ in range(50):
        race()


def test_timeout_racing_with_an_answer() -> None:
    """wait(timeout) gives the outcome or RpcTimeout, never both, and leaves no waiter behind."""

    def race(seconds: float) -> None:
        future = pending()
        _, result = all_at_once(lambda: future.set_result(7), lambda: future.wait(seconds))
        assert result == 7 or isinstance(result, RpcTimeout)
        wait_until(lambda: future.waiters == 0)
        assert future.wait() == 7

    for number in range(100):
        race(number * 1e-6)


def test_answer_at_the_very_end_of_a_wait_is_returned() -> None:
    """If the answer comes after the lock timed out and before the waiter has gone, the waiter returns it."""

    class Late:
        """Told that the wait is over, before the waiter looks whether anybody has settled the Future."""

        def enter_blocked(self) -> None: ...

        def exit_blocked(self) -> None:
            assert future.waiters == 1
            future.set_result("late")

    future = pending()
    token = block_observer.set(Late())
    try:
        assert future.wait(0.0) == "late"
    finally:
        block_observer.reset(token)


# --- wait -------------------------------------------------------------------------------------------------------------


def test_wait_blocks_until_settled() -> None:
    """wait in one thread returns what another thread sets later."""
    future = pending()
    with running(future.wait) as result:
        wait_until(lambda: future.waiters == 1)
        assert not result
        future.set_result("here")
    assert result == ["here"]


def test_wait_raises_the_error_at_every_thread() -> None:
    """Four threads that wait all get the error."""
    future = pending()
    error = ValueError("no")
    results = all_at_once(*([lambda: future.wait(LONG)] * 4), lambda: future.set_exception(error))
    assert results == [error] * 4 + [None]


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_wait_timeout_leaves_the_future_usable(timeout: float) -> None:
    """RpcTimeout from wait names seconds, is a TimeoutError, and changes nothing: the answer can still be had."""
    future = pending()
    with pytest.raises(RpcTimeout, match=r"waited 0") as caught:
        future.wait(timeout)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.seconds == timeout
    assert future.waiters == 0
    future.set_result(3)
    assert future.wait(timeout) == 3


@pytest.mark.parametrize("timeout", [1e10, float("inf")])
def test_wait_for_longer_than_the_system_can(timeout: float) -> None:
    """A timeout of centuries is as good as none."""
    future = pending()
    answer = threading.Timer(0.02, future.set_result, (3,))
    answer.start()
    assert future.wait(timeout) == 3
    answer.join()


@pytest.mark.parametrize("future", [pending(), settled(1)], ids=["pending", "settled"])
@pytest.mark.parametrize("timeout", [-0.5, -1, float("nan")])
def test_wait_for_less_than_nothing_is_refused(timeout: float, future: Future[Any]) -> None:
    """A negative timeout is a mistake, whether or not there is anything to wait for; the Future is untouched."""
    before = future.waiters, future.done()
    with pytest.raises(RpcUsageError, match="timeout"):
        future.wait(timeout)
    assert (future.waiters, future.done()) == before


def test_wait_reports_to_the_pool() -> None:
    """A pool is told when one of its threads begins and ends to wait, and not when there is nothing to wait for."""
    told: list[str] = []

    class Observer:
        def enter_blocked(self) -> None:
            told.append("enter")

        def exit_blocked(self) -> None:
            told.append("exit")

    token = block_observer.set(Observer())
    try:
        settled(1).wait()
        assert told == []
        with pytest.raises(RpcTimeout):
            pending().wait(0.001)
        assert told == ["enter", "exit"]
    finally:
        block_observer.reset(token)


def test_ctrl_c_interrupts_wait() -> None:
    """SIGINT ends a wait on the main thread with KeyboardInterrupt, at once, and the Future stays usable."""
    future = pending()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: future.waiters == 1)
        signal.pthread_kill(main, signal.SIGINT)

    with running(interrupt), pytest.raises(KeyboardInterrupt):
        future.wait(LONG)
    assert future.waiters == 0
    future.set_result(1)
    assert future.wait() == 1


def test_wait_on_the_settling_loop_is_refused(loop_factory: LoopFactory) -> None:
    """wait on the loop that has to settle it is refused at once and names await; a completed one may be waited for."""

    async def main() -> None:
        future = pending(asyncio.get_running_loop())
        with pytest.raises(WouldBlockLoop, match="await future"):
            future.wait(LONG)
        with pytest.raises(WouldBlockLoop):
            collect_all([settled(1), future]).wait(LONG)
        with pytest.raises(WouldBlockLoop):
            future.then(lambda done: done.value()).wait(LONG)
        with pytest.raises(WouldBlockLoop):
            wait_all([future])
        assert future.waiters == 3
        future.set_result(5)
        assert future.wait() == 5

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_waiting_for_futures_of_several_loops_is_refused_on_each(loop_factory: LoopFactory) -> None:
    """On a loop that has to settle any one of them, whichever stands first, and also for what comes of all of them."""
    home = asyncio.new_event_loop()

    async def main() -> None:
        other, own, bare = pending(home), pending(asyncio.get_running_loop()), pending()
        for several in ([other, own], [own, other], [bare, other, own]):
            for refused in (
                partial(wait_all, several),
                collect_all(several).wait,
                collect_all([collect_all(several)]).wait,
                collect_all(several).then(lambda done: done.value()).wait,
            ):
                with pytest.raises(WouldBlockLoop):
                    refused()
        own.set_result(1)
        waiters = other.waiters

        def settle() -> None:
            wait_until(lambda: other.waiters > waiters)
            other.set_result(2)

        with running(settle):
            assert wait_all([other, own]) == [2, 1]  # nobody needs this loop any more

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
    finally:
        home.close()


def test_a_thread_that_waits_runs_no_callback_of_others() -> None:
    """Whenever the answer comes: a callback could take longer than the thread is to wait, or wait for that thread."""

    seen, gone = threading.Event(), threading.Event()

    class Held(Future[Any]):
        """Its settler is held up for a moment once the outcome can be seen, and before callbacks run."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_state":
                seen.set()
                gone.wait(0.005)

    def wait(at: int) -> bool:
        """It settles at that instruction of who waits for it; False if there is none."""
        future, ran = Held(), list[int]()
        seen.clear()
        gone.clear()
        future.add_done_callback(lambda _: ran.append(threading.get_ident()))
        settlers: list[threading.Thread] = []

        def settle(_: str) -> None:
            settlers.append(threading.Thread(target=future.settle, args=(7,)))
            settlers[-1].start()
            assert seen.wait(LONG)

        timer = threading.Timer(LONG, future.settle, (None,))
        timer.start()
        try:
            found = meanwhile(partial(future.wait, 0.02), at, settle, futures_module.__file__)
        except RpcTimeout:
            found = False
        timer.cancel()
        gone.set()
        for thread in settlers:
            thread.join(LONG)
            assert threading.get_ident() not in ran
        timer.join(LONG)
        return bool(found)

    found = list(takewhile(bool, map(wait, range(MOST))))
    assert 30 < len(found) < MOST, "there was no such instruction"


@pytest.mark.parametrize("timeout", [None, LONG])
def test_a_thread_whose_lock_was_lost_looks_for_itself(timeout: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took the lock of a waiting thread and died with it does not keep that from seeing the outcome."""
    monkeypatch.setattr(futures_module, "_LOOK", 0.01)
    future = pending()
    with running(future.wait, timeout) as result:
        wait_until(lambda: future.waiters == 1)
        future._callbacks.pop()
        future.set_result("here")
    assert result == ["here"]


def test_wait_on_another_loop_is_allowed(loop_factory: LoopFactory) -> None:
    """A thread that runs some other loop may block, as a notebook cell does."""
    home = asyncio.new_event_loop()
    future = pending(home)

    async def cell() -> Any:
        return future.wait(LONG)

    def settle() -> None:
        wait_until(lambda: future.waiters == 1)
        future.set_result("cell")

    try:
        with running(settle), asyncio.Runner(loop_factory=loop_factory) as runner:
            assert runner.run(cell()) == "cell"
    finally:
        home.close()


def test_raised_error_keeps_its_own_traceback() -> None:
    """Waiting often for a failed Future does not make the error's traceback longer each time."""
    future = settled(error=ValueError("no"))
    lengths = []
    for _ in range(3):
        try:
            future.wait()
        except ValueError as error:
            lengths.append(_frames(error))
    assert lengths[0] == lengths[2]


def _frames(error: BaseException) -> int:
    count, trace = 0, error.__traceback__
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


async def test_failed_await_is_freed_without_the_collector() -> None:
    """A failed Future that was awaited, and all that the awaiting frame held, go at once: no reference cycle stays."""

    class Large:
        pass

    async def use(kept: list[weakref.ref[Large]]) -> None:
        large = Large()
        kept.append(weakref.ref(large))
        await settled(error=ValueError("no"))

    gc.collect()
    gc.disable()
    try:
        kept: list[weakref.ref[Large]] = []
        with pytest.raises(ValueError, match="no") as caught:
            await use(kept)
        del caught
        assert kept[0]() is None
    finally:
        gc.enable()


# --- await ------------------------------------------------------------------------------------------------------------


async def test_await_returns_or_raises() -> None:
    """A completed Future is awaited without a turn of the loop; one that fails raises its error."""
    assert await settled(1) == 1
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught:
        await settled(error=error)
    assert caught.value is error


async def test_await_wakes_when_its_own_loop_settles() -> None:
    """The loop that awaits may also be the one that settles."""
    future = pending(asyncio.get_running_loop())
    asyncio.get_running_loop().call_soon(future.set_result, "here")
    assert await future == "here"


async def test_await_wakes_when_a_thread_settles() -> None:
    """A thread that settles wakes a loop that sleeps."""
    future = pending()
    task = asyncio.ensure_future(future)
    await until(lambda: future.waiters == 1)
    await asyncio.to_thread(future.set_result, "there")
    async with asyncio.timeout(LONG):
        assert await task == "there"


def test_await_on_three_loops_and_wait_in_two_threads(loop_factory: LoopFactory) -> None:
    """One Future, awaited on three loops and waited for in two threads: all get the value."""
    future = pending()

    def loop() -> Any:
        async def main() -> Any:
            return await future

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())

    def settle() -> None:
        wait_until(lambda: future.waiters == 5)
        future.set_result(11)

    assert all_at_once(loop, loop, loop, future.wait, future.wait, settle) == [11] * 5 + [None]


async def test_wait_for_gives_up_and_cancels() -> None:
    """asyncio.wait_for and asyncio.timeout raise TimeoutError and cancel the Future nobody else waits for."""
    first, second = pending(), pending()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first, 0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await second
    assert first.cancelled()
    assert second.cancelled()
    assert await asyncio.wait_for(settled(1), LONG) == 1


async def test_gather_shield_as_completed_and_task_group() -> None:
    """asyncio's helpers take a Future as it is; a TaskGroup takes a coroutine around it."""

    async def wrapped(future: Future[Any]) -> Any:
        return await future

    futures = [pending() for _ in range(6)]
    async with asyncio.timeout(LONG), asyncio.TaskGroup() as group:
        task = group.create_task(wrapped(futures[0]))
        both = asyncio.gather(futures[1], futures[2])
        shielded = asyncio.shield(futures[3])
        completed = asyncio.as_completed([futures[4], futures[5]])
        await until(lambda: all(future.waiters == 1 for future in futures[:4]))
        for number, future in enumerate(futures):
            future.set_result(number)
        assert list(await both) == [1, 2]
        assert await shielded == 3
        assert sorted([await each for each in completed]) == [4, 5]
    assert task.result() == 0


async def test_shield_keeps_the_call() -> None:
    """Cancelling the outside of a shield leaves the Future pending and usable."""
    future = pending()
    outer = asyncio.shield(future)
    await until(lambda: future.waiters == 1)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert not future.done()
    future.set_result(None)
    await until(lambda: future.waiters == 0)


async def test_gather_with_an_error() -> None:
    """gather raises the error of one and, with return_exceptions, hands back RpcCancelled as a value."""
    failed, cancelled = settled(error=ValueError("no")), pending()
    cancelled.cancel()
    with pytest.raises(ValueError, match="no"):
        await asyncio.gather(settled(1), failed)
    values = await asyncio.gather(settled(1), cancelled, return_exceptions=True)
    assert values[0] == 1
    assert isinstance(values[1], RpcCancelled)


async def test_cancelled_waiter_cancels_only_as_the_last_one() -> None:
    """Two tasks await: cancelling the first leaves the call alone, cancelling the second cancels it."""
    future = pending()
    tasks = [asyncio.ensure_future(future) for _ in range(2)]
    await until(lambda: future.waiters == 2)
    for task, cancelled in zip(tasks, (False, True), strict=True):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled() is cancelled


async def test_cancelled_waiter_leaves_a_call_with_callbacks() -> None:
    """A callback, a `then`, or a thread that waits is an interest too."""
    for interest in (
        lambda future: future.add_done_callback(lambda _: None),
        lambda future: future.then(lambda _: None),
        lambda future: collect_all([future]),
    ):
        future = pending()
        interest(future)
        task = asyncio.ensure_future(future)
        await until(lambda future=future: future.waiters == 2)  # type: ignore[misc]  # bound now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not future.done()


async def test_awaiter_sees_cancelled_error_only_for_its_own_task() -> None:
    """A Future cancelled by somebody else raises RpcCancelled, which does not look like a cancelled task."""
    future = pending()
    task = asyncio.ensure_future(future)
    await until(lambda: future.waiters == 1)
    future.cancel()
    with pytest.raises(RpcCancelled):
        await task
    assert not task.cancelled()


async def test_cancelling_racing_with_an_answer() -> None:
    """A task cancelled while a thread settles ends cancelled or with the value; the Future is settled once."""
    for _ in range(50):
        future = pending()
        task = asyncio.ensure_future(future)
        await until(lambda future=future: future.waiters == 1)  # type: ignore[misc]  # bound now
        settling = asyncio.ensure_future(asyncio.to_thread(future.settle, 1))
        await asyncio.sleep(0)
        task.cancel()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
        won = await settling
        assert ended == 1 or isinstance(ended, asyncio.CancelledError)
        assert see(future)[0] == ("value" if won else "RpcCancelled")


async def test_dropped_coroutine_is_no_waiter() -> None:
    """A coroutine closed in the middle of its await takes its interest with it."""

    async def use() -> None:
        await future

    future = pending()
    coroutine = use()
    coroutine.send(None)
    assert future.waiters == 1
    coroutine.close()
    assert future.waiters == 0
    assert future.cancelled()


def test_answer_for_a_loop_that_is_gone(loop_factory: LoopFactory) -> None:
    """A waiter whose loop was closed under it neither stops the settler nor keeps others from their answer."""

    async def leave() -> None:
        asyncio.get_running_loop().stop()
        await future

    future = pending()
    loop = loop_factory()
    coroutine = leave()
    task = loop.create_task(coroutine)
    loop.run_forever()
    assert future.waiters == 1
    loop.close()
    ran: list[Any] = []
    future.add_done_callback(lambda done: ran.append(done.value()))
    future.set_result(4)
    assert ran == [4]
    loop.set_exception_handler(lambda *_: None)  # asyncio tells of a task that is destroyed while it is pending
    del task
    coroutine.close()


# --- callbacks and then -----------------------------------------------------------------------------------------------


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
        raise KeyboardInterrupt

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
    assert future.value() == 1 and future.waiters == 0
    assert not caplog.records


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["value", "error"])
def test_an_interrupted_settler_leaves_nobody_waiting(error: Exception | None) -> None:
    """Whatever instruction the signal comes at: it has not begun, or all who wait are told, and callbacks run once."""

    class Call(Future[Any]):
        _apart = True

    async def awaited(future: Future[Any]) -> tuple[str, object]:
        with contextlib.suppress(Exception):
            await future
        return see(future)

    home = asyncio.new_event_loop()
    expected = ("value", 7) if error is None else ("ValueError", "no")
    value = 7 if error is None else None

    def settle(at: int) -> tuple[str | None, bool]:
        """Interrupted at that instruction: where that is, None behind the last, and whether it had begun."""
        future, ran, seen = Call(), list[int](), list[tuple[str, object]]()
        future.site = (made_here.__code__, 0)
        task = asyncio.run_coroutine_threadsafe(awaited(future), home)
        wait_until(lambda: future.waiters == 1)
        all_of_it = collect_all([future])
        child = future.then(lambda done: seen.append(see(done)))
        future.add_done_callback(lambda _: ran.append(0))
        future.add_done_callback(lambda _: ran.append(1))
        with running(outcome_of, future) as result:
            wait_until(lambda: future.waiters == 6)
            where = interrupted(partial(future.settle, value, error), at, futures_module.__file__)
            begun = not future.settle(value, error)
            wait_until(lambda: len(ran) >= 2 and all_of_it.done() and child.done())
            assert all_of_it.wait(LONG) == [future], where
            assert task.result(LONG) == expected, where
        assert result == seen == [expected], where
        assert sorted(ran) == [0, 1] and future.waiters == 0, where
        assert torch._C.Future.done(future), where
        return where, begun

    with running(home.run_forever):
        try:
            found = list(takewhile(lambda found: found[0] is not None, map(settle, range(MOST))))
        finally:
            home.call_soon_threadsafe(home.stop)
    home.close()
    assert 100 < len(found) < MOST and {begun for _, begun in found} == {False, True}, "it was not interrupted"


def outcome_of(future: Future[Any]) -> tuple[str, object]:
    """Wait for it, and say how it ended."""
    with contextlib.suppress(ValueError):
        future.wait(LONG)
    return see(future)


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


async def test_callbacks_go_to_the_executor() -> None:
    """With an executor the callback goes there; when that is closed it still runs."""
    jobs: list[tuple[Any, ...]] = []

    class Threads:
        may_stay_awake = True

        def stay_awake(self, look: Any, done: Any, timeout: float | None) -> None:
            raise AssertionError("nobody waits")

        def waited(self, seconds: float) -> None:
            raise AssertionError("nobody waits")

    class Open(Threads):
        def submit(self, fn: Callable[..., None], *args: object) -> None:
            jobs.append((fn, *args))

    class Closed(Threads):
        def submit(self, fn: Callable[..., None], *args: object) -> None:
            raise WorkerClosed("closed")

    ran: list[Any] = []
    future = pending()
    future.executor = Open()
    future.add_done_callback(lambda done: ran.append(done.value()))
    future.set_result(1)
    assert ran == []
    ((job, *args),) = jobs
    await asyncio.to_thread(job, *args)
    assert ran == [1]

    future = pending()
    future.executor = Closed()
    future.add_done_callback(lambda done: ran.append(done.value()))
    future.set_result(2)
    await until(lambda: ran == [1, 2])


def test_then_makes_a_future_of_ours() -> None:
    """then gives a Future of the callback's result, with everything ours can do, and chains."""
    parent = pending()
    child = parent.then(lambda done: done.value() + 1).then(lambda done: done.wait() * 10)
    assert type(child) is Future
    assert not child.done()
    parent.set_result(1)
    assert child.wait(LONG) == 20
    assert "then" in child.describe()


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


def test_cancelled_child_does_not_stop_its_parent() -> None:
    """Cancelling what `then` gave leaves the parent alone, and the callback's late result is dropped."""
    parent = pending()
    child = parent.then(lambda done: done.value())
    assert child.cancel()
    assert not parent.done()
    parent.set_result(1)
    assert child.cancelled()


# --- torch's helpers, and ours on torch's Futures ---------------------------------------------------------------------


def torch_future(value: Any = None, error: Exception | None = None) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
    return future


def test_torch_sees_ours() -> None:
    """torch.futures.wait_all and collect_all work on ours, complete before and after they are asked."""
    futures = [settled(1), pending(), pending()]
    collected = torch.futures.collect_all(futures)  # type: ignore[arg-type]  # its stubs want its own class
    with running(torch.futures.wait_all, futures) as result:
        futures[2].set_result(torch.ones(2))
        assert not collected.done()
        futures[1].set_result([2])
    assert result[0][:2] == [1, [2]]
    assert torch.equal(result[0][2], torch.ones(2))
    assert [future.value() for future in collected.wait()][:2] == [1, [2]]


@pytest.mark.parametrize("settle", ["set_exception", "cancel", "failure"])
def test_torch_wait_all_raises_our_error(settle: str) -> None:
    """torch.futures.wait_all raises the error of ours, whoever settled it."""
    future = pending()
    SETTLERS[settle](future)
    with pytest.raises((ValueError, RpcCancelled, KeyError)) as caught:
        torch.futures.wait_all([settled(1), future])
    assert caught.value is future.exception()


def test_is_a_torch_future() -> None:
    """isinstance checks of torch programs hold, and so does the signature of the constructor."""
    assert isinstance(Future(), torch.futures.Future)
    assert isinstance(Future(devices=[]), torch.futures.Future)


def test_our_helpers_take_bare_torch_futures() -> None:
    """wait_all, collect_all, when_done and outcome take any torch Future, also the C++ base that torch's then gives."""
    source: torch.futures.Future[int] = torch.futures.Future()
    bare = source.then(lambda done: done.value() + 1)
    ran: list[Any] = []
    when_done(bare, lambda done: ran.append(outcome(done)))
    both = collect_all([settled(1), bare])
    assert not both.done()
    source.set_result(4)
    assert both.wait(LONG)[1] is bare
    assert ran == [(5, None)]
    assert wait_all([settled(1), bare, torch_future(2)]) == [1, 5, 2]
    error = ValueError("no")
    assert outcome(torch_future(error=error)) == (None, error)


def test_wait_all_raises_the_first_error_after_all_are_done() -> None:
    """wait_all waits for all, then raises the first error in the order of the list."""
    first, second, third = pending(), pending(), torch_future(error=KeyError("third"))
    with running(wait_all, [first, second, third]) as result:
        second.set_exception(ValueError("second"))
        wait_until(lambda: first.waiters == 1)
        assert not result
        first.set_result(0)
    assert repr(result[0]) == "ValueError('second')"


def test_collect_all_keeps_identity_and_refuses_others() -> None:
    """The list holds the very Futures that were given; none at all is complete at once; other things are refused."""
    futures = [settled(1), settled(error=ValueError("no"))]
    assert all(mine is theirs for mine, theirs in zip(collect_all(futures).wait(LONG), futures, strict=True))
    assert collect_all([]).wait(LONG) == []
    with pytest.raises(TypeError, match="not int"):
        collect_all([1])  # type: ignore[list-item]  # misuse


def test_collect_all_completes_once_when_many_threads_settle() -> None:
    """However many threads settle its members at once, the collection completes once, after the last."""

    def race() -> None:
        futures = [pending() for _ in range(8)]
        done: list[bool] = []
        collect_all(futures).add_done_callback(lambda all_of: done.append(all(f.done() for f in all_of.value())))
        all_at_once(*(partial(future.set_result, None) for future in futures))
        wait_until(lambda: bool(done))
        assert done == [True]

    for _ in range(30):
        race()


# --- failures nobody looked at ----------------------------------------------------------------------------------------


def made_here() -> Future[Any]:
    future = pending()
    future.subject = "the call of f"
    future.site = (made_here.__code__, 0)
    return future


def test_unobserved_failure_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """A failed call that nobody looked at is logged when it is dropped: what, where made, which error."""
    future = made_here()
    future.settle(None, ValueError("lost in space"))
    with caplog.at_level(logging.ERROR, "aiorpc"):
        del future
        gc.collect()
    (record,) = caplog.records
    message = record.getMessage()
    assert "the call of f" in message
    assert f"{__file__}:" in message
    assert "in made_here" in message
    assert "ValueError: lost in space" in message


def test_failure_seen_the_moment_it_is_there_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that polls done() may look at the error before its settler is through; it has been looked at."""

    seen: list[BaseException | None] = []

    class Watched(Future[int]):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if self.done() and not seen:  # as another thread may, from here on
                seen.append(self.exception())

    future = Watched()
    future.site = (Watched.__setattr__.__code__, 0)
    error = ValueError("seen")
    future.settle(None, error)
    assert seen == [error]
    del future
    gc.collect()
    assert not caplog.records


def test_what_a_callback_of_then_raises_is_logged_if_nobody_looks(caplog: pytest.LogCaptureFixture) -> None:
    """It has looked at the error of the call, which is then the child's, with the place of the call; once."""
    future = made_here()
    child = future.then(lambda done: done.value())
    with caplog.at_level(logging.ERROR, "aiorpc"):
        future.settle(None, ValueError("lost in space"))
        del future, child
        gc.collect()
    (record,) = caplog.records
    message = record.getMessage()
    assert "then(" in message and "in made_here" in message and "ValueError: lost in space" in message


def raises_value_error(look: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="seen"):
        look()


@pytest.mark.parametrize(
    "look",
    [
        lambda future: future.exception(),
        lambda future: outcome(future),
        lambda future: future.then(lambda done: done.exception()),
        lambda future: raises_value_error(future.wait),
        lambda future: raises_value_error(future.value),
        lambda future: raises_value_error(lambda: wait_all([future])),
    ],
)
def test_observed_failure_is_not_logged(
    look: Callable[[Future[Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever looked at the error, in whatever way, has dealt with it."""
    future = made_here()
    future.settle(None, ValueError("seen"))
    look(future)
    del future
    gc.collect()
    assert not caplog.records


def test_cancelled_and_answered_calls_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A cancelled call is nobody's surprise, nor is one that was answered or never ended."""
    futures = [made_here() for _ in range(3)]
    futures[0].cancel()
    futures[1].set_result(1)
    futures.clear()
    gc.collect()
    assert not caplog.records


# --- values on devices ------------------------------------------------------------------------------------------------


class Joined:
    """An arrival that remembers the threads that joined."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def join(self) -> None:
        self.threads.append(threading.get_ident())


def arriving(value: Any = 1) -> tuple[Future[Any], Joined]:
    """A pending Future of a value that is still being made on some streams."""
    future, joined = pending(), Joined()
    future.arrival = joined
    return future, joined


@pytest.mark.parametrize("take", [Future.wait, Future.value, outcome, lambda future: wait_all([future])])
def test_who_takes_a_value_joins_its_streams(take: Callable[[Future[Any]], Any]) -> None:
    """In the thread that takes it, each time; a look at whether it is there joins nothing."""
    future, joined = arriving()
    future.settle(1)
    assert future.done() and not future.cancelled() and future.exception() is None
    assert joined.threads == []
    take(future)
    assert joined.threads == [threading.get_ident()]
    with running(take, future) as result:
        pass
    assert not isinstance(result[0], BaseException)
    assert len(set(joined.threads)) == 2


async def test_who_awaits_a_value_joins_its_streams() -> None:
    """Once for each await, on the loop's thread, whoever settles."""
    future, joined = arriving()

    async def taker() -> int:
        return int(await future)

    tasks = [asyncio.create_task(taker()) for _ in range(2)]
    await until(lambda: future.waiters == 2)
    with running(future.settle, 1):
        assert await asyncio.gather(*tasks) == [1, 1]
    assert await future == 1
    assert joined.threads == [threading.get_ident()] * 3


@pytest.mark.parametrize("method", ["add_done_callback", "then"])
def test_callback_that_takes_a_value_joins_its_streams(method: str) -> None:
    """In its own thread; one that takes nothing joins nothing."""
    future, joined = arriving()
    getattr(future, method)(lambda done: None)
    getattr(future, method)(lambda done: done.value())
    with running(future.settle, 1):
        pass
    assert len(joined.threads) == 1
    assert joined.threads != [threading.get_ident()]


def test_collect_all_leaves_the_joining_to_its_members() -> None:
    """The collection is a list of Futures: whoever takes a value from one of them joins that one's streams."""
    (first, one), (second, two) = arriving(), arriving()
    both = collect_all([first, second])
    first.settle(1)
    second.settle(2)
    members = both.wait(LONG)
    assert one.threads + two.threads == []
    assert members[1].value() == 2
    assert (len(one.threads), len(two.threads)) == (0, 1)


def test_failure_has_no_streams_to_join() -> None:
    """What could not be made is not waited for."""
    future, joined = arriving()
    future.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        future.wait(LONG)
    assert joined.threads == []


@pytest.mark.parametrize("helper", ["wait_all", "collect_all"])
def test_torch_s_helpers_join_streams_too(helper: str) -> None:
    """Programs written for torch need not know whose Futures they have."""
    future, joined = arriving()
    future.settle(1)
    if helper == "wait_all":
        assert torch.futures.wait_all([future]) == [1]
    else:
        collected = torch.futures.collect_all([future])
        assert [each.wait() for each in collected.wait()] == [1]
    assert joined.threads


def test_devices_that_torch_does_not_have_are_refused_at_once() -> None:
    """As torch's own Future does, and not only when it is completed."""
    with pytest.raises(ValueError, match="indices"):
        Future(devices=["cpu"])
    if torch.version.cuda is not None:
        pytest.skip("this torch is made for CUDA: it takes such devices, whether there are any or not")
    with pytest.raises(RuntimeError):
        Future(devices=["cuda:0"])


# Since Python 3.13 the interpreter tells of what torch's C++ asks such an error for, and does not mind.
@pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttr:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("raised", hostile.RAISED)
@pytest.mark.parametrize("place", hostile.PLACES)
def test_settling_with_an_error_that_raises_when_touched(place: str, raised: type[BaseException]) -> None:
    """Whoever settles is not harmed; whoever waits, by our way or torch's, and its callbacks get that very error."""
    error = hostile.make(place, raised)
    future: Future[int] = Future()
    seen: list[BaseException | None] = []
    child = future.then(lambda done: seen.append(outcome(done)[1]))
    assert future.settle(None, error)
    child.wait(LONG)
    assert seen[0] is error and outcome(future)[1] is error
    for wait in (future.wait, partial(torch._C.Future.wait, future)):
        try:
            wait()
        except BaseException as got:
            assert type(got) is type(error)
        else:
            pytest.fail("it has a value")


def test_an_unobserved_error_without_a_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The line that nobody looked says what it can."""
    future: Future[int] = Future()
    future.site = (test_an_unobserved_error_without_a_text_is_logged.__code__, 0)
    future.settle(None, hostile.make("__str__", SystemExit))
    del future
    gc.collect()
    assert "nobody looked: Hostile_str_SystemExit: <its text cannot be made: SystemExit>" in caplog.text
