"""The drop-in in place, and a worker alone in its group."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiorpc.compat.torch import install, uninstall


@pytest.fixture
def rpc() -> Iterator[Any]:
    """What programs get as ``torch.distributed.rpc`` while aiorpc is installed."""
    install()
    try:
        yield importlib.import_module("torch.distributed.rpc")
    finally:
        uninstall()


@pytest.fixture
def alone(rpc: Any, tmp_path: Path) -> Iterator[Any]:
    """The same, with RPC initialized: one worker, ``me``, that calls itself."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=20)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        yield rpc
    finally:
        if rpc.api._is_current_rpc_agent_set():
            rpc.shutdown()
