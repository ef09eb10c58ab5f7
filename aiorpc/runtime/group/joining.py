"""New processes in vacant places: the parts of the leader, the other members and the joining member. On the loop.

The decisions and their order are in `protocol/leaving.py`, the store's part in `meeting/returning.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import msgspec

from ... import foreign
from ..._typing import Coro, Function
from ...errors import ProtocolError, RendezvousError, RpcError, RpcUsageError, StoreGone, WorkerClosed
from ...logs import logger
from ...protocol import leaving
from ...protocol.identity import RecordFields, WorkerRecord
from ...protocol.leaving import GroupTable, Outputs, Roster
from ...protocol.states import Returning
from ..calls.declared import pack
from ..meeting.returning import Admission
from .interface import MembershipContext

JoiningOutput = leaving.Admit | leaving.Refuse | leaving.Announce | leaving.Welcome

# Seconds between two looks whether this worker knows the new leader.
_PAUSE = 0.01


class JoiningMembers:
    """The joining members of one worker's group.

    carry_out: does the table's outputs. lose: takes a member for lost, with a cause. is_together: asks a member whether
    it is there and has not parted with another one. verbs: the handlers `arrive` and `introduce`, called on others.
    """

    def __init__(
        self,
        context: MembershipContext,
        table: GroupTable,
        *,
        carry_out: Callable[[Outputs], None],
        lose: Callable[[WorkerRecord, str], None],
        is_together: Callable[[WorkerRecord, WorkerRecord], Coro[bool]],
        has_left: Callable[[WorkerRecord], Coro[bool]],
        verbs: tuple[Function, Function],
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._table = table
        self._carry_out = carry_out
        self._lose = lose
        self._is_together = is_together
        self._has_left = has_left
        self._arrive, self._introduce = verbs
        self._answered: set[str] = set()  # incarnations of joining members with a reply in the store
        self._arriving: dict[int, asyncio.Future[Roster]] = {}
        self._doubted: dict[int, asyncio.Task[None]] = {}  # waits for members that claim to lead, by id
        self._hearing: dict[str, asyncio.Event] = {}  # running introductions, by incarnation
        self._looking = False
        self._blind = False  # the store has gone or is unreachable
        self._trouble = ""  # the last logged problem with the store's content

    # --- as the leader ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Begin to look for joining members in the store, while this worker leads and a place is vacant."""
        if not self._looking and self._table.admits and (not self._blind or self._context.rendezvous.is_client):
            self._looking = True
            self._engine.tasks.spawn(self._look())

    async def _look(self) -> None:
        in_store, bounds = self._context.rendezvous.joining, self._engine.bounds
        try:
            while self._table.admits and not self._engine.closed:
                look = partial(in_store.applicants, self._table.places.vacant())
                try:
                    for record in await self._engine.steps.run(look):
                        if record.incarnation not in self._answered:
                            self._carry_out(self._table.apply(record))
                    self._blind, self._trouble = False, ""
                except StoreGone as error:
                    if not self._blind:
                        logger.info("worker %s cannot admit joining members: %s", self._engine.name, error)
                    self._blind = True
                    if not self._context.rendezvous.is_client:  # the store has gone for good
                        return
                except RendezvousError as error:
                    if str(error) != self._trouble:  # it looks several times a second
                        self._trouble = str(error)
                        logger.warning("worker %s cannot see who wants to come: %s", self._engine.name, error)
                await asyncio.sleep(bounds.foreign_pause if self._blind else bounds.serving_pause)
        finally:
            self._looking = False

    def do(self, output: JoiningOutput) -> None:
        """Carry out an output of the table."""
        match output:
            case leaving.Admit(joiner, roster):
                logger.info("worker %s lets %s in", self._engine.name, joiner.describe())
                self._reply(joiner, lambda: self._context.rendezvous.joining.admit(joiner, roster))
            case leaving.Refuse(joiner, reason):
                arriving = self._arriving.get(joiner.id)
                if arriving is None:
                    self._reply(joiner, lambda: self._context.rendezvous.joining.turn_away(joiner, reason))
                elif not arriving.done():
                    arriving.set_exception(RpcUsageError(reason))
            case leaving.Announce(to, joiner):
                self._engine.tasks.spawn(self._tell(to, joiner))
            case leaving.Welcome(joiner, roster):
                arriving = self._arriving.get(joiner.id)
                if arriving is not None and not arriving.done():
                    arriving.set_result(roster)

    def _reply(self, joiner: WorkerRecord, say: Callable[[], None]) -> None:
        self._answered.add(joiner.incarnation)
        self._engine.tasks.spawn(self._reply_to(joiner, say))

    async def _reply_to(self, joiner: WorkerRecord, say: Callable[[], None]) -> None:
        try:
            await self._engine.steps.run(say)
        except (RendezvousError, OSError) as error:
            self._answered.discard(joiner.incarnation)
            logger.warning("worker %s cannot reply to %s: %s", self._engine.name, joiner.describe(), error)

    async def arrive(self, joiner: WorkerRecord) -> Roster:
        """A joining member has proved itself. Returns once all members know it. RpcUsageError if it cannot be one."""
        arriving: asyncio.Future[Roster] = self._engine.loop.create_future()
        self._arriving[joiner.id] = arriving
        try:
            self._carry_out(self._table.arrive(joiner))
            return await arriving
        finally:
            self._arriving.pop(joiner.id, None)

    async def _tell(self, to: WorkerRecord, joiner: WorkerRecord) -> None:
        try:
            # Without a limit: a stopped member has to know it before the joining member calls it.
            await self._context.peers.of(to).call(self._introduce, (pack(joiner.to_wire()),), None, 0.0, system=True)
        except RpcUsageError as error:
            self._lose(joiner, f"{to.describe()} does not take it for a member: {error}")
        except RpcError:
            return  # the member is lost, or this worker leaves
        self._carry_out(self._table.introduced(to.id, joiner.id))

    # --- as another member --------------------------------------------------------------------------------------------

    async def introduce(self, leader: int, joiner: WorkerRecord) -> None:
        """A member introduces a joining member. RpcUsageError if it does not lead, or the joining member does not
        fit."""
        over = asyncio.Event()
        first = self._hearing.setdefault(joiner.incarnation, over) is over
        try:
            await self._hear_of(leader, joiner)
        finally:
            if first:
                del self._hearing[joiner.incarnation]
                over.set()

    async def until_heard_of(self, joiner: WorkerRecord) -> None:
        """Wait for the end of a running introduction of that joining member; later messages about it follow it."""
        over = self._hearing.get(joiner.incarnation)
        if over is not None:
            await over.wait()

    async def _hear_of(self, leader: int, joiner: WorkerRecord) -> None:
        await self._until_it_leads(leader)
        holder = self._table.in_the_way(joiner)
        if holder is not None:
            said_by = self._table.members[leader]
            if await self._is_together(holder, said_by):
                raise RpcUsageError(f"{holder.describe()} is there, as it says itself, and has that place")
            if not await self._has_left(holder):
                self._lose(holder, f"it was replaced, says {said_by.describe()}")
        if joiner.id not in self._table.members:
            objection = self._table.places.objection(joiner)
            if objection:
                raise RpcUsageError(objection)
            self._carry_out(self._table.introduce(joiner))

    async def _until_it_leads(self, leader: int) -> None:
        """Wait until that member leads: it may know earlier than this worker that the leaders before it are lost. One
        task waits for each member, for however many calls."""
        if self._table.leader != leader:
            looking = self._doubted.get(leader)
            if looking is None:
                looking = self._doubted[leader] = self._engine.tasks.spawn(self._look_whether_it_leads(leader))
            await asyncio.wait([looking])
        if self._table.leader != leader:
            raise RpcUsageError(f"worker {self._engine.name!r} takes the word of its leader alone, which that is not")

    async def _look_whether_it_leads(self, leader: int) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._engine.bounds.vouch):
                    while self._table.leader != leader:  # noqa: ASYNC110  # losses set no event
                        await asyncio.sleep(_PAUSE)
        finally:
            self._doubted.pop(leader, None)

    # --- as the joining member
    # ----------------------------------------------------------------------------------------------

    async def come(self, seconds: float) -> None:
        """Become a member, within so many seconds; 0 for no limit. RendezvousError if that fails."""
        returned = self._context.rendezvous.returned
        assert returned is not None, "it is a joining member"
        try:
            await self._come(returned.admission, seconds)
            await self._engine.steps.run(returned.settle_in)
        except BaseException as error:
            if self._table.returning in (Returning.ASKING, Returning.ARRIVING):
                self._table.turned_away()
            await self._engine.steps.run(returned.give_up)
            if isinstance(error, TimeoutError):
                why = f"not all members have heard of it within {seconds:g} s: one may be stopped, or hold its loop"
            elif isinstance(error, RpcError) and not isinstance(error, WorkerClosed):
                why = f"{foreign.text_of(error)}; start it again"
            else:
                raise
            name = self._engine.name
            raise RendezvousError(f"worker {name!r} was let into the group, and is no member: {why}") from error

    async def _come(self, admission: Admission, seconds: float) -> None:
        self._carry_out(self._table.admitted(admission.roster))
        peer, said = self._context.peers.of(admission.by), (pack(self._engine.record.to_wire()),)
        async with asyncio.timeout(seconds or None):
            answer = await peer.call(self._arrive, said, None, 0.0, system=True)
        self._carry_out(self._table.welcomed(roster_from_wire(answer)))


#: Members; lost members with the causes; members that have left.
_read_roster = msgspec.msgpack.Decoder(
    tuple[list[RecordFields], list[tuple[RecordFields, str]], list[RecordFields]]
).decode


def roster_to_wire(roster: Roster) -> bytes:
    """A roster for the wire."""
    lost = [[record.to_wire(), cause] for record, cause in roster.lost]
    return pack([[each.to_wire() for each in roster.members], lost, [each.to_wire() for each in roster.left]])


def roster_from_wire(packed: bytes) -> Roster:
    """The inverse of `roster_to_wire`. ProtocolError for other bytes."""
    try:
        members, lost, left = _read_roster(packed)
    except msgspec.MsgspecError as error:  # its text has no values
        raise ProtocolError(f"a list of the members of a group that is none: {error}") from None
    return Roster(
        tuple(WorkerRecord.from_wire(each) for each in members),
        tuple((WorkerRecord.from_wire(record), cause) for record, cause in lost),
        tuple(WorkerRecord.from_wire(each) for each in left),
    )
