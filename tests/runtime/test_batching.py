"""@batched: gathering, shares, errors, deadlines, cancelled callers, methods; each caller settled exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.errors import RpcCancelled, RpcUsageError, WorkerClosed
from aiorpc.runtime.calls.batched import batched
from aiorpc.runtime.calls.batching import Batch, Batcher, get_batcher


class Caller:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object | None, BaseException | None]] = []

    def __call__(self, result: object | None, error: BaseException | None) -> None:
        self.told.append((result, error))

    @property
    def result(self) -> Any:
        ((result, error),) = self.told
        assert error is None
        return result

    @property
    def error(self) -> BaseException:
        ((result, error),) = self.told
        assert result is None
        assert error is not None
        return error


class Timer:
    """A timer that rings when the test says so."""

    def __init__(self) -> None:
        self.armed: list[tuple[float, Callable[[], Batch | None]]] = []

    def __call__(self, seconds: float, take: Callable[[], Batch | None]) -> None:
        self.armed.append((seconds, take))

    def ring(self) -> Batch | None:
        return self.armed.pop(0)[1]()

    def ring_all(self) -> Iterator[Batch]:
        """Until it is not armed any more. Other threads may ring it, too."""
        with contextlib.suppress(IndexError):
            while True:
                batch = self.ring()
                if batch is not None:
                    yield batch


class Scope:
    """What stands for a worker: it has queues of its own."""


scopes: list[Scope] = []


@pytest.fixture(autouse=True)
def scope_of_test() -> Iterator[None]:
    """Each test begins with empty queues of this module's functions."""
    scopes.append(Scope())
    yield
    scopes.clear()


def batcher_of(function: Any, scope: Any = None) -> Batcher[Any]:
    batcher = get_batcher(function, scopes[-1] if scope is None else scope)
    assert batcher is not None
    return batcher


def arrive(batcher: Batcher[Any], *args: Any, **kwargs: Any) -> tuple[Caller, Batch | None]:
    caller = Caller()
    return caller, batcher.add(args, kwargs, caller)


def call_all(function: Any, values: list[Any]) -> list[Caller]:
    """As many callers as the batch takes, one argument each; the last one runs it."""
    pairs = [arrive(batcher_of(function), value) for value in values]
    assert [batch for _, batch in pairs[:-1]] == [None] * (len(values) - 1)
    batch = pairs[-1][1]
    assert batch is not None
    batch.run()
    return [caller for caller, _ in pairs]


@batched(max_size=3)
def tripled(xs: list[int]) -> list[int]:
    return [3 * x for x in xs]


@batched(max_size=2, max_wait=0.5)
async def doubled(xs: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * x for x in xs]


@batched(max_size=2, max_wait=30.0)
# A default for each call of the batch, which the signature does not tell.
def scaled(xs: list[float], factors: list[float] = 10.0, *, offset: list[float] = 0.0) -> list[Any]:  # type: ignore[assignment]  # as users write it
    return list(zip(xs, factors, offset, strict=True))


# Shares.


def test_the_arrival_that_fills_the_batch_gets_it_and_each_caller_its_own_result() -> None:
    """One call with a list; result i goes to caller i."""
    callers = call_all(tripled, [1, 2, 3])
    assert [caller.result for caller in callers] == [3, 6, 9]


async def test_a_coroutine_function_is_awaited_once_for_all() -> None:
    """run_async awaits the function in the running task."""
    first, none = arrive(batcher_of(doubled), 1)
    second, batch = arrive(batcher_of(doubled), 2)
    assert none is None
    assert batch is not None
    assert batch.is_async
    assert len(batch) == 2
    await batch.run_async()
    assert (first.result, second.result) == (2, 4)


async def test_run_async_takes_a_plain_function_too() -> None:
    """A ``def`` function may be run in the task where the runtime chooses so."""
    made = [arrive(batcher_of(tripled), value) for value in (1, 2, 3)]
    batch = made[-1][1]
    assert batch is not None
    assert not batch.is_async
    await batch.run_async()
    assert [caller.result for caller, _ in made] == [3, 6, 9]


