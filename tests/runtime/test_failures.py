"""Exceptions there and back: as themselves where they can be rebuilt, as text where not, always with their origin."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pytest
import torch

import aiorpc
from aiorpc import foreign
from aiorpc.errors import (
    GroupError,
    NotAllowed,
    PeerLost,
    RemoteError,
    RpcTimeout,
    SerializationError,
    UnknownObject,
)
from aiorpc.protocol.messages import Error, read_error, write
from aiorpc.protocol.packing import pack
from aiorpc.runtime.calls.failures import MAX_TEXT, decode_error, encode_error


def travel(error: BaseException, safe: bool = False) -> BaseException:
    """What the caller gets when a handler on worker ``there`` raises this."""
    try:
        raise error
    except BaseException as raised:
        said = read_error(write(encode_error(raised, "there", safe)))
    finally:
        error.with_traceback(None)
    arrived = decode_error(said, "module:function", safe)
    if not isinstance(arrived, aiorpc.RpcError):  # the others say in their text where that was
        notes = foreign.field(arrived, "__dict__")["__notes__"]
        assert notes.pop() == "on worker 'there', in module:function"
        if not notes:
            del foreign.field(arrived, "__dict__")["__notes__"]
    return arrived


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Watchful(Exception):
    """Tells of each call of its own code."""

    __slots__ = ("code",)
    calls: ClassVar[list[str]] = []

    def __new__(cls, *args: Any) -> Watchful:
        cls.calls.append("__new__")
        return super().__new__(cls, *args)

    def __init__(self, code: int) -> None:
        self.calls.append("__init__")
        super().__init__(f"code {code}")
        self.code = code

    def __setattr__(self, name: str, value: object) -> None:
        self.calls.append(f"set {name}")
        super().__setattr__(name, value)

    def __setstate__(self, state: Any) -> None:
        self.calls.append("__setstate__")


def test_an_exception_is_put_together_without_its_own_code() -> None:
    """Where the parts travel; its code has its own ideas of what to do with them."""
    error = Watchful(3)
    error.add_note("look here")
    Watchful.calls.clear()
    arrived = travel(error)
    assert Watchful.calls == []
    assert type(arrived) is Watchful
    assert (arrived.args, arrived.code, arrived.__notes__) == (("code 3",), 3, ["look here"])


OTHERS: list[tuple[BaseException, str, str]] = [
    (KeyboardInterrupt("stop"), "KeyboardInterrupt", "stop"),
    (SystemExit(3), "SystemExit", "3"),
    (asyncio.CancelledError("gone"), "asyncio.exceptions.CancelledError", "gone"),
    (GeneratorExit(), "GeneratorExit", ""),
    (StopIteration(5), "StopIteration", "5"),
    (StopAsyncIteration(), "StopAsyncIteration", ""),
    (HoldsLock(), f"{__name__}.HoldsLock", "locked"),
    (BaseExceptionGroup("group", [KeyboardInterrupt()]), "BaseExceptionGroup", "group (1 sub-exception)"),
    (ValueError(torch.ones(2)), "ValueError", "tensor([1., 1.])"),
    (ValueError("x" * 2_000_000), "ValueError", "x" * MAX_TEXT),
]


@pytest.mark.parametrize(("error", "name", "text"), OTHERS, ids=lambda value: type(value).__name__)
def test_exception_that_cannot_be_raised_as_itself_is_a_remote_error(
    error: BaseException, name: str, text: str
) -> None:
    """RemoteError has type name, text, traceback and worker as fields, and says all of it."""
    arrived = travel(error)
    assert type(arrived) is RemoteError
    assert arrived.type_name == name
    assert arrived.remote_message == text
    assert arrived.worker == "there"
    assert "Traceback (most recent call last)" in arrived.remote_traceback or len(arrived.remote_traceback) == MAX_TEXT
    assert f"On there: module:function raised {name}: {text}" in str(arrived)


def test_every_error_is_small_on_the_wire() -> None:
    """No exception, whatever it drags along, makes a frame that the other side would refuse."""
    huge = ValueError("y" * 5_000_000)
    huge.blob = b"z" * 5_000_000  # type: ignore[attr-defined]  # errors take any attribute
    chained = ValueError("end")
    for number in range(500):
        link = ValueError(f"{number} {'w' * 1000}")
        link.__cause__ = chained
        chained = link
    for error in (huge, chained):
        assert len(write(encode_error(error, "there"))) < 2_000_000


def _of_group(message: str, **fields: tuple[str, ...]) -> GroupError:
    error = GroupError(message)
    vars(error).update(fields)
    return error


OWN = [
    PeerLost("gone", worker="w", rank=3, host="h\udc80", pid=7, cause="killed"),
    RpcTimeout("late", worker="w", function="f", seconds=5),
    NotAllowed("no", worker="w", caller="c", role="r", function="f", rule="nothing"),
    SerializationError("what", 2),
    UnknownObject("none", worker="w", name="n", names=("a", "b")),
    _of_group("two", failed=("a",), lost=("b", "c")),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_errors_of_our_own_keep_their_fields_without_pickle(error: Exception) -> None:
    """As plain values; text that is none is mended."""
    arrived = travel(error, safe=True)
    assert type(arrived) is type(error) and str(arrived) == str(error)
    expected = {name: "h?" if name == "host" else value for name, value in vars(error).items()}
    assert vars(arrived) == expected


@pytest.mark.parametrize(
    "said",
    [
        pack([{"worker": 5, "rank": "3", "host": None, "pid": True, "cause": b"x", "more": 1, "args": "no", 5: 5}]),
        pack([]),
        pack([1]),
        pack([[]]),
        pack([{}, {}]),
        b"rubbish",
        b"",
    ],
)
def test_fields_of_a_wrong_type_are_left_out(said: bytes) -> None:
    """A field that the class does not have, or has with another type, is nothing: what is there has its defaults."""
    arrived = decode_error(Error("aiorpc.errors.PeerLost", "gone", "", "there", said, False), "module:function", True)
    assert type(arrived) is PeerLost and vars(arrived) == vars(PeerLost("gone")) and arrived.args == ("gone",)


@pytest.mark.parametrize("names", [5, "ab", ["a", 5], {"a": "b"}, None])
def test_names_of_a_wrong_type_are_left_out(names: Any) -> None:
    """As any field."""
    said = pack([{"worker": "w", "names": names}])
    arrived = decode_error(Error("aiorpc.errors.UnknownObject", "none", "", "there", said, False), "f", True)
    assert isinstance(arrived, UnknownObject) and (arrived.worker, arrived.names) == ("w", ())
