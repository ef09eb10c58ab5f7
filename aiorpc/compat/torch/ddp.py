"""DistributedDataParallel inside of autograd contexts: its gradients are averaged, into the context.

DDP averages when torch's engine accumulates into ``.grad``, and aiorpc's passes do not. So the gradients of its
parameters go through that once more: they are given to the parameters themselves, and what DDP makes of them is taken
from ``.grad``, which gets back what it had, when the context's gradients are asked for. Hooks that a program registered
on such a parameter run twice then. As with DDP alone, one pass at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from ...runtime.gradients import AutogradContext
from .replace import Replacements

Tensor = torch.Tensor
Gradients = Sequence[tuple[Tensor, Tensor]]


class Averaging:
    """What passes do to the parameters of DDP modules that were made since `follow`."""

    def __init__(self) -> None:
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by identity
        self._held: WeakKeyDictionary[AutogradContext, dict[int, tuple[Tensor, Tensor | None]]] = WeakKeyDictionary()
        self._accumulate = AutogradContext.accumulate
        self._gradients = AutogradContext.gradients
        self._end = AutogradContext.end

    def follow(self, replaced: Replacements) -> None:
        """From now on."""
        make: Callable[..., None] = DistributedDataParallel.__init__
        averaging = self

        def init(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            averaging._parameters.update({id(each): each for each in module.parameters() if each.requires_grad})

        def accumulate(context: AutogradContext, gradients: Gradients, arrival: Any) -> None:
            averaging.accumulate(context, gradients, arrival)

        def gradients(context: AutogradContext) -> dict[Tensor, Tensor]:
            averaging.collect(context)
            return averaging._gradients(context)

        def end(context: AutogradContext, error: Exception) -> None:
            averaging.take(context)
            averaging._end(context, error)

        replaced.attribute(DistributedDataParallel, "__init__", init)
        replaced.attribute(AutogradContext, "accumulate", accumulate)
        replaced.attribute(AutogradContext, "gradients", gradients)
        replaced.attribute(AutogradContext, "end", end)

    def accumulate(self, context: AutogradContext, gradients: Gradients, arrival: Any) -> None:
        """A pass has gradients of these leaves."""
        known = self._parameters
        mine = [pair for pair in gradients if id(pair[0]) in known] if known else []
        if mine:
            gradients = [pair for pair in gradients if id(pair[0]) not in known]
            held = self._held.setdefault(context, {})
            for parameter, _ in mine:
                if id(parameter) not in held:
                    held[id(parameter)] = parameter, parameter.grad
                    parameter.grad = None
            torch.autograd.backward([leaf for leaf, _ in mine], [gradient for _, gradient in mine])
        self._accumulate(context, gradients, arrival)

    def collect(self, context: AutogradContext) -> None:
        """What DDP has made of the gradients goes to the context."""
        averaged = self.take(context)
        if averaged:
            self._accumulate(context, averaged, None)

    def take(self, context: AutogradContext) -> list[tuple[Tensor, Tensor]]:
        """The averages; ``.grad`` is what it was before."""
        taken = []
        for parameter, before in (self._held.pop(context, None) or {}).values():
            if parameter.grad is not None:
                taken.append((parameter, parameter.grad))
            parameter.grad = before
        return taken
