"""One side of TLS, on bytes: what is sent arrives however it is cut, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.interrupts import SocketTurn
from aiorpc.protocol.frames import CHUNK, FIRST_READ_SIZE, READ_SIZE, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.states import TlsState
from aiorpc.transport.certificates import Credentials
from aiorpc.transport.tls import PIECE, RECORD, TlsLayer
from tests.authority import Authority
from tests.tiers import examples

MOST = 128 * 1024


def turn(unread: deque[bytes] | None = None) -> SocketTurn:
    """One of a thread that reads for itself."""
    return SocketTurn(lambda: None, 0, MOST, unread)


def look(side: TlsLayer, unread: deque[bytes], most: int) -> bytes:
    """`TlsLayer.look` in a turn."""
    return side.look(unread, most, turn(unread))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def credentials(authority: Authority) -> Iterator[dict[str, Credentials]]:
    yield {name: Credentials(authority.tls(name), name) for name in ("w0", "w1")}


def side(credentials: Credentials, *, opener: bool, read_size: int = READ_SIZE) -> TlsLayer:
    context, own = credentials.context(opener=opener)
    decoder = FrameDecoder(max_body=1 << 24, max_segment=1 << 24, read_size=read_size)
    return TlsLayer(context, decoder, opener=opener, own=own)


def shaken(credentials: dict[str, Credentials], read_size: int = READ_SIZE) -> tuple[TlsLayer, TlsLayer]:
    """An opener and an acceptor that are open; what the latter reads at once."""
    opener = side(credentials["w0"], opener=True)
    acceptor = side(credentials["w1"], opener=False, read_size=read_size)
    opener.start()
    acceptor.start()
    for _ in range(4):
        for source, target in ((opener, acceptor), (acceptor, opener)):
            if data := source.outgoing.read():
                assert target.feed(data) == []
    assert opener.open and acceptor.open
    return opener, acceptor


def frame(number: int, size: int = 0, *segments: bytes, kind: Kind = Kind.REPLY) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(kind, number, b"x" * size, segments))


def encrypted(source: TlsLayer, data: bytes) -> bytes:
    source.encrypt(data)
    return source.outgoing.read()


def found(frames: list[Frame]) -> list[tuple[int, int, list[bytes]]]:
    return [(each.call_id, len(each.body), [bytes(segment) for segment in each.segments]) for each in frames]


def test_both_sides_see_the_other_certificate(credentials: dict[str, Credentials]) -> None:
    """Once both are open, each knows the other's names, and both have one binding, which no other pair has."""
    opener, acceptor = shaken(credentials)
    assert opener.peer is not None and acceptor.peer is not None
    assert (opener.peer.names, acceptor.peer.names) == (("w1",), ("w0",))
    assert opener.binding() == acceptor.binding() and len(opener.binding()) == 32
    other, _ = shaken(credentials)
    assert other.binding() != opener.binding()


def test_a_binding_tells_certificates_apart_without_finished(
    credentials: dict[str, Credentials], authority: Authority
) -> None:
    """Whoever ends TLS himself has other bindings on his two sides, each of them right for its own two ends."""
    relay = {"w0": Credentials(authority.tls("w0"), "w0"), "w1": credentials["w1"]}
    first, second = shaken(credentials), shaken(relay)
    assert first[0].binding() == first[1].binding()
    assert second[0].binding() == second[1].binding()
    assert first[0].binding() != second[1].binding()


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(st.sampled_from([0, 1, 100, RECORD - 18, RECORD, RECORD + 1, 150_000]), max_size=4),
    st.lists(st.integers(1, PIECE), max_size=6),
    st.lists(st.sampled_from([1_000, 16_384, 70_000]), min_size=1, max_size=3),
)
def test_frames_arrive_however_they_are_cut_and_read(
    credentials: dict[str, Credentials], sizes: list[int], cuts: list[int], reads: list[int]
) -> None:
    """Records end anywhere in frames, reads anywhere in records; bodies, segments and their order are the same."""
    opener, acceptor = shaken(credentials)
    stream = b"".join(frame(number, size, b"s" * size, b"t") for number, size in enumerate(sizes))
    data = bytearray()
    for size in [*cuts, *[PIECE] * len(stream)]:
        if not stream:
            break
        data += encrypted(opener, stream[:size])
        stream = stream[size:]
    frames: list[Frame] = []
    while data:
        count = reads[len(data) % len(reads)]
        frames += acceptor.feed(bytes(data[:count]))
        del data[:count]
    assert found(frames) == [(number, size, [b"s" * size, b"t"]) for number, size in enumerate(sizes)]
    assert acceptor.empty and not acceptor.left


