"""The layout of tensors: what a message says about them, and the buffers that hold their bytes.

Tensors of one message that share a storage share one at the receiver: the span of the storage that they cover travels
once. A tensor alone in its storage travels as its bytes; strides are kept unless they would make the span more than
twice as long as the elements, and longer than `EMBEDDED_SIZE`: then the receiver gets a contiguous copy. The
bits "to be conjugated" and "to be negated" travel as bits: nothing is computed, and a conjugate still shares memory
with its origin. This module does not know the channels.

A tensor of up to `EMBEDDED_SIZE` bytes alone in its storage goes into the table itself: a buffer of its own costs more
than the copy.

The table of a message has one `TensorEntry` for each tensor.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy
import torch

from ..errors import ProtocolError, SerializationError
from ..protocol.frames import DIRECT_SIZE, Buffer
from ..protocol.messages import TensorEntry
from . import AnyBuffer
from .accelerator import Accelerator, DeviceBuffer, device_index
from .landing import Landing
from .routes import Route

REQUIRES_GRAD, PARAMETER, CONJUGATE, NEGATIVE = 1, 2, 4, 8
OF_A_LEAF = REQUIRES_GRAD | PARAMETER
NO_BYTES, EMBEDDED = -1, -2
EMBEDDED_SIZE = 4096

# Positions are codes on the wire: append only. A version of torch without some type has None in its place.
_DTYPE_NAMES = """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32
    uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    float4_e2m1fn_x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 bits8 bits16
    bits1x8 bits2x4 bits4x2 bcomplex32
