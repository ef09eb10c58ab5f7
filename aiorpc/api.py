"""The asynchronous verbs. Each finds the current worker and says what it wants; nothing else happens here."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch.distributed import Store

from .futures import Future
from .options import RpcBackendOptions
from .protocol.identity import WorkerInfo
from .protocol.retries import Backoff
from .queues import QueueHandle
from .runtime.callee.objects import ServedObject
from .runtime.caller.handle import PeerHandle
from .runtime.caller.peers import To
from .runtime.caller.stream import Stream, open_stream
from .runtime.fanout.options import Quorum
from .runtime.fanout.peer_group import PeerGroup
from .runtime.node import registry
from .runtime.publication.subscription import Publication, Subscription
from .runtime.references.rref import RRef
from .runtime.worker import Worker


def init(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    options: RpcBackendOptions | None = None,
    store: Store | None = None,
    role: str = "",
) -> Worker:
    """A worker that joins when it is awaited, or joins and leaves with ``async with``, on the running loop.

    name: unique in the group; letters, digits, ``-``, ``_`` and ``:``. rank, world_size: with ``env://`` as torchrun
    sets them in RANK and WORLD_SIZE if not given; elsewhere a group without a world size is open at any time.
    init_method: ``env://`` (default), ``tcp://host:port`` or ``file:///path``. store: a torch Store to meet at instead.
    role: what this worker is to the others, by which their option ``allow`` decides what it may call; of the letters
    that names have.
    Joining raises RendezvousError within ``options.rpc_timeout`` seconds when the group cannot be formed;
    DeviceMapError, a kind of it, for devices or device maps that cannot be; RpcUsageError for a rank, a size or an
    init_method that makes no sense. Raised here: RpcUsageError for a name, a role, options or a store that
    cannot be.
    """
    return Worker(
        name, rank=rank, world_size=world_size, init_method=init_method, options=options, store=store, role=role
    )


def current() -> Worker:
    """The worker that verbs act on here: the one whose handler runs, else the process's only one.

    With several, that of the ``async with`` block this runs in. NotInitialized without one, or if nothing says which;
    WorkerClosed if the loop of the only one has ended.
    """
    worker: Worker = registry.get().worker
    return worker


def call(to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Run ``function(*args, **kwargs)`` on worker `to`; starts at once and returns a Future. Any thread.

    to: name, rank or WorkerInfo. Awaiting the Future gives the result or raises what the function raised, RpcTimeout
    after the worker's ``rpc_timeout``, PeerLost when the other worker dies. Raised here, with nothing sent:
    SerializationError, UnknownWorker, Overloaded; NotInitialized without a worker, WorkerClosed if it has left,
    RpcUsageError for what names no worker. Cancelling the Future stops the callee as far as it can be stopped;
    it may have run in part.
    """
    node = registry.only or registry.get()
    return node.peers.find(to).call(function, args, kwargs, node.engine.default_timeout)


def peer(
    to: To,
    *,
    timeout: float | None = None,
    wait: bool = False,
    retries: int = 0,
    backoff: float | tuple[float, float] = Backoff(),
    idempotent: bool = False,
) -> PeerHandle:
    """A handle of a worker with options for the calls made through it.

    timeout: seconds, 0 for no limit; None for this worker's ``rpc_timeout``. wait: whether calls and streams wait,
    within their deadlines, for a worker of that name to join a group without a size, also where one has left or was
    lost; what `remote` makes has to be there. retries: how often `call` is tried again if the worker was lost, left,
    refused the connection, or was overloaded, so for calls that may run twice; all tries together have the one timeout.
    backoff: seconds that the pause before the first retry has at most, or a pair with
    those of the longest one; pauses are of random length, up to twice as long with each try. idempotent: whether one
    process runs such a call once at most, and gives its first answer again. UnknownWorker if the group cannot have it;
    RpcUsageError for options that cannot be, or for what names no worker.
    """
    return current().peer(to, timeout=timeout, wait=wait, retries=retries, backoff=backoff, idempotent=idempotent)


