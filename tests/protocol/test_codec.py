"""Values to fields and back, with tensors and buffers handed over as a channel would."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import inspect
import math
import pathlib
import sys
import threading
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.errors import ProtocolError, SerializationError
from aiorpc.protocol.codec import (
    Incoming,
    Outgoing,
    decode_values,
    dumps,
    encode_values,
    loads,
)
from aiorpc.protocol.messages import Reply, Values, read_values, write
from aiorpc.protocol.packing import pack, unpack
from aiorpc.protocol.reference_messages import PassedReference, ReferenceId


def travel(*values: Any) -> list[Any]:
    """What arrives when these values are sent in one message."""
    out = Outgoing()
    said = again(encode_values(list(values), out))
    buffers = [bytearray(buffer) for buffer in out.buffers]
    return decode_values(said, Incoming(out.tensors, ()), buffers)


def again(values: Values) -> Values:
    """What the other side reads of them."""
    return read_values(write(Reply(values)))


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Flag(enum.Flag):
    A = 1
    B = 2


class Text(str): ...


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Config:
    name: str
    layers: list[int]
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: int


SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    1 << 64,
    -(1 << 63) - 1,
    10**400,
    0.0,
    -0.0,
    1e308,
    5e-324,
    float("inf"),
    -float("inf"),
    "",
    "text",
    "größer 中文 🎉",
    "a\0b",
    "lone \ud800 surrogate",
    "x" * 100_000,
    b"",
    b"\0\xff",
    b"y" * 100_000,
    1 + 2j,
    ...,
    NotImplemented,
]

OBJECTS = [
    [],
    [1, [2, [3]]],
    (),
    (1, (2,), [3]),
    {},
    {"a": 1, 2: "b", None: (1,), (1, 2): {3}},
    set(),
    {1, 2},
    {None},
    frozenset({1, 2}),
    bytearray(b"bytes"),
    range(3, 30, 4),
    slice(1, None, 2),
    Color.RED,
    Color.BLUE,
    Level.LOW,
    Flag.A | Flag.B,
    Text("text"),
    Point(1, [2]),
    Config("c", [1, 2]),
    Frozen(3),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.deque([1, 2], maxlen=5),
    collections.Counter("abca"),
    collections.defaultdict(list, {"a": [1]}),
    types.SimpleNamespace(a=1),
    decimal.Decimal("1.10"),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    datetime.timedelta(seconds=1.5),
    uuid.UUID(int=5),
    pathlib.PurePosixPath("/a/b"),
    int,
    Config,
    torch.float32,
    torch.device("cpu"),
    torch.Size([1, 2]),
    len,
    math.sqrt,
    Config.__init__,
    str.upper,
    torch.Tensor.add_,
]


@pytest.mark.parametrize("value", [*SCALARS, *OBJECTS], ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_values_arrive_equal_and_of_their_type(value: Any) -> None:
    """Each kind of value arrives as itself: same type, same value, whether alone or inside of a container."""
    (alone,), (inside,) = travel(value), travel([value])
    for arrived in (alone, inside[0]):
        assert type(arrived) is type(value)
        assert arrived == value
        assert repr(arrived) == repr(value)  # tells 0.0 from -0.0 and True from 1


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(bytearray, st.binary(max_size=4))
    ),
    max_leaves=8,
)


@given(st.lists(values, max_size=5))
def test_any_nested_values_arrive(sent: list[Any]) -> None:
    """Whatever plain Python builds, a whole list of arguments of it arrives equal, type for type."""
    arrived = travel(*sent)
    assert arrived == sent
    assert repr(arrived) == repr(sent)


@given(st.lists(values, min_size=1, max_size=4))
def test_sent_values_are_not_touched(sent: list[Any]) -> None:
    """Encoding changes none of the caller's values, nor the list they came in."""
    before, ids = repr(sent), [id(value) for value in sent]
    encode_values(sent, Outgoing())
    assert repr(sent) == before
    assert [id(value) for value in sent] == ids


def test_shared_objects_stay_shared() -> None:
    """An object that two arguments refer to is one object at the receiver, too."""
    shared = [1]
    first, second, inside = travel(shared, shared, {"key": shared})
    assert first is second
    assert inside["key"] is first


def test_cycles_arrive() -> None:
    """A list that contains itself, and two objects that refer to each other."""
    cycle: list[Any] = [1]
    cycle.append(cycle)
    left, right = types.SimpleNamespace(), types.SimpleNamespace()
    left.other, right.other = right, left
    arrived, pair = travel(cycle, left)
    assert arrived[1] is arrived
    assert pair.other.other is pair


# --- functions and classes --------------------------------------------------------------------------------------------


