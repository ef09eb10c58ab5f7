"""The shared-memory channel: a large buffer is copied once, into a block that the receiver then owns in place.

Each end lends blocks of its own arena and adopts those of the other's (shm.py). The messages of the two ends are in
`shared_messages`; neither end waits for one. Until a segment is mapped, and while there is no warm room, `send` takes
nothing: the first buffers to a peer go another way, and a thread prepares the memory meanwhile.

Short buffers of a message with many share a block, each at the next multiple of 64 bytes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ..errors import ProtocolError
from ..interrupts import acquire
from ..options import SHARE_SIZE
from ..protocol.frames import Buffer
from . import Arrived, Channel, ChannelLink, Wire, count_refused
from .arena import TOGETHER_SIZE, Arena, Block, lay_out
from .keeping import Keeper
from .segments import Bytes
from .shared_messages import MESSAGES, Lent, LentPart, Mapped, Message, SegmentOffer, SegmentRefused, Warm
from .shm import Borrower, Copies, Lender

# Bytes: short buffers share a block if together they have the first; a block of short buffers has at most the second,
# which bounds what one of them keeps lent.
PACK_LEAST, PACK_MOST = 64 * 1024, 1024 * 1024
# Bytes from which on a buffer is copied out off the loop.
COPY_SIZE = 1024 * 1024
# Bytes from which on a thread that may wait sends through cold memory, and through memory that the other end has yet to
# map: that takes less time than to send the buffer another way.
COLD_SIZE = 512 * 1024
# Most messages of the other end that wait for a thread, and most segments that it may offer.
MOST_WAITING = 512
# Characters that are kept of the other end's reason for not mapping our memory.
REASON_LIMIT = 1000
NAME = "shared memory"
# The receiver uses the block in place; copies it out; or maps it privately, as others have the block, too. To map a
# short one costs more than to copy it.
IN_PLACE, COPY_OUT, PRIVATE = range(3)


class Surroundings(ChannelLink, Protocol):
    """What the channel needs around it."""

    def on_refused(self, reason: str) -> None:
        """The other end cannot use our memory. On the loop."""

    def on_closed(self, channel: SharedMemory) -> None:
        """The channel is closed; lent blocks may still be in use. On the loop."""

    def on_cold(self, size: int) -> None:
        """The arena had no warm room for so many bytes. Any thread."""

    def may_wait(self) -> bool:
        """Whether this thread may wait for the other end to map a segment: not on a loop. Any thread."""

    def wait(self, wait: Callable[[float], object]) -> None:
        """Call `wait` with how many seconds it may take. Another thread does this one's work meanwhile."""


def descriptor() -> dict[str, object]:
    """What the other end needs to know of this process in order to decide whether memory can be shared."""
    return {"user": os.getuid(), "processes": _process_namespace()}


