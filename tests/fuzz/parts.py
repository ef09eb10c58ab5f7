"""The target of parts: tensors of all kinds that a sender puts together of whatever parts, looked at in every way.

Bytes of the input choose: which mark a tree has, and for each of its parts a tensor of a message, with a type, a shape,
strides and values. What is let in is shown, copied, made dense and computed with. As a program this makes many such
inputs, in a process that nobody misses: ``python -m tests.fuzz.parts SEED COUNT`` prints how many were let in.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import torch

from aiorpc.channels import layout
from aiorpc.errors import ProtocolError, SerializationError
from aiorpc.protocol.codec import Incoming
from aiorpc.protocol.trees import Mark, read_tree
from aiorpc.protocol.trees.marks import MARKS, TENSORS
from tests.fuzz.trees import found

_FEW = 1 << 14  # elements of a tensor that is computed with
_TYPES = [code for code, dtype in enumerate(layout.DTYPES) if dtype is not None]
_FLOATS = [0, 1, 2, 3]
_WHOLE = [4, 5]
_QUANTISED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_SIZES = (0, 1, 2, 2, 3, 4, 4, 6, 8, -1, 1 << 31, (1 << 63) - 1)
_NUMBERS = (0, 0, 1, 1, 2, 2, 3, 4, 4, 6, 8, -1, -2, 9, 1 << 40, (1 << 63) - 1, -(1 << 63))


class Chooser:
    """Makes choices by the bytes of an input; once they are used up, always the first."""

    def __init__(self, data: bytes) -> None:
        self._rest = iter(data)
        self.table: list[list[Any]] = []
        self.buffers: list[bytearray] = []

    def of(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[next(self._rest, 0) % len(options)]

    def often(self, usual: Sequence[Any], others: Sequence[Any]) -> Any:
        """One of the usual ones, seven of eight times."""
        return self.of(others if self.of(range(8)) == 7 else usual)

    def shape(self, most: int = 4) -> list[int]:
        """Sizes, small ones as a rule."""
        return [self.often((1, 2, 2, 3, 4), _SIZES) for _ in range(self.of(range(most)))]

    def tensor(self, types: Sequence[int], shape: list[int] | None = None, rises_to: int | None = None) -> Any:
        """A tensor of the message: what stands in a tree for it. rises_to: what its numbers end with, as a rule."""
        code = self.often(types, _TYPES)
        shape = self.shape() if shape is None else shape
        dtype: Any = layout.DTYPES[code]
        count = 1
        for size in shape:
            count *= size
        count = count if 0 < count < 64 else 8
        if code in _WHOLE:
            size = dtype.itemsize
            numbers = self.often((_NUMBERS[:6],), (_NUMBERS,))
            made = [self.of(numbers) for _ in range(count)]
            if rises_to is not None:
                made = self.often(([*sorted([0, rises_to, *made])[: count - 1], rises_to],), (made,))
            data = b"".join((each % (1 << (8 * size))).to_bytes(size, "little") for each in made)
        else:
            data = bytes(self.of(range(256)) for _ in range(count * dtype.itemsize))
        strides: list[int] | None = None
        flags = self.often((0,), (0, 0, 0, 1, 2, 3, 4, 8, 12))
        if self.of(range(16)) == 15 or 0 in shape:
            strides = [self.often((1, 2, 4), _NUMBERS) for _ in shape]
            self.table.append([-1 if 0 in shape else len(self.buffers), 0, code, shape, strides, flags, None])
            self.buffers.append(bytearray(data))
        else:
            self.table.append([-2, data, code, shape, None, flags, None])
        return TENSORS[len(self.table) - 1]


def _mark(mark: Mark, *items: Any) -> list[Any]:
    return [MARKS[mark], *items]


def _sparse(choose: Chooser) -> list[Any]:
    name, entries, index = choose.of(_LAYOUTS), choose.of((2, 0, 1, 3)), [choose.of(_WHOLE)]
    if name == "sparse_coo":
        sparse, dense = choose.of((2, 1, 3)), choose.of(([], [2], [4]))
        size = [4] * sparse + dense
        parts = [choose.tensor([4], [sparse, entries])]
        values = [entries, *dense]
    else:
        blocks = choose.of(([1, 1], [2, 2], [2, 1])) if name in ("sparse_bsr", "sparse_bsc") else []
        batch, dense = choose.often(([],), ([2],)), choose.often(([],), ([2],))
        size = [*batch, 4, 4, *dense]
        ends = 4 // (blocks or [1, 1])[name in ("sparse_csc", "sparse_bsc")] + 1
        parts = [
            choose.tensor(index, [*batch, ends], entries),
            choose.tensor(index, [*batch, entries], choose.of((1, 3))),
        ]
        values = [*batch, entries, *blocks, *dense]
    parts.append(choose.tensor(_FLOATS, choose.often((values,), (choose.shape(),))))
    size = choose.often((size,), (choose.shape(), [2**62, 2**62], [2**62, 4]))
    return _mark(
        *(Mark.SPARSE, _mark(Mark.LAYOUT, name), _mark(Mark.SIZE, *size), choose.of((False, True)), False), *parts
    )


def _quantised(choose: Chooser) -> list[Any]:
    name = choose.of(_QUANTISED)
    size = choose.often(([4, 4], [2, 2], [4], [2, 4, 2]), (choose.shape(), [0, 4], []))
    stored = {"qint8": 7, "quint8": 8, "qint32": 5}.get(name, 8)
    parts: list[Any] = [choose.tensor([stored], choose.often((size,), ([8], [4])))]
    if choose.of((True, False)):
        axis = choose.often((0, 0, 1), (0, 1, 2, -1))
        channels = [size[axis] if -1 < axis < len(size) else 1]
        for types in ([1, 0], [4, 0]):
            parts.append(choose.tensor(types, choose.often((channels,), ([1], [2, 2]))))
        parts.append(axis)
    else:
        parts += [choose.of((0.5, 0.0, float("nan"), float("inf"), -1.0)), choose.often((0, 1), _NUMBERS)]
    return _mark(Mark.QUANTISED, _mark(Mark.DTYPE, name), _mark(Mark.SIZE, *size), *parts)


def _nested(choose: Chooser) -> list[Any]:
    parts, dims = choose.of((1, 2, 0)), choose.of((1, 2, 3))
    buffer = choose.tensor(_FLOATS, choose.often(([8],), ([0], [2, 4])))
    places = [choose.tensor([4], [parts, dims]), choose.tensor([4], [parts, dims]), choose.tensor([4], [parts], 4)]
    return _mark(Mark.NESTED, buffer, *places, False)


def _jagged(choose: Chooser) -> list[Any]:
    values = choose.tensor(_FLOATS, choose.often(([8], [8, 2], [2, 8]), ([0], [])))
    offsets = choose.tensor(_WHOLE, [choose.of((3, 2, 1, 4))], choose.of((2, 8)))
    lengths = choose.often((None,), (choose.tensor(_WHOLE, [2]),))
    return _mark(Mark.JAGGED, values, offsets, lengths, choose.often((1,), (0, 1, 2, 3)), choose.of((False, True)))


def _meta(choose: Chooser) -> list[Any]:
    size = choose.shape()
    return _mark(Mark.META, _mark(Mark.DTYPE, choose.of(_NAMES)), size, [choose.of(_NUMBERS) for _ in size], False)


def _storages(choose: Chooser) -> list[Any]:
    tree = _mark(Mark.STORAGE, choose.tensor(_FLOATS))
    typed = _mark(Mark.TYPED_STORAGE, tree, _mark(Mark.DTYPE, choose.of(_NAMES)))
    return tree if choose.of((True, False)) else typed


def _plain(choose: Chooser) -> Any:
    return choose.tensor(_TYPES)


_NAMES = [f"{dtype}".removeprefix("torch.") for dtype in layout.DTYPES if dtype is not None]
_KINDS: tuple[Callable[[Chooser], Any], ...] = (_sparse, _quantised, _nested, _jagged, _meta, _storages, _plain)


def taste(data: bytes) -> None:
    """One tree beside its tensors, and everything that may be done with what is made of it."""
    choose = Chooser(data)
    tree: Any = choose.of(_KINDS)(choose)
    if choose.of(range(6)) == 5:
        tree = choose.of((_mark(Mark.ATTRIBUTES, tree, {"note": 1}), [tree, tree]))
    with warnings.catch_warnings(action="ignore"):  # torch's own, of some kinds of tensors
        tensors = layout.rebuild(choose.table, choose.buffers)
        made = read_tree(msgpack.packb(tree), Incoming(tensors, (), None, True))
        for tensor in [*found(made, 3), *tensors]:
            look_at(tensor)
        if isinstance(made, torch.TypedStorage | torch.UntypedStorage):
            with suppress(*_REFUSALS):
                repr(made)


# What torch says of what it cannot do with a tensor.
_REFUSALS = (
    *(NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, OverflowError, MemoryError),
    AssertionError,
)


def _ways(tensor: torch.Tensor) -> list[Callable[[], object]]:
    plain = tensor.detach()
    ways: list[Callable[[], object]] = [lambda: repr(tensor), lambda: str(tensor.shape), lambda: hash(tensor)]
    if tensor.is_meta:
        return ways
    if tensor.is_nested:
        return [
            *ways,
            lambda: [part.clone() for part in plain.unbind()],
            lambda: plain.to_padded_tensor(0.0),
            lambda: (plain + plain).sum(),
            lambda: plain.clone().contiguous(),
        ]
    if tensor.numel() > _FEW and (tensor.layout is torch.strided or tensor.is_quantized):
        return ways[1:]
    ways += [plain.clone, lambda: plain + plain, lambda: plain * 2, plain.sum, plain.contiguous]
    if tensor.layout is torch.strided and math.prod(max(size, 1) for size in tensor.shape) <= _FEW:
        ways.append(plain.tolist)  # of no elements it makes as many lists as a size says
    ways += [lambda: plain[0], lambda: plain.abs().max(), lambda: plain == plain, plain.nonzero]
    if tensor.is_quantized:
        return [*ways, plain.dequantize, plain.int_repr, lambda: torch.relu(plain), lambda: plain.view(-1)]
    if tensor.layout is torch.strided:
        return [*ways, plain.to_sparse, lambda: plain.sort(), plain.double]
    if tensor.numel() <= _FEW:
        ways += [plain.to_dense, lambda: plain.to_sparse_csr(), plain.to_sparse_coo, lambda: plain.transpose(0, 1)]
        ways += [lambda: plain @ torch.ones(plain.shape[-1], 2, dtype=plain.dtype)]
    else:
        ways = ways[1:4]
    return [*ways, plain.coalesce] if tensor.layout is torch.sparse_coo else ways


def look_at(tensor: torch.Tensor) -> None:
    """Whatever a handler may do with a tensor that it is given: it may be refused, and the process lives on."""
    for way in _ways(tensor):
        with suppress(*_REFUSALS):
            way()


def seeds() -> list[bytes]:
    """One choice after the other, for each kind."""
    chance = random.Random(5)
    return [bytes([kind]) + bytes(40) for kind in range(len(_KINDS))] + [
        bytes([at % len(_KINDS)]) + chance.randbytes(80) for at in range(40)
    ]


def main() -> None:
    """Many inputs; each one is written down before it is tried, so that a crash names it."""
    chance, taken = random.Random(int(sys.argv[1])), 0
    for _ in range(int(sys.argv[2])):
        data = chance.randbytes(100)
        print(data.hex(), file=sys.stderr)
        with suppress(ProtocolError, SerializationError):
            taste(data)
            taken += 1
    print(taken)


if __name__ == "__main__":
    main()
