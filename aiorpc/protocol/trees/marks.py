"""The parts of trees: marks, extensions of msgpack, the names of plain types; and what travels beside a tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgpack
import numpy
import torch

from ..frames import Buffer
from ..reductions import Past, TensorRoute
from ..reference_messages import PassedReference

Tensor = torch.Tensor
# An array of any shape and type.
Array = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]]
strided: torch.layout = torch.strided
ExtType = msgpack.ExtType

DTYPE = re.compile(
    r"[<>|=](?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SU][1-9]\d{0,9}|[mM]8(?:\[[a-zA-Zμ0-9]+\])?)"
)


class Mark(IntEnum):
    """The kind of a list that begins with the mark."""

    TUPLE = 0
    SET = 1
    FROZENSET = 2
    INT = 3
    COMPLEX = 4
    RANGE = 5
    SLICE = 6
    ELLIPSIS = 7
    ORDERED = 8
    DEQUE = 9
    DATE = 10
    TIME = 11
    DATETIME = 12
    TIMEDELTA = 13
    DECIMAL = 14
    UUID = 15
    DTYPE = 16
    SIZE = 17
    DEVICE = 18
    LAYOUT = 19
    MEMORY_FORMAT = 20
    ARRAY = 21
    SCALAR = 22
    ATTRIBUTES = 23
    SPARSE = 24
    QUANTISED = 25
    NESTED = 26
    JAGGED = 27
    META = 28
    SUBCLASS = 29
    UNINITIALIZED = 30
    STORAGE = 31
    TYPED_STORAGE = 32
    PAST = 33
    REFERENCE = 34
    NAMED_TUPLE = 35
    NAMED = 36
    OBJECT = 37
    PARTS = 38
    ERROR = 39


TENSOR, MARK = 1, 2  # extension types
TENSORS = [ExtType(TENSOR, number.to_bytes(4, "big")) for number in range(1024)]
NUMBERS = {each.data: number for number, each in enumerate(TENSORS)}
MARKS = [ExtType(MARK, bytes((mark,))) for mark in Mark]
TUPLE = MARKS[Mark.TUPLE]

DTYPES = {f"{each}".removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
LAYOUTS = {f"{each}".removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.layout)}
FORMATS = {
    f"{each}".removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.memory_format)
}
#: torch's named tuples, as its operators return them.
NAMED_TUPLES: dict[str, type[tuple[object, ...]]] = {
    name: each
    for name, each in vars(torch.return_types).items()
    if isinstance(each, type) and issubclass(each, tuple) and each.__module__ == "torch.return_types"
}


class Collected(Protocol):
    """What `write_tree` uses of `codec.Outgoing`."""

    apart: list[Tensor] | None
    buffers: list[Buffer]
    places: dict[int, int]
    references: list[PassedReference]
    route: TensorRoute | None
    tensors: list[Tensor]


class Brought(Protocol):
    """What `read_tree` uses of `codec.Incoming`."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def references(self) -> Sequence[object]: ...

    @property
    def past(self) -> Past | None: ...
