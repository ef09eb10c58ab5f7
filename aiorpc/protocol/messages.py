"""The messages of the wire: one class for each, from which it is written and read.

The body of a message is the msgpack array of the fields of its class, all of them, in their order. A message whose
class has no fields has an empty body. Reading compares the number of the fields, their types, ranges and lengths with
the declaration, all the way down, and raises ProtocolError for a body that does not fit. So nothing behind this module
looks at a body again, or at a field by its number.

msgspec does both in C (`bench/wire.py` has the figures). Two rules keep what a peer sent harmless. No field is declared
as `Any`: msgspec would make maps with any keys of it, and a sender may choose numbers whose hashes collide. Nothing is
nested more deeply than the declarations are, so a body cannot announce lists in lists that are not there.

Bodies of the handshake that a worker of another version has to understand (HELLO, REFUSED) keep their form for ever;
see `handshake`. Messages of reference counting have classes of their own in `reference_messages`, and the two ends of a
channel have messages that the channel declares; here are the envelopes that they travel in.

`docs/inside/wire.md` is made from these classes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from ..errors import ProtocolError
from .frames import HEAD, MAGIC, Buffer, Kind
from .packing import CONTAINERS, MALFORMED, NUMBERS, PLAIN, SIMPLE_SIZE, malformed, pack, unpack
from .reference_messages import PassedReference, ReferenceId
from .trace_context import TraceContext

M = TypeVar("M")

#: A count, or a position.
Count = Annotated[int, Meta(ge=0)]
Number = None | bool | int | float
if TYPE_CHECKING:  # users' values take the places of those that travel apart
    Plain = Any
else:
    Plain = Number | str | list[Number] | dict[str, Number]


class Fields(Struct, array_like=True, forbid_unknown_fields=True):
    """What travels as the array of its fields."""


class TensorEntry(NamedTuple):
    """What a message says about one of its tensors (`channels/layout.py`)."""

    #: The number of the buffer that its bytes are in; -1 if it has none, -2 if they stand in the next field.
    buffer: int
    #: Where they begin in the buffer, in bytes; or the bytes themselves.
    offset: int | bytes
    #: The code of its dtype: its place in `DTYPES`.
    dtype: int
    #: Its shape.
    shape: Sequence[int]
    #: Its strides, in elements; nil if it is contiguous and alone in its buffer.
    strides: Sequence[int] | None
    #: The sum of 1: it requires gradients, 2: it is a Parameter, 4: to be conjugated, 8: to be negated.
    flags: int
    #: The device of the receiver that it is for; nil for the host's memory. Its bytes are on that device, or come from
    #: the host.
    target: str | None


class Recorded(Fields):
    """What an autograd context has recorded of the tensors in a message."""

    #: The id of the context.
    context: int
    #: The number of the message in that context, at its sender.
    number: int
    #: Which tensors require gradients, by their numbers in the table; those that were taken apart count on from there.
    places: list[Count]
    #: What is behind each of them (`autograd/reach.py`), as worker, message and place of each; nil if all may be.
    behind: list[list[int] | None]


class Values(Fields):
    """User's values as they travel: the arguments of a call, the one result of a reply, one item of a stream."""

    #: The values themselves, where they are None, bool, int, float or str. Where all values are plain, one of them may
    #: be a list of the first four, or a dict of them by str. Others leave None in their place.
    values: list[Plain]
    #: Those that are bytes, each with its position in `values`.
    data: Sequence[tuple[Count, bytes]] = ()
    #: Positions in `values` that are dense tensors, in the order of `table`.
    tensors_at: Sequence[Count] = ()
    #: Positions in `values` that were pickled.
    opaque_at: Sequence[Count] = ()
    #: One pickle (protocol 5) of the tuple of those, so that what they share stays shared; nil if there are none. In a
    #: group with safe serialization it is written in the safe encoding (`trees`).
    pickled: bytes | None = None
    #: How many segments of the frame are out-of-band buffers of that pickle; they come last.
    buffers: Count = 0
    #: What the receiver has to know of each tensor; nil if there are none.
    table: Sequence[TensorEntry] | None = None
    #: The remote references inside; also a message that cannot be unpickled has to take them.
    references: Sequence[PassedReference] = ()
    #: What the autograd context has to say of the tensors; nil outside of any.
    gradients: Recorded | None = None


