"""The arena: memory that processes of one host share, and the allocator that hands out blocks of it.

One arena per process. Its memory comes in segments, each a sealed memory file that peers map; its blocks are lent to
peers (shm.py). What a block holds is not known here.

Invariants
1. A range of bytes belongs to one live block, to one slab, or is free; never to two of them.
2. A generation names one allocation for ever: a stale block is refused, also when its place is in use again.
3. The lock is held for arithmetic only. Copying, filling, punching and system calls happen outside of it.
4. No mapping is taken away under somebody who uses it: mappings are dropped, and go with their last user.
5. Free room is warm: its pages are there. What the system gives or gets back is cold, and no room until `grow` or
   `allocate` with grow takes it: a page that is touched for the first time costs more than to send its bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing

from ..protocol.frames import Buffer
from .space import GIB, MIB, PAGE, SLAB, Extents, Place, Space

Bytes = numpy.typing.NDArray[numpy.uint8]

ALIGN = 64  # bytes; every block begins at a multiple of it
HEADER = PAGE  # of a segment: the nonce, then nothing; blocks begin on a page
NONCE_SIZE = 16
SEGMENT_SIZE, MAX_SEGMENT_SIZE = 64 * MIB, GIB
POISON = 0xDD
GROW_SIZE = 8 * MIB  # least that is made warm at a time
TOGETHER_SIZE, PIECE = 8 * MIB, 2 * MIB  # from how many bytes on two threads copy, and how many each takes at a time
RETRY = 1.0  # seconds between attempts to get memory once the system refused some

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
_STEP = 4 * MIB  # of memory touched or filled at a time
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_NOEXEC_SEAL = 8  # of memfd_create; kernels before 6.3 do not know it, and later ones may insist on it
_CLEAN, _IDLE, _USED = range(3)  # state of a stretch of a segment, as `trim` sees it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Block(NamedTuple):
    """A piece of the arena; what travels to a peer. size, offset: bytes. generation: which allocation it is."""

    segment: int
    offset: int
    size: int
    generation: int


_new_tuple = tuple.__new__  # what Block(...) does, without its call into Python


class Mapping:
    """A file mapped into memory, shared, readable and writable. It stays mapped as long as somebody refers to it."""

    def __init__(self, fd: int, size: int) -> None:
        """Map `size` bytes of `fd`, which may be closed afterwards. Raises OSError."""
        self.memory = mmap.mmap(fd, size)
        self.size = size
        # An export that stays: nobody can close the mmap under the address.
        self.array: Bytes = numpy.frombuffer(self.memory, numpy.uint8)
        self.address: int = self.array.ctypes.data

    def touch(
        self, start: int, end: int, advice: int = MADV_POPULATE_WRITE, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Have these pages present, without changing what they hold. Only a hint: a refusal is ignored.

        stop: asked now and then whether nobody wants them any more.
        """
        for at in range(start // PAGE * PAGE, end, _STEP):
            if stop():
                return
            size = min(_STEP, end - at)
            if _libc.madvise(self.address + at, size, advice) == 0:  # releases the GIL; that of mmap does not
                continue
            if ctypes.get_errno() != errno.EINVAL:
                return
            self.memory[at : at + size : PAGE]  # before Linux 5.14: reading a page of such a file makes it present


@dataclass(frozen=True, eq=False)
class Segment:
    """One memory file of the arena. size: bytes. nonce: its first bytes, by which a peer knows it is the same memory.

    reserved: all of its memory is held from the start, because getting it later could fail in the middle of a copy.
    """

    index: int
    fd: int
    size: int
    nonce: bytes
    mapping: Mapping = field(repr=False)
    reserved: bool = False
    states: bytearray = field(repr=False, default_factory=bytearray)

    def resident(self) -> int:
        """Bytes of memory that it takes up. Raises OSError once it is closed."""
        return os.fstat(self.fd).st_blocks * 512


class _Copy:
    """One copy that two threads make together, each taking the next piece. The second one may be late, or never come.

    One core does not use up the bandwidth of the memory: measured 1.7 times as fast at 256 MB, 2.5 times at 16 MB.
    """

    def __init__(self, target: Bytes, source: Bytes) -> None:
        self._target = target
        self._source = source
        self._pieces = deque(range(0, source.size, PIECE))
        self._assisted = False
        self._done = threading.Lock()
        self._done.acquire()

    def assist(self) -> None:
        """In another thread."""
        self._assisted = True  # before the first piece is taken
        try:
            self._work()
        finally:
            self._done.release()

    def finish(self) -> None:
        """Return once all is copied."""
        self._work()
        if self._assisted:
            self._done.acquire()

    def _work(self) -> None:
        while self._pieces:
            try:
                at = self._pieces.popleft()
            except IndexError:  # the other one was faster
                return
            self._target[at : at + PIECE] = self._source[at : at + PIECE]


class Arena:
    """Shared memory of this process, in blocks. Any thread.

    limit: bytes that all segments may take together. segment_size: of the first segment; each next one is twice as
    large, up to 1 GiB. poison: overwrite what is freed, so that use after release shows. assist: has a function run in
    another thread, to help with large copies.
    last_refusal: why `allocate` gave None the last time, in a few words without numbers.
    """

    def __init__(
        self,
        limit: int,
        *,
        segment_size: int = SEGMENT_SIZE,
        poison: bool = False,
        assist: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.limit = limit
        self.poison = poison
        self.last_refusal = ""
        self.used = 0  # bytes that live blocks take, with what rounding adds
        self._segment_size = segment_size
        self._assist = assist
        self._segments: tuple[Segment, ...] = ()
        self._space = Space()
        self._cold = Extents()
        self._spare: tuple[int, Place] | None = None  # what was freed last, and how long its block was
        self._live: dict[int, tuple[Block, Place]] = {}
        self._generation = 0
        self._closed = False
        self._retry_at = 0.0
        self._failure = ""
        self._lock = threading.Lock()
        self._growth = threading.Lock()  # taken before the other

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, by index; none once it is closed."""
        return self._segments

    @property
    def size(self) -> int:
        """Bytes of all segments; how much of it takes up memory is `resident`."""
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

    def allocate(self, size: int, *, grow: bool = True) -> Block | None:
        """A block of `size` bytes, or None when there is none to be had (`last_refusal`).

        grow: take cold memory if need be, whose pages then cost their first touch.
        """
        if size <= 0:
            self.last_refusal = "empty"
            return None
        with self._lock:
            block = self._carve(size)
            if block is None and not grow:
                self.last_refusal = self._why_none(size)
        if block is not None or not grow:
            return block
        with self._growth:
            while True:  # each turn the arena grows, and it is bounded
                with self._lock:
                    block = self._carve(size)
                if block is not None:
                    return block
                extent = self._take_cold(size)
                if extent is None:
                    return None
                self._give_room(extent)

    def grow(self, size: int) -> list[tuple[int, int, int]]:
        """Have room for `size` bytes more, warm. Slow; for a thread.

        Returns the ranges (segment, start, bytes) that were made warm: none where there is no memory to be had.
        """
        with self._growth:
            extent = self._take_cold(size)
            # At the limit what is cold may join what is free, and be enough then.
            ranges = [extent] if extent is not None else self._take_all_cold()
            segments = self._segments
        for index, start, room in ranges:
            if self._closed:  # whoever closes does not wait for this
                return []
            segments[index].mapping.touch(start, start + room, stop=lambda: self._closed)
            self._give_room((index, start, room))
        return ranges

    def write(self, block: Block, source: Buffer, at: int = 0) -> None:
        """Copy `source` into the block, `at` bytes from its start; other threads run meanwhile.

        Raises ValueError when it is too long, or when the block is not in use (any more).
        """
        segments, entry = self._segments, self._live.get(block.generation)
        if entry is None or entry[0] != block or not segments:
            raise ValueError(f"{block} is not in use")
        data = numpy.frombuffer(source, numpy.uint8)
        if at < 0 or at + data.size > block.size:
            raise ValueError(f"{data.size} bytes at {at} do not fit into {block}")
        target = segments[block.segment].mapping.array
        start = block.offset + at
        place = target[start : start + data.size]
        if self._assist is None or data.size < TOGETHER_SIZE:
            place[:] = data  # as fast as memmove; releases the GIL
        else:
            copy = _Copy(place, data)
            self._assist(copy.assist)
            copy.finish()

    def free(self, block: Block) -> None:
        """The block may be used again. Raises ValueError for one that is not in use. Nothing once it is closed."""
        with self._lock:
            if self._closed:
                return
            entry = self._live.get(block.generation)
            if entry is None or entry[0] != block:
                raise ValueError(f"{block} is not in use")
            del self._live[block.generation]
            place = entry[1]
            mapping = self._segments[place.segment].mapping
            if not self.poison:
                self._give(block.size, place)
        if self.poison:
            ctypes.memset(mapping.address + place.start, POISON, place.room)
            with self._lock:
                self._give(block.size, place)

    def trim(self, floor: int = SEGMENT_SIZE) -> int:
        """Give back memory that was not in use since the last call; returns how many bytes. For a thread, now and then.

        floor: bytes that stay, warm for what comes next.
        """
        with self._growth:  # nobody closes the descriptors meanwhile
            with self._lock:
                idle = self._take_idle()
            clean: list[tuple[int, int, int]] = []
            try:
                for index, start, size in reversed(idle):  # the lowest addresses are used first: they stay
                    end = self._punch(index, start, start + size, floor)
                    if end < start + size:
                        clean.append((index, end, start + size - end))
            finally:
                self._give_idle(idle, clean)
        return sum(size for *_, size in clean)

    def close(self) -> None:
        """Let go of all memory; mappings of peers, and copies under way, are not affected. Again: nothing."""
        with self._growth, self._lock:
            self._let_go()

    def close_in_child(self) -> None:
        """In a forked child: let go of what is the parent's, without its locks."""
        self._lock, self._growth = threading.Lock(), threading.Lock()
        self._let_go()

    def _let_go(self) -> None:
        segments, self._segments = self._segments, ()
        self._closed = True
        self._live.clear()
        self._space, self._cold, self._spare = Space(), Extents(), None
        self.used = 0
        for segment in segments:
            os.close(segment.fd)

    def _carve(self, size: int) -> Block | None:
        place: Place | None
        if self._spare is not None and self._spare[0] == size:  # blocks of one size come and go: no arithmetic
            place = self._spare[1]
            self._spare = None
        else:
            place = self._space.take(size)
            if place is None and self._spare is not None:
                self._give_spare()
                place = self._space.take(size)
            if place is None:
                return None
            self._mark(place)
        self.used += place.room
        generation = self._generation = self._generation + 1
        block = _new_tuple(Block, (place.segment, place.start, size, generation))
        self._live[generation] = (block, place)
        return block

    def _give(self, size: int, place: Place) -> None:
        if self._closed:
            return
        self._mark(place)
        self.used -= place.room
        self._give_spare()
        self._spare = (size, place)

    def _give_spare(self) -> None:
        if self._spare is not None:
            self._space.give(self._spare[1])
            self._spare = None

    def _mark(self, place: Place) -> None:
        first, last = place.start // SLAB, (place.start + place.room - 1) // SLAB + 1
        states = self._segments[place.segment].states
        if last - first == 1:
            states[first] = _USED
        else:
            states[first:last] = bytes((_USED,)) * (last - first)

    def _take_cold(self, size: int) -> tuple[int, int, int] | None:
        """Cold room (segment, start, bytes) for `size` bytes, out of a new segment if need be; None: not to be had.

        The growth lock is held.
        """
        room = -(-size // PAGE) * PAGE
        most = max(room, GROW_SIZE)
        extent = self._cold.take_some(room, most)
        if extent is None and self._add_segment(room):
            extent = self._cold.take_some(room, most)
        return extent

    def _take_all_cold(self) -> list[tuple[int, int, int]]:
        cold, self._cold = self._cold, Extents()
        return list(cold)

    def _give_room(self, extent: tuple[int, int, int]) -> None:
        with self._lock:
            if not self._closed:
                self._mark(Place(*extent))  # it is not given back at once
                self._space.extents.give(*extent)

    def _why_none(self, size: int) -> str:
        if self._closed:
            return "closed"
        return "limit" if size + HEADER > self.limit - self.used else self._failure or "cold"

    def _add_segment(self, size: int) -> bool:
        """One more segment, with cold room for `size` bytes; the growth lock is held. False: not to be had."""
        need = size + HEADER
        left = (self.limit - self.size) // PAGE * PAGE
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
        with self._lock:
            self._segments += (segment,)
        self._cold.give(segment.index, HEADER, segment.size - HEADER)
        return True

    def _new_segment(self, size: int, need: int) -> Segment | None:
        """As large as the system lets it be, from `size` down to `need` bytes."""
        while True:
            try:
                return create_segment(len(self._segments), size)
            except OSError as error:
                if size <= need:
                    self._retry_at = time.monotonic() + RETRY
                    self._failure = f"memory: {error.strerror}"
                    return None
            size = max(size // 2 // PAGE * PAGE, need)

    def _take_idle(self) -> list[tuple[int, int, int]]:
        """Ranges (segment, start, size) unused since the last call, no longer free, in order of address."""
        idle: list[tuple[int, int, int]] = []
        self._give_spare()
        self._space.drop_empty_slabs()
        for index, start, size in sorted(self._space.extents):
            segment = self._segments[index]
            if segment.reserved:  # what was given back there might not be had again
                continue
            for first, last in _runs(segment.states, -(-start // SLAB), (start + size) // SLAB):
                self._space.extents.cut(index, first, last - first, (start, size))
                idle.append((index, first, last - first))
                start, size = last, start + size - last
        return idle

    def _punch(self, index: int, start: int, end: int, floor: int) -> int:
        """Give back memory of a range from its end on, as long as more than `floor` is resident; its new end."""
        while start < end:
            surplus = self.resident - floor
            part = min(end - start, -(-surplus // SLAB) * SLAB)
            if part <= 0 or not _punch(self._segments[index].fd, end - part, part):
                break
            end -= part
        return end

    def _give_idle(self, idle: list[tuple[int, int, int]], clean: list[tuple[int, int, int]]) -> None:
        """What was not given back is free again; the rest is cold."""
        punched = {(index, start + size): size for index, start, size in clean}
        with self._lock:
            if self._closed:
                return
            for index, start, size in clean:
                self._segments[index].states[start // SLAB : (start + size) // SLAB] = bytes(size // SLAB)
                self._cold.give(index, start, size)
            for index, start, size in idle:
                size -= punched.get((index, start + size), 0)
                if size:
                    self._space.extents.give(index, start, size)


def create_segment(index: int, size: int) -> Segment:
    """A segment of `size` bytes, in a sealed memory file, or where that is refused in a file without a name.

    That file stands in `AIORPC_SHM_DIR`, else in /dev/shm. Raises OSError when neither can be had.
    """
    try:
        fd, reserved = _memory_file(size), _strict_overcommit()
    except (OSError, AttributeError):  # no such call in this system, or refused by a filter of system calls
        fd, reserved = _unnamed_file(size), True
    try:
        if reserved:
            os.posix_fallocate(fd, 0, size)
        nonce = os.urandom(NONCE_SIZE)
        os.pwrite(fd, nonce, 0)
        return Segment(index, fd, size, nonce, Mapping(fd, size), reserved, bytearray(-(-size // SLAB)))
    except BaseException:
        os.close(fd)
        raise


def _memory_file(size: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("aiorpc", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("aiorpc", flags)
    try:
        os.ftruncate(fd, size)
        # Nobody can shorten it: that would kill whoever reads what was cut off.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unnamed_file(size: int) -> int:
    folder = os.environ.get("AIORPC_SHM_DIR") or "/dev/shm"
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), folder)
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        space = os.fstatvfs(fd)
        if size > space.f_bavail * space.f_frsize // 2:  # other programs want some of it, too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _strict_overcommit() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def _punch(fd: int, start: int, size: int) -> bool:
    """Give the memory of a range back to the system; it reads as zeros then. False: not possible."""
    fallocate = getattr(_libc, "fallocate", None)  # Linux only
    numbers = (ctypes.c_int64(start), ctypes.c_int64(size))
    return fallocate is not None and fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, *numbers) == 0


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