def group(
    to: str | Sequence[To] | None = None,
    *,
    role: str | None = None,
    timeout: float | None = None,
    quorum: Quorum | None = None,
    wait: bool = False,
    retries: int = 0,
    backoff: float | tuple[float, float] = Backoff(),
    idempotent: bool = False,
) -> PeerGroup:
    """Several workers, to be called together: those of a list, or those that a pattern or a role means at the moment.

    to: a list of names, ranks or WorkerInfos, whose order is that of the members; or a pattern as file names have
    (``"actor*"``). role: as the workers gave it to `init`; with a pattern both have to fit. Members by pattern or role
    are those that live at each call, this worker among them if it fits, by id: who joins is one, who has gone is none.
    quorum: how many values are enough for `PeerGroup.call`, as a number or as a share of the members above 0 and up to
    1.0; None waits for all. The other options are those of `peer`, for the call to each member.
    Raised here: RpcUsageError for an empty list, a worker that is in it twice, or options that cannot be;
    UnknownWorker for a name that the group cannot have. That a pattern or a role fits nobody is told by the calls.
    """
    return current().group(
        to,
        role=role,
        timeout=timeout,
        quorum=quorum,
        wait=wait,
        retries=retries,
        backoff=backoff,
        idempotent=idempotent,
    )


def serve(name: str, value: Any, *, replace: bool = False) -> ServedObject:
    """Have other workers call methods of an object: ``rpc.peer(worker).object(name).method(...)``. Any thread.

    name: one that this worker serves no other object under; of the letters that names of workers have. Public methods
    are served, each as a function of its kind is: in a thread, on the loop if it is a coroutine, as a stream if it is a
    generator; who may call them is for the option ``allow``, as for references. replace: whether it may take the place
    of another object of that name, whose calls under way go on. What is returned ends the service by its ``close()``,
    or as a context manager; the worker's end does so as well, and until then the object is kept. RpcUsageError for a
    name that cannot be or is taken, for None and for references; NotInitialized, WorkerClosed.
    ``Worker.serve`` does it before the worker has joined: then whoever meets the worker finds the object.
    """
    return current().serve(name, value, replace=replace)


def queue(name: str, *, owner: str, timeout: float | None = None) -> QueueHandle:
    """A handle of a queue that another worker owns (`aiorpc.Queue`), or this one; nothing is sent.

    name: that of the queue. owner: the name of its worker; one that takes that name, and makes such a queue, is found
    by the same handle. timeout: seconds that each of its methods has, 0 for no limit of those that wait; None for the
    worker's ``rpc_timeout``. Any thread. RpcUsageError for names that cannot be, NotInitialized. That there is no
    such queue is told by the methods: UnknownObject.
    """
    return QueueHandle(name, owner, timeout)._bind()


def wait_for(to: To, *, timeout: float | None = None) -> Future[WorkerInfo]:
    """A Future of the WorkerInfo of a worker, which settles when that has joined and answers. Any thread.

    For a group without a size, where workers come and go; ``await`` it, or ``wait()`` for it in a thread. timeout:
    seconds, 0 for no limit; None for this worker's ``rpc_timeout``; past it RpcTimeout is raised. Raised as by `call`:
    UnknownWorker for what the group cannot have; PeerLost and PeerLeft in a group of fixed size, which nobody joins.
    """
    return current().wait_for(to, timeout=timeout)


@overload
def remote(to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]: ...


@overload
def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = -1.0,
) -> RRef[Any]: ...


def remote(*given: Any, **named: Any) -> RRef[Any]:
    """An RRef of the result of a call on worker `to`; returns at once, the result stays there. Any thread.

    Two forms: ``remote(to, func, *args, **kwargs)``, and torch's ``remote(to, func, args=(), kwargs=None, timeout=s)``.
    The latter is meant when there is nothing but keywords of these three names, and when a lone tuple or list is given,
    or one and a dict, as in ``remote(to, func, (1, 2), {"k": 3})``; to send those to the function use
    ``peer(to).remote``. timeout: seconds, negative for the worker's ``rpc_timeout``, 0 for no limit; past it the call
    is cancelled, and the RRef raises RpcTimeout from then on.

    The function's error is raised by whoever asks for the value. Raised here, with nothing sent: SerializationError,
    UnknownWorker (also for who has not joined yet), Overloaded, NotInitialized, WorkerClosed, and RendezvousError if
    only the store can tell where the worker is and does not answer.
    """
    node = registry.get()
    if len(given) < 2 or _is_torch_form(given[2:], named):
        to, function, args, kwargs, timeout = _remote_as_in_torch(*given, **named)
        timeout = node.engine.timeout(timeout)
    else:
        (to, function, *args), kwargs, timeout = given, named, node.engine.default_timeout
    return node.references.create(node.peers.find(to), function, tuple(args), kwargs, timeout, depth=2)


def _is_torch_form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what follows the function is torch's ``args``, ``kwargs`` and ``timeout``."""
    kinds: dict[str, tuple[type, ...]] = {"args": (tuple, list), "kwargs": (dict,), "timeout": ()}
    if not (args or kwargs) or len(args) > len(kinds) or not kwargs.keys() <= set(list(kinds)[len(args) :]):
        return False
    given = {
        **dict(zip(kinds, args, strict=False)),
        **{key: value for key, value in kwargs.items() if value is not None},
    }
    timeout = given.pop("timeout", 0)  # of all kinds that `options.seconds` takes
    if isinstance(timeout, bool) or not isinstance(timeout, (numbers.Real, timedelta)):
        return False
    return all(type(value) in kinds[key] for key, value in given.items())


