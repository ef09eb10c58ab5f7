"""The published values of one worker: those that it publishes, and those that it reads.

How a publisher and its readers find each other: whoever has claimed a name (`claims`) says so to all members, and to
each that joins later. So a reader needs no store, knows the publisher of every name, and asks that worker alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from ..._typing import Function
from ...callbacks import Again
from ...errors import NotAllowed, Overloaded, RendezvousError, RpcError, RpcUsageError
from ...futures import Future
from ...logs import logger
from ...options import seconds
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    Claim,
    DigestWanted,
    Latest,
    Message,
    PieceWanted,
    StillFetching,
    Unpublished,
    Want,
    check_name,
    needed,
    write,
)
from ...sites import call_site, outside
from ..caller.peers import Peers
from ..calls.current import within_call
from ..calls.options import CallOptions
from ..calls.values import Results
from ..engine.engine import Engine
from ..engine.host import provably_dead
from ..engine.watch import ProcessWatch
from ..group.events import Events, Listener
from ..group.group import Group
from ..links.links import Links
from ..meeting.rendezvous import Rendezvous
from .access import Access
from .claims import RESERVED, raise_limit, release_claim
from .content import Content, take_apart
from .feed import Feed
from .handlers import SAID, claimed, digest, pieced, unpublished, wanted
from .names import Names
from .publisher import Publisher
from .readers import Delivery
from .relay import Relay
from .shelf import Shelf, in_background
from .subscription import Publication, Subscription

T = TypeVar("T")

# Seconds between two tries to tell a worker of a claim, or of its end.
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 1.0
# Seconds until a worker is told again what it did not take.
_TOLD_PAUSE = 0.1
# Names that are not read any more, of which a worker knows how far it has read them.
_MOST_READ = 65_536


class Home(Protocol):
    """What published values need of the worker."""

    engine: Engine
    rendezvous: Rendezvous
    links: Links
    peers: Peers
    group: Group
    news: Events


class Publications:
    """See the module. On the loop, but for the verbs (`publish`, `subscribe`, `delivered`), which any thread may call.

    publishers: by name. relays: of names that this worker fetches for its host. feeds: of the subscriptions that are
    open, or whose values are alive, by their numbers.
    """

    def __init__(self, home: Home) -> None:
        self.publishers: dict[str, Publisher] = {}
        self.relays: dict[str, Relay] = {}
        self.feeds: dict[int, Feed] = {}
        self._ended: list[Shelf] = []  # whose versions are held still
        self._were_read: dict[str, int] = {}  # newest versions of ended subscriptions by name, those that ended last
        self._home = home
        self._engine = home.engine
        self.names: Names = Names(home, self._read_here, self._on_lost)
        self._claiming: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._pending: set[Future[Any]] = set()
        self._listener: Listener | None = None
        self._watch = ProcessWatch(home.engine.loop, lambda record: self._on_dead())

    # --- verbs --------------------------------------------------------------------------------------------------------

    def publish(self, name: str, value: object) -> Future[Publication]:
        """See `aiorpc.publish`."""
        check_name(name)
        self._engine.lifetime.check_begin()
        content = take_apart(name, value, self._engine, self._home.links.accelerators.accelerator)
        future: Future[Publication] = self._future(f"publishing {name!r}")
        future._site = call_site(outside("aiorpc"))  # so a failure that nobody looks at is logged
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
        feed = Feed(self._engine, self, self._home.links.memory.descriptors, name, next(self._numbers))
        self._engine.run_on_loop(self._open, feed)
        if self._engine.closed:  # meanwhile: the loop may have stopped, and nobody would end it
            feed.end(self._engine.lifetime.why_closed())
        return Subscription(feed, limit, device)

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
                    f"worker {engine.name!r} has unpublished {name!r}, and does not know any more who has version "
                    f"{version} of it: wait for the delivery first, then unpublish the name"
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
        """Have something done on the loop that settles a Future; it is settled whatever becomes of the worker."""
        self._pending.add(future)
        future._when_settled(Again(self._pending.discard))
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
        """Let the store know that versions go further. Nothing waits for it: without the store nobody takes over."""
        async with self._claiming.setdefault(publisher.name, asyncio.Lock()):
            try:
                step = partial(raise_limit, self._home.rendezvous, publisher.stands, limit)
                publisher.stands = await self.names.at_store(step)
            except RendezvousError as error:
                logger.debug("worker %s: %s", self._engine.name, error)
            finally:
                publisher.raising = False

    async def _publisher(self, name: str) -> Publisher:
        """The publisher of a name, for which it is claimed the first time. Raises what `Names.claim` raises."""
        publisher = self.publishers.get(name)
        if publisher is not None and not publisher.ending and not publisher.unsure:
            return publisher
        async with self._claiming.setdefault(name, asyncio.Lock()):
            publisher = self.publishers.get(name)
            if publisher is None or publisher.unsure:
                try:
                    stands = await self.names.claim(name)
                except (RpcUsageError, NotAllowed):  # another worker has it
                    if publisher is not None:
                        self._retire(publisher)
                    raise
                if publisher is not None and stands.claim == publisher.claim:
                    publisher.stands, publisher.unsure = stands, False
                    return publisher
                if publisher is not None:  # the store has released it, although it could not say so
                    self._retire(publisher)
                publisher = self.publishers[name] = Publisher(self._home, stands)
                self._follow_group()
                self._look()
        return publisher

    async def _unpublish(self, name: str, future: Future[None]) -> None:
        async with self._claiming.setdefault(name, asyncio.Lock()):
            publisher = self.publishers.get(name)
            if publisher is None:
                raise RpcUsageError(
                    f"worker {self._engine.name!r} cannot unpublish {name!r}, as it does not publish it: "
                    f"{self.names.describe(name)}"
                )
            publisher.ending = True  # who publishes a version from here on waits for the lock, and claims the name anew
            try:
                await publisher.idle.wait()
                claim, last = publisher.claim, publisher.last
                release = partial(release_claim, self._home.rendezvous, publisher.stands, last)
                await self.names.at_store(release)
            except BaseException:
                publisher.ending, publisher.unsure = False, True  # the answer of the store may have been lost alone
                self._look()  # newcomers have not been told meanwhile
                raise
            self._retire(publisher)
            # All who answer have heard it before this worker can claim the name once more; the others hear it later.
            told = [self._engine.tasks.spawn(self._tell_end(claim, each)) for each in self._home.group.live()]
            await asyncio.wait(told, timeout=self._engine.bounds.vouch)
        future._settle(None)

    def _retire(self, publisher: Publisher) -> None:
        """What this worker publishes no longer."""
        del self.publishers[publisher.name]
        publisher.retire(f"worker {self._engine.name!r} has unpublished {publisher.name!r}")
        if publisher.stored:
            self._ended.append(publisher)

    def _look(self) -> None:
        """The group has changed: tell claims to who has not heard of them, and forget readers that are gone."""
        group = self._home.group
        for publisher in self.publishers.values():
            for record in group.live():
                if record.incarnation not in publisher.told and record.id != self._engine.id and not publisher.ending:
                    publisher.tell(record)
                    self._engine.tasks.spawn(self._tell_claim(publisher, record))
            publisher.told.intersection_update(record.incarnation for record in group.live())
            publisher.forget_gone([record for record in group.members.values() if group.is_gone(record)])
        for shelf in self._shelves():
            for record in shelf.on_gone(group.is_gone):
                if record.pid != os.getpid() and record.host == self._engine.record.host:
                    self._watch.add(record)
        self.names.wake()  # whoever follows a worker that is gone looks for another one
        self._on_dead()

    async def _tell_claim(self, publisher: Publisher, record: WorkerRecord) -> None:
        limit = self._engine.options.rpc_timeout
        # Deliveries do not wait for a worker that says nothing for so long.
        silent = self._engine.loop.call_later(limit, publisher.expect, record, 0) if limit else None

        def goes_on() -> bool:
            if self.publishers.get(publisher.name) is not publisher:
                return False
            publisher.tell(record)  # it may have subscriptions, which wait for this publisher and do not know of it
            return True

        try:
            subscriptions = await self._say(record, claimed, publisher.claim, goes_on)
        finally:
            if silent is not None:
                silent.cancel()
        publisher.expect(record, subscriptions if type(subscriptions) is int else 0)

    async def _tell_end(self, claim: Claim, record: WorkerRecord) -> None:
        await self._say(record, unpublished, Unpublished(claim.name, claim.turn), lambda: True)

    async def _say(
        self, record: WorkerRecord, function: Function, message: Claim | Unpublished, goes_on: Callable[[], bool]
    ) -> object:
        """Say something to a worker until it has heard it, as one that is overloaded runs no calls. Its answer.

        None if it is gone, or this worker is, or if there is nothing to say any more (goes_on).
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
        for shelf in self._shelves():
            shelf.on_dead(lambda record: provably_dead(record, here) or record.host != here)

    def _shelves(self) -> list[Shelf]:
        self._ended = [shelf for shelf in self._ended if shelf.stored]
        return [*self.publishers.values(), *self.relays.values(), *self._ended]

    def shelves_of(self, name: str) -> list[Shelf]:
        """Those that may have given versions of a name to somebody."""
        return [shelf for shelf in self._shelves() if shelf.name == name]

    # --- the group ----------------------------------------------------------------------------------------------------

    def _follow_group(self) -> None:
        if self._listener is None:
            self._listener = self._home.news.listen()
            self._engine.tasks.spawn(self._listen(self._listener))

    async def _listen(self, listener: Listener) -> None:
        async for _ in listener:
            self._look()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _open(self, feed: Feed) -> None:
        if self._engine.closed:
            feed.end(self._engine.lifetime.why_closed())
            return
        self.feeds[feed.number] = feed
        self._follow_group()
        feed.start()

    def feed_ended(self, feed: Feed) -> None:
        """A feed is closed, and nothing that it has brought is alive any more."""
        self.feeds.pop(feed.number, None)
        if newest := max(feed.newest, self._were_read.pop(feed.name, 0)):
            self._were_read[feed.name] = newest
            if len(self._were_read) > _MOST_READ:
                del self._were_read[next(iter(self._were_read))]

    async def source(self, name: str, newest: int) -> WorkerRecord:
        """The worker that publishes a name, once there is one that lives; or one that has a version which it left.

        newest: the version that is here already.
        """
        looked, look = bool(newest), None
        try:
            while True:
                changed = self.names.changed
                claim = self.names.get(name)
                record = None if claim is None else self.names.holder(claim)
                if record is None and not looked:
                    looked, look = True, self._engine.tasks.spawn(self._look_for(name, claim))
                if record is None and look is not None:  # the store may not answer for long, and who publishes say so
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

    async def _look_for(self, name: str, claim: Claim | None) -> WorkerRecord | None:
        """Whoever has a version of a name whose publisher is not known, or has gone; None if there is none."""
        if claim is None:
            claim = await self.names.look_up(name)
            record = None if claim is None else self.names.holder(claim)
            if claim is None or record is not None:
                return record  # a worker that publishes it first says so
        # What a member hands on is its own word: its role has to be one that may publish the name.
        kept = [
            (said.kept, record)
            for record, said in await self.names.ask_all(name)
            if said is not None and self.names.access.may_publish(record, name)
        ]
        newest, record = max(kept, key=lambda each: (each[0], self._is_read(each[1])), default=(0, None))
        return record if newest else None

    def _is_read(self, record: WorkerRecord) -> bool:
        """Whether pickles that this worker, or another one, hands on are read here, as far as that goes by which."""
        return record.id == self._engine.id or not self._engine.rights.limited(record.role)

    def leader(self, name: str, worker_id: int, publisher: WorkerRecord) -> WorkerRecord:
        """The member of that id, which fetches for this host what another one publishes; this worker begins to.

        RpcUsageError if there is no such member.
        """
        record = self.member(worker_id)
        if record is None:
            raise RpcUsageError(f"no member has the id {worker_id}, which fetches {name!r} for this host")
        if record.id == self._engine.id:
            relay = self.relays.get(name)
            if relay is None or relay.publisher != publisher:
                if relay is not None:
                    relay.stop()
                    self.relay_ended(relay)
                self.relays[name] = Relay(self._home, self, name, publisher, next(self._numbers))
        return record

    def relay_ended(self, relay: Relay) -> None:
        """Nobody reads from a relay any more, or its publisher has gone."""
        if self.relays.get(relay.name) is relay:
            del self.relays[relay.name]
            self._ended.append(relay)

    def member(self, worker_id: int) -> WorkerRecord | None:
        """The member of that id, if there is one that lives."""
        record = self.known(worker_id)
        return record if record is not None and not self._home.group.is_gone(record) else None

    def known(self, worker_id: int) -> WorkerRecord | None:
        """The record of a member, which may have gone; None if it is not known any more."""
        return self._home.group.members.get(worker_id)

    def piece(self, record: WorkerRecord, message: PieceWanted) -> Future[object]:
        """Ask a worker for some bytes of a version, without a limit."""
        return self._home.peers.of(record).call(pieced, (write(message),), None, 0.0, system=True)

    def digest(self, record: WorkerRecord, name: str, version: int) -> Future[object]:
        """Ask the publisher of a name for the digest of a version."""
        said, limit = write(DigestWanted(name, version)), self._engine.options.rpc_timeout
        options = CallOptions(part_of=("published", name))
        return self._home.peers.of(record).call(digest, (said,), None, limit, system=True, options=options)

    @property
    def access(self) -> Access:
        """Who may publish a name, and who may read it."""
        return self.names.access

    def latest(self, name: str) -> Latest:
        """What this worker has of a name."""
        shelf = self.shelf_of(name)
        feeds = [feed for feed in self.feeds.values() if feed.name == name]
        # What was read once shall not be followed by versions before it, though nobody reads the name just now.
        seen = self._were_read.get(name, 0)
        newest = max([seen, 0 if shelf is None else shelf.newest, *(feed.newest for feed in feeds)])
        return Latest(name, newest, max((feed.kept.edition.version for feed in feeds if feed.kept), default=0))

    def hand_on(self, message: Want) -> asyncio.Task[Results]:
        """The newest version of a name that this worker reads, for who has come after its publisher had gone."""
        return self._engine.tasks.spawn(self._hand_on(message))

    async def _hand_on(self, message: Want) -> Results:
        kept = [feed.kept for feed in self.feeds.values() if feed.name == message.name and feed.kept is not None]
        newest = max(kept, key=lambda each: each.edition.version, default=None)
        if newest is None or newest.edition.version <= message.have:
            raise RpcUsageError(
                f"worker {self._engine.name!r} neither publishes {message.name!r} nor has a version of it"
            )
        edition = newest.edition._replace(offer=None, copy=False, slots=[])
        data: tuple[torch.Tensor, ...] = ()
        if newest.view is not None:  # else all of it is in the bodies
            data = (torch.from_numpy(await in_background(self._engine, partial(newest.view.read, edition.size))),)
        return Results((write(edition), *newest.bodies, *data))

    def want(self, record: WorkerRecord, message: Want, limit: float = 0.0) -> Future[object]:
        """Ask a worker for its newest version. limit: seconds, 0 for none."""
        said, options = write(message), CallOptions(part_of=("published", message.name))
        return self._home.peers.of(record).call(wanted, (said,), None, limit, system=True, options=options)

    def tell(self, record: WorkerRecord, message: Message) -> None:
        """Say something to a worker that needs no answer. One that takes no further calls now is told again: it would
        keep what nobody holds any more, and wait for who does not read."""
        function = SAID[type(message)]
        with contextlib.suppress(RpcError):  # it is gone, or this worker is
            limit = self._engine.options.rpc_timeout
            call = self._home.peers.of(record).call(function, (write(message),), None, limit, system=True)
            call._when_settled(Again(self._told, record, message))

    def _told(self, record: WorkerRecord, message: Message, future: Future[object]) -> None:
        """Any thread. It may run twice: what is told twice is as if it were told once."""
        if isinstance(future.exception(), Overloaded):
            self._engine.call_on_loop(self._engine.loop.call_later, _TOLD_PAUSE, self._tell_again, record, message)

    def _tell_again(self, record: WorkerRecord, message: Message) -> None:
        if not isinstance(message, StillFetching):  # it says so again by itself
            self.tell(record, message)

    # --- what others say ----------------------------------------------------------------------------------------------

    def on_claim(self, claim: Claim, record: WorkerRecord) -> int:
        """A worker says that it publishes a name. How many subscriptions to it there are here."""
        if claim.publisher != record.id:
            raise RpcUsageError(f"{record.describe()} tells of a claim to {claim.name!r} that is not its own")
        self.names.tell(claim, record)
        return len(self._readers(claim.name))

    def on_unpublished(self, message: Unpublished, caller_id: int) -> None:
        """A worker does not publish a name any more: the subscriptions to it end here. Nothing of a claim before."""
        if self.names.tell_end(message, caller_id):
            for feed in self._readers(message.name):
                feed.finish()

    def _on_lost(self, name: str) -> None:
        """Another worker has the name in the store: whether this one has it is seen with the next version."""
        publisher = self.publishers.get(name)
        if publisher is not None:
            publisher.unsure = True

    def reads(self, name: str) -> bool:
        """Whether a subscription to the name fetches versions here."""
        return bool(self._readers(name))

    def _readers(self, name: str) -> list[Feed]:
        return [feed for feed in self.feeds.values() if feed.name == name and feed.reads]

    def _read_here(self) -> set[str]:
        """The names that are read here."""
        return {feed.name for feed in self.feeds.values() if feed.reads}

    def shelf_of(self, name: str) -> Shelf | None:
        """What gives versions of a name to others here; None if nothing does."""
        return self.publishers.get(name) or self.relays.get(name)

    def shelf_with(self, name: str, version: int) -> Shelf | None:
        """What gives a version of a name to others here, also where the name was unpublished; None if nothing does."""
        ended = [shelf for shelf in self._ended if shelf.name == name and shelf.has(version)]
        return ended[0] if ended else self.shelf_of(name)

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This worker is about to leave: its subscriptions end. Those who publish are told so if it makes calls still,
        which is how they learn that nothing is held here any more, as its process may live on. Again: nothing."""
        error = self._engine.lifetime.why_closed()
        for feed in list(self.feeds.values()):
            feed.end(error)
            feed.close()

    def close(self) -> None:
        """This worker has left: nobody waits here any more."""
        error, feeds = self._engine.lifetime.why_closed(), list(self.feeds.values())
        self.leave()
        for feed in feeds:
            feed.let_go()
        for publisher in self.publishers.values():
            publisher.close(error)
        for shelf in [*self.relays.values(), *self._ended]:
            shelf.clear()
        for future in list(self._pending):
            future._settle(None, error)
        self._watch.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the descriptors, which are the parent's."""
        self._watch.close_in_child()
