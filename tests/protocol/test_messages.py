"""The messages of the wire: their bytes are pinned, each is read as it was written, and nothing else is read."""

from __future__ import annotations

import contextlib
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.protocol import reference_messages
from aiorpc.protocol.families import Family
from aiorpc.protocol.frames import FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import (
    PIPE,
    SEALED,
    VERSION,
    Challenge,
    Hello,
    Introduction,
    read_challenge,
    read_hello,
    read_introduction,
    refusal,
)
from aiorpc.protocol.messages import (
    CLASSES,
    Ack,
    ByName,
    Call,
    Cancel,
    ChannelMessage,
    Chunk,
    Credit,
    Error,
    Fetch,
    Goodbye,
    Item,
    Method,
    ObjectMethod,
    Parcel,
    Parting,
    Recorded,
    Release,
    Reply,
    TensorEntry,
    Values,
    read,
    with_function,
    without_function,
    write,
    write_chunk,
)
from aiorpc.protocol.packing import pack, unpack
from aiorpc.protocol.reference_messages import (
    Abandon,
    Add,
    Added,
    Ask,
    ChildOk,
    Del,
    Gone,
    Never,
    PassedReference,
    ReferenceId,
)
from aiorpc.protocol.trace_context import MOST_CHARACTERS, MOST_MEMBERS, TraceContext, valid
from tests import colliding, wire
from tests.documents import WIRE, wire_differences

NOTHING = Values([])
PASSED = PassedReference(rref=ReferenceId(1, 2, 6), owner=3, fork=ReferenceId(4, 5), position=None)
# By their names: a field that is declared at another place has to be seen in the bytes.
VALUES = Values(
    values=[None, 1, "t", b"b"],
    tensors_at=[0],
    opaque_at=[3],
    pickled=b"P",
    buffers=2,
    table=[TensorEntry(buffer=9, offset=8, dtype=7, shape=[6], strides=[5], flags=4, target="t")],
    references=[PASSED],
    gradients=Recorded(context=7, number=8, places=[0], behind=[[1], None]),
)
PLAIN_CALL = Call(function=1, payload=NOTHING)
FULL_CALL = Call(
    function=1,
    payload=VALUES,
    names=["n"],
    remaining=0.5,
    origin=(2, 3),
    trace=TraceContext("p", "s"),
    autograd=3,
    credit=4,
    creates=ReferenceId(5, 6, 7),
)
FULL_ERROR = Error(type_name="m.E", message="t", traceback="u", worker="w", pickled=b"P", again=True)

