"""Values as a tree: the serialization of a group that reads no pickles (``serialization="safe"``).

A tree is msgpack. It cannot name a function to call, because it has no way of saying that: what msgpack has no type for
is a list that begins with a mark, a number of `Mark`, and each mark has one method here that reads it, which checks
what it is given. Dense tensors leave the tree, as they leave a pickle; an extension says their number. The only names
are those of registered classes and functions (`registered`), of numpy's and torch's plain types, and of torch's named
tuples.

What a tree does not keep: which lists, dicts and objects were the same (tensors do), and bytearrays and memoryviews,
which arrive as bytes. Something that contains itself is refused.

The parts of tensors that say where to look in memory (indices, offsets, sizes) are checked before a tensor is made of
them, and copied before that: the memory that they arrive in may be shared with their sender.
"""

from __future__ import annotations

import copyreg
import math
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType
from typing import Any, Protocol

import msgpack
import numpy
import torch

from .. import foreign
from ..errors import ProtocolError, RemoteError, RpcError, SerializationError
from . import reductions
from .frames import Buffer
from .reductions import Past, TensorRoute, is_dense
from .reference_messages import PassedReference
from .registered import name_of, registered

Tensor = torch.Tensor
strided = torch.strided
ExtType = msgpack.ExtType

# Arrays of more bytes than this leave the tree.
_SMALL = 4096
# Trees longer than this are looked through once before anything is made of them: a list may announce as many items as
# the tree has bytes, and one inside of another may do so again.
_LONG = 1024
_DTYPE = re.compile(
    r"[<>|=](?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SU][1-9]\d{0,9}|[mM]8(?:\[[a-zA-Zμ0-9]+\])?)"
)


class Mark(IntEnum):
    """What a list is that begins with such a mark."""

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


_TENSOR, _MARK = 1, 2  # extension types
_new: Any = tuple.__new__
# What ExtType(...) makes, without its call into Python.
_TENSORS = [_new(ExtType, (_TENSOR, number.to_bytes(4, "big"))) for number in range(1024)]
_NUMBERS = {each.data: number for number, each in enumerate(_TENSORS)}
_MARKS = [_new(ExtType, (_MARK, bytes((mark,)))) for mark in Mark]
_TUPLE = _MARKS[Mark.TUPLE]

_DTYPES = {f"{each}".removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_LAYOUTS = {f"{each}".removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.layout)}
_FORMATS = {
    f"{each}".removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.memory_format)
}
#: torch's named tuples, as its operators return them.
_NAMED_TUPLES: dict[str, Any] = {
    name: each
    for name, each in vars(torch.return_types).items()
    if isinstance(each, type) and issubclass(each, tuple) and each.__module__ == "torch.return_types"
}
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class Collected(Protocol):
    """What is collected while a message is encoded (`codec.Outgoing`)."""

    apart: list[Tensor] | None
    buffers: list[Buffer]
    places: dict[int, int]
    references: list[PassedReference]
    route: TensorRoute | None
    tensors: list[Tensor]


class Brought(Protocol):
    """What a message has brought along (`codec.Incoming`)."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def references(self) -> Sequence[Any]: ...

    @property
    def past(self) -> Past | None: ...


# --- writing ----------------------------------------------------------------------------------------------------------


def write_tree(value: object, out: Collected) -> bytes:
    """One value as a tree; its dense tensors, its arrays and its references go to `out`.

    Raises SerializationError for what cannot be in one, and whatever the code of registered classes raises.
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


