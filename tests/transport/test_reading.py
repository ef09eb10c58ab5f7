"""Reading by a thread that waits for an answer, in place of the loop."""

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
from aiorpc.protocol.frames import READ_SIZE, Frame, Kind, encode_frame
from aiorpc.protocol.seal import Seal
from aiorpc.transport.connection import Connection
from aiorpc.transport.reading import PORTION_BYTES, READ_HERE, TURN_FRAMES
from tests.transport.ends import LONG, SOON, End, encoded, unread, until


class Waiter:
    """A thread that reads on a connection until the answer of that call is there, or until it is told to stop."""

    def __init__(self, end: End) -> None:
        self.connection, self.sock = end.connection, end.sock
        self.taken: list[Frame] = []
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.looking = threading.Event()  # it has found nothing for the first time
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.taken += self.connection.read_here(self._enough)
        except BaseException as error:
            self.errors.append(error)

    def _enough(self) -> bool:
        self.looking.set()
        return self.stop.is_set()

    async def looks(self) -> Waiter:
        assert await asyncio.to_thread(self.looking.wait, LONG)
        return self

    async def has_read(self) -> None:
        """Wait until it has read all that has arrived so far; the loop reads nothing meanwhile."""
        await until(lambda: not unread(self.sock))

    async def ended(self) -> None:
        """Wait until it has gone by itself."""
        try:
            await asyncio.to_thread(self.thread.join, SOON)
            assert not self.thread.is_alive(), "it reads on"
        finally:
            await self.stopped()

    async def stopped(self) -> None:
        self.stop.set()
        await asyncio.to_thread(self.thread.join, LONG)
        assert not self.thread.is_alive()


async def share(end: End) -> None:
    """Have threads read for themselves from now on."""
    looked = threading.Event()

    def enough() -> bool:
        looked.set()
        return True

    async with asyncio.timeout(LONG):
        while not looked.is_set():
            await asyncio.to_thread(end.connection.read_here, enough)


@pytest.fixture
async def shared(half: tuple[End, socket.socket]) -> tuple[End, socket.socket]:
    """A connection that threads may read on, and the bare socket at its other end."""
    await share(half[0])
    return half


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.ERROR])
async def test_waiter_takes_its_answer(shared: tuple[End, socket.socket], kind: Kind) -> None:
    """The answer that a thread waits for is taken in that thread, and the loop does not see it."""
    end, far = shared
    waiter = await Waiter(end).looks()
    far.send(encoded(7, b"answer", kind))
    await waiter.ended()
    assert [(frame.kind, frame.body) for frame in waiter.taken] == [(kind, b"answer")]
    far.send(encoded(8, b"next"))
    assert [frame.call_id for frame in await end.received(1)] == [8]
    assert end.connection.bytes_received == len(encoded(7, b"answer") + encoded(8, b"next"))


