"""Items of queues as they travel and as they wait: small ones as bytes, others at the worker that has put them.

Several items that are put together are the value of one reference (`KeptItems`), as each reference costs some messages.
In a message the references come first and each item behind them is its bytes, or a number: which of the references,
and which of its items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..protocol.identity import NAME_LIMIT
from ..runtime.references.references import References
from ..runtime.references.rref import RRef

#: Items, and bytes of them, that one reference may have: all stay in memory until the last of them was got. The bytes
#: that are no power of two are for what is packed with the tensors, so that eight of 1 MB have a place.
KEPT_ITEMS, KEPT_BYTES = 16, (8 << 20) + 16 * 1024


class KeptItem:
    """An item that stays with the worker that has put it. packed: its bytes; None: it is kept as it is, in `value`.

    size: about how many bytes it has; `KEPT_BYTES` where nobody knows.
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
    """An item of another worker, or of this one: which of those that the reference stands for.

    producer: the name of the worker that has it, as the owner of the queue has told; at the owner itself nothing.
    """

    reference: RRef[object]
    place: int
    producer: str = ""


# What Kept(...) does, without its call into Python.
_new_tuple: Any = tuple.__new__

# In a queue and where it is got: bytes, a `Kept`, or the name of the worker that is gone with it; where it is put, and
# was not sent yet, also a `KeptItem`.
Item = Any
#: What a call that puts items, or puts them back, has at its end (`to_wire`): references, then for each item its bytes,
#: or which item of which reference it is.
Said = RRef[KeptItems] | bytes | int


class Taken(NamedTuple):
    """An item that was got. ticket: by it the owner of the queue knows the item again if it is put back."""

    ticket: bytes
    item: Item


def to_wire(items: Iterable[Item]) -> list[object]:
    """References and items as values of a message. None of them is a `KeptItem`."""
    references: dict[int, int] = {}  # by identity: what a message names twice it would count twice
    first: list[object] = []
    then: list[object] = []
    for item in items:
        if type(item) is Kept:
            index = references.setdefault(id(item.reference), len(first))
            if index == len(first):
                first.append(item.reference)
            item = index * KEPT_ITEMS + item.place
        then.append(item)
    return first + then


def from_wire(values: Sequence[Any], names: dict[object, object] | None = None) -> list[Item]:
    """What `to_wire` was given, and whatever else another worker makes of it. ValueError for what cannot be.

    names: of the owners of the references, by their ids; None where nobody needs them.
    """
    count = 0
    producers: list[str] = []
    while count < len(values) and isinstance(values[count], RRef):
        producer = "" if names is None else names.get(values[count]._owner)
        if type(producer) is not str or len(producer) > NAME_LIMIT:
            raise ValueError("a reference to the value of a worker without a name")
        producers.append(producer)
        count += 1
    items: list[Item] = []
    for value in values[count:]:
        if type(value) is int:
            index, place = divmod(value, KEPT_ITEMS)
            if not 0 <= index < count:
                raise ValueError(f"an item of a reference that is none of {count}")
            value = _new_tuple(Kept, (values[index], place, producers[index]))
        elif type(value) is str and len(value) > NAME_LIMIT:
            raise ValueError("a worker has no name that is so long")
        items.append(value)
    return items


def to_named(items: Iterable[Kept]) -> list[int]:
    """What `kept_of` needs to find these items at the one worker that has them.

    That is no references: whoever asks holds them until the answer is there, and one that were passed would only have
    to be counted and given back.
    """
    named: list[int] = []
    for item in items:
        _, number, key = item.reference._rref
        named += (number, key, item.place)
    return named


def kept_of(references: References, named: Sequence[object]) -> list[KeptItem]:
    """The items that `to_named` was given, here at the worker that has them. references: of this worker.

    ValueError for what cannot name an item; RpcError if the value is not here any more.
    """
    items: list[KeptItem] = []
    kept: Any = ()
    before: Any = None
    numbers = iter(named)
    for number, key, place in zip(numbers, numbers, numbers, strict=True):
        if not type(number) is type(key) is type(place) is int:
            raise ValueError("no numbers")
        if before != (number, key):  # neighbours are mostly of one reference
            kept = references.value(references.engine.id, number, key).value()
            if type(kept) is not KeptItems:
                raise ValueError("no items of a queue")
            before = number, key
        if not 0 <= place < len(kept):
            raise ValueError("no item of a queue")
        items.append(kept[place])
    return items


def gone_with(item: Kept) -> str | None:
    """The name of the worker that has kept an item and is gone; None if it can be had, as far as is known here."""
    return None if item.reference._broken is None else item.reference.owner_name()
