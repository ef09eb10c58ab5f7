"""The inline channel: every layout of a dense tensor arrives, shares what it shared, and belongs to the receiver."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.channels.inline import DTYPES, EMBEDDED_SIZE, InlineChannel, allocate
from aiorpc.errors import ProtocolError, SerializationError
from aiorpc.protocol.codec import unpack
from aiorpc.protocol.frames import DIRECT_SIZE, FrameDecoder, Kind, encode_frame
from aiorpc.runtime import messages

channel = InlineChannel()
Tensor = torch.Tensor
COMPACT = torch.contiguous_format


def send(tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    """What a receiver makes of these tensors, its memory being its own."""
    table, segments = channel.put(tensors, copy=copy)
    return channel.take(table, [bytearray(segment) for segment in segments])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in every bit, so that NaN equals itself."""
    clones = [tensor.detach().resolve_conj().resolve_neg().clone(memory_format=COMPACT) for tensor in (left, right)]
    raw = [bytes(tensor.untyped_storage()) for tensor in clones]
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
    "real of complex": lambda: torch.tensor([1 + 2j, 3 + 4j]).real,
}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_arrive(name: str, copy: bool) -> None:
    """Shape, dtype and every bit arrive; strides too, unless keeping them would send far more than the elements."""
    tensor = LAYOUTS[name]()
    (arrived,) = send([tensor], copy=copy)
    assert same_bits(arrived, tensor)
    assert not arrived.is_conj()
    assert not arrived.is_neg()
    if name in ("far apart", "conjugate", "negative view"):
        assert arrived.is_contiguous()
    else:
        assert arrived.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
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
    assert DTYPES[-1] is torch.bits4x2
    assert len(set(DTYPES)) == len(DTYPES)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("strided", [False, True])
def test_requires_grad_and_parameter_arrive(grad: bool, kind: type, strided: bool) -> None:
    """requires_grad and being a Parameter arrive, alone and among views; the arrived tensor is a leaf without history."""
    base = torch.ones(4, 3).t() if strided else torch.ones(3, 4)
    tensor = torch.nn.Parameter(base, requires_grad=grad) if kind is torch.nn.Parameter else base.requires_grad_(grad)
    for arrived in (send([tensor])[0], send([tensor, tensor.detach()])[0]):
        assert type(arrived) is kind
        assert arrived.requires_grad is grad
        assert arrived.is_leaf
        assert arrived.stride() == tensor.stride()


def test_result_of_a_computation_arrives_as_a_leaf() -> None:
    """A tensor with a graph behind it arrives with requires_grad and without the graph."""
    (arrived,) = send([torch.ones(2, requires_grad=True) * 2])
    assert arrived.requires_grad
    assert arrived.grad_fn is None


def test_views_share_their_storage_at_the_receiver() -> None:
    """Tensors over one storage travel once and still see each other's writes; others do not."""
    base = torch.zeros(4, 6)
    views = [base, base[1], base.t(), base.view(-1)[3:5], torch.zeros(2)]
    table, segments = channel.put(views)
    assert len(segments) == 1
    arrived = channel.take(table, [bytearray(segment) for segment in segments])
    arrived[0][1, 2] = 7
    assert arrived[1][2] == 7
    assert arrived[2][2, 1] == 7
    arrived[3][0] = 9
    assert arrived[0][0, 3] == 9
    assert [tensor.stride() for tensor in arrived] == [tensor.stride() for tensor in views]


def test_views_of_other_dtypes_share() -> None:
    """A reinterpretation of the same bytes stays one, at an odd offset too."""
    raw = torch.arange(64, dtype=torch.uint8)
    words = raw[24:40].view(torch.int32)
    arrived = send([words, raw[26:28]])
    arrived[1][0] = 255
    assert arrived[0][0].item() == words[0].item() | 0xFF0000
    assert words[0].item() != arrived[0][0].item()


def test_only_the_covered_span_travels() -> None:
    """Two small views of a large storage send the bytes between them, not the whole."""
    base = torch.zeros(1_000_000)
    _, segments = channel.put([base[500:510], base[520:530]])
    assert sum(map(len, segments)) < 200
    table, segments = channel.put([base[::100_000]])
    assert sum(map(len, segments)) + len(table[0][1]) == 40


def test_empty_and_conjugate_views_among_others() -> None:
    """Views without bytes, and lazy conjugates, of a shared storage arrive with the rest."""
    base = torch.tensor([1 + 2j, 3 - 1j])
    tensors = [base, base[:0], base.conj(), torch.view_as_real(base)]
    for arrived, sent in zip(send(tensors), tensors, strict=True):
        assert same_bits(arrived, sent)


