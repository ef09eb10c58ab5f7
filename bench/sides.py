"""The two sides as modules with the names of torch.distributed.rpc, so that every measurement is written once."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

SideName = Literal["aiorpc", "torch"]
Style = Literal["blocking", "awaited"]

SIDES: tuple[SideName, SideName] = ("aiorpc", "torch")
SERVER, CLIENT = PAIR = ("server", "client")

_MODULES: dict[SideName, str] = {"aiorpc": "aiorpc", "torch": "torch.distributed.rpc"}


class RpcFuture(Protocol):
    """What both sides' futures have in common."""

    def wait(self) -> Any: ...

    def done(self) -> bool: ...


class RpcModule(Protocol):
    """The names of torch.distributed.rpc that the measurements use."""

    TensorPipeRpcBackendOptions: Callable[..., Any]

    def init_rpc(self, name: str, *, rank: int, world_size: int, rpc_backend_options: Any) -> None: ...

    def shutdown(self, graceful: bool = True) -> None: ...

    def rpc_sync(self, to: str, func: Callable[..., Any], args: Sequence[Any] = ()) -> Any: ...

    def rpc_async(self, to: str, func: Callable[..., Any], args: Sequence[Any] = ()) -> RpcFuture: ...


def module(side: SideName) -> RpcModule:
    """Import a side; ImportError where it is not installed."""
    return cast(RpcModule, importlib.import_module(_MODULES[side]))
