"""The blocking verbs for ordinary scripts, with the names and signatures of ``torch.distributed.rpc``.

They add no logic: `init_rpc` runs a worker on a loop in a thread of its own, and the other verbs wait for the worker's
Futures. A verb that would block its worker's loop raises WouldBlockLoop, which names what to await.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

from . import draining
from ._typing import Coro, Function, Kwargs, Later, T, Ts
from .errors import RpcUsageError, WorkerClosed, WouldBlockLoop
from .futures import Future
from .interrupts import follow
from .options import RpcBackendOptions
from .protocol.states import WorkerState
from .runtime.caller.misuse import check_arguments
from .runtime.caller.peers import To
from .runtime.calls.batched import Batched
from .runtime.engine.loops import LoopThread
from .runtime.group.group import ShutdownReport
from .runtime.node import registry
from .undoing import on_error
from .worker import Worker

_ENDING = (WorkerState.CLOSING, WorkerState.CLOSED)
UNSET_RPC_TIMEOUT = -1.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0


class BackendType(enum.Enum):
    """Names of backends, for programs that pass one; there is one runtime behind all of them."""

    AIORPC = "AIORPC"
    TENSORPIPE = "TENSORPIPE"


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    role: str = "",
) -> None:
    """Start this process's worker and wait until its group is complete. Its loop runs in a thread of its own (uvloop).
    name: unique in the group; see `aiorpc.init`. backend: for programs of torch that pass one; there is one runtime
    behind all of them.
    rank: -1 takes RANK from the environment, with ``env://``.
    world_size: None takes WORLD_SIZE from there. With ``tcp://`` and ``file://`` None makes a free group, which workers
        join and leave at any time.
    rpc_backend_options: all other options; the defaults if None. role: see `aiorpc.init`. Raised here: RendezvousError
    within ``rpc_timeout`` seconds; DeviceMapError, a kind of it, for invalid devices or device maps; RpcUsageError for
    an invalid name, role or options, or if this process has a worker already.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    rank_or_none = None if rank == -1 else rank  # other negative numbers are refused
    host(Worker(name, rank=rank_or_none, world_size=world_size, options=rpc_backend_options, role=role))


def host(worker: Worker) -> None:
    """Start a worker on a loop in a thread of its own, which `shutdown` ends; blocks until its group is complete.

    Raises the errors of `Worker.start`; RpcUsageError if this process has a worker already.
    """
    running = registry.nodes()
    if running:
        raise _already(running[0].engine.name)
    while True:
        former = registry.host(worker)
        if former is None:
            break
        if former.state not in _ENDING or former._thread is None:  # without a thread: another thread starts it
            raise _already(former.name)
        if former._thread.is_here:
            raise WouldBlockLoop("init_rpc() would block the event loop of the worker that was shut down; use a thread")
        # A handler has shut it down, perhaps not to the end.
        _end(former, partial(former.shutdown, False), "init_rpc()")
    follow(True)
    with on_error(_unhost, worker):
        thread = LoopThread(worker.name)
        thread.on_end = worker._loop_ended
        with on_error(_abandon, worker, thread):
            thread.start()
            thread.run(worker.start())
            worker._hosted_by = thread
        draining.follow()


def _abandon(worker: Worker, thread: LoopThread) -> None:
    """Starting the worker has failed or was interrupted, perhaps at the end: undo it."""
    try:
        if worker.state is WorkerState.RUNNING:
            thread.run(worker.shutdown(graceful=False))
    finally:
        thread.close()


def _unhost(worker: Worker) -> None:
    """Forget a worker that has ended or was not started."""
    registry.unhost(worker)
    follow(bool(registry.nodes()))
    draining.follow()


def _already(name: str) -> RpcUsageError:
    return RpcUsageError(f"RPC is already initialized: worker {name!r} runs in this process")


