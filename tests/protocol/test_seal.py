"""Seals: what was sent arrives whatever its sizes, and nothing else does."""

from __future__ import annotations

import hashlib
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import CHUNK, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.seal import HEAD, LONG, MAX_PAYLOAD, OVERHEAD, TAG_SIZE, Seal, Unsealer

KEY, OTHER = b"k" * 32, b"o" * 32


def sealed(*payloads: bytes, key: bytes = KEY, first: int = 0) -> list[bytes]:
    """The pieces of these payloads, numbered from `first`."""
    seal = Seal(key)
    return [
        b"".join(seal.piece(number, [payload], len(payload))) for number, payload in enumerate(payloads, start=first)
    ]


def opener(key: bytes = KEY) -> Unsealer:
    return Unsealer(Seal(key), FrameDecoder(max_body=1 << 20, max_segment=1 << 24))


def frame(number: int, size: int = 0, *segments: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(Kind.REPLY, number, b"x" * size, segments))


def found(frames: list[Frame]) -> list[tuple[int, int, list[bytes]]]:
    return [(each.call_id, len(each.body), [bytes(segment) for segment in each.segments]) for each in frames]


cuts = st.lists(st.integers(1, MAX_PAYLOAD), max_size=6)
reads = st.lists(st.sampled_from([5_000, 65_536, MAX_PAYLOAD, 4 * MAX_PAYLOAD]), min_size=1, max_size=3)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0, 1, 100, LONG, 150_000]), max_size=4), cuts, reads)
def test_frames_arrive_however_they_are_cut_and_read(sizes: list[int], cuts: list[int], reads: list[int]) -> None:
    """Pieces end anywhere in frames, reads anywhere in pieces; bodies, segments and their order are the same."""
    stream = b"".join(frame(number, size, b"s" * size, b"t") for number, size in enumerate(sizes))
    payloads = []
    for size in [*cuts, *[MAX_PAYLOAD] * len(stream)]:
        if not stream:
            break
        payloads.append(stream[:size])
        stream = stream[size:]
    data, unsealer, frames = b"".join(sealed(*payloads)), opener(), []
    while data:
        count = reads[len(data) % len(reads)]
        frames += unsealer.feed(data[:count])
        data = data[count:]
    assert found(frames) == [(number, size, [b"s" * size, b"t"]) for number, size in enumerate(sizes)]
    assert unsealer.empty


def test_frames_arrive_byte_by_byte() -> None:
    """Also where a read brings but a part of a head."""
    unsealer = opener()
    frames = [each for byte in ONE + TWO + THREE for each in unsealer.feed(bytes([byte]))]
    assert [each.call_id for each in frames] == [1, 2, 3]


def test_chunk_goes_to_its_place() -> None:
    """A part of a large tensor lands where it belongs, by way of pieces too."""
    target = bytearray(400_000)
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 24)
    decoder.place = lambda number, body, length: memoryview(target)
    unsealer = Unsealer(Seal(KEY), decoder)
    stream = b"".join(bytes(part) for part in encode_frame(CHUNK, 1, b"at", [b"c" * 400_000]))
    for piece in sealed(stream[:MAX_PAYLOAD], stream[MAX_PAYLOAD:]):
        frames = unsealer.feed(piece)
    assert [each.kind for each in frames] == [CHUNK] and target == b"c" * 400_000


@pytest.mark.parametrize("size", [0, LONG + 50])
def test_one_flipped_bit_anywhere_is_refused(size: int) -> None:
    """In head, payload or tag, of short and of long pieces: no frame comes out, at once or once the rest is there."""
    piece = sealed(frame(1, size))[0]
    for at in range(len(piece)):
        broken = bytearray(piece)
        broken[at] ^= 1 << at % 8
        unsealer = opener()
        with pytest.raises(ProtocolError, match=r"seal"):
            # A length that grew waits for more, as for any piece; what is there then has no seal either.
            assert unsealer.feed(bytes(broken)) == []
            unsealer.feed(bytes(MAX_PAYLOAD + OVERHEAD))


