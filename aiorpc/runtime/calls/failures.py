"""Exceptions on the wire: the exception itself if it can be rebuilt, and always the remote traceback as text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from ... import errors, foreign
from ...errors import (
    PeerLeft,
    PeerLost,
    PeerRefused,
    ProtocolError,
    RemoteError,
    RendezvousError,
    RpcCancelled,
    RpcError,
    RpcTimeout,
    SerializationError,
    UnknownWorker,
)
from ...protocol.codec import Incoming, Outgoing, dumps, loads, outgoing
from ...protocol.messages import Error
from ...protocol.packing import pack, unpack

MAX_TEXT = 64 * 1024
# An exception whose pickle is longer than this travels as text, because it must never break the limit on a frame.
MAX_PICKLE = 1024 * 1024
# aiorpc's own errors, which travel without a pickle.
_OWN: dict[str, type[errors.RpcError]] = {
    f"{kind.__module__}.{name}": kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.RpcError) and kind is not RemoteError
}
# Texts in a field of such an error, at most; more are cut off.
_MOST_NAMES = 1000
# Raised at the caller as themselves these would end loops and generators silently.
NEVER_AS_ITSELF = (StopIteration, StopAsyncIteration, GeneratorExit)
# The creation of a value ends with one of these at its creator if the owner has not answered.
NO_VALUE = (RpcTimeout, RpcCancelled)
_PICKLE = b"\x80"  # first byte of a pickle, and not of packed fields (`_pack_fields`)
# Methods with which a class pickles its exceptions itself.
_SAYS_HOW = frozenset(("__reduce__", "__reduce_ex__"))


class RemoteTraceback(Exception):
    """The traceback of another worker, as text; the cause of every exception from there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def encode_error(error: BaseException, worker: str, safe: bool = False, again: bool = False) -> Error:
    """The Error message of an exception. Never raises.

    safe: nothing is pickled. aiorpc's own errors travel by name, text and fields. again: see `Error`.
    """
    name, pickled = _valid(_type_name(type(error))), None
    if type(error) is _OWN.get(name) and (safe or _has_plain_fields(error)):
        pickled = _pack_fields(error)
    elif not safe and foreign.is_a(error, Exception) and not foreign.is_a(error, NEVER_AS_ITSELF):
        pickled = _pickle(error)
    return Error(name, _valid(foreign.text_of(error)), _valid(foreign.traceback_of(error)), worker, pickled, again)


def decode_error(told: Error, function: str, safe: bool = False) -> BaseException:
    """The exception to raise at the caller, with the remote traceback as its cause.

    safe: nothing is unpickled; only aiorpc's own errors are rebuilt, with their text and fields.
    """
    name, message, text, worker, pickled = told.type_name, told.message, told.traceback, told.worker, told.pickled
    cause = RemoteTraceback(f"worker {worker!r}, in {function}:\n{text}")
    error: BaseException | None = None
    kind = _OWN.get(name)
    if kind is not None and (safe or pickled is None or pickled[:1] != _PICKLE):
        error = kind(message)  # all fields have defaults
        _set_fields(error, pickled)
    elif pickled is not None and not safe:
        try:
            loaded = loads(pickled, Incoming((), ()))
            error = loaded if foreign.is_a(loaded, Exception) else None
        except BaseException:  # rebuilding runs code of users; the text is left
            error = None
    if error is None:
        error = RemoteError(
            f"On {worker}: {function} raised {name}: {message}\nOriginal exception on remote side was {name}\n{text}",
            type_name=name,
            remote_message=message,
            remote_traceback=text,
            worker=worker,
        )
    foreign.set_cause(error, cause)
    if not foreign.is_a(error, RpcError):  # aiorpc's errors have it in their text
        foreign.add_note(error, f"on worker {worker!r}, in {function}")
    return error


def _has_plain_fields(error: BaseException) -> bool:
    """Whether an error of aiorpc's own consists of its text and packable fields."""
    if foreign.field(error, "args") != (foreign.text_of(error),):
        return False
    fields, own = foreign.field(error, "__dict__"), vars(type(error)(""))
    return all(
        type(value) is type(own.get(name)) and (type(value) in (str, int, float) or _are_names(value, tuple))
        for name, value in fields.items()
    )


def _pack_fields(error: BaseException) -> bytes | None:
    """The fields of an error that are plain values or tuples of names."""
    fields = {
        name: _valid(value) if type(value) is str else _names(value) if type(value) is tuple else value
        for name, value in foreign.field(error, "__dict__").items()
        if type(value) in (str, int, float) or _are_names(value, tuple)
    }
    try:
        return pack([fields]) if fields else None
    except (OverflowError, ValueError):
        return None


def _set_fields(error: BaseException, packed: bytes | None) -> None:
    """Set the known fields of an error to sent values of the right type; others are ignored."""
    said: object = None
    with contextlib.suppress(ProtocolError, ValueError):
        (said,) = unpack(packed) if packed is not None else (None,)
    if type(said) is not dict:
        return
    own = vars(error)
    for name, kind in [(name, type(value)) for name, value in own.items() if type(value) in (str, int, float, tuple)]:
        value: Any = said.get(name)
        if kind is tuple:
            own[name] = tuple(value) if _are_names(value, list) else own[name]
        elif type(value) is kind or (kind is float and type(value) is int):
            own[name] = value