"""
DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES.split())


class _Codes(dict[torch.dtype, int]):
    """The code of each type. Raises SerializationError for a type of a later torch, which no worker could read."""

    def __missing__(self, dtype: torch.dtype) -> NoReturn:
        raise SerializationError(
            f"(or another value) holds a {dtype} tensor, a type that this version of aiorpc does not know; send a view "
            "of it as another type, tensor.view(torch.uint8)"
        )


_CODES = _Codes((dtype, code) for code, dtype in enumerate(DTYPES) if dtype is not None)
_NUMPY = {
    _CODES[dtype]: numpy.dtype(str(dtype).removeprefix("torch."))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8)
} | {_CODES[torch.uint8]: numpy.dtype("uint8"), _CODES[torch.bool]: numpy.dtype("bool")}
_COMPLEX = frozenset(code for dtype, code in _CODES.items() if dtype.is_complex)
_NEGATED = frozenset(dtype for dtype in _CODES if dtype.is_complex) | {torch.float64, torch.float32, torch.float16}
_MOST_DIMENSIONS = 64  # numpy takes no more, nor do most operators of torch
_ALIGN = 16
Parameter = torch.nn.Parameter
_PLAIN = frozenset((torch.Tensor,))
# True for a tensor of zeros without memory, as torch makes for some derivatives.
_IS_ZERO: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
# Named each time: the program may have set another default device for the thread that decodes.
_CPU = torch.device("cpu")


_FIRST, _LAST = operator.itemgetter(0), operator.itemgetter(1)  # of a span


def describe(tensors: Sequence[torch.Tensor], route: Route | None = None) -> tuple[list[TensorEntry], list[AnyBuffer]]:
    """The table for dense tensors, and the buffers with their bytes, which borrow the tensors' memory.

    route: for tensors on devices; those it takes may be among them. Raises SerializationError for a tensor that has
    elements but no bytes.
    """
    if (route is None or not route.host_target) and _PLAIN.issuperset(map(type, tensors)):
        described = describe_plain(tensors)
        if described is not None:
            return described
    buffers: list[AnyBuffer] = []
    try:
        if any(map(_IS_ZERO, tensors)):
            tensors = list(map(_filled, tensors))
        return _describe_routed(tensors, route, buffers) if route else _describe_all(tensors, _HOST, buffers), buffers
    except SerializationError:
        raise
    except RuntimeError as error:  # inside of a transform (vmap) tensors look dense, and have no memory
        raise SerializationError(f"(or another value) holds a tensor without memory of its own: {error}") from error


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether it has memory. RuntimeError from torch if it never had any."""
    return storage.nbytes() > 0 and storage.data_ptr() != 0


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; zeros without memory get memory of their own."""
    if not tensor._is_zerotensor():
        return tensor
    zeros = tensor.detach().clone()
    if type(tensor) is Parameter:
        return Parameter(zeros, requires_grad=tensor.requires_grad)
    return zeros.requires_grad_(tensor.requires_grad)


def without_leaf(entry: TensorEntry) -> TensorEntry:
    """The entry of a tensor that gets a grad_fn at the receiver: it is no leaf there, and no Parameter."""
    return entry._replace(flags=entry.flags & ~OF_A_LEAF)


def describe_plain(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorEntry], list[AnyBuffer]] | None:
    """The table and the buffers of plain tensors, each alone in its storage; None if one is of another kind.

    The result is that of `describe`, in a fifth of the instructions.
    """
    table: list[TensorEntry] = []
    buffers: list[AnyBuffer] = []
    storages = set()
    for tensor in tensors:
        if not tensor.is_cpu:  # cheaper than the exception of `numpy()`
            return None
        try:
            size = tensor.nbytes  # TypeError or RuntimeError for sparse ones
            flags = 0
            if tensor.requires_grad:
                flags = REQUIRES_GRAD
                array = tensor.detach().numpy()
            elif size <= EMBEDDED_SIZE:
                array = tensor.numpy()  # refuses all that is not a dense CPU tensor without gradient and pending bits
            else:
                # A tensor of our own: `tensor.data = ...` gives the caller's another storage, and frees this one.
                array = tensor.detach().numpy()
            # The storage was freed, or never had memory (`functionalize`): the address alone does not show it.
            if tensor.storage_offset() and not _has_memory(tensor.untyped_storage()):
                return None
        except (TypeError, RuntimeError):
            return None
        memory = array.flags
        # Attributes go by pickle. `owndata`: the storage has no memory, and numpy has made some.
        if not size or not memory.c_contiguous or memory.owndata or tensor.__dict__:
            return None
        code = _CODES[tensor.dtype]
        if size <= EMBEDDED_SIZE:
            entry = TensorEntry(EMBEDDED, array.tobytes(), code, array.shape, None, flags, None)
        elif size >= DIRECT_SIZE and code in _COMPLEX:  # a memoryview cannot cast complex numbers
            return None
        else:
            entry = TensorEntry(len(buffers), 0, code, array.shape, None, flags, None)
            buffers.append(array.tobytes() if size < DIRECT_SIZE else array.data.cast("B"))
        table.append(entry)
        if len(tensors) > 1:
            storages.add(tensor.untyped_storage()._cdata)
            if len(storages) < len(table):  # tensors that share a storage share one at the receiver, too
                return None
    return table, buffers


def rebuild(
    table: Sequence[Sequence[Any]], buffers: Sequence[Any], landing: Landing | None = None
) -> list[torch.Tensor]:
    """Tensors over the received buffers, without copying, except from the host to a device: on the current streams.
    Raises ProtocolError for a table that does not fit, torch.OutOfMemoryError if the device is full.

    buffers: bytes, and `DeviceBuffer` for what has arrived on a device. landing: notes the tensors on devices.
    """
    if torch.is_inference_mode_enabled():  # tensors made in that mode cannot be used outside of it
        with torch.inference_mode(False):
            return rebuild(table, buffers, landing)
    try:
        storages: dict[int, torch.UntypedStorage] = {}
        there = list(buffers) if landing is not None else []  # a buffer moved to a device is replaced there
        tensors = []
        for entry in table:
            buffer, offset, code, shape, strides, flags, target = entry
            kind = _NUMPY.get(code)
            # The common cases of `_take`, without a call.
            if target is not None and landing is not None:
                tensors.append(_take_on_device(entry, there, landing))
            elif kind is None or strides is not None or flags or target is not None:
                tensors.append(_take(entry, buffers, storages, there, landing))
            elif buffer >= 0:
                tensors.append(torch.from_numpy(numpy.ndarray(shape, kind, buffers[buffer])))
            elif buffer == EMBEDDED and type(offset) is bytes:
                tensors.append(torch.from_numpy(numpy.ndarray(shape, kind, bytearray(offset))))
            else:
                tensors.append(_take(entry, buffers, storages, there, landing))
        return tensors
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, OverflowError, BufferError, RuntimeError) as error:
        raise ProtocolError(f"a tensor that does not fit its bytes: {error}") from error


def warm_up() -> None:
    """Make torch and numpy set up what they need of each other, or a program's first tensor takes a millisecond."""
    table, buffers = describe([torch.zeros(DIRECT_SIZE)])
    describe(rebuild(table, [bytearray(bytes(buffer)) for buffer in buffers]))  # type: ignore[arg-type]  # host memory


