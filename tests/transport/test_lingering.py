"""The last words of a connection over TCP: they arrive, whatever the other side sends meanwhile."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from aiorpc.protocol.frames import READ_SIZE, Frame, Kind
from aiorpc.transport import connection as connection_module
from aiorpc.transport import reading as reading_module
from tests.transport.ends import LONG, End, encoded, unread, until

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


async def test_an_end_that_never_closes_is_waited_for_in_vain(
    tied: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a bounded time; nothing that comes meanwhile is handed on, and reading cannot begin again."""
    left, right = tied
    monkeypatch.setattr(connection_module, "CLOSING", 0.1)
    right.connection.pause()
    left.connection.close()
    left.connection.resume()
    right.send(1, bytes(DATA), urgent=True)
    assert not left.causes
    assert await left.closed() is None and left.connection.ended and not left.frames


@pytest.mark.parametrize("both", [False, True])
async def test_a_close_is_over_as_soon_as_the_other_side_has_closed(
    tied: tuple[End, End], both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is not waited for, nor if both close at once."""
    monkeypatch.setattr(connection_module, "CLOSING", 100 * LONG)
    left, right = tied
    for end in tied if both else (left,):
        end.send(1, b"goodbye")
        end.connection.close()
    assert (await right.closed() is None) is both
    assert await left.closed() is None and left.connection.ended


async def test_a_goodbye_behind_much_data_is_read_before_a_write_that_fails_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than one turn's worth, by somebody who stops reading again and again."""
    monkeypatch.setattr(reading_module, "TURN_BYTES", 1024)
    near, far = tcp_pair(takes=LARGE)
    end = End(near, "end")

    def on_frames(frames: list[Frame]) -> None:
        end.on_frames(frames)
        end.connection.pause()

    end.connection.on_frames = on_frames
    end.connection.start()
    end.connection.pause()
    data = b"".join(encoded(number, bytes(READ_SIZE // 8)) for number in range(10)) + encoded(10, b"", Kind.GOODBYE)
    with far:
        far.sendall(data)
        await until(lambda: unread(near) == len(data))
    for _ in range(3):  # the first is answered by a reset, which the next one finds
        end.send(1, b"x", urgent=True)
    assert isinstance(await end.closed(), OSError)
    assert end.frames[-1].kind == Kind.GOODBYE
