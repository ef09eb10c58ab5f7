"""Reading by a thread that stands by for calls, in place of the loop."""

from __future__ import annotations

import asyncio
import random
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import Frame, Kind
from aiorpc.transport.connection import Connection
from tests.transport.ends import LONG, End, encoded, unread, until


class Stander:
    """A thread that waits at an epoll of its own, and takes frames while it is let.

    taken: the numbers of the frames that it took. refused: of those that it did not. told: how often it was told.
    """

    def __init__(self, end: End) -> None:
        self.connection = end.connection
        self.connection.on_stood = self._on_stood
        self.epoll = select.epoll()
        self.taken: list[int] = []
        self.refused: list[int] = []
        self.told = 0
        self.takes = True
        self.waiting = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _on_stood(self, frames: list[Frame]) -> bool:
        (self.taken if self.takes else self.refused).extend(frame.call_id for frame in frames)
        return self.takes

    async def attached(self) -> Stander:
        if not self.connection.attach(self.epoll):
            await until(
                lambda: self.connection._reader.epoll is not None
            )  # reading is shared from the next turn of the loop on
            assert self.connection.attach(self.epoll)
        return self

    def wait(self, seconds: float = LONG) -> None:
        """Wait in a thread until there is something, or `stop`."""
        self._stop.clear()
        self.waiting.clear()
        self._thread = threading.Thread(target=self._wait, args=(seconds,))
        self._thread.start()
        assert self.waiting.wait(LONG)

    def _wait(self, seconds: float) -> None:
        self.waiting.set()
        end = time.monotonic() + seconds
        while not self._stop.is_set() and time.monotonic() < end:
            if self.epoll.poll(0.05):
                self.told += 1
                self.connection.read_once()
                return

    def look(self) -> None:
        """Wait as a thread does that does not sleep: the socket is kept from the loop until it has read."""
        self._stop.clear()
        self.waiting.clear()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        assert self.waiting.wait(LONG)

    def _look(self) -> None:
        assert self.connection.keep_from_loop()
        self.waiting.set()
        while not self._stop.is_set():
            if self.epoll.poll(0):
                self.told += 1
                self.connection.read_once()
                break
        self.connection.leave_to_loop()

    def join(self) -> None:
        """Wait until it was told; blocks the loop, so nobody else can have read."""
        assert self._thread is not None
        self._thread.join(LONG)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(LONG)
            assert not self._thread.is_alive()
        self.epoll.close()


@pytest.fixture
async def stander(half: tuple[End, socket.socket]) -> Stander:
    """Of a connection; attached, and not waiting yet."""
    return await Stander(half[0]).attached()


async def test_the_thread_that_waits_reads_and_the_loop_does_not(
    half: tuple[End, socket.socket], stander: Stander
) -> None:
    """What comes is taken in the thread while the loop is blocked, and the loop does not hear of it."""
    end, far = half
    stander.wait()
    far.send(encoded(1, kind=Kind.CALL))
    stander.join()
    assert stander.taken == [1]
    assert end.connection.bytes_received == len(encoded(1))
    await asyncio.sleep(0.01)
    assert end.frames == []
    stander.stop()