def describe_away(tensors: Sequence[torch.Tensor], route: Route) -> tuple[list[TensorEntry], list[AnyBuffer]] | None:
    """As `describe_plain`, for tensors on devices that the route leads from; None if one is of another kind."""
    driver = route.accelerator
    if driver is None:
        return None
    table: list[TensorEntry] = []
    buffers: list[AnyBuffer] = []
    storages = set()
    try:
        for tensor in tensors:
            device = tensor.device
            if not (route.leads(device) and driver.holds(tensor) and tensor.is_contiguous()):
                return None
            if tensor.__dict__ or tensor.is_neg() or tensor.is_conj() or _IS_ZERO(tensor):
                return None
            size, storage = tensor.nbytes, tensor.untyped_storage()
            if not size or not storage.nbytes():
                return None
            storages.add(storage._cdata)
            if len(storages) <= len(table):
                return None
            target = route.target(tensor)
            flat = torch.empty(0, dtype=torch.uint8, device=device)
            flat.set_(storage, tensor.storage_offset() * tensor.itemsize, (size,), (1,))
            flags = REQUIRES_GRAD if tensor.requires_grad else 0
            there = None if target == "cpu" else target
            table.append(TensorEntry(len(buffers), 0, _CODES[tensor.dtype], tensor.shape, None, flags, there))
            buffers.append(DeviceBuffer(flat, device.index, target))
    except RuntimeError:  # inside of a transform (vmap) a tensor has no memory
        return None
    return table, buffers


class _Host:
    """Makes buffers of storages in the host's memory."""

    embedded = EMBEDDED_SIZE

    def bytes_at(self, storage: torch.UntypedStorage, address: int, size: int) -> Buffer:
        """A buffer that keeps the storage alive, or a copy."""
        if size < DIRECT_SIZE:
            return ctypes.string_at(address, size)
        array = (ctypes.c_ubyte * size).from_address(address)
        # Keep the storage, not the tensor: `tensor.data = ...` gives the tensor another one and would free this one.
        array.owner = storage  # type: ignore[attr-defined]  # ctypes declares no attributes
        return memoryview(array).cast("B")


_HOST = _Host()


class _OnDevice:
    """Makes buffers of storages on one device."""

    embedded = 0

    def __init__(self, index: int, target: str) -> None:
        self._index = index
        self._target = target

    def bytes_at(self, storage: torch.UntypedStorage, address: int, size: int) -> DeviceBuffer:
        """A buffer that keeps the storage alive."""
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return DeviceBuffer(flat.set_(storage, address - storage.data_ptr(), (size,), (1,)), self._index, self._target)


_Where = _Host | _OnDevice


