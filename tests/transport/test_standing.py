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
