"""Users' values to the body and the buffers of a message, and back: one function each way, for calls and answers alike.

`protocol.codec` writes values, and `channels.layout` describes tensors. This module joins the two, adds the autograd
context's entries about the tensors, and checks the receiver's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from ...channels import AnyBuffer, layout
from ...channels.landing import Landing
from ...channels.routes import Route
from ...errors import ProtocolError, SerializationError
from ...protocol.codec import Incoming, Outgoing, Past, TooLong, decode_values, encode_values
from ...protocol.frames import MAX_SEGMENTS, Buffer
from ...protocol.messages import Call, Item, Recorded, Reply, TensorEntry, Values, write
from ...protocol.packing import PLAIN
from ...protocol.reference_messages import PassedReference

# A message whose pickle is longer than this is unpickled in a thread, off the loop.
LARGE_PICKLE = 64 * 1024
_ALWAYS_PLAIN = PLAIN - {int, str}  # an int or a str is plain if msgpack can write it
_NOT_PICKLED = PLAIN | {Tensor}


M = TypeVar("M", Call, Reply, Item)
#: Makes handles of the remote references in a message.
ReferenceLoader = Callable[[Sequence[PassedReference]], Sequence[object]]
#: Gives the tensors of a message their places in the autograd graph, from the message. Returns the tensors, and a
#: function that does the same for a tensor inside of the pickle, by its number.
GradientLoader = Callable[[Recorded, Sequence[Tensor]], tuple[Sequence[Tensor], Past | None]]


class Results(tuple[Any, ...]):
    """Several results of a call of the runtime's own, which travel side by side and not as one pickled tuple."""

    __slots__ = ()


class Recorder(Protocol):
    """Remembers the tensors of a message that require gradients (`gradients.contexts.Tape`)."""

    def record(self, tensors: Sequence[torch.Tensor], on_unsent: list[Callable[[], None]]) -> Recorded | None:
        """The message's entries about them; None for none. on_unsent: gets the function that undoes it."""


class Destination(Protocol):
    """The receiver of a message, for its encoding."""

    @property
    def same_main(self) -> bool: ...

    @property
    def other_python(self) -> str:
        """Its minor version of Python if it is known and differs from ours; "" otherwise."""

    @property
    def safe(self) -> bool:
        """Whether it reads no pickles."""

    @property
    def max_body(self) -> int: ...

    @property
    def max_segment(self) -> int: ...


def encode(
    message: M,
    target: Destination,
    route: Route | None = None,
    tape: Recorder | None = None,
    other_main: bool = False,
    lends: bool = False,
) -> tuple[bytes, Sequence[Any], Outgoing | None]:
    """The body and the buffers of a message, and the `Outgoing` to `unsend` if the message does not leave, or None.

    message: with the values of the program. target: the receiver. route: for tensors on devices, whose buffers are
    `DeviceBuffer`; None if there can be none. tape: of the message's autograd context. other_main: whether to write for
    a worker with another main module, even if the target has ours. lends: whether the caller keeps `Outgoing.lent`
    until the answer. Raises SerializationError, after everything was undone. The buffers borrow the tensors' memory.
    """
    values: list[Any] = message.payload.values
    _check_texts(values, target.max_body)  # before writing, which takes seconds for gigabytes
    out: Outgoing | None = None
    try:
        places = _places_of_tensors(values)
        tensors = [values[place] for place in places]
        described = _describe_at_once(tensors, route) if tensors else None
        buffers: Sequence[AnyBuffer]
        if described is not None:
            table, buffers = described
            plain, gradients = [*values], None
            for position in places:
                plain[position] = None
            if tape is not None and any(tensor.requires_grad for tensor in tensors):
                out = Outgoing(target)
                gradients = _record(tape, tensors, table, out)
            said = Values(plain, tensors_at=places, table=table, gradients=gradients)
        else:
            out = Outgoing(
                target,
                same_main=target.same_main and not other_main,
                route=route,
                apart=tape is not None,
                safe=target.safe,
                lends=lends,
                most=target.max_body,
                other_python=target.other_python,
            )
            said, buffers = _in_general(values, out, route, tape)
        if buffers and (len(buffers) > MAX_SEGMENTS or max(map(len, buffers)) > target.max_segment):
            raise _too_many(buffers, target.max_segment)
        body = _write(message, said, target.max_body)
        return body, buffers, out if out is not None and (out.on_unsent or out.lent) else None
    except BaseException as error:  # pickling runs code of users
        if out is not None:
            out.unsend()
        if isinstance(error, TooLong):
            raise _too_long(f"more than {target.max_body}", target.max_body, _first_opaque(values)) from None
        raise


def _check_texts(values: Sequence[object], limit: int) -> None:
    """Raise SerializationError for texts and bytes longer than a message may be."""
    size = 0
    for value in values:
        if type(value) is str or type(value) is bytes:
            size += len(value)
    if size > limit:
        raise _too_long(f"at least {size}", limit, _longest_of(values))


def _places_of_tensors(values: Sequence[object]) -> list[int]:
    """The places of plain tensors among plain values; empty if there are other values."""
    places: list[int] = []
    for position, value in enumerate(values):
        kind = type(value)
        if kind is Tensor:
            places.append(position)
        elif kind is int:
            if not -(1 << 63) <= value < 1 << 64:  # type: ignore[operator]  # an int, by its type
                return []
        elif kind is str:
            if not value.isascii():  # type: ignore[attr-defined]  # a str, by its type
                return []
        elif kind not in _ALWAYS_PLAIN:
            return []
    return places


