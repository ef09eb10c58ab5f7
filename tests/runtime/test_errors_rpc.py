"""Errors of remote functions, and of messages that cannot be read: who gets them, and who does not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import sys
import threading
import traceback
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import RemoteError, RpcBackendOptions, RpcError, Worker
from aiorpc.errors import SerializationError
from aiorpc.testing import cluster
from tests.runtime.waiting import until


class Simple(Exception):
    """Pickles by itself."""


class Several(Exception):
    """Takes several arguments and passes another on: plain pickle would call ``Several(text)``."""

    def __init__(self, code: int, where: str, *, hint: str = "") -> None:
        super().__init__(f"{code} at {where}")
        self.code = code
        self.where = where
        self.hint = hint


class WithLock(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NoText(Exception):
    """Its text cannot be made."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise ZeroDivisionError


class Fatal(BaseException):
    """No Exception: must not be raised as itself at the caller."""


def raise_it(error: BaseException) -> None:
    raise error


def raise_simple() -> None:
    raise Simple("line 1\nline 2", 3)


async def raise_simple_async() -> None:
    raise Simple("line 1\nline 2", 3)


def raise_several() -> None:
    raise Several(7, "here", hint="try again")


def raise_with_lock() -> None:
    raise WithLock("held")


def raise_no_text() -> None:
    raise NoText


def raise_fatal() -> None:
    raise Fatal("gone")


def raise_stop() -> None:
    raise StopIteration(5)


async def raise_stop_async() -> None:
    raise StopAsyncIteration


def raise_chain() -> None:
    try:
        raise_simple()
    except Simple as error:
        raise KeyError("outer") from error


def raise_group() -> None:
    raise ExceptionGroup("several", [ValueError(1), KeyError("k")])


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("from a function")


def raise_with_tensor() -> None:
    raise ValueError(torch.ones(3))


def relay(to: str) -> None:
    aiorpc.rpc_sync(to, raise_simple)


# --- of the function --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [raise_simple, raise_simple_async])
async def test_the_type_itself_is_raised_with_the_remote_traceback(pair: list[Worker], handler: Any) -> None:
    """Type, arguments and line breaks are kept; the cause is the remote traceback, which a printed traceback shows."""
    with pytest.raises(Simple) as caught:
        await pair[0].call("worker1", handler)
    assert caught.value.args == ("line 1\nline 2", 3)
    text = "".join(traceback.format_exception(caught.value))
    assert "worker 'worker1'" in text and handler.__name__ in text and 'raise Simple("line 1' in text


async def test_exceptions_with_several_arguments(pair: list[Worker]) -> None:
    """Also those whose ``__init__`` does not take what ``args`` has; attributes are kept."""
    with pytest.raises(Several, match="7 at here") as caught:
        await pair[0].call("worker1", raise_several)
    assert (caught.value.code, caught.value.where, caught.value.hint) == (7, "here", "try again")
    with pytest.raises(UnicodeDecodeError) as decode:
        await pair[0].call("worker1", bytes.decode, b"\xff")
    assert decode.value.start == 0
    with pytest.raises(FileNotFoundError) as missing:
        await pair[0].call("worker1", open, "/nowhere/at/all")
    assert missing.value.errno == 2 and missing.value.filename == "/nowhere/at/all"
    with pytest.raises(ExceptionGroup) as group:
        await pair[0].call("worker1", raise_group)
    assert [repr(error) for error in group.value.exceptions] == ["ValueError(1)", "KeyError('k')"]


