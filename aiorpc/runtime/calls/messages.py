"""Message bodies: from values to a body and buffers and back, by one function each way, for calls and replies."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...channels import AnyBuffer, layout
from ...channels.landing import Landing
from ...channels.routes import Route
from ...errors import ProtocolError, SerializationError
from ...protocol.codec import (
    PLAIN,
    Incoming,
    Outgoing,
    Past,
    decode_values,
    encode_values,
    is_reference,
    is_simple,
    pack,
    refer,
)
from ...protocol.frames import MAX_SEGMENTS, Buffer


class Results(tuple[Any, ...]):
    """Several results of one call of the runtime's own; they travel side by side, not as one pickled tuple."""

    __slots__ = ()


class ReferenceLoader(Protocol):
    """Makes handles of the remote references in a message."""

    def __call__(self, wires: list[Any]) -> Sequence[Any]: ...


class Recorder(Protocol):
    """Remembers the tensors of a message that require gradients (gradients.py)."""

    def record(self, tensors: Sequence[torch.Tensor], on_unsent: list[Any]) -> list[Any] | None:
        """What the message says of them; None: nothing. on_unsent: gets what undoes it."""


class GradientLoader(Protocol):
    """Gives the tensors of a message the place in their graph that the message says of them; and what gives it to those
    that are taken apart in the pickle, by their number among these."""

    def __call__(self, said: Any, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Past | None]: ...


class Target(Protocol):
    """The worker that a message goes to, as its encoding needs to know it."""

    @property
    def same_main(self) -> bool: ...

    @property
    def max_body(self) -> int: ...

    @property
    def max_segment(self) -> int: ...


def encode(
    prefix: list[Any],
    values: list[Any],
    target: Target,
    route: Route | None = None,
    tape: Recorder | None = None,
) -> tuple[bytes, Sequence[Any], Outgoing | None]:
    """Body and buffers of a message, and what to `unsend` if it does not leave after all (None: nothing).

    route: for tensors on devices, whose buffers are `DeviceBuffer`; None: there can be none. Raises SerializationError,
    with nothing left behind. The buffers borrow the tensors. tape: of the autograd context that it is made in.
    """
    if route is None or not route.host_target:
        quick = _encode_quickly(prefix, values, target, tape)
        if quick is not None:
            return quick
    out = Outgoing(target, same_main=target.same_main, route=route, apart=tape is not None)
    try:
        fields = encode_values(values, out)
        table = None
        buffers: list[AnyBuffer] = []
        if out.tensors:
            table, buffers = layout.describe(out.tensors, route)
        buffers = _checked([*buffers, *out.buffers], target.max_segment)
        said = tape.record([*out.tensors, *(out.apart or ())], out.on_unsent) if tape is not None else None
        if table or out.references or said:
            fields += [None] * (5 - len(fields))
            fields[4] = len(out.buffers)
            fields += [table, out.references, said]
            for place in said[2] if said else ():
                if place < len(out.tensors):
                    table[place][5] &= ~layout.OF_A_LEAF  # type: ignore[index]  # there are tensors, so there is one
            while not fields[-1]:
                fields.pop()
        return _pack(prefix, fields, target.max_body), buffers, out
    except BaseException:
        out.unsend()
        raise


def _encode_quickly(
    prefix: list[Any], values: list[Any], target: Target, tape: Recorder | None
) -> tuple[bytes, Sequence[Buffer], Outgoing | None] | None:
    """A message of plain values, simple containers of them, references, at most one plain tensor; None: there is more.

    What the general way gives, in a fraction of its instructions: most calls that have to be quick are of this kind.
    """
    tensor_at = -1
    opaque_at: list[int] = []
    references_at: list[int] = []
    for position, value in enumerate(values):
        kind = type(value)
        if kind in PLAIN:
            continue
        if kind is torch.Tensor and tensor_at < 0:
            tensor_at = position
        elif is_reference(kind):
            references_at.append(position)
        elif is_simple((value,)):
            opaque_at.append(position)
        else:
            return None
    fields: list[Any] = [values]
    buffers: Sequence[Buffer] = ()
    recorded = False
    if tensor_at >= 0 or opaque_at or references_at:
        plain = list(values)
        fields = [plain, (), opaque_at, None, 0]
        if opaque_at:
            fields[3] = pickle.dumps(tuple(values[position] for position in opaque_at), 5)
            for position in opaque_at:
                plain[position] = None
        if tensor_at >= 0:
            described = layout.describe_plain(values[tensor_at])
            if described is None:
                return None
            entry, buffers = described
            if buffers and len(buffers[0]) > target.max_segment:
                return None  # refused with all the words that this takes
            plain[tensor_at] = None
            fields[1] = (tensor_at,)
            fields.append((entry,))
            recorded = tape is not None and entry[5] != 0
    out: Outgoing | None = None
    try:
        if references_at or recorded:
            out = Outgoing(target)
            _accompany(fields, values, references_at, out, tape if recorded else None)
        return _pack(prefix, fields, target.max_body), buffers, out
    except BaseException as error:
        if out is not None:
            out.unsend()
        if isinstance(error, (OverflowError, UnicodeEncodeError)):
            return None  # an int beyond 64 bits, a str that is no text: these are pickled
        raise


