"""RRef: a handle of a value on another worker, and the runtime's side of counting the handles.

Who holds what is decided by `protocol.references.ReferenceTable` (its guarantees: docs/references.md); this module
keeps the values, gives the table its events and carries out what it says.

Invariants
1. The table is used under `_lock` only, and what it sends is queued under the lock, so messages leave in its order.
2. `RRef.__del__` may run anywhere, inside a lock or the garbage collector: it only appends to a deque, wakes the loop.
3. A value is dropped outside of the lock, since its destructor is the user's code.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from ... import foreign
from ...errors import RpcError, RpcUsageError
from ...futures import Future, call_site, describe_site
from ...protocol import codec
from ...protocol.codec import pack
from ...protocol.frames import Kind, encode_frame
from ...protocol.identity import WorkerInfo
from ...protocol.reference_messages import (
    Broken,
    Confirmed,
    Counts,
    Free,
    Output,
    Outputs,
    ReferenceId,
    Role,
    Send,
)
from ...protocol.references import ReferenceTable
from ..callee.resolver import FETCH, METHOD
from ..calls.failures import came_from_afar
from ..engine.current import CallContext, registry

if TYPE_CHECKING:
    from ..caller.future import CallFuture
    from ..worker import Worker

logger = logging.getLogger("aiorpc")
T = TypeVar("T")

# While a handler has references among its arguments, what the table says of them waits so long, in seconds: a frame of
# its own for each would wake up a loop on either side, in the midst of that call.
_FLUSH_PAUSE = 0.001


class RRef(Generic[T]):
    """A reference to a value that lives on one worker, its owner. The owner keeps the value while any RRef is alive.

    ``RRef(value)`` makes one to a value of this worker; `aiorpc.remote` makes one to a value another worker creates.
    RRefs may be passed to any worker, as arguments and results and inside them, also before the value exists. Methods
    may be used from any thread; those that block are refused on the worker's own loop. Cycles of RRefs across workers
    are not collected.
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """type_hint: as torch's, without effect. NotInitialized if there is no worker, or nothing says which."""
        references = registry.get().references
        rref, fork = references.own(value)
        self._bind(references, rref, fork, references.worker.id, sys._getframe(1))
        references.register(fork, self)

    def _bind(
        self, references: References, rref: ReferenceId, fork: ReferenceId, owner: int, frame: Any = None
    ) -> None:
        self._references = references
        self._rref = rref
        self._fork = fork
        self._owner = owner
        self._confirmed = owner == references.worker.id
        self._broken: str | None = None
        self._creation: CallFuture | None = None
        self._site = call_site(frame) if frame is not None else None

    # --- where it is --------------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._references.worker.peers.info(self._owner)

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return self._owner == self._references.worker.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this reference. Never blocks."""
        return self._confirmed

    # --- the value ----------------------------------------------------------------------------------------------------

    def local_value(self) -> T:
        """The value itself, on its owner; blocks until it exists, raises what its creation raised.

        RpcUsageError on any other worker: use `to_here` or await the RRef.
        """
        if not self.is_owner():
            raise RpcUsageError(
                f"For {self}, can't call localValue() on user {self._references.worker.info}. "
                f"Call it on owner {self.owner()}, or use to_here() or `await rref`."
            )
        return self._value_future().wait()

    def to_here(self, timeout: float = -1.0) -> T:
        """A copy of the value; on the owner the value itself. Blocks until it exists.

        timeout: seconds; negative for the worker's default, 0 for no limit. Raises what the creation of the value
        raised, RpcTimeout, PeerLost. Not for the loop that runs the worker: ``await rref`` there.
        """
        self._check()
        if self.is_owner():
            return self._value_future().wait(self._references.worker.timeout(timeout) or None)
        self._references.worker.refuse_on_loop("rref.to_here()", "await rref")
        return self._fetch(timeout, 3).wait()

    def __await__(self) -> Generator[Any, None, T]:
        """The same value as `to_here`, without blocking."""
        return self._fetch(-1.0, 3).__await__()

    def _fetch(self, timeout: float, depth: int) -> Future[T]:
        self._check()
        if self.is_owner():
            return self._value_future()
        peer = self._references.worker.peers.by_id(self._owner)
        seconds = self._references.worker.timeout(timeout)
        return peer.call([FETCH, *self._rref, "to_here"], (), None, seconds, depth=depth)

    def _call_method(self, name: str, args: Sequence[Any], seconds: float) -> Future[Any]:
        """Call a method of the value on its owner; for the runtime's own."""
        return self._references.worker.peers.by_id(self._owner).call([METHOD, *self._rref, name], args, None, seconds)

    def _value_future(self) -> Future[T]:
        return self._references.value(*self._rref)

    def _check(self) -> None:
        creation = self._creation
        if creation is not None and creation.done():
            creation.value()  # raises what the construction raised
        if self._broken is not None:
            gone = self._references.worker.peers.by_id(self._owner).gone
            failure = (RpcError if gone is None else type(gone))(f"{self} cannot be used: {gone or self._broken}")
            failure.__dict__.update(vars(gone) if gone is not None else {})
            raise failure

    # --- methods of the value -----------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods run on the owner and block until they have a result.

        timeout: seconds for each call; negative for the worker's default, 0 for no limit. Not for the loop that runs
        the worker, where the methods raise WouldBlockLoop: ``await rref.rpc_async().method()`` there.
        """
        return _Proxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods run on the owner and return a Future at once. timeout: as in `rpc_sync`."""
        return _Proxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods run on the owner and return an RRef of their result at once.

        timeout: as in `rpc_sync`.
        """
        return _Proxy(self, "remote", timeout)

    # --- travelling and ending ----------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        out = codec.outgoing.get()
        if out is None or out.target is None:
            raise RpcUsageError(
                "Can not pickle rref in python pickler: an RRef can only travel in a call, as an argument or result"
            )
        number = self._references.encode(self, out)
        return codec.load_reference, (number,)

    def _travel(self, out: codec.Outgoing, position: int) -> None:
        """It is a value of a message by itself: see `codec.refer`."""
        self._references.encode(self, out, position)

    def __str__(self) -> str:
        kind = "OwnerRRef" if self.is_owner() else "UserRRef"
        rref, fork = self._rref, self._fork
        text = f"{kind}(RRefId = GloballyUniqueId(created_on={rref.worker}, local_id={rref.number})"
        if not self.is_owner():
            text += f", ForkId = GloballyUniqueId(created_on={fork.worker}, local_id={fork.number})"
        return text + ")"

    def __repr__(self) -> str:
        made = f", made at {describe_site(self._site)}" if self._site is not None else ""
        return f"<{self} owned by {self._references.worker.peers.describe(self._owner)}{made}>"

    def __del__(self) -> None:
        references = self.__dict__.get("_references")
        if references is not None:
            references.drop_later(self._rref, self._fork)


class _Proxy:
    """Methods of an RRef's value. Making a call needs no round trip to learn what the value can do."""

    __slots__ = ("_rref", "_timeout", "_verb")

    def __init__(self, rref: RRef[Any], verb: str, timeout: float) -> None:
        self._rref = rref
        self._verb = verb
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _Method(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _invoke(self, "__call__", args, kwargs)


class _Method:
    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: _Proxy, name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _invoke(self._proxy, self._name, args, kwargs)


def _invoke(proxy: _Proxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rref = proxy._rref
    rref._check()
    worker = rref._references.worker
    peer = worker.peers.by_id(rref._owner)
    wire = [METHOD, *rref._rref, name]
    seconds = worker.timeout(proxy._timeout)
    if proxy._verb == "remote":
        return worker.references.create(peer, wire, args, kwargs, seconds, depth=3)
    if proxy._verb == "rpc_sync":
        worker.refuse_on_loop(f"rref.rpc_sync().{name}()", f"await rref.rpc_async().{name}()")
    future = peer.call(wire, args, kwargs, seconds, depth=3)
    return future.wait() if proxy._verb == "rpc_sync" else future


@dataclass(frozen=True)
class LeakedReference:
    """A reference that was still alive at shutdown.

    role: "owner" for an RRef here of a value here, "user" for an RRef here of a value elsewhere, "fork" for an RRef on
    another worker of a value here. owner: who has the value. made_at: where the RRef was made, "?" if not known.
    """

    reference: str
    role: str
    owner: str
    type: str
    made_at: str


class _ValueFuture(Future[Any]):
    """The value of a reference: nobody who waits for it owns it, so the last one to give up does not cancel it."""

    def cancel(self, msg: object = None) -> bool:
        return False


class References:
    """All references of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.handle_class: type[RRef[Any]] = worker.handle_class
        self._table = ReferenceTable(worker.id)
        self._lock = threading.Lock()
        self._values: dict[ReferenceId, Future[Any]] = {}
        self._handles: WeakValueDictionary[ReferenceId, RRef[Any]] = WeakValueDictionary()
        self._dropped: deque[tuple[ReferenceId, ReferenceId]] = deque()
        self._flushing = False  # whether `flush` will be called
        self._unsaid: set[Any] = set()  # peers with frames that leave then
        self._closed = False

    # --- making handles -----------------------------------------------------------------------------------------------

    def own(self, value: Any) -> tuple[ReferenceId, ReferenceId]:
        """A new reference to a value of this worker."""
        future = self._new_value()
        future._arrival = self.worker.accelerators.arrival(value)
        future._settle(value)
        with self._lock:
            rref, fork = self._table.own()
            self._values[rref] = future
        return rref, fork

    def register(self, fork: ReferenceId, handle: RRef[Any]) -> None:
        """Remember the handle of a fork, for reports and for what the table says of it."""
        self._handles[fork] = handle

    def create(
        self,
        peer: Any,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
        *,
        depth: int,
    ) -> RRef[Any]:
        """An RRef of the result of a call on `peer`; returns at once. Raises SerializationError, with nothing sent."""
        owner = self.worker.peers.id_of(peer)
        with self._lock:
            rref, fork = self._table.create(owner)
        handle = self.handle_class.__new__(self.handle_class)
        handle._bind(self, rref, fork, owner, sys._getframe(depth))
        handle._confirmed = False
        self._handles[fork] = handle
        extra = [*rref, *fork]
        try:
            call = peer.call(function, args, kwargs, timeout, extra=extra, depth=depth + 1)
        except BaseException:
            self._run(self._table.create_failed_to_send, rref, fork)
            raise
        handle._creation = call
        call._add_callback(lambda future: self._on_created(rref, fork, future))
        return handle

    def _on_created(self, rref: ReferenceId, fork: ReferenceId, future: Future[Any]) -> None:
        error = future._error
        future._look()  # the error is raised by whoever uses the reference
        if error is None:
            self._run(self._table.created, rref, fork)
            return
        if came_from_afar(error):
            # The owner has the error as the value: other holders can fetch it, and this handle raises it by itself.
            self._run(self._table.created, rref, fork)
        else:
            reason = foreign.text_of(error)
            self._run(lambda: self._table.creation_failed(rref, fork, reason, answered=False))

    def load(self, wires: list[Any], sender: int) -> list[RRef[Any]]:
        """Handles of the references in a message from `sender`."""
        handles = []
        for wire in wires:
            with self._lock:
                rref, owner, fork, outputs = self._table.decode(wire[:5], sender)
                handle = self.handle_class.__new__(self.handle_class)
                handle._bind(self, rref, fork, owner)
                self._handles[fork] = handle
                freed = self._carry_out(outputs)
            self._release(freed)
            handles.append(handle)
        return handles

    def encode(self, handle: RRef[Any], out: codec.Outgoing, *position: int) -> int:
        """Put a handle into a message to `out.target`; its number there. position: of a value that is nothing else."""
        to = self.worker.peers.id_of(out.target)
        with self._lock:
            try:
                wire, outputs = self._table.encode(handle._rref, handle._fork, to)
            except RpcUsageError:
                handle._check()
                raise
            freed = self._carry_out(outputs)
        self._release(freed)
        child = ReferenceId(wire[3], wire[4])
        out.on_unsent.append(lambda: self._run(self._table.unsend, child))
        out.references.append((*wire, *position))
        return len(out.references) - 1

    # --- values, on the owner -----------------------------------------------------------------------------------------

    def value(self, worker: int, number: int, asker: int = -1) -> Future[Any]:
        """The Future of a value of this worker; also of one whose creation has not arrived yet.

        asker: who wants it. Its creator holds a reference, so the value was not freed; the creation is on its way, and
        was overtaken, as its arguments were long.
        """
        rref = ReferenceId(worker, number)
        with self._lock:
            future = self._values.get(rref)
            if future is None:
                future = self._new_value()
                if self._table.holds(rref) or (worker == asker and asker != self.worker.id):
                    self._values[rref] = future
                else:
                    gone = f"reference {tuple(rref)} names no value of this worker; it was freed"
                    future._settle(None, RpcError(gone))
        return future

    def _new_value(self) -> Future[Any]:
        future: Future[Any] = _ValueFuture()
        future._loop = self.worker.loop
        future._what = "the value of a reference"
        future._executor = self.worker.pool
        return future

    def on_create(self, extra: list[Any], sender: int, context: CallContext) -> None:
        """A call that creates a reference arrived; its result will be the value. On the loop."""
        rref, fork = ReferenceId(extra[0], extra[1]), ReferenceId(extra[2], extra[3])
        with self._lock:
            outputs = self._table.on_create(rref, fork, sender)
            if rref not in self._values:
                self._values[rref] = self._new_value()
            context.creates = rref
            freed = self._carry_out(outputs)
        self._release(freed)

    def settle_created(self, context: CallContext, result: Any, error: BaseException | None = None) -> None:
        """The call of `context` creates a reference: its value is this, or this error for its users. Any thread."""
        future = self._values.get(context.creates)
        if future is not None:
            if error is None:  # other handlers, on other streams, use what this one has put on a device
                try:
                    future._arrival = self.worker.accelerators.arrival(result)
                except BaseException as broken:  # a container of the users' that cannot be looked into
                    result, error = None, broken
            future._settle(result, error)

    # --- the table's outputs ------------------------------------------------------------------------------------------

    def on_message(self, sender: int, message: tuple[Any, ...]) -> None:
        """A message of reference counting arrived; on the loop. Raises ProtocolError."""
        self._run(self._table.on_message, sender, message)

    def on_gone(self, worker_id: int, lost: bool) -> None:
        """A worker died, or left."""
        self._run(self._table.lost if lost else self._table.left, worker_id)

    def drop_later(self, rref: ReferenceId, fork: ReferenceId) -> None:
        """A handle died, anywhere: tell the table from the loop."""
        if self._closed:
            return
        self._dropped.append((rref, fork))
        if not self._flushing:
            self._flushing = True
            self.worker.call_on_loop(self.flush)

    def coming(self) -> None:
        """A call with references came: what is to be said of them is said together, a little later. On the loop."""
        if not self._flushing:
            self._flushing = True
            self.worker.loop.call_later(_FLUSH_PAUSE, self.flush)

    def flush(self) -> None:
        """Tell the table which handles have died, and send what is still unsaid; on the loop."""
        with self._lock:
            self._flushing = False
            unsaid, self._unsaid = self._unsaid, set()
        for peer in unsaid:
            peer.flush()
        while self._dropped:
            rref, fork = self._dropped.popleft()
            self._run(self._table.drop, rref, fork)

    def _run(self, event: Callable[..., Outputs], *args: Any) -> None:
        with self._lock:
            freed = self._carry_out(event(*args))
        self._release(freed)

    def _carry_out(self, outputs: Sequence[Output]) -> list[Future[Any]]:
        """Under the lock. Returns values that nobody holds any more, for the caller to drop after it."""
        freed = []
        for output in outputs:
            if isinstance(output, Send):
                peer = self.worker.peers.by_id(output.to)
                peer.send(encode_frame(Kind.REFERENCE, 0, pack(output.message)), later=self._flushing)
                if self._flushing:
                    self._unsaid.add(peer)
            elif isinstance(output, Free):
                value = self._values.pop(output.rref, None)
                if value is not None:
                    freed.append(value)
            else:
                self._tell(output)
        return freed

    def _release(self, freed: list[Future[Any]]) -> None:
        """Outside of the lock: what settling and dropping a value sets off is the users' code."""
        for value in freed:
            value._settle(None, RpcError("the value was never created: its creator is gone or gave up"))

    def _tell(self, output: Confirmed | Broken) -> None:
        handle = self._handles.get(output.fork)
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

    def leaked(self) -> list[LeakedReference]:
        """What is still referred to: handles of users here, and values here that somebody holds."""
        with self._lock:
            records = self._table.live()
        found = []
        for record in records:
            if record.role in (Role.WAITING, Role.TOMBSTONE) or record.dropped or record.fork is None:
                continue
            handle = self._handles.get(record.fork)
            value = self._values.get(record.rref)
            kind = type(value._value).__qualname__ if value is not None and value.done() else "?"
            site = describe_site(handle._site) if handle is not None and handle._site is not None else "?"
            holder = "" if record.holder == self.worker.id else f", held by {self.worker.peers.describe(record.holder)}"
            found.append(
                LeakedReference(
                    f"{tuple(record.rref)}{holder}",
                    record.role.value,
                    self.worker.peers.describe(record.owner),
                    kind,
                    site,
                )
            )
        return found

    def close(self) -> None:
        """The worker shuts down: values are dropped."""
        self._closed = True
        values = list(self._values.values())
        self._values.clear()
        for value in values:
            value._settle(None, RpcError(f"worker {self.worker.name!r}, which owns the value, shut down"))
        self._dropped.clear()