def test_rows_of_a_tensor_go_to_the_callers() -> None:
    """A tensor's first dimension is the batch."""

    @batched(max_size=3)
    def forward(xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(xs) * 2

    callers = call_all(forward, [torch.full((2,), float(value)) for value in range(3)])
    assert [caller.result.tolist() for caller in callers] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def test_rows_of_a_sparse_tensor_go_to_the_callers() -> None:
    """A sparse tensor is shared out as well."""

    @batched(max_size=2)
    def forward(xs: list[float]) -> torch.Tensor:
        return torch.diag(torch.tensor(xs)).to_sparse()

    callers = call_all(forward, [1.0, 2.0])
    assert [caller.result.to_dense().tolist() for caller in callers] == [[1.0, 0.0], [0.0, 2.0]]


def test_arguments_by_position_by_name_and_by_default_come_in_one_form() -> None:
    """Callers of one batch may spell the same call differently."""
    first, _ = arrive(batcher_of(scaled), 1.0)
    second, batch = arrive(batcher_of(scaled), offset=7.0, xs=2.0, factors=3.0)
    assert batch is not None
    batch.run()
    assert first.result == (1.0, 10.0, 0.0)
    assert second.result == (2.0, 3.0, 7.0)


def test_a_call_that_does_not_fit_the_function_fails_alone() -> None:
    """Wrong arguments are an error at that caller, at once; the batch is not disturbed."""
    bad, none = arrive(batcher_of(scaled), 1.0, 2.0, 3.0)
    assert none is None
    assert isinstance(bad.error, TypeError)
    assert "scaled()" in str(bad.error)
    assert batcher_of(scaled).waiting == 0


def test_calls_of_different_shape_do_not_share_a_batch() -> None:
    """With *args or **kwargs the first caller sets the shape; another one is told so."""

    @batched(max_size=2)
    def loose(*columns: list[int], **named: list[int]) -> list[Any]:
        return [sum(row) for row in zip(*columns, *named.values(), strict=True)]

    batcher = batcher_of(loose)
    first, _ = arrive(batcher, 1, 2, c=3)
    wrong, none = arrive(batcher, 1)
    assert none is None
    assert isinstance(wrong.error, RpcUsageError)
    assert "1 by position and [] by name" in str(wrong.error)
    second, batch = arrive(batcher, 10, 20, c=30)
    assert batch is not None
    batch.run()
    assert (first.result, second.result) == (6, 60)


# Errors.


def test_an_exception_among_the_results_is_raised_at_that_caller_alone() -> None:
    """An Exception instance is an outcome of its own caller."""

    @batched(max_size=3)
    def careful(xs: list[int]) -> list[Any]:
        return [ValueError(f"{x} is odd") if x % 2 else x for x in xs]

    callers = call_all(careful, [2, 3, 4])
    assert (callers[0].result, callers[2].result) == (2, 4)
    assert isinstance(callers[1].error, ValueError)
    assert str(callers[1].error) == "3 is odd"


def test_what_is_no_exception_of_the_program_is_raised_too_and_not_returned() -> None:
    """As `asyncio.gather(..., return_exceptions=True)` has cancellations among its results."""

    @batched(max_size=3)
    def gathered(xs: list[BaseException | int]) -> list[BaseException | int]:
        return xs

    cancelled, left, well = call_all(gathered, [asyncio.CancelledError("stop"), SystemExit(3), 7])
    assert isinstance(cancelled.error, RpcCancelled) and isinstance(cancelled.error.__cause__, asyncio.CancelledError)
    assert isinstance(left.error, SystemExit)
    assert well.result == 7


def test_an_exception_of_the_function_reaches_every_caller() -> None:
    """If the call itself fails, it failed for all."""

    @batched(max_size=2)
    def failing(xs: list[int]) -> list[int]:
        raise LookupError("no model")

    assert [repr(caller.error) for caller in call_all(failing, [1, 2])] == ["LookupError('no model')"] * 2


class Longer(list[int]):
    """Says that it has one more than it has."""

    def __len__(self) -> int:
        return super().__len__() + 1


@pytest.mark.parametrize(
    ("result", "got"),
    [
        ([1], "got 1"),
        ((1, 2, 3), "got 3"),
        (torch.zeros(3, 2), "got a tensor of shape (3, 2)"),
        (torch.tensor(1.0), "got a tensor without dimensions"),
        (None, "got NoneType"),
        ("ab", "got str"),
        ({0: 1, 1: 2}, "got dict"),
        (Longer([7]), "got 1"),
    ],
)
def test_a_wrong_number_of_results_is_a_clear_error_at_every_caller(result: Any, got: str) -> None:
    """The error names the function, what was expected and what it returned."""

    @batched(max_size=2)
    def wrong(xs: list[int]) -> Any:
        return result

    for caller in call_all(wrong, [1, 2]):
        assert isinstance(caller.error, RpcUsageError)
        assert "wrong is batched and was called for 2 callers: expected 2 results" in str(caller.error)
        assert got in str(caller.error)


def test_running_a_coroutine_function_in_a_thread_is_refused() -> None:
    """run() of an async function settles every caller with the reason and leaves no coroutine behind."""
    for caller in call_all(doubled, [1, 2]):
        assert isinstance(caller.error, RpcUsageError)
        assert "needs run_async" in str(caller.error)
    gc.collect()


def test_an_exit_is_told_to_the_callers_and_goes_on() -> None:
    """SystemExit in the function settles everyone and reaches whoever runs the batch."""

    @batched(max_size=1)
    def leaving(xs: list[int]) -> list[int]:
        raise SystemExit(3)

    caller, batch = arrive(batcher_of(leaving), 1)
    assert batch is not None
    with pytest.raises(SystemExit):
        batch.run()
    assert isinstance(caller.error, SystemExit)


async def test_a_cancelled_task_settles_its_callers() -> None:
    """Cancelling the task that runs the batch cancels the callers, and the task ends cancelled."""
    begun = asyncio.Event()

    @batched(max_size=1)
    async def endless(xs: list[int]) -> list[int]:
        begun.set()
        await asyncio.Event().wait()
        return xs

    caller, batch = arrive(batcher_of(endless), 1)
    assert batch is not None
    task = asyncio.create_task(batch.run_async())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(caller.error, RpcCancelled)


def test_a_caller_that_cannot_be_told_does_not_disturb_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """What ``done`` raises is logged; the next callers get their results."""
    batcher = batcher_of(tripled)

    def broken(result: object | None, error: BaseException | None) -> None:
        raise RuntimeError("gone")

    batcher.add((1,), {}, broken)
    second, _ = arrive(batcher, 2)
    third, batch = arrive(batcher, 3)
    assert batch is not None
    with caplog.at_level(logging.ERROR, logger="aiorpc"):
        batch.run()
    assert (second.result, third.result) == (6, 9)
    assert "could not be told" in caplog.text


def test_a_batch_runs_once() -> None:
    """Running again, or aborting after the run, settles nobody a second time."""
    caller, batch = arrive(batcher_of(single), 1)
    assert batch is not None
    batch.run()
    batch.run()
    batch.abort(WorkerClosed("late"))
    assert caller.result == 1


@batched(max_size=1)
def single(xs: list[int]) -> list[int]:
    return xs


# Size and time.


def test_a_size_that_is_a_function_is_asked_at_every_arrival() -> None:
    """max_size may be 'all current peers'; shrinking is noticed by the next arrival."""
    peers = {"a", "b", "c"}

    @batched(max_size=lambda: len(peers))
    def gather(xs: list[int]) -> list[int]:
        return [sum(xs)] * len(xs)

    batcher = batcher_of(gather)
    first, none = arrive(batcher, 1)
    assert none is None
    peers.discard("c")
    second, batch = arrive(batcher, 2)
    assert batch is not None
    batch.run()
    assert (first.result, second.result) == (3, 3)
    peers.clear()
    last, batch = arrive(batcher, 5)
    assert batch is not None
    batch.run()
    assert last.result == 5


@pytest.mark.parametrize(
    ("size", "error"), [("three", RpcUsageError), (True, RpcUsageError), (None, ZeroDivisionError)]
)
def test_a_size_function_that_fails_is_an_error_at_the_caller(size: Any, error: type[Exception]) -> None:
    """The arrival that asked is told; nothing is left waiting."""

    @batched(max_size=lambda: 1 // 0 if size is None else size)
    def function(xs: list[int]) -> list[int]:
        return xs

    caller, batch = arrive(batcher_of(function), 1)
    assert batch is None
    assert isinstance(caller.error, error)
    assert batcher_of(function).waiting == 0


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None])
def test_a_size_that_makes_no_sense_is_refused(size: Any) -> None:
    """max_size is checked when the function is decorated."""
    with pytest.raises(RpcUsageError, match="max_size must be"):
        batched(max_size=size)


