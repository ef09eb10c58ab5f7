"""Trees to values; see the package."""

from __future__ import annotations

import copyreg
import math
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import MemberDescriptorType
from typing import Any, TypeVar, cast

import msgpack
import numpy
import torch

from ... import foreign
from ..._typing import Function
from ...errors import ProtocolError, RemoteError, RpcError, SerializationError
from .. import reductions
from ..frames import Buffer
from ..packing import LONG, look_through, shown
from ..registered import registered
from ..tables import Tables
from .marks import (
    DTYPE,
    DTYPES,
    FORMATS,
    LAYOUTS,
    MARK,
    NAMED_TUPLES,
    NUMBERS,
    TENSOR,
    Array,
    Brought,
    Mark,
    Tensor,
)

T = TypeVar("T")

_MARKS = {bytes((mark,)): mark for mark in Mark}
_TUPLE = Mark.TUPLE


def read_tree(tree: bytes, message: Brought, buffers: Sequence[Buffer] = ()) -> object:
    """The value of a tree.

    Raises SerializationError for unregistered or impossible values, ProtocolError for bytes that are no tree, and
    exceptions other than Exception from the code of a registered class.
    """
    reader = _Reader(message, buffers, len(tree))
    try:
        if len(tree) > LONG:
            look_through(tree)
        try:
            return _unpack(tree, reader)
        except ValueError:
            # There are maps with other keys than text and bytes, or it is no tree at all. Now each map is made here,
            # which takes longer; most trees do not need it.
            reader.again()
            return _unpack(tree, reader, reader.tables.mapping)
    except RpcError:
        raise
    except Exception as error:
        raise ProtocolError(
            f"values that are no tree: {type(error).__name__}: {foreign.text_of(error):.200}"
        ) from error


def _unpack(tree: bytes, reader: _Reader, mapping: Function | None = None) -> object:
    """mapping: makes the maps, of any keys; without it msgpack makes them, with keys of text and bytes alone."""
    tensors = reader.message.tensors
    open_marks = 0  # marks whose lists are incomplete; a mark in a wrong place stays open

    # Closures, not methods: they are called for each tensor, and each list.
    def extension(code: int, data: bytes) -> object:
        nonlocal open_marks
        if code == MARK:
            open_marks += 1
            return _MARKS[data]
        if code == TENSOR:
            return tensors[NUMBERS[data] if data in NUMBERS else int.from_bytes(data, "big")]
        raise ProtocolError(f"an extension of type {code}, which does not exist")

    def whole(items: list[object]) -> object:
        nonlocal open_marks
        if not items:
            return items
        mark = items[0]
        if type(mark) is not Mark:
            return items
        open_marks -= 1
        del items[0]
        return tuple(items) if mark is _TUPLE else reader.read(mark, items)

    # A msgpack timestamp, which no worker sends, becomes a number, not an object with a hash of its own.
    value: object = msgpack.unpackb(
        tree,
        ext_hook=extension,
        list_hook=whole,
        object_pairs_hook=mapping,
        strict_map_key=mapping is None,
        unicode_errors="surrogatepass",
        timestamp=1,
    )
    if open_marks:
        raise ProtocolError("values that are no tree: a mark stands where none belongs")
    return value


