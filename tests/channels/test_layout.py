"""The layout of tensors: every kind of a dense tensor arrives, shares what it shared, and belongs to the receiver."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.channels.accelerator import DeviceBuffer, device_index
from aiorpc.channels.landing import Landing
from aiorpc.channels.layout import DTYPES, EMBEDDED_SIZE, describe_plain, rebuild
from aiorpc.channels.layout import describe as describe_routed
from aiorpc.channels.routes import Route, going
from aiorpc.devices import to_device_map
from aiorpc.errors import ProtocolError, SerializationError
from aiorpc.protocol.frames import DIRECT_SIZE
from aiorpc.protocol.packing import pack, unpack
from tests.fakes.cuda import FakeCuda, FakeTensor
from tests.tensors import describe_on_host as describe

Tensor = torch.Tensor
COMPACT = torch.contiguous_format


def send(tensors: list[Tensor]) -> list[Tensor]:
    """What a receiver makes of these tensors, its memory being its own."""
    table, segments = describe(tensors)
    return rebuild(table, [bytearray(segment) for segment in segments])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in every bit, so that NaN equals itself."""
    clones = [tensor.detach().resolve_conj().resolve_neg().clone(memory_format=COMPACT) for tensor in (left, right)]
    raw = [ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"" for tensor in clones]
    return left.shape == right.shape and left.dtype is right.dtype and raw[0] == raw[1]