async def test_waiter_takes_an_answer_in_pieces(shared: tuple[End, socket.socket]) -> None:
    """An answer that comes in pieces is taken whole, with its segments, and counted once."""
    end, far = shared
    data = b"".join(bytes(part) for part in encode_frame(Kind.REPLY, 7, b"answer", [b"one", b"two"]))
    waiter = await Waiter(end).looks()
    for start in range(0, len(data) - 10, 10):
        far.send(data[start : start + 10])
        await waiter.has_read()
    far.send(data[(len(data) - 1) // 10 * 10 :])
    await waiter.ended()
    ((kind, call_id, body, segments),) = waiter.taken
    assert (kind, call_id, body, [bytes(segment) for segment in segments]) == (
        Kind.REPLY,
        7,
        b"answer",
        [b"one", b"two"],
    )
    assert end.connection.bytes_received == len(data)
    assert end.frames == []


ITEM = encoded(7, kind=Kind.ITEM)


@pytest.mark.parametrize("takes", [True, False])
async def test_waiter_takes_what_comes_with_answers(shared: tuple[End, socket.socket], takes: bool) -> None:
    """Memory that is given back always; a PARCEL, if whoever opens it says so, and else the loop gets all of it."""
    end, far = shared
    asked: list[Frame] = []

    def take(frame: Frame) -> bool:
        asked.append(frame)
        return takes

    end.connection.takes = take
    data = encoded(0, b"blocks", Kind.RELEASE) + encoded(7, b"one", Kind.PARCEL) + encoded(8)
    waiter = await Waiter(end).looks()
    far.send(data)
    await waiter.ended()
    if not takes:
        await end.received(3)
    assert [frame.kind for frame in waiter.taken or end.frames] == [Kind.RELEASE, Kind.PARCEL, Kind.REPLY]
    assert bool(waiter.taken) == takes and [(frame.call_id, frame.body) for frame in asked] == [(7, b"one")]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ITEM, [7]),
        (ITEM + encoded(8), [7, 8]),
        (encoded(8) + ITEM, [8, 7]),
        (encoded(8) + encoded(9, b"x" * READ_HERE), [8, 9]),
        (encoded(7, b"x" * READ_HERE), [7]),
    ],
    ids=["no answer", "something before it", "something behind it", "a long one behind it", "too long"],
)
async def test_waiter_leaves_all_else_to_the_loop(
    shared: tuple[End, socket.socket], data: bytes, expected: list[int]
) -> None:
    """Whatever else comes, or comes with answers: the thread has read, and the loop gets all of it, in order."""
    end, far = shared
    waiter = await Waiter(end).looks()
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(far, data))
    await waiter.ended()
    await sending
    await end.received(len(expected))
    assert [frame.call_id for frame in end.frames] == expected
    assert waiter.taken == []
    await until(lambda: end.connection.bytes_received == len(data))


async def test_garbage_ends_the_connection_while_a_thread_reads(shared: tuple[End, socket.socket]) -> None:
    """What is no frame at all is the loop's to judge, also when a thread has read it."""
    end, far = shared
    waiter = await Waiter(end).looks()
    far.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: bool(end.causes) or not unread(end.sock))  # it may go at once, or read on
    await waiter.stopped()
    assert isinstance(await end.closed(), ProtocolError)
    assert (waiter.taken, waiter.errors) == ([], [])


@pytest.mark.parametrize("before", [b"", ITEM, ITEM[:-1]], ids=["nothing", "a frame", "half a frame"])
async def test_end_is_told_by_the_loop_when_a_thread_reads_it(shared: tuple[End, socket.socket], before: bytes) -> None:
    """The other side's end ends the waiter without an error; on_closed gets it, behind what was said before."""
    end, far = shared
    waiter = await Waiter(end).looks()
    far.send(before)
    far.shutdown(socket.SHUT_WR)
    await waiter.ended()
    assert isinstance(await end.closed(), ConnectionResetError)
    assert waiter.errors == []
    assert [frame.call_id for frame in end.frames] == ([7] if before == ITEM else [])
    assert end.connection.bytes_received == len(before)


@pytest.mark.parametrize("way", ["close", "abort"])
async def test_connection_ends_under_a_waiter(shared: tuple[End, socket.socket], way: str) -> None:
    """The loop may end the connection while a thread reads: that one goes, and nothing is raised."""
    end, _ = shared
    waiter = await Waiter(end).looks()
    getattr(end.connection, way)()
    assert end.connection.ended
    await waiter.ended()
    assert await end.closed() is None
    assert (waiter.taken, waiter.errors) == ([], [])
    assert await asyncio.to_thread(end.connection.read_here, lambda: False) == []  # and none begins


