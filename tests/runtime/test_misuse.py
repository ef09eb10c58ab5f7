"""Mistakes of newcomers: each error says who is at fault, where, and what to write in its place."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import operator
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
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
from aiorpc.nn import RemoteModule
from aiorpc.runtime.calls.current import current_node
from tests.runtime.waiting import until


def add(a: int, b: int = 1) -> int:
    return a + b


def patient(a: int, timeout: float = 0.0, **others: Any) -> tuple[int, float, dict[str, Any]]:
    return a, timeout, others


def any_of(**given: Any) -> dict[str, Any]:
    return given


async def later(a: int) -> int:
    return a


def items() -> Iterator[int]:
    yield 1


def makes_items() -> Iterator[int]:
    return items()


async def makes_items_later() -> Iterator[int]:
    return items()


async def items_later() -> AsyncIterator[int]:
    yield 1


def makes_async_items() -> AsyncIterator[int]:
    return items_later()


def gives_future() -> Any:
    return aiorpc.Future()


class Model:
    def __init__(self, width: int) -> None:
        self.width = width

    def size(self) -> int:
        return self.width


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such layer")


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


async def test_functions_that_take_them_get_them(pair: list[Worker]) -> None:
    """A keyword that the function has, or any, is its own affair; so is one of a function that does not tell."""
    call = pair[0].call
    assert await call("worker1", patient, 1, timeout=5, retries=2) == (1, 5, {"retries": 2})
    assert await call("worker1", any_of, args=1, timeout=2) == {"args": 1, "timeout": 2}
    with pytest.raises(TypeError, match="timeout"):
        await call("worker1", torch.add, torch.ones(1), torch.ones(1), timeout=5)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("function", [makes_items, makes_items_later, makes_async_items])
async def test_generators_that_are_returned_are_told_from_streams(
    pair: list[Worker], function: Callable[[], Any]
) -> None:
    """A generator that a function returns does not travel; the error says how to stream it."""
    with pytest.raises(SerializationError, match=f"{function.__name__}.*generator.*rpc.stream"):
        await pair[0].call("worker1", function)


async def test_a_stream_of_a_function_that_returns_a_generator(pair: list[Worker]) -> None:
    """It has to be a generator function itself."""
    with pytest.raises(RpcUsageError, match=r"makes_items is no generator function.*yield from"):
        await anext(pair[0].stream("worker1", makes_items))


async def test_values_that_have_to_be_awaited_first(pair: list[Worker]) -> None:
    """A Future or a coroutine as an argument, a Future as a result."""
    coroutine = later(1)
    with pytest.raises(SerializationError, match=r"argument 0 of .*coroutine.*await it"):
        pair[0].call("worker1", add, coroutine)  # type: ignore[call-overload]
    coroutine.close()
    call = pair[0].call("worker1", add, 1)
    with pytest.raises(SerializationError, match=r"argument 1 of .*\(a Future\).*await it"):
        pair[0].call("worker1", add, 1, call)  # type: ignore[call-overload]
    assert await call == 2
    with pytest.raises(SerializationError, match=r"gives_future.*Future.*@rpc.async_execution"):
        await pair[0].call("worker1", gives_future)


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


async def test_what_is_deep_inside_of_much_is_found_in_bounded_time(pair: list[Worker]) -> None:
    """Where too many parts would have to be tried, the error names what it has."""
    value = [*range(50_000), *([i] for i in range(20_000)), threading.Lock()]
    with pytest.raises(
        SerializationError, match=r"argument 0 of .*add .*\(a list\) cannot be serialised.*_thread.lock"
    ):
        pair[0].call("worker1", add, value)  # type: ignore[call-overload]


@pytest.mark.parametrize("how", [lambda file: file, lambda file: {"files": [file]}, lambda file: lambda: file.name])
async def test_an_open_file_is_refused(pair: list[Worker], tmp_path: Path, how: Callable[[Any], Any]) -> None:
    """A copy of what is in it would arrive, which is no file; the streams of the process are those of the other one."""
    (tmp_path / "file").write_text("text")
    with (tmp_path / "file").open() as file:
        with pytest.raises(
            SerializationError, match=r"an open file stays with its process; send what file\.read\(\) gives"
        ):
            pair[0].call("worker1", add, how(file))
        assert file.read() == "text"
    real = sys.__stdout__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", real)
        assert await pair[0].call("worker1", itself, [real]) == [real]


def itself(value: Any) -> Any:
    return value


@pytest.mark.parametrize("value", [1, [1]])
async def test_a_name_that_is_no_text_is_told_as_such(pair: list[Worker], value: Any) -> None:
    """Half of a character in the name of an argument, which no message can hold; its size is not to blame."""
    before = pair[0].statistics().calls_made
    named: dict[str, Any] = {"good": 1, "half \ud800": value}
    text = r"argument 'half \\ud800' of .*any_of for .*lone surrogate"
    for make in (
        lambda: pair[0].call("worker1", any_of, **named),
        lambda: pair[0].remote("worker1", any_of, **named),
        lambda: pair[0].group("*").call(any_of, **named),
        lambda: pair[0].group("*").any(any_of, **named),
    ):
        with pytest.raises(SerializationError, match=text) as caught:
            make()
        assert "too large" not in str(caught.value)
    assert pair[0].statistics().calls_made == before


async def test_a_batched_function_that_has_no_name_is_told_to_have_one(pair: list[Worker]) -> None:
    """It would travel by value, with its callers: as what is called, and as an argument."""
    nameless: Any = aiorpc.batched(2)(lambda values: values)

    @aiorpc.batched(2)
    def inner(values: list[int]) -> list[int]:
        return values

    text = r"<lambda> \(.*test_misuse.py:\d+\) is batched.*with a name at the top of a module"
    for make in (
        lambda: pair[0].call("worker1", nameless, 1),
        lambda: pair[0].call("worker1", any_of, a=nameless),
        lambda: pair[0].group("*").call(nameless, 1),
    ):
        with pytest.raises(SerializationError, match=text):
            make()
    with pytest.raises(SerializationError, match=r"inner \(.*is batched"):
        pair[0].call("worker1", inner, 1)


# --- handles that are taken for what they stand for -------------------------------------------------------------------


async def test_a_call_is_not_its_result(pair: list[Worker]) -> None:
    """The error names the call, and says to await it."""
    call: Any = pair[0].call("worker1", add, 1)
    with pytest.raises(AttributeError, match=r"no attribute 'item': this is the call of .*:add on .*await it first"):
        call.item()
    assert await call == 2 and not hasattr(call, "shape") and not hasattr(call, "_shape")


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


async def test_what_gives_items_and_what_gives_one_result_are_told_apart(pair: list[Worker]) -> None:
    """A stream is not awaited, and a call is not iterated over: each error names the other verb."""
    stream: Any = pair[0].stream("worker1", items)
    with pytest.raises(TypeError, match=r"a Stream gives items.*`async for.*`await rpc.call"):
        await stream
    assert [item async for item in stream] == [1]
    call: Any = pair[0].call("worker1", add, 1)
    with pytest.raises(TypeError, match=r"add on worker 'worker1'.*one result: await it.*rpc.stream"):
        async for _ in call:
            pass
    assert await call == 2


def test_a_worker_is_entered_by_async_with() -> None:
    """The error says so, and what a script without a loop writes."""
    worker: Any = aiorpc.init("me", rank=0, world_size=1)
    with pytest.raises(TypeError, match=r"async with rpc.init.*rpc.init_rpc"), worker:
        pass


def test_a_verb_behind_the_shutdown_names_the_worker_that_has_left(tmp_path: Path) -> None:
    """It is not said that there was never one; a process that had none hears that."""
    options = aiorpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    aiorpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    aiorpc.shutdown()
    with pytest.raises(aiorpc.errors.NotInitialized, match="not been initialized since worker 'me' has shut down"):
        aiorpc.rpc_sync("me", add, (1,))


async def test_a_reference_is_not_its_value(pair: list[Worker]) -> None:
    """The error says how to call the method where the value is."""
    ref: Any = pair[0].remote("worker1", Model, 3)
    with pytest.raises(AttributeError, match=r"no attribute 'size'.*await ref\.rpc_async\(\)\.size\(\.\.\.\)"):
        ref.size()
    assert await ref.rpc_async().size() == 3 and not hasattr(ref, "_size")


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


async def test_what_verbs_give_to_a_worker_alone_does_not_travel(pair: list[Worker]) -> None:
    """The error of a handler that returns it says what to send in its place, and not that a lock cannot be pickled."""
    worker = pair[0]
    events, stream, mapped = worker.events(), worker.group("*").stream(items), worker.group("*").map(later, [1])
    given = {
        r"publication of 'w' stays with .*send its name and its version": await worker.publish("w", 1),
        r"stays with its worker.*rpc\.peer\('worker0'\)\.object\('o'\)": worker.serve("o", Model(1)),
        r"stream of a group has one consumer.*send the items": stream,
        r"what map\(\) gives cannot be .*send those": mapped,
        r"what events\(\) gives cannot be .*send those": events,
    }
    for text, value in given.items():
        with pytest.raises(SerializationError, match=text):
            worker.call("worker1", any_of, a=value)
        for use in (pickle.dumps, copy.copy):
            with pytest.raises(RpcUsageError, match=text):
                use(value)
    for each in (events, stream, mapped):
        await each.aclose()


async def test_handles_can_be_copied(pair: list[Worker]) -> None:
    """A copy makes the same calls; there is one worker of a name, and no copy of it."""
    assert await copy.copy(pair[0].peer("worker1", timeout=30)).call(add, 1) == 2
    retrying = copy.copy(pair[0].peer("worker1", retries=1))
    assert "1 retries" in repr(retrying) and await retrying.call(add, 1) == 2
    assert (await copy.copy(pair[0].group("*")).call(add, 1)).values() == [2, 2]
    with pytest.raises(RpcUsageError, match="stays in its process"):
        copy.copy(pair[0])


# --- whose line it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["worker1", "worker1/cpu"])
async def test_errors_of_modules_name_the_line_of_the_program(
    pair: list[Worker], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The forward that nobody awaits, and the other calls of a RemoteModule, are told with the user's line."""

    async def use() -> None:
        module: Any = await RemoteModule.create(device, Broken)
        made = [module(torch.ones(1)), module.forward_async(torch.ones(1)), module.load_state_dict_async({"no": 1})]
        sites = [call._describe() for call in made]
        assert all("test_misuse.py" in site and "use" in site for site in sites), sites
        await until(lambda: all(call.done() for call in made))
        making = RemoteModule.create(device, lambda: torch.nn.Linear(1, 1))
        task = asyncio.create_task(making)
        assert (await task).device == "cpu"

    await pair[0].call("worker0", use)
    gc.collect()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(lines) == 3 and all("test_misuse.py" in line for line in lines)
    caplog.clear()


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

    current_node.set(pair[0]._node)
    await asyncio.to_thread(use)