def _remote_as_in_torch(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = -1.0,
) -> tuple[To, Callable[..., Any], Sequence[Any], dict[str, Any], float]:
    return to, func, args or (), dict(kwargs or {}), timeout


def stream(to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
    """``async for item in stream(to, generator_function, *args)``: items of a generator that runs on worker `to`.

    The producer stops while the consumer does (``options.stream_window`` items may be under way), and for good when the
    loop is left. Its error is raised in its place, after the items before it. The timeout is for each item.
    """
    node = registry.get()
    return open_stream(node.peers.find(to), function, args, kwargs, node.engine.default_timeout)


def publish(name: str, value: Any) -> Future[Publication]:
    """Give a value to all who subscribe to a name, as its next version; returns a Future at once. Any thread.

    ``w = await publish("policy", model.state_dict())``, or ``publish(...).wait()`` in a thread that may block. The
    value is taken as it is at this moment, but the bytes of its tensors are copied until the Future has settled: they
    must not be changed before that, and may be from then on. Nobody waits for a reader, and no reader gets half of a
    version.
    ``w.version`` counts from 1 on, also when another worker goes on with the name; ``w.delivered()`` says who has it.

    value: a tensor, or a tree of tensors and whatever else may be sent, but for references; storages that tensors share
    stay shared, and what lies on a device is copied to the host, on the current streams. All readers of a host read one
    copy in shared memory, as long as ``options.shared_memory`` has room for it.
    A name has one publisher at a time: the Future raises RpcUsageError if another worker that lives publishes it, with
    its name, RendezvousError if the store of the group cannot be asked about that, the first time, and NotAllowed if no
    other worker takes that name from this one's role (option ``allow``). Raised here:
    RpcUsageError for what can be no name, SerializationError, NotInitialized, WorkerClosed. Cancelling the Future does
    not keep the version from being published. The newest version is kept until the name is unpublished, or this worker
    leaves.
    """
    return current().publish(name, value)


def unpublish(name: str) -> Future[None]:
    """Publish a name no longer; returns a Future at once. Any thread.

    ``await unpublish("policy")``, or ``unpublish("policy").wait()`` in a thread that may block. Versions that were
    published before the call are published still. Then the subscriptions to the name end, on all workers: a reader
    takes what has come to it, and its loop is over. Whoever is to have the last version has to have it before: ``await
    published.delivered()``. A delivery that is still waited for settles as it stands. Values that readers have taken
    stay as they are; the memory of a version goes when the last of them is dropped.
    The name is free from then on. This worker or another one may publish it anew, and versions go on; who subscribes
    afterwards waits for that. The Future settles when all members have heard it; one that does not answer for 5 s hears
    it later, and may follow the next publisher as if this one had left.

    The Future raises RpcUsageError if this worker does not publish the name, with who does, and RendezvousError, with
    the name as it was, if the store of the group cannot be asked. Raised here: RpcUsageError for what can be no name,
    NotInitialized, WorkerClosed. Cancelling the Future does not keep the name from being unpublished.
    """
    return current().unpublish(name)


def subscribe(
    name: str, *, timeout: float | None = None, map_location: str | torch.device | None = None
) -> Subscription:
    """``async for v in subscribe("policy")``: the newest version of what is published under a name. Any thread.

    Each turn waits for a version that is newer than the one before, and gives the newest there is; the next one is
    fetched meanwhile. ``v.value``, ``v.version``, ``v.publisher``. In a thread that may block: ``for v in ...``.
    Whoever subscribes late begins with the newest version. timeout: seconds that one turn waits, 0 for no limit; None
    for this worker's ``rpc_timeout``; past it RpcTimeout is raised. map_location: the device that all tensors are moved
    to as a version is taken, by the thread that takes it; None leaves them in shared memory. RpcUsageError for what can
    be no name, timeout or device, NotInitialized, WorkerClosed. See `Subscription` for how it ends.
    """
    return current().subscribe(name, timeout=timeout, map_location=map_location)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of the current worker, or of the one of that name. Returns at once, but for a look at the store.

    UnknownWorker if the group cannot have it, or has not had it yet. Of one that has gone: in a group without a size
    PeerLeft or PeerLost, as a call to its name; in one of fixed size what it had, as its place has that for ever.
    """
    return current().get_worker_info(worker_name)
