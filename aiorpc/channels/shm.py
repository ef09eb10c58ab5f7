"""Shared memory between two processes of one host: the lender's half and the borrower's.

The lender copies a buffer into a block of its arena and sends the block's numbers. The borrower makes an array over its
own mapping of the same memory and owns the bytes until the last view of them has died. Then the numbers travel back and
the block is free again. This module knows no connections, calls or tensors.

Who owns a block
1. From `lend` to `taken_back`, `released` or `reclaim`: the peer. The lender neither reads nor writes it meanwhile.
2. The end of a connection changes nothing (`retire`): the peer may still use what it adopted. Only the proof that its
   process is gone frees its blocks (`reclaim`).
3. Each adopted block is released once: by its last view, or at once when it was copied out.
4. A block that is lent to several peers (`Copies`) is reused after the last of them has released it. None of them
   writes to it: each maps it privately, or copies it out.

A segment is mapped only if its file is sealed. The lender could shorten another file, and the system would kill the
process that reads what was cut off: such a file is read, and each block is copied out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from ..errors import ProtocolError
from ..locks import Lock
from ..protocol.frames import Buffer
from ..protocol.packing import shown
from . import count_refused
from .arena import ALIGN, Arena, Block, lay_out
from .segments import HEADER, MADV_POPULATE_READ, NONCE_SIZE, Bytes, Mapping, OwnedDescriptor, map_private
from .space import MIB, PAGE

# Segments of one peer, each larger than the one before: the system limits the mappings of a process.
_MOST_SEGMENTS = 256
_MOST_PRIVATE = 1024  # adopted blocks of one peer; with more, none is mapped privately: the same limit


class Copies:
    """The copies in an arena of buffers that several peers get: each is made once. Used by one thread at a time.

    Each peer has a lease of a copy, and this object holds the copy itself until `close`. wanted: whether the arena was
    already asked for missing room.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # By the ids of the buffers, which are kept alive: no other buffers get these ids.
        self._made: dict[tuple[int, ...], tuple[Sequence[Buffer], Block]] = {}
        self.wanted = False

    def find(self, buffers: Sequence[Buffer]) -> Block | None:
        """The copy of these buffers, if there is one."""
        made = self._made.get(tuple(map(id, buffers)))
        return None if made is None else made[1]

    def add(self, buffers: Sequence[Buffer], block: Block) -> None:
        """That block is the copy of these buffers."""
        self._arena.share(block)
        self._made[tuple(map(id, buffers))] = buffers, block

    def close(self) -> None:
        """No further peer gets the copies. Lent ones stay lent until they are released. Idempotent."""
        made, self._made = self._made, {}
        for _, block in made.values():
            self._arena.free(block)