# A message, and its body in hexadecimal digits.
GOLDEN: list[tuple[Any, str]] = [
    (PLAIN_CALL, "9a019990909090c000c090c0c0c0c0c0c0c0c0c0"),
    (
        replace(PLAIN_CALL, function=ByName(number=1, name="m:f")),
        "9a930101a36d3a669990909090c000c090c0c0c0c0c0c0c0c0c0",
    ),
    (
        replace(PLAIN_CALL, function=Method(worker=2, number=300, key=4, name="run")),
        "9a950202cd012c04a372756e9990909090c000c090c0c0c0c0c0c0c0c0c0",
    ),
    (
        replace(PLAIN_CALL, function=ObjectMethod(object="buffer", name="put")),
        "9a9303a6627566666572a37075749990909090c000c090c0c0c0c0c0c0c0c0c0",
    ),
    (
        replace(PLAIN_CALL, function=Fetch(worker=2, number=300, key=4)),
        "9a940402cd012c049990909090c000c090c0c0c0c0c0c0c0c0c0",
    ),
    (
        replace(PLAIN_CALL, function=None, payload=Values([None], opaque_at=[0], pickled=b"N.")),
        "9ac09991c090909100c4024e2e00c090c0c0c0c0c0c0c0c0c0",
    ),
    (replace(PLAIN_CALL, names=["k"], payload=Values([1, -2])), "9a01999201fe909090c000c090c091a16bc0c0c0c0c0c0c0"),
    (replace(PLAIN_CALL, remaining=2.5), "9a019990909090c000c090c0c0cb4004000000000000c0c0c0c0c0c0"),
    (replace(PLAIN_CALL, trace=TraceContext("p", "s")), "9a019990909090c000c090c0c0c0c092a170a173c0c0c0c0"),
    (replace(PLAIN_CALL, origin=(3, 70000)), "9a019990909090c000c090c0c0c09203ce00011170c0c0c0c0c0"),
    (
        replace(
            PLAIN_CALL, autograd=1 << 48, payload=Values([None], tensors_at=[0], gradients=Recorded(1, 2, [0], [[]]))
        ),
        "9a019991c090910090c000c09094010291009190c0c0c0c0cf0001000000000000c0c0c0",
    ),
    (replace(PLAIN_CALL, credit=16), "9a019990909090c000c090c0c0c0c0c0c010c0c0"),
    (replace(PLAIN_CALL, creates=ReferenceId(0, 1, 2)), "9a019990909090c000c090c0c0c0c0c0c0c093000102c0"),
    (replace(PLAIN_CALL, once=(300, 1)), "9a019990909090c000c090c0c0c0c0c0c0c0c092cd012c01"),
    (
        FULL_CALL,
        "9a019994c001a174c0919203c4016291009103c401500291970908079106910504a1749194930102060393040500c09407089100929101c091a16ecb3fe000000000000092020392a170a173030493050607c0",
    ),
    (Reply(NOTHING), "919990909090c000c090c0"),
    (
        Reply(Values([None, True, False, -1, 1 << 40, 1.5, "é", b"\0"])),
        "919998c0c3c2ffcf0000010000000000cb3ff8000000000000a2c3a9c0919207c401009090c000c090c0",
    ),
    (
        Reply(Values([None], tensors_at=[0], table=[TensorEntry(-2, bytes(8), 6, [2], None, 0, None)])),
        "919991c090910090c0009197fec4080000000000000000069102c000c090c0",
    ),
    (Reply(Values([None], opaque_at=[0], pickled=b"\x80\x05N.", buffers=1)), "919991c090909100c40480054e2e01c090c0"),
    (
        Reply(Values([None], references=[PassedReference(ReferenceId(1, 2), 1, ReferenceId(1, 3), 0)])),
        "919991c0909090c000c0919493010200019301030000c0",
    ),
    (
        Reply(VALUES),
        "919994c001a174c0919203c4016291009103c401500291970908079106910504a1749194930102060393040500c09407089100929101c0",
    ),
    (Item(Values(["item"])), "919991a46974656d909090c000c090c0"),
    (
        Item(VALUES),
        "919994c001a174c0919203c4016291009103c401500291970908079106910504a1749194930102060393040500c09407089100929101c0",
    ),
    (replace(FULL_ERROR, message="wrong", pickled=None), "96a36d2e45a577726f6e67a175a177c0c3"),
    (FULL_ERROR, "96a36d2e45a174a175a177c40150c3"),
    (Cancel(False), "91c2"),
    (Cancel(True), "91c3"),
    (Goodbye(""), "91a0"),
    (Goodbye("KeyError"), "91a84b65794572726f72"),
    (Parting(), "90"),
    (Ack(), ""),
    (Release([(1, 4096, 64, 7), (0, 128, 1 << 20, 8)]), "91929401cd100040079400cc80ce0010000008"),
    (Credit(0), "9100"),
    (Credit(1000), "91cd03e8"),
    (ChannelMessage(channel=1, fields=["tag", 7]), "920192a374616707"),
    (
        Parcel(kind=int(Kind.REPLY), wires=[(1, [0, 4096, 65536, 2, 0]), (3, [0])], body=b"body"),
        "93059292019500cd1000ce00010000020092039100c404626f6479",
    ),
    (Chunk(offset=1 << 20, size=(1 << 40) + 5), "00001000000000000500000000010000"),
]

