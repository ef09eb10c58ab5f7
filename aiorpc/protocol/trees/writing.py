"""Values to trees; see the package."""

from __future__ import annotations

import copyreg
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any

import msgpack
import numpy
import torch

from ... import foreign
from ..._typing import Function
from ...errors import SerializationError
from .. import reductions
from ..reductions import is_dense
from ..registered import NAMEABLE, name_of, registered
from .marks import (
    DTYPE,
    MARKS,
    NAMED_TUPLES,
    TENSOR,
    TENSORS,
    TUPLE,
    Array,
    Collected,
    ExtType,
    Mark,
    Tensor,
    strided,
)

# Arrays of more bytes than this leave the tree.
_SMALL = 4096


def write_tree(value: object, out: Collected) -> bytes:
    """One value as a tree; its dense tensors, its arrays and its references go to `out`.

    Raises SerializationError for values that cannot be in a tree, and the errors of registered classes' code.
    """
    # A lone surrogate is valid in str and not in UTF-8.
    packer = msgpack.Packer(default=_writer(out), strict_types=True, unicode_errors="surrogatepass")
    try:
        tree: bytes = packer.pack(value)
    except RecursionError:
        raise SerializationError("is nested too deeply, or contains itself") from None
    except ValueError as error:
        if "recursion limit" in str(error):
            raise SerializationError("is nested too deeply, or contains itself") from None
        raise
    return tree


def _writer(out: Collected) -> Callable[[object], object]:
    """msgpack's hook for values of types that it lacks. Returns their representation."""
    # A closure, not an object: it is called for each tensor, and each tuple.
    places, tensors, on_host, other = out.places, out.tensors, out.route is None, _Writer(out).write

    def write(value: Any) -> object:
        kind = type(value)
        if kind is tuple:
            return [TUPLE, *value]
        if (
            kind is Tensor
            and on_host
            # `codec.encode_values`, without a call for each tensor.
            and value.is_cpu
            and value.layout is strided
            and not (value.is_quantized or value.is_nested or value.__dict__)
        ):
            key = id(value)
            if key in places:
                place = places[key]
            else:
                place = places[key] = len(tensors)
                tensors.append(value)
            return TENSORS[place] if place < 1024 else ExtType(TENSOR, place.to_bytes(4, "big"))
        return other(value, kind)

    return write