ONE, TWO, THREE = sealed(frame(1), frame(2), frame(3))
LONG_ONE, LONG_TWO = sealed(frame(1, LONG), frame(2, LONG))
ATTACKS: dict[str, list[bytes]] = {
    "replayed": [ONE, ONE],
    "replayed later": [ONE, TWO, ONE],
    "in another order": [TWO, ONE],
    "dropped": [ONE, THREE],
    "reflected": sealed(frame(1), key=OTHER),
    "of another number": sealed(frame(1), first=1),
    "long, replayed": [LONG_ONE, LONG_ONE],
    "long, in another order": [LONG_TWO, LONG_ONE],
    "long, with the tag of another": [LONG_ONE[:-TAG_SIZE] + LONG_TWO[-TAG_SIZE:]],
    "long, reflected": sealed(frame(1, LONG), key=OTHER),
    "long, by the key of short ones": [
        LONG_ONE[:-TAG_SIZE] + hashlib.blake2b(bytes(8) + LONG_ONE[:-TAG_SIZE], key=KEY, digest_size=TAG_SIZE).digest()
    ],
    "without a seal": [frame(1, 50)],
    "put in": [ONE, frame(9), TWO],
    "with a tag of zeros": [ONE[:-TAG_SIZE] + bytes(TAG_SIZE)],
    "empty": sealed(b""),
    "too long": sealed(bytes(MAX_PAYLOAD + 1)),
    "joined": [HEAD.pack(2 * len(frame(1))) + frame(1) + frame(2) + ONE[-TAG_SIZE:]],
}


@pytest.mark.parametrize("pieces", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("way", ["one by one", "at once"])
def test_what_the_other_side_did_not_send_like_that_is_refused(pieces: list[bytes], way: str) -> None:
    """Every piece before the wrong one is good; nothing of it, or behind it, is handed out."""
    unsealer = opener()
    with pytest.raises(ProtocolError, match="seal"):
        for piece in pieces if way == "one by one" else [b"".join(pieces)]:
            unsealer.feed(piece)
            unsealer.feed(b"")


def test_tag_of_a_long_piece_is_poly1305_by_a_key_of_its_own() -> None:
    """As RFC 8439 has it, computed here with whole numbers; by a key that another number or length does not have."""
    tags, keys = set(), set()
    for number, size in ((0, LONG + 1), (1, LONG + 1), (1, LONG + 17)):
        payload = bytes(range(251)) * (size // 251 + 1)
        payload = payload[:size]
        head = HEAD.pack(size)
        key = hashlib.blake2b(number.to_bytes(8, "little") + head, key=KEY, digest_size=32).digest()
        r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
        sum_ = 0
        for at in range(0, size, 16):
            block = int.from_bytes(payload[at : at + 16] + b"\1", "little")
            sum_ = (sum_ + block) * r % (2**130 - 5)
        tag = ((sum_ + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")
        assert sealed(payload, first=number)[0] == head + payload + tag
        tags.add(tag)
        keys.add(key)
    assert len(tags) == len(keys) == 3


@pytest.mark.parametrize("take", [True, False])
def test_looking_settles_nothing(take: bool) -> None:
    """What a thread has looked at is the loop's unless it was taken; what it lacks is said."""
    unsealer = opener()
    unread = deque([ONE, TWO[:5]])
    assert unsealer.look(ONE + TWO[:5]) == (frame(1), 1, len(TWO) - 5)
    assert unsealer.look(ONE + TWO[:2]) == (frame(1), 1, OVERHEAD - 2)
    assert unsealer.look(ONE + TWO) == (frame(1) + frame(2), 2, 0)
    with pytest.raises(ProtocolError):
        unsealer.look(TWO)
    if take:
        unsealer.take(unread, 2)
        assert not unread and [each.call_id for each in unsealer.feed(THREE)] == [3]
    else:
        assert [each.call_id for each in unsealer.feed(ONE + TWO)] == [1, 2]


def test_limits_of_the_decoder_hold() -> None:
    """A peer that has the key may still ask for too much; that is refused as ever."""
    with pytest.raises(ProtocolError, match="announces a body"):
        opener().feed(sealed(frame(1, (1 << 20) + 1)[:100])[0])