BASE = torch.arange(24, dtype=torch.float32)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: BASE.clone(),
    "matrix": lambda: BASE.clone().view(4, 6),
    "zero-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0),
    "empty with sizes": lambda: torch.empty(3, 0, 2),
    "empty strided": lambda: torch.empty(5, 4)[:, :0],
    "one element": lambda: torch.ones(1, 1, 1),
    "transposed": lambda: BASE.clone().view(4, 6).t(),
    "permuted": lambda: BASE.clone().view(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: BASE.clone().view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "row of many": lambda: BASE.clone().view(4, 6)[2],
    "columns": lambda: BASE.clone().view(4, 6)[:, 1:5],
    "every second": lambda: BASE.clone()[::2],
    "offset": lambda: BASE.clone()[5:],
    "expanded": lambda: torch.ones(3, 1).expand(3, 5),
    "expanded scalar": lambda: torch.tensor(2.0).expand(10, 10),
    "overlapping": lambda: BASE.clone().as_strided((5, 4), (2, 1)),
    "far apart": lambda: torch.arange(100_000.0)[::50_000],
    "large": lambda: torch.arange(float(DIRECT_SIZE)),
    "large transposed": lambda: torch.arange(float(DIRECT_SIZE)).view(-1, 128).t(),
    "nan and infinity": lambda: torch.tensor([math.nan, math.inf, -0.0]),
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negative view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "conjugate and transposed": lambda: (torch.ones(3, 2) * (1 + 2j)).t().conj(),
    "conjugate and large": lambda: torch.full((DIRECT_SIZE,), 1 + 2j).conj(),
    "empty conjugate": lambda: torch.empty(0, 3, dtype=torch.complex64).conj(),
    "real of complex": lambda: torch.tensor([1 + 2j, 3 + 4j]).real,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_arrive(name: str) -> None:
    """Shape, dtype and every bit arrive; strides too, unless keeping them would send far more than the elements."""
    tensor = LAYOUTS[name]()
    (arrived,) = send([tensor])
    assert same_bits(arrived, tensor)
    assert (arrived.is_conj(), arrived.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if name in ("far apart", "negative view"):  # one element of a pair has no stride to keep
        assert arrived.is_contiguous()
    else:
        assert arrived.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch's own
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not None], ids=str)
def test_dtypes_arrive(dtype: torch.dtype) -> None:
    """Every dtype torch has for dense tensors arrives bit for bit, flat, strided and empty."""
    raw = torch.arange(1, 97, dtype=torch.uint8)
    tensor = raw.view(torch.uint8).remainder(2).bool() if dtype is torch.bool else torch.empty(0, dtype=dtype)
    if dtype is not torch.bool:
        tensor = tensor.set_(raw.untyped_storage(), 0, (96 // dtype.itemsize,), (1,))
    arrived = send([tensor])[0]
    assert arrived.dtype is dtype
    assert bytes(arrived.untyped_storage())[:96] == bytes(tensor.untyped_storage())[:96]
    empty = send([torch.empty((0, 2), dtype=dtype)])[0]
    assert (empty.dtype, empty.shape) == (dtype, (0, 2))


def test_every_dense_dtype_of_torch_has_a_code() -> None:
    """A dtype that torch adds is noticed here; quantised ones are never dense, one cannot be made."""
    found = {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    quantised = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
    assert found - quantised - set(DTYPES) <= {torch.bit} if hasattr(torch, "bit") else found - quantised == set(DTYPES)


def test_codes_do_not_move() -> None:
    """Positions are codes on the wire: the first ones stay what they were."""
    assert DTYPES[:5] == (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
    assert DTYPES[20] is torch.float8_e8m0fnu
    assert DTYPES[40] is torch.bits4x2
    assert len(set(DTYPES)) == len(DTYPES)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("strided", [False, True])
def test_requires_grad_and_parameter_arrive(grad: bool, kind: type, strided: bool) -> None:
    """requires_grad and being a Parameter arrive, alone and among views; what arrives is a leaf without history."""
    base = torch.ones(4, 3).t() if strided else torch.ones(3, 4)
    tensor = torch.nn.Parameter(base, requires_grad=grad) if kind is torch.nn.Parameter else base.requires_grad_(grad)
    for arrived in (send([tensor])[0], send([tensor, tensor.detach()])[0]):
        assert type(arrived) is kind
        assert arrived.requires_grad is grad
        assert arrived.is_leaf
        assert arrived.stride() == tensor.stride()


def test_views_share_their_storage_at_the_receiver() -> None:
    """Tensors over one storage travel once and still see each other's writes; others do not."""
    base = torch.zeros(4, 6)
    views = [base, base[1], base.t(), base.view(-1)[3:5], torch.zeros(2)]
    table, segments = describe(views)
    assert len(segments) == 1
    arrived = rebuild(table, [bytearray(segment) for segment in segments])
    arrived[0][1, 2] = 7
    assert arrived[1][2] == 7
    assert arrived[2][2, 1] == 7
    arrived[3][0] = 9
    assert arrived[0][0, 3] == 9
    assert [tensor.stride() for tensor in arrived] == [tensor.stride() for tensor in views]


def test_only_the_covered_span_travels() -> None:
    """Two small views of a large storage send the bytes between them, not the whole."""
    base = torch.zeros(1_000_000)
    _, segments = describe([base[500:510], base[520:530]])
    assert sum(map(len, segments)) < 200
    table, segments = describe([base[::100_000]])
    assert sum(map(len, segments)) + len(table[0][1]) == 40


def test_conjugate_shares_with_its_origin() -> None:
    """Bits that are pending need no memory of their own: a write is seen through them, at the receiver too."""
    base = torch.tensor([1 + 2j, 3 - 1j])
    for views in ([base, base.conj(), base.conj().imag], [base.conj().imag, base]):
        arrived = send(views)
        at = next(index for index, tensor in enumerate(views) if tensor is base)
        arrived[at].fill_(5 + 7j)
        for tensor in arrived:
            if tensor.is_conj():
                assert tensor[0] == 5 - 7j
            elif not tensor.is_complex():
                assert tensor.is_neg()
                assert tensor[0] == -7


@pytest.mark.parametrize("count", [10, 2000, DIRECT_SIZE])
def test_tensor_whose_memory_was_freed(count: int) -> None:
    """Elements without memory are refused, alone and among others; nothing is read from where they would be."""
    tensor = torch.ones(count)
    view = tensor[1:]
    tensor.untyped_storage().resize_(0)
    for tensors in ([tensor], [view], [tensor, view], [torch.ones(1), tensor]):
        with pytest.raises(SerializationError, match=r"float32 tensor of shape \(\d+,\) whose memory was freed"):
            describe(tensors)
    assert describe_plain([tensor]) is None


@pytest.mark.parametrize("count", [3, 2000, DIRECT_SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_tensor_that_stands_for_zeros(dtype: torch.dtype, count: int) -> None:
    """A derivative that torch knows to be zero has no memory: it arrives as zeros, and nothing else is read for it."""
    zero = torch._efficientzerotensor(count, dtype=dtype)
    assert describe_plain([zero]) is None
    expected = torch.zeros(count, dtype=dtype)
    sent = [zero, zero[1:], torch.ones(count, dtype=dtype), torch.nn.Parameter(zero)]
    if dtype.is_complex:
        sent.append(zero.conj())
    for arrived, original in zip([*send(sent), *send([zero])], [*sent, zero], strict=True):
        is_zero = original._is_zerotensor()
        assert torch.equal(arrived.detach(), expected[: len(original)] if is_zero else torch.ones(count, dtype=dtype))
        assert (type(arrived), arrived.requires_grad) == (type(original), original.requires_grad)


def test_tensor_inside_of_a_transform() -> None:
    """What vmap gives to a function looks like a tensor and has no memory: an error that says so."""

    def inside(tensor: Tensor) -> Tensor:
        with pytest.raises(SerializationError, match="holds a tensor without memory of its own"):
            describe([tensor])
        assert describe_plain([tensor]) is None
        return tensor

    torch.vmap(inside)(torch.ones(2, 2))


@pytest.mark.parametrize("count", [3, 2000, DIRECT_SIZE])
def test_tensor_inside_of_functionalize(count: int) -> None:
    """It has an address all the same, of which nothing is read: alone, among others, in part and as a Parameter."""

    def inside(tensor: Tensor) -> Tensor:
        parameter: Tensor = torch.nn.Parameter(tensor)
        both = [[tensor, torch.ones(1)], [tensor, tensor[1:]]]
        for tensors in [[tensor], [tensor[1:]], [tensor[::2]], [parameter], *both]:
            with pytest.raises(SerializationError, match="holds a tensor without memory of its own"):
                describe(tensors)
        assert describe_plain([tensor]) is None
        return tensor

    torch.func.functionalize(inside)(torch.ones(count))


def test_small_tensors_may_change_at_once() -> None:
    """A small tensor was copied by the time it is described; a large one is lent until it was written."""
    small, large = torch.zeros(EMBEDDED_SIZE // 4 + 1), torch.zeros(DIRECT_SIZE)
    table, segments = describe([small, large])
    small[0] = large[0] = 1
    taken = rebuild(table, [bytearray(segment) for segment in segments])
    assert [taken[0][0], taken[1][0]] == [0, 1]


@pytest.mark.parametrize("views", [False, True])
def test_tensor_that_is_given_other_memory_after_put(views: bool) -> None:
    """``tensor.data = ...`` before the frame is written changes nothing: the memory that is sent stays alive."""
    tensor = torch.full((DIRECT_SIZE,), 3.0)
    gone = weakref.ref(tensor.untyped_storage())
    tensors = [tensor, tensor[1:]] if views else [tensor]
    table, segments = describe(tensors)
    for each in tensors:
        each.data = torch.zeros(1)
    gc.collect()
    assert gone() is not None
    assert torch.equal(rebuild(table, [bytearray(segments[0])])[0], torch.full((DIRECT_SIZE,), 3.0))


shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def views_of_one_storage(draw: st.DrawFn) -> list[Tensor]:
    """Tensors with any sizes, strides and offsets over one storage."""
    base = torch.arange(2000).to(draw(st.sampled_from([torch.uint8, torch.float32, torch.complex64])))
    views = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        strides = [draw(st.integers(0, 40)) for _ in shape]
        views.append(base.as_strided(shape, strides, draw(st.integers(0, 1000))))
    return views


@given(views_of_one_storage())
def test_any_views_arrive(tensors: list[Tensor]) -> None:
    """Whatever the sizes, strides and offsets, all views of a message arrive bit for bit; none is written outside."""
    for arrived, sent in zip(send(tensors), tensors, strict=True):
        assert same_bits(arrived, sent)


GOOD = [0, 0, 0, [2, 2], None, 0, None]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        GOOD[:-1],
        [*GOOD, None],
        [1, 0, 0, [2, 2], None, 0, None],
        ["0", 0, 0, [2, 2], None, 0, None],
        [0, 0, 999, [2, 2], None, 0, None],
        [0, 0, 0, [2, 3], None, 0, None],
        [0, 0, 0, [-2, -2], None, 0, None],
        [0, 0, 0, [1 << 62, 1 << 62], None, 0, None],
        [0, 0, 0, "shape", None, 0, None],
        [0, 0, 0, [1 << 70], None, 0, None],
        [0, 0, 0, [2, 3], [3, 1], 0, None],
        [0, 4, 0, [2, 2], [2, 1], 0, None],
        [0, -16, 0, [1], [1], 0, None],
        [0, 1 << 62, 0, [1], [1], 0, None],
        [0, 1 << 70, 0, [1], [1], 0, None],
        [0, 0, 0, [2], [-1], 0, None],
        [0, 0, 0, [2], [1 << 62], 0, None],
        [0, 0, 0, [2, 2], [1], 0, None],
        [0, 0, 0, [2, 2], 5, 0, None],
        [0, 0, 4, [2], None, 1, None],
        [-1, 0, 0, [1 << 40], [1], 0, None],
        [-1, 0, 0, [], [], 0, None],
        [-1, 0, 0, [0], None, 0, None],
        [-2, 1 << 40, 0, [1], None, 0, None],
        [-2, "1234", 0, [1], None, 0, None],
        [-2, b"123", 0, [1], None, 0, None],
        [-2, b"123", 3, [2], None, 0, None],
        [-3, 0, 0, [1], None, 0, None],
        [0, 0, 4, [2], None, 1 | 4 | 8, None],
        [0, 0, 9, [16], None, 8, None],
        [0, 0, 0, [2, 2], None, "1", None],
    ],
)
def test_table_that_does_not_fit_is_a_protocol_error(entry: Any) -> None:
    """A table that asks for bytes, dtypes or sizes that are not there gives ProtocolError and takes no memory."""
    assert rebuild([GOOD], [bytearray(16)])[0].shape == (2, 2)
    with pytest.raises(ProtocolError, match="does not fit its bytes"):
        rebuild([entry], [bytearray(16)])


# --- tensors on devices -----------------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Two devices that do not exist."""
    with FakeCuda(lag=(0, 0.0005)) as fake:
        yield fake
        assert fake.violations == []


def route(fake: FakeCuda | None, devices: dict[Any, Any]) -> Route:
    return going(fake, to_device_map(devices), "ps")


CROSSED = {0: 1, 1: 0}


def carry(fake: FakeCuda, buffers: Sequence[Any]) -> list[Any]:
    """What arrives of these buffers, in memory of its own, where it belongs."""
    arrived: list[Any] = []
    for buffer in buffers:
        if not isinstance(buffer, DeviceBuffer):
            arrived.append(bytearray(buffer))
            continue
        index = device_index(buffer.target)
        memory = fake.empty(len(buffer), index) if index >= 0 else fake.pinned(len(buffer))
        stream = fake.current(buffer.index)
        fake.move(memory, buffer.carrier, stream)
        if index >= 0:
            fake.wait(fake.mark(stream), fake.current(index))
            arrived.append(DeviceBuffer(memory, index, buffer.target))
        else:
            fake.synchronize(fake.mark(stream))
            arrived.append(bytearray(memory.numpy()))
    return arrived


def send_routed(
    fake: FakeCuda, tensors: Sequence[Tensor], devices: dict[Any, Any], landing: Landing | None = None
) -> list[Tensor]:
    """What the worker at the end of this map makes of these tensors."""
    table, buffers = describe_routed(tensors, route(fake, devices))
    return rebuild(unpack(pack(table)), carry(fake, buffers), landing or Landing(fake))


def here(fake: FakeCuda, tensor: Tensor) -> Tensor:
    """What a tensor on a device holds, with its sizes, strides and pending bits; after all that was enqueued."""
    if isinstance(tensor, FakeTensor):
        fake.settle(tensor.ordinal)
        return tensor.raw
    return tensor


def on_device(fake: FakeCuda, tensor: Tensor, index: int = 0) -> FakeTensor:
    """The same view of the same storage, on a device."""
    memory = torch.empty(0, dtype=torch.uint8)
    memory.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))
    carrier = fake.empty(memory.numel(), index)
    fake.move(carrier, memory, fake.current(index))
    raw = torch.empty(0, dtype=tensor.dtype)
    raw.set_(carrier.untyped_storage(), int(tensor.storage_offset()), tensor.size(), tensor.stride())
    raw = raw.conj() if tensor.is_conj() else raw
    return FakeTensor(torch._neg_view(raw) if tensor.is_neg() else raw, fake, index)


def over(fake: FakeCuda, bits: Tensor, dtype: torch.dtype, index: int) -> FakeTensor:
    """A tensor on a device with these bytes, whatever the dtype can do."""
    carrier = fake.empty(bits.numel(), index)
    fake.move(carrier, bits, fake.current(index))
    raw = torch.empty(0, dtype=torch.int32 if dtype is torch.complex32 else dtype, device="cpu")
    raw = raw.view(torch.complex32) if dtype is torch.complex32 else raw
    raw.set_(carrier.untyped_storage(), 0, (bits.numel() // dtype.itemsize,), (1,))
    return FakeTensor(raw, fake, index)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch's own
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not None], ids=str)
def test_dtypes_arrive_on_a_device(fake: FakeCuda, dtype: torch.dtype) -> None:
    """Every dtype, flat and with strides, from a device to a device and to the host, bit for bit."""
    bits = torch.arange(1, 97, dtype=torch.uint8)
    bits = bits.remainder(2) if dtype is torch.bool else bits
    sent = over(fake, bits, dtype, 0)
    views = [sent, FakeTensor(sent.raw[1:-1], fake, 0)]
    for devices, place in (({0: 1}, torch.device("cuda", 1)), ({0: "cpu"}, torch.device("cpu"))):
        for tensors in ([sent], views):
            for arrived, tensor in zip(send_routed(fake, tensors, devices), tensors, strict=True):
                assert (arrived.dtype, arrived.shape, arrived.device) == (dtype, tensor.shape, place)
                start = int(tensor.storage_offset()) * dtype.itemsize
                raw = here(fake, arrived)
                assert ctypes.string_at(raw.data_ptr(), raw.nbytes) == bytes(bits.tolist())[start:][: raw.nbytes]


@pytest.mark.parametrize("devices", [{0: 1}, {0: 0}, {0: "cpu"}], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_arrive_on_a_device(fake: FakeCuda, name: str, devices: dict[Any, Any]) -> None:
    """As in the host's memory: every bit, pending bits as such, and strides unless the elements are gathered."""
    tensor = LAYOUTS[name]()
    (arrived,) = send_routed(fake, [on_device(fake, tensor)], devices)
    target = next(iter(devices.values()))
    assert str(arrived.device) == ("cpu" if target == "cpu" else f"cuda:{target}")
    got = here(fake, arrived)
    assert same_bits(got, tensor)
    if name == "far apart":
        assert got.is_contiguous()
    elif name != "negative view":
        assert (got.is_conj(), got.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert got.stride() == tensor.stride()


@pytest.mark.parametrize("devices", [{0: 1}, {0: "cpu"}, {"cpu": 1}], ids=str)
def test_views_share_their_storage_on_a_device(fake: FakeCuda, devices: dict[Any, Any]) -> None:
    """One buffer travels for all of them, and what is written to one is seen in the others, wherever they arrive."""
    base = torch.zeros(4, 6)
    if 0 in devices:
        base = fake.fake_tensor(base, 0)
    views = [base, base[1], base.t(), base.view(-1)[3:5]]
    table, buffers = describe_routed(views, route(fake, devices))
    assert [len(buffer) for buffer in buffers] == [base.nbytes]
    arrived = rebuild(unpack(pack(table)), carry(fake, buffers), Landing(fake))
    arrived[0][1, 2] = 7
    arrived[3][0] = 9
    seen = [here(fake, tensor) for tensor in arrived]
    assert [seen[1][2].item(), seen[2][2, 1].item(), seen[0][0, 3].item()] == [7, 7, 9]
    assert [tensor.stride() for tensor in arrived] == [tensor.stride() for tensor in views]


@pytest.mark.parametrize("devices", [CROSSED, {0: 1, 1: "cpu", "cpu": 0}], ids=str)
def test_table_keeps_the_order_of_host_and_devices(fake: FakeCuda, devices: dict[Any, Any]) -> None:
    """However mixed they are, alone or views, each tensor arrives in its place and on its device."""
    bases = [torch.arange(300.0), on_device(fake, torch.arange(300.0), 0), on_device(fake, torch.arange(300.0), 1)]
    tensors: list[Tensor] = []
    for number in range(30):
        base = bases[number % 3]
        tensors.append(base[number * 7 : number * 7 + number % 4])
        own = torch.full((number % 3, 2), float(number))
        tensors.append(own if number % 3 == 0 else on_device(fake, own, number % 3 - 1))
    names = {str(source): str(target) for source, target in to_device_map(devices).items()}
    landing = Landing(fake)
    for arrived, sent in zip(send_routed(fake, tensors, devices, landing), tensors, strict=True):
        assert str(arrived.device) == names.get(str(sent.device), "cpu")
        assert torch.equal(here(fake, arrived), here(fake, sent))
    assert {index for index, _ in landing.carriers} == {
        device_index(names.get(str(tensor.device), "cpu")) for tensor in tensors
    } - {-1}


# --- tables that lie --------------------------------------------------------------------------------------------------

ON_DEVICE = [0, 0, 0, [2, 2], None, 0, "cuda:0"]
LIES: list[Any] = [
    [*ON_DEVICE, 0],
    [1, *ON_DEVICE[1:]],
    ["0", *ON_DEVICE[1:]],
    [None, *ON_DEVICE[1:]],
    [-3, *ON_DEVICE[1:]],
    [-1, *ON_DEVICE[1:]],
    [-2, *ON_DEVICE[1:]],
    [-2, b"123", 0, [1], None, 0, "cuda:0"],
    [-1, 0, 0, [1 << 40], [1], 0, "cuda:0"],
    # targets
    [*ON_DEVICE[:6], "cuda:1"],
    [*ON_DEVICE[:6], "cuda:2"],
    [*ON_DEVICE[:6], "cuda:-1"],
    [*ON_DEVICE[:6], "cuda:99999999999999999999"],
    [*ON_DEVICE[:6], "cuda"],
    [*ON_DEVICE[:6], "cpu"],
    [*ON_DEVICE[:6], ""],
    [*ON_DEVICE[:6], 0],
    [*ON_DEVICE[:6], None],
    [*ON_DEVICE[:6], ["cuda:0"]],
    ON_DEVICE[:6],  # as one on the host
    # sizes
    [0, 0, 999, [2, 2], None, 0, "cuda:0"],
    [0, 0, None, [2, 2], None, 0, "cuda:0"],
    [0, 0, 0, [2, 3], None, 0, "cuda:0"],
    [0, 0, 0, [1], None, 0, "cuda:0"],
    [0, 0, 0, [-2, -2], None, 0, "cuda:0"],
    [0, 0, 0, [1 << 62, 1 << 62], None, 0, "cuda:0"],
    [0, 0, 0, "shape", None, 0, "cuda:0"],
    # strides and offsets
    [0, 0, 0, [2, 3], [3, 1], 0, "cuda:0"],
    [0, 4, 0, [2, 2], [2, 1], 0, "cuda:0"],
    [0, -16, 0, [1], [1], 0, "cuda:0"],
    [0, -4, 0, [1], [1], 0, "cuda:0"],
    [0, 16, 0, [1], [1], 0, "cuda:0"],
    [0, 1 << 62, 0, [1], [1], 0, "cuda:0"],
    [0, 1 << 70, 0, [1], [1], 0, "cuda:0"],
    [0, 0, 0, [1000], [1], 0, "cuda:0"],
    [0, 0, 0, [2], [-1], 0, "cuda:0"],
    [0, 0, 0, [2], [1 << 62], 0, "cuda:0"],
    [0, 0, 0, [2, 2], [1], 0, "cuda:0"],
    [0, 0, 0, [2, 2], 5, 0, "cuda:0"],
    [0, "0", 0, [2, 2], [2, 1], 0, "cuda:0"],
    [0, None, 0, [2, 2], [2, 1], 0, "cuda:0"],
    # flags
    [0, 0, 4, [2], None, 1, "cuda:0"],
    [0, 0, 9, [16], None, 8, "cuda:0"],
    [0, 0, 0, [2, 2], None, "1", "cuda:0"],
]


def arrived_on(fake: FakeCuda, *, resizable: bool) -> DeviceBuffer:
    """Sixteen bytes on device 0. resizable: in a storage that torch would enlarge, as it does those of real devices."""
    carrier = fake.empty(16, 0)
    if resizable:
        carrier = torch.zeros(16, dtype=torch.uint8, device="cpu")
    return DeviceBuffer(carrier, 0, "cuda:0")


class AnyMemory(FakeCuda):
    """Takes memory that is not its own for that of its devices."""

    def tensor(self, carrier: torch.Tensor, index: int) -> torch.Tensor:
        return carrier


@pytest.mark.parametrize("resizable", [False, True])
@pytest.mark.parametrize("entry", LIES, ids=str)
def test_table_that_lies_about_a_device_is_a_protocol_error(entry: Any, resizable: bool) -> None:
    """Wrong devices, buffers, sizes, offsets: ProtocolError and nothing else; no memory is taken."""
    with (AnyMemory if resizable else FakeCuda)(lag=(0, 0.0005)) as fake:
        buffer = arrived_on(fake, resizable=resizable)
        assert rebuild([ON_DEVICE], [buffer], Landing(fake))[0].shape == (2, 2)
        before = fake.in_use(0)
        with pytest.raises(ProtocolError, match="does not fit its bytes"):
            rebuild([entry], [buffer], Landing(fake))
        assert buffer.carrier.untyped_storage().nbytes() == 16
        assert fake.in_use(0) <= before
        assert fake.violations == []


@pytest.mark.parametrize("landing", [False, True])
def test_bytes_of_the_host_and_of_a_device_are_not_taken_for_each_other(fake: FakeCuda, landing: bool) -> None:
    """A table that says one and a message that brings the other: what can be had is had, the rest is an error."""
    lands = Landing(fake) if landing else None
    buffer = arrived_on(fake, resizable=False)
    for code in range(15):
        with pytest.raises(ProtocolError, match="does not fit its bytes"):
            rebuild([[0, 0, code, [1], None, 0]], [buffer], lands)
        with pytest.raises(ProtocolError, match="does not fit its bytes"):
            rebuild([[0, 0, code, [1], [1], 0]], [buffer], lands)
    if lands is None:
        for received in (buffer, bytearray(16)):
            with pytest.raises(ProtocolError, match="there is no cuda:0 here"):
                rebuild([ON_DEVICE], [received])
    else:
        (tensor,) = rebuild([ON_DEVICE], [bytearray(16)], lands)
        assert here(fake, tensor).tolist() == [[0, 0], [0, 0]]


junk: Any = st.recursive(
    st.none() | st.integers(-3, 1 << 65) | st.integers(-20, 20) | st.binary(max_size=20) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=12,
)


@given(
    entries=st.lists(
        junk
        | st.tuples(junk, junk, junk, junk, junk, junk, st.sampled_from(["cuda:0", "cuda:1", "cpu"]) | junk).map(list)
        | st.tuples(
            st.integers(-3, 2),
            st.integers(-20, 20),
            st.integers(-2, 50),
            st.lists(st.integers(-1, 5), max_size=3),
            st.none() | st.lists(st.integers(-1, 5), max_size=3),
            st.integers(-1, 16),
            st.sampled_from(["cuda:0", "cuda:1", "cpu"]),
        ).map(list),
        max_size=3,
    )
)
def test_any_table_makes_tensors_or_a_protocol_error(entries: list[Any]) -> None:
    """Whatever stands in it; and no tensor leaves the bytes that arrived."""
    with FakeCuda(lag=(0, 0)) as fake:
        buffers = [arrived_on(fake, resizable=False), bytearray(16)]
        try:
            made = rebuild(entries, buffers, Landing(fake))
        except ProtocolError:
            return
        for tensor in made:
            raw = here(fake, tensor)
            assert raw.untyped_storage().nbytes() >= raw.nbytes or 0 in raw.stride()
        assert fake.violations == []
