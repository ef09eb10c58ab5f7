"""The messages of the wire: one class for each, and the one place where they are written and read.

The body of a message is the msgpack array of the fields of its class, all of them, in their order. A message whose
class has no fields has an empty body. `write` makes a body, and `read` takes one apart; where a message is on the path
of each call there is a function of its own beside them (`write_with`, `write_plain`, `read_call`, `read_values`), which
does the same in fewer steps. Reading checks the number of the fields and the types of those that the runtime relies on,
and raises ProtocolError for a body that does not fit: nobody behind this module looks at a body again, or at a field by
its number.

Bodies of the handshake that a worker of another version has to understand (HELLO, REFUSED) keep their form for ever;
see `handshake`. Messages of reference counting have classes of their own in `reference_messages`, and what the two ends
of a channel say to each other is declared by the channel; here are the envelopes that they travel in.

`docs/inside/wire.md` is made from these classes.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from msgpack import unpackb

from ..errors import ProtocolError
from .frames import HEAD, MAGIC, Buffer, Kind
from .packing import (
    CONTAINERS,
    LONG,
    MOST_KEPT,
    NUMBERS,
    PLAIN,
    SIMPLE_SIZE,
    look_through,
    new_packer,
    no_extension,
    pack,
    packers,
    shown,
    unpack,
)
from .reference_messages import PassedReference, read_passed

M = TypeVar("M", bound="Message")


class Recorded(NamedTuple):
    """What an autograd context has recorded of the tensors in a message."""

    #: The id of the context.
    context: int
    #: The number of the message in that context, at its sender.
    number: int
    #: Which tensors require gradients, by their numbers in the table; those that were taken apart count on from there.
    places: list[int]
    #: What is behind each of them (`autograd/reach.py`); nil if all may be.
    behind: list[object]


class Values(NamedTuple):
    """User's values as they travel: the arguments of a call, the one result of a reply, one item of a stream."""

    #: The values themselves, where they are None, bool, int, float, str or bytes. Where all are, one of them may be a
    #: list of the first four, or a dict of them by str. Others leave None in their place.
    values: list[object]
    #: Positions in `values` that are dense tensors, in the order of `table`.
    tensors_at: Sequence[int] = ()
    #: Positions in `values` that were pickled.
    opaque_at: Sequence[int] = ()
    #: One pickle (protocol 5) of the tuple of those, so that what they share stays shared; nil if there are none. In a
    #: group with safe serialization it is a tree (`trees`).
    pickled: bytes | None = None
    #: How many segments of the frame are out-of-band buffers of that pickle; they come last.
    buffers: int = 0
    #: What the receiver has to know of each tensor (`channels/layout.py`); nil if there are none.
    table: Sequence[Sequence[object]] | None = None
    #: The remote references inside; also a message that cannot be unpickled has to take them.
    references: Sequence[PassedReference] = ()
    #: What the autograd context has to say of the tensors; nil outside of any.
    gradients: Recorded | None = None


class ByName(NamedTuple):
    """A function that the callee hears of for the first time, and the number that it has from now on."""

    number: int
    name: str


class Method(NamedTuple):
    """A method of the value of a reference, which the first three name (`ReferenceId`)."""

    worker: int
    number: int
    key: int
    name: str


class ObjectMethod(NamedTuple):
    """A method of an object that the callee serves under a name (`rpc.serve`)."""

    object: str
    name: str


class Fetch(NamedTuple):
    """The value of a reference, which is named as a `ReferenceId`."""

    worker: int
    number: int
    key: int


#: What a call names: a function by the number that a ByName gave to it; one that is the first of the values (nil).
Function = int | ByName | Method | ObjectMethod | Fetch | None


