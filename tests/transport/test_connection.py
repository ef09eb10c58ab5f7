"""Connections over socket pairs: order, partial writes, threads, garbage, and the ways to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading

import pytest

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import DIRECT_SIZE, Frame, Kind, encode_frame
from aiorpc.transport import sockets
from aiorpc.transport.silence import Heard, Silence, hear
from tests.transport.ends import LONG, End, Watched, read_all, until


@pytest.mark.parametrize("urgent", [False, True])
async def test_frames_arrive_in_order(ends: tuple[End, End], urgent: bool) -> None:
    """Frames of all sizes arrive once each, in the order of send, in both directions."""
    left, right = ends
    sizes = [0, 1, 100, 20_000, 300_000, 5, 70_000, 0]
    for sender, receiver in ((left, right), (right, left)):
        for number, size in enumerate(sizes):
            sender.send(number, bytes([number]) * size, urgent=urgent)
        frames = await receiver.received(len(sizes))
        assert [(frame.call_id, frame.body) for frame in frames] == [
            (number, bytes([number]) * size) for number, size in enumerate(sizes)
        ]
        assert sender.connection.unsent == 0
    assert left.connection.bytes_sent == right.connection.bytes_received


async def test_large_segments_survive_partial_writes(ends: tuple[End, End]) -> None:
    """Segments far larger than the socket's buffer arrive bit for bit, frames behind them too."""
    left, right = ends
    segments = [os.urandom(size) for size in (3_000_000, 7, DIRECT_SIZE, 1_000_001)]
    left.send(1, b"body", *segments)
    left.send(2, b"behind")
    assert left.connection.unsent > 0, "the test needs a socket that takes less than everything"
    first, second = await right.received(2)
    assert [bytes(segment) for segment in first.segments] == segments
    assert second.body == b"behind"


# --- ending -----------------------------------------------------------------------------------------------------------


async def test_close_writes_what_is_queued(half: tuple[End, socket.socket]) -> None:
    """close flushes what the socket does not take at once, as long as the peer reads; then the peer sees the end."""
    end, far = half
    body = b"x" * 1_000_000
    end.send(1, body)
    end.send(2, b"goodbye")
    end.connection.close()
    assert end.connection.closed
    data = await read_all(far)
    assert data.endswith(b"goodbye")
    assert len(data) == 18 + len(body) + 18 + 7
    assert await end.closed() is None


async def test_close_does_not_wait_for_a_peer_that_does_not_read(half: tuple[End, socket.socket]) -> None:
    """With a peer that reads nothing, close ends after a bounded time all the same."""
    end, _ = half
    end.send(1, b"x" * 1_000_000)
    end.connection.close()
    assert await end.closed() is None


async def test_close_waits_for_a_thread_that_is_writing(watched: tuple[End, Watched, socket.socket]) -> None:
    """What another thread has taken off the queue and not yet written is not lost by close."""
    end, slow, far = watched
    slow.held = True
    body = b"x" * 1_000_000
    thread = threading.Thread(target=end.send, args=(1, body), kwargs={"urgent": True})
    thread.start()
    assert await asyncio.to_thread(slow.inside.wait, LONG)
    threading.Timer(0.05, slow.go.set).start()
    end.connection.close()
    assert len(await read_all(far)) == 18 + len(body)
    await asyncio.to_thread(thread.join, LONG)


async def test_abort_drops_what_is_queued(half: tuple[End, socket.socket]) -> None:
    """abort ends at once with the given cause; nothing more is written or taken."""
    end, far = half
    end.send(1, b"x" * 1_000_000, urgent=True)
    cause = TimeoutError("enough")
    end.connection.abort(cause)
    assert end.causes == [cause]
    end.send(2, b"too late", urgent=True)
    assert end.connection.unsent == 0
    assert b"too late" not in await read_all(far)


async def test_frames_before_the_end_are_handed_out_first(ends: tuple[End, End]) -> None:
    """A peer that sends and leaves at once is heard to the end."""
    left, right = ends
    for number in range(20):
        left.send(number, b"x" * 1000)
    left.connection.close()
    assert isinstance(await right.closed(), ConnectionResetError)
    assert [frame.call_id for frame in right.frames] == list(range(20))


@pytest.mark.parametrize("urgent", [False, True])
async def test_what_was_said_before_the_end_is_heard_by_a_writer(half: tuple[End, socket.socket], urgent: bool) -> None:
    """A write that fails because the peer has gone does not hide its last words: a goodbye is no broken connection."""
    end, far = half
    far.send(b"".join(bytes(part) for part in encode_frame(Kind.GOODBYE, 0, b"")))
    far.close()
    end.send(1, b"call", urgent=urgent)
    assert isinstance(await end.closed(), ConnectionError)
    assert [frame.kind for frame in end.frames] == [Kind.GOODBYE]


async def test_many_threads_send_while_it_closes(ends: tuple[End, End]) -> None:
    """Threads that go on sending while the connection ends neither fail nor hang."""
    left, right = ends
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            left.send(1, b"x" * 500, urgent=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    await right.received(50)
    left.connection.abort()
    stop.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, LONG)
        assert not thread.is_alive()
    assert isinstance(await right.closed(), ConnectionError)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"\xff" * 5000])