def test_a_decorator_without_its_arguments_is_refused() -> None:
    """The function would be taken for max_size, and each caller told of it."""
    bare: Any = batched
    with pytest.raises(RpcUsageError, match=r"decorate that function write @rpc\.batched\(max_size="):
        bare(plain)
    batched(iter([2]).__next__)  # nothing says what it takes: it is asked


def plain(values: list[int]) -> list[int]:
    return values


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf"), True, "1"])
def test_a_wait_that_makes_no_sense_is_refused(wait: Any) -> None:
    """max_wait is checked when the function is decorated."""
    with pytest.raises(RpcUsageError, match="max_wait must be"):
        batched(max_size=2, max_wait=wait)


def test_without_max_wait_no_timer_is_armed() -> None:
    """A partial batch waits until it is full."""
    batcher, timer = batcher_of(tripled), Timer()
    assert batcher.add((5,), {}, Caller(), timer) is None
    assert (batcher.waiting, timer.armed) == (1, [])


def test_a_partial_batch_is_due_max_wait_after_its_first_caller() -> None:
    """The timer hands it out; later callers do not move it."""

    @batched(max_size=10, max_wait=timedelta(seconds=30))
    def function(xs: list[int]) -> list[int]:
        return xs

    batcher, timer = batcher_of(function), Timer()
    first, second = Caller(), Caller()
    before = time.monotonic()
    batcher.add((1,), {}, first, timer)
    ((seconds, _),) = timer.armed
    assert seconds <= 30.0
    batcher.add((2,), {}, second, timer)
    assert len(timer.armed) == 1
    batch = timer.ring()
    assert batch is not None and before + 30 <= (batch.deadline or 0.0) <= time.monotonic() + 30
    batch.run()
    assert timer.armed == []
    assert (first.result, second.result) == (1, 2)


