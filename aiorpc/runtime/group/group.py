"""A worker's part in its group: it carries out the decisions of the group's table.

`protocol/leaving.py` decides who is a member, who leads, who was lost and how all leave together. Observations here
(calls from members, ended connections, dead processes, passing time) go into its table. The table's outputs are carried
out here: calls to members, tasks, timers, and events for the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from ..._typing import Function
from ...errors import PeerLost, PeerRefused, RendezvousError, RpcError, RpcUsageError
from ...logs import logger
from ...protocol import leaving
from ...protocol.identity import RecordFields, WorkerInfo, WorkerRecord, legible
from ...protocol.leaving import GroupTable, Output, Outputs
from ...protocol.states import Leaving, Returning
from ...transport import sockets
from ..callee.service import Service
from ..caller.addressee import farewell
from ..calls import current
from ..calls.current import current_call
from ..calls.declared import pack
from ..calls.functions import system
from ..engine.host import how_ended, is_gone, provably_dead, sees
from ..engine.watch import ProcessWatch
from ..gradients.contexts import Gradients
from ..meeting.free import Listed
from ..meeting.rendezvous import Rendezvous
from ..references.references import LeakedReference, References
from .departure import Departure
from .events import WorkerJoined, WorkerLeft, WorkerLost, WorkerReplaced
from .indirect_probe import IndirectProbe
from .interface import MembershipContext
from .joining import JoiningMembers, roster_to_wire
from .versions import VersionNotes

# Seconds between the end of a process and the loss of its worker: sockets may still hold its last messages.
_EXIT_GRACE = 0.05
# Seconds for a process that broke a connection to end, and between two looks at it.
_DYING, _LOOK = 0.1, 0.002
# Seconds between a goodbye and the end of calls to that worker: replies may come over another connection.
_GOODBYE_GRACE = 1.0
# Members that are not in the list any more are asked so many at once, by one worker; without a list so many are
# connected with at once.
_ASKED_AT_ONCE = 16
# Characters of a reported cause of a member's end.
CAUSE_LIMIT = 1000


@dataclass(frozen=True)
class ShutdownReport:
    """How a shutdown went.

    lost: the members that were lost. timed_out: whether the worker left although a member still had calls under way.
    references: the references that were still alive. unfinished: what was under way here when the time was up: calls,
    and, of a drain, items that nobody had fetched.
    """

    lost: tuple[WorkerInfo, ...] = ()
    timed_out: bool = False
    references: tuple[LeakedReference, ...] = ()
    unfinished: tuple[str, ...] = ()


class GroupContext(MembershipContext, Protocol):
    """A running worker, as `Group` needs it."""

    gradients: Gradients
    references: References


class Group:
    """One worker's view of its group. On the loop.

    members, lost: by id; they are the table's.
    """

    def __init__(self, context: GroupContext, records: list[WorkerRecord]) -> None:
        self._context = context
        self._engine = context.engine
        joiner = context.rendezvous.returned is not None
        self._table = GroupTable(context.engine.id, records, free=context.rendezvous.dynamic, joiner=joiner)
        self._versions = VersionNotes(context.engine.record)
        self._versions.tell(records)
        self._indirect_probe = IndirectProbe(context, self.is_gone, vouch)
        self.departure: Departure = Departure(
            context, self._table, carry_out=self._carry_out, on_left=self._on_left, verbs=(enter, poll)
        )
        self.joining: JoiningMembers = JoiningMembers(
            context,
            self._table,
            carry_out=self._carry_out,
            lose=self.on_lost,
            is_together=self._indirect_probe.is_together,
            has_left=self.look_for_farewell,
            verbs=(arrive, introduce),
        )
        self.members: dict[int, WorkerRecord] = self._table.members
        self.lost: dict[int, WorkerInfo] = self._table.lost
        self._failed: dict[int, str] = {}  # errors of leaving members, from their goodbyes, by id
        self._watch = ProcessWatch(context.engine.loop, self.on_process_exit)
        self.losses: int = 0  # how many members were lost, also those that are forgotten since
        self._listed: set[str] = {each.incarnation for each in records}  # in the list of a free group, as seen last
        self._kept: set[str] = set()  # incarnations of the members to which this worker has made itself known
        self._unmet: list[WorkerRecord] = []  # members that the last look at the list has shown first
        self._unlisted: dict[WorkerRecord, bool] = {}  # members that are not in it any more; whether they say they left
        self._ended: dict[str, str] = {}  # how members' processes ended, until the loss; by incarnation

    @property
    def leader(self) -> int:
        """The id of the member that coordinates a group of fixed size."""
        return self._table.leader

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader."""
        return self._table.leads

    def start(self) -> None:
        """Make this worker known to the leader; in a free group, to the oldest members."""
        self._carry_out(self._table.start())

    def is_gone(self, record: WorkerRecord) -> bool:
        """Whether that member has left or was lost; the rendezvous may list it a little longer."""
        return record.id in self._table.gone

    def has_gone(self, member: int) -> bool:
        """Whether the member of that id has left or was lost. Any thread."""
        return member in self._table.gone

    def is_lost(self, record: WorkerRecord) -> bool:
        """Whether that member was lost, or is gone for so long that the reason is forgotten."""
        return record.id in self.lost or (self.is_gone(record) and record.id not in self.members)

    def contradicts(self, record: WorkerRecord) -> bool:
        """Whether a member's record differs from the known one. A free group admits unknown members."""
        known = self.members.get(record.id)
        return known != record and not (known is None and (self._table.free or self._table.expects(record)))

    def has_shown(self, record: WorkerRecord) -> bool:
        """Whether a connected member showed this very record in its handshake, where it was checked.

        A later record must not differ: for example, the role was compared with the certificate then.
        """
        return any(service.record == record for service in self._context.services)

    def may_not_know_this(self, record: WorkerRecord) -> bool:
        """Whether that member may refuse this joining worker because it does not know it yet: except for the leader,
        members learn of it one after the other."""
        return self._table.returning is not Returning.MEMBER and record.id != self._table.leader

    def live(self) -> list[WorkerRecord]:
        """The members that have neither left nor been lost."""
        return self._table.live()

    @property
    def is_member(self) -> bool:
        """Whether the others know this worker; a new process in a lost one's place has joined before that."""
        return self._table.returning is Returning.MEMBER

    @property
    def parted(self) -> bool:
        """Whether this worker has lost members and knows no other living one."""
        return bool(self.lost) and all(record.id == self._engine.id for record in self.live())

    def close(self) -> None:
        """Stop watching processes, and remove lost members' unix sockets on this host."""
        self._watch.close()
        for member in self.lost:
            self._remove_sockets(self.members.get(member))

    def _remove_sockets(self, record: WorkerRecord | None) -> None:
        """Those at which it took connections and could be looked at, and the link to its heartbeat."""
        if record is None or record.host != self._engine.record.host:
            return
        with contextlib.suppress(OSError):
            endpoints = sockets.private_directory().glob(f"look-{record.pid}-*.sock")
            for path in (Path(record.unix_path), *endpoints) if record.unix_path else endpoints:
                sockets.remove_if_stale(path)
            sockets.remove_dead_links(sockets.private_directory(), record.pid)

    def close_in_child(self) -> None:
        """After a fork: release the descriptors, which are the parent's."""
        self._watch.close_in_child()

    async def leave(self, timeout: float) -> bool:
        """As of `Departure.leave`. In a group of fixed size the losses before the common leave are known when it
        returns.

        The leader may have reported a loss just before it let all go, and this worker still probes that member.
        """
        until = time.monotonic() + timeout if timeout else float("inf")
        complete = await self.departure.leave(timeout)
        if complete and not self._table.free and not self._engine.lifetime.drains:
            await self._indirect_probe.settle(max(0.0, min(self._engine.bounds.vouch, until - time.monotonic())))
        return complete

    # --- what the table decides ---------------------------------------------------------------------------------------

    def _carry_out(self, outputs: Outputs) -> None:
        for output in outputs:
            self._do(output)

    def _do(self, output: Output) -> None:
        match output:
            case leaving.Attend(to):
                self._attend(to)
            case leaving.Follow(to):
                # A joining member may have given up while its process lives.
                if not self.watch(to) or to.id != to.rank:
                    self._attend(to)
            case leaving.ReportLost(to, member, cause):
                self._tell(to, report_lost, pack(member.to_wire()), cause)
            case leaving.Joined(member):
                self._context.references.admit(member.id)
                self._context.peers.note(member)
                self._context.events.publish(WorkerJoined(member.info))
            case leaving.Replaced(member, before):
                logger.info("worker %s: %s has taken the place of %s", self._engine.name, member.describe(), before.pid)
                self._context.references.admit(member.id)
                self._context.peers.add(member)
                self._context.events.publish(WorkerReplaced(member.info))
            case leaving.Admit() | leaving.Refuse() | leaving.Announce() | leaving.Welcome():
                self.joining.do(output)
            case leaving.Lost(member, cause, error):
                self._mourn(member, cause, error)
            case leaving.Left(member):
                self._part(member)
            case leaving.Forget(member):
                self._forget_for_good(member)
            case _:
                self.departure.do(output)

    def _attend(self, record: WorkerRecord) -> None:
        self._kept.add(record.incarnation)
        self._tell(record, attend, pack(self._engine.record.to_wire()))

    def may_rest(self, record: WorkerRecord) -> bool:
        """Whether a connection with a member of a free group may rest: its end shows in the list, which this worker
        sees, and the connection is not for watching."""
        return self._table.free and record.incarnation in self._listed - self._kept

    def _tell(self, record: WorkerRecord, function: Function, *args: object) -> None:
        try:
            # Without a limit: a stopped member has to hear it when it goes on, and it is sent once.
            call = self._context.peers.of(record).call(function, args, None, 0.0, system=True)
        except RpcError:
            return
        call._when_settled(lambda future: future._mark_seen())

    # --- members come and go ------------------------------------------------------------------------------------------

    def watch(self, record: WorkerRecord) -> bool:
        """Watch the process of a member, connected or not; False if it cannot be watched from here."""
        if not sees(self._engine.record.host, record.host):
            return False
        return record.pid == os.getpid() or self._watch.add(record)

    def on_joined(self, record: WorkerRecord) -> None:
        """A member is there. Publishes an event if it is new."""
        if self.is_gone(record):
            return  # the rendezvous may list it a little longer
        self.departure.heard.add(record.id)
        self._context.peers.note(record)
        self._versions.tell([record])
        self._carry_out(self._table.join(record))

    def on_met(self, record: WorkerRecord) -> None:
        """A worker has proved itself over a connection. In a free group it may not have been known."""
        if self._table.free:
            self.on_joined(record)

    def on_listed(self, listed: Listed | None) -> None:
        """This worker has looked at the list of its free group. listed: what stands there; None if that is as before.

        The list is no proof of an end: members that are not in it any more are asked, unless they are known to be gone.
        """
        unmet, self._unmet = self._unmet, []
        if self.leads and unmet:  # of a member that died before it turned to a watcher no connection tells
            met = {service.record.incarnation for service in self._context.services}
            self._carry_out(
                [leaving.Follow(each) for each in unmet if not (each.incarnation in met or self.is_gone(each))]
            )
        if listed is not None:
            self._unmet = [record for record in listed.members if record.id not in self.members]
            for record in self._unmet:
                self.on_joined(record)
            before, self._listed = self._listed, {record.incarnation for record in listed.members}
            idle = not self._unlisted
            for record in self.live():
                if record.incarnation in before and record.incarnation not in self._listed:
                    self._unlisted[record] = record.id in listed.left
            if self._unlisted and idle:
                for _ in range(_ASKED_AT_ONCE):
                    self._engine.tasks.spawn(self._ask_unlisted())
        self._carry_out(self._table.turn())

    def on_unlisted(self, at_once: int = _ASKED_AT_ONCE) -> None:
        """The list of the free group is gone, with its store: members hear of each other over connections alone.

        at_once: with so many more this worker connects now.
        """
        self._listed = set()
        self._carry_out(self._table.unlisted(at_once))

    async def _ask_unlisted(self) -> None:
        while self._unlisted and not self._engine.closed:
            record, left = self._unlisted.popitem()
            if self.is_gone(record) or record.id == self._engine.id:
                continue
            dead = provably_dead(record, self._engine.record.host)
            if not dead and await self._indirect_probe.is_together(record, self._engine.record):
                continue  # a member that cannot reach it has struck it off; its end shows over the connection, now
            if left:
                self._on_left(record)
            else:
                await self._look_and_lose(record, "it was struck off the list of its group, and cannot be reached")

    def on_process_exit(self, record: WorkerRecord) -> None:
        """The process of a member has ended."""
        self._context.links.memory.collect()
        self._ended[record.incarnation] = how_ended(record.pid)  # now: its parent may reap it
        # The sockets may still hold its last messages; their end of file usually comes first.
        self._engine.loop.call_later(_EXIT_GRACE, self._on_exit, record, self.cause_of(record, "its process ended"))

    def _on_exit(self, record: WorkerRecord, cause: str) -> None:
        links = [each.link for each in self._context.services if each.record.incarnation == record.incarnation]
        called = self._context.peers.of(record).link
        links += [] if called is None else [called]
        if links and all(link.connection.local for link in links):
            self.on_lost(record, cause)  # local sockets would have brought a goodbye; TCP may be down
        else:
            self._lose_unless_left(record, cause)

    def _lose_unless_left(self, record: WorkerRecord, cause: str) -> None:
        if not self._engine.closed and not self.is_gone(record):
            self._engine.tasks.spawn(self._look_and_lose(record, cause))

    async def _look_and_lose(self, record: WorkerRecord, cause: str) -> None:
        if not await self.look_for_farewell(record):
            await self.await_end(record)
            self.on_lost(record, cause)

    def on_lost(self, record: WorkerRecord, cause: str, error: BaseException | None = None) -> None:
        """A member died or cannot be reached: everything that waits for it fails.

        It may be called several times for one member; the table takes the first call.
        """
        if not self._engine.closed:
            self._carry_out(self._table.lose(record, self.cause_of(record, cause), error))
            self.joining.look()

    async def await_end(self, record: WorkerRecord) -> None:
        """Wait a moment for the end of a process of this host that has broken a connection.

        A dying process closes its sockets first; a moment later the cause of its death is known.
        """
        if record.pid == os.getpid() or not sees(self._engine.record.host, record.host):
            return
        until = time.monotonic() + _DYING
        while (  # noqa: ASYNC110  # without a pidfd no event tells of a zombie
            time.monotonic() < until and not (is_gone(record.pid) or self.is_gone(record) or self._engine.closed)
        ):
            await asyncio.sleep(_LOOK)

    def cause_of(self, record: WorkerRecord, cause: str) -> str:
        """Why that worker is lost: the end of its process, if that is known, else `cause`."""
        ended = self._ended.get(record.incarnation, "")
        if not ended and sees(self._engine.record.host, record.host):
            ended = how_ended(record.pid)
        return f"its process (pid {record.pid}) {ended}" if ended else cause

    def _mourn(self, record: WorkerRecord, cause: str, error: BaseException | None) -> None:
        context, engine = self._context, self._engine
        self.losses += 1
        if not engine.lifetime.leaving and self._table.returning is Returning.MEMBER:
            logger.of(engine.name).warning("worker %s was lost: %s", record.describe(), cause)
        self._end_calls(record, failure(record, cause, error))
        self._forget(record)
        if context.rendezvous.dynamic:
            engine.tasks.spawn(self._strike_off(context.rendezvous, record))
        context.events.publish(WorkerLost(record.info, cause))

    def on_goodbye(self, record: WorkerRecord, sure: bool = True, failed: str = "") -> None:
        """A member leaves in good order. sure: its connection is proved to be its own. failed: as of `farewell`."""
        left = partial(self._on_left, record, failed)
        if sure:
            left()
        else:
            self._indirect_probe.look_into(record, self._engine.record, left, "has said goodbye")

    def _on_left(self, record: WorkerRecord, failed: str = "") -> None:
        if not self._engine.closed:
            if failed:
                self._failed[record.id] = failed
            self._carry_out(self._table.depart(record))
            self.joining.look()  # this worker may lead now

    async def look_for_farewell(self, record: WorkerRecord) -> bool:
        """Whether an unreachable member has left: it wrote so into the store, which is asked for a bounded time.

        If so, the member has left for this worker, too.
        """
        if not self.is_gone(record) and not self._engine.closed:
            asked = self._engine.tasks.spawn(self._ask_store(record))
            await asyncio.wait((asked,), timeout=self._engine.bounds.farewell)
        return self.is_gone(record) and not self.is_lost(record)

    async def _ask_store(self, record: WorkerRecord) -> None:
        try:
            if await self._engine.steps.run(lambda: self._context.rendezvous.has_left(record)):
                self._on_left(record)
        except RendezvousError as error:
            logger.debug("worker %s cannot see whether %s has left: %s", self._engine.name, record.describe(), error)

    # --- unproved signs of a member's end -----------------------------------------------------------------------------

    def on_broken(self, service: Service, cause: str) -> None:
        """A connection opened by a member, or by a stranger in its name, has broken."""
        if service.sure and provably_dead(service.record, self._engine.record.host):
            self.on_lost(service.record, cause)
        elif service.sure:  # it may be about to leave, and its goodbye late
            self._lose_unless_left(service.record, cause)
        else:
            believed = partial(self.on_lost, service.record, cause)
            self._indirect_probe.look_into(service.record, self._engine.record, believed, "has broken a connection")

    def on_report(self, reporter: int, record: WorkerRecord, cause: str) -> None:
        """A member reports the loss of another one.

        The two may report each other. Then the member with the lower id stays, and all lose the same.
        """
        told, known = self.members.get(reporter), self.members.get(record.id)
        if told is not None and known == record:
            other = told if told.id < record.id else self._engine.record
            believed = partial(self.on_lost, record, cause)
            self._indirect_probe.look_into(record, other, believed, f"was lost, says {told.describe()}", told)

    def vouches(self, member: int) -> bool:
        """Whether this worker is not leaving, and has not parted with that member."""
        leaves = self._engine.closed or self._table.leaving is Leaving.LEFT
        return not leaves and member not in self._table.gone

    # --- after a member is gone ---------------------------------------------------------------------------------------

    def _part(self, record: WorkerRecord) -> None:
        peer = self._context.peers.of(record)
        new = self._table.returning is not Returning.MEMBER
        failed = self._failed.pop(record.id, "")
        error = peer.parting = farewell(record, failed, ", before this worker came" if new else "")
        if peer.pending.calls:
            self._engine.loop.call_later(_GOODBYE_GRACE, self._end_calls, record, error)
        else:
            self._end_calls(record, error)
        self._forget(record)
        self._context.events.publish(WorkerLeft(record.info))

    def _end_calls(self, record: WorkerRecord, error: RpcError) -> None:
        self._context.peers.of(record).fail(error)
        self._context.peers.on_gone(record)

    def _forget(self, record: WorkerRecord) -> None:
        self._watch.remove(record)
        self._ended.pop(record.incarnation, None)
        self._kept.discard(record.incarnation)
        self.departure.forget(record)
        for service in list(self._context.services):
            if service.record.incarnation == record.incarnation:
                service.connection.abort()
        self._context.references.on_gone(record.id, record.id in self.lost)
        self._context.gradients.on_gone(record.id)

    def _forget_for_good(self, record: WorkerRecord) -> None:
        self.departure.heard.discard(record.id)
        self._context.peers.forget(record)
        self._context.references.forget(record.id)
        self._remove_sockets(record)

    async def _strike_off(self, rendezvous: Rendezvous, record: WorkerRecord) -> None:
        with contextlib.suppress(RendezvousError):
            await self._engine.steps.run(lambda: rendezvous.leave(record))