HELLO = Hello(introduction=b"\x92\x01\x02", proof=b"proof")
INTRODUCTION = Introduction(
    VERSION, record=["name", 3], nonce=bytes(range(32)), whom=b"w" * 32, known=b"k" * 32, link=7, flags=PIPE
)
CHALLENGE = Challenge(VERSION, nonce=bytes(range(32)), flags=SEALED)
RREF, FORK = ReferenceId(worker=1, number=2, key=(1 << 64) - 1), ReferenceId(worker=3, number=4)
REFERENCES: list[tuple[reference_messages.Message, str]] = [
    (Add(rref=RREF, fork=FORK), "93a3414444930102cfffffffffffffffff93030400"),
    (Added(rref=RREF, fork=FORK), "93a54144444544930102cfffffffffffffffff93030400"),
    (Gone(rref=RREF, fork=FORK, reason="why"), "94a4474f4e45930102cfffffffffffffffff93030400a3776879"),
    (ChildOk(child=RREF), "92a84348494c445f4f4b930102cfffffffffffffffff"),
    (Del(rref=RREF, fork=FORK), "93a344454c930102cfffffffffffffffff93030400"),
    (Ask(rref=RREF), "92a341534b930102cfffffffffffffffff"),
    (Never(rref=RREF), "92a54e45564552930102cfffffffffffffffff"),
    (
        Abandon(rref=RREF, fork=FORK, coming=True, reason="why"),
        "95a74142414e444f4e930102cfffffffffffffffff93030400c3a3776879",
    ),
]

SAMPLES = [message for message, _ in GOLDEN]


def kind_of(message: Any) -> Kind:
    """The kind of the frame that a message travels in."""
    (kind,) = [kind for kind, declared in CLASSES.items() if declared is type(message)]
    return Kind(kind)


def written(message: Any) -> bytes:
    """Its body."""
    return write_chunk(message) if type(message) is Chunk else write(message)


def shown(message: Any) -> str:
    """Its name in the list of tests."""
    return type(message).__name__ if type(message) in CLASSES.values() else ""


# --- golden bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "digits"), GOLDEN, ids=shown)
def test_a_message_has_these_bytes(message: Any, digits: str) -> None:
    """Written so, and read back as what it was."""
    assert written(message).hex() == digits
    assert same(read(kind_of(message), bytes.fromhex(digits)), message)


def same(arrived: Any, message: Any) -> bool:
    """Whether a message has arrived as it was sent; one kind of sequence may stand for another."""
    return type(arrived) is type(message) and as_lists(arrived) == as_lists(message)


def as_lists(value: Any) -> Any:
    """A message as its fields, with lists in place of tuples, of whose two kinds msgpack knows one."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        return [*([] if tag is None else [tag]), *(as_lists(getattr(value, name)) for name in value.__struct_fields__)]
    return [as_lists(part) for part in value] if isinstance(value, (tuple, list)) else value


def test_each_kind_has_golden_bytes() -> None:
    """None is forgotten, be it a message, a form of a call's function, or a message of reference counting."""
    handshake = {Kind.HELLO, Kind.PROOF, Kind.REFUSED, Kind.WELCOME}
    assert {kind_of(message) for message in SAMPLES} | handshake | {Kind.REFERENCE} == set(Kind)
    functions = {type(message.function) for message in SAMPLES if type(message) is Call}
    assert functions == {int, ByName, Method, ObjectMethod, Fetch, type(None)}
    assert {type(message) for message, _ in REFERENCES} == set(reference_messages.MESSAGES.classes.values())


@pytest.mark.parametrize(("message", "digits"), REFERENCES, ids=lambda part: type(part).__name__)
def test_a_reference_message_has_these_bytes(message: reference_messages.Message, digits: str) -> None:
    """As those of the runtime."""
    assert pack(reference_messages.MESSAGES.write(message)).hex() == digits
    assert reference_messages.read(unpack(bytes.fromhex(digits))) == message


