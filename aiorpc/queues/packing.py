"""An item of a queue, from the worker that puts it to the one that gets it; whoever has it meanwhile does not read it.

An item is packed as it is put: its errors are raised there, and what happens to the object afterwards does not matter.
What is packed is the body of a message and its buffers, one behind the other. If that is small it travels with the put.
Else it stays with the worker that has put it (`items`), where it can be lent from if there is room (`Memory.keep`); and
so does an item that has references or tensors on devices inside of it, as itself. Whoever gets the item fetches it from
there (`hand_over`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from ..channels.accelerator import DeviceBuffer
from ..channels.arena import Span, lay_out
from ..channels.segments import Bytes
from ..errors import ProtocolError, RpcUsageError
from ..protocol.frames import MAX_SEGMENTS
from ..protocol.messages import Reply, read_values
from ..protocol.reference_messages import PassedReference
from ..runtime.caller.peer import Peer
from ..runtime.calls.functions import inline, system
from ..runtime.calls.values import Results, decode, encode
from ..runtime.node import Node, registry
from .items import KeptItem, kept_of

#: Bytes of a packed item that travels with the put; longer ones stay with their producer.
SMALL = 32 * 1024
#: Bytes of packed items in one message, if there is more than one item. Together they stay below what a frame may have.
TOGETHER = 8 * SMALL
# Bytes of the body, and how many buffers there are; the bytes of each follow.
_HEAD = struct.Struct("<QQ")


def pack(item: Any, owner: Peer, copy: bool, keep: Callable[[int], torch.Tensor]) -> bytes | KeptItem:
    """An item for a queue of `owner`. Any thread. Raises SerializationError; nothing was sent then.

    Who gets the item is not known yet; it is written as for the owner. copy: whether one that is kept is kept as it is
    now; else it is written, as it is then, when it is fetched. keep: memory of so many bytes for one that is kept.
    """
    body, buffers, out = encode(Reply, (), [item], owner, owner.route)
    if out is not None or DeviceBuffer in map(type, buffers):
        if out is not None:  # references: whoever gets the item has to be named in them
            out.unsend()
        return KeptItem(None, item)
    layout = layout_of(len(body), [*map(len, buffers)])
    size = layout.size
    if size <= min(SMALL, owner.max_body // 16):
        small = bytearray(size)
        join(body, buffers, layout, numpy.frombuffer(small, numpy.uint8))
        return bytes(small)
    if not copy:
        return KeptItem(None, item, size)
    packed = keep(size)
    join(body, buffers, layout, packed.numpy())
    return KeptItem(packed, None, size)


def join(body: bytes, buffers: Sequence[Any], layout: Layout, into: Bytes) -> None:
    """Write an item: how long its parts are, its body, and its buffers, each where it is aligned."""
    spans = layout.buffers
    head = struct.pack(f"<QQ{len(spans)}Q", len(body), len(spans), *[length for _, length in spans]) + body
    into[: len(head)] = numpy.frombuffer(head, numpy.uint8)
    for (start, length), each in zip(spans, buffers, strict=True):
        # numpy's, as other threads run while it copies.
        into[start : start + length] = numpy.frombuffer(each, numpy.uint8)


def unpack(packed: bytes | torch.Tensor, safe: bool) -> Any:
    """The item again, in the memory that it came in. safe: whether no pickles are read.

    Raises ProtocolError for what is no item, and whatever unpickling raises.
    """
    if type(packed) is not bytes and not (type(packed) is torch.Tensor and packed.dtype is torch.uint8):
        raise ProtocolError("an item of a queue that is no bytes")
    # What is given to a program may be written to, and bytes may not.
    memory = memoryview(bytearray(packed)) if isinstance(packed, bytes) else _memory(packed)
    body, buffers = split(memory)
    values = decode(read_values(body), buffers, _no_references, None, None, safe)
    if len(values) != 1:
        raise ProtocolError(f"an item of a queue that is {len(values)} values")
    return values[0]


def split(packed: memoryview) -> tuple[bytes, list[memoryview]]:
    """The body and the buffers of an item. Raises ProtocolError if it is none."""
    try:
        body, count = _HEAD.unpack_from(packed)
        if count > MAX_SEGMENTS:
            raise ProtocolError(f"an item of a queue with {count} buffers; the limit is {MAX_SEGMENTS}")
        lengths = struct.unpack_from(f"<{count}Q", packed, _HEAD.size)
    except struct.error as error:
        raise ProtocolError(f"an item of a queue that is none: {error}") from None
    layout = layout_of(body, lengths)
    if layout.size != len(packed):
        raise ProtocolError(f"an item of a queue of {len(packed)} bytes that says it has {layout.size}")
    buffers = [packed[start : start + length] for start, length in layout.buffers]
    return bytes(packed[layout.body : layout.body + body]), buffers


class Layout(NamedTuple):
    """Where the body of an item starts, and the spans of its buffers. size: of all of it, in bytes."""

    body: int
    buffers: list[Span]
    size: int


def layout_of(body: int, lengths: Sequence[int]) -> Layout:
    """Where the parts of an item lie; body, lengths: bytes of its body and of each of its buffers."""
    start = _HEAD.size + 8 * len(lengths)
    return Layout(start, *lay_out(lengths, start + body))


def _memory(packed: torch.Tensor) -> memoryview:
    array: Any = packed.numpy()
    return memoryview(array)


def _no_references(passed: Sequence[PassedReference]) -> Sequence[Any]:
    raise ProtocolError("an item of a queue that was packed with references")


# --- from the worker that has it ------------------------------------------------------------------------------------


@system
@inline
def hand_over(*wanted: Any) -> Results:
    """Items of queues that this worker has kept, for whoever holds references to them (`items.to_named`).

    It is the runtime's own, as what was taken from a queue would be lost where users' calls are too many.
    """
    node: Node = registry.get()
    given: list[Any] = [0]
    try:
        for item in kept_of(node.references, wanted):
            given += (True, item.packed) if item.packed is not None else (False, item.value)
    except ValueError:
        raise RpcUsageError("hand_over is for items of queues that this worker has put, and this is none") from None
    return Results(given)
