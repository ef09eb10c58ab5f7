"""The same programs on torch.distributed.rpc, to compare with: a backend module (see `rl` and `ps` of the examples)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import rpc as torch_rpc
from torch.futures import Future

from aiorpc.examples._shared import ps, rl

__all__ = ["Agent", "ParameterServer", "rpc"]


rpc = torch_rpc


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