def _accompany(
    fields: list[Any], values: list[Any], references_at: Sequence[int], out: Outgoing, tape: Recorder | None
) -> None:
    """Add the fields behind the table. tape: the tensor requires gradients, and is recorded."""
    for position in references_at:
        refer(values[position], position, out)
        fields[0][position] = None
    if len(fields) == 5:
        fields.append(None)
    fields.append(out.references)
    if tape is not None:
        (tensor_at,), (entry,) = fields[1], fields[5]
        fields.append(tape.record([values[tensor_at]], out.on_unsent))
        entry[5] = 0  # it is no leaf there


def _pack(prefix: list[Any], fields: list[Any], limit: int) -> bytes:
    # Refused here: the peer would close the connection over it, and fail every other call with this one.
    try:
        body = pack([*prefix, *fields])
    except UnicodeEncodeError:
        raise
    except ValueError as error:  # a string or bytes longer than msgpack can say
        raise SerializationError(
            f"is too large: {error}; send large data as tensors or arrays", _longest(fields)
        ) from error
    if len(body) > limit:
        raise SerializationError(
            f"is too large: the message takes {len(body)} bytes, tensors and arrays apart, and the limit is {limit} "
            "(max_frame_bytes). Send large data as tensors or arrays",
            _longest(fields),
        )
    return body


def _checked(segments: list[AnyBuffer], limit: int) -> list[AnyBuffer]:
    # As for the body: the receiver would close the connection.
    if len(segments) > MAX_SEGMENTS:
        raise SerializationError(f"has {len(segments)} tensors and arrays; the limit is {MAX_SEGMENTS}")
    longest = max(map(len, segments), default=0)
    if longest > limit:
        raise SerializationError(f"has a tensor of {longest} bytes; the limit is {limit} (max_tensor_bytes)")
    return segments


def _longest(fields: list[Any]) -> int:
    """Position of the value that makes a message long: the longest one, or the first that was pickled."""
    sizes = [len(value) if isinstance(value, (str, bytes)) else 0 for value in fields[0]]
    if len(fields) > 3 and fields[2] and len(fields[3]) > max(sizes):
        return int(fields[2][0])
    return max(range(len(sizes)), key=sizes.__getitem__, default=0)


def _is_one(items: object) -> bool:
    return type(items) is list and len(items) == 1


def decode(
    fields: list[Any],
    segments: Sequence[Any],
    load: ReferenceLoader,
    track: GradientLoader | None = None,
    landing: Landing | None = None,
) -> list[Any]:
    """The values of a message, from its fields behind the prefix. segments: its buffers. landing: for tensors on
    devices; its streams must be current. None: there can be none. track: for what it says of gradients.

    Raises whatever unpickling raises, and ProtocolError for a message that is none.
    """
    count = len(fields)
    if count == 0 or type(fields[0]) is not list:
        raise ProtocolError("a message whose values are no list")
    if count == 1:
        values: list[Any] = fields[0]
        return values
    if count == 6 and not fields[2] and not fields[4] and _is_one(fields[1]) and _is_one(fields[5]):
        (tensor,) = layout.rebuild(fields[5], segments, landing)  # the most common of all: one tensor and plain values
        values = fields[0]
        try:
            values[fields[1][0]] = tensor
        except (TypeError, IndexError) as error:
            raise ProtocolError(f"a message whose tensor has no place: {error}") from None
        return values
    # References first: whatever fails below, their senders wait for an answer that only taking them gives.
    references = load(fields[6]) if count > 6 and fields[6] else ()
    buffers: Sequence[Buffer] = ()
    if count > 4 and fields[4]:
        if type(fields[4]) is not int or not 0 < fields[4] <= len(segments):
            raise ProtocolError(f"a message of {len(segments)} segments that says {str(fields[4])[:80]} are buffers")
        buffers = segments[len(segments) - fields[4] :]
    tensors: Sequence[torch.Tensor] = layout.rebuild(fields[5], segments, landing) if count > 5 and fields[5] else ()
    past: Past | None = None
    if count > 7 and fields[7] and track is not None:
        tensors, past = track(fields[7], tensors)
    return decode_values(fields, Incoming(tensors, references, past), buffers)