def failure(record: WorkerRecord, cause: str, error: BaseException | None) -> RpcError:
    """The error for everything that waits for a lost worker."""
    if isinstance(error, PeerRefused):
        failure: RpcError = PeerRefused(f"{record.describe()}: {error}")
    else:
        text = f"{record.describe()} was lost: {cause}"
        host, pid = record.hostname, record.pid
        failure = PeerLost(text, worker=record.name, rank=record.rank, host=host, pid=pid, cause=cause)
    failure.__cause__ = error
    return failure


class _NodeForHandlers(Protocol):
    """A running worker, as the handlers need it."""

    group: Group


def _current() -> tuple[Group, int]:
    """In a handler: this worker's group, and the caller's id."""
    call = current_call.get()
    assert call is not None, "these functions are handlers"
    return cast(_NodeForHandlers, call.node).group, call.caller_id


@system
async def attend(record: RecordFields) -> None:
    """Handler: a member makes itself known, and keeps the connection over which it does so."""
    group, caller_id = _current()
    member = WorkerRecord.from_wire(record)
    _check_own(group, member, caller_id)
    group.on_joined(member)


def _check_own(group: Group, member: WorkerRecord, caller_id: int) -> None:
    caller = current.caller()
    if (member.id, member.info) != (caller_id, caller):
        raise RpcUsageError(f"worker {caller.name!r} speaks for itself alone, and not for {member.name!r}")
    if not group.has_shown(member):
        raise RpcUsageError(f"worker {caller.name!r} has sent another record of itself than when it connected")


