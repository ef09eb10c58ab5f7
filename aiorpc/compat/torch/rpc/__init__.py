"""Stands as ``torch.distributed.rpc``."""

from __future__ import annotations

import copy
import itertools
import numbers
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed

from ....errors import RpcUsageError
from ....runtime.meeting.meeting_place import parse
from .. import autograd as dist_autograd
from . import api, backend_registry, constants
from .agent import RpcAgent, TensorPipeAgent
from .api import (  # noqa: F401  # torch's package has those with an underscore, too
    AllGatherStates,
    RRef,
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _wait_all,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    method_factory,
    new_method,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from .backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from .options import RpcBackendOptions, TensorPipeRpcBackendOptions
from .rref import PyRRef
from .server_process_global_profiler import _server_process_global_profile  # noqa: F401  # as above
from .workers import WorkerInfo

_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_init_counter = itertools.count()
c10d: Any = torch.distributed  # torch's stubs lack parts of it

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "construct_rpc_backend_options",
    "enable_gil_profiling",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "method_factory",
    "new_method",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def is_available() -> bool:
    """Always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Start this process's worker and wait until its group is complete; see `aiorpc.init_rpc`.

    backend: of the program's own, if it registered one. RuntimeError if the group cannot be formed in ``rpc_timeout``
    seconds, or RPC is initialized already; TypeError for an invalid backend or options.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    given: Any = rank
    if not isinstance(given, numbers.Integral):  # such as what os.environ["RANK"] gives
        raise RpcUsageError(f"`rank` must be an integer, not {given!r}")
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    chosen: Any = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    if _is_current_rpc_agent_set():
        raise RpcUsageError("RPC is already initialized")
    if not world_size and rank < 0:
        _check_rank(chosen.init_method)
    dist_autograd._init(rank)
    if backend.value.init_backend_handler is backend_registry.start_worker:
        store = None  # the worker itself meets the others, with more patience for late or dying ones
        rank, chosen = _freely(rank, world_size, chosen)
    else:
        store = _open_store(chosen, rank, world_size)
    _start(backend, store, name, rank, world_size, chosen)


def _infer_backend(given: RpcBackendOptions | None) -> Any:
    """The backend that options are for; the usual one if there are none."""
    if given is None:
        return backend_registry.BackendType["TENSORPIPE"]
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _check_rank(init_method: str) -> None:
    """Require a rank in a free group, as torch does; `aiorpc.init` itself finds a free rank."""
    url = urlsplit(init_method)
    if url.scheme == "env" and "rank" not in parse_qs(url.query) and "RANK" not in os.environ:
        raise ValueError(
            "Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
            "expected, but not set"
        )
    if url.scheme in ("file", "tcp") and "rank" not in parse_qs(url.query):
        raise ValueError(
            f"Error initializing torch.distributed using {url.scheme}:// rendezvous: rank parameter missing"
        )


def _freely(rank: int, world_size: int | None, given: Any) -> tuple[int, Any]:
    """The rank and the options; as in torch, env:// without a size makes a free group."""
    url = urlsplit(given.init_method)
    if url.scheme != "env" or world_size or "world_size" in parse_qs(url.query) or os.environ.get("WORLD_SIZE"):
        return rank, given
    place = parse(given.init_method, None if rank < 0 else rank, 1, os.environ)  # it wants a size, whichever
    options = copy.copy(given)
    options.init_method = str(replace(place, host=place.host.strip("[]")))
    assert place.rank is not None, "of env://"
    return place.rank, options


def _open_store(given: Any, rank: int, world_size: int | None) -> Any:
    """A store for torch's backends; each init has a part of its own."""
    if world_size:
        store, _, _ = next(c10d.rendezvous(given.init_method, rank=rank, world_size=world_size))
    else:
        store = c10d._create_store_from_options(given, rank)
    store.set_timeout(timedelta(seconds=given.rpc_timeout))
    return c10d.PrefixStore(f"rpc_prefix_{next(_init_counter)}", store)


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: Any = -1,
    world_size: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    """The same as `init_rpc`, meeting at a torch store."""
    backend = backend or backend_registry.BackendType["TENSORPIPE"]
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RpcUsageError("RPC is already initialized")
    _start(backend, store, name, rank, world_size, rpc_backend_options)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    kinds: list[tuple[Any, Any]] = [
        (backend, backend_registry.BackendType),
        (store, c10d.Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for value, kind in kinds:
        if not isinstance(value, kind):
            raise RuntimeError(f"Argument {value} must be of type {kind} but got type {type(value)}")


def _start(backend: Any, store: Any, name: str, rank: int, world_size: int | None, given: Any) -> None:
    started = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=given
    )
    api._init_rpc_states(started)


def _get_debug_info() -> dict[str, str | int]:
    """Figures of references and of the worker as text, and of autograd as numbers."""
    found: dict[str, str | int] = dict(api._rref_context_get_debug_info())
    found.update(api._get_current_rpc_agent().get_debug_info())
    found.update(dist_autograd._get_debug_info())
    return found


def _enable_jit_rref_pickle() -> None:
    """Nothing to do: aiorpc has no part of TorchScript's pickles."""


def _disable_jit_rref_pickle() -> None:
    """Nothing to do."""


def _set_profiler_node_id(node_id: int) -> None:
    """Nothing to do."""