def _writer(out: Collected) -> Callable[[Any], Any]:
    """What msgpack asks about values that it has no type for. It answers with what stands for them."""
    # Names of this function, not attributes of an object: it is called for each tensor, and each tuple.
    places, tensors, on_host, other = out.places, out.tensors, out.route is None, _Writer(out).write

    def write(value: Any) -> Any:
        kind = type(value)
        if kind is tuple:
            return [_TUPLE, *value]
        if (
            kind is Tensor
            and on_host
            # As `codec.encode_values` says, without a call for each tensor.
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
            return _TENSORS[place] if place < 1024 else ExtType(_TENSOR, place.to_bytes(4, "big"))
        return other(value, kind)

    return write


class _Writer:
    """The same for values that are rarer."""

    __slots__ = ("_out",)

    def __init__(self, out: Collected) -> None:
        self._out = out

    def write(self, value: Any, kind: type) -> Any:
        write = _WRITERS.get(kind)
        return self._other(value, kind) if write is None else write(value)

    def dense(self, tensor: Tensor) -> Any:
        """A dense tensor, which leaves the tree."""
        out = self._out
        place = out.places.get(id(tensor))
        if place is None:
            place = out.places[id(tensor)] = len(out.tensors)
            out.tensors.append(tensor)
        there = ExtType(_TENSOR, place.to_bytes(4, "big"))
        return [_MARKS[Mark.ATTRIBUTES], there, tensor.__dict__] if tensor.__dict__ else there

    def _other(self, value: Any, kind: type) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is numpy.ndarray:
            return self._array(value)
        if isinstance(value, (type, *_FUNCTIONS)):
            return [_MARKS[Mark.NAMED], _name(value, f"the {_sort(value)} {name_of(value) or value!r:.200}")]
        if hasattr(kind, "_travel"):  # a remote reference
            value._travel(self._out, None)
            return [_MARKS[Mark.REFERENCE], len(self._out.references) - 1]
        if kind is torch.UntypedStorage:
            _, (tensor,) = reductions.OTHERS[kind](value, self._out.route)
            return [_MARKS[Mark.STORAGE], tensor]
        if kind is torch.TypedStorage:
            return [_MARKS[Mark.TYPED_STORAGE], value._untyped_storage, value.dtype]
        if isinstance(value, numpy.generic):
            return [_MARKS[Mark.SCALAR], _plain_dtype(value.dtype), value.tobytes()]
        if kind.__module__ == "torch.return_types" and _NAMED_TUPLES.get(kind.__name__) is kind:
            return [_MARKS[Mark.NAMED_TUPLE], kind.__name__, *value]
        if isinstance(value, BaseException) and registered.name(kind) is None:
            said = foreign.text_of(value)
            return [_MARKS[Mark.ERROR], foreign.name_of(value), said, foreign.traceback_of(value)]
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> Any:
        """An object of a registered class, as pickle would take it apart."""
        name = _name(kind, f"an object of {name_of(kind)}")
        take_apart = getattr(kind, "_take_apart", None)
        if take_apart is not None:
            return [_MARKS[Mark.PARTS], name, take_apart(value)]
        if isinstance(value, Enum):
            return [_MARKS[Mark.OBJECT], name, True, [value._value_], {}, None, None, None]
        reduce = copyreg.dispatch_table.get(kind)
        reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if type(reduced) is not tuple:
            raise SerializationError(f"is an object of {name} that pickles itself as a name, which is not safe")
        made_by, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        names: dict[str, Any] = {}
        calls = made_by is kind
        if made_by is copyreg.__newobj__:  # type: ignore[attr-defined]  # not in typeshed, but documented
            made_by, *args = args
        elif made_by is copyreg.__newobj_ex__:  # type: ignore[attr-defined]  # not in typeshed, but documented
            made_by, args, names = args
        if made_by is not kind or setter is not None:
            by = getattr(setter or made_by, "__qualname__", made_by)
            raise SerializationError(
                f"is an object of {name} that pickles itself by {by}, which is not safe; give the class __getstate__ "
                "and __setstate__, or a __reduce__ that calls the class itself"
            )
        items = None if items is None else list(items)
        pairs = None if pairs is None else [list(pair) for pair in pairs]
        return [_MARKS[Mark.OBJECT], name, calls, list(args), names, state, items, pairs]

    def _array(self, array: numpy.ndarray[Any, Any]) -> Any:
        dtype, fortran = _plain_dtype(array.dtype), array.flags.fnc
        # Not array.copy(): of some it would keep the order of the axes.
        order = numpy.asfortranarray(array) if fortran else numpy.ascontiguousarray(array)
        data: Any
        if array.nbytes <= _SMALL:
            data = order.tobytes("A")
        else:
            data = len(self._out.buffers)
            flat: Any = order.reshape(-1, order="A").view(numpy.uint8)
            self._out.buffers.append(memoryview(flat))
        return [_MARKS[Mark.ARRAY], dtype, list(array.shape), fortran, array.flags.writeable, data]

    def _tensor(self, tensor: Tensor) -> Any:
        """A tensor that is not plain: see `reductions`, whose parts are used here."""
        out = self._out
        if is_dense(tensor, out.route):
            return self.dense(tensor)
        apart = out.apart
        if apart is not None and reductions.has_sparse_past(tensor):
            apart.append(tensor)
            return self._with([_MARKS[Mark.PAST], len(apart) - 1, tensor.detach()], tensor)
        if tensor.is_nested and tensor.layout is torch.jagged and type(tensor) is reductions.jagged_class():
            return self._jagged(tensor)
        if tensor.is_meta and type(tensor) is Tensor and tensor.layout is torch.strided:
            shape = [list(tensor.size()), list(tensor.stride())]
            return self._with([_MARKS[Mark.META], tensor.dtype, *shape, tensor.requires_grad], tensor)
        reduced = reductions.reduce_tensor(tensor, out.route)
        if reduced is NotImplemented:
            raise SerializationError(
                f"is a tensor of {name_of(type(tensor))} that pickles itself, which is not safe; send a plain tensor"
            )
        mark = _BY_FUNCTION.get(reduced[0])
        args = list(reduced[1])
        if mark is Mark.SUBCLASS:
            args[0] = _name(args[0], f"a tensor of the class {name_of(args[0])}")
        elif mark is Mark.UNINITIALIZED:
            args.insert(0, type(tensor) is reductions.UninitializedParameter)
        assert mark is not None, "the marks are complete"
        return self._with([_MARKS[mark], *args], tensor)

    def _with(self, tree: list[Any], tensor: Tensor) -> Any:
        """The same, and the attributes of the tensor."""
        if type(tensor).__getstate__ is not Tensor.__getstate__:
            raise SerializationError(f"is a {name_of(type(tensor))} with a __getstate__ of its own, which is not safe")
        state = tensor.__getstate__()
        if not state:
            return tree
        attributes, slots = state if type(state) is tuple else (state, None)
        return [_MARKS[Mark.ATTRIBUTES], tree, {**(attributes or {}), **(slots or {})}]

    def _jagged(self, tensor: Any) -> Any:
        grad = tensor.requires_grad
        inner = tensor.detach()
        parts = (inner._values, inner._offsets, inner._lengths, inner._ragged_idx)
        return [_MARKS[Mark.JAGGED], *parts, grad]


def _sort(value: object) -> str:
    return "class" if isinstance(value, type) else "function"


def _name(thing: Any, what: str) -> str:
    name = registered.name(thing)
    if name is None:
        raise SerializationError(
            f"is {what}, which is not registered, and this group uses safe serialization; call "
            f"aiorpc.register_safe({getattr(thing, '__qualname__', 'it')}) on all workers, or send plain values"
        )
    return name


def _plain_dtype(dtype: numpy.dtype[Any]) -> str:
    text = dtype.str
    if dtype.names is not None or not _DTYPE.fullmatch(text):
        raise SerializationError(
            f"is an array of {dtype}, which is not plain; safe serialization sends numbers and text"
        )
    return text


def _big(value: int) -> Any:
    return [_MARKS[Mark.INT], value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)]


