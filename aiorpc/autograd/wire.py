"""What workers say to each other in a backward pass, as values of calls."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection
from typing import Any

import torch

from ..channels.layout import EMBEDDED_SIZE
from ..errors import ProtocolError
from ..protocol.reference_messages import ReferenceId
from ..runtime.calls.values import Results
from ..runtime.gradients.reach import SentName

Tensor = torch.Tensor
Gradients = dict[SentName, Tensor | None]
# The names of entries, packed, and then the gradient of each; None: nothing flows there.
Wire = Results
_new: Any = tuple.__new__  # what SentName(...) does, without its call into Python
_REFERENCE = struct.Struct("<qqQ")
_MOST_SIZES = 65  # a layout and dimensions, of which torch has 64 at most
# Of sparse gradients, by their codes. Those in blocks arrive in the first one.
# So many rows, and columns, they may have in the others, which take memory for each: a size is only announced.
_MOST_ROWS = 1 << 22
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
# What an answer says of the part, behind the names of its gradients. Nothing: that was the last one.
MORE = b"+"  # others will follow it
NOT_CLOSED = b"-"  # that was the last one, and what the plan wants done last had nothing to do


def to_wire(gradients: Gradients, said: bytes = b"") -> Wire:
    """Values side by side: in a list they would be pickled. said: of an answer, see `MORE`.

    A sparse gradient goes as three dense tensors: its indices, its values, and its layout and size. The place in its
    name is written as -1 less that place.
    """
    if not any(map(_is_sparse, gradients.values())):
        return Results((pack_names(gradients) + said, *map(_short, gradients.values())))
    names: list[SentName] = []
    parts: list[Tensor | None] = []
    for name, gradient in gradients.items():
        if gradient is None or not _is_sparse(gradient):
            names.append(name)
            parts.append(_short(gradient))
        else:
            message, place = name
            names.append(_new(SentName, (message, -1 - place)))
            sparse = gradient.detach().to_sparse()  # of any layout
            code = _LAYOUTS.index(gradient.layout) if gradient.layout in _LAYOUTS else 0
            parts += (sparse._indices(), sparse._values(), torch.tensor([code, *sparse.shape], dtype=torch.int64))
    return Results((pack_names(names) + said, *parts))


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _short(gradient: Tensor | None) -> Tensor | None:
    """A dense copy of a short gradient that was expanded, as that of a sum is: strides cost more than its elements."""
    if gradient is None or not gradient.is_cpu or gradient.layout is not torch.strided or gradient.is_contiguous():
        return gradient
    return gradient.contiguous() if gradient.nbytes <= EMBEDDED_SIZE and 0 in gradient.stride() else gradient


def said_of_part(names: bytes) -> bytes:
    """What an answer with these packed names says of the part: MORE, NOT_CLOSED or nothing."""
    return names[len(names) // 8 * 8 :]


def from_wire(names: bytes, *gradients: Tensor | None) -> Gradients:
    """What `to_wire` was given. ProtocolError for what it cannot have made."""
    unpacked = unpack_names(names)
    if not any(place < 0 for _, place in unpacked):
        return dict(zip(unpacked, gradients, strict=True))
    given: Gradients = {}
    parts = iter(gradients)
    for name in unpacked:
        message, place = name
        if place < 0:
            given[_new(SentName, (message, -1 - place))] = _sparse(
                next(parts, None), next(parts, None), next(parts, None)
            )
        else:
            given[name] = next(parts, None)
    return given


def _sparse(indices: Tensor | None, values: Tensor | None, size: Tensor | None) -> Tensor:
    if indices is None or values is None or size is None or size.dtype is not torch.int64 or size.numel() > _MOST_SIZES:
        raise ProtocolError("a sparse gradient without indices, values or a size")
    try:
        # Copied: the memory in which they arrive may be shared with their sender.
        code, *shape = size.tolist()
        sparse = torch.sparse_coo_tensor(indices.clone(), values, shape, check_invariants=True)
        return sparse.to_sparse(layout=_LAYOUTS[code]) if code and max(shape) <= _MOST_ROWS else sparse
    except (RuntimeError, TypeError, ValueError, IndexError):  # whose text would show what was sent
        raise ProtocolError("a sparse gradient whose indices, values and size do not fit") from None


def pack_names(names: Collection[SentName]) -> bytes:
    """Names of entries, in their order."""
    return struct.pack(f"<{2 * len(names)}q", *itertools.chain.from_iterable(names))


def unpack_names(packed: bytes) -> list[SentName]:
    """What `pack_names` was given."""
    numbers = iter(struct.unpack_from(f"<{len(packed) // 8}q", packed))
    return list(map(_new, itertools.repeat(SentName), zip(numbers, numbers, strict=True)))


def pack_reference(rref: ReferenceId) -> bytes:
    """The reference to a `Closing`, for a plan."""
    return _REFERENCE.pack(*rref)


def unpack_reference(packed: bytes) -> ReferenceId:
    """What `pack_reference` was given."""
    return ReferenceId(*_REFERENCE.unpack(packed))
