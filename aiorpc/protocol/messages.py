"""The messages of the wire: one class for each, from which it is written and read.

The body of a message is the msgpack array of all fields of its class, in their order. A message whose class has no
fields has an empty body. Reading compares the number of the fields, their types, ranges and lengths with the
declaration, at all depths, and raises ProtocolError for a mismatch. The code above this module never sees a body.

msgspec does both in C (`bench/wire.py` has the figures). Two rules keep a peer's messages harmless. No field is
declared as `Any`: msgspec would make maps with any keys of it, and a sender may choose numbers whose hashes collide.
Messages are not nested more deeply than their declarations: a body cannot announce lists in lists that are not there.

Bodies of the handshake that a worker of another version has to understand (HELLO, REFUSED) never change their form; see
`handshake`. Messages of reference counting are declared in `reference_messages`, those of channels by each channel;
their envelopes are here.

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
if TYPE_CHECKING:  # before encoding, users' values are in the places of None
    Plain = Any
else:
    Plain = Number | str | list[Number] | dict[str, Number]


class Fields(Struct, array_like=True, forbid_unknown_fields=True):
    """Base of messages that travel as the array of their fields."""


class TensorEntry(NamedTuple):
    """What a message says about one of its tensors (`channels/layout.py`)."""

    #: The number of the buffer with its bytes; -1 if it has none, -2 if they are in the next field.
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
    #: Its device at the receiver; nil for the host's memory. Its bytes are on that device, or come from the host.
    target: str | None


class Recorded(Fields):
    """What an autograd context has recorded of the tensors in a message."""

    #: The id of the context.
    context: int
    #: The number of the message in that context, at its sender.
    number: int
    #: Which tensors require gradients, by their numbers in the table; those taken apart have the numbers after it.
    places: list[Count]
    #: The graph behind each of them (`autograd/reach.py`), as worker, message and place; nil if it may be anything.
    behind: list[list[int] | None]


class Values(Fields):
    """User's values as they travel: the arguments of a call, the one result of a reply, one item of a stream."""

    #: The values themselves, if they are None, bool, int, float or str. If all values are plain, one of them may be a
    #: list of the first four, or a dict of them by str. Others leave None in their place.
    values: list[Plain]
    #: Those that are bytes, each with its position in `values`.
    data: Sequence[tuple[Count, bytes]] = ()
    #: Positions in `values` that are dense tensors, in the order of `table`.
    tensors_at: Sequence[Count] = ()
    #: Positions in `values` that were pickled.
    opaque_at: Sequence[Count] = ()
    #: One pickle (protocol 5) of the tuple of those, which keeps what they share; nil if there are none. In a group
    #: with safe serialization it is in the safe encoding (`trees`).
    pickled: bytes | None = None
    #: How many segments of the frame are out-of-band buffers of that pickle; they come last.
    buffers: Count = 0
    #: The description of each tensor; nil if there are none.
    table: Sequence[TensorEntry] | None = None
    #: The remote references in the values. They are taken even if the values cannot be unpickled.
    references: Sequence[PassedReference] = ()
    #: The autograd context's record of the tensors; nil outside of any.
    gradients: Recorded | None = None


class ByName(Struct, array_like=True, forbid_unknown_fields=True, tag=1, frozen=True):
    """A function that the callee does not know yet: its name, and its number from now on."""

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


#: The function of a call: its number from a ByName, one of the classes above, or nil for the first of the values.
Function = int | ByName | Method | ObjectMethod | Fetch | None


