"""The arena: memory that processes of one host share, and the allocator that hands out blocks of it.

One arena per process. Its memory comes in segments, each a sealed memory file that peers map; its blocks are lent to
peers (shm.py). The arena does not know what a block holds.

Invariants
1. A range of bytes belongs to one live block, to one slab, or is free; never to two of them.
2. A generation names one allocation and is never reused: a stale block is refused even if its place is in use again.
3. The lock is held for arithmetic only. Copying, filling, punching and system calls happen outside of it.
4. A mapping is never unmapped while it is used: mappings are dropped, and go with their last user.
5. Free room is warm: the system has allocated its pages. Cold room becomes usable by `grow` or `allocate_cold`: the
   first touch of a page costs more than sending its bytes. Writing to the file (`write_cold`) costs half of a touch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy

from ..locks import Lock
from ..protocol.frames import Buffer
from .copying import Assist, together, write_cold
from .segments import HEADER, Bytes, Segment, create_segment, punch
from .space import GIB, MIB, PAGE, SLAB, Extents, Place, Space

T = TypeVar("T")

ALIGN = 64  # bytes; every block begins at a multiple of it
SEGMENT_SIZE, MAX_SEGMENT_SIZE = 64 * MIB, GIB
POISON = 0xDD
GROW_SIZE = 8 * MIB  # least to be made warm at a time
TOGETHER_SIZE, PIECE = 8 * MIB, 2 * MIB  # from how many bytes on two threads copy, and how many each takes at a time
SPARES, SPARE_SIZE = 32, 64 * MIB  # freed blocks of one size that are kept for reuse, and their bytes, at most
PREPARED = 8  # a segment is made beforehand only if the limit is so many times the first segment
RETRY = 1.0  # seconds between attempts to get memory once the system refused some

_CLEAN, _IDLE, _USED = range(3)  # state of a stretch of a segment, as `trim` sees it


Span = tuple[int, int]  # where something begins, and how long it is, in bytes


def lay_out(lengths: Iterable[int], start: int = 0) -> tuple[list[Span], int]:
    """Where buffers of these lengths lie, one after the other from `start` on, and where the last one ends.

    Each begins at a multiple of `ALIGN`.
    """
    spans: list[Span] = []
    for length in lengths:
        begin = -(-start // ALIGN) * ALIGN
        spans.append((begin, length))
        start = begin + length
    return spans, start


class Block(NamedTuple):
    """A piece of the arena."""

    segment: int
    #: Where it begins in the segment, in bytes.
    offset: int
    #: Its size in bytes.
    size: int
    #: The number of the allocation; see invariant 2.
    generation: int


class Arena:
    """Shared memory of this process, in blocks. Any thread.

    limit: bytes that all segments may take together. segment_size: of the first segment; each next one is twice as
    large, up to 1 GiB. poison: overwrite what is freed, to make use after release visible. assist: runs a function in
    another thread, to help with large copies.
    last_refusal: why `allocate` gave None the last time, in a few words without numbers.

    If an exception interrupts a step the arena is torn: it does not know what is free, and gives no more blocks.
    Messages go other ways.
    """

    def __init__(
        self,
        limit: int,
        *,
        segment_size: int = SEGMENT_SIZE,
        poison: bool = False,
        assist: Assist | None = None,
    ) -> None:
        self.limit = limit
        self.poison = poison
        self._torn = self._cold_torn = False  # true during a step, and after an interrupted step
        self.last_refusal: str = ""
        self.used: int = 0  # bytes that live blocks take, with what rounding adds
        self._segment_size = segment_size
        self._assist = assist
        self._segments: tuple[Segment, ...] = ()
        self._space = Space()
        self._cold = Extents()
        self._spares: list[Place] = []  # of the blocks that were freed last, as long as these are of one size
        self._spare_size = 0
        self._live: dict[int, tuple[Block, Place]] = {}
        self._fresh: set[int] = set()  # by generation, of a block whose memory was cold
        self._shares: dict[int, int] = {}  # by generation, of a block with several holders: their number minus one
        self._generation = 0
        self._aside = 0
        self._closed = False
        self._retry_at = 0.0
        self._failure = ""
        self._lock = Lock()
        self._growth = Lock()  # always taken before `_lock`

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, by index; none once it is closed."""
        return self._segments

    @property
    def size(self) -> int:
        """Bytes of all segments; `resident` is the part that takes up memory."""
        return sum(segment.size for segment in self._segments)

    @property
    def resident(self) -> int:
        """Bytes of memory that the segments take up at this moment."""
        try:
            return sum(segment.resident() for segment in self._segments)
        except OSError:  # closed meanwhile
            return 0

    @property
    def blocks(self) -> int:
        """How many blocks are in use."""
        return len(self._live)

    @property
    def closed(self) -> bool:
        """Whether `close` or `close_in_child` was called."""
        return self._closed

    def allocate(self, size: int) -> Block | None:
        """A block of `size` bytes, or None when there is no warm room for it (`last_refusal`)."""
        if size <= 0:
            self.last_refusal = "empty"
            return None
        block = None
        with self._lock:
            if not self._torn:
                self._torn = True
                place = self._find_place(size)
                block = None if place is None else self._carve(size, place)
                self._torn = False
            if block is None:
                self.last_refusal = self._why_none(size)
        return block

    def allocate_cold(self, size: int) -> Block | None:
        """A block of cold memory, whose pages come with the first `write`; None when there is none.

        Not on a loop: it may ask the system for a segment.
        """
        with self._growth:
            if self._cold_torn:
                return None
            self._cold_torn = True
            extent = self._take_cold(size, 0)
            self._cold_torn = False
            if extent is None:
                return None
            with self._lock:
                if self._torn:
                    return None
                place = Place(*extent)
                self._mark(place)
                block = self._carve(size, place)
                self._fresh.add(block.generation)
                return block

    def grow(self, size: int) -> list[tuple[int, int, int]]:
        """Make `size` more bytes warm. Slow; for a thread.

        Returns the ranges (segment, start, bytes) that were made warm: none if the system has no memory.
        """
        with self._growth:
            extent = self._take_cold(size, GROW_SIZE)
            if extent is not None:
                ranges = [extent]
            else:  # at the limit: the cold ranges next to free ones may suffice
                ranges, self._cold = list(self._cold), Extents()
            segments = self._segments
        for index, start, room in ranges:
            if self._closed:  # `close` does not wait for this loop
                return []
            segments[index].mapping.touch(start, start + room, stop=lambda: self._closed)
            self._give_room((index, start, room))
        return ranges

    def prepare(self) -> None:
        """Make a first segment, all of it cold: it takes no memory yet, but it counts against the limit.

        Not if the system would reserve memory for it, or if it is a large part of the limit. Slow; for a thread.
        """
        with self._growth:
            if not self._segments and not self._closed and PREPARED * self._segment_size + self._aside <= self.limit:
                with contextlib.suppress(OSError):  # the next `allocate_cold` or `grow` tries again and has the reason
                    self._join(create_segment(0, self._segment_size, may_reserve=False))

    def set_aside(self, size: int) -> bool:
        """Reserve bytes of the limit for shared memory beside the arena; False if they are not left.

        `take_back` gives them back.
        """
        with self._growth:
            if self._closed or self.size + self._aside + size > self.limit:
                return False
            self._aside += size
            return True

    def take_back(self, size: int) -> None:
        """The arena may use so many of the bytes again that were set aside."""
        with self._growth:
            self._aside -= size

    def write(self, block: Block, source: Buffer, at: int = 0) -> None:
        """Copy `source` into the block, `at` bytes from its start; other threads run meanwhile.

        Raises ValueError when it is too long, or when the block is not in use, and OSError when the system has no
        memory for a cold block.
        """
        segments, entry = self._segments, self._live.get(block.generation)
        if entry is None or entry[0] != block or not segments:
            raise ValueError(f"{block} is not in use")
        data = numpy.frombuffer(source, numpy.uint8)
        if at < 0 or at + data.size > block.size:
            raise ValueError(f"{data.size} bytes at {at} do not fit into {block}")
        mapping = segments[block.segment].mapping
        start = block.offset + at
        if block.generation in self._fresh:
            write_cold(mapping, start, data, PIECE, self._assist)
            return
        place = mapping.array[start : start + data.size]
        if data.size < TOGETHER_SIZE:
            place[:] = data  # as fast as memmove; releases the GIL
            return

        def copy(at: int) -> None:
            place[at : at + PIECE] = data[at : at + PIECE]

        self.together(copy, range(0, data.size, PIECE))

    def view(self, block: Block) -> Bytes:
        """The bytes of a block, as an array that keeps their memory mapped, but not the block. Raises as `write`."""
        segments, entry = self._segments, self._live.get(block.generation)
        if entry is None or entry[0] != block or not segments:
            raise ValueError(f"{block} is not in use")
        # Over the mmap itself: a view of an array would keep that array.
        return numpy.frombuffer(segments[block.segment].mapping.memory, numpy.uint8, block.size, block.offset)

    def together(self, work: Callable[[T], None], pieces: Iterable[T]) -> None:
        """Have each piece worked on, here and in a second thread; return when all is done."""
        together(work, pieces, self._assist)

    def share(self, block: Block) -> None:
        """The block has one holder more: `free` has to be called once more. Raises ValueError as `free` does."""
        with self._lock:
            entry = self._live.get(block.generation)
            if entry is None or entry[0] != block:
                raise ValueError(f"{block} is not in use")
            self._shares[block.generation] = self._shares.get(block.generation, 0) + 1

    def free(self, block: Block) -> None:
        """A holder is done with the block; after the last one it may be reused.

        Raises ValueError for a block that is not in use. Does nothing once the arena is closed.
        """
        with self._lock:
            if self._closed:
                return
            entry = self._live.get(block.generation)
            if entry is None or entry[0] != block:
                raise ValueError(f"{block} is not in use")
            others = self._shares.get(block.generation, 0) if self._shares else 0
            if others:
                if others > 1:
                    self._shares[block.generation] = others - 1
                else:
                    del self._shares[block.generation]
                return
            place = entry[1]
            if not self.poison:
                self._give(block, place)
                return
            mapping = self._segments[place.segment].mapping
        ctypes.memset(mapping.address + place.start, POISON, place.room)
        with self._lock:
            self._give(block, place)

    def trim(self, floor: int = SEGMENT_SIZE) -> int:
        """Give back memory that was not in use since the last call; returns how many bytes. Called in a thread, now and
        then.

        floor: bytes that stay warm.
        """
        with self._growth:  # keeps the descriptors open
            with self._lock:
                idle = self._take_idle()
            clean: list[tuple[int, int, int]] = []
            try:
                for index, start, size in reversed(idle):  # allocations prefer the lowest addresses: those stay warm
                    end = self._punch(index, start, start + size, floor)
                    if end >= start + size:
                        continue
                    clean.append((index, end, start + size - end))
            finally:
                self._give_idle(idle, clean)
        return sum(size for *_, size in clean)

    def close(self) -> None:
        """Let go of all memory; mappings of peers and running copies are not affected. Idempotent."""
        with self._growth, self._lock:
            self._let_go()

    def close_in_child(self) -> None:
        """In a forked child: let go of what is the parent's, without its locks."""
        self._lock, self._growth = Lock(), Lock()
        self._let_go()

    def _let_go(self) -> None:
        segments, self._segments = self._segments, ()
        self._closed = True
        self._live.clear()
        self._fresh.clear()
        self._shares.clear()
        self._space, self._cold = Space(), Extents()
        self._spares.clear()
        self.used = 0
        for segment in segments:
            os.close(segment.fd)

    def _find_place(self, size: int) -> Place | None:
        """Warm room for a block; None if there is none."""
        if self._spares and self._spare_size == size:  # the common case: blocks of one size come and go
            return self._spares.pop()
        place = self._space.take(size)
        if place is None and self._spares:
            self._give_spares()
            place = self._space.take(size)
        if place is not None:
            self._mark(place)
        return place

    def _carve(self, size: int, place: Place) -> Block:
        self.used += place.room
        generation = self._generation = self._generation + 1
        block = Block(place.segment, place.start, size, generation)
        self._live[generation] = (block, place)
        return block

    def _give(self, block: Block, place: Place) -> None:
        self._live.pop(block.generation, None)
        if self._fresh:
            self._fresh.discard(block.generation)
        if self._closed or self._torn:
            return
        self._torn = True
        self._mark(place)
        self.used -= place.room
        spares = self._spares
        if spares and (
            self._spare_size != block.size or len(spares) >= SPARES or len(spares) * block.size >= SPARE_SIZE
        ):
            self._give_spares()
        self._spare_size = block.size
        spares.append(place)
        self._torn = False

    def _give_spares(self) -> None:
        while self._spares:
            self._space.give(self._spares.pop())

    def _mark(self, place: Place) -> None:
        first, last = place.start // SLAB, (place.start + place.room - 1) // SLAB + 1
        states = self._segments[place.segment].states
        if last - first == 1:
            states[first] = _USED
        else:
            states[first:last] = bytes((_USED,)) * (last - first)

    def _take_cold(self, size: int, most: int) -> tuple[int, int, int] | None:
        """Cold room (segment, start, bytes) for `size` bytes, from a new segment if necessary; None: there is none.

        most: take up to so many bytes if they are free, even for a smaller size. The growth lock is held.
        """
        room = -(-size // PAGE) * PAGE
        most = max(room, most)
        extent = self._cold.take_some(room, most)
        if extent is None and self._add_segment(room):
            extent = self._cold.take_some(room, most)
        return extent

    def _give_room(self, extent: tuple[int, int, int]) -> None:
        with self._lock:
            if not self._closed:
                self._mark(Place(*extent))  # `trim` does not take it at once
                self._space.extents.give(*extent)

    def _why_none(self, size: int) -> str:
        if self._closed:
            return "closed"
        return "limit" if size + HEADER > self.limit - self.used else self._failure or "cold"

    def _add_segment(self, size: int) -> bool:
        """One more segment, with cold room for `size` bytes; the growth lock is held. False: there is no memory."""
        need = size + HEADER
        left = (self.limit - self._aside - self.size) // PAGE * PAGE
        if self._closed or left < need:
            self.last_refusal = "closed" if self._closed else "limit"
            return False
        if time.monotonic() < self._retry_at:
            self.last_refusal = self._failure
            return False
        wanted = min(self._segment_size << min(len(self._segments), 16), max(MAX_SEGMENT_SIZE, self._segment_size))
        segment = self._new_segment(min(max(wanted, need), left), need)
        if segment is None:
            self.last_refusal = self._failure
            return False
        self._failure = ""
        self._join(segment)
        return True

    def _join(self, segment: Segment) -> None:
        with self._lock:
            self._segments += (segment,)
        self._cold.give(segment.index, HEADER, segment.size - HEADER)

    def _new_segment(self, size: int, need: int) -> Segment | None:
        """As large as the system allows, from `size` down to `need` bytes."""
        while True:
            try:
                return create_segment(len(self._segments), size)
            except OSError as error:
                if error.errno is None:  # a signal handler has raised it
                    raise
                if size <= need:
                    self._retry_at = time.monotonic() + RETRY
                    self._failure = f"memory: {error.strerror}"
                    return None
            size = max(size // 2 // PAGE * PAGE, need)

    def _take_idle(self) -> list[tuple[int, int, int]]:
        """Ranges (segment, start, size) unused since the last call, in order of address. They are no longer free."""
        idle: list[tuple[int, int, int]] = []
        self._give_spares()
        self._space.drop_empty_slabs()
        for index, start, size in sorted(self._space.extents):
            segment = self._segments[index]
            if segment.reserved:  # the system might refuse them later
                continue
            for first, last in _runs(segment.states, -(-start // SLAB), (start + size) // SLAB):
                self._space.extents.cut(index, first, last - first, (start, size))
                idle.append((index, first, last - first))
                start, size = last, start + size - last
        return idle

    def _punch(self, index: int, start: int, end: int, floor: int) -> int:
        """Give back memory of a range from its end on while more than `floor` is resident; returns its new end."""
        while start < end:
            surplus = self.resident - floor
            part = min(end - start, -(-surplus // SLAB) * SLAB)
            if part <= 0 or not punch(self._segments[index].fd, end - part, part):
                break
            end -= part
        return end

    def _give_idle(self, idle: list[tuple[int, int, int]], clean: list[tuple[int, int, int]]) -> None:
        """Make the punched ranges cold, and the rest free again."""
        punched = {(index, start + size): size for index, start, size in clean}
        with self._lock:
            if self._closed:
                return
            for index, start, size in clean:
                self._segments[index].states[start // SLAB : (start + size) // SLAB] = bytes(size // SLAB)
                self._cold.give(index, start, size)
            for index, start, size in idle:
                size -= punched.get((index, start + size), 0)
                if not size:
                    continue
                self._space.extents.give(index, start, size)


def _runs(states: bytearray, first: int, last: int) -> list[tuple[int, int]]:
    """Ranges of bytes in the stretches `first` to `last` that are idle; those used until now are idle next time."""
    runs: list[tuple[int, int]] = []
    for at in range(first, last):
        if states[at] == _USED:
            states[at] = _IDLE
        elif states[at] == _IDLE:
            start = runs.pop()[0] if runs and runs[-1][1] == at * SLAB else at * SLAB
            runs.append((start, (at + 1) * SLAB))
    return runs