def _describe_at_once(
    tensors: Sequence[Tensor], route: Route | None
) -> tuple[list[TensorEntry], Sequence[AnyBuffer]] | None:
    """The result of `_in_general` for plain tensors, in half the time; None if they need `_in_general`."""
    if not tensors[0].is_cpu:
        return layout.describe_away(tensors, route) if route is not None else None
    return layout.describe_plain(tensors) if route is None or not route.host_target else None


def _write(message: M, said: Values, limit: int) -> bytes:
    """The body of a message with that payload. Raises SerializationError."""
    try:
        body = write(replace(message, payload=said))
    except UnicodeEncodeError as error:
        raise SerializationError(f"cannot be written as UTF-8, as half of a character is in it: {error}") from error
    except ValueError as error:  # longer than msgpack can write
        text = f"is too large: {error}; send large data as tensors or arrays"
        raise SerializationError(text, _longest(said)) from error
    if len(body) > limit:
        raise _too_long(str(len(body)), limit, _longest(said))
    return body


def _in_general(
    values: list[object], out: Outgoing, route: Route | None, tape: Recorder | None
) -> tuple[Values, Sequence[AnyBuffer]]:
    """The payload and buffers for any values; `out` has the steps to undo."""
    said = encode_values(values, out)
    tensors, table, gradients = out.tensors, None, None
    buffers: Sequence[AnyBuffer] = out.buffers
    if tensors:
        table, described = layout.describe(tensors, route)
        buffers = [*described, *buffers] if buffers else described
    if tape is not None and (tensors or out.apart):
        gradients = _record(tape, [*tensors, *(out.apart or ())], table, out)
    if table is not None or gradients is not None:
        said.table, said.gradients = table, gradients
    return said, buffers


def _record(
    tape: Recorder, tensors: Sequence[Tensor], table: list[TensorEntry] | None, out: Outgoing
) -> Recorded | None:
    """The autograd context's entries about the tensors. Tensors in the table get a past, so they are no leaves."""
    recorded = tape.record(tensors, out.on_unsent)
    if recorded is not None and table is not None:
        for place in recorded.places:
            if place < len(table):
                table[place] = layout.without_leaf(table[place])
    return recorded


def _too_long(size: str, limit: int, position: int) -> SerializationError:
    # Refused here: the receiver would close the connection, and every other call would fail.
    return SerializationError(
        f"is too large: the message takes {size} bytes, tensors and arrays apart, and the limit is {limit} "
        "(max_frame_bytes). Send large data as tensors or arrays",
        position,
    )


def _too_many(segments: Sequence[AnyBuffer], limit: int) -> SerializationError:
    # Refused here for the same reason.
    if len(segments) > MAX_SEGMENTS:
        return SerializationError(f"has {len(segments)} tensors and arrays; the limit is {MAX_SEGMENTS}")
    longest = max(map(len, segments))
    return SerializationError(f"has a tensor of {longest} bytes; the limit is {limit} (max_tensor_bytes)")


def _longest(said: Values) -> int:
    """Position of the value that makes a message long: the longest, or the first pickled one."""
    longest = _longest_of(said.values)
    value = said.values[longest] if said.values else None
    if said.pickled is not None and (not isinstance(value, (str, bytes)) or len(said.pickled) > len(value)):
        return int(said.opaque_at[0])
    return longest


def _longest_of(values: Sequence[object]) -> int:
    """Position of the longest text or bytes."""
    sizes = [len(value) if isinstance(value, (str, bytes)) else 0 for value in values]
    return max(range(len(sizes)), key=sizes.__getitem__, default=0)


def _first_opaque(values: Sequence[object]) -> int:
    """Position of the first value that was pickled."""
    return next((place for place, value in enumerate(values) if type(value) not in _NOT_PICKLED), 0)


def decode(
    message: Values,
    segments: Sequence[Buffer],
    load: ReferenceLoader,
    track: GradientLoader | None = None,
    landing: Landing | None = None,
    safe: bool = False,
) -> list[Any]:
    """The values of a message.

    segments: its buffers. load: makes handles of its references. landing: for tensors on devices; its streams must be
    the current ones. None if there can be no such tensors. track: for the entries about gradients. safe: whether no
    pickles are read. Raises ProtocolError for a broken message, and the errors of unpickling.
    """
    values = message.values
    table, passed, count, said = message.table, message.references, message.buffers, message.gradients
    if not (table or message.pickled or passed):
        return values
    # References first: their senders wait for them, so they must be taken before anything below can fail.
    references = load(passed) if passed else ()
    buffers: Sequence[Buffer] = ()
    if count:
        if count > len(segments):
            raise ProtocolError(f"a message of {len(segments)} segments that says {count} are buffers")
        buffers = segments[len(segments) - count :]
    tensors: Sequence[torch.Tensor] = layout.rebuild(table, segments, landing) if table else ()
    past: Past | None = None
    if said and track is not None:
        tensors, past = track(said, tensors)
    places = message.tensors_at
    if not (message.pickled or references or message.opaque_at) and len(tensors) == len(places):
        try:
            for position, tensor in zip(places, tensors, strict=True):
                values[position] = tensor
        except (TypeError, IndexError) as error:
            raise ProtocolError(f"a message whose tensors have no place: {error}") from None
        return values
    return decode_values(message, Incoming(tensors, references, past, safe), buffers)
