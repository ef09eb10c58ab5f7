"""The asynchronous verbs. Each finds the current worker and calls it; nothing else happens here."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch.distributed import Store

from ._typing import Function, Items, Kwargs, Later, P, T, Ts
from .futures import Future
from .observability.recorder import Recording
from .options import RpcBackendOptions
from .protocol.identity import WorkerInfo
from .protocol.retries import Backoff
from .queues import QueueHandle
from .runtime.callee.objects import ServedObject
from .runtime.caller.handle import PeerHandle
from .runtime.caller.peers import To
from .runtime.caller.stream import Stream, open_stream
from .runtime.calls.batched import Batched
from .runtime.fanout.options import Quorum
from .runtime.fanout.peer_group import PeerGroup
from .runtime.meeting.launchers import Launched, found
from .runtime.node import registry
from .runtime.publication.subscription import Publication, Subscription
from .runtime.references.rref import RRef
from .worker import Worker


def init(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    options: RpcBackendOptions | None = None,
    store: Store | None = None,
    role: str = "",
    progress: bool = False,
) -> Worker:
    """A worker that joins when it is awaited, or joins and leaves with ``async with``, on the running loop.

    name: unique in the group; letters, digits, ``-``, ``_`` and ``:``. In ``"{role}{rank}"`` the words in braces stand
        for what this worker has, and so does ``{local_rank}``; ``{rank:02}`` has two digits at least.
    rank, world_size: with ``env://`` as the launcher says, if not given: torchrun by RANK and WORLD_SIZE, others by
        variables of their own (`launched`). Elsewhere a group without a world size is free: workers join and leave it
        at any time.
    init_method: where the workers meet: ``env://`` (the default), ``tcp://host:port`` or ``file:///path``.
    options: everything else that can be set; the defaults if None.
    store: a torch Store to meet at, in place of `init_method`.
    role: the role of this worker, by which the option ``allow`` of others decides what this worker may call. Letters as
        in `name`. If it is empty: that of the variable AIORPC_ROLE, or of ``torchrun --role``.
    progress: whether to show, in a terminal or a notebook, that it joins, and how many of how many members have come.
        Needs rich or tqdm.

    Raised here: RpcUsageError for an invalid name, role, options or store, for progress without either package, and for
    a pattern with a word that is not known of this worker.

    Raised by joining: RendezvousError within ``options.rpc_timeout`` seconds when the group cannot be formed;
    DeviceMapError, a kind of it, for invalid devices or device maps; RpcUsageError for an invalid rank, size or
    init_method.
    """
    return Worker(
        name,
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        options=options,
        store=store,
        role=role,
        progress=progress,
    )


def launched() -> Launched | None:
    """What the launcher of this process says of it: its rank, and that among the processes of this host, for a device.

    None if the environment tells no rank. Before joining as well as after, from any thread.

    Raised here: RendezvousError if variables of the environment contradict each other or say too little; RpcUsageError
    for a number that is none.
    """
    return found(os.environ)


def current() -> Worker:
    """The worker that verbs act on here: the worker whose handler runs, or the only worker of the process.

    In a process with several workers it is the worker of the surrounding ``async with`` block. From any thread.

    Raised here: NotInitialized if there is no worker, or several and nothing says which; WorkerClosed if the loop of
    the only one has ended.
    """
    worker: Worker = registry.get().worker
    return worker


@overload
def call(to: To, function: Batched[..., object, T], /, *args: object, **kwargs: object) -> Future[T]: ...


@overload
def call(to: To, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...


@overload
def call(to: To, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...


def call(to: To, function: Function, /, *args: object, **kwargs: object) -> Future[Any]:
    """Run ``function(*args, **kwargs)`` on worker `to`; starts at once and returns a Future. Any thread.

    Awaiting the Future gives the result, or raises what the function raised. Cancelling it tells the callee to stop;
    the function may have run in part.

    to: name, rank or WorkerInfo.
    function: a function, a class, a bound method, or an operator of torch. Functions of modules go by name; lambdas and
        closures go by value.

    Raised here, with nothing sent: SerializationError, UnknownWorker, Overloaded; NotInitialized without a worker,
    WorkerClosed if it has left, RpcUsageError if `to` is neither a name, a rank nor a WorkerInfo.

    Raised by the Future: what the function raised; RpcTimeout after the worker's ``rpc_timeout``; PeerLost or PeerLeft
    when the other worker dies or leaves.
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
    """A handle of a worker, with options for the calls made through it. Any thread; nothing is sent.

    timeout: seconds, 0 for no limit; None for this worker's ``rpc_timeout``.
    wait: in a free group, whether calls and streams wait, within their deadlines, for a worker of that name to join,
        even after one has left or was lost. `PeerHandle.remote` does not wait.
    retries: how often a call is tried again if the worker was lost, left, refused the connection, or was overloaded.
        Only for functions that may run twice. All tries together have the one timeout.
    backoff: the longest pause before the first retry in seconds, or a pair with the limit of all pauses. Pauses are of
        random length, up to twice as long with each try.
    idempotent: whether one process runs such a call at most once, and gives its first answer again.

    Raised here: UnknownWorker if the group cannot have it; RpcUsageError for invalid options, or an invalid `to`.
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
    progress: bool = False,
) -> PeerGroup:
    """Several workers, to be called together: a list of workers, or all that fit a pattern or a role.

    to: a list of names, ranks or WorkerInfos, in the order of the members; or a pattern like those for file names
        (``"actor*"``).
    role: the workers' argument of `init`. With a pattern both have to fit.
    quorum: how many values are enough for `PeerGroup.call`, as a number, or as a share of the members above 0 and up to
        1.0. None waits for all.
    timeout, wait, retries, backoff, idempotent: as of `peer`, for the call to each member.
    progress: whether `PeerGroup.call` shows, in a terminal or a notebook, how many outcomes have come. Needs rich or
        tqdm.

    Members by pattern or role are the workers that live at the time of each call, by id; this worker is among them if
    it fits.

    Raised here: RpcUsageError for an empty list, a worker that is in it twice, or invalid options; UnknownWorker for a
    name that the group cannot have. If a pattern or a role fits no worker, the calls raise that.
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
        progress=progress,
    )


