"""Items of queues as they travel and as they wait, and the declared messages of queues.

A small item is its bytes. A larger one stays with the worker that has put it, its producer: several items that are put
together are the value of one reference (`KeptItems`), because each reference costs some messages. A message has a list
of items, in which an item that stays with its producer is `At` a place of one of the references behind the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from ..protocol.identity import NAME_LIMIT
from ..runtime.references.references import References
from ..runtime.references.rref import RRef

#: Items, and bytes of them, that one reference may have: all stay in memory until the last of them was got. The bytes
#: that are no power of two are for what is packed with the tensors, so that eight of 1 MB have a place.
KEPT_ITEMS, KEPT_BYTES = 16, (8 << 20) + 16 * 1024
#: Bytes of a packed item that travels with the put; longer ones stay with their producer.
SMALL = 32 * 1024
#: Items that one call puts or takes.
MOST = 1024


class KeptItem:
    """An item that stays with its producer. packed: its bytes; None: it is kept as it is, in `value`.

    size: about how many bytes it has; `KEPT_BYTES` where that is not known.
    """

    __slots__ = ("packed", "size", "value")

    def __init__(self, packed: torch.Tensor | None, value: object = None, size: int = KEPT_BYTES) -> None:
        self.packed: torch.Tensor | None = packed
        self.value: object = value
        self.size: int = size


class KeptItems(tuple[KeptItem, ...]):
    """The value of a reference: items that were put together."""

    __slots__ = ()


class Kept(NamedTuple):
    """An item that stays with its producer: the reference to the items there, and which of them it is.

    producer: the name of that worker, where the owner of the queue has sent it; empty at the owner.
    """

    reference: RRef[object]
    place: int
    producer: str = ""


class At(Struct, frozen=True, array_like=True, tag=0):
    """In a message, an item that stays with its producer: the number of a reference behind it, and the place there."""

    reference: Annotated[int, Meta(ge=0, lt=MOST)]
    place: Annotated[int, Meta(ge=0, lt=KEPT_ITEMS)]


class GoneItem(Struct, frozen=True, array_like=True, tag=1):
    """In place of an item: its producer, of that name, is gone, and the item with it. It counts as finished."""

    worker: Annotated[str, Meta(max_length=NAME_LIMIT)]


# In a queue and where it is got: bytes, `Kept` or `GoneItem`; where it is put, and not sent yet, also `KeptItem`.
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
    """An item for its producer, which has it: number and key of the reference to it (`rref`), and the place there.

    The getter holds that reference until the answer has come; to send it along would only cost messages that count it.
    """

    number: int
    key: int
    place: Annotated[int, Meta(ge=0, lt=KEPT_ITEMS)]


PUT: Decoder[Put] = Decoder(Put)
TAKEN: Decoder[Items | Shut] = Decoder(Items | Shut)
#: Reply to `hand_over`, before the items: which of them are packed.
PACKED: Decoder[list[bool]] = Decoder(list[bool])


class Taken(NamedTuple):
    """An item that was got. ticket: by it the owner of the queue knows the item again if it is put back."""

    ticket: bytes
    item: Item


def to_wire(items: Iterable[Item]) -> tuple[list[bytes | At | GoneItem], list[RRef[object]]]:
    """The list of items for a message, and the references that go behind it. None of the items is a `KeptItem`."""
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
    """The items of a message. producers: names of workers by id; None at the owner, which needs none.

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
    """The items that are named, here at their producer. references: of this worker.

    ValueError for what names no item of a queue; RpcError if the value is not here any more.
    """
    items: list[KeptItem] = []
    for each in named:
        kept: Any = references.value(references.engine.id, each.number, each.key).value()
        if type(kept) is not KeptItems or each.place >= len(kept):
            raise ValueError("no item of a queue")
        items.append(kept[each.place])
    return items


def gone_with(item: Kept) -> str | None:
    """The name of the producer, if it is gone as far as is known here; None if the item can be had."""
    return None if item.reference._broken is None else item.reference.owner_name()
