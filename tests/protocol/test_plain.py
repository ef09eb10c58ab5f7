"""Pickles of plain values: which are, and what others would cost."""

from __future__ import annotations

import io
import math
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.protocol.plain import names_nothing
from tests import colliding
from tests.tiers import examples

SHARED: list[Any] = [1, 2.5, "a"]
CIRCLE: list[Any] = [1]
CIRCLE.append(CIRCLE)
KEYS: dict[Any, Any] = {None: 0, True: 1, 7: 2, 1.5: 3, "a": 4, b"b": 5, (1, (2, "c")): 6, frozenset((1, 2)): 7}


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 10**400, -(1 << 31), 1.5, "put", "half \ud800", b"rrrr", bytearray(b"b"), [1, "p1\n"]),
        *({"a": [1.5, None]}, (), {1, 2}, frozenset(), frozenset((1, (2,))), [(), ()], [[], [], {}], KEYS),
        (SHARED, [SHARED, {"a": SHARED}], SHARED, CIRCLE[:1]),
        [{"observation": 1.0, "reward": 2, "done": False}] * 3000,
        [dict.fromkeys(["observation", "reward"], number) for number in range(3000)],
        ["a long text" * 20] * 1000,
        {number: (number, number % 4) for number in range(5000)},
        [*range(100_000)],
        colliding.nested(10),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_name_nothing(value: Any, protocol: int) -> None:
    """As they are pickled here; protocol 4 has no opcode for a bytearray, and names its class."""
    named = protocol == 4 and type(value) is bytearray
    assert names_nothing(pickle.dumps((value, value), protocol)) is not named
    assert names_nothing(pickle.dumps(value, protocol)) is not named


def test_no_values_name_nothing() -> None:
    """There is no pickle of them."""
    assert names_nothing(None)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.frozensets(st.integers() | st.text())
        | inner.map(lambda value: [value, value])
    ),
)


@given(ANY)
@settings(max_examples=examples(200), deadline=None)
def test_any_plain_value_names_nothing(value: Any) -> None:
    """Whatever is in it, and is in it twice."""
    assert names_nothing(pickle.dumps(value, 5))


TUPLES = [b"(" + b"".join(b"J" + struct.pack("<i", each) for each in key) + b"t" for key in colliding.equal_hashes(14)]
BAD: dict[str, bytes] = {
    "a name": pickle.dumps(math.floor, 5),
    "a name of protocol 0": pickle.dumps(math.floor, 0),
    "an extension": b"\x80\x05\x82\x01.",
    "a call": b"\x80\x05N)R.",
    "a persistent id": b"\x80\x05NQ.",
    "a number of an object": b"\x80\x04Nr" + struct.pack("<I", 1 << 28) + b".",
    "a number of an object in text": b"\x80\x04Np268435456\n.",
    "a number of an object in a byte": b"\x80\x04Nq\xff.",
    "a version that there is not": b"\x80\x06N.",
    "a frame that is announced": b"\x80\x05\x95" + struct.pack("<Q", 1 << 63) + b"N.",
    "no end": b"\x80\x04N",
    "nothing": b"",
    "more behind the end": pickle.dumps(1, 5) + b"N",
    "two values": b"\x80\x05NN.",
    "a mark that stays": b"\x80\x05(N.",
    "a list that is announced": b"\x80\x05X\xff\xff\xff\x7f.",
    "bytes that are announced": b"\x80\x05\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "a number of fewer than no bytes": b"\x80\x05\x8b\xff\xff\xff\xff.",
    "a key by DUP": b"\x80\x05(N" + b"2\x86" * 40 + b"Nd" + b"\x85.",
    "nested tuples": b"\x80\x05N" + b"\x85" * 1_000_000 + b".",
    "a key of nested tuples": b"\x80\x05}N" + b"\x85" * 1_000_000 + b"Ns.",
    "nested lists": b"\x80\x05" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "pairs of pairs": pickle.dumps(colliding.nested(60), 5),
    "keys of pairs of pairs": b"\x80\x05}\x94N\x85\x94"
    + b"".join(b"h%ch%c\x86\x94" % (at + 1, at + 1) for at in range(60))
    + b"Ns.",
    "a text very often": pickle.dumps(["a text" * 10_000] * 20_000, 5),
    "a circle": pickle.dumps(CIRCLE, 5),
    "a circle of dicts": b"\x80\x05}\x94Nh\x00s.",
    "a list that grows after it was referred to": b"\x80\x05(]\x94h\x00e.",
    "items for a tuple": b"\x80\x05)Na.",
    "items for what was referred to": b"\x80\x05]\x94h\x00Na\x86.",
    "what is not there": b"\x80\x05h\x07.",
    "from behind the mark": b"\x80\x05N(\x85.",
    "keys of one hash": b"\x80\x05}(" + b"N".join(TUPLES) + b"Nu.",
    "members of one hash": b"\x80\x05\x8f(" + b"".join(TUPLES) + b"\x90.",
    "frozen members of one hash": b"\x80\x05(" + b"".join(TUPLES) + b"\x91.",
    "keys one by one": b"\x80\x05}"
    + b"".join(pickle.dumps(number, 2)[2:-1] + b"Ns" for number in colliding.multiples(15_000))
    + b".",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_more_than_plain_values(name: str) -> None:
    """It is refused before it is unpickled: some of these would take hours for that, or end the process."""
    assert not names_nothing(BAD[name])


@pytest.mark.parametrize("name", [name for name in BAD if "number of" in name or "announced" in name])
def test_what_is_only_announced_takes_no_memory(name: str) -> None:
    """Two of these would take gigabytes for an empty value."""
    tracemalloc.start()
    try:
        assert not names_nothing(BAD[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def changed(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """With other bytes at some places."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        made[draw(st.integers(0, len(made) - 1))] = draw(st.integers(0, 255))
    return bytes(made)


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_what_names_nothing_is_unpickled_to_what_it_says(data: st.DataObject) -> None:
    """Whatever bytes are changed: what passes here has the unpickler look for no class and no function."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name} was looked for")

    said = changed(pickle.dumps([KEYS, [SHARED, SHARED], {1, 2}, "text", 1 << 70], 5), data.draw)
    if names_nothing(said):
        Unpickler(io.BytesIO(said)).load()