class Call(Fields):
    """Run a function. Sent by the side that opened the connection."""

    #: A number; a ByName, Method, ObjectMethod or Fetch, each after its tag 1 to 4; nil if the function itself is the
    #: first of the values.
    function: Function
    #: The arguments.
    payload: Values
    #: Names of the last values, which are keyword arguments; nil if there are none.
    names: list[str] | None = None
    #: Seconds left until the caller gives up; nil: it never does.
    remaining: float | None = None
    #: For a call that a handler makes: the first call of the chain, as its caller and the number that it had there. A
    #: leaving worker recognises by it the calls of those that it serves. nil in the first call.
    origin: tuple[int, int] | None = None
    #: `traceparent` and `tracestate` of the call's trace; nil if there is none. Values that W3C does not allow are
    #: ignored.
    trace: TraceContext | None = None
    #: The autograd context that the call is made in; nil outside of any.
    autograd: int | None = None
    #: How many items of a stream may be sent; nil if the call is no stream.
    credit: Count | None = None
    #: The reference whose value the result becomes; the caller's fork of it has the next number. nil if the caller
    #: wants the result itself.
    creates: ReferenceId | None = None
    #: For an idempotent call, which its callee runs at most once even if it comes several times: its number among those
    #: of its caller, and how often it was sent before; nil for all others. Streams, and calls that create a reference,
    #: are never idempotent.
    once: tuple[int, int] | None = None


class Reply(Fields):
    """The result of a call; calls of the runtime's own may have several."""

    #: One value; for those calls all of them, side by side.
    payload: Values


class Item(Fields):
    """One item of a stream."""

    #: One value.
    payload: Values


class Error(Fields):
    """The exception that a call has raised."""

    #: The type, with its module unless that is builtins.
    type_name: str
    #: Its text.
    message: str
    #: The traceback at the callee, as text.
    traceback: str
    #: The name of the worker that raised it.
    worker: str
    #: The exception itself, if it can be rebuilt; otherwise nil. In a group with safe serialization the fields of an
    #: error of aiorpc's own: a list of one map, as msgpack.
    pickled: bytes | None
    #: Whether the call may be sent again: nothing was run, or the answer of an idempotent call is kept.
    again: bool


class Cancel(Fields):
    """The caller does not wait for that call any more."""

    #: Whether its time was up. If not, its caller gave up.
    expired: bool


class Credit(Fields):
    """So many more items of a stream may be sent."""

    #: How many.
    items: Count


_ERROR_NAME = r"\A([^\W\d]\w{0,99})?\Z"


class Goodbye(Fields):
    """The sender leaves in good order."""

    #: The name of the error that has ended its program; "" for none. It appears in errors and logs of others.
    failed: Annotated[str, Meta(pattern=_ERROR_NAME)]


class Parting(Fields):
    """The sender leaves soon, and takes no more calls. Those that have come it answers."""


