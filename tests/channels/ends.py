"""Two ends of one channel, joined in memory, for the contract suite; a new channel joins with one more class of `Ends`.

What travels between the ends waits in lanes: each keeps its order, and who steps them in which order is the test's
choice. A message and what a channel says by `on_message` share a lane, as they share a connection.
"""

from __future__ import annotations

import os
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy

from aiorpc.channels import AnyBuffer, Wire
from aiorpc.channels.accelerator import DeviceBuffer
from aiorpc.channels.arena import GROW_SIZE, Arena, Block
from aiorpc.channels.bulk import Bulk
from aiorpc.channels.inline import Inline, allocate
from aiorpc.channels.keeping import Keeper
from aiorpc.channels.shared import SharedMemory
from aiorpc.options import SHARE_SIZE
from aiorpc.protocol.frames import PARCEL, Buffer, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.messages import read_release
from aiorpc.protocol.packing import pack, unpack
from tests.channels.files_channel import LEAST, FilesContext

KIB, MIB = 1 << 10, 1 << 20
MOST_STEPS = 100_000  # of `settle`: more is no end
Choose = Callable[[Sequence[str]], str]
Job = list[tuple[Callable[..., object], tuple[Any, ...]]]


def pattern(seed: int, size: int) -> bytes:
    """Bytes that are different for each seed, and at each place within 64 KiB."""
    return random.Random(seed).randbytes(min(size, 64 * KIB)).ljust(size, bytes([seed % 255 + 1]))


def borrowed(data: bytes) -> memoryview:
    """The same bytes in an array that nothing but this view keeps alive; `.obj` may be weakly referenced."""
    return numpy.frombuffer(bytearray(data), numpy.uint8).copy().data


@dataclass(eq=False)
class Message:
    """Buffers on their way. outcomes: for each of them what came of it, in order: at most one each.

    content: the bytes of one that came.
    """

    wires: list[Wire | None]
    riders: list[Buffer]
    expected: list[bytes]
    way: int = 0
    content: Callable[[Any], bytes] = bytes
    posted: bool = False
    delivered: bool = False
    given_up: bool = False
    outcomes: list[list[AnyBuffer | Exception]] = field(default_factory=list)

    @property
    def taken(self) -> list[Wire]:
        """The wires of the buffers that the channel took."""
        return [wire for wire in self.wires if wire is not None]

    @property
    def settled(self) -> bool:
        """Whether it was delivered, and something came of each of its buffers."""
        return self.delivered and all(self.outcomes)

    def check(self) -> None:
        """What came is what was sent, each once; an error only where it was given up."""
        expected = [data for data, wire in zip(self.expected, self.wires, strict=True) if wire is not None]
        for data, outcome in zip(expected, self.outcomes, strict=True):
            assert len(outcome) == 1, f"{len(outcome)} outcomes for one buffer"
            (value,) = outcome
            if isinstance(value, Exception):
                assert self.given_up, f"nobody gave it up: {value!r}"
            else:
                assert self.content(value) == data

    def buffers(self) -> list[Any]:
        """Those that arrived."""
        values = [value for (value,) in self.outcomes if not isinstance(value, Exception)]
        return [value if isinstance(value, DeviceBuffer) else memoryview(value) for value in values]


