"""aiorpc: an asyncio-native RPC runtime for PyTorch.

A name is imported when it is first used: what needs no torch, as `python -m aiorpc ps`, does not wait for its import.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

from . import _forks  # noqa: F401  # before a program forks
from ._exiting import end_at_exit
from ._installed import warn_of_another
from ._version import __version__ as __version__

if TYPE_CHECKING:
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

end_at_exit()
warn_of_another()
del end_at_exit, warn_of_another

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


_SUBMODULES = ("autograd", "errors", "events", "functions", "nn", "optim", "types")
#: The module that defines each other name of `__all__`.
_PLACES = {
    ".api": """call current get_worker_info group init peer publish queue record remote serve stream subscribe unpublish
        wait_for""",
    ".collecting": "collect_all wait_all",
    ".errors": """NotAllowed Overloaded PeerLeft PeerLost QueueEmpty QueueFull QueueShutDown RemoteError RpcCancelled
        RpcError RpcTimeout RpcUsageError WorkerClosed""",
    ".functions": "async_execution batched",
    ".futures": "Future",
    ".options": "LimitOptions NetworkOptions RpcBackendOptions SecurityOptions Tls",
    ".protocol.identity": "WorkerInfo",
    ".protocol.registered": "register_safe",
    ".queues": "Queue",
    ".rights": "exposed",
    ".runtime.calls.current": "caller cancelled check_cancelled deadline",
    ".runtime.references.rref": "RRef",
    ".sync": "BackendType init_rpc rpc_async rpc_sync shutdown",
    ".worker": "Worker",
}


if not TYPE_CHECKING:  # type checkers read the imports above, and must not see moved names

    def __getattr__(name: str) -> object:
        """Import a public name; or one that has moved since before the first release, with a DeprecationWarning."""
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in __all__:
            of = "RpcBackendOptions" if name == "TensorPipeRpcBackendOptions" else name
            place = next(place for place, names in _PLACES.items() if of in names.split())
            value = globals()[name] = getattr(importlib.import_module(place, __name__), of)
            return value
        for place in ("errors", "events", "types") if name[:1].isupper() else ():  # classes have moved
            module = importlib.import_module(f".{place}", __name__)
            if name in module.__all__:
                warnings.warn(f"aiorpc.{name} is {module.__name__}.{name}", DeprecationWarning, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the package's own modules."""
    return [*__all__, "__version__"]