class Call(NamedTuple):
    """Run a function. Sent by the side that opened the connection."""

    #: A number; [number, name]; [worker, number, key, name] for a method of a reference, [worker, number, key] for its
    #: value; [object, name] for a method of a named object; nil if the function itself is the first of the values.
    function: Function
    #: Names of the last values, which are keyword arguments; nil if there are none.
    names: list[str] | None
    #: Seconds left until the caller gives up; nil: it never does.
    remaining: float | None
    #: The id of the first call of a chain of calls; nil in that first call.
    trace: int | None
    #: The autograd context that the call is made in; nil outside of any.
    autograd: int | None
    #: How many items of a stream may be sent; nil if the call is no stream.
    credit: int | None
    #: The reference that the result becomes the value of, as worker, number and key; the caller's fork of it has the
    #: next number. nil if the result is wanted itself.
    creates: Sequence[int] | None
    #: For an idempotent call, which its callee runs at most once however often it comes: the number that it has among
    #: those of its caller, and how often it was sent before; nil for all others. Streams, and calls that create a
    #: reference, are none.
    once: Sequence[int] | None
    #: The arguments.
    arguments: Values


class Reply(NamedTuple):
    """The result of a call; of calls of the runtime's own it may be several."""

    #: One value; for those calls all of them, side by side.
    result: Values


class Error(NamedTuple):
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


class Cancel(NamedTuple):
    """The caller does not wait for that call any more."""

    #: Whether its time was up. Else its caller gave up.
    expired: bool


class Item(NamedTuple):
    """One item of a stream."""

    #: One value.
    item: Values


class Credit(NamedTuple):
    """So many more items of a stream may be sent."""

    #: How many.
    items: int


class Goodbye(NamedTuple):
    """The sender leaves in good order."""

    #: The name of the error that has ended its program; "" for none.
    failed: str


class Ack(NamedTuple):
    """So many frames have come since the handshake, all kinds counted: that number stands in place of the call id.

    It is for the connection (protocol/session.py), and only where both ends want a session.
    """


class ChannelMessage(NamedTuple):
    """A message from one end of a channel to the other. Channel 0 is the link itself."""

    #: Its number.
    channel: int
    #: The fields of a message that the channel declares.
    fields: list[object]


class Parcel(NamedTuple):
    """A message some of whose buffers do not travel in its frame."""

    #: The kind of the message.
    kind: int
    #: For each buffer the number of its channel, and what that needs to receive it: the fields that it declares.
    wires: Sequence[tuple[int, list[Any]]]
    #: The body of the message.
    body: bytes


class Chunk(NamedTuple):
    """A piece of a large buffer, which is the one segment of the frame. Packed as two u64, not as msgpack."""

    #: Where the piece begins in the buffer, in bytes; 2^64 - 1, without a segment: no more of it comes, and `size` is 1
    #: if a message that names the transfer was sent, else 0.
    offset: int
    #: The size of the whole buffer, in bytes.
    size: int


class Release(NamedTuple):
    """Blocks of shared memory are the receiver's again. It comes just before an answer, as a rule, and is taken where
    that is: by the loop, or by a thread that waits for the answer."""

    #: Segment, offset, size and generation of each, as it was lent; the lender compares them with what it has lent.
    blocks: Sequence[Sequence[int]]


Message = Call | Reply | Error | Cancel | Item | Credit | Goodbye | Ack | ChannelMessage | Parcel | Release