def _describe_all(tensors: Sequence[torch.Tensor], where: _Where, buffers: list[AnyBuffer]) -> list[TensorEntry]:
    """Entries for tensors in that kind of memory."""
    if len(tensors) == 1:
        return [_describe_alone(tensors[0], tensors[0].untyped_storage(), where, buffers)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    if len({storage._cdata for storage in storages}) == len(storages):
        return [_describe_alone(*each, where, buffers) for each in zip(tensors, storages, strict=True)]
    return _describe_groups(tensors, storages, where, buffers)


def _describe_routed(tensors: Sequence[torch.Tensor], route: Route, buffers: list[AnyBuffer]) -> list[TensorEntry]:
    """Entries for tensors in the host's memory and on devices."""
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    table: list[Any] = [None] * len(tensors)
    for device, indices in places.items():
        there = [tensors[index] for index in indices]
        if device.type == "cpu":
            entries, target = _describe_all(there, _HOST, buffers), route.host_target
        else:
            target = route.target(there[0])
            entries = _describe_on_device(there, route, _OnDevice(device.index, target), buffers)
        for index, entry in zip(indices, entries, strict=True):
            table[index] = entry._replace(target=target) if target not in ("", "cpu") else entry
    return table


def _describe_on_device(
    tensors: Sequence[torch.Tensor], route: Route, where: _OnDevice, buffers: list[AnyBuffer]
) -> list[TensorEntry]:
    accelerator = route.accelerator
    assert accelerator is not None, "only a route with an accelerator takes tensors on devices"
    carriers = [accelerator.carrier(tensor) for tensor in tensors]
    holders = Counter(carrier.untyped_storage()._cdata for carrier in carriers)
    for index, tensor in enumerate(tensors):
        # Of the tensor, not the carrier: gathering is work on the current stream.
        if holders[carriers[index].untyped_storage()._cdata] == 1 and _is_scattered(tensor):
            carriers[index] = accelerator.carrier(tensor.detach().contiguous())
    entries = _describe_all(carriers, where, buffers)
    return [
        entry._replace(flags=entry.flags | _gradient_flags(tensor))
        for tensor, entry in zip(tensors, entries, strict=True)
    ]


def _gradient_flags(tensor: torch.Tensor) -> int:
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | PARAMETER if type(tensor) is Parameter else flags


def _flags(tensor: torch.Tensor, code: int) -> int:
    flags = _gradient_flags(tensor)
    if code in _COMPLEX and tensor.is_conj():
        flags |= CONJUGATE
    if tensor.is_neg():
        flags |= NEGATIVE
    return flags


def _is_scattered(tensor: torch.Tensor) -> bool:
    """Whether its span is so much larger than its elements that they are gathered before they are sent."""
    if not tensor.nbytes or tensor.is_contiguous():
        return False
    first, last = _span(tensor)
    return last - first > max(2 * tensor.nbytes, EMBEDDED_SIZE)


def _describe_alone(
    tensor: torch.Tensor, storage: torch.UntypedStorage, where: _Where, buffers: list[AnyBuffer]
) -> TensorEntry:
    code = _CODES[tensor.dtype]
    flags = _flags(tensor, code)
    size = tensor.nbytes
    if size == 0:
        return TensorEntry(NO_BYTES, 0, code, tensor.shape, tensor.stride(), flags, None)
    if not storage.nbytes():
        raise _freed(tensor)
    if not tensor.is_contiguous():
        if not _is_scattered(tensor):
            return _describe_together([tensor], storage, where, buffers)[0]
        tensor = tensor.detach().contiguous()  # also applies the pending bits
        storage = tensor.untyped_storage()
        flags &= OF_A_LEAF
    # The storage raises if there is no memory; a tensor inside of `functionalize` has an address anyway.
    address = storage.data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
    if size <= where.embedded:
        data = ctypes.string_at(address, size)
        return TensorEntry(EMBEDDED, data, code, tensor.shape, None, flags, None)
    buffers.append(where.bytes_at(storage, address, size))
    return TensorEntry(len(buffers) - 1, 0, code, tensor.shape, None, flags, None)


def _describe_groups(
    tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage], where: _Where, buffers: list[AnyBuffer]
) -> list[TensorEntry]:
    """The table for tensors, some of which share a storage."""
    table: list[Any] = [None] * len(tensors)
    groups: dict[int, list[int]] = {}
    for index, (tensor, storage) in enumerate(zip(tensors, storages, strict=True)):
        if tensor.nbytes:
            groups.setdefault(storage._cdata, []).append(index)
        else:
            table[index] = _describe_alone(tensor, storage, where, buffers)
    for indices in groups.values():
        first, storage = indices[0], storages[indices[0]]
        if len(indices) == 1:
            table[first] = _describe_alone(tensors[first], storage, where, buffers)
            continue
        entries = _describe_together([tensors[index] for index in indices], storage, where, buffers)
        for index, entry in zip(indices, entries, strict=True):
            table[index] = entry
    return table


