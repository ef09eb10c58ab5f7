"""Every transition of a Future, every race of two settlers, and every way to wait for one."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from aiorpc.collecting import collect_all, wait_all
from aiorpc.errors import RpcCancelled, RpcTimeout, RpcUsageError, WouldBlockLoop
from aiorpc.futures import Future, is_future, outcome
from tests.conftest import LoopFactory
from tests.runtime import hostile
from tests.settling import (
    LONG,
    all_at_once,
    arriving,
    pending,
    running,
    see,
    settled,
    until,
    wait_until,
)

SETTLERS: dict[str, Callable[[Future[Any]], object]] = {
    "set_result": lambda future: future.set_result(1),
    "set_exception": lambda future: future.set_exception(ValueError("no")),
    "cancel": lambda future: future.cancel(),
    "answer": lambda future: future._settle(2),
    "failure": lambda future: future._settle(None, KeyError("lost")),
}


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
            future.add_done_callback(lambda done, seen=seen: seen.append(see(done)))  # type: ignore[misc]  # no type for a default
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
        wait_until(lambda: future._waiters == 0)
        assert future.wait() == 7

    for number in range(100):
        race(number * 1e-6)


# --- wait -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_wait_timeout_leaves_the_future_usable(timeout: float) -> None:
    """RpcTimeout from wait names seconds, is a TimeoutError, and changes nothing: the answer can still be had."""
    future = pending()
    with pytest.raises(RpcTimeout, match=r"waited 0") as caught:
        future.wait(timeout)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.seconds == timeout
    assert future._waiters == 0
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
    before = future._waiters, future.done()
    with pytest.raises(RpcUsageError, match="timeout"):
        future.wait(timeout)
    assert (future._waiters, future.done()) == before


def test_ctrl_c_interrupts_wait() -> None:
    """SIGINT ends a wait on the main thread with KeyboardInterrupt, at once, and the Future stays usable."""
    future = pending()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: future._waiters == 1)
        signal.pthread_kill(main, signal.SIGINT)

    with running(interrupt), pytest.raises(KeyboardInterrupt):
        future.wait(LONG)
    assert future._waiters == 0
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
        assert future._waiters == 3
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
                collect_all(several).then(lambda done: done.value()).then(lambda done: done.value()).wait,
            ):
                with pytest.raises(WouldBlockLoop):
                    refused()
        own.set_result(1)
        waiters = other._waiters

        def settle() -> None:
            wait_until(lambda: other._waiters > waiters)
            other.set_result(2)

        with running(settle):
            assert wait_all([other, own]) == [2, 1]  # nobody needs this loop any more

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
    finally:
        home.close()


def test_wait_on_another_loop_is_allowed(loop_factory: LoopFactory) -> None:
    """A thread that runs some other loop may block, as a notebook cell does."""
    home = asyncio.new_event_loop()
    future = pending(home)

    async def cell() -> Any:
        return future.wait(LONG)

    def settle() -> None:
        wait_until(lambda: future._waiters == 1)
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


@pytest.mark.parametrize("raised", ["before", "after"])
def test_an_error_that_is_a_value_and_is_raised_keeps_no_frames(raised: str) -> None:
    """The garbage collector frees what raises the value of a Future, and frames that have that Future."""

    class Large:
        pass

    def use() -> weakref.ref[Large]:
        large, future, error = Large(), pending(), ValueError("no")
        if raised == "after":
            future.set_result(error)
        with pytest.raises(ValueError, match="no"):
            raise error
        if raised == "before":
            future.set_result(error)
        assert future.value() is error
        (seen,) = torch.futures.wait_all([future])
        assert isinstance(seen, ValueError)
        assert seen.args == ("no",)
        return weakref.ref(large)

    kept = use()
    gc.collect()
    assert kept() is None


# --- await ------------------------------------------------------------------------------------------------------------


def test_await_on_three_loops_and_wait_in_two_threads(loop_factory: LoopFactory) -> None:
    """One Future, awaited on three loops and waited for in two threads: all get the value."""
    future = pending()

    def loop() -> Any:
        async def main() -> Any:
            return await future

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())

    def settle() -> None:
        wait_until(lambda: future._waiters == 5)
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
        await until(lambda: all(future._waiters == 1 for future in futures[:4]))
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
    await until(lambda: future._waiters == 1)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert not future.done()
    future.set_result(None)
    await until(lambda: future._waiters == 0)


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
    await until(lambda: future._waiters == 2)
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
        await until(lambda future=future: future._waiters == 2)  # type: ignore[misc]  # no type for a default
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not future.done()


async def test_awaiter_sees_cancelled_error_only_for_its_own_task() -> None:
    """A Future cancelled by somebody else raises RpcCancelled, which does not look like a cancelled task."""
    future = pending()
    task = asyncio.ensure_future(future)
    await until(lambda: future._waiters == 1)
    future.cancel()
    with pytest.raises(RpcCancelled):
        await task
    assert not task.cancelled()


async def test_whoever_awaits_what_has_ended_with_a_cancelled_error_is_not_cancelled() -> None:
    """As where a callback has raised it; by a thread that waits it is raised as it is."""

    def fails(_: Future[Any]) -> None:
        raise asyncio.CancelledError("its own")

    child = settled(1).then(fails)
    task = asyncio.ensure_future(child)
    with pytest.raises(RpcCancelled, match="has ended with CancelledError: its own"):
        await task
    assert not task.cancelled()
    with pytest.raises(asyncio.CancelledError, match="its own"):
        await asyncio.to_thread(child.wait)


async def test_cancelling_racing_with_an_answer() -> None:
    """A task cancelled while a thread settles ends cancelled or with the value; the Future is settled once."""
    for _ in range(50):
        future = pending()
        task = asyncio.ensure_future(future)
        await until(lambda future=future: future._waiters == 1)  # type: ignore[misc]  # no type for a default
        settling = asyncio.ensure_future(asyncio.to_thread(future._settle, 1))
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
    assert future._waiters == 1
    coroutine.close()
    assert future._waiters == 0
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
    assert future._waiters == 1
    loop.close()
    ran: list[Any] = []
    future.add_done_callback(lambda done: ran.append(done.value()))
    future.set_result(4)
    assert ran == [4]
    loop.set_exception_handler(lambda *_: None)  # asyncio tells of a task that is destroyed while it is pending
    del task
    coroutine.close()


# --- torch's helpers, and ours on torch's Futures ---------------------------------------------------------------------


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


# --- values on devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [Future.wait, Future.value, outcome, lambda future: wait_all([future])])
def test_who_takes_a_value_joins_its_streams(take: Callable[[Future[Any]], Any]) -> None:
    """In the thread that takes it, each time; a look at whether it is there joins nothing."""
    future, joined = arriving()
    future._settle(1)
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
    await until(lambda: future._waiters == 2)
    with running(future._settle, 1):
        assert await asyncio.gather(*tasks) == [1, 1]
    assert await future == 1
    assert joined.threads == [threading.get_ident()] * 3


@pytest.mark.parametrize("method", ["add_done_callback", "then"])
def test_callback_that_takes_a_value_joins_its_streams(method: str) -> None:
    """In its own thread; one that takes nothing joins nothing."""
    future, joined = arriving()
    getattr(future, method)(lambda done: None)
    getattr(future, method)(lambda done: done.value())
    with running(future._settle, 1):
        pass
    assert len(joined.threads) == 1
    assert joined.threads != [threading.get_ident()]


@pytest.mark.parametrize("helper", ["wait_all", "collect_all"])
def test_torch_s_helpers_join_streams_too(helper: str) -> None:
    """Programs written for torch need not know whose Futures they have."""
    future, joined = arriving()
    future._settle(1)
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
    assert future._settle(None, error)
    child.wait(LONG)
    assert seen[0] is error and outcome(future)[1] is error
    for wait in (future.wait, partial(torch._C.Future.wait, future)):
        try:
            wait()
        except BaseException as got:
            assert type(got) is type(error)
        else:
            pytest.fail("it has a value")
