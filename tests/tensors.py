"""Tensors of all kinds, and things that hold them, for the tests that send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from aiorpc.channels.layout import describe, rebuild
from aiorpc.protocol.codec import Incoming, Outgoing, decode_values, encode_values
from aiorpc.protocol.frames import Buffer
from aiorpc.protocol.messages import Reply, read_values, write
from aiorpc.protocol.packing import pack, unpack

Tensor = torch.Tensor
ROWS, COLUMNS = 64, 512


def describe_on_host(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Buffer]]:
    """As `describe` without a route, by which all buffers are in the host's memory."""
    table, buffers = describe(tensors)
    return table, cast("list[Buffer]", buffers)


def travel(*values: Any) -> tuple[list[Any], int]:
    """What arrives when these values are sent in one message, and how long its body is, tensors' table apart."""
    out = Outgoing()
    body = write(Reply(encode_values(list(values), out)))
    table, segments = describe_on_host(out.tensors) if out.tensors else ([], [])
    tensors = rebuild(unpack(pack(table)), [bytearray(segment) for segment in segments])
    arrived = decode_values(read_values(body), Incoming(tensors, ()), [bytearray(buffer) for buffer in out.buffers])
    return arrived, len(body)


class Tagged(torch.Tensor):
    """A subclass with attributes."""

    label: str
    friend: Tensor


class Slotted(torch.Tensor):
    """One with a slot beside its dictionary."""

    __slots__ = ("slot",)
    slot: str


class OwnParameter(nn.Parameter):
    """A subclass of Parameter."""


class Stateful(torch.Tensor):
    """One with a state of its own making."""

    secret = 0

    def __getstate__(self) -> Any:
        return {"kept": self.secret}

    def __setstate__(self, state: Any) -> None:
        self.secret = state["kept"] + 1


class Reducing(torch.Tensor):
    """One that says itself how it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_reducing, (self.tolist(),)


def make_reducing(numbers: list[float]) -> Tensor:
    return torch.tensor([-number for number in numbers]).as_subclass(Reducing)


class Watching(torch.Tensor):
    """One over real memory that sees each operation, and refuses it unless it was asked for."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a method of the object in the stubs
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} was called")


class Pair(torch.Tensor):
    """A wrapper of two tensors, without memory of its own."""

    left: Tensor
    right: Tensor

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> Pair:
        made = Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, requires_grad=left.requires_grad)
        made.left, made.right = left, right
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a method of the object in the stubs
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(str(func))


def numbers(*shape: int) -> Tensor:
    """The same ones each time, none of them zero, exact in most types."""
    shape = shape or (ROWS, COLUMNS)
    return (torch.arange(torch.Size(shape).numel()) % 100 + 1).reshape(shape).float()


def gaps() -> Tensor:
    """A matrix of which half is zero."""
    return numbers() * (torch.arange(COLUMNS) % 2)


def with_note(tensor: Tensor) -> Tensor:
    tensor.note = ["text", 1]  # type: ignore[attr-defined]  # tensors take any attribute
    return tensor


def per_channel(dtype: torch.dtype, *, floating: bool = False) -> Tensor:
    zeros = torch.arange(ROWS).remainder(3)
    scales = torch.arange(1, ROWS + 1) / 8
    return torch.quantize_per_channel(
        numbers(), scales if floating else scales.double(), zeros.float() if floating else zeros, 0, dtype
    )


def tagged(tensor: Tensor) -> Tensor:
    made = tensor.as_subclass(Tagged)
    made.label, made.friend = "label", tensor
    return made


def slotted() -> Tensor:
    made = numbers().as_subclass(Slotted)
    made.slot = "in a slot"
    made.other = "not in a slot"  # type: ignore[attr-defined]  # no slot for it
    return made


def uncoalesced() -> Tensor:
    places = torch.arange(ROWS).repeat(100).view(1, -1)
    return torch.sparse_coo_tensor(places, numbers(ROWS * 100), (ROWS,), check_invariants=False)


def nested(layout: torch.layout, *, grad: bool = False) -> Tensor:
    return torch.nested.nested_tensor([numbers(3, 4000), numbers(5, 4000)], layout=layout, requires_grad=grad)


def uninitialised(kind: Any) -> Any:
    return kind(requires_grad=False, dtype=torch.float64)


def masked() -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(numbers(), numbers() > 50)


