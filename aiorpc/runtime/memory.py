"""Shared memory in the runtime: who lends to whom, and the few messages that this takes.

Large buffers to a worker of this host are copied into a block of our arena, and the message names the block; the
receiver works on the same memory. Each connection between workers of one host has a `Sharing` at either end, which
tells the other what it may map:

    MEMORY frame                             says
    offer, segment, fd, size, nonce          map this segment of my arena; I should like to send through it
    mapped, segment                          done: blocks of it may come
    refused, segment, reason                 it cannot be done: send the bytes
    release, [blocks]                        these are yours again

Nothing waits for any of it: until a segment is mapped, and whenever the arena has no room, bytes go with the frame.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..channels.arena import Arena, Block
from ..channels.shm import Borrower, Lender
from ..errors import ProtocolError
from ..protocol.codec import pack
from ..protocol.frames import Buffer, Kind, encode_frame
from ..protocol.identity import WorkerRecord
from ..transport.connection import Connection
from .host import provably_dead
from .watch import ProcessWatch

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger("aiorpc")

OFFER, MAPPED, REFUSED, RELEASE = "offer", "mapped", "refused", "release"
# Below this, in bytes, a copy into the frame costs less than a block (measured: about equal at 100 KB).
SHARE_SIZE = 128 * 1024
# What was released travels with the next message, or by itself after this many seconds.
RELEASE_PAUSE = 0.01
# Seconds after which memory of the arena that nobody used goes back to the system.
TRIM_PAUSE = 60.0


class Memory:
    """The arena of one worker, and all that was lent out of it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.arena = Arena(worker.options.shared_memory)
        self.sent = 0
        self.bytes_sent = 0
        self._sharings: set[Sharing] = set()
        self._retired: list[tuple[WorkerRecord, Lender]] = []
        self._past_refusals: Counter[str] = Counter()
        self._trimming: asyncio.TimerHandle | None = None
        # Its own: the group's ends with the connection, and that may come before the end of the process.
        self._watch = ProcessWatch(worker.loop, lambda record: self.collect())

    def share(self, connection: Connection, record: WorkerRecord) -> Sharing | None:
        """The sharing of a new connection to that worker; None where memory cannot be shared. On the loop."""
        if not connection.local or not self._worker.options.shared_memory:
            return None
        sharing = Sharing(self._worker, self, connection, record)
        self._sharings.add(sharing)
        if self._trimming is None:
            self._trim_later()
        return sharing

    def _trim_later(self) -> None:
        self._trimming = self._worker.loop.call_later(TRIM_PAUSE, self._trim)

    def _trim(self) -> None:
        """Give memory back that a burst has left behind."""

        def trim() -> None:
            self.arena.trim()

        if self.arena.segments:
            self._worker.decoders.submit(trim)
        self._trim_later()

    @property
    def refused(self) -> Counter[str]:
        """How often a large buffer went with its frame all the same, by reason."""
        total = Counter(self._past_refusals)
        for sharing in list(self._sharings):
            total.update(sharing.lender.refused)
        return total

    @property
    def lent(self) -> int:
        """Bytes that other workers hold."""
        lenders = [sharing.lender for sharing in list(self._sharings)] + [lender for _, lender in self._retired]
        return sum(lender.lent for lender in lenders)

    def ended(self, sharing: Sharing) -> None:
        """Its connection is gone. What the other side has adopted stays its own until its process ends."""
        self._sharings.discard(sharing)
        self._past_refusals.update(sharing.lender.refused)
        self._retired.append((sharing.record, sharing.lender))
        self.collect()
        record = sharing.record
        if sharing.lender.leases and record.pid != os.getpid() and not self.arena.closed:
            self._watch.add(record)

    def collect(self) -> None:
        """Take back what was lent to processes that are gone. On the loop."""
        here = self._worker.record.host
        retired, self._retired = self._retired, []
        for record, lender in retired:
            if provably_dead(record, here):
                lender.reclaim()
            if lender.leases:
                self._retired.append((record, lender))

    def close(self) -> None:
        """Let go of the arena; what others have adopted stays valid for them."""
        if self._trimming is not None:
            self._trimming.cancel()
        self.arena.close()
        for sharing in list(self._sharings):
            sharing.close()
        self._watch.close()

    def close_in_child(self) -> None:
        """After a fork: all of it is the parent's."""
        for sharing in list(self._sharings):
            sharing.borrower.close_in_child()
        self._watch.close_in_child()
        self.arena.close_in_child()


