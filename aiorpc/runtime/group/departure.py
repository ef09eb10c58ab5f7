"""How a worker leaves with its group: what it waits for, and what it does as the leader.

The table decides (`protocol/leaving.py`); its outputs about leaving are carried out here.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from ..._typing import Coro, Function
from ...errors import RendezvousError, RpcError
from ...logs import logger
from ...protocol import leaving
from ...protocol.identity import WorkerRecord, legible
from ...protocol.leaving import Activity, GroupTable, Outputs
from ..engine.lifetime import no_longer_waits
from ..engine.tasks import begin
from .interface import MembershipContext

_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05
_read_activity = msgspec.msgpack.Decoder(tuple[bool, int]).decode

#: The table's outputs about leaving.
LeavingOutput = (
    leaving.SendEnter
    | leaving.CloseDoor
    | leaving.AwaitIdle
    | leaving.Go
    | leaving.AnswerEnters
    | leaving.Poll
    | leaving.Rest
    | leaving.Overdue
)


class Departure:
    """See the module. On the loop.

    carry_out: does the table's outputs. on_left: a member has left in good order. verbs: the handlers `enter` and
    `poll`, called on others. heard: the ids of members that have made themselves known.
    """

    def __init__(
        self,
        context: MembershipContext,
        table: GroupTable,
        *,
        carry_out: Callable[[Outputs], None],
        on_left: Callable[[WorkerRecord], None],
        verbs: tuple[Function, Function],
    ) -> None:
        self.heard: set[int] = set()
        self._context = context
        self._engine = context.engine
        self._table = table
        self._carry_out = carry_out
        self._on_left = on_left
        self._enter, self._poll_verb = verbs
        self._entered: dict[int, asyncio.Future[None]] = {}  # the answers to the ENTERs that were received
        self._rounds_limit, self._pause = 0.0, _FIRST_PAUSE
        # While this worker leaves: the end that its shutdown waits for, and the tasks that this takes.
        self._go: asyncio.Future[bool] | None = None
        self._variables = contextvars.Context()
        self._waits: set[asyncio.Task[None]] = set()
        self._grace: asyncio.TimerHandle | None = None  # until the program's waits end
        self._bounds: list[asyncio.TimerHandle] = []
        self.unfinished: tuple[str, ...] = ()  # when the time was up

    @property
    def entered(self) -> list[int]:
        """The ids of the members that have asked this leader to leave; it waits for the rest."""
        return list(self._entered)

    def forget(self, record: WorkerRecord) -> None:
        """A member is gone."""
        self._entered.pop(record.id, None)

    def do(self, output: LeavingOutput) -> None:
        """Carry out an output of the table."""
        match output:
            case leaving.SendEnter(to):
                self._spawn(self._enter_at(to))
                if to.id == self._engine.id:
                    self._spawn(self._look_for_the_silent())
            case leaving.CloseDoor(alone):
                self._close_door(alone)
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
                names = ", ".join(self._context.peers.describe(each) for each in busy) or "nobody"
                logger.of(self._engine.name).warning(
                    "shutdown: %s still had calls under way; leaving all the same", names
                )
            case _:
                assert_never(output)

    # --- as a member --------------------------------------------------------------------------------------------------

    async def leave(self, timeout: float) -> bool:
        """Serve until the work of the group is over; False if that took too long. timeout: seconds, 0 for no limit.

        A worker that drains: only until what it has accepted is over.
        """
        self._go = asyncio.get_running_loop().create_future()
        self._variables = contextvars.copy_context()
        if self._engine.lifetime.drains:
            self.drain(timeout)
        else:
            self._bound(timeout)
            self._carry_out(self._table.leave(hosts_store=self._context.rendezvous.hosts_store))
        try:
            return await self._go
        finally:
            self._table.give_up()  # for a cancelled wait; else it does nothing
            for timer in (*self._bounds, self._grace):
                if timer is not None:
                    timer.cancel()
            for task in self._waits:
                task.cancel()
            await asyncio.gather(*self._waits, return_exceptions=True)

    def drain(self, timeout: float) -> None:
        """Leave without the others, also if `leave` waits for them. timeout: as of `leave`."""
        self._bound(timeout)
        self._carry_out(self._table.drain())

    def _bound(self, timeout: float) -> None:
        if timeout:
            self._bounds.append(self._engine.loop.call_later(timeout, self._overdue, timeout))

    def _overdue(self, seconds: float) -> None:
        calls = self._context.describe_pending()
        self.unfinished = (*([calls] if calls else ()), *self._leftovers())
        if self.unfinished and self._engine.lifetime.drains:
            logger.of(self._engine.name).warning(
                "worker %s has drained for %g s, and leaves without the end of: %s",
                self._engine.name,
                seconds,
                "; ".join(self.unfinished),
            )
        self._give_up()

    def _leftovers(self) -> list[str]:
        """What a worker that drains waits for, beside calls."""
        return [legible(each) for each in self._context.describe_leftovers()] if self._engine.lifetime.drains else []

    def _give_up(self) -> None:
        self._carry_out(self._table.give_up())

    def _close_door(self, alone: bool) -> None:
        self._engine.lifetime.close_door(alone=alone)
        if alone:
            self._context.tell_parting()
        if self._grace is not None:
            self._grace.cancel()
        self._grace = self._engine.loop.call_later(self._engine.bounds.grace, self._end_waits, alone)

    def _end_waits(self, alone: bool) -> None:
        """End the waits of this worker's program, which would delay the other members.

        Calls of functions at other members go on in a fixed group, where these serve until the calls end; and in a
        drain, as they have accepted them, and may drain at the same time.
        """
        seconds, calls = self._engine.bounds.grace, alone and not self._engine.lifetime.drains
        ended = self._context.end_waits(partial(no_longer_waits, self._engine.name, seconds), calls=calls)
        if ended:
            named = [*ended[:5], f"and {len(ended) - 5} more"] if len(ended) > 5 else ended
            logger.warning(
                "worker %s leaves. After %g s its program still waited for this, which has ended with WorkerClosed: %s",
                self._engine.name,
                seconds,
                legible("; ".join(named)),
            )

    def _spawn(self, coroutine: Coro[None]) -> None:
        """Start a task that is cancelled when `leave` ends; in the context of the call of `leave`."""
        task = begin(coroutine, self._engine.loop, self._variables)
        self._waits.add(task)
        task.add_done_callback(self._waited)

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._waits.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._give_up()  # otherwise `leave` would wait without end

    async def _enter_at(self, leader: WorkerRecord) -> None:
        # This worker goes on serving meanwhile.
        try:
            if leader.id == self._engine.id:
                await self.enter(leader.id)
            else:
                await self._context.peers.of(leader).call(self._enter, (), None, 0.0, system=True)
        except RpcError:
            self._carry_out(self._table.enter_failed(leader.id))
        else:
            self._carry_out(self._table.enter_answered())

    async def _look_for_the_silent(self) -> None:
        """As the leaving leader: ask the store for members that left before they could say goodbye to this worker."""
        while silent := [each for each in self._table.live() if each.id not in self.heard | {self._engine.id}]:
            await asyncio.sleep(self._engine.bounds.serving_pause)
            try:
                left = await self._engine.steps.run(
                    lambda: [each for each in silent if self._context.rendezvous.has_left(each)]
                )
            except RendezvousError as error:
                logger.debug("worker %s cannot see who has left: %s", self._engine.name, error)
                return
            for record in left:
                self._on_left(record)

    def _patience(self) -> float:
        """Seconds for calls under way that have no limit of their own."""
        return self._engine.options.rpc_timeout or 60.0

    async def _until_idle(self) -> None:
        pause = _FIRST_PAUSE
        limit = float("inf")  # for answers: a caller that does not read for so long is not waited for
        told = time.monotonic() + self._engine.bounds.told
        while not (idle := self._context.is_idle() and not self._leftovers()) or (
            self._context.owes_answers() and time.monotonic() < limit
        ):
            limit = min(limit, time.monotonic() + self._patience()) if idle else float("inf")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
            if time.monotonic() >= told:  # once; a served stream may be endless
                told = float("inf")
                logger.warning(
                    "worker %s leaves once these have ended, which it has waited for since %g s: %s. %s bound that",
                    self._engine.name,
                    self._engine.bounds.told,
                    "; ".join(filter(None, (self._context.describe_pending(), *self._leftovers())))
                    or "what is still to be sent",
                    "drain(timeout=...) and the option drain_timeout"
                    if self._engine.lifetime.drains
                    else "shutdown(timeout=...) and the option shutdown_timeout",
                )
        self._carry_out(self._table.idle())

    # --- as the leader ------------------------------------------------------------------------------------------------

    async def enter(self, member: int) -> None:
        """On the leader: that member's program is done. Returns when the member may leave."""
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
            self._rounds_limit = time.monotonic() + self._patience()
        answers = await asyncio.gather(*(self._poll(record) for record in members), return_exceptions=True)
        found = {
            record.id: None if isinstance(answer, BaseException) else answer
            for record, answer in zip(members, answers, strict=True)
        }
        self._carry_out(self._table.polled(found, overdue=time.monotonic() > self._rounds_limit))

    async def _poll(self, record: WorkerRecord) -> Activity:
        if record.id == self._engine.id:
            return Activity(*self.polled(record.id))
        patience = self._engine.bounds.poll
        said = await self._context.peers.of(record).call(self._poll_verb, (), None, patience, system=True)
        return Activity(*_read_activity(said))

    def polled(self, leader: int) -> tuple[bool, int]:
        """The leader announces that all leave, and asks whether this worker is idle and how many calls it has seen."""
        self._carry_out(self._table.all_entered(leader))
        return self._context.activity()

    async def _rest(self) -> None:
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._carry_out(self._table.rested())