async def test_garbage_closes_the_connection(half: tuple[End, socket.socket], garbage: bytes) -> None:
    """A peer that does not speak the protocol is cut off, with ProtocolError as the cause."""
    end, far = half
    far.send(garbage)
    assert isinstance(await end.closed(), ProtocolError)
    # The end may be seen as a reset: what we did not read was thrown away.
    with contextlib.suppress(ConnectionResetError):
        assert await read_all(far) == b""


async def test_peer_that_leaves_in_the_middle_of_a_frame(half: tuple[End, socket.socket]) -> None:
    """A half frame is not handed out; the end is an end."""
    end, far = half
    far.send(b"".join(bytes(part) for part in encode_frame(Kind.CALL, 1, b"body"))[:-1])
    far.shutdown(socket.SHUT_WR)
    assert isinstance(await end.closed(), ConnectionResetError)
    assert end.frames == []


async def test_error_in_the_handler_closes_and_is_logged(
    half: tuple[End, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """An error that a frame causes above ends this connection, is logged with its traceback, and is the cause."""
    end, far = half
    error = KeyError("bug")

    def broken(_: list[Frame]) -> None:
        raise error

    end.connection.on_frames = broken
    with caplog.at_level(logging.ERROR, "aiorpc"):
        far.send(b"".join(bytes(part) for part in encode_frame(Kind.CALL, 1, b"")))
        assert await end.closed() is error
    (record,) = caplog.records
    # Behind the name of the last worker of this process, if tests before this one had one.
    assert record.getMessage().endswith("half: a frame could not be handled")


async def test_forked_child_lets_go_silently(half: tuple[End, socket.socket]) -> None:
    """close_in_child closes the descriptor and tells neither the peer nor the loop."""
    end, far = half
    twin = end.sock.dup()
    asyncio.get_running_loop().remove_reader(end.sock.fileno())
    end.connection.close_in_child()
    with twin:
        assert end.connection.closed
        assert end.causes == []
        with pytest.raises(BlockingIOError):
            far.recv(1)


async def test_whoever_has_closed_his_ear_and_talks_on_is_not_heard_for_ever(half: tuple[End, socket.socket]) -> None:
    """What stands in the socket as a write fails is taken, for a goodbye among it; what comes after that is not."""
    end, far = half
    more = b"".join(bytes(part) for part in encode_frame(Kind.CREDIT, 1, b""))
    far.send(more)
    await end.received(1)

    def on_frames(frames: list[Frame]) -> None:
        end.on_frames(frames)
        end.connection.pause()  # as for a caller that takes no answers
        if len(end.frames) < 5000:
            far.send(more)

    far.send(more)
    far.shutdown(socket.SHUT_RD)
    end.connection.pause()
    end.connection.on_frames = on_frames
    end.send(1, b"answer", urgent=True)
    assert isinstance(await end.closed(), BrokenPipeError)
    assert 2 <= len(end.frames) < 10


# --- a host that is silent, and one whose process is only busy --------------------------------------------------------


def test_silence_lasts_from_the_first_look_that_saw_it() -> None:
    """As long as an answer is owed and none comes."""
    silence = Silence()
    assert silence.look(Heard(True, 50.0), 100.0) == 0.0  # what was sent a moment ago may be answered
    assert silence.look(Heard(True, 52.0), 102.0) == 2.0
    assert silence.look(Heard(True, 70.0), 120.0) == 20.0


def test_an_answer_ends_a_silence() -> None:
    """Also one between two looks, though the next answer is owed by then; and so does having nothing to answer."""
    silence = Silence()
    silence.look(Heard(True, 0.0), 100.0)
    assert silence.look(Heard(True, 0.5), 110.0) == 0.5
    assert silence.look(Heard(True, 5.5), 115.0) == 5.5
    assert silence.look(Heard(False, 6.5), 116.0) == 0.0
    assert silence.look(Heard(True, 12.0), 122.0) == 0.0


async def test_a_closed_window_is_no_silence() -> None:
    """A process that reads nothing is not silent: its host acknowledges, and answers probes of the closed window."""
    with (
        sockets.listen_tcp("127.0.0.1", None) as listener,
        await sockets.connect_tcp("127.0.0.1", listener.getsockname()[1]) as sock,
    ):
        listener.setblocking(True)
        with listener.accept()[0]:
            full = False
            while not full:
                try:
                    sock.send(bytes(1 << 20))
                except BlockingIOError:
                    full = True
            asked: list[float] = []

            def probed() -> bool:
                heard = hear(sock)
                assert heard is not None and not (heard.owes and heard.ago > 5.0)
                if not asked or heard.ago < asked[-1]:
                    asked.append(heard.ago)  # it was answered anew
                else:
                    asked[-1] = heard.ago
                return len(asked) >= 4

            await until(probed)


async def test_a_connection_that_is_over_is_seen() -> None:
    """Whoever has closed it; some loops do not tell of all errors of a socket."""
    with sockets.listen_tcp("127.0.0.1", None) as listener:
        listener.setblocking(True)
        with await sockets.connect_tcp("127.0.0.1", listener.getsockname()[1]) as sock:
            far = listener.accept()[0]
            before = hear(sock)
            assert before is not None and not before.over
            far.close()
            await until(lambda: (heard := hear(sock)) is not None and heard.over)


def test_nothing_is_said_of_unix_sockets() -> None:
    """Nor of one that is closed."""
    left, right = socket.socketpair()
    with left, right:
        assert hear(left) is None
    tcp = socket.socket()
    tcp.close()
    assert hear(tcp) is None
