"""Stands as ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

from typing import Any

import torch

from ...futures import Future
from ...optim import DistributedOptimizer as BaseOptimizer
from ...optim import NoGradients
from ...runtime.calls.annotations import signature
from ...runtime.references.rref import RRef
from . import autograd as dist_autograd

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(BaseOptimizer):
    """See `aiorpc.optim.DistributedOptimizer`. A step without gradients does nothing, and there may be no parameters.

    As in torch, the default ``lr`` is the one of the functional optimizer that torch puts in place of some classes (the
    ``functional_optim_map`` of torch.distributed.optim.utils): 1e-2 for SGD, where torch.optim has 1e-3.
    """

    def __init__(self, optimizer_class: Any, params_rref: Any, *args: Any, **kwargs: Any) -> None:
        self.is_functional_optim = False
        if not isinstance(params_rref, RRef | torch.Tensor):  # which are no lists, as the base says
            params_rref = list(params_rref)
            if not params_rref:
                self.remote_optimizers: list[RRef[Any]] = []
                return
        if not args and "lr" not in kwargs:
            kwargs |= _default_lr(optimizer_class)
        super().__init__(optimizer_class, params_rref, *args, **kwargs)

    def step(self, context_id: int) -> Future[None]:
        """One step on all owners, with the gradients that the context has there; blocks."""
        try:
            if self.remote_optimizers:
                return super().step(context_id)
            dist_autograd._is_valid_context(context_id)
        except NoGradients:
            pass
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _default_lr(optimizer_class: Any) -> dict[str, Any]:
    """The default ``lr`` as an argument; none if torch uses the class itself, or one of the two takes no ``lr``."""
    from torch.distributed.optim.utils import functional_optim_map  # imports the module that this one stands for

    functional: Any = functional_optim_map.get(optimizer_class)
    if functional is None or not torch.jit._state._enabled or "lr" not in signature(optimizer_class).parameters:
        return {}
    lr = signature(functional).parameters.get("lr")
    return {} if lr is None or lr.default is lr.empty else {"lr": lr.default}