class _Reader:
    """Reads the lists that begin with a mark. tables: makes the dicts and sets."""

    __slots__ = ("_buffers", "_made", "_parts", "_remade", "message", "tables")

    def __init__(self, message: Brought, buffers: Sequence[Buffer], size: int) -> None:
        self.message = message
        self.tables = Tables(size)
        self._buffers = buffers
        self._made: list[object] = []  # by registered classes, whose code runs once
        self._remade: Iterator[object] = iter(())
        self._parts = -1

    def again(self) -> None:
        """Read the same tree from its beginning: objects that were made are reused."""
        self._made, made = [], self._made
        self._remade = iter(made)

    def read(self, mark: Mark, items: list[object]) -> object:
        """The value of that list."""
        try:
            if mark not in _ONCE:
                return _READERS[mark](self, *items)
            made = next(self._remade, _MISSING)
            if made is _MISSING:
                made = _READERS[mark](self, *items)
            self._made.append(made)
            return made
        except RpcError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {foreign.text_of(error):.200}"
            raise SerializationError(f"has a {mark.name.lower()} that cannot be read: {said}") from error

    def part(self, tensor: Tensor) -> Tensor:
        """A tensor that refers to memory, or is copied. The sum of all uses is bounded: one may be used many times."""
        if self._parts < 0:
            storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in self.message.tensors}
            self._parts = _ANYWAY + _OFTEN * sum(each.nbytes() for each in storages.values())
        self._parts -= tensor.untyped_storage().nbytes()
        if self._parts < 0:
            raise ValueError("parts of tensors that are named much oftener than there are tensors")
        return tensor

    # --- each mark ----------------------------------------------------------------------------------------------------

    def array(self, dtype: str, shape: list[int], fortran: bool, writeable: bool, data: bytes | int) -> Array:
        kind, count = _dtype(dtype), _count(shape)
        memory = bytearray(data) if type(data) is bytes else self._buffers[_index(data)]
        if count * kind.itemsize != memoryview(memory).nbytes:
            raise ValueError(f"{memoryview(memory).nbytes} bytes for the shape {shown(shape)} of {dtype}")
        array: Array = numpy.ndarray(tuple(shape), kind, memory, order="F" if fortran else "C")
        if not writeable:
            array.flags.writeable = False
        return array

    def past(self, number: int, tensor: Tensor) -> Tensor:
        _dense_or_sparse(tensor)
        if self.message.past is None:  # the context was left meanwhile
            return tensor.requires_grad_()
        return self.message.past(_index(number), tensor)

    def reference(self, number: int) -> object:
        return self.message.references[_index(number)]


def _index(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{shown(number)} is no number of something")
    return number


def _sizes(shape: object) -> list[int]:
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shown(shape)} is no shape")
    return shape


def _count(shape: object) -> int:
    sizes = _sizes(shape)
    if len(sizes) > _MOST_DIMENSIONS:  # their product would take time with the square of how many they are
        raise ValueError(f"a shape of {len(sizes)} dimensions")
    return math.prod(sizes)


def _dtype(text: object) -> numpy.dtype[numpy.generic]:
    if type(text) is not str or not DTYPE.fullmatch(text):
        raise ValueError(f"{shown(text)} is no plain type of numpy's")
    return numpy.dtype(text)


def _int64(value: object) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{shown(value)} is no number of 64 bits")
    return value


def _number_of_elements(size: torch.Size) -> int:
    """Raises ValueError for more than torch can count."""
    count = _count(list(_exact(size, torch.Size)))
    if math.prod(max(each, 1) for each in size) >= 1 << 63:
        raise ValueError(f"a tensor of {len(size)} dimensions with more elements than can be counted")
    return count


def _tensors(*tensors: object) -> None:
    """Check that these are dense tensors from a message that do not require gradients."""
    for tensor in tensors:
        _plain(tensor)


def _plain(tensor: object) -> Tensor:
    """Check one such tensor, and return it."""
    _dense_or_sparse(tensor)
    assert isinstance(tensor, Tensor), "checked above"
    if tensor.layout is not torch.strided or tensor.requires_grad:
        raise TypeError("no plain tensor stands where one belongs")
    return tensor


def _dense_or_sparse(tensor: object) -> None:
    """Check that it is a plain Tensor with its values in memory, dense or sparse."""
    if type(tensor) is not Tensor:
        raise TypeError("no tensor stands where one belongs")
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise TypeError("a tensor of another kind stands where a plain one belongs")


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{shown(value)} is no truth value")
    return value


def _own(reader: _Reader, tensor: Tensor, *dtypes: torch.dtype) -> Tensor:
    """A copy, which its sender cannot change any more, of integers that refer to positions in memory."""
    _tensors(tensor)
    if tensor.dtype not in (dtypes or (torch.int64,)):
        raise TypeError(f"indices of {tensor.dtype}")
    return _copy(reader, tensor)


