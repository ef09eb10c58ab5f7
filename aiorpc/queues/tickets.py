"""Tickets of items: the owner of a queue recognizes items that it has given, without keeping anything of them.

A ticket is a number and a message authentication code (MAC) of the number, the getter and the item. The key never
leaves the owner. An item comes back with its ticket, and each number comes back at most once.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b

from .items import Item, Kept, Taken

TICKET = 16  # bytes
# How many items that one worker put back the owner remembers; it refuses them if they come twice.
_MOST_RETURNED = 65_536
_NUMBER = struct.Struct("<Q")
_SEALED = struct.Struct("<QQ?")  # the getter, the number, whether the item stays with its producer; the item follows


class Tickets:
    """Makes and checks the tickets of one queue, at its owner."""

    __slots__ = ("_count", "_keyed", "_used")

    def __init__(self) -> None:
        self._keyed = blake2b(key=secrets.token_bytes(32), digest_size=TICKET - _NUMBER.size)
        self._count = 0
        # By place: the numbers that the worker there has put back, and the number up to which all are refused.
        self._used: dict[int, tuple[dict[int, None], int]] = {}

    def issue(self, worker: int, items: Sequence[Item]) -> bytes:
        """The tickets of these items, which are given to that worker."""
        for item in items:
            if type(item) is Kept:
                item.reference._name()  # a borrowed reference gets the name that it is sent under
        first = self._count + 1
        self._count += len(items)
        return b"".join(self._ticket(worker, first + place, item) for place, item in enumerate(items))

    def redeem(self, worker: int, place: int, taken: Sequence[Taken]) -> bool:
        """Whether the worker was given all these items and has put none of them back. From now on it has.

        worker: its unique id, so a later worker in its place has nothing to put back.
        place: its place, for `forget`.
        """
        used, floor = self._used.get(place, ({}, 0))
        numbers = {_NUMBER.unpack_from(each.ticket)[0] for each in taken}
        if len(numbers) < len(taken) or min(numbers, default=1) <= floor or not used.keys().isdisjoint(numbers):
            return False
        for ticket, item in taken:
            if not secrets.compare_digest(ticket, self._ticket(worker, _NUMBER.unpack_from(ticket)[0], item)):
                return False
        for number in numbers:
            used[number] = None
            if len(used) > _MOST_RETURNED:
                oldest = next(iter(used))
                del used[oldest]
                floor = max(floor, oldest)
        self._used[place] = used, floor
        return True

    def forget(self, place: int) -> None:
        """Forget a gone worker."""
        self._used.pop(place, None)

    def _ticket(self, worker: int, number: int, item: Item) -> bytes:
        kept = type(item) is Kept
        content = repr((*item.reference._rref, item.place)).encode() if kept else item
        if type(content) is not bytes:
            return bytes(TICKET)  # `GoneItem` does not come back
        seal = self._keyed.copy()  # half the time of a new one with the key
        seal.update(_SEALED.pack(worker, number, kept) + content)
        return _NUMBER.pack(number) + seal.digest()


def split_tickets(tickets: bytes) -> list[bytes]:
    """The tickets of several items, one by one."""
    return [tickets[start : start + TICKET] for start in range(0, len(tickets), TICKET)]