async def test_write_that_fails_under_a_waiter_hears_the_last_words(shared: tuple[End, socket.socket]) -> None:
    """What a thread has read is handed out before the failure of a write ends the connection."""
    end, far = shared
    waiter = await Waiter(end).looks()
    far.send(encoded(0, kind=Kind.GOODBYE))
    far.close()
    end.send(1, b"call", urgent=True)
    await waiter.ended()
    assert isinstance(await end.closed(), ConnectionError)
    assert [frame.kind for frame in end.frames] == [Kind.GOODBYE]
    assert waiter.errors == []


class Wire:
    """What the other end of a connection sends: as it is, or sealed from now on."""

    def __init__(self, end: End, sealed: bool) -> None:
        self._seal = Seal(KEY) if sealed else None
        self._number = 0
        if sealed:
            end.connection.unseal(KEY)

    def __call__(self, data: bytes) -> bytes:
        """For each in the order in which it is sent."""
        if self._seal is None:
            return data
        self._number += 1
        return b"".join(self._seal.piece(self._number - 1, [data], len(data)))


KEY = b"k" * 32


async def test_waiter_takes_sealed_answers_in_pieces(shared: tuple[End, socket.socket]) -> None:
    """They are taken once all of it is there, and the loop goes on with the next seal."""
    end, far = shared
    wire = Wire(end, True)
    data = wire(encoded(7)[:11]) + wire(encoded(7)[11:] + encoded(8))
    waiter = await Waiter(end).looks()
    for start in range(0, len(data), 10):
        far.send(data[start : start + 10])
        if start + 10 < len(data):
            await waiter.has_read()
    await waiter.ended()
    assert [frame.call_id for frame in waiter.taken] == [7, 8]
    assert end.connection.bytes_received == len(data)
    far.send(wire(encoded(9)))
    assert [frame.call_id for frame in await end.received(1)] == [9]


@pytest.mark.parametrize("waits", [True, False], ids=["a thread reads", "the loop reads"])
async def test_one_flipped_bit_ends_a_sealed_connection(shared: tuple[End, socket.socket], waits: bool) -> None:
    """On a real socket, whoever reads: the loop ends the connection, and nothing of it is handed out."""
    end, far = shared
    wire = Wire(end, True)
    waiter = await Waiter(end).looks() if waits else None
    data = bytearray(wire(encoded(7)))
    data[9] ^= 1
    far.send(data)
    if waiter is not None:
        await waiter.ended()
        assert waiter.taken == []
    assert isinstance(await end.closed(), ProtocolError)
    assert end.frames == []


async def test_seals_begin_where_the_handshake_ends(ends: tuple[End, End]) -> None:
    """What was sent before goes without; what came behind it without one is refused."""
    left, right = ends
    left.send(1, urgent=True)
    await right.received(1)
    left.connection.seal(KEY)
    right.connection.unseal(KEY)
    left.send(2, b"b" * 300_000, b"s" * 1_000_000)
    left.send(3)
    assert [(each.call_id, len(each.body)) for each in await right.received(3)] == [(1, 0), (2, 300_000), (3, 0)]
    right.connection.decoder.feed(encoded(4)[:3])
    with pytest.raises(ProtocolError, match="without a seal"):
        right.connection.unseal(KEY)


async def test_a_flood_of_short_messages_leaves_the_loop_to_others(half: tuple[End, socket.socket]) -> None:
    """A turn ends after so many of them, too: a hundred thousand are few bytes, and much work."""
    end, far = half
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    frame = encoded(1)
    data = frame * (10 * READ_SIZE // len(frame))
    sent = far.send(data)
    turns, before = list[int](), 0
    while len(end.frames) < sent // len(frame):
        await asyncio.sleep(0)
        if len(end.frames) > before:
            turns.append(len(end.frames) - before)
            before = len(end.frames)
    assert turns[0] <= READ_SIZE // len(frame) + 1  # from then on it is known that they are short
    assert len(turns) > 5 and max(turns[1:]) <= TURN_FRAMES + PORTION_BYTES // len(frame) + 1


# --- reading by a thread that stands by for calls, in place of the loop -----------------------------------------------


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
