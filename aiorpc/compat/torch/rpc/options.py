"""Stands as ``torch.distributed.rpc.options``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ....options import RpcBackendOptions
from . import constants

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options with torch's names; every option of aiorpc can be given, or set later, beside them.

    _transports, _channels: of TensorPipe, without effect. What the others mean says `aiorpc.RpcBackendOptions`.
    """

    def __init__(
        self,
        *,
        rpc_timeout: Any = constants.DEFAULT_RPC_TIMEOUT_SEC,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(rpc_timeout, timedelta):
            raise TypeError(
                "__init__(): incompatible constructor arguments: rpc_timeout is a number of seconds, no timedelta"
            )
        super().__init__(rpc_timeout=rpc_timeout, **options)
