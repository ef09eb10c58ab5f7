"""Stand-ins of ``torch._C._distributed_rpc`` and ``_distributed_autograd``: our names, and torch's for the rest."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch._C._distributed_autograd
import torch._C._distributed_rpc

from . import autograd, rpc
from .rpc import api

_RPC = (
    "PyRRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "_disable_jit_rref_pickle",
    "_enable_jit_rref_pickle",
    "_set_profiler_node_id",
)
_API = (
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
)
_AUTOGRAD = (
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "get_gradients",
)


class _Native(ModuleType):
    """A module with some names of ours; all others are torch's."""

    def __init__(self, real: ModuleType, ours: dict[str, object]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(ours, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__dict__["_real"]), *self.__dict__})


def modules() -> dict[str, ModuleType]:
    """The stand-ins, by the names of torch's modules."""
    ours = {name: getattr(rpc, name) for name in _RPC} | {name: getattr(api, name) for name in _API}
    return {
        "torch._C._distributed_rpc": _Native(torch._C._distributed_rpc, ours),
        "torch._C._distributed_autograd": _Native(
            torch._C._distributed_autograd, {name: getattr(autograd, name) for name in _AUTOGRAD}
        ),
    }
