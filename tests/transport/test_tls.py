"""One side of TLS, on bytes: what is sent arrives however it is cut, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.interrupts import SocketTurn
from aiorpc.protocol.frames import CHUNK, READ_SIZE, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.states import TlsState
from aiorpc.transport.certificates import Credentials
from aiorpc.transport.tls import PIECE, RECORD, TlsLayer
from tests.authority import Authority
from tests.tiers import examples
from tests.transport.ends import LONG, SOON, End, encoded, takes_little, unread, until

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


# --- connections with tls over real sockets ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def credentials_of_tls_connection(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials(Authority(tmp_path_factory.mktemp("authority")).tls("w"), "w")


def layer(credentials_of_tls_connection: Credentials, opener: bool, decoder: FrameDecoder) -> TlsLayer:
    context, own = credentials_of_tls_connection.context(opener=opener)
    return TlsLayer(context, decoder, opener=opener, own=own)


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        return near, far


@pytest.fixture
async def ends(credentials_of_tls_connection: Credentials) -> AsyncIterator[tuple[End, End]]:
    """Two connections, tied together, that are open; small socket buffers, so that writes are often partial."""
    near, far = connected()
    pair = (
        End(near, "left", partial(layer, credentials_of_tls_connection, True)),
        End(far, "right", partial(layer, credentials_of_tls_connection, False)),
    )
    told: list[End] = []
    for end in pair:
        takes_little(end.sock)
        end.connection.on_open = partial(told.append, end)
        end.connection.start()
    await until(lambda: len(told) == 2)
    yield pair
    for end in pair:
        end.connection.abort()


class Far:
    """The bare socket at the other end of a connection, and its side of TLS."""

    def __init__(self, sock: socket.socket, tls: TlsLayer) -> None:
        self.sock, self._tls = sock, tls
        sock.setblocking(False)

    def send(self, data: bytes) -> None:
        self.send_raw(self.encrypted(data))

    def encrypted(self, data: bytes) -> bytes:
        self._tls.encrypt(data)
        return self._tls.outgoing.read()

    def send_raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def shake(self) -> None:
        """Take what has come of TLS itself, and answer."""
        with contextlib.suppress(BlockingIOError):
            self._tls.feed(self.sock.recv(1 << 16))
        if data := self._tls.outgoing.read():
            self.send_raw(data)

    def frames(self) -> list[Frame]:
        """What has come."""
        found: list[Frame] = []
        with contextlib.suppress(BlockingIOError):
            while data := self.sock.recv(1 << 16):
                found += self._tls.feed(data)
        return found


@pytest.fixture
async def half(credentials_of_tls_connection: Credentials) -> AsyncIterator[tuple[End, Far]]:
    """A connection that is open, and the bare socket at its other end."""
    near, far = connected()
    with far:
        end = End(near, "half", partial(layer, credentials_of_tls_connection, True))
        other = Far(
            far, layer(credentials_of_tls_connection, False, FrameDecoder(max_body=1 << 24, max_segment=1 << 24))
        )
        opened: list[None] = []
        end.connection.on_open = partial(opened.append, None)
        end.connection.start()

        def shaken() -> bool:
            other.shake()
            return bool(opened)

        await until(shaken)
        other.shake()
        yield end, other
        end.connection.abort()


@pytest.fixture
async def shared(half: tuple[End, Far]) -> tuple[End, Far]:
    """A connection that threads may read on, and its other end."""
    looked = threading.Event()

    def enough() -> bool:
        looked.set()
        return True

    async with asyncio.timeout(LONG):
        while not looked.is_set():
            await asyncio.to_thread(half[0].connection.read_here, enough)
    return half


# --- frames -----------------------------------------------------------------------------------------------------------


async def test_large_buffers_arrive_in_their_place(ends: tuple[End, End]) -> None:
    """Segments, and chunks in the memory that was meant for them."""
    left, right = ends
    content, place = os.urandom(3_000_001), bytearray(1 << 20)
    right.connection.decoder.place = lambda transfer, body, length: memoryview(place)[:length]
    left.send(1, b"body", content)
    left.connection.send(encode_frame(CHUNK, 2, b"\x90", [content[: 1 << 20]]))
    left.send(3)
    frames = await right.received(3)
    assert [frame.call_id for frame in frames] == [1, 2, 3]
    assert bytes(frames[0].segments[0]) == content
    assert bytes(place) == content[: 1 << 20]


async def test_both_ways_at_once_from_many_threads(ends: tuple[End, End]) -> None:
    """Each thread's frames arrive in its order, while both sides send and read."""

    def send(end: End, thread: int) -> None:
        for number in range(50):
            end.send(thread << 16 | number, bytes(number * 400), urgent=number % 3 == 0)

    await asyncio.gather(*(asyncio.to_thread(send, end, thread) for end in ends for thread in range(3)))
    for end in ends:
        frames = await end.received(150)
        for thread in range(3):
            assert [f.call_id & 0xFFFF for f in frames if f.call_id >> 16 == thread] == list(range(50))


