"""One name at the worker that publishes it: making versions, counting deliveries, and choosing leaders of hosts.

The publisher never waits for a reader. Readers of this host map the slot of a version. On each other host one reader,
its *leader*, fetches every version in pieces into a version store of its own (`relay`), from which the host's other
readers read. The leaders form a chain: the first fetches from here, each other one from the leader before it, piece by
piece. So the publisher sends about one copy, regardless of the number of hosts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ...channels.accelerator import Event
from ...channels.slots import copy_all
from ...errors import RpcUsageError
from ...futures import Future
from ...protocol.identity import WorkerRecord
from ...protocol.publication import AskLeader, Lease, SubscriptionClosed, VersionArrived, Want, write
from ..calls.values import Results
from .content import Content
from .digests import Digests, digest_of
from .home import Home
from .leases import StandingLease
from .readers import AwaitedVersion, Delivery, Readers
from .version_store import IN_PIECES, Key, Origin, Stored, Subscriber, VersionStore, in_background

# The least bytes of a copy that is made in a thread, not on the loop.
_LONG_COPY = 1 << 20


@dataclass(eq=False)
class _AwaitedDelivery(AwaitedVersion):
    """A delivery that a program waits for. bound: the timer that ends the wait."""

    future: Future[Delivery] = field(default_factory=Future)
    bound: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Leader:
    """The reader that fetches for a host. seen: when it last reported (monotonic seconds). key: its subscription, once
    it has asked. waiting: whether it waits for a newer version. given: the last version that it was given.
    """

    record: WorkerRecord
    seen: float = field(default_factory=time.monotonic)
    key: Key | None = None
    waiting: bool = False
    given: int = 0


class Publisher(VersionStore):
    """The versions of one published name. On the loop. put_at: when the newest version was complete (monotonic
    seconds)."""

    def __init__(self, home: Home, stands: StandingLease) -> None:
        super().__init__(home, stands.lease.name)
        self.lease: Lease = stands.lease
        self.stands = stands  # its entry in the store
        self.raising = False  # whether the limit in the store is being raised
        self.told: set[str] = set()  # the incarnations of the workers that were told of the lease
        self.ending = False  # the name is being unpublished: no version begins
        self.unsure = False  # unpublishing has failed: check the lease before the next version
        self.idle: Event = asyncio.Event()  # set while no version is being copied
        self.idle.set()
        self._copying = 0
        self._arena = home.links.memory.arena
        self._accelerators = home.links.accelerators
        self._next = self.lease.first
        self.put_at: float = 0.0
        self._leaders: dict[str, _Leader] = {}  # by host, in the order of the chain
        self._readers = Readers()
        self._waiters: set[_AwaitedDelivery] = set()
        self._digests = Digests()

    # --- publishing ---------------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The last version that was begun; the first less one if none was."""
        return self._next - 1

    async def put(self, content: Content) -> int:
        """Copy a value and give it to the waiting readers. Returns its version; its buffers are free then."""
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
        origin = Origin(engine.id, engine.name, engine.record.main, (engine.record.role,), content.trace)
        stored = self.begin(version, origin, content.bodies, content.spans, content.size)

        def copy() -> None:
            copy_all(self._arena, content.buffers, content.spans, stored.data)

        if content.marks:
            await in_background(engine, lambda: self._synchronize(content.marks), self._accelerators.in_background)
        # Only the end of the worker cancels this: the thread may still write, so the slot is not given back.
        if content.size < _LONG_COPY:
            copy()
        else:
            await in_background(engine, copy)
        self.put_at = time.monotonic()
        self.finish(stored)

    def _synchronize(self, marks: Sequence[Event]) -> None:
        driver = self._accelerators.accelerator
        assert driver is not None, "without it nothing lies on a device"
        for mark in marks:
            driver.synchronize(mark)

    # --- readers ------------------------------------------------------------------------------------------------------

    def want(self, reader: WorkerRecord, said: Want) -> Results | asyncio.Future[Results]:
        """See `VersionStore`. A reader of another host that can map memory is sent to its leader."""
        if said.maps and not said.leads and reader.host != self._engine.record.host:
            leader = self._leaders.get(reader.host)
            if leader is None or (leader.record != reader and self._is_stalled(leader)):
                leader = self._lead(reader)
            key = (reader.id, said.subscription)
            subscriber = self.subscriber(key, reader)  # from now on it reports its versions by `arrived`
            subscriber.has(said.have, self.newest)
            self.on_has(key, subscriber)
            self.on_readers()
            return Results((write(AskLeader(self.name, leader.record.id, self.newest)), b""))
        if said.leads:
            leader = self._leaders.get(reader.host) or self._lead(reader)
            if leader.record != reader:
                raise RpcUsageError(f"{leader.record.describe()} fetches {self.name!r} for {reader.hostname} now")
            leader.key, leader.seen, leader.waiting = (reader.id, said.subscription), time.monotonic(), True
        return super().want(reader, said)

    def on_has(self, key: Key, subscriber: Subscriber) -> None:
        """Count what a reader has. A leader is not counted: the readers of its host are."""
        leader = self._leaders.get(subscriber.record.host)
        if leader is None or leader.key != key:
            self._readers.has(subscriber.record.info, key[1], subscriber.have)

    def arrived(self, reader: WorkerRecord, said: VersionArrived) -> None:
        """A reader has a whole version that came from its leader."""
        subscriber = self.subscribers.get((reader.id, said.subscription))
        if subscriber is not None and subscriber.have < said.version <= self.newest:
            subscriber.has(said.version, self.newest)
            self.on_has((reader.id, said.subscription), subscriber)
            self.on_readers()

    def _lead(self, reader: WorkerRecord) -> _Leader:
        """Make a reader the leader of its host, in place of another one."""
        leader = self._leaders[reader.host] = _Leader(reader)
        return leader

    def _is_stalled(self, leader: _Leader) -> bool:
        """Whether a leader lacks the newest version and has not reported for long."""
        subscriber = None if leader.key is None else self.subscribers.get(leader.key)
        if subscriber is not None and subscriber.have >= self.newest:
            return False
        return time.monotonic() - max(leader.seen, self.put_at) > self._engine.bounds.stalled

    def _answer(self, key: Key, subscriber: Subscriber, stored: Stored, said: Want) -> Results:
        if not said.leads:
            return super()._answer(key, subscriber, stored, said)
        for version in list(subscriber.held):
            self._release(key, subscriber, version)
        stored.holders.add(key)
        subscriber.held.add(stored.version)
        if self._digests.wanted and self._digests.get(stored.version) is None:
            self._begin_digest(stored)  # its readers will ask for it, perhaps after the next version
        source = self._before(key, stored.version)
        return Results((write(self.edition(stored, None, False, [], source)), *stored.bodies))

    def _before(self, key: Key, version: int) -> int:
        """The id of the worker from which a leader fetches a version: the leader before it in the chain, or this
        worker.
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
        """See `VersionStore`. If it was a leader, no worker of its host reads any more.

        A worker that ends a subscription before it was known is not waited for.
        """
        key = (reader.id, said.subscription)
        self._end_leader(key)
        self._readers.ended(reader.info, said.subscription)
        self._readers.expect_no_more(reader.info)
        super().closed(reader, said)
        self.on_readers()

    def _end_leader(self, key: Key) -> bool:
        """Remove a leader by its subscription. Returns whether it was one."""
        ended = [host for host, leader in self._leaders.items() if leader.key == key]
        for host in ended:
            del self._leaders[host]
        return bool(ended)

    def goes_on(self, reader: WorkerRecord) -> None:
        """A leader says that it goes on."""
        leader = self._leaders.get(reader.host)
        if leader is not None and leader.record == reader:
            leader.seen = time.monotonic()

    def expect(self, record: WorkerRecord, subscriptions: int) -> None:
        """A worker has answered the announcement of the lease with its number of subscriptions to the name."""
        if not subscriptions:
            self._readers.expect_no_more(record.info)
            self.on_readers()

    def tell(self, record: WorkerRecord) -> None:
        """A worker gets the announcement of the lease: it may subscribe."""
        self.told.add(record.incarnation)
        self._readers.expect(record.info)

    def on_reader_gone(self, key: Key, subscriber: Subscriber) -> None:
        """A reader has left or was lost. If it was a leader, another reader of its host will ask."""
        if not self._end_leader(key):
            self._readers.lost(subscriber.record.info, key[1], subscriber.have, self.newest)

    def forget_gone(self, gone: list[WorkerRecord]) -> None:
        """Forget members that have gone, even if they have never asked."""
        for record in gone:
            self._readers.expect_no_more(record.info)
            leader = self._leaders.get(record.host)
            if leader is not None and leader.record == record:
                del self._leaders[record.host]
        self.on_readers()

    # --- digests ------------------------------------------------------------------------------------------------------

    def digest(self, version: int) -> asyncio.Future[bytes]:
        """The digest of a whole version. Raises RpcUsageError if the version is not here (any more)."""
        self._digests.wanted = True
        task = self._digests.get(version) or self._begin_digest(self._stored.get(version))
        if task is None:
            raise RpcUsageError(f"worker {self._engine.name!r} has version {version} of {self.name!r} no more")
        return asyncio.shield(task)

    def _begin_digest(self, stored: Stored | None) -> asyncio.Task[bytes] | None:
        if stored is None or stored.abandoned or stored.filled < len(stored.data):
            return None
        task = self._engine.tasks.spawn(self._digest(stored))
        self._digests.put(stored.version, task)
        return task

    async def _digest(self, stored: Stored) -> bytes:
        key = (self._engine.id, IN_PIECES)
        stored.holders.add(key)
        try:
            edition = self.edition(stored, None, False, [])
            compute = partial(digest_of, self.name, edition, stored.bodies, stored.data)
            found: bytes = await in_background(self._engine, compute)
            return found
        finally:
            self._release(key, None, stored.version)

    # --- delivery -----------------------------------------------------------------------------------------------------

    def delivered(self, version: int, quorum: float | None, timeout: float, future: Future[Delivery]) -> None:
        """Settle the Future when enough readers have the version, or after `timeout` seconds; 0 for no limit."""
        waiter = _AwaitedDelivery(version, quorum, future=future)
        self._waiters.add(waiter)
        self._readers.await_version(waiter)
        if timeout:
            waiter.bound = self._engine.loop.call_later(timeout, self._settle, waiter)
        self.on_readers()

    def on_readers(self) -> None:
        """Settle the deliveries that have reached their quorum."""
        for waiter in tuple(self._waiters):
            if waiter.future.done() or self._readers.reached(waiter):
                self._settle(waiter)

    def _settle(self, waiter: _AwaitedDelivery, error: Exception | None = None) -> None:
        self._waiters.discard(waiter)
        self._readers.leave(waiter)
        if waiter.bound is not None:
            waiter.bound.cancel()
        waiter.future._settle(self._readers.delivery(waiter), error)

    def retire(self, reason: str) -> None:
        """The name is unpublished: settle all deliveries as they stand. Readers keep what they hold."""
        for waiter in tuple(self._waiters):
            self._settle(waiter)
        self.end(reason)

    def close(self, error: Exception) -> None:
        """The worker ends."""
        for waiter in tuple(self._waiters):
            self._settle(waiter, error)
        self.clear()
