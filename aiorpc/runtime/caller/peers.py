"""The workers that one worker knows, itself among them: found by name, id or record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol
from weakref import WeakValueDictionary

from ...errors import (
    PeerLeft,
    PeerLost,
    PeerRefused,
    RendezvousError,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    StoreGone,
    UnknownWorker,
)
from ...locks import Lock
from ...protocol.identity import WorkerInfo, WorkerRecord, check_name
from ...protocol.states import PeerState
from ..engine.deadlines import Deadlines
from ..meeting.rendezvous import Rendezvous
from .addressee import PeerContext
from .misuse import no_worker
from .peer import Peer

To = str | int | WorkerInfo

#: Peers kept for names without a worker and without waiting calls.
UNMET = 128


class GroupForPeers(Protocol):
    """The group (`Group`), for finding workers."""

    def live(self) -> list[WorkerRecord]: ...

    def is_gone(self, record: WorkerRecord) -> bool: ...

    def on_joined(self, record: WorkerRecord) -> None: ...


class PeersContext(PeerContext, Protocol):
    """The worker, as its peers need it."""

    rendezvous: Rendezvous

    @property
    def group(self) -> GroupForPeers: ...

    def on_unknown(self, worker_id: int) -> None:
        """No member of the group has that id. On the loop."""


class Peers:
    """The peers of one worker, itself among them. In a free group a peer may be here before its worker has joined.

    Any thread, unless a method says otherwise. A peer is entered under its id and its name. Entries are made under the
    lock and read without it.

    A name without a worker has a peer, too: it knows when the name was called first, and its former worker. While calls
    wait for it (CONNECTING) it stays. Otherwise it is in `_resting`, which drops its oldest peers, because programs may
    ask for any number of names. A thread may have found such a peer just before, and call it: `_let_go` holds it
    weakly, for its deadlines, and `locate` enters it again.

    In a free group a member that this worker has not called has no peer, only its record, in `_noted`.

    In a group of fixed size only the record and the error of a replaced worker are kept, in `_replaced`: references may
    still name it, and calls to it end with the error.
    """

    def __init__(self, home: PeersContext) -> None:
        self._home = home
        self._engine = home.engine
        self._dynamic = home.rendezvous.dynamic
        self._deadlines = Deadlines(home.engine.loop, self._scan_deadlines)
        self._peers: dict[str | int, Peer] = {}
        self._ranks: dict[int, int] = {}  # in a group of fixed size: the id of the latest worker of each rank
        self._resting: dict[Peer, None] = {}  # peers of names without a worker, oldest first
        self._let_go: WeakValueDictionary[int, Peer] = WeakValueDictionary()  # by ``id(peer)``
        self._noted: dict[str | int, WorkerRecord] = {}  # by id and by name
        self._replaced: dict[int, tuple[WorkerRecord, RpcError]] = {}
        self._lock = Lock()
        self._next_look: asyncio.Task[list[WorkerRecord]] | None = None  # not begun yet
        self._last_look: asyncio.Task[list[WorkerRecord]] | None = None
        self._searches: dict[Peer, asyncio.Event] = {}  # set when its worker became known in another way

    def all(self) -> set[Peer]:
        """Every peer once."""
        peers = set(self._peers.values())
        if self._let_go:
            peers.update(peer for each in self._let_go.valuerefs() if (peer := each()) is not None)
        return peers

    def _make(self, name: str, record: WorkerRecord | None, former: Peer | None = None) -> Peer:
        return Peer(self._home, self._deadlines, name, record, former)

    def _scan_deadlines(self, now: float) -> float:
        """End the calls whose deadline has passed; the earliest deadline of the rest, or infinity. On the loop."""
        return min((peer.pending.scan_deadlines(now) for peer in self.all()), default=float("inf"))

    def close(self) -> None:
        """This worker leaves: say goodbye to all peers, and end the calls that are still pending. On the loop."""
        self._deadlines.close()
        for peer in self.all():
            peer.close()

    def find(self, to: To) -> Peer:
        """The peer of that name, id or WorkerInfo. UnknownWorker if the group cannot have it."""
        known = self._peers.get(to) if type(to) is str else None
        return known if known is not None and known.gone is None else self._find(to)

    def _find(self, to: To) -> Peer:
        """As `find`, for all keys but the names of known peers."""
        number = _number_in(to.name) if isinstance(to, WorkerInfo) else None
        if number is not None:  # from `info` of a worker without a known name
            return self.by_id(number)
        key: str | int = to if type(to) is str else to.name if isinstance(to, WorkerInfo) else to
        at = (
            self._ranks.get(key, -1) if isinstance(key, int) and not self._dynamic else key
        )  # the place, not the worker
        peer = self._peers.get(at) if _is_key(key) else None  # another object may not be hashable
        if peer is not None and (peer.gone is None or not self._dynamic or self._engine.closed):
            return peer
        if peer is None and self._dynamic and _is_key(key) and (noted := self._noted.get(key)) is not None:
            return self.add(noted)
        self._engine.lifetime.check_open()
        if not _is_key(key):
            raise RpcUsageError(no_worker(to))
        if not self._dynamic or not isinstance(key, str):
            raise UnknownWorker(f"could not find destination worker {to!r}; the group has {self._names()}")
        with self._lock:
            peer = self._peers.get(key)
            if peer is None and (noted := self._noted.get(key)) is not None:
                return self._enter(noted)
            if peer is None or peer.gone is not None:
                peer = self._peers[key] = self._make(check_name(key), None, _last_holder(peer))
                self._rest(peer)
            return peer

    def _rest(self, peer: Peer) -> None:
        """No call waits for the worker of that name now. Drops the oldest of too many such peers. Under the lock."""
        self._resting[peer] = None
        while len(self._resting) > UNMET:
            oldest = next(iter(self._resting))
            del self._resting[oldest]
            if oldest.record is not None or oldest.state is PeerState.CONNECTING or oldest.pending.calls:
                continue  # in use, or it comes here again
            if self._peers.get(oldest.name) is not oldest:
                continue
            self._let_go[id(oldest)] = oldest  # first: `all` must find it at all times
            former = oldest.former
            if former is not None and former.record is not None and self._peers.get(former.record.id) is former:
                self._peers[oldest.name] = former
            else:
                del self._peers[oldest.name]

    def of(self, record: WorkerRecord) -> Peer:
        """The peer of a record that a worker proved or the rendezvous gave."""
        peer = self._peers.get(record.id)
        return peer if peer is not None else self.add(record)

    def by_id(self, worker_id: int) -> Peer:
        """The peer with that id; in a group of fixed size a gone peer, if there is no such member.

        In a free group an unknown worker is looked for at the first use.
        """
        peer = self._peers.get(worker_id)
        if peer is not None and (peer.gone is None or peer.record is not None or self._engine.closed):
            return peer
        if not self._dynamic:
            replaced = self._replaced.get(worker_id)
            if replaced is not None:
                return self._make_gone(*replaced)
            peer = self._make(_name_of(worker_id), None)  # not kept: invented ids must not fill our memory
            peer.fail(_no_member(worker_id))
            return peer
        with self._lock:
            peer = self._peers.get(worker_id)
            if peer is None and (noted := self._noted.get(worker_id)) is not None:
                return self._enter(noted)
            if peer is None or _was_not_found(peer):
                peer = self._peers[worker_id] = self._make(_name_of(worker_id), None)
            return peer

    def note(self, record: WorkerRecord) -> None:
        """A member is known. In a free group, which may be large, it gets a peer with the first use."""
        with self._lock:
            if self._dynamic and record.id not in self._peers and record.name not in self._peers:
                self._noted[record.id] = self._noted[record.name] = record
                return
        self.add(record)

    def add(self, record: WorkerRecord) -> Peer:
        """The peer of a record, entered under its id and, unless another worker of that name lives, its name."""
        replaced = self._replaced.get(record.id)
        if replaced is not None:
            return self._make_gone(*replaced)
        with self._lock:
            peer = self._enter(record)
        search = self._searches.get(peer)
        if search is not None:
            self._engine.call_on_loop(search.set)
        return peer

    def _enter(self, record: WorkerRecord) -> Peer:
        """As `add`, under the lock."""
        self._drop_note(record)
        peer = self._peers.get(record.id)
        if peer is None or _was_not_found(peer):
            waiting = self._peers.get(record.name)
            unknown = waiting is not None and waiting.record is None and waiting.gone is None
            peer = waiting if waiting is not None and unknown else self._make(record.name, record)
        if peer.record is None:
            peer.identify(record)
            self._resting.pop(peer, None)
        peer.rename(record.name)
        self._peers[record.id] = peer
        if not self._dynamic:
            before = self._ranks.get(record.rank, -1)
            self._ranks[record.rank] = max(record.id, before)
        named = self._peers.get(record.name)
        if self._gives_way(named, record):
            if named is not None and named is not peer and named.gone is None:
                self._peers[_name_of(record.id)] = named  # keeps its calls in `all`
            self._peers[record.name] = peer
        if not self._dynamic:
            self._reduce(before)
        return peer

    def _drop_note(self, record: WorkerRecord) -> None:
        for key in (record.id, record.name):
            noted = self._noted.get(key)
            if noted is not None and noted.id == record.id:
                del self._noted[key]

    def forget(self, record: WorkerRecord) -> None:
        """Drop a worker of a free group that has been gone for long, with its error."""
        with self._lock:
            self._drop_note(record)
            peer = self._peers.get(record.id)
            for key in (record.id, record.name, _name_of(record.id)):
                if self._peers.get(key) is not peer:
                    continue
                self._peers.pop(key, None)

    def on_gone(self, record: WorkerRecord) -> None:
        """A worker's peer is gone; it may have been replaced before this was known."""
        with self._lock:
            self._reduce(record.id)

    def _reduce(self, worker_id: int) -> None:
        """Keep only the record and the error of a worker that is gone and replaced. Under the lock."""
        peer = self._peers.get(worker_id)
        if self._dynamic or peer is None or peer.record is None or peer.gone is None:
            return
        if self._ranks.get(peer.record.rank) == worker_id:
            return
        error: BaseException | None = peer.gone
        while error is not None:  # its frames hold the peer
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
        self._replaced[worker_id] = peer.record, peer.gone  # first: look-ups go there next
        for key in (worker_id, peer.name, _name_of(worker_id)):
            if self._peers.get(key) is peer:
                del self._peers[key]

    def _make_gone(self, record: WorkerRecord, error: RpcError) -> Peer:
        peer = self._make(record.name, record)
        peer.fail(error)
        return peer

    def _gives_way(self, named: Peer | None, record: WorkerRecord) -> bool:
        """Whether a name now leads to the worker of that record instead of the peer `named`."""
        if named is None or named.gone is not None or named.record is None:
            return True
        return not self._dynamic and named.record.id < record.id  # it has taken that place

    def id_of(self, peer: Peer) -> int:
        """The id of a peer, for a reference. UnknownWorker if it has not joined yet.

        If the last worker of that name is gone, it raises the error of a call to the name.
        """
        number = self._known_id(peer)
        if number is None:
            raise UnknownWorker(
                f"worker {peer.name!r} has not joined yet, and a call that makes or passes a reference does not wait "
                "for it, as the reference names the worker that has it. Nothing was sent; wait first: "
                f"`await rpc.wait_for({peer.name!r})`"
            )
        return number

    def info_of(self, peer: Peer) -> WorkerInfo:
        """Name and rank of a peer. Raises as `id_of` does."""
        return self.info(self.number_of(peer))

    def number_of(self, peer: Peer) -> int:
        """The id of a peer, which differs from its rank after a replacement. Raises as `id_of` does."""
        number = self._known_id(peer)
        if number is None:
            raise UnknownWorker(
                f"worker {peer.name!r} has not joined yet, as far as worker {self._engine.name!r} and the store know; "
                f"the group has {self._names()}. To wait until it comes: `await rpc.wait_for({peer.name!r})`"
            )
        return number

    def _known_id(self, peer: Peer) -> int | None:
        """The id of a peer, from the store if need be; None if it has not joined yet. Raises as `id_of` if it is
        gone."""
        number = _number_in(peer.name)
        if number is not None:
            return number
        silent: StoreGone | None = None
        if peer.record is None and self._dynamic:
            record = None
            try:
                record = self._home.rendezvous.find(peer.name, self._engine.bounds.look)
            except StoreGone as error:
                silent = error
            if record is not None and not self._home.group.is_gone(record):
                self._adopt(peer, record)
        if peer.record is None:
            if peer.former is not None or silent is not None:
                raise self._absent(peer, silent)
            return None
        return peer.record.id

    def info(self, worker_id: int) -> WorkerInfo:
        """Name and id of a worker of the group."""
        peer = self.by_id(worker_id)
        return peer.record.info if peer.record is not None else WorkerInfo(peer.name, worker_id)

    def describe(self, worker_id: int) -> str:
        """The name of a worker, for errors and reports; its id as text if the name is not known."""
        peer = self._peers.get(worker_id)
        if peer is not None:
            return peer.name
        noted, replaced = self._noted.get(worker_id), self._replaced.get(worker_id)
        if noted is not None:
            return noted.name
        return replaced[0].name if replaced is not None else _name_of(worker_id)

    async def locate(self, peer: Peer) -> WorkerRecord | None:
        """The record of a peer. Searches until the worker joins; None once no message waits for it. On the loop."""
        self._searches[peer] = met = asyncio.Event()
        by_name = _number_in(peer.name) is None
        if by_name and peer.record is None:
            with self._lock:
                self._resting.pop(peer, None)
                self._peers.setdefault(peer.name, peer)  # it may have been dropped
        try:
            return await self._search(peer, met)
        finally:
            del self._searches[peer]
            if by_name and peer.record is None:
                with self._lock:
                    self._rest(peer)

    async def _search(self, peer: Peer, met: asyncio.Event) -> WorkerRecord | None:
        pause = 0.01
        while peer.record is None:
            number = _number_in(peer.name)
            asked, silent = time.monotonic(), None
            try:
                records = await self._look_until(met)
            except StoreGone as error:
                if number is not None:
                    raise
                records, silent = [], error  # the store may come back, and workers become known without it
            if met.is_set():
                break
            for record in records:
                if self._home.group.is_gone(record):
                    continue
                if record.name == peer.name or record.id == number:
                    self._adopt(peer, record)
                    self._home.group.on_joined(record)
                    break
            else:
                if number is not None:  # the store has an id before any worker knows it
                    with self._lock:
                        if self._peers.get(number) is peer:
                            del self._peers[number]
                    self._home.on_unknown(number)
                    raise _no_member(number)
                grace = peer.made + self._engine.options.newcomer_grace - time.monotonic()
                if peer.former is not None or silent is not None or grace <= 0:
                    peer.turn_away(asked, lambda: self._absent(peer, silent))  # noqa: B023  # called at once
                if peer.rest():
                    return None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(pause, grace) if grace > 0 else pause):
                        await met.wait()
                pause = min(2 * pause, 0.5)
        return peer.record

    def not_come(self, peer: Peer, error: BaseException | None) -> BaseException | None:
        """The error of `wait_for`, made of the error of its call."""
        if not isinstance(error, RpcTimeout):
            return error
        within, former, record = f"within {error.seconds:g} s", peer.former, peer.record
        if record is None:
            text = f"worker {peer.name!r} has not joined {within}"
            if former is not None and former.gone is not None:
                text += f"; of its predecessor of that name: {former.gone}"
        elif peer.state is PeerState.CONNECTING:
            text = f"{record.describe()} has joined, and could not be connected to {within}"
        else:
            why = "" if error.late else ": busy, stopped or cut off"
            text = f"{record.describe()} has joined, and has not answered {within}{why}"
        if error.late:
            text += f". {error.late}"
        return RpcTimeout(text, worker=peer.name, function="wait_for", seconds=error.seconds)

    def _absent(self, peer: Peer, silent: StoreGone | None) -> RpcError:
        """The error of a call to a name without a worker. silent: why the store cannot tell."""
        name, engine = peer.name, self._engine
        advice = f"Nothing was sent. To wait until it comes: `await rpc.wait_for({name!r})`, or `peer(..., wait=True)`"
        unseen = "no other worker of that name has joined since"
        if silent is not None:
            unseen = f"whether another one of that name has joined since is not known: {silent}"
        former = peer.former
        if former is not None and former.gone is not None:
            since = f". That was {time.monotonic() - former.ended:.1f} s ago, and {unseen}. {advice}"
            error = type(former.gone)(f"{former.gone}{'' if isinstance(former.gone, PeerRefused) else since}")
            error.__dict__.update(former.gone.__dict__)
            return error
        if silent is not None:
            return RendezvousError(f"worker {engine.name!r} cannot find {name!r}: {silent}. {advice}")
        return UnknownWorker(
            f"no worker {name!r} that this worker knows of was ever in this group, which has {self._names()}; a name "
            f"is waited for {engine.options.newcomer_grace:g} s after the first call to it (newcomer_grace). {advice}"
        )

    def _names(self) -> str:
        """The names in the group now, for errors."""
        return ", ".join(sorted(record.name for record in self._home.group.live()))

    async def _look(self) -> list[WorkerRecord]:
        """The members in the store's list; requests share one look, which begins after them."""
        if self._next_look is None:
            self._next_look = self._engine.tasks.spawn(self._read_members(self._last_look))
        return await asyncio.shield(self._next_look)

    async def _look_until(self, met: asyncio.Event) -> list[WorkerRecord]:
        """As `_look`; an empty list once `met` is set, because the store may be silent for long."""
        look = self._engine.tasks.spawn(self._look())
        try:
            await self._engine.tasks.done_or_set(look, met)
            return look.result() if look.done() else []
        finally:
            look.cancel()

    async def _read_members(self, before: asyncio.Task[list[WorkerRecord]] | None) -> list[WorkerRecord]:
        if before is not None:
            await asyncio.wait([before])
        self._last_look, self._next_look = self._next_look, None  # later requests need another look
        return await self._engine.steps.run(self._home.rendezvous.members)

    def _adopt(self, peer: Peer, record: WorkerRecord) -> None:
        with self._lock:
            self._drop_note(record)
            peer.identify(record)
            self._peers.setdefault(record.id, peer)
            self._resting.pop(peer, None)


def _name_of(worker_id: int) -> str:
    """The name of a worker with an unknown name, made of its id; no worker has such a name."""
    return f"#{worker_id}"


def _number_in(name: str) -> int | None:
    """The inverse of `_name_of`; None for the name of a worker."""
    return int(name[1:]) if name.startswith("#") and name[1:].isdecimal() else None


def _was_not_found(peer: Peer) -> bool:
    """Whether that peer ended before its worker was known, as when the store was silent.

    It is replaced once that worker is known, or searched again.
    """
    return peer.gone is not None and peer.record is None


def _last_holder(peer: Peer | None) -> Peer | None:
    """The last ended peer of this name, if any: the given peer or its former one."""
    if peer is None or isinstance(peer.gone, (PeerLost, PeerLeft, PeerRefused)):
        return peer
    return peer.former


def _no_member(worker_id: int) -> UnknownWorker:
    return UnknownWorker(
        f"there is no worker {worker_id} in the group: the id is wrong, or its worker has left; drop the reference "
        "with that id"
    )


def _is_key(key: object) -> bool:
    """Whether it can name a worker: 1.0 and True are equal to 1, and would find its entry."""
    return isinstance(key, (str, int)) and not isinstance(key, bool)