#: The class of each kind of message whose body is written and read here. Those of the handshake are in `handshake`, and
#: those of reference counting in `reference_messages`.
CLASSES: dict[int, type[tuple[object, ...]]] = {
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

# What Call(...) and Values(...) do, without their call into Python: two are made for each call.
_new: Any = tuple.__new__
_NAME_LIMIT = 100
_CHUNK = struct.Struct("<QQ")
_NOTHING_ELSE = Values([])[1:]
_KEYS = frozenset((str,))
_FEW_ITEMS = 0x90  # what an array of msgpack begins with, added to how many items it has, up to 15


def write(message: Message) -> bytes:
    """The body of a message. Raises OverflowError or UnicodeEncodeError for a value that msgpack cannot say."""
    return pack(message) if message else b""


def write_with(kind: type[Call | Reply | Item], head: tuple[object, ...], values: Values) -> bytes:
    """The body of a message of that class, whose last field are these Values. head: its other fields, in their order.

    Raises what `write` raises.
    """
    try:  # as `pack` does, with one function less for each call
        packer = packers.pop()
    except IndexError:
        packer = new_packer()
    body: bytes = packer.pack(_new(kind, (*head, values)))
    if len(body) <= MOST_KEPT:
        packers.append(packer)
    return body


def write_plain(
    kind: int, call_id: int, head: tuple[object, ...], values: list[Any], limit: int
) -> list[Buffer] | None:
    """The frame of a message of that kind whose last field are Values without anything but plain ones: most calls that
    have to be quick, and their answers, are of this kind, and this is all that they need.

    head: as of `write_with`. limit: bytes that the body may have. None if a value is not plain, or the frame cannot be.
    One of the values may be a short list of numbers, or a dict of them. Not two: if they are the same one they have to
    arrive as such.
    """
    if not PLAIN.issuperset(map(type, values)):
        container: object = None
        for value in values:
            if type(value) in PLAIN:
                continue
            if container is not None or type(value) not in CONTAINERS or len(value) > SIMPLE_SIZE:
                return None
            container = value
            if type(value) is dict:
                if not _KEYS.issuperset(map(type, value)):
                    return None
                value = value.values()
            if not NUMBERS.issuperset(map(type, value)):
                return None
    size = 0
    for value in values:
        if type(value) is str or type(value) is bytes:
            size += len(value)
    if size > limit:  # to write gigabytes takes seconds
        return None
    try:
        packer = packers.pop()
    except IndexError:
        packer = new_packer()
    try:
        body: bytes = packer.pack((*head, (values, *_NOTHING_ELSE)))
    except (OverflowError, ValueError, TypeError):
        # An int beyond 64 bits, a str that is no text, one that is too long, a list that another thread changes.
        return None
    if len(body) <= MOST_KEPT:
        packers.append(packer)
    return [HEAD.pack(call_id, len(body), 0, kind, MAGIC) + body] if len(body) <= limit else None


def without_head(body: bytes, head: tuple[object, ...]) -> bytes:
    """The last field of a body that was written with that head, as bytes: what a call has for all of its receivers."""
    return body[len(pack(head)) :]  # an array of one item less begins with as many bytes


def with_head(head: tuple[object, ...], last: bytes) -> bytes:
    """The body of a message with that head, and with a last field that `without_head` gave."""
    return bytes((_FEW_ITEMS + len(head) + 1,)) + pack(head)[1:] + last


def read_call(body: Buffer) -> Call:
    """The Call of a body. Raises ProtocolError."""
    try:
        if len(body) > LONG:
            look_through(body)
        fields: Any = unpackb(body, ext_hook=no_extension)  # as `unpack` does, with one function less for each call
    except Exception as error:
        raise ProtocolError(f"a message body that is no msgpack: {type(error).__name__}: {error}") from None
    try:
        function, names, remaining, trace, autograd, credit, creates, once, arguments = fields
        values, tensors_at, opaque_at, pickled, buffers, table, references, gradients = arguments
    except (TypeError, ValueError):
        raise ProtocolError(f"a call that is none: {_shown([fields])}") from None
    if type(function) is list:
        function = _read_function(function)
    elif function is not None and type(function) is not int:
        raise ProtocolError(f"a call of {shown(function)}")
    if (
        not (type(values) is type(tensors_at) is type(opaque_at) is type(references) is list)
        or not (pickled is None or type(pickled) is bytes)
        or type(buffers) is not int
        or not (table is None or type(table) is list)
        or not (gradients is None or (type(gradients) is list and len(gradients) == 4))
        or not (names is None or type(names) is list)
        or not (remaining is None or type(remaining) is float)
        or not (trace is None or type(trace) is int)
        or not (autograd is None or type(autograd) is int)
        or not (credit is None or type(credit) is int)
        or not (creates is None or (type(creates) is list and len(creates) == 3 and _are_ints(creates)))
        or not (once is None or (type(once) is list and len(once) == 2 and _are_ints(once)))
        or not (once is None or (credit is None and creates is None))
    ):
        raise ProtocolError(f"a call with a field of a wrong type: {_shown(fields)}")
    if names and not _KEYS.issuperset(map(type, names)):
        raise ProtocolError("a call with names that are no text")
    if not PLAIN.issuperset(map(type, values)):
        _check_values(values)
    if references:
        references = [*map(read_passed, references)]
    recorded = None if gradients is None else _new(Recorded, gradients)
    arguments = _new(Values, (values, tensors_at, opaque_at, pickled, buffers, table, references, recorded))
    call: Call = _new(Call, (function, names, remaining, trace, autograd, credit, creates, once, arguments))
    return call


def _read_function(wire: list[object]) -> Function:
    function: Function = None
    match list(map(type, wire[:5])):
        case [builtins.int, builtins.str]:
            function = _new(ByName, wire)
        case [builtins.int, builtins.int, builtins.int, builtins.str]:
            function = _new(Method, wire)
        case [builtins.int, builtins.int, builtins.int]:
            function = _new(Fetch, wire)
        case [builtins.str, builtins.str]:
            function = _new(ObjectMethod, wire)
    if function is not None:
        return function
    raise ProtocolError(f"a call of what is no function: {_shown(wire)}")


def read_values(body: Buffer) -> Values:
    """The Values of a Reply or an Item. Raises ProtocolError."""
    try:
        if len(body) > LONG:
            look_through(body)
        fields: Any = unpackb(body, ext_hook=no_extension)  # as `unpack` does, with one function less for each call
    except Exception as error:
        raise ProtocolError(f"a message body that is no msgpack: {type(error).__name__}: {error}") from None
    try:
        (result,) = fields
        values, tensors_at, opaque_at, pickled, buffers, table, references, gradients = result
    except (TypeError, ValueError):
        raise ProtocolError(f"a message of values that is none: {_shown([fields])}") from None
    if (
        not (type(values) is type(tensors_at) is type(opaque_at) is type(references) is list)
        or not (pickled is None or type(pickled) is bytes)
        or type(buffers) is not int
        or not (table is None or type(table) is list)
        or not (gradients is None or (type(gradients) is list and len(gradients) == 4))
    ):
        raise ProtocolError(f"a message of values with a field of a wrong type: {_shown(result)}")
    if not PLAIN.issuperset(map(type, values)):
        _check_values(values)
    if references:
        references = [*map(read_passed, references)]
    recorded = None if gradients is None else _new(Recorded, gradients)
    read: Values = _new(Values, (values, tensors_at, opaque_at, pickled, buffers, table, references, recorded))
    return read


def read_error(body: Buffer) -> Error:
    """The Error of a body. Raises ProtocolError."""
    error = _read(Error, body)
    if (
        not all(type(text) is str for text in error[:4])
        or not (error.pickled is None or type(error.pickled) is bytes)
        or type(error.again) is not bool
    ):
        raise ProtocolError("an error with a field of a wrong type")
    return error


def read_credit(body: Buffer) -> int:
    """How many items a Credit grants. Raises ProtocolError."""
    (count,) = _read(Credit, body)
    if type(count) is not int or count < 0:
        raise ProtocolError(f"a credit of {shown(count)} items")
    return count


def read_cancel(body: Buffer) -> bool:
    """Whether the time of a call that is cancelled was up. Raises ProtocolError."""
    (expired,) = _read(Cancel, body)
    if type(expired) is not bool:
        raise ProtocolError(f"a call was cancelled for {shown(expired)}, which is no reason")
    return expired


def read_goodbye(body: Buffer) -> str:
    """The name of the error after which the sender leaves, "" for none. Raises ProtocolError."""
    (failed,) = _read(Goodbye, body)
    if type(failed) is not str or (failed and not is_error_name(failed)):
        raise ProtocolError("a goodbye with a reason that is no name of an error")
    return failed


def is_error_name(name: str) -> bool:
    """Whether a goodbye may say that: it stands in errors and logs of others."""
    return len(name) <= _NAME_LIMIT and name.isidentifier()


def read_channel(body: Buffer) -> ChannelMessage:
    """The ChannelMessage of a body. Raises ProtocolError."""
    message = _read(ChannelMessage, body)
    if type(message.channel) is not int or type(message.fields) is not list:
        raise ProtocolError("a message of a channel with a field of a wrong type")
    return message


def read_parcel(body: Buffer) -> Parcel:
    """The Parcel of a body. Raises ProtocolError."""
    parcel = _read(Parcel, body)
    if type(parcel.kind) is not int or type(parcel.body) is not bytes or type(parcel.wires) is not list:
        raise ProtocolError("a parcel with a field of a wrong type")
    try:
        for channel, wire in parcel.wires:
            if type(channel) is not int or type(wire) is not list:
                raise TypeError("one that does not say how it comes")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a parcel whose buffers are none: {error}") from None
    return parcel


def read_release(body: Buffer) -> Release:
    """The Release of a body. Raises ProtocolError."""
    release = _read(Release, body)
    if type(release.blocks) is not list:
        raise ProtocolError("a release with a field of a wrong type")
    for block in release.blocks:
        try:
            segment, offset, size, generation = block
            if type(block) is not list or not type(segment) is type(offset) is type(size) is type(generation) is int:
                raise TypeError("one that is none")
        except (TypeError, ValueError):
            raise ProtocolError(f"a release of what is no block: {shown(block)}") from None
    return release


def write_chunk(chunk: Chunk) -> bytes:
    """The body of a Chunk."""
    return _CHUNK.pack(*chunk)


def read_chunk(body: Buffer) -> Chunk:
    """The Chunk of a body. Raises ProtocolError."""
    try:
        return Chunk(*_CHUNK.unpack(body))
    except struct.error:
        raise ProtocolError("a chunk that does not say where it belongs") from None


def _read(kind: type[M], body: Buffer) -> M:
    fields = unpack(body)
    if len(fields) != len(kind._fields):
        raise ProtocolError(f"a {kind.__name__} of {len(fields)} fields, which has {len(kind._fields)}")
    message: M = _new(kind, fields)
    return message


def _check_values(values: list[Any]) -> None:
    """See that the values are what `write_plain` makes of some. Raises ProtocolError."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            continue
        if not (
            (kind is list and NUMBERS.issuperset(map(type, value)))
            or (kind is dict and NUMBERS.issuperset(map(type, value.values())) and _KEYS.issuperset(map(type, value)))
        ):
            raise ProtocolError(f"a message with {shown(value)} of more than numbers among its plain values")


def _are_ints(values: Sequence[object]) -> bool:
    return all(type(value) is int for value in values)


#: How a body of each kind is read.
READERS: dict[int, Callable[[Buffer], tuple[object, ...]]] = {
    Kind.CALL: read_call,
    Kind.REPLY: lambda body: Reply(read_values(body)),
    Kind.ERROR: read_error,
    Kind.ITEM: lambda body: Item(read_values(body)),
    Kind.CANCEL: lambda body: Cancel(read_cancel(body)),
    Kind.CREDIT: lambda body: Credit(read_credit(body)),
    Kind.GOODBYE: lambda body: Goodbye(read_goodbye(body)),
    Kind.CHANNEL: read_channel,
    Kind.PARCEL: read_parcel,
    Kind.CHUNK: read_chunk,
    Kind.RELEASE: read_release,
}


def read(kind: int, body: Buffer) -> tuple[object, ...]:
    """The message of that kind that a body is. Raises ProtocolError; also for a kind whose body is not read here."""
    declared = CLASSES.get(kind)
    if declared is None:
        raise ProtocolError(f"a message of kind {kind}, which is not read here")
    reader = READERS.get(kind)
    if reader is not None:
        return reader(body)
    if len(body):
        raise ProtocolError(f"a {declared.__name__} with a body of {len(body)} bytes, which has none")
    return declared()


def _shown(fields: Sequence[object]) -> str:
    # Their types alone: a value may be long, and is not ours to show.
    return ", ".join(type(field).__name__ for field in fields[:8])