class Ends:
    """Ends 0 and 1. way: the number of the sending one. random: where bytes are split."""

    name: ClassVar[str]
    way: ClassVar[str] = ""  # of those that the channel has
    taken: ClassVar[tuple[int, ...]]  # sizes, in bytes, of buffers that it takes one by one
    refused: ClassVar[tuple[int, ...]] = ()  # and of those that it does not
    takes_when_closed: ClassVar[bool] = False
    channels: tuple[Any, Any]  # each a Channel, of buffers as `make` makes them
    lenient: bool = False  # an end that hears nonsense of the other one goes on: it was the test that said it

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.closed = [False, False]
        self._lanes: dict[str, deque[Callable[[], None]]] = {}
        self._decoders = [self._decoder(), self._decoder()]

    @staticmethod
    def _decoder() -> FrameDecoder:
        return FrameDecoder(max_body=MIB, max_segment=64 * MIB, allocate=allocate)

    # --- what the messages are made of --------------------------------------------------------------------------------

    def pattern(self, seed: int, size: int) -> bytes:
        """Bytes to send."""
        return pattern(seed, size)

    def make(self, data: bytes, way: int = 0) -> Any:
        """A buffer to send that way, which nothing else keeps alive. Any thread."""
        return borrowed(data)

    def part(self, buffer: Any, size: int) -> Any:
        """The beginning of a buffer to send."""
        return buffer[:size]

    def reference(self, buffer: Any) -> weakref.ref[Any]:
        """To what is gone when nobody keeps the buffer."""
        return weakref.ref(buffer.obj)

    def content(self, buffer: Any) -> bytes:
        """What it holds: one to send, or one that came."""
        return bytes(buffer)

    def fill(self, buffer: Any, value: int) -> None:
        """Write to it."""
        assert not buffer.readonly
        buffer[:] = bytes([value]) * len(buffer)

    # --- what the tests do --------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Any], way: int = 0) -> Message:
        """A message of these, not posted yet."""
        riders: list[Buffer] = []
        expected = [self.content(buffer) for buffer in buffers]
        return Message(self.channels[way].send(buffers, riders), riders, expected, way, self.content)

    def post(self, message: Message) -> None:
        """The message itself is on its way."""
        message.posted = True
        frame = encode_frame(PARCEL, 0, pack(message.taken), message.riders)
        message.riders = []
        self.put(f"messages {message.way}", lambda: self._deliver(message, frame))

    def withdraw(self, message: Message) -> None:
        """Nobody wants it any more."""
        message.given_up = True
        self.channels[message.way].withdraw(message.taken, named=message.posted)

    def say(self, way: int, fields: list[Any]) -> None:
        """From one end of the channel to the other."""
        body = pack(fields)
        self.put(f"messages {way}", lambda: self.hear(1 - way, body))

    def close(self, end: int) -> None:
        self.closed[end] = True
        self.channels[end].close()

    def lanes(self) -> list[str]:
        """Where something waits."""
        return [name for name, lane in self._lanes.copy().items() if lane]

    def step(self, lane: str) -> None:
        """What waits there first, happens."""
        self._lanes[lane].popleft()()

    def settle(self, choose: Choose | None = None) -> None:
        """Step until nothing waits. choose: the next lane; the first one if None."""
        for _ in range(MOST_STEPS):
            waiting = self.lanes()
            if not waiting:
                return
            self.step(choose(waiting) if choose else waiting[0])
        raise AssertionError(f"no end: {self.lanes()}")

    def put(self, lane: str, action: Callable[[], None]) -> None:
        """Let it wait. Any thread."""
        self._lanes.setdefault(lane, deque()).append(action)

    def under_way(self) -> dict[str, int]:
        """What both ends hold for transfers, by name; all zero when nothing is under way."""
        return {}

    def dispose(self) -> None:
        """Close both ends, and what they stand on. What arrived is still to be had."""
        self.close(0)
        self.close(1)

    def finish(self) -> None:
        """`dispose`, and nothing is to be had any more."""
        self.dispose()

    # --- delivery -----------------------------------------------------------------------------------------------------

    def _deliver(self, message: Message, frame: list[Buffer]) -> None:
        """As a link does with a PARCEL: the riders are segments of a frame that came as bytes."""
        end = 1 - message.way
        if self.closed[end]:
            return
        arrivals = feed(self._decoders[end], b"".join(frame), self.random)
        ((kind, _, body, segments),) = arrivals
        assert kind == PARCEL
        wires = unpack(body)
        message.outcomes = [[] for _ in wires]

        def arrived(index: int, outcome: AnyBuffer | Exception) -> None:
            assert not self.closed[end], "`arrived` after `close`"
            message.outcomes[index].append(outcome)

        message.delivered = True
        here = self.receive(end, wires, segments, arrived)
        assert len(here) == len(wires)
        for outcomes, buffer in zip(message.outcomes, here, strict=True):
            if buffer is not None:
                outcomes.append(buffer)

    def receive(
        self, end: int, wires: list[Any], riders: Sequence[Any], arrived: Callable[[int, Any], None]
    ) -> list[Any]:
        """What an end makes of the wires of a message; the rest comes by `arrived`."""
        received: list[Any] = self.channels[end].receive(wires, riders, arrived)
        return received

    def hear(self, end: int, body: bytes) -> None:
        if not self.closed[end]:
            self.channels[end].on_message(unpack(body))