def test_small_and_copied_tensors_may_change_at_once() -> None:
    """After put with copy, or of a small tensor, the sender may change it; a large one is lent until it was written."""
    small, large = torch.zeros(EMBEDDED_SIZE // 4 + 1), torch.zeros(DIRECT_SIZE)
    table, segments = channel.put([small, large])
    _, copies = channel.put([small, large], copy=True)
    small[0] = large[0] = 1
    taken = channel.take(table, [bytearray(segment) for segment in segments])
    kept = channel.take(table, [bytearray(segment) for segment in copies])
    assert [taken[0][0], taken[1][0]] == [0, 1]
    assert [kept[0][0], kept[1][0]] == [0, 0]


def test_lent_memory_lives_as_long_as_the_segment() -> None:
    """A large tensor that the sender drops stays readable until its frame was written, and no longer."""
    tensor = torch.full((DIRECT_SIZE,), 3.0)
    gone = weakref.ref(tensor.untyped_storage())
    table, segments = channel.put([tensor])
    del tensor
    gc.collect()
    assert torch.equal(channel.take(table, [bytearray(segments[0])])[0], torch.full((DIRECT_SIZE,), 3.0))
    segments.clear()
    gc.collect()
    assert gone() is None


def test_received_tensors_use_the_received_memory() -> None:
    """Nothing is copied on arrival: the tensor lies over the segment and keeps it alive."""
    table, segments = channel.put([torch.arange(float(DIRECT_SIZE))])
    memory = allocate(len(segments[0]))
    memory[:] = segments[0]
    (arrived,) = channel.take(table, [memory])
    memory[:4] = b"\0\0\x80\x3f"
    assert arrived[0] == 1.0
    del memory
    gc.collect()
    assert arrived[-1] == DIRECT_SIZE - 1


shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def views_of_one_storage(draw: st.DrawFn) -> list[Tensor]:
    """Tensors with any sizes, strides and offsets over one storage."""
    base = torch.arange(2000, dtype=draw(st.sampled_from([torch.uint8, torch.float32, torch.complex64])))
    views = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        strides = [draw(st.integers(0, 40)) for _ in shape]
        views.append(base.as_strided(shape, strides, draw(st.integers(0, 1000))))
    return views


@given(views_of_one_storage(), st.booleans())
def test_any_views_arrive(tensors: list[Tensor], copy: bool) -> None:
    """Whatever the sizes, strides and offsets, all views of a message arrive with every bit, and none is written outside."""
    for arrived, sent in zip(send(tensors, copy=copy), tensors, strict=True):
        assert same_bits(arrived, sent)


GOOD = [0, 0, 0, [2, 2], None, 0]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        GOOD[:-1],
        [1, 0, 0, [2, 2], None, 0],
        ["0", 0, 0, [2, 2], None, 0],
        [0, 0, 999, [2, 2], None, 0],
        [0, 0, 0, [2, 3], None, 0],
        [0, 0, 0, [-2, -2], None, 0],
        [0, 0, 0, [1 << 62, 1 << 62], None, 0],
        [0, 0, 0, "shape", None, 0],
        [0, 0, 0, [1 << 70], None, 0],
        [0, 0, 0, [2, 3], [3, 1], 0],
        [0, 4, 0, [2, 2], [2, 1], 0],
        [0, -16, 0, [1], [1], 0],
        [0, 1 << 62, 0, [1], [1], 0],
        [0, 1 << 70, 0, [1], [1], 0],
        [0, 0, 0, [2], [-1], 0],
        [0, 0, 0, [2], [1 << 62], 0],
        [0, 0, 0, [2, 2], [1], 0],
        [0, 0, 0, [2, 2], 5, 0],
        [0, 0, 4, [2], None, 1],
        [-1, 0, 0, [1 << 40], [1], 0],
        [-1, 0, 0, [], [], 0],
        [-1, 0, 0, [0], None, 0],
        [-2, 1 << 40, 0, [1], None, 0],
        [-2, "1234", 0, [1], None, 0],
        [-2, b"123", 0, [1], None, 0],
        [-2, b"123", 3, [2], None, 0],
        [-3, 0, 0, [1], None, 0],
    ],
)
def test_table_that_does_not_fit_is_a_protocol_error(entry: Any) -> None:
    """A table that asks for bytes, dtypes or sizes that are not there gives ProtocolError and takes no memory."""
    assert channel.take([GOOD], [bytearray(16)])[0].shape == (2, 2)
    with pytest.raises(ProtocolError, match="does not fit its bytes"):
        channel.take([entry], [bytearray(16)])


# --- whole messages ---------------------------------------------------------------------------------------------------


class To:
    """A worker that messages go to."""

    same_main = True

    def __init__(self, max_body: int = 1 << 20) -> None:
        self.max_body = max_body


