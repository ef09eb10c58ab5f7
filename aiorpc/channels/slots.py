"""Slots: memory files that many processes of one host read at once, each of which holds one value at a time.

The publisher of a value copies it into a slot once. Each reader maps the file privately (`PrivateMapping`): it reads
the value without a copy, and a write makes a page of its own. This module knows no names, versions or connections.

Who owns a slot
1. From `SharedSlots.take` until the copy is done: the publisher.
2. Afterwards no process writes to it while a reader has adopted it. The publisher keeps track of the readers; after the
   last one it gives the slot back (`SharedSlots.give`), and only then may the slot be written to again.
3. A view is adopted once at a time, and released with the last tensor over it. Before it is adopted again, the reader's
   own writes are dropped: they would hide the slot's contents.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy

from ..errors import ProtocolError
from ..locks import Lock
from ..protocol.frames import Buffer
from ..undoing import on_error
from .arena import PIECE, Arena, Span
from .descriptors import Descriptors, DescriptorShare
from .segments import HEADER, SEAL_FUTURE_WRITE, Bytes, OwnedDescriptor, PrivateMapping, create_read_only
from .shm import check_file, check_present
from .space import MIB, PAGE

#: Bytes from which on two threads copy a value. Below, processor time counts more than the wait, as the publisher
#: computes meanwhile: one thread needs 0.92 of what two need together, with 20 MB and readers that compute.
TWO_THREADS_SIZE = 64 * MIB
# Free slots that are kept even if fewer are in use.
_MOST_FREE = 4


def copy_all(arena: Arena, buffers: Sequence[Buffer], spans: Sequence[Span], target: Bytes) -> None:
    """Copy each buffer to its place, with two threads if there is much. Other threads run meanwhile."""
    work: list[list[tuple[int, Bytes]]] = [[]]  # the parts of one step: pieces of long buffers, short ones together
    size = 0
    for buffer, (start, length) in zip(buffers, spans, strict=True):
        data = numpy.frombuffer(buffer, numpy.uint8)
        for at in range(0, length, PIECE):
            part = data if length <= PIECE else data[at : at + PIECE]
            work[-1].append((start + at, part))
            size += part.size
            if size >= PIECE:
                work.append([])
                size = 0

    def copy(parts: list[tuple[int, Bytes]]) -> None:
        for start, part in parts:
            target[start : start + part.size] = part

    if target.size < TWO_THREADS_SIZE:
        for parts in work:
            copy(parts)
    else:
        arena.together(copy, work)


class SharedSlot:
    """One memory file. number: unique among all slots of the worker. size: bytes of the file.

    fd, nonce: other processes open the file by its only descriptor here, and check the nonce.
    """

    nonce: bytes

    def __init__(self, number: int, size: int, share: DescriptorShare | None = None) -> None:
        """size: bytes of the whole file. share: the right to have it open. Raises OSError if the system has no memory
        for it, or no such files."""
        self.number = number
        self.size = size
        self._share = share
        self._mapping, self.nonce = create_read_only(size)
        self.fd: int = self._mapping.memory.file.fd

    def bytes(self, size: int) -> Bytes:
        """The first bytes of its contents; each call makes an array of its own."""
        return numpy.frombuffer(self._mapping.memory, numpy.uint8, size, HEADER)

    def close(self) -> None:
        """Let go of the file, which is closed with the last array over it here. Readers keep their mappings."""
        del self._mapping
        self._share = None


class SharedSlots:
    """The slots of one worker: those that are in use, and free ones, whose pages are there. Any thread.

    Their bytes count against the limit of the arena, and their descriptors against `Descriptors`. There are not more
    free ones than used ones, except for `_MOST_FREE`. The surplus is closed in the background.
    """

    def __init__(
        self,
        arena: Arena,
        descriptors: Descriptors | None = None,
        later: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        """later: runs a function that may take milliseconds in the background."""
        self._arena = arena
        self._descriptors = descriptors or Descriptors()
        self._later = later
        self._number = 0
        self._used: set[SharedSlot] = set()
        self._free: list[SharedSlot] = []  # in the order in which they were freed
        self._idle: set[SharedSlot] = set()  # those that were free already when `trim` was called
        self._closed = False
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return sum(slot.size for slot in [*self._used, *self._free])

    @property
    def used(self) -> int:
        """How many are in use."""
        return len(self._used)

    def numbers(self) -> list[int]:
        """The numbers of all slots: readers close their views of others."""
        with self._lock:
            return [slot.number for slot in [*self._used, *self._free]]

    def take(self, size: int) -> SharedSlot | None:
        """A slot for so many bytes; None if there is no memory for it."""
        room = HEADER + -(-max(size, 1) // PAGE) * PAGE
        with self._lock:
            if self._closed:
                return None
            slot = self._fitting(room)
            if slot is not None:
                self._free.remove(slot)
                self._idle.discard(slot)
                self._used.add(slot)
                return slot
            return self._make(room)

    def _make(self, room: int) -> SharedSlot | None:
        """A new slot of that size. Closes free ones if there is no room or no descriptor for it."""
        while True:
            share = self._descriptors.take()
            if share is not None and self._arena.set_aside(room):
                try:
                    self._number += 1
                    slot = SharedSlot(self._number, room, share)
                except OSError as error:
                    self._arena.take_back(room)
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        return None
                else:
                    self._used.add(slot)
                    return slot
            if not self._free:
                if share is None:
                    self._descriptors.refused()
                return None
            share = None
            self._drop(self._free[0])

    def _fitting(self, room: int) -> SharedSlot | None:
        """The best free slot: of the shortest that fit, the one freed last, as its pages may be in the caches.

        A slot much larger than needed does not count: its unused memory would be missing elsewhere.
        """
        fitting = [slot for slot in self._free if room <= slot.size <= 2 * room + MIB]
        return min(reversed(fitting), key=lambda each: each.size, default=None)

    def give(self, slot: SharedSlot) -> None:
        """No reader uses the slot any more. Does nothing once it is closed."""
        surplus: list[SharedSlot] = []
        with self._lock:
            if slot in self._used:
                self._used.remove(slot)
                self._free.append(slot)
            while len(self._free) > max(_MOST_FREE, len(self._used)):
                surplus.append(self._free.pop(0))
                self._idle.discard(surplus[-1])
        if surplus:
            self._later(partial(self._close_all, surplus))

    def _close_all(self, slots: list[SharedSlot]) -> None:
        while slots:
            slot = slots.pop()
            slot.close()
            self._arena.take_back(slot.size)

    def trim(self) -> None:
        """Give back the memory of slots that were free since the last call."""
        with self._lock:
            for slot in filter(self._idle.__contains__, list(self._free)):
                self._drop(slot)
            self._idle = set(self._free)

    def _drop(self, slot: SharedSlot) -> None:
        self._free.remove(slot)
        self._idle.discard(slot)
        slot.close()
        self._arena.take_back(slot.size)

    def close(self) -> None:
        """Let go of all slots; readers keep their mappings. Idempotent."""
        with self._lock:
            self._let_go()

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's slots, without its lock."""
        self._lock = Lock()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        slots, self._used, self._free = [*self._used, *self._free], set(), []
        for slot in slots:
            slot.close()


