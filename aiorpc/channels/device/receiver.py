"""The receiving side of the device channel: incomplete transfers, and opened boxes. See the package."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy

from ...errors import ProtocolError, RpcError
from ...protocol.frames import Buffer
from ...undoing import on_error
from .. import AnyBuffer, Arrived, Traffic, Wire
from ..accelerator import Accelerator, DeviceBuffer, Stream, Tensor, device_index
from ..inline import allocate
from .messages import BoxOffer, BoxRefused, FilledSlot, Got, Opened, Slot, Slots, Stop, read_transfer
from .outbox import Inbox
from .surroundings import DIRECT, IPC, NONCE_SLOT, STAGING, Surroundings, failed

# The result of `receive` for a buffer: all of it, or None so far.
Received = DeviceBuffer | memoryview | None


@dataclass(eq=False)
class _Receiving:
    """An incomplete transfer. memory: the carrier it goes to, or bytes on the host."""

    number: int
    memory: Tensor | memoryview
    target: str
    index: int  # of the device; -1: the host
    stream: Stream
    left: int
    total: int
    arrived: Callable[[AnyBuffer | Exception], None] | None = None

    def buffer(self) -> DeviceBuffer | memoryview:
        """What was received."""
        return (
            self.memory if isinstance(self.memory, memoryview) else DeviceBuffer(self.memory, self.index, self.target)
        )


@dataclass
class _Early:
    """What came of a transfer before the message that names it."""

    chunks: list[FilledSlot] = field(default_factory=list)
    pieces: list[tuple[int, Buffer]] = field(default_factory=list)
    reason: str = ""


class Receiver:
    """On the loop, except where it says otherwise. limit: bytes of the longest buffer that is received."""

    def __init__(
        self, accelerator: Accelerator | None, surroundings: Surroundings, ways: dict[str, Traffic], *, limit: int
    ) -> None:
        self.ways = ways
        self.released: deque[Slot] = deque()  # slots that `flush` gives back
        self._driver = accelerator
        self._around = surroundings
        self._limit = limit
        self._inboxes: dict[int, Inbox] = {}
        self._targets: dict[int, str] = {}  # by the number of an open box: the device that it is for
        self._receiving: dict[int, _Receiving] = {}
        self._early: dict[int, _Early] = {}
        self._unwanted: set[int] = set()  # until their sender's Stop
        self._completed: deque[int] = deque(maxlen=256)  # the latest numbers that `_receiving` had
        self._closed = False
        self._left = False  # this worker leaves, and the inboxes are closed

    @property
    def _accelerator(self) -> Accelerator:
        if self._driver is None:
            raise RpcError("this worker has no devices")
        return self._driver

    # --- receiving ----------------------------------------------------------------------------------------------------

    def is_here(self, wire: Wire) -> bool:
        """Whether the wire is a whole transfer to a device, all of it in slots of open boxes. Any thread."""
        try:
            number, target, total, chunks = wire
            at = 0
            for box, slot, start, size in chunks:
                if not type(box) is type(slot) is type(start) is type(size) is int or slot < 0 or size < 1:
                    return False
                if start != at or self._targets.get(box) != target:
                    return False
                at += size
        except (TypeError, ValueError):
            return False
        return type(number) is type(total) is int and type(target) is str and 0 < at == total <= self._limit

    def receive_one(self, wire: Wire, streams: Mapping[int, Stream]) -> DeviceBuffer:
        """As `receive`, for a wire that `is_here`, but raises the device's errors. Gives its slots back in any case.

        On the loop, or in a thread that has read the message. streams: the current ones that are known, by device.
        """
        _, target, total, chunks = wire
        driver, inbox = self._driver, self._inboxes.get(chunks[0][0])
        try:
            if inbox is None or driver is None:
                raise RpcError("this worker is leaving")
            index = inbox.index
            stream = streams[index] if index in streams else driver.current(index)
            memory = driver.empty(total, index)
            address = memory.data_ptr()
            for box, slot, start, size in chunks:
                self._inboxes[box].get(slot, address + start, size, stream)
                self.ways[IPC]._count_received(size)
        except (ValueError, IndexError) as error:
            raise ProtocolError(f"chunks that cannot be: {chunks!r:.100}: {error}") from None
        except Exception as error:
            self._release_all(chunks)
            raise failed(error) from error
        self._release_all(chunks)
        return DeviceBuffer(memory, index, target)

    def receive(self, wires: Sequence[Wire], arrived: Arrived) -> list[Received]:
        """Take memory for them on the current streams, and enqueue the copies of what has been sent so far.

        Raises ProtocolError for invalid wires.
        """
        received: list[Received] = []
        for place, wire in enumerate(wires):
            try:
                number, target, total, chunks = read_transfer(wire)
                index = device_index(target)
                if not 0 < total <= self._limit:
                    raise ValueError(f"{total} bytes")
                if not isinstance(chunks, int):
                    _check_chunks(chunks)
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"not a transfer: {wire!r:.100}: {error}") from None
            try:
                received.append(self._receive(number, target, index, total, chunks, partial(arrived, place)))
            except ProtocolError:
                raise
            except Exception as error:  # an error of the device fails this message alone
                self._do_without(number)
                self._around.on_loop(self._tell, partial(arrived, place, failed(error)))
                received.append(None)
        return received

    def _tell(self, arrived: Callable[[], None]) -> None:
        if not self._closed:
            arrived()

    def _receive(
        self,
        number: int,
        target: str,
        index: int,
        total: int,
        chunks: list[FilledSlot] | int,
        arrived: Callable[[AnyBuffer | Exception], None],
    ) -> Received:
        if isinstance(chunks, int):
            return self._take_over(chunks, target, index, total)
        early = self._early.get(number) or _Early()
        if early.reason:
            self._release_all([*chunks, *early.chunks])
            raise RpcError(early.reason)
        receiving = self._prepare(number, target, index, total, [*chunks, *early.chunks])
        receiving.arrived = arrived
        self._use_chunks(receiving, [*chunks, *early.chunks])
        self._early.pop(number, None)
        if receiving.left == 0:
            return receiving.buffer()
        self._receiving[number] = receiving
        self.flush()  # the sender waits for slots
        for start, buffer in early.pieces:
            self.on_piece(number, start, buffer)
        return None

    def _prepare(self, number: int, target: str, index: int, total: int, chunks: Sequence[FilledSlot]) -> _Receiving:
        try:
            if index < 0:
                return _Receiving(number, allocate(total), target, index, None, total, total)
            driver = self._accelerator
            if index >= driver.count():
                raise RpcError(f"there is no {target} here")
            return _Receiving(number, driver.empty(total, index), target, index, driver.current(index), total, total)
        except Exception:
            self._release_all(chunks)
            raise

    def _take_over(self, number: int, target: str, index: int, total: int) -> DeviceBuffer:
        handed = self._around.take_over(number)
        if handed is None:
            raise RpcError("its sender has taken it back")
        carrier, event = handed
        if carrier.numel() != total:
            raise ProtocolError(f"{total} bytes announced, {carrier.numel()} handed over")
        driver = self._accelerator
        stream = driver.current(index)
        driver.wait(event, stream)
        driver.keep(carrier, stream)
        self.ways[DIRECT]._count_received(total)
        return DeviceBuffer(carrier, index, target)

    def _use_chunks(self, receiving: _Receiving, chunks: Sequence[FilledSlot]) -> None:
        """Enqueue the copies out of these slots, and give the slots back. Raises ProtocolError for impossible chunks,
        and the driver's errors."""
        left = deque(chunks)
        try:
            while left:
                box, slot, start, size = left[0]
                if self._left:
                    raise RpcError("this worker is leaving")
                inbox, memory = self._inboxes[box], receiving.memory
                if not 0 <= start < start + size <= receiving.total:
                    raise ValueError(f"bytes {start} to {start + size} of {receiving.total}")
                if isinstance(memory, memoryview) or inbox.index != receiving.index:
                    raise ValueError(f"a box for device {inbox.index}")
                inbox.get(slot, memory.data_ptr() + start, size, receiving.stream)
                left.popleft()
                self._release(box, slot)
                receiving.left -= size
                self.ways[IPC]._count_received(size)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ProtocolError(f"chunks that cannot be: {chunks!r:.100}: {error}") from None
        except Exception:
            self._release_all(left)
            raise

    def _release_all(self, chunks: Iterable[FilledSlot]) -> None:
        for box, slot, _, _ in chunks:
            self._release(box, slot)

    def _release(self, box: int, slot: int) -> None:
        self.released.append(Slot(box, slot))
        self._around.on_release()

    def flush(self, *, more: bool = False) -> None:
        """Tell the other end which slots it may use again, if any. more: a message follows at once. Any thread."""
        slots: list[Slot] = []
        with suppress(IndexError):
            while True:
                slots.append(self.released.popleft())
        if slots:
            self._around.post(Slots(slots), more=more)

    def _do_without(self, number: int) -> None:
        """The transfer is not wanted any more: stop its sender, and drop what still comes."""
        self._unwanted.add(number)
        self._completed.append(number)  # its sender may send a Stop, too, and pieces after it
        self._around.post(Stop(number, ""))
        early = self._early.pop(number, None)
        for _ in early.pieces if early is not None else ():
            self._around.post(Got(number))

    def on_chunks(self, number: int, chunks: list[FilledSlot]) -> None:
        """More of a transfer is in these slots. Raises ProtocolError for impossible chunks."""
        _check_chunks(chunks)
        receiving = self._receiving.get(number)
        if number in self._unwanted:
            self._release_all(chunks)
        elif receiving is None:  # its message waits behind another one of the same call
            self._early.setdefault(number, _Early()).chunks.extend(chunks)
        else:
            try:
                self._use_chunks(receiving, chunks)
            except ProtocolError:
                raise
            except Exception as error:
                self._do_without(number)
                self._settle(receiving, failed(error))
                return
            self.flush()
            if receiving.left == 0:
                self._settle(receiving, None)

    def on_piece(self, number: int, start: int, buffer: Buffer) -> None:
        receiving = self._receiving.get(number)
        if number in self._unwanted or number in self._completed:
            self._around.post(Got(number))
            return
        if receiving is None:
            self._early.setdefault(number, _Early()).pieces.append((start, buffer))
            return
        if not 0 <= start < start + len(buffer) <= receiving.total:
            raise ProtocolError(f"a piece of {len(buffer)} bytes at {start} of {receiving.total}")
        self._around.in_background(self._place, receiving, start, buffer)

    def _place(self, receiving: _Receiving, start: int, buffer: Buffer) -> None:
        """In a thread: copy a piece from the host to its place."""
        size = len(buffer)
        failure: Exception | None = None
        try:
            given = numpy.frombuffer(buffer, numpy.uint8)  # copied without the interpreter's lock
            if isinstance(receiving.memory, memoryview):
                numpy.copyto(numpy.frombuffer(receiving.memory, numpy.uint8)[start : start + size], given)
            else:
                host = self._accelerator.pinned(size)
                numpy.copyto(host.numpy(), given)
                self._accelerator.move(receiving.memory[start : start + size], host, receiving.stream)
        except Exception as error:
            failure = failed(error)
        self._around.on_loop(self._placed, receiving, size, failure)

    def _placed(self, receiving: _Receiving, size: int, failure: Exception | None) -> None:
        if self._closed:
            return
        receiving.left -= size
        self.ways[STAGING]._count_received(size)
        if failure is not None and receiving.arrived is not None:
            self._do_without(receiving.number)
            self._settle(receiving, failure)
        elif receiving.left == 0:
            self._settle(receiving, None)
        self._around.post(Got(receiving.number))

    def _settle(self, receiving: _Receiving, failure: Exception | None) -> None:
        self._receiving.pop(receiving.number, None)
        self._completed.append(receiving.number)
        arrived, receiving.arrived = receiving.arrived, None
        if arrived is not None:
            arrived(receiving.buffer() if failure is None else failure)

    def on_lost(self, number: int, error: Exception) -> None:
        """A piece of that transfer is lost."""
        receiving = self._receiving.get(number)
        if receiving is not None:
            self._do_without(number)
            self._settle(receiving, error)
        elif number not in self._unwanted and number not in self._completed:
            self._early.setdefault(number, _Early()).reason = f"a piece of it was lost: {error}"
        self._around.post(Got(number))

    def on_stop(self, number: int, reason: str) -> None:
        """Its sender sends nothing more."""
        receiving = self._receiving.get(number)
        if number in self._unwanted:
            self._unwanted.discard(number)
        elif receiving is not None:
            self._settle(receiving, RpcError(f"a tensor for {receiving.target} did not arrive: {reason}"))
        elif number not in self._completed:  # a completed one: the Stop crossed the last piece
            self._early.setdefault(number, _Early()).reason = reason

    # --- boxes --------------------------------------------------------------------------------------------------------

    def open(self, offer: BoxOffer) -> None:
        """In a thread: open an outbox of the other end, and check its nonce."""
        number, uuid, target, handle, event_handles, slots, nonce = offer
        try:
            driver = self._accelerator
            if driver.interprocess is None:
                raise RpcError(f"{driver.kind} devices of this worker share no memory with other processes")
            reason = driver.interprocess.obstacle(target)
            if reason or not driver.interprocess.reaches(target, uuid):
                raise RpcError(reason or f"{driver.kind}:{target} cannot read the memory of {uuid}")
            if self._left:
                raise RpcError("this worker is leaving")
            inbox = Inbox(driver.interprocess, target, handle, event_handles, slots)
            with on_error(inbox.close):
                self._around.hold([inbox])  # the nonce may still be on its way when the other process dies
                self._prove(inbox, nonce)
        except Exception as error:
            self._around.post(BoxRefused(number, f"{type(error).__name__}: {error}"))
            return
        self._around.on_loop(self._use, number, inbox)

    def _prove(self, inbox: Inbox, nonce: bytes) -> None:
        driver = self._accelerator
        stream = driver.fresh(inbox.index)
        with driver.entered([stream]):
            proof = driver.empty(len(nonce), inbox.index)
            inbox.get(NONCE_SLOT, proof.data_ptr(), len(nonce), stream)
            host = driver.pinned(len(nonce))
            driver.move(host, proof, stream)
            driver.synchronize(driver.mark(stream))
        if host.numpy().tobytes() != nonce:
            raise RpcError("what was opened is other memory than what was offered")

    def _use(self, number: int, inbox: Inbox) -> None:
        if self._closed:
            self._around.ended([inbox])
            return
        if self._left:
            self._around.in_background(self._decline, number, inbox)
            return
        self._inboxes[number] = inbox
        self._targets[number] = f"{self._accelerator.kind}:{inbox.index}"
        self._around.post(Opened(number))

    def _decline(self, number: int, inbox: Inbox) -> None:
        """In a thread: this worker began to leave while the box was opened."""
        inbox.close()
        self._around.post(BoxRefused(number, "this worker is leaving"))

    def take_inboxes(self) -> dict[int, Inbox]:
        """The inboxes, which the caller must close off the loop; nothing is received through them any more. Any
        thread."""
        self._left = True
        inboxes, self._inboxes = self._inboxes, {}
        self._targets.clear()
        return inboxes

    @property
    def opened(self) -> int:
        """How many outboxes of the other end are open here."""
        return len(self._inboxes)

    @property
    def transfers(self) -> int:
        """How many are incomplete."""
        return len(self._receiving)

    @property
    def early(self) -> int:
        """Of how many transfers something is here before the message that names them."""
        return len(self._early)

    @property
    def unwanted(self) -> int:
        """How many unwanted transfers still wait for their sender's Stop."""
        return len(self._unwanted)

    def close(self) -> list[Inbox]:
        """Nothing more arrives. Returns the inboxes, which the caller must close off the loop."""
        self._closed = True
        self._receiving.clear()
        self._early.clear()
        return list(self.take_inboxes().values())


def _check_chunks(chunks: Sequence[FilledSlot]) -> None:
    """Raises ValueError for impossible chunks."""
    if any(part < 0 for chunk in chunks for part in chunk):
        raise ValueError(f"no chunks: {chunks!r:.80}")