def deliver(values: list[Any], *, copy: bool = False, to: To | None = None) -> list[Any]:
    """Through encode, frame, decoder and decode: the whole way but for the socket."""
    body, segments = messages.encode([], values, to or To(), copy=copy)
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 30, allocate=allocate)
    frames = []
    for part in encode_frame(Kind.REPLY, 1, body, segments):
        rest = memoryview(part)
        while rest:
            buffer = decoder.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            frames += decoder.received(count)
            rest = rest[count:]
    (frame,) = frames
    return messages.decode(unpack(frame.body), frame.segments, lambda wires: [])


def test_messages_with_all_kinds_of_values() -> None:
    """Plain values, containers, tensors alone and inside, arrays and sparse tensors in one message."""
    numpy = pytest.importorskip("numpy")
    tensor, array = torch.randn(300, 300), numpy.arange(90_000)
    sent = [1, tensor, {"t": tensor[1], "a": array}, "text", torch.eye(2).to_sparse(), torch.empty(0)]
    number, whole, inside, text, sparse, empty = deliver(sent)
    assert (number, text, empty.shape) == (1, "text", (0,))
    assert torch.equal(whole, tensor)
    whole[1, 0] = 5
    assert inside["t"][0] == 5, "they shared a storage, so they still do"
    assert numpy.array_equal(inside["a"], array)
    assert torch.equal(sparse.to_dense(), torch.eye(2))


def test_module_arrives_with_its_parameters_and_buffers() -> None:
    """An nn.Module arrives ready to train: same outputs, parameters are Parameters, tied weights stay tied."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    module[2].weight = module[0].weight
    (arrived,) = deliver([module])
    assert arrived[2].weight is arrived[0].weight
    assert all(type(parameter) is torch.nn.Parameter for parameter in arrived.parameters())
    inputs = torch.randn(4, 3)
    assert torch.equal(arrived(inputs), module(inputs))
    arrived(inputs).sum().backward()
    assert arrived[0].weight.grad is not None


def test_state_dict_arrives() -> None:
    """A whole state_dict arrives in its order and type, and loads."""
    module = torch.nn.LSTM(4, 5, num_layers=2)
    state = module.state_dict()
    (arrived,) = deliver([state])
    assert type(arrived) is type(state)
    assert list(arrived) == list(state)
    other = torch.nn.LSTM(4, 5, num_layers=2)
    other.load_state_dict(arrived)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))


def test_optimizer_state_and_generator_arrive() -> None:
    """What training keeps besides parameters: an optimizer's state_dict and a generator's state."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state, random = deliver([optimizer.state_dict(), torch.get_rng_state()])
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert torch.equal(random, torch.get_rng_state())


def test_copied_message_may_change_at_once() -> None:
    """A reply takes tensors' and arrays' bytes when it is encoded: the handler may go on writing into them."""
    numpy = pytest.importorskip("numpy")
    tensor, array = torch.zeros(DIRECT_SIZE), numpy.zeros(DIRECT_SIZE)
    body, segments = messages.encode([], [tensor, array], To(), copy=True)
    tensor[0] = array[0] = 1
    arrived = messages.decode(unpack(body), [bytearray(segment) for segment in segments], lambda wires: [])
    assert [arrived[0][0].item(), arrived[1][0]] == [0, 0]


@pytest.mark.parametrize(
    ("values", "position"),
    [
        (["x", b"y" * 2000, 3], 1),
        (["x" * 2000], 0),
        ([1, "x", ["long"] * 5 + ["y" * 2000]], 2),
        ([torch.ones(2), "x" * 2000], 1),
    ],
)
def test_message_longer_than_the_limit_is_refused_at_the_sender(values: list[Any], position: int) -> None:
    """A body that the peer would not take is refused here, naming the value; the connection never sees it."""
    with pytest.raises(SerializationError, match=r"limit is 1000 \(max_frame_bytes\)") as caught:
        messages.encode([], values, To(max_body=1000))
    assert caught.value.position == position
    large = torch.ones(5000)
    assert torch.equal(deliver([large], to=To(max_body=1000))[0], large), "tensors do not count"


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [1],
        [None, []],
        [[None], [], [], None, 2, None],
        [[None], [], [], None, "x", None],
        [[None], [], [], None, -1, None],
        [[None], [0], [], None, 0, 5],
        [[None], [0], [], None, 0, [[9, 0, 0, [1], None, 0]]],
    ],
)
def test_fields_that_are_no_message(fields: list[Any]) -> None:
    """Fields that do not belong together give ProtocolError."""
    with pytest.raises(ProtocolError):
        messages.decode(fields, [bytearray(4)], lambda wires: [])
