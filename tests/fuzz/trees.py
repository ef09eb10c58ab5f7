"""The target of trees: what values are read from in a group with safe serialization."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from aiorpc import WorkerInfo
from aiorpc.protocol.codec import Incoming, Outgoing
from aiorpc.protocol.registered import register_safe
from aiorpc.protocol.trees import read_tree, write_tree

ELEMENTS = 1 << 16  # of a tensor that is read to its end
DEPTH = 50  # of containers that are looked into
TENSORS = (
    torch.tensor([[0, 1], [1, 0]]),
    torch.tensor([2.0, 3.0]),
    torch.tensor([0, 1, 2]),
    torch.tensor([0, 1]),
    torch.arange(8, dtype=torch.int8),
    torch.arange(24.0),
    torch.zeros(2, 1, dtype=torch.int64),
    torch.tensor(5.0),
)


@register_safe
@dataclass
class Point:
    """A class that a program has registered."""

    x: Any
    y: Any = 0


@register_safe
class Color(enum.Enum):
    """An enumeration that a program has registered."""

    RED = 1
    BLUE = "blue"


def taste(data: bytes) -> None:
    """A tree beside tensors, references and buffers of its message; whatever is made of it is read to its end."""
    message = Incoming([each.clone() for each in TENSORS], (object(), object()), None, True)
    with warnings.catch_warnings(action="ignore"):  # torch's own, of some kinds of tensors
        made = read_tree(data, message, [bytearray(64), bytearray(4000)])
        for tensor in found(made, DEPTH):
            read(tensor)


def found(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors inside of a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        inside: Iterable[Any] = [*value, *value.values()] if isinstance(value, dict) else value
        for each in inside:
            yield from found(each, depth - 1)
    elif depth and isinstance(value, Point):
        yield from found([*vars(value).values()], depth - 1)


def read(tensor: torch.Tensor) -> None:
    """Every element: none may lie outside of its memory."""
    # Of some kinds torch copies none, or says that it can do little with them, or that there is too much of them.
    with suppress(NotImplementedError, RuntimeError, TypeError, ValueError):
        if tensor.numel() <= ELEMENTS and not tensor.is_meta:
            tensor.detach().clone()
            if tensor.layout is not torch.strided and tensor.layout is not torch.jagged:
                if tensor.values().numel() <= ELEMENTS:
                    tensor.detach().to_dense()
            elif tensor.is_nested:
                for part in tensor.detach().unbind():
                    part.clone()


def seeds() -> list[bytes]:
    """Trees of values of each kind."""
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    with warnings.catch_warnings(action="ignore"):  # torch's own, of some kinds of tensors
        return [write_tree(tuple(sample), Outgoing(safe=True)) for sample in _samples(moment)]


def _samples(moment: datetime.datetime) -> list[Sequence[Any]]:
    dense = torch.tensor([[0, 2.0], [3, 0]])
    return [
        [None, True, 1, -1.5, "text", b"bytes", [1, (2, 3)], {"a": {1, 2}, 3: frozenset((4,))}],
        [1 << 64, -(1 << 200), 1.5 - 2j, range(1, 9, 2), slice(1, None, 2), ...],
        [OrderedDict([("b", 1)]), deque([1, 2], 3), moment, moment.date(), moment.time(), datetime.timedelta(-1, 2)],
        [decimal.Decimal("1.50"), uuid.UUID(int=7), torch.float32, torch.Size((1, 2)), torch.device("cpu")],
        [torch.sparse_csr, torch.channels_last, numpy.float32(1.5), numpy.datetime64("2026-01-02")],
        [numpy.arange(5), numpy.ones((50, 60)), numpy.array(["a", "bcd"]), numpy.asfortranarray(numpy.eye(3))],
        [Point(1, [2, Point(3)]), Color.RED, Color.BLUE, WorkerInfo("w", 1), Point, ValueError("no")],
        [dense.to_sparse().coalesce(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 1))],
        [torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8), torch.empty(2, 3, device="meta")],
        [torch.nn.Parameter(torch.ones(2)), torch.ones(2).untyped_storage(), torch.nn.UninitializedParameter()],
        [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
    ]
