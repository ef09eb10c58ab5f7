"""aiorpc: an asyncio-native RPC runtime for PyTorch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from . import autograd, errors, events, functions, nn, optim, types
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
    record,
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
from .sync import BackendType, init_rpc, rpc_async, rpc_sync, shutdown
from .worker import Worker

TensorPipeRpcBackendOptions = RpcBackendOptions

warn_of_another()
del warn_of_another

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
    "record",
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


if not TYPE_CHECKING:  # type checkers must not see moved names

    def __getattr__(name: str) -> object:
        """A name that has moved since before the first release, with a DeprecationWarning."""
        for place in (errors, events, types):
            if name in place.__all__:
                warnings.warn(f"aiorpc.{name} is {place.__name__}.{name}", DeprecationWarning, stacklevel=2)
                return getattr(place, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the package's own modules."""
    return [*__all__, "__version__"]
