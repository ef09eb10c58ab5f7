"""Mistakes of newcomers: each error says who is at fault, where, and what to write in its place."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import operator
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import aiorpc
from aiorpc import RpcUsageError, Worker
from aiorpc.errors import SerializationError
from tests.runtime.inside import act_as
from tests.runtime.waiting import until


def add(a: int, b: int = 1) -> int:
    return a + b


def any_of(**given: Any) -> dict[str, Any]:
    return given


async def later(a: int) -> int:
    return a


def items() -> Iterator[int]:
    yield 1


class Model:
    def __init__(self, width: int) -> None:
        self.width = width

    def size(self) -> int:
        return self.width


# --- keywords that are meant for aiorpc -------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["call", "remote", "stream"])
@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"timeout": 5}, r"rpc\.peer\('worker1', timeout=5\)"),
        ({"retries": 3}, r"rpc\.peer\('worker1', retries=3\)"),
        ({"args": (1, 2)}, "arguments simply follow the function"),
    ],
)
async def test_keywords_of_other_verbs_are_refused(
    pair: list[Worker], verb: str, given: dict[str, Any], instead: str
) -> None:
    """The function does not take them, and the error says where they belong; nothing is sent."""
    function: Callable[..., Any] = items if verb == "stream" else Model if verb == "remote" else add
    before = pair[0].statistics().calls_made
    with pytest.raises(RpcUsageError, match=f"{function.__name__} takes no argument .*nothing was sent.*{instead}"):
        getattr(pair[0], verb)("worker1", function, **given)
    assert pair[0].statistics().calls_made == before


def forms_of_timeout(worker: Worker) -> list[Callable[[Any], Any]]:
    """What takes a timeout, beside the verbs whose options it is one of."""
    refs, group = worker.group(["worker1"]).remote(Model, 3), worker.group(["worker1"])
    one, some = worker.peer("worker1").object("model"), group.object("model")
    return [
        lambda timeout: refs[0].rpc_async(timeout).size(),
        lambda timeout: refs.rpc_async(timeout).size(),
        lambda timeout: one.rpc_async(timeout=timeout).size(),
        lambda timeout: some.rpc_async(timeout=timeout).size(),
        lambda timeout: group.rpc_async(add, (1, 2), timeout=timeout),
        lambda timeout: aiorpc.remote("worker1", add, (1, 2), timeout=timeout),
        lambda timeout: aiorpc.remote("worker1", add, (1, 2), {}, timeout),
    ]


async def test_timeouts_are_durations_of_all_kinds(current_pair: list[Worker]) -> None:
    """A timedelta and a number of numpy are as good as a float, wherever one is said; what is none is refused."""
    current_pair[1].serve("model", Model(3))
    wrong: list[Any] = [None, "1", float("nan"), timedelta(-1)]
    for made in forms_of_timeout(current_pair[0]):
        for timeout in (timedelta(seconds=30), numpy.float32(30), numpy.float64(30), 30, 0, -1):
            got = await made(timeout)
            assert (got.values()[0] if isinstance(got, aiorpc.types.Outcomes) else got) == 3
    for made in forms_of_timeout(current_pair[0])[:-2]:  # of `remote` it may be an argument of the function
        for timeout in wrong:
            with pytest.raises(RpcUsageError, match="timeout must be a number of seconds"):
                made(timeout)


# --- what is no function, and what cannot travel ----------------------------------------------------------------------


async def test_what_is_no_function_is_refused_before_it_is_sent(pair: list[Worker]) -> None:
    """A result in place of the function, a name, a coroutine, and the worker in the second place."""
    call: Any = pair[0].call
    before = pair[0].statistics().calls_made
    for given, text in ((add(1, 2), "3 is not callable"), ("add", "'add' is not callable"), ([], "an object of list")):
        with pytest.raises(RpcUsageError, match=f"{text}.*nothing was sent.*the function by itself"):
            call("worker1", given)
    with pytest.raises(RpcUsageError, match=r"later\(\.\.\.\) runs here.*pass the function by itself"):
        call("worker1", later(1))
    with pytest.raises(RpcUsageError, match="the worker comes first"):
        call(add, "worker1", 1)
    assert pair[0].statistics().calls_made == before


async def test_what_names_no_worker_is_told_as_such(pair: list[Worker]) -> None:
    """Also what cannot be looked up in a dictionary; who lists several workers is told of groups."""
    wrong: list[Any] = [None, 1.0, True, b"worker1", {"worker1": 1}]
    several: list[Any] = [["worker1"], ("worker1",), {"worker1"}]
    for to in (*wrong, *several):
        text = "a worker is named by a name, a rank or a WorkerInfo, not by "
        text += r".*several workers are called together by rpc\.group" if to in several else ""
        for make in (
            lambda to=to: pair[0].call(to, add, 1),
            lambda to=to: pair[0].remote(to, add, 1),
            lambda to=to: pair[0].peer(to),
            lambda to=to: pair[0].group(["worker0", to]),
        ):
            with pytest.raises(RpcUsageError, match=text):
                make()


class Holder:
    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Row(NamedTuple):
    name: str
    held: Any


def deep(what: Any) -> list[tuple[Any, str]]:
    """Values with that in them, and where it is."""
    model = Model(1)
    model.lock = what  # type: ignore[attr-defined]  # as programs do
    return [
        ({"a": [1, 2, torch.ones(1), model]}, r"\['a'\]\[3\]\.lock"),
        ([Holder(1, {2: what})], r"\[0\]\.second\[2\]"),
        ({("k", 1): (0, what)}, r"\[<a tuple>\]\[1\]"),
        (Row("x", what), r"\.held"),
        (lambda: what, r"\.<what>"),
    ]


def gives_deep(number: int) -> Any:
    return deep(threading.Lock())[number][0]


@pytest.mark.parametrize("number", range(5))
async def test_the_path_to_what_cannot_be_sent_is_told(pair: list[Worker], number: int) -> None:
    """Of an argument, by position and by name, and of a result, whose worker is named."""
    value, path = deep(threading.Lock())[number]
    kind = type(value).__qualname__
    told = rf"for worker 'worker1' \(a {kind}\) cannot be serialised at {path} \(a lock\): cannot pickle '_thread.lock'"
    with pytest.raises(SerializationError, match=rf"argument 1 of .*add {told}"):
        pair[0].call("worker1", add, 1, value)
    with pytest.raises(SerializationError, match=rf"argument 'a' of .*any_of {told}"):
        pair[0].call("worker1", any_of, a=value)
    told = rf"the result of .*gives_deep on worker 'worker1' \(a {kind}\) cannot be serialised at {path} \(a lock\)"
    with pytest.raises(SerializationError, match=told):
        await pair[0].call("worker1", gives_deep, number)


def itself(value: Any) -> Any:
    return value


# --- handles that are taken for what they stand for -------------------------------------------------------------------


FORGOTTEN: dict[str, Callable[[Any], Any]] = {
    "+": lambda call: call + 1,
    "reflected +": lambda call: 1 + call,
    "^": lambda call: call ^ 1,
    "tensor *": lambda call: torch.ones(1) * call,
    "-": lambda call: -call,
    "<": lambda call: call < 1,
    "[0]": lambda call: call[0],
    "[0] =": lambda call: operator.setitem(call, 0, 1),
    "len": len,
    "float": float,
    "in": lambda call: 1 in call,
    "for": list,
    "if": bool,
    "not": lambda call: not call,
    "and": lambda call: call and 1,
}


@pytest.mark.parametrize("what", FORGOTTEN)
async def test_a_call_whose_await_was_forgotten_is_told(pair: list[Worker], what: str) -> None:
    """No operator takes a Future for its result, nor is it true or false; the error names the call: await it."""
    group = pair[0].group("*")
    calls: list[Any] = [
        pair[0].call("worker1", add, 1),
        pair[0].peer("worker1", retries=1).call(add, 1),
        group.call(add, 1),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"'Future': this is the call of .*add on .*not its result; await it first"):
            FORGOTTEN[what](call)
        await call


async def test_a_future_can_be_tested_for_being_there(pair: list[Worker]) -> None:
    """One that stands for no call is true, as any object; asyncio and torch take those of calls everywhere."""
    assert aiorpc.Future()

    def given() -> Any:
        return pair[0].call("worker1", add, 1)

    assert [*await asyncio.gather(given())] == [2]
    assert await asyncio.wait_for(given(), 30) == 2
    shielded: Any = asyncio.shield(given())
    assert await shielded == 2
    collected: Any = aiorpc.collect_all([given()])
    assert [await each for each in await collected] == [2]
    done, _ = await asyncio.wait([asyncio.ensure_future(given())])
    assert done.pop().result() == 2
    assert await asyncio.to_thread(torch.futures.wait_all, [given()]) == [2]


def test_a_verb_behind_the_shutdown_names_the_worker_that_has_left(tmp_path: Path) -> None:
    """It is not said that there was never one; a process that had none hears that."""
    options = aiorpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    aiorpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    aiorpc.shutdown()
    with pytest.raises(aiorpc.errors.NotInitialized, match="not been initialized since worker 'me' has shut down"):
        aiorpc.rpc_sync("me", add, (1,))


def staying(worker: Worker) -> dict[str, tuple[Any, str]]:
    """What belongs to one worker, and what to do in place of sending it."""
    peer, group = worker.peer("worker1"), worker.group("*")
    there = r"makes calls of the worker that made it.*make one there: "
    return {
        "worker": (worker, r"worker 'worker0' stays in its process.*aiorpc\.current\(\)"),
        "peer": (peer, rf"{there}rpc\.peer\('worker1'\)"),
        "info": (worker.peer(worker.info), rf"{there}rpc\.peer\('worker0'\)"),
        "retrying": (worker.peer("worker1", retries=1), rf"{there}rpc\.peer\('worker1'\)"),
        "group": (group, rf"{there}rpc\.group\(\.\.\.\)"),
        "object": (peer.object("buffer"), rf"{there}rpc\.peer\('worker1'\)\.object\('buffer'\)"),
        "method": (peer.object("buffer").size, rf"{there}rpc\.peer\('worker1'\)\.object\('buffer'\)"),
        "objects": (group.object("buffer"), rf"{there}rpc\.group\(\.\.\.\)\.object\('buffer'\)"),
    }


async def test_what_belongs_to_a_worker_does_not_travel(pair: list[Worker]) -> None:
    """As an argument, inside of one, or in a function that is sent by value; the error says what to do there."""
    before = pair[0].statistics().calls_made
    for value, text in staying(pair[0]).values():
        for make in (
            lambda value=value: pair[0].call("worker1", any_of, a=value),
            lambda value=value: pair[0].call("worker1", any_of, a=[{"b": value}]),
            lambda value=value: pair[0].call("worker1", lambda: value),
            lambda value=value: pair[0].group("*").call(any_of, a=value),
        ):
            with pytest.raises(SerializationError, match=text):
                make()
        for use in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RpcUsageError, match=text):
                use(value)
    assert pair[0].statistics().calls_made == before


# --- whose line it is -------------------------------------------------------------------------------------------------


async def test_a_creation_that_failed_and_that_nobody_looked_at_is_logged(
    pair: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """With the line that made it; not if the reference was used, or was sent to somebody who may use it."""

    def errors() -> list[str]:
        gc.collect()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

    ref = pair[0].remote("worker1", Model)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="width"):
        await ref
    sent = pair[0].remote("worker1", Model)  # type: ignore[call-overload]
    await pair[0].call("worker1", isinstance, sent, aiorpc.RRef)
    await until(sent.confirmed_by_owner)
    del ref, sent
    assert errors() == []
    pair[0].remote("worker1", Model)  # type: ignore[call-overload]
    await until(errors)
    (line,) = errors()
    assert "failed and nobody looked" in line and "Model" in line and "test_misuse.py" in line
    caplog.clear()


# --- the blocking verbs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [aiorpc.rpc_sync, aiorpc.rpc_async])
async def test_arguments_that_are_no_tuple_are_told_as_such(pair: list[Worker], verb: Callable[..., Any]) -> None:
    """Most of them lack a comma; nothing is sent. What can be taken for arguments still is."""

    def use() -> None:
        wrong: list[Any] = [5, torch.zeros(1), torch.ones(2), "ab"]
        for args in wrong:
            with pytest.raises(RpcUsageError, match=r"args must be a tuple of arguments, not .*write args=\(value,\)"):
                verb("worker1", add, args=args)
        with pytest.raises(RpcUsageError, match=r"kwargs must be a dict of arguments by name, or None, not \[1\]"):
            verb("worker1", add, args=(1,), kwargs=[1])
        for timeout in ("3", None):
            with pytest.raises(RpcUsageError, match="timeout must be a number of seconds"):
                verb("worker1", add, args=(1,), timeout=timeout)
        before = pair[0].statistics().calls_made
        for args in [None, [], range(0)]:
            assert value_of(verb("worker1", any_of, args=args, kwargs=MappingProxyType({"a": 1}))) == {"a": 1}
        assert pair[0].statistics().calls_made == before + 3

    def value_of(result: Any) -> Any:
        return result.wait() if isinstance(result, aiorpc.Future) else result

    act_as(pair[0])
    await asyncio.to_thread(use)


@pytest.mark.parametrize(("rank", "text"), [(-7, "rank must not be negative, but is -7"), ("0", "rank must be an int")])
def test_a_rank_that_is_none_is_told_as_such(tmp_path: Path, rank: Any, text: str) -> None:
    """Only -1 stands for the one of the environment; any other number would make a group that nobody asked for."""
    options = aiorpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet")
    with pytest.raises(RpcUsageError, match=text):
        aiorpc.init_rpc("alone", rank=rank, rpc_backend_options=options)
