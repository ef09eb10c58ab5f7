"""Everything that reads a peer's bytes, fed with broken ones: bounded, from fixed seeds, whole and in pieces.

Each target raises the exceptions that its docstring names, and nothing else; a byte that is changed may also change
nothing. Pickles are left as they are: they are read only after the peer has proved the secret, and run its code by
design.
"""

from __future__ import annotations

import operator
import pickle
import random
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy
import pytest
import torch

from aiorpc.channels import layout
from aiorpc.channels.inline import allocate
from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.protocol.codec import Incoming, loads
from aiorpc.protocol.frames import Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import MAX_BODY, Handshake
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.messages import Reply, Values, read_values
from aiorpc.runtime.calls.values import decode, encode

from .mutations import mutate
from .targets import To

SEEDS = range(6)
ROUNDS = 250
# Far above what the corpus needs, far below what a length read from the wire could ask for.
MEMORY = 256 << 20
MAX_SEGMENT = 1 << 24

# What pickle documents, and what numpy raises for a buffer of another length than its array.
UNPICKLING = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, ValueError)

RECORD = WorkerRecord("worker", 3, "ab", "host", "name", 17, "main", "/run/x.sock", "127.0.0.1", 1)


def bodies() -> list[tuple[bytes, list[bytes]]]:
    """Messages of all kinds, as body and segments."""
    large = torch.arange(2000.0)
    samples: list[list[Any]] = [
        [],
        [1, "text", b"bytes", None, 1.5, True, -(1 << 63)],
        [torch.ones(2, 2)],
        [torch.empty(0, 3), torch.ones(1).bool(), torch.ones(2, dtype=torch.bfloat16)],
        [large, large[3:7], large.view(40, 50).t()],
        [torch.nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)],
        [[1, {"a": torch.ones(2)}], numpy.arange(2000), {"k": (1,)}],
    ]
    made = [encode(Reply(Values(values)), To())[:2] for values in samples]
    return [(body, [bytes(segment) for segment in segments]) for body, segments in made]


CORPUS = bodies()
STREAMS = [
    b"".join(bytes(part) for part in encode_frame(Kind.CALL, number, body, segments))
    for number, (body, segments) in enumerate(CORPUS)
]


def inputs(corpus: list[bytes], seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        yield mutate(chance.choice(corpus), chance)


def accepts_only(target: Callable[[bytes], object], corpus: list[bytes], seed: int, *allowed: type[Exception]) -> int:
    """Feed the target; what it may raise is swallowed, all else fails. Returns how many inputs it refused."""
    refused = 0
    tracemalloc.start()
    try:
        for data in inputs(corpus, seed):
            try:
                target(data)
            except allowed:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} from {data.hex()}") from error
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return refused


def feed(decoder: FrameDecoder, data: bytes, most: int) -> list[Frame]:
    frames: list[Frame] = []
    rest = memoryview(data)
    while rest:
        buffer = decoder.get_buffer()
        assert len(buffer)
        count = min(len(buffer), len(rest), most)
        buffer[:count] = rest[:count]
        frames += decoder.received(count)
        rest = rest[count:]
    return frames


def make_decoder() -> FrameDecoder:
    return FrameDecoder(max_body=1 << 20, max_segment=MAX_SEGMENT, allocate=small)


def small(size: int) -> bytearray | memoryview:
    assert size <= MAX_SEGMENT
    return allocate(size)


@pytest.mark.parametrize("seed", SEEDS)
def test_frame_decoder(seed: int) -> None:
    """Frames whole and in pieces: both give the same frames or the same ProtocolError."""

    def target(data: bytes) -> None:
        whole, pieces = outcome_of(data, len(data)), outcome_of(data, 7)
        # An error in the middle of a read loses the frames before it; in pieces they were out already.
        assert whole == pieces or (whole[1] and whole[1] == pieces[1])
        if whole[1]:
            raise ProtocolError(whole[1])

    def outcome_of(data: bytes, most: int) -> tuple[list[Any], str]:
        try:
            frames = feed(make_decoder(), data, max(most, 1))
        except ProtocolError as error:
            return [], str(error)
        return [(f.kind, f.call_id, f.body, [bytes(segment) for segment in f.segments]) for f in frames], ""

    doubles = [left + right for left in STREAMS for right in STREAMS[:2]]
    assert accepts_only(target, doubles, seed, ProtocolError) > ROUNDS // 20


