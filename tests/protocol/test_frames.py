"""Frames on bytes alone: round trips however the stream is cut, limits before memory, one documented error."""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import (
    DIRECT_SIZE,
    HEAD,
    MAGIC,
    MAX_SEGMENTS,
    READ_SIZE,
    Buffer,
    Frame,
    FrameDecoder,
    Kind,
    encode_frame,
    least_length,
    whole_frames,
)

MAX_BODY = 4 * READ_SIZE
MAX_SEGMENT = 1 << 24
PAGE = mmap.PAGESIZE


class Allocator:
    """Gives memory for large segments and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, size: int) -> bytearray:
        self.asked.append(size)
        return bytearray(size)


def make_decoder(allocate: Allocator | None = None) -> FrameDecoder:
    return FrameDecoder(max_body=MAX_BODY, max_segment=MAX_SEGMENT, allocate=allocate or Allocator())


def put(decoder: FrameDecoder, data: Buffer, most: int = 1 << 62) -> list[Frame]:
    """Feed all of `data`, at most so many bytes a time, as a socket would."""
    frames: list[Frame] = []
    rest = memoryview(data)
    while rest:
        buffer = decoder.get_buffer()
        assert len(buffer) > 0, "an empty buffer looks like the end of the stream to a socket"
        count = min(len(buffer), len(rest), most)
        buffer[:count] = rest[:count]
        frames += decoder.received(count)
        rest = rest[count:]
    return frames


def memory_of(decoder: FrameDecoder) -> int:
    """Bytes that it keeps to read into."""
    return memoryview(decoder.get_buffer().obj).nbytes


def on_the_wire(frames: Iterable[Frame]) -> bytes:
    return b"".join(bytes(part) for frame in frames for part in encode_frame(*frame))


def plain(frames: Sequence[Frame]) -> list[tuple[int, int, bytes, list[bytes]]]:
    return [(frame.kind, frame.call_id, frame.body, [bytes(segment) for segment in frame.segments]) for frame in frames]


segments = st.lists(st.binary(max_size=40) | st.integers(DIRECT_SIZE - 1, DIRECT_SIZE + 1).map(bytearray), max_size=6)
frames_of_any_kind = st.builds(
    Frame,
    kind=st.integers(0, 255).filter(lambda kind: kind != Kind.CHUNK),  # the decoder has to be told of those
    call_id=st.integers(0, (1 << 64) - 1),
    body=st.binary(max_size=200) | st.integers(READ_SIZE - 20, READ_SIZE + 20).map(bytes),
    segments=segments,
)


@given(st.lists(frames_of_any_kind, max_size=6), st.data())
def test_frames_come_back_however_the_stream_is_cut(frames: list[Frame], data: st.DataObject) -> None:
    """Any frames, one behind the other, come out equal and in order, whatever pieces the stream arrives in."""
    stream = on_the_wire(frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    decoder = make_decoder()
    found: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += put(decoder, stream[start:end])
    assert plain(found) == plain(frames)


@given(frames_of_any_kind, st.data())
def test_truncated_stream_gives_nothing(frame: Frame, data: st.DataObject) -> None:
    """A frame that is cut short is not handed out, and is no error either: the rest may still come."""
    stream = on_the_wire([frame])
    decoder = make_decoder()
    assert put(decoder, stream[: data.draw(st.integers(0, len(stream) - 1))]) == []


@given(frames_of_any_kind, st.data())
def test_mutated_stream_raises_only_protocol_error(frame: Frame, data: st.DataObject) -> None:
    """Whatever byte is changed: frames, silence or ProtocolError, and never more memory than the limits allow."""
    stream = bytearray(on_the_wire([frame, frame]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(stream) - 1, 100)))
        stream[at] = data.draw(st.integers(0, 255))
    allocator = Allocator()
    with contextlib.suppress(ProtocolError):
        put(make_decoder(allocator), stream)
    assert all(size <= MAX_SEGMENT for size in allocator.asked)


@given(st.binary(min_size=1, max_size=300))
def test_garbage_raises_only_protocol_error(garbage: bytes) -> None:
    """Bytes that are no frame at all give ProtocolError once a head is there, and nothing else ever."""
    decoder = make_decoder()
    if len(garbage) >= HEAD.size and garbage[HEAD.size - 1] != MAGIC:
        with pytest.raises(ProtocolError, match="not an aiorpc stream"):
            put(decoder, garbage)
    else:
        with contextlib.suppress(ProtocolError):
            put(decoder, garbage)


@pytest.mark.parametrize(
    ("head", "table", "expected"),
    [
        (HEAD.pack(1, MAX_BODY + 1, 0, 4, MAGIC), b"", f"a body of {MAX_BODY + 1} bytes; the limit is {MAX_BODY}"),
        (HEAD.pack(1, 0xFFFFFFFF, 0, 4, MAGIC), b"", "a body of 4294967295 bytes"),
        (HEAD.pack(1, 0, MAX_SEGMENTS + 1, 4, MAGIC), b"", f"{MAX_SEGMENTS + 1} segments; the limit is {MAX_SEGMENTS}"),
        (HEAD.pack(1, 0, 0xFFFFFFFF, 4, MAGIC), b"", "4294967295 segments"),
        (HEAD.pack(1, 0, 2, 4, MAGIC), struct.pack("<QQ", 8, MAX_SEGMENT + 1), f"a tensor of {MAX_SEGMENT + 1} bytes"),
        (HEAD.pack(1, 0, 1, 4, MAGIC), struct.pack("<Q", (1 << 64) - 1), f"a tensor of {(1 << 64) - 1} bytes"),
    ],
)
def test_limits_are_checked_before_memory_is_taken(head: bytes, table: bytes, expected: str) -> None:
    """A length over its limit is refused as soon as it is read; no memory was taken for it or for its neighbours."""
    allocator = Allocator()
    decoder = make_decoder(allocator)
    with pytest.raises(ProtocolError, match=expected):
        put(decoder, head + table)
    assert allocator.asked == []
    assert memory_of(decoder) == READ_SIZE


def test_a_frame_whose_segments_are_too_long_together_is_refused() -> None:
    """Each of them may be within its limit: what a frame may announce in all has a limit of its own."""
    allocator = Allocator()
    decoder = FrameDecoder(max_body=100, max_segment=1000, max_frame=2000, allocate=allocator)
    with pytest.raises(ProtocolError, match="announces 3000 bytes of tensors; the limit is 2000"):
        put(decoder, HEAD.pack(1, 0, 3, 4, MAGIC) + struct.pack("<3Q", 1000, 1000, 1000))
    assert allocator.asked == []


def resident() -> int:
    """Bytes of memory that this process takes up."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize(
    "head",
    [
        HEAD.pack(1, 1 << 30, 0, Kind.CALL, MAGIC) + b"body",
        HEAD.pack(1, 0, 4, Kind.CALL, MAGIC) + struct.pack("<4Q", *[1 << 30] * 4) + b"s",
        HEAD.pack(1, 0, MAX_SEGMENTS, Kind.CALL, MAGIC) + struct.pack("<Q", 1 << 16) * MAX_SEGMENTS + b"s",
    ],
    ids=["a long body", "long segments", "very many segments"],
)
def test_what_is_only_announced_takes_no_memory(head: bytes) -> None:
    """Four frames of which little more than the head has come take what has come, once more while it is looked at."""
    decoders = [
        FrameDecoder(max_body=1 << 31, max_segment=1 << 31, allocate=lambda size: numpy.empty(size, numpy.uint8).data)
        for _ in range(4)
    ]
    before = resident()
    for decoder in decoders:
        assert put(decoder, head, READ_SIZE) == []
    huge_page = 2 << 20  # what the system may give for the first byte of a long stretch
    assert resident() - before < 4 * (2 * len(head) + 2 * huge_page)


