"""Dicts and sets whose keys a peer chose.

Python keys the hashes of text and bytes only (PYTHONHASHSEED). A sender can choose numbers, or tuples of them, that
collide in a table, and a megabyte of those would keep the interpreter busy for hours. Only filling the table shows how
long that takes, as the order of its places is internal to the interpreter. Tables are therefore filled in pieces, and
the processor time for these is bounded by the length of the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from time import thread_time
from typing import TypeVar

from ..errors import SerializationError

K = TypeVar("K")
T = TypeVar("T")

# Entries that take hardly any time with any hashes.
_FEW = 16
# Entries between two checks of the clock: one entry takes at most as many steps as the table has entries.
_PIECE = 64
# Seconds of processor time for the tables of one message, and for each of its bytes. An honest entry has five bytes or
# more, and takes 0.1 to 2 microseconds, so a slow or busy machine stays below the limit.
_ONCE, _PER_BYTE = 0.5, 1e-6
_TEXT = frozenset((str, bytes))
_KEY = itemgetter(0)


class Tables:
    """Makes the tables of one message. On one thread."""

    __slots__ = ("_left",)

    def __init__(self, size: int) -> None:
        """size: bytes of the message."""
        self._left = _ONCE + _PER_BYTE * size

    def mapping(self, pairs: Sequence[tuple[object, object]]) -> dict[object, object]:
        """A dict of these pairs. Raises the errors of `update`."""
        made: dict[object, object] = {}
        self.update(made, pairs)
        return made

    def members(self, items: Sequence[T]) -> set[T]:
        """A set of these items. Raises the errors of `add`."""
        made: set[T] = set()
        self.add(made, items)
        return made

    def update(self, table: dict[K, T], pairs: Sequence[tuple[K, T]]) -> None:
        """Add pairs to a dict.

        Raises SerializationError for keys that collide, and TypeError for keys without a hash.
        """
        if len(table) + len(pairs) <= _FEW or _TEXT.issuperset(map(type, map(_KEY, pairs))):
            table.update(pairs)
        else:
            self._fill(table.update, pairs)

    def add(self, table: set[T], items: Sequence[T]) -> None:
        """Add items to a set. Raises the errors of `update`."""
        if len(table) + len(items) <= _FEW or _TEXT.issuperset(map(type, items)):
            table.update(items)
        else:
            self._fill(table.update, items)

    def _fill(self, update: Callable[[Iterable[T]], object], items: Sequence[T]) -> None:
        for at in range(0, len(items), _PIECE):
            begin = thread_time()
            update(items[at : at + _PIECE])
            self._left -= thread_time() - begin
            if self._left < 0:
                raise SerializationError(
                    "has keys whose hashes collide: a dict or a set of them would take a time that grows with the "
                    "square of their number. Send lists, or take text for keys"
                )