def test_one_timer_serves_all_batches() -> None:
    """It is armed by the first caller, takes that batch, and is armed again for a younger one it finds."""
    batcher, timer = batcher_of(scaled), Timer()
    batcher.add((1.0,), {}, Caller(), timer)
    ((seconds, _),) = timer.armed
    assert 29.0 < seconds <= 30.0
    full = batcher.add((2.0,), {}, Caller(), timer)
    assert full is not None
    late = Caller()
    batcher.add((3.0,), {}, late, timer)
    assert len(timer.armed) == 1
    assert timer.ring() is None
    assert len(timer.armed) == 1
    batch = timer.ring()
    assert batch is not None
    batch.run()
    assert late.result == (3.0, 10.0, 0.0)
    assert timer.armed == []
    full.abort(WorkerClosed("end"))


def test_a_timer_that_finds_nothing_rests_until_the_next_caller() -> None:
    """After a full batch the ring is empty, and the next arrival arms anew."""
    batcher, timer = batcher_of(scaled), Timer()
    batcher.add((1.0,), {}, Caller(), timer)
    full = batcher.add((2.0,), {}, Caller(), timer)
    assert full is not None
    assert timer.ring() is None
    assert timer.armed == []
    batcher.add((3.0,), {}, Caller(), timer)
    assert len(timer.armed) == 1


