"""The values of calls between workers about contexts and backward passes: writing and reading them.

Gradients travel as dense tensors; sparse ones as their parts. `Given` tells which tensors belong to which gradient.
Reading raises ProtocolError for a message that does not fit its declaration, without showing its content.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch

from ..channels.layout import EMBEDDED_SIZE
from ..errors import ProtocolError
from ..protocol.reference_messages import ReferenceId
from ..runtime.calls.values import Results
from ..runtime.gradients.reach import SentName

Tensor = torch.Tensor
Gradients = Mapping[SentName, Tensor | None]
# A packed `Given`, followed by its tensors.
Wire = Results
# The state of the part in an answer. LAST: the part is done. MORE: more gradients will follow. NOT_CLOSED: as LAST, and
# there was nothing to do at the end.
LAST, MORE, NOT_CLOSED = range(3)
# The order gives the numbers on the wire.
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_LAYOUTS = (torch.sparse_coo, *_BY_ROW, torch.sparse_csc, torch.sparse_bsc)
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Sparse(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """A sparse gradient.

    Its parts are indices and values (COO), or two lists of indices and values (the others).

    at: its place among the gradients. layout: number in `_LAYOUTS`. coalesced: for COO.
    """

    at: _Number
    layout: Annotated[int, msgspec.Meta(ge=0, le=len(_LAYOUTS) - 1)]
    coalesced: bool
    size: list[_Number]


class Given(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """The gradients of a message. names: message and place of each, one after the other. state: of an answer, see
    `MORE`. absent: places of gradients that are None and have no tensor. sparse: the sparse gradients.
    """

    names: list[_Number]
    state: Annotated[int, msgspec.Meta(ge=0, le=NOT_CLOSED)] = LAST
    absent: list[_Number] = []
    sparse: list[Sparse] = []


class EntryTable(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """A worker's entries in a context, and the tensors that they lead to.

    received: the received tensors, as bit, worker, message and place. entries: message and place of each, and its bits:
    naming all received tensors for each entry would be too long.
    """

    received: list[tuple[_Number, _Number, _Number, _Number]]
    entries: list[tuple[_Number, _Number, bytes]]


_encode = msgspec.msgpack.Encoder().encode
_read_given = msgspec.msgpack.Decoder(Given).decode
_read_table = msgspec.msgpack.Decoder(EntryTable).decode
_read_numbers = msgspec.msgpack.Decoder(list[_Number]).decode
_read_reference = msgspec.msgpack.Decoder(tuple[int, int, int]).decode


def to_wire(gradients: Gradients, state: int = LAST) -> Wire:
    """The values of a call or an answer with gradients. state: of an answer, see `MORE`."""
    tensors: list[Tensor] = []
    absent, sparse = [], []
    for at, gradient in enumerate(gradients.values()):
        if gradient is None:
            absent.append(at)
        elif gradient.layout is torch.strided:
            tensors.append(_plain(gradient))
        else:
            sparse.append(_taken_apart(at, gradient, tensors))
    if len({*map(id, tensors)}) < len(tensors):  # one tensor twice would go by pickle
        tensors = [each.detach() for each in tensors]
    names = list(itertools.chain.from_iterable(gradients))
    return Results((_encode(Given(names, state, absent, sparse)), *tensors))


def _plain(gradient: Tensor) -> Tensor:
    """A gradient in the form for sending. A short expanded gradient (of a sum) becomes a dense copy: strides cost more
    than elements.
    """
    if type(gradient) is not Tensor or gradient.requires_grad:
        gradient = gradient.detach().as_subclass(Tensor)
    if gradient.is_cpu and not gradient.is_contiguous() and gradient.nbytes <= EMBEDDED_SIZE and 0 in gradient.stride():
        return gradient.contiguous()
    return gradient


def _taken_apart(at: int, gradient: Tensor, tensors: list[Tensor]) -> Sparse:
    layout = gradient.layout
    if layout not in _LAYOUTS:
        raise ProtocolError(f"a gradient has the layout {layout}, which no worker can be given; make it dense")
    if layout is torch.sparse_coo:
        tensors += gradient._indices(), _plain(gradient._values())
    elif layout in _BY_ROW:
        tensors += gradient.crow_indices(), gradient.col_indices(), _plain(gradient.values())
    else:
        tensors += gradient.ccol_indices(), gradient.row_indices(), _plain(gradient.values())
    coalesced = layout is torch.sparse_coo and gradient.is_coalesced()
    return Sparse(at, _LAYOUTS.index(layout), coalesced, list(gradient.shape))


def from_wire(packed: object, tensors: Sequence[object]) -> tuple[dict[SentName, Tensor | None], int]:
    """The gradients and the state from `to_wire`. tensors: the values after the packed one, not checked yet."""
    given: Given = _read(_read_given, packed)
    names = _paired(given.names)
    for each in tensors:
        if type(each) is not Tensor or each.layout is not torch.strided or each.is_quantized or each.is_nested:
            raise ProtocolError("a gradient travels as plain dense tensors")
    if not (given.absent or given.sparse):
        if len(names) != len(tensors):
            raise ProtocolError(f"{len(names)} gradients came with {len(tensors)} tensors")
        return dict(zip(names, tensors, strict=True)), given.state  # type: ignore[arg-type]  # looked at above
    absent, sparse = set(given.absent), {each.at: each for each in given.sparse}
    rest: Any = iter(tensors)
    gradients: dict[SentName, Tensor | None] = {}
    try:
        for at, name in enumerate(names):
            form = sparse.get(at)
            gradients[name] = None if at in absent else next(rest) if form is None else _put_together(form, rest)
    except (StopIteration, RuntimeError, TypeError, ValueError):
        raise ProtocolError("a sparse gradient came in parts that do not fit") from None
    if next(rest, None) is not None:
        raise ProtocolError(f"{len(names)} gradients came with too many tensors")
    return gradients, given.state


def _put_together(form: Sparse, parts: Any) -> Tensor:
    """A sparse gradient from its parts. torch checks the indices and the other rules of the layout.

    Indices are copied first, because their memory may be shared with the sender.
    """
    layout = _LAYOUTS[form.layout]
    with torch.no_grad():
        if layout is torch.sparse_coo:
            indices, values = next(parts).clone(), next(parts)
            return torch.sparse_coo_tensor(
                indices, values, form.size, is_coalesced=form.coalesced or None, check_invariants=True
            )
        firsts, seconds, values = next(parts).clone(), next(parts).clone(), next(parts)
        return torch.sparse_compressed_tensor(firsts, seconds, values, form.size, layout=layout, check_invariants=True)


def pack_names(names: Collection[SentName]) -> bytes:
    """Names of entries, in their order."""
    return _encode(list(itertools.chain.from_iterable(names)))


def unpack_names(packed: object) -> list[SentName]:
    """The names from `pack_names`."""
    return _paired(_read(_read_numbers, packed))


def _paired(numbers: list[int]) -> list[SentName]:
    if len(numbers) % 2:
        raise ProtocolError("the names of tensors are pairs of numbers")
    return list(map(SentName, numbers[::2], numbers[1::2]))


def pack_table(received: list[tuple[int, int, int, int]], entries: list[tuple[int, int, bytes]]) -> bytes:
    """The answer of `gather`."""
    return _encode(EntryTable(received, entries))


def unpack_table(packed: object) -> EntryTable:
    """The table from `pack_table`."""
    table: EntryTable = _read(_read_table, packed)
    return table


def pack_ids(ids: Collection[int]) -> bytes:
    """Ids of workers."""
    return _encode(list(ids))


def unpack_ids(packed: object) -> list[int]:
    """The ids from `pack_ids`."""
    ids: list[int] = _read(_read_numbers, packed)
    return ids


def pack_reference(rref: ReferenceId) -> bytes:
    """A reference, for a handler of the runtime."""
    return _encode(tuple(rref))


def unpack_reference(packed: object) -> ReferenceId:
    """The reference from `pack_reference`."""
    return ReferenceId(*_read(_read_reference, packed))


def _read(read: Any, packed: object) -> Any:
    if type(packed) is not bytes:
        raise ProtocolError("what is said of gradients stands in bytes")
    try:
        return read(packed)
    except (msgspec.DecodeError, RecursionError):
        raise ProtocolError("what is said of gradients is not what is declared") from None
