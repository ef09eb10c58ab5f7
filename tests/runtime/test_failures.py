"""Exceptions there and back: as themselves where they can be rebuilt, as text where not, always with their origin."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace

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
from aiorpc.runtime.calls.failures import MAX_TEXT, RemoteTraceback, decode_error, encode_error


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


class Plain(Exception): ...


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Reworded(Exception):
    """Its text is not what it was made from: calling the type with ``args`` would reword it again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Mixed(Exception):
    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__(a)
        self.b, self.c = b, c


class Slotted(Exception):
    __slots__ = ("extra",)


class SlottedDefault(Exception):
    """A call of the type with ``args`` would fill the slot with something else."""

    __slots__ = ("code",)

    def __init__(self, text: str, code: int = 7) -> None:
        super().__init__(text)
        self.code = code


class SlottedBelow(SlottedDefault):
    """Has slots of its own, one of them private, one empty, and a ``__dict__`` as every exception."""

    __slots__ = ("__hidden", "empty")

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}", code)
        self.__hidden = [code]
        self.more = {"code": code}

    @property
    def hidden(self) -> list[int]:
        return self.__hidden


class SlottedReduced(Exception):
    """Says itself how it is pickled, and keeps something back."""

    __slots__ = ("code", "lock")

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return SlottedReduced, (self.code,)


class SlottedReworded(SlottedDefault):
    """Its pickle brings another text with it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return SlottedReworded, (f"again {self.args[0]}", self.code)


class SlottedLock(SlottedDefault):
    """Holds what cannot be sent."""

    __slots__ = ("lock",)
    lock: threading.Lock


class OwnFile(OSError):
    """The interpreter keeps the name of the file beside the ``args``."""

    def __init__(self, *, name: str) -> None:
        super().__init__(2, "no such file", name)


class OwnDecode(UnicodeDecodeError):
    """The interpreter's ``__init__`` fills the fields that its text is made of."""

    def __init__(self, *, at: int) -> None:
        super().__init__("utf-8", b"12345", at, at + 1, "bad")


class OwnImport(ImportError):
    """The interpreter keeps both names where no ``args`` and no ``__dict__`` have them."""

    def __init__(self, *, module: str) -> None:
        super().__init__("no module", name=module, path="there")


class BothKinds(ValueError, OSError):
    """Laid out as the second of its bases."""

    def __init__(self, *, name: str) -> None:
        OSError.__init__(self, 2, "no such file", name)


class CodedGroup(ExceptionGroup):
    """A group with more than groups have."""

    __slots__ = ("code",)
    code: int

    def __new__(cls, errors: list[Exception], *, code: int) -> CodedGroup:
        self = super().__new__(cls, "several", errors)
        self.code = code
        return self

    def __init__(self, errors: list[Exception], *, code: int) -> None:
        pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Explosive(Exception):
    """Can be pickled, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class Disguised(Exception):
    """Comes out of its pickle as something else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def noted() -> Exception:
    error = ValueError("with notes")
    error.add_note("look here")
    return error


def decode_problem() -> Exception:
    try:
        json.loads("{")
    except ValueError as error:
        return error
    raise AssertionError


