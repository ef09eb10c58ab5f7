"""What is written to a socket pair: order, many threads, full sockets, interruptions."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from aiorpc.protocol.frames import FrameDecoder, Kind, encode_frame
from aiorpc.transport.writing import BATCH_FRAMES
from tests.transport.ends import LONG, End, Watched, encoded, read_all, takes_little


@pytest.mark.parametrize("urgent", [False, True])
async def test_frames_from_many_threads_keep_each_threads_order(ends: tuple[End, End], urgent: bool) -> None:
    """Eight threads and the loop send at once: every frame arrives whole and once, each sender's in its order."""
    left, right = ends
    threads, count = 8, 300

    def work(thread: int) -> None:
        for number in range(count):
            left.send(thread, number.to_bytes(4, "little") * (1 + number % 50 * 20), urgent=urgent)

    jobs = [asyncio.to_thread(work, thread) for thread in range(threads)]
    work(threads)
    await asyncio.gather(*jobs)
    frames = await right.received((threads + 1) * count)
    for thread in range(threads + 1):
        mine = [frame.body for frame in frames if frame.call_id == thread]
        assert [int.from_bytes(body[:4], "little") for body in mine] == list(range(count))
        assert all(body == body[:4] * (len(body) // 4) for body in mine)
    assert len(frames) == (threads + 1) * count


async def test_urgent_frame_is_written_by_its_sender(half: tuple[End, socket.socket]) -> None:
    """With nothing else under way an urgent frame is in the socket when send returns, from any thread, loop or not."""
    end, far = half
    expected = b"".join(bytes(part) for part in encode_frame(Kind.CALL, 7, b"now"))
    end.send(7, b"now", urgent=True)
    assert far.recv(100) == expected
    thread = threading.Thread(target=end.send, args=(7, b"now"), kwargs={"urgent": True})
    thread.start()
    thread.join(LONG)  # blocks the loop: only the thread can have written
    assert far.recv(100) == expected


async def test_urgent_frame_does_not_overtake(half: tuple[End, socket.socket]) -> None:
    """An urgent frame behind others waits its turn: a cancel never arrives before its call."""
    end, far = half
    end.send(1, b"call")
    end.send(2, b"cancel", urgent=True)
    end.connection.close()
    decoder = FrameDecoder(max_body=100)
    data = await read_all(far)
    decoder.get_buffer()[: len(data)] = data
    assert [frame.call_id for frame in decoder.received(len(data))] == [1, 2]


async def test_small_frames_of_one_turn_leave_together(watched: tuple[End, Watched, socket.socket]) -> None:
    """What is sent within one turn of the loop is one write, not one for each frame."""
    end, sock, _ = watched
    for number in range(BATCH_FRAMES - 1):
        end.send(number, b"x")
    assert sock.writes == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sock.writes == [(BATCH_FRAMES - 1) * (18 + 1)]


async def test_many_small_frames_do_not_wait_for_the_turn_to_end(half: tuple[End, socket.socket]) -> None:
    """The other side gets the first of them while the rest is made; all of them arrive, in order."""
    end, far = half
    for number in range(3 * BATCH_FRAMES):
        end.send(number, b"x")
    assert len(far.recv(100_000)) == 3 * BATCH_FRAMES * (18 + 1)
    end.send(0, b"last")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert far.recv(100).endswith(b"last")


async def test_many_small_frames_behind_a_full_socket(half: tuple[End, socket.socket]) -> None:
    """A backlog of more small frames than one system call takes buffers is written as the peer reads."""
    end, far = half
    takes_little(end.sock, 4096)
    for number in range(20_000):
        end.send(number, b"x" * 20)
    assert end.connection.unsent > 10_000, "the test needs a socket that takes less than everything"
    reading = asyncio.ensure_future(read_all(far))
    async with asyncio.timeout(LONG):
        while end.connection.unsent and not end.causes:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.001)
    end.connection.close()
    assert len(await reading) == 20_000 * (18 + 20)
    assert await end.closed() is None


async def test_sender_never_blocks(half: tuple[End, socket.socket]) -> None:
    """A peer that does not read fills the queue, not the sender; once it reads, everything arrives."""
    end, far = half
    body = b"x" * 4_000_000
    for number in range(5):
        end.send(number, body, urgent=True)
    assert end.connection.unsent > 0
    reading = asyncio.ensure_future(read_all(far))
    async with asyncio.timeout(LONG):
        while end.connection.unsent:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.001)
    end.connection.close()
    assert len(await reading) == 5 * (18 + len(body))


async def test_flush_writes_what_is_queued(half: tuple[End, socket.socket]) -> None:
    """Frames with more to come wait for flush, which writes them in one go; with nothing queued it does nothing."""
    end, far = half
    end.connection.flush()
    for number in range(3):
        end.connection.send(encode_frame(Kind.CALL, number, b""), more=True)
    with pytest.raises(BlockingIOError):
        far.recv(1000)
    end.connection.flush()
    assert far.recv(1000) == b"".join(encoded(number, kind=Kind.CALL) for number in range(3))


@pytest.mark.parametrize("later", [False, True])
async def test_that_all_is_written_is_told_whoever_wrote_it(
    watched: tuple[End, Watched, socket.socket], later: bool
) -> None:
    """Also when the loop found another thread at work and left its frames to that, or when no loop wrote anything."""
    end, slow, far = watched
    slow.held = True
    drained = asyncio.Event()
    thread = threading.Thread(target=end.send, args=(1, b"first"), kwargs={"urgent": True})
    if later:
        end.connection.on_drained = drained.set
    thread.start()
    assert await asyncio.to_thread(slow.inside.wait, LONG)
    end.connection.on_drained = drained.set
    if later:
        end.send(2, b"second")
        for _ in range(3):
            await asyncio.sleep(0)
    assert not drained.is_set()
    slow.go.set()
    async with asyncio.timeout(LONG):
        await drained.wait()
    await asyncio.to_thread(thread.join, LONG)
    assert far.recv(1000) == encoded(1, b"first", Kind.CALL) + (encoded(2, b"second", Kind.CALL) if later else b"")


async def test_alarm_that_rings_in_a_write_is_no_word_of_the_socket(
    watched: tuple[End, Watched, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TimeoutError that a signal handler has raised is its thread's, and the connection goes on."""
    end, sock, far = watched

    def ring(data: bytes, flags: int) -> int:
        monkeypatch.undo()
        raise TimeoutError("the time of the program is up")

    def send() -> None:
        with pytest.raises(TimeoutError, match="the time of the program"):
            end.send(1, urgent=True)

    monkeypatch.setattr(sock, "send", ring)
    await asyncio.to_thread(send)
    end.send(2)
    expected = encoded(1, kind=Kind.CALL) + encoded(2, kind=Kind.CALL)
    found = bytearray()
    async with asyncio.timeout(LONG):
        while len(found) < len(expected) and not end.causes:
            found += await asyncio.get_running_loop().sock_recv(far, 1000)
    assert bytes(found) == expected and end.causes == []
