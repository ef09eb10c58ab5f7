"""What functions are called on the wire, how they are found, and how each kind is run."""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import re
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiorpc as rpc
from aiorpc import Worker
from aiorpc.errors import RpcUsageError
from aiorpc.runtime.calls.batching import batched
from aiorpc.runtime.calls.functions import (
    Mode,
    async_execution,
    brief,
    classify,
    describe,
    find_name,
    inline,
    is_loaded,
    resolve,
    system,
)
from tests.processes.workers import until


def function() -> None: ...


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@async_execution
def deferred() -> torch.futures.Future[int]:
    return torch.futures.Future()


def decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*args: Any) -> Any:
        return inner(*args)

    return outer


@decorated
async def timed() -> None: ...


class Thing:
    def method(self) -> None: ...

    async def async_method(self) -> None: ...

    def generate(self) -> Iterator[int]:
        yield 1

    @staticmethod
    def static() -> None: ...

    @classmethod
    def build(cls) -> Thing:
        return cls()

    @async_execution
    def later(self) -> torch.futures.Future[int]:
        return torch.futures.Future()

    @staticmethod
    @async_execution
    def static_below() -> torch.futures.Future[int]:
        return torch.futures.Future()

    @async_execution
    @staticmethod
    def static_above() -> torch.futures.Future[int]:
        return torch.futures.Future()

    @classmethod
    @async_execution
    def class_below(cls) -> torch.futures.Future[int]:
        return torch.futures.Future()

    @async_execution
    @classmethod
    def class_above(cls) -> torch.futures.Future[int]:
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


NAMED = [
    function,
    coroutine,
    generator,
    deferred,
    timed,
    Thing,
    Thing.Nested,
    Thing.method,
    Thing.Nested.method,
    Thing.static,
    Thing.build,
    Thing.static_below,
    Thing.class_above,
    together,
    len,
    int,
    print,
    math.sqrt,
    operator.add,
    asyncio.sleep,
    torch.add,
    torch.mm,
    torch.ones,
    torch.nn.Linear,
    torch.nn.functional.relu,
    torch.nn.functional.linear,
    torch.linalg.norm,
    torch.fft.fft,
    torch.special.gammaln,
    torch.tensor,
    torch.ops.aten.relu,
    torch.ops.aten.add.Tensor,
    doubled,
    torch.ops.aiorpc_tests.doubled,
    torch.ops.aiorpc_tests.doubled.default,
    np.add,
    np.sum,
]


@pytest.mark.parametrize("target", NAMED, ids=name_of)
def test_named_function_is_found_under_its_name(target: Callable[..., Any]) -> None:
    """The name that the caller sends leads the callee to the same function."""
    name = find_name(target, same_main=False)
    if name is None:
        pytest.fail(f"{target!r} has no name and would travel by value")
    assert is_loaded(name)
    assert resolve(name).function == target
    assert resolve(name).name == name


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


def test_local_functions_have_no_name() -> None:
    """Neither closures nor local classes can be found from outside."""

    def local() -> None: ...

    class Local: ...

    assert find_name(local, same_main=True) is None
    assert find_name(Local, same_main=True) is None


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


