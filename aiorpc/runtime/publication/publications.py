"""The published values of one worker: those that it publishes, and those that it reads.

The worker that leases a name (`leases`) announces it to all members, and to each that joins later. So a reader knows
the publisher of every name without the store, and asks that worker alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from ..._typing import Function
from ...errors import NotAllowed, Overloaded, RendezvousError, RpcError, RpcUsageError
from ...futures import Future
from ...logs import logger
from ...options import seconds
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    Latest,
    Lease,
    Unpublished,
    Want,
    check_name,
    needed,
    write,
)
from ...protocol.states import CallOutcome
from ...sites import call_site, outside
from ...undoing import on_error
from ..calls.current import within_call
from ..calls.values import Results
from ..engine.call_tracing import Raised
from ..engine.host import provably_dead
from ..engine.watch import ProcessWatch
from ..group.events import Listener
from .access import Access
from .content import Content, take_apart
from .handlers import leased, unpublished
from .home import Home
from .leases import RESERVED, raise_limit, release_lease
from .names import Names
from .outbound import Outbound
from .prefetcher import Prefetcher
from .publisher import Publisher
from .readers import Delivery
from .relay import Relay
from .subscription import Publication, Subscription
from .version_store import VersionStore, in_background

T = TypeVar("T")

# Seconds between two announcements of a lease, or of its end, to an overloaded worker.
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 1.0
# The most names of ended subscriptions whose newest version a worker remembers.
_MOST_READ = 65_536


class Publications:
    """The published values of one worker. On the loop; any thread may call the verbs (`publish`, `delivered`, ...).

    publishers: by name. relays: of names that this worker fetches for its host. prefetchers: by number, of
    subscriptions that are open or whose values are alive.
    """

    def __init__(self, home: Home) -> None:
        self.publishers: dict[str, Publisher] = {}
        self.relays: dict[str, Relay] = {}
        self.prefetchers: dict[int, Prefetcher] = {}
        self._ended: list[VersionStore] = []  # their versions are still held
        self._were_read: dict[str, int] = {}  # newest versions of ended subscriptions, by name
        self._home = home
        self._engine = home.engine
        self.names: Names = Names(home, self._read_here, self._on_lost)
        self._leasing: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self.outbound: Outbound = Outbound(home)
        self._pending: set[Future[Any]] = set()
        self._listener: Listener | None = None
        self._watch = ProcessWatch(home.engine.loop, lambda record: self._on_dead())

    # --- verbs --------------------------------------------------------------------------------------------------------

    def publish(self, name: str, value: object) -> Future[Publication]:
        """See `aiorpc.publish`."""
        check_name(name)
        self._engine.lifetime.check_begin()
        tracer = self._engine.tracer
        span = None if tracer is None else tracer.exchanged("publish", name)
        try:
            content = take_apart(name, value, self._engine, self._home.links.accelerators.accelerator)
        except Exception as error:
            if span is not None:
                span.ended(CallOutcome.REFUSED, Raised(error))
            raise
        future: Future[Publication] = self._future(f"publishing {name!r}")
        if span is not None:
            content = content._replace(trace=span.context)
            future._when_settled(partial(span.ended, None))
        future._site = call_site(outside("aiorpc"))  # to log a failure that the program does not look at
        self._begin(future, lambda: self._publish(name, content, future))
        return future

    def unpublish(self, name: str) -> Future[None]:
        """See `aiorpc.unpublish`."""
        check_name(name)
        self._engine.lifetime.check_open()
        future: Future[None] = self._future(f"unpublishing {name!r}")
        future._site = call_site(outside("aiorpc"))
        self._begin(future, lambda: self._unpublish(name, future))
        return future

    def subscribe(
        self, name: str, timeout: float | None, map_location: str | torch.device | None = None
    ) -> Subscription[Any]:
        """See `aiorpc.subscribe`."""
        check_name(name)
        try:
            device = None if map_location is None else torch.device(map_location)
        except (RuntimeError, TypeError) as error:
            raise RpcUsageError(f"map_location is a device, or None, not {map_location!r:.80}: {error}") from None
        self._engine.lifetime.check_begin()
        limit = self._engine.default_timeout if timeout is None else seconds(timeout, "timeout")
        prefetcher = Prefetcher(self._engine, self, self._home.links.memory.descriptors, name, next(self._numbers))
        self._engine.run_on_loop(self._open, prefetcher)
        if self._engine.closed:  # meanwhile: the loop may have stopped, and nothing would end it
            prefetcher.end(self._engine.lifetime.why_closed())
        return Subscription(prefetcher, limit, device)

    def delivered(self, name: str, version: int, quorum: float | None, timeout: float | None) -> Future[Delivery]:
        """See `Publication.delivered`."""
        engine = self._engine
        engine.lifetime.check_begin()
        limit = within_call(engine, engine.default_timeout if timeout is None else seconds(timeout, "timeout"))
        wanted = needed(quorum, 0)
        size = self._home.rendezvous.world_size
        if size is not None and wanted > size:
            raise RpcUsageError(f"quorum={quorum} is more than the {size} workers of this group")
        future: Future[Delivery] = self._future(f"the delivery of version {version} of {name!r}")

        async def begin() -> None:
            publisher = self.publishers.get(name)
            if publisher is None:
                raise RpcUsageError(
                    f"worker {engine.name!r} has unpublished {name!r}, and does not know any more which readers have "
                    f"version {version} of it: wait for the delivery first, then unpublish the name"
                )
            publisher.delivered(version, quorum, limit, future)

        self._begin(future, begin)
        return future

    def _future(self, subject: str) -> Future[T]:
        future: Future[T] = Future()
        future._subject = subject
        engine = self._engine
        future._loop, future._home_thread, future._executor = engine.loop, engine.thread, engine.pool
        return future

    def _begin(self, future: Future[T], make: Callable[[], Awaitable[object]]) -> None:
        """Run a coroutine on the loop that settles a Future. The end of the worker settles it, too."""
        self._pending.add(future)
        future._when_settled(self._pending.discard)
        self._engine.run_on_loop(self._spawn, future, make)
        if self._engine.closed:  # `close` may not have seen it
            future._settle(None, self._engine.lifetime.why_closed())

    def _spawn(self, future: Future[T], make: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            try:
                await make()
            except Exception as error:
                future._settle(None, error)

        if not self._engine.closed:
            self._engine.tasks.spawn(run())

    # --- publishing ---------------------------------------------------------------------------------------------------

    async def _publish(self, name: str, content: Content, future: Future[Publication]) -> None:
        publisher = await self._publisher(name)
        version = await publisher.put(content)
        if version > publisher.stands.limit - RESERVED // 2 and not publisher.raising:
            publisher.raising = True
            self._engine.tasks.spawn(self._raise_limit(publisher, version + RESERVED))
        future._settle(Publication(name, version, partial(self.delivered, name, version)))

    async def _raise_limit(self, publisher: Publisher, limit: int) -> None:
        """Raise the limit in the store. Nothing waits for it: without the store no worker can take the name over."""
        async with self._leasing.setdefault(publisher.name, asyncio.Lock()):
            try:
                step = partial(raise_limit, self._home.rendezvous, publisher.stands, limit)
                publisher.stands = await self.names.at_store(step)
            except RendezvousError as error:
                logger.debug("worker %s: %s", self._engine.name, error)
            finally:
                publisher.raising = False

    async def _publisher(self, name: str) -> Publisher:
        """The publisher of a name; leases the name the first time. Raises the errors of `Names.lease`."""
        publisher = self.publishers.get(name)
        if publisher is not None and not publisher.ending and not publisher.unsure:
            return publisher
        async with self._leasing.setdefault(name, asyncio.Lock()):
            publisher = self.publishers.get(name)
            if publisher is None or publisher.unsure:
                try:
                    stands = await self.names.lease(name)
                except (RpcUsageError, NotAllowed):  # another worker has it
                    if publisher is not None:
                        self._retire(publisher)
                    raise
                if publisher is not None and stands.lease == publisher.lease:
                    publisher.stands, publisher.unsure = stands, False
                    return publisher
                if publisher is not None:  # the store had released it, but its answer was lost
                    self._retire(publisher)
                publisher = self.publishers[name] = Publisher(self._home, stands)
                self._follow_group()
                self._look()
        return publisher

    async def _unpublish(self, name: str, future: Future[None]) -> None:
        async with self._leasing.setdefault(name, asyncio.Lock()):
            publisher = self.publishers.get(name)
            if publisher is None:
                raise RpcUsageError(
                    f"worker {self._engine.name!r} cannot unpublish {name!r}, as it does not publish it: "
                    f"{self.names.describe(name)}"
                )
            publisher.ending = True  # who publishes a version from here on waits for the lock, and leases the name anew
            with on_error(self._stay, publisher):
                await publisher.idle.wait()
                lease, last = publisher.lease, publisher.last
                release = partial(release_lease, self._home.rendezvous, publisher.stands, last)
                await self.names.at_store(release)
            self._retire(publisher)
            # All members that answer hear it before this worker can lease the name again.
            told = [self._engine.tasks.spawn(self._tell_end(lease, each)) for each in self._home.group.live()]
            await asyncio.wait(told, timeout=self._engine.bounds.vouch)
        future._settle(None)

    def _stay(self, publisher: Publisher) -> None:
        """It was not unpublished, as far as is known: the answer of the store alone may have been lost."""
        publisher.ending, publisher.unsure = False, True
        self._look()  # newcomers have not been told meanwhile

    def _retire(self, publisher: Publisher) -> None:
        """Stop publishing a name."""
        del self.publishers[publisher.name]
        publisher.retire(f"worker {self._engine.name!r} has unpublished {publisher.name!r}")
        if publisher.stored:
            self._ended.append(publisher)

    def _look(self) -> None:
        """The group has changed: announce leases to new members, and forget readers that are gone."""
        group = self._home.group
        for publisher in self.publishers.values():
            for record in group.live():
                if record.incarnation not in publisher.told and record.id != self._engine.id and not publisher.ending:
                    publisher.tell(record)
                    self._engine.tasks.spawn(self._tell_lease(publisher, record))
            publisher.told.intersection_update(record.incarnation for record in group.live())
            publisher.forget_gone([record for record in group.members.values() if group.is_gone(record)])
        for versions in self._version_stores():
            for record in versions.on_gone(group.is_gone):
                if record.pid != os.getpid() and record.host == self._engine.record.host:
                    self._watch.add(record)
        self.names.wake()  # prefetchers of a gone publisher look for another one
        self._on_dead()

    async def _tell_lease(self, publisher: Publisher, record: WorkerRecord) -> None:
        limit = self._engine.options.rpc_timeout
        # Deliveries do not wait for a worker that is silent for so long.
        silent = self._engine.loop.call_later(limit, publisher.expect, record, 0) if limit else None

        def goes_on() -> bool:
            if self.publishers.get(publisher.name) is not publisher:
                return False
            publisher.tell(record)  # it may have subscriptions that wait for this publisher
            return True

        try:
            subscriptions = await self._say(record, leased, publisher.lease, goes_on)
        finally:
            if silent is not None:
                silent.cancel()
        publisher.expect(record, subscriptions if type(subscriptions) is int else 0)

    async def _tell_end(self, lease: Lease, record: WorkerRecord) -> None:
        await self._say(record, unpublished, Unpublished(lease.name, lease.turn), lambda: True)

    async def _say(
        self, record: WorkerRecord, function: Function, message: Lease | Unpublished, goes_on: Callable[[], bool]
    ) -> object:
        """Call a worker again until it is not overloaded. Returns its answer.

        None if it is gone, if this worker has ended, or if goes_on() says that the message is out of date.
        """
        said, pause = write(message), _FIRST_PAUSE
        while True:
            try:
                return await self._home.peers.of(record).call(function, (said,), None, 0.0, system=True)
            except Overloaded as error:
                if pause == _FIRST_PAUSE:
                    logger.warning(
                        "worker %s has not told %s yet who publishes %r, and goes on trying: %s",
                        self._engine.name,
                        record.describe(),
                        message.name,
                        error,
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
                if not goes_on():
                    return None
            except RpcError:
                return None

    def _on_dead(self) -> None:
        here = self._engine.record.host
        for versions in self._version_stores():
            versions.on_dead(lambda record: provably_dead(record, here) or record.host != here)

    def _version_stores(self) -> list[VersionStore]:
        self._ended = [versions for versions in self._ended if versions.stored]
        return [*self.publishers.values(), *self.relays.values(), *self._ended]

    def version_stores_of(self, name: str) -> list[VersionStore]:
        """The version stores that may have given versions of a name to readers."""
        return [versions for versions in self._version_stores() if versions.name == name]

    # --- the group ----------------------------------------------------------------------------------------------------

    def _follow_group(self) -> None:
        if self._listener is None:
            self._listener = self._home.events.listen()
            self._engine.tasks.spawn(self._listen(self._listener))

    async def _listen(self, listener: Listener) -> None:
        async for _ in listener:
            self._look()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _open(self, prefetcher: Prefetcher) -> None:
        if self._engine.closed:
            prefetcher.end(self._engine.lifetime.why_closed())
            return
        self.prefetchers[prefetcher.number] = prefetcher
        self._follow_group()
        prefetcher.start()

    def prefetcher_ended(self, prefetcher: Prefetcher) -> None:
        """A prefetcher is closed, and none of its values is alive any more."""
        self.prefetchers.pop(prefetcher.number, None)
        if newest := max(prefetcher.newest, self._were_read.pop(prefetcher.name, 0)):
            self._were_read[prefetcher.name] = newest
            if len(self._were_read) > _MOST_READ:
                del self._were_read[next(iter(self._were_read))]

    async def source(self, name: str, newest: int) -> WorkerRecord:
        """Wait for the worker that publishes a name, or for a member that has a version of it.

        newest: the version that is here already.
        """
        looked, look = bool(newest), None
        try:
            while True:
                changed = self.names.changed
                lease = self.names.get(name)
                record = None if lease is None else self.names.holder(lease)
                if record is None and not looked:
                    looked, look = True, self._engine.tasks.spawn(self._look_for(name, lease))
                if (
                    record is None and look is not None
                ):  # the store may be silent for long, but publishers announce themselves
                    await self._engine.tasks.done_or_set(look, changed)
                    if look.done():
                        record, look = look.result(), None
                elif record is None:
                    await changed.wait()
                if record is not None:
                    return record
        finally:
            if look is not None:
                look.cancel()

    async def _look_for(self, name: str, lease: Lease | None) -> WorkerRecord | None:
        """A member that has a version of a name whose publisher is unknown or gone; None if there is none."""
        if lease is None:
            lease = await self.names.look_up(name)
            record = None if lease is None else self.names.holder(lease)
            if lease is None or record is not None:
                return record  # a first publisher will announce itself
        # A member answers for versions that it hands on: its role must have the right to publish the name.
        kept = [
            (said.kept, record)
            for record, said in await self.names.ask_all(name)
            if said is not None and self.names.access.may_publish(record, name)
        ]
        newest, record = max(kept, key=lambda each: (each[0], self._is_read(each[1])), default=(0, None))
        return record if newest else None

    def _is_read(self, record: WorkerRecord) -> bool:
        """Whether this worker reads pickles from a member, depending on the member's role."""
        return record.id == self._engine.id or not self._engine.rights.limited(record.role)

    def leader(self, name: str, worker_id: int, publisher: WorkerRecord) -> WorkerRecord:
        """The member that fetches a name for this host. If it is this worker, it begins to.

        RpcUsageError if there is no such member.
        """
        record = self.outbound.member(worker_id)
        if record is None:
            raise RpcUsageError(f"no member has the id {worker_id}, which fetches {name!r} for this host")
        if record.id == self._engine.id:
            relay = self.relays.get(name)
            if relay is None or relay.publisher != publisher:
                if relay is not None:
                    relay.stop()
                    self.relay_ended(relay)
                self.relays[name] = Relay(
                    self._home, self.outbound, name, publisher, next(self._numbers), self.relay_ended
                )
        return record

    def relay_ended(self, relay: Relay) -> None:
        """A relay has ended: no worker reads from it any more, or its publisher has gone."""
        if self.relays.get(relay.name) is relay:
            del self.relays[relay.name]
            self._ended.append(relay)

    @property
    def access(self) -> Access:
        """Who may publish a name, and who may read it."""
        return self.names.access

    def latest(self, name: str) -> Latest:
        """What this worker has of a name."""
        versions = self.version_store_of(name)
        prefetchers = [prefetcher for prefetcher in self.prefetchers.values() if prefetcher.name == name]
        # Ended subscriptions count: versions that this worker reads must never go back.
        seen = self._were_read.get(name, 0)
        newest = max(
            [seen, 0 if versions is None else versions.newest, *(prefetcher.newest for prefetcher in prefetchers)]
        )
        return Latest(
            name,
            newest,
            max((prefetcher.kept.edition.version for prefetcher in prefetchers if prefetcher.kept), default=0),
        )

    def hand_on(self, message: Want) -> asyncio.Task[Results]:
        """The newest version that this worker has read, for a reader that came after the publisher had gone."""
        return self._engine.tasks.spawn(self._hand_on(message))

    async def _hand_on(self, message: Want) -> Results:
        kept = [
            prefetcher.kept
            for prefetcher in self.prefetchers.values()
            if prefetcher.name == message.name and prefetcher.kept is not None
        ]
        newest = max(kept, key=lambda each: each.edition.version, default=None)
        if newest is None or newest.edition.version <= message.have:
            raise RpcUsageError(
                f"worker {self._engine.name!r} neither publishes {message.name!r} nor has a version of it"
            )
        edition = replace(newest.edition, offer=None, copy=False, slots=[])
        data: tuple[torch.Tensor, ...] = ()
        if newest.view is not None:  # without it all is in the bodies
            data = (torch.from_numpy(await in_background(self._engine, partial(newest.view.read, edition.size))),)
        return Results((write(edition), *newest.bodies, *data))

    # --- what others say ----------------------------------------------------------------------------------------------

    def on_lease(self, lease: Lease, record: WorkerRecord) -> int:
        """A worker publishes a name. Returns the number of subscriptions to it here."""
        if lease.publisher != record.id:
            raise RpcUsageError(f"{record.describe()} tells of a lease to {lease.name!r} that is not its own")
        self.names.tell(lease, record)
        return len(self._readers(lease.name))

    def on_unpublished(self, message: Unpublished, caller_id: int) -> None:
        """A worker does not publish a name any more: end the subscriptions to it here. Ignores older leases."""
        if self.names.tell_end(message, caller_id):
            for prefetcher in self._readers(message.name):
                prefetcher.finish()

    def _on_lost(self, name: str) -> None:
        """Another worker has the name in the store: check the lease with the next version."""
        publisher = self.publishers.get(name)
        if publisher is not None:
            publisher.unsure = True

    def _readers(self, name: str) -> list[Prefetcher]:
        return [prefetcher for prefetcher in self.prefetchers.values() if prefetcher.name == name and prefetcher.reads]

    def _read_here(self) -> set[str]:
        """The names that are read here."""
        return {prefetcher.name for prefetcher in self.prefetchers.values() if prefetcher.reads}

    def version_store_of(self, name: str) -> VersionStore | None:
        """The publisher or relay of a name here; None if there is none."""
        return self.publishers.get(name) or self.relays.get(name)

    def version_store_with(self, name: str, version: int) -> VersionStore | None:
        """The version store here that has a version of a name, even of an unpublished name; None if there is none."""
        ended = [versions for versions in self._ended if versions.name == name and versions.has(version)]
        return ended[0] if ended else self.version_store_of(name)

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This worker is about to leave: end its subscriptions while it can still tell the publishers that nothing is
        held here. Its process may live on. Idempotent.
        """
        error = self._engine.lifetime.why_closed()
        for prefetcher in list(self.prefetchers.values()):
            prefetcher.end(error)
            prefetcher.close()

    def close(self) -> None:
        """This worker has left: end all waits."""
        error, prefetchers = self._engine.lifetime.why_closed(), list(self.prefetchers.values())
        self.leave()
        for prefetcher in prefetchers:
            prefetcher.let_go()
        for publisher in self.publishers.values():
            publisher.close(error)
        for versions in [*self.relays.values(), *self._ended]:
            versions.clear()
        for future in list(self._pending):
            future._settle(None, error)
        self._watch.close()

    def close_in_child(self) -> None:
        """In a forked child: close its copies of the descriptors."""
        self._watch.close_in_child()
