"""Stands as ``torch.distributed.rpc.rref_proxy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .api import remote, rpc_async, rpc_sync
from .constants import UNSET_RPC_TIMEOUT
from .rref import PyRRef

__all__ = ["RRefProxy"]


class RRefProxy:
    """Methods of an RRef's value. rpc_api: `rpc_sync`, `rpc_async` or `remote`. See `aiorpc.RRef.rpc_async`."""

    def __init__(self, rref: PyRRef[Any], rpc_api: Callable[..., object], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Any:
        verbs = {rpc_sync: self.rref.rpc_sync, rpc_async: self.rref.rpc_async, remote: self.rref.remote}
        return getattr(verbs[self.rpc_api](self.rpc_timeout), func_name)
