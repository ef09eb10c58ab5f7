"""The handles that `aiorpc.peer` returns: another worker, with options for its calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, Self, overload

from ..._typing import Arg, Function, Items, Later, P, T
from ...errors import RpcUsageError
from ...futures import Future
from ...protocol.identity import WorkerInfo
from ...protocol.retries import check_backoff, check_retries
from ...sites import call_site
from ..calls.batched import Batched
from ..calls.options import PLAIN_CALL, WAITING_CALL
from ..references.rref import RRef
from .misuse import stays_here
from .objects import HandleContext, ObjectHandle, not_tried_again
from .peers import To
from .retrying import RetryOptions
from .stream import Stream, open_stream


class PeerHandle:
    """A worker with options for the calls made through this handle; see `aiorpc.peer`. Any thread."""

    def __init__(self, home: HandleContext, to: To, timeout: float, *, wait: bool = False) -> None:
        self._home = home
        self._to = to
        self._timeout = timeout
        self._wait = wait
        self._options = WAITING_CALL if wait else PLAIN_CALL

    @overload
    def call(self, function: Batched[..., Arg, T], /, *args: Arg, **kwargs: Arg) -> Future[T]: ...

    @overload
    def call(self, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    @overload
    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def call(self, function: Function, /, *args: Arg, **kwargs: Arg) -> Future[Any]:
        """As `aiorpc.call`, with this handle's options."""
        return self._home.peers.find(self._to).call(function, args, kwargs, self._timeout, options=self._options)

    @overload
    def remote(self, function: Batched[..., Arg, T], /, *args: Arg, **kwargs: Arg) -> RRef[T]: ...

    @overload
    def remote(self, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...

    @overload
    def remote(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...

    def remote(self, function: Function, /, *args: Arg, **kwargs: Arg) -> RRef[object]:
        """An RRef of the function's result on that worker, with this handle's timeout; it does not wait for the worker
        to join.
        """
        home = self._home
        return home.references.create(home.peers.find(self._to), function, args, kwargs, self._timeout, depth=2)

    def stream(self, function: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        """As `aiorpc.stream`, with this handle's options."""
        peer = self._home.peers.find(self._to)
        return open_stream(peer, function, args, kwargs, self._timeout, wait=self._wait)

    def object(self, name: str) -> ObjectHandle:
        """The object that this worker serves under that name, with this handle's options; nothing is sent.

        RpcUsageError if it can be no name of an object.
        """
        return ObjectHandle(self._home, self._to, name, self._timeout, self._wait)

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce__(self) -> NoReturn:
        """A handle makes calls of this worker, and works nowhere else."""
        to = self._to.name if isinstance(self._to, WorkerInfo) else self._to
        raise stays_here(self, f"rpc.peer({to!r})")

    def __repr__(self) -> str:
        return f"<aiorpc.peer {self._to!r}, timeout {self._timeout:g} s>"


class RetryingHandle(PeerHandle):
    """A worker whose calls are tried again; see `aiorpc.peer`. Any thread."""

    def __init__(self, home: HandleContext, to: To, timeout: float, options: RetryOptions) -> None:
        super().__init__(home, to, timeout, wait=options.wait)
        self._retry = options

    @overload
    def call(self, function: Batched[..., Arg, T], /, *args: Arg, **kwargs: Arg) -> Future[T]: ...

    @overload
    def call(self, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    @overload
    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def call(self, function: Function, /, *args: Arg, **kwargs: Arg) -> Future[Any]:
        """As `aiorpc.call`, with this handle's retries. The arguments must not change until it has ended."""
        site = call_site(sys._getframe(1))
        return self._home.retries.call(self._to, function, args, kwargs, self._timeout, self._retry, site)

    def remote(self, function: Function, /, *args: Arg, **kwargs: Arg) -> NoReturn:
        """Refused: the value of a reference is made once."""
        raise self._refusal("remote")

    def stream(self, function: Function, /, *args: Arg, **kwargs: Arg) -> NoReturn:
        """Refused: items of a stream cannot be taken back."""
        raise self._refusal("stream")

    def object(self, name: str) -> ObjectHandle:
        """As `PeerHandle.object`; calls of its methods are tried again, also while it is not served."""
        return ObjectHandle(self._home, self._to, name, self._timeout, self._wait, self._retry)

    def _refusal(self, verb: str) -> RpcUsageError:
        return not_tried_again(verb, self._to)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self._retry.retries} retries>"


def retry_options(wait: bool, retries: int, backoff: object, idempotent: bool) -> RetryOptions:
    """The checked options. RpcUsageError for wrong ones."""
    retries, backoff = check_retries(retries), check_backoff(backoff)
    if not isinstance(idempotent, bool):
        raise RpcUsageError(f"idempotent must be True or False, not {idempotent!r:.40}")
    if idempotent and not retries:
        raise RpcUsageError("idempotent=True says how calls are tried again, and retries is 0: give retries=, too")
    return RetryOptions(retries, backoff, idempotent, wait)


def make_handle(
    home: HandleContext, to: To, timeout: float, wait: bool, retries: int, backoff: object, idempotent: bool
) -> PeerHandle:
    """The handle for these options. RpcUsageError for wrong ones."""
    options = retry_options(wait, retries, backoff, idempotent)
    if not options.retries:
        return PeerHandle(home, to, timeout, wait=wait)
    return RetryingHandle(home, to, timeout, options)