class ByName(Struct, array_like=True, forbid_unknown_fields=True, tag=1, frozen=True):
    """A function that the callee does not know yet: its name, and the number that it has from now on."""

    number: int
    name: str


class Method(Struct, array_like=True, forbid_unknown_fields=True, tag=2, frozen=True):
    """A method of the value of a reference, which the first three name (`ReferenceId`)."""

    worker: int
    number: int
    key: int
    name: str


class ObjectMethod(Struct, array_like=True, forbid_unknown_fields=True, tag=3, frozen=True):
    """A method of an object that the callee serves under a name (`rpc.serve`)."""

    object: str
    name: str


class Fetch(Struct, array_like=True, forbid_unknown_fields=True, tag=4, frozen=True):
    """The value of a reference, which is named as a `ReferenceId`."""

    worker: int
    number: int
    key: int


#: What a call names: a function by the number that a ByName gave to it; the first of the values (nil).
Function = int | ByName | Method | ObjectMethod | Fetch | None


class Call(Fields):
    """Run a function. Sent by the side that opened the connection."""

    #: A number; a ByName, Method, ObjectMethod or Fetch, each behind its tag 1 to 4; nil if the function itself is the
    #: first of the values.
    function: Function
    #: The arguments.
    payload: Values
    #: Names of the last values, which are keyword arguments; nil if there are none.
    names: list[str] | None = None
    #: Seconds left until the caller gives up; nil: it never does.
    remaining: float | None = None
    #: Of a call that a handler makes: the first call of the chain, as its caller and the number that it had there. A
    #: worker that leaves knows by it what belongs to a call that it serves. nil in that first call.
    origin: tuple[int, int] | None = None
    #: `traceparent` and `tracestate` of what the call is part of; nil if there is none. What W3C does not have so is
    #: ignored.
    trace: TraceContext | None = None
    #: The autograd context that the call is made in; nil outside of any.
    autograd: int | None = None
    #: How many items of a stream may be sent; nil if the call is no stream.
    credit: Count | None = None
    #: The reference that the result becomes the value of; the caller's fork of it has the next number. nil if the
    #: result is wanted itself.
    creates: ReferenceId | None = None
    #: For an idempotent call, which its callee runs at most once however often it comes: the number that it has among
    #: those of its caller, and how often it was sent before; nil for all others. Streams, and calls that create a
    #: reference, are none.
    once: tuple[int, int] | None = None


class Reply(Fields):
    """The result of a call; of calls of the runtime's own it may be several."""

    #: One value; for those calls all of them, side by side.
    payload: Values


class Item(Fields):
    """One item of a stream."""

    #: One value.
    payload: Values


class Error(Fields):
    """The exception that a call has raised."""

    #: The type, with its module if that is not builtins.
    type_name: str
    #: Its text.
    message: str
    #: The traceback at the callee, as text.
    traceback: str
    #: The name of the worker that raised it.
    worker: str
    #: The exception itself, if it can be rebuilt; else nil. In a group with safe serialization the fields of an error
    #: of aiorpc's own: a list of one map, as msgpack.
    pickled: bytes | None
    #: Whether the call may be sent again: nothing was run, or the answer of an idempotent call is kept.
    again: bool


class Cancel(Fields):
    """The caller does not wait for that call any more."""

    #: Whether its time was up. Else its caller gave up.
    expired: bool


class Credit(Fields):
    """So many more items of a stream may be sent."""

    #: How many.
    items: Count


_ERROR_NAME = r"\A([^\W\d]\w{0,99})?\Z"


class Goodbye(Fields):
    """The sender leaves in good order."""

    #: The name of the error that has ended its program; "" for none. It stands in errors and logs of others.
    failed: Annotated[str, Meta(pattern=_ERROR_NAME)]


class Ack(Fields):
    """So many frames have come since the handshake, all kinds counted: that number stands in place of the call id.

    It is for the connection (protocol/session.py), and only where both ends want a session.
    """


class ChannelMessage(NamedTuple):
    """A message from one end of a channel to the other. Channel 0 is the link itself."""

    #: Its number.
    channel: int
    #: The fields of a message that the channel declares.
    fields: list[Any]


class Parcel(Fields):
    """A message some of whose buffers do not travel in its frame."""

    #: The kind of the message.
    kind: int
    #: For each buffer the number of its channel, and what that needs to receive it: the fields that it declares.
    wires: list[tuple[int, list[int | str | list[list[int]]]]]
    #: The body of the message.
    body: bytes


