"""What one worker notes while it is recorded, and the handlers by which another worker starts and fetches that.

A recording of a worker is among `Engine.kept` from `begin` until its last piece is fetched, and among the observers
while it notes. It ends by itself: it notes for no longer than its bound, and is dropped as soon as the worker that
asked for it is gone, or `KEEP` seconds after its bound.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from ..errors import Overloaded, RpcUsageError
from ..protocol.states import CallOutcome
from ..runtime.calls.functions import inline, system
from ..runtime.engine.call_events import CallEvent, Observation
from ..runtime.engine.engine import Engine
from ..runtime.engine.transfer_events import BufferTransfer
from ..runtime.node import Node, registry, serving
from . import notes
from .notes import NAME_LIMIT, RangeNote, StepNote, Summary, TransferNote
from .profiling import Profiling

#: Notes of one worker; what comes after them is counted and dropped.
MOST_NOTES = 200_000
#: Recordings of one worker at a time.
MOST_RECORDINGS = 4
#: Seconds that a recording may last.
MOST_SECONDS = 3600.0
#: Seconds for which the notes wait to be fetched, after the bound of the recording.
KEEP = 60.0
#: Notes in one answer: about 100 KB, written in a millisecond.
PIECE = 500
_LOOK = 1.0  # seconds between two looks whether the recorder is there
_MOST_THREADS = 4096

Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
Most = Annotated[int, Meta(gt=0, le=MOST_NOTES)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class WorkerNotes:
    """The notes of one worker. `started` to `transferred` from any thread, the rest on the loop.

    key: of the worker that asked for it, its id and its number for the recording. bound: when it ends at the latest.
    profiling: torch's profiler, which it runs if it was asked to and no other worker of the process does.
    """

    def __init__(self, node: Node, key: tuple[int, int], seconds: float, most: int) -> None:
        self.key = key
        self.profiling: Profiling | None = None
        self._node = node
        self._engine: Engine = node.engine
        self._notes: list[tuple[str, CallEvent, str, int] | tuple[BufferTransfer, int] | RangeNote] = []
        self._dropped = 0
        self._most = most
        self._seconds = seconds
        self._began = self._ended = 0.0
        self._observation: Observation | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._engine.kept.add(self)

    # --- noting, in any thread ----------------------------------------------------------------------------------------

    def started(self, call: CallEvent) -> None:
        """See `CallObserver`."""
        self._note("started", call)

    def queued(self, call: CallEvent) -> None:
        """See `CallObserver`."""
        self._note("queued", call)

    def running(self, call: CallEvent) -> None:
        """See `CallObserver`."""
        self._note("running", call)

    def ended(self, call: CallEvent, outcome: CallOutcome) -> None:
        """See `CallObserver`."""
        self._note("ended", call, outcome.value)

    def _note(self, step: str, call: CallEvent, outcome: str = "") -> None:
        if len(self._notes) < self._most:
            self._notes.append((step, call, outcome, threading.get_ident()))
        else:
            self._dropped += 1

    def transferred(self, transfer: BufferTransfer) -> None:
        """See `TransferObserver`."""
        if len(self._notes) < self._most:
            self._notes.append((transfer, threading.get_ident()))
        else:
            self._dropped += 1

    # --- on the loop --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to note."""
        engine = self._engine
        self._began = time.monotonic()
        self._observation = Observation(engine, self)
        with engine.observing:
            engine.transfer_observers = (*engine.transfer_observers, self)
        self._timer = engine.loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._began + self._seconds:
            self.stop()
        gone = self._node.group.has_gone(self.key[0])
        if gone or self._engine.closed or now >= self._began + self._seconds + KEEP:
            self.drop()
            return
        self._timer = self._engine.loop.call_later(_LOOK, self._look)

    def stop(self) -> None:
        """Note no more; what was noted stays. Idempotent."""
        if self._observation is None:
            return
        self._observation.close()
        self._observation = None
        engine = self._engine
        with engine.observing:
            engine.transfer_observers = tuple(each for each in engine.transfer_observers if each is not self)
        self._ended = time.monotonic()

    def drop(self) -> None:
        """End, and forget what was noted. Idempotent."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self.profiling is not None:
            self.profiling.stop()
        self._notes = []
        self._engine.kept.discard(self)

    async def finish(self) -> Summary:
        """Note no more, and add what torch's profiler has seen."""
        self.stop()
        trouble, error = "", 0.0
        if self.profiling is not None:
            ranges = await self.profiling.ranges()
            room = max(0, self._most - len(self._notes))
            self._dropped += max(0, len(ranges) - room)
            self._notes += ranges[:room]
            trouble, error = self.profiling.trouble, self.profiling.error
        running = threading.enumerate()[:_MOST_THREADS]
        threads = {each.ident or 0: (each.name[:NAME_LIMIT], each.native_id or 0) for each in running}
        counts = len(self._notes), self._dropped
        return Summary(self._began, self._ended, *counts, threads, threading.get_ident(), trouble, error)

    def piece(self, first: int) -> bytes:
        """Some of the notes as bytes, from that one on."""
        return notes.write([_written(each) for each in self._notes[first : first + PIECE]])