def serve(name: str, value: object, *, replace: bool = False) -> ServedObject:
    """Let other workers call methods of an object: ``rpc.peer(worker).object(name).method(...)``. Any thread.

    Public methods are served like functions: in a thread; on the loop for a coroutine function; as a stream for a
    generator function. The option ``allow`` decides which workers may call them. The object is kept until ``close()``
    of the returned handle, the end of its ``with`` block, or the end of the worker. `Worker.serve` does it before the
    worker has joined, so no caller comes too early.

    name: of the object, unique at this worker. Letters as in names of workers.
    value: the object.
    replace: whether it may replace an object of that name. Calls of the replaced object that are under way go on.

    Raised here: RpcUsageError for a name that is invalid or taken, for None and for references; NotInitialized,
    WorkerClosed.
    """
    return current().serve(name, value, replace=replace)


def queue(name: str, *, owner: str, timeout: float | None = None) -> QueueHandle[Any]:
    """A handle of a queue that any worker owns (`aiorpc.Queue`). Any thread; nothing is sent.

    name: of the queue.
    owner: the name of its worker. If another worker takes that name and makes such a queue, the handle finds that.
    timeout: seconds for each of its methods, 0 for no limit of the waiting ones; None for the worker's ``rpc_timeout``.

    Raised here: RpcUsageError for invalid names, NotInitialized. If there is no such queue, its methods raise
    UnknownObject.
    """
    return current().queue(name, owner=owner, timeout=timeout)


def wait_for(to: To, *, timeout: float | None = None) -> Future[WorkerInfo]:
    """A Future of the WorkerInfo of a worker, which settles when the worker has joined and answers. Any thread.

    For free groups, where workers come and go. ``await`` it, or ``wait()`` for it in a thread.

    to: name, rank or WorkerInfo.
    timeout: seconds, 0 for no limit; None for this worker's ``rpc_timeout``.

    Raised here: UnknownWorker for a worker that the group cannot have, and the errors of `call`.

    Raised by the Future: RpcTimeout when the time is up; in a fixed group PeerLost or PeerLeft at once for a worker
    that has gone.
    """
    return current().wait_for(to, timeout=timeout)


@overload
def remote(to: To, function: Batched[..., object, T], /, *args: object, **kwargs: object) -> RRef[T]: ...


