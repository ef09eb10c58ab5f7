"""The references of one worker: the values that it owns, and its side of counting the handles.

`protocol.references.ReferenceTable` decides which worker holds which value; docs/inside/counting.md has its guarantees.
This module keeps the values, reports events to the table, and carries out its outputs.

Invariants
1. The table is used under `_lock` only. What it sends is queued under the same lock, so that messages leave in the
   order in which the table has decided on them.
2. A handle may die anywhere, inside of any lock and of the garbage collector. So the callback of its weak reference
   (`_on_death`) takes no lock: it appends to a deque and wakes the loop, which looks by itself as long as it finds
   something (`_look`).
3. A value is dropped outside of the lock, because its destructor is code of the user.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

from ... import foreign
from ..._typing import Function, T
from ...errors import Overloaded, ProtocolError, RpcError, RpcUsageError, WorkerClosed
from ...futures import Future
from ...locks import Lock
from ...protocol import codec
from ...protocol.frames import Kind
from ...protocol.messages import Method, ObjectMethod
from ...protocol.packing import pack
from ...protocol.reference_messages import (
    LENT,
    MESSAGES,
    Broken,
    Confirmed,
    Counts,
    Free,
    Message,
    Output,
    Outputs,
    PassedReference,
    ReferenceId,
    Role,
    Send,
    all_lent,
    fork_of_creator,
)
from ...protocol.references import ReferenceTable
from ...sites import describe_site
from ...undoing import on_error
from ..calls.current import ServedCall
from ..calls.failures import came_from_afar
from ..calls.options import CallOptions
from ..engine.engine import Engine
from ..engine.looking import Looking
from ..links.accelerators import Accelerators
from .rref import PeerForRRef, PeersForReferences, RRef, WorkerForReferences

# Seconds for which the table's messages wait when a call with references arrives, or handles die, to leave together.
# Sent one by one, they would wake up the loops of both workers in the middle of that call or the next. They must not
# wait longer: a group that leaves would count unreported references as held.
_FLUSH_PAUSE = 0.001

#: A value without holders, and, if it was never created, the reason.
_Freed = tuple[Future[object], str]
_NO_CREATOR = "its creator is gone or gave up"


@dataclass(frozen=True)
class LeakedReference:
    """A reference that was still alive at shutdown.

    reference: its id, as the logs have it. role: "owner" for an RRef here of a value here, "user" for an RRef here of
    a value elsewhere, "fork" for an RRef on another worker of a value here. owner: the worker that has the value. type:
    of the value, "?" if it is not here. made_at: where the RRef was made, "?" if not known.
    """

    reference: str
    role: str
    owner: str
    type: str
    made_at: str


class _ValueFuture(Future[object]):
    """The Future of the value of a reference. Its waiters do not own it, so they cannot cancel it.

    Each waiter gets a copy of the error: the original lives as long as a handle of the reference, and the frames in its
    traceback usually hold such a handle.
    """

    def cancel(self, msg: object = None) -> bool:
        return False

    def _outcome(self) -> object:
        copied = None if self._error is None else foreign.copy_of(self._error)
        if copied is None:
            return super()._outcome()
        self._mark_seen()
        raise foreign.with_traceback(copied, self._trace)


class _Watched(ref["RRef[object]"]):
    """A weak reference to a counted handle. rref, fork: the ids of the handle, valid after its death."""

    __slots__ = ("fork", "rref")

    rref: ReferenceId
    fork: ReferenceId


class References:
    """All references of one worker."""

    def __init__(
        self,
        worker: WorkerForReferences,
        accelerators: Accelerators,
        handle_class: type[RRef[Any]] = RRef,
        *,
        members: set[int] | None = None,
    ) -> None:
        """handle_class: the class of received handles, and of results of `remote`.

        members: the possible ids of workers of the group; None if others may join.
        """
        self.engine: Engine = worker.engine
        self.handle_class = handle_class
        self.worker = worker
        self._accelerators = accelerators
        self._most = worker.engine.options.max_references
        self._members = members
        self._table = ReferenceTable(worker.engine.id, members=members, most=self._most)
        self._lock = Lock()
        self._values: dict[ReferenceId, Future[Any]] = {}
        # By creator: ids in `_values` that it asked for before its creating call arrived; the table does not know them
        # yet.
        self._early: dict[int, set[ReferenceId]] = {}
        self._unknown: set[int] = set()
        self._handles: dict[ReferenceId, _Watched] = {}
        self._died: deque[_Watched] = deque()
        self._looking = Looking(self.engine, self._look, lambda: _FLUSH_PAUSE)
        self._unsaid: set[PeerForRRef] = set()  # peers with messages that leave with the next `flush`
        self.closed: bool = False

    # --- making handles -----------------------------------------------------------------------------------------------

    @property
    def peers(self) -> PeersForReferences:
        """The peers of this worker."""
        return self.worker.peers

    def own(self, value: object, handle: RRef[object]) -> tuple[ReferenceId, ReferenceId]:
        """A new reference to a value of this worker. handle: its first handle, not bound yet."""
        future = self._new_value()
        future._arrival = self._accelerators.arrival(value)
        future._settle(value)
        with self._lock:
            rref, fork = self._table.own()
            self._values[rref] = future
            self._watch(handle, rref, fork)
        return rref, fork

    def _watch(self, handle: RRef[object], rref: ReferenceId, fork: ReferenceId) -> None:
        """Count a handle until it dies. Under the lock."""
        watched = self._handles[fork] = _Watched(handle, self._on_death)
        watched.rref, watched.fork = rref, fork

    def refer_to(self, value: T, depth: int = 1) -> RRef[T]:
        """A handle of a new reference to a value of this worker. depth: of the frame that makes it. Any thread."""
        handle: RRef[T] = self.handle_class.__new__(self.handle_class)
        rref, fork = self.own(value, handle)
        handle._bind(self, rref, fork, self.engine.id, sys._getframe(depth))
        return handle

    def handles(self) -> dict[ReferenceId, RRef[object]]:
        """The handles that are alive, by their forks."""
        watched = self._handles.copy().items()
        return {fork: handle for fork, each in watched if (handle := each()) is not None}

    def create(
        self,
        peer: PeerForRRef,
        function: Function | Method | ObjectMethod,
        args: Sequence[object],
        kwargs: dict[str, object] | None,
        timeout: float,
        *,
        depth: int,
        keeps: object = None,
    ) -> RRef[object]:
        """An RRef of the result of a call on `peer`; returns at once. keeps: as of `Peer.call`.

        Raises SerializationError, with nothing sent.
        """
        owner = self.worker.peers.id_of(peer)
        self._tell_first()
        handle = self.handle_class.__new__(self.handle_class)
        with self._lock:
            rref, fork = self._table.create(owner)
            self._watch(handle, rref, fork)
        handle._bind(self, rref, fork, owner, sys._getframe(depth))
        handle._confirmed = False
        with on_error(self._run, self._table.create_failed_to_send, rref, fork):
            options = CallOptions(creates=rref, keeps=keeps)
            call = peer.call(function, args, kwargs, timeout, depth=depth + 1, options=options)
        handle._creation = call
        call._when_settled(partial(self._on_created, rref, fork))
        return handle

    def _on_created(self, rref: ReferenceId, fork: ReferenceId, future: Future[object]) -> None:
        """The call that creates a value has its answer, maybe after the death of its handle."""
        error = future._error
        if error is None:
            self._run(self._table.created, rref, fork)
            return
        if came_from_afar(error):
            # The owner keeps the error as the value; other holders can fetch it.
            self._run(self._table.created, rref, fork)
        else:
            reason = foreign.text_of(error)
            unsent = getattr(future, "unsent", False)  # if it was sent, the call may still arrive
            self._run(lambda: self._table.creation_failed(rref, fork, reason, answered=unsent))
            self.end_waits(rref, future)

    def end_waits(self, rref: ReferenceId, creation: Future[object]) -> None:
        """The creation of a value has failed here: fail this worker's calls to the value.

        The owner may never answer them, and they may have no timeout. Any thread.
        """
        error, peer = creation._error, getattr(creation, "peer", None)
        if peer is not None and error is not None and issubclass(type(error), RpcError) and not came_from_afar(error):
            peer.pending.fail_calls_of(rref, error)

    def load(self, passed: Sequence[PassedReference], sender: int) -> list[RRef[Any]]:
        """Handles of the references in a message from `sender`."""
        self._tell_first()
        handles = []
        for each in passed:
            if each.fork == LENT:
                handles.append(self._load_lent(each, sender))
                continue
            handle = self.handle_class.__new__(self.handle_class)
            handle._bind(self, each.rref, each.fork, each.owner)
            with self._lock:
                outputs = self._table.decode(each, sender)
                self._watch(handle, each.rref, each.fork)
                freed = self._carry_out(outputs)
            self._release(freed)
            handles.append(handle)
        return handles

    def _load_lent(self, passed: PassedReference, sender: int) -> RRef[object]:
        """A handle of a value here that the sender keeps until its call has ended.

        It is not counted, because it has the value. A handle of a value that does not exist yet is counted. If the
        sender has given up the call, the value may be gone; the handle then names nothing.
        """
        rref, owner, _, _ = passed
        if owner != self.engine.id:
            raise ProtocolError(f"worker {sender} lends {rref} to another worker than its owner")
        handle = self.handle_class.__new__(self.handle_class)
        handle._bind(self, rref, LENT, owner)
        value = self._values.get(rref)
        if value is not None and value.done():
            handle._lent = value
        else:
            with suppress(RpcUsageError):
                self.count(handle)
        return handle

    def count(self, handle: RRef[object]) -> None:
        """Count a lent handle from now on. Any thread. Raises RpcUsageError if its value is gone."""
        with self._lock:
            if handle._fork == LENT:
                lent, rref = handle._lent, handle._rref
                if lent is None or self._values.get(rref) is lent:
                    _, fork = self._table.own(rref)
                else:  # all counted handles have died
                    handle._rref, fork = self._table.own()
                    self._values[handle._rref] = lent
                self._watch(handle, handle._rref, fork)
                handle._fork = fork

    def encode(self, handle: RRef[object], out: codec.Outgoing, position: int | None = None) -> int:
        """Put a handle into a message to the worker `out.target`; returns its number among those of the message.

        position: the place of the handle among the values, if it is a value itself and not inside of one. Raises
        RpcUsageError if another worker of this process sends the message.
        """
        sender = getattr(out.target, "engine", None)
        if sender is not self.engine:  # the receiver refuses a fork of another worker
            raise self._not_to_be_sent(sender)
        to = self.worker.peers.id_of(out.target)
        handle._ask()  # from now on the receiver may use it
        if handle._fork == LENT:
            self.count(handle)
        if out.lent is not None and handle._owner == to and handle._confirmed and handle._broken is None:
            out.lent.append(handle)
            out.references.append(PassedReference(handle._rref, to, LENT, position))
            return len(out.references) - 1
        with self._lock:
            try:
                passed, outputs = self._table.encode(handle._rref, handle._fork, to, position)
            except RpcUsageError:
                handle._check()
                raise
            out.on_unsent.append(partial(self._run, self._table.unsend, passed.fork))
            freed = self._carry_out(outputs)
        self._release(freed)
        out.references.append(passed)
        return len(out.references) - 1

    def _not_to_be_sent(self, sender: Engine | None) -> RpcUsageError:
        if sender is None:
            return RpcUsageError("a reference is sent to one worker, which is counted as a holder, and not published")
        lifetime = self.engine.lifetime
        why = lifetime.why_closed() if lifetime.closed else f"only {lifetime.name!r} can, as it counts the holders"
        return RpcUsageError(f"worker {sender.name!r} cannot pass on a reference of another worker: {why}")

    # --- values, on the owner -----------------------------------------------------------------------------------------

    def value(self, worker: int, number: int, key: int, asker: int = -1) -> Future[Any]:
        """The Future of a value of this worker, even before the creating call has arrived.

        asker: the worker that wants it. If it is the creator, which holds a reference, the value cannot have been
        freed: the creating call is still on its way, overtaken because its arguments are large.
        """
        rref = ReferenceId(worker, number, key)
        with self._lock:
            future = self._values.get(rref)
            if future is None:
                future = self._new_value()
                if self.closed:  # nothing would settle it any more
                    future._settle(None, WorkerClosed(self._shut_down()))
                elif self._table.holds(rref):
                    self._values[rref] = future
                elif (refusal := self._table.refusal(rref)) is not None:
                    future._settle(None, RpcError(f"the value was never created: {refusal}"))
                elif worker == asker and asker != self.engine.id:
                    early = self._early.setdefault(asker, set())
                    if len(early) >= self._most:
                        future._settle(None, Overloaded(f"worker {asker} waits for too many values (max_references)"))
                    else:
                        self._values[rref] = future
                        early.add(rref)
                else:
                    gone = f"reference {rref} names no value of this worker; it was freed"
                    future._settle(None, RpcError(gone))
        return future

    def _new_value(self) -> Future[object]:
        future: Future[object] = _ValueFuture()
        future._loop, future._home_thread = self.engine.loop, self.engine.thread
        future._subject = "the value of a reference"
        future._executor = self.engine.pool
        return future

    def on_create(self, creates: Sequence[int], sender: int, call: ServedCall) -> None:
        """A call that creates a reference arrived; its result will be the value. On the loop."""
        rref = ReferenceId(*creates)
        with self._lock:
            outputs = self._table.on_create(rref, fork_of_creator(rref), sender)
            if rref not in self._values:
                self._values[rref] = self._new_value()
            elif sender in self._early:
                self._early[sender].discard(rref)
            call.creates = rref
            freed = self._carry_out(outputs)
        self._release(freed)

    def settle_created(self, call: ServedCall, result: object, error: BaseException | None = None) -> None:
        """Settle the value of the reference that a call creates, if it creates one. Any thread."""
        future = self._values.get(call.creates) if call.creates is not None else None
        if future is not None:
            if error is None:  # other handlers, on other streams, use what this one has put on a device
                try:
                    future._arrival = self._accelerators.arrival(result)
                except BaseException as broken:  # of a user's container
                    result, error = None, broken
            future._settle(result, error)

    # --- the table's outputs ------------------------------------------------------------------------------------------

    def on_message(self, sender: int, message: Message) -> None:
        """A message of reference counting arrived; on the loop. Raises ProtocolError."""
        self._run(self._table.on_message, sender, message)

    def admit(self, worker_id: int) -> None:
        """A worker has joined the group."""
        if self._members is not None:
            self._members.add(worker_id)

    def on_gone(self, worker_id: int, lost: bool) -> None:
        """A worker died, or left."""
        self._run(self._table.lost if lost else self._table.left, worker_id)
        with self._lock:
            early = [self._values.pop(rref, None) for rref in self._early.pop(worker_id, ())]
        self._release([(value, _NO_CREATOR) for value in early if value is not None])

    def forget(self, worker_id: int) -> None:
        """A worker has been gone for long: its id is unknown from now on."""
        with self._lock:
            self._table.forget(worker_id)

    def on_unknown(self, worker_id: int) -> None:
        """No worker of the group has that id. On the loop."""
        if not self._unknown:  # the first of many that are handled together
            self.engine.call_on_loop(self._on_unknown)
        self._unknown.add(worker_id)

    def _on_unknown(self) -> None:
        unknown, self._unknown = self._unknown, set()
        self._run(self._table.unknown, unknown)

    def end(self, handle: RRef[object]) -> None:
        """A live handle gives up its value. Any thread."""
        self._handles.pop(handle._fork, None)
        self._run(self._table.drop, handle._rref, handle._fork)

    def _on_death(self, watched: _Watched) -> None:
        """A handle has died, anywhere: the loop tells the table."""
        if not self.closed:
            self._died.append(watched)
            self._looking.ask()

    def _look(self) -> float | None:
        if not (self._died or self._unsaid):
            return None
        self.flush()
        return _FLUSH_PAUSE

    def coming(self, passed: Sequence[PassedReference]) -> None:
        """A call with references has arrived: messages about them leave together a little later. On the loop."""
        if not all_lent(passed):
            self._looking.begin()

    def flush(self) -> None:
        """Report dead handles to the table, and send kept messages. On the loop."""
        with self._lock:
            unsaid, self._unsaid = self._unsaid, set()
        for peer in unsaid:
            peer.flush()
        self._tell_died()

    def _tell_first(self) -> None:
        """Report dead handles before making new ones; otherwise owners would count both, perhaps above their limit. The
        messages leave with the next one. Any thread.
        """
        if not self._died or self.closed:
            return
        self._tell_died(later=True)

    def _tell_died(self, *, later: bool = False) -> None:
        while True:
            try:
                watched = self._died.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            self._handles.pop(watched.fork, None)
            with self._lock:
                freed = self._carry_out(self._table.drop(watched.rref, watched.fork), later=later)
            self._release(freed)

    def _run(self, event: Callable[..., Outputs], *args: object) -> None:
        with self._lock:
            freed = self._carry_out(event(*args))
        self._release(freed)

    def _carry_out(self, outputs: Sequence[Output], *, later: bool = False) -> list[_Freed]:
        """Carry out the table's outputs, under the lock. later: messages leave with the next one, or `flush`.

        Returns the values without holders; the caller drops them after releasing the lock.
        """
        freed = []
        for output in outputs:
            if isinstance(output, Send):
                peer = self.worker.peers.by_id(output.to)
                later = later or self._looking.near
                peer.send(Kind.REFERENCE, 0, pack(MESSAGES.write(output.message)), later=later)
                if later:
                    self._unsaid.add(peer)
                    self._looking.ask()
            elif isinstance(output, Free):
                value = self._values.pop(output.rref, None)
                if value is not None:
                    why = self._table.refusal(output.rref) or _NO_CREATOR
                    freed.append((value, why))
                early = self._early.get(output.rref.worker)
                if early is not None:  # its creator asked for it, then gave it up
                    early.discard(output.rref)
            else:
                self._tell(output)
        return freed

    def _release(self, freed: list[_Freed]) -> None:
        """Drop values, outside of the lock: that runs users' code."""
        for value, why in freed:
            value._settle(None, RpcError(f"the value was never created: {why}"))

    def _tell(self, output: Confirmed | Broken) -> None:
        watched = self._handles.get(output.fork)
        handle = None if watched is None else watched()
        if handle is None:
            return
        if isinstance(output, Confirmed):
            handle._confirmed = True
        else:
            handle._broken = output.reason

    # --- looking, ending ----------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """How many references there are."""
        with self._lock:
            return self._table.counts()

    def values_of(self, kind: type) -> int:
        """How many values of that class this worker owns which are referred to. Any thread."""
        with self._lock:
            values = list(self._values.values())
        return sum(isinstance(value._value, kind) for value in values)

    def leaked(self) -> list[LeakedReference]:
        """References that are still alive: handles here of values elsewhere, and held values here."""
        with self._lock:
            records = self._table.live()
        handles = self.handles()
        found = []
        for record in records:
            if record.role in (Role.WAITING, Role.TOMBSTONE) or record.dropped or record.fork is None:
                continue
            handle = handles.get(record.fork)
            value = self._values.get(record.rref)
            kind = type(value._value).__qualname__ if value is not None and value.done() else "?"
            site = describe_site(handle._site) if handle is not None and handle._site is not None else "?"
            holder = "" if record.holder == self.engine.id else f", held by {self.worker.peers.describe(record.holder)}"
            found.append(
                LeakedReference(
                    f"{record.rref}{holder}",
                    record.role.value,
                    self.worker.peers.describe(record.owner),
                    kind,
                    site,
                )
            )
        return found

    def close(self) -> None:
        """The worker closes: drop all values. All waits for them fail, now and later."""
        with self._lock:
            self.closed = True
            values = list(self._values.values())
            self._values.clear()
        self._looking.close()
        for value in values:
            value._settle(None, WorkerClosed(self._shut_down()))
        self._handles.clear()
        self._died.clear()

    def _shut_down(self) -> str:
        return f"worker {self.engine.name!r}, which owns the value, shut down"
