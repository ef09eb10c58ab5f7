"""Stands as ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

from typing import Any

from ...futures import Future
from ...optim import DistributedOptimizer as BaseOptimizer
from ...optim import NoGradients

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(BaseOptimizer):
    """See `aiorpc.optim.DistributedOptimizer`. A step without gradients does nothing, as with torch."""

    def __init__(self, optimizer_class: Any, params_rref: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer_class, params_rref, *args, **kwargs)
        self.is_functional_optim = False

    def step(self, context_id: int) -> Future[None]:
        """One step on all owners, with the gradients that the context has there; blocks."""
        try:
            return super().step(context_id)
        except NoGradients:
            done: Future[None] = Future()
            done.set_result(None)
            return done
