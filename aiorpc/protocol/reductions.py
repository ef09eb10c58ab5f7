"""Tensors that are not dense, and other owners of much memory, taken apart for the pickle.

The parts are dense tensors, which leave the pickle and travel as buffers; the pickle says how to put them together:

    sparse (COO, CSR, CSC, BSR, BSC)   indices and values; on the CPU they are checked again
    quantised                          a view of the stored integers, scale and zero point (per tensor or per channel)
    nested, strided layout             its buffer, sizes, strides and offsets
    subclass with memory of its own    a plain tensor over that memory, class and state (``__getstate__``)
    uninitialised parameter, buffer    dtype, device and requires_grad
    storage, typed and untyped         a tensor over it, so that it shares with the tensors of the message
    array that is not contiguous       a contiguous copy

Tensors that pickle themselves (jagged nested tensors, subclasses with ``__reduce_ex__`` or in ``copyreg``), wrapper
subclasses, meta tensors and Parameters of these kinds are left to torch; the tensors inside come back here. Attributes
travel. Hooks, graphs and ``grad`` stay behind, as with ``torch.save``; tensors that require gradients arrive as leaves
that require them, except sparse ones inside an autograd context (`codec.load_past`).

Devices: a tensor on a device travels if the route of the message leads from that device (`TensorRoute`; None: there is
no route). The tensor is put together on the device where its parts have arrived.

The functions ``load_*`` are named in pickles.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy
import torch

from ..errors import SerializationError
from .annotated import REFERENCES

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
UninitializedParameter = torch.nn.parameter.UninitializedParameter
UninitializedBuffer = torch.nn.parameter.UninitializedBuffer

# Arrays up to this many bytes may be written into the pickle.
_SMALL = 4096
# Stored integers of quantised types; the types that are missing here pack several elements into a byte.
STORED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_SPARSE_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_SPARSE = (torch.sparse_coo, *_SPARSE_BY_ROW, *_SPARSE_BY_COLUMN)
_KNOWN_LAYOUTS = (torch.strided, *_SPARSE, torch.jagged)


class TensorRoute(Protocol):
    """Knows which tensors on devices may go to a worker."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can go as a whole; False if it has to be taken apart.

        Raises SerializationError if it cannot go at all.
        """

    def leads(self, device: torch.device) -> bool:
        """Whether tensors on that device can go to the worker."""


# The result of ``__reduce_ex__`` unless it is a name: a callable, its arguments, and optional further items.
Reduced: TypeAlias = tuple[object, tuple[object, ...], *tuple[object, ...]]
# Gives a tensor that was taken apart, by its number among those, its place in the graph of the message.
Past = Callable[[int, Tensor], Tensor]


def is_dense(tensor: Tensor, route: TensorRoute | None = None) -> bool:
    """Whether a tensor is described by dtype, shape and strides over bytes, on a CPU or a device that the route takes.

    The functions below are for other tensors.
    """
    if route is not None and not tensor.is_cpu:
        return route.takes(tensor)
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def reduce_tensor(tensor: Tensor, route: TensorRoute | None = None) -> Reduced | None:
    """The ``__reduce_ex__`` result for a tensor that is not dense; None: use torch's own.

    Raises SerializationError for a tensor that cannot travel.
    """
    kind = type(tensor)
    if kind is UninitializedParameter or kind is UninitializedBuffer:
        return _reduce_uninitialized(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        _refuse(tensor, route)
        if kind is Tensor:
            return _reduce_plain(tensor)
        return None if kind is Parameter or _pickles_itself(kind) else _reduce_subclass(tensor)


def _refuse(tensor: Tensor, route: TensorRoute | None) -> None:
    problem = ""
    if _is_fake(tensor):
        problem = "is a FakeTensor: it has no values that could be sent"
    elif tensor.device.type not in ("cpu", "meta") and not (route is not None and route.leads(tensor.device)):
        problem = f"on {tensor.device} has no way to the other worker; send tensor.cpu()"
    elif tensor.layout not in _KNOWN_LAYOUTS:
        problem = f"has the layout {tensor.layout}, which cannot be sent; send tensor.to_dense()"
    if problem:
        shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
        raise SerializationError(f"a {tensor.dtype} tensor{shape} {problem}")


def _is_fake(tensor: Tensor) -> bool:
    module = sys.modules.get("torch._subclasses.fake_tensor")  # imported when the first one is made
    return module is not None and isinstance(tensor, module.FakeTensor)


def jagged_class() -> type[Tensor] | None:
    """The class of nested tensors of the jagged layout; None before the first one is made."""
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    kind: type[Tensor] | None = None if module is None else module.NestedTensor
    return kind


def _reduce_plain(tensor: Tensor) -> Reduced | None:
    """For an exact ``torch.Tensor``."""
    if tensor.is_quantized:
        reduced = _reduce_quantised(tensor)
    elif tensor.is_nested and tensor.layout is torch.strided:
        reduced = _reduce_nested(tensor)
    elif tensor.layout is torch.strided:  # meta
        return None
    else:
        reduced = _reduce_sparse(tensor)
    return with_state(reduced, tensor)


def with_state(reduced: Reduced, tensor: Tensor) -> Reduced:
    """Add the attributes of the tensor."""
    state = tensor.__getstate__()
    return reduced if not state else (*reduced, state, None, None, restore_state)


def restore_state(tensor: Tensor, state: object) -> None:
    """Used in pickles: restore the ``__getstate__`` of a tensor, attributes in its dictionary and in slots."""
    if type(tensor).__setstate__ is not Tensor.__setstate__:
        tensor.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple else (state, None)
    tensor.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(tensor, name, value)


# --- sparse -----------------------------------------------------------------------------------------------------------


def has_sparse_past(tensor: Tensor) -> bool:
    """Whether it is a sparse tensor that requires gradients."""
    return type(tensor) is Tensor and tensor.requires_grad and tensor.layout in _SPARSE


def _reduce_sparse(tensor: Tensor) -> Reduced:
    grad = tensor.requires_grad
    tensor = tensor.detach()
    parts: tuple[Tensor, ...]
    if tensor.layout is torch.sparse_coo:
        coalesced, parts = tensor.is_coalesced(), (tensor._indices(), tensor._values())
    elif tensor.layout in _SPARSE_BY_ROW:
        coalesced, parts = False, (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        coalesced, parts = False, (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    *indices, values = parts
    # Expanded indices go as a dense copy: the safe encoding's reader allows no others.
    own = [each.contiguous() for each in indices]
    return load_sparse, (tensor.layout, tensor.size(), coalesced, grad, *own, values)


def load_sparse(
    layout: torch.layout, size: torch.Size, coalesced: bool, grad: bool, *parts: Tensor, check: bool = False
) -> Tensor:
    """Used in pickles: a sparse tensor of these parts. Raises SerializationError.

    check: whether to check the indices even if that waits for a device; on the CPU they are always checked, since torch
    writes to any place that they name. Not by torch's own function, which keeps all it makes in a list for a check at
    the end of `torch.load`.
    """
    device = parts[0].device
    check = check or device.type == "cpu"
    try:
        if layout is torch.sparse_coo:
            indices, values = parts
            made = torch.sparse_coo_tensor(
                indices, values, size, device=device, is_coalesced=coalesced, check_invariants=check
            )
        else:
            compressed, plain, values = parts
            if check:
                _check_compressed(compressed, plain)
            made = torch.sparse_compressed_tensor(
                compressed, plain, values, size, layout=layout, device=device, check_invariants=check
            )
    except (RuntimeError, ValueError, IndexError) as error:
        raise SerializationError(f"parts that are no sparse tensor: {error!s:.200}") from None
    return made.requires_grad_() if grad else made


def _check_compressed(compressed: Tensor, plain: Tensor) -> None:
    """Check that the compressed indices rise from 0 to the number of plain ones. Raises ValueError if not.

    torch's own check may read past the end of the plain indices.
    """
    if compressed.dim() != plain.dim() or compressed.shape[:-1] != plain.shape[:-1] or not compressed.shape[-1]:
        raise ValueError("indices that do not belong together")
    rises = compressed[..., 1:] >= compressed[..., :-1]
    if not bool((compressed[..., 0] == 0).all() and (compressed[..., -1] == plain.shape[-1]).all() and rises.all()):
        raise ValueError("compressed indices that do not rise to the number of the others")


# --- quantised --------------------------------------------------------------------------------------------------------


def _reduce_quantised(tensor: Tensor) -> Reduced:
    if tensor.qscheme() is torch.per_tensor_affine:
        scale: tuple[object, ...] = (tensor.q_scale(), tensor.q_zero_point())
    else:
        scale = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis())
    kind = STORED.get(tensor.dtype)
    stored = _over_memory(tensor, kind) if kind is not None else _over_storage(tensor.untyped_storage())
    return load_quantised, (tensor.dtype, tensor.size(), stored, *scale)


def load_quantised(dtype: torch.dtype, size: torch.Size, stored: Tensor, *scale: Any) -> Tensor:
    """Used in pickles: a quantised tensor over stored integers. scale: it and the zero point; per channel the axis."""
    packed = dtype not in STORED
    if len(scale) == 2:
        made = torch._empty_affine_quantized(
            size if packed else (0,), scale=scale[0], zero_point=scale[1], dtype=dtype, device=stored.device
        )
    else:
        made = torch._empty_per_channel_affine_quantized(
            size, scales=scale[0], zero_points=scale[1], axis=scale[2], dtype=dtype, device=stored.device
        )
    if packed:  # torch counts a byte for each element, and would consider the storage too short
        made.untyped_storage().copy_(stored.untyped_storage())
        return made
    return made.set_(stored.untyped_storage(), int(stored.storage_offset()), size, stored.stride())


# --- nested -----------------------------------------------------------------------------------------------------------


def _reduce_nested(tensor: Tensor) -> Reduced:
    grad = tensor.requires_grad
    tensor = tensor.detach()
    sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
    if sizes.dim() != 2 or not len(sizes):
        raise SerializationError("a nested tensor of no parts cannot be sent: torch cannot make one of its parts")
    return load_nested, (tensor.values(), sizes, strides, tensor._nested_tensor_storage_offsets(), grad)


def load_nested(buffer: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor, grad: bool) -> Tensor:
    """Used in pickles: a nested tensor over one buffer. Raises SerializationError."""
    if sizes.dim() != 2 or not len(sizes) or sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        # A nested tensor without parts would crash the process when it is used.
        raise SerializationError("a nested tensor of no parts, or of sizes, strides and offsets that do not fit")
    made: Tensor = torch._nested_view_from_buffer(buffer, sizes, strides, offsets)
    return made.requires_grad_() if grad else made


def load_jagged(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int, grad: bool) -> Tensor:
    """A nested tensor of the jagged layout. dim: the ragged dimension, counting the batch dimension in front."""
    from torch.nested._internal.nested_tensor import NestedTensor  # imports half of torch's compiler

    made: Tensor = NestedTensor(values, offsets, lengths=lengths, _ragged_idx=dim, requires_grad=grad)
    return made


# --- subclasses -------------------------------------------------------------------------------------------------------


def _pickles_itself(kind: type[Tensor]) -> bool:
    ours = (Tensor.__reduce_ex__, Parameter.__reduce_ex__)
    return kind.__reduce_ex__ not in ours or kind in copyreg.dispatch_table


def _reduce_subclass(tensor: Tensor) -> Reduced | None:
    kind = type(tensor)
    dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or (dispatches and not _has_memory(tensor)):
        return None
    grad = tensor.requires_grad
    if tensor.layout is torch.strided:
        plain = _over_memory(tensor, tensor.dtype)  # not detach(), which the class may define
    elif dispatches:
        return None
    else:
        plain = tensor.detach()
    return with_state((load_subclass, (kind, plain, grad)), tensor)


def load_subclass(kind: type[Tensor], plain: Tensor, grad: bool) -> Tensor:
    """Used in pickles: an object of a subclass, without its constructor, over the memory of a plain tensor."""
    return Tensor._make_subclass(kind, plain, grad)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.data_ptr() != 0


def _reduce_uninitialized(tensor: Tensor) -> Reduced:
    data = tensor.data  # usable before it has a shape
    return with_state((type(tensor), (tensor.requires_grad, data.device, data.dtype)), tensor)


# --- memory -----------------------------------------------------------------------------------------------------------


def _over_storage(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _over_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor over the same memory, of a type with elements of the same size."""
    if tensor._is_zerotensor():  # zeros without memory
        return torch.zeros(tensor.size(), dtype=dtype, device=tensor.device)
    storage = tensor.untyped_storage()
    if not storage.nbytes() and tensor.numel():  # set_ would give it new memory
        raise SerializationError(f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} whose memory was freed")
    plain = torch.empty(0, dtype=dtype, device=tensor.device)
    plain.set_(storage, int(tensor.storage_offset()), tensor.size(), tensor.stride())
    if tensor.is_conj():
        plain = plain.conj()
    return torch._neg_view(plain) if tensor.is_neg() else plain