def _written(note: tuple[str, CallEvent, str, int] | tuple[BufferTransfer, int] | RangeNote) -> notes.Note:
    if isinstance(note, RangeNote):
        return note
    if len(note) == 2:
        transfer, thread = note
        return TransferNote(
            transfer.side,
            transfer.worker,
            transfer.call_id,
            ", ".join(transfer.channels)[:NAME_LIMIT],
            transfer.size,
            transfer.started,
            transfer.ended,
            transfer.copied,
            thread,
        )
    step, call, outcome, thread = note
    return StepNote(
        step,
        call.side,
        call.caller,
        call.worker,
        call.call_id,
        call.function[:NAME_LIMIT],
        call.kind,
        call.own,
        call.parent,
        call.part_of,
        call.started,
        call.time,
        call.request_bytes,
        call.answer_bytes,
        outcome,
        thread,
    )


def _of(node: Node) -> list[WorkerNotes]:
    return [each for each in node.engine.kept if isinstance(each, WorkerNotes)]


def _asked(handler: Callable[..., object]) -> tuple[Node, int]:
    """In a handler: its worker and the id of the caller. Raises NotAllowed if the caller's role may not call it."""
    node, call = serving()
    assert call.record is not None, "members alone call handlers"
    # A program may see the calls of its own worker in any case.
    if call.permits is not None and call.record.incarnation != node.engine.record.incarnation:
        call.permits.check_callable(handler)
    return node, call.record.id


def _find(node: Node, key: tuple[int, int]) -> WorkerNotes:
    for each in _of(node):
        if each.key == key:
            return each
    raise RpcUsageError(f"worker {node.engine.name!r} has no such recording: it has ended by its bound")


# --- handlers ---------------------------------------------------------------------------------------------------------


@system
@inline
def clock() -> float:
    """Handler: the clock of this worker, to which its notes refer."""
    _asked(clock)
    return time.monotonic()


@system
async def begin(number: Number, seconds: Seconds, most: Most, profile: bool) -> None:
    """Handler: note what this worker does, for that many seconds at most.

    most: how many notes it keeps. profile: whether to run torch's profiler, too. Raises Overloaded if it is being
    recorded too often.
    """
    node, caller = _asked(begin)
    if len(_of(node)) >= MOST_RECORDINGS:
        raise Overloaded(f"worker {node.engine.name!r} is in {MOST_RECORDINGS} recordings already")
    recording = WorkerNotes(node, (caller, number), seconds, most)
    try:
        if profile and not any(each.profiling for other in registry.nodes() for each in _of(other)):
            recording.profiling = Profiling(node.engine.name, seconds + KEEP)
            await recording.profiling.start()
    except BaseException:
        recording.drop()
        raise
    recording.start()


@system
async def end(number: Number) -> bytes:
    """Handler: end a recording; what there is of it."""
    node, caller = _asked(end)
    return notes.write(await _find(node, (caller, number)).finish())


@system
@inline
def piece(number: Number, first: Number) -> bytes:
    """Handler: some of the notes of a recording that has ended, from that one on."""
    node, caller = _asked(piece)
    return _find(node, (caller, number)).piece(first)


@system
@inline
def drop(number: Number) -> None:
    """Handler: the caller has all that it wants of a recording."""
    node, caller = _asked(drop)
    for each in _of(node):
        if each.key == (caller, number):
            each.drop()


#: All of them, for the caller's side.
HANDLERS = (clock, begin, end, piece, drop)