def test_lambdas_and_closures_travel_by_value() -> None:
    """Functions that no name leads to arrive with what they close over."""
    step = 3

    def recursive(n: int) -> int:
        return 0 if n == 0 else step + recursive(n - 1)

    class Local:
        def value(self) -> int:
            return step

    add, loop, local, part = travel(lambda x: x + step, recursive, Local(), functools.partial(recursive, 2))
    assert add(1) == 4
    assert loop(2) == 6
    assert local.value() == 3
    assert part() == 6


def test_a_function_of_no_module_travels_without_a_look_into_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that ``exec`` makes: a module that makes up what it is asked for is not asked for its name."""
    asked: list[str] = []

    class Inventive(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return object()

    monkeypatch.setitem(sys.modules, "inventive", Inventive("inventive"))
    space: dict[str, Any] = {"factor": 3}
    exec("def times(x): return factor * x\ndef twice(x): return times(times(x))", space)
    times, twice = travel(space["times"], space["twice"])
    assert (times(2), twice(2), times.__name__, times.__module__) == (6, 18, "times", None)
    assert travel(times)[0](5) == 15
    assert not {"times", "twice"}.intersection(asked)


MAIN = """
import threading
lock = threading.Lock()
def f():
    return lock
class C:
    def m(self):
        return lock
