"""The worker that records: it asks all workers of the group, aligns their clocks, and makes one trace of their notes.

What goes wrong at a worker is told in the trace; the others are recorded. No call of the program is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import foreign
from ..errors import ProtocolError, RpcError, RpcUsageError
from ..logs import logger
from ..options import seconds as checked_seconds
from ..protocol.identity import WorkerRecord
from ..runtime.caller.peer import Peer
from ..runtime.engine.host import sees
from ..runtime.node import Node
from ..threads import run_in_thread
from . import recording
from .notes import MOST_TIME, Note, Summary, read_notes, read_summary
from .timeline import Clock, WorkerRecording, as_json

#: Notes of all workers together: a file of some 200 MB, which is made in some ten seconds.
MOST_IN_ALL = 1_000_000
#: Questions for the time of each worker, at the beginning and at the end. The fastest answer counts.
_ROUNDS = 10
_CLOCK_PATIENCE = 2.0  # seconds for the answer to one of them
_PATIENCE = 10.0  # seconds for any other answer of a worker
_PROFILER_PATIENCE = 60.0  # more where torch's profiler has to begin or to end


@dataclass(frozen=True)
class RecordedWorker:
    """What a recording has of one worker.

    clock_error: seconds by which its times may be off from those of the worker that has recorded; infinite if its clock
    is not known, and then nothing of it is in the file. events: how many steps of calls, transfers and events of
    torch's profiler it has noted. dropped: how many more there were, for which it had no room. trouble: what is missing
    of it, and why; empty if nothing is.
    """

    clock_error: float
    events: int
    dropped: int
    trouble: str


@dataclass
class _Member:
    """A worker while it is recorded."""

    peer: Peer
    record: WorkerRecord
    asked: bool = False
    begun: bool = False
    samples: list[tuple[float, float, float]] = field(default_factory=list)  # our time, the other's less ours, error
    summary: Summary | None = None
    notes: list[Note] = field(default_factory=list)
    trouble: str = ""


class _Session:
    """One recording of the group by a node. On one loop, which need not be the node's."""

    def __init__(self, node: Node, seconds: float, profile: bool) -> None:
        self._node = node
        self._number = next(node.engine.numbers)
        self._seconds = seconds
        self._profile = profile
        self._members: list[_Member] = []
        self._began = 0.0

    async def begin(self) -> None:
        """Ask all workers to note. Raises WorkerClosed if this worker makes no calls any more."""
        self._node.engine.lifetime.check_begin()
        live = sorted(self._node.group.live(), key=lambda record: record.id)
        self._members = [_Member(self._node.peers.by_id(record.id), record) for record in live]
        patience = _PROFILER_PATIENCE if self._profile else _PATIENCE
        most = max(1, min(recording.MOST_NOTES, MOST_IN_ALL // len(live)))
        arguments = self._number, self._seconds, most, self._profile
        await _each(self._members, partial(self._begin, arguments, patience))
        self._began = time.monotonic()
        await self._compare_clocks()

    async def _begin(self, arguments: tuple[int, float, int, bool], patience: float, member: _Member) -> None:
        member.asked = True
        await member.peer.call(recording.begin, arguments, None, patience, system=True)
        member.begun = True

    async def _compare_clocks(self) -> None:
        """One worker after the other, so that they do not delay each other's answers."""
        for member in self._members:
            if member.begun:
                best: tuple[float, float, float] | None = None
                with contextlib.suppress(RpcError):  # told if there is no time of it at all
                    for _ in range(_ROUNDS):
                        before = time.monotonic()
                        call = member.peer.call(recording.clock, (), None, _CLOCK_PATIENCE, system=True)
                        theirs = float(await call)
                        after = time.monotonic()
                        if not abs(theirs) <= MOST_TIME:
                            raise ProtocolError(f"{member.record.name} has a clock that shows {theirs}")
                        sample = (before + after) / 2, theirs - (before + after) / 2, (after - before) / 2
                        if best is None or sample[2] < best[2]:
                            best = sample
                if best is not None:
                    member.samples.append(best)

    async def finish(self) -> list[WorkerRecording]:
        """Fetch the notes of all workers."""
        begun = [member for member in self._members if member.begun]
        await self._compare_clocks()
        await _each(begun, self._end)
        await _each([member for member in begun if member.summary is not None], self._fetch)
        self.drop()
        return [self._recorded(member) for member in self._members] + self._newcomers()

    async def _end(self, member: _Member) -> None:
        patience = _PROFILER_PATIENCE if self._profile else _PATIENCE
        told = await member.peer.call(recording.end, (self._number,), None, patience, system=True)
        member.summary = read_summary(told)

    async def _fetch(self, member: _Member) -> None:
        assert member.summary is not None, "it is asked for those that have told it"
        while len(member.notes) < min(member.summary.notes, recording.MOST_NOTES):
            arguments = self._number, len(member.notes)
            data = await member.peer.call(recording.piece, arguments, None, _PATIENCE, system=True)
            found = read_notes(data)
            if not found:
                raise ProtocolError(f"{member.record.name} has fewer notes than it said")
            member.notes += found

    def drop(self) -> None:
        """Tell all workers that nothing more is wanted of them. Idempotent; never raises, waits for nothing."""
        for member in self._members:
            if member.asked:
                member.asked = False
                with contextlib.suppress(RpcError):
                    member.peer.call(recording.drop, (self._number,), None, _PATIENCE, system=True)

    def _recorded(self, member: _Member) -> WorkerRecording:
        own = self._node.engine.record
        here = sees(own.host, member.record.host)
        clock = Clock.of(member.samples, same=here)
        trouble = member.trouble
        if clock is None and not trouble:
            trouble = "it has not told its time, so its notes have no place on the axis"
        return WorkerRecording(member.record, clock, member.notes, member.summary, trouble)

    def _newcomers(self) -> list[WorkerRecording]:
        known = {member.record.id for member in self._members}
        why = "it joined after the recording had begun"
        return [
            WorkerRecording(record, None, [], None, why) for record in self._node.group.live() if record.id not in known
        ]


async def _each(members: Sequence[_Member], step: Any) -> None:
    """Take a step with all members at once; what it raises is the trouble of that member."""

    async def attempt(member: _Member) -> None:
        try:
            await step(member)
        except RpcError as error:
            member.trouble = member.trouble or foreign.said(error)

    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(attempt(member))


async def record_group(node: Node, seconds: float, *, profile: bool = False) -> bytes:
    """Record all workers of a node's group for that long. Returns the trace, as the JSON of a file.

    On any loop. profile: whether to run torch's profiler in each process, too. Cancelling it ends the recording
    everywhere.

    Raises RpcUsageError for seconds out of range, WorkerClosed if the worker has left.
    """
    session = _Session(node, _check(seconds), profile)
    try:
        await session.begin()
        await asyncio.sleep(seconds)
        data, _ = await _made(node, await session.finish())
    finally:
        session.drop()
    return data


async def _made(node: Node, recorded: list[WorkerRecording]) -> tuple[bytes, list[WorkerRecording]]:
    name = node.engine.name
    data = await run_in_thread(partial(as_json, name, recorded), f"aiorpc-{name}-recorder")
    return data, recorded


def _check(seconds: float) -> float:
    limit = checked_seconds(seconds, "seconds")
    if not 0 < limit <= recording.MOST_SECONDS:
        raise RpcUsageError(
            f"a recording lasts more than 0 s and no more than {recording.MOST_SECONDS:g} s, not {limit:g}"
        )
    return limit


class Recording:
    """A recording of the whole group, for ``async with``: see `aiorpc.record`. On one loop.

    path: of the file. workers: what there is of each worker, by its name; empty before the end.
    """

    def __init__(self, node: Node, path: str | os.PathLike[str], seconds: float, profile: bool) -> None:
        self.path: Path = Path(path).absolute()
        self.workers: dict[str, RecordedWorker] = {}
        self._node = node
        self._seconds = _check(seconds)
        self._session = _Session(node, self._seconds, profile)
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Recording:
        """Begin. Raises RpcUsageError if the file cannot be written."""
        if self._running is not None:
            raise RpcUsageError("a recording is entered once: make another one with aiorpc.record")
        try:
            if self.path.is_dir():
                raise IsADirectoryError(f"{self.path} is a folder")
            self._part.touch()
        except OSError as error:
            raise RpcUsageError(f"the recording cannot be written to {str(self.path)!r}: {error}") from error
        try:
            await self._session.begin()
        except BaseException:
            self._abandon()
            raise
        self._running = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, and write the file; a cancelled block leaves none."""
        running = self._running
        assert running is not None, "it was entered"
        self._stop.set()
        if isinstance(error, asyncio.CancelledError):
            running.cancel()
            await asyncio.wait([running])
            return
        try:
            await running
        except OSError as failure:
            text = f"the recording cannot be written to {str(self.path)!r}: {failure}"
            if error is None:
                raise RpcUsageError(text) from failure
            logger.warning("%s", text)  # the error of the block says more

    async def _run(self) -> None:
        """Wait for the end of the block, or of the time; then fetch what there is and write it."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._stop.wait()
            data, recorded = await _made(self._node, await self._session.finish())
            await run_in_thread(partial(self._write, data), f"aiorpc-{self._node.engine.name}-recorder")
            self.workers = {each.record.name: _told(each) for each in recorded}
        finally:
            self._abandon()

    def _write(self, data: bytes) -> None:
        self._part.write_bytes(data)
        os.replace(self._part, self.path)

    def _abandon(self) -> None:
        self._session.drop()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)


def _told(recorded: WorkerRecording) -> RecordedWorker:
    error = float("inf") if recorded.clock is None else recorded.clock.error
    dropped = 0 if recorded.summary is None else recorded.summary.dropped
    return RecordedWorker(error, len(recorded.notes), dropped, recorded.told)