async def test_while_no_thread_waits_the_loop_reads(half: tuple[End, socket.socket], stander: Stander) -> None:
    """Before the first wait, between two, and after the last one; no system call is made for the change."""
    end, far = half
    for number in range(0, 6, 2):
        far.send(encoded(number))
        await end.received(number // 2 + 1)
        stander.wait()
        far.send(encoded(number + 1))
        stander.join()
    assert [frame.call_id for frame in end.frames] == [0, 2, 4]
    assert stander.taken == [1, 3, 5]
    stander.stop()
    far.send(encoded(9))
    assert [frame.call_id for frame in await end.received(4)] == [0, 2, 4, 9]


async def test_a_thread_that_does_not_sleep_reads_alone(half: tuple[End, socket.socket], stander: Stander) -> None:
    """What comes while it looks is its own, though it never waits; the loop is told of what comes later."""
    end, far = half
    for number in range(0, 60, 2):
        stander.look()
        far.send(encoded(number))
        await asyncio.to_thread(stander.join)  # the loop would have read it meanwhile
        far.send(encoded(number + 1))
        await end.received(number // 2 + 1)
    assert stander.taken == list(range(0, 60, 2))
    assert [frame.call_id for frame in end.frames] == list(range(1, 60, 2))
    stander.stop()


async def test_what_comes_as_a_thread_stops_looking_is_the_loops(
    half: tuple[End, socket.socket], stander: Stander
) -> None:
    """It was kept from the loop, which is told as soon as nobody looks any more."""
    end, far = half
    assert stander.connection.keep_from_loop()
    far.send(encoded(1))
    await asyncio.sleep(0.01)
    assert end.frames == [] and unread(end.sock)
    stander.connection.leave_to_loop()
    stander.connection.leave_to_loop()
    assert [frame.call_id for frame in await end.received(1)] == [1]
    far.send(encoded(2))
    assert [frame.call_id for frame in await end.received(2)] == [1, 2]
    stander.stop()


async def test_what_a_thread_refuses_after_a_look_goes_to_the_loop(
    half: tuple[End, socket.socket], stander: Stander
) -> None:
    """In order, and also what it has left in the socket."""
    end, far = half
    end.connection.decoder.read_size = 4096
    end.connection.decoder._buffer = bytearray(4096)
    stander.takes = False
    count = 200
    assert stander.connection.keep_from_loop()
    assert far.send(b"".join(encoded(number, bytes(60)) for number in range(count))) > 2 * 4096
    stander.connection.read_once()
    stander.connection.leave_to_loop()
    assert [frame.call_id for frame in await end.received(count)] == list(range(count))
    stander.stop()


async def test_nothing_is_kept_from_a_loop_that_has_to_read(half: tuple[End, socket.socket], stander: Stander) -> None:
    """Not twice, not while something was left to it, not while it reads, and not behind the end."""
    end, far = half
    connection = stander.connection
    assert connection.keep_from_loop()
    assert not connection.keep_from_loop()
    connection.leave_to_loop()
    stander.takes = False
    stander.wait()
    far.send(encoded(1))
    stander.join()
    assert not connection.keep_from_loop()
    await end.received(1)
    with connection._reader.reading:
        assert not await asyncio.to_thread(connection.keep_from_loop)
    assert connection.keep_from_loop()
    connection.abort()
    connection.leave_to_loop()
    assert not connection.keep_from_loop()
    assert await end.closed() is None
    stander.stop()


async def test_another_thread_that_attaches_ends_it(half: tuple[End, socket.socket], stander: Stander) -> None:
    """The loop is told again; who looked says its end later, which changes nothing."""
    end, far = half
    assert stander.connection.keep_from_loop()
    with select.epoll() as other:
        assert stander.connection.attach(other)
        far.send(encoded(1))
        await end.received(1)
        stander.connection.leave_to_loop()
        far.send(encoded(2))
        await end.received(2)
    stander.stop()


async def test_what_is_refused_goes_to_the_loop_in_order(half: tuple[End, socket.socket], stander: Stander) -> None:
    """Frames that `on_stood` does not take are handed out by the loop, before all that comes later."""
    end, far = half
    stander.takes = False
    stander.wait()
    far.send(encoded(1) + encoded(2))
    stander.join()
    far.send(encoded(3))
    assert [frame.call_id for frame in await end.received(3)] == [1, 2, 3]
    assert stander.refused == [1, 2]
    stander.stop()


async def test_nobody_reads_past_what_was_left(half: tuple[End, socket.socket], stander: Stander) -> None:
    """A thread that is told again before the loop has had its turn leaves that to the loop, too."""
    end, far = half
    stander.takes = False
    stander.wait()
    far.send(encoded(1))
    stander.join()
    stander.takes = True
    stander.wait()
    far.send(encoded(2))
    stander.join()
    assert stander.taken == [] and stander.told == 2
    assert [frame.call_id for frame in await end.received(2)] == [1, 2]
    stander.stop()


async def test_the_loop_reads_the_rest_of_a_frame(half: tuple[End, socket.socket], stander: Stander) -> None:
    """A thread that was told of the first bytes of a frame has read them; whoever is told of the others goes on."""
    end, far = half
    data = encoded(1, bytes(1000))
    stander.wait()
    far.send(data[:500])
    stander.join()
    assert stander.taken == [] and not unread(end.sock)
    far.send(data[500:])
    assert [frame.call_id for frame in await end.received(1)] == [1]
    stander.wait()
    far.send(data[:1])
    stander.join()
    stander.wait()
    far.send(data[1:])
    stander.join()
    assert stander.taken == [1]
    stander.stop()


async def test_what_is_more_than_one_socketful_is_the_loops(half: tuple[End, socket.socket], stander: Stander) -> None:
    """A thread reads once; the loop is told of what is left in the socket, also if that thread does not come back."""
    end, far = half
    end.connection.decoder.read_size = 4096  # less than the system tells of at once
    end.connection.decoder._buffer = bytearray(4096)
    count = 200
    stander.wait()
    assert far.send(b"".join(encoded(number, bytes(60)) for number in range(count))) > 2 * 4096
    stander.join()
    taken = len(stander.taken)
    assert taken and unread(end.sock)
    await end.received(count - taken)
    assert [*stander.taken, *(frame.call_id for frame in end.frames)] == list(range(count))
    stander.stop()


async def test_the_end_is_the_loops(half: tuple[End, socket.socket], stander: Stander) -> None:
    """The other side closes: the connection ends as if the loop had been told."""
    end, far = half
    stander.wait()
    far.close()
    stander.join()
    assert isinstance(await end.closed(), ConnectionResetError)
    stander.connection.read_once()  # late, as a thread may be
    assert not await asyncio.to_thread(stander.connection.attach, stander.epoll)
    stander.stop()


async def test_nothing_is_read_while_that_is_stopped(half: tuple[End, socket.socket], stander: Stander) -> None:
    """A paused connection is not read by a thread either; what came meanwhile is there after `resume`."""
    end, far = half
    stander.wait()
    end.connection.pause()
    far.send(encoded(1))
    stander.join()
    assert stander.taken == [] and unread(end.sock)
    await asyncio.sleep(0.01)
    assert end.frames == []
    end.connection.resume()
    assert [frame.call_id for frame in await end.received(1)] == [1]
    stander.stop()


@pytest.mark.parametrize("ending", [Connection.close, Connection.abort])
async def test_a_connection_ends_while_a_thread_waits(
    half: tuple[End, socket.socket], stander: Stander, ending: Callable[[Connection], None]
) -> None:
    """The other side sees the end at once: the thread's epoll does not keep the socket."""
    end, far = half
    stander.wait()
    ending(end.connection)
    assert await end.closed() is None
    async with asyncio.timeout(LONG):
        assert await asyncio.get_running_loop().sock_recv(far, 1) == b""
    stander.stop()
    assert stander.taken == []


async def test_nonsense_ends_the_connection(half: tuple[End, socket.socket], stander: Stander) -> None:
    """What is no frame, and what `on_stood` calls wrong, ends it on the loop."""
    end, far = half
    stander.wait()
    far.send(b"\xff" * 64)
    stander.join()
    assert isinstance(await end.closed(), ProtocolError)
    stander.stop()


async def test_an_error_of_whoever_takes_frames_ends_the_connection(
    half: tuple[End, socket.socket], stander: Stander
) -> None:
    """As one of `on_frames` does."""
    end, far = half

    def wrong(_: list[Frame]) -> bool:
        raise ProtocolError("two calls of one number")

    end.connection.on_stood = wrong
    stander.wait()
    far.send(encoded(1))
    stander.join()
    cause = await end.closed()
    assert isinstance(cause, ProtocolError) and "two calls" in str(cause)
    stander.stop()


@pytest.mark.parametrize("seed", range(4))
async def test_each_frame_is_had_once_and_in_order(half: tuple[End, socket.socket], seed: int) -> None:
    """A thread that waits now and then, takes some and refuses others, and a loop with other work: a random storm."""
    end, far = half
    dice = random.Random(seed)
    order: list[int] = []
    end.connection.on_frames = lambda frames: order.extend(frame.call_id for frame in frames)
    far.setblocking(True)
    count = 3000
    stop = threading.Event()

    def on_stood(frames: list[Frame]) -> bool:
        if dice.random() < 0.3:
            return False
        order.extend(frame.call_id for frame in frames)
        return True

    def stand() -> None:
        mine = random.Random(seed + 100)
        while not stop.is_set():
            epoll = select.epoll()  # another thread, as far as the socket knows
            if end.connection.attach(epoll):
                for _ in range(mine.randrange(1, 40)):
                    kept = mine.random() < 0.5 and end.connection.keep_from_loop()
                    if epoll.poll(0 if kept else mine.random() / 300):
                        end.connection.read_once()
                    if kept:
                        end.connection.leave_to_loop()
                    if mine.random() < 0.3:
                        time.sleep(mine.random() / 2000)
            epoll.close()

    def send() -> None:
        mine = random.Random(seed + 200)
        data = b"".join(encoded(number, bytes(mine.randrange(40))) for number in range(count))
        while data:
            size = mine.choice((1, 10, 100, 1000))
            far.sendall(data[:size])
            data = data[size:]
            if mine.random() < 0.2:
                time.sleep(mine.random() / 1000)

    end.connection.on_stood = on_stood
    threads = [threading.Thread(target=stand), threading.Thread(target=stand), threading.Thread(target=send)]
    for thread in threads:
        thread.start()
    try:
        while len(order) < count:
            if dice.random() < 0.02:
                end.connection.pause()
                await asyncio.sleep(0.001)
                end.connection.resume()
            seen = len(order)
            await until(lambda: len(order) > seen or len(order) == count)  # noqa: B023  # it is awaited at once
    finally:
        stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join, LONG)
    assert order == list(range(count))
