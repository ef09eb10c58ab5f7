"""Connections that outlive their sockets: over sockets that break at any byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator

import pytest

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.session import ACK_BYTES
from aiorpc.transport.connection import Connection
from tests.tiers import examples
from tests.transport.ends import LONG, takes_little, until

LIMIT = 1 << 20


class LastingEnd:
    """One end, with what it was given, and how often its socket has broken."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self.connection = connection(sock)
        self.frames: list[Frame] = []
        self.suspended = 0
        self.causes: list[BaseException | None] = []
        self.sent = 0
        self.connection.on_frames = self.frames.extend
        self.connection.on_closed = self.causes.append
        self.connection.on_suspended = self.on_suspended
        self.connection.start()
        self.connection.last(limit)

    def on_suspended(self, cause: OSError) -> None:
        self.suspended += 1

    def send(self, size: int = 0, parts: int = 1) -> None:
        """The next one, with its number in its body and in its segments."""
        segments = [bytes([self.sent % 251]) * size] * parts if size else []
        self.connection.send(encode_frame(Kind.CALL, self.sent, b"%d" % self.sent, segments), urgent=self.sent % 2 == 0)
        self.sent += 1


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection, which do not take much at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def connection(sock: socket.socket) -> Connection:
    made = Connection(
        asyncio.get_running_loop(), sock, FrameDecoder(max_body=1 << 20, max_segment=1 << 24), label="end"
    )
    takes_little(sock)
    return made


class Pair:
    """Both ends and the sockets between them."""

    def __init__(self, limit: int = LIMIT, *, sealed: bool = False) -> None:
        self.socks = tcp_pair()
        self.sealed = sealed
        self.ends = [LastingEnd(sock, limit) for sock in self.socks]
        self.opener, self.acceptor = self.ends

    def cut(self) -> None:
        for sock in self.socks:
            with contextlib.suppress(OSError):  # it has noticed by itself
                sock.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """As after a handshake over new sockets."""
        self.socks = tcp_pair()
        left, right = [connection(sock) for sock in self.socks]
        if self.sealed:
            keys = secrets.token_bytes(32), secrets.token_bytes(32)
            for made, (ours, theirs) in ((left, keys), (right, keys[::-1])):
                made.unseal(theirs)
                made.seal(ours)
        opener, acceptor = self.opener.connection, self.acceptor.connection
        acceptor.halt()
        said = acceptor.received
        acceptor.go_on(right, opener.received, opener=False)
        opener.go_on(left, said, opener=True)

    def check(self) -> None:
        """All that either end has sent was handed on at the other one, once, in order, and unchanged."""
        for near, far in (self.ends, self.ends[::-1]):
            assert [frame.call_id for frame in far.frames] == list(range(near.sent))
            for frame in far.frames:
                assert frame.body == b"%d" % frame.call_id
                assert all(bytes(segment) == bytes([frame.call_id % 251]) * len(segment) for segment in frame.segments)

    def done(self) -> bool:
        return all(len(far.frames) >= near.sent for near, far in (self.ends, self.ends[::-1]))

    def close(self) -> None:
        for end in self.ends:
            end.connection.abort()


