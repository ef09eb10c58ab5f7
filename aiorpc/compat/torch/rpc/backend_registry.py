"""Stands as ``torch.distributed.rpc.backend_registry``: backends by name, also of a program's own."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .... import foreign
from ....runtime.hooks import Hooks
from ....sync import host
from ....undoing import on_error
from ....worker import Worker
from ..ddp import averaging
from ..futures import error_of_call
from . import constants
from .agent import TensorPipeAgent, process
from .options import TensorPipeRpcBackendOptions
from .rref import PyRRef

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """What makes the options of a backend, and what starts it."""

    construct_rpc_backend_options_handler: Callable[..., object]
    init_backend_handler: Callable[..., Any]


BackendType: Any = enum.Enum("BackendType", {})  # type: ignore[misc]  # empty: members come with `register_backend`


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., object],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; its member of BackendType, which is a new class then, as with torch.

    The first handler makes options; the second gets ``store, name, rank, world_size, rpc_backend_options`` and returns
    an agent. RuntimeError if there is one of that name.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    members = {backend_name: value} | {member.name: member.value for member in BackendType}
    BackendType = enum.Enum("BackendType", members)  # type: ignore[misc]  # made at run time, as its members are
    BackendType.__repr__ = _repr  # type: ignore[method-assign]  # as its members, made at run time
    return BackendType[backend_name]


def _repr(member: Any) -> str:
    return f"BackendType.{member.name}"


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start an agent of that backend."""
    return backend.value.init_backend_handler(*args, **kwargs)


def make_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    **_: object,
) -> TensorPipeRpcBackendOptions:
    """Options of a worker."""
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, num_worker_threads=num_worker_threads
    )


def start_worker(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> TensorPipeAgent:
    """Start this process's worker; its agent. store: a torch Store to meet at; None: where the options say."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    worker = Worker(
        name,
        rank=None if rank < 0 else rank,
        world_size=world_size or None,
        options=rpc_backend_options,
        store=store,
        hooks=Hooks(
            handle_class=PyRRef,
            on_handler_error=lambda error: _report(worker, error),
            read_error=error_of_call,
            sink=averaging,
            as_torch=True,
        ),
    )
    # Others may call as soon as it serves: everything must be ready for handlers before.
    process.agent = agent = TensorPipeAgent(worker, store)
    with on_error(setattr, process, "agent", None):
        host(worker)
    return agent


def _report(worker: Worker, error: BaseException) -> None:
    """Write a handler's error to stderr of its process, as torch does, even if no caller waits for it."""
    if foreign.is_a(error, Exception):
        try:
            shown = repr(error)
        except Exception:  # of a class of the program's own
            shown = foreign.said(error)
        said = f"On {worker._node.engine.info}:\n{shown}\n{foreign.traceback_of(error)}"
        print(said, file=sys.stderr, flush=True)


register_backend("TENSORPIPE", make_options, start_worker)