def test_memory_of_a_long_body_grows_with_what_comes() -> None:
    """At every point it is at most twice what has come, and a constant; the frame is whole in the end."""
    size = 64 << 20
    decoder = FrameDecoder(max_body=size)
    piece = bytes(READ_SIZE)
    before = resident()
    assert put(decoder, HEAD.pack(1, size, 0, Kind.CALL, MAGIC)) == []
    for came in range(len(piece), size, len(piece)):
        assert put(decoder, piece) == []
        assert resident() - before < 2 * came + (8 << 20)
    (frame,) = put(decoder, piece)
    assert frame.body == bytes(size)
    assert memory_of(decoder) == READ_SIZE


def test_what_is_read_at_once_can_be_raised_on_the_way() -> None:
    """A decoder for strangers has a short buffer; it takes its new size as soon as nothing is half read."""
    decoder = FrameDecoder(max_body=MAX_BODY, read_size=100)
    assert memory_of(decoder) == 100
    (hello,) = put(decoder, on_the_wire([Frame(Kind.HELLO, 0, b"x" * 300)]))
    assert hello.body == b"x" * 300
    decoder.read_size = READ_SIZE
    assert plain(put(decoder, on_the_wire([hello, hello]))) == plain([hello, hello])
    assert memory_of(decoder) == READ_SIZE


