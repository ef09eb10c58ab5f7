"""Values as a tree and back, and bytes that are none."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import operator
import os
import pickle
import struct
import sys
import types
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.errors import ProtocolError, RpcError, RpcUsageError, SerializationError
from aiorpc.protocol.codec import Incoming, Outgoing, decode_values, encode_values
from aiorpc.protocol.identity import WorkerInfo
from aiorpc.protocol.messages import Reply, Values, read_values, write
from aiorpc.protocol.registered import Registered, register_safe
from aiorpc.protocol.trees import Mark, read_tree, write_tree
from tests import colliding
from tests.tiers import examples

Tensor = torch.Tensor


@register_safe
@dataclasses.dataclass
class Point:
    x: int
    y: Any = None

    def norm(self) -> float:
        return float(self.x)


@register_safe
class Pair(NamedTuple):
    left: Any
    right: Any


@register_safe
class Color(enum.Enum):
    RED = 1


@register_safe
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@register_safe
class Chosen(set[int]):
    """A set of a class of its own, which pickles itself as sets do."""


@register_safe
class Latest(deque[int]):
    """As `Chosen`, and so are those that follow."""


@register_safe
class Settled(frozenset[int]):
    pass


@register_safe
class Data(bytearray):
    pass


@register_safe
class Row(tuple[int, ...]):
    """It is made by what `tuple` is made by, and so is the next one of what `bytes` is."""


@register_safe
class Key(bytes):
    pass


@register_safe
class Grid(np.ndarray[Any, Any]):
    """No object of it is sent, as arrays pickle themselves by a function."""


@register_safe
class Named(dict[str, Any]):
    label = "none"


@register_safe
class Slots:
    __slots__ = ("slot",)
    slot: Any


@register_safe
class Tagged(torch.Tensor):
    """A class of tensors."""


@register_safe
class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return ("state", self.value)

    def __setstate__(self, state: Any) -> None:
        assert state[0] == "state"
        self.value = state[1]


#: The numbers of what `Counted` has made, in their order.
made: list[int] = []


@register_safe
class Counted:
    """Says when one of it is read."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        made.append(self.number)


class Unknown:
    """Nobody has registered it."""


class Evil:
    """What a pickle can make of anything."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


@register_safe
class ByFunction:
    """Registered, but it pickles itself by a function."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


register_safe(torch.nn.Linear)


def travel(value: Any) -> Any:
    """What arrives of it, in a message by itself."""
    out = Outgoing(safe=True)
    said = read_values(write(Reply(encode_values([value], out))))
    buffers = [bytearray(buffer) for buffer in out.buffers]
    return decode_values(said, Incoming(out.tensors, (), None, True), buffers)[0]


def read(*tree: Any, tensors: Any = (), buffers: Any = (), references: Any = ()) -> Any:
    """What a tree of the test's own making is read as."""
    return read_tree(msgpack.packb([mark(Mark.TUPLE), *tree]), Incoming(tensors, references, None, True), buffers)


def mark(number: int) -> msgpack.ExtType:
    return msgpack.ExtType(2, bytes((number,)))


def tensor(number: int) -> msgpack.ExtType:
    return msgpack.ExtType(1, number.to_bytes(4, "big"))