async def test_arguments_for_a_group_that_are_no_tuple_are_told_as_such(pair: list[Worker]) -> None:
    """As those for one worker."""

    def use() -> None:
        group: Any = pair[0].group(["worker1"])
        for verb in (group.rpc_sync, group.rpc_async):
            for args in (5, torch.ones(2), "ab"):
                with pytest.raises(RpcUsageError, match=r"args must be a tuple of arguments, not .*args=\(value,\)"):
                    verb(add, args=args)
            with pytest.raises(RpcUsageError, match="kwargs must be a dict"):
                verb(add, (1,), kwargs=[1])
        none: list[Any] = [None, [], range(0)]
        for given in none:
            assert group.rpc_sync(any_of, given, MappingProxyType({"a": 1})).values() == [{"a": 1}]

    await asyncio.to_thread(use)


def test_a_store_that_is_none_is_told_as_such() -> None:
    """Before anybody joins."""
    wrong: Any = 3
    with pytest.raises(RpcUsageError, match=r"store must be a store of torch\.distributed, .* not 3"):
        aiorpc.init("alone", store=wrong)


@pytest.mark.parametrize(("rank", "text"), [(-7, "rank must not be negative, but is -7"), ("0", "rank must be an int")])
def test_a_rank_that_is_none_is_told_as_such(tmp_path: Path, rank: Any, text: str) -> None:
    """Only -1 stands for the one of the environment; any other number would make a group that nobody asked for."""
    options = aiorpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet")
    with pytest.raises(RpcUsageError, match=text):
        aiorpc.init_rpc("alone", rank=rank, rpc_backend_options=options)