class Lender:
    """The sending half, for one peer process. Any thread.

    Fractions of the arena's limit: share: if this peer holds more, or soft: if more is in use in all, a peer is asked
    to copy at once; most: the most that this peer may hold.
    refused: how often `lend` gave None, by reason.
    """

    def __init__(self, arena: Arena, *, share: float = 0.25, soft: float = 0.5, most: float = 0.75) -> None:
        self.arena = arena
        self.refused: Counter[str] = Counter()
        self.last_refusal: str = ""  # why `lend` gave None the last time
        self._share = int(share * arena.limit)
        self._soft = int(soft * arena.limit)
        self._most = int(most * arena.limit)
        self._leases: dict[int, Block] = {}  # by generation
        self._lent = 0
        self._retired = False
        self._reclaimed = False
        self._lock = Lock()

    @property
    def lent(self) -> int:
        """Bytes that the peer holds or is about to be sent."""
        return self._lent

    @property
    def leases(self) -> int:
        """Blocks that the peer holds."""
        return len(self._leases)

    def lend(
        self,
        buffer: Buffer,
        *,
        others: Sequence[Buffer] = (),
        usable: Callable[[int], bool] | None = None,
        soon: Callable[[int], bool] | None = None,
        copies: Copies | None = None,
        kept: Block | None = None,
        cold: Callable[[], bool] | None = None,
        confirm: Callable[[int], bool] | None = None,
    ) -> tuple[Block, bool] | None:
        """Copy the buffers, each at the next multiple of `ALIGN`, into a fresh block that the peer owns from now on.

        others: go into the same block, after the first one.
        copies: of buffers that other peers get, too: an existing copy is lent to this peer as well.
        kept: a block that has the bytes already; it is lent without copying, but not twice at a time.
        usable: asked, before anything is copied, whether the peer can use the segment of that index. soon: asked, if it
        cannot, whether it may be able to soon.
        cold: asked, if there is no warm room, whether cold memory may be taken. confirm: asked after the copy, for a
        segment that was not usable before it, whether it is by now; it may wait for that.
        The flag asks the peer to copy it out at once. None: send the bytes another way (`refused` counts the reasons).
        """
        buffers = (buffer, *others)
        size = len(buffer) if not others else lay_out(map(len, buffers))[1]
        reason = self._reserve(size)
        if reason:
            self._refuse(reason)
            return None
        block = None
        try:
            made = kept if copies is None else copies.find(buffers)
            if made is not None and (copies is not None or made.generation not in self._leases):
                self.arena.share(made)
                block = made
            else:
                made = None
                block = self._allocate(size, cold)
            reason = (
                self.arena.last_refusal if block is None else self._fill(block, buffers, made, usable, soon, confirm)
            )
            if block is not None and not reason:
                if copies is not None and made is None:
                    copies.add(buffers, block)
                reason = self._lease(block)
                if not reason:
                    return block, self._lent > self._share or self.arena.used > self._soft
        except OSError as error:  # the system lacks memory that it had promised
            reason = f"memory: {error.strerror}"
        except Exception:
            if not self.arena.closed:
                self._give_up(size, block)
                raise
            reason = "closed"
        self._give_up(size, block)
        self._refuse(reason)
        return None

    def _reserve(self, size: int) -> str:
        """Count so many bytes as lent; returns the reason if it cannot."""
        with self._lock:
            if self._retired:
                return "retired"
            if self._lent and self._lent + size > self._most:
                return "share"
            self._lent += size
        return ""

    def _allocate(self, size: int, cold: Callable[[], bool] | None) -> Block | None:
        block = self.arena.allocate(size)
        return self.arena.allocate_cold(size) if block is None and cold is not None and cold() else block

    def _fill(
        self,
        block: Block,
        buffers: Sequence[Buffer],
        made: Block | None,
        usable: Callable[[int], bool] | None,
        soon: Callable[[int], bool] | None,
        confirm: Callable[[int], bool] | None,
    ) -> str:
        """Copy the buffers into a block, if the peer can use it; returns the reason if not. made: the block, if it has
        the bytes already. usable, soon, confirm: see `lend`."""
        segment = block.segment
        unusable = usable is not None and not usable(segment)
        if unusable and (soon is None or not soon(segment)):
            return "not mapped"
        if made is None and len(buffers) == 1:
            self.arena.write(block, buffers[0])
        elif made is None:
            for buffer, (start, _) in zip(buffers, lay_out(map(len, buffers))[0], strict=True):
                self.arena.write(block, buffer, start)
        return "not mapped" if unusable and confirm is not None and not confirm(segment) else ""

    def _lease(self, block: Block) -> str:
        """Lease the block to the peer; returns the reason if not. After the copy: `reclaim` must not free it before."""
        with self._lock:
            if self._retired:
                return "retired"
            if block.generation in self._leases:
                return "lent twice"
            self._leases[block.generation] = block
        return ""

    def _give_up(self, size: int, block: Block | None) -> None:
        with self._lock:
            self._lent -= size
        if block is not None:
            self.arena.free(block)

    def taken_back(self, block: Block) -> None:
        """The frame with this block will not be sent. Raises ValueError if the peer does not hold it."""
        if block != self._leases.get(block.generation) and not self._reclaimed:
            raise ValueError(f"{block} is not lent")
        self.released((block,))

    def released(self, blocks: Sequence[Sequence[int]]) -> None:
        """The peer is done with these blocks, each of which is the fields of a `Block`. Raises ProtocolError for a
        block that the peer does not hold."""
        for numbers in blocks:
            with self._lock:
                if self._reclaimed:
                    return
                block = self._leases.get(numbers[3])
                if block is None or block != tuple(numbers):
                    raise ProtocolError(f"a release of a block that is not lent: {numbers}")
                del self._leases[block.generation]
                self._lent -= block.size
            self.arena.free(block)

    def retire(self) -> None:
        """The connection is gone: nothing more is lent; leases stay."""
        with self._lock:
            self._retired = True

    def reclaim(self) -> None:
        """The peer's process is proved gone: its blocks are free. Idempotent."""
        with self._lock:
            self._retired = self._reclaimed = True
            blocks = list(self._leases.values())
            self._leases.clear()
            self._lent -= sum(block.size for block in blocks)
        for block in blocks:
            self.arena.free(block)

    def _refuse(self, reason: str) -> None:
        count_refused(self.refused, reason)
        self.last_refusal = reason