MOMENT = datetime.datetime(2026, 2, 3, 4, 5, 6, 7)
VALUES: list[Any] = [
    (),
    (1, (2, [3, {"a": (4,)}])),
    {1, "a"},
    frozenset((1, (2, 3))),
    1 << 64,
    -(1 << 200),
    1.5 - 2j,
    range(1, 9, 2),
    slice(1, None, 2),
    ...,
    OrderedDict([("b", 1), ("a", 2)]),
    deque([1, 2], 3),
    MOMENT.date(),
    MOMENT.time(),
    MOMENT,
    MOMENT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    [MOMENT.replace(fold=1), MOMENT.time().replace(fold=1)],
    datetime.timedelta(-1, 2, 3),
    decimal.Decimal("1.50"),
    uuid.UUID(int=7),
    [torch.float32, torch.Size((1, 2)), torch.Size(()), torch.device("cpu"), torch.sparse_csr, torch.channels_last],
    {(1, 2): 3, None: 4, 1.5: 5, True: 6, b"b": 7},
    ["\ud800", "", "\N{SNOWMAN}"],
    Point(1, [2, Point(3)]),
    Pair(1, (2,)),
    [Color.RED, Access.READ | Access.WRITE],
    Named(a=1),
    WorkerInfo("w", 1),
    [Point, torch.nn.Linear],
    [np.float32(1.5), np.int64(7), np.True_, np.datetime64("2026-01-02"), np.str_("text")],
    [np.str_(""), np.bytes_(b""), np.str_("a\0b\0"), np.bytes_(b"a\0"), np.str_("\ud800")],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_arrive_as_they_were(value: Any) -> None:
    """Types included."""
    arrived = travel([value])[0]
    assert type(arrived) is type(value)
    assert arrived == value
    assert repr(arrived) == repr(value)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(plain)
@settings(max_examples=examples(200), deadline=None)
def test_any_plain_value_arrives_as_it_was(value: Any) -> None:
    """Tuples stay tuples, integers have any size."""
    assert travel((value,)) == (value,)


ARRAYS = [
    np.arange(5),
    np.arange(5)[::2],
    np.zeros((0, 3)),
    np.array(7),
    np.ones((50, 50)),
    np.ones((50, 60))[:, ::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.asfortranarray(np.arange(3000.0).reshape(50, 60)),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2026-01-01"], dtype="M8[D]"),
    np.arange(3, dtype=">i4"),
    np.array([1 + 2j]),
    np.array([True, False]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_arrive_as_they_were(array: Any) -> None:
    """With their order, and writable, as they were."""
    for writeable in (True, False):
        array.flags.writeable = writeable
        arrived = travel({"a": array})["a"]
        assert (arrived.dtype, arrived.shape, arrived.flags.writeable) == (array.dtype, array.shape, writeable)
        assert arrived.flags.fnc == array.flags.fnc
        np.testing.assert_array_equal(arrived, array)


TENSORS: dict[str, Tensor] = {
    "dense": torch.arange(6.0).reshape(2, 3).t(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "coo": torch.tensor([[0, 2.0], [3, 0]]).to_sparse().coalesce(),
    "csr": torch.tensor([[0, 2.0], [3, 0]]).to_sparse_csr(),
    "csc": torch.tensor([[0, 2.0], [3, 0]]).to_sparse_csc(),
    "bsr": torch.tensor([[0, 2.0], [3, 0]]).to_sparse_bsr((1, 1)),
    "bsc": torch.tensor([[0, 2.0], [3, 0]]).to_sparse_bsc((1, 1)),
    "quantised": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
    "by channel": torch.quantize_per_channel(
        torch.arange(6.0).reshape(3, 2), torch.full((3,), 0.5), torch.zeros(3, dtype=torch.int64), 0, torch.quint8
    ),
    "packed": torch.quantize_per_channel(
        torch.arange(6.0).reshape(3, 2), torch.full((3,), 0.5), torch.zeros(3), 0, torch.quint4x2
    ),
    "subclass": torch.ones(2).as_subclass(Tagged),
}


def dense(value: Tensor) -> Tensor:
    return (
        value.dequantize() if value.is_quantized else value.to_dense() if value.layout is not torch.strided else value
    )


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_arrive_as_they_were(kind: str) -> None:
    """Of each layout."""
    sent = TENSORS[kind]
    arrived = travel((sent,))[0]
    assert (type(arrived), arrived.dtype, arrived.layout) == (type(sent), sent.dtype, sent.layout)
    assert torch.equal(dense(arrived.detach()), dense(sent.detach()))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")  # torch's own
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("grad", [False, True])
def test_nested_tensors_arrive_as_they_were(layout: torch.layout, grad: bool) -> None:
    """Part by part."""
    sent = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=layout, requires_grad=grad)
    arrived = travel((sent,))[0]
    assert (arrived.layout, arrived.requires_grad, arrived.is_leaf) == (layout, grad, True)
    for mine, theirs in zip(arrived.detach().unbind(), sent.detach().unbind(), strict=True):
        assert torch.equal(mine, theirs)


def test_tensors_keep_their_attributes_and_what_they_share() -> None:
    """One that is sent twice arrives as one."""
    sent = torch.ones(2)
    sent.label = "here"  # type: ignore[attr-defined]  # any attribute may be set
    first, second = travel([sent, {"again": sent}])
    assert first.label == "here"
    assert first is second["again"]
    storage, typed = travel((sent.untyped_storage(), sent.storage()))
    assert bytes(storage) == bytes(sent.untyped_storage())
    assert (typed.dtype, typed.tolist()) == (torch.float32, [1.0, 1.0])


def test_objects_have_the_state_that_they_say() -> None:
    """In slots, and by methods of their own."""
    sent = Slots()
    sent.slot = (1, 2)
    assert travel(sent).slot == (1, 2)
    assert travel(Stateful([1])).value == [1]
    named = Named(a=1)
    named.label = "label"
    assert travel(named).label == "label"


@pytest.mark.parametrize(
    "value",
    [
        *(Counter("hello"), Counter(), Chosen((1, 2)), Chosen(), Color.RED, Pair(1, 2)),
        *(Latest((1, 2), 3), Latest(), Settled((1, 2)), Settled(), Data(b"12"), Data()),
        *(Row((1, 2)), Row(), Key(b"12"), Key()),
    ],
)
def test_classes_that_are_called_get_what_they_ask_for(value: Any) -> None:
    """They say so themselves, by how they are pickled."""
    arrived = travel(value)
    assert arrived == value and type(arrived) is type(value)


# --- what is refused at once ------------------------------------------------------------------------------------------

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
REFUSED: dict[str, Any] = {
    "object": Unknown(),
    "class": Unknown,
    "gadget": Evil(),
    "function": os.system,
    "builtin": eval,
    "lambda": lambda: 1,
    "partial": functools.partial(os.system, "true"),
    "method": [].append,
    "module": os,
    "objects": np.array([object()]),
    "fields": np.zeros(2, dtype=[("a", "i4")]),
    "by function": ByFunction(),
    "circle": CIRCLE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_in_a_tree_is_named_at_once(name: str) -> None:
    """With its place among the values, also inside of others."""
    for value in (REFUSED[name], [(REFUSED[name],)]):
        with pytest.raises(SerializationError) as refused:
            encode_values([1, (2,), value, [torch.ones(1)]], Outgoing(safe=True))
        assert refused.value.position == 2


# --- bytes that an honest worker does not send ------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("payload", [Evil(), eval, [1, (2,)], Point(1)], ids=["gadget", "builtin", "plain", "object"])
def test_no_pickle_is_read(payload: Any, protocol: int) -> None:
    """Of whatever protocol."""
    data = pickle.dumps(payload, protocol)
    with pytest.raises((ProtocolError, SerializationError)):
        decode_values(Values([None], opaque_at=[0], pickled=data), Incoming((), (), None, True), ())


NOTHING: list[Any] = [False, [], {}, None, None, None]
ONE = torch.ones(4)
INDEX = torch.tensor([[0, 9]])


def quantised(dtype: str, size: int, *parts: Any) -> list[Any]:
    """A tree of one of that type and size; its first parts are numbers of tensors, but for a scale."""
    scaled = type(parts[1]) is float
    tensors = [tensor(number) for number in parts[: 1 if scaled else 3]]
    return [mark(Mark.QUANTISED), [mark(Mark.DTYPE), dtype], [mark(Mark.SIZE), size], *tensors, *parts[len(tensors) :]]


BAD: dict[str, list[Any]] = {
    "a name": [mark(Mark.NAMED), "os:system"],
    "a builtin": [mark(Mark.NAMED), "builtins:eval"],
    "a dotted name": [mark(Mark.NAMED), f"{__name__}:Point.norm"],
    "a name that is none": [mark(Mark.NAMED), 7],
    "an object": [mark(Mark.OBJECT), f"{__name__}:Unknown", *NOTHING],
    "an object of a function": [mark(Mark.OBJECT), "builtins:eval", *NOTHING],
    "a method replaced": [mark(Mark.OBJECT), f"{__name__}:Point", False, [], {}, {"norm": 7}, None, None],
    "a class replaced": [mark(Mark.OBJECT), f"{__name__}:Point", False, [], {}, {"__class__": 7}, None, None],
    "a dictionary replaced": [mark(Mark.OBJECT), f"{__name__}:Point", False, [], {}, {"__dict__": {}}, None, None],
    "a state that is none": [mark(Mark.OBJECT), f"{__name__}:Point", False, [], {}, 7, None, None],
    "parts of a class without": [mark(Mark.PARTS), f"{__name__}:Point", {}],
    "a tensor of no tensor": [mark(Mark.SUBCLASS), f"{__name__}:Point", tensor(0), False],
    "a tensor as an object": [mark(Mark.OBJECT), f"{__name__}:Tagged", *NOTHING],
    "a tensor's method replaced": [mark(Mark.ATTRIBUTES), tensor(0), {"add_": 7}],
    "a tensor's hooks": [mark(Mark.ATTRIBUTES), tensor(0), {"_backward_hooks": {}}],
    "a tensor with memory that numpy would look at": [
        *(mark(Mark.ATTRIBUTES), tensor(0)),
        {"__array_interface__": {"version": 3, "typestr": "|u1", "shape": [mark(Mark.TUPLE), 1], "data": b"1"}},
    ],
    "an object with a meaning to others": [
        *(mark(Mark.OBJECT), f"{__name__}:Point", False, [], {}, {"__torch_function__": 7}, None, None),
    ],
    "a dictionary with a meaning to others": [mark(Mark.ORDERED), {}, {"__array_interface__": {}}],
    "a constructor that no object of the class asks for": [
        *(mark(Mark.OBJECT), f"{__name__}:Point", True, [1], {}, None, None, None),
    ],
    "a count of a range": [
        *(mark(Mark.OBJECT), "collections:Counter", True, [[mark(Mark.RANGE), 0, 1 << 60, 1]], {}, None, None, None),
    ],
    "a count of a tensor": [
        *(mark(Mark.OBJECT), "collections:Counter", True, [tensor(0)], {}, None, None, None),
    ],
    "a set of a range": [
        *(mark(Mark.OBJECT), f"{__name__}:Chosen", True, [[mark(Mark.RANGE), 0, 1 << 60, 1]], {}, None, None, None),
    ],
    "a set of a range that does not change": [
        *(mark(Mark.OBJECT), f"{__name__}:Settled", False, [[mark(Mark.RANGE), 0, 1 << 60, 1]], {}, None, None, None),
    ],
    "a range by its name": [
        *(mark(Mark.OBJECT), f"{__name__}:Latest", True, [], {"iterable": [mark(Mark.RANGE), 0, 1 << 60, 1]}),
        *(None, None, None),
    ],
    "a row of a range": [
        *(mark(Mark.OBJECT), f"{__name__}:Row", False, [[mark(Mark.RANGE), 0, 1 << 60, 1]], {}, None, None, None),
    ],
    "as many bytes as a number says": [
        *(mark(Mark.OBJECT), f"{__name__}:Key", False, [1 << 40], {}, None, None, None),
    ],
    "as many bytes as a number with a name says": [
        *(mark(Mark.OBJECT), f"{__name__}:Data", True, [], {"source": 1 << 40}, None, None, None),
    ],
    "an array of what lay in memory before": [
        *(mark(Mark.OBJECT), f"{__name__}:Grid", False, [[mark(Mark.TUPLE), 64]], {}, None, None, None),
    ],
    "attributes of a list": [mark(Mark.ATTRIBUTES), [], {"a": 1}],
    "objects in an array": [mark(Mark.ARRAY), "|O", [1], False, True, bytes(8)],
    "fields in an array": [mark(Mark.ARRAY), "i4,O", [1], False, True, bytes(12)],
    "an array of an array": [mark(Mark.ARRAY), "(2,)i4", [1], False, True, bytes(8)],
    "a wide array": [mark(Mark.ARRAY), "<i4", [1 << 62, 4], False, True, bytes(4)],
    "a negative array": [mark(Mark.ARRAY), "<i4", [-1], False, True, bytes(4)],
    "an array of nothing": [mark(Mark.ARRAY), "|S0", [1 << 60], False, True, b""],
    "an array without its buffer": [mark(Mark.ARRAY), "<i4", [1], False, True, 7],
    "a buffer from behind": [mark(Mark.ARRAY), "<i4", [1], False, True, -1],
    "a scalar of objects": [mark(Mark.SCALAR), "|O", bytes(8)],
    "a scalar that is short": [mark(Mark.SCALAR), "<i8", b"1"],
    "a tensor that is not there": [tensor(99)],
    "a reference that is not there": [mark(Mark.REFERENCE), 7],
    "a reference from behind": [mark(Mark.REFERENCE), -1],
    "a mark that does not exist": [msgpack.ExtType(2, b"\xff")],
    "a mark that is long": [msgpack.ExtType(2, b"\x00\x00")],
    "an extension": [msgpack.ExtType(7, b"")],
    "a mark in the middle": [1, mark(Mark.SET)],
    "a set of lists": [mark(Mark.SET), []],
    "a named tuple": [mark(Mark.NAMED_TUPLE), "SequenceKey", 1],
    "a dtype": [mark(Mark.DTYPE), "load"],
    "a device": [mark(Mark.DEVICE), "nowhere:7"],
    "a device that is none": [mark(Mark.DEVICE), [mark(Mark.OBJECT), "builtins:eval", *NOTHING]],
    "a range of text": [mark(Mark.RANGE), "a", "b", "c"],
    "an error of lists": [mark(Mark.ERROR), [], [], []],
    "a size below zero": [mark(Mark.SIZE), -1],
    "too few items": [mark(Mark.COMPLEX), 1.0],
    "a storage of a list": [mark(Mark.STORAGE), []],
    "sparse indices outside": [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_coo"], [mark(Mark.SIZE), 3], False, False),
        *(tensor(1), tensor(2)),
    ],
    "sparse of a dense layout": [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "strided"], [mark(Mark.SIZE), 3], False, False),
        *(tensor(1), tensor(1), tensor(2)),
    ],
    "sparse indices that are not all there": [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_coo"], [mark(Mark.SIZE), 3], False, False),
        *(tensor(16), tensor(17)),
    ],
    "scales that are not all there": [
        *(
            mark(Mark.QUANTISED),
            [mark(Mark.DTYPE), "qint8"],
            [mark(Mark.SIZE), 4],
            tensor(4),
            tensor(12),
            tensor(18),
            0,
        ),
    ],
    "compressed indices outside": [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_csr"], [mark(Mark.SIZE), 1, 3], False, False),
        *(tensor(3), tensor(3), tensor(2)),
    ],
    "quantised of too few": [
        *(mark(Mark.QUANTISED), [mark(Mark.DTYPE), "qint8"], [mark(Mark.SIZE), 99], tensor(4), 0.5, 0),
    ],
    "packed of too few": [
        *(mark(Mark.QUANTISED), [mark(Mark.DTYPE), "quint4x2"], [mark(Mark.SIZE), 99], tensor(4), 0.5, 0),
    ],
    "quantised as something else": [
        *(mark(Mark.QUANTISED), [mark(Mark.DTYPE), "float32"], [mark(Mark.SIZE), 4], tensor(4), 0.5, 0),
    ],
    "scales of another axis": [
        *(mark(Mark.QUANTISED), [mark(Mark.DTYPE), "qint8"], [mark(Mark.SIZE), 4], tensor(4), tensor(2), tensor(2), 0),
    ],
    "nested outside": [mark(Mark.NESTED), tensor(0), tensor(5), tensor(5), tensor(6), False],
    "nested without parts": [mark(Mark.NESTED), tensor(0), tensor(10), tensor(10), tensor(11), False],
    "nested in one element": [mark(Mark.NESTED), tensor(12), tensor(13), tensor(14), tensor(15), False],
    "quantised of another shape": [
        *(mark(Mark.QUANTISED), [mark(Mark.DTYPE), "qint8"], [mark(Mark.SIZE), 2, 2], tensor(4), 0.5, 0),
    ],
    "a parameter on a device": [
        *(mark(Mark.UNINITIALIZED), True, False, [mark(Mark.DEVICE), "cuda:0"], [mark(Mark.DTYPE), "float32"]),
    ],
    "scales of a type that torch has not": quantised("qint32", 1, 19, 20, 2, 0),
    "zero points of a type that torch has not": quantised("qint32", 1, 19, 22, 2, 0),
    "scales of a shape that torch has not": quantised("qint8", 4, 4, 24, 25, 0),
    "zero points beyond the integers": quantised("qint8", 2, 26, 23, 33, 0),
    "a zero point beyond the integers": quantised("qint8", 4, 4, 0.5, 128),
    "stored integers that are not all there": quantised("qint8", 4, 27, 0.5, 0),
    "compressed indices that fall": [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_csr"], [mark(Mark.SIZE), 4, 4], False, False),
        *(tensor(28), tensor(11), tensor(29)),
    ],
    "more elements than can be counted": [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_coo"], [mark(Mark.SIZE), 1 << 62, 4], False, False),
        *(tensor(30), tensor(31)),
    ],
    "parts with a past": [mark(Mark.JAGGED), tensor(32), tensor(15), None, 1, False],
    "a tensor of a tensor that is quantised": [
        *(mark(Mark.SUBCLASS), f"{__name__}:Tagged", quantised("qint8", 4, 4, 0.5, 0), False),
    ],
    "a range of very large numbers": [
        mark(Mark.RANGE),
        0,
        [mark(Mark.INT), b"\x7f" * 2000],
        [mark(Mark.INT), b"\x7f" * 999],
    ],
    "a type by a list": [mark(Mark.DTYPE), [mark(Mark.TUPLE), 1]],
    "jagged outside": [mark(Mark.JAGGED), tensor(0), tensor(7), None, 1, False],
    "jagged that falls": [mark(Mark.JAGGED), tensor(0), tensor(8), None, 1, False],
    "jagged with long parts": [mark(Mark.JAGGED), tensor(0), tensor(9), tensor(6), 1, False],
}
PARTS = (
    *(ONE, INDEX, torch.ones(2), torch.tensor([0, 9]), torch.ones(4, dtype=torch.int8)),
    *(torch.tensor([[9]]), torch.tensor([7]), torch.tensor([0, 99]), torch.tensor([3, 1]), torch.tensor([0, 4])),
    *(torch.zeros((0, 2), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
    *(torch.ones(1).expand(4), torch.tensor([[4]]), torch.tensor([[1]]), torch.tensor([0])),
    *(torch.zeros(1, dtype=torch.int64).expand(1, 3), torch.ones(3), torch.zeros(1, dtype=torch.int64).expand(4)),
    *(
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, dtype=torch.float16),
        torch.zeros(1),
        torch.ones(1, dtype=torch.float64),
    ),
    *(
        torch.ones(2, dtype=torch.float64),
        torch.ones((4, 1), dtype=torch.float64),
        torch.zeros((4, 1), dtype=torch.int64),
    ),
    *(torch.zeros(2, dtype=torch.int8), torch.zeros(1, dtype=torch.int8).expand(4)),
    *(
        torch.tensor([0, 0, 0, 2, 0]),
        torch.zeros(0),
        torch.tensor([[0], [0]]),
        torch.ones(1),
        torch.ones(1, requires_grad=True),
    ),
    torch.tensor([0, 128]),
)


@pytest.mark.parametrize("name", BAD)
def test_what_no_honest_worker_sends_is_refused(name: str) -> None:
    """With an error that is documented, wherever it stands."""
    for tree in (BAD[name], [[BAD[name]]], [{"key": BAD[name]}]):
        with pytest.raises((ProtocolError, SerializationError)):
            read(tree, tensors=PARTS)


def test_values_of_a_sparse_tensor_have_the_strides_of_their_shape() -> None:
    """Kernels of torch take lengths from those, which no memory bounds where a size is 1."""
    values = torch.ones(4).as_strided((1, 4), (1 << 40, 1))
    tree = [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_coo"], [mark(Mark.SIZE), 4, 4, 4], False, False),
        *(tensor(0), tensor(1)),
    ]
    (made,) = read(tree, tensors=(torch.tensor([[0], [1]]), values))
    assert made.to_dense().sum() == 4


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "set of a class", "dict of a class", "nested sets"])
def test_keys_that_collide_are_refused(kind: str) -> None:
    """The table would take minutes; the error says what to send."""
    keys = [[mark(Mark.TUPLE), *key] for key in colliding.equal_hashes(14)]
    pairs = [[key, 1] for key in keys]
    trees: dict[str, Any] = {
        "set": [mark(Mark.SET), *keys],
        "frozenset": [mark(Mark.FROZENSET), *keys],
        "nested sets": [mark(Mark.SET), *([mark(Mark.FROZENSET), key] for key in keys)],
        "set of a class": [mark(Mark.OBJECT), f"{__name__}:Chosen", True, [keys], {}, None, None, None],
        "dict of a class": [mark(Mark.OBJECT), "collections:Counter", True, [], {}, None, None, pairs],
    }
    packed = (
        msgpack.packb(trees[kind])
        if kind in trees
        else b"\xdf" + struct.pack(">I", len(keys)) + b"".join(msgpack.packb(key) + b"\1" for key in keys)
    )
    with pytest.raises(SerializationError, match=r"hashes collide.*Send lists"):
        read_tree(packed, Incoming((), (), None, True))


def test_keys_of_all_kinds_are_taken() -> None:
    """Also among objects of classes, each of which is made once."""
    made.clear()
    sent = [
        Counted(1),
        {"a": Counted(2), 7: Counted(3)},
        Counted(4),
        {(1, "b"): 1.5, None: 2, 1.5: {2: {3: 4}}},
        {b"b": 5},
    ]
    (arrived,) = travel([sent])
    assert arrived[3:] == sent[3:] and arrived[1].keys() == {"a", 7}
    assert [arrived[0].number, arrived[1]["a"].number, arrived[1][7].number, arrived[2].number] == [1, 2, 3, 4]
    assert made == [1, 2, 3, 4]


def test_a_part_that_is_named_very_often_is_refused() -> None:
    """Each time it would be copied, and looked through."""
    index, values = torch.zeros((1, 50_000), dtype=torch.int64), torch.ones(50_000)
    tree = [
        *(mark(Mark.SPARSE), [mark(Mark.LAYOUT), "sparse_coo"], [mark(Mark.SIZE), 3], False, False),
        *(tensor(0), tensor(1)),
    ]
    assert len(read(*[tree] * 20, tensors=(index, values))) == 20
    with pytest.raises(SerializationError, match="much oftener"):
        read(*[tree] * 2000, tensors=(index, values))


def test_no_error_shows_what_was_sent() -> None:
    """Only what it is."""
    secret = [[["a list"] * 3]]
    for tree in ([mark(Mark.SIZE), secret], [mark(Mark.NAMED), secret], [mark(Mark.ARRAY), secret, secret, 1, 1, b""]):
        with pytest.raises(SerializationError) as refused:
            read(tree)
        assert "a list" in f"{refused.value}" and "['a list'" not in f"{refused.value}"


def test_the_product_of_very_many_sizes_is_not_taken() -> None:
    """It would take minutes for a message of a megabyte; a torch.Size is nothing but its numbers."""
    sizes = [2**63 - 1] * 2000
    with pytest.raises(SerializationError, match="a shape of 2000 dimensions"):
        read([mark(Mark.ARRAY), "<i4", sizes, False, True, bytes(4)])
    assert read([mark(Mark.SIZE), *sizes]) == (torch.Size(sizes),)


def test_what_a_sender_changes_afterwards_changes_no_indices() -> None:
    """They may have arrived in memory that it shares."""
    index = torch.tensor([[0, 2]])
    tree = [
        mark(Mark.SPARSE),
        [mark(Mark.LAYOUT), "sparse_coo"],
        [mark(Mark.SIZE), 3],
        False,
        False,
        tensor(0),
        tensor(1),
    ]
    (made,) = read(tree, tensors=(index, torch.ones(2)))
    index.fill_(1 << 40)
    assert made.coalesce().to_dense().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "head", [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_what_is_only_announced_takes_no_memory(head: bytes) -> None:
    """Lists of as many items as the tree has bytes, one inside of the other, would take thousands of times its size."""
    tree = b"\xdc\xff\xff" * 500 + head * 500 + bytes(200_000)
    before = memory()
    with pytest.raises(ProtocolError):
        read_tree(tree, Incoming((), (), None, True))
    assert memory() - before < 32 << 20


def memory() -> int:
    """The most that this process has had, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@given(st.binary(max_size=200))
@settings(max_examples=examples(400), deadline=None)
def test_any_bytes_are_a_tree_or_a_documented_error(data: bytes) -> None:
    """Nothing else is raised."""
    read_anything(data)


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_tree_with_changed_bytes_is_a_tree_or_a_documented_error(data: st.DataObject) -> None:
    """One that says much."""
    out = Outgoing(safe=True)
    tree = bytearray(write_tree([value for value in VALUES[:-2]] + list(TENSORS.values()), out))
    for _ in range(data.draw(st.integers(1, 3))):
        tree[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(0, 255))
    read_anything(bytes(tree), out.tensors, out.buffers)


def read_anything(tree: bytes, tensors: Any = (ONE,), buffers: Any = ()) -> None:
    try:
        read_tree(tree, Incoming(tensors, (), None, True), buffers)
    except RpcError as error:
        assert type(error) in (ProtocolError, SerializationError)  # it may also raise nothing


def test_reading_imports_nothing() -> None:
    """Not even the module of a name."""
    before = set(sys.modules)
    with pytest.raises(SerializationError):
        read([mark(Mark.NAMED), "antigravity:fly"])
    assert set(sys.modules) == before


# --- what may be named in trees, and what may not be registered -------------------------------------------------------


class Plain:
    """A class of a program."""


def shout(text: str) -> str:
    return text.upper()


@pytest.fixture
def registry() -> Registered:
    """A registry of the test's own."""
    return Registered()


@pytest.fixture
def other() -> Iterator[Any]:
    """A module that defines a class, twice if need be."""
    made: Any = types.ModuleType("aiorpc_test_registered")
    sys.modules[made.__name__] = made
    try:
        yield made
    finally:
        del sys.modules[made.__name__]


def define(module: Any) -> type:
    return type("Thing", (), {"__module__": module.__name__, "__qualname__": "Thing"})


def test_what_is_registered_is_found_under_its_one_name(registry: Registered) -> None:
    """Exactly that object, by exactly that name."""
    registry.add(Plain)
    registry.add(shout)
    name = f"{__name__}:Plain"
    assert (registry.name(Plain), registry.find(name), registry.find_class(name)) == (name, Plain, Plain)
    assert registry.find(f"{__name__}:shout") is shout


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        f"{__name__}:Plain.__init__",
        f"{__name__}:Plain.__class__",
        f"{__name__}:Plain.__init__.__globals__",
        f"{__name__}.Plain",
        f"{__name__}:",
        ":Plain",
        "",
        None,
        7,
        b"os:system",
        ("os", "system"),
    ],
)
def test_no_other_name_is_found(registry: Registered, name: object) -> None:
    """No attribute is walked from what is registered, and nothing is imported."""
    registry.add(Plain)
    before = set(sys.modules)
    with pytest.raises(SerializationError, match="not registered"):
        registry.find(name)
    with pytest.raises(SerializationError, match="not registered"):
        registry.find("antigravity:fly")
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "thing",
    [
        type,
        types.FunctionType,
        types.CodeType,
        types.MethodType,
        types.ModuleType,
        functools.partial,
        functools.partialmethod,
        operator.attrgetter,
        operator.methodcaller,
        type("Meta", (type,), {}),
        lambda: 1,
        functools.partial(shout, "a"),
        Plain(),
        "os.system",
        None,
        sys,
    ],
)
def test_what_could_name_anything_is_refused(registry: Registered, thing: Any) -> None:
    """Also instances, and what no other worker could find."""
    with pytest.raises(RpcUsageError):
        registry.add(thing)


def test_two_classes_of_one_name_are_refused(registry: Registered, other: Any) -> None:
    """The error names both."""
    other.Thing = first = define(other)
    registry.add(first)
    with pytest.raises(RpcUsageError, match="registered twice"):
        registry.add(define(other))
    assert registry.find(f"{other.__name__}:Thing") is first
