"""What is written to a socket pair: order, many threads, full sockets, interruptions."""

from __future__ import annotations

import asyncio
import socket

import pytest

from aiorpc.protocol.frames import FrameDecoder, Kind, encode_frame
from aiorpc.transport.writing import BATCH_FRAMES
from tests.transport.ends import LONG, End, encoded, read_all


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