class _Writer:
    """Represents the rarer values."""

    __slots__ = ("_out",)

    def __init__(self, out: Collected) -> None:
        self._out = out

    def write(self, value: object, kind: type) -> object:
        write = _WRITERS.get(kind)
        return self._other(value, kind) if write is None else write(value)

    def _dense(self, tensor: Tensor) -> object:
        """A dense tensor, which leaves the tree."""
        out = self._out
        place = out.places.get(id(tensor))
        if place is None:
            place = out.places[id(tensor)] = len(out.tensors)
            out.tensors.append(tensor)
        there = ExtType(TENSOR, place.to_bytes(4, "big"))
        return [MARKS[Mark.ATTRIBUTES], there, tensor.__dict__] if tensor.__dict__ else there

    def _other(self, value: Any, kind: type) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is numpy.ndarray:
            return self._array(value)
        if isinstance(value, NAMEABLE):
            sort = "class" if isinstance(value, type) else "function"
            return [MARKS[Mark.NAMED], _name(value, f"the {sort} {name_of(value) or value!r:.200}")]
        if hasattr(kind, "_travel"):  # a remote reference
            value._travel(self._out, None)
            return [MARKS[Mark.REFERENCE], len(self._out.references) - 1]
        if kind is torch.UntypedStorage:
            (tensor,) = reductions.reduce_storage(value, self._out.route)[1]
            return [MARKS[Mark.STORAGE], tensor]
        if kind is torch.TypedStorage:
            return [MARKS[Mark.TYPED_STORAGE], value._untyped_storage, value.dtype]
        if isinstance(value, numpy.generic):
            dtype = value.dtype
            empty = dtype.kind in "SU" and not dtype.itemsize  # an empty text, whose type no array has
            text, data = (dtype.str, b"") if empty else (_plain_dtype(dtype), value.tobytes())
            return [MARKS[Mark.SCALAR], text, data]
        if kind.__module__ == "torch.return_types" and NAMED_TUPLES.get(kind.__name__) is kind:
            return [MARKS[Mark.NAMED_TUPLE], kind.__name__, *value]
        if isinstance(value, BaseException) and registered.name(kind) is None:
            said = foreign.text_of(value)
            return [MARKS[Mark.ERROR], foreign.name_of(value), said, foreign.traceback_of(value)]
        return self._object(value, kind)

    def _object(self, value: object, kind: type) -> list[object]:
        """An object of a registered class, taken apart as by pickle."""
        name = _name(kind, f"an object of {name_of(kind)}")
        take_apart: Function | None = getattr(kind, "_take_apart", None)
        if take_apart is not None:
            return [MARKS[Mark.PARTS], name, take_apart(value)]
        if isinstance(value, Enum):
            return [MARKS[Mark.OBJECT], name, True, [value._value_], {}, None, None, None]
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if type(reduced) is not tuple:
            raise SerializationError(f"is an object of {name} that pickles itself as a name, which is not safe")
        made_by, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        names: dict[str, object] = {}
        calls = made_by is kind
        if made_by is copyreg.__newobj__:  # type: ignore[attr-defined]  # not in typeshed; `object.__reduce_ex__` gives it
            made_by, *args = args
        elif made_by is copyreg.__newobj_ex__:  # type: ignore[attr-defined]  # not in typeshed; `object.__reduce_ex__` gives it
            made_by, args, names = args
        if made_by is not kind or setter is not None:
            by = getattr(setter or made_by, "__qualname__", made_by)
            raise SerializationError(
                f"is an object of {name} that pickles itself by {by}, which is not safe; give the class __getstate__ "
                "and __setstate__, or a __reduce__ that calls the class itself"
            )
        items = None if items is None else list(items)
        pairs = None if pairs is None else [list(pair) for pair in pairs]
        return [MARKS[Mark.OBJECT], name, calls, list(args), names, state, items, pairs]

    def _array(self, array: Array) -> list[object]:
        dtype, fortran = _plain_dtype(array.dtype), array.flags.fnc
        # Not array.copy(), which may keep the order of the axes.
        order = numpy.asfortranarray(array) if fortran else numpy.ascontiguousarray(array)
        data: bytes | int
        if array.nbytes <= _SMALL:
            data = order.tobytes("A")
        else:
            data = len(self._out.buffers)
            flat = order.reshape(-1, order="A").view(numpy.uint8)
            self._out.buffers.append(flat.data)
        return [MARKS[Mark.ARRAY], dtype, list(array.shape), fortran, array.flags.writeable, data]

    def _tensor(self, tensor: Tensor) -> object:
        """A tensor that is not plain: uses the parts from `reductions`."""
        out = self._out
        if is_dense(tensor, out.route):
            return self._dense(tensor)
        apart = out.apart
        if apart is not None and reductions.has_sparse_past(tensor):
            apart.append(tensor)
            return self._with([MARKS[Mark.PAST], len(apart) - 1, tensor.detach()], tensor)
        if tensor.is_nested and tensor.layout is torch.jagged and type(tensor) is reductions.jagged_class():
            return self._jagged(tensor)
        if tensor.is_meta and type(tensor) is Tensor and tensor.layout is torch.strided:
            shape = [list(tensor.size()), list(tensor.stride())]
            return self._with([MARKS[Mark.META], tensor.dtype, *shape, tensor.requires_grad], tensor)
        reduced = reductions.reduce_tensor(tensor, out.route)
        if reduced is None:
            raise SerializationError(
                f"is a tensor of {name_of(type(tensor))} that pickles itself, which is not safe; send a plain tensor"
            )
        mark = _BY_FUNCTION.get(reduced[0])
        args = list(reduced[1])
        if mark is Mark.SUBCLASS:
            args[0] = _name(args[0], f"a tensor of the class {name_of(args[0])}")
        elif mark is Mark.UNINITIALIZED:
            args.insert(0, type(tensor) is reductions.UninitializedParameter)
        assert mark is not None, "each function of `reductions` has a mark"
        return self._with([MARKS[mark], *args], tensor)

    def _with(self, tree: list[object], tensor: Tensor) -> list[object]:
        """Add the attributes of the tensor."""
        if type(tensor).__getstate__ is not Tensor.__getstate__:
            raise SerializationError(f"is a {name_of(type(tensor))} with a __getstate__ of its own, which is not safe")
        state = tensor.__getstate__()
        if not state:
            return tree
        attributes, slots = state if type(state) is tuple else (state, None)
        return [MARKS[Mark.ATTRIBUTES], tree, {**(attributes or {}), **(slots or {})}]

    def _jagged(self, tensor: Tensor) -> list[object]:
        grad = tensor.requires_grad
        inner: Any = tensor.detach()  # the private attributes of torch.nested are not typed
        lengths = inner._lengths
        # Dense copies of expanded ones: the reader allows no others.
        offsets, lengths = inner._offsets.contiguous(), None if lengths is None else lengths.contiguous()
        parts = (inner._values, offsets, lengths, inner._ragged_idx)
        return [MARKS[Mark.JAGGED], *parts, grad]


