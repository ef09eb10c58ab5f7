"""Which worker publishes which name, as one worker knows it from the group's store and by its own rules.

Leases are made, kept and released in the store (`leases.py`). Leases that other workers announce are looked up there
(`told.py`). `known.py` keeps the known ones. A lease of a member whose role may not publish the name here (`access.py`)
does not count: this worker does not follow it, and may publish the name itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from ..._typing import Function
from ...errors import NotAllowed, PeerLeft, PeerLost, RendezvousError, RpcError
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    LAST_VERSION,
    LATEST,
    Latest,
    LatestWanted,
    Lease,
    LeaveWanted,
    Unpublished,
    read,
    write,
)
from .access import Access
from .handlers import latest, leave
from .home import Home
from .known import KnownLeases
from .leases import StandingLease, find_lease, make_lease, taken
from .told import ToldLeases

T = TypeVar("T")


class Names:
    """The leases of all names for one worker. On the loop.

    read_here: returns the names that are read here. lost: called with a name that this worker publishes and another one
    has in the store.
    """

    def __init__(self, home: Home, read_here: Callable[[], Collection[str]], lost: Callable[[str], None]) -> None:
        self.access: Access = Access(home.engine.rights, home.engine.record)
        self._home = home
        self._engine = home.engine
        self._lost = lost
        self._leases = KnownLeases(home.engine.name, read_here, home.group.has_gone)
        self._stood_in: dict[str, Lease] = {}  # announced leases that count while the store does not answer
        self._told = ToldLeases(home.engine, home.rendezvous, read_here, self._take, self._stand_in)

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set, and replaced by a new one, when a lease has come or the group has changed."""
        return self._leases.changed

    def wake(self) -> None:
        """The group has changed: wake the tasks that wait for a publisher."""
        self._leases.wake()

    def get(self, name: str) -> Lease | None:
        """The known lease to a name, or None."""
        return self._leases.get(name)

    def holder(self, lease: Lease) -> WorkerRecord | None:
        """The member that has made a lease, if it lives and this worker's rules let it publish the name."""
        record = self._home.group.members.get(lease.publisher)
        if record is None or self._home.group.is_gone(record) or not self.access.may_publish(record, lease.name):
            return None
        return record

    def publishes(self, record: WorkerRecord, name: str) -> bool:
        """Whether a worker is the known publisher of a name, and lives."""
        lease = self._leases.get(name)
        return lease is not None and lease.publisher == record.id and self.holder(lease) is not None

    def has_published(self, record: WorkerRecord, name: str, version: int) -> bool:
        """Whether a version of a name must be the worker's own: earlier publishers made those before its first one."""
        lease = self._leases.get(name)
        return self.publishes(record, name) and lease is not None and version >= lease.first

    def describe(self, name: str) -> str:
        """Which worker publishes a name, for errors."""
        lease = self._leases.get(name)
        if lease is None:
            return "no worker publishes it at present"
        record = self._home.group.members.get(lease.publisher)
        what = "published it, and has left or was lost"
        if record is not None and not self._home.group.is_gone(record):
            what = "publishes it"
            if self.holder(lease) is None:
                what = f"leases it, and is not followed: {self.access.why_not(record, name)}"
        return f"worker {lease.worker!r} (id {lease.publisher}) {what}"

    # --- what is heard ------------------------------------------------------------------------------------------------

    def tell(self, lease: Lease, record: WorkerRecord) -> None:
        """A worker announces a lease of its own. Raises NotAllowed if it may not publish the name here."""
        self.access.check_publish(record, lease.name)
        if self._leases.get(lease.name) != lease:
            self._told.tell(lease)

    def tell_end(self, message: Unpublished, worker_id: int) -> bool:
        """A worker announces the end of its lease. Returns whether that was the known one."""
        self._told.end(message.name, worker_id)
        return self._leases.end(message.name, message.turn, worker_id)

    def _take(self, name: str, lease: Lease | None) -> None:
        """Take what the store has under a name that a worker has announced."""
        stood_in = self._stood_in.pop(name, None)
        if lease is None:
            if stood_in is not None:
                self._leases.end(name, stood_in.turn, stood_in.publisher)
            return
        known, holder = self._leases.get(name), self.holder(lease)
        # An older lease was read late. A lease that only was announced does not count in this comparison.
        lesser = holder is None or (known is not None and lease.turn < known.turn and stood_in is None)
        if lesser and known is not None and self.holder(known) is not None:
            return
        self._leases.offer(lease)
        if holder is not None and holder.id != self._engine.id:
            self._lost(name)

    def _stand_in(self, lease: Lease) -> None:
        """The store does not answer: an announced lease counts if no other valid one is known."""
        known = self._leases.get(lease.name)
        if (known is None or self.holder(known) is None) and self.holder(lease) is not None:
            self._stood_in[lease.name] = lease
            self._leases.offer(lease)

    # --- the store ----------------------------------------------------------------------------------------------------

    async def at_store(self, step: Callable[[], T]) -> T:
        """Run a step at the group's store. Raises RendezvousError if it takes longer than a call may."""
        limit = self._engine.default_timeout
        try:
            async with asyncio.timeout(limit or None):
                return await self._engine.steps.run(step)
        except TimeoutError:
            raise RendezvousError(f"the store of the group has not answered for {limit:g} s") from None

    async def look_up(self, name: str) -> Lease | None:
        """The lease to a name in the store; None if there is none, or if the store cannot be asked."""
        try:
            stands = await self._engine.steps.run(partial(find_lease, self._home.rendezvous, name))
        except RendezvousError as error:
            logger.debug("worker %s cannot see who publishes %r: %s", self._engine.name, name, error)
            return None
        lease = None if stands is None else stands.lease
        self._take(name, lease)
        return lease

    async def lease(self, name: str) -> StandingLease:
        """Lease a name for this worker. Raises the errors of `make_lease`, and NotAllowed if all members refuse it."""
        home, record = self._home, self._engine.record
        try:  # even if a lease is known: it may have ended, and another worker may have made one since
            stands = await self.at_store(partial(find_lease, home.rendezvous, name))
        except RendezvousError:
            known = self.get(name)
            holder = None if known is None else self.holder(known)
            if known is None or holder is None or holder.id == record.id:
                raise
            raise taken(name, known.worker, known.publisher) from None
        newest = 0
        if stands is not None and stands.lease.publisher != record.id and self.holder(stands.lease) is not None:
            # Do not ask members for versions: it may publish more, and be gone before all have answered.
            raise taken(name, stands.lease.worker, stands.lease.publisher)
        await self._ask_leave(name)
        if stands is not None:
            newest = await self._newest(name, stands)
        members = home.group.members.values()
        gone = {each.id for each in members if home.group.is_gone(each) or not self.access.may_publish(each, name)}
        made = await self.at_store(partial(make_lease, home.rendezvous, name, record, newest, gone))
        self._leases.hear(made.lease)
        return made

    async def _newest(self, name: str, stands: StandingLease) -> int:
        """The newest version, by all members, of a name to take over; `LAST_VERSION` if a member is silent."""
        found = await self.ask_all(name)
        silent = [record for record, said in found if said is None and not self._home.group.is_gone(record)]
        if not silent:
            return max((said.newest for _, said in found if said is not None), default=0)
        logger.warning(
            "worker %s takes over %r and skips versions up to %d, as it has not heard which ones there were from %s",
            self._engine.name,
            name,
            stands.limit,
            ", ".join(record.describe() for record in silent),
        )
        return LAST_VERSION

    # --- the members --------------------------------------------------------------------------------------------------

    async def ask_all(self, name: str) -> list[tuple[WorkerRecord, Latest | None]]:
        """What each live member has of a name, this one included; None for a member that does not answer."""

        async def ask(record: WorkerRecord) -> tuple[WorkerRecord, Latest | None]:
            try:
                return record, read(LATEST, await self._ask(record, latest, write(LatestWanted(name))))
            except RpcError:
                return record, None

        return await asyncio.gather(*map(ask, self._home.group.live()))

    async def _ask_leave(self, name: str) -> None:
        """Raise NotAllowed if each other member refuses to take the name from this worker.

        A single member that accepts, or does not answer in time, is enough: a refusal concerns its member alone.
        """
        question = write(LeaveWanted(name))
        others = [record for record in self._home.group.live() if record.id != self._engine.id]
        asked = {self._engine.tasks.spawn(self._ask(record, leave, question)) for record in others}
        refusal: NotAllowed | None = None
        try:
            while asked:
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for error in [task.exception() for task in done]:
                    if isinstance(error, NotAllowed):
                        refusal = error
                    elif not isinstance(error, (PeerLost, PeerLeft)):
                        return
        finally:
            for task in asked:
                task.cancel()
        if refusal is not None:
            raise refusal

    async def _ask(self, record: WorkerRecord, function: Function, message: bytes) -> object:
        limit = self._engine.bounds.vouch
        return await self._home.peers.of(record).call(function, (message,), None, limit, system=True)
