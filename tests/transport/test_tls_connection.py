"""Connections with TLS over real sockets: frames, ends, threads that read and write for themselves, interruptions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.protocol.frames import CHUNK, Frame, FrameDecoder, encode_frame
from aiorpc.transport.certificates import Credentials
from aiorpc.transport.tls import PIECE, RECORD, TlsLayer
from tests.authority import Authority
from tests.transport.ends import LONG, SOON, End, encoded, takes_little, unread, until


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials(Authority(tmp_path_factory.mktemp("authority")).tls("w"), "w")


def layer(credentials: Credentials, opener: bool, decoder: FrameDecoder) -> TlsLayer:
    context, own = credentials.context(opener=opener)
    return TlsLayer(context, decoder, opener=opener, own=own)


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        return near, far


@pytest.fixture
async def ends(credentials: Credentials) -> AsyncIterator[tuple[End, End]]:
    """Two connections, tied together, that are open; small socket buffers, so that writes are often partial."""
    near, far = connected()
    pair = End(near, "left", partial(layer, credentials, True)), End(far, "right", partial(layer, credentials, False))
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
async def half(credentials: Credentials) -> AsyncIterator[tuple[End, Far]]:
    """A connection that is open, and the bare socket at its other end."""
    near, far = connected()
    with far:
        end = End(near, "half", partial(layer, credentials, True))
        other = Far(far, layer(credentials, False, FrameDecoder(max_body=1 << 24, max_segment=1 << 24)))
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


@pytest.mark.parametrize("urgent", [False, True])
async def test_frames_arrive_in_order(ends: tuple[End, End], urgent: bool) -> None:
    """Frames of all sizes arrive once each, in the order of send, in both directions."""
    left, right = ends
    sizes = [0, 1, 100, RECORD, 20_000, PIECE - 17, PIECE - 18, PIECE - 19, 300_000, 5, 2_000_000, 0]
    for sender, receiver in ((left, right), (right, left)):
        for number, size in enumerate(sizes):
            sender.send(number, bytes([number]) * size, urgent=urgent)
        frames = await receiver.received(len(sizes))
        assert [(frame.call_id, frame.body) for frame in frames] == [
            (number, bytes([number]) * size) for number, size in enumerate(sizes)
        ]
        assert sender.connection.unsent == 0
    assert left.connection.bytes_sent == right.connection.bytes_received


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


async def test_the_end_is_told(half: tuple[End, Far]) -> None:
    """An end of the socket is one, with or without a word of TLS."""
    end, far = half
    far.send(encoded(1))
    far.sock.close()
    assert isinstance(await end.closed(), ConnectionResetError)
    assert [frame.call_id for frame in end.frames] == [1]


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


async def test_an_error_of_on_open_closes_the_connection(credentials: Credentials) -> None:
    """Whoever looks at the certificate may refuse it: nothing is sent."""
    near, far = connected()
    left = End(near, "left", partial(layer, credentials, True))
    right = End(far, "right", partial(layer, credentials, False))

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
