"""RRef: a handle of a value on another worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast

from ... import foreign
from ..._typing import T, T_co
from ...collecting import wait_alone
from ...errors import RpcError, RpcUsageError
from ...futures import Future
from ...protocol import codec
from ...protocol.identity import WorkerInfo
from ...protocol.messages import Fetch, Method
from ...protocol.reference_messages import LENT, ReferenceId
from ...sites import call_site, describe_site
from ..calls.current import registry
from ..calls.options import CallOptions
from ..engine.blocking import BlockingIterator
from ..engine.engine import Engine

R = TypeVar("R")


class PeerForRRef(Protocol):
    """The owner of a value (`Peer`), for handles of the value."""

    @property
    def gone(self) -> RpcError | None: ...

    @property
    def parting(self) -> RpcError | None: ...

    @property
    def call(self) -> Callable[..., Future[Any]]: ...

    def send(self, kind: int, call_id: int, body: bytes, *, urgent: bool = False, later: bool = False) -> None: ...

    def flush(self) -> None: ...


class PeersForReferences(Protocol):
    """The peers of a worker (`Peers`)."""

    def by_id(self, worker_id: int) -> PeerForRRef: ...

    def id_of(self, peer: Any) -> int: ...

    def info(self, worker_id: int) -> WorkerInfo: ...

    def describe(self, worker_id: int) -> str: ...


class WorkerForReferences(Protocol):
    """The worker that holds the handles (`Node`)."""

    @property
    def engine(self) -> Engine: ...

    @property
    def peers(self) -> PeersForReferences: ...

    @property
    def open_stream(self) -> Callable[..., BlockingIterator[object]]:
        """The items of a method of a value (`caller.stream.open_stream`)."""


class ReferencesForRRef(Protocol):
    """The part of `References` that a handle uses."""

    @property
    def engine(self) -> Engine: ...

    @property
    def peers(self) -> PeersForReferences: ...

    @property
    def worker(self) -> WorkerForReferences: ...

    @property
    def closed(self) -> bool: ...

    def own(self, value: object, handle: RRef[object]) -> tuple[ReferenceId, ReferenceId]: ...

    def count(self, handle: RRef[object]) -> None: ...

    @property
    def create(self) -> Callable[..., RRef[object]]: ...

    def encode(self, handle: RRef[object], out: codec.Outgoing, position: int | None = None) -> int: ...

    def value(self, worker: int, number: int, key: int, asker: int = -1) -> Future[Any]: ...

    def end_waits(self, rref: ReferenceId, creation: Future[object]) -> None: ...


class RRef(Generic[T_co]):
    """A reference to a value that lives on one worker, its owner. The owner keeps the value while any RRef is alive.

    ``RRef(value)`` makes one to a value of this worker; `aiorpc.remote` makes one to a value another worker creates.
    RRefs may be passed to any worker, as arguments and results and inside them, even before the value exists. Any
    thread may use the methods; blocking ones are refused on the worker's own loop. Cycles of RRefs across workers are
    not collected.
    """

    def __init__(self, value: T_co, type_hint: object = None) -> None:
        """type_hint: as torch's, without effect. Raises NotInitialized without a current worker."""
        references: ReferencesForRRef = cast(Any, registry.get()).references
        rref, fork = references.own(value, self)
        self._bind(references, rref, fork, references.engine.id, sys._getframe(1))

    def _bind(
        self,
        references: ReferencesForRRef,
        rref: ReferenceId,
        fork: ReferenceId,
        owner: int,
        frame: FrameType | None = None,
    ) -> None:
        """fork: LENT for a handle that is not counted and has the value itself, in `_lent`."""
        self._lent: Future[Any] | None = None
        self._rref = rref
        self._fork = fork
        self._owner = owner
        self._confirmed = owner == references.engine.id
        self._broken: str | None = None
        self._creation: Future[object] | None = None  # the creating call, if this handle came from it
        self._site = call_site(frame) if frame is not None else None
        self._references = references

    # --- where it is --------------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._references.peers.info(self._owner)

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return self._owner == self._references.engine.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this reference. Never blocks."""
        return self._confirmed

    # --- the value ----------------------------------------------------------------------------------------------------

    def local_value(self) -> T_co:
        """The value itself, on its owner. Blocks until it exists.

        Raised here: the error of the creation of the value; RpcUsageError on any other worker: use `to_here` or await
        the RRef.
        """
        if not self.is_owner():
            raise RpcUsageError(
                f"For {self}, can't call localValue() on user {self._references.engine.info}. "
                f"Call it on owner {self.owner()}, or use to_here() or `await rref`."
            )
        return self._value_future().wait()

    def to_here(self, timeout: float = -1.0) -> T_co:
        """A copy of the value; on the owner the value itself. Blocks until it exists.

        timeout: seconds; negative for the worker's default, 0 for no limit.

        Raised here: the error of the creation of the value; RpcTimeout, PeerLost; WouldBlockLoop on the worker's loop:
        ``await rref`` there.
        """
        self._check()
        if self.is_owner():
            return self._value_future().wait(self._references.engine.timeout(timeout) or None)
        self._references.engine.refuse_on_loop("rref.to_here()", "await rref")
        return wait_alone(self._fetch(timeout, 3))

    def __await__(self) -> Generator[object, None, T_co]:
        """The same value as `to_here`, without blocking."""
        return self._fetch(-1.0, 3).__await__()

    def _fetch(self, timeout: float, depth: int) -> Future[T_co]:
        self._check()
        if self.is_owner():
            return self._value_future()
        peer = self._references.peers.by_id(self._owner)
        seconds = self._references.engine.timeout(timeout)
        return self._asked(
            peer.call(Fetch(*self._rref), (), None, seconds, depth=depth, options=CallOptions(keeps=self))
        )

    def _asked(self, call: Future[T]) -> Future[T]:
        """After a call to the value: fail it if the creation of the value failed meanwhile. Returns the call."""
        if self._creation is not None and self._creation.done():
            self._references.end_waits(self._rref, self._creation)
        return call

    def _call_method(self, name: str, args: Sequence[object], seconds: float) -> Future[object]:
        """Call a method of the value on its owner, for the runtime itself."""
        self._ask()
        peer = self._references.peers.by_id(self._owner)
        return self._asked(peer.call(Method(*self._name(), name), args, None, seconds, options=CallOptions(keeps=self)))

    def _name(self) -> ReferenceId:
        """The name of the value in calls. Counts a lent handle from now on, because calls may come late."""
        if self._fork == LENT:
            self._references.count(self)
        return self._rref

    def _value_future(self) -> Future[T_co]:
        self._ask()
        return self._lent or self._references.value(*self._rref)

    def _ask(self) -> None:
        """The program uses the value, which raises an error of its creation: the error need not be logged."""
        if self._creation is not None:
            self._creation._mark_seen()

    def _check(self) -> None:
        if self._references.closed and self.is_owner():
            return  # the next step raises WorkerClosed
        self._ask()
        if self._creation is not None and self._creation.done():
            _raise_own(self._creation)
        if self._broken is not None:
            owner = self._references.peers.by_id(self._owner)
            gone = owner.gone or owner.parting
            failure = (RpcError if gone is None else type(gone))(f"{self} cannot be used: {gone or self._broken}")
            failure.__dict__.update(vars(gone) if gone is not None else {})
            raise failure

    # --- methods of the value -----------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = -1.0) -> RemoteMethods[Any]:
        """A proxy whose methods run on the owner and block until they have a result.

        timeout: seconds for each call; negative for the worker's default, 0 for no limit.

        Raised by its methods: WouldBlockLoop on the worker's loop: ``await rref.rpc_async().method()`` there.
        """
        return RemoteMethods(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = -1.0) -> RemoteMethods[Future[Any]]:
        """A proxy whose methods run on the owner and return a Future at once. timeout: as in `rpc_sync`."""
        return RemoteMethods(self, "rpc_async", timeout)

    def remote(self, timeout: float = -1.0) -> RemoteMethods[RRef[Any]]:
        """A proxy whose methods run on the owner and return an RRef of their result at once.

        timeout: as in `rpc_sync`.
        """
        return RemoteMethods(self, "remote", timeout)

    def stream(self, timeout: float = -1.0) -> RemoteMethods[BlockingIterator[Any]]:
        """A proxy whose methods are generators: ``async for item in ref.stream().method()`` takes what they yield.

        timeout: seconds for each item, otherwise as in `rpc_sync`. See `aiorpc.stream`.
        """
        return RemoteMethods(self, "stream", timeout)

    if not TYPE_CHECKING:  # type checkers must not see it

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with a hint: the program wants an attribute of the value."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text += (
                    ": this is a reference, and not the value. To call a method of the value, where that is: "
                    f"await ref.rpc_async().{name}(...), or ref.rpc_sync().{name}(...) in a script. "
                    "To fetch the value: await ref, or ref.to_here()"
                )
            raise AttributeError(text)

    # --- travelling and ending ----------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[int], object], tuple[int]]:
        out = codec.outgoing.get()
        if out is None or out.target is None:
            raise RpcUsageError(
                "Can not pickle rref in python pickler: an RRef can only travel in a call, as an argument or result"
            )
        number = self._references.encode(self, out)
        return codec.load_reference, (number,)

    def _travel(self, out: codec.Outgoing, position: int | None) -> None:
        """Put this reference into a message as a value of its own. See `codec.refer`."""
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
        return f"<{self} owned by {self._references.peers.describe(self._owner)}{made}>"


def _raise_own(creation: Future[object]) -> None:
    """Raise a copy of the error of a Future, if it has one. The original stays with the handle, and its traceback's
    frames hold the handle: a cycle that the garbage collector may not see.
    """
    error = creation.exception()
    copied = None if error is None else foreign.copy_of(error)
    if copied is None:
        creation.value()
        return
    creation._mark_seen()
    raise foreign.with_traceback(copied, None)


class RemoteMethods(Generic[R]):
    """Methods of an RRef's value, each of which gives an `R`. Every other attribute is a method of the value, without a
    round trip. Python's methods for copying are defined here; otherwise copying a proxy would call them on the remote
    value.
    """

    __slots__ = ("_rref", "_timeout", "_verb")

    def __init__(self, rref: RRef[object], verb: str, timeout: float) -> None:
        self._rref = rref
        self._verb = verb
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., R]:
        return partial(_invoke, self, name, 2)

    def __call__(self, *args: object, **kwargs: object) -> R:
        result: R = _invoke(self, "__call__", 3, *args, **kwargs)
        return result

    def __copy__(self) -> RemoteMethods[R]:
        return RemoteMethods(self._rref, self._verb, self._timeout)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        raise RpcUsageError(
            f"what {self._verb}() of {self._rref} gives stands for a value elsewhere: it has no deep copy, and cannot "
            f"be pickled or sent; pass the reference on in a call, and use its {self._verb}() there"
        )


def _invoke(proxy: RemoteMethods[R], name: str, depth: int, /, *args: object, **kwargs: object) -> Any:
    """Call a method of the value. depth: as of `Peer.call`."""
    rref = proxy._rref
    references = rref._references
    engine = references.engine
    peer = references.peers.by_id(rref._owner)
    if peer.gone is None or proxy._verb == "rpc_sync":
        rref._check()
    else:  # the call fails as a call by name does
        rref._ask()
    method = Method(*rref._name(), name)
    seconds = engine.timeout(proxy._timeout)
    if proxy._verb == "remote":
        return references.create(peer, method, args, kwargs, seconds, depth=depth, keeps=rref)
    if proxy._verb == "stream":
        return references.worker.open_stream(peer, method, args, kwargs, seconds, depth=depth, keeps=rref)
    if proxy._verb == "rpc_sync":
        engine.refuse_on_loop(f"rref.rpc_sync().{name}()", f"await rref.rpc_async().{name}()")
    future = rref._asked(peer.call(method, args, kwargs, seconds, depth=depth, options=CallOptions(keeps=rref)))
    return wait_alone(future) if proxy._verb == "rpc_sync" else future