async def test_on_a_real_loop_a_partial_batch_goes_after_max_wait() -> None:
    """Armed with call_later, three callers of a batch of eight get their results when the time is up."""

    @batched(max_size=8, max_wait=0.05)
    async def function(xs: list[int]) -> list[int]:
        return [len(xs)] * len(xs)

    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    def go(take: Callable[[], Batch | None]) -> None:
        batch = take()
        assert batch is not None
        tasks.append(loop.create_task(batch.run_async()))

    def arm(seconds: float, take: Callable[[], Batch | None]) -> object:
        return loop.call_later(seconds, go, take)

    async def call(value: int) -> Any:
        answer: asyncio.Future[Any] = loop.create_future()
        assert batcher_of(function).add((value,), {}, lambda result, _: answer.set_result(result), arm) is None
        return await answer

    start = time.monotonic()
    assert await asyncio.wait_for(asyncio.gather(*(call(value) for value in range(3))), 10) == [3, 3, 3]
    assert time.monotonic() - start > 0.04
    assert len(tasks) == 1


# Callers that leave.


def test_a_discarded_caller_is_not_called_for() -> None:
    """Others of its batch are not disturbed, and it no longer counts for the size."""
    batcher = batcher_of(tripled)
    gone, _ = arrive(batcher, 1)
    first, _ = arrive(batcher, 2)
    assert batcher.discard(gone)
    assert not batcher.discard(gone)
    second, none = arrive(batcher, 3)
    assert none is None
    third, batch = arrive(batcher, 4)
    assert batch is not None
    batch.run()
    assert [caller.result for caller in (first, second, third)] == [6, 9, 12]
    assert gone.told == []


def test_a_caller_can_be_discarded_until_the_batch_starts() -> None:
    """Also from a full batch that waits for a thread; afterwards it is too late."""
    batcher = batcher_of(tripled)
    callers = [Caller() for _ in range(3)]
    batch = [batcher.add((index,), {}, caller, token=f"call {index}") for index, caller in enumerate(callers)][-1]
    assert batch is not None
    assert batcher.discard("call 1")
    batch.run()
    assert not batcher.discard("call 0")
    assert (callers[0].result, callers[1].told, callers[2].result) == (0, [], 6)


def test_a_batch_all_of_whose_callers_left_is_no_batch() -> None:
    """The next caller opens a new one with its own deadline, and the function is not called for nobody."""
    batcher, timer = batcher_of(scaled), Timer()
    caller = Caller()
    batcher.add((1.0,), {}, caller, timer)
    assert batcher.discard(caller)
    assert batcher.waiting == 0
    assert timer.ring() is None
    lone, batch = arrive(batcher_of(single), 1)
    assert batch is not None
    assert batcher_of(single).discard(lone)
    batch.run()
    assert lone.told == []


def test_abort_settles_the_callers_of_a_batch_that_has_not_started() -> None:
    """They are told the reason."""
    callers, batches = zip(*(arrive(batcher_of(tripled), value) for value in range(3)), strict=True)
    batches[-1].abort(WorkerClosed("bye"))
    assert [str(caller.error) for caller in callers] == ["bye"] * 3


# How many run at once.


def test_one_batch_of_a_function_runs_at_a_time() -> None:
    """A full batch that comes meanwhile waits for the end of the one that runs; further ones wait behind it."""
    batcher = batcher_of(tripled)
    batches = [[arrive(batcher, value)[1] for value in range(3)][-1] for _ in range(3)]
    first, second, third = (batch for batch in batches if batch is not None)
    assert [each.begin() for each in (first, second, third)] == [True, False, False]
    first.run()
    assert (len(second), len(third)) == (3, 3)
    assert first.end() is second and second.begin()
    second.run()
    assert second.end() is third and third.begin()
    third.run()
    assert third.end() is None