def _ordered(value: OrderedDict[Any, Any]) -> Any:
    return [_MARKS[Mark.ORDERED], dict(value), value.__dict__]


def _moment(mark: Mark) -> Callable[[Any], Any]:
    def write(value: Any) -> Any:
        zone = getattr(value, "tzinfo", None)
        if zone is not None and type(zone) is not timezone:
            raise SerializationError(f"is a {type(value).__name__} in {zone!r:.80}; send it in UTC")
        return [_MARKS[mark], value.isoformat()]

    return write


_WRITERS: dict[type, Callable[[Any], Any]] = {
    int: _big,  # those that msgpack has a type for do not come here
    set: lambda value: [_MARKS[Mark.SET], *value],
    frozenset: lambda value: [_MARKS[Mark.FROZENSET], *value],
    complex: lambda value: [_MARKS[Mark.COMPLEX], value.real, value.imag],
    range: lambda value: [_MARKS[Mark.RANGE], value.start, value.stop, value.step],
    slice: lambda value: [_MARKS[Mark.SLICE], value.start, value.stop, value.step],
    type(...): lambda value: [_MARKS[Mark.ELLIPSIS]],
    OrderedDict: _ordered,
    deque: lambda value: [_MARKS[Mark.DEQUE], value.maxlen, *value],
    date: _moment(Mark.DATE),
    time: _moment(Mark.TIME),
    datetime: _moment(Mark.DATETIME),
    timedelta: lambda value: [_MARKS[Mark.TIMEDELTA], value.days, value.seconds, value.microseconds],
    Decimal: lambda value: [_MARKS[Mark.DECIMAL], str(value)],
    uuid.UUID: lambda value: [_MARKS[Mark.UUID], value.bytes],
    torch.dtype: lambda value: [_MARKS[Mark.DTYPE], f"{value}".removeprefix("torch.")],
    torch.Size: lambda value: [_MARKS[Mark.SIZE], *value],
    torch.device: lambda value: [_MARKS[Mark.DEVICE], str(value)],
    torch.layout: lambda value: [_MARKS[Mark.LAYOUT], f"{value}".removeprefix("torch.")],
    torch.memory_format: lambda value: [_MARKS[Mark.MEMORY_FORMAT], f"{value}".removeprefix("torch.")],
}
_BY_FUNCTION: dict[Any, Mark] = {
    reductions.load_sparse: Mark.SPARSE,
    reductions.load_quantised: Mark.QUANTISED,
    reductions.load_nested: Mark.NESTED,
    reductions.load_subclass: Mark.SUBCLASS,
    reductions.UninitializedParameter: Mark.UNINITIALIZED,
    reductions.UninitializedBuffer: Mark.UNINITIALIZED,
}


