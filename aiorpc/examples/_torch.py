"""The same programs on torch.distributed.rpc, to compare with: a backend module (see ``_rl`` and ``_ps``)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from . import _ps, _rl

__all__ = ["Agent", "ParameterServer", "rpc"]


class Agent(_rl.AgentBase):
    """The agent of batch_rl."""

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch's has no types
    def select_action_batch(self, observer: int, state: Tensor) -> Future[list[int]]:
        return super().select_action_batch(observer, state)


class ParameterServer(_ps.ServerBase):
    """The parameter server of batch_ps."""

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch's has no types
    def update_and_fetch_model(self, trainer: int, gradients: list[Tensor], loss: float) -> Future[list[Tensor]]:
        return super().update_and_fetch_model(trainer, gradients, loss)
