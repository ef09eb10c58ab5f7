"""Message bodies: from values to a body and segments and back. One function for each direction, for calls and replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..channels.inline import InlineChannel
from ..errors import ProtocolError
from ..protocol.codec import PLAIN, Incoming, Outgoing, decode_values, encode_values, pack
from ..protocol.frames import Buffer

channel = InlineChannel()


class ReferenceLoader(Protocol):
    """Makes handles of the remote references in a message."""

    def __call__(self, wires: list[Any]) -> Sequence[Any]: ...


class Target(Protocol):
    """The worker that a message goes to, as its encoding needs to know it."""

    @property
    def same_main(self) -> bool: ...


def encode(
    prefix: list[Any], values: list[Any], target: Target, *, copy: bool = False
) -> tuple[bytes, Sequence[Buffer]]:
    """Body and segments of a message. copy: the tensors may change as soon as this returns.

    Raises SerializationError, with nothing left behind. The segments borrow the tensors until they are written.
    """
    for value in values:
        if type(value) not in PLAIN:
            break
    else:
        try:
            return pack([*prefix, values]), ()
        except (OverflowError, UnicodeEncodeError):
            pass  # an int beyond 64 bits, a str that is no text: these are pickled
    out = Outgoing(target, same_main=target.same_main)
    try:
        fields = encode_values(values, out)
        if not out.tensors and not out.references:
            return pack(prefix + fields), out.buffers
        segments: Sequence[Buffer] = out.buffers
        table = None
        if out.tensors:
            table, segments = channel.put(out.tensors, copy=copy)
            segments += out.buffers
        fields += [None] * (5 - len(fields))
        fields[4] = len(out.buffers)
        fields.append(table)
        if out.references:
            fields.append(out.references)
        return pack(prefix + fields), segments
    except BaseException:
        out.unsend()
        raise


def decode(fields: list[Any], segments: Sequence[Buffer], load: ReferenceLoader) -> list[Any]:
    """The values of a message, from its fields behind the prefix. Raises whatever unpickling raises."""
    count = len(fields)
    if count == 1:
        values: list[Any] = fields[0]
        return values
    # References first: whatever fails below, their senders wait for an answer that only taking them gives.
    references = load(fields[6]) if count > 6 and fields[6] else ()
    buffers: Sequence[Buffer] = ()
    if count > 4 and fields[4]:
        buffers = segments[len(segments) - fields[4] :]
    tensors = channel.take(fields[5], segments) if count > 5 and fields[5] else ()
    if not isinstance(fields[0], list):
        raise ProtocolError("a message whose values are no list")
    return decode_values(fields, Incoming(tensors, references), buffers)
