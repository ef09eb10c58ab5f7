"""aiorpc: an asyncio-native RPC runtime for PyTorch."""

from __future__ import annotations

from . import autograd, functions, nn, optim
from ._installed import warn_of_another
from ._version import __version__ as __version__
from .api import (
    call,
    current,
    get_worker_info,
    group,
    init,
    peer,
    publish,
    queue,
    remote,
    serve,
    stream,
    subscribe,
    unpublish,
    wait_for,
)
from .collecting import collect_all, wait_all
from .errors import (
    DeviceMapError,
    GroupError,
    ItemLost,
    NotAllowed,
    NotInitialized,
    Overloaded,
    PeerLeft,
    PeerLost,
    PeerRefused,
    ProtocolError,
    QueueEmpty,
    QueueFull,
    QueueShutDown,
    RemoteError,
    RendezvousError,
    RpcCancelled,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    SerializationError,
    StoreGone,
    UnknownObject,
    UnknownWorker,
    WorkerClosed,
    WouldBlockLoop,
)
from .functions import async_execution, batched
from .futures import Future
from .options import RpcBackendOptions, Tls
from .protocol.identity import WorkerInfo
from .protocol.registered import register_safe
from .queues import Queue, QueueHandle
from .rights import exposed
from .runtime.callee.objects import ServedObject
from .runtime.caller.handle import PeerHandle
from .runtime.caller.objects import ObjectHandle
from .runtime.caller.stream import Stream
from .runtime.calls.current import caller, cancelled, check_cancelled, deadline
from .runtime.calls.pending import PendingCall
from .runtime.fanout.group_call import GroupCall
from .runtime.fanout.group_object import GroupObject
from .runtime.fanout.group_stream import GroupStream
from .runtime.fanout.mapping import GroupMap
from .runtime.fanout.outcomes import Outcome, Outcomes
from .runtime.fanout.peer_group import PeerGroup
from .runtime.fanout.rref_group import RRefGroup
from .runtime.group.events import (
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerReplaced,
    WorkerResumed,
    WorkerSuspended,
)
from .runtime.group.group import ShutdownReport
from .runtime.publication.readers import Delivery
from .runtime.publication.subscription import Publication, PublishedVersion, Subscription
from .runtime.references.rref import RRef
from .runtime.statistics import Statistics
from .runtime.worker import Worker
from .sync import BackendType, init_rpc, rpc_async, rpc_sync, shutdown

TensorPipeRpcBackendOptions = RpcBackendOptions

warn_of_another()
del warn_of_another

__all__ = [
    "BackendType",
    "Delivery",
    "DeviceMapError",
    "Future",
    "GroupCall",
    "GroupError",
    "GroupMap",
    "GroupObject",
    "GroupStream",
    "ItemLost",
    "NotAllowed",
    "NotInitialized",
    "ObjectHandle",
    "Outcome",
    "Outcomes",
    "Overloaded",
    "PeerGroup",
    "PeerHandle",
    "PeerLeft",
    "PeerLost",
    "PeerRefused",
    "PendingCall",
    "ProtocolError",
    "Publication",
    "PublishedVersion",
    "Queue",
    "QueueEmpty",
    "QueueFull",
    "QueueHandle",
    "QueueShutDown",
    "RRef",
    "RRefGroup",
    "RemoteError",
    "RendezvousError",
    "RpcBackendOptions",
    "RpcCancelled",
    "RpcError",
    "RpcTimeout",
    "RpcUsageError",
    "SerializationError",
    "ServedObject",
    "ShutdownReport",
    "Statistics",
    "StoreGone",
    "Stream",
    "Subscription",
    "TensorPipeRpcBackendOptions",
    "Tls",
    "UnknownObject",
    "UnknownWorker",
    "Worker",
    "WorkerClosed",
    "WorkerInfo",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerLost",
    "WorkerReplaced",
    "WorkerResumed",
    "WorkerSuspended",
    "WouldBlockLoop",
    "async_execution",
    "autograd",
    "batched",
    "call",
    "caller",
    "cancelled",
    "check_cancelled",
    "collect_all",
    "current",
    "deadline",
    "exposed",
    "functions",
    "get_worker_info",
    "group",
    "init",
    "init_rpc",
    "nn",
    "optim",
    "peer",
    "publish",
    "queue",
    "register_safe",
    "remote",
    "rpc_async",
    "rpc_sync",
    "serve",
    "shutdown",
    "stream",
    "subscribe",
    "unpublish",
    "wait_all",
    "wait_for",
]
