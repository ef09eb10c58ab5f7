"""Tickets of items: by them the owner of a queue knows what it has given, without keeping anything of it.

A ticket is a number and a seal over that, the worker that was given the item, and the item. The key of the seals never
leaves the owner. An item that comes back has to bear its ticket, and each number comes back once.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b

from .items import Item, Kept, Taken

TICKET = 16  # bytes
# Items that one worker has put back, the last ones, which are known again if they come twice.
_MOST_RETURNED = 65_536
_NUMBER = struct.Struct("<Q")
_SEALED = struct.Struct("<QQ?")  # the worker, the number, and whether the item is named or there; the item follows


class Tickets:
    """What the owner gives with each item: the number of that, and a seal. The key never leaves the owner."""

    __slots__ = ("_count", "_keyed", "_used")

    def __init__(self) -> None:
        self._keyed = blake2b(key=secrets.token_bytes(32), digest_size=TICKET - _NUMBER.size)
        self._count = 0
        # What the worker in each place has put back, and below which number nothing is taken back any more.
        self._used: dict[int, tuple[dict[int, None], int]] = {}

    def issue(self, worker: int, items: Sequence[Item]) -> bytes:
        """The tickets of these items, which are given to that worker."""
        for item in items:
            if type(item) is Kept:
                item.reference._name()  # where it was lent to this worker, it gets the name that it is sent under
        first = self._count + 1
        self._count += len(items)
        return b"".join(self._ticket(worker, first + place, item) for place, item in enumerate(items))

    def redeem(self, worker: int, place: int, taken: Sequence[Taken]) -> bool:
        """Whether that worker was given all of these and has put none of them back; from now on it has.

        worker: its id, which no other one of the group ever has, so that who takes its place has nothing to put back.
        place: by which it is forgotten.
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
        """The worker in that place is gone."""
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
