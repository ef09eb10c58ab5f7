"""Two ends of the device channel, joined in memory: direct, ipc and staging; see `tests.channels.ends`.

For ipc both ends are in this process, which CUDA refuses, and the fake, too. `NeighbourCuda` lifts that rule, and only
that one: what one fake has exported another one of this process opens, never the one that exported it. So the order in
which the ends hear of each other is the test's choice; two real processes are in `tests/processes`.

A thread that may wait for a device is a lane, too. Outside of these a fake that is waited for puts down a violation.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy
import torch

from aiorpc.channels.accelerator import DeviceBuffer
from aiorpc.channels.device import DIRECT, IPC, STAGING, Devices
from aiorpc.channels.device.messages import MESSAGES, FilledSlots
from aiorpc.channels.device.messages import Message as Said
from aiorpc.channels.device.outbox import BoxEnd, Outbox
from aiorpc.errors import ProtocolError, RpcError
from aiorpc.protocol.frames import PARCEL, Buffer, encode_frame
from aiorpc.protocol.packing import pack, unpack
from tests.channels.ends import KIB, MIB, Ends, Message, feed
from tests.fakes.cuda import FakeCuda, FakeInterprocess
from tests.fakes.interprocess import HANDLE, HANDLE_SIZE
from tests.fakes.streams import Mark, Stream

UUIDS = ("FAKE-A", "FAKE-B")
BOX = 4 * MIB
PIECE = 256 * KIB  # a transfer by way of the host has many
Job = deque[tuple[Callable[..., object], tuple[Any, ...]]]  # of one entry, popped: what it holds goes when it is done
LANES = 3  # of pieces: they overtake each other, and everything else


class NeighbourInterprocess(FakeInterprocess):
    """Handles of this process may be opened, other than those of the same fake. What may block is for threads."""

    def begin(self, name: str, index: int) -> None:
        fake = self._fake
        if name in ("allocate", "free", "open", "close", "event", "open_event") and isinstance(fake, NeighbourCuda):
            fake.require_thread(name)
        super().begin(name, index)

    def _read(self, magic: bytes, handle: bytes) -> tuple[int, int, int, bytes, bytes]:
        if len(handle) != HANDLE_SIZE or handle[:4] != magic:
            raise RuntimeError("invalid handle")
        _, pid, fd, number, nonce, who = HANDLE.unpack_from(handle)
        if any(page.nonce() == nonce for page in self._pages):
            self._refuse("an event opened by the fake that exported it")
        return pid, fd, number, nonce, who


class NeighbourCuda(FakeCuda):
    """See the module. Within `in_thread` it may be waited for."""

    interprocess_type = NeighbourInterprocess

    def __init__(self, **options: Any) -> None:
        self._threads: set[int] = set()
        super().__init__(**options)

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """What is done now is done by a thread of its own."""
        mine = threading.get_ident()
        inner = mine in self._threads
        self._threads.add(mine)
        try:
            yield
        finally:
            if not inner:
                self._threads.discard(mine)

    def require_thread(self, name: str) -> None:
        """A violation on the loop."""
        if threading.get_ident() not in self._threads:
            self.report(f"{name} on the loop")

    def synchronize(self, event: Mark) -> None:
        self.require_thread("synchronize")
        super().synchronize(event)


class DeviceAround:
    """What an end needs around it: threads and the loop are lanes, timers wait for the test."""

    def __init__(self, ends: DeviceEnds, end: int) -> None:
        self._ends = ends
        self._end = end
        self._count = 0
        self.chosen: list[tuple[str, str]] = []
        self.timers: list[Callable[[], object]] = []
        self.left: dict[int, tuple[torch.Tensor, Any]] = {}
        self.retired: list[Outbox] = []
        self.held: list[BoxEnd] = []
        self.said: list[list[Any]] = []  # the tags and first fields of what went to the other end
        self.followed: Counter[int] = Counter()  # bytes of transfers that went there in slots, behind their message

    def post(self, message: Said, *, more: bool = False) -> None:
        fields = MESSAGES.write(message)
        self.said.append(fields[:2])
        if isinstance(message, FilledSlots):
            self.followed[message.transfer] += sum(chunk.size for chunk in message.chunks)
        self._ends.say(self._end, fields)

    def post_buffer(self, message: Said, buffer: Buffer) -> None:
        self._count += 1
        frame = encode_frame(PARCEL, 1, pack(MESSAGES.write(message)), [buffer])
        job = deque([frame])  # borrowed until it is written
        self._ends.put(
            f"pieces {self._end} {self._count % LANES}", lambda: self._ends.hear_piece(1 - self._end, job.pop())
        )

    def in_background(self, fn: Callable[..., None], *args: Any) -> None:
        self._count += 1
        job: Job = deque([(fn, args)])
        self._ends.put(f"thread {self._end} {self._count % 2}", lambda: self._ends.run_thread(self._end, job))

    def on_loop(self, function: Callable[..., object], *args: Any) -> None:
        job: Job = deque([(function, args)])
        self._ends.put(f"loop {self._end}", lambda: _run(job))

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        assert seconds > 1
        self.timers.append(lambda: function(*args))

    def on_release(self) -> None:
        self.on_loop(self._ends.channels[self._end].flush)

    def on_chosen(self, way: str, reason: str) -> None:
        self.chosen.append((way, reason))

    def hand_over(self, carrier: torch.Tensor, event: Any) -> int:
        self._count += 1
        self.left[self._count] = (carrier, event)
        return self._count

    def take_over(self, number: int) -> tuple[torch.Tensor, Any] | None:
        return self._ends.around[1 - self._end].left.pop(number, None)

    def introduced(self, theirs: Any) -> tuple[None, str, str]:
        return None, *theirs

    def take_back(self, number: int) -> None:
        self.left.pop(number, None)

    def hold(self, boxes: Sequence[BoxEnd]) -> None:
        self.held += boxes

    def ended(self, boxes: Sequence[BoxEnd]) -> None:
        for box in boxes:
            if isinstance(box, Outbox):
                self.retired.append(box)
            else:
                self.in_background(box.close)


def _run(job: Job) -> None:
    function, args = job.pop()
    function(*args)


class DeviceEnds(Ends):
    """Tensors go from each device to each other one, and to the host.

    What was sent is written over right after `send`, and then is as before again. What arrives, arrives on fresh
    streams; its `ready` is the event that says so.
    """

    name = "device"
    # A byte; around the shortest slots; more than the middle ones hold; more than the whole box.
    taken = (1, 64 * KIB - 1, 64 * KIB, MIB + 1, BOX + 9)
    takes_when_closed = True  # until it is withdrawn; test_device.py says more
    way: ClassVar[str]
    lag: tuple[float, float] = (0.0, 0.0002)
    targets: tuple[str, ...] = ("cuda:0", "cuda:1", "cuda:1", "cpu")

    def __init__(
        self,
        seed: int = 0,
        *,
        forced: bool = False,
        chosen: bool = True,
        box_size: int = BOX,
        fakes: Sequence[FakeCuda] | None = None,
    ) -> None:
        super().__init__(seed)
        self.fakes = tuple(fakes if fakes is not None else self._make_fakes(seed))
        self.around = (DeviceAround(self, 0), DeviceAround(self, 1))
        way = DIRECT if self.way == DIRECT else ""
        self.devices: tuple[Devices, Devices] = (
            self._make_devices(0, way=way, forced=forced, box_size=box_size),
            self._make_devices(1, way=way, forced=forced, box_size=box_size),
        )
        self.channels = self.devices
        self.overwrites = True
        self.holds = True  # messages, now and then: what they name comes first
        self.holding = False
        self._known: dict[int, bytes] = {}  # by address: what buffers to send hold
        self.calls_made = 0
        self.numbers: dict[int, int] = {}  # of calls, by the identity of their messages
        if chosen:
            self.choose()

    def _make_devices(self, end: int, **options: Any) -> Devices:
        return Devices(self.fakes[end], self.around[end], limit=64 * MIB, piece_size=PIECE, **options)

    def _make_fakes(self, seed: int) -> tuple[FakeCuda, FakeCuda]:
        return (
            NeighbourCuda(seed=seed, uuids=UUIDS, lag=self.lag),
            NeighbourCuda(seed=seed + 1, uuids=UUIDS[::-1], lag=self.lag),
        )

    def choose(self) -> None:
        """Both ends know the way."""
        if self.way != DIRECT:
            for devices in self.devices:
                devices.choose(self.way, "" if self.way == IPC else "there are reasons")

    # --- what the messages are made of --------------------------------------------------------------------------------

    def pattern(self, seed: int, size: int) -> bytes:
        """Different at each place within 16 MiB."""
        numbers = numpy.arange(size // 4 + 1, dtype=numpy.uint32) * numpy.uint32(2654435761)
        return (numbers ^ numpy.uint32(seed * 40503 + 1)).tobytes()[:size]

    def make(self, data: bytes, way: int = 0) -> DeviceBuffer:
        """On one of the devices, and one of its streams."""
        index = self.random.choice((0, 0, 0, 1))
        return self.make_on(index, self.random.choice(self.targets), data, way, elsewhere=self.random.random() < 0.5)

    def make_on(self, index: int, target: str, data: bytes, way: int = 0, *, elsewhere: bool = False) -> DeviceBuffer:
        """elsewhere: on another stream than the current one, which has to wait for it."""
        fake = self.fakes[way]
        stream = fake.fresh(index) if elsewhere else fake.current(index)
        with fake.entered([stream]):
            tensor = fake.fake_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), index)
            carrier = fake.carrier(tensor)
            ready = fake.mark(stream) if elsewhere else None
        self._known[carrier.data_ptr()] = data
        return DeviceBuffer(carrier, index, target, ready)

    def part(self, buffer: DeviceBuffer, size: int) -> DeviceBuffer:
        return replace(buffer, carrier=buffer.carrier[:size])

    def reference(self, buffer: DeviceBuffer) -> weakref.ref[Any]:
        return weakref.ref(buffer.carrier)

    def content(self, buffer: Any) -> bytes:
        """Of one to send what was put in, for to look would be to wait."""
        if not isinstance(buffer, DeviceBuffer):
            return bytes(buffer)
        known = self._known.get(buffer.carrier.data_ptr())
        return self.look(buffer) if known is None else known[: len(buffer)]

    def look(self, buffer: DeviceBuffer) -> bytes:
        """What it holds now, on the current stream."""
        fake = self._enter(buffer)
        held: bytes = fake.tensor(buffer.carrier, buffer.index).cpu().numpy().tobytes()
        return held

    def fill(self, buffer: Any, value: int) -> None:
        if not isinstance(buffer, DeviceBuffer):
            super().fill(buffer, value)
            return
        fake = self._enter(buffer)
        fake.tensor(buffer.carrier, buffer.index).fill_(value)
        if buffer.carrier.data_ptr() in self._known:
            self._known[buffer.carrier.data_ptr()] = bytes([value]) * len(buffer)

    def _enter(self, buffer: DeviceBuffer) -> FakeCuda:
        """The current stream is about to use it."""
        fake = next(fake for fake in self.fakes if fake.device_of(buffer.carrier) == buffer.index)
        stream = fake.current(buffer.index)
        if buffer.ready is not None:
            fake.wait(buffer.ready, stream)
            fake.keep(buffer.carrier, stream)
        return fake

    # --- what the tests do --------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Any], way: int = 0) -> Message:
        message = super().send(buffers, way)
        if self.overwrites:
            for buffer in buffers:
                self._write_over(buffer)
        return message

    def _write_over(self, buffer: DeviceBuffer) -> None:
        fake = self._enter(buffer)
        tensor = fake.tensor(buffer.carrier, buffer.index)
        before = torch.frombuffer(bytearray(self.content(buffer)), dtype=torch.uint8)
        tensor.fill_(0xEE)
        tensor.copy_(before, non_blocking=True)

    def put(self, lane: str, action: Callable[[], None]) -> None:
        if self.holding:  # it comes, but waits behind another message of its call
            lane = f"held {self.random.randrange(LANES)}"
        super().put(lane, action)

    def post(self, message: Message) -> None:
        self.holding = self.holds and self.random.random() < 0.3
        super().post(message)
        self.holding = False
        self.calls_made += 1
        self.numbers[id(message)] = self.calls_made
        self.devices[message.way].posted(message.taken, self.calls_made)

    def withdraw(self, message: Message) -> None:
        super().withdraw(message)
        if message.posted:
            self.devices[message.way].give_up(self.numbers[id(message)])

    def hear_piece(self, end: int, frame: list[Buffer]) -> None:
        """A frame with a piece has come."""
        if self.closed[end]:
            return
        ((_, _, body, segments),) = feed(self._decoder(), b"".join(frame), self.random)
        try:
            self.devices[end].on_buffer(unpack(body), segments[0])
        except ProtocolError:
            if not self.lenient:
                raise

    def run_thread(self, end: int, job: Job) -> None:
        """What an end wants done by a thread that may wait for its devices."""
        with self.in_thread(end):
            _run(job)

    @contextmanager
    def in_thread(self, end: int) -> Iterator[None]:
        fake = self.fakes[end]
        assert isinstance(fake, NeighbourCuda)
        with fake.in_thread():
            yield

    def under_way(self) -> dict[str, int]:
        """Also what was left for the other end, and memory; once the devices have done what they were given."""
        self.settle()
        found: dict[str, int] = {}
        for end, devices in enumerate(self.devices):
            found |= {f"{what} {end}": count for what, count in devices.under_way.items()}
            found[f"left {end}"] = len(self.around[end].left)
        return found | self.bytes_in_use()

    def bytes_in_use(self) -> dict[str, int]:
        """Memory of tensors, by end and device, once all is done."""
        gc.collect()
        for _ in range(3):  # what died is noticed, then what its streams had to do, then it has come back
            for fake in self.fakes:
                assert fake.machine.drain(20)
                sum(map(fake.in_use, range(fake.count())))
        return {
            f"bytes {end} {index}": fake.in_use(index)
            for end, fake in enumerate(self.fakes)
            for index in range(fake.count())
        }

    def dispose(self) -> None:
        """Both ends are closed; what they had open is closed, then the boxes are freed."""
        super().dispose()
        self.settle()
        for end in (0, 1):
            with self.in_thread(end):
                while self.around[end].retired:
                    self.around[end].retired.pop().close()
            self.around[end].left.clear()  # it goes with the link

    def finish(self) -> None:
        """No rule was broken, all boxes were freed and closed; the devices go."""
        self.dispose()
        shared = [fake.interprocess.mapped for fake in self.fakes if fake.interprocess is not None]
        left = [memory for memories in shared for memory in memories.values()]
        for fake in self.fakes:
            fake.close()
        assert [fake.violations for fake in self.fakes] == [[], []]
        assert left == [], "memory that is shared is left"

    # --- delivery -----------------------------------------------------------------------------------------------------

    def receive(
        self, end: int, wires: list[Any], riders: Sequence[Any], arrived: Callable[[int, Any], None]
    ) -> list[Any]:
        """On fresh streams, as a link does."""
        fake = self.fakes[end]
        streams: list[Stream] = [fake.fresh(index) for index in range(fake.count())]

        def landed(value: Any) -> Any:
            if not isinstance(value, DeviceBuffer):
                return value
            self._known.pop(value.carrier.data_ptr(), None)
            return replace(value, ready=fake.mark(streams[value.index]))

        with fake.entered(streams):
            if len(wires) == 1 and self.devices[end].is_here(wires[0]) and self.random.random() < 0.7:
                return [self._receive_one(end, wires[0], streams, landed, arrived)]
            return [
                landed(each)
                for each in super().receive(end, wires, riders, lambda place, outcome: arrived(place, landed(outcome)))
            ]

    def _receive_one(
        self,
        end: int,
        wire: Any,
        streams: Sequence[Stream],
        landed: Callable[[Any], Any],
        arrived: Callable[[int, Any], None],
    ) -> Any:
        """The short cut of a link: what fails is told as what `receive` tells later."""
        try:
            landing: Any = SimpleNamespace(streams=dict(enumerate(streams)))
            return landed(self.devices[end].receive_one(wire, landing))
        except RpcError as error:
            outcome = error
            self.around[end].on_loop(lambda: None if self.closed[end] else arrived(0, outcome))
            return None

    def hear(self, end: int, body: bytes) -> None:
        try:
            super().hear(end, body)
        except ProtocolError:
            if not self.lenient:
                raise


class DirectEnds(DeviceEnds):
    """Two workers of one process: one fake."""

    name = "device"
    way = DIRECT

    def _make_fakes(self, seed: int) -> tuple[FakeCuda, FakeCuda]:
        fake = NeighbourCuda(seed=seed, lag=self.lag)
        return (fake, fake)


class IpcEnds(DeviceEnds):
    """The same devices, in another order."""

    way = IPC


class StagingEnds(DeviceEnds):
    """They have nothing in common."""

    way = STAGING

    def _make_fakes(self, seed: int) -> tuple[FakeCuda, FakeCuda]:
        return NeighbourCuda(seed=seed, ipc=None, lag=self.lag), NeighbourCuda(seed=seed + 1, ipc=None, lag=self.lag)


DEVICE_KINDS: tuple[type[DeviceEnds], ...] = (DirectEnds, IpcEnds, StagingEnds)