def came_from_unpickling(error: BaseException) -> bool:
    """Whether the pickle's own instructions failed, and not what is ours around them."""
    return any(frame.f_code is loads.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


class Shift:
    """Becomes ``1 << by`` when it is unpickled: a ValueError for a negative one."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.lshift, (1, self.by)


def test_only_what_a_pickle_does_passes_for_unpickling() -> None:
    """The same error counts when unpickling raised it, and does not when what stands around it did."""
    nothing = Incoming((), ())
    with pytest.raises(ValueError, match="negative shift") as theirs:
        loads(pickle.dumps(Shift(-1)), nothing)
    assert came_from_unpickling(theirs.value)
    with pytest.raises(ValueError, match="negative shift") as ours:
        operator.lshift(loads(pickle.dumps(Shift(1)), nothing), -1)
    assert not came_from_unpickling(ours.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_message_body(seed: int) -> None:
    """Bodies of messages, with their segments whole, short and missing."""
    pickles = {body: read_values(body).pickled for body, _ in CORPUS}
    segments = {body: parts for body, parts in CORPUS}
    chance = random.Random(seed)

    def target(data: bytes) -> None:
        said = read_values(data)
        original = chance.choice(CORPUS)[0]
        if said.pickled is not None:
            said.pickled = pickles[original] or b"N."
        parts = [bytearray(part) for part in segments[original]]
        if parts and chance.random() < 0.3:
            parts[0] = parts[0][: chance.randrange(len(parts[0]))]
        try:
            values = decode(said, parts[: chance.randint(0, 3)], lambda wires: [])
        except UNPICKLING as error:
            # The tensors and buffers that a pickle asks for may be missing or short: then it fails as unpickling does.
            if not came_from_unpickling(error):
                raise
            raise ProtocolError("a pickle without what belongs to it") from error
        for value in values:
            if isinstance(value, torch.Tensor):
                value.clone()  # reads every element: none may lie outside of its memory

    assert accepts_only(target, list(segments), seed, ProtocolError) > ROUNDS // 20


@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_table(seed: int) -> None:
    """Tables with entries changed one value at a time: sizes, strides, offsets, types, segments, flags."""
    chance = random.Random(seed)
    values = [0, 1, -1, -2, -3, 2, 3, 7, 40, 1 << 20, 1 << 40, 1 << 62, (1 << 64) - 1, -(1 << 63)]
    odd: list[Any] = [None, True, 1.5, "x", b"abcd", [], [0], [2, 3], [[1]], [1 << 40], {}]
    tables = [(read_values(body).table, parts) for body, parts in CORPUS if read_values(body).table]
    refused = 0
    for _ in range(ROUNDS * 2):
        table, parts = chance.choice(tables)
        table = msgpack.unpackb(msgpack.packb(table))
        entry = chance.choice(table)
        at = chance.randrange(len(entry))
        if isinstance(entry[at], list) and entry[at] and chance.random() < 0.8:
            entry[at][chance.randrange(len(entry[at]))] = chance.choice(values)
        else:
            entry[at] = chance.choice(values + odd)
        try:
            for tensor in layout.rebuild(table, [bytearray(part) for part in parts]):
                if tensor.numel() < 1 << 20:
                    tensor.clone()
        except ProtocolError:
            refused += 1
    assert refused > ROUNDS // 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_handshake(seed: int, turn: int) -> None:
    """Each frame of a handshake, broken: the receiver refuses, and knows nobody afterwards."""
    secret = b"s" * 32

    def sides() -> tuple[Handshake, Handshake]:
        return Handshake(RECORD, secret, expect=RECORD), Handshake(RECORD, secret)

    def one(written: list[Any]) -> Frame:
        (frame,) = feed(FrameDecoder(max_body=MAX_BODY), b"".join(bytes(part) for part in written), 1 << 20)
        return frame

    def target(data: bytes) -> None:
        opener, acceptor = sides()
        hello = one(opener.start())
        if turn == 0:
            acceptor.feed(hello._replace(body=data))
        elif turn == 1:
            opener.feed(one(acceptor.feed(hello))._replace(body=data))
        elif turn == 3:
            opener.feed(one(acceptor.feed(hello)))
            opener.feed(Frame(Kind.WELCOME, 0, data))
        else:
            acceptor.feed(hello)
            acceptor.feed(Frame(Kind.PROOF, 0, data))
        assert acceptor.peer is None
        assert opener.peer is None

    opener, acceptor = sides()
    first = one(opener.start())
    second = one(acceptor.feed(first))
    third = one(opener.feed(second))
    fourth = one(acceptor.feed(third))
    accepts_only(target, [(first, second, third, fourth)[turn].body], seed, ProtocolError, PeerRefused)


@pytest.mark.parametrize("seed", SEEDS)
def test_worker_record(seed: int) -> None:
    """Records from the store or a HELLO, with parts lost, doubled and of other types."""
    chance = random.Random(seed)
    odd: list[Any] = [None, True, 1.5, -1, 1 << 70, "", "x" * 10_000, "bad name!", "\ud800", b"bytes", [], {}]
    refused = 0
    for _ in range(ROUNDS):
        record: list[Any] = list(RECORD.to_wire())
        record[chance.randrange(len(record))] = chance.choice(odd)
        if chance.random() < 0.1:
            del record[chance.randrange(len(record))]
        try:
            WorkerRecord.from_wire(chance.choice([record, record, record, *odd]))
        except ProtocolError:
            refused += 1
    assert refused > ROUNDS // 4
