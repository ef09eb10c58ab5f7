"""DistributedDataParallel inside of autograd contexts: its gradients are averaged, into the context.

DDP averages when torch's engine accumulates into ``.grad``, and aiorpc's passes do not. So the gradients of its
parameters go through that once more: they are given to the parameters themselves, and what DDP makes of them is taken
from ``.grad``, which has what it had before when the worker's part in the pass is over. Hooks that a program registered
on such a parameter run twice then. As with DDP alone, one pass at a time.
"""

from __future__ import annotations

import functools
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
    """What passes do to the parameters of DDP modules that were made since `follow`; the sink of workers."""

    def __init__(self) -> None:
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by identity
        self._held: WeakKeyDictionary[AutogradContext, dict[int, tuple[Tensor, Tensor | None]]] = WeakKeyDictionary()

    def follow(self, replaced: Replacements) -> None:
        """From now on."""
        make: Callable[..., None] = DistributedDataParallel.__init__
        parameters = self._parameters

        @functools.wraps(make)
        def init(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            parameters.update({id(each): each for each in module.parameters() if each.requires_grad})

        replaced.attribute(DistributedDataParallel, "__init__", init)

    def take(self, context: AutogradContext, leaves: Gradients) -> Gradients:
        """A pass has gradients of these leaves: those that are not to be averaged."""
        known = self._parameters
        mine = [pair for pair in leaves if id(pair[0]) in known] if known else []
        if not mine:
            return leaves
        held = self._held.setdefault(context, {})
        for parameter, _ in mine:
            if id(parameter) not in held:
                held[id(parameter)] = parameter, parameter.grad
                parameter.grad = None
        torch.autograd.backward([leaf for leaf, _ in mine], [gradient for _, gradient in mine])
        return [pair for pair in leaves if id(pair[0]) not in known]

    def finish(self, context: AutogradContext) -> Gradients:
        """The averages; ``.grad`` is what it was before."""
        taken = []
        for parameter, before in self._held.pop(context, {}).values():
            if parameter.grad is not None:
                taken.append((parameter, parameter.grad.clone()))  # it may be part of DDP's memory
            parameter.grad = before
        return taken


averaging = Averaging()
