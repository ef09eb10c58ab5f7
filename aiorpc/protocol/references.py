"""Who still holds which remote reference: the counting of RRefs, without I/O.

A value lives at its owner. Every holder has a *fork* of the reference, named by an id, and the owner keeps the set of
forks it counts; it frees the value when that set is empty. A fork that is passed on stays counted (*pinned*) until the
receiver's own fork is counted. `docs/inside/counting.md` numbers the guarantees and has the tables of messages and of
states.

One `ReferenceTable` per worker. Its methods take events and return what is to be done, in order; they never block, and
must be called by one thread at a time. A worker's messages to itself (about references to its own values) are handled
inside the call that causes them, in order.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from ..errors import ProtocolError, RpcUsageError
from .reference_messages import (
    FREED,
    LARGEST,
    PASSED_TWICE,
    REFUSED,
    UNSENT,
    Abandon,
    Add,
    Added,
    Ask,
    Broken,
    ChildOk,
    Confirmed,
    Counts,
    Del,
    Free,
    Gone,
    Message,
    Never,
    Outputs,
    PassedReference,
    Record,
    ReferenceId,
    Role,
    Send,
    fork_of_creator,
    unguessable,
)


class _State(enum.Enum):
    """The states of a fork, at its holder."""

    PENDING = enum.auto()
    CONFIRMED = enum.auto()
    BROKEN = enum.auto()


class _Value(enum.Enum):
    """The states of a value, at its owner."""

    AWAITED = enum.auto()
    CREATED = enum.auto()
    NEVER = enum.auto()


@dataclass(slots=True)
class _Fork:
    """A fork held here. counted: the owner knows it, so DEL tells its end. parent: the worker that awaits our
    CHILD_OK."""

    rref: ReferenceId
    fork: ReferenceId
    owner: int
    state: _State
    counted: bool
    creator: bool = False
    parent: int | None = None
    dropped: bool = False
    reason: str = ""
    pins: dict[ReferenceId, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Owned:
    """A value owned here. waiting: ADDs that came before CREATE. coming: NEVER was decided, yet CREATE may arrive."""

    rref: ReferenceId
    value: _Value
    forks: dict[ReferenceId, int] = field(default_factory=dict)
    waiting: dict[ReferenceId, int] = field(default_factory=dict)
    coming: bool = False
    reason: str = ""


class ReferenceTable:
    """The references one worker holds, and those that others hold to its values.

    worker_id: this worker's id. Ids of workers are never reused, not even by a worker that comes back. members: the ids
    that workers of this group can have; None if others may join. most: how many forks of values here another worker may
    name by its own messages; more are a ProtocolError. keys: of the references named here.
    """

    def __init__(
        self,
        worker_id: int,
        *,
        members: Container[int] | None = None,
        most: int = 1 << 62,
        keys: Iterator[int] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._members = members
        self._most = most
        self._said: dict[int, int] = {}  # how many forks of values here each worker has named
        self._next = 0
        self._keys = keys or unguessable()
        self._forks: dict[ReferenceId, _Fork] = {}  # held here, by fork
        self._owned: dict[ReferenceId, _Owned] = {}  # owned here, by rref
        self._pinned: dict[ReferenceId, ReferenceId] = {}  # child -> fork it pins
        self._granted: dict[ReferenceId, ReferenceId] = {}  # child counted when we, the owner, encoded it -> rref
        self._departed: set[int] = set()
        self._outputs: Outputs = []
        self._loopback: deque[Message] = deque()
        # Each takes the sender, and then the fields of the message.
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Add: self._on_add,
            Added: self._on_added,
            Gone: self._on_gone,
            ChildOk: self._on_child_ok,
            Del: self._on_del,
            Ask: self._on_ask,
            Never: self._on_never,
            Abandon: self._on_abandon,
        }

    # -- user side --------------------------------------------------------------------------------------------------

    def create(self, owner: int) -> tuple[ReferenceId, ReferenceId]:
        """Name a value that `owner` will make, and our fork of it. The call that carries both is sent afterwards.

        Exactly one of `create_failed_to_send`, `created`, `creation_failed`, or `lost(owner)` has to follow.
        """
        rref, fork = self._new_id(next(self._keys)), self._new_id()
        self._forks[fork] = _Fork(rref, fork, owner, _State.PENDING, counted=False, creator=True)
        if owner == self.worker_id:
            self._owned[rref] = _Owned(rref, _Value.AWAITED, {fork: owner})
        return rref, fork

    def create_failed_to_send(self, rref: ReferenceId, fork: ReferenceId) -> Outputs:
        """The call of `create` was never sent, not even in part."""
        return self._abandon(rref, fork, UNSENT, coming=False)

    def created(self, rref: ReferenceId, fork: ReferenceId) -> Outputs:
        """The owner answered the call of `create`. Ignored if that creation was given up before."""
        held = self._creation(rref, fork)
        if held is not None:
            self._confirm(held)
        return self._finish()

    def creation_failed(self, rref: ReferenceId, fork: ReferenceId, reason: str, *, answered: bool = True) -> Outputs:
        """The owner answered the call of `create` with an error, or (answered=False) we stopped waiting for the answer.

        answered is true also if the call could not be sent: nothing of it will arrive. The value may exist
        nevertheless, as an error that others can fetch; here the reference is broken.
        """
        return self._abandon(rref, fork, reason, coming=not answered)

    def encode(
        self, rref: ReferenceId, fork: ReferenceId, to: int, position: int | None = None
    ) -> tuple[PassedReference, Outputs]:
        """Prepare a frame to worker `to`, which gets a fork of its own; `fork` stays counted meanwhile.

        position: among the values, if it is a value by itself. A frame that is not sent needs `unsend` for each of
        its children. Raises RpcUsageError, and changes nothing, when this fork is not held here or is broken.
        """
        held = self._forks.get(fork)
        if held is None or held.rref != rref or held.dropped:
            raise RpcUsageError(f"reference {rref} has no live fork {fork} here")
        if held.state is _State.BROKEN:
            raise RpcUsageError(f"a broken reference cannot be passed on: {held.reason}")
        child = self._new_id()
        if to not in self._departed:  # after `lost(to)` nothing would ever release the child
            self._keep_for(held, child, to)
        return PassedReference(rref, held.owner, child, position), self._finish()

    def unsend(self, child: ReferenceId) -> Outputs:
        """The frame that carried `child` was never sent. Idempotent."""
        if child in self._granted:
            self._uncount(self._owned[self._granted[child]], child)
        self._unpin(child)
        return self._finish()

    def decode(self, passed: PassedReference, sender: int) -> Outputs:
        """A reference came in a frame from `sender`: its fork is ours now.

        Every reference of a frame that arrived must be decoded once, even if its handle is dropped at once (a body
        that cannot be unpickled, a cancelled call): the sender waits for it. Raises ProtocolError, and changes nothing,
        for an impossible reference.
        """
        self._check_passed(passed, sender)
        rref, owner, fork, _ = passed
        direct = sender == owner  # the owner counted us when it encoded
        state = _State.CONFIRMED if direct else _State.PENDING
        held = _Fork(rref, fork, owner, state, counted=direct, parent=None if direct else sender)
        self._forks[fork] = held
        if owner in self._departed:
            self._break(held, f"its owner, worker {owner}, is gone")
        elif self._members is not None and owner not in self._members:
            self._break(held, _no_member(owner))
        elif owner == self.worker_id and direct and fork not in self._granted:
            self._break(held, REFUSED)  # decided while the frame travelled from us to us
        elif direct:
            self._outputs.append(Confirmed(rref, fork))
        else:
            self._send(owner, Add(rref, fork))
        return self._finish()

    def drop(self, rref: ReferenceId, fork: ReferenceId) -> Outputs:
        """The last handle of this fork died here. DEL tells the owner as soon as that is safe. Idempotent."""
        held = self._forks.get(fork)
        if held is not None and held.rref == rref:
            held.dropped = True
            self._settle(held)
        return self._finish()

    # -- owner side -------------------------------------------------------------------------------------------------

    def own(self, rref: ReferenceId | None = None) -> tuple[ReferenceId, ReferenceId]:
        """A local handle: to a new value (`RRef(value)`), or one more to `rref`, whose value is here or may still come.

        If the value then never comes, the handle breaks. Raises RpcUsageError if `rref` is given and `holds` denies it.
        """
        owned: _Owned | None
        if rref is None:
            fork = rref = self._new_id(next(self._keys))  # equal as in torch: programs compare the numbers
            owned = _Owned(rref, _Value.CREATED)
        else:
            fork = self._new_id()
            owned = self._owned.get(rref)
        if owned is None or owned.value is _Value.NEVER:
            raise RpcUsageError(f"reference {rref} does not exist on this worker")
        held = _Fork(rref, fork, self.worker_id, _State.CONFIRMED, counted=True)
        owned.forks[fork] = self.worker_id
        self._owned[rref] = owned
        self._forks[fork] = held
        return rref, fork

    def on_create(self, rref: ReferenceId, fork: ReferenceId, sender: int) -> Outputs:
        """A call that creates `rref` arrived from `sender`: its fork counts, and early ADDs are answered.

        Called for every such call, also for a refused one (its value is then the error). If Free is returned, the
        creator has given up and no other worker holds it: the call need not run. Raises ProtocolError, and changes
        nothing, for impossible ids.
        """
        owned = self._owned.get(rref)
        if rref.worker != sender or fork != fork_of_creator(rref) or not (0 <= rref.number < LARGEST and rref.key >= 0):
            raise ProtocolError(f"worker {sender} cannot create {rref} with fork {fork}")
        if owned is not None and owned.value is _Value.CREATED:
            raise ProtocolError(f"reference {rref} was created twice")
        if sender in self._departed:
            self._outputs.append(Free(rref))
        else:
            if owned is None or fork not in owned.forks:
                self._name(sender)
            self._bring_to_life(owned or _Owned(rref, _Value.AWAITED), fork, sender)
        return self._finish()

    def holds(self, rref: ReferenceId) -> bool:
        """Whether the value of `rref` is here or may still come. False: it is gone for good, or was never here."""
        owned = self._owned.get(rref)
        return owned is not None and owned.value is not _Value.NEVER

    def refusal(self, rref: ReferenceId) -> str | None:
        """Why the value of `rref` will never exist, from its creator; None if the creator has not given it up."""
        owned = self._owned.get(rref)
        return owned.reason if owned is not None and owned.value is _Value.NEVER else None

    # -- both -------------------------------------------------------------------------------------------------------

    def on_message(self, sender: int, message: Message) -> Outputs:
        """A message of another worker's table. Raises ProtocolError, and changes nothing, for an impossible one."""
        if sender == self.worker_id:
            raise ProtocolError("a worker does not send reference messages to itself")
        if sender not in self._departed:
            self._handlers[type(message)](sender, *message)
        return self._finish()

    def lost(self, worker_id: int) -> Outputs:
        """Worker `worker_id` died, and nothing more will come from it. Idempotent."""
        return self._depart(worker_id, "was lost")

    def left(self, worker_id: int) -> Outputs:
        """Worker `worker_id` left in good order, and nothing more will come from it. Idempotent."""
        return self._depart(worker_id, "has left")

    def unknown(self, worker_ids: Container[int]) -> Outputs:
        """No worker has these ids: nothing will come from them. Unlike workers that left, they may join later."""
        for held in list(self._forks.values()):
            if held.owner in worker_ids:
                self._break(held, _no_member(held.owner))
        for owned in list(self._owned.values()):
            if owned.rref.worker in worker_ids and owned.value is _Value.AWAITED:
                self._refuse(owned, _no_member(owned.rref.worker))
                self._reap(owned)
        return self._finish()

    def live(self) -> list[Record]:
        """Every reference this worker holds or counts, for statistics and the report of leaks."""
        records = [self._record(held) for held in self._forks.values()]
        for owned in self._owned.values():
            others = {fork: holder for fork, holder in owned.forks.items() if holder != self.worker_id}
            if owned.value is _Value.NEVER:
                records.append(Record(owned.rref, self.worker_id, None, Role.TOMBSTONE, owned.rref.worker, False))
                continue
            records += [Record(owned.rref, self.worker_id, f, Role.FORK, h, True) for f, h in others.items()]
            waiting = {fork: holder for fork, holder in owned.waiting.items() if holder != self.worker_id}
            records += [Record(owned.rref, self.worker_id, f, Role.WAITING, h, False) for f, h in waiting.items()]
        return records

    def counts(self) -> Counts:
        """Sizes of the table, in time proportional to it."""
        values = [owned.value for owned in self._owned.values()]
        return Counts(
            owned=values.count(_Value.CREATED),
            users=sum(held.owner != self.worker_id for held in self._forks.values()),
            pending=sum(held.state is _State.PENDING for held in self._forks.values()),
            forks=sum(len(owned.forks) for owned in self._owned.values()),
            pins=len(self._pinned),
            placeholders=values.count(_Value.AWAITED),
            tombstones=values.count(_Value.NEVER),
            granted=len(self._granted),
        )

    # -- the holder's half ------------------------------------------------------------------------------------------

    def _new_id(self, key: int = 0) -> ReferenceId:
        number = self._next
        self._next += 1
        return ReferenceId(self.worker_id, number, key)

    def _creation(self, rref: ReferenceId, fork: ReferenceId) -> _Fork | None:
        """Our fork of a creation that is still undecided."""
        held = self._forks.get(fork)
        undecided = held is not None and held.rref == rref and held.creator and held.state is _State.PENDING
        return held if undecided else None

    def _abandon(self, rref: ReferenceId, fork: ReferenceId, reason: str, *, coming: bool) -> Outputs:
        held = self._creation(rref, fork)
        if held is not None:
            # Other workers may have registered already: the owner has to refuse them until our DEL ends it.
            self._send(held.owner, Abandon(rref, fork, coming, reason))
            self._break(held, reason, counted=True)
        return self._finish()

    def _check_passed(self, passed: PassedReference, sender: int) -> None:
        rref, owner, fork, _ = passed
        if fork.worker != sender:
            raise ProtocolError(f"worker {sender} passed fork {fork}, which it cannot have named")
        if fork in self._forks:
            raise ProtocolError(f"fork {fork} was passed twice")
        if sender == owner and rref.worker == self.worker_id and rref.number >= self._next:
            # About another worker's value the sender may have been misinformed: `_on_add` answers that.
            raise ProtocolError(f"reference {rref} was never named by this worker")

    def _keep_for(self, held: _Fork, child: ReferenceId, to: int) -> None:
        """Keep the child alive while it travels: count it at once if we own the value; pin our fork otherwise."""
        if held.owner == self.worker_id:
            self._owned[held.rref].forks[child] = to
            self._granted[child] = held.rref
        else:
            held.pins[child] = to
            self._pinned[child] = held.fork

    def _unpin(self, child: ReferenceId) -> None:
        fork = self._pinned.pop(child, None)
        if fork is not None:
            held = self._forks[fork]
            del held.pins[child]
            self._settle(held)

    def _confirm(self, held: _Fork) -> None:
        held.state, held.counted = _State.CONFIRMED, True
        if not held.dropped:
            self._outputs.append(Confirmed(held.rref, held.fork))
        self._release_parent(held)
        self._settle(held)

    def _break(self, held: _Fork, reason: str, *, counted: bool = False) -> None:
        """counted: the owner still knows this fork, so its pins hold and DEL must tell its end."""
        if held.state is _State.BROKEN and not held.counted:
            return
        if held.state is not _State.BROKEN:
            held.reason = reason
            if not held.dropped:
                self._outputs.append(Broken(held.rref, held.fork, reason))
        held.state, held.counted = _State.BROKEN, counted
        if not counted:
            for child in held.pins:
                del self._pinned[child]
            held.pins.clear()
        self._release_parent(held)
        self._settle(held)

    def _release_parent(self, held: _Fork) -> None:
        parent, held.parent = held.parent, None
        if parent is not None:
            self._send(parent, ChildOk(held.fork))

    def _settle(self, held: _Fork) -> None:
        """Forget a dropped fork once nothing depends on it: no child to be counted, no answer to come."""
        if not held.dropped or held.pins or held.state is _State.PENDING:
            return
        if self._forks.pop(held.fork, None) is not None and held.counted:
            self._send(held.owner, Del(held.rref, held.fork))

    def _on_added(self, sender: int, rref: ReferenceId, fork: ReferenceId) -> None:
        held = self._forks.get(fork)
        asked = held is not None and held.state is _State.PENDING and not held.creator
        if held is None or not asked or held.rref != rref or held.owner != sender:
            raise ProtocolError(f"ADDED for fork {fork}, which did not ask worker {sender}")
        self._confirm(held)

    def _on_gone(self, sender: int, rref: ReferenceId, fork: ReferenceId, reason: str) -> None:
        held = self._forks.get(fork)
        if held is None:  # our DEL crossed it
            return
        if held.rref != rref or held.owner != sender:
            raise ProtocolError(f"GONE for fork {fork} from worker {sender}, which does not own it")
        self._break(held, reason)

    def _on_child_ok(self, sender: int, child: ReferenceId) -> None:
        fork = self._pinned.get(child)
        if fork is None:  # released before: a broken fork needs no pins
            return
        if self._forks[fork].pins[child] != sender:
            raise ProtocolError(f"CHILD_OK for {child} from worker {sender}, which it was not passed to")
        self._unpin(child)

    def _on_ask(self, sender: int, rref: ReferenceId) -> None:
        if rref.worker != self.worker_id:
            raise ProtocolError(f"asked about {rref}, which this worker did not create")
        held = self._forks.get(fork_of_creator(rref))
        if held is None or not held.creator or held.rref != rref or held.owner != sender:
            self._send(sender, Never(rref))
        # No answer otherwise: CREATE or ABANDON is on its way, or the answer to it is.
        # An id that was never named here may come from another worker; the sender is not to blame.

    # -- the owner's half -------------------------------------------------------------------------------------------

    def _on_add(self, sender: int, rref: ReferenceId, fork: ReferenceId) -> None:
        owned = self._owned.get(rref)
        if fork.worker == self.worker_id:
            raise ProtocolError(f"ADD for fork {fork}, which its owner named and counts")
        holder = None if owned is None else owned.forks.get(fork, owned.waiting.get(fork))
        if holder == sender:
            raise ProtocolError(f"ADD for fork {fork} a second time")
        if holder is not None:
            self._send(sender, Gone(rref, fork, PASSED_TWICE))
        elif owned is None and (rref.worker == self.worker_id or rref.worker in self._departed):
            self._send(sender, Gone(rref, fork, FREED))
        elif owned is None and self._members is not None and rref.worker not in self._members:
            self._send(sender, Gone(rref, fork, _no_member(rref.worker)))
        elif owned is None:
            self._name(sender)
            # Not created yet, or freed long ago? Only the creator knows; remembering all freed values would not end.
            self._owned[rref] = _Owned(rref, _Value.AWAITED, waiting={fork: sender})
            self._send(rref.worker, Ask(rref))
        elif owned.value is _Value.CREATED:
            self._name(sender)
            owned.forks[fork] = sender
            self._send(sender, Added(rref, fork))
        elif owned.value is _Value.AWAITED:
            self._name(sender)
            owned.waiting[fork] = sender
        else:
            self._send(sender, Gone(rref, fork, owned.reason))

    def _bring_to_life(self, owned: _Owned, fork: ReferenceId, sender: int) -> None:
        if owned.value is _Value.AWAITED:
            owned.forks[fork] = sender
        # In other states the fork is in the set, or its DEL has been here.
        owned.value, owned.coming = _Value.CREATED, False
        self._owned[owned.rref] = owned
        waiting, owned.waiting = owned.waiting, {}
        owned.forks.update(waiting)
        for early, holder in waiting.items():
            self._send(holder, Added(owned.rref, early))
        self._reap(owned)

    def _on_del(self, sender: int, rref: ReferenceId, fork: ReferenceId) -> None:
        owned = self._owned.get(rref)
        if owned is None:
            return
        if owned.forks.get(fork, sender) != sender or fork in owned.waiting:
            raise ProtocolError(f"DEL for fork {fork} from worker {sender}, which cannot drop it now")
        self._uncount(owned, fork)

    def _name(self, sender: int) -> None:
        """Another worker names one more fork of a value here. ProtocolError: it has too many."""
        said = self._said.get(sender, 0) + 1
        if said > self._most:
            raise ProtocolError(
                f"worker {sender} holds {self._most} references to values of this worker, and wants more "
                "(max_references)"
            )
        self._said[sender] = said

    def _on_never(self, sender: int, rref: ReferenceId) -> None:
        if rref.worker != sender:
            raise ProtocolError(f"NEVER for {rref} from worker {sender}, which did not create it")
        owned = self._owned.get(rref)
        if owned is not None and owned.value is _Value.AWAITED:
            self._refuse(owned, FREED)
            self._reap(owned)

    def _on_abandon(self, sender: int, rref: ReferenceId, fork: ReferenceId, coming: bool, reason: str) -> None:
        if rref.worker != sender or fork != fork_of_creator(rref):
            raise ProtocolError(f"ABANDON of {rref} from worker {sender}, which did not create it")
        owned = self._owned.get(rref) or _Owned(rref, _Value.AWAITED)
        if owned.value is _Value.CREATED:  # users can fetch its value, which is the error
            return
        if owned.value is _Value.NEVER:
            raise ProtocolError(f"reference {rref} was abandoned twice")
        # The creator knows; its fork, and with it the refusal, stays until its DEL.
        if owned.forks.pop(fork, None) is None:
            self._name(sender)
        self._refuse(owned, reason)
        owned.value, owned.reason, owned.coming = _Value.NEVER, reason, coming
        owned.forks[fork] = sender
        self._owned[rref] = owned

    def _refuse(self, owned: _Owned, reason: str) -> None:
        """The value will never come: tell all workers that have or want a fork."""
        everyone = {**owned.forks, **owned.waiting}
        for fork, holder in everyone.items():
            self._granted.pop(fork, None)
            if fork.worker != self.worker_id and holder in self._said:
                self._said[holder] -= 1
            self._send(holder, Gone(owned.rref, fork, reason))
        owned.forks, owned.waiting = {}, {}
        self._outputs.append(Free(owned.rref))

    def _uncount(self, owned: _Owned, fork: ReferenceId) -> None:
        holder = owned.forks.pop(fork, None)
        if holder in self._said and fork.worker != self.worker_id:
            self._said[holder] -= 1
        self._granted.pop(fork, None)
        self._reap(owned)

    def _reap(self, owned: _Owned) -> None:
        """Forget a value without forks."""
        if owned.forks or owned.waiting or owned.coming:
            return
        del self._owned[owned.rref]
        if owned.value is _Value.CREATED:
            self._outputs.append(Free(owned.rref))

    # -- departures, sending, reports ---------------------------------------------------------------------------------

    def forget(self, worker_id: int) -> None:
        """Drop a worker that is long gone. If its id is used again, `unknown` answers."""
        self._departed.discard(worker_id)

    def _depart(self, worker_id: int, how: str) -> Outputs:
        if worker_id == self.worker_id:
            raise RpcUsageError("a worker cannot lose itself")
        if worker_id not in self._departed:
            self._departed.add(worker_id)
            for held in list(self._forks.values()):
                self._fork_departs(held, worker_id, how)
            for owned in list(self._owned.values()):
                self._value_departs(owned, worker_id, how)
            self._said.pop(worker_id, None)
        return self._finish()

    def _fork_departs(self, held: _Fork, worker_id: int, how: str) -> None:
        if held.parent == worker_id:
            held.parent = None
        if held.owner == worker_id:
            self._break(held, f"its owner, worker {worker_id}, {how}")
        for child in [child for child, to in held.pins.items() if to == worker_id]:
            self._unpin(child)

    def _value_departs(self, owned: _Owned, worker_id: int, how: str) -> None:
        creator = owned.rref.worker == worker_id
        for fork in _held_by(owned.forks, worker_id):
            del owned.forks[fork]
            self._granted.pop(fork, None)
        for fork in _held_by(owned.waiting, worker_id):
            del owned.waiting[fork]
        if creator and owned.value is _Value.AWAITED:
            self._refuse(owned, f"its creator, worker {worker_id}, {how} before the value was made")
        owned.coming = owned.coming and not creator
        self._reap(owned)

    def _send(self, to: int, message: Message) -> None:
        if to == self.worker_id:
            self._loopback.append(message)
        elif to not in self._departed and (self._members is None or to in self._members):
            self._outputs.append(Send(to, message))

    def _finish(self) -> Outputs:
        """Handle this worker's messages to itself, then return the outputs."""
        while self._loopback:
            message = self._loopback.popleft()
            self._handlers[type(message)](self.worker_id, *message)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _record(self, held: _Fork) -> Record:
        role = Role.OWNER if held.owner == self.worker_id else Role.USER
        confirmed = held.state is _State.CONFIRMED
        return Record(held.rref, held.owner, held.fork, role, self.worker_id, confirmed, len(held.pins), held.dropped)


def _no_member(worker_id: int) -> str:
    return f"there is no worker {worker_id} in the group: the worker that passed the reference on has invented it"


def _held_by(forks: dict[ReferenceId, int], worker_id: int) -> list[ReferenceId]:
    return [fork for fork, holder in forks.items() if holder == worker_id]
