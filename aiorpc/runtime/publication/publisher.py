"""One name at the worker that publishes it: its versions, who has them, and who waits for the next one.

A version lies in a slot (`channels/slots.py`), or where there is none to be had in memory of this process alone. It is
kept as long as it is the newest one or somebody reads it. Who publishes never waits for a reader.

Invariants
1. A version is given to readers only when all of its bytes are in their place (`newest` is set then).
2. A slot is given back only when its version is not the newest one, no reader holds it, and no answer that brings its
   bytes is under way. A reader holds what it was given until it says that it does not (`released`, `closed`, or a
   `want` that has less), or until its process is proved gone.
3. Versions go up. Of two that are copied at the same time the later one counts.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch

from ...channels.segments import Bytes
from ...channels.slots import SharedSlot, SharedSlots, Span, copy_all
from ...errors import Overloaded, RpcUsageError
from ...futures import Future
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...protocol.publication import Claim, Edition, SlotOffer, SubscriptionClosed, VersionsReleased, Want, needed, write
from ..calls.values import Results
from ..engine.engine import Engine
from ..links.links import Links
from .content import Content

# Versions that one subscription may hold before it is asked to copy the next one and release it: the one that its
# program uses, the next one that lies ready, and the one that comes.
MOST_HELD = 3
# Subscriptions of one worker to one name, and lost readers that are remembered.
_MOST_SUBSCRIPTIONS, _MOST_LOST = 4096, 256
# From so many bytes on a copy does not belong on the loop.
_LONG_COPY = 1 << 20

Key = tuple[int, int]  # the id of a worker, and the number of its subscription


class Home(Protocol):
    """What publishing needs of the worker."""

    engine: Engine
    links: Links


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
class _Subscriber:
    """One subscription to the name. have: the newest version that it has whole. held: those that it may be reading."""

    record: WorkerRecord
    have: int = 0
    held: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Stored:
    """One version. data: its bytes. holders: the subscriptions that may be reading its slot."""

    version: int
    bodies: tuple[bytes, ...]
    spans: list[Span]
    data: Bytes
    slot: SharedSlot | None
    holders: set[Key] = field(default_factory=set)
    editions: dict[tuple[bool, bool], bytes] = field(default_factory=dict)  # by whether it is mapped, and to be copied
    answers: set[weakref.ref[Bytes]] = field(default_factory=set)  # that bring its bytes and are under way


@dataclass(eq=False)
class _Awaited:
    """Somebody waits until a version is delivered. many: to how many readers, None for all of them."""

    version: int
    quorum: float | None
    future: Future[Delivery]
    bound: asyncio.TimerHandle | None = None


class Publisher:
    """See the module. On the loop. newest: the newest version, as a number; 0 before there is one."""

    def __init__(self, home: Home, claim: Claim) -> None:
        self.claim = claim
        self.told: set[str] = set()  # the incarnations of the workers that were told of the claim
        self._engine = home.engine
        self._arena = home.links.memory.arena
        self._slots: SharedSlots = home.links.memory.slots
        self._next = claim.first
        self._newest: _Stored | None = None
        self._stored: dict[int, _Stored] = {}
        self._subscribers: dict[Key, _Subscriber] = {}
        self._expected: dict[int, WorkerInfo] = {}  # of workers that may subscribe, and have not asked yet
        self._gone: dict[Key, _Subscriber] = {}  # that hold versions still
        self._lost: dict[WorkerInfo, tuple[int, int]] = {}  # what they had, and what was the newest one then
        self._awaited: set[_Awaited] = set()
        self._changed = asyncio.Event()

    @property
    def newest(self) -> int:
        """The newest version; 0 before there is one."""
        return 0 if self._newest is None else self._newest.version

    @property
    def stored(self) -> int:
        """How many versions take up memory."""
        return len(self._stored)

    # --- publishing ---------------------------------------------------------------------------------------------------

    async def put(self, content: Content) -> int:
        """Copy a value and give it to whoever waits; its version. Returns when its buffers are not read any more."""
        version, self._next = self._next, self._next + 1
        slot = self._slots.take(content.size) if content.size else None
        data: Bytes = numpy.empty(content.size, numpy.uint8) if slot is None else slot.bytes(content.size)

        def copy() -> None:
            copy_all(self._arena, content.buffers, content.spans, data)

        # If this is cancelled, the worker ends: the thread may go on to write, so the slot is not given back.
        if content.size < _LONG_COPY:
            copy()
        else:
            await in_background(self._engine, copy)
        self._stored[version] = stored = _Stored(version, content.bodies, content.spans, data, slot)
        before = self._newest
        if before is None or before.version < version:
            self._newest = stored
            self._changed.set()
            self._changed = asyncio.Event()
        if before is not None:
            self._look_at(before)
        self._look_at(stored)
        return version

    # --- what readers say ---------------------------------------------------------------------------------------------

    async def want(self, reader: WorkerRecord, said: Want) -> Results:
        """The newest version for a subscription that has not got it, once there is one."""
        key = (reader.id, said.subscription)
        subscriber = self._subscriber(key, reader)
        self._expected.pop(reader.id, None)
        unheard = [each for each in subscriber.held if each > said.have]  # of an answer that it never got
        for version in [*unheard, *said.released]:
            self._release(key, subscriber, version)
        subscriber.have = max(subscriber.have, said.have)
        self._look_at_deliveries()
        while self._newest is None or self._newest.version <= said.have:
            await self._changed.wait()
        if self._subscribers.get(key) is not subscriber:
            raise RpcUsageError(f"the subscription to {said.name!r} has ended")
        return self._answer(key, subscriber, self._newest, said.maps)

    def _subscriber(self, key: Key, reader: WorkerRecord) -> _Subscriber:
        subscriber = self._subscribers.get(key)
        if subscriber is None:
            if sum(worker == reader.id for worker, _ in self._subscribers) >= _MOST_SUBSCRIPTIONS:
                raise Overloaded(f"{reader.name!r} has {_MOST_SUBSCRIPTIONS} subscriptions to {self.claim.name!r}")
            subscriber = self._subscribers[key] = _Subscriber(reader)
        return subscriber

    def _answer(self, key: Key, subscriber: _Subscriber, stored: _Stored, maps: bool) -> Results:
        slot, copy = stored.slot, False
        data: tuple[torch.Tensor, ...] = ()
        mapped = slot is not None and maps
        if mapped:
            stored.holders.add(key)
            subscriber.held.add(stored.version)
            copy = len(subscriber.held) > MOST_HELD
        elif len(stored.data):
            data = (torch.from_numpy(stored.data if slot is None else self._lend(stored, slot)),)
        return Results((self._edition(stored, mapped, copy), *stored.bodies, *data))

    def _edition(self, stored: _Stored, mapped: bool, copy: bool) -> bytes:
        """What is said of a version, which is written once for all readers of a kind."""
        said = stored.editions.get((mapped, copy))
        if said is None:
            engine, slot = self._engine, stored.slot
            offer, numbers = None, []
            if slot is not None and mapped:
                offer, numbers = SlotOffer(slot.number, slot.fd, slot.size, slot.nonce), self._slots.numbers()
            size, spans, main = len(stored.data), [[*span] for span in stored.spans], engine.record.main
            edition = Edition(stored.version, engine.id, engine.name, size, spans, offer, copy, numbers, main)
            said = stored.editions[mapped, copy] = write(edition)
        return said

    def _lend(self, stored: _Stored, slot: SharedSlot) -> Bytes:
        """The bytes of a version, for an answer: as long as that borrows them, the slot is kept."""
        view = slot.bytes(len(stored.data))

        def ended(answer: weakref.ref[Bytes]) -> None:  # in any thread
            stored.answers.discard(answer)
            self._engine.call_on_loop(self._look_at, stored)

        stored.answers.add(weakref.ref(view, ended))
        return view

    def released(self, reader: WorkerRecord, said: VersionsReleased) -> None:
        """A subscription does not use these versions any more."""
        key = (reader.id, said.subscription)
        subscriber = self._subscribers.get(key) or self._gone.get(key)
        for version in said.versions if subscriber is not None else ():
            self._release(key, subscriber, version)

    def closed(self, reader: WorkerRecord, said: SubscriptionClosed) -> None:
        """A subscription has ended; what it still holds it releases later."""
        key = (reader.id, said.subscription)
        subscriber = self._subscribers.pop(key, None)
        if subscriber is not None:
            for version in subscriber.held - {*said.held}:
                self._release(key, subscriber, version)
            if subscriber.held:
                self._gone[key] = subscriber
        self._look_at_deliveries()

    def expect(self, record: WorkerRecord, subscriptions: int) -> None:
        """A worker that was told of the claim has answered how many subscriptions it has to the name."""
        if not subscriptions:
            self._expected.pop(record.id, None)
            self._look_at_deliveries()

    def tell(self, record: WorkerRecord) -> None:
        """A worker is told of the claim: it may subscribe."""
        self.told.add(record.incarnation)
        if all(worker != record.id for worker, _ in self._subscribers):
            self._expected[record.id] = record.info

    # --- readers that go ----------------------------------------------------------------------------------------------

    def on_gone(self, is_gone: Callable[[WorkerRecord], bool]) -> list[WorkerRecord]:
        """Members have left or were lost: no version waits for them. Returns those that may still read some."""
        for key, subscriber in list(self._subscribers.items()):
            if is_gone(subscriber.record):
                del self._subscribers[key]
                self._lost[subscriber.record.info] = subscriber.have, self.newest
                if subscriber.held:
                    self._gone[key] = subscriber
        while len(self._lost) > _MOST_LOST:
            del self._lost[next(iter(self._lost))]
        self._look_at_deliveries()
        return [subscriber.record for subscriber in self._gone.values()]

    def not_expected(self, record: WorkerRecord) -> None:
        """A worker could not be told of the claim."""
        self.expect(record, 0)

    def on_dead(self, is_dead: Callable[[WorkerRecord], bool]) -> None:
        """Processes have ended: what their workers held is nobody's any more."""
        for key, subscriber in list(self._gone.items()):
            if is_dead(subscriber.record):
                for version in list(subscriber.held):
                    self._release(key, subscriber, version)

    def _release(self, key: Key, subscriber: _Subscriber | None, version: int) -> None:
        if subscriber is not None:
            subscriber.held.discard(version)
            if not subscriber.held:
                self._gone.pop(key, None)
        stored = self._stored.get(version)
        if stored is not None:
            stored.holders.discard(key)
            self._look_at(stored)

    def _look_at(self, stored: _Stored) -> None:
        """Let a version go that nobody needs."""
        if stored is self._newest or stored.holders or stored.answers or stored.version not in self._stored:
            return
        del self._stored[stored.version]
        if stored.slot is not None:
            self._slots.give(stored.slot)

    # --- delivery -----------------------------------------------------------------------------------------------------

    def delivered(self, version: int, quorum: float | None, timeout: float, future: Future[Delivery]) -> None:
        """Settle the Future when so many readers have the version, or after so many seconds; 0 for no limit."""
        awaited = _Awaited(version, quorum, future)
        self._awaited.add(awaited)
        if timeout:
            awaited.bound = self._engine.loop.call_later(timeout, self._settle, awaited)
        self._look_at_deliveries()

    def _look_at_deliveries(self) -> None:
        for awaited in [each for each in self._awaited if self._delivery(each).reached or each.future.done()]:
            self._settle(awaited)

    def _settle(self, awaited: _Awaited) -> None:
        self._awaited.discard(awaited)
        if awaited.bound is not None:
            awaited.bound.cancel()
        awaited.future.settle(self._delivery(awaited))

    def _delivery(self, awaited: _Awaited) -> Delivery:
        have: dict[WorkerInfo, int] = {}
        for subscriber in self._subscribers.values():
            info = subscriber.record.info
            have[info] = min(subscriber.have, have.get(info, subscriber.have))
        for info in self._expected.values():
            have.setdefault(info, 0)
        has = tuple(sorted(info for info, version in have.items() if version >= awaited.version))
        missing = tuple(sorted(info for info, version in have.items() if version < awaited.version))
        lost = tuple(info for info, (had, newest) in self._lost.items() if had < awaited.version <= newest)
        wanted = needed(awaited.quorum, len(have))
        return Delivery(awaited.version, has, missing, lost, len(has) >= wanted)

    def close(self, error: Exception) -> None:
        """The worker ends."""
        for awaited in list(self._awaited):
            self._awaited.discard(awaited)
            if awaited.bound is not None:
                awaited.bound.cancel()
            awaited.future.settle(None, error)
        self._stored.clear()
        self._newest = None


async def in_background(engine: Engine, work: Callable[[], Any]) -> Any:
    """Have something done in a background thread that takes long. It is not cancelled with whoever awaits it."""
    outcome: asyncio.Future[Any] = engine.loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)

    def run() -> None:
        try:
            value, error = work(), None
        except BaseException as raised:
            value, error = None, raised
        engine.call_on_loop(settle, value, error)

    engine.in_background(run)
    return await outcome