@overload
def remote(to: To, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...


@overload
def remote(to: To, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...


@overload
def remote(
    to: To,
    func: Batched[..., object, T],
    args: Sequence[object] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = -1.0,
) -> RRef[T]: ...


@overload
def remote(
    to: To, func: Callable[[], Later[T]], args: None = None, kwargs: None = None, timeout: float = -1.0
) -> RRef[T]: ...


@overload
def remote(to: To, func: Callable[[], T], args: None = None, kwargs: None = None, timeout: float = -1.0) -> RRef[T]: ...


@overload
def remote(
    to: To, func: Callable[[*Ts], Later[T]], args: tuple[*Ts], kwargs: None = None, timeout: float = -1.0
) -> RRef[T]: ...


@overload
def remote(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = None, timeout: float = -1.0
) -> RRef[T]: ...


@overload
def remote(
    to: To, func: Callable[..., Later[T]], args: Sequence[object] | None, kwargs: dict[str, Any], timeout: float = -1.0
) -> RRef[T]: ...


@overload
def remote(
    to: To, func: Callable[..., T], args: Sequence[object] | None, kwargs: dict[str, Any], timeout: float = -1.0
) -> RRef[T]: ...


@overload
def remote(to: To, func: Callable[..., Later[T]], *, kwargs: dict[str, Any], timeout: float = -1.0) -> RRef[T]: ...


@overload
def remote(to: To, func: Callable[..., T], *, kwargs: dict[str, Any], timeout: float = -1.0) -> RRef[T]: ...


def remote(*given: Any, **named: Any) -> RRef[Any]:
    """An RRef of the result of a call on worker `to`; returns at once, the result stays there. Any thread.

    Two forms: ``remote(to, func, *args, **kwargs)``, and torch's ``remote(to, func, args=(), kwargs=None, timeout=s)``.
    Arguments that fit torch's form are read as such: only keywords of these three names, or a single tuple or list, or
    one with a dict, as in ``remote(to, func, (1, 2), {"k": 3})``. To pass those to the function use
    `PeerHandle.remote`. A timeout in seconds is negative for the worker's ``rpc_timeout`` and 0 for no limit; past it
    the call is cancelled, and the RRef raises RpcTimeout from then on.

    Raised here, with nothing sent: SerializationError, UnknownWorker (also for a worker that has not joined yet),
    Overloaded, NotInitialized, WorkerClosed, and RendezvousError if only the store knows the worker's place and does
    not answer.

    Raised when the value is wanted: the function's error.
    """
    node = registry.get()
    if len(given) < 2 or _is_torch_form(given[2:], named):
        to, function, args, kwargs, timeout = _remote_as_in_torch(*given, **named)
        timeout = node.engine.timeout(timeout)
    else:
        (to, function, *args), kwargs, timeout = given, named, node.engine.default_timeout
    return node.references.create(node.peers.find(to), function, tuple(args), kwargs, timeout, depth=2)


def _is_torch_form(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the arguments after the function are torch's ``args``, ``kwargs`` and ``timeout``."""
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
    func: Function,
    args: Sequence[object] | None = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float = -1.0,
) -> tuple[To, Function, Sequence[object], Kwargs, float]:
    return to, func, args or (), dict(kwargs or {}), timeout


def stream(to: To, function: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
    """``async for item in stream(to, generator_function, *args)``: items of a generator that runs on worker `to`.

    The producer stops while the consumer does: ``options.stream_window`` items may be under way (back-pressure). It
    stops for good when the loop is left. The timeout, ``rpc_timeout`` or a handle's, is for each item. In a thread that
    may block: ``for item in stream(...)``.

    Raised here: the same as by `call`.

    Raised by a turn: the generator's error, after its items; RpcTimeout, PeerLost, PeerLeft.
    """
    node = registry.get()
    return open_stream(node.peers.find(to), function, args, kwargs, node.engine.default_timeout)


def publish(name: str, value: object) -> Future[Publication]:
    """Give a value to all subscribers of a name, as its next version; returns a Future at once. Any thread.

    ``w = await publish("policy", model.state_dict())``, or ``publish(...).wait()`` in a thread that may block.
    ``w.version`` counts from 1 on, also when another worker goes on with the name; ``w.delivered()`` tells which
    readers have it. The publisher waits for no reader, and no reader gets half of a version. Do not change the tensors
    before the Future has settled: their bytes are copied until then. The newest version is kept until the name is
    unpublished or this worker leaves. Cancelling the Future does not stop the publication.

    name: under which it is published. A name has one publisher at a time.
    value: anything that may be sent, except references. Storages that tensors share stay shared. Tensors on devices are
        copied to the host, on the current streams. All readers of a host read one copy in shared memory, if
        ``options.shared_memory`` has room for it.

    Raised here: RpcUsageError for an invalid name, SerializationError, NotInitialized, WorkerClosed.

    Raised by the Future: RpcUsageError if another live worker publishes the name; RendezvousError if the group's store
    cannot be asked about that, the first time; NotAllowed if no other worker takes the name from this worker's role
    (option ``allow``).
    """
    return current().publish(name, value)


def unpublish(name: str) -> Future[None]:
    """Stop publishing a name; returns a Future at once. Any thread.

    Versions under way are still delivered. Then the subscriptions to the name end, on all workers: a reader takes the
    version that has come, and its loop ends. To be sure that readers have the last version, ``await
    published.delivered()`` before. Values that readers have taken stay valid. The name is free from then on: any worker
    may publish it anew, and versions go on. The Future settles when all members have heard it; a member that does not
    answer for 5 s hears it later. Cancelling the Future does not stop it.

    Raised here: RpcUsageError for an invalid name, NotInitialized, WorkerClosed.

    Raised by the Future: RpcUsageError if this worker does not publish the name, with the publisher's name;
    RendezvousError if the group's store cannot be asked; the name stays published then.
    """
    return current().unpublish(name)


def subscribe(
    name: str, *, timeout: float | None = None, map_location: str | torch.device | None = None
) -> Subscription[Any]:
    """``async for v in subscribe("policy")``: the newest version of a published value. Any thread.

    Each turn waits for a version that is newer than the last one, and gives the newest; the next one is fetched
    meanwhile. A late subscriber begins with the newest version. A version has ``v.value``, ``v.version`` and
    ``v.publisher``. In a thread that may block: ``for v in subscribe("policy")``. See `Subscription` for its end.

    name: under which values are published. There need not be a publisher yet.
    timeout: seconds that one turn waits, 0 for no limit; None for this worker's ``rpc_timeout``.
    map_location: the device that all tensors are moved to, by the thread that takes a version. None leaves them in
        shared memory.

    Raised here: RpcUsageError for an invalid name, timeout or device, NotInitialized, WorkerClosed.

    Raised by a turn: RpcTimeout when the time is up.
    """
    return current().subscribe(name, timeout=timeout, map_location=map_location)


def record(path: str | os.PathLike[str], *, seconds: float = 60.0, profile: bool = False) -> Recording:
    """``async with record("step.json"):`` writes what all workers of the group do meanwhile to one file.

    The file has the calls, their queueing and handlers, copies and transfers of all workers on one time axis, in the
    format that https://ui.perfetto.dev opens. ``as recording`` gives the `Recording`, which tells after the block what
    there is of each worker. A worker that is lost, does not answer or does not allow it is missing in the file, which
    says so; no call fails because of a recording. If the block is cancelled, there is no file. On any loop.

    path: of the file; one that exists is replaced at the end.
    seconds: the recording ends after these at the latest, also if the block goes on or this process dies; up to 3600.
    profile: whether torch's profiler runs in all processes meanwhile. The file then has operators, and ranges of
        ``torch.profiler.record_function``. Its first begin in a process takes about a second.

    Raised here: RpcUsageError for seconds out of range, NotInitialized, WorkerClosed.

    Raised at the beginning of the block: RpcUsageError for a file that cannot be written. At its end, too, if that has
    changed.
    """
    return current().record(path, seconds=seconds, profile=profile)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of the current worker, or of another one. Returns at once, apart from a look at the store.

    worker_name: of any member of the group; None for the current worker.

    Raised here: UnknownWorker if the group cannot have it, or has not had it yet. For a gone worker in a free group
    PeerLeft or PeerLost; in a fixed group its place stays, and nothing is raised.
    """
    return current().get_worker_info(worker_name)