def feed(decoder: FrameDecoder, data: bytes, where: random.Random) -> list[Frame]:
    """Bytes into a decoder, in pieces of random length."""
    frames: list[Frame] = []
    at = 0
    while at < len(data):
        place = decoder.get_buffer()
        count = min(len(place), len(data) - at)
        if where.random() < 0.5:
            count = where.randint(1, count)
        place[:count] = data[at : at + count]
        frames += decoder.received(count)
        at += count
    return frames


class InlineEnds(Ends):
    """Everything is in the frame."""

    name = "inline"
    taken = (1, 7, 4 * KIB, 100 * KIB)
    takes_when_closed = True  # it has no state: whoever closed the connection sends no frame

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.channels = (Inline(), Inline())


class BulkEnds(Ends):
    """Chunks go through decoders, on lanes of their own, in pieces that end anywhere."""

    name = "bulk"
    LEAST, CHUNK, LIMIT = KIB, 4 * KIB, MIB
    taken = (LEAST, LEAST + 1, CHUNK, CHUNK + 1, 5 * CHUNK - 1, 10 * CHUNK)
    refused = (1, LEAST - 1)

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.bulks = (self._bulk(), self._bulk())
        self.channels = self.bulks
        self._pipes = [self._decoder(), self._decoder()]  # of the receiving ends
        self._unread = [b"", b""]  # of the sending ends
        for bulk, pipe in zip(self.bulks, self._pipes, strict=True):
            pipe.place = bulk.place

    def _bulk(self) -> Bulk:
        bulk = Bulk(limit=self.LIMIT, wake=lambda: None, least=self.LEAST, chunk=self.CHUNK)
        bulk.ready = True
        return bulk

    def lanes(self) -> list[str]:
        return super().lanes() + [f"chunks {way}" for way in (0, 1) if self._has_chunks(way)]

    def _has_chunks(self, way: int) -> bool:
        if not self._unread[way]:
            frame = self.bulks[way].next_frame()
            self._unread[way] = b"".join(frame) if frame is not None else b""
        return bool(self._unread[way])

    def step(self, lane: str) -> None:
        if not lane.startswith("chunks"):
            super().step(lane)
            return
        way = int(lane[-1])
        data = self._unread[way]
        count = self.random.randint(1, len(data)) if self.random.random() < 0.5 else len(data)
        self._unread[way] = data[count:]
        if self.closed[1 - way]:
            return
        for frame in feed(self._pipes[1 - way], data[:count], self.random):
            assert frame.kind == Kind.CHUNK
            self.bulks[1 - way].on_frame(frame)

    def under_way(self) -> dict[str, int]:
        sending = {f"sending {end}": bulk.sending for end, bulk in enumerate(self.bulks)}
        return sending | {f"receiving {end}": bulk.receiving for end, bulk in enumerate(self.bulks)}


class Around:
    """What a shared-memory end needs around it: threads and the loop are lanes."""

    record: Any = None
    opener = local = True

    def __init__(self, ends: SharedEnds, end: int) -> None:
        self._ends = ends
        self._end = end
        self.refusals: list[str] = []
        self.cold: list[int] = []
        self.loans = self.closed = 0
        self.seconds = 0.0  # that a sender may wait: none where one thread is both ends

    def post(self, fields: list[Any], *, more: bool = False) -> None:
        self._ends.say(self._end, fields)

    def post_buffer(self, fields: list[Any], buffer: Buffer) -> None:
        raise NotImplementedError

    def give_back(self, released: Sequence[Sequence[int]], *, more: bool) -> None:
        self._ends.give_back(self._end, released)

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        raise NotImplementedError

    def in_background(self, fn: Callable[..., None], *args: Any) -> None:
        job: Job = [(fn, args)]  # popped, so that what it holds goes when it is done
        self._ends.put(f"thread {self._end}", lambda: run_job(job))

    def on_loop(self, function: Callable[..., object], *args: Any) -> None:
        job: Job = [(function, args)]
        self._ends.put(f"loop {self._end}", lambda: run_job(job))

    def watch(self) -> None:
        self.loans += 1

    def on_closed(self, channel: SharedMemory) -> None:
        self.closed += 1

    def on_refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def on_cold(self, size: int) -> None:
        self.cold.append(size)

    def may_wait(self) -> bool:
        return self.seconds > 0

    def wait(self, wait: Callable[[float], object]) -> None:
        wait(self.seconds)