def reduce_storage(storage: torch.UntypedStorage, route: TensorRoute | None) -> Reduced:
    if storage.device.type != "cpu" and not (route is not None and route.leads(storage.device)):
        raise SerializationError(
            f"a storage of {storage.nbytes()} bytes on {storage.device} has no way to the other worker"
        )
    return load_storage, (_over_storage(storage),)


def load_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Used in pickles: the storage of a tensor. It cannot be resized, as its memory was received."""
    return tensor.untyped_storage()


def _reduce_typed_storage(storage: torch.TypedStorage, route: object) -> Reduced:
    return load_typed_storage, (storage._untyped_storage, storage.dtype)


def load_typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Used in pickles: a typed storage over an untyped one."""
    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _reduce_array(array: numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]], route: object) -> object:
    """Copy an array with gaps, which would be written into the pickle: numpy lends only contiguous memory."""
    if array.nbytes <= _SMALL or array.flags.forc or array.dtype.hasobject:
        return NotImplemented
    axes = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
    if array.transpose(axes).flags.c_contiguous:
        return NotImplemented
    copy = array.copy(order="K")
    copy.flags.writeable = array.flags.writeable
    return copy.__reduce_ex__(5)


# Exact types that are not tensors.
OTHERS: dict[type, Callable[[Any, TensorRoute | None], object]] = {
    torch.UntypedStorage: reduce_storage,
    torch.TypedStorage: _reduce_typed_storage,
    numpy.ndarray: _reduce_array,
    **REFERENCES,
}
