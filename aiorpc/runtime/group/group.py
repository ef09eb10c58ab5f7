"""The group of workers: who leads, who was lost, and how all leave together.

A group of fixed size is a star: every member keeps a connection to the leader, the live member with the lowest id. The
leader sees a member die and tells the others; when it dies itself the next one leads. Graceful shutdown, as torch
programs expect, serves while others still work:

    member                         leader
    ENTER (a call)         -->     notes it; once every live member has entered:
                           <--     POLL (calls): idle? how many calls so far?   ... two equal, idle rounds in a row
    leaves                 <--     answers all ENTERs: commit
    GOODBYE                        GOODBYE

Why two rounds: an idle worker wakes up only by a call, and calls start only at workers that are not idle, or from
users' threads. If all were idle in both rounds and nobody's count of calls changed between them, nothing was under
way in between.

In a group that is joined freely each newcomer announces itself to all, and a member that leaves finishes its own work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import PeerClosed, PeerLost, PeerRefused, RendezvousError, RpcError
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...transport import sockets
from ..calls.functions import system
from ..engine.current import current_call
from ..engine.watch import ProcessWatch
from ..meeting.rendezvous import Rendezvous
from ..references.rref import LeakedReference
from .events import WorkerJoined, WorkerLeft, WorkerLost

if TYPE_CHECKING:
    from ..worker import Worker

logger = logging.getLogger("aiorpc")

_POLL_TIMEOUT = 10.0
# How long, in seconds: what a process wrote before it ended may still be in the sockets; a reply may be on its way when
# its sender says goodbye on another connection.
_EXIT_GRACE = 0.05
_GOODBYE_GRACE = 1.0
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05


@dataclass(frozen=True)
class ShutdownReport:
    """How a shutdown went. timed_out: somebody's work was not over. references: what was still referred to."""

    lost: tuple[WorkerInfo, ...] = ()
    timed_out: bool = False
    references: tuple[LeakedReference, ...] = ()


