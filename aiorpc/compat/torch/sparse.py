"""Gradients of sparse tensors that are sent: aiorpc sends those as their parts, which have no past.

While the drop-in is installed this stands in place of functions of `reductions`, `gradients` and `messages`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...protocol import codec, reductions
from ...runtime import gradients, messages
from ...runtime.current import registry
from ...runtime.gradients import AutogradContext
from ...runtime.reach import SentName
from .replace import Replacements

Tensor = torch.Tensor
_reduce: Callable[[Tensor], tuple[Any, ...]] = reductions._reduce_sparse
_encode = messages.encode
_tape: ContextVar[Any] = ContextVar("aiorpc_sparse_tape", default=None)


class _Entries:
    """The sparse tensors of one message; called if that is not sent."""

    def __init__(self, context: AutogradContext) -> None:
        self.context = context
        self.number = next(context._numbers)
        self.count = 0

    def __call__(self) -> None:
        self.context.unsend(self.number, range(self.count))

    def add(self, tensor: Tensor) -> tuple[int, int, list[int] | None]:
        """Remember a tensor: number of the message, its place, and what is behind it."""
        place, self.count = self.count, self.count + 1
        edge = edge_of(tensor)
        self.context.sent[SentName(self.number, place)] = edge
        found = self.context.behind(edge)
        behind = None if found is None else [part for worker, name in found for part in (worker, *name)]
        return self.number, place, behind


def edge_of(tensor: Tensor) -> GradientEdge:
    """What torch's `get_gradient_edge` gives; that takes a view of the tensor, which a sparse one has not."""
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        behind: Any = torch.neg(tensor).grad_fn
    node = tensor.grad_fn
    if node is None:
        return GradientEdge(behind.next_functions[0][0], 0)
    return GradientEdge(node, tensor.output_nr, behind)  # which keeps the node alive, as in torch's own


def follow(replaced: Replacements) -> None:
    """From now on."""
    replaced.attribute(reductions, "_reduce_sparse", reduce_sparse)
    replaced.attribute(gradients, "get_gradient_edge", edge_of)
    replaced.attribute(messages, "encode", encode)


def encode(prefix: Any, values: Any, target: Any, route: Any = None, tape: Any = None) -> Any:
    """As `messages.encode`; what is pickled in it knows the tape."""
    if tape is None:
        return _encode(prefix, values, target, route)
    token = _tape.set(tape)
    try:
        return _encode(prefix, values, target, route, tape)
    finally:
        _tape.reset(token)


def reduce_sparse(tensor: Tensor) -> tuple[Any, ...]:
    """How a sparse tensor is pickled: with its entry in the autograd context that the message is made in."""
    out, tape = codec.outgoing.get(), _tape.get()
    if not tensor.requires_grad or out is None or tape is None:
        return _reduce(tensor)
    context: AutogradContext = tape._context
    entries = next((each for each in out.on_unsent if isinstance(each, _Entries)), None)
    if entries is None:
        entries = _Entries(context)
        out.on_unsent.append(entries)
    said = (registry.get().id, context.id, *entries.add(tensor))
    return partial(load_sparse, said), _reduce(tensor.detach())[1]


def load_sparse(said: tuple[int, int, int, int, list[int] | None], *parts: Any) -> Tensor:
    """Used in pickles: a sparse tensor that knows where its gradient goes."""
    made: Tensor = reductions.load_sparse(*parts)
    sender, context_id, number, place, behind = said
    context = registry.get().gradients.find(context_id)
    if context is None:  # left meanwhile
        return made.requires_grad_()
    return context.receive(sender, number, [place], [behind], [made] * (place + 1))[place]