def test_module_is_imported_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module the callee has not loaded yet is imported; what the import raises is passed on."""
    (tmp_path / "fresh_module.py").write_text("def f():\n    return 5\n")
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_loaded("fresh_module:f")
    assert resolve("fresh_module:f").function() == 5
    assert is_loaded("fresh_module:f")
    with pytest.raises(ValueError, match="broken"):
        resolve("broken_module:f")
    monkeypatch.delitem(sys.modules, "fresh_module")


# --- how they run -----------------------------------------------------------------------------------------------------

MODES = [
    (function, Mode.THREAD),
    (lambda: 1, Mode.THREAD),
    (len, Mode.THREAD),
    (torch.add, Mode.THREAD),
    (Thing, Mode.THREAD),
    (AsyncCallable, Mode.THREAD),
    (Thing(), Mode.THREAD),
    (Thing().method, Mode.THREAD),
    (functools.partial(function), Mode.THREAD),
    (torch.nn.Linear(1, 1), Mode.THREAD),
    (coroutine, Mode.COROUTINE),
    (functools.partial(functools.partial(coroutine)), Mode.COROUTINE),
    (Thing().async_method, Mode.COROUTINE),
    (AsyncCallable(), Mode.COROUTINE),
    (timed, Mode.THREAD),
    (asyncio.sleep, Mode.COROUTINE),
    (generator, Mode.GENERATOR),
    (Thing().generate, Mode.GENERATOR),
    (async_generator, Mode.ASYNC_GENERATOR),
    (functools.partial(async_generator), Mode.ASYNC_GENERATOR),
    (deferred, Mode.DEFERRED),
    (functools.partial(deferred), Mode.DEFERRED),
    (Thing().later, Mode.DEFERRED),
    (Thing.static_below, Mode.DEFERRED),
    (Thing.static_above, Mode.DEFERRED),
    (Thing().static_above, Mode.DEFERRED),
    (Thing.class_below, Mode.DEFERRED),
    (Thing.class_above, Mode.DEFERRED),
    (Thing().class_above, Mode.DEFERRED),
    (together, Mode.BATCHED),
]


@pytest.mark.parametrize(("target", "mode"), MODES, ids=name_of)
def test_each_kind_of_function_has_its_mode(target: Callable[..., Any], mode: Mode) -> None:
    """How it is written says how it runs: on the loop, in a thread, deferred, streamed, batched."""
    found = classify(target, "name")
    assert found.mode is mode
    assert found.function is target
    assert not found.system


@decorated
def counted() -> Iterator[int]:
    yield 1


@functools.wraps(function)
def repeated() -> Iterator[int]:
    yield 1


WRAPPERS = [(counted, True), (timed, False), (repeated, False), (coroutine, False), (decorated(function), False)]


@pytest.mark.parametrize(("target", "wrapper"), WRAPPERS, ids=["generator", "coroutine", "own", "none", "plain"])
def test_plain_wrappers_of_generator_functions_are_marked(target: Any, wrapper: bool) -> None:
    """What is a coroutine or a generator function itself is that, whatever it wraps."""
    found = classify(target, "name")
    assert found.wrapper is wrapper
    assert (found.mode is Mode.GENERATOR) is (target in (counted, repeated))


def test_a_partial_of_a_batched_function_is_refused() -> None:
    """It would be run for each caller alone, with one value in place of a list."""
    with pytest.raises(RpcUsageError, match=r"partial of a @batched function"):
        classify(functools.partial(together), "name")


def test_functions_of_the_runtime_are_marked() -> None:
    """System functions are told from the users', whose work a graceful shutdown waits for."""

    @system
    def mine() -> None: ...

    assert classify(mine, "mine").system


def test_functions_that_never_wait_are_run_on_the_loop() -> None:
    """Plain functions of the runtime's, when they say so."""

    @inline
    def quick() -> None: ...

    @brief
    def quicker() -> None: ...

    assert classify(quick, "quick").mode is Mode.INLINE
    assert classify(quicker, "quicker").mode is Mode.BRIEF


gates: list[asyncio.Future[str]] = []


@system
@inline
def answered_later() -> asyncio.Future[str]:
    """The answer is what the test says."""
    gates.append(asyncio.get_running_loop().create_future())
    return gates[-1]


async def _asked(worker: Worker) -> tuple[rpc.Future[str], asyncio.Future[str]]:
    peer = worker._node.peers.of(next(record for record in worker._node.group.live() if record.name == "worker1"))
    gates.clear()
    future = peer.call(answered_later, (), None, 0.0, system=True)
    await until(lambda: len(gates) == 1)
    return future, gates[0]


async def test_they_may_answer_with_a_future(pair: list[Worker]) -> None:
    """Its value, its error, and what its end says, whoever has ended it; a call that is given up cancels it."""
    future, gate = await _asked(pair[0])
    gate.set_result("late")
    assert await future == "late"
    future, gate = await _asked(pair[0])
    gate.set_exception(KeyError("wrong"))
    with pytest.raises(KeyError, match="wrong"):
        await future
    future, gate = await _asked(pair[0])
    gate.cancel()
    with pytest.raises(rpc.RpcCancelled, match="answered_later was cancelled on 'worker1'"):
        await future
    future, gate = await _asked(pair[0])
    future.cancel()
    await until(gate.cancelled)


def test_async_execution_changes_nothing_else() -> None:
    """A decorated function is still the same function, callable at home."""
    assert deferred.__name__ == "deferred"
    assert isinstance(Thing.static_above(), torch.futures.Future)
    assert isinstance(Thing().class_above(), torch.futures.Future)


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