class SlotView:
    """A slot of any process of this host, mapped for one reader. On one thread; `on_release` runs in any.

    stale: whether it may show this reader's writes in place of the slot's contents.
    """

    def __init__(self, path: str, size: int, nonce: bytes, share: DescriptorShare | None = None) -> None:
        """path: of the file, as this process can open it. size: bytes of the file, which begins with `nonce`. share:
        the right to have it open.

        Raises OSError when it cannot be opened or mapped, ProtocolError when it is not what its owner has announced.
        """
        # Kept open: other processes may map the slot from here when its owner has gone.
        self._file = OwnedDescriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        with on_error(self._file.close):
            if not check_file(self._file.fd, size, nonce):
                raise ProtocolError("a slot in a file that can be cut off")
            if not fcntl.fcntl(self._file.fd, fcntl.F_GET_SEALS) & SEAL_FUTURE_WRITE:
                raise ProtocolError("a slot whose memory its owner can take away")
            self._mapping = PrivateMapping(self._file.fd, size)
        self.size = size
        self.nonce = nonce
        self._share = share
        self._loan: weakref.ref[Bytes] | None = None  # to the adopted array, which all its views keep alive
        self.stale: bool = False
        self._pid = os.getpid()

    @property
    def fd(self) -> int:
        """The number of the open file, as long as this lives."""
        return self._file.fd

    @property
    def adopted(self) -> bool:
        """Whether a view of an adopted array lives."""
        return self._loan is not None

    def adopt(self, size: int, on_release: Callable[[], None]) -> Bytes:
        """The first bytes of the slot's contents, readable and writable, as long as any view of them lives.

        on_release: called when the last view has died, in any thread and from inside the garbage collector: it must
        take no lock and not raise. It is not called in forked children. Raises ProtocolError for more bytes than there
        are in the file or in memory, and if the slot is in use.
        """
        if self._loan is not None or not 0 <= size <= self.size - HEADER:
            raise ProtocolError(f"{size} bytes of a slot of {self.size} that is {'' if self._loan else 'not '}in use")
        check_present(self.fd, HEADER + size)
        if self.stale:
            self._mapping.forget_writes()
        self.stale = True
        array: Bytes = numpy.frombuffer(self._mapping.memory, numpy.uint8, size, HEADER)

        def released(_: weakref.ref[Bytes]) -> None:
            self._loan = None
            if os.getpid() == self._pid:
                on_release()

        self._loan = weakref.ref(array, released)
        return array

    def let_go(self) -> None:
        """What was adopted stays valid; its `on_release` is not called."""
        self._loan = None

    def read(self, size: int) -> Bytes:
        """A copy of the first bytes of the slot's contents, without this reader's writes. Raises ProtocolError."""
        copy: Bytes = numpy.empty(size, numpy.uint8)
        rest = copy.data
        while rest:
            count = os.preadv(self.fd, [rest], HEADER + size - len(rest))
            if not count:
                raise ProtocolError(f"{size} bytes of a slot of {self.size}")
            rest = rest[count:]
        return copy

    def forget(self) -> None:
        """Give back the pages that the reader has written to, once it is released. May take milliseconds.

        It stays stale if the system keeps them.
        """
        if self._loan is None and self.stale:
            with contextlib.suppress(OSError):
                self._mapping.forget_writes()
                self.stale = False