class Ack(Fields):
    """So many frames have come since the handshake, all kinds counted: that number stands in place of the call id.

    It belongs to the connection (protocol/session.py), and is used only if both ends want a session.
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
    #: For each buffer the number of its channel, and the channel's descriptor: the fields that the channel declares.
    wires: list[tuple[int, list[int | str | list[list[int]]]]]
    #: The body of the message.
    body: bytes


class Chunk(NamedTuple):
    """A piece of a large buffer, which is the one segment of the frame. Packed as two u64, not as msgpack."""

    #: Where the piece begins in the buffer, in bytes; 2^64 - 1, without a segment: no more of it comes, and `size` is 1
    #: if a message with the transfer was sent, 0 if not.
    offset: int
    #: The size of the whole buffer, in bytes.
    size: int


class Release(Fields):
    """Blocks of shared memory go back to the receiver. It usually comes just before an answer, and the thread that
    takes the answer takes it, too: the loop, or a waiting thread."""

    #: Segment, offset, size and generation of each, as it was lent; the lender compares them with what it has lent.
    blocks: list[tuple[int, int, int, int]]


Message = Call | Reply | Item | Error | Cancel | Credit | Goodbye | Parting | Ack | ChannelMessage | Parcel | Release
WithValues = Call | Reply | Item
V = TypeVar("V", Call, Reply, Item)

#: The class of each kind of message whose body is written and read here. The handshake's are in `handshake`, and those
#: of reference counting in `reference_messages`.
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
    Kind.PARTING: Parting,
}

_CHUNK = struct.Struct("<QQ")
_KEYS = frozenset((str,))
_LONG = frozenset((str, bytes))
_FLAT = PLAIN.union(CONTAINERS)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(message: Message) -> bytes:
    """The body of a message. Raises OverflowError or UnicodeEncodeError for a value that msgpack cannot express."""
    if isinstance(message, WithValues):
        if bytes in map(type, message.payload.values):
            return _pack_bytes(message)
        return pack(message)
    return pack(message) if type(message) is not Ack else b""


def write_plain(kind: int, call_id: int, message: V, limit: int) -> list[Buffer] | None:
    """The frame of a message whose values are plain: the short path of most quick calls and their answers.

    limit: bytes that the body may have. None if a value is not plain, or the frame would be too long. One of the values
    may be a short list of numbers, or a dict of them. Not two: they may be the same object, and must stay the same.
    """
    values = message.payload.values
    kinds = set(map(type, values))
    if not (kinds <= PLAIN or (kinds <= _FLAT and _has_one_flat(values))):
        return None
    if not (kinds.isdisjoint(_LONG) or _is_short(values, limit)):
        return None
    try:
        body = _pack_bytes(message) if bytes in kinds else pack(message)
    except (OverflowError, ValueError, TypeError):
        # An int beyond 64 bits, a str with lone surrogates, a value that is too long, a list that another thread
        # changes.
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
    """Whether it is a short list of numbers, or a dict of them by str."""
    if type(value) not in CONTAINERS or len(value) > SIMPLE_SIZE:
        return False
    if type(value) is dict:
        return _KEYS.issuperset(map(type, value)) and NUMBERS.issuperset(map(type, value.values()))
    return NUMBERS.issuperset(map(type, value))


def _pack_bytes(message: WithValues) -> bytes:
    """The body of a message with bytes among its values. msgspec cannot tell them from str in one list: while this
    runs they are in a field of their own."""
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
    """The part of a call's body that is the same for all receivers. function: the function of this body."""
    return body[1 + len(pack(function)) :]


def with_function(function: Function, rest: bytes) -> bytes:
    """The body of a call of that function. rest: from `without_function`."""
    return _CALL + pack(function) + rest


def write_chunk(chunk: Chunk) -> bytes:
    """The body of a Chunk."""
    return _CHUNK.pack(*chunk)


def is_error_name(name: str) -> bool:
    """Whether a goodbye may have that error name, which appears in errors and logs of others."""
    return re.search(_ERROR_NAME, name) is not None


# --- reading ----------------------------------------------------------------------------------------------------------


def reader(declared: type[M]) -> Callable[[Buffer], M]:
    """A function that reads bodies of that class, and raises ProtocolError."""
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


read_error: Callable[[Buffer], Error] = reader(Error)
read_cancel: Callable[[Buffer], Cancel] = reader(Cancel)
read_credit: Callable[[Buffer], Credit] = reader(Credit)
read_goodbye: Callable[[Buffer], Goodbye] = reader(Goodbye)
read_parcel: Callable[[Buffer], Parcel] = reader(Parcel)
read_release: Callable[[Buffer], Release] = reader(Release)
read_parting: Callable[[Buffer], Parting] = reader(Parting)


def read_channel(body: Buffer) -> ChannelMessage:
    """The ChannelMessage of a body; the channel compares its fields with its own declarations. Raises ProtocolError."""
    message = unpack(body)
    if len(message) != 2 or type(message[0]) is not int or type(message[1]) is not list:
        raise ProtocolError("a message of a channel is malformed")
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


#: The reader of each kind's body.
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
    Kind.PARTING: read_parting,
}


def read(kind: int, body: Buffer) -> Any:
    """The message of that kind in a body. Raises ProtocolError, also for a kind whose body is not read here."""
    found = READERS.get(kind)
    if found is None:
        raise ProtocolError(f"a message of kind {kind}, which is not read here")
    return found(body)


_CALL = pack(Call(None, Values([])))[:1]  # the first byte: an array of so many fields
