"""The last words of a connection over TCP: they arrive, whatever the other side sends meanwhile."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from tests.transport.ends import End, unread, until

SMALL, LARGE = 8 * 1024, 400 * 1024  # what sockets hold, about; the system doubles it
DATA = 150 * 1024


def tcp_pair(*, takes: int) -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection. takes: what each holds that was not read, in bytes, about."""
    with socket.socket() as listener, socket.socket() as near:
        for sock in (listener, near):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        near.connect(listener.getsockname())
        return near.dup(), listener.accept()[0]


@pytest.fixture
async def tied() -> AsyncIterator[tuple[End, End]]:
    """Two ends of which each has written more at once than the other one takes unread."""
    left, right = tcp_pair(takes=SMALL)
    pair = End(left, "left"), End(right, "right")
    for end in pair:
        end.connection.start()
    yield pair
    for end in pair:
        end.connection.abort()


async def test_last_words_outlive_what_the_other_side_sends_meanwhile(tied: tuple[End, End]) -> None:
    """All is in the socket, the other end reads late, and has sent what nobody here reads: nothing is thrown away."""
    left, right = tied
    for end in tied:
        end.connection.pause()
    right.send(1, b"unread", urgent=True)
    await until(lambda: unread(left.sock) > 0)
    left.send(2, bytes(DATA), urgent=True)
    left.send(3, b"goodbye", urgent=True)
    assert not left.connection.unsent, "the test needs a socket that takes all of it"
    left.connection.close()
    right.send(4, b"behind it", urgent=True)
    right.connection.resume()
    assert [frame.call_id for frame in await right.received(2)] == [2, 3]
    assert await left.closed() is None and not left.frames
    assert left.sock.fileno() == -1


async def test_last_words_wait_until_the_socket_takes_them(tied: tuple[End, End]) -> None:
    """What the socket does not take at once is written before the end is said."""
    left, right = tied
    right.connection.pause()
    for number in range(8):
        left.send(number, bytes(DATA))
    left.connection.close()
    assert left.connection.unsent and left.connection.closed and not left.connection.ended
    right.send(9, b"unread", urgent=True)
    right.connection.resume()
    assert [frame.call_id for frame in await right.received(8)] == [*range(8)]
    assert await left.closed() is None