def test_segments_are_refused_before_the_proof() -> None:
    """A decoder without a limit for segments takes none: strangers have nothing to allocate for."""
    decoder = FrameDecoder(max_body=100)
    with pytest.raises(ProtocolError, match="before the handshake is done"):
        put(decoder, on_the_wire([Frame(Kind.HELLO, 0, b"", [bytearray(1)])]))


def test_limits_can_be_raised_on_the_way() -> None:
    """After the proof the same decoder takes what it refused before, also from bytes that are there already."""
    decoder = FrameDecoder(max_body=8)
    hello, large = Frame(Kind.HELLO, 0, b"12345678"), Frame(Kind.CALL, 1, b"x" * 100, [bytearray(50)])
    assert plain(put(decoder, on_the_wire([hello]))) == plain([hello])
    decoder.max_body, decoder.max_segment = MAX_BODY, MAX_SEGMENT
    assert plain(put(decoder, on_the_wire([large]))) == plain([large])


def test_handed_out_buffers_are_the_receivers_alone() -> None:
    """Later traffic does not change what was handed out, and writing into it harms no later frame."""
    decoder = make_decoder()
    frames = [Frame(Kind.CALL, number, b"body", [bytearray(b"first"), bytearray(b"second")]) for number in range(3)]
    found = put(decoder, on_the_wire(frames))
    found[0].segments[0][:] = b"xxxxx"
    found += put(decoder, on_the_wire(frames))
    assert bytes(found[0].segments[0]) == b"xxxxx"
    assert plain(found[1:]) == plain([*frames[1:], *frames])
    assert all(not memoryview(segment).readonly for frame in found for segment in frame.segments)


@pytest.mark.parametrize("pad", range(-2, 3))
def test_frames_that_end_at_the_edge_of_the_buffer(pad: int) -> None:
    """Frames that fill the buffer exactly, or almost, leave no empty buffer and lose nothing."""
    decoder = make_decoder()
    frames = [
        Frame(Kind.CALL, 1, bytes(READ_SIZE - HEAD.size + pad)),
        Frame(Kind.CALL, 2, b"", [bytearray(READ_SIZE - HEAD.size - 8 + pad)]),
        Frame(Kind.CALL, 3, bytes(READ_SIZE - 2 * HEAD.size + pad)),
        Frame(Kind.CALL, 4, b"end"),
    ]
    assert plain(put(decoder, on_the_wire(frames))) == plain(frames)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (
            Frame(Kind.CALL, 7, b"x" * 1000, [bytearray(1)] * 3),
            "<CALL 7: 1000 bytes b'xxxxxxxxxxxxxxxxxxxxxxxx', 3 segments>",
        ),
        (Frame(200, 0, b"\xff\n"), "<200 0: 2 bytes b'\\xff\\n', 0 segments>"),
    ],
)
def test_frame_prints_within_a_line(frame: Frame, expected: str) -> None:
    """Whatever a peer sends, a log line stays a line of bounded length."""
    assert str(frame) == expected


