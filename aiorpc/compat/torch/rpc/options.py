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
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: Any = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[Any, Any]] | None = None,
        devices: list[Any] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(rpc_timeout, timedelta):
            raise TypeError(
                "__init__(): incompatible constructor arguments: rpc_timeout is a number of seconds, no timedelta"
            )
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps or {},
            devices=devices or [],
            **options,
        )