@system
async def arrive(record: RecordFields) -> bytes:
    """Handler, on the leader: a joining member is there. The answer comes when all members know it, with the
    members."""
    group, caller_id = _current()
    joiner = WorkerRecord.from_wire(record)
    _check_own(group, joiner, caller_id)
    return roster_to_wire(await group.joining.arrive(joiner))


@system
async def introduce(record: RecordFields) -> None:
    """Handler: the leader introduces a joining member in a lost one's place. The answer comes when this worker knows
    it."""
    group, caller_id = _current()
    await group.joining.introduce(caller_id, WorkerRecord.from_wire(record))


@system
async def report_lost(record: RecordFields, cause: str) -> None:
    """Handler: a member reports the loss of another one."""
    group, caller_id = _current()
    lost = WorkerRecord.from_wire(record)
    await group.joining.until_heard_of(lost)  # a report of an unknown member would be dropped
    group.on_report(caller_id, lost, legible(str(cause)[:CAUSE_LIMIT]))  # a member's words, for the log


@system
async def vouch(member: int) -> bool:
    """Handler: whether this worker is there, and has not parted with that member."""
    group, _ = _current()
    return group.vouches(member)


@system
async def present() -> None:
    """Handler: this worker is there, and answers."""


@system
async def enter() -> None:
    """Handler, on the leader: a member's program is done. The answer comes when all may leave."""
    group, caller_id = _current()
    await group.departure.enter(caller_id)


@system
async def poll() -> bytes:
    """Handler: whether this worker is idle, and how many calls it has seen."""
    group, caller_id = _current()
    return pack(group.departure.polled(caller_id))