"""


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A main module with a lock in its globals, as scripts have."""
    module = types.ModuleType("__main__")
    exec(MAIN, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    return module


def test_functions_of_the_same_main_go_by_name(main_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same main module on both sides its locks do not matter, and a spawned child finds it as __mp_main__."""
    out = Outgoing(same_main=True)
    data = dumps([main_module.f, main_module.C, main_module.C()], out)
    monkeypatch.setitem(sys.modules, "__mp_main__", main_module)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    function, kind, made = loads(data, Incoming((), ()))
    assert function is main_module.f
    assert kind is main_module.C
    assert made.m() is main_module.lock


def test_functions_of_another_main_go_by_value(main_module: Any) -> None:
    """Without it, a function that needs a lock cannot travel, and says so."""
    with pytest.raises(SerializationError, match=r"cannot be serialised.*lock"):
        encode_values([main_module.f], Outgoing(same_main=False))


ANNOTATED = """
import dataclasses
lock = __import__("threading").Lock()
def add(a: Absent, b: "Absent" = 2, *, c: int = 3) -> Absent.Other:
    return a + b + c
add.mark = "kept"
def double(a: int) -> list[int]:
    return [a, a]
@dataclasses.dataclass
class Data:
    number: int
    missing: Absent | None = None
    def plus(self, other: Absent) -> int:
        return self.number + other
class Plain:
    width: int
    height: "int"
"""
LAZY = pytest.mark.skipif(sys.version_info < (3, 14), reason="Python looks annotations up where they stand until 3.14")


def from_annotated(name: str) -> Any:
    """That function or class of a program on another worker, whose own is not here any more."""
    module = types.ModuleType("program_with_annotations")
    exec(compile(ANNOTATED, module.__name__, "exec", dont_inherit=True), vars(module))  # unlike this module
    out = Outgoing()
    data = dumps(getattr(module, name), out)
    del module
    gc.collect()  # or the class that is there already is found again
    return loads(data, Incoming(out.tensors, ()))


@LAZY
def test_functions_travel_by_value_whatever_their_annotations_name() -> None:
    """As what is imported for type checkers alone. Such annotations arrive as texts, and all others as they are."""
    add = from_annotated("add")
    assert (add(1), add(1, c=4), add.mark, add.__qualname__) == (6, 7, "kept", "add")
    assert add.__annotations__ == {"a": "Absent", "b": "Absent", "c": "int", "return": "Absent.Other"}
    assert from_annotated("double").__annotations__ == {"a": int, "return": list[int]}


@LAZY
def test_classes_travel_by_value_with_their_annotations() -> None:
    """Nor do those of a dataclass, which keeps what stands for the missing type, take all of its module with them."""
    assert from_annotated("Plain").__annotations__ == {"width": int, "height": "int"}
    data = from_annotated("Data")
    assert data.__annotations__ == {"number": "int", "missing": "Absent | None"}
    assert data(1).plus(2) == 3
    assert dataclasses.asdict(data(1)) == {"number": 1, "missing": None}
    missing: Any = dataclasses.fields(data)[1].type
    assert missing.__forward_arg__ == "Absent | None"


# --- what cannot travel -----------------------------------------------------------------------------------------------


def double(x: Any) -> Any:
    return 2 * x


class Refuses:
    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (threading.Lock(), r"\(a lock\) cannot be serialised: .*lock"),
        (Refuses(), r"\(a Refuses\) cannot be serialised: not me"),
        ([1, {"deep": Refuses()}], r"\(a list\) cannot be serialised at \[1\]\['deep'\] \(a Refuses\): not me"),
        ((item for item in "x"), r"\(a generator\) cannot be serialised"),
        (inspect.currentframe(), r"\(a frame\) cannot be serialised"),
    ],
)
def test_unserialisable_value_is_named(value: Any, expected: str) -> None:
    """The error has the position and type of the culprit, not of its innocent neighbours, and the cause."""
    with pytest.raises(SerializationError, match=expected) as caught:
        encode_values([1, (2,), torch.ones(2), value, [3]], Outgoing())
    assert caught.value.position == 3
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None


def test_what_was_compiled_beside_its_function_is_told_how_to_go() -> None:
    """Its name leads to what it was made of, and it cannot be pickled: the error says what to write."""
    compiled = torch.compile(double, backend="eager")
    with pytest.raises(
        SerializationError, match=r"cannot be serialised.*: .*; what torch.compile gives goes by its name"
    ):
        encode_values([compiled], Outgoing())


def test_too_deep_nesting_is_a_serialization_error() -> None:
    """A structure deeper than the interpreter's stack is refused and nothing else breaks."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(SerializationError, match="recursion"):
            encode_values([deep], Outgoing())
    finally:
        while deep:  # level by level: freeing it at once would need a deep stack, too
            deep = deep.pop()
    assert travel([1]) == [[1]]


# --- numpy ------------------------------------------------------------------------------------------------------------

ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "matrix": lambda: np.arange(12, dtype=np.float32).reshape(3, 4),
    "fortran": lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
    "transposed": lambda: np.arange(12).reshape(3, 4).T,
    "strided": lambda: np.arange(20)[::3],
    "reversed": lambda: np.arange(5)[::-1],
    "empty": lambda: np.empty((0, 3)),
    "zero-dim": lambda: np.array(5.0),
    "bool": lambda: np.array([True, False]),
    "complex": lambda: np.array([1 + 2j]),
    "structured": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "object": lambda: np.array([1, "two", None], dtype=object),
    "text": lambda: np.array(["a", "bcd"]),
    "datetime": lambda: np.array(["2024-01-01"], dtype="datetime64[D]"),
    "large": lambda: np.arange(100_000),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_writable(name: str) -> None:
    """Arrays of all layouts and dtypes arrive equal, of the same dtype, and writable."""
    sent = ARRAYS[name]()
    (arrived,) = travel(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.tolist() == sent.tolist()
    assert arrived.flags.writeable


# --- tensors inside of values -----------------------------------------------------------------------------------------


# --- broken messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x01", b"\x80", b"\x92\x01", b"\x81\x90\x01", b"\xff\xff", b"\x91" * 5000]
)
def test_body_that_is_no_message(body: bytes) -> None:
    """What is no msgpack list is a ProtocolError, whatever msgpack calls it."""
    with pytest.raises(ProtocolError):
        unpack(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"tensors_at": [5]},
        {"tensors_at": ["a"]},
        {"tensors_at": 1},
        {"tensors_at": [[]]},
        {"opaque_at": [0], "pickled": 5},
        {"opaque_at": [0], "pickled": "text"},
        {"opaque_at": [0, 1], "pickled": dumps((1,), Outgoing())},
        {"opaque_at": [3], "pickled": dumps((1,), Outgoing())},
        {"opaque_at": 1, "pickled": dumps((1,), Outgoing())},
        {"opaque_at": [0], "pickled": dumps(1, Outgoing())},
        {"opaque_at": [0]},
    ],
)
def test_positions_that_do_not_fit(fields: dict[str, Any]) -> None:
    """Positions and pickles that do not belong together are a ProtocolError."""
    with pytest.raises(ProtocolError):
        decode_values(again(Values([None], **fields)), Incoming([torch.ones(1)], ()), [])


def test_reference_without_a_place() -> None:
    """A position that no value has is a ProtocolError."""
    said = again(Values([None], references=[PassedReference(ReferenceId(0, 1), 0, ReferenceId(1, 1), 2)]))
    with pytest.raises(ProtocolError, match="no place"):
        decode_values(said, Incoming([], ["one"]), [])


def test_many_threads_pack_at_once() -> None:
    """Packers are shared between threads one at a time: no message gets parts of another."""
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(300):
            message = [number, str(number) * 50, [number] * 20]
            if unpack(pack(message)) != message:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_code_that_another_version_of_python_has_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is made, whoever has brought it; both versions are named."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("aiorpc.protocol.codec._MINOR", "3.99")
        data = dumps(lambda: 1, Outgoing())
    with pytest.raises(SerializationError, match=r"Python 3\.99, and this is 3\.1"):
        loads(data, Incoming((), ()))