def run_job(job: Job) -> None:
    """Run what is in the list, which does not keep it."""
    fn, args = job.pop()
    fn(*args)


def keeper_of(arena: Arena) -> Keeper:
    """What is kept in an arena, of which nobody is told."""
    return Keeper(arena, lambda: None, lambda size: None)


class SharedEnds(Ends):
    """Over two arenas of this process. warm: both ends have mapped and warm memory, and nothing waits."""

    name = "shared memory"
    taken = (SHARE_SIZE, SHARE_SIZE + 1, 300 * KIB, MIB + 3)
    refused = (1, SHARE_SIZE // 2 - 1)
    LIMIT = 64 * MIB

    def __init__(self, seed: int = 0, *, limit: int = LIMIT, warm: int = 16 * MIB, least: int = SHARE_SIZE) -> None:
        super().__init__(seed)
        segment = min(limit, 64 * MIB)
        self.arenas = (
            Arena(limit, segment_size=segment, poison=True),
            Arena(limit, segment_size=segment, poison=True),
        )
        self.around = (Around(self, 0), Around(self, 1))
        self.ends = (
            SharedMemory(self.arenas[0], os.getpid(), self.around[0], least=least, keeper=keeper_of(self.arenas[0])),
            SharedMemory(self.arenas[1], os.getpid(), self.around[1], least=least, keeper=keeper_of(self.arenas[1])),
        )
        self.channels = self.ends
        if warm:
            self.warm(warm)

    def give_back(self, way: int, blocks: Sequence[Sequence[int]]) -> None:
        """From one end to the other, in its turn among the messages."""
        body = pack((blocks,))  # a Release
        self.put(f"messages {way}", lambda: self._given_back(1 - way, body))

    def _given_back(self, end: int, body: bytes) -> None:
        if not self.closed[end]:
            self.channels[end].on_release(read_release(body).blocks)

    def warm(self, size: int) -> None:
        """Make so many bytes ready in both arenas, and known to the other end."""
        for end, arena in zip(self.ends, self.arenas, strict=True):
            ranges = arena.grow(size)
            assert ranges and end.send([bytes(self.LIMIT // 4)], []) == [None]
            end.grown(ranges)
        self.settle()
        for end, around in zip(self.ends, self.around, strict=True):
            end.traffic.refused.clear()
            around.cold.clear()

    def lanes(self) -> list[str]:
        for end in self.ends:
            end.flush()
        return super().lanes()

    def under_way(self) -> dict[str, int]:
        self.settle()  # the word that blocks were released
        return {
            f"{what} {end}": count
            for end, shared in enumerate(self.ends)
            for what, count in (
                ("lent", shared.lender.lent),
                ("leases", shared.lender.leases),
                ("used", shared.arena.used),
                ("blocks", shared.borrower.blocks),
            )
        }

    def dispose(self) -> None:
        super().dispose()
        for arena in self.arenas:
            arena.close()


class FilesEnds(Ends):
    """A channel as another package would have one."""

    name = FilesContext.name
    taken = (LEAST, LEAST + 1, 300 * KIB)
    refused = (1, LEAST - 1)

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        contexts = self._contexts = (FilesContext(None), FilesContext(None))
        link: Any = None  # which it does not look at
        said = [context.descriptor(link) for context in contexts]
        assert contexts[0].obstacle(*said) == contexts[1].obstacle(*said) == ""
        self.ends = (contexts[0].open(link), contexts[1].open(link))
        for end, other in zip(self.ends, reversed(said), strict=True):
            end.introduced(other)
        self.channels = self.ends

    def under_way(self) -> dict[str, int]:
        return {f"files {end}": channel.waiting for end, channel in enumerate(self.ends)}

    def dispose(self) -> None:
        super().dispose()
        for context in self._contexts:
            context.close()


KINDS: tuple[type[Ends], ...] = (InlineEnds, BulkEnds, SharedEnds, FilesEnds)


class GrowingArena(Arena):
    """For tests of blocks, which need not see to room first. What it takes is not touched before it is used."""

    def allocate(self, size: int) -> Block | None:
        """As of an Arena; where that has no room there may be some then."""
        block = super().allocate(size)
        if size <= 0:
            return block
        while block is None:  # each turn the arena grows, and it is bounded
            with self._growth:
                extent = self._take_cold(size, GROW_SIZE)
                if extent is None:
                    return None
                self._give_room(extent)
            block = super().allocate(size)
        return block