def _name(thing: object, what: str) -> str:
    name = registered.name(thing)
    if name is None:
        raise SerializationError(
            f"is {what}, which is not registered, and this group uses safe serialization; call "
            f"aiorpc.register_safe({getattr(thing, '__qualname__', 'it')}) on all workers, or send plain values"
        )
    return name


def _plain_dtype(dtype: numpy.dtype[numpy.generic]) -> str:
    text = dtype.str
    if dtype.names is not None or not DTYPE.fullmatch(text):
        raise SerializationError(
            f"is an array of {dtype}, which is not plain; safe serialization sends numbers and text"
        )
    return text


def _big(value: int) -> list[object]:
    return [MARKS[Mark.INT], value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)]


def _ordered(value: OrderedDict[object, object]) -> list[object]:
    return [MARKS[Mark.ORDERED], dict(value), value.__dict__]


def _moment(mark: Mark) -> Callable[[date | time], list[object]]:
    def write(value: date | time) -> list[object]:
        zone = getattr(value, "tzinfo", None)
        if zone is not None and type(zone) is not timezone:
            raise SerializationError(f"is a {type(value).__name__} in {zone!r:.80}; send it in UTC")
        tree: list[object] = [MARKS[mark], value.isoformat()]
        if getattr(value, "fold", 0):  # the second of two equal times when a clock is set back; the text is the same
            tree.append(1)
        return tree

    return write


_WRITERS: dict[type, Function] = {
    int: _big,  # integers of more than 64 bits
    set: lambda value: [MARKS[Mark.SET], *value],
    frozenset: lambda value: [MARKS[Mark.FROZENSET], *value],
    complex: lambda value: [MARKS[Mark.COMPLEX], value.real, value.imag],
    range: lambda value: [MARKS[Mark.RANGE], value.start, value.stop, value.step],
    slice: lambda value: [MARKS[Mark.SLICE], value.start, value.stop, value.step],
    type(...): lambda value: [MARKS[Mark.ELLIPSIS]],
    OrderedDict: _ordered,
    deque: lambda value: [MARKS[Mark.DEQUE], value.maxlen, *value],
    date: _moment(Mark.DATE),
    time: _moment(Mark.TIME),
    datetime: _moment(Mark.DATETIME),
    timedelta: lambda value: [MARKS[Mark.TIMEDELTA], value.days, value.seconds, value.microseconds],
    Decimal: lambda value: [MARKS[Mark.DECIMAL], str(value)],
    uuid.UUID: lambda value: [MARKS[Mark.UUID], value.bytes],
    torch.dtype: lambda value: [MARKS[Mark.DTYPE], f"{value}".removeprefix("torch.")],
    torch.Size: lambda value: [MARKS[Mark.SIZE], *value],
    torch.device: lambda value: [MARKS[Mark.DEVICE], str(value)],
    torch.layout: lambda value: [MARKS[Mark.LAYOUT], f"{value}".removeprefix("torch.")],
    torch.memory_format: lambda value: [MARKS[Mark.MEMORY_FORMAT], f"{value}".removeprefix("torch.")],
}
_BY_FUNCTION: dict[object, Mark] = {
    reductions.load_sparse: Mark.SPARSE,
    reductions.load_quantised: Mark.QUANTISED,
    reductions.load_nested: Mark.NESTED,
    reductions.load_subclass: Mark.SUBCLASS,
    reductions.UninitializedParameter: Mark.UNINITIALIZED,
    reductions.UninitializedBuffer: Mark.UNINITIALIZED,
}
