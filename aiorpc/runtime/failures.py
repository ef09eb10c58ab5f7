"""Exceptions on the wire: the type itself where it can be rebuilt, always the remote traceback as text."""

from __future__ import annotations

import traceback
from typing import Any

from ..errors import RemoteError
from ..protocol.codec import Incoming, Outgoing, dumps, loads, outgoing

MAX_TEXT = 64 * 1024
# An exception that drags more than this along travels as text: it must never break the limit on a frame.
MAX_PICKLE = 1024 * 1024
# Raising these as themselves at the caller would do something else there than report an error.
NEVER_AS_ITSELF = (StopIteration, StopAsyncIteration, GeneratorExit)


class RemoteTraceback(Exception):
    """The traceback of the other worker, as text; the cause of every exception that came from there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def encode_error(error: BaseException, worker: str) -> list[Any]:
    """The fields of an ERROR: type name, message, traceback text, worker, pickled exception or None. Never raises."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    pickled = _pickle(error) if isinstance(error, Exception) and not isinstance(error, NEVER_AS_ITSELF) else None
    return [_valid(name), _text_of(error), _traceback_of(error), worker, pickled]


def decode_error(fields: list[Any], function: str) -> BaseException:
    """The exception to raise at the caller, with the remote traceback as its cause."""
    name, message, text, worker, pickled = fields
    cause = RemoteTraceback(f"worker {worker!r}, in {function}:\n{text}")
    error: BaseException | None = None
    if pickled is not None:
        try:
            loaded = loads(pickled, Incoming((), ()))
            error = loaded if isinstance(loaded, Exception) else None
        except BaseException:  # whatever rebuilding it runs, the text is there
            error = None
    if error is None:
        error = RemoteError(
            f"On {worker}: {function} raised {name}: {message}\nOriginal exception on remote side was {name}\n{text}",
            type_name=name,
            remote_message=message,
            remote_traceback=text,
            worker=worker,
        )
    error.__cause__ = cause
    return error


def without_frames(error: BaseException) -> BaseException:
    """The same error, its traceback kept as a note: its frames hold what was being decoded, and with it much memory.

    A Future that held them could never be freed: the garbage collector does not see through torch's part of it.
    """
    error.add_note(_traceback_of(error))
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            left += [each.__cause__, each.__context__]
    return error


def _text_of(error: BaseException) -> str:
    try:
        return _valid(str(error))
    except Exception as broken:
        return f"<its text cannot be made: {type(broken).__name__}>"


def _traceback_of(error: BaseException) -> str:
    try:
        return _valid("".join(traceback.format_exception(error)))
    except Exception as broken:
        return f"<its traceback cannot be made: {type(broken).__name__}>"


def _valid(text: str) -> str:
    return text[-MAX_TEXT:].encode("utf-8", "replace").decode()


def _pickle(error: Exception) -> bytes | None:
    """The exception as a pickle that survived a full round trip here, or None.

    Exceptions whose ``__init__`` takes something else than their ``args`` cannot be called again by pickle; for those
    the parts travel. Tensors inside are left to the text form.
    """
    parts = (type(error), error.args, dict(error.__dict__))
    for value in (error, _Parts(*parts)):
        out = Outgoing(same_main=True)
        token = outgoing.set(out)
        try:
            data = dumps(value, out)
            if not (out.tensors or out.buffers or out.references) and len(data) <= MAX_PICKLE:
                made = loads(data, Incoming((), ()))
                # Parts are put back as they were; a call of the type may have made something else of its arguments.
                if type(made) is type(error) and (type(value) is _Parts or made.args == error.args):
                    return data
        except Exception:
            continue
        finally:
            outgoing.reset(token)
            out.unsend()
    return None


class _Parts:
    """Pickles as a call of `rebuild`."""

    def __init__(self, kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self.parts = (kind, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, self.parts


def rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """An exception of that type without calling its ``__init__``."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
