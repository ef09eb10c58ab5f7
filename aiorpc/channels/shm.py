"""Shared memory between two processes of one host: the lender's half and the borrower's.

The lender copies a buffer into a block of its arena and sends the block's numbers; the borrower makes an array over its
own mapping of the same memory and owns the bytes until the last view of any kind of it has died. Then the numbers
travel back and the block is free again. Nothing here knows of connections, calls or tensors.

Who owns a block
1. From `lend` to `taken_back`, `released` or `reclaim`: the peer. The lender neither reads nor writes it meanwhile.
2. A connection that ends changes nothing (`retire`): the peer may still use what it adopted. Only the proof that its
   process is gone does (`reclaim`).
3. Each adopted block is released once: by its last view, or at once when it was copied out.
4. A block that is lent to several peers (`Copies`) is used again after the last of them is done with it. None of them
   writes to it: each maps it privately, or copies it out.

What is read here is mapped only where its file is sealed. Of another one the lender could cut something off, and the
system would end whoever reads that: it is read like any file, and each block is copied out.
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

# Of one peer, whose segments become ever longer: the system lets a process map only so many files.
_MOST_SEGMENTS = 256
_MOST_PRIVATE = 1024  # adopted blocks of one peer, beyond which none is mapped by itself: the same limit


_new: Any = tuple.__new__  # what Block(...) does, without its call into Python


class Copies:
    """The copies in an arena of buffers that several peers get: each is made once. One thread at a time.

    Each peer holds its lease of a copy, and this holds the copy itself until `close`. wanted: whether the arena was
    asked already for the room that it lacked.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # By the ids of the buffers, which are kept so that no others have these.
        self._made: dict[tuple[int, ...], tuple[Sequence[Buffer], Block]] = {}
        self.wanted = False

    def find(self, buffers: Sequence[Buffer]) -> Block | None:
        """The copy of these very buffers, if there is one."""
        made = self._made.get(tuple(map(id, buffers)))
        return None if made is None else made[1]

    def add(self, buffers: Sequence[Buffer], block: Block) -> None:
        """That block is the copy of these buffers."""
        self._arena.share(block)
        self._made[tuple(map(id, buffers))] = buffers, block

    def close(self) -> None:
        """No further peer gets them. What was lent stays so until it is given back. Again: nothing."""
        made, self._made = self._made, {}
        for _, block in made.values():
            self._arena.free(block)


class Lender:
    """The sending half, for one peer process. Any thread.

    Fractions of the arena's limit: share: what this peer may hold, soft: what may be in use in all, before peers are
    asked to copy at once; most: what this peer may hold at all.
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
        """Copy the buffers, each at the next multiple of `ALIGN`, into a fresh block that is the peer's from now on.

        others: that go into the same block, behind the first one.
        copies: of buffers that others get, too: a block that is there is lent to this peer as well.
        kept: a block that has the bytes already; it is lent as it is, but not twice at a time.
        usable: asked, before anything is copied, whether the peer can use the segment of that index. soon: asked where
        it cannot, whether the peer may be about to.
        cold: asked whether cold memory is to be taken, where there is no other. confirm: asked after the copy, for a
        segment that the peer could not use before it, whether it can by now; it may wait for that.
        The flag asks the peer to copy it out at once. None: send the bytes another way (`refused` says why).
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
        except OSError as error:  # what the system had promised it has not
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
        """Count so many bytes as lent; or why not."""
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
        """Copy the buffers into a block, if the peer can use it; or why not. made: the block, if it has them already.
        usable, soon, confirm: as of `lend`."""
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
        """The block is the peer's; or why not. After the copy: until then `reclaim` must not free it."""
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
        """The frame that mentions this block was not sent and never will be. Raises ValueError for no lease."""
        if block != self._leases.get(block.generation) and not self._reclaimed:
            raise ValueError(f"{block} is not lent")
        self.released((block,))

    def released(self, blocks: Sequence[Sequence[int]]) -> None:
        """The peer is done with these blocks, each of which is the fields of a `Block`. Raises ProtocolError for one
        that the peer does not hold."""
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
        """The connection is gone: nothing more is lent; what is lent stays so."""
        with self._lock:
            self._retired = True

    def reclaim(self) -> None:
        """The peer's process is proved gone: its blocks are free. Again: nothing."""
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
    """Knows when the last view of an adopted block has died: all of them keep the array itself alive."""

    __slots__ = ("block",)
    block: Block