@pytest.mark.parametrize(
    ("handler", "kind", "text"),
    [
        (raise_with_lock, "WithLock", "held"),
        (raise_no_text, "NoText", "its text cannot be made"),
        (raise_fatal, "Fatal", "gone"),
        (raise_stop, "StopIteration", "5"),
        (raise_stop_async, "", ""),
    ],
)
async def test_what_cannot_be_rebuilt_becomes_a_remote_error(
    pair: list[Worker], handler: Any, kind: str, text: str
) -> None:
    """RemoteError has the type's name, the message and the traceback as fields; nothing else goes wrong."""
    expected: Any = RpcError if kind else RuntimeError
    with pytest.raises(expected) as caught:
        await pair[0].call("worker1", handler)
    if isinstance(caught.value, RemoteError):
        error = caught.value
        assert error.worker == "worker1" and kind in error.type_name and text in error.remote_message
        assert handler.__name__ in error.remote_traceback and kind in str(error)
    assert await pair[0].call("worker1", len, "abc") == 3


async def test_a_type_of_no_module_comes_by_value(pair: list[Worker]) -> None:
    """A class made inside of a function is rebuilt, with its text."""
    with pytest.raises(Exception, match="from a function") as caught:
        await pair[0].call("worker1", raise_local)
    assert type(caught.value).__name__ == "Local"


async def test_an_exception_with_a_tensor_inside(pair: list[Worker]) -> None:
    """Comes as RemoteError with its text: an error carries no tensors."""
    with pytest.raises((RemoteError, ValueError), match=r"tensor\(\[1., 1., 1.\]\)"):
        await pair[0].call("worker1", raise_with_tensor)


async def test_the_whole_chain_is_in_the_text(pair: list[Worker]) -> None:
    """What the exception was raised from is in the remote traceback."""
    with pytest.raises(KeyError) as caught:
        await pair[0].call("worker1", raise_chain)
    assert "Simple" in str(caught.value.__cause__) and "direct cause" in str(caught.value.__cause__)


async def test_errors_travel_over_several_workers(trio: list[Worker]) -> None:
    """Type kept, and every hop's traceback in the text."""
    with pytest.raises(Simple) as caught:
        await trio[0].call("worker1", relay, "worker2")
    text = "".join(traceback.format_exception(caught.value))
    assert "worker 'worker1'" in text and "worker 'worker2'" in text


async def test_errors_of_the_callees_own_calls_say_where_they_come_from(trio: list[Worker]) -> None:
    """A timeout that the callee suffered is told from one of the caller's own."""
    with pytest.raises(aiorpc.RpcTimeout) as caught:
        await trio[0].call("worker1", time_out, "worker2")
    assert caught.value.worker == "worker2" and "worker 'worker1'" in str(caught.value.__cause__)


async def time_out(to: str) -> None:
    await aiorpc.peer(to, timeout=0.01).call(for_ever)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_blocked_thread_raises_the_same(pair: list[Worker]) -> None:
    """rpc_sync raises the remote exception's own type."""
    with pytest.raises(Several):
        await asyncio.to_thread(lambda: pair[0].call("worker1", raise_several).wait())


