"""What is written to a socket pair: order, many threads, full sockets, interruptions."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.interrupts import SocketTurn
from aiorpc.protocol.frames import Buffer, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.seal import MAX_PAYLOAD, Seal, Unsealer
from aiorpc.transport.send_queue import JOIN_SIZE, SendQueue
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


# --- the queue of frames on their way into a socket -------------------------------------------------------------------


DONT_WAIT = int(socket.MSG_DONTWAIT)
MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
EVERYTHING = 1 << 30


class Taker:
    """A socket that takes the given amounts, None for nothing now, and everything once they are used up."""

    def __init__(self, amounts: Iterable[int | None] = ()) -> None:
        self.amounts: Iterator[int | None] = iter(amounts)
        self.data = bytearray()
        self.handed: list[list[Buffer]] = []

    def send(self, data: Buffer, flags: int) -> int:
        return self._take([data])

    def sendmsg(self, buffers: Sequence[Buffer], ancillary: Sequence[Any], flags: int) -> int:
        if len(buffers) > MOST_BUFFERS:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        return self._take(buffers)

    def _take(self, buffers: Sequence[Buffer]) -> int:
        amount = next(self.amounts, EVERYTHING)
        if amount is None:
            raise BlockingIOError
        self.handed.append(list(buffers))
        data = b"".join(buffers)[:amount]
        self.data += data
        return len(data)


def write(queue: SendQueue, sock: Taker) -> tuple[int, bool]:
    return queue.write(cast(socket.socket, sock), SocketTurn(lambda: None, queue.frames, DONT_WAIT))


def drain(queue: SendQueue, sock: Taker, calls: int = 10_000) -> None:
    """Write until all is written, in so many calls at most."""
    for _ in range(calls):
        if not queue:
            return
        try:
            write(queue, sock)
        except BlockingIOError:
            continue
    raise AssertionError(f"{len(queue)} frames are left")


def filled(frames: Iterable[Sequence[Buffer]]) -> SendQueue:
    queue = SendQueue()
    for frame in frames:
        queue.append(frame)
    return queue


def joined(frames: Iterable[Sequence[Buffer]]) -> bytes:
    return b"".join(bytes(buffer) for frame in frames for buffer in frame)


sizes = st.sampled_from([1, 5, 700, JOIN_SIZE, JOIN_SIZE + 1, 50_000]) | st.integers(1, 100)
frame_sizes = st.lists(st.lists(sizes, min_size=1, max_size=5), max_size=10)
some_amounts = st.lists(st.none() | st.integers(0, 100) | st.integers(1, 100_000), max_size=30)


def make_frames(lengths: Sequence[Sequence[int]]) -> list[list[Buffer]]:
    """Frames of such buffers, whose bytes tell them apart."""
    numbers = iter(range(1 << 30))
    return [
        [next(numbers).to_bytes(4, "little") * (size // 4) + b"." * (size % 4) for size in frame] for frame in lengths
    ]


# --- what it writes ---------------------------------------------------------------------------------------------------


@given(frame_sizes, frame_sizes, some_amounts)
def test_bytes_leave_in_order_however_little_is_taken(
    first: list[list[int]], second: list[list[int]], amounts: list[int | None]
) -> None:
    """Whatever frames, and whatever the socket takes of them while more are appended: each byte once, in order."""
    frames = make_frames([*first, *second])
    sock = Taker(amounts)
    queue = filled(frames[: len(first)])
    for frame in frames[len(first) :]:
        queue.append(frame)
        try:
            write(queue, sock)
        except BlockingIOError:
            continue
    drain(queue, sock)
    assert bytes(sock.data) == joined(frames)


def test_frames_cross_a_real_socket() -> None:
    """Small frames and large ones, more than the socket holds at once, arrive bit for bit."""
    frames = [
        encode_frame(Kind.CALL, number, b"x" * number, [os.urandom(40_000)] * (number % 3)) for number in range(60)
    ]
    queue = filled(frames)
    expected, found = joined(frames), bytearray()
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(10_000):
            if not queue:
                break
            try:
                queue.write(left, SocketTurn(lambda: None, queue.frames, DONT_WAIT))
            except BlockingIOError:
                found += right.recv(1 << 16)
        left.close()
        while data := right.recv(1 << 16):
            found += data
    assert found == expected


def test_large_buffers_are_not_copied() -> None:
    """What is larger than joining pays for goes to the system as the very same object, between joined small ones."""
    large: list[Buffer] = [bytearray(JOIN_SIZE + 1), memoryview(bytearray(50_000))]
    sock = Taker()
    drain(filled([[b"a"], [b"b", large[0], b"c"], [b"d", large[1]]]), sock)
    ((first, second, third, fourth),) = sock.handed
    assert (first, third) == (b"ab", b"cd")
    assert second is large[0]
    assert fourth is large[1]


def test_error_of_the_socket_loses_nothing() -> None:
    """When the socket raises, write raises that, and the same bytes are offered again."""
    queue, sock = filled([[b"one"], [b"two" * JOIN_SIZE]]), Taker([2, None, None])
    write(queue, sock)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            write(queue, sock)
    drain(queue, sock)
    assert bytes(sock.data) == b"one" + b"two" * JOIN_SIZE


# --- seals ------------------------------------------------------------------------------------------------------------


KEY = b"k" * 32


def opened(data: bytes | bytearray) -> bytes:
    """What the pieces say, which have to be whole and in order."""
    unsealer = Unsealer(Seal(KEY), FrameDecoder(max_body=1 << 20))
    payload, count, missing = unsealer.look(bytes(data))
    assert missing == 0 and bool(count) == bool(data)
    return payload


@given(frame_sizes, frame_sizes, some_amounts, st.sampled_from([2000, JOIN_SIZE, MAX_PAYLOAD]))
def test_sealed_bytes_leave_in_order_however_little_is_taken(
    first: list[list[int]], second: list[list[int]], amounts: list[int | None], most: int
) -> None:
    """Whatever ends where, and whatever is appended meanwhile: the pieces hold each byte once."""
    frames = make_frames([*first, *second])
    sock = Taker(amounts)
    queue = filled(frames[: len(first)])
    queue.seal(Seal(KEY), most)
    for frame in frames[len(first) :]:
        queue.append(frame)
        try:
            write(queue, sock)
        except BlockingIOError:
            continue
    drain(queue, sock)
    assert opened(sock.data) == joined(frames)


def test_what_changes_while_it_is_sent_keeps_its_seal() -> None:
    """A program may go on with a tensor that is under way: a piece is a copy."""
    tensor = bytearray(100_000)
    queue, sock = filled([[b"head", tensor]]), Taker([10, 50_000])
    queue.seal(Seal(KEY))
    while queue:
        write(queue, sock)
        tensor[:] = b"\1" * len(tensor)
    assert opened(sock.data) == b"head" + bytes(100_000)


# --- interruption -----------------------------------------------------------------------------------------------------


LARGE = b"L" * (JOIN_SIZE + 1)