@pytest.fixture(params=[False, True], ids=["open", "sealed"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    made = Pair(sealed=request.param)
    yield made
    made.close()


async def test_frames_arrive_over_the_next_socket(pair: Pair) -> None:
    """Those that were under way, those that were sent while there was none, and those after."""
    for end in pair.ends:
        for _ in range(10):
            end.send()
    await until(pair.done)
    for _ in range(3):
        pair.cut()
        await until(lambda: all(end.connection.suspended for end in pair.ends))
        for end in pair.ends:
            assert end.connection.suspended and not end.connection.closed
            end.send()
            end.send(100_000, 3)
        pair.mend()
        for end in pair.ends:
            end.send()
        await until(pair.done)
    pair.check()
    assert [end.causes for end in pair.ends] == [[], []]


@pytest.mark.random
@pytest.mark.parametrize("seed", range(examples(15)))
async def test_random_cuts(seed: int) -> None:
    """At any byte of small and of large frames, while both ends have much to send and keep little."""
    rng = random.Random(seed)
    pair = Pair(200_000, sealed=seed % 2 == 1)
    for _ in range(15):
        for _ in range(rng.randrange(15)):
            rng.choice(pair.ends).send(*rng.choice(((0, 1), (100, 1), (40_000, 1), (300_000, 1), (1000, 300))))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            pair.cut()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if not pair.opener.connection.suspended:
                pair.opener.connection.halt()
            pair.mend()
    await until(lambda: look(pair))
    pair.check()
    pair.close()


def look(pair: Pair) -> bool:
    """Whether all is there; as somebody who looks once in a while."""
    for end in pair.ends:
        end.connection.look()
    return pair.done()


async def test_what_is_kept_is_bounded() -> None:
    """A side that reads nothing is sent no more than that; it reads on, and all arrives. Both ends are full at once."""
    pair = Pair(50_000)
    for end in pair.ends:
        end.connection.pause()
        for _ in range(100):
            end.send(5_000)
    await asyncio.sleep(0.05)
    for end in pair.ends:
        session = end.connection.lasting
        assert session is not None and session.size < 50_000 + 300_000  # one write more
    for end in pair.ends:
        end.connection.resume()
    await until(lambda: look(pair))
    pair.check()
    sessions = [end.connection.lasting for end in pair.ends]
    await until(lambda: look(pair) and all(session is not None and session.size < 1000 for session in sessions))
    pair.close()


async def test_the_acceptor_waits_for_the_opener_also_if_its_old_socket_was_full() -> None:
    """What was still to be done for the old socket, or for an acknowledgement over it, has nothing sent over the new
    one: the opener takes nothing that comes right behind the handshake."""
    pair = Pair()
    acceptor, opener = pair.ends[::-1]
    opener.send()
    await until(lambda: len(acceptor.frames) == 1)
    acceptor.send(3_000_000)  # so the loop is to wait until the socket takes more
    assert acceptor.connection.unsent
    acceptor.connection.halt()
    opener.connection.halt()
    near, far = tcp_pair()
    left, right = connection(near), connection(far)
    said = acceptor.connection.received
    acceptor.connection.go_on(right, opener.connection.received, opener=False)
    for _ in range(10):
        await asyncio.sleep(0)
        acceptor.connection.look()
        acceptor.send()
    with pytest.raises(BlockingIOError):
        near.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    opener.connection.go_on(left, said, opener=True)
    await until(pair.done)
    pair.check()
    pair.close()


async def test_what_threads_read_is_acknowledged() -> None:
    """By bytes, as what the loop reads: nobody has to look first, and the other end does not wait for that."""
    pair = Pair(2 * ACK_BYTES)
    near, far = pair.ends
    loop, answer = asyncio.get_running_loop(), encode_frame(Kind.REPLY, 1, bytes(100_000))
    many = 4 * ACK_BYTES // 100_000
    near.connection.read_here(lambda: True)  # so that threads may, from now on

    def read_all() -> int:
        """As threads do that wait, each for the answer of the call that it has just made."""
        taken, limit = 0, time.monotonic() + LONG
        for number in range(many):
            sent = False

            def enough() -> bool:
                nonlocal sent
                if not sent:
                    sent = True
                    loop.call_soon_threadsafe(far.connection.send, answer)
                return taken + len(near.frames) > number or time.monotonic() > limit  # noqa: B023

            while taken + len(near.frames) <= number:
                taken += len(near.connection.read_here(enough))
                assert time.monotonic() < limit, f"{number} answers have come, and no more"
        return taken

    assert await asyncio.to_thread(read_all) > many // 2
    pair.close()


async def test_an_end_that_is_no_break_is_final() -> None:
    """A frame that is none ends the connection; so does whoever closes it, and the grace that is over."""
    pair = Pair()
    pair.acceptor.connection.on_suspended = None  # it has said its last word
    pair.socks[0].send(b"no frame" * 10)
    await until(lambda: len(pair.acceptor.causes) == 1)
    assert isinstance(pair.acceptor.causes[0], ProtocolError)
    await until(lambda: pair.opener.suspended == 1)
    cause = TimeoutError("the grace is over")
    pair.opener.connection.abort(cause)
    assert pair.opener.causes == [cause]
    assert pair.opener.connection.ended and not pair.opener.connection.suspended


async def test_a_number_that_cannot_be_leaves_it_suspended() -> None:
    """The other end claims to have received what was not sent."""
    pair = Pair()
    pair.cut()
    await until(lambda: pair.opener.suspended == 1)
    near, far = tcp_pair()
    other = connection(near)
    with far, pytest.raises(ProtocolError, match="has received 5 frames"):
        pair.opener.connection.go_on(other, 5, opener=True)
    assert pair.opener.connection.suspended and not other.ended
    other.abort()
    pair.close()
