"""Calls: to whom, of what, with what, and in which order."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import enum
import functools
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import aiorpc
from aiorpc import RpcError, RpcUsageError, Worker, WorkerInfo
from aiorpc.errors import SerializationError, UnknownWorker
from aiorpc.testing import cluster
from tests.runtime.bad_member import say, serving
from tests.runtime.inside import act_as, act_no_more
from tests.runtime.waiting import LIMIT, until


def add(a: int, b: int = 10, *, c: int = 0) -> int:
    return a + b + c


def echo(value: Any) -> Any:
    return value


def where() -> str:
    return aiorpc.current().name


async def where_async() -> str:
    return aiorpc.current().name


class Scale:
    """Bound and class methods, and an object that can be called."""

    factor = 2

    def __init__(self, by: int) -> None:
        self.by = by

    def times(self, x: int) -> int:
        return self.by * x

    async def times_later(self, x: int) -> int:
        return self.by * x

    @classmethod
    def double(cls, x: int) -> int:
        return cls.factor * x

    @staticmethod
    def negate(x: int) -> int:
        return -x

    def __call__(self, x: int) -> int:
        return self.by * x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and other.by == self.by

    __hash__ = None  # type: ignore[assignment]  # not hashable


class Half(Scale):
    """A class method knows the class it was taken from."""

    factor = 1


@dataclasses.dataclass
class Point:
    """Travels by pickle."""

    x: int
    y: list[int]


class Colour(enum.IntEnum):
    """An int that must stay what it is."""

    RED = 1


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("not this one")


# --- to whom ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["name", "rank", "info"])
async def test_a_worker_is_named_by_name_rank_or_info(trio: list[Worker], form: str) -> None:
    """All three ways to name a worker reach the same one, oneself included."""
    for other in trio:
        forms: dict[str, str | int | WorkerInfo] = {"name": other.name, "rank": other.id, "info": other.info}
        to = forms[form]
        assert await trio[0].call(to, where) == other.name
        assert await trio[0].peer(to).call(where_async) == other.name


async def test_get_worker_info_gives_what_calls_take(trio: list[Worker]) -> None:
    """Infos carry name and id, of oneself without an argument."""
    info = trio[0].get_worker_info("worker2")
    assert (info.name, info.id) == ("worker2", 2)
    assert trio[1].get_worker_info() == aiorpc.WorkerInfo("worker1", 1)
    assert await trio[0].call(info, where) == "worker2"


@pytest.mark.parametrize("to", ["nobody", 7, -1])
async def test_an_unknown_worker_is_refused_at_once(pair: list[Worker], to: str | int) -> None:
    """The error names the worker that was asked for and those that there are."""
    with pytest.raises(UnknownWorker, match=r"nobody|7|-1") as caught:
        pair[0].call(to, where)
    assert "worker0, worker1" in str(caught.value)


@pytest.mark.parametrize("to", [None, 1.0, True, b"worker1"])
async def test_what_names_no_worker_is_refused(pair: list[Worker], to: Any) -> None:
    """Neither None nor a float nor a bool is a worker."""
    with pytest.raises(RpcUsageError, match="a name, a rank or a WorkerInfo"):
        pair[0].call(to, where)


async def test_a_result_of_a_call_to_oneself_is_a_copy(pair: list[Worker]) -> None:
    """A call to oneself takes the same way as any other: arguments and results are copies."""
    value = [1, 2]
    result = await pair[0].call("worker0", echo, value)
    assert result == value and result is not value


async def test_the_calls_of_torch_take_args_and_kwargs(pair: list[Worker]) -> None:
    """rpc_sync and rpc_async take args as a tuple or a list, and kwargs as a dict."""

    def script() -> list[int]:
        token = act_as(pair[0])
        try:
            return [
                aiorpc.rpc_sync("worker1", add, (1,)),
                aiorpc.rpc_sync("worker1", add, args=[1, 2]),  # type: ignore[call-overload]
                aiorpc.rpc_async("worker1", add, args=(1,), kwargs={"c": 5}).wait(),
                aiorpc.rpc_sync("worker1", add, kwargs={"a": 1, "b": 1}, timeout=0),
            ]
        finally:
            act_no_more(token)

    assert await asyncio.to_thread(script) == [11, 3, 16, 2]


async def test_a_blocking_verb_on_the_loop_is_refused_before_anything_is_sent(pair: list[Worker]) -> None:
    """The error names the awaitable to use instead, and no call was made."""
    act_as(pair[0])
    with pytest.raises(aiorpc.errors.WouldBlockLoop, match=r"await aiorpc\.call"):
        aiorpc.rpc_sync("worker1", add, (1,))
    assert pair[0].statistics().calls_made == 0


async def test_workers_on_loops_of_their_own_call_each_other(apart: list[Worker]) -> None:
    """Workers in one process may each have their own loop; Futures are awaited from any."""
    calls = [a.call(b.name, where_async) for a in apart for b in apart]
    assert await asyncio.gather(*calls) == ["worker0", "worker1", "worker2"] * 3


# --- of what ----------------------------------------------------------------------------------------------------------


async def test_functions_classes_and_torch_operators(pair: list[Worker]) -> None:
    """Python functions, classes (which construct), builtins and torch operators go by name."""
    call = pair[0].call
    assert await call("worker1", add, 1) == 11
    assert await call("worker1", Scale, 3) == Scale(3)
    assert await call("worker1", sorted, [3, 1, 2], reverse=True) == [3, 2, 1]
    assert torch.equal(await call("worker1", torch.add, torch.ones(2, 2), 1), torch.full((2, 2), 2.0))
    rectified = await call("worker1", torch.nn.functional.relu, torch.tensor([-1.0, 1.0]))
    assert torch.equal(rectified, torch.tensor([0.0, 1.0]))
    assert await call("worker1", torch.Tensor.sum, torch.ones(3)) == 3


async def test_lambdas_closures_and_partials(pair: list[Worker]) -> None:
    """What has no name travels by value, with what it closes over."""
    base = torch.arange(3)

    def closure(x: int) -> torch.Tensor:
        return base + x

    call = pair[0].call
    assert await call("worker1", lambda x: x + 1, 5) == 6
    assert torch.equal(await call("worker1", closure, 2), torch.tensor([2, 3, 4]))
    assert await call("worker1", functools.partial(add, 1, c=1), b=2) == 4


async def test_coroutine_functions_that_travel_by_value(pair: list[Worker]) -> None:
    """A local ``async def`` runs on the callee's loop as any other."""

    async def later(x: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return x, aiorpc.current().name

    assert await pair[0].call("worker1", later, 4) == (4, "worker1")


async def test_bound_class_and_static_methods(pair: list[Worker]) -> None:
    """A bound method takes its object along; a class method the class it was taken from."""
    call = pair[0].call
    with pytest.warns(UserWarning, match="with a copy of its object"):
        assert await call("worker1", Scale(3).times, 4) == 12
        assert await call("worker1", Scale(3).times_later, 4) == 12
    assert await call("worker1", Scale.double, 4) == 8
    assert await call("worker1", Half.double, 4) == 4
    assert await call("worker1", Scale.negate, 4) == -4
    assert await call("worker1", Scale(5), 4) == 20


async def test_what_cannot_be_called_is_refused(pair: list[Worker]) -> None:
    """Calling 7 is an error of the caller."""
    with pytest.raises(RpcUsageError, match="not callable"):
        await pair[0].call("worker1", 7)  # type: ignore[call-overload]  # misuse


# --- with what --------------------------------------------------------------------------------------------------------


async def test_positional_and_keyword_arguments(pair: list[Worker]) -> None:
    """Arguments arrive as they were passed, also those called ``timeout`` or ``to``."""

    def named(*args: int, **kwargs: int) -> tuple[Any, Any]:
        return args, kwargs

    call = pair[0].call
    assert await call("worker1", add, 1, b=2, c=3) == 6
    assert await call("worker1", named, 1, 2, timeout=3, to=4, args=5) == ((1, 2), {"timeout": 3, "to": 4, "args": 5})
    assert await call("worker1", named) == ((), {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        await call("worker1", add, 1, d=2)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        2**64,
        3.5,
        float("inf"),
        1 + 2j,
        "text é \N{GRINNING FACE}",
        "\ud800 lone",
        b"bytes\0",
        bytearray(b"array"),
        (1, (2, [3])),
        [1, {"a": (2,)}],
        {1: 2, (3, 4): None},
        {1, 2},
        frozenset({3}),
        range(3),
        slice(1, None),
        Ellipsis,
        Colour.RED,
        Point(1, [2]),
        Scale(4),
        datetime.timedelta(seconds=3),
        pathlib.PurePosixPath("/a/b"),
        collections.OrderedDict(a=1),
        torch.float32,
        torch.Size([1, 2]),
        int,
        Point,
        len,
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),  # the same in every process
)
async def test_everything_that_pickles_arrives_as_it_was(pair: list[Worker], value: Any) -> None:
    """Type and value are kept, in both directions, alone, in a list, and by keyword."""
    result = await pair[0].call("worker1", echo, value)
    assert type(result) is type(value) and result == value
    assert await pair[0].call("worker1", echo, value=[value, 1]) == [value, 1]


async def test_arrays_arrive_equal_and_writable(pair: list[Worker]) -> None:
    """A numpy array comes back with dtype, shape and values, as the receiver's own."""
    array = np.arange(100_000, dtype=np.int16).reshape(10, -1)
    result = await pair[0].call("worker1", echo, array)
    assert result.dtype == array.dtype and np.array_equal(result, array)
    result[0, 0] = 7
    assert array[0, 0] == 0


async def test_objects_shared_within_a_message_stay_shared(pair: list[Worker]) -> None:
    """An object passed twice is one object at the callee."""
    shared = [1]
    assert await pair[0].call("worker1", lambda a, b: a is b, shared, shared)
    first, second = await pair[0].call("worker1", echo, [shared, shared])
    assert first is second


async def test_a_tensor_given_twice_is_one(pair: list[Worker]) -> None:
    """By itself, by keyword and inside of others; so what a handler adds to its `.grad` is in one place."""

    def grad_of(x: torch.Tensor, y: torch.Tensor, *more: Any, z: torch.Tensor) -> Any:
        assert x is y is z and all(x is each for each in more[0])
        (x * y * z * more[0][0]).backward()
        return x.grad

    x = torch.tensor(2.0, requires_grad=True)
    assert await pair[0].call("worker1", grad_of, x, x, [x, x], z=x) == 32
    assert await pair[0].call("worker1", lambda a, b, c: a is b and a is not c, x, x, x.clone())


@pytest.mark.parametrize(
    ("arguments", "keywords", "name"),
    [((1, Refuses()), {}, "argument 1"), ((Refuses(),), {}, "argument 0"), ((1,), {"b": Refuses()}, "argument 'b'")],
)
async def test_what_cannot_be_serialised_raises_at_once_naming_the_argument(
    pair: list[Worker], arguments: tuple[Any, ...], keywords: dict[str, Any], name: str
) -> None:
    """The error is raised by the call itself, names argument, type, function and worker; nothing was sent."""
    with pytest.raises(SerializationError) as caught:
        pair[0].call("worker1", add, *arguments, **keywords)
    text = str(caught.value)
    assert name in text and "Refuses" in text and "add" in text and "'worker1'" in text and "not this one" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert pair[0].pending_calls() == []
    assert await pair[0].call("worker1", add, 1) == 11


async def test_a_result_that_cannot_be_serialised_is_the_callers_error(pair: list[Worker]) -> None:
    """The caller learns that it was the result, of which function, and why."""
    with pytest.raises(SerializationError, match=r"the result of .*make_refuser.*Refuses.*not this one"):
        await pair[0].call("worker1", make_refuser)


def make_refuser() -> Refuses:
    return Refuses()


async def test_an_error_in_one_argument_leaves_other_calls_alone(pair: list[Worker]) -> None:
    """Calls before and after one that cannot be serialised are answered."""
    before = pair[0].call("worker1", add, 1)
    with pytest.raises(SerializationError):
        pair[0].call("worker1", echo, Refuses())
    after = pair[0].call("worker1", add, 2)
    assert [await before, await after] == [11, 12]


# --- in which order ---------------------------------------------------------------------------------------------------


class Log:
    """What arrived, in order."""

    def __init__(self) -> None:
        self.entries: list[int] = []

    async def note(self, number: int) -> None:
        self.entries.append(number)

    def get(self) -> list[int]:
        return self.entries


async def test_coroutine_handlers_start_in_the_order_of_the_calls(pair: list[Worker]) -> None:
    """``async def`` handlers that one caller calls take their first step in the order in which they were called."""
    log = pair[0].remote("worker1", Log)
    await log
    await asyncio.gather(*(log.rpc_async().note(number) for number in range(500)))
    assert await log.rpc_async().get() == list(range(500))


async def test_threads_take_calls_in_order(pair: list[Worker]) -> None:
    """``def`` handlers are taken from the queue in the order of the calls: with one thread they run in that order."""
    seen: list[int] = []
    _seen["here"] = seen
    with_one = aiorpc.RpcBackendOptions(num_worker_threads=1)
    async with cluster(2, options=with_one) as workers:
        await asyncio.gather(*(workers[0].call("worker1", note, number) for number in range(300)))
    assert seen == list(range(300))


_seen: dict[str, list[int]] = {}


def note(number: int) -> None:
    _seen["here"].append(number)


async def test_a_small_call_is_not_held_up_by_a_slow_handler(pair: list[Worker]) -> None:
    """Replies come as handlers finish, not in the order of the calls."""
    release = threading.Event()
    _events["hold"] = release
    slow = pair[0].call("worker1", hold)
    assert await pair[0].call("worker1", add, 1) == 11
    assert not slow.done()
    release.set()
    assert await slow


_events: dict[str, threading.Event] = {}


def hold() -> bool:
    return _events["hold"].wait(30)


async def test_many_threads_may_call_at_once(pair: list[Worker]) -> None:
    """Calls made by several threads at the same time all get their own answers."""

    def script(start: int) -> list[int]:
        calls = [pair[0].call("worker1", echo, number) for number in range(start, start + 100)]
        return [call.wait() for call in calls]

    results = await asyncio.gather(*(asyncio.to_thread(script, 100 * k) for k in range(4)))
    assert [x for part in results for x in part] == list(range(400))


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.call("worker1", add, 1),
        lambda w: w.peer("worker1").call(add, 1),
        lambda w: w.remote("worker1", add, 1),
        lambda w: w.peer("worker1").remote(add, 1),
        lambda w: w.remote("worker1", Log).rpc_async().get(),
        lambda w: w.remote("worker1", Log).remote().get(),
        lambda w: aiorpc.rpc_async("worker1", add, (1,)),
        lambda w: aiorpc.call("worker1", add, 1),
        lambda w: aiorpc.remote("worker1", add, 1),
        lambda w: aiorpc.peer("worker1").call(add, 1),
        lambda w: aiorpc.RRef(1),
    ],
)
async def test_futures_and_references_name_the_users_line(pair: list[Worker], make: Callable[[Worker], Any]) -> None:
    """Whatever was made, its text says where: a line of the user's, not one of the library's."""
    act_as(pair[0])
    made = make(pair[0])
    assert f"{__file__}:" in repr(made) and "in <lambda>" in repr(made)
    await made


_events["hold for ever"] = threading.Event()


async def test_an_answer_that_is_none_says_whose_it_is(pair: list[Worker]) -> None:
    """Whoever waits for it hears which worker has sent it, and for what."""
    assert await pair[0].call("worker1", len, "abc") == 3
    release = _events["hold"] = threading.Event()
    call = pair[0].call("worker1", hold)
    connection = serving(pair[1], "worker0")
    await until(lambda: any(each.user_calls() for each in pair[1]._node.services))
    (number,) = [number for each in pair[1]._node.services for number, one in each.calls.items() if not one.system]
    say(connection, "REPLY", number, b"\xc1")
    with pytest.raises(RpcError, match=r"the result of .*hold on .*worker1.* cannot be read here: ProtocolError"):
        await asyncio.wait_for(call, LIMIT)
    release.set()
