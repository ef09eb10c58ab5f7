"""The asynchronous verbs. Each finds the current worker and says what it wants; nothing else happens here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's stubs

from .futures import Future
from .options import RpcBackendOptions
from .protocol.identity import WorkerInfo
from .runtime.current import registry
from .runtime.handle import PeerHandle
from .runtime.peers import To
from .runtime.references import RRef
from .runtime.streams import Stream
from .runtime.worker import Worker


def init(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    options: RpcBackendOptions | None = None,
    store: Store | None = None,
) -> Worker:
    """A worker that joins when it is awaited, or joins and leaves with ``async with``, on the running loop.

    name: unique in the group; letters, digits, ``-``, ``_`` and ``:``. rank, world_size: with ``env://`` as torchrun
    sets them in RANK and WORLD_SIZE if not given; elsewhere a group without a world size is open at any time.
    init_method: ``env://`` (default), ``tcp://host:port`` or ``file:///path``. store: a torch Store to meet at instead.
    Joining raises RendezvousError within ``options.rpc_timeout`` seconds when the group cannot be formed.
    """
    return Worker(name, rank=rank, world_size=world_size, init_method=init_method, options=options, store=store)


def current() -> Worker:
    """The worker that verbs act on here: the one whose handler runs, else the process's. NotInitialized without one."""
    return registry.get()


def call(to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Run ``function(*args, **kwargs)`` on worker `to`; starts at once and returns a Future. Any thread.

    to: name, rank or WorkerInfo. Awaiting the Future gives the result or raises what the function raised, RpcTimeout
    after the worker's ``rpc_timeout``, PeerLost when the other worker dies. Raised here, with nothing sent:
    SerializationError, UnknownWorker, Overloaded. Cancelling the Future stops the callee as far as it can be stopped;
    it may have run in part.
    """
    worker = registry.get()
    return worker.peers.find(to).call(function, args, kwargs, worker.default_timeout)


def peer(to: To, *, timeout: float | None = None) -> PeerHandle:
    """A handle of a worker with options for the calls made through it. timeout: seconds, 0 for no limit."""
    return registry.get().peer(to, timeout=timeout)


def remote(to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
    """An RRef of the result of a call on worker `to`; returns at once, the result stays there. Any thread.

    Two forms: ``remote(to, func, *args, **kwargs)`` and torch's ``remote(to, func, args=(), kwargs={}, timeout=s)``,
    which is also taken when the third argument is a lone tuple or list. To send a lone tuple use ``peer(to).remote``.
    """
    worker = registry.get()
    timeout = worker.default_timeout
    if len(args) == 1 and type(args[0]) in (tuple, list) and kwargs.keys() <= {"kwargs", "timeout"}:
        kwargs = {"args": args[0], **kwargs}
        args = ()
    if (
        not args
        and kwargs
        and kwargs.keys() <= {"args", "kwargs", "timeout"}
        and type(kwargs.get("args", ())) in (tuple, list)
    ):
        timeout = worker.timeout(kwargs.get("timeout", -1.0))
        args, kwargs = tuple(kwargs.get("args", ())), dict(kwargs.get("kwargs") or {})
    return worker.references.create(worker.peers.find(to), function, args, kwargs, timeout, depth=2)


def stream(to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
    """``async for item in stream(to, generator_function, *args)``: items of a generator that runs on worker `to`.

    The producer stops while the consumer does (``options.stream_window`` items may be under way), and for good when the
    loop is left. Its error is raised in its place, after the items before it. The timeout is for each item.
    """
    worker = registry.get()
    return worker.open_stream(worker.peers.find(to), function, args, kwargs, worker.default_timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of the current worker, or of the one of that name. UnknownWorker if the group has none."""
    return registry.get().get_worker_info(worker_name)
