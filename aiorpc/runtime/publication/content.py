"""A published value as bytes, and back: what a message says of it, and its buffers one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import foreign
from ...channels.slots import Span, lay_out
from ...errors import NotAllowed, ProtocolError, SerializationError
from ...protocol.codec import names_nothing
from ...protocol.frames import Buffer
from ...protocol.messages import Reply, read_values
from ...protocol.reference_messages import PassedReference
from ..calls.values import decode, encode
from ..engine.engine import Engine


@dataclass(frozen=True)
class _AnyReader:
    """Whoever may read it, as the encoding needs to know it."""

    safe: bool
    max_body: int
    max_segment: int
    same_main: bool = True


class Content(NamedTuple):
    """A value that was taken apart.

    bodies: what a message says of it: for readers that run our main module, and for the others where that differs.
    buffers: with the bytes of its tensors, which they borrow. spans, size: where these come to lie, in how many bytes.
    """

    bodies: tuple[bytes, ...]
    buffers: Sequence[Buffer]
    spans: list[Span]
    size: int


def take_apart(name: str, value: object, engine: Engine) -> Content:
    """The content of a value that is published under that name. Raises SerializationError."""
    options = engine.options
    reader = _AnyReader(engine.safe, options.max_frame_bytes, options.max_tensor_bytes)
    what = f"the value published as {name!r}"
    try:
        body, buffers = _encode(value, reader, other_main=False)
        other_body = body
        if b"load_main" in body:  # as the codec names what the main module defines
            other_body, _ = _encode(value, reader, other_main=True)
    except SerializationError as error:
        raise SerializationError(f"{what} {error}") from error.__cause__
    spans, size = lay_out(buffers)
    if size > options.max_tensor_bytes:
        raise SerializationError(
            f"{what} takes {size} bytes; the limit is {options.max_tensor_bytes} (max_tensor_bytes)"
        )
    return Content((body,) if other_body == body else (body, other_body), buffers, spans, size)


def _encode(value: object, reader: _AnyReader, *, other_main: bool) -> tuple[bytes, Sequence[Buffer]]:
    body, buffers, out = encode(Reply, (), [value], reader, other_main=other_main)
    if out is not None or read_values(body).references:
        if out is not None:
            out.unsend()
        raise SerializationError("holds a remote reference, which is sent to one worker and not published")
    return body, buffers


def choose(bodies: Sequence[Any], main: str, engine: Engine) -> Any:
    """What a message says of a value, in the form for this worker; one form stands for both.

    main: the main module of who has published it.
    """
    return bodies[-1] if main != engine.record.main else bodies[0]


def put_together(body: Any, data: Buffer, spans: Sequence[Sequence[int]], engine: Engine, *, plain: bool) -> Any:
    """The value again, over the bytes of its buffers.

    plain: whether no pickle that names anything is read, as the rights of who has published it do not go so far; it
    raises NotAllowed. Raises whatever unpickling raises, and ProtocolError for what is none.
    """
    if type(body) is not bytes:
        raise ProtocolError("a version without what it says of its value")
    said = read_values(body)
    if plain and not engine.safe and not names_nothing(said.pickled):
        raise NotAllowed(
            f"worker {engine.name!r} has a rule in its option serve for the role of who has published this, and reads "
            "no pickle of it that names a class or a function; publish plain tensors, or set serialization='safe'"
        )
    view = memoryview(data)
    values = decode(said, [view[start : start + length] for start, length in spans], _no_references, safe=engine.safe)
    if len(values) != 1:
        raise ProtocolError(f"a version with {len(values)} values")
    return values[0]


def _no_references(passed: Sequence[PassedReference]) -> Sequence[Any]:
    raise ProtocolError("a published value with remote references")


def unreadable(name: str, version: int, error: BaseException) -> str:
    """What to say of a version whose value cannot be read."""
    return f"version {version} of {name!r} cannot be read here: {foreign.said(error)}"
