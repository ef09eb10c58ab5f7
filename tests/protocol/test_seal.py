"""Seals: what was sent arrives whatever its sizes, and nothing else does."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import CHUNK, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.seal import HEAD, MAX_PAYLOAD, OVERHEAD, SHORT, TAG_SIZE, Seal, Unsealer

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
@given(st.lists(st.sampled_from([0, 1, 100, SHORT, 150_000, 700_000]), max_size=4), cuts, reads)
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
    assert unsealer.empty and not unsealer.filling


HEAD_OF_CHUNK, DATA = map(bytes, encode_frame(CHUNK, 1, b"at", [bytes(range(250)) * 2000]))
HALF = len(DATA) // 2
CHUNK_PIECES = sealed(HEAD_OF_CHUNK, DATA[:HALF], DATA[HALF:])


def placing(target: bytearray) -> Unsealer:
    """One that reads the data of a chunk into `target`."""
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 24)
    decoder.place = lambda number, body, length: memoryview(target)[:length]
    return Unsealer(Seal(KEY), decoder)


@pytest.mark.parametrize("most", [1_000, 100_001, 200_000])
def test_chunk_is_read_straight_into_its_place(most: int) -> None:
    """Nothing that lies in between takes part in it, and it is handed out once the last tag was right."""
    target = bytearray(len(DATA))
    unsealer = placing(target)
    assert unsealer.feed(CHUNK_PIECES[0]) == []
    rest = b"".join(CHUNK_PIECES[1:]) + sealed(frame(7), first=3)[0]
    places, frames = set(), []
    while rest:
        buffer = unsealer.get_buffer()
        count = min(len(buffer), len(rest), most)
        buffer[:count] = rest[:count]
        places.add(buffer.obj is target)
        frames += unsealer.received(count)
        rest = rest[count:]
    assert places == {True, False} and target == DATA  # the last tag, and the first head, lie elsewhere
    assert [(each.kind, each.call_id) for each in frames] == [(CHUNK, 1), (Kind.REPLY, 7)]
    assert unsealer.empty and not unsealer.filling


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNK_PIECES[0], CHUNK_PIECES[2], CHUNK_PIECES[1]],
        [CHUNK_PIECES[0], CHUNK_PIECES[1], CHUNK_PIECES[1]],
        [CHUNK_PIECES[0], sealed(DATA[:HALF], key=OTHER, first=1)[0], CHUNK_PIECES[2]],
        [*CHUNK_PIECES[:2], sealed(DATA[HALF:], first=3)[0]],
        [*CHUNK_PIECES[:2], CHUNK_PIECES[2][:-1] + b"!"],
        [*CHUNK_PIECES[:2], CHUNK_PIECES[2][:9] + b"!" + CHUNK_PIECES[2][10:]],
        [*CHUNK_PIECES[:2], HEAD.pack(0)],
        [*CHUNK_PIECES[:2], HEAD.pack(MAX_PAYLOAD + 1)],
        [*CHUNK_PIECES[:2], HEAD.pack(HALF - 1) + CHUNK_PIECES[2][4:]],
    ],
    ids=["moved", "repeated", "by another key", "left out", "tag", "data", "empty", "too long", "shorter"],
)
@pytest.mark.parametrize("most", [5_000, 1 << 20])
def test_chunk_that_was_changed_is_not_handed_out(pieces: list[bytes], most: int) -> None:
    """Its bytes lie in their place before they are checked; nobody hears of them."""
    unsealer = placing(bytearray(len(DATA)))
    data = b"".join(pieces)
    with pytest.raises(ProtocolError, match="seal"):
        while data:
            assert unsealer.feed(data[:most]) == []
            data = data[most:]


@pytest.mark.parametrize("size", [0, SHORT + 50])
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
LONG_ONE, LONG_TWO = sealed(frame(1, SHORT), frame(2, SHORT))
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
    "long, reflected": sealed(frame(1, SHORT), key=OTHER),
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


def test_tag_is_gmac() -> None:
    """As NIST SP 800-38D has it, computed here with whole numbers; another one for another number or length."""
    aes = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    key = int.from_bytes(aes.update(bytes(16)), "big")

    def times_key(x: int) -> int:
        product, v = 0, key
        for bit in range(127, -1, -1):
            product ^= v if x >> bit & 1 else 0
            v = v >> 1 ^ (0xE1 << 120 if v & 1 else 0)
        return product

    tags = set()
    for number, size in ((0, 30), (1, 30), (1, 32), (1 << 40, SHORT + 1)):
        payload, head = bytes(size), HEAD.pack(size)
        hashed = 0
        for at in range(0, size, 16):
            hashed = times_key(hashed ^ int.from_bytes(payload[at : at + 16].ljust(16, b"\0"), "big"))
        hashed = times_key(hashed ^ size * 8 << 64)
        first_block = number.to_bytes(8, "little") + head + (1).to_bytes(4, "big")
        tag = hashed ^ int.from_bytes(aes.update(first_block), "big")
        assert sealed(payload, first=number)[0] == head + payload + tag.to_bytes(16, "big")
        tags.add(tag)
    assert len(tags) == 4


def test_limits_of_the_decoder_hold() -> None:
    """A peer that has the key may still ask for too much; that is refused as ever."""
    with pytest.raises(ProtocolError, match="announces a body"):
        opener().feed(sealed(frame(1, (1 << 20) + 1)[:100])[0])
