"""The part of a worker that speaks with its group: it carries out what the table of the group decides.

Who is a member, who leads, who was lost and how all leave together is decided by `protocol/leaving.py`. What is seen
here of other members (calls that arrive, connections that end, processes that die, time that passes) goes into its
table. What the table returns is done here: calls to other members, tasks that wait, timers, and news for the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, assert_never, cast

from ...errors import PeerClosed, PeerLost, PeerRefused, RendezvousError, RpcError, RpcUsageError
from ...protocol import leaving
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...protocol.leaving import Activity, GroupTable, Output, Outputs
from ...protocol.states import Leaving, Returning
from ...transport import sockets
from ..callee.service import Service
from ..caller.peers import Peers
from ..calls import current
from ..calls.current import current_call
from ..calls.functions import system
from ..engine.engine import Engine
from ..engine.host import provably_dead, sees
from ..engine.watch import ProcessWatch
from ..gradients.contexts import Gradients
from ..links.links import Links
from ..meeting.rendezvous import Rendezvous
from ..references.references import LeakedReference, References
from .events import Events, WorkerJoined, WorkerLeft, WorkerLost, WorkerReplaced
from .newcomers import Newcomers, roster_to_wire

logger = logging.getLogger("aiorpc")

# Seconds between the end of a process and the loss of its worker: what it wrote before may still be in the sockets.
_EXIT_GRACE = 0.05
# Seconds between a goodbye and the end of the calls to that worker: replies may be on their way on another connection.
_GOODBYE_GRACE = 1.0
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05
# Seconds before each time that a member is asked whether it is there, when somebody says that it is not.
_VOUCH_PAUSES = (0.0, 0.05, 0.5)
# Characters of what a member says of another one's end.
CAUSE_LIMIT = 1000


@dataclass(frozen=True)
class ShutdownReport:
    """How a shutdown went.

    lost: the members that were lost. timed_out: whether the worker left although somebody's work was not over.
    references: the references that were still alive.
    """

    lost: tuple[WorkerInfo, ...] = ()
    timed_out: bool = False
    references: tuple[LeakedReference, ...] = ()


class Home(Protocol):
    """What the group needs of the worker."""

    engine: Engine
    rendezvous: Rendezvous
    links: Links
    gradients: Gradients
    peers: Peers
    references: References
    services: set[Service]
    news: Events

    def is_idle(self) -> bool:
        """Whether no call of users is under way, in either direction."""

    def activity(self) -> tuple[bool, int]:
        """Whether it is idle, and how many calls of users it has seen."""

    async def probe(self, record: WorkerRecord) -> None:
        """Raises OSError or RpcError if a worker takes no connections."""


class Group:
    """One worker's view of its group. On the loop.

    members, lost: by id; they are the table's.
    """

    def __init__(self, home: Home, records: list[WorkerRecord]) -> None:
        self._home = home
        self._engine = home.engine
        newcomer = home.rendezvous.returned is not None
        self._table = GroupTable(home.engine.id, records, free=home.rendezvous.dynamic, newcomer=newcomer)
        self.newcomers = Newcomers(
            home,
            self._table,
            carry_out=self._carry_out,
            lose=self.on_lost,
            is_together=self._is_together,
            verbs=(arrive, introduce),
        )
        self.members = self._table.members
        self.lost = self._table.lost
        self._watch = ProcessWatch(home.engine.loop, self.on_process_exit)
        self._asked: set[int] = set()  # of whom something is looked into
        self._heard: set[int] = set()  # who has made itself known
        self._entered: dict[int, asyncio.Future[None]] = {}  # the answers to the ENTERs that were received
        self._rounds_limit, self._pause = 0.0, _FIRST_PAUSE
        # While this worker leaves: what its shutdown waits for, and what that takes.
        self._go: asyncio.Future[bool] | None = None
        self._context = contextvars.Context()
        self._waits: set[asyncio.Task[None]] = set()

    @property
    def leader(self) -> int:
        """The id of the member that coordinates a group of fixed size."""
        return self._table.leader

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader."""
        return self._table.leads

    @property
    def entered(self) -> list[int]:
        """The ids of the members that this worker has heard of that they want to leave: a leader waits for the rest."""
        return list(self._entered)

    def start(self) -> None:
        """Make this worker known to the leader; in a free group, to everybody."""
        self._carry_out(self._table.start())

    def is_gone(self, record: WorkerRecord) -> bool:
        """Whether that member has left or was lost; the rendezvous may list it a little longer."""
        return record.id in self._table.gone

    def has_gone(self, member: int) -> bool:
        """Whether the member of that id has left or was lost. Any thread."""
        return member in self._table.gone

    def is_lost(self, record: WorkerRecord) -> bool:
        """Whether that member was lost, or has been gone for so long that this is not known any more."""
        return record.id in self.lost or (self.is_gone(record) and record.id not in self.members)

    def contradicts(self, record: WorkerRecord) -> bool:
        """Whether a member says something else of itself than this worker knows of it; a free group has new members."""
        known = self.members.get(record.id)
        return known != record and not (known is None and (self._table.free or self._table.expects(record)))

    def may_not_know_this(self, record: WorkerRecord) -> bool:
        """Whether that member may refuse this worker because it has not heard of it yet: of a newcomer, but for the
        leader, members hear one after the other."""
        return self._table.returning is not Returning.MEMBER and record.id != self._table.leader

    def live(self) -> list[WorkerRecord]:
        """The members that have neither left nor been lost."""
        return self._table.live()

    def close(self) -> None:
        """Watch nobody any more, and remove the sockets that lost members have left on this host."""
        self._watch.close()
        for member in self.lost:
            self._remove_socket(self.members.get(member))

    def _remove_socket(self, record: WorkerRecord | None) -> None:
        if record is not None and record.unix_path and record.host == self._engine.record.host:
            sockets.remove_if_stale(Path(record.unix_path))

    def close_in_child(self) -> None:
        """After a fork: let go of the descriptors, which are the parent's."""
        self._watch.close_in_child()

    # --- what the table decides ---------------------------------------------------------------------------------------

    def _carry_out(self, outputs: Outputs) -> None:
        for output in outputs:
            self._do(output)

    def _do(self, output: Output) -> None:
        match output:
            case leaving.Attend(to):
                self._tell(to, attend, self._engine.record.to_wire())
            case leaving.Follow(to):
                # A newcomer may have given up, and its process live on.
                if not self.watch(to) or to.id != to.rank:
                    self._tell(to, attend, self._engine.record.to_wire())
            case leaving.ReportLost(to, member, cause):
                self._tell(to, report_lost, member.to_wire(), cause)
            case leaving.Joined(member):
                self._home.references.admit(member.id)
                self._home.peers.add(member)
                self._home.news.publish(WorkerJoined(member.info))
            case leaving.Replaced(member, before):
                logger.info("worker %s: %s has taken the place of %s", self._engine.name, member.describe(), before.pid)
                self._home.references.admit(member.id)
                self._home.peers.add(member)
                self._home.news.publish(WorkerReplaced(member.info))
            case leaving.Admit() | leaving.Refuse() | leaving.Announce() | leaving.Welcome():
                self.newcomers.do(output)
            case leaving.Lost(member, cause, error):
                self._mourn(member, cause, error)
            case leaving.Left(member):
                self._part(member)
            case leaving.Forget(member):
                self._forget_for_good(member)
            case leaving.SendEnter(to):
                self._spawn(self._enter_at(to))
                if to.id == self._engine.id:
                    self._spawn(self._look_for_the_silent())
            case leaving.AwaitIdle():
                self._spawn(self._until_idle())
            case leaving.Go(complete):
                if self._go is not None and not self._go.done():
                    self._go.set_result(complete)
            case leaving.AnswerEnters(members):
                self._answer(members)
            case leaving.Poll(records, first):
                self._engine.tasks.spawn(self._poll_all(records, first))
            case leaving.Rest():
                self._engine.tasks.spawn(self._rest())
            case leaving.Overdue(busy):
                names = ", ".join(self._home.peers.describe(each) for each in busy) or "nobody"
                logger.warning("shutdown: %s still had calls under way; leaving all the same", names)
            case _:
                assert_never(output)

    def _tell(self, record: WorkerRecord, function: Any, *args: Any) -> None:
        try:
            # Without a limit: a member that is stopped for long has to hear it when it goes on. Nobody says it twice.
            call = self._home.peers.of(record).call(function, args, None, 0.0, system=True)
        except RpcError:
            return
        call.when_settled(lambda future: future.mark_seen())

    # --- members come and go ------------------------------------------------------------------------------------------

    def watch(self, record: WorkerRecord) -> bool:
        """Watch the process of a member, connected or not; False if that cannot be done from here."""
        if not sees(self._engine.record.host, record.host):
            return False
        return record.pid == os.getpid() or self._watch.add(record)

    def on_joined(self, record: WorkerRecord) -> None:
        """A member is there. It is news for the user only if it was not known."""
        if self.is_gone(record):
            return  # the rendezvous may list it a little longer
        self._heard.add(record.id)
        self._home.peers.add(record)
        self._carry_out(self._table.join(record))

    def on_process_exit(self, record: WorkerRecord) -> None:
        """The process of a member has ended."""
        self._home.links.memory.collect()
        # What it wrote before it ended may still be in the sockets; their end of file usually comes first.
        self._engine.loop.call_later(_EXIT_GRACE, self._on_exit, record, "its process ended")

    def _on_exit(self, record: WorkerRecord, cause: str) -> None:
        links = [each.link for each in self._home.services if each.record.incarnation == record.incarnation]
        called = self._home.peers.of(record).link
        links += [] if called is None else [called]
        if links and all(link.connection.local for link in links):
            self.on_lost(record, cause)  # else a goodbye would have come; over TCP the line may be down
        else:
            self._lose_unless_left(record, cause)

    def _lose_unless_left(self, record: WorkerRecord, cause: str) -> None:
        if not self._engine.closed and not self.is_gone(record):
            self._engine.tasks.spawn(self._look_and_lose(record, cause))

    async def _look_and_lose(self, record: WorkerRecord, cause: str) -> None:
        if not await self.look_for_farewell(record):
            self.on_lost(record, cause)

    def on_lost(self, record: WorkerRecord, cause: str, error: BaseException | None = None) -> None:
        """A member died or cannot be reached: everything that waits for it fails.

        It may be called several times for one member, by whoever sees a sign of it; the table takes the first one.
        """
        if not self._engine.closed:
            self._carry_out(self._table.lose(record, cause, error))
            self.newcomers.look()

    def _mourn(self, record: WorkerRecord, cause: str, error: BaseException | None) -> None:
        home, engine = self._home, self._engine
        if not engine.lifetime.leaving and self._table.returning is Returning.MEMBER:
            logger.warning("worker %s was lost: %s", record.describe(), cause)
        home.peers.of(record).fail(failure(record, cause, error))
        home.peers.on_lost(record)
        self._forget(record)
        if home.rendezvous.dynamic:
            engine.tasks.spawn(self._strike_off(home.rendezvous, record))
        home.news.publish(WorkerLost(record.info, cause))

    def on_goodbye(self, record: WorkerRecord, sure: bool = True) -> None:
        """A member leaves in good order. sure: it was it for sure that has said so."""
        if sure:
            self._on_left(record)
        else:
            self._look_into(record, self._engine.record, partial(self._on_left, record), "has said goodbye")

    def _on_left(self, record: WorkerRecord) -> None:
        if not self._engine.closed:
            self._carry_out(self._table.depart(record))
            self.newcomers.look()  # this worker may lead now

    async def look_for_farewell(self, record: WorkerRecord) -> bool:
        """Whether a member that cannot be reached has left: no goodbye can come where there is no connection.

        The store is asked, which it has told, for a bounded time. If it has, it has left here, too.
        """
        if not self.is_gone(record) and not self._engine.closed:
            asked = self._engine.tasks.spawn(self._ask_store(record))
            await asyncio.wait((asked,), timeout=self._engine.bounds.farewell)
        return self.is_gone(record) and not self.is_lost(record)

    async def _ask_store(self, record: WorkerRecord) -> None:
        try:
            if await self._engine.steps.run(lambda: self._home.rendezvous.has_left(record)):
                self._on_left(record)
        except RendezvousError as error:
            logger.debug("worker %s cannot see whether %s has left: %s", self._engine.name, record.describe(), error)

    # --- what is said of a member by somebody who may not be it -------------------------------------------------------

    def on_broken(self, service: Service, cause: str) -> None:
        """A connection that a member has opened, or somebody in its name, has broken."""
        if service.sure and provably_dead(service.record, self._engine.record.host):
            self.on_lost(service.record, cause)
        elif service.sure:  # it may be about to leave, and too busy to say so here in time
            self._lose_unless_left(service.record, cause)
        else:
            believed = partial(self.on_lost, service.record, cause)
            self._look_into(service.record, self._engine.record, believed, "has broken a connection")

    def on_report(self, reporter: int, record: WorkerRecord, cause: str) -> None:
        """A member says that it has lost another one.

        The other one may say the same of it. Then the one that leads before the other stays, so that all lose the same.
        """
        told, known = self.members.get(reporter), self.members.get(record.id)
        if told is not None and known == record:
            other = told if told.id < record.id else self._engine.record
            believed = partial(self.on_lost, record, cause)
            self._look_into(record, other, believed, f"was lost, says {told.describe()}", told)

    def _look_into(
        self,
        record: WorkerRecord,
        other: WorkerRecord,
        believed: Callable[[], None],
        what: str,
        told: WorkerRecord | None = None,
    ) -> None:
        """Ask a member whether `other` and it have parted, before that is believed. told: by whom, if not by itself.

        Only a proof of who has connected would make that unnecessary: over unix sockets the kernel's word, over TCP a
        certificate. Whoever is gone does not answer.
        """
        if self._engine.closed or self.is_gone(record) or record.id in self._asked:
            return
        if record.id == self._engine.id:
            return  # we know that better
        if provably_dead(record, self._engine.record.host):
            believed()
            return
        self._asked.add(record.id)
        self._engine.tasks.spawn(self._ask(record, other, believed, what, told))

    async def _ask(
        self,
        record: WorkerRecord,
        other: WorkerRecord,
        believed: Callable[[], None],
        what: str,
        told: WorkerRecord | None,
    ) -> None:
        try:
            for pause in _VOUCH_PAUSES:  # it may come to see only now what the other one has seen
                await asyncio.sleep(pause)
                if self.is_gone(record):
                    return
                if not await self._is_together(record, other):
                    believed()
                    return
            if told is not None and self.is_gone(told):
                return  # the two had lost each other
        finally:
            self._asked.discard(record.id)
        logger.warning(
            "worker %s: it seemed that %s %s, but that worker is there, and says otherwise: a member may be lying",
            self._engine.name,
            record.describe(),
            what,
        )

    async def _is_together(self, record: WorkerRecord, other: WorkerRecord) -> bool:
        """Whether a member says of itself that it is there, and has not parted with the other one."""
        patience = self._engine.bounds.vouch
        try:
            async with asyncio.timeout(patience):
                await self._home.probe(record)  # to call alone would try for longer where nobody listens
                peer = self._home.peers.of(record)
                together: bool = await peer.call(vouch, (other.id,), None, patience, system=True)
                return together
        except (OSError, RpcError):
            return False

    def vouches(self, member: int) -> bool:
        """Whether this worker stays for now, and has not parted with that member."""
        leaves = self._engine.closed or self._table.leaving is Leaving.LEFT
        return not leaves and member not in self._table.gone

    # --- what becomes of a member that is gone ------------------------------------------------------------------------

    def _part(self, record: WorkerRecord) -> None:
        peer = self._home.peers.of(record)
        new = self._table.returning is not Returning.MEMBER
        error = peer.parting = farewell(record, ", before this worker came" if new else "")
        if peer.owed.pending:
            self._engine.loop.call_later(_GOODBYE_GRACE, peer.fail, error)
        else:
            peer.fail(error)
        self._forget(record)
        self._home.news.publish(WorkerLeft(record.info))

    def _forget(self, record: WorkerRecord) -> None:
        self._watch.remove(record)
        self._entered.pop(record.id, None)
        for service in list(self._home.services):
            if service.record.incarnation == record.incarnation:
                service.connection.abort()
        self._home.references.on_gone(record.id, record.id in self.lost)
        self._home.gradients.on_gone(record.id)

    def _forget_for_good(self, record: WorkerRecord) -> None:
        self._heard.discard(record.id)
        self._home.peers.forget(record)
        self._home.references.forget(record.id)
        self._remove_socket(record)

    async def _strike_off(self, rendezvous: Rendezvous, record: WorkerRecord) -> None:
        with contextlib.suppress(RendezvousError):
            await self._engine.steps.run(lambda: rendezvous.leave(record))

    # --- leaving, as a member -----------------------------------------------------------------------------------------

    async def leave(self, timeout: float) -> bool:
        """Serve until the work of the group is over; False if that took too long. timeout: seconds, 0 for no limit."""
        self._go = asyncio.get_running_loop().create_future()
        self._context = contextvars.copy_context()
        bound = self._engine.loop.call_later(timeout, self._give_up) if timeout else None
        self._carry_out(self._table.leave(hosts_store=self._home.rendezvous.hosts_store))
        try:
            return await self._go
        finally:
            self._table.give_up()  # if the waiting was cancelled, the table has not heard of it yet
            if bound is not None:
                bound.cancel()
            for task in self._waits:
                task.cancel()
            await asyncio.gather(*self._waits, return_exceptions=True)

    def _give_up(self) -> None:
        self._carry_out(self._table.give_up())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a task that waits for something, until the worker is let go; in the context of the call of `leave`."""
        task = self._engine.loop.create_task(coroutine, context=self._context)
        self._waits.add(task)
        task.add_done_callback(self._waited)

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._waits.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._give_up()  # whatever the reason was: nothing else would end the waiting

    async def _enter_at(self, leader: WorkerRecord) -> None:
        # This worker goes on serving while that is awaited: everything else on the loop runs as before.
        try:
            if leader.id == self._engine.id:
                await self.enter(leader.id)
            else:
                await self._home.peers.of(leader).call(enter, (), None, 0.0, system=True)
        except RpcError:
            self._carry_out(self._table.enter_failed(leader.id))
        else:
            self._carry_out(self._table.enter_answered())

    async def _look_for_the_silent(self) -> None:
        """As the leader that leaves: see in the store who has left before it could say goodbye to this worker."""
        while silent := [each for each in self._table.live() if each.id not in self._heard | {self._engine.id}]:
            await asyncio.sleep(self._engine.bounds.serving_pause)
            try:
                left = await self._engine.steps.run(
                    lambda: [each for each in silent if self._home.rendezvous.has_left(each)]
                )
            except RendezvousError as error:
                logger.debug("worker %s cannot see who has left: %s", self._engine.name, error)
                return
            for record in left:
                self._on_left(record)

    async def _until_idle(self) -> None:
        pause = _FIRST_PAUSE
        while not self._home.is_idle():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        self._carry_out(self._table.idle())

    # --- leaving, as the leader ---------------------------------------------------------------------------------------

    async def enter(self, member: int) -> None:
        """On the leader: the program of that member is done. Returns when the member may leave."""
        answer = self._entered.get(member)
        if answer is None:
            answer = self._entered[member] = asyncio.get_running_loop().create_future()
        self._carry_out(self._table.enter(member))
        await asyncio.shield(answer)

    def _answer(self, members: tuple[int, ...]) -> None:
        for member in members:
            if not self._entered[member].done():
                self._entered[member].set_result(None)

    async def _poll_all(self, members: tuple[WorkerRecord, ...], first: bool) -> None:
        if first:
            self._pause = _FIRST_PAUSE
            self._rounds_limit = time.monotonic() + (self._engine.options.rpc_timeout or 60.0)
        answers = await asyncio.gather(*(self._poll(record) for record in members), return_exceptions=True)
        found = {
            record.id: None if isinstance(answer, BaseException) else answer
            for record, answer in zip(members, answers, strict=True)
        }
        self._carry_out(self._table.polled(found, overdue=time.monotonic() > self._rounds_limit))

    async def _poll(self, record: WorkerRecord) -> Activity:
        if record.id == self._engine.id:
            return Activity(*self.activity())
        patience = self._engine.bounds.poll
        return Activity(*await self._home.peers.of(record).call(poll, (), None, patience, system=True))

    def activity(self) -> tuple[bool, int]:
        """Whether this worker is idle, and how many calls of users it has seen."""
        return self._home.activity()

    async def _rest(self) -> None:
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._carry_out(self._table.rested())


def failure(record: WorkerRecord, cause: str, error: BaseException | None) -> RpcError:
    """The error that everything gets which waits for a lost worker."""
    if isinstance(error, PeerRefused):
        failure: RpcError = PeerRefused(f"{record.describe()}: {error}")
    else:
        text = f"{record.describe()} was lost: {cause}"
        host, pid = record.hostname, record.pid
        failure = PeerLost(text, worker=record.name, rank=record.rank, host=host, pid=pid, cause=cause)
    failure.__cause__ = error
    return failure


def farewell(record: WorkerRecord, when: str = "") -> PeerClosed:
    """The error that everything gets which waits for a worker that has left."""
    return PeerClosed(f"{record.describe()} has shut down{when}")


class _NodeForHandlers(Protocol):
    """A running worker, whose group this is."""

    group: Group


def _current() -> tuple[Group, int]:
    """In a handler: the group of this worker, and the id of the caller."""
    call = current_call.get()
    assert call is not None, "these functions are handlers"
    return cast(_NodeForHandlers, call.node).group, call.caller_id


@system
async def attend(record: list[Any]) -> None:
    """Handler: a member makes itself known, and keeps the connection over which it does so."""
    group, caller_id = _current()
    member = WorkerRecord.from_wire(record)
    _check_own(member, caller_id)
    group.on_joined(member)


def _check_own(member: WorkerRecord, caller_id: int) -> None:
    caller = current.caller()
    if (member.id, member.info) != (caller_id, caller):
        raise RpcUsageError(f"worker {caller.name!r} speaks for itself alone, and not for {member.name!r}")


@system
async def arrive(record: list[Any]) -> list[Any]:
    """Handler, on the leader: a newcomer is there. It is answered when all members know it, with who they are."""
    group, caller_id = _current()
    newcomer = WorkerRecord.from_wire(record)
    _check_own(newcomer, caller_id)
    return roster_to_wire(await group.newcomers.arrive(newcomer))


@system
async def introduce(record: list[Any]) -> None:
    """Handler: the leader says that a newcomer has the place of a lost member. It is answered when that is known."""
    group, caller_id = _current()
    await group.newcomers.introduce(caller_id, WorkerRecord.from_wire(record))


@system
async def report_lost(record: list[Any], cause: str) -> None:
    """Handler: the leader has seen a member die, and tells it."""
    group, caller_id = _current()
    lost = WorkerRecord.from_wire(record)
    await group.newcomers.until_heard_of(lost)  # else the report would be of somebody unknown, and be dropped
    group.on_report(caller_id, lost, str(cause)[:CAUSE_LIMIT])


@system
async def vouch(member: int) -> bool:
    """Handler: whether this worker is there, and has not parted with that member."""
    group, _ = _current()
    return group.vouches(member)


@system
async def present() -> WorkerInfo:
    """Handler: this worker is there, and answers."""
    call = current_call.get()
    assert call is not None, "this function is a handler"
    return call.node.engine.info


@system
async def enter() -> None:
    """Handler, on the leader: the program of a member is done. It is answered when all may leave."""
    group, caller_id = _current()
    await group.enter(caller_id)


@system
async def poll() -> tuple[bool, int]:
    """Handler: whether this worker is idle, and how many calls it has seen."""
    group, _ = _current()
    return group.activity()