def _names(value: tuple[str, ...]) -> list[str]:
    return [_valid(each) for each in value[:_MOST_NAMES]]


def _are_names(value: object, kind: type[Iterable[object]]) -> bool:
    """Whether it is a tuple, or a list, of texts."""
    return type(value) is kind and all(type(each) is str for each in value)


def absence_behind(error: SerializationError) -> RpcError | None:
    """Why a reference could not be written: the worker that it is meant for is not there, or its value is not.

    In the second case the creation of the value has timed out or was cancelled here. The error has no traceback, whose
    frames would hold values.
    """
    cause: BaseException | None = error
    while isinstance(cause, SerializationError):
        cause = cause.__cause__
    if not isinstance(cause, (PeerLost, PeerLeft, PeerRefused, RendezvousError, UnknownWorker, *NO_VALUE)):
        return None
    _drop_frames(cause)
    return cause


def came_from_afar(error: BaseException) -> bool:
    """Whether the error was raised on another worker and arrived here as an answer."""
    return foreign.is_a(foreign.field(error, "__cause__"), RemoteTraceback)


def without_frames(error: BaseException) -> BaseException:
    """The same error, with its traceback as a note: the frames hold decoded values, and with them much memory.

    A Future that held them could never be freed: the garbage collector cannot see through torch's part of it.
    """
    foreign.add_note(error, _valid(foreign.traceback_of(error)))
    _drop_frames(error)
    return error


def _drop_frames(error: BaseException) -> None:
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and foreign.field(each, "__traceback__") is not None:
            foreign.with_traceback(each, None)
            left += [foreign.field(each, "__cause__"), foreign.field(each, "__context__")]


def _type_name(kind: type[BaseException]) -> str:
    try:
        return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    except Exception:  # a metaclass of the user's
        return "an exception"


def _valid(text: str) -> str:
    return text[-MAX_TEXT:].encode("utf-8", "replace").decode()


def _pickle(error: BaseException) -> bytes | None:
    """The exception as a pickle that was tried here, or None.

    Pickle calls the type with ``args`` and then fills the ``__dict__``. That fails if ``__init__`` takes other
    arguments, and it leaves out slots; the parts of such exceptions travel. A class with a ``__reduce__`` of its own is
    pickled by it, unless another exception comes of that. An exception with tensors travels as text.
    """
    args, kind = foreign.field(error, "args"), type(error)
    says_how = any(not _SAYS_HOW.isdisjoint(foreign.names_of(each)) for each in foreign.classes_of(kind))
    whole_first = says_how or not foreign.slots_of(kind)
    for whole in (whole_first, not whole_first):
        out = Outgoing(same_main=True)
        token = outgoing.set(out)
        try:
            data = dumps(error if whole else _Parts(error), out)
            if not (out.tensors or out.buffers or out.references) and len(data) <= MAX_PICKLE:
                made = loads(data, Incoming((), ()))
                # Parts are restored as they were; a call of the type may have changed its arguments.
                if type(made) is kind and (not whole or made.args == args):
                    return data
        except BaseException:  # pickling runs code of users; parts or text are left
            continue
        finally:
            outgoing.reset(token)
            out.unsend()
    return None


class _Parts:
    """All parts of an exception, read without a call of its own code. Pickles as a call of `rebuild`."""

    def __init__(self, error: BaseException) -> None:
        kind = type(error)
        state = dict(foreign.field(error, "__dict__"))
        reduced: Any = foreign.base_of(kind).__reduce__(error)
        more = reduced[2] if len(reduced) > 2 else None  # an ImportError has fields beside its ``args``
        members = {name: value for name, value in more.items() if name not in state} if more else {}
        for name, slot in foreign.slots_of(kind).items():
            with contextlib.suppress(AttributeError):  # an empty slot
                members[name] = slot.__get__(error)
        self.parts = (kind, foreign.field(error, "args"), state, reduced[1], members)

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild, self.parts


def rebuild(
    kind: type[BaseException],
    args: tuple[object, ...],
    state: dict[str, object],
    made_of: tuple[object, ...],
    members: dict[str, object],
) -> BaseException:
    """An exception of that type from its parts, without a call of its own code.

    made_of: the arguments of the builtin base, which may be more than ``args``. members: the slots, and fields of the
    builtin base that are no arguments.
    """
    base = foreign.base_of(kind)
    error: BaseException = base.__new__(kind, *made_of)
    with contextlib.suppress(Exception):  # its ``args`` were changed later
        base.__init__(error, *made_of)
    foreign.set_args(error, args)
    foreign.field(error, "__dict__").update(state)
    slots = {**foreign.members_of(base), **foreign.slots_of(kind)}
    for name, value in members.items():
        if name in slots:
            slots[name].__set__(error, value)
    return error
