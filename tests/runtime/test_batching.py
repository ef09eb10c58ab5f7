"""@batched: gathering, shares, errors, deadlines, cancelled callers, methods; each caller settled exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc import batched
from aiorpc.errors import RpcCancelled, RpcUsageError
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


def test_what_is_no_exception_of_the_program_is_raised_too_and_not_returned() -> None:
    """As `asyncio.gather(..., return_exceptions=True)` has cancellations among its results."""

    @batched(max_size=3)
    def gathered(xs: list[BaseException | int]) -> list[BaseException | int]:
        return xs

    cancelled, left, well = call_all(gathered, [asyncio.CancelledError("stop"), SystemExit(3), 7])
    assert isinstance(cancelled.error, RpcCancelled) and isinstance(cancelled.error.__cause__, asyncio.CancelledError)
    assert isinstance(left.error, SystemExit)
    assert well.result == 7


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


# Size and time.


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


# Callers that leave.


# How many run at once.


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
