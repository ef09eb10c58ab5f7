"""The same programs on torch.distributed.rpc, to compare with: a backend module (see `rl` and `ps` of the examples)."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from torch import Tensor
from torch.distributed import rpc as torch_rpc
from torch.futures import Future

from aiorpc.examples._shared import ps, rl

__all__ = ["Agent", "ParameterServer", "rpc"]


class _Rpc:
    """torch.distributed.rpc, whose workers meet in a file where no torchrun keeps a store for them.

    By default rank 0 serves the store, and may be gone with it while others still read there that all have left: now
    and then a run ends with "Connection reset by peer" in their `shutdown()`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_rpc, name)

    @staticmethod
    def init_rpc(name: str, *, rank: int, world_size: int) -> None:
        options = torch_rpc.TensorPipeRpcBackendOptions()
        if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            options.init_method = f"file://{tempfile.gettempdir()}/store"  # of this run alone: see `launch`
        torch_rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


rpc = _Rpc()


class Agent(rl.AgentBase):
    """The agent of batch_rl."""

    @torch_rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch's has no types
    def select_action_batch(self, observer: int, state: Tensor) -> Future[list[int]]:
        return super().select_action_batch(observer, state)


class ParameterServer(ps.ServerBase):
    """The parameter server of batch_ps."""

    @torch_rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch's has no types
    def update_and_fetch_model(self, trainer: int, gradients: list[Tensor], loss: float) -> Future[list[Tensor]]:
        return super().update_and_fetch_model(trainer, gradients, loss)