# --- reading ----------------------------------------------------------------------------------------------------------


class _Read:
    """A mark as msgpack hands it over, before the list that begins with it is whole."""

    __slots__ = ("mark",)

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


_READ = {bytes((mark,)): _Read(mark) for mark in Mark}
_READ_TUPLE = _READ[bytes((Mark.TUPLE,))]


def read_tree(tree: bytes, message: Brought, buffers: Sequence[Buffer] = ()) -> Any:
    """The value of a tree.

    Raises SerializationError for what is not registered or cannot be, ProtocolError for bytes that are no tree, and
    whatever is no Exception that the code of a registered class raises.
    """
    reader, tensors = _Reader(message, buffers), message.tensors
    open_marks = 0  # whose list is not whole

    # Functions of this one, not methods: they are called for each tensor, and each list.
    def extension(code: int, data: bytes) -> Any:
        nonlocal open_marks
        if code == _MARK:
            open_marks += 1
            return _READ[data]
        if code == _TENSOR:
            return tensors[_NUMBERS[data] if data in _NUMBERS else int.from_bytes(data, "big")]
        raise ProtocolError(f"an extension of type {code}, which does not exist")

    def whole(items: list[Any]) -> Any:
        nonlocal open_marks
        if not items or type(items[0]) is not _Read:
            return items
        open_marks -= 1
        read = items.pop(0)
        return tuple(items) if read is _READ_TUPLE else reader.read(read.mark, items)

    try:
        if len(tree) > _LONG:
            look = msgpack.Unpacker(max_buffer_size=len(tree), strict_map_key=False)
            look.feed(tree)
            look.skip()
        value = msgpack.unpackb(
            tree, ext_hook=extension, list_hook=whole, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except RpcError:
        raise
    except Exception as error:
        raise ProtocolError(
            f"values that are no tree: {type(error).__name__}: {foreign.text_of(error):.200}"
        ) from error
    if open_marks:
        raise ProtocolError("values that are no tree: a mark stands where none belongs")
    return value


class _Reader:
    """What reads the lists that begin with a mark."""

    __slots__ = ("_buffers", "_message")

    def __init__(self, message: Brought, buffers: Sequence[Buffer]) -> None:
        self._message = message
        self._buffers = buffers

    def read(self, mark: Mark, items: list[Any]) -> Any:
        """What that list stands for."""
        try:
            return _READERS[mark](self, *items)
        except RpcError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {foreign.text_of(error):.200}"
            raise SerializationError(f"has a {mark.name.lower()} that cannot be read: {said}") from error

    # --- each mark ----------------------------------------------------------------------------------------------------

    def array(self, dtype: str, shape: list[int], fortran: bool, writeable: bool, data: bytes | int) -> Any:
        kind, count = _dtype(dtype), _count(shape)
        memory: Any = bytearray(data) if type(data) is bytes else self._buffers[_index(data)]
        if count * kind.itemsize != memoryview(memory).nbytes:
            raise ValueError(f"{memoryview(memory).nbytes} bytes for the shape {shape!r:.80} of {dtype}")
        array: Any = numpy.ndarray(tuple(shape), kind, memory, order="F" if fortran else "C")
        if not writeable:
            array.flags.writeable = False
        return array

    def past(self, number: int, tensor: Tensor) -> Tensor:
        _dense_or_sparse(tensor)
        if self._message.past is None:  # the context was left meanwhile
            return tensor.requires_grad_()
        return self._message.past(_index(number), tensor)

    def reference(self, number: int) -> Any:
        return self._message.references[_index(number)]


def _index(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r:.80} is no number of something")
    return number


def _count(shape: object) -> int:
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r:.80} is no shape")
    return math.prod(shape)