class Loan(weakref.ref[Bytes]):
    """Notes when the last view of an adopted block has died: all views keep the array itself alive."""

    __slots__ = ("block",)
    block: Block


class Borrower:
    """The receiving half, for one peer process. Any thread.

    The death of the last view of a block only notes it; `drain` then finds it. on_loan: called from any thread when
    `drain` should be called from now on.
    """

    def __init__(self, on_loan: Callable[[], None]) -> None:
        self._on_loan = on_loan
        self._mappings: dict[int, tuple[Mapping | _Unsealed, bytes]] = {}
        self._loans: dict[tuple[int, int], Loan] = {}  # by segment and offset
        #: For `drain`; public, for a cheap check whether there is anything.
        self.released: deque[Loan | Block] = deque()
        self._pid = os.getpid()
        self._closed = False

    @property
    def segments(self) -> frozenset[int]:
        """Indices of the segments that are mapped."""
        return frozenset(self._mappings.copy())

    def has(self, index: object) -> bool:
        """Whether the segment of that index is mapped."""
        return type(index) is int and index in self._mappings

    @property
    def held(self) -> int:
        """Bytes of the peer's memory that adopted blocks take."""
        return sum(loan.block.size for loan in self._loans.copy().values() if loan() is not None)

    @property
    def blocks(self) -> int:
        """How many adopted blocks are alive."""
        return sum(loan() is not None for loan in self._loans.copy().values())

    @property
    def mapped(self) -> int:
        """Bytes of the segments that are mapped."""
        return sum(mapping.size for mapping, _ in self._mappings.copy().values())

    @property
    def borrowed(self) -> bool:
        """Whether `drain` may have something, now or later."""
        return bool(self._loans or self.released)

    def map(self, index: int, path: str, size: int, nonce: bytes) -> None:
        """Map the peer's segment, a file of `size` bytes that begins with `nonce`. Slow; for a thread.

        Raises OSError when it cannot be opened or mapped, ProtocolError when it is not what the peer has announced.
        """
        known = self._mappings.get(index)
        if known is not None:
            if known[1] != nonce:
                raise ProtocolError(f"segment {index} is mapped already, and is another one")
            return
        if len(self._mappings) >= _MOST_SEGMENTS:
            raise ProtocolError(f"more than {_MOST_SEGMENTS} segments of one peer")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mapping: Mapping | _Unsealed
            mapping = Mapping(fd, size) if check_file(fd, size, nonce) else _Unsealed(fd, size)
        finally:
            os.close(fd)
        if self._closed:
            raise ProtocolError("closed")
        self._mappings[index] = (mapping, nonce)

    def touch_present(self, index: int) -> None:
        """`touch` all present pages of a mapped segment."""
        known = self._mappings.get(index)
        if known is not None and type(known[0]) is Mapping:
            for start, end in _present(known[0].memory.file.fd, known[0].size):
                self.touch(index, start, end - start)

    def touch(self, index: int, start: int, size: int) -> None:
        """Map these pages of a segment in this process. Only a hint. Slow; for a thread."""
        known = self._mappings.get(index)
        if known is not None and type(known[0]) is Mapping and 0 <= start <= start + size <= known[0].size:
            known[0].touch(start, start + size, MADV_POPULATE_READ, stop=lambda: self._closed)

    def adopt(self, numbers: object, copy: bool = False, private: bool = False) -> Bytes:
        """The block of these numbers, as an array of bytes that the caller owns as long as any view of it lives.

        copy: into memory of its own; the block is released at once. private: other peers read the block, too: writes to
        the array do not reach the block; it is copied if the system allows no more mappings.
        Raises ProtocolError for numbers that name no block.
        """
        mapping = self._check(numbers)
        block = Block(*numbers)  # type: ignore[misc]  # `_check` has seen four integers
        if isinstance(mapping, _Unsealed):
            read = mapping.read(block.offset, block.size)
            self._give_back(block)
            return read
        if block.size >= MIB:
            check_present(mapping.memory.file.fd, block.size)
        # Over the mmap itself: a view of an array would keep that array, and the block would die with this one.
        array: Bytes = numpy.frombuffer(mapping.memory, numpy.uint8, block.size, block.offset)
        if private:
            try:
                copy = copy or len(self._loans) >= _MOST_PRIVATE
                array = array if copy else map_private(mapping.memory.file.fd, block.offset, block.size)
            except OSError:
                copy = True
        if copy:
            taken = array.copy()
            self._give_back(block)
            return taken
        # The last view may die in any thread, at any time: `append` needs no lock.
        loan = Loan(array, self.released.append)
        loan.block = block
        self._loans[block.segment, block.offset] = loan
        self._on_loan()
        return array

    def drain(self) -> list[Block]:
        """The blocks released since the last call, for the lender. None in forked children: they are the parent's."""
        blocks: list[Block] = []
        released = self.released
        while released and os.getpid() == self._pid:
            try:
                each = released.popleft()
            except IndexError:  # another thread took the last one
                break
            if isinstance(each, Loan):
                self._loans.pop((each.block.segment, each.block.offset), None)
            blocks.append(each.block if isinstance(each, Loan) else each)
        return blocks

    def close(self) -> None:
        """Nothing is adopted or released any more. What was adopted stays valid as long as it lives.

        In a forked child a page that the child has written is its own (`segments`); other pages may change at any time,
        once the parent has released them.
        """
        self._closed = True
        self._mappings = {}  # each is unmapped with its last user
        self._loans = {}  # a deleted weak reference calls nothing
        self.released.clear()

    def _check(self, numbers: Any) -> Mapping | _Unsealed:
        try:
            segment, offset, size, generation = numbers
            if type(numbers) is not list or not type(segment) is type(offset) is type(size) is type(generation) is int:
                raise TypeError
        except (TypeError, ValueError):
            raise ProtocolError(f"not a block: {shown(numbers)}") from None
        known = self._mappings.get(segment)
        if known is None:
            raise ProtocolError(f"a block of segment {segment}, which is not mapped")
        if offset < HEADER or offset % ALIGN or size <= 0 or offset + size > known[0].size:
            raise ProtocolError(f"a block outside of its segment: {numbers}")
        if (segment, offset) in self._loans:
            raise ProtocolError(f"a block that is in use here: {numbers}")
        return known[0]

    def _give_back(self, block: Block) -> None:
        self.released.append(block)
        self._on_loan()


