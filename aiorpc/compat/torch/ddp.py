"""DistributedDataParallel inside of autograd contexts: its gradients are averaged, into the context.

DDP averages when torch's engine accumulates into ``.grad``, which aiorpc's passes do not. So the gradients of its
parameters go through torch's engine once more, on top of the context's gradients of earlier passes, as in torch (passes
within ``no_sync()`` only add up, and the next one averages the sum). When the worker's part in the pass is over, DDP's
averages replace the gradients in the context, and ``.grad`` is restored; if the part failed, the context keeps its
gradients. Hooks of a program on such a parameter run twice. As with DDP alone, one pass at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from ...runtime.gradients.contexts import AutogradContext
from .replace import Replacements

Tensor = torch.Tensor
Gradients = Sequence[tuple[Tensor, Tensor]]


class Averaging:
    """The sink of workers: averages gradients of parameters of DDP modules that were made since `follow`."""

    def __init__(self) -> None:
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by identity
        self._modules: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()  # by a parameter's
        self._held: WeakKeyDictionary[AutogradContext, dict[int, tuple[Tensor, Tensor | None]]] = WeakKeyDictionary()

    def follow(self, replaced: Replacements) -> None:
        """From now on."""
        make: Callable[..., None] = DistributedDataParallel.__init__
        parameters, modules = self._parameters, self._modules

        @functools.wraps(make)
        def init(module: DistributedDataParallel, *args: object, **kwargs: object) -> None:
            make(module, *args, **kwargs)
            mine = {id(each): each for each in module.parameters() if each.requires_grad}
            parameters.update(mine)
            modules.update(dict.fromkeys(mine, module))

        replaced.attribute(DistributedDataParallel, "__init__", init)

    def take(self, context: AutogradContext, leaves: Gradients) -> Gradients:
        """Take gradients of leaves; returns those that are not to be averaged."""
        known = self._parameters
        mine = [pair for pair in leaves if id(pair[0]) in known] if known else []
        if not mine:
            return leaves
        held, earlier = self._held.setdefault(context, {}), context.gradients()
        for parameter in itertools.chain((leaf for leaf, _ in mine), self._unused(mine)):
            if id(parameter) not in held:
                held[id(parameter)] = parameter, parameter.grad
                before = earlier.get(parameter)
                parameter.grad = None if before is None else before.clone()  # the engine adds to it in place
        torch.autograd.backward([leaf for leaf, _ in mine], [gradient for _, gradient in mine])
        return [pair for pair in leaves if id(pair[0]) not in known]

    def _unused(self, mine: Gradients) -> Iterator[Tensor]:
        """The other parameters that DDP reduces: other ranks may have gradients of them."""
        modules = {self._modules.get(id(parameter)) for parameter, _ in mine}
        for module in modules:
            if module is not None and (module.find_unused_parameters or module.static_graph):
                yield from (each for each in module.parameters() if id(each) in self._parameters)

    def finish(self, context: AutogradContext, failed: bool) -> Gradients:
        """The averages, for the context; restores ``.grad``."""
        taken = []
        for parameter, before in self._held.pop(context, {}).values():
            if parameter.grad is not None and not failed:
                context.take_back(parameter)
                taken.append((parameter, parameter.grad.clone()))  # it may be part of DDP's memory
            parameter.grad = before
        return taken


averaging: Averaging = Averaging()