class Sharing:
    """One end of a connection whose other end can map our memory. `share` and `restore` from any thread."""

    def __init__(self, worker: Worker, memory: Memory, connection: Connection, record: WorkerRecord) -> None:
        self.record = record
        self.lender = Lender(memory.arena)
        self.borrower = Borrower(self._on_release)
        self.released = self.borrower.released  # what `flush` would send
        self._worker = worker
        self._memory = memory
        self._connection = connection
        self._offered: set[int] = set()
        self._mapped: set[int] = set()
        self._timed = False
        self._closed = False

    # --- sending ------------------------------------------------------------------------------------------------------

    def share(self, segments: Sequence[Buffer]) -> tuple[list[list[int]], list[Buffer]]:
        """Put the large ones into shared memory: ``[position, *block, copy out]`` for each of those, and the rest."""
        shared: list[list[int]] = []
        rest: list[Buffer] = []
        for position, segment in enumerate(segments):
            wire = self._lend(position, segment) if len(segment) >= SHARE_SIZE else None
            if wire is None:
                rest.append(segment)
            else:
                shared.append(wire)
        return shared, rest

    def _lend(self, position: int, segment: Buffer) -> list[int] | None:
        if self._offered and not self._mapped:
            return None
        lent = self.lender.lend(segment, self._usable)
        if lent is None:
            self._worker.call_on_loop(self._memory.collect)
            return None
        block, copy_out = lent
        self._memory.sent += 1
        self._memory.bytes_sent += block.size
        return [position, *block, int(copy_out)]

    def _usable(self, index: int) -> bool:
        """Whether the other side has mapped that segment; if it was never asked, it is now."""
        if index in self._mapped:
            return True
        self._offer(index)
        return False

    def take_back(self, shared: list[list[int]]) -> None:
        """The message that named these will not be sent."""
        for wire in shared:
            self.lender.taken_back(Block(*wire[1:5]))

    def _offer(self, index: int) -> None:
        if index in self._offered:
            return
        segments = self._memory.arena.segments
        if index >= len(segments):  # closed meanwhile, by the loop
            return
        self._offered.add(index)
        segment = segments[index]
        self._send([OFFER, index, segment.fd, segment.size, segment.nonce])

    # --- receiving ----------------------------------------------------------------------------------------------------

    def restore(self, shared: Any, segments: Sequence[Buffer]) -> list[Buffer]:
        """All buffers of a message in order: those that came with it and those in shared memory."""
        whole: list[Any] = list(segments)
        try:
            for position, *block, copy_out in shared:
                whole.insert(position, self.borrower.adopt(block, bool(copy_out)))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a message whose shared blocks are none: {error}") from None
        return whole

    def _on_release(self) -> None:
        # From any thread, and from inside the garbage collector.
        if not self._timed:
            self._timed = True
            self._worker.call_on_loop(self._flush_later)

    def _flush_later(self) -> None:
        self._worker.loop.call_later(RELEASE_PAUSE, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timed = False
        self.flush()

    def flush(self, *, more: bool = False) -> None:
        """Send what was released, if anything was. more: another frame follows at once. Any thread."""
        released = self.borrower.drain()
        if released:
            self._send([RELEASE, released], more=more)

    # --- messages, on the loop ----------------------------------------------------------------------------------------

    def on_message(self, fields: list[Any]) -> None:
        """A MEMORY frame. Raises ProtocolError."""
        try:
            tag, *rest = fields
            if tag == OFFER:
                index, fd, size, nonce = rest
                if self._closed:  # we leave: the threads that map are gone
                    return
                self._worker.decoders.submit(self._map, int(index), int(fd), int(size), bytes(nonce))
            elif tag == MAPPED:
                self._mapped.add(int(rest[0]))
            elif tag == REFUSED:
                logger.info("%s cannot map our memory: %s; large tensors go by socket", self.record.describe(), rest[1])
            elif tag == RELEASE:
                self.lender.released(rest[0])
            else:
                raise ProtocolError(f"a message about memory that is none: {str(tag)[:40]}")
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"a message about memory that is none: {error}") from None

    def _map(self, index: int, fd: int, size: int, nonce: bytes) -> None:
        """In a thread: mapping makes the pages of the segment known to this process."""
        try:
            self.borrower.map(index, f"/proc/{self.record.pid}/fd/{fd}", size, nonce)
        except Exception as error:
            self._send([REFUSED, index, f"{type(error).__name__}: {error}"])
        else:
            self._send([MAPPED, index])

    def _send(self, message: list[Any], *, more: bool = False) -> None:
        self._connection.send(encode_frame(Kind.MEMORY, 0, pack(message)), more=more)

    def close(self) -> None:
        """The connection has ended, or we leave. On the loop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.lender.retire()
        self.borrower.close()
        self._memory.ended(self)