def test_a_handshake_has_these_bytes() -> None:
    """HELLO and what is inside, and REFUSED: a worker of another version has to understand them."""
    nonce = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    hello, introduction = (
        "92c403920102c40570726f6f66",
        f"970792a46e616d6503c420{nonce}c420{'77' * 32}c420{'6b' * 32}0701",
    )
    assert pack(HELLO).hex() == hello
    assert read_hello(bytes.fromhex(hello)) == HELLO
    assert pack(INTRODUCTION).hex() == introduction
    assert as_lists(read_introduction(bytes.fromhex(introduction))) == as_lists(INTRODUCTION)
    assert pack(CHALLENGE).hex() == f"9307c420{nonce}02"
    assert read_challenge(pack(CHALLENGE)) == CHALLENGE
    assert b"".join(map(bytes, refusal("no"))).hex() == "0000000000000000020000000000000003a16e6f"


def test_a_worker_of_another_version_is_told_so() -> None:
    """Whatever else its introduction has, and however many fields."""
    for fields in ([2], [2, "more", "of", "it", 1, 2], [-(1 << 63), {}]):
        with pytest.raises(PeerRefused, match=rf"it speaks version .*, we speak {VERSION}"):
            read_introduction(msgpack.packb(fields))


FRAMES: list[tuple[Kind, int, bytes, tuple[bytes, ...], str]] = [
    (Kind.CREDIT, 5, write(Credit(3)), (), "0500000000000000020000000000000009a19103"),
    (Kind.RELEASE, 0, write(Release([(1, 4096, 64, 7)])), (), "0000000000000000090000000000000011a191919401cd10004007"),
    (Kind.CANCEL, (1 << 64) - 1, write(Cancel(True)), (), "ffffffffffffffff020000000000000007a191c3"),
    (
        Kind.REPLY,
        258,
        write(Reply(NOTHING)),
        (b"one", b"", b"three"),
        "02010000000000000b0000000300000005a1030000000000000000000000000000000500000000000000919990909090c000c090c06f6e657468726565",
    ),
    (
        Kind.CHUNK,
        2,
        write_chunk(Chunk(4, 9)),
        (b"piece",),
        "020000000000000010000000010000000fa10500000000000000040000000000000009000000000000007069656365",
    ),
]


@pytest.mark.parametrize(("kind", "call_id", "body", "segments", "digits"), FRAMES, ids=lambda part: shown(part))
def test_a_frame_has_these_bytes(
    kind: Kind, call_id: int, body: bytes, segments: tuple[bytes, ...], digits: str
) -> None:
    """Head, table, body and segments, in this order."""
    assert b"".join(map(bytes, encode_frame(kind, call_id, body, segments))).hex() == digits
    decoder = FrameDecoder(max_body=1000, max_segment=1000)
    decoder.place = lambda number, body, size: memoryview(bytearray(size))
    (frame,) = decoder.feed(bytes.fromhex(digits))
    assert (frame.kind, frame.call_id, bytes(frame.body)) == (kind, call_id, body)
    assert [bytes(segment) for segment in frame.segments] == list(segments)


# --- any message ------------------------------------------------------------------------------------------------------

