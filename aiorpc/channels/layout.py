"""The layout of tensors: what a message says about them, and the buffers that hold their bytes.

Tensors of one message that share a storage share one at the receiver: the span of the storage that they cover travels
once. A tensor alone in its storage travels as its bytes; strides are kept unless they would make the span more than
twice as long as the elements, in which case the receiver gets a contiguous copy. How the buffers travel is a matter of
the channels; nothing here knows of them.

Up to `EMBEDDED_SIZE` bytes a tensor alone in its storage goes into the table itself: a buffer of its own costs more
than the copy.

table: per tensor ``[buffer, byte offset, dtype code, shape, strides or None, flags]``; in place of a buffer's number
-1 for a tensor without bytes, and -2 for one whose bytes stand in place of the offset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from ..errors import ProtocolError
from ..protocol.frames import DIRECT_SIZE, Buffer

REQUIRES_GRAD, PARAMETER = 1, 2
NO_BYTES, EMBEDDED = -1, -2
EMBEDDED_SIZE = 4096

# Positions are codes on the wire: append only. A version of torch without some type has None in its place.
_DTYPE_NAMES = """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32
    uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    float4_e2m1fn_x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 bits8 bits16
    bits1x8 bits2x4 bits4x2
"""
DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES.split())
_CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}
_NUMPY = {
    _CODES[dtype]: numpy.dtype(str(dtype).removeprefix("torch."))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8)
} | {_CODES[torch.uint8]: numpy.dtype("uint8"), _CODES[torch.bool]: numpy.dtype("bool")}
_ALIGN = 16


def describe(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Buffer]]:
    """The table for some tensors, and the buffers with their bytes; those borrow the tensors' memory."""
    table: list[Any] = [None] * len(tensors)
    buffers: list[Buffer] = []
    if len(tensors) == 1:
        _put_alone(0, tensors[0], table, buffers)
        return table, buffers
    shared: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        shared.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    for indices in shared.values():
        if len(indices) == 1:
            _put_alone(indices[0], tensors[indices[0]], table, buffers)
        else:
            _put_span(indices, tensors, table, buffers)
    return table, buffers


def embed(tensor: torch.Tensor) -> list[Any] | None:
    """The table entry of one small and plain tensor by itself; None if it takes more than that.

    What `describe` would say, in a fifth of its instructions: a call that wakes a core pays for each of them anew.
    """
    try:
        array = tensor.numpy()  # refuses all that is not a dense CPU tensor without gradient and pending bits
    except (TypeError, RuntimeError):
        return None
    if not 0 < array.nbytes <= EMBEDDED_SIZE or not array.flags.c_contiguous:
        return None
    return [EMBEDDED, array.tobytes(), _CODES[tensor.dtype], array.shape, None, 0]


def rebuild(table: list[Any], buffers: Sequence[Buffer]) -> list[torch.Tensor]:
    """Tensors over the received buffers, without copying. Raises ProtocolError for a table that does not fit."""
    try:
        storages: dict[int, torch.UntypedStorage] = {}
        return [_take(entry, buffers, storages) for entry in table]
    except (ValueError, TypeError, IndexError, OverflowError, BufferError, RuntimeError) as error:
        raise ProtocolError(f"a tensor that does not fit its bytes: {error}") from error


def allocate(size: int) -> memoryview:
    """Memory for one large buffer. Not zeroed: it is about to be overwritten, and touching it twice costs more."""
    return numpy.empty(size, dtype=numpy.uint8).data


def _flags(tensor: torch.Tensor) -> int:
    return (REQUIRES_GRAD if tensor.requires_grad else 0) | (PARAMETER if type(tensor) is torch.nn.Parameter else 0)


def _bytes_at(owner: torch.Tensor, address: int, size: int) -> Buffer:
    if size < DIRECT_SIZE:
        return ctypes.string_at(address, size)
    array = (ctypes.c_ubyte * size).from_address(address)
    # The storage, not the tensor: `tensor.data = ...` gives that another one and would free this one.
    array.owner = owner.untyped_storage()  # type: ignore[attr-defined]  # ctypes declares no attributes
    return memoryview(array).cast("B")


