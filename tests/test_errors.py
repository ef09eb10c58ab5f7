"""The tree of errors: who is whose kind, what each carries, and that each survives a pickle."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
from types import ModuleType
from typing import Any

import pytest

import aiorpc
import aiorpc.testing  # one of those where errors are looked for
from aiorpc import errors

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]

KINDS: dict[type[errors.RpcError], type[Exception] | tuple[type[Exception], ...]] = {
    errors.RpcUsageError: errors.RpcError,
    errors.SerializationError: (errors.RpcUsageError, TypeError),
    errors.WouldBlockLoop: errors.RpcUsageError,
    errors.UnknownWorker: (errors.RpcUsageError, LookupError),
    errors.NotInitialized: errors.RpcUsageError,
    errors.RendezvousError: errors.RpcError,
    errors.DeviceMapError: (errors.RendezvousError, ValueError),
    errors.StoreGone: errors.RendezvousError,
    errors.UnknownObject: (errors.RpcError, LookupError),
    errors.QueueEmpty: (errors.RpcError, asyncio.QueueEmpty),
    errors.QueueFull: (errors.RpcError, asyncio.QueueFull),
    errors.QueueShutDown: (errors.RpcError, getattr(asyncio, "QueueShutDown", Exception)),
    errors.ItemLost: errors.RpcError,
    errors.Overloaded: errors.RpcError,
    errors.NotAllowed: (errors.RpcError, PermissionError),
    errors.RpcTimeout: (errors.RpcError, TimeoutError),
    errors.RpcCancelled: errors.RpcError,
    errors.PeerLost: (errors.RpcError, ConnectionError),
    errors.PeerLeft: (errors.RpcError, ConnectionError),
    errors.WorkerClosed: errors.RpcError,
    errors.PeerRefused: (errors.RpcError, ConnectionError),
    errors.GroupError: (errors.RpcError, ExceptionGroup),
    errors.ProtocolError: errors.RpcError,
    errors.RemoteError: errors.RpcError,
}


def test_every_error_has_one_base() -> None:
    """Every error is an RpcError, which is a RuntimeError as torch raises, and none is missing here."""
    assert set(CLASSES) == {errors.RpcError, *KINDS}
    assert issubclass(errors.RpcError, RuntimeError)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_is_also_what_the_standard_library_calls_it(kind: type[errors.RpcError]) -> None:
    """A timeout can be caught as TimeoutError, a lost peer as ConnectionError, and so on."""
    bases = KINDS[kind]
    assert all(issubclass(kind, base) for base in (bases if isinstance(bases, tuple) else (bases,)))


def test_misuse_and_faults_are_told_apart() -> None:
    """`except RpcUsageError` catches the caller's mistakes and nothing that the network did."""
    misuse = {kind for kind in CLASSES if issubclass(kind, errors.RpcUsageError)}
    assert {kind.__name__ for kind in misuse} == {
        "RpcUsageError",
        "SerializationError",
        "WouldBlockLoop",
        "UnknownWorker",
        "NotInitialized",
    }


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_public_documented_and_in_the_tree(kind: type[Exception]) -> None:
    """Each can be caught as aiorpc.errors.Name, says what it means, and stands in the tree of the docstring."""
    assert kind.__name__ in aiorpc.errors.__all__
    assert kind.__doc__
    assert kind.__name__ in (errors.__doc__ or "")


def public_errors() -> dict[str, type[errors.RpcError]]:
    """All by the names that users write after ``aiorpc.``: those of errors.py, and those of other public modules."""
    found: dict[str, type[errors.RpcError]] = {}
    for module in (each for each in vars(aiorpc).values() if isinstance(each, ModuleType)):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, errors.RpcError) and kind.__module__ == module.__name__:
                where = "" if module is errors else module.__name__.removeprefix("aiorpc.") + "."
                found[where + name] = kind
    return found


def test_the_tree_is_that_of_the_classes() -> None:
    """The picture at the top of the module has every error below its base, with its other base."""
    line = r"^( {4}[ │├└─]*)((?:\w+\.)?[A-Z]\w+)(?: \((?:asyncio\.)?(\w+)\))?"
    drawn = re.findall(line, errors.__doc__ or "", re.MULTILINE)
    known = public_errors()
    assert sorted(name for _, name, _ in drawn) == sorted(known)
    above: list[str] = []
    for indent, name, other in drawn:
        del above[len(indent) // 4 - 1 :]
        bases = [base.__name__ for base in known[name].__bases__ if base is not Exception]
        if other == "QueueShutDown" and not hasattr(asyncio, other):
            other = ""  # asyncio has it from Python 3.13 on
        assert bases == [*above[-1:], *filter(None, [other])], name
        above.append(name)


FULL: list[tuple[errors.RpcError, dict[str, object]]] = [
    (
        errors.RpcTimeout("late", worker="w", function="m:f", seconds=1.5),
        {"worker": "w", "function": "m:f", "seconds": 1.5},
    ),
    (
        errors.PeerLost("gone", worker="w", rank=3, host="h", pid=7, cause="killed"),
        {"worker": "w", "rank": 3, "host": "h", "pid": 7, "cause": "killed"},
    ),
    (
        errors.RemoteError("bad", type_name="m.E", remote_message="x", remote_traceback="tb", worker="w"),
        {"type_name": "m.E", "remote_message": "x", "remote_traceback": "tb", "worker": "w"},
    ),
    (errors.SerializationError("bad", 2), {"position": 2}),
]


@pytest.mark.parametrize(("error", "fields"), FULL, ids=lambda value: type(value).__name__)
def test_fields_survive_a_pickle(error: errors.RpcError, fields: dict[str, object]) -> None:
    """Nobody has to parse text: the fields are there, also after the error has travelled."""
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert type(each) is type(error)
        assert str(each) == str(error)
        assert {name: getattr(each, name) for name in fields} == fields


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_message_alone_is_enough(kind: type[errors.RpcError]) -> None:
    """Every error can be made from a text, shows it, and survives a pickle."""
    error = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(error) is kind
    assert str(error) == "what happened"


def test_the_parts_of_a_group_error_are_of_its_kind() -> None:
    """``except*`` takes out what it names; who was lost is known of each part."""
    error = errors.GroupError("2 of 3", [ValueError("a"), errors.PeerLost("gone", worker="w")])
    error.lost = ("w",)
    parts: tuple[Any, Any] = error.split(errors.PeerLost)
    lost, rest = parts
    assert type(lost) is type(rest) is errors.GroupError
    assert (str(lost), lost.lost, [str(each) for each in lost.exceptions]) == ("2 of 3", ("w",), ["gone"])
