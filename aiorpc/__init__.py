"""aiorpc: an asyncio-native RPC runtime for PyTorch."""

from __future__ import annotations

from . import autograd, errors, events, functions, nn, optim, types
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
    NotAllowed,
    Overloaded,
    PeerLeft,
    PeerLost,
    QueueEmpty,
    QueueFull,
    QueueShutDown,
    RemoteError,
    RpcCancelled,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    WorkerClosed,
)
from .functions import async_execution, batched
from .futures import Future
from .options import LimitOptions, NetworkOptions, RpcBackendOptions, SecurityOptions, Tls
from .protocol.identity import WorkerInfo
from .protocol.registered import register_safe
from .queues import Queue
from .rights import exposed
from .runtime.calls.current import caller, cancelled, check_cancelled, deadline
from .runtime.references.rref import RRef
from .runtime.worker import Worker
from .sync import BackendType, init_rpc, rpc_async, rpc_sync, shutdown

__version__ = "0.1.0"

TensorPipeRpcBackendOptions = RpcBackendOptions

__all__ = [
    "BackendType",
    "Future",
    "LimitOptions",
    "NetworkOptions",
    "NotAllowed",
    "Overloaded",
    "PeerLeft",
    "PeerLost",
    "Queue",
    "QueueEmpty",
    "QueueFull",
    "QueueShutDown",
    "RRef",
    "RemoteError",
    "RpcBackendOptions",
    "RpcCancelled",
    "RpcError",
    "RpcTimeout",
    "RpcUsageError",
    "SecurityOptions",
    "TensorPipeRpcBackendOptions",
    "Tls",
    "Worker",
    "WorkerClosed",
    "WorkerInfo",
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
    "errors",
    "events",
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
    "types",
    "unpublish",
    "wait_all",
    "wait_for",
]


def __dir__() -> list[str]:
    """The public names; the package's own modules are found under it, but are not for programs."""
    return [*__all__, "__version__"]