def typed_storage() -> Any:
    return torch.TypedStorage(wrap_storage=numbers().untyped_storage(), dtype=torch.float32, _internal=True)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


STRUCTURE = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
FLOATS = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]

DENSE: dict[str, Callable[[], Any]] = {
    "plain": numbers,
    "zero-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: numbers().t(),
    "channels last 2d": lambda: numbers(2, 3, 40, 50).contiguous(memory_format=torch.channels_last),
    "channels last 3d": lambda: numbers(2, 3, 4, 20, 50).contiguous(memory_format=torch.channels_last_3d),
    "every second": lambda: numbers()[:, ::2],
    "expanded": lambda: numbers(1, COLUMNS).expand(ROWS, COLUMNS),
    "bool": lambda: numbers() > 50,
    **{str(dtype): partial(numbers().to, dtype) for dtype in FLOATS},
    "complex": lambda: numbers() * (1 + 2j),
    "half complex": lambda: torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(torch.complex32),
    "conjugate": lambda: (numbers() * (1 + 2j)).conj(),
    "conjugate, transposed": lambda: (numbers() * (1 + 2j)).t().conj(),
    "negative": lambda: (numbers() * (1 + 2j)).conj().imag,
    "requires grad": lambda: numbers().requires_grad_(),
    "result that requires grad": lambda: numbers().requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(numbers()),
    "frozen parameter": lambda: nn.Parameter(numbers(), requires_grad=False),
    "buffer": lambda: nn.Buffer(numbers(), persistent=False),
    "with attributes": lambda: with_note(numbers()),
    "parameter with attributes": lambda: with_note(nn.Parameter(numbers())),
    "made in inference mode": lambda: torch.inference_mode()(numbers)(),
}

ODD: dict[str, Callable[[], Any]] = {
    "qint8": lambda: torch.quantize_per_tensor(numbers(), 0.5, 3, torch.qint8),
    "quint8 channels last": lambda: torch.quantize_per_tensor(numbers(2, 3, 40, 50), 0.5, 0, torch.quint8).contiguous(
        memory_format=torch.channels_last
    ),
    "qint32": lambda: torch.quantize_per_tensor(numbers(), 0.5, 3, torch.qint32),
    "qint8 per channel": lambda: per_channel(torch.qint8),
    "quint8 per channel, float": lambda: per_channel(torch.quint8, floating=True),
    "quint4x2 per channel, float": lambda: per_channel(torch.quint4x2, floating=True),
    "quantised parameter": lambda: nn.Parameter(per_channel(torch.qint8), requires_grad=False),
    "coo": lambda: gaps().to_sparse(),
    "coo, uncoalesced": uncoalesced,
    "coo, hybrid": lambda: gaps().view(ROWS, -1, 8).to_sparse(2),
    "coo that requires grad": lambda: gaps().to_sparse().requires_grad_(),
    "coo parameter": lambda: nn.Parameter(gaps().to_sparse()),
    "coo with attributes": lambda: with_note(gaps().to_sparse()),
    "coo, empty": lambda: torch.empty(3, 0).to_sparse(),
    "csr": lambda: gaps().to_sparse_csr(),
    "csr that requires grad": lambda: gaps().to_sparse_csr().requires_grad_(),
    "csc": lambda: gaps().to_sparse_csc(),
    "bsr": lambda: gaps().to_sparse_bsr((8, 8)),
    "bsc": lambda: gaps().to_sparse_bsc((8, 8)),
    "nested": lambda: nested(torch.strided),
    "nested that requires grad": lambda: nested(torch.strided, grad=True),
    "jagged": lambda: nested(torch.jagged),
    "jagged that requires grad": lambda: nested(torch.jagged, grad=True),
    "subclass": lambda: numbers().as_subclass(Tagged),
    "subclass with attributes": lambda: tagged(numbers()),
    "subclass, strided": lambda: tagged(numbers().t()),
    "subclass, conjugate": lambda: (numbers() * (1 + 2j)).conj().as_subclass(Tagged),
    "subclass, bfloat16": lambda: numbers().bfloat16().as_subclass(Tagged),
    "subclass that requires grad": lambda: numbers().as_subclass(Tagged).requires_grad_(),
    "subclass, empty": lambda: torch.empty(0, 3).as_subclass(Tagged),
    "subclass with a slot": slotted,
    "subclass, sparse": lambda: Tensor._make_subclass(Tagged, gaps().to_sparse()),
    "subclass of Parameter": lambda: with_note(OwnParameter(numbers())),
    "wrapper subclass": lambda: Pair(numbers(), numbers().t()),
    "masked": masked,
    "meta": lambda: numbers().to("meta").t(),
    "meta parameter": lambda: nn.Parameter(numbers().to("meta")),
    "uninitialised parameter": lambda: uninitialised(nn.UninitializedParameter),
    "uninitialised buffer": lambda: uninitialised(nn.UninitializedBuffer),
    "untyped storage": lambda: numbers().untyped_storage(),
    "typed storage": typed_storage,
    "empty storage": lambda: torch.UntypedStorage(0),
    "packed sequence": lambda: pack_sequence([numbers(500, 10), numbers(30, 10)]),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    "fortran": lambda: np.asfortranarray(numbers().numpy()),
    "every second": lambda: numbers().numpy()[:, ::2],
    "backwards": lambda: numbers().numpy()[::-1],
    "backwards in both": lambda: numbers().numpy()[::-1, ::-2],
    "permuted": lambda: numbers(20, 30, 40).numpy().transpose(1, 0, 2),
    "read-only": lambda: read_only(numbers().numpy()),
    "read-only, every second": lambda: read_only(numbers().numpy()[:, ::2]),
    "structured": lambda: np.ones(2000, dtype=STRUCTURE),
    "structured, every second": lambda: np.ones(4000, dtype=STRUCTURE)[::2],
    "zero size": lambda: np.empty((0, 3)),
    "big-endian": lambda: np.arange(10_000).astype(">i4"),
    "broadcast": lambda: np.broadcast_to(np.arange(2000), (3, 2000)),
}