def _put_alone(index: int, tensor: torch.Tensor, table: list[Any], buffers: list[Buffer]) -> None:
    flags = _flags(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    size = tensor.nbytes
    if size == 0:
        table[index] = [NO_BYTES, 0, _CODES[tensor.dtype], list(tensor.shape), list(tensor.stride()), flags]
        return
    if not tensor.is_contiguous():
        first, last = _span(tensor)
        if last - first <= 2 * size:
            _put_span([index], [tensor] * (index + 1), table, buffers)
            table[index][5] = flags
            return
        tensor = tensor.detach().contiguous()
    if size <= EMBEDDED_SIZE:
        data = ctypes.string_at(tensor.data_ptr(), size)
        table[index] = [EMBEDDED, data, _CODES[tensor.dtype], list(tensor.shape), None, flags]
        return
    table[index] = [len(buffers), 0, _CODES[tensor.dtype], list(tensor.shape), None, flags]
    buffers.append(_bytes_at(tensor, tensor.data_ptr(), size))


def _put_span(indices: Sequence[int], tensors: Sequence[torch.Tensor], table: list[Any], buffers: list[Buffer]) -> None:
    members = []
    for index in indices:
        tensor = tensors[index]
        if tensor.nbytes == 0 or tensor.is_conj() or tensor.is_neg():
            _put_alone(index, tensor.detach().resolve_conj().resolve_neg(), table, buffers)
            table[index][5] = _flags(tensor)
        else:
            members.append(index)
    if not members:
        return
    spans = [_span(tensors[index]) for index in members]
    first = min(span[0] for span in spans) // _ALIGN * _ALIGN
    last = max(span[1] for span in spans)
    owner = tensors[members[0]]
    for index, span in zip(members, spans, strict=True):
        tensor = tensors[index]
        strides = list(tensor.stride())
        table[index] = [
            len(buffers),
            span[0] - first,
            _CODES[tensor.dtype],
            list(tensor.shape),
            strides,
            _flags(tensor),
        ]
    buffers.append(_bytes_at(owner, owner.untyped_storage().data_ptr() + first, last - first))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte of the storage that a non-empty tensor covers."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first * tensor.itemsize, last * tensor.itemsize


def _take(entry: list[Any], buffers: Sequence[Buffer], storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    buffer, offset, code, shape, strides, flags = entry
    dtype = DTYPES[code]
    if dtype is None:
        raise ValueError(f"a type that this version of torch does not have (code {code})")
    if buffer == EMBEDDED:
        if type(offset) is not bytes:  # bytearray of a number would take so much memory
            raise TypeError("an embedded tensor without its bytes")
        tensor = _over(bytearray(offset), code, dtype, shape)
    elif buffer == NO_BYTES:
        if 0 not in shape:
            raise ValueError(f"shape {shape} without bytes")
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
    elif buffer < 0:
        raise IndexError(f"buffer {buffer}")
    elif strides is None:
        tensor = _over(buffers[buffer], code, dtype, shape)
    else:
        storage = storages.get(buffer)
        if storage is None:  # one for all views of it, so that they are seen to share it when they are sent on
            storage = storages[buffer] = torch.frombuffer(buffers[buffer], dtype=torch.uint8).untyped_storage()
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, strides)
    if flags:
        if flags & PARAMETER:
            return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
        if flags & REQUIRES_GRAD:
            tensor.requires_grad_()
    return tensor


def _over(buffer: Any, code: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A contiguous tensor over a whole buffer."""
    numpy_type = _NUMPY.get(code)
    if numpy_type is not None:  # half of the time of frombuffer and view
        return torch.from_numpy(numpy.ndarray(shape, numpy_type, buffer))
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
