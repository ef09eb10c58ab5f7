"""One name at the worker that publishes it: making versions, who has got them, and which readers fetch for their hosts.

Who publishes never waits for a reader. Readers of this host map the slot of a version. Of each other host one reader,
its *leader*, fetches every version in pieces and puts it on a shelf of its own (`relay`), which the others of its host
read. The leaders are a chain: the first fetches from here, each other one from the leader before it, piece by piece as
they come. So what leaves here is about one copy, however many hosts there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...channels.accelerator import Event
from ...channels.slots import copy_all
from ...errors import RpcUsageError
from ...futures import Future
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...protocol.publication import AskLeader, Claim, SubscriptionClosed, Want, needed, write
from ..calls.values import Results
from .content import Content
from .shelf import Home, Key, Origin, Shelf, Stored, Subscriber, in_background

# Lost readers that are remembered.
_MOST_LOST = 256
# From so many bytes on a copy does not belong on the loop.
_LONG_COPY = 1 << 20


@dataclass(frozen=True)
class Delivery:
    """How far a version has come: the readers that have it or a newer one whole, and those that do not.

    has, missing: workers that subscribe to the name. lost: those that left or were lost before they had it. reached:
    whether as many have it as were asked for.
    """

    version: int
    has: tuple[WorkerInfo, ...]
    missing: tuple[WorkerInfo, ...]
    lost: tuple[WorkerInfo, ...]
    reached: bool


@dataclass(eq=False)
class _Awaited:
    """Somebody waits until a version is delivered. many: to how many readers, None for all of them."""

    version: int
    quorum: float | None
    future: Future[Delivery]
    bound: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Leader:
    """Who fetches for a host. seen: when it was heard of last (monotonic seconds). key: its subscription, once it has
    asked. waiting: whether it asks for a newer version now. given: the one that it was told of last. readers: those of
    its host, and what they have, by id.
    """

    record: WorkerRecord
    seen: float = field(default_factory=time.monotonic)
    key: Key | None = None
    waiting: bool = False
    given: int = 0
    readers: dict[int, tuple[WorkerInfo, int]] = field(default_factory=dict)


class Publisher(Shelf):
    """See the module. On the loop."""

    def __init__(self, home: Home, claim: Claim) -> None:
        super().__init__(home, claim.name)
        self.claim = claim
        self.told: set[str] = set()  # the incarnations of the workers that were told of the claim
        self.ending = False  # whether the name is being unpublished: no version is begun
        self.unsure = False  # whether that has failed, so that it is to be seen first whether the claim still stands
        self.idle = asyncio.Event()  # set while no version is being copied
        self.idle.set()
        self._copying = 0
        self._arena = home.links.memory.arena
        self._accelerators = home.links.accelerators
        self._next = claim.first
        self._put_at = 0.0  # when the newest version was there
        self._leaders: dict[str, _Leader] = {}  # by host, in the order of the chain
        self._expected: dict[int, WorkerInfo] = {}  # of workers that may subscribe, and have not asked yet
        self._lost: dict[WorkerInfo, tuple[int, int]] = {}  # what they had, and what was the newest one then
        self._awaited: set[_Awaited] = set()

    # --- publishing ---------------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The last version that was begun; one less than the first if none was."""
        return self._next - 1

    async def put(self, content: Content) -> int:
        """Copy a value and give it to whoever waits; its version. Returns when its buffers are not read any more."""
        version, self._next = self._next, self._next + 1
        self._copying += 1
        self.idle.clear()
        try:
            await self._put(version, content)
        finally:
            self._copying -= 1
            if not self._copying:
                self.idle.set()
        return version

    async def _put(self, version: int, content: Content) -> None:
        engine = self._engine
        origin = Origin(engine.id, engine.name, engine.record.main, (engine.record.role,))
        stored = self.begin(version, origin, content.bodies, content.spans, content.size)

        def copy() -> None:
            copy_all(self._arena, content.buffers, content.spans, stored.data)

        if content.marks:
            await in_background(engine, lambda: self._synchronize(content.marks), self._accelerators.in_background)
        # If this is cancelled, the worker ends: the thread may go on to write, so the slot is not given back.
        if content.size < _LONG_COPY:
            copy()
        else:
            await in_background(engine, copy)
        self._put_at = time.monotonic()
        self.finish(stored)

    def _synchronize(self, marks: Sequence[Event]) -> None:
        driver = self._accelerators.accelerator
        assert driver is not None, "without it nothing lies on a device"
        for mark in marks:
            driver.synchronize(mark)

    # --- readers ------------------------------------------------------------------------------------------------------

    def want(self, reader: WorkerRecord, said: Want) -> Results | asyncio.Future[Results]:
        """As of a shelf. A reader of another host that can map memory there is told who fetches for its host."""
        if said.maps and not said.leads and reader.host != self._engine.record.host:
            leader = self._leaders.get(reader.host)
            if leader is None or (leader.record != reader and self._is_stalled(leader)):
                leader = self._lead(reader)
            if reader.id not in leader.readers:
                self._expected[reader.id] = reader.info
            return Results((write(AskLeader(self.name, leader.record.id)), b""))
        if said.leads:
            leader = self._leaders.get(reader.host) or self._lead(reader)
            if leader.record != reader:
                raise RpcUsageError(f"{leader.record.describe()} fetches {self.name!r} for {reader.hostname} now")
            leader.key, leader.seen, leader.waiting = (reader.id, said.subscription), time.monotonic(), True
        else:
            self._expected.pop(reader.id, None)
        return super().want(reader, said)

    def _lead(self, reader: WorkerRecord) -> _Leader:
        """That reader fetches for its host from now on; one that did so before is passed by."""
        before = self._leaders.get(reader.host)
        if before is not None:
            self._forget_leader(reader.host, before)
        leader = self._leaders[reader.host] = _Leader(reader)
        return leader

    def _is_stalled(self, leader: _Leader) -> bool:
        """Whether a leader has not got the newest version, and was not heard of for long since that is there."""
        subscriber = None if leader.key is None else self.subscribers.get(leader.key)
        if subscriber is not None and subscriber.have >= self.newest:
            return False
        return time.monotonic() - max(leader.seen, self._put_at) > self._engine.bounds.stalled

    def _answer(self, key: Key, subscriber: Subscriber, stored: Stored, said: Want) -> Results:
        if not said.leads:
            return super()._answer(key, subscriber, stored, said)
        for version in list(subscriber.held):
            self._release(key, subscriber, version)
        stored.holders.add(key)
        subscriber.held.add(stored.version)
        source = self._before(key, stored.version)
        return Results((write(self.edition(stored, None, False, [], source)), *stored.bodies))

    def _before(self, key: Key, version: int) -> int:
        """The worker that a leader is to fetch a version from: the one before it in the chain, or this one.

        Passed by is who is busy with an older version: it may have stalled, and would hold up all behind it.
        """
        before = self._engine.id
        for leader in self._leaders.values():
            if leader.key == key:
                leader.waiting, leader.given = False, version
                break
            if leader.waiting or leader.given == version:
                before = leader.record.id
        return before

    def closed(self, reader: WorkerRecord, said: SubscriptionClosed) -> None:
        """As of a shelf; of a leader it says that nobody of its host reads any more.

        Who has ended its subscription before it was heard of is not waited for.
        """
        self._end_leader((reader.id, said.subscription))
        if self._expected.pop(reader.id, None) is not None:
            self.on_readers()
        super().closed(reader, said)

    def _end_leader(self, key: Key) -> None:
        for host, leader in list(self._leaders.items()):
            if leader.key == key:
                self._forget_leader(host, leader)

    def _forget_leader(self, host: str, leader: _Leader) -> None:
        del self._leaders[host]
        for worker, (info, _) in leader.readers.items():
            if worker != leader.record.id:
                self._expected[worker] = info  # it will ask again

    def on_readers_of_host(self, reader: WorkerRecord, readers: dict[WorkerRecord, int]) -> None:
        """A leader says what the readers of its host have."""
        leader = self._leaders.get(reader.host)
        if leader is not None and leader.record == reader:
            leader.seen = time.monotonic()
            leader.readers = {record.id: (record.info, have) for record, have in readers.items()}
            for record in readers:
                self._expected.pop(record.id, None)
            self.on_readers()

    def expect(self, record: WorkerRecord, subscriptions: int) -> None:
        """A worker that was told of the claim has answered how many subscriptions it has to the name."""
        if not subscriptions:
            self._expected.pop(record.id, None)
            self.on_readers()

    def tell(self, record: WorkerRecord) -> None:
        """A worker is told of the claim: it may subscribe."""
        self.told.add(record.incarnation)
        if all(worker != record.id for worker, _ in self.subscribers):
            self._expected[record.id] = record.info

    def on_reader_gone(self, key: Key, subscriber: Subscriber) -> None:
        """A reader has left or was lost; if it was a leader, another one of its host will ask."""
        self._end_leader(key)
        self._remember_lost(subscriber.record.info, subscriber.have)

    def _remember_lost(self, info: WorkerInfo, had: int) -> None:
        self._lost[info] = had, self.newest
        while len(self._lost) > _MOST_LOST:
            del self._lost[next(iter(self._lost))]

    def forget_gone(self, gone: list[WorkerRecord]) -> None:
        """Of members that have gone nobody expects anything, also where they have never asked."""
        for record in gone:
            self._expected.pop(record.id, None)
            for host, leader in list(self._leaders.items()):
                if leader.record == record:
                    del self._leaders[host]
                elif record.id in leader.readers:
                    self._remember_lost(*leader.readers.pop(record.id))
        self.on_readers()

    # --- delivery -----------------------------------------------------------------------------------------------------

    def delivered(self, version: int, quorum: float | None, timeout: float, future: Future[Delivery]) -> None:
        """Settle the Future when so many readers have the version, or after so many seconds; 0 for no limit."""
        awaited = _Awaited(version, quorum, future)
        self._awaited.add(awaited)
        if timeout:
            awaited.bound = self._engine.loop.call_later(timeout, self._settle, awaited)
        self.on_readers()

    def on_readers(self) -> None:
        """Look which deliveries have come so far as was asked for."""
        for awaited in tuple(self._awaited):
            if awaited.future.done() or self._delivery(awaited).reached:
                self._settle(awaited)

    def _settle(self, awaited: _Awaited, error: Exception | None = None) -> None:
        self._awaited.discard(awaited)
        if awaited.bound is not None:
            awaited.bound.cancel()
        awaited.future.settle(self._delivery(awaited), error)

    def _delivery(self, awaited: _Awaited) -> Delivery:
        have: dict[WorkerInfo, int] = {}
        leading = {leader.key for leader in self._leaders.values()}
        for key, subscriber in self.subscribers.items():
            if key not in leading:
                info = subscriber.record.info
                have[info] = min(subscriber.have, have.get(info, subscriber.have))
        for leader in self._leaders.values():
            have |= dict(leader.readers.values())
        for info in self._expected.values():
            have.setdefault(info, 0)
        has = tuple(sorted(info for info, version in have.items() if version >= awaited.version))
        missing = tuple(sorted(info for info, version in have.items() if version < awaited.version))
        lost = tuple(info for info, (had, newest) in self._lost.items() if had < awaited.version <= newest)
        wanted = needed(awaited.quorum, len(have))
        return Delivery(awaited.version, has, missing, lost, len(has) >= wanted)

    def retire(self, reason: str) -> None:
        """The name is unpublished: deliveries have come as far as they will, and what readers hold stays with them."""
        for awaited in tuple(self._awaited):
            self._settle(awaited)
        self.end(reason)

    def close(self, error: Exception) -> None:
        """The worker ends."""
        for awaited in tuple(self._awaited):
            self._settle(awaited, error)
        self.clear()