class Group:
    """One worker's view of its group. On the loop."""

    def __init__(self, worker: Worker, records: list[WorkerRecord]) -> None:
        self.worker = worker
        self.members: dict[int, WorkerRecord] = {record.id: record for record in records}
        self.lost: dict[int, WorkerInfo] = {}
        self._gone: set[int] = set()
        self._entered: dict[int, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._lost_at: float | None = None
        self._leaving_since = 0.0
        self._rounds: asyncio.Task[None] | None = None
        self._watch = ProcessWatch(worker.loop, self._on_process_exit)

    @property
    def leader(self) -> int:
        """The id of the member that coordinates a group of fixed size."""
        return min((id for id in self.members if id not in self._gone), default=self.worker.id)

    @property
    def leads(self) -> bool:
        """Whether that is us."""
        return self.leader == self.worker.id

    def start(self) -> None:
        """Make ourselves known: to the leader, or to everybody in a group that is joined freely."""
        others = [record for record in self.members.values() if record.id != self.worker.id]
        if not self.worker.dynamic:
            others = self._star(others)
        for record in others:
            self._tell(record, attend, self.worker.record.to_wire())

    def _star(self, others: list[WorkerRecord]) -> list[WorkerRecord]:
        """Whom to connect to in a group of fixed size: the leader; as it, those whose process cannot be watched."""
        if self.leads:
            # A member may die before it has connected to us.
            return [record for record in others if not self.watch(record)]
        return [record for record in others if record.id == self.leader]

    def _tell(self, record: WorkerRecord, function: Any, *args: Any) -> None:
        try:
            call = self.worker.peers.of(record).call(function, args, None, self.worker.options.rpc_timeout, system=True)
        except RpcError:
            return
        call._add_callback(lambda future: future._look())

    # --- members come and go ------------------------------------------------------------------------------------------

    def watch(self, record: WorkerRecord) -> bool:
        """See that member's process die, whether or not we are connected; False if that cannot be done from here."""
        if record.host != self.worker.record.host:
            return False
        return record.pid == os.getpid() or self._watch.add(record)

    def on_joined(self, record: WorkerRecord) -> None:
        """A member is there; no news if we knew it."""
        self.worker.peers.add(record)
        if record.id not in self.members:
            self.members[record.id] = record
            self.worker.news.publish(WorkerJoined(record.info))

    def _on_process_exit(self, record: WorkerRecord) -> None:
        self.worker.memory.collect()
        # What it wrote before it ended may still be in the sockets; their end of file usually comes first.
        self.worker.loop.call_later(_EXIT_GRACE, self.on_lost, record, "its process ended")

    def on_lost(self, record: WorkerRecord, cause: str, error: BaseException | None = None) -> None:
        """A member died or cannot be reached: everything that waits for it fails."""
        worker = self.worker
        if worker.closed or record.id == worker.id or not self._gone_now(record, cause):
            return
        if not worker.leaving:
            logger.warning("worker %s was lost: %s", record.describe(), cause)
        worker.peers.of(record).fail(failure(record, cause, error))
        self._forget(record)
        if worker.dynamic and worker.rendezvous is not None:
            worker.tasks.spawn(self._strike_off(worker.rendezvous, record))
        worker.news.publish(WorkerLost(record.info, cause))

    def on_goodbye(self, record: WorkerRecord | None) -> None:
        """A member leaves in good order."""
        worker = self.worker
        if worker.closed or record is None or not self._gone_now(record):
            return
        peer = worker.peers.of(record)
        error = PeerClosed(f"{record.describe()} has shut down")
        if peer.pending:
            worker.loop.call_later(_GOODBYE_GRACE, peer.fail, error)
        else:
            peer.fail(error)
        self._forget(record)
        worker.news.publish(WorkerLeft(record.info))

    def _gone_now(self, record: WorkerRecord, cause: str | None = None) -> bool:
        """Note that a member left, or was lost for a cause; False if that is no news."""
        if record.id in self._gone:
            return False
        led = record.id == self.leader
        self._gone.add(record.id)
        self._changed.set()
        if cause is not None:
            self._note_loss(record, cause, led)
        entered = self._entered.pop(record.id, None)
        if entered is not None and not entered.done():
            entered.set_result(None)
        if self._entered:
            self._start_rounds()  # it may have been the one that all waited for
        return True

    def _note_loss(self, record: WorkerRecord, cause: str, led: bool) -> None:
        self.lost[record.id] = record.info
        self._lost_at = self._lost_at or time.monotonic()
        if self.worker.dynamic:
            return
        if led:
            self.start()
        if self.leads:
            for other in self.live():
                if other.id != self.worker.id:
                    self._tell(other, report_lost, record.to_wire(), cause)

    def _forget(self, record: WorkerRecord) -> None:
        self._watch.remove(record)
        for service in list(self.worker.services):
            if service.peer.incarnation == record.incarnation:
                service.connection.abort()
        self.worker.references.on_gone(record.id, record.id in self.lost)
        self.worker.gradients.on_gone(record.id)

    async def _strike_off(self, rendezvous: Rendezvous, record: WorkerRecord) -> None:
        with contextlib.suppress(RendezvousError):
            await self.worker.in_thread(lambda: rendezvous.leave(record))

    def is_gone(self, record: WorkerRecord) -> bool:
        """Whether that member has left or was lost; the rendezvous may list it a little longer."""
        return record.id in self._gone

    def live(self) -> list[WorkerRecord]:
        """The members that have neither left nor been lost."""
        return [record for record in self.members.values() if record.id not in self._gone]

    def close(self) -> None:
        """Watch no more, and remove what the lost have left on this host."""
        self._watch.close()
        for member in self.lost:
            record = self.members.get(member)
            if record is not None and record.unix_path and record.host == self.worker.record.host:
                sockets.remove_if_stale(Path(record.unix_path))

    def close_in_child(self) -> None:
        """After a fork: let go of the descriptors, which are the parent's."""
        self._watch.close_in_child()

    # --- leaving together ---------------------------------------------------------------------------------------------

    async def leave(self, timeout: float) -> bool:
        """Serve until the group's work is over; False if that took too long. timeout: seconds, 0 for no limit."""
        self._leaving_since = time.monotonic()
        work = asyncio.ensure_future(self._leave_freely() if self.worker.dynamic else self._leave_together())
        limit = time.monotonic() + timeout if timeout else None
        try:
            while not work.done():
                pause = self._patience(limit)
                if pause is not None and pause <= 0:
                    return False
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait((work, changed), timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
            return work.exception() is None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _patience(self, limit: float | None) -> float | None:
        """Seconds that may still be waited: until the limit; not much longer once we leave and a member was lost."""
        limits = [limit] if limit is not None else []
        if self._lost_at is not None and not self.worker.dynamic:
            limits.append(max(self._lost_at, self._leaving_since) + self.worker.options.loss_grace)
        return min(limits) - time.monotonic() if limits else None

    async def _leave_together(self) -> None:
        while not self.leads:
            leader = self.members[self.leader]
            # While that is awaited we go on serving: everything else on the loop runs as before.
            call = self.worker.peers.of(leader).call(enter, (), None, 0.0, system=True)
            try:
                await call
            except RpcError:
                if leader.id in self._gone:
                    continue  # the next one leads
                await self._until_idle()
            return
        await self.enter(self.worker.id)

    async def _leave_freely(self) -> None:
        await self._until_idle()
        while self.worker.hosts_store and any(record.id != self.worker.id for record in self.live()):
            # The store goes when its host goes: nobody could join, or be found, any more.
            self._changed.clear()
            await self._changed.wait()

    async def _until_idle(self) -> None:
        pause = _FIRST_PAUSE
        while not self.worker.is_idle():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def enter(self, member: int) -> None:
        """On the leader: that member's own program is done; returns when it may leave."""
        future = self._entered.get(member)
        if future is None:
            future = self._entered[member] = asyncio.get_running_loop().create_future()
        self._changed.set()
        self._start_rounds()
        await asyncio.shield(future)

    def _start_rounds(self) -> None:
        if self._rounds is None or self._rounds.done():
            self._rounds = self.worker.tasks.spawn(self._run_rounds())

    async def _run_rounds(self) -> None:
        """Once all live members have entered: poll until the group is quiet, then let everybody go."""
        if any(record.id not in self._entered for record in self.live()):
            return
        limit = time.monotonic() + (self.worker.options.rpc_timeout or 60.0)
        previous: list[tuple[int, bool, int]] | None = None
        pause = _FIRST_PAUSE
        while True:
            current = await self._poll_all()
            if current == previous and all(idle for _, idle, _ in current):
                break
            if time.monotonic() > limit:
                busy = [self.worker.peers.describe(member) for member, idle, _ in current if not idle]
                logger.warning(
                    "shutdown: %s still had calls under way; leaving all the same", ", ".join(busy) or "nobody"
                )
                break
            if previous is not None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
            previous = current
        for future in self._entered.values():
            if not future.done():
                future.set_result(None)

    async def _poll_all(self) -> list[tuple[int, bool, int]]:
        live = self.live()
        answers = await asyncio.gather(*(self._poll(record) for record in live), return_exceptions=True)
        # No answer says nothing: a member that is stopped, or holds the interpreter, is not idle.
        return [
            (record.id, False, -1) if isinstance(answer, BaseException) else answer
            for record, answer in zip(live, answers, strict=True)
            if record.id not in self._gone
        ]

    async def _poll(self, record: WorkerRecord) -> tuple[int, bool, int]:
        if record.id == self.worker.id:
            return (record.id, *self.worker.activity())
        idle, calls = await self.worker.peers.of(record).call(poll, (), None, _POLL_TIMEOUT, system=True)
        return record.id, idle, calls


def failure(record: WorkerRecord, cause: str, error: BaseException | None) -> RpcError:
    """What is raised by everything that waits for a lost worker."""
    if isinstance(error, PeerRefused):
        failure: RpcError = PeerRefused(f"{record.describe()}: {error}")
    else:
        text = f"{record.describe()} was lost: {cause}"
        host, pid = record.hostname, record.pid
        failure = PeerLost(text, worker=record.name, rank=record.id, host=host, pid=pid, cause=cause)
    failure.__cause__ = error
    return failure


def _current() -> tuple[Group, WorkerInfo]:
    context = current_call.get()
    assert context is not None, "these functions are handlers"
    return context.worker.group, context.caller


@system
async def attend(record: list[Any]) -> None:
    """Handler: a member is there, and keeps a connection to us."""
    group, _ = _current()
    group.on_joined(WorkerRecord.from_wire(record))


@system
async def report_lost(record: list[Any], cause: str) -> None:
    """Handler: the leader saw a member die."""
    group, _ = _current()
    group.on_lost(WorkerRecord.from_wire(record), cause)


@system
async def enter() -> None:
    """Handler, on the leader: a member's own program is done; answered when all may leave."""
    group, caller = _current()
    await group.enter(caller.id)


@system
async def poll() -> tuple[bool, int]:
    """Handler: whether this worker is idle, and how many calls it has seen."""
    group, _ = _current()
    return group.worker.activity()