def _describe_together(
    tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage, where: _Where, buffers: list[AnyBuffer]
) -> list[TensorEntry]:
    """Entries for tensors with bytes in one storage: one buffer, the span that they cover."""
    if not storage.nbytes():
        raise _freed(tensors[0])
    spans = list(map(_span, tensors))
    first = min(map(_FIRST, spans)) // _ALIGN * _ALIGN
    last = max(map(_LAST, spans))
    number = len(buffers)
    buffers.append(where.bytes_at(storage, storage.data_ptr() + first, last - first))
    entries = []
    for tensor, span in zip(tensors, spans, strict=True):
        code = _CODES[tensor.dtype]
        flags = _flags(tensor, code)
        entries.append(TensorEntry(number, span[0] - first, code, tensor.shape, tensor.stride(), flags, None))
    return entries


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte of the storage that a non-empty tensor covers."""
    first, strides = int(tensor.storage_offset()), tensor.stride()
    last = first + sum(map(operator.mul, tensor.shape, strides)) - sum(strides) + 1
    return first * tensor.itemsize, last * tensor.itemsize


def _freed(tensor: torch.Tensor) -> SerializationError:
    return SerializationError(
        f"(or another value) holds a {tensor.dtype} tensor of shape {tuple(tensor.shape)} whose memory was freed: its "
        "storage was resized to nothing, as sharded training does between uses"
    )


def _take(
    entry: Sequence[Any],
    buffers: Sequence[Buffer],
    storages: dict[int, torch.UntypedStorage],
    there: list[AnyBuffer],
    landing: Landing | None,
) -> torch.Tensor:
    """The tensor of an entry. storages, there: made by earlier entries from the buffers."""
    buffer, offset, code, shape, strides, flags, target = entry
    if target is not None:
        return _take_on_device(entry, there, landing)
    dtype = DTYPES[code]
    if dtype is None:
        raise ValueError(f"a type that this version of torch does not have (code {code})")
    if strides is not None:
        _check_countable(shape, dtype)
    if buffer == EMBEDDED:
        if type(offset) is not bytes:  # bytearray(number) would allocate so many bytes
            raise TypeError("an embedded tensor without its bytes")
        tensor = _over(bytearray(offset), code, dtype, shape)
    elif buffer == NO_BYTES:
        if 0 not in shape:
            raise ValueError("a shape without bytes")
        tensor = _empty(shape, strides, dtype)
    elif buffer < 0:
        raise IndexError(f"there is no buffer {buffer}")
    elif strides is None:
        tensor = _over(buffers[buffer], code, dtype, shape)
    else:
        storage = storages.get(buffer)
        if storage is None:  # one for all views: they share it again when they are sent on
            storage = storages[buffer] = torch.frombuffer(buffers[buffer], dtype=torch.uint8).untyped_storage()
        view = _empty((0,), (1,), dtype) if dtype is torch.complex32 else torch.empty(0, dtype=dtype, device=_CPU)
        tensor = view.set_(storage, offset // dtype.itemsize, shape, strides)
    return _flagged(tensor, flags) if flags else tensor


def _check_countable(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ValueError for more elements than torch can count: strides can repeat elements, so memory is no bound."""
    if len(shape) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"a shape of {len(shape)} dimensions with more elements than can be counted")