class Borrower:
    """The receiving half, for one peer process. Any thread.

    Nobody is told when the last view of a block has died: `drain` finds it. on_loan: called whenever it is to be looked
    for from now on; from any thread.
    """

    def __init__(self, on_loan: Callable[[], None]) -> None:
        self._on_loan = on_loan
        self._mappings: dict[int, tuple[Mapping | _Unsealed, bytes]] = {}
        self._loans: dict[tuple[int, int], Loan] = {}  # by segment and offset
        #: For `drain`; public so that one can look cheaply whether there is anything.
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

        Raises OSError when it cannot be opened or mapped, ProtocolError when it is not what the peer says it is.
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
        """As `touch`, of what there is of a mapped segment."""
        known = self._mappings.get(index)
        if known is not None and type(known[0]) is Mapping:
            for start, end in _present(known[0].memory.file.fd, known[0].size):
                self.touch(index, start, end - start)

    def touch(self, index: int, start: int, size: int) -> None:
        """Have these bytes of a mapped segment in this process's tables. Only a hint. Slow; for a thread."""
        known = self._mappings.get(index)
        if known is not None and type(known[0]) is Mapping and 0 <= start <= start + size <= known[0].size:
            known[0].touch(start, start + size, MADV_POPULATE_READ, stop=lambda: self._closed)

    def adopt(self, numbers: object, copy: bool = False, private: bool = False) -> Bytes:
        """The block of these numbers, as an array of bytes that is the caller's as long as any view of it lives.

        copy: as memory of its own; the block is released at once. private: others read the block, too, so that what is
        written to the array is not written to the block; it is copied if the system maps no more.
        Raises ProtocolError for numbers that name no block.
        """
        mapping = self._check(numbers)
        block: Block = _new(Block, numbers)
        if isinstance(mapping, _Unsealed):
            read = mapping.read(block.offset, block.size)
            self._give_back(block)
            return read
        if block.size >= MIB:
            check_present(mapping.memory.file.fd, block.size)
        # Over the mmap, not over an array: a view of a view would refer to that one and let the block die.
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
        # The last view may die in any thread, and in the midst of anything. What is called then needs no lock.
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
            except IndexError:  # another thread was faster
                break
            if isinstance(each, Loan):
                self._loans.pop((each.block.segment, each.block.offset), None)
            blocks.append(each.block if isinstance(each, Loan) else each)
        return blocks

    def close(self) -> None:
        """Nothing is adopted or released any more. What was adopted stays valid as long as it lives.

        In a forked child it is the parent's: what is written to it there is not shared (`segments`), and what was not
        may change at any time, once the parent has let go of it.
        """
        self._closed = True
        self._mappings = {}  # each goes with the last who refers to it
        self._loans = {}  # a weak reference that is gone calls nobody
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
    """Whether it is safe to map it. Raises ProtocolError if it is not what the peer says it is.

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
    if not sealed and seals != fcntl.F_SEAL_SEAL:  # nobody has to leave them out
        raise ProtocolError("a segment that is not sealed")
    # Memory in pages of another size may be promised and not be there: to touch it ends the process. The blocks of such
    # a file are as long as its pages.
    if sealed and status.st_blksize != PAGE:
        raise ProtocolError(f"a segment in pages of {status.st_blksize} bytes, which is no ordinary memory")
    if len(nonce) != NONCE_SIZE or not any(nonce) or os.pread(fd, NONCE_SIZE, 0) != nonce:
        raise ProtocolError("a segment without the peer's nonce: not the same memory")
    return sealed


def check_present(fd: int, size: int) -> None:
    """See that a file takes up so many bytes of memory: who reads what is missing has to give the memory for it.

    Raises ProtocolError.
    """
    there = os.fstat(fd).st_blocks * 512
    if there < size:
        raise ProtocolError(f"{size} bytes of shared memory, of which there are {there}")


def _present(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Stretches of the file that take up memory. Only these are touched: reading a hole would fill it."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:  # no data from here on
            return
        yield start, min(end, size)