class Chunk(NamedTuple):
    """A piece of a large buffer, which is the one segment of the frame. Packed as two u64, not as msgpack."""

    #: Where the piece begins in the buffer, in bytes; 2^64 - 1, without a segment: no more of it comes, and `size` is 1
    #: if a message that names the transfer was sent, else 0.
    offset: int
    #: The size of the whole buffer, in bytes.
    size: int


class Release(Fields):
    """Blocks of shared memory are the receiver's again. It comes just before an answer, as a rule, and is taken where
    that is: by the loop, or by a thread that waits for the answer."""

    #: Segment, offset, size and generation of each, as it was lent; the lender compares them with what it has lent.
    blocks: list[tuple[int, int, int, int]]


Message = Call | Reply | Item | Error | Cancel | Credit | Goodbye | Ack | ChannelMessage | Parcel | Release
WithValues = Call | Reply | Item
V = TypeVar("V", Call, Reply, Item)

#: The class of each kind of message whose body is written and read here. Those of the handshake are in `handshake`, and
#: those of reference counting in `reference_messages`.
CLASSES: dict[int, type[Any]] = {
    Kind.CALL: Call,
    Kind.REPLY: Reply,
    Kind.ERROR: Error,
    Kind.CANCEL: Cancel,
    Kind.ITEM: Item,
    Kind.CREDIT: Credit,
    Kind.GOODBYE: Goodbye,
    Kind.CHANNEL: ChannelMessage,
    Kind.PARCEL: Parcel,
    Kind.CHUNK: Chunk,
    Kind.ACK: Ack,
    Kind.RELEASE: Release,
}

_CHUNK = struct.Struct("<QQ")
_KEYS = frozenset((str,))
_LONG = frozenset((str, bytes))


# --- writing ----------------------------------------------------------------------------------------------------------


def write(message: Message) -> bytes:
    """The body of a message. Raises OverflowError or UnicodeEncodeError for a value that msgpack cannot say."""
    if isinstance(message, WithValues):
        if bytes in map(type, message.payload.values):
            return _pack_bytes(message)
        return pack(message)
    return pack(message) if type(message) is not Ack else b""


def write_plain(kind: int, call_id: int, message: V, limit: int) -> list[Buffer] | None:
    """The frame of a message whose values are plain: most calls that have to be quick, and their answers, are of this
    kind, and this is all that they need.

    limit: bytes that the body may have. None if a value is not plain, or the frame cannot be. One of the values may be
    a short list of numbers, or a dict of them. Not two: if they are the same one they have to arrive as such.
    """
    values = message.payload.values
    kinds = set(map(type, values))
    if not (kinds <= PLAIN or _has_one_flat(values)) or not (kinds.isdisjoint(_LONG) or _is_short(values, limit)):
        return None
    try:
        body = _pack_bytes(message) if bytes in kinds else pack(message)
    except (OverflowError, ValueError, TypeError):
        # An int beyond 64 bits, a str that is no text, one that is too long, a list that another thread changes.
        return None
    return [HEAD.pack(call_id, len(body), 0, kind, MAGIC) + body] if len(body) <= limit else None


def _has_one_flat(values: list[Any]) -> bool:
    """Whether all values but one are plain, and that one is a short list of numbers, or a dict of them."""
    others = [value for value in values if type(value) not in PLAIN]
    return len(others) == 1 and _is_flat(others[0])


def _is_short(values: list[Any], limit: int) -> bool:
    """Whether what is long among them may fit: to write gigabytes takes seconds."""
    return sum(len(value) for value in values if type(value) in _LONG) <= limit


def _is_flat(value: Any) -> bool:
    """Whether that is a short list of numbers, or a dict of them by str."""
    if type(value) not in CONTAINERS or len(value) > SIMPLE_SIZE:
        return False
    if type(value) is dict:
        return _KEYS.issuperset(map(type, value)) and NUMBERS.issuperset(map(type, value.values()))
    return NUMBERS.issuperset(map(type, value))


def _pack_bytes(message: WithValues) -> bytes:
    """The body of a message with bytes among its values: msgspec cannot tell them from str in one list, so they have a
    field of their own, for as long as this takes."""
    payload = message.payload
    values = payload.values
    plain, data = values.copy(), []
    for place, value in enumerate(values):
        if type(value) is bytes:
            plain[place] = None
            data.append((place, value))
    payload.values, payload.data = plain, data
    try:
        return pack(message)
    finally:
        payload.values, payload.data = values, ()


