"""The versions of one name at a worker that gives them to readers: their memory, their holders, and who waits.

The publisher of a name has a version store (`publisher`), and so has each leader, which fetches for all readers of its
host (`relay`). A version lies in a slot (`channels/slots.py`); if there is no slot, in memory of this process alone. It
is kept while it is the newest one or a reader holds it.

Invariants
1. A version is given to readers only when all of its bytes are in their place (`finish`). To the next host its pieces
   are given as they come (`piece`).
2. A slot is given back only when its version is not the newest one, no reader holds it, and no answer that brings its
   bytes is under way. A reader holds what it was given until it says that it does not (`released`, `closed`, or a
   `want` that has less), or until its process is proved gone.
3. Versions go up. Of two that are filled at the same time the later one counts.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
import torch

from ..._typing import T
from ...channels.arena import Span
from ...channels.segments import Bytes
from ...channels.slots import SharedSlot, SharedSlots
from ...errors import Overloaded, RpcUsageError
from ...futures import Future
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    Edition,
    PieceWanted,
    SlotOffer,
    SubscriptionClosed,
    VersionsReleased,
    Want,
    write,
)
from ...protocol.trace_context import TraceContext
from ..calls.values import Results
from ..engine.engine import Engine
from .home import Home

# A subscription that holds more versions is asked to copy the next one and release it. Four are: the one in use, the
# next one ready, the one arriving, and one whose release is not reported yet.
MOST_HELD = 4
# The most subscriptions of one worker to one name, with ended ones that still hold versions.
_MOST_SUBSCRIPTIONS = 4096
# Stands for the number of a subscription while a worker of another host fetches a version in pieces. By the same number
# it reports that it has stopped (`VersionsReleased`).
IN_PIECES = 0

Key = tuple[int, int]  # the id of a worker, and the number of its subscription


class Origin(NamedTuple):
    """The publisher of a version: its id, name, and main module.

    roles: the publisher's role, and the roles of all workers that handed the version on. trace: the trace context in
    which it was published.
    """

    publisher: int
    worker: str
    main: str
    roles: Sequence[str]
    trace: TraceContext | None = None


@dataclass(eq=False)
class Subscriber:
    """One subscription to the name. have: its newest whole version. held: the versions that it may be reading. lacking:
    since when there are newer ones, and none has come to it (``time.monotonic()``); 0.0 while it has the newest.

    asked: its waiting question and the Future of the answer, which may be done if the reader has given up; or None.
    """

    record: WorkerRecord
    have: int = 0
    lacking: float = 0.0
    held: set[int] = field(default_factory=set)
    asked: tuple[Want, asyncio.Future[Results]] | None = None

    def has(self, version: int, newest: int) -> None:
        """It has reported a version. newest: of the name."""
        if version > self.have:
            self.have = version
            self.lacking = time.monotonic() if version < newest else 0.0

    def fail(self, error: Exception) -> None:
        """Fail its waiting question."""
        asked, self.asked = self.asked, None
        if asked is not None and not asked[1].done():
            asked[1].set_exception(error)


@dataclass(eq=False)
class Stored:
    """One version. data: its bytes, filled up to `filled`. holders: subscriptions that may be reading its slot.

    editions: its written editions, by (mapped, copy). answers: under way with its bytes. grown: set when more bytes are
    there. abandoned: whether it will not become whole.
    """

    version: int
    origin: Origin
    bodies: tuple[bytes, ...]
    spans: list[Span]
    data: Bytes
    slot: SharedSlot | None
    filled: int = 0
    holders: set[Key] = field(default_factory=set)
    editions: dict[tuple[bool, bool], bytes] = field(default_factory=dict)
    answers: dict[int, weakref.ref[Bytes]] = field(default_factory=dict)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: bool = False


class VersionStore:
    """The versions of one name. On the loop. subscribers: the open subscriptions."""

    def __init__(self, home: Home, name: str) -> None:
        self.name = name
        self.subscribers: dict[Key, Subscriber] = {}
        self._subscriptions: dict[int, int] = {}  # by worker: how many in `subscribers` and `_gone`
        self._engine = home.engine
        self._slots: SharedSlots = home.links.memory.slots
        self._newest: Stored | None = None
        self._stored: dict[int, Stored] = {}
        self._gone: dict[Key, Subscriber] = {}  # ended, but still hold versions
        self._fetching: dict[WorkerRecord, int] = {}  # the version that a worker of another host fetches
        self._begun = asyncio.Event()  # set when a version is begun or whole, or none comes any more
        self._over: str | None = None

    @property
    def newest(self) -> int:
        """The newest whole version; 0 if there is none."""
        return 0 if self._newest is None else self._newest.version

    @property
    def stored(self) -> int:
        """How many versions take up memory."""
        return len(self._stored)

    def has(self, version: int) -> bool:
        """Whether a version takes up memory."""
        return version in self._stored

    # --- filling ------------------------------------------------------------------------------------------------------

    def begin(self, version: int, origin: Origin, bodies: tuple[bytes, ...], spans: list[Span], size: int) -> Stored:
        """Make room for a version, whose bytes will be filled in."""
        slot = self._slots.take(size) if size else None
        data: Bytes = numpy.empty(size, numpy.uint8) if slot is None else slot.bytes(size)
        self._stored[version] = stored = Stored(version, origin, bodies, spans, data, slot)
        self._wake_fetching()
        return stored

    def filled_to(self, stored: Stored, end: int) -> None:
        """The first bytes of a version are there, up to `end`."""
        stored.filled = end
        stored.grown.set()
        stored.grown = asyncio.Event()

    def finish(self, stored: Stored) -> None:
        """All bytes of a version are there: give it to readers."""
        self.filled_to(stored, len(stored.data))
        before = self._newest
        if before is None or before.version < stored.version:
            self._newest = stored
            for subscriber in self.subscribers.values():
                subscriber.lacking = subscriber.lacking or time.monotonic()
            self._wake()
        if before is not None:
            self._look_at(before)
        self._look_at(stored)

    def give_up(self, stored: Stored) -> None:
        """A version will not become whole."""
        stored.abandoned = True
        stored.holders.clear()
        stored.grown.set()
        self._look_at(stored)

    def _wake(self) -> None:
        """There is a newer version, or no more come: answer the waiting readers."""
        newest = self._newest
        for key, subscriber in self.subscribers.items():
            if subscriber.asked is None or subscriber.asked[1].done():
                continue
            said, answer = subscriber.asked
            if newest is not None and newest.version > said.have:
                try:
                    given = self._answer(key, subscriber, newest, said)
                except Exception as error:  # the others wait as well
                    subscriber.fail(error)
                else:
                    subscriber.asked = None
                    answer.set_result(given)
            elif self._over is not None:
                subscriber.fail(RpcUsageError(self._over))
        self._wake_fetching()

    def _wake_fetching(self) -> None:
        self._begun.set()
        self._begun = asyncio.Event()

    # --- what readers say ---------------------------------------------------------------------------------------------

    def want(self, reader: WorkerRecord, said: Want) -> Results | asyncio.Future[Results]:
        """The newest version, if the subscription does not have it; if it does, a Future of the next one."""
        key = (reader.id, said.subscription)
        subscriber = self.subscriber(key, reader)
        unheard = filter(said.have.__lt__, subscriber.held)  # given by an answer that it never got
        for version in {*unheard, *subscriber.held.intersection(said.released)}:
            self._release(key, subscriber, version)
        subscriber.has(said.have, self.newest)
        self.on_has(key, subscriber)
        self.on_readers()
        newest = self._newest
        if newest is not None and newest.version > said.have:
            return self._answer(key, subscriber, newest, said)
        if self._over is not None:
            raise RpcUsageError(self._over)
        if subscriber.asked is not None:
            subscriber.fail(RpcUsageError(f"the subscription to {self.name!r} has asked again"))
        answer: asyncio.Future[Results] = self._engine.loop.create_future()
        subscriber.asked = said, answer
        return answer

    def subscriber(self, key: Key, reader: WorkerRecord) -> Subscriber:
        """The subscription of a key; begins a new one if there is none."""
        subscriber = self.subscribers.get(key)
        if subscriber is None:
            subscriber = self._gone.pop(key, None)  # it goes on, and still holds its versions
            if subscriber is None:
                count = self._subscriptions.get(reader.id, 0)
                if count >= _MOST_SUBSCRIPTIONS:
                    raise Overloaded(
                        f"{reader.name!r} has {_MOST_SUBSCRIPTIONS} subscriptions to {self.name!r}, with those that "
                        f"have ended and hold versions of it still: it has to close some, and let go of what they gave"
                    )
                self._subscriptions[reader.id] = count + 1
                subscriber = Subscriber(reader, lacking=time.monotonic() if self.newest else 0.0)
            self.subscribers[key] = subscriber
            self.on_has(key, subscriber)
        return subscriber

    def _uncount(self, key: Key) -> None:
        """Count a subscription no more: it has ended and holds nothing."""
        self._subscriptions[key[0]] -= 1
        if not self._subscriptions[key[0]]:
            del self._subscriptions[key[0]]

    def _remember(self, key: Key, subscriber: Subscriber) -> None:
        """Keep an ended subscription while it holds versions."""
        if subscriber.held:
            self._gone[key] = subscriber
        else:
            self._uncount(key)

    def _answer(self, key: Key, subscriber: Subscriber, stored: Stored, said: Want) -> Results:
        slot, copy = stored.slot, False
        data: tuple[torch.Tensor, ...] = ()
        mapped = slot is not None and said.maps
        if mapped:
            stored.holders.add(key)
            subscriber.held.add(stored.version)
            copy = len(subscriber.held) > MOST_HELD
        elif len(stored.data):
            data = (torch.from_numpy(self._lend(stored)),)
        edition = stored.editions.get((mapped, copy)) or self._write_edition(stored, mapped, copy)
        return Results((edition, *stored.bodies, *data))

    def _write_edition(self, stored: Stored, mapped: bool, copy: bool) -> bytes:
        """The edition of a version as bytes, written once for all readers of a kind."""
        offer, numbers = None, []
        if stored.slot is not None and mapped:
            slot = stored.slot
            offer, numbers = SlotOffer(slot.number, slot.fd, slot.size, slot.nonce), self._slots.numbers()
        said = stored.editions[mapped, copy] = write(self.edition(stored, offer, copy, numbers))
        return said

    def edition(
        self, stored: Stored, offer: SlotOffer | None, copy: bool, numbers: list[int], source: int | None = None
    ) -> Edition:
        """The edition of a version. source: the id of the worker to fetch its pieces from."""
        origin, size = stored.origin, len(stored.data)
        spans = [[*span] for span in stored.spans]
        return Edition(
            stored.version,
            origin.publisher,
            origin.worker,
            size,
            spans,
            offer,
            copy,
            numbers,
            origin.main,
            source,
            [*origin.roles],
            origin.trace,
        )

    def _lend(self, stored: Stored) -> Bytes:
        """The bytes of a version for an answer. The slot is kept while the answer borrows them."""
        if stored.slot is None:
            return stored.data
        view = stored.slot.bytes(len(stored.data))
        place = id(view)

        def ended(_: weakref.ref[Bytes]) -> None:  # in any thread
            del stored.answers[place]
            self._engine.call_on_loop(self._look_at, stored)

        stored.answers[place] = weakref.ref(view, ended)
        return view

    async def piece(self, reader: WorkerRecord, said: PieceWanted) -> torch.Tensor:
        """Wait for some bytes of a version, for a worker that fetches it for its host."""
        while (stored := self._stored.get(said.version)) is None:
            if self.newest >= said.version or self._over is not None:
                raise RpcUsageError(f"worker {self._engine.name!r} has version {said.version} of {self.name!r} no more")
            await self._begun.wait()
        end = said.start + said.length
        if stored.abandoned:
            raise RpcUsageError(f"version {said.version} of {self.name!r} did not become whole")
        if not said.start < end <= len(stored.data):
            raise RpcUsageError(f"version {said.version} of {self.name!r} has no bytes from {said.start} to {end}")
        key = (reader.id, IN_PIECES)
        self._fetches(reader, said.version)
        stored.holders.add(key)
        while stored.filled < end:
            if stored.abandoned:
                raise RpcUsageError(f"version {said.version} of {self.name!r} did not become whole")
            await stored.grown.wait()
        if (
            self._stored.get(said.version) is not stored
        ):  # it went before this task woke: another version may lie in its slot
            raise RpcUsageError(f"worker {self._engine.name!r} has version {said.version} of {self.name!r} no more")
        piece = torch.from_numpy(self._lend(stored)[said.start : end])
        if end == len(stored.data):
            self._fetches(reader, None)
        return piece

    def _fetches(self, reader: WorkerRecord, version: int | None) -> None:
        """A worker of another host fetches a version in pieces from now on, and not the one before."""
        before = self._fetching.get(reader)
        if before is not None and before != version:
            del self._fetching[reader]
            self._release((reader.id, IN_PIECES), None, before)
        if version is not None:
            self._fetching[reader] = version

    def released(self, reader: WorkerRecord, said: VersionsReleased) -> None:
        """A subscription does not use some versions any more, or a worker has stopped fetching one in pieces."""
        if said.subscription == IN_PIECES and self._fetching.get(reader) in said.versions:
            self._fetches(reader, None)
        key = (reader.id, said.subscription)
        subscriber = self.subscribers.get(key) or self._gone.get(key)
        for version in subscriber.held.intersection(said.versions) if subscriber is not None else ():
            self._release(key, subscriber, version)

    def closed(self, reader: WorkerRecord, said: SubscriptionClosed) -> None:
        """A subscription has ended. It releases later what it still holds."""
        key = (reader.id, said.subscription)
        subscriber = self.subscribers.pop(key, None)
        if subscriber is not None:
            subscriber.fail(RpcUsageError(f"the subscription to {self.name!r} has ended"))
            for version in subscriber.held - {*said.held}:
                self._release(key, subscriber, version)
            self._remember(key, subscriber)
            self.on_readers()

    def on_has(self, key: Key, subscriber: Subscriber) -> None:
        """A reader has reported its newest version."""

    def on_readers(self) -> None:
        """Readers, or their versions, have changed."""

    # --- readers that go ----------------------------------------------------------------------------------------------

    def on_gone(self, is_gone: Callable[[WorkerRecord], bool]) -> list[WorkerRecord]:
        """Members have left or were lost. Returns those whose processes may still read versions."""
        for key, subscriber in list(self.subscribers.items()):
            if is_gone(subscriber.record):
                del self.subscribers[key]
                self.on_reader_gone(key, subscriber)
                self._remember(key, subscriber)
        for reader in [each for each in self._fetching if is_gone(each)]:
            self._fetches(reader, None)
        self.on_readers()
        return [subscriber.record for subscriber in self._gone.values()]

    def on_reader_gone(self, key: Key, subscriber: Subscriber) -> None:
        """A reader has left or was lost."""

    def on_dead(self, is_dead: Callable[[WorkerRecord], bool]) -> None:
        """Processes have ended: forget what their workers held."""
        for key, subscriber in list(self._gone.items()):
            if is_dead(subscriber.record):
                for version in list(subscriber.held):
                    self._release(key, subscriber, version)

    def _release(self, key: Key, subscriber: Subscriber | None, version: int) -> None:
        if subscriber is not None:
            subscriber.held.discard(version)
            if not subscriber.held and self._gone.pop(key, None) is not None:
                self._uncount(key)
        stored = self._stored.get(version)
        if stored is not None:
            stored.holders.discard(key)
            if not stored.holders:
                self._look_at(stored)

    def _look_at(self, stored: Stored) -> None:
        """Drop a version if it is not needed."""
        if stored is self._newest or stored.holders or stored.answers:
            return
        if stored.filled < len(stored.data) and not stored.abandoned:
            return
        if self._stored.get(stored.version) is stored:
            del self._stored[stored.version]
            if stored.slot is not None:
                self._slots.give(stored.slot)

    def end(self, reason: str) -> None:
        """No more versions come: fail the waiting questions. Held versions stay until they are released."""
        self._over = reason
        newest, self._newest = self._newest, None
        if newest is not None:
            self._look_at(newest)
        self._wake()

    def clear(self) -> None:
        """The worker ends: let go of everything."""
        self._stored.clear()
        self._newest = None


async def in_background(
    engine: Engine, work: Callable[[], T], submit: Callable[[Callable[[], None]], None] | None = None
) -> T:
    """Run long work in a background thread. Cancelling the awaiting task does not cancel it.

    submit: hands it to a thread; the engine's if None.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            outcome._settle(None, error)
        else:
            outcome._settle(value)

    (submit or engine.in_background)(run)
    return await outcome
