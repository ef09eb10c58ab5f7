"""Items of queues as they travel and as they wait, and the declared messages of queues.

A small item travels as bytes. A larger one stays with the worker that put it, its producer. Several items that are put
together are the value of one reference (`KeptItems`), because each reference costs some messages. A message has a list
of items and the references after it; in the list, `At` stands for an item that stays with its producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from ..protocol.identity import NAME_LIMIT
from ..protocol.trace_context import TraceContext
from ..runtime.references.references import References
from ..runtime.references.rref import RRef

#: The most items and bytes of one reference: all stay in memory until the last of them was got. The 16 KiB on top are
#: for what is packed with tensors: eight items of 1 MiB fit.
KEPT_ITEMS, KEPT_BYTES = 16, (8 << 20) + 16 * 1024
#: The most bytes of a packed item that travels with the put; a larger one stays with its producer.
SMALL = 32 * 1024
#: The most items that one call puts or takes.
MOST = 1024


class KeptItem:
    """An item that stays with its producer. packed: its bytes; None if it is kept unpacked, in `value`.

    size: its approximate bytes; `KEPT_BYTES` if unknown. trace: of an unpacked one, the trace context in which it was
    put.
    """

    __slots__ = ("packed", "size", "trace", "value")

    def __init__(
        self,
        packed: torch.Tensor | None,
        value: object = None,
        size: int = KEPT_BYTES,
        trace: TraceContext | None = None,
    ) -> None:
        self.packed: torch.Tensor | None = packed
        self.value: object = value
        self.size: int = size
        self.trace: TraceContext | None = trace


class KeptItems(tuple[KeptItem, ...]):
    """The value of a reference: items that were put together."""

    __slots__ = ()


class Kept(NamedTuple):
    """An item that stays with its producer: the reference to the items there, and its place among them.

    producer: the name of that worker; empty at the owner of the queue.
    """

    reference: RRef[object]
    place: int
    producer: str = ""


class At(Struct, frozen=True, array_like=True, tag=0):
    """In a message, an item that stays with its producer: the number of its reference, and its place there."""

    reference: Annotated[int, Meta(ge=0, lt=MOST)]
    place: Annotated[int, Meta(ge=0, lt=KEPT_ITEMS)]


class GoneItem(Struct, frozen=True, array_like=True, tag=1):
    """In place of an item: its producer, of that name, is gone, and the item with it. It counts as finished."""

    worker: Annotated[str, Meta(max_length=NAME_LIMIT)]


# At the owner and at the getter: bytes, `Kept` or `GoneItem`; at the producer, before it is sent, also `KeptItem`.
Item = Any
#: The items of a call that puts some, or puts them back.
PutItems = Annotated[list[Annotated[bytes, Meta(max_length=SMALL)] | At], Meta(max_length=MOST)]


class Put(Struct, frozen=True, array_like=True):
    """Reply to a put: the first `count` items are in the queue. The others had no room; shut: they never will."""

    count: Annotated[int, Meta(ge=0)]
    shut: bool = False


class Items(Struct, frozen=True, array_like=True, tag=0):
    """Reply to a take: items with their tickets (`tickets`), and the names of their producers by id."""

    tickets: bytes
    producers: dict[int, Annotated[str, Meta(max_length=NAME_LIMIT)]]
    items: Annotated[list[bytes | At | GoneItem], Meta(max_length=MOST)]


class Shut(Struct, frozen=True, array_like=True, tag=1):
    """Reply to a take: the queue is shut down, and has no more items."""


class Named(Struct, frozen=True, array_like=True):
    """An item as its getter names it to its producer: number and key of its reference, and its place there.

    The getter holds the reference until the answer comes, so the message need not count a reference.
    """

    number: int
    key: int
    place: Annotated[int, Meta(ge=0, lt=KEPT_ITEMS)]


PUT: Decoder[Put] = Decoder(Put)
TAKEN: Decoder[Items | Shut] = Decoder(Items | Shut)
#: Reply to `hand_over`, before the items: which of them are packed; for others the trace context, if they have one.
PACKED: Decoder[list[bool | TraceContext]] = Decoder(list[bool | TraceContext])


class Taken(NamedTuple):
    """An item that was got. ticket: the owner of the queue recognizes the item by it if it is put back."""

    ticket: bytes
    item: Item


def to_wire(items: Iterable[Item]) -> tuple[list[bytes | At | GoneItem], list[RRef[object]]]:
    """The list of items for a message, and the references that follow it. None of the items is a `KeptItem`."""
    numbers: dict[int, int] = {}  # by identity: a reference that is sent twice in a message would be counted twice
    references: list[RRef[object]] = []
    sent: list[bytes | At | GoneItem] = []
    for item in items:
        if type(item) is Kept:
            number = numbers.setdefault(id(item.reference), len(references))
            if number == len(references):
                references.append(item.reference)
            sent.append(At(number, item.place))
        else:
            sent.append(item)
    return sent, references


def from_wire(
    sent: Iterable[bytes | At | GoneItem], references: Sequence[RRef[Any]], producers: dict[int, str] | None = None
) -> list[Item]:
    """The items of a message. producers: names of workers by id; None at the owner, which needs no names.

    Raises ValueError for a place without a reference, and for a reference to a worker without a name.
    """
    items: list[Item] = []
    for item in sent:
        if type(item) is not At:
            items.append(item)
        elif item.reference >= len(references):
            raise ValueError("an item of a reference that is not there")
        else:
            reference = references[item.reference]
            name = "" if producers is None else producers.get(reference._owner)
            if name is None:
                raise ValueError("a reference to the value of a worker without a name")
            items.append(Kept(reference, item.place, name))
    return items


def to_named(items: Iterable[Kept]) -> list[Named]:
    """What `kept_of` needs to find these items at their producer."""
    return [Named(*item.reference._rref[1:], item.place) for item in items]


def kept_of(references: References, named: Iterable[Named]) -> list[KeptItem]:
    """The named items, at their producer. references: of this worker.

    Raises ValueError for a reference that is no item of a queue; RpcError if the value is not here any more.
    """
    items: list[KeptItem] = []
    for each in named:
        kept: Any = references.value(references.engine.id, each.number, each.key).value()
        if type(kept) is not KeptItems or each.place >= len(kept):
            raise ValueError("no item of a queue")
        items.append(kept[each.place])
    return items


def gone_with(item: Kept) -> str | None:
    """The name of the producer if this worker knows that it is gone; None if the item can be fetched."""
    return None if item.reference._broken is None else item.reference.owner_name()