def without_function(body: bytes, function: Function) -> bytes:
    """A call without its function: what it has in common for all of its receivers. function: that of this body."""
    return body[1 + len(pack(function)) :]


def with_function(function: Function, rest: bytes) -> bytes:
    """The body of a call of that function. rest: what `without_function` gave."""
    return _CALL + pack(function) + rest


def write_chunk(chunk: Chunk) -> bytes:
    """The body of a Chunk."""
    return _CHUNK.pack(*chunk)


def is_error_name(name: str) -> bool:
    """Whether a goodbye may say that: it stands in errors and logs of others."""
    return re.search(_ERROR_NAME, name) is not None


# --- reading ----------------------------------------------------------------------------------------------------------


def reader(declared: type[M]) -> Callable[[Buffer], M]:
    """What reads bodies of that class. It raises ProtocolError."""
    decode = Decoder(declared).decode

    def read(body: Buffer) -> M:
        try:
            return decode(body)
        except MALFORMED as error:
            raise malformed(f"a {declared.__name__}", error) from None

    return read


_decode_call = Decoder(Call).decode
_decode_values = Decoder(Reply).decode


def read_call(body: Buffer) -> Call:
    """The Call of a body. Raises ProtocolError."""
    try:
        call = _decode_call(body)
    except MALFORMED as error:
        raise malformed("a Call", error) from None
    if call.payload.data:
        _put_bytes(call.payload)
    if call.once is not None and (call.credit is not None or call.creates is not None):
        raise ProtocolError("a call that is to run once, and is a stream or creates a reference")
    return call


def read_values(body: Buffer) -> Values:
    """The Values of a Reply or an Item. Raises ProtocolError."""
    try:
        values = _decode_values(body).payload
    except MALFORMED as error:
        raise malformed("a message of values", error) from None
    if values.data:
        _put_bytes(values)
    return values


def _put_bytes(payload: Values) -> None:
    values = payload.values
    for place, data in payload.data:
        if place >= len(values) or values[place] is not None:
            raise ProtocolError("a message with bytes that have no place")
        values[place] = data
    payload.data = ()


read_error = reader(Error)
read_cancel = reader(Cancel)
read_credit = reader(Credit)
read_goodbye = reader(Goodbye)
read_parcel = reader(Parcel)
read_release = reader(Release)


def read_channel(body: Buffer) -> ChannelMessage:
    """The ChannelMessage of a body; the channel compares its fields with its own declarations. Raises ProtocolError."""
    message = unpack(body)
    if len(message) != 2 or type(message[0]) is not int or type(message[1]) is not list:
        raise ProtocolError("a message of a channel that is none")
    return ChannelMessage(*message)


def read_chunk(body: Buffer) -> Chunk:
    """The Chunk of a body. Raises ProtocolError."""
    try:
        return Chunk(*_CHUNK.unpack(body))
    except struct.error:
        raise ProtocolError("a chunk that does not say where it belongs") from None


def _read_ack(body: Buffer) -> Ack:
    if len(body):
        raise ProtocolError(f"an Ack with a body of {len(body)} bytes, which has none")
    return Ack()


#: How a body of each kind is read.
READERS: dict[int, Callable[[Buffer], Any]] = {
    Kind.CALL: read_call,
    Kind.REPLY: lambda body: Reply(read_values(body)),
    Kind.ITEM: lambda body: Item(read_values(body)),
    Kind.ERROR: read_error,
    Kind.CANCEL: read_cancel,
    Kind.CREDIT: read_credit,
    Kind.GOODBYE: read_goodbye,
    Kind.CHANNEL: read_channel,
    Kind.PARCEL: read_parcel,
    Kind.CHUNK: read_chunk,
    Kind.ACK: _read_ack,
    Kind.RELEASE: read_release,
}


def read(kind: int, body: Buffer) -> Any:
    """The message of that kind that a body is. Raises ProtocolError; also for a kind whose body is not read here."""
    found = READERS.get(kind)
    if found is None:
        raise ProtocolError(f"a message of kind {kind}, which is not read here")
    return found(body)


_CALL = pack(Call(None, Values([])))[:1]  # how each begins: an array of so many fields
