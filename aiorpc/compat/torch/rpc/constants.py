"""Stands as ``torch.distributed.rpc.constants``. Times are seconds."""

from __future__ import annotations

from datetime import timedelta

from ....options import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT
from ....sync import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT
DEFAULT_INIT_METHOD = "env://"
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=(1 << 31) - 1)

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]
