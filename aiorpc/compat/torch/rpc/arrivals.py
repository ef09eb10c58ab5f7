"""What other workers say of an `_all_gather` before this worker has come to it. It is kept for them, in bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from ....errors import Overloaded

MOST = 256  # gatherings of one member: it may be far ahead of this worker
_ENTRY = 256  # bytes of an entry of a table, without its content

Said = bytes | dict[str, bytes]


class _Kept(NamedTuple):
    """A kept message. name: of its worker; None for this process itself. size: its bytes."""

    name: str | None
    said: Said
    size: int


class Arrivals:
    """Messages for gatherings that this worker has not begun, by worker and sequence id.

    A worker's object is kept as bytes, a leader's result as a table. Use it with the lock of the gatherings.
    """

    def __init__(self) -> None:
        self._kept: dict[int | None, dict[str, _Kept]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def keep(self, member: int | None, name: str | None, sequence_id: str, said: Said, most: int) -> None:
        """Keep a message of a member. most: the most bytes of all its messages.

        Raises Overloaded for too many gatherings or bytes of the member; AssertionError for its second message for a
        gathering.
        """
        kept = self._kept.get(member, {})
        if sequence_id in kept:
            raise AssertionError(f"{name} reported intent sequence id twice, of an _all_gather that has not begun. ")
        if len(kept) >= MOST:
            raise Overloaded(f"worker {name!r} has come to {MOST} of _all_gather to which this one has not")
        size = _ENTRY + sys.getsizeof(sequence_id) + _size(said)
        if sum(each.size for each in kept.values()) + size > most:
            raise Overloaded(
                f"worker {name!r} has come to {len(kept)} of _all_gather to which this one has not, and {size} bytes "
                "more of its objects are too many (max_queued_bytes)"
            )
        self._kept.setdefault(member, kept)[sequence_id] = _Kept(name, said, size)

    def take(self, sequence_id: str) -> list[tuple[str | None, Said]]:
        """Remove and return the messages for a gathering, by the names of their workers."""
        found = [kept.pop(sequence_id) for kept in self._kept.values() if sequence_id in kept]
        self._kept = {member: kept for member, kept in self._kept.items() if kept}
        return [(each.name, each.said) for each in found]

    def forget(self, is_gone: Callable[[int], bool] = lambda _: True) -> None:
        """Drop the messages of gone members; by default all messages."""
        self._kept = {member: kept for member, kept in self._kept.items() if member is not None and not is_gone(member)}


def _size(said: Said) -> int:
    if isinstance(said, bytes):
        return sys.getsizeof(said)
    return sys.getsizeof(said) + sum(_ENTRY + sys.getsizeof(name) + sys.getsizeof(obj) for name, obj in said.items())