def test_chunks_are_decrypted_into_their_place(credentials: dict[str, Credentials]) -> None:
    """The memory of a large buffer is filled without another copy of it."""
    opener, acceptor = shaken(credentials)
    place, content = bytearray(1 << 20), os.urandom(1 << 20)
    acceptor._decoder.place = lambda transfer, body, length: memoryview(place)
    data = b"".join(bytes(part) for part in encode_frame(CHUNK, 3, b"\x90", [content]))
    frames = acceptor.feed(encrypted(opener, data))
    assert len(frames) == 1 and bytes(place) == content


@pytest.mark.parametrize("before", [0, 1_000])
def test_the_end_of_a_large_buffer_is_read_however_its_records_lie(
    credentials: dict[str, Credentials], before: int
) -> None:
    """Its first record is read in part to see what it is, the next ones to where they belong; nothing comes behind."""
    for size in range(3 * RECORD, 4 * RECORD, 1_111):
        opener, acceptor = shaken(credentials, read_size=FIRST_READ_SIZE)
        data = frame(0, before) + frame(1, 0, b"s" * size)
        wire = b"".join(encrypted(opener, data[at : at + RECORD]) for at in range(0, len(data), RECORD))
        frames = [*acceptor.feed(wire[:FIRST_READ_SIZE]), *acceptor.feed(wire[FIRST_READ_SIZE:])]
        assert found(frames)[-1:] == [(1, 0, [b"s" * size])]


SPOILT: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
    "a flipped bit": lambda one, two, back: one[:-1] + bytes([one[-1] ^ 1]),
    "one is missing": lambda one, two, back: two,
    "repeated": lambda one, two, back: one + one,
    "sent back": lambda one, two, back: back,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_what_was_changed_is_refused(
    credentials: dict[str, Credentials], spoil: Callable[[bytes, bytes, bytes], bytes]
) -> None:
    """It ends with an alert for the other side."""
    opener, acceptor = shaken(credentials)
    one, two = encrypted(opener, frame(1)), encrypted(opener, frame(2))
    with pytest.raises(ProtocolError, match="changed on its way"):
        acceptor.feed(spoil(one, two, encrypted(acceptor, frame(3))))
    assert acceptor.state is TlsState.FAILED
    assert acceptor.last_words()


@pytest.mark.parametrize("opener", [True, False])
def test_whoever_does_not_speak_tls_is_told_so(credentials: dict[str, Credentials], opener: bool) -> None:
    """Frames in the clear are no TLS: the last word is a frame that says it, in the clear."""
    layer = side(credentials["w0"], opener=opener)
    layer.start()
    with pytest.raises(PeerRefused, match="does not speak TLS"):
        layer.feed(frame(0, 40, kind=Kind.HELLO))
    (said,) = FrameDecoder(max_body=1000).feed(layer.last_words())
    assert said.kind == Kind.REFUSED and b"TLS" in said.body


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x00\x05hello", b"\x16" * 4096, b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03\x01\xff\xff"]
)
@pytest.mark.parametrize("opener", [True, False])
def test_rubbish_is_refused_or_waited_for(credentials: dict[str, Credentials], data: bytes, opener: bool) -> None:
    """Nothing but PeerRefused comes of it, and no frame."""
    layer = side(credentials["w0"], opener=opener)
    layer.start()
    try:
        assert layer.feed(data) == []
    except PeerRefused:
        assert layer.state is TlsState.FAILED