async def test_an_error_nobody_looked_at_is_logged(pair: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    """With the function and the line that made the call; one that was looked at is not."""
    with caplog.at_level(logging.ERROR, "aiorpc"):
        call = pair[0].call("worker1", raise_simple)
        await until(call.done)
        del call
        gc.collect()
        seen = pair[0].call("worker1", raise_several)
        with pytest.raises(Several):
            await seen
        del seen
        gc.collect()
    (record,) = caplog.records
    assert "raise_simple" in record.message and "nobody looked" in record.message and __file__ in record.message


# --- of messages ------------------------------------------------------------------------------------------------------


class BadState:
    """Pickles, and raises when it is unpickled."""

    def __init__(self, error: str) -> None:
        self.error = error

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds = {"value": ValueError, "exit": SystemExit, "memory": MemoryError, "fatal": Fatal}
        raise kinds[state["error"]]("bad state")


def take(value: object) -> None:
    return None


async def take_async(value: object) -> None:
    return None


def give(error: str) -> BadState:
    return BadState(error)


class BadError(Exception):
    """Raises when it is unpickled, but only the second time: the callee's own check passes."""

    count = 0

    def __reduce__(self) -> Any:
        return _make_bad_error, ()


def _make_bad_error() -> BadError:
    BadError.count += 1
    if BadError.count > 1:
        raise ValueError("cannot be made here")
    return BadError()


def raise_bad_error() -> None:
    BadError.count = 0
    raise BadError


@pytest.mark.parametrize("error", ["value", "memory", "exit", "fatal"])
@pytest.mark.parametrize("handler", [take, take_async])
async def test_an_error_in_unpickling_at_the_callee_settles_that_call(
    pair: list[Worker], handler: Any, error: str
) -> None:
    """The caller is told what it was, and where; calls before and after on the same connection are answered."""
    before = pair[0].call("worker1", for_a_moment)
    bad = pair[0].call("worker1", handler, BadState(error))
    after = pair[0].call("worker1", len, "abc")
    with pytest.raises(SerializationError, match=r"an argument of .* cannot be read on worker 'worker1': .*bad state"):
        await bad
    assert [await before, await after] == ["moment", 3]


class OfNoModule:
    """Arrives as what a module has that the callee cannot import."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("aiorpc_tests_no_such_module",)


def take_items(value: object) -> Iterator[object]:
    yield value


async def take_items_async(value: object) -> AsyncIterator[object]:
    yield value


@aiorpc.batched(max_size=1)
def take_together(values: list[object]) -> list[object]:
    return values


class Taker:
    """Made of an argument, and takes one."""

    def __init__(self, value: object) -> None:
        self.value = value

    def take(self, value: object) -> None:
        return None


async def items_of(stream: AsyncIterator[object]) -> list[object]:
    return [item async for item in stream]


async def taken_by_a_reference(worker: Worker, value: object) -> None:
    await worker.remote("worker1", Taker, 1).rpc_async().take(value)


async def taken_by_an_object(workers: list[Worker], value: object) -> None:
    with workers[1].serve("taker", Taker(1)):
        await workers[0].peer("worker1").object("taker").take(value)


async def of_the_only_member(worker: Worker, value: object) -> None:
    (error,) = (await worker.group(["worker1"]).call(take, value)).errors.values()
    raise error


ARGUMENTS: dict[str, tuple[str, Callable[[list[Worker], object], Any]]] = {
    "call": (":take", lambda workers, value: workers[0].call("worker1", take, value)),
    "awaited": (":take_async", lambda workers, value: workers[0].call("worker1", take_async, value)),
    "batch": (":take_together", lambda workers, value: workers[0].call("worker1", take_together, value)),
    "stream": (":take_items", lambda workers, value: items_of(workers[0].stream("worker1", take_items, value))),
    "items": (
        ":take_items_async",
        lambda workers, value: items_of(workers[0].stream("worker1", take_items_async, value)),
    ),
    "constructor": (":Taker", lambda workers, value: workers[0].remote("worker1", Taker, value)),
    "reference": ("Taker.take", lambda workers, value: taken_by_a_reference(workers[0], value)),
    "object": ("Taker.take", taken_by_an_object),
    "group": (":take", lambda workers, value: of_the_only_member(workers[0], value)),
}


@pytest.mark.parametrize("way", ARGUMENTS)
async def test_an_argument_that_cannot_be_read_is_told_from_an_error_of_the_function(
    pair: list[Worker], way: str
) -> None:
    """With the function, the worker and what to do: nothing was run that could have raised it."""
    function, start = ARGUMENTS[way]
    with pytest.raises(SerializationError) as caught:
        await start(pair, OfNoModule())
    text = str(caught.value)
    assert f"{function} cannot be read on worker 'worker1': ModuleNotFoundError: No module named" in text
    assert text.startswith("an argument of ")
    assert text.endswith("nothing was run; the module has to be importable there, too")
    assert "import_module" in str(caught.value.__cause__)  # the traceback of what has gone wrong


async def test_a_function_by_value_that_cannot_be_read(pair: list[Worker]) -> None:
    """It has no name to be called by."""
    held = OfNoModule()
    with pytest.raises(SerializationError, match=r"^a function that came by value, or an argument, cannot be read on"):
        await pair[0].call("worker1", lambda: held)


async def test_an_error_of_aiorpc_in_unpickling_stays_what_it_is(pair: list[Worker]) -> None:
    """Its class says whose doing it was, which is no doing of the argument's."""
    with pytest.raises(aiorpc.Overloaded, match="no room"):
        await pair[0].call("worker1", take, Refused())


class Refused:
    """Raises an error of the runtime's as it is unpickled."""

    def __reduce__(self) -> Any:
        return raise_it, (aiorpc.Overloaded("no room"),)


async def for_a_moment() -> str:
    await asyncio.sleep(0.02)
    return "moment"


@pytest.mark.parametrize("error", ["value", "memory", "exit", "fatal"])
async def test_an_error_in_unpickling_at_the_caller_settles_that_call(pair: list[Worker], error: str) -> None:
    """A result that cannot be read fails its own call, saying so; the others go on."""
    before = pair[0].call("worker1", for_a_moment)
    bad = pair[0].call("worker1", give, error)
    after = pair[0].call("worker1", len, "abc")
    with pytest.raises(RpcError, match=r"cannot be read here.*bad state"):
        await bad
    assert [await before, await after] == ["moment", 3]


async def test_an_exception_that_cannot_be_unpickled_comes_as_text(pair: list[Worker]) -> None:
    """RemoteError, with the name of the type."""
    with pytest.raises(RemoteError, match="BadError"):
        await pair[0].call("worker1", raise_bad_error)
    assert await pair[0].call("worker1", len, "abc") == 3


async def test_a_bad_item_ends_its_stream_alone(pair: list[Worker]) -> None:
    """The stream raises; calls go on."""
    with pytest.raises(RpcError, match="cannot be read here"):
        async for _ in pair[0].stream("worker1", bad_items):
            pass
    assert await pair[0].call("worker1", len, "abc") == 3


async def bad_items() -> Any:
    yield BadState("value")


async def test_a_module_the_callee_cannot_import(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names the module; nothing else is touched."""

    module = types.ModuleType("nowhere_to_be_found")
    exec("def f(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", module)
    call = pair[0].call("worker1", module.f)
    monkeypatch.delitem(sys.modules, "nowhere_to_be_found")
    with pytest.raises(aiorpc.RpcUsageError, match="nowhere_to_be_found"):
        await call
    with pytest.raises(aiorpc.RpcUsageError, match="nowhere_to_be_found"):
        await pair[0].call("worker1", module.f)
    assert await pair[0].call("worker1", len, "abc") == 3
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", module)
    assert await pair[0].call("worker1", module.f) == 1


async def test_a_tensor_past_the_limit_is_the_error_of_its_call() -> None:
    """As argument it raises at once, as result at the caller; the connection, and with it the group, lives on."""
    async with cluster(2, options=RpcBackendOptions(max_tensor_bytes=1 << 16)) as workers:
        with pytest.raises(
            aiorpc.errors.SerializationError, match=r"argument 0 of .*numel.*65540 bytes; the limit is 65536"
        ):
            workers[0].call("worker1", torch.numel, torch.zeros(16_385))
        with pytest.raises(aiorpc.errors.SerializationError, match=r"result of torch:zeros .*limit is 65536"):
            await workers[0].call("worker1", torch.zeros, 16_385)
        assert await workers[0].call("worker1", torch.numel, torch.zeros(16_384)) == 16_384
        assert await workers[1].call("worker0", len, "abc") == 3


async def test_a_failed_call_leaves_nothing_to_the_garbage_collector(pair: list[Worker]) -> None:
    """The Future, the error and the locals of the frames that waited are freed without a collection."""
    import weakref

    class Local:
        pass

    async def fail() -> weakref.ref[Local]:
        local = Local()
        with contextlib.suppress(Simple):
            await pair[0].call("worker1", raise_simple)
        return weakref.ref(local)

    gc.collect()
    gc.disable()
    try:
        assert (await fail())() is None
    finally:
        gc.enable()
