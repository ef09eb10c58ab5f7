"""What other workers say of an `_all_gather` before this worker has come to it. It is kept for them, in bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from ....errors import Overloaded

MOST = 256  # gatherings of one member, so that one far ahead of this worker is served as well
_ENTRY = 256  # bytes that an entry of a table takes, beside what is in it

Said = bytes | dict[str, bytes]


class _Kept(NamedTuple):
    """One of them. name: of the worker that has said it; None if that was this process itself. size: its bytes."""

    name: str | None
    said: Said
    size: int


class Arrivals:
    """What was said of gatherings that this worker has not begun, by who has said it and by sequence id.

    A worker's object stands as bytes, what a leader has gathered as a table. The lock is that of the gatherings.
    """

    def __init__(self) -> None:
        self._kept: dict[int | None, dict[str, _Kept]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def keep(self, member: int | None, name: str | None, sequence_id: str, said: Said, most: int) -> None:
        """Keep what the member of that id has said. most: bytes, of all that is kept for it.

        Overloaded: it has as many gatherings here, or bytes. AssertionError: it has said something of this one before.
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
        """What was said of that one, by the names of those who have said it; it is kept no more."""
        found = [kept.pop(sequence_id) for kept in self._kept.values() if sequence_id in kept]
        self._kept = {member: kept for member, kept in self._kept.items() if kept}
        return [(each.name, each.said) for each in found]

    def forget(self, is_gone: Callable[[int], bool] = lambda _: True) -> None:
        """Let go of what members have said that are gone; of everything by default."""
        self._kept = {member: kept for member, kept in self._kept.items() if member is not None and not is_gone(member)}


def _size(said: Said) -> int:
    if isinstance(said, bytes):
        return sys.getsizeof(said)
    return sys.getsizeof(said) + sum(_ENTRY + sys.getsizeof(name) + sys.getsizeof(obj) for name, obj in said.items())
