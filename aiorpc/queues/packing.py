"""Packs an item of a queue at its producer and unpacks it at its getter; the owner of the queue does not read it.

`put` packs the item: it raises the errors, and later changes of the object do not matter. A packed item is the body of
a message followed by its buffers. A small one travels with the put. A larger one stays with the worker that put it
(`items`), in lendable memory if there is room (`Memory.keep`). An item with references or device tensors inside stays
there unpacked. The getter fetches it from there (`hand_over`).

The producer does not know who the getter will be. What the producer's main module defines goes by name to a worker that
runs the same module, and by value to any other. So an item that names such a thing is packed in both forms, and the
getter takes its own. All other items have one form, as have all items of a group of fixed size whose members run the
same main module: writing by value takes many times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy
import torch
from msgspec import Meta

from .. import foreign
from ..channels.accelerator import DeviceBuffer
from ..channels.arena import Span, lay_out
from ..channels.segments import Bytes
from ..errors import ProtocolError, RpcUsageError, SerializationError
from ..protocol.codec import load_main
from ..protocol.frames import MAX_SEGMENTS
from ..protocol.messages import Reply, Values, read_values, write
from ..protocol.reference_messages import PassedReference
from ..protocol.trace_context import TraceContext, valid
from ..runtime.caller.peer import Peer
from ..runtime.calls import declared
from ..runtime.calls.functions import carries, inline, system
from ..runtime.calls.values import Results, decode, encode
from ..runtime.node import Node, registry
from .items import MOST, SMALL, KeptItem, Named, kept_of

#: The most bytes of packed items in a message of more than one item. They stay below the limit of a frame.
TOGETHER = 8 * SMALL
# Bytes of the body, and the number of buffers; the bytes of each follow.
_HEAD = struct.Struct("<QQ")
# A pickle that has something by name from the main module contains this.
_BY_NAME = load_main.__name__.encode()
# The body of an item in two forms: the producer's main module; the body for workers that run it; the body for all
# others, or why there is none; the number of buffers of each (the first ones, the last ones).
_FORMS = (str, bytes, bytes | str, int, int)


def pack(
    item: Any,
    here: Peer,
    owner: Peer,
    others: Callable[[], bool],
    copy: bool,
    keep: Callable[[int], torch.Tensor],
    trace: TraceContext | None = None,
) -> bytes | KeptItem:
    """Pack an item for a queue of `owner`. Any thread. Raises SerializationError.

    here: this worker; the item is written as if for itself, because the getter is not known yet. others: returns
    whether a worker that runs another main module may get it. copy: whether an item that stays here is packed now; if
    not, it is written when it is fetched. keep: returns memory of so many bytes for an item that stays here. trace: the
    trace context in which it is put, which is packed with it.
    """
    values = [item] if trace is None else [item, *trace]
    body, buffers, out = encode(Reply(Values(values)), here, owner.route)
    if out is not None or DeviceBuffer in map(type, buffers):
        if out is not None:  # references can only be written for a known getter
            out.unsend()
        return KeptItem(None, item, trace=trace)
    if _BY_NAME in body and others():
        forms = _in_two_forms(values, body, buffers, here, owner)
        if forms is None:
            return KeptItem(None, item, trace=trace)
        body, buffers = forms
    layout = layout_of(len(body), [*map(len, buffers)])
    size = layout.size
    if size <= min(SMALL, owner.max_body // 16):
        small = bytearray(size)
        join(body, buffers, layout, numpy.frombuffer(small, numpy.uint8))
        return bytes(small)
    if not copy:
        return KeptItem(None, item, size, trace)
    if size > here.max_segment:  # no worker could take it from here
        raise SerializationError(
            f"is too large: it is kept in one piece of {size} bytes, and the limit is {here.max_segment} "
            "(max_tensor_bytes). Put less at a time, or with copy=False"
        )
    packed = keep(size)
    join(body, buffers, layout, packed.numpy())
    return KeptItem(packed, None, size)


def _in_two_forms(
    values: list[Any], body: bytes, buffers: Sequence[Any], here: Peer, owner: Peer
) -> tuple[bytes, Sequence[object]] | None:
    """Body and buffers of an item that names what our main module defines, in both forms.

    values: the item, and its trace context, if any. body, buffers: of the form for workers that run our main module.
    None if the other form has references or device tensors. If the other form cannot be written, only workers with our
    main module can read the item; if the owner of the queue has another one, that raises SerializationError.
    """
    other: bytes | str
    others: Sequence[Any]
    try:
        other, others, out = encode(Reply(Values(values)), here, owner.route, other_main=True)
    except SerializationError as error:
        if not owner.same_main:
            raise
        other, others, out = foreign.text_of(error), (), None
    if out is not None or DeviceBuffer in map(type, others):
        if out is not None:
            out.unsend()
        return None
    if other == body:  # only a text looked like a name
        return body, buffers
    # A class that goes by value may bring tensors of its own. Most do not: then both forms share the buffers.
    same = not others or _are_equal(buffers, others)
    assert here.record is not None, "a worker knows itself"
    forms = [here.record.main, body, other, len(buffers), len(others)]
    return write(Reply(Values(forms))), buffers if same else [*buffers, *others]


def _are_equal(buffers: Sequence[Any], others: Sequence[Any]) -> bool:
    if [*map(len, buffers)] != [*map(len, others)]:
        return False
    return all(
        numpy.array_equal(numpy.frombuffer(one, numpy.uint8), numpy.frombuffer(other, numpy.uint8))
        for one, other in zip(buffers, others, strict=True)
    )


def join(body: bytes, buffers: Sequence[Any], layout: Layout, into: Bytes) -> None:
    """Write an item: the lengths of its parts, its body, and its buffers, each aligned."""
    spans = layout.buffers
    head = struct.pack(f"<QQ{len(spans)}Q", len(body), len(spans), *[length for _, length in spans]) + body
    into[: len(head)] = numpy.frombuffer(head, numpy.uint8)
    for (start, length), each in zip(spans, buffers, strict=True):
        # numpy copies without the GIL.
        into[start : start + length] = numpy.frombuffer(each, numpy.uint8)


def unpack(
    packed: bytes | torch.Tensor, safe: bool, main: str, traced: Callable[[TraceContext], object] | None = None
) -> Any:
    """The item, in the memory that it came in. safe: whether pickles are refused. main: our main module. traced: called
    with the trace context in which it was put, if it has one.

    Raises ProtocolError for invalid bytes, SerializationError for an item that only workers with another main module
    can read, and the errors of unpickling.
    """
    if type(packed) is not bytes and not (type(packed) is torch.Tensor and packed.dtype is torch.uint8):
        raise ProtocolError("an item of a queue that is no bytes")
    # A program may write to what it gets, so `bytes` is copied.
    memory = memoryview(bytearray(packed)) if isinstance(packed, bytes) else _memory(packed)
    body, buffers = split(memory)
    read = read_values(body)
    if len(read.values) == len(_FORMS):
        body, buffers = choose(read.values, buffers, main)
        read = read_values(body)
    values = decode(read, buffers, _no_references, None, None, safe)
    if len(values) == 3 and type(values[1]) is type(values[2]) is str:
        trace = valid(TraceContext(values[1], values[2]))
        if traced is not None and trace is not None:
            traced(trace)
    elif len(values) != 1:
        raise ProtocolError(f"an item of a queue that is {len(values)} values")
    return values[0]


def split(packed: memoryview) -> tuple[bytes, list[memoryview]]:
    """The body and the buffers of an item. Raises ProtocolError if it is none."""
    try:
        body, count = _HEAD.unpack_from(packed)
        if count > 2 * MAX_SEGMENTS:  # of two forms
            raise ProtocolError(f"an item of a queue with {count} buffers; the limit is {2 * MAX_SEGMENTS}")
        lengths = struct.unpack_from(f"<{count}Q", packed, _HEAD.size)
    except struct.error as error:
        raise ProtocolError(f"an invalid item of a queue: {error}") from None
    layout = layout_of(body, lengths)
    if layout.size != len(packed):
        raise ProtocolError(f"an item of a queue of {len(packed)} bytes that says it has {layout.size}")
    buffers = [packed[start : start + length] for start, length in layout.buffers]
    return bytes(packed[layout.body : layout.body + body]), buffers


def choose(forms: Sequence[Any], buffers: list[memoryview], main: str) -> tuple[bytes, list[memoryview]]:
    """Body and buffers of an item in two forms, in the form for workers that run the main module `main`.

    Raises ProtocolError for invalid forms, and SerializationError if there is no such form.
    """
    if not all(isinstance(form, kind) for form, kind in zip(forms, _FORMS, strict=True)):
        raise ProtocolError("an item of a queue in two invalid forms")
    origin, named, other, count, others = forms
    if not (0 <= count <= len(buffers) and 0 <= others <= len(buffers)):
        raise ProtocolError(f"an item of a queue with {count} and {others} of {len(buffers)} buffers")
    if origin == main:
        return named, buffers[:count]
    if type(other) is not bytes:
        raise SerializationError(
            f"its producer runs another main module, which defines what is in it, and by value the item {other}"
        )
    return other, buffers[len(buffers) - others :]


class Layout(NamedTuple):
    """Where the body of an item starts, and the spans of its buffers. size: bytes of the whole item."""

    body: int
    buffers: list[Span]
    size: int


def layout_of(body: int, lengths: Sequence[int]) -> Layout:
    """The layout of an item. body, lengths: bytes of its body and of each of its buffers."""
    start = _HEAD.size + 8 * len(lengths)
    return Layout(start, *lay_out(lengths, start + body))


def _memory(packed: torch.Tensor) -> memoryview:
    array: Any = packed.numpy()
    return memoryview(array)


def _no_references(passed: Sequence[PassedReference]) -> Sequence[object]:
    raise ProtocolError("an item of a queue that was packed with references")


# --- from the worker that has it ------------------------------------------------------------------------------------


@system
@carries
@inline
def hand_over(named: Annotated[list[Named], Meta(max_length=MOST)]) -> Results:
    """Handler: hand over items that this worker keeps: which of them are packed (`PACKED`), and the items.

    A system call, because the limits of users' calls could drop items that were taken from a queue.
    """
    node: Node = registry.get()
    try:
        items = kept_of(node.references, named)
    except ValueError:
        raise RpcUsageError("hand_over is for items of queues that this worker has put, and this is none") from None
    packed = [item.trace or False if item.packed is None else True for item in items]
    return Results((declared.pack(packed), *(item.value if item.packed is None else item.packed for item in items)))
