"""The memory that a worker shares: how much of it there is, who holds it, and when it comes back.

It grows in the background: a message without room goes another way, and the next one finds room (`want`). It shrinks
when it is unused for a while. Memory that a worker holds stays lent until the worker releases it or its process is
proved gone: the end of a connection proves nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

import torch

from ...channels.arena import Arena
from ...channels.descriptors import Descriptors
from ...channels.keeping import Keeper
from ...channels.shared import SharedMemory
from ...channels.shm import Lender
from ...channels.slots import SharedSlots
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ..engine.coalesced import CoalescedCallback
from ..engine.engine import Engine
from ..engine.host import most_descriptors, provably_dead
from ..engine.watch import ProcessWatch
from .returns import Returns

# Seconds after which unused memory of the arena goes back to the system.
TRIM_PAUSE = 60.0
# Seconds from the first message that found no room until the arena grows, for all that found none meanwhile; longer
# while these messages are still on their other way, which needs the processor itself.
GROW_PAUSE, GROW_PATIENCE = 0.02, 0.5
# The arena grows by the missing bytes, at most to twice its size or by so many bytes, unless one buffer needs more.
GROW_MOST = 64 * 1024 * 1024
# Published values may have one in so many of the descriptors of the process.
_SHARE = 4
# Links that are prepared before anything large is sent, at most: each costs the other end a descriptor.
MOST_PREPARED = 16


class Memory:
    """The arena of one worker, and all that was lent out of it. On the loop, except where a method says otherwise.

    descriptors: of slots, its own and mapped ones of other workers.
    """

    def __init__(self, engine: Engine, busy: Callable[[], bool]) -> None:
        """busy: whether buffers are under way that did not go through shared memory."""
        self._engine = engine
        self._busy = busy
        self.arena: Arena = Arena(
            engine.options.shared_memory,
            poison=sys.flags.dev_mode,
            assist=engine.in_background if len(os.sched_getaffinity(0)) > 1 else None,
        )
        self.descriptors: Descriptors = Descriptors(lambda: most_descriptors() // _SHARE, self._on_full)
        self.slots: SharedSlots = SharedSlots(self.arena, self.descriptors, engine.in_background)
        self.keeper: Keeper = Keeper(self.arena, lambda: self._unused.watch(), self.want)
        self._unused = Returns(engine, self.keeper.collect, lambda: bool(self.keeper.keeps))
        self._shared: dict[SharedMemory, WorkerRecord] = {}
        self._retired: list[tuple[WorkerRecord, Lender]] = []
        self._reasons: set[str] = set()
        self._missing: list[int] = []
        self._unprepared: list[SharedMemory] = []  # until there is a segment
        self._growing = False
        self._grow_soon = CoalescedCallback(engine.call_on_loop, self._grow_later)
        self._trimming: asyncio.TimerHandle | None = None
        # Not the group's watch, which ends with the connection, maybe before the end of the process.
        self._watch = ProcessWatch(engine.loop, lambda record: self.collect())

    # --- who shares ---------------------------------------------------------------------------------------------------

    def add(self, channel: SharedMemory, record: WorkerRecord, *, prepare: bool = False) -> None:
        """A link to that worker shares memory from now on. prepare: make the first segment before anything needs it."""
        self._shared[channel] = record
        if self._trimming is None:
            self._trim_later()
        if not prepare or len(self._shared) > MOST_PREPARED:
            return
        if self.arena.segments:
            channel.offer_all()
            return
        if not self._unprepared:
            self._engine.in_background(self._prepare)
        self._unprepared.append(channel)

    def _prepare(self) -> None:
        """In a background thread: make the first segment."""
        self.arena.prepare()
        self._engine.call_on_loop(self._prepared)

    def _prepared(self) -> None:
        unprepared, self._unprepared = self._unprepared, []
        for channel in unprepared:
            if channel in self._shared:
                channel.offer_all()

    def cannot_share(self, record: WorkerRecord, reason: str) -> None:
        """Memory cannot be shared with that worker. It is logged once for each reason."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.of(self._engine.name).info(
                "no shared memory with %s: %s; large tensors go by socket", record.describe(), reason
            )

    def ended(self, channel: SharedMemory) -> None:
        """A link that shared memory has ended. Blocks that the other end has adopted stay lent until its death."""
        record = self._shared.pop(channel)
        self._retired.append((record, channel.lender))
        self.collect()
        if channel.lender.leases and record.pid != os.getpid() and not self.arena.closed:
            self._watch.add(record)

    def collect(self) -> None:
        """Take back what was lent to dead processes."""
        here = self._engine.record.host
        retired, self._retired = self._retired, []
        for record, lender in retired:
            if provably_dead(record, here):
                lender.reclaim()
            if lender.leases:
                self._retired.append((record, lender))

    def keep(self, size: int) -> torch.Tensor:
        """Memory for so many bytes that must not change after they were first written: another worker may get them in
        place. Any thread.

        Ordinary memory of this process if the arena has no room, or no link shares memory.
        """
        if self._shared and size >= self._engine.options.min_shared_bytes:
            array = self.keeper.keep(size)
            if array is not None:
                return torch.from_numpy(array)
        return torch.empty(size, dtype=torch.uint8)

    def _on_full(self, limit: int) -> None:
        logger.warning(
            "worker %s: published values have %d descriptors open, their share of those that this process may have; "
            "further versions are sent without memory of their own, which takes longer: unpublish what is of no use "
            "any more, publish several tensors together, or raise the limit (ulimit -n)",
            self._engine.name,
            limit,
        )

    # --- growing and shrinking ----------------------------------------------------------------------------------------

    def want(self, size: int) -> None:
        """A message found no room for so many bytes. Any thread."""
        self._missing.append(size)
        if not self._growing:
            self._grow_soon()

    def _grow_later(self) -> None:
        if self._growing or not self._missing:
            return
        self._growing = True
        self.collect()
        self._engine.loop.call_later(GROW_PAUSE, self._grow_when_quiet, time.monotonic() + GROW_PATIENCE)

    def _grow_when_quiet(self, latest: float) -> None:
        if time.monotonic() < latest and self._busy():
            self._engine.loop.call_later(GROW_PAUSE, self._grow_when_quiet, latest)
        else:
            self._engine.in_background(self._grow)

    def _grow(self) -> None:
        """In a background thread, because touching new pages takes long: enlarge the arena."""
        missing, self._missing = self._missing, []
        size = min(sum(missing), max(*missing, self.arena.size, GROW_MOST))
        ranges = self.arena.grow(min(size, self.arena.limit)) or self.arena.grow(max(missing))
        self._engine.call_on_loop(self._grown, ranges)

    def _grown(self, ranges: list[tuple[int, int, int]]) -> None:
        self._growing = False
        for channel in list(self._shared):
            channel.grown(ranges)

    def _trim_later(self) -> None:
        self._trimming = self._engine.loop.call_later(TRIM_PAUSE, self._trim)

    def _trim(self) -> None:
        """Give unused memory back to the system."""

        def trim() -> None:
            self.slots.trim()
            self.arena.trim()

        if self.arena.segments or self.slots.size:
            self._engine.in_background(trim)
        self._trim_later()

    # --- looking, from any thread -------------------------------------------------------------------------------------

    @property
    def lent(self) -> int:
        """Bytes that other workers hold."""
        return sum(lender.lent for lender in self._lenders())

    @property
    def leases(self) -> int:
        """Blocks that other workers hold."""
        return sum(lender.leases for lender in self._lenders())

    def _lenders(self) -> list[Lender]:
        return [channel.lender for channel in list(self._shared)] + [lender for _, lender in list(self._retired)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the arena. Blocks that others have adopted stay valid for them."""
        if self._trimming is not None:
            self._trimming.cancel()
        self.slots.close()
        self._unused.close()
        self.keeper.close()
        self.arena.close()
        for channel in list(self._shared):
            channel.close()
        self._watch.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of everything; it belongs to the parent."""
        for channel in list(self._shared):
            channel.borrower.close()
        self._watch.close_in_child()
        self.slots.close_in_child()
        self.keeper.close()
        self.arena.close_in_child()
