"""What the main module defines: by name where both sides run it, by value elsewhere, also before it is known which."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, Store

import aiorpc
from aiorpc import RpcBackendOptions, RpcUsageError, Worker
from aiorpc.errors import SerializationError
from aiorpc.protocol.codec import Incoming, loads
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.main_module import is_main
from aiorpc.rights import Rights
from aiorpc.runtime.calls.functions import check_pattern, resolve
from aiorpc.runtime.calls.permits import Permits
from aiorpc.testing import cluster

STATE = {"n": 0}
LOCK = threading.Lock()


class Point:
    """A class of the main module, as far as pickles see it."""


async def bump(by: int = 1) -> int:
    STATE["n"] += by
    return STATE["n"]


def total(*values: Any) -> float:
    return float(sum(value.sum() for value in values))


def locked() -> int:
    return id(LOCK)


def kind(value: object) -> type:
    return type(value)


async def raised(future: Any) -> BaseException:
    """The error that the call ends with."""
    try:
        value = await future
    except Exception as error:
        return error
    raise AssertionError(f"it gave {value!r}")


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main module defines these."""
    module = sys.modules["__main__"]
    each: Any
    for each in (bump, total, locked, Point):
        each.__module__ = "__main__"
        monkeypatch.setitem(vars(module), each.__name__, each)
    monkeypatch.setitem(STATE, "n", 0)


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture
def join_with_other_main(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    """Makes a worker that says that it runs another main module than the rest."""

    def join(name: str, **options: Any) -> Worker:
        monkeypatch.setattr("aiorpc.runtime.lifecycle.main_identity", lambda: "file:another")
        return aiorpc.init(name, store=store, **options)

    return join


async def test_calls_made_before_the_callee_has_joined_use_its_own_state(store: Store) -> None:
    """They go by name, as later calls do, with the main module's classes in their arguments."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        early = [worker.call("late", bump) for _ in range(3)]
        where, what = worker.call("late", locked), worker.call("late", kind, Point())
        array = worker.call("late", total, np.ones(3), torch.ones(100_000))
        async with aiorpc.init("late", store=store):
            assert await asyncio.gather(*early) == [1, 2, 3]
            assert (await where, await what, await array) == (id(LOCK), Point, 100_003.0)
            assert [await worker.call("late", bump) for _ in range(3)] == [4, 5, 6] and STATE == {"n": 6}


async def test_they_go_by_value_if_it_runs_another_main_module(
    store: Store, join_with_other_main: Callable[..., Worker]
) -> None:
    """As later calls do; a function that cannot travel so is an error of that call, which says why."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        early = [worker.call("late", bump, 2), worker.call("late", total, np.ones(3), torch.ones(100_000))]
        what, stuck = worker.call("late", kind, Point()), worker.call("late", locked)
        async with join_with_other_main("late"):
            assert await asyncio.gather(*early) == [2, 100_003.0] and STATE == {"n": 0}  # type: ignore[call-overload]
            assert (await what).__name__ == "Point"
            error = await raised(stuck)
            assert isinstance(error, SerializationError) and "locked" in str(error) and "another main" in str(error)
            assert await worker.call("late", bump, 3) == 3 and STATE == {"n": 0}
            assert await worker.call("late", where) == "late"


SCRIPT = """
import aiorpc as rpc
model = None
async def predict():
    return model
@rpc.exposed
def shown():
    return model
class Row:
    pass
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script that runs as the main module, in a folder that modules are imported from."""
    monkeypatch.undo()
    file = tmp_path / "served_script.py"
    file.write_text(SCRIPT)
    module = ModuleType("__main__")
    module.__file__ = str(file)
    exec(compile(SCRIPT, file, "exec"), module.__dict__)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setitem(sys.modules, "served_script", module)  # so that it is taken away in the end
    del sys.modules["served_script"]
    return module


def test_a_script_is_not_imported_again_under_its_module_name(script: Any) -> None:
    """Whoever names what it defines by the module that others import means the script that runs."""
    script.model = "loaded"
    assert is_main("served_script") and "served_script" not in sys.modules
    assert loads(b"cserved_script\nRow\n.", Incoming((), ())) is not None
    del sys.modules["served_script"]
    assert resolve("served_script:predict").function is script.predict
    assert importlib.import_module("served_script") is script


@pytest.mark.parametrize("allow", [["__main__:*"], [aiorpc.exposed]])
def test_rights_have_the_name_of_the_script(script: Any, allow: Any) -> None:
    """Rules for ``__main__`` hold for what is called by the module's name; one by that name is refused at joining."""
    caller = WorkerRecord("caller", 0, "1", "h", "h", 1, "", "", "", 0)
    permits = Permits(Rights(allow), "server", caller)
    assert permits.find("served_script:shown").function is script.shown
    with pytest.raises(RpcUsageError, match="allow '__main__:shown'"):
        check_pattern("served_script:shown")


def where() -> str:
    return aiorpc.current().name


async def test_without_pickle_they_go_by_name_or_not_at_all(
    store: Store, join_with_other_main: Callable[..., Worker]
) -> None:
    """With safe serialization a call waits for a worker with the same main module, and is refused by another one."""
    options = RpcBackendOptions(serialization="safe", allow="*")
    async with cluster(1, dynamic=True, store=store, options=options) as (worker,):
        early, stuck = worker.call("late", bump), worker.call("other", bump)
        async with aiorpc.init("late", store=store, options=options):
            assert await early == 1 and STATE == {"n": 1}
        async with join_with_other_main("other", options=options):
            error = await raised(stuck)
            assert isinstance(error, SerializationError) and "by value" in str(error) and "bump" in str(error)