def test_a_certificate_of_another_authority_is_refused(credentials: dict[str, Credentials], tmp_path: Path) -> None:
    """By the opener at once; the acceptor hears of it by the alert."""
    stranger = Credentials(Authority(tmp_path).tls("w1"), "w1")
    opener, acceptor = side(credentials["w0"], opener=True), side(stranger, opener=False)
    opener.start()
    acceptor.feed(opener.outgoing.read())
    with pytest.raises(PeerRefused, match="its certificate is not one that we take"):
        opener.feed(acceptor.outgoing.read())
    with pytest.raises(PeerRefused, match="does not know the authority"):
        acceptor.feed(opener.last_words())


def test_a_side_without_a_certificate_is_refused(credentials: dict[str, Credentials], authority: Authority) -> None:
    """Both have to show one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.folder / "ca.pem")
    opener = TlsLayer(context, FrameDecoder(max_body=1000), opener=True)
    acceptor = side(credentials["w1"], opener=False)
    opener.start()
    acceptor.feed(opener.outgoing.read())
    opener.feed(acceptor.outgoing.read())
    with pytest.raises(PeerRefused, match="shows no certificate"):
        acceptor.feed(opener.outgoing.read())
    with pytest.raises(PeerRefused, match="it wants a certificate"):
        opener.feed(acceptor.last_words())


def test_an_older_tls_is_refused(credentials: dict[str, Credentials], authority: Authority) -> None:
    """Nothing below 1.3 is spoken."""
    tls = authority.tls("w0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    opener = TlsLayer(context, FrameDecoder(max_body=1000), opener=True)
    opener.start()
    with pytest.raises(PeerRefused, match=r"TLS 1\.3"):
        side(credentials["w1"], opener=False).feed(opener.outgoing.read())


@pytest.mark.parametrize("looks", [False, True])
def test_what_comes_behind_the_end_is_not_waited_for(credentials: dict[str, Credentials], looks: bool) -> None:
    """Whoever says that it sends no more, and sends something, ends the connection, and holds up nobody."""
    acceptor = side(credentials["w1"], opener=False)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    opener = credentials["w0"].context(opener=True)[0].wrap_bio(incoming, outgoing)
    for _ in range(3):
        with contextlib.suppress(ssl.SSLWantReadError):
            opener.do_handshake()
        acceptor.feed(outgoing.read())
        incoming.write(acceptor.outgoing.read())
    assert acceptor.open
    with contextlib.suppress(ssl.SSLWantReadError):
        opener.unwrap()
    data = outgoing.read() + b"more"
    with pytest.raises(ConnectionResetError):
        if looks:
            look(acceptor, deque([data]), MOST)
        else:
            acceptor.feed(data)
    assert acceptor.state is TlsState.SHUT


# --- a thread that reads for itself -----------------------------------------------------------------------------------


def test_what_is_looked_at_stays_until_it_is_taken(credentials: dict[str, Credentials]) -> None:
    """A second look sees it again; whoever feeds gets it first; taken, it is gone."""
    opener, acceptor = shaken(credentials)
    unread = deque([encrypted(opener, frame(1, 10))])
    assert look(acceptor, unread, MOST) == frame(1, 10)
    assert len(unread) == 0
    unread.append(encrypted(opener, frame(2)))
    assert look(acceptor, unread, MOST) == frame(1, 10) + frame(2)
    assert found(acceptor.feed(encrypted(opener, frame(3)))) == [(1, 10, []), (2, 0, []), (3, 0, [])]
    assert look(acceptor, deque([encrypted(opener, frame(4))]), MOST) == frame(4)
    acceptor.taking()()
    assert acceptor.feed() == []