# --- bytes that somebody else has read --------------------------------------------------------------------------------


@given(st.lists(frames_of_any_kind, max_size=4), st.data())
def test_whole_frames_are_those_that_are_there(frames: list[Frame], data: st.DataObject) -> None:
    """Of the beginning of a stream, cut anywhere: its whole frames, which own their segments, and how long they are."""
    each = [on_the_wire([frame]) for frame in frames]
    stream = b"".join(each)
    cut = data.draw(st.integers(0, len(stream)))
    found, length = whole_frames(stream[:cut])
    count = sum(len(b"".join(each[: number + 1])) <= cut for number in range(len(each)))
    assert plain(found) == plain(frames[:count])
    assert length == sum(map(len, each[:count]))
    assert all(not memoryview(segment).readonly for frame in found for segment in frame.segments)
    if count < len(frames):
        assert cut - length < least_length(stream[:cut], length) <= len(each[count])
        assert least_length(stream, length) == len(each[count])


@pytest.mark.parametrize("length", [1, 1 << 31, (1 << 64) - 1])
def test_whole_frames_believe_no_length(length: int) -> None:
    """A segment or a body that is longer than what is there takes no memory for more than that."""
    for head in (
        HEAD.pack(1, 0, 1, Kind.REPLY, MAGIC) + struct.pack("<Q", length),
        HEAD.pack(1, min(length, 0xFFFFFFFF), 0, Kind.REPLY, MAGIC),
        HEAD.pack(1, 0, min(length, 0xFFFFFFFF), Kind.REPLY, MAGIC),
    ):
        assert whole_frames(head) == ([], 0)
        assert least_length(head) > len(head)


@given(frames_of_any_kind, st.data())
def test_whole_frames_are_what_the_decoder_finds(frame: Frame, data: st.DataObject) -> None:
    """Of bytes that were changed, cut or added to, too."""
    stream = bytearray(on_the_wire([frame]))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, min(len(stream) - 1, 60)))
        stream[at] = data.draw(st.integers(0, 255))
    whole = bytes(stream)[: data.draw(st.none() | st.integers(0, len(stream)))] + data.draw(st.binary(max_size=20))
    decoder = make_decoder()
    try:
        found = put(decoder, whole)
    except ProtocolError:  # its limits are not those of whole_frames; nor does it take a CHUNK
        return
    assert plain(whole_frames(whole)[0]) == plain(found)


@given(st.lists(frames_of_any_kind, max_size=4), st.data())
def test_feed_gives_what_received_gives(frames: list[Frame], data: st.DataObject) -> None:
    """Pieces of any length, longer than the decoder's own buffer too, give each frame with the same piece."""
    stream = on_the_wire(frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    fed, read = make_decoder(), make_decoder()
    found: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        new = fed.feed(stream[start:end])
        assert plain(new) == plain(put(read, stream[start:end]))
        assert fed.empty == read.empty
        found += new
    assert plain(found) == plain(frames)
    assert fed.empty


@given(frames_of_any_kind, st.data())
def test_feed_raises_what_received_raises(frame: Frame, data: st.DataObject) -> None:
    """Bytes that are wrong are as wrong when somebody else has read them."""
    stream = bytearray(on_the_wire([frame, frame]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(stream) - 1, 100)))
        stream[at] = data.draw(st.integers(0, 255))

    def outcome(take: Callable[[bytes], list[Frame]]) -> object:
        try:
            return plain(take(bytes(stream)))
        except ProtocolError as error:
            return str(error)

    fed, read = make_decoder(), make_decoder()
    assert outcome(fed.feed) == outcome(lambda data: put(read, data))
