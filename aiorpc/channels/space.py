"""Which bytes of the arena are free: the arithmetic alone. Touches no memory; used by one thread at a time.

Blocks of up to 1 MiB: slots of fixed sizes in slabs of 2 MiB. Longer ones, or if there is no room for a slab: whole
pages of the extents, which join again when they are free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4 * KIB
SLAB = 2 * MIB
# Sizes 2^k and 1.5 * 2^k from 32 KiB to 1 MiB: at most a third of a block is waste.
SLOTS = tuple(sorted([KIB << k for k in range(5, 11)] + [(3 * KIB << k) // 2 for k in range(5, 10)]))


class Place(NamedTuple):
    """Where a block lies and how much room it takes; slab: the slab that contains it."""

    segment: int
    start: int
    room: int
    slab: Slab | None = None


class Slab:
    """2 MiB cut into slots of one size. The slot freed last is used first: its bytes are likely in the cache."""

    __slots__ = ("count", "free", "room", "segment", "start")

    def __init__(self, segment: int, start: int, room: int) -> None:
        self.segment: int = segment
        self.start: int = start
        self.room: int = room
        self.count: int = SLAB // room
        self.free: list[int] = [start + room * index for index in reversed(range(self.count))]

    @property
    def empty(self) -> bool:
        return len(self.free) == self.count


class Extents:
    """Free ranges: neighbours join; the smallest that suffices is used first, and among those the lowest."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # size, segment, start
        self._sizes: dict[tuple[int, int], int] = {}  # by segment and start
        self._starts: dict[tuple[int, int], int] = {}  # by segment and end

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(segment, start, size) of each, as of now."""
        return iter([(segment, start, size) for (segment, start), size in self._sizes.items()])

    def take(self, size: int) -> tuple[int, int] | None:
        """Segment and start of `size` bytes, which are no longer free; None when no range is long enough."""
        found = self.take_some(size, size)
        return None if found is None else found[:2]

    def take_some(self, least: int, most: int) -> tuple[int, int, int] | None:
        """Segment, start and size of `most` bytes, or of the longest range if it has `least`; None otherwise."""
        if not self._by_size:
            return None
        at = min(bisect_left(self._by_size, (most,)), len(self._by_size) - 1)
        room, segment, start = self._by_size[at]
        if room < least:
            return None
        self._remove(segment, start, room)
        if room > most:
            self._insert(segment, start + most, room - most)
        return segment, start, min(room, most)

    def cut(self, segment: int, start: int, size: int, within: tuple[int, int]) -> None:
        """Take exactly this range out of the free one `within` (start, size)."""
        whole, room = within
        self._remove(segment, whole, room)
        if start > whole:
            self._insert(segment, whole, start - whole)
        if whole + room > start + size:
            self._insert(segment, start + size, whole + room - start - size)

    def give(self, segment: int, start: int, size: int) -> None:
        """This range is free from now on."""
        following = self._sizes.get((segment, start + size))
        if following is not None:
            self._remove(segment, start + size, following)
            size += following
        before = self._starts.get((segment, start))
        if before is not None:
            self._remove(segment, before, start - before)
            start, size = before, size + start - before
        self._insert(segment, start, size)

    def _insert(self, segment: int, start: int, size: int) -> None:
        insort(self._by_size, (size, segment, start))
        self._sizes[segment, start] = size
        self._starts[segment, start + size] = start

    def _remove(self, segment: int, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, segment, start))]
        del self._sizes[segment, start]
        del self._starts[segment, start + size]


class Space:
    """Slots for small blocks, extents for large ones. See the module."""

    def __init__(self) -> None:
        self.extents: Extents = Extents()
        self._slabs: dict[int, list[Slab]] = {room: [] for room in SLOTS}  # those with a free slot

    def take(self, size: int) -> Place | None:
        """Room for `size` bytes, or None."""
        if size <= SLOTS[-1]:
            place = self._take_slot(SLOTS[bisect_left(SLOTS, size)])
            if place is not None:
                return place
        room = -(-size // PAGE) * PAGE
        found = self.extents.take(room)
        return None if found is None else Place(*found, room)

    def give(self, place: Place) -> None:
        """The place is free again."""
        slab = place.slab
        if slab is None:
            self.extents.give(place.segment, place.start, place.room)
            return
        slabs = self._slabs[slab.room]
        if not slab.free:
            slabs.append(slab)
        slab.free.append(place.start)
        # One empty slab per size is kept: a lone block that comes and goes should not cut a slab each time.
        if slab.empty and any(other.empty for other in slabs if other is not slab):
            self._drop(slab)

    def drop_empty_slabs(self) -> None:
        """Return their memory to the extents."""
        for slabs in self._slabs.values():
            for slab in [slab for slab in slabs if slab.empty]:
                self._drop(slab)

    def _take_slot(self, room: int) -> Place | None:
        slabs = self._slabs[room]
        if not slabs:
            found = self.extents.take(SLAB)
            if found is None:
                return None
            slabs.append(Slab(*found, room))
        slab = slabs[-1]
        start = slab.free.pop()
        if not slab.free:
            slabs.pop()
        return Place(slab.segment, start, room, slab)

    def _drop(self, slab: Slab) -> None:
        self._slabs[slab.room].remove(slab)
        self.extents.give(slab.segment, slab.start, SLAB)