def _take_on_device(entry: Sequence[Any], buffers: list[AnyBuffer], landing: Landing | None) -> torch.Tensor:
    """A tensor for a device. A buffer from the host is moved there once, and replaced in `buffers`."""
    buffer, offset, code, shape, strides, flags, target = entry
    index = device_index(target)
    dtype = DTYPES[code]
    if strides is None and landing is not None and dtype is not None and buffer >= 0:  # the common case
        received = buffers[buffer]
        if type(received) is DeviceBuffer and received.index == index:
            made = received.carrier.view(dtype).view(shape)
            landing.carriers.append((index, made))
            tensor = landing.accelerator.tensor(made, index)
            return _flagged(tensor, flags) if flags else tensor
    if landing is None or not 0 <= index < landing.accelerator.count():
        raise ValueError(f"there is no {target} here")
    if dtype is None:
        raise ValueError(f"a type that this version of torch does not have (code {code})")
    if strides is not None:
        _check_countable(shape, dtype)
    driver = landing.accelerator
    if buffer == NO_BYTES:
        if 0 not in shape:
            raise ValueError("a shape without bytes")
        made = torch.empty_strided(shape, strides, dtype=dtype, device=driver.empty(0, index).device)
    elif buffer == EMBEDDED:
        if type(offset) is not bytes:
            raise TypeError("an embedded tensor without its bytes")
        made = _moved(bytearray(offset), index, driver).view(dtype).view(shape)
    elif buffer < 0:
        raise IndexError(f"there is no buffer {buffer}")
    else:
        received = buffers[buffer]
        if not isinstance(received, DeviceBuffer):
            received = buffers[buffer] = DeviceBuffer(_moved(received, index, driver), index, target)
        if received.index != index:
            raise ValueError(f"{received.target} in place of {target}")
        made = _over_carrier(received.carrier, offset, dtype, shape, strides)
    landing.carriers.append((index, made))
    tensor = driver.tensor(made, index)
    return _flagged(tensor, flags) if flags else tensor


def _over_carrier(
    carrier: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None
) -> torch.Tensor:
    if strides is None:
        return carrier.view(dtype).view(shape)
    made = torch.empty(0, dtype=dtype, device=carrier.device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # Checked here: torch would enlarge the storage for a view that exceeds it.
    if offset < 0 or offset % dtype.itemsize or min(strides, default=0) < 0 or 0 in shape:
        raise ValueError("a view that does not lie in its memory")
    if offset + reach * dtype.itemsize > carrier.numel():
        raise ValueError(f"a view of {reach} elements at {offset} of {carrier.numel()} bytes")
    start = (int(carrier.storage_offset()) + offset) // dtype.itemsize
    return made.set_(carrier.untyped_storage(), start, shape, strides)


def _moved(data: Buffer, index: int, accelerator: Accelerator) -> torch.Tensor:
    """A carrier with bytes of the host, on the current stream."""
    source = torch.frombuffer(data, dtype=torch.uint8)
    carrier = accelerator.empty(source.numel(), index)
    accelerator.move(carrier, source, accelerator.current(index))
    return carrier


def _flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & CONJUGATE:
        tensor = tensor.conj()
    if flags & NEGATIVE:
        if tensor.dtype not in _NEGATED:
            raise TypeError(f"a {tensor.dtype} tensor to be negated")
        tensor = torch._neg_view(tensor)
    if flags & PARAMETER:
        return Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.complex32:  # made directly, torch warns that few operators support it
        return torch.empty_strided(shape, strides, dtype=torch.int32, device=_CPU).view(dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=_CPU)


def _over(buffer: Buffer, code: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A contiguous tensor over a whole buffer."""
    numpy_type = _NUMPY.get(code)
    if numpy_type is not None:  # half of the time of frombuffer and view
        return torch.from_numpy(numpy.ndarray(shape, numpy_type, buffer))
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