def test_as_many_run_at_once_as_concurrency_says() -> None:
    """Two with 2, and all with None; each instance and each worker counts its own."""

    class Several:
        @batched(max_size=1, concurrency=2)
        def two(self, xs: list[int]) -> list[int]:
            return xs

        @batched(max_size=1, concurrency=None)
        def all(self, xs: list[int]) -> list[int]:
            return xs

    def begun(batcher: Batcher[Any]) -> list[bool]:
        batches = [arrive(batcher, 1)[1] for _ in range(3)]
        return [batch.begin() for batch in batches if batch is not None]

    one, other, scope = Several(), Several(), Caller()
    assert begun(batcher_of(one.two)) == begun(batcher_of(other.two)) == [True, True, False]
    assert begun(batcher_of(one.two, scope)) == [True, True, False]
    assert begun(batcher_of(one.all)) == begun(batcher_of(one.all, scope)) == [True, True, True]

    def wrapper(self: Several, xs: list[int]) -> Any:
        return self.two(xs)

    wrapped = functools.wraps(Several.two)(wrapper)
    assert batcher_of(MethodType(wrapped, one)).concurrency == 2


def test_a_batch_whose_time_comes_while_another_one_runs_grows_until_its_turn() -> None:
    """It is not cut off at its deadline: who arrives before the other one ends is served with it, and no timer runs."""
    batcher, timer = batcher_of(doubled), Timer()
    arrive(batcher, 1)
    _, running = arrive(batcher, 2)
    assert running is not None and running.begin()
    first = Caller()
    batcher.add((3,), {}, first, timer)
    assert timer.ring() is None
    second = Caller()
    assert batcher.discard(first)
    batcher.add((4,), {}, second, timer)
    assert timer.ring() is None
    assert not timer.armed
    batch = running.end()
    assert batch is not None and batch.tokens() == [second]
    assert batch.begin()
    assert batch.end() is None


def test_a_batch_that_waits_and_has_lost_its_callers_is_passed_over() -> None:
    """Who ends a batch gets one that has something to do."""
    batcher = batcher_of(single)
    running, empty, full = (arrive(batcher, value) for value in range(3))
    assert running[1] is not None and empty[1] is not None and full[1] is not None
    assert [each[1].begin() for each in (running, empty, full) if each[1] is not None] == [True, False, False]
    assert batcher.discard(empty[0])
    assert running[1].end() is full[1]


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5, "2", float("inf")])
def test_a_concurrency_that_cannot_be_is_refused_at_decoration(concurrency: Any) -> None:
    """It is an integer from 1 on, or None."""
    with pytest.raises(RpcUsageError, match="concurrency must be"):
        batched(max_size=2, concurrency=concurrency)


# Kinds of functions.