def _copy(reader: _Reader, tensor: Tensor) -> Tensor:
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # expanded: the sender would choose the copy's length
        raise ValueError(f"{tensor.nbytes} bytes to be copied, of which {tensor.untyped_storage().nbytes()} are there")
    return reader.part(tensor).detach().clone(memory_format=torch.contiguous_format)


def _contiguous(reader: _Reader, tensor: Tensor) -> Tensor:
    """The same values with the strides that follow from the shape: kernels rely on them for lengths."""
    if tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return tensor
    return _copy(reader, tensor)


def _exact(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _sparse(
    reader: _Reader, layout: torch.layout, size: torch.Size, coalesced: bool, grad: bool, *parts: Tensor
) -> Tensor:
    *indices, values = parts
    _tensors(values)
    _exact(layout, torch.layout)
    if len(indices) != (1 if layout is torch.sparse_coo else 2):
        raise ValueError(f"{len(indices)} tensors of indices")
    _number_of_elements(size)
    # Indices of one type: torch misinterprets mixed ones.
    own = [_own(reader, each, indices[0].dtype if layout is not torch.sparse_coo else torch.int64) for each in indices]
    if own[0].dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices of {own[0].dtype}")
    values = _contiguous(reader, values)
    return reductions.load_sparse(layout, size, _flag(coalesced), _flag(grad), *own, values, check=True)


def _quantised(reader: _Reader, dtype: torch.dtype, size: torch.Size, stored: Tensor, *scale: object) -> Tensor:
    _tensors(stored)
    least, most = _QUANTA[_exact(dtype, torch.dtype)]
    _number_of_elements(size)
    if not _fits(dtype, size, stored):
        raise ValueError(f"{stored.untyped_storage().nbytes()} bytes for {dtype} of the size {tuple(size)}")
    reader.part(stored)
    if len(scale) == 3:
        scales, zeros, axis = _plain(scale[0]), _plain(scale[1]), _index(scale[2])
        if not axis < len(size) or not scales.shape == zeros.shape == (size[axis],):
            raise ValueError("scales that do not fit the axis")
        # The types that torch uses itself. It would convert others, and then some kernels would not accept them.
        if (dtype, scales.dtype, zeros.dtype) not in _SCALES:
            raise TypeError(f"scales of {scales.dtype} and zero points of {zeros.dtype} for {dtype}")
        scales, zeros = _copy(reader, scales), _copy(reader, zeros)
        if zeros.dtype is torch.int64 and zeros.numel() and not least <= zeros.min() <= zeros.max() <= most:
            raise ValueError(f"zero points outside of {dtype}")
        return reductions.load_quantised(dtype, size, stored, scales, zeros, axis)
    if len(scale) == 2:
        whole, zero = _exact(scale[0], float), _exact(scale[1], int)
        if not least <= zero <= most:
            raise ValueError(f"a zero point outside of {dtype}")
        return reductions.load_quantised(dtype, size, stored, whole, zero)
    raise ValueError(f"{len(scale)} parts of a scale")


def _fits(dtype: torch.dtype, size: torch.Size, stored: Tensor) -> bool:
    """Whether the stored integers belong to a tensor of that size."""
    there = stored.untyped_storage().nbytes()
    kind = reductions.STORED.get(dtype)
    if kind is not None:
        return stored.dtype is kind and stored.shape == size and stored.nbytes <= there and not stored.is_neg()
    # Types that pack several elements into a byte: their storages are copied as a whole.
    count, packed = math.prod(size), {torch.quint4x2: 2, torch.quint2x4: 4}[dtype]
    return stored.dtype is torch.uint8 and there >= -(-count // packed)


def _nested(reader: _Reader, buffer: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor, grad: bool) -> Tensor:
    _tensors(buffer)
    sizes, strides, offsets = _own(reader, sizes), _own(reader, strides), _own(reader, offsets)
    # The parts refer to the memory, not to a view.
    if buffer.dim() != 1 or not buffer.is_contiguous() or sizes.dim() != 2:
        raise ValueError("no buffer or no parts")
    # With Python's integers, which cannot overflow.
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        _number_of_elements(torch.Size(_sizes(size)))
        _sizes(stride)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset < 0 or (0 not in size and last >= buffer.numel()):
            raise ValueError("a part that is outside of the buffer")
    return reductions.load_nested(buffer, sizes, strides, offsets, _flag(grad))


def _jagged(reader: _Reader, values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int, grad: bool) -> Tensor:
    _tensors(values)
    offsets = _own(reader, offsets, torch.int64, torch.int32)
    _index(dim)
    if offsets.dim() != 1 or not 1 <= dim <= values.dim():
        raise ValueError("offsets that do not belong to these values")
    starts = offsets.tolist()
    ends = starts[1:]
    if lengths is not None:
        lengths = _own(reader, lengths, offsets.dtype)
        if lengths.shape != (len(starts) - 1,) or min(lengths.tolist(), default=0) < 0:
            raise ValueError("lengths that do not belong to these offsets")
        ends = [start + length for start, length in zip(starts, lengths.tolist(), strict=False)]
    if not starts or starts != sorted(starts) or starts[0] < 0:
        raise ValueError("offsets that do not rise")
    if max(starts[-1], *ends, 0) > values.shape[dim - 1]:
        raise ValueError("offsets beyond the values")
    return reductions.load_jagged(values, offsets, lengths, dim, _flag(grad))


def _meta(_: _Reader, dtype: object, size: list[int], strides: list[int], grad: bool) -> Tensor:
    _number_of_elements(torch.Size(_sizes(size)))
    _count(strides)
    made = torch.empty_strided(size, strides, dtype=_exact(dtype, torch.dtype), device="meta")
    return made.requires_grad_() if _flag(grad) else made


def _subclass(_: _Reader, name: str, plain: Tensor, grad: bool) -> Tensor:
    kind = registered.find_class(name)
    if not issubclass(kind, Tensor):
        raise TypeError(f"{name} is no class of tensors")
    _dense_or_sparse(plain)
    return reductions.load_subclass(kind, plain, _flag(grad))


def _uninitialized(_: _Reader, parameter: bool, grad: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    if _exact(device, torch.device).type not in ("cpu", "meta"):
        raise ValueError(f"one on {device}: no message wakes a device here")
    kind: Any = reductions.UninitializedParameter if _flag(parameter) else reductions.UninitializedBuffer
    made: Tensor = kind(_flag(grad), device, _exact(dtype, torch.dtype))
    return made


def _storage(_: _Reader, tensor: Tensor) -> torch.UntypedStorage:
    _tensors(tensor)
    return reductions.load_storage(tensor)


def _attributes(_: _Reader, tensor: object, attributes: dict[str, object]) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError("attributes of something that is no tensor")
    fill(tensor, _exact(attributes, dict))
    return tensor


def _ordered_dict(
    _: _Reader, items: dict[object, object], attributes: dict[str, object]
) -> OrderedDict[object, object]:
    made = OrderedDict(_exact(items, dict))
    fill(made, _exact(attributes, dict))
    return made


def _named_tuple(_: _Reader, name: str, *items: object) -> tuple[object, ...]:
    return NAMED_TUPLES[_exact(name, str)](items)


def _error(_: _Reader, type_name: str, message: str, traceback: str) -> RemoteError:
    said = (_exact(type_name, str), _exact(message, str), _exact(traceback, str))
    return RemoteError(f"{said[0]}: {said[1]}", type_name=said[0], remote_message=said[1], remote_traceback=said[2])


def _parts(_: _Reader, name: str, parts: object) -> object:
    kind = registered.find_class(name)
    put_together: Function | None = getattr(kind, "_put_together", None)
    if put_together is None:
        raise TypeError(f"{name} is not put together from parts")
    return put_together(_exact(parts, dict))


def _object(
    reader: _Reader,
    name: str,
    calls: bool,
    args: list[Any],
    names: dict[str, object],
    state: Any,
    items: list[object] | None,
    pairs: Iterable[tuple[object, object]] | None,
) -> object:
    """An object of a registered class. See `registered.register_safe` for what of the class may run."""
    kind: Any = registered.find_class(name)
    # An array made this way would show what lay in its memory before.
    if hasattr(kind, "_put_together") or issubclass(kind, Tensor) or kind.__new__ is numpy.ndarray.__new__:
        raise TypeError(f"{name} is not made like this")
    _check_making(kind, name, _flag(calls), _exact(args, list), _exact(names, dict))
    if args and issubclass(kind, (set, frozenset)):
        reader.tables.members(args[0])
    make = kind if calls else kind.__new__
    made = make(*([] if calls else [kind]), *args, **names)
    if items is not None:
        made.extend(_exact(items, list))
    for key, value in reader.tables.mapping([(key, value) for key, value in pairs or ()]).items():
        made[key] = value
    if state is None:
        return made
    if not isinstance(made, kind):
        raise TypeError(f"{name} has made a {type(made).__name__}")
    own = getattr(type(made), "__setstate__", None)
    if own is not None:
        own(made, state)
        return made
    attributes, slots = state if type(state) is tuple else (state, None)
    fill(made, {**(attributes or {}), **(slots or {})})
    return made


def _check_making(kind: type, name: str, calls: bool, args: list[object], names: dict[str, object]) -> None:
    """Check that the class itself is called only if it asks for that, and that builtin classes get suitable
    arguments."""
    anything, plain = cast(Any, kind), cast(Any, object)
    made_by = anything.__reduce__ if calls else anything.__new__
    if (
        made_by is plain.__reduce__
        and anything.__reduce_ex__ is plain.__reduce_ex__
        and kind not in copyreg.dispatch_table
        and not issubclass(kind, Enum)
    ):
        raise TypeError(f"{name} is made without its constructor, and a call of it is asked for")
    given = _GIVEN.get(made_by)
    if names and (calls or given is not None):
        raise TypeError(f"{name} is made without arguments that have names, and is given some")
    if given is not None:
        _exact(args[0] if args else given(), given)


def fill(made: object, attributes: dict[str, object]) -> None:
    """Give an object attributes, in its dictionary or in its slots; never one that would replace a method.

    Nor one with a name like ``__array_interface__`` that the class does not have: such names control how others treat
    an object; numpy would read memory at any address.
    """
    kind = type(made)
    fields = getattr(kind, "__dataclass_fields__", ())
    for name, value in attributes.items():
        there = next((base.__dict__[name] for base in kind.__mro__ if _exact(name, str) in base.__dict__), _MISSING)
        if type(there) is MemberDescriptorType and there.__objclass__.__flags__ & _MADE_IN_PYTHON:  # a slot
            there.__set__(made, value)
        elif there is _MISSING and name.startswith("__") and name.endswith("__"):
            raise TypeError(f"an attribute {shown(name)}, which {kind.__qualname__} does not have by itself")
        elif there is _MISSING or name in fields or not (callable(there) or hasattr(type(there), "__get__")):
            made.__dict__[name] = value
        else:
            raise TypeError(f"an attribute {shown(name)} would replace what {kind.__qualname__} has under that name")


def _size(_: _Reader, *sizes: int) -> torch.Size:
    return torch.Size(_sizes(list(sizes)))


def _scalar(_: _Reader, text: str, data: bytes) -> numpy.generic:
    if text in _NO_TEXT and data == b"":
        return _NO_TEXT[text]
    kind = _dtype(text)
    if len(_exact(data, bytes)) != kind.itemsize:
        raise ValueError(f"{len(data)} bytes for one {text}")
    if kind.kind == "S":  # an array would strip zeros at the end
        return numpy.bytes_(data)
    if kind.kind == "U":
        return numpy.str_(data.decode("utf-32-be" if kind.str[0] == ">" else "utf-32-le", "surrogatepass"))
    scalar: numpy.generic = numpy.frombuffer(data, kind, 1)[0]
    return scalar


# The empty scalars: numpy has no arrays of their types, so `DTYPE` does not match them.
_NO_TEXT: dict[str, numpy.generic] = {"|S0": numpy.bytes_(), "<U0": numpy.str_(), ">U0": numpy.str_()}
# Marks of values that code of classes makes, or that become part of a graph.
_ONCE = frozenset((Mark.OBJECT, Mark.PARTS, Mark.PAST))
# Bytes of tensors that refer to memory or are copied: so many times the bytes of all tensors, and in any case.
_OFTEN, _ANYWAY = 64, 1 << 20
# The integers that quantised types store, and the types of their scales and zero points for each channel.
_QUANTA: dict[torch.dtype, tuple[int, int]] = {
    torch.qint8: (-(1 << 7), (1 << 7) - 1),
    torch.quint8: (0, (1 << 8) - 1),
    torch.qint32: (-(1 << 31), (1 << 31) - 1),
    torch.quint4x2: (0, (1 << 4) - 1),
    torch.quint2x4: (0, (1 << 2) - 1),
}
_SCALES = frozenset(
    [
        *((kind, torch.float64, torch.int64) for kind in (torch.qint8, torch.quint8, torch.qint32)),
        *((kind, torch.float32, torch.float32) for kind in (torch.qint8, torch.quint8, torch.quint4x2, torch.quint2x4)),
    ]
)
_MADE_IN_PYTHON = 1 << 9  # of a class: Py_TPFLAGS_HEAPTYPE
_MISSING = object()
_MOST_DIMENSIONS = 1024
# The argument types of builtin classes, by the method that shows or takes them. Other arguments would be accepted, too,
# and could make as many items as a range of a few bytes has, or as many bytes as a number tells.
_GIVEN: dict[object, type] = {
    Counter.__reduce__: dict,
    set.__reduce__: list,
    frozenset.__reduce__: list,
    frozenset.__new__: list,
    deque.__reduce__: tuple,
    bytearray.__reduce__: bytes,
    tuple.__new__: tuple,
    bytes.__new__: bytes,
}

_READERS: list[Function] = [
    lambda _, *items: items,  # TUPLE; it is read without a call
    lambda reader, *items: reader.tables.members(items),
    lambda reader, *items: frozenset(reader.tables.members(items)),
    lambda _, data: int.from_bytes(_exact(data, bytes), "big", signed=True),
    lambda _, real, imaginary: complex(_exact(real, float), _exact(imaginary, float)),
    lambda _, *parts: range(*map(_int64, parts)),
    lambda _, start, stop, step: slice(start, stop, step),
    lambda _: ...,
    _ordered_dict,
    lambda _, most, *items: deque(items, most),
    lambda _, text: date.fromisoformat(text),
    lambda _, text, fold=0: time.fromisoformat(text).replace(fold=fold),
    lambda _, text, fold=0: datetime.fromisoformat(text).replace(fold=fold),
    lambda _, days, seconds, micros: timedelta(_exact(days, int), _exact(seconds, int), _exact(micros, int)),
    lambda _, text: Decimal(_exact(text, str)),
    lambda _, data: uuid.UUID(bytes=_exact(data, bytes)),
    lambda _, name: DTYPES[_exact(name, str)],
    _size,
    lambda _, name: torch.device(_exact(name, str)),
    lambda _, name: LAYOUTS[_exact(name, str)],
    lambda _, name: FORMATS[_exact(name, str)],
    _Reader.array,
    _scalar,
    _attributes,
    _sparse,
    _quantised,
    _nested,
    _jagged,
    _meta,
    _subclass,
    _uninitialized,
    _storage,
    lambda _, untyped, dtype: reductions.load_typed_storage(
        _exact(untyped, torch.UntypedStorage), _exact(dtype, torch.dtype)
    ),
    _Reader.past,
    _Reader.reference,
    _named_tuple,
    lambda _, name: registered.find(name),
    _object,
    _parts,
    _error,
]
assert len(_READERS) == len(Mark), "the function at each mark's position reads it"
