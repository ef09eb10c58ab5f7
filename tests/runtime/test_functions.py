"""What functions are called on the wire, how they are found, and how each kind is run."""

from __future__ import annotations

import functools
import operator
import re
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from aiorpc import Worker, batched
from aiorpc.errors import RpcUsageError
from aiorpc.runtime.calls.functions import (
    Mode,
    async_execution,
    classify,
    describe,
    find_name,
    resolve,
)


def function() -> None: ...


def generator() -> Iterator[int]:
    yield 1


def decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*args: Any) -> Any:
        return inner(*args)

    return outer


class Thing:
    def method(self) -> None: ...

    @async_execution
    def later(self) -> torch.futures.Future[int]:
        return torch.futures.Future()

    def __call__(self) -> None: ...

    class Nested:
        def method(self) -> None: ...


class AsyncCallable:
    async def __call__(self) -> None: ...


@batched(max_size=2, max_wait=0.01)
def together(values: list[int]) -> list[int]:
    return values


@torch.library.custom_op("aiorpc_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# --- names ------------------------------------------------------------------------------------------------------------


def name_of(value: object) -> str:
    """A test's id: the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", describe(value))[:40]


async def test_operators_of_every_kind_can_be_called(pair: list[Worker]) -> None:
    """torch's own and those that a program has defined, with an overload or without."""
    ones = torch.ones(2)
    aten, ours = torch.ops.aten, torch.ops.aiorpc_tests.doubled
    for target in (doubled, ours, ours.default):
        assert (await pair[0].call("worker1", target, ones)).tolist() == [2, 2]
    assert (await pair[0].call("worker1", aten.add.Tensor, ones, 1)).tolist() == [2, 2]
    assert (await pair[0].call("worker1", aten.relu, -ones)).tolist() == [0, 0]


NAMELESS = [
    lambda: 1,
    functools.partial(function),
    Thing().method,
    Thing(),
    decorated(function),
    [].append,
    operator.itemgetter(1),
    str.upper,
    torch.Tensor.add_,
]


@pytest.mark.parametrize("target", NAMELESS, ids=name_of)
def test_function_without_a_name_travels_by_value(target: Callable[..., Any]) -> None:
    """What no name leads to, or a name that leads to something else, has none."""
    assert find_name(target, same_main=True) is None


@pytest.mark.parametrize("called", ["__main__", "__mp_main__"])
def test_main_module_counts_only_when_both_run_it(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the main module go by name to a worker with the same one, under either name, else by value."""
    module = types.ModuleType(called)
    exec("def f(): pass\nclass C:\n    def m(self): pass\n", module.__dict__)
    for other in ("__main__", "__mp_main__"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, called, module)
    for target, name in ((module.f, "__main__:f"), (module.C, "__main__:C"), (module.C.m, "__main__:C.m")):
        assert find_name(target, same_main=False) is None
        assert find_name(target, same_main=True) == name
        assert resolve(name).function is target


# --- finding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["no_such_module_here:f", "math:no_such_function", "math:pi", "__main__:no.such", "math:", ":", "", "math"]
)
def test_name_that_leads_nowhere(name: str) -> None:
    """What cannot be imported, is not there, or cannot be called is the caller's mistake, and named."""
    with pytest.raises(RpcUsageError) as caught:
        resolve(name)
    assert repr(name) in str(caught.value)


# --- how they run -----------------------------------------------------------------------------------------------------


def test_a_partial_of_a_batched_function_is_refused() -> None:
    """It would be run for each caller alone, with one value in place of a list."""
    with pytest.raises(RpcUsageError, match=r"partial of a @batched function"):
        classify(functools.partial(together), "name")


def test_async_execution_is_for_functions_that_return_a_future() -> None:
    """What can return none is refused where it is decorated, and stays what it was."""

    async def awaited() -> int:
        return 1

    def items() -> Iterator[int]:
        yield 1

    async def async_items() -> AsyncIterator[int]:
        yield 1

    for wrong, text in (
        (awaited, r"awaited is an `async def`, which needs no decorator"),
        (staticmethod(awaited), r"awaited is an `async def`"),
        (functools.partial(awaited), r"is an `async def`"),
        (AsyncCallable(), r"is an `async def`"),
        (items, r"items is a generator function: it is called with aiorpc\.stream"),
        (async_items, r"async_items is a generator function"),
        (3, r"decorates a function that returns a Future, not 3"),
        (len, r"len takes no attribute.*decorate a `def`"),
    ):
        with pytest.raises(RpcUsageError, match=text):
            async_execution(wrong)  # type: ignore[type-var]  # what is no function, too
    assert classify(awaited, "awaited").mode is Mode.COROUTINE
    assert classify(async_execution(lambda: torch.futures.Future()), "a lambda").mode is Mode.DEFERRED


def test_async_execution_takes_a_wrapper_that_makes_a_future_of_a_coroutine() -> None:
    """What it wraps may be written in any way: its own result counts."""

    async def inner() -> int:
        return 1

    @functools.wraps(inner)
    def outer() -> torch.futures.Future[int]:
        return torch.futures.Future()

    assert classify(async_execution(outer), "outer").mode is Mode.DEFERRED