class Model:
    """An object with every kind of batched method."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @batched(max_size=2)
    def scale(self, xs: list[int]) -> list[int]:
        return [self.factor * x for x in xs]

    @classmethod
    @batched(max_size=2)
    def named(cls, xs: list[int]) -> list[str]:
        return [f"{cls.__name__}{x}" for x in xs]

    @batched(max_size=2)
    @classmethod
    def named_outside(cls, xs: list[int]) -> list[str]:
        return [f"{cls.__name__}{x}" for x in xs]

    @staticmethod
    @batched(max_size=2)
    def negated(xs: list[int]) -> list[int]:
        return [-x for x in xs]

    @batched(max_size=2)
    @staticmethod
    def negated_outside(xs: list[int]) -> list[int]:
        return [-x for x in xs]

    @torch.no_grad()
    @batched(max_size=2)
    def frozen(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(xs) * self.factor

    @batched(max_size=2)
    def __call__(self, xs: list[int]) -> list[int]:
        return self.scale(xs)


class SubModel(Model):
    """Inherits the methods, not the queues."""

    __hash__ = None  # type: ignore[assignment]  # not hashable

    def __eq__(self, other: object) -> bool:
        return True


def test_each_instance_gathers_its_own_callers() -> None:
    """Callers of two instances do not meet, even where the instances are equal and cannot be hashed."""
    one, two = SubModel(1), SubModel(2)
    assert batcher_of(one.scale) is batcher_of(one.scale)
    assert batcher_of(one.scale) is not batcher_of(two.scale)
    first, none = arrive(batcher_of(one.scale), 10)
    assert none is None
    results = [caller.result for caller in call_all(two.scale, [1, 2])]
    assert results == [2, 4]
    second, batch = arrive(batcher_of(one.scale), 20)
    assert batch is not None
    batch.run()
    assert (first.result, second.result) == (10, 20)


def test_an_instance_is_held_weakly_but_lives_while_callers_wait() -> None:
    """A queue does not keep its instance; an open batch does, for it needs it."""
    model = Model(3)
    watch = weakref.ref(model)
    batcher_of(model.scale)
    caller, _ = arrive(batcher_of(model.scale), 5)
    batcher = batcher_of(model.scale)
    del model
    assert watch() is not None
    second, batch = arrive(batcher, 6)
    assert batch is not None
    batch.run()
    del batch
    assert (caller.result, second.result) == (15, 18)
    assert watch() is None
    late, none = arrive(batcher, 1)
    assert none is None
    assert "no longer exists" in str(late.error)


def test_dead_instances_leave_nothing_behind() -> None:
    """A thousand short-lived instances leave no queue."""
    queues = [weakref.ref(batcher_of(Model(index).scale)) for index in range(1000)]
    gc.collect()
    assert not any(queue() is not None for queue in queues)


def test_callers_of_two_workers_do_not_share_a_batch() -> None:
    """Each scope has its own queue of a function and of a method, and takes it along when it goes."""
    one, two, model = Caller(), Caller(), Model(2)
    for function in (tripled, model.scale):
        assert batcher_of(function, one) is batcher_of(function, one)
        assert len({batcher_of(function), batcher_of(function, one), batcher_of(function, two)}) == 3
    arrive(batcher_of(model.scale, one), 1)
    assert batcher_of(model.scale, two).waiting == 0
    second, batch = arrive(batcher_of(model.scale, one), 2)
    assert batch is not None
    batch.run()
    assert second.result == 4
    queues = [weakref.ref(batcher_of(each, scope)) for each in (tripled, model.scale) for scope in (one, two)]
    del one, two, batch
    gc.collect()
    assert not any(queue() is not None for queue in queues)


def test_an_instance_without_weak_references_is_refused_by_name() -> None:
    """__slots__ without __weakref__ says what to add."""

    class Slotted:
        __slots__ = ()

        @batched(max_size=1)
        def method(self, xs: list[int]) -> list[int]:
            return xs

    with pytest.raises(RpcUsageError, match="Slotted cannot be weakly referenced"):
        get_batcher(Slotted().method)


@pytest.mark.parametrize("name", ["named", "named_outside"])
def test_class_methods_gather_for_each_class(name: str) -> None:
    """The class is the instance."""
    assert [caller.result for caller in call_all(getattr(Model, name), [1, 2])] == ["Model1", "Model2"]
    assert [caller.result for caller in call_all(getattr(SubModel, name), [1, 2])] == ["SubModel1", "SubModel2"]


@pytest.mark.parametrize("name", ["negated", "negated_outside"])
def test_static_methods_gather_for_all(name: str) -> None:
    """A static method is a function."""
    assert [caller.result for caller in call_all(getattr(Model, name), [1, 2])] == [-1, -2]
    assert get_batcher(getattr(Model(1), name)) is get_batcher(getattr(Model, name))


def test_a_callable_instance_is_recognised_and_its_class_is_not() -> None:
    """obj(x) is batched where __call__ is; making an object is not."""
    model = Model(4)
    assert [caller.result for caller in call_all(model, [1, 2])] == [4, 8]
    assert get_batcher(Model) is None


def test_a_wrapper_around_a_batched_function_runs_once_for_the_batch() -> None:
    """torch.no_grad above batched holds while the batch runs."""
    weights = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    callers = call_all(Model(2).frozen, weights)
    assert all(not caller.result.requires_grad for caller in callers)
    calls: list[int] = []

    @functools.wraps(tripled)
    def counted(xs: list[int]) -> list[int]:
        calls.append(len(xs))
        return tripled(xs)

    assert [caller.result for caller in call_all(counted, [1, 2, 3])] == [3, 6, 9]
    assert calls == [3]
    assert get_batcher(counted) is get_batcher(counted)
    assert get_batcher(counted) is not get_batcher(tripled)


@pytest.mark.parametrize("function", [torch.add, len, print, Caller(), Caller, Model(1).factor, None, lambda: 1])
def test_what_is_not_batched_has_no_batcher(function: Any) -> None:
    """Operators, builtins, classes, plain functions and things that cannot be called."""
    assert get_batcher(function) is None


async def test_called_locally_the_function_is_what_it_was() -> None:
    """Lists in, lists out, its own name, picklable."""
    assert tripled([1, 2]) == [3, 6]
    assert await doubled([4]) == [8]
    assert Model(5).scale([1]) == [5]
    assert tripled.__name__ == "tripled"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(tripled)) is tripled


def test_generators_are_refused() -> None:
    """A stream has no single result to share out."""

    def plain(xs: list[int]) -> Iterator[int]:
        yield from xs

    with pytest.raises(RpcUsageError, match="plain is a generator"):
        batched(max_size=2)(plain)  # type: ignore[arg-type]
    with pytest.raises(RpcUsageError, match="decorates a function"):
        batched(max_size=2)(7)  # type: ignore[call-overload]  # misuse


# All together.


def test_arrivals_from_many_threads_are_settled_exactly_once() -> None:
    """Threads that add, discard and run, also before batches are full: each caller is told once, or was discarded."""

    @batched(max_size=4, max_wait=30.0)
    def function(xs: list[int]) -> list[int]:
        return [x + 1 for x in xs]

    batcher, timer = batcher_of(function), Timer()
    callers = [Caller() for _ in range(2000)]
    discarded = [False] * 2000

    def work(first: int) -> None:
        for index in range(first, 2000, 4):
            batch = batcher.add((index,), {}, callers[index], timer)
            if index % 7 == 0:
                discarded[index] = batcher.discard(callers[index])
            if batch is not None:
                batch.run()
            for early in timer.ring_all() if index % 50 == first else ():
                early.run()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for rest in timer.ring_all():
        rest.run()
    for index, caller in enumerate(callers):
        assert caller.told == ([] if discarded[index] else [(index + 1, None)])
    assert batcher.waiting == 0


@given(st.lists(st.sampled_from(["add", "discard", "ring", "run"]), max_size=60), st.integers(1, 4))
def test_any_order_of_events_settles_each_caller_once(events: list[str], size: int) -> None:
    """Whatever happens in which order: told once with its own result, or discarded and told nothing."""

    @batched(max_size=size, max_wait=1.0)
    def function(xs: list[int]) -> list[int]:
        assert 1 <= len(xs) <= size
        return [x * x for x in xs]

    batcher, timer = batcher_of(function), Timer()
    callers: list[Caller] = []
    removed: set[int] = set()
    ready: list[Batch | None] = []
    for event in events:
        if event == "add":
            callers.append(Caller())
            ready.append(batcher.add((len(callers) - 1,), {}, callers[-1], timer))
        elif event == "discard" and callers:
            index = (len(events) * 7 + len(ready)) % len(callers)
            if batcher.discard(callers[index]):
                removed.add(index)
        elif event == "ring" and timer.armed:
            ready.append(timer.ring())
        elif event == "run" and ready and (batch := ready.pop(0)) is not None:
            batch.run()
    for batch in [*ready, *timer.ring_all()]:
        if batch is not None:
            batch.run()
    for index, caller in enumerate(callers):
        assert caller.told == ([] if index in removed else [(index * index, None)])