KINDS = DENSE | ODD | {f"array: {name}": make for name, make in ARRAYS.items()}


def raw_bytes(storage: torch.UntypedStorage) -> bytes:
    raw: bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
    return raw


def contents(value: Any) -> list[Any]:
    """What a thing of any of these kinds consists of, as plain tensors, numbers and types."""
    if isinstance(value, torch.UntypedStorage):
        return [raw_bytes(value)]
    if isinstance(value, torch.TypedStorage):
        return [value.dtype, raw_bytes(value._untyped_storage)]
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, value.flags.writeable, value.tobytes()]
    if isinstance(value, tuple):
        return [contents(item) for item in value]
    if not isinstance(value, Tensor):
        return [value]
    if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return [value.data.dtype, value.requires_grad, value.__dict__]
    with torch._C.DisableTorchFunctionSubclass():
        return [value.dtype, value.layout, value.requires_grad, value.is_leaf or "result", *_elements(value)]


def _elements(value: Tensor) -> list[Any]:
    if value.is_nested:
        return [contents(item) for item in value.detach().unbind()]
    attributes = {name: contents(item) for name, item in value.__dict__.items()}
    if value.layout is torch.sparse_coo:
        return [value.shape, attributes, value.is_coalesced(), value._indices().tolist(), value._values().tolist()]
    if value.layout is not torch.strided:
        return [value.shape, attributes, value.values().tolist(), value.to_dense().tolist()]
    geometry = [value.shape, value.stride(), attributes]
    if value.is_meta or isinstance(value, (Pair, torch.masked.MaskedTensor)):
        return geometry
    if value.is_quantized:
        scale: list[Any] = [value.qscheme()]
        if value.qscheme() is torch.per_tensor_affine:
            scale += [value.q_scale(), value.q_zero_point()]
        else:
            zeros = value.q_per_channel_zero_points()
            scale += [value.q_per_channel_axis(), value.q_per_channel_scales().tolist(), zeros.dtype, zeros.tolist()]
        return [*geometry, *scale, value.dequantize().tolist()]
    if value.dtype is torch.complex32:
        value = value.view(torch.int32)
    raw = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return [*geometry, value.is_conj(), value.is_neg(), raw_bytes(raw.untyped_storage())]


def assert_same(arrived: Any, sent: Any) -> None:
    """The same type, and the same in all that makes it up; only graphs stay behind."""
    assert type(arrived) is type(sent)
    expected = [True if item == "result" else item for item in contents(sent)]
    for got, wanted in zip(contents(arrived), expected, strict=True):
        if got != wanted:  # not by assert: explaining how long ones differ takes minutes
            pytest.fail(f"{type(sent).__name__} arrived with {got!r:.200} in place of {wanted!r:.200}")