@pytest.mark.parametrize("waits", [True, False], ids=["a thread reads", "the loop reads"])
async def test_one_flipped_bit_ends_the_connection(shared: tuple[End, Far], waits: bool) -> None:
    """Whoever reads: nothing of it is handed out, and the other side gets an alert."""
    end, far = shared
    waiter = await Waiter(end).looks() if waits else None
    data = bytearray(far.encrypted(encoded(7)))
    data[9] ^= 1
    far.send_raw(bytes(data))
    if waiter is not None:
        await waiter.ended()
        assert waiter.taken == []
    assert isinstance(await end.closed(), ProtocolError)
    assert end.frames == []
    with pytest.raises(PeerRefused, match="bad record mac"):
        far.frames()


async def test_an_error_of_on_open_closes_the_connection(credentials_of_tls_connection: Credentials) -> None:
    """Whoever looks at the certificate may refuse it: nothing is sent."""
    near, far = connected()
    left = End(near, "left", partial(layer, credentials_of_tls_connection, True))
    right = End(far, "right", partial(layer, credentials_of_tls_connection, False))

    def refuse() -> None:
        raise PeerRefused("not you")

    left.connection.on_open = refuse
    right.connection.start()
    left.connection.start()
    cause = await left.closed()
    assert isinstance(cause, PeerRefused) and "not you" in str(cause)
    await right.closed()
    assert right.frames == []


# --- threads that read for themselves ---------------------------------------------------------------------------------


class Waiter:
    """A thread that reads on a connection until an answer is there, or until it is told to stop."""

    def __init__(self, end: End) -> None:
        self.connection = end.connection
        self.taken: list[Frame] = []
        self.stop = threading.Event()
        self.looking = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.taken += self.connection.read_here(self._enough)

    def _enough(self) -> bool:
        self.looking.set()
        return self.stop.is_set()

    async def looks(self) -> Waiter:
        assert await asyncio.to_thread(self.looking.wait, LONG)
        return self

    async def ended(self) -> None:
        """Wait until it has gone by itself."""
        try:
            await asyncio.to_thread(self.thread.join, SOON)
            assert not self.thread.is_alive(), "it reads on"
        finally:
            self.stop.set()
            await asyncio.to_thread(self.thread.join, LONG)


async def test_waiter_takes_answers_in_pieces(shared: tuple[End, Far]) -> None:
    """Once all of them are there, however the records are cut; the loop goes on behind them."""
    end, far = shared
    data = far.encrypted(encoded(7)[:11]) + far.encrypted(encoded(7)[11:] + encoded(8, b"x" * 20_000))
    waiter = await Waiter(end).looks()
    for start in range(0, len(data), 700):
        far.send_raw(data[start : start + 700])
        if start + 700 < len(data):
            await until(lambda: not unread(end.sock))
    await waiter.ended()
    assert [frame.call_id for frame in waiter.taken] == [7, 8]
    far.send(encoded(9))
    assert [frame.call_id for frame in await end.received(1)] == [9]


# --- interruptions ----------------------------------------------------------------------------------------------------