def shutdown(graceful: bool = True, timeout: float | None = None) -> ShutdownReport:
    """Leave the group, then end the worker's loop and thread; blocks. Nothing happens if there is no worker.

    graceful: finish what was accepted. In a fixed group serve until every live member has called this, too. False
        leaves at once. Verbs of other threads raise WorkerClosed from then on, and their waits after 3 s.
    timeout: seconds for all of it, 0 for no limit; the option ``shutdown_timeout`` if None.

    Returns the lost members, whether the time was up, and the references that were still alive. From any thread but the
    loop's.

    Raised here: WouldBlockLoop on the loop's thread; RpcUsageError if the worker runs on a loop of yours: ``await
    worker.shutdown()`` there.
    """
    return _leave(lambda worker: partial(worker.shutdown, graceful, timeout), "shutdown()")


def drain(timeout: float | None = None) -> ShutdownReport:
    """Leave without the other members, once what was accepted is over; blocks. Nothing happens without a worker.

    As `Worker.drain`, and then as `shutdown`: the worker's loop and thread end. From any thread but the loop's.

    timeout: seconds for all of it, 0 for no limit; the option ``drain_timeout`` if None.

    Raised here: the errors of `shutdown`.
    """
    return _leave(lambda worker: partial(worker.drain, timeout), "drain()")


def drained() -> ShutdownReport:
    """Block until the worker has left, as a signal that drains it, or another thread, has asked it to.

    For scripts that only serve. As `Worker.drained`, and then as `shutdown`. From any thread but the loop's; Ctrl-C
    ends the wait, and not the worker.

    Raised here: the errors of `shutdown`.
    """
    return _leave(lambda worker: worker.drained, "drained()")


def _leave(how: Callable[[Worker], Callable[[], Coro[ShutdownReport]]], verb: str) -> ShutdownReport:
    if registry.nodes():
        worker: Any = registry.get().worker
    else:  # a worker may be ending
        registry.forget()
        worker = registry.hosted
        if worker is None or worker.state not in _ENDING or worker._thread is None:
            return ShutdownReport()
    return _end(worker, how(worker), verb)


def _end(worker: Worker, how: Callable[[], Coro[ShutdownReport]], verb: str) -> ShutdownReport:
    """Shut a worker down, or wait for a shutdown that is under way, and end its thread."""
    thread = worker._thread
    report = worker._report()
    if report is None:
        worker._node.engine.refuse_on_loop(verb, f"await worker.{verb}")
    if thread is None:
        if report is not None:
            return report
        raise RpcUsageError(f"worker {worker.name!r} runs on a loop of yours; use `await worker.{verb}` there")
    try:
        if report is None:
            report = _wait_for_end(worker, thread, how)
        return report
    finally:
        # Not if the shutdown was refused or interrupted: the worker needs its loop. In a handler on that loop the
        # thread stays, too; the next `init_rpc` or `shutdown` ends it.
        if worker.closed and not thread.is_here:
            thread.close()
            _unhost(worker)


def _wait_for_end(worker: Worker, thread: LoopThread, how: Callable[[], Coro[ShutdownReport]]) -> ShutdownReport:
    try:
        with worker._node.engine.pool.excused():  # the shutdown must not wait for this thread's own handler
            return thread.run(how())
    except WorkerClosed:  # another thread was sooner, and has ended the loop
        report = worker._report()
        if report is None:
            raise
        return report


@overload
def rpc_sync(
    to: To,
    func: Batched[..., object, T],
    args: Sequence[object] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = -1.0,
) -> T: ...


@overload
def rpc_sync(
    to: To, func: Callable[[], Later[T]], args: None = None, kwargs: None = None, timeout: float = -1.0
) -> T: ...


@overload
def rpc_sync(to: To, func: Callable[[], T], args: None = None, kwargs: None = None, timeout: float = -1.0) -> T: ...


@overload
def rpc_sync(
    to: To, func: Callable[[*Ts], Later[T]], args: tuple[*Ts], kwargs: None = None, timeout: float = -1.0
) -> T: ...


@overload
def rpc_sync(to: To, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = None, timeout: float = -1.0) -> T: ...


@overload
def rpc_sync(
    to: To, func: Callable[..., Later[T]], args: Sequence[object] | None, kwargs: dict[str, Any], timeout: float = -1.0
) -> T: ...


@overload
def rpc_sync(
    to: To, func: Callable[..., T], args: Sequence[object] | None, kwargs: dict[str, Any], timeout: float = -1.0
) -> T: ...