def obstacle(one: object, other: object) -> str:
    """Why processes with these descriptors cannot share memory; empty if nothing speaks against trying."""
    if type(one) is not dict or type(other) is not dict:
        return "it does not share memory"
    if one.get("user") != other.get("user"):
        return "it runs as another user"
    if one.get("processes") != other.get("processes"):
        return "it is in another process namespace, where the files of this process cannot be opened"
    return ""


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class SharedMemory(Channel):
    """One end. See the module.

    pid: of the process at the other end, as this process sees it. least: bytes of the shortest buffer that gets a block
    of its own. keeper: knows the buffers that lie in the arena already.
    """

    name = NAME
    borrows = False

    def __init__(
        self,
        arena: Arena,
        pid: int,
        surroundings: Surroundings,
        *,
        least: int = SHARE_SIZE,
        keeper: Keeper,
    ) -> None:
        super().__init__()
        self.arena = arena
        self._keeper = keeper
        self.lender: Lender = Lender(arena)
        self.lender.refused = self.traffic.refused
        self.borrower: Borrower = Borrower(surroundings.watch)
        self.released: deque[Any] = self.borrower.released
        self._pid = pid
        self._least = least
        self._around = surroundings
        self._offered: set[int] = set()
        self._mapped: set[int] = set()
        self._is_mapped = self._mapped.__contains__
        self._unmappable: set[int] = set()  # segments that the other end refused, or has not mapped in time
        # One for each thread that waits for a change of these two sets.
        self._gates: list[threading.Lock] = []
        self._wanted = False
        self._waiting: deque[None] = deque()  # one entry for each message of the other end that waits for a thread
        self._offers = 0  # of the other end
        self._answered: set[int] = set()  # segments that the other end has mapped or refused
        self._closed = False

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer], riders: list[Buffer], copies: Copies | None = None) -> list[Wire | None]:
        """Copy the buffers that are worth a block. A wire is the fields of a Lent or a LentPart."""
        wires: list[Wire | None] = [None] * len(buffers)
        groups = _groups(buffers, self._least)
        send = partial(self._send_group, buffers, wires, copies)
        try:
            if copies is None and len(groups) > 1 and self.to_copy(buffers) >= TOGETHER_SIZE:
                self.arena.together(send, groups)
            else:
                for group in groups:
                    send(group)
        except Exception:
            self.withdraw([wire for wire in wires if wire is not None], named=False)
            raise
        return wires

    def to_copy(self, buffers: Sequence[Buffer]) -> int:
        """Bytes that `send` would copy: all except those in the arena."""
        keeper, size = self._keeper, sum(map(len, buffers))
        if not keeper.keeps:
            return size
        return size - sum(block.size for block in map(keeper.find, buffers) if block is not None)

    def _send_group(
        self, buffers: Sequence[Buffer], wires: list[Wire | None], copies: Copies | None, group: list[int]
    ) -> None:
        members = [buffers[index] for index in group]
        lent = self._lend(members, copies)
        if lent is None:
            return
        block, copy_out = lent
        if len(group) == 1:
            wires[group[0]] = [*block, copy_out]  # a Lent
            self.traffic._count_sent(len(members[0]))
            return
        for index, span in zip(group, lay_out(map(len, members))[0], strict=True):
            wires[index] = [*LentPart(*block, copy_out, *span)]
            self.traffic._count_sent(span[1])

    def send_one(self, buffer: Buffer, copies: Copies | None = None) -> Wire | None:
        """`send` for a message of one buffer."""
        lent = None if len(buffer) < self._least else self._lend((buffer,), copies)
        if lent is None:
            return None
        self.traffic._count_sent(len(buffer))
        block, copy_out = lent
        return [*block, copy_out]  # a Lent

    def _lend(self, buffers: Sequence[Buffer], copies: Copies | None) -> tuple[Block, int] | None:
        """The block, and how the receiver uses it (IN_PLACE and so on)."""
        if self._closed:
            return None
        keeper, kept = self._keeper, None
        alone = copies is None and len(buffers) == 1
        if alone and keeper.keeps:
            kept = keeper.find(buffers[0])
        large = alone and len(buffers[0]) >= COLD_SIZE
        if not self._mapped:
            self.offer_all()
        lent = self.lender.lend(
            buffers[0],
            others=buffers[1:],
            usable=self._is_mapped,
            soon=self._usable_soon if large else None,
            copies=copies,
            kept=kept,
            cold=self._may_wait if large else None,
            confirm=self._confirm if large else None,
        )
        if lent is not None:
            block, crowded = lent
            if not crowded and copies is None:
                return block, IN_PLACE
            return block, COPY_OUT if crowded or block.size < COPY_SIZE else PRIVATE
        if self.lender.last_refusal == "not mapped":
            self.offer_all()
        elif self.lender.last_refusal not in ("share", "retired", "closed"):
            self._wanted = True
            if copies is None or not copies.wanted:  # all receivers share one copy: ask for its room once
                self._around.on_cold(sum(map(len, buffers)))
            if copies is not None:
                copies.wanted = True
        return None

    def offer_all(self) -> None:
        """Ask the other end to map the segments that it was not asked to map yet."""
        for segment in self.arena.segments:
            self._offer(segment.index)

    def _may_wait(self) -> bool:
        """Whether this thread may wait for the other end to map a segment, and the other end seems able to map any."""
        return self._around.may_wait() and (bool(self._mapped) or not self._unmappable)

    def _usable_soon(self, index: int) -> bool:
        """Whether the other end may be mapping that segment. Asks it to if it was not asked before."""
        self._offer(index)
        return self._may_wait() and index not in self._unmappable

    def _confirm(self, index: int) -> bool:
        """Wait until the other end has answered the offer of a segment; whether it has mapped it."""
        if index not in self._mapped:
            self._around.wait(partial(self._wait_for, index))
        return index in self._mapped

    def _wait_for(self, index: int, seconds: float) -> None:
        gate, until = threading.Lock(), time.monotonic() + seconds
        self._gates.append(gate)  # before the check: a change after the check opens the gate
        try:
            while not (self._closed or index in self._mapped or index in self._unmappable):
                left = until - time.monotonic()
                if left <= 0:
                    self._unmappable.add(index)  # do not wait for it again
                    break
                acquire(gate, left)
        finally:
            self._gates.remove(gate)

    def _open_gates(self) -> None:
        for gate in self._gates.copy():
            with contextlib.suppress(RuntimeError):  # it is open already
                gate.release()

    def _offer(self, index: int) -> None:
        if index in self._offered:
            return
        segments = self.arena.segments
        if index >= len(segments):  # closed meanwhile, by the loop
            return
        self._offered.add(index)
        segment = segments[index]
        self._say(SegmentOffer(index, segment.fd, segment.size, segment.nonce))

    def grown(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """These ranges (segment, start, bytes) of the arena are warm now: tell the other end if it may need them."""
        if not self._wanted or self._closed:
            return
        for index, start, size in ranges:
            if index in self._mapped:
                self._say(Warm(index, start, size))
            else:
                self._offer(index)

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """Free the blocks of an unsent message; the receiver releases the others."""
        if named:
            return
        for block in {_block_of(wire) for wire in wires}:
            self.lender.taken_back(block)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Buffer | None]:
        """The blocks, in place. Long ones that are copied out arrive when a thread has done so."""
        buffers: list[Buffer | None] = []
        packs: dict[int, memoryview] = {}
        several = len(wires) > 1
        left = self.borrower.mapped if several else 0
        for index, wire in enumerate(wires):
            if type(wire) is not list:
                raise ProtocolError(f"not a block: {wire!r:.100}")
            if len(wire) == len(LentPart._fields):
                part = LentPart(*wire)
                if type(part.generation) is not int:
                    raise ProtocolError(f"not a block: {wire!r:.100}")
                if several and part.generation not in packs:
                    left = _without(left, part.size)
                buffers.append(self._part(part, packs))
                continue
            *numbers, copy_out = wire or [None]
            if several and len(numbers) == len(Block._fields):
                left = _without(left, numbers[2])
            block = self.borrower.adopt(numbers, private=copy_out == PRIVATE)
            self.traffic._count_received(block.nbytes)
            if copy_out == COPY_OUT and block.nbytes >= COPY_SIZE:
                buffers.append(None)
                self._around.in_background(self._copy_out, [block], partial(arrived, index))
            else:
                buffers.append((block.copy() if copy_out == COPY_OUT else block).data)
            del block
        return buffers

    def receive_one(self, wire: Wire, landing: object = None) -> memoryview | None:
        """`receive` for a block to be used in place; None for any other."""
        if len(wire) != len(Lent._fields):
            return None
        *numbers, copy_out = wire
        if copy_out == COPY_OUT:
            return None
        block = self.borrower.adopt(numbers, private=copy_out == PRIVATE)
        self.traffic._count_received(block.nbytes)
        return block.data

    def is_here(self, wire: Wire) -> bool:
        """Whether `receive_one` has that block at once, in any thread."""
        return len(wire) == len(Lent._fields) and wire[-1] != COPY_OUT and self.borrower.has(wire[0])

    def _part(self, part: LentPart, packs: dict[int, memoryview]) -> Buffer:
        """One of several buffers in a block. A slice of the memoryview keeps the block."""
        *numbers, copy_out, start, length = part
        pack = packs.get(part.generation)
        if pack is None:
            pack = packs[part.generation] = self.borrower.adopt(numbers, bool(copy_out)).data
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= len(pack):
            raise ProtocolError(f"a part outside of its block: {part!r:.100}")
        self.traffic._count_received(length)
        return pack[start : start + length]

    def _copy_out(self, block: list[Bytes], arrived: Callable[[Buffer | Exception], None]) -> None:
        """In a thread. block: a list, from which it is popped and released here, before the thread's next job."""
        try:
            outcome: Buffer | Exception = block.pop().copy().data
        except MemoryError as error:  # fails this message alone
            outcome = error.with_traceback(None)
        self._around.on_loop(self._copied_out, arrived, outcome)

    def _copied_out(self, arrived: Callable[[Buffer | Exception], None], outcome: Buffer | Exception) -> None:
        if not self._closed:
            arrived(outcome)

    def flush(self, *, more: bool = False) -> None:
        """Give back what was released, if anything was. more: a message follows at once. Any thread."""
        released = self.borrower.drain()
        if released:
            self._around.give_back(released, more=more)

    @property
    def borrowed(self) -> bool:
        """Whether blocks of the other end are in use here."""
        return self.borrower.borrowed

    def on_release(self, released: Sequence[Sequence[int]]) -> None:
        """The other end has given these blocks back. Any thread. Raises ProtocolError as `Lender.released`."""
        self.lender.released(released)

    # --- messages, on the loop ----------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._around.post(MESSAGES.write(message))

    def on_message(self, fields: list[object]) -> None:
        """From the other end. Raises ProtocolError."""
        match MESSAGES.read(fields):
            case SegmentOffer(index, fd, size, nonce):
                self._offers += 1
                if len(self._waiting) >= MOST_WAITING:
                    raise ProtocolError(f"more than {MOST_WAITING} segments are offered at once")
                if self._offers > MOST_WAITING:  # each gets an answer, which the other end may not read
                    raise ProtocolError(f"more than {MOST_WAITING} segments are offered")
                if not self._closed:
                    self._in_thread(self._map, index, fd, size, nonce)
            case Mapped(index):
                if index not in self._offered:
                    raise ProtocolError(f"segment {index} was mapped, and not offered")
                self._hear_answer(index)
                self._mapped.add(index)
                self._open_gates()
            case Warm(index, start, size):
                if not self._closed and len(self._waiting) < MOST_WAITING:  # dropped otherwise: it is only a hint
                    self._in_thread(self.borrower.touch, index, start, size)
            case SegmentRefused(index, reason):
                self._hear_answer(index)
                self._unmappable.update({index} & self._offered)
                self._open_gates()
                count_refused(self.traffic.refused, "refused")
                self._around.on_refused(f"it cannot map our memory: {reason[:REASON_LIMIT]}")

    def _hear_answer(self, index: int) -> None:
        """One answer to each offer is allowed: more reasons for refusals would fill the log."""
        if index in self._answered or len(self._answered) >= MOST_WAITING:
            raise ProtocolError(f"an answer to the offer of segment {index}, which is one too many")
        self._answered.add(index)

    def _in_thread(self, function: Callable[..., None], *args: object) -> None:
        self._waiting.append(None)
        self._around.in_background(self._see_to, function, *args)

    def _see_to(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        finally:
            self._waiting.pop()

    def _map(self, index: int, fd: int, size: int, nonce: bytes) -> None:
        """In a thread. Answers before it touches the pages: the other end may wait for the answer."""
        try:
            self.borrower.map(index, f"/proc/{self._pid}/fd/{fd}", size, nonce)
        except Exception as error:
            self._say(SegmentRefused(index, f"{type(error).__name__}: {error}"))
        else:
            self._say(Mapped(index))
            self.borrower.touch_present(index)

    def close(self) -> None:
        """Lent blocks stay lent until the other end provably cannot use them; adopted ones stay valid."""
        if self._closed:
            return
        self._closed = True
        self._open_gates()
        self.lender.retire()
        self.borrower.close()
        self._around.on_closed(self)


def _without(left: int, size: object) -> int:
    """Bytes that remain of `left` after one more block of a message. Raises ProtocolError if there are not so many.

    The blocks of a message do not overlap. Without this check a short message could have the same bytes copied out any
    number of times.
    """
    if type(size) is not int or size > left:
        raise ProtocolError("a message with blocks of more bytes than there are")
    return left - size


def _block_of(wire: Wire) -> Block:
    """The block of a Lent or a LentPart of ours."""
    segment, offset, size, generation, *_ = wire
    return Block(segment, offset, size, generation)


def _groups(buffers: Sequence[Buffer], least: int) -> list[list[int]]:
    """The buffers that get a block, by index; those of an inner list share one."""
    if len(buffers) == 1:
        return [[0]] if len(buffers[0]) >= least else []
    groups: list[list[int]] = []
    short: list[int] = []
    for index, buffer in enumerate(buffers):
        if len(buffer) >= least:
            groups.append([index])
        elif len(buffer):
            short.append(index)
    pack: list[int] = []
    size = 0
    for index in short:
        if pack and size + len(buffers[index]) > PACK_MOST:
            groups.append(pack)
            pack, size = [], 0
        pack.append(index)
        size += len(buffers[index])
    if size >= PACK_LEAST:
        groups.append(pack)
    return groups
