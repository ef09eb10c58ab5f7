"""Handles of objects that other workers serve under names."""

from __future__ import annotations

import sys
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from ..._typing import Args, Kwargs
from ...collecting import wait_alone
from ...errors import RpcUsageError
from ...futures import Future
from ...protocol.identity import WorkerInfo, check_object_name
from ...protocol.messages import ObjectMethod
from ...rights import is_public
from ...sites import call_site
from ..calls.options import PLAIN_CALL, WAITING_CALL
from ..references.references import References
from ..references.rref import RRef
from .misuse import stays_here
from .peers import Peers, To
from .retrying import Retries, RetryOptions
from .stream import Stream, open_stream

R = TypeVar("R")


class HandleContext(Protocol):
    """The calling worker, as a handle needs it."""

    peers: Peers
    references: References
    retries: Retries


class ObjectHandle:
    """An object that another worker serves under a name: ``rpc.peer(worker).object(name)``. Any thread.

    ``await handle.method(*args, **kwargs)`` runs a public method there, as `PeerHandle.call` runs a function; where the
    method has one of the names below: ``handle.rpc_async().method(...)``. A worker that comes in the other one's place
    and serves an object of that name is found by the same handle. Awaiting raises UnknownObject if the worker serves
    none of that name, NotAllowed if it does not let this one call the method.
    """

    __slots__ = ("_home", "_name", "_retried", "_timeout", "_to", "_wait")

    def __init__(
        self, home: HandleContext, to: To, name: str, timeout: float, wait: bool, retried: RetryOptions | None = None
    ) -> None:
        """As of the handle of its worker. retried: how calls are tried again; None if they are not."""
        self._home = home
        self._to = to
        self._name = check_object_name(name)
        self._timeout = timeout
        self._wait = wait
        self._retried = retried

    def rpc_sync(self, timeout: float = -1.0) -> ObjectMethods[Any]:
        """A proxy whose methods run there and block until they have a result.

        timeout: seconds for each call; negative for that of the worker's handle, 0 for no limit. Not for the loop that
        runs the worker, where the methods raise WouldBlockLoop: ``await handle.method()`` there.
        """
        return ObjectMethods(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = -1.0) -> ObjectMethods[Future[Any]]:
        """A proxy whose methods run there and return a Future at once. timeout: as in `rpc_sync`."""
        return ObjectMethods(self, "rpc_async", timeout)

    def remote(self, timeout: float = -1.0) -> ObjectMethods[RRef[Any]]:
        """A proxy whose methods run there and return an RRef of their result at once. timeout: as in `rpc_sync`.

        Its methods raise RpcUsageError on a handle with retries: the value of a reference is made once.
        """
        return ObjectMethods(self, "remote", timeout)

    def stream(self, timeout: float = -1.0) -> ObjectMethods[Stream[Any]]:
        """A proxy whose methods are generators: ``async for item in handle.stream().method()`` takes what they yield.

        timeout: seconds for each item, otherwise as in `rpc_sync`. See `aiorpc.stream`. Its methods raise RpcUsageError
        on a handle with retries: items of a stream cannot be taken back.
        """
        return ObjectMethods(self, "stream", timeout)

    def __getattr__(self, name: str) -> _MethodOfObject[Future[Any]]:
        if name in self.__slots__:  # not set yet: a copy is being made
            raise AttributeError(name)
        return _MethodOfObject(self, "rpc_async", -1.0, _checked(self, name))

    def __call__(self, *args: object, **kwargs: object) -> Future[Any]:
        method: _MethodOfObject[Future[Any]] = _MethodOfObject(self, "rpc_async", -1.0, "__call__")
        future: Future[Any] = _invoke(method, args, kwargs)
        return future

    def __copy__(self) -> ObjectHandle:
        return ObjectHandle(self._home, self._to, self._name, self._timeout, self._wait, self._retried)

    def __reduce__(self) -> NoReturn:
        """A handle makes calls of this worker, and works nowhere else."""
        to = self._to.name if isinstance(self._to, WorkerInfo) else self._to
        raise stays_here(self, f"rpc.peer({to!r}).object({self._name!r})")

    def __repr__(self) -> str:
        return f"<aiorpc.peer {self._to!r}, object {self._name!r}>"


class ObjectMethods(Generic[R]):
    """Methods of an object, called by one verb."""

    __slots__ = ("_handle", "_timeout", "_verb")

    def __init__(self, handle: ObjectHandle, verb: str, timeout: float) -> None:
        self._handle = handle
        self._verb = verb
        self._timeout = timeout

    def __getattr__(self, name: str) -> _MethodOfObject[R]:
        if name in self.__slots__:  # not set yet: a copy is being made
            raise AttributeError(name)
        return _MethodOfObject(self._handle, self._verb, self._timeout, _checked(self._handle, name))

    def __call__(self, *args: object, **kwargs: object) -> R:
        result: R = _invoke(_MethodOfObject(self._handle, self._verb, self._timeout, "__call__"), args, kwargs)
        return result


class _MethodOfObject(NamedTuple, Generic[R]):
    """A method of an object, called by one verb. timeout: seconds, negative for that of the handle."""

    handle: ObjectHandle
    verb: str
    timeout: float
    name: str

    def __call__(self, *args: object, **kwargs: object) -> R:
        result: R = _invoke(self, args, kwargs)
        return result

    def __await__(self) -> NoReturn:
        raise RpcUsageError(
            f"{self.name!r} of {self.handle!r} is awaited, and not called: an object serves its methods alone; "
            f"write `await ....{self.name}()`, and for an attribute a method that returns it"
        )


def _checked(handle: ObjectHandle, name: str) -> str:
    if not is_public(name):
        raise AttributeError(f"{name!r} of {handle!r} is private: an object serves its public methods", name=name)
    return name


def _invoke(method: _MethodOfObject[R], args: Args, kwargs: Kwargs) -> Any:
    handle, verb, timeout, name = method
    home, to, retried = handle._home, handle._to, handle._retried
    function = ObjectMethod(handle._name, name)
    peer = home.peers.find(to)
    seconds = handle._timeout if timeout == -1.0 else peer.engine.timeout(timeout, handle._timeout)
    if verb == "rpc_sync":
        peer.engine.refuse_on_loop(f"{handle!r}.rpc_sync().{name}()", f"await the object's {name}()")
    elif verb in ("remote", "stream") and retried is not None:
        raise not_tried_again(verb, to)
    if verb == "remote":
        return home.references.create(peer, function, args, kwargs, seconds, depth=3)
    if verb == "stream":
        return open_stream(peer, function, args, kwargs, seconds, wait=handle._wait, depth=3)
    if retried is not None:
        future = home.retries.call(to, function, args, kwargs, seconds, retried, call_site(sys._getframe(2)))
    else:
        future = peer.call(
            function, args, kwargs, seconds, depth=3, options=WAITING_CALL if handle._wait else PLAIN_CALL
        )
    return wait_alone(future) if verb == "rpc_sync" else future


def not_tried_again(verb: str, to: To) -> RpcUsageError:
    """The error of a verb without retries."""
    return RpcUsageError(f"{verb}() is not tried again: use rpc.peer({to!r}) without retries")