numbers = st.integers(-(1 << 63), (1 << 64) - 1)
counts = st.integers(0, (1 << 63) - 1)
texts = st.text(max_size=6)
plain = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | texts
few: Any = st.none() | st.booleans() | numbers
small = st.lists(few, max_size=3) | st.dictionaries(texts, few, max_size=3)
some = st.none() | numbers
ids = st.builds(ReferenceId, counts, counts, st.integers(0, (1 << 64) - 1))
entries = st.builds(
    TensorEntry,
    numbers,
    numbers | st.binary(max_size=6),
    numbers,
    st.lists(numbers, max_size=2),
    st.none() | st.lists(numbers, max_size=2),
    numbers,
    st.none() | texts,
)
values = st.builds(
    Values,
    st.lists(plain | small | st.binary(max_size=6), max_size=4),
    st.just([]),
    st.lists(counts, max_size=2),
    st.lists(counts, max_size=2),
    st.none() | st.binary(max_size=6),
    counts,
    st.none() | st.lists(entries, max_size=2),
    st.lists(st.builds(PassedReference, ids, counts, ids, st.none() | counts), max_size=2),
    st.none()
    | st.builds(
        Recorded,
        numbers,
        numbers,
        st.lists(counts, max_size=2),
        st.lists(st.none() | st.lists(numbers, max_size=2), max_size=2),
    ),
)
functions: Any = numbers | st.none() | st.builds(ByName, numbers, texts) | st.builds(Fetch, numbers, numbers, numbers)
functions |= st.builds(Method, numbers, numbers, numbers, texts) | st.builds(ObjectMethod, texts, texts)
calls = st.builds(
    Call,
    functions,
    values,
    names=st.none() | st.lists(texts, max_size=2),
    remaining=st.none() | st.floats(allow_nan=False),
    origin=st.none() | st.tuples(numbers, numbers),
    trace=st.none() | st.builds(TraceContext, texts, texts),
    autograd=some,
)
calls |= st.builds(Call, functions, values, credit=st.none() | counts, creates=st.none() | ids)
calls |= st.builds(Call, functions, values, once=st.tuples(numbers, numbers))
wires = st.lists(st.tuples(numbers, st.lists(numbers | texts, max_size=3)), max_size=3)
anything = (
    calls
    | st.builds(Reply, values)
    | st.builds(Item, values)
    | st.builds(Error, texts, texts, texts, texts, st.none() | st.binary(max_size=6), st.booleans())
    | st.builds(Credit, counts)
    | st.builds(ChannelMessage, numbers, st.lists(plain, max_size=3))
    | st.builds(Parcel, numbers, wires, st.binary(max_size=6))
    | st.builds(Chunk, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
    | st.sampled_from([Cancel(False), Cancel(True), Goodbye("")])
)


@given(anything)
def test_any_message_is_read_as_it_was_written(message: Any) -> None:
    """Field for field, also what is inside."""
    assert same(read(kind_of(message), written(message)), message)


# --- what is no message -----------------------------------------------------------------------------------------------

WHOLE = [
    FULL_CALL,
    Reply(VALUES),
    Item(VALUES),
    FULL_ERROR,
    Credit(1000),
    ChannelMessage(1, ["tag", 7]),
    Parcel(int(Kind.REPLY), [(1, [0])], b"body"),
]
by_message = pytest.mark.parametrize("message", WHOLE, ids=shown)


@by_message
def test_wrong_numbers_of_fields(message: Any) -> None:
    """One too few, one too many, none, and something else than fields."""
    sent = on_wire(message)
    wrong: list[Any] = [[], [*sent, None], None, 5, "text", b"bytes", {}, sent[0]]
    if type(message) is not Call:  # whose last fields may be left out
        wrong.append(sent[:-1])
    for fields in wrong:
        with pytest.raises(ProtocolError):
            read(kind_of(message), pack(fields))


def on_wire(message: Any) -> list[Any]:
    """The fields of a message, as lists all the way down."""
    fields: list[Any] = unpack(written(message))
    return fields


OTHERS: list[Any] = [None, True, 7, 1.5, "text", b"bytes", {"a": 1}, ["x"]]
#: What a field may be, where that is more than the type of the one that stands there.
MORE: dict[tuple[type[Any], str], tuple[type[Any], ...]] = {
    (Call, "function"): (type(None),),
    (Call, "remaining"): (int,),  # a whole number of seconds
    (Values, "values"): (),
    (ChannelMessage, "fields"): (list,),
}


@pytest.mark.parametrize("message", [*WHOLE, VALUES], ids=shown)
def test_wrong_types_in_each_place(message: Any) -> None:
    """Each field, also of the values inside, with values of all other types in its place."""
    names = getattr(type(message), "__struct_fields__", None) or type(message)._fields
    sent = on_wire(Reply(message))[0] if type(message) is Values else on_wire(message)
    kind = Kind.REPLY if type(message) is Values else kind_of(message)
    optional = type(message) in (Call, Values) or type(message) is Error
    for place, name in enumerate(names):
        kept = sent[place]
        more = MORE.get((type(message), name), ())
        for other in OTHERS:
            if type(other) is type(kept) or type(other) in more or (other is None and optional):
                continue
            if kept is None:
                continue
            sent[place] = other
            with pytest.raises(ProtocolError):
                read(kind, pack([sent] if type(message) is Values else sent))
        sent[place] = kept


_NO_FUNCTIONS: tuple[Any, ...] = (
    *([], [1], ["f"], [1, 2], [5, 1, "f"], [True, 1, "f"]),
    *([4, 1, 2], [[1]], [1, 1, "f", 2], [3, "a", 1], [2, 1, 2, 3, 4]),
)
#: By the place of the field.
WRONG: dict[int, tuple[Any, ...]] = {
    0: (*_NO_FUNCTIONS, "f", 1.5, b"f"),
    2: ([1], [None], [b"a"], "a", {"a": 1}),
    4: (1, [], [1], [1, 2, 3], ["a", 1]),
    5: ("p", [], [1], ["p", 1], ["p", "s", "t"], {"p": "s"}),
    7: (-1,),
    8: ([], [1, 2, 3, 4], [1, 2, None], [1, 2, True], [-1, 2, 3], [1 << 63, 2, 3]),
    9: ([], [1], [1, 2, 3], [1, None], [True, 1], ["a", 1]),
}


@pytest.mark.parametrize(("place", "wrong"), [(place, each) for place, several in WRONG.items() for each in several])
def test_what_is_no_call(place: int, wrong: Any) -> None:
    """A field that is of another type, length or range than it can be."""
    fields = on_wire(PLAIN_CALL)
    read(Kind.CALL, pack(fields))
    fields[place] = wrong
    with pytest.raises(ProtocolError):
        read(Kind.CALL, pack(fields))


@pytest.mark.parametrize(
    "payload",
    [
        [[None], [[1, b"x"]]],
        [[1], [[0, b"x"]]],
        [[None], [[0, b"x"], [0, b"y"]]],
        [[None], [[-1, b"x"]]],
        [[None], [[0, "x"]]],
        [[b"x"]],
        [[None], [], [-1]],
        [[None], [], [], [], None, -1],
        [[None], [], [], [], None, 0, [[0, 0, 6, [2], None, 0]]],
        [[None], [], [], [], None, 0, None, [[[1, 2, 3], 1, [1]]]],
        [[None], [], [], [], None, 0, None, [], [1, 2, [-1], [None]]],
    ],
    ids=repr,
)
def test_values_that_cannot_be(payload: list[Any]) -> None:
    """Bytes, tensors and references without a place or of another form."""
    with pytest.raises(ProtocolError):
        read(Kind.REPLY, pack([payload]))


@pytest.mark.parametrize("wires", [[5], [[]], [["x"]], [[None, 1]], [[1], [True]], [{}], [[1, [{}]]]], ids=repr)
def test_wires_that_name_no_channel(wires: list[Any]) -> None:
    """Each begins with the number of a channel."""
    with pytest.raises(ProtocolError):
        read(Kind.PARCEL, pack([1, wires, b""]))


@pytest.mark.parametrize("body", [b"", pack([]), pack([None]), pack([1]), pack([True, True]), b"\xc3"])
def test_a_call_is_cancelled_for_a_reason_or_for_none(body: bytes) -> None:
    """Its time was up, or not: there is no third."""
    with pytest.raises(ProtocolError):
        read(Kind.CANCEL, body)


@pytest.mark.parametrize("said", [None, 1, b"KeyError", "x" * 101, "Key Error", "a.b", "\x1b[2J"])
def test_a_goodbye_says_the_name_of_an_error_or_nothing(said: object) -> None:
    """It stands in errors and logs of others."""
    with pytest.raises(ProtocolError):
        read(Kind.GOODBYE, pack([said]))


@pytest.mark.parametrize("message", SAMPLES, ids=shown)
def test_a_message_that_ends_early(message: Any) -> None:
    """Each beginning of each message, and each with a byte behind its end."""
    body = written(message)
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            read(kind_of(message), body[:end])
    with pytest.raises(ProtocolError):
        read(kind_of(message), body + b"\xc0")


def refused_soon(read: Callable[[bytes], object], body: bytes) -> bool:
    """Whether a body is refused, with ProtocolError alone, and without much time or memory in any case."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        read(body)
    except ProtocolError:
        return True
    finally:
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert memory < 1 << 20
        assert time.process_time() - begun < 1
    return False


# What announces as many bytes, items or pairs as four bytes can say; and nesting without an end.
HUGE = [bytes([code]) + b"\xff" * 4 for code in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)] + [b"\x91" * 100_000]


@pytest.mark.parametrize("huge", HUGE, ids=lambda body: body[:1].hex())
@by_message
def test_numbers_in_a_message_take_no_memory(message: Any, huge: bytes) -> None:
    """A body, or a field at each place of one, that announces more than is there is refused at once."""
    kind, sent = kind_of(message), on_wire(message)
    assert refused_soon(lambda body: read(kind, body), huge)
    for place in range(len(sent)):
        parts = [pack(field) for field in sent]
        parts[place] = huge
        assert refused_soon(lambda body: read(kind, body), bytes([0x90 + len(parts)]) + b"".join(parts))


@pytest.mark.parametrize("head", [b"\xdc\xff\xff", b"\xde\xff\xff\xc0"], ids=["lists", "maps"])
@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REPLY, Kind.ITEM, Kind.REFERENCE, Kind.ERROR, Kind.CHANNEL])
def test_lists_in_lists_that_announce_what_is_not_there_take_no_memory(kind: Kind, head: bytes) -> None:
    """Each may announce as many items as the body has bytes: together they would take thousands of times its size."""
    reader = unpack if kind is Kind.REFERENCE else partial(read, kind)
    assert refused_soon(reader, head * 500 + bytes(200_000))


def test_a_body_that_is_a_number_takes_no_memory() -> None:
    """bytes(n) would make n of them."""
    assert refused_soon(lambda body: read(Kind.PARCEL, body), pack([5, [[1, []]], 1 << 40]))
    assert refused_soon(lambda body: read(Kind.CREDIT, body), pack([[1 << 60]]))
    assert not refused_soon(lambda body: read(Kind.CREDIT, body), pack([1 << 60]))
    assert not refused_soon(lambda body: read(Kind.CHUNK, body), struct.pack("<QQ", 1 << 62, 1 << 63))


@settings(max_examples=200)
@given(st.sampled_from(list(CLASSES)), st.binary(max_size=60))
def test_random_bytes(kind: Kind, body: bytes) -> None:
    """They are a message or a ProtocolError."""
    with contextlib.suppress(ProtocolError):
        read(kind, body)


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_is_as_the_classes_are() -> None:
    """docs/inside/wire.md has what they declare; the message says how to make it anew."""
    found = wire_differences(WIRE.read_text(encoding="utf-8"))
    assert not found, found


def test_the_document_has_every_field_explained() -> None:
    """Each message of CLASSES is there with all its fields; and a field with another name is another document."""
    text = WIRE.read_text(encoding="utf-8")
    declarations: list[type[Any]] = [Values, TensorEntry, *CLASSES.values()]
    for declared in declarations:
        assert f"### {declared.__name__}" in text
        for name, _, about in wire.field_rows(declared):
            assert about, f"{declared.__name__}.{name} says nothing of itself"
    changed = text.replace("| `remaining` |", "| `left` |")
    assert changed != text
    assert "python -m tests.documents --write" in wire_differences(changed)


@pytest.mark.parametrize("named", [7, 70_000, ByName(3, "module:function"), None, Method(1, 2, 3, "step")])
def test_a_body_gets_another_function(named: Any) -> None:
    """What a call has for all of its receivers is the same bytes, whichever function they know it by."""
    payload = Values([1, "two", b"3" * 70_000], [], [0], [], b"pickle")
    one, other = (write(Call(function, payload, ["key"], 1.5)) for function in (300, named))
    assert with_function(named, without_function(one, 300)) == other


# --- what is in the values of a body ----------------------------------------------------------------------------------

NOT_PLAIN: dict[str, Any] = {
    "a map by numbers": {1: 2},
    "a map by tuples": {(): 2},
    "a map of lists": {"a": [1]},
    "a list of lists": [[1]],
    "a list of texts": ["a"],
    "a timestamp": msgpack.Timestamp(1, 2),
    "a list of timestamps": [msgpack.Timestamp(1, 2)],
    "an extension": msgpack.ExtType(5, b""),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REPLY, Kind.ITEM])
def test_values_are_what_a_worker_writes_there(kind: Kind, name: str) -> None:
    """Scalars, and one list or dict of numbers; so nothing is nested, and keys of maps are text."""
    head = [1] if kind == Kind.CALL else []
    for value in (1, [1, 2.5, None], {"a": 1.5}):
        read(kind, msgpack.packb([*head, [[value]]]))
    with pytest.raises(ProtocolError):
        read(kind, msgpack.packb([*head, [[1, NOT_PLAIN[name]]]]))


@pytest.mark.parametrize("reader", [unpack, partial(read, Kind.CALL), partial(read, Kind.CHANNEL)])
def test_a_body_with_a_map_by_numbers_is_refused_at_once(reader: Callable[[bytes], object]) -> None:
    """Whatever these are: a map of those that a sender has chosen could take minutes."""
    numbers = colliding.multiples(8)
    pairs = b"".join(msgpack.packb(number % (1 << 63)) + b"\1" for number in numbers) * 100_000
    colliding_map = b"\xdf" + struct.pack(">I", 800_000) + pairs
    begin = time.thread_time()
    for head in (b"\x91", b"\x92\1\x91\x91", b"\x92\1\x91"):
        with pytest.raises(ProtocolError):
            reader(head + colliding_map)
    assert time.thread_time() - begin < 10


# --- messages of families that are none -------------------------------------------------------------------------------


class Said(NamedTuple):
    number: int


FAMILY: Family[Said] = Family("tests", {"said": Said})


@pytest.mark.parametrize("within", [lambda deep: deep, lambda deep: ["said", deep], lambda deep: [deep, 1]])
def test_lists_in_lists_are_no_message(within: Any) -> None:
    """As deep as msgpack takes them, which is deeper than they can be shown."""
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit() + 10):
        deep = [deep]
    with pytest.raises(ProtocolError, match="a message about tests is malformed"):
        FAMILY.read(within(deep))


# --- which texts are a trace context of w3c, and what becomes of others -----------------------------------------------


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("state", ["", "a=1", "a=1,b=2", "a=1 , b= 2", "tenant@vendor=x", "0a_-*/@=~!", "a=1,,b=2"])
def test_what_is_valid_goes_on_as_it_is(state: str) -> None:
    """Byte for byte: an intermediary changes nothing."""
    assert valid(TraceContext(PARENT, state)) == (PARENT, state)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-",
        f"{PARENT}\n",
        f" {PARENT}",
        f"ff-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00_{TRACE}_{SPAN}_01",
        "\u0660\u0660" + PARENT[2:],
    ],
)
def test_what_is_no_parent_is_no_context(parent: str) -> None:
    """Its state goes with it."""
    assert valid(TraceContext(parent, "a=1")) is None
    assert TraceContext.from_headers({"traceparent": parent}) is None


@pytest.mark.parametrize(
    "state",
    [
        "a",
        "=1",
        "a=",
        "A=1",
        "a=1,a=2",
        "a=1=2",
        "a=\x7f",
        "a=é",
        "a=1\n",
        f"{'k' * 257}=1",
        f"a={'v' * 257}",
        ",".join(f"k{number}=1" for number in range(MOST_MEMBERS + 1)),
        ",".join(f"k{number}={'v' * 100}" for number in range(MOST_CHARACTERS // 100)),
    ],
)
def test_what_is_no_state_is_left_out(state: str) -> None:
    """The parent goes on."""
    assert valid(TraceContext(PARENT, state)) == (PARENT, "")


@given(st.text(max_size=60), st.text(max_size=40))
def test_whatever_comes_is_valid_or_ignored(parent: str, state: str) -> None:
    """What goes on is valid by itself."""
    for context in (TraceContext(parent, state), TraceContext(PARENT, state)):
        known = valid(context)
        assert known is None or valid(known) == known