class _Unsealed:
    """A segment in a file that cannot be sealed."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._file = OwnedDescriptor(os.dup(fd))

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of these bytes. Raises ProtocolError if they were cut off."""
        array: Bytes = numpy.empty(size, numpy.uint8)
        rest = array.data
        while rest:
            count = os.preadv(self._file.fd, [rest], offset + size - len(rest))
            if not count:
                raise ProtocolError("the peer has cut off the memory that it shares")
            rest = rest[count:]
        return array


def check_file(fd: int, size: object, nonce: bytes) -> bool:
    """Whether the file is safe to map. Raises ProtocolError if it is not what the peer has announced.

    False for a file of a file system without seals, such as one in a folder: it may be read, and not mapped.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or type(size) is not int or status.st_size != size or size < HEADER:
        raise ProtocolError(f"a segment of {status.st_size} bytes, and the peer said something else")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seals = fcntl.F_SEAL_SEAL  # a file system without seals
    sealed = bool(seals & fcntl.F_SEAL_SHRINK)
    if not sealed and seals != fcntl.F_SEAL_SEAL:  # a sealable file must be sealed
        raise ProtocolError("a segment that is not sealed")
    # Pages of another size may be promised and not be there: touching one kills the process. The file's block size is
    # its page size.
    if sealed and status.st_blksize != PAGE:
        raise ProtocolError(f"a segment in pages of {status.st_blksize} bytes, which is no ordinary memory")
    if len(nonce) != NONCE_SIZE or not any(nonce) or os.pread(fd, NONCE_SIZE, 0) != nonce:
        raise ProtocolError("a segment without the peer's nonce: not the same memory")
    return sealed


def check_present(fd: int, size: int) -> None:
    """Check that a file takes up so many bytes of memory: reading a missing page would allocate it.

    Raises ProtocolError.
    """
    there = os.fstat(fd).st_blocks * 512
    if there < size:
        raise ProtocolError(f"{size} bytes of shared memory, of which there are {there}")


def _present(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of the file that take up memory. Only these are touched: reading a hole would fill it."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:  # no data from here on
            return
        yield start, min(end, size)