SAME = [
    ValueError("text"),
    KeyError("key"),
    ValueError(),
    ValueError(1, [2], {"a": None}),
    FileNotFoundError(2, "No such file", "name"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ZeroDivisionError("division"),
    NotImplementedError(),
    Plain("plain"),
    TwoArguments(5, "why"),
    KeywordOnly(code=6),
    Reworded(7),
    Mixed(1, 2, 3),
    Slotted("slots"),
    subprocess.CalledProcessError(3, ["cmd"], b"out", b"err"),
    RpcTimeout("late", worker="w", function="f", seconds=2.0),
    PeerLost("gone", worker="w", rank=3, pid=4),
    ConnectionResetError(104, "reset"),
    TimeoutError("slow"),
    torch.OutOfMemoryError("full"),
    noted(),
    decode_problem(),
    ValueError("lone \ud800 surrogate"),
    ExceptionGroup("several", [ValueError("a"), TwoArguments(1, "b")]),
]


@pytest.mark.parametrize("error", SAME, ids=lambda error: f"{type(error).__name__} {error}".encode("ascii", "replace"))
def test_exception_arrives_as_itself(error: Exception) -> None:
    """Type, arguments, text and attributes arrive, also where ``__init__`` takes something else than ``args``."""
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert repr(arrived.args) == repr(error.args)
    assert repr(arrived.__dict__) == repr(error.__dict__)


def slotted_below() -> SlottedBelow:
    error = SlottedBelow(code=5)
    error.code = 6
    error.add_note("look here")
    return error


FIELDS: list[tuple[Exception, list[str]]] = [
    (SlottedDefault("text", 9), ["code"]),
    (slotted_below(), ["code", "hidden", "more"]),
    (SlottedReduced(5), ["code"]),
    (SlottedReworded("text", 9), ["code"]),
    (OwnFile(name="name"), ["errno", "strerror", "filename"]),
    (OwnDecode(at=3), ["encoding", "object", "start", "end", "reason"]),
    (OwnImport(module="that"), ["msg", "name", "path"]),
    (ImportError("no module", name="that", path="there"), ["msg", "name", "path"]),
    (BothKinds(name="name"), ["errno", "strerror", "filename"]),
    (CodedGroup([ValueError("a"), TwoArguments(1, "b")], code=3), ["message", "code"]),
]


@pytest.mark.parametrize(("error", "names"), FIELDS, ids=lambda value: type(value).__name__)
def test_fields_arrive_wherever_they_are_kept(error: Exception, names: list[str]) -> None:
    """In slots, or in the interpreter's part of an exception, whatever ``__init__`` takes."""
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert repr(arrived.args) == repr(error.args)
    assert repr(arrived.__dict__) == repr(error.__dict__)
    assert [getattr(arrived, name) for name in names] == [getattr(error, name) for name in names]


def test_an_empty_slot_stays_empty() -> None:
    """Nothing is put there."""
    arrived = travel(slotted_below())
    assert not hasattr(arrived, "empty")


def test_a_slot_that_cannot_be_sent_costs_the_slots_alone() -> None:
    """The rest arrives as pickle would bring it."""
    error = SlottedLock("text", 9)
    error.lock = threading.Lock()
    arrived = travel(error)
    assert type(arrived) is SlottedLock and arrived.args == ("text",) and not hasattr(arrived, "lock")


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


@pytest.mark.parametrize("error", SAME[:3])
def test_remote_traceback_is_attached(error: Exception) -> None:
    """The cause shows worker, function and the remote traceback as text."""
    cause = travel(error).__cause__
    assert isinstance(cause, RemoteTraceback)
    text = str(cause)
    assert "worker 'there', in module:function" in text
    assert "Traceback (most recent call last)" in text
    assert f"{__file__}" in text
    assert "in travel" in text


class Local:
    """Builds types that no name leads to."""

    @staticmethod
    def error() -> Exception:
        class Nameless(Exception):
            pass

        return Nameless("nameless")


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


@pytest.mark.parametrize("kind", [Explosive, Disguised])
def test_exception_that_does_not_survive_a_pickle_is_rebuilt_from_its_parts(kind: type[Exception]) -> None:
    """A pickle of its own that fails, or gives something else, is noticed by the sender, which sends the parts."""
    arrived = travel(kind("bang"))
    assert type(arrived) is kind
    assert arrived.args == ("bang",)


def test_exception_whose_text_cannot_be_made() -> None:
    """A broken ``__str__`` breaks nothing else."""
    said = encode_error(Unprintable(), "there")
    assert said.message == "<its text cannot be made: ValueError>"
    assert type(decode_error(said, "f")) is Unprintable


def test_local_exception_travels_by_value() -> None:
    """A type that no name leads to is sent along, by cloudpickle."""
    arrived = travel(Local.error())
    assert type(arrived).__name__ == "Nameless"
    assert str(arrived) == "nameless"


def test_pickle_that_cannot_be_loaded_here_gives_a_remote_error() -> None:
    """The caller lacks the module, or the bytes are broken: the text form is used."""
    said = encode_error(Plain("plain"), "there")
    for broken in (b"cno_such_module\nE\n.", b"\x80\x05garbage", b"", b"\x80\x05K\x01."):
        arrived = decode_error(replace(said, pickled=broken), "f")
        assert type(arrived) is RemoteError
        assert arrived.remote_message == "plain"


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


def test_a_field_that_msgpack_cannot_say_costs_the_fields_alone() -> None:
    """The error arrives all the same."""
    arrived = travel(PeerLost("gone", rank=1 << 70), safe=True)
    assert type(arrived) is PeerLost and arrived.rank == -1
