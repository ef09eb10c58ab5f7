"""Fetches the newest version for a subscription before the program wants it.

A prefetcher asks for the next version as soon as it has one, and keeps it until the program takes it; a newer one takes
its place. So the program gets the newest version, and a version that it does not take is never decoded.

A version in a slot is mapped for this subscription alone. It is released when the value and all its tensors have died:
a thread gives back the written pages, and after that the prefetcher tells the publisher.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy
import torch
from msgspec.structs import replace

from ...channels.descriptors import Descriptors, DescriptorShare
from ...channels.segments import Bytes
from ...channels.slots import SlotView
from ...errors import NotAllowed, PeerLeft, PeerLost, ProtocolError, RpcError, SerializationError
from ...locks import Lock
from ...logs import logger
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...protocol.publication import (
    VERSION,
    AskLeader,
    Edition,
    SlotOffer,
    SubscriptionClosed,
    VersionArrived,
    VersionsReleased,
    Want,
    read,
)
from ..calls.failures import without_frames
from ..calls.values import Results
from ..engine.engine import Engine
from .digests import changed, is_digest
from .names import Names
from .outbound import Outbound
from .version_store import in_background

# Seconds between two tries to get a version after an error that may pass.
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 1.0
# The release of a version up to _LARGE bytes waits _PATIENCE seconds, to travel with the next question.
_LARGE, _PATIENCE = 64 << 20, 0.2
# Readers wait this multiple of `stalled` for a leader's next version; then they pass the leader by.
_MOST_STALLS = 6
# The most unused views of slots that are kept for the next versions.
_MOST_IDLE = 4


class PublicationsForPrefetcher(Protocol):
    """The part of `Publications` that a prefetcher uses."""

    names: Names
    outbound: Outbound

    async def source(self, name: str, newest: int) -> WorkerRecord:
        """Wait for the worker that publishes a name, or for a member that has a version of it.

        newest: the version that is here already.
        """

    def leader(self, name: str, worker_id: int, publisher: WorkerRecord) -> WorkerRecord:
        """The member that fetches a name for this host. If it is this worker, it begins to.

        RpcUsageError if there is no such member.
        """

    def prefetcher_ended(self, prefetcher: Prefetcher) -> None:
        """A prefetcher is closed, and none of its values is alive any more."""


class ArrivedVersion(NamedTuple):
    """A version that has arrived whole. plain: whether its publisher or sender may send no pickles.

    data: its bytes, the reader's own. view: of its slot, which keeps the published bytes while `mapped` lives, even if
    the reader writes to its own; None if the bytes came with the answer. publisher: who published it.
    """

    edition: Edition
    bodies: tuple[bytes, ...]
    data: Bytes
    plain: bool
    view: SlotView | None
    mapped: Bytes | None
    publisher: WorkerInfo


class Prefetcher:
    """Fetches for one subscription. On the loop; any thread may call `take`, `forget` and `close_later`.

    number: of the subscription, at this worker. newest: the newest whole version here, 0 for none. came: when it came
    (monotonic seconds). taken: the version that the program took last, 0 for none; taken_came: when that one had come.
    kept: that version, for readers that come when its publisher has gone; None if the program may have changed its
    bytes.
    """

    def __init__(
        self, engine: Engine, publications: PublicationsForPrefetcher, descriptors: Descriptors, name: str, number: int
    ) -> None:
        """descriptors: of the worker, for slots that are mapped."""
        self.name = name
        self._descriptors = descriptors
        self.number = number
        self.engine = engine
        self.kept: ArrivedVersion | None = None
        self._publications = publications
        self._outbound = publications.outbound
        self.newest: int = 0
        self.came: float = 0.0
        self.taken_came: float = 0.0
        self.taken: int = 0
        self._made_by = -1  # id of the publisher of `newest`
        self._maps = False
        self._views: dict[int, SlotView] = {}
        self._source: WorkerRecord | None = None  # the worker that owns these slots
        self._leader: WorkerRecord | None = None  # fetches for this host
        self._passed_by: set[WorkerRecord] = set()  # leaders that handed on nothing, or something wrong
        self._behind_since = 0.0  # since when a leader has a newer version and hands on nothing (monotonic seconds)
        self._late: set[WorkerRecord] = set()  # former leaders; their answers may have come too late
        self._trouble = ""  # why nothing has come
        # The version and the lender of each view. By view, because two publishers may have versions of the same number.
        self._lent: dict[SlotView, tuple[int, WorkerRecord]] = {}
        self._ready: ArrivedVersion | None = None
        self._error: Exception | None = None
        self._refusal: Exception | None = None  # why the newest version cannot come, until a turn raises it
        self._unsaid: list[tuple[int, WorkerRecord]] = []  # released versions and their lenders, not yet told
        self._saying: asyncio.TimerHandle | None = None  # tells them, if no question does before
        self._size = 0  # bytes of the newest version
        self._wakers: set[Callable[[], object]] = set()
        self._released: deque[tuple[SlotView, int, WorkerRecord]] = deque()
        self._lock = Lock()
        self._task: asyncio.Task[None] | None = None
        self.closed: bool = False
        self._over = False  # the name was unpublished
        self._asking = False  # whether a question is under way, or its answer is being read

    @property
    def reads(self) -> bool:
        """Whether it fetches versions: it is neither closed, nor was the name unpublished."""
        return not self.closed and not self._over

    def start(self) -> None:
        """Begin to fetch versions."""
        if not self.closed:
            self._task = self.engine.tasks.spawn(self._run())

    # --- the program, in any thread -----------------------------------------------------------------------------------

    def take(self, waker: Callable[[], object] | None) -> ArrivedVersion | None:
        """Take the newest version. If there is none new: returns None, and calls the waker when it is worth trying
        again. Raises the error that ended the prefetcher, and once the reason why the newest version cannot come here.
        """
        with self._lock:
            if waker is not None:
                self._wakers.discard(waker)
            arrival, self._ready = self._ready, None
            if arrival is not None:
                self.taken, self.taken_came = arrival.edition.version, self.came
            if arrival is None:
                if self._error is not None:
                    raise copy.copy(self._error)  # with the traceback of this turn alone
                if self._refusal is not None:
                    refusal, self._refusal = self._refusal, None
                    raise refusal
                if waker is not None:
                    self._wakers.add(waker)
        return arrival

    def forget(self, waker: Callable[[], object]) -> None:
        """A waker does not wait any more."""
        with self._lock:
            self._wakers.discard(waker)

    def close_later(self) -> None:
        """No more versions are wanted. Also from inside the garbage collector."""
        if not self.closed:
            self.engine.call_on_loop(self.close)

    def describe(self) -> str:
        """What this waits for, for errors."""
        newer = f" newer than {self.newest}" if self.newest else ""
        reason = self._trouble or self._publications.names.describe(self.name)
        return f"no version of {self.name!r}{newer} has come to worker {self.engine.name!r}: {reason}"

    # --- fetching -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._over:
                record, self._leader = await self._publications.source(self.name, self.newest), None
                try:
                    while self._goes_on(record):
                        self._asking = True
                        try:
                            await self._fetch(record)
                        finally:
                            self._asking = False
                        pause = _FIRST_PAUSE
                except (PeerLost, PeerLeft):
                    await asyncio.sleep(_FIRST_PAUSE)  # the next publisher of the name announces itself
                except (ProtocolError, NotAllowed):
                    raise
                except SerializationError as error:
                    await self._refused(error)
                except RpcError as error:
                    self._trouble = str(error)
                    logger.debug("worker %s: fetching %r again: %s", self.engine.name, self.name, error)
                    if self.reads:
                        await asyncio.sleep(pause)
                    pause = min(2 * pause, _LAST_PAUSE)
            self._finished()
        except Exception as error:
            self.end(error)

    async def _refused(self, error: SerializationError) -> None:
        """The newest version cannot be sent here. Wait until a turn has raised that, then ask again."""
        self._trouble = str(error)
        refusal = RpcError(f"the newest version of {self.name!r} cannot come to worker {self.engine.name!r}: {error}")
        refusal.__cause__ = without_frames(error)
        self._refusal = refusal
        self._wake()
        await asyncio.sleep(_FIRST_PAUSE)
        while self.reads and self._refusal is refusal:  # noqa: ASYNC110  # taken in any thread, without a signal
            await asyncio.sleep(_LAST_PAUSE)

    def _goes_on(self, record: WorkerRecord) -> bool:
        """Whether to ask a worker for the next version."""
        return self.reads and (self._publications.names.publishes(record, self.name) or not self.newest)

    async def _fetch(self, record: WorkerRecord) -> None:
        self._follow(record)
        publisher, record = record, self._leader or record
        if self._source != record:
            self._source, self._views = record, {}
            self._maps = self.engine.options.shared_memory > 0  # until mapping one of its slots fails
        released = [version for version, source in self._unsaid if source == record]
        self._unsaid = [each for each in self._unsaid if each[1] != record]
        if not self._unsaid and self._saying is not None:
            self._saying.cancel()
        want = Want(self.name, self.number, self.newest, self._maps, released, False)
        try:
            # The leader of this host may have stalled: from time to time ask the publisher which worker it is.
            elsewhere = self._leader is not None and self._leader.id != self.engine.id
            answer = await self._outbound.want(record, want, self.engine.bounds.stalled if elsewhere else 0.0)
        except RpcError as error:
            if released:  # it may not have heard the question
                self._outbound.tell(record, VersionsReleased(self.name, self.number, released))
            if self._leader is None:
                raise
            if isinstance(error, (NotAllowed, ProtocolError, SerializationError)):
                self._pass_by(record, str(error))
            self._leader = None  # the publisher names the present leader
            self._late.add(record)
            await asyncio.sleep(_FIRST_PAUSE)
            return
        try:
            await self._read(answer, record, publisher)
        except ProtocolError as error:
            if record == publisher:
                raise
            self._pass_by(record, str(error))

    async def _read(self, answer: object, record: WorkerRecord, publisher: WorkerRecord) -> None:
        """What a worker has answered, which is the publisher itself or fetches for this host. Raises ProtocolError."""
        if type(answer) is not Results:
            raise ProtocolError(f"{record.describe()} has answered with no version of {self.name!r}")
        said, *rest = answer
        edition = read(VERSION, said)
        if isinstance(edition, AskLeader) and record == publisher:
            self._lead_by(edition, publisher)
            return
        if not isinstance(edition, Edition):
            raise ProtocolError(f"{record.describe()} has answered with no version of {self.name!r}")
        bodies = tuple([each for each in rest if type(each) is bytes])
        self._check(edition, bodies, record, publisher)
        # A version through another worker is compared with its digest, unless all members may run anything here.
        others = record not in (publisher, self.engine.record)
        compares = others and not self.engine.rights.unlimited
        view: SlotView | None = None
        mapped: Bytes | None = None
        if edition.offer is None:
            data = _bytes_of(rest[len(bodies) :], edition.size)
        else:
            found = self._map(edition, edition.offer, record)
            if found is None:
                self._maps = False
                return
            view, mapped = found
            data = mapped
            if edition.copy or compares:  # the lender could change it after the comparison
                data = await in_background(self.engine, mapped.copy)
        if compares:
            view, mapped = None, None
            wanted = await self._outbound.digest(publisher, self.name, edition.version)
            if not await is_digest(self.engine, wanted, self.name, edition, bodies, data):
                self._pass_by(record, changed(record, edition.version, self.name, publisher))
                return
            edition = replace(edition, roles=[publisher.role])
        maker = self._outbound.known(edition.publisher)
        info = WorkerInfo(edition.worker, edition.publisher) if maker is None else maker.info
        edition = replace(edition, roles=self._roles(edition, publisher, None if compares else record, maker))
        plain = any(map(self.engine.rights.limited, edition.roles))
        self._arrived(ArrivedVersion(edition, bodies, data, plain, view, mapped, info))
        if record != publisher:
            self._outbound.tell(publisher, VersionArrived(self.name, self.number, edition.version))

    def _roles(self, edition: Edition, *named: WorkerRecord | None) -> list[str]:
        """The roles of the workers that a version comes from, for those to whom this worker hands it on.

        The publisher may have gone before this worker came: the worker that hands the version on names its role.
        """
        others = [each.role for each in named if each is not None and each.id != self.engine.id]
        return sorted({*edition.roles, *others})

    def _check(self, edition: Edition, bodies: Sequence[bytes], record: WorkerRecord, publisher: WorkerRecord) -> None:
        """Raise ProtocolError for a version that `record` must not send."""
        if not 1 <= len(bodies) <= 2:
            raise ProtocolError(f"{record.describe()} has sent a version without what it says of its value")
        if edition.version <= self.newest:
            raise ProtocolError(f"{record.describe()} has sent version {edition.version} after {self.newest}")
        own = edition.publisher == publisher.id  # if not: handed on, because its publisher has gone
        names = self._publications.names
        if not own and (record != publisher or names.has_published(publisher, self.name, edition.version)):
            raise ProtocolError(f"{record.describe()} has sent a version of another worker")

    def _lead_by(self, said: AskLeader, publisher: WorkerRecord) -> None:
        """The publisher has named the leader of this host. A leader that hands on nothing for long is passed by."""
        late, self._late = self._late, set()
        for each in late:
            if each.id != said.leader:
                self._end_at(each)
        leader, now = self._publications.leader(self.name, said.leader, publisher), time.monotonic()
        if said.newest <= self.newest or not self._behind_since:
            self._behind_since = now
        elif now - self._behind_since > _MOST_STALLS * self.engine.bounds.stalled and leader.id != self.engine.id:
            self._pass_by(leader, f"{leader.describe()} hands on no version of {self.name!r} for its host")
        if leader in self._passed_by:
            self._maps = False  # so the publisher itself sends the bytes
        else:
            self._leader = leader

    def _pass_by(self, leader: WorkerRecord, reason: str) -> None:
        """Take nothing from a leader any more."""
        if leader not in self._passed_by:
            self._passed_by.add(leader)
            logger.warning("worker %s: %s", self.engine.name, reason)
        self._late.add(leader)
        self._leader = None

    def _follow(self, publisher: WorkerRecord) -> None:
        """Count all versions of a new publisher as newer than the previous publisher's, regardless of their numbers.

        A worker that takes a name over asks all members for their newest version. It does not hear of a version that
        was under way to this worker just then; waiting for a higher number would take long.
        """
        lease = self._publications.names.get(self.name)
        if lease is not None and lease.publisher == publisher.id != self._made_by:
            self.newest = min(self.newest, lease.first - 1)

    def _map(self, edition: Edition, offer: SlotOffer, record: WorkerRecord) -> tuple[SlotView, Bytes] | None:
        """The view of a slot and the bytes of the version in it; None if this worker cannot map it."""
        view = self._views.get(offer.slot)
        try:
            if record.host != self.engine.record.host:
                raise ProtocolError("its memory is on another host, or of another user")
            if view is None or view.nonce != offer.nonce:
                share = self._share()
                if share is None:
                    return None
                view = SlotView(f"/proc/{record.pid}/fd/{offer.fd}", offer.size, offer.nonce, share)
                self._views[offer.slot] = view
            version = edition.version
            data = view.adopt(edition.size, partial(self._on_release, view, version, record))
        except (OSError, ValueError, ProtocolError) as error:
            logger.info("worker %s cannot map what %s publishes: %s", self.engine.name, record.describe(), error)
            return None
        self._lent[view] = version, record
        self._drop_idle(edition.slots)
        return view, data

    def _share(self) -> DescriptorShare | None:
        """A descriptor for one more slot; closes unused slots if there is none. None if there is still none."""
        share = self._descriptors.take()
        if share is None:
            self._views = {number: view for number, view in self._views.items() if view.adopted}
            share = self._descriptors.take()
        if share is None:
            self._descriptors.refused()
        return share

    def _drop_idle(self, there: list[int]) -> None:
        """Unmap idle slots that their owner has freed, and more than `_MOST_IDLE`: mapping keeps their memory."""
        idle = [number for number, view in self._views.items() if not view.adopted]
        for place, number in enumerate(idle):
            if number not in there or place < len(idle) - _MOST_IDLE:
                del self._views[number]

    def _arrived(self, arrival: ArrivedVersion) -> None:
        edition = arrival.edition
        self.came = time.monotonic()
        self.newest, self._made_by, self._size, self._trouble = edition.version, edition.publisher, edition.size, ""
        # The program may write to bytes that came without a slot. A version without bytes is all in its message, which
        # does not change.
        self.kept = arrival if arrival.view is not None or not edition.size else None
        self._behind_since = 0.0
        with self._lock:
            self._ready, self.came = arrival, time.monotonic()
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            wakers, self._wakers = self._wakers, set()
        for wake in wakers:
            wake()

    # --- what is released ---------------------------------------------------------------------------------------------

    def _on_release(self, view: SlotView, version: int, record: WorkerRecord) -> None:
        # Any thread, also inside the garbage collector: takes no lock.
        self._released.append((view, version, record))
        self.engine.call_on_loop(self._give_back)

    def _give_back(self) -> None:
        released: list[tuple[SlotView, int, WorkerRecord]] = []
        while self._released:
            released.append(self._released.popleft())
        if not released:
            return

        def forget() -> None:  # giving pages back takes milliseconds
            for view, _, _ in released:
                view.forget()
            self.engine.call_on_loop(self._tell_released, released)

        self.engine.in_background(forget)

    def _tell_released(self, released: list[tuple[SlotView, int, WorkerRecord]]) -> None:
        for view, _, _ in released:
            if view.stale:  # the program has locked its memory: map the slot anew
                self._views = {number: each for number, each in self._views.items() if each is not view}
        unsaid = [(version, record) for view, version, record in released if self._lent.pop(view, None) is not None]
        if unsaid and not self._unsaid:
            # A message for each version and reader costs a publisher of small versions as much as the copy.
            pause = 0.0 if self.closed or self._size > _LARGE else _PATIENCE
            self._saying = self.engine.loop.call_later(pause, self._say_released)
        self._unsaid += unsaid
        self._look_whether_over()

    def _say_released(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for version, record in unsaid:
            self._outbound.tell(record, VersionsReleased(self.name, self.number, [version]))

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: Exception) -> None:
        """No more versions come, because of `error`. A version that is here can still be taken."""
        self._error = self._error or error.with_traceback(None)
        self._wake()

    def finish(self) -> None:
        """The name was unpublished. A question under way is still answered; then it ends."""
        self._over = True
        if not self._asking:
            if self._task is not None:
                self._task.cancel()
                self._task = None
            self._finished()

    def _finished(self) -> None:
        self.kept, self._views = None, {}
        self.end(StopAsyncIteration())

    def close(self) -> None:
        """Fetch no more, and tell the publisher. What was taken stays valid. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            # The traceback of its error keeps frames, and with them the data that they were about to copy.
            self._task = None
        with self._lock:
            self._ready = None
        self.kept = None
        if self._error is None:
            self._error = StopAsyncIteration()
        self._wake()
        self._views = {}
        if self._source is not None:
            # Do not report released versions as held. If this worker is about to leave, this is its last report, and
            # its process may live on.
            for view in [view for view, (_, record) in self._lent.items() if record == self._source]:
                if not view.adopted:
                    del self._lent[view]
            self._end_at(self._source)
        for late in self._late:
            self._end_at(late)
        lease = self._publications.names.get(self.name)
        publisher = None if lease is None else self._outbound.known(lease.publisher)
        if publisher is not None and publisher != self._source:
            # It counts this subscription as a reader, although another worker fetches for this host.
            self._outbound.tell(publisher, SubscriptionClosed(self.name, self.number, []))
        self._look_whether_over()

    def _end_at(self, source: WorkerRecord) -> None:
        """Tell a worker that the subscription has ended, and which of its versions are still lent."""
        held = [version for version, record in self._lent.values() if record == source]
        self._outbound.tell(source, SubscriptionClosed(self.name, self.number, held))

    def let_go(self) -> None:
        """The worker ends: report no more releases."""
        for view in self._lent:
            view.let_go()
        self._lent.clear()
        self._released.clear()

    def _look_whether_over(self) -> None:
        if self.closed and not self._lent:
            self._publications.prefetcher_ended(self)


def _bytes_of(data: tuple[object, ...] | list[object], size: int) -> Bytes:
    """The bytes that came with an answer. Raises ProtocolError if there are not `size` of them."""
    if not data and not size:
        return numpy.empty(0, numpy.uint8)
    if len(data) != 1 or type(data[0]) is not torch.Tensor or data[0].dtype is not torch.uint8:
        raise ProtocolError("a version without its bytes")
    if data[0].shape != (size,) or not data[0].is_contiguous() or not data[0].is_cpu:
        raise ProtocolError(f"a version of {size} bytes that has {data[0].shape}")
    array: Bytes = data[0].numpy()
    return array