def _dtype(text: object) -> numpy.dtype[Any]:
    if type(text) is not str or not _DTYPE.fullmatch(text):
        raise ValueError(f"{text!r:.80} is no plain type of numpy's")
    return numpy.dtype(text)


def _tensors(*tensors: object) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError("no plain tensor stands where one belongs")


def _dense_or_sparse(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError("no tensor stands where one belongs")


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r:.80} is no truth value")
    return value


def _own(tensor: Tensor) -> Tensor:
    """A copy that its sender cannot change any more. For whole numbers that say where to look in memory."""
    _tensors(tensor)
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices of {tensor.dtype}")
    return tensor.detach().clone()


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _sparse(_: _Reader, layout: Any, size: Any, coalesced: bool, grad: bool, *parts: Tensor) -> Tensor:
    *indices, values = parts
    _tensors(values)
    _exact(layout, torch.layout)
    if len(indices) != (1 if layout is torch.sparse_coo else 2):
        raise ValueError(f"{len(indices)} tensors of indices")
    own = [_own(each) for each in indices]
    size = _exact(size, torch.Size)
    return reductions.load_sparse(layout, size, _flag(coalesced), _flag(grad), *own, values, check=True)


def _quantised(_: _Reader, dtype: Any, size: Any, stored: Tensor, *scale: Any) -> Tensor:
    _tensors(stored)
    _exact(dtype, torch.dtype)
    size = _exact(size, torch.Size)
    _count(list(size))
    if len(scale) == 3:
        scales, zeros, axis = scale
        _tensors(scales, zeros)
        if not (0 <= _index(axis) < len(size)) or not scales.numel() == zeros.numel() == size[axis]:
            raise ValueError("scales that do not fit the axis")
        scale = (scales.clone(), zeros.clone(), axis)
    elif len(scale) == 2:
        scale = (_exact(scale[0], float), _exact(scale[1], int))
    else:
        raise ValueError(f"{len(scale)} parts of a scale")
    if not _fits(dtype, size, stored):
        raise ValueError(f"{stored.untyped_storage().nbytes()} bytes for {dtype} of the size {tuple(size)}")
    return reductions.load_quantised(dtype, size, stored, *scale)