@overload
def rpc_sync(to: To, func: Callable[..., Later[T]], *, kwargs: dict[str, Any], timeout: float = -1.0) -> T: ...


@overload
def rpc_sync(to: To, func: Callable[..., T], *, kwargs: dict[str, Any], timeout: float = -1.0) -> T: ...


def rpc_sync(
    to: To,
    func: Function,
    args: Sequence[object] | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on a worker and block for the result. See `aiorpc.call`.

    From any thread but the one of the worker's loop. Ctrl-C, or another exception of a signal handler, cancels the
    call.

    timeout: seconds; negative for the worker's ``rpc_timeout``, 0 for no limit.

    Raised here: the function's error, and the errors of `aiorpc.call` and its Future; WouldBlockLoop on the loop's
    thread, with nothing sent; RpcUsageError if args is not a tuple or kwargs not a dict, and for an invalid timeout.
    """
    node = registry.only or registry.get()
    if args is None:
        args = ()
    if (type(args) is not tuple and type(args) is not list) or (kwargs is not None and type(kwargs) is not dict):
        args, kwargs = check_arguments(args, kwargs)
    engine = node.engine
    if engine.thread == threading.get_ident() or asyncio._get_running_loop() is engine.loop:
        engine.refuse_on_loop("rpc_sync()", "await aiorpc.call(...)")
    limit = engine.default_timeout if timeout == UNSET_RPC_TIMEOUT else engine.timeout(timeout)
    future = node.peers.find(to).call(func, args, kwargs, limit)
    try:  # as `wait_alone`, inlined for speed
        return future.wait()
    except BaseException:
        future.cancel()
        raise
    finally:
        del future


@overload
def rpc_async(
    to: To,
    func: Batched[..., object, T],
    args: Sequence[object] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = -1.0,
) -> Future[T]: ...


@overload
def rpc_async(
    to: To, func: Callable[[], Later[T]], args: None = None, kwargs: None = None, timeout: float = -1.0
) -> Future[T]: ...


@overload
def rpc_async(
    to: To, func: Callable[[], T], args: None = None, kwargs: None = None, timeout: float = -1.0
) -> Future[T]: ...


@overload
def rpc_async(
    to: To, func: Callable[[*Ts], Later[T]], args: tuple[*Ts], kwargs: None = None, timeout: float = -1.0
) -> Future[T]: ...


@overload
def rpc_async(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = None, timeout: float = -1.0
) -> Future[T]: ...


@overload
def rpc_async(
    to: To, func: Callable[..., Later[T]], args: Sequence[object] | None, kwargs: dict[str, Any], timeout: float = -1.0
) -> Future[T]: ...


@overload
def rpc_async(
    to: To, func: Callable[..., T], args: Sequence[object] | None, kwargs: dict[str, Any], timeout: float = -1.0
) -> Future[T]: ...


@overload
def rpc_async(to: To, func: Callable[..., Later[T]], *, kwargs: dict[str, Any], timeout: float = -1.0) -> Future[T]: ...


@overload
def rpc_async(to: To, func: Callable[..., T], *, kwargs: dict[str, Any], timeout: float = -1.0) -> Future[T]: ...


def rpc_async(
    to: To,
    func: Function,
    args: Sequence[object] | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Run ``func(*args, **kwargs)`` on a worker; returns a Future at once, to wait for or to await. See `aiorpc.call`.

    timeout: seconds; negative for the worker's ``rpc_timeout``, 0 for no limit.

    Raised here: the errors of `aiorpc.call`; RpcUsageError if args is not a tuple or kwargs not a dict, and for an
    invalid timeout. Any thread.
    """
    node = registry.only or registry.get()
    if args is None:
        args = ()
    if (type(args) is not tuple and type(args) is not list) or (kwargs is not None and type(kwargs) is not dict):
        args, kwargs = check_arguments(args, kwargs)
    return node.peers.find(to).call(func, args, kwargs, node.engine.timeout(timeout))


__all__ = [
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
    "BackendType",
    "drain",
    "drained",
    "host",
    "init_rpc",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
