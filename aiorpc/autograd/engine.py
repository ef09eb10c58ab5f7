"""Runs torch's engine for the gradients of targets, finds shared memory, and notes the place of errors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

from .. import foreign
from ..runtime.gradients.reach import FOREIGN, Target

Tensor = torch.Tensor
_EDGE = operator.attrgetter("edge")


def evaluate(
    entries: Sequence[tuple[GradientEdge, Tensor]], targets: Sequence[Target], retain: bool
) -> Sequence[Tensor | None]:
    """The gradients of targets, from the gradients of entries. retain: keep the graph for another run."""
    if not entries:
        return [None] * len(targets)
    outputs, gradients = zip(*entries, strict=True)
    inputs = tuple(map(_EDGE, targets))
    # The core of `torch.autograd.grad` for edges, with a quarter of its calls: the engine itself checks shapes and
    # types of the gradients.
    results: Sequence[Tensor | None] = _engine_run_backward(
        outputs, gradients, retain, False, inputs, allow_unreachable=True, accumulate_grad=False
    )
    return results


def unshared(gradient: Tensor, taken: set[int]) -> Tensor:
    """A gradient that shares no memory with others. The engine may give one tensor, or views of it, to several inputs,
    and may pass on its own inputs.
    """
    memory = memory_of(gradient)
    if memory in taken or (gradient.layout is torch.strided and 0 in gradient.stride()):
        return gradient.clone(memory_format=torch.contiguous_format)
    taken.add(memory)
    return gradient


def memory_of(tensor: Tensor | None) -> int:
    """A number that is equal for tensors that share memory; the object's id for a tensor without storage."""
    if tensor is None or tensor.layout is not torch.strided:
        return id(tensor)
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def references_to(tensors: Sequence[Tensor | None]) -> list[int]:
    """The reference count of each tensor, to compare with `ALONE`."""
    return list(map(sys.getrefcount, tensors))


IS_FOREIGN = partial(operator.is_, FOREIGN)
# The count of a tensor without other owners: a custom Function may have kept what it returned.
ALONE = references_to((torch.empty(0),))[0]


def say_where(error: BaseException, worker: str) -> None:
    """Add a note with the worker and the graph node to an error."""
    node = None
    traceback = foreign.field(error, "__traceback__")
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        first = names.get(code.co_varnames[0]) if code.co_argcount and code.co_varnames else None
        if isinstance(first, torch.autograd.graph.Node):
            node = first.name()
        traceback = traceback.tb_next
    foreign.add_note(error, f"in the backward pass on worker {worker!r}" + (f", at node {node}" if node else ""))