def _fits(dtype: torch.dtype, size: torch.Size, stored: Tensor) -> bool:
    """Whether the stored integers are those of a tensor of that size."""
    kind = reductions.STORED.get(dtype)
    if kind is not None:
        return stored.dtype is kind and stored.shape == size
    count = math.prod(size)
    # Those that put several elements into a byte: their storages are copied as a whole.
    packed = {torch.quint4x2: 2, torch.quint2x4: 4}.get(dtype, 0)
    return packed > 0 and stored.dtype is torch.uint8 and stored.untyped_storage().nbytes() >= -(-count // packed)


def _nested(_: _Reader, buffer: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor, grad: bool) -> Tensor:
    _tensors(buffer)
    sizes, strides, offsets = _own(sizes), _own(strides), _own(offsets)
    # One of no parts ends the process where it is used, and the parts are looked for in the memory, not in a view.
    if buffer.dim() != 1 or not buffer.is_contiguous() or sizes.dim() != 2 or not len(sizes):
        raise ValueError("no buffer or no parts")
    if sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        raise ValueError("sizes, strides and offsets that do not belong together")
    # As Python's integers: these cannot overflow.
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        _count(size)
        _count(stride)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset < 0 or (0 not in size and last >= buffer.numel()):
            raise ValueError("a part that is outside of the buffer")
    return reductions.load_nested(buffer, sizes, strides, offsets, _flag(grad))


def _jagged(_: _Reader, values: Tensor, offsets: Any, lengths: Any, dim: int, grad: bool) -> Tensor:
    _tensors(values)
    offsets = _own(offsets)
    _index(dim)
    if offsets.dim() != 1 or not 1 <= dim <= values.dim():
        raise ValueError("offsets that do not belong to these values")
    starts = offsets.tolist()
    ends = starts[1:]
    if lengths is not None:
        lengths = _own(lengths)
        if lengths.shape != (len(starts) - 1,) or min(lengths.tolist(), default=0) < 0:
            raise ValueError("lengths that do not belong to these offsets")
        ends = [start + length for start, length in zip(starts, lengths.tolist(), strict=False)]
    if not starts or starts != sorted(starts) or starts[0] < 0:
        raise ValueError("offsets that do not rise")
    if max(starts[-1], *ends, 0) > values.shape[dim - 1]:
        raise ValueError("offsets beyond the values")
    return reductions.load_jagged(values, offsets, lengths, dim, _flag(grad))


def _meta(_: _Reader, dtype: Any, size: list[int], strides: list[int], grad: bool) -> Tensor:
    _count(size)
    _count(strides)
    made = torch.empty_strided(size, strides, dtype=_exact(dtype, torch.dtype), device="meta")
    return made.requires_grad_() if _flag(grad) else made


def _subclass(_: _Reader, name: str, plain: Tensor, grad: bool) -> Tensor:
    kind = registered.find_class(name)
    if not issubclass(kind, Tensor):
        raise TypeError(f"{name} is no class of tensors")
    _dense_or_sparse(plain)
    return reductions.load_subclass(kind, plain, _flag(grad))


def _uninitialized(_: _Reader, parameter: bool, grad: bool, device: Any, dtype: Any) -> Tensor:
    if _exact(device, torch.device).type not in ("cpu", "meta"):
        raise ValueError(f"one on {device}: no message wakes a device here")
    kind: Any = reductions.UninitializedParameter if _flag(parameter) else reductions.UninitializedBuffer
    made: Tensor = kind(_flag(grad), device, _exact(dtype, torch.dtype))
    return made


def _storage(_: _Reader, tensor: Tensor) -> torch.UntypedStorage:
    _tensors(tensor)
    return reductions.load_storage(tensor)


def _attributes(_: _Reader, tensor: Any, attributes: dict[str, Any]) -> Any:
    if not isinstance(tensor, Tensor):
        raise TypeError("attributes of something that is no tensor")
    fill(tensor, _exact(attributes, dict))
    return tensor


def _ordered_dict(_: _Reader, items: dict[Any, Any], attributes: dict[str, Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(_exact(items, dict))
    fill(made, _exact(attributes, dict))
    return made


def _named_tuple(_: _Reader, name: str, *items: Any) -> Any:
    return _NAMED_TUPLES[name](items)


def _error(_: _Reader, type_name: str, message: str, traceback: str) -> RemoteError:
    said = (_exact(type_name, str), _exact(message, str), _exact(traceback, str))
    return RemoteError(f"{said[0]}: {said[1]}", type_name=said[0], remote_message=said[1], remote_traceback=said[2])


def _parts(_: _Reader, name: str, parts: Any) -> Any:
    kind = registered.find_class(name)
    put_together = getattr(kind, "_put_together", None)
    if put_together is None:
        raise TypeError(f"{name} is not put together from parts")
    return put_together(_exact(parts, dict))


def _object(
    _: _Reader, name: str, calls: bool, args: list[Any], names: dict[str, Any], state: Any, items: Any, pairs: Any
) -> Any:
    """An object of a registered class. See `registered.register_safe` for what of the class may run."""
    kind = registered.find_class(name)
    if hasattr(kind, "_put_together") or issubclass(kind, Tensor):
        raise TypeError(f"{name} is not made like this")
    make = kind if _flag(calls) else kind.__new__
    made = make(*([] if calls else [kind]), *_exact(args, list), **_exact(names, dict))
    if items is not None:
        made.extend(_exact(items, list))
    for key, value in pairs or ():
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


def fill(made: Any, attributes: dict[str, Any]) -> None:
    """Give an object attributes, in its dictionary or in its slots; never one that would replace a method."""
    kind = type(made)
    fields = getattr(kind, "__dataclass_fields__", ())
    for name, value in attributes.items():
        there = next((base.__dict__[name] for base in kind.__mro__ if _exact(name, str) in base.__dict__), _MISSING)
        if type(there) is MemberDescriptorType and there.__objclass__.__flags__ & _MADE_IN_PYTHON:  # a slot
            there.__set__(made, value)
        elif there is _MISSING or name in fields or not (callable(there) or hasattr(type(there), "__get__")):
            made.__dict__[name] = value
        else:
            raise TypeError(f"an attribute {name!r:.80} would replace what {kind.__qualname__} has under that name")


def _size(_: _Reader, *sizes: int) -> torch.Size:
    _count(list(sizes))
    return torch.Size(sizes)


def _scalar(_: _Reader, text: str, data: bytes) -> Any:
    kind = _dtype(text)
    if len(_exact(data, bytes)) != kind.itemsize:
        raise ValueError(f"{len(data)} bytes for one {text}")
    return numpy.frombuffer(data, kind, 1)[0]


_MADE_IN_PYTHON = 1 << 9  # of a class: Py_TPFLAGS_HEAPTYPE
_MISSING = object()

_READERS: list[Callable[..., Any]] = [
    lambda _, *items: items,  # TUPLE; it is read without a call
    lambda _, *items: set(items),
    lambda _, *items: frozenset(items),
    lambda _, data: int.from_bytes(_exact(data, bytes), "big", signed=True),
    lambda _, real, imaginary: complex(_exact(real, float), _exact(imaginary, float)),
    lambda _, start, stop, step: range(start, stop, step),
    lambda _, start, stop, step: slice(start, stop, step),
    lambda _: ...,
    _ordered_dict,
    lambda _, most, *items: deque(items, most),
    lambda _, text: date.fromisoformat(text),
    lambda _, text: time.fromisoformat(text),
    lambda _, text: datetime.fromisoformat(text),
    lambda _, days, seconds, micros: timedelta(_exact(days, int), _exact(seconds, int), _exact(micros, int)),
    lambda _, text: Decimal(_exact(text, str)),
    lambda _, data: uuid.UUID(bytes=_exact(data, bytes)),
    lambda _, name: _DTYPES[name],
    _size,
    lambda _, name: torch.device(_exact(name, str)),
    lambda _, name: _LAYOUTS[name],
    lambda _, name: _FORMATS[name],
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
assert len(_READERS) == len(Mark), "each mark is read by the function at its place"
