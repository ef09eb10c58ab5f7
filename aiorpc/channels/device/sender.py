"""The sending side of the device channel: transfers, and the boxes that they wait for. See the package.

States of a box: MAKING (in a thread), OFFERED, then OPEN or REFUSED. Until it is OPEN transfers wait for it, cloned; if
it is REFUSED they go by staging, or fail where the options ask for ipc alone.

Invariant: transfers that wait for a box get its slots in the order in which they were sent, and before any later one. A
message may have to wait for an earlier one of its call, and must not hold the slots that the earlier one needs.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import RpcError
from ...locks import Lock
from .. import Traffic, Wire
from ..accelerator import Accelerator, DeviceBuffer, Event, Stream, Tensor, device_index
from .messages import BoxOffer, FilledSlot, FilledSlots, Piece, Slot, Span, Stop
from .outbox import Outbox
from .surroundings import DIRECT, IPC, NONCE_SLOT, STAGING, Surroundings

# Bytes of a piece, and how many pieces of a transfer may be under way: enough to keep both copies and the socket busy.
PIECE_SIZE = 4 * 1024 * 1024
WINDOW = 4
# Bytes of the random nonce that proves to the other end that memory is shared.
NONCE_SIZE = 32
# Seconds after which an unanswered offer counts as refused.
OFFER_PATIENCE = 30.0


@dataclass(eq=False)
class _Box:
    """The sender's side of an outbox for one device of the other end."""

    number: int
    index: int
    target: int
    outbox: Outbox | None = None
    offered: bool = False
    open: bool = False
    refused: str = ""
    waiting: deque[_Sending] = field(default_factory=deque)


@dataclass(eq=False)
class _Sending:
    """The rest of a transfer. source: its bytes from `first` on, cloned; `ready`: the event after the clone."""

    number: int
    index: int
    source: Tensor
    first: int
    total: int
    ready: Event
    box: _Box | None
    sent: int  # of all its bytes
    target: int  # device of the receiver, -1: its host
    call: int = 0  # the number of its call, once the message that names it is posted
    stopped: bool = False
    fetched: int = 0  # pieces; written by the thread that sends them
    used: int = 0  # pieces that the other end has acknowledged; written on the loop
    unwanted: bool = False  # the other end wants no more
    running: bool = False  # a thread sends pieces
    stream: Stream = None


class Sender:
    """`send`, `withdraw` and `posted` from any thread, the rest on the loop.

    ways: the counts of each way. way: "direct", "ipc" or "staging"; empty: transfers wait until `choose` decides.
    forced: no other way may be used. box_size, piece_size: bytes of an outbox, and of a piece that goes through the
    host.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        surroundings: Surroundings,
        ways: dict[str, Traffic],
        *,
        way: str,
        forced: bool,
        box_size: int,
        piece_size: int,
    ) -> None:
        self.way: str = way
        self.ways = ways
        self._driver = accelerator
        self._around = surroundings
        self._forced = forced
        self._box_size = box_size
        self._piece_size = piece_size
        self._numbers = itertools.count(1)
        self._lock = Lock()
        self._boxes: dict[tuple[int, int], _Box] = {}  # by both devices
        self._sending: dict[int, _Sending] = {}
        self._why = ""  # the reason if the way is not ipc
        self._closed = False

    @property
    def _accelerator(self) -> Accelerator:
        if self._driver is None:
            raise RpcError("this worker has no devices")
        return self._driver

    # --- sending, from any thread -------------------------------------------------------------------------------------

    def send(self, buffer: DeviceBuffer) -> Wire:
        """Copy it, or begin to. Raises the device's errors; nothing was sent then."""
        if self._closed:
            raise RpcError("the connection to it has ended")
        number = next(self._numbers)
        index = device_index(buffer.target)
        driver, size = self._accelerator, len(buffer)
        if buffer.ready is not None:
            driver.wait(buffer.ready, driver.current(buffer.index))
        if index >= 0 and self.way == DIRECT:
            return [number, buffer.target, size, self._hand_over(buffer, index)]  # the fields of a DeviceTransfer
        box = self._box(buffer.index, index) if index >= 0 and self.way == IPC else None
        stream = driver.current(buffer.index)
        driver.keep(buffer.carrier, stream)  # it may belong to another stream, and be dropped right after this
        chunks: list[FilledSlot] = []
        sent = 0
        if box is not None and box.open and not box.waiting:
            sent = self._fill(box, buffer.carrier, 0, size, stream, chunks)
        if sent < size:
            try:
                self._clone(number, buffer, sent, box, index)
            except Exception:
                self._give_back(chunks)
                self._around.on_loop(self._pump_all, chunks)
                raise
        return [number, buffer.target, size, chunks]

    def _hand_over(self, buffer: DeviceBuffer, index: int) -> int:
        driver = self._accelerator
        copy = driver.empty(len(buffer), index)
        stream = driver.current(buffer.index)
        if index != buffer.index:  # the memory belongs to a stream of the other device: this copy comes after its work
            driver.wait(driver.mark(driver.current(index)), stream)
            driver.keep(copy, stream)
        driver.move(copy, buffer.carrier, stream)
        self.ways[DIRECT]._count_sent(len(buffer))
        return self._around.hand_over(copy, driver.mark(stream))

    def _fill(
        self, box: _Box, source: Tensor, start: int, size: int, stream: Stream, chunks: list[FilledSlot], first: int = 0
    ) -> int:
        """Copy what fits into free slots; returns where that ends. start, size: of the transfer, in bytes; `source`
        begins at `first`."""
        outbox = box.outbox
        taken: list[int] = []
        try:
            while start < size and outbox is not None:
                slot = outbox.take(size - start)
                if slot is None:
                    break
                taken.append(slot)
                copied = outbox.put(slot, source, start - first, stream)
                chunks.append(FilledSlot(box.number, slot, start, copied))
                self.ways[IPC]._count_sent(copied)
                start += copied
        except Exception:
            if outbox is not None:
                for slot in taken:
                    outbox.give(slot)
            self._around.on_loop(self._pump, box)  # other transfers may wait for these slots by now
            raise
        return start

    def _clone(self, number: int, buffer: DeviceBuffer, sent: int, box: _Box | None, target: int) -> None:
        """Clone the rest of a buffer at this point of the current stream."""
        driver = self._accelerator
        source = driver.empty(len(buffer) - sent, buffer.index)
        stream = driver.current(buffer.index)
        driver.move(source, buffer.carrier[sent:], stream)
        ready = driver.mark(stream)
        sending = _Sending(number, buffer.index, source, sent, len(buffer), ready, box, sent, target)
        self._sending[number] = sending
        if box is not None:
            with self._lock:
                box.waiting.append(sending)

    def posted(self, wires: Sequence[Wire], call: int) -> None:
        """The message that names these is on its way: the rest of them may follow. call: the number of its call."""
        for number, *_ in wires:
            sending = self._sending.get(number)
            if sending is not None:
                sending.call = call
                self._around.on_loop(self._go_on, sending)

    def give_up(self, call: int) -> None:
        """Send nothing more of what was posted for that call."""
        for sending in list(self._sending.values()):
            if sending.call == call:
                self._stop(sending, "its sender has given it up")

    def _stop(self, sending: _Sending, reason: str) -> None:
        sending.stopped = True
        self._around.on_loop(self._end_sending, sending, reason)

    def withdraw(self, wires: Sequence[Wire]) -> None:
        """The message that names these was not sent."""
        for number, _, _, chunks in wires:
            sending = self._sending.get(number)
            if sending is not None:
                self._stop(sending, "")
            if isinstance(chunks, int):
                self._around.take_back(chunks)
            elif chunks:
                self._give_back(chunks)
                self._around.on_loop(self._pump_all, chunks)

    def _pump_all(self, slots: Sequence[Slot | FilledSlot]) -> None:
        numbers = {slot.box for slot in slots}
        for box in list(self._boxes.values()):  # none once this end is closed
            if box.number in numbers:
                self._pump(box)

    def _give_back(self, slots: Sequence[Slot | FilledSlot]) -> None:
        boxes = {box.number: box.outbox for box in list(self._boxes.values())}
        for each in slots:
            outbox = boxes.get(each.box)
            if outbox is not None:  # None: the other end has closed it meanwhile, or the connection has ended
                outbox.give(each.slot)

    # --- boxes: the sender's side -------------------------------------------------------------------------------------

    def _box(self, index: int, target: int) -> _Box | None:
        """The box for that pair of devices; None if transfers have to go by staging."""
        box = self._boxes.get((index, target))
        if box is None:
            with self._lock:
                box = self._boxes.get((index, target))
                if box is None:
                    box = self._boxes[index, target] = _Box(len(self._boxes), index, target)
                    self._around.in_background(self._make, box)
        if box.refused and not self._forced:
            return None
        return box

    def _make(self, box: _Box) -> None:
        """In a thread: allocate and offer it."""
        driver = self._accelerator
        assert driver.interprocess is not None, "no ipc without it"
        try:
            outbox = box.outbox = Outbox(driver.interprocess, box.index, self._box_size)
            nonce = os.urandom(NONCE_SIZE)
            stream = driver.fresh(box.index)
            with driver.entered([stream]):
                proof = driver.empty(NONCE_SIZE, box.index)
                host = driver.pinned(NONCE_SIZE)
                host.numpy()[:] = bytearray(nonce)
                driver.move(proof, host, stream)
                outbox.put(NONCE_SLOT, proof, 0, stream)
            uuid = driver.interprocess.uuid(box.index)
        except Exception as error:
            self._around.on_loop(self._refuse, box, f"device memory cannot be offered: {error}")
            self._free(box)
            return
        if self._closed:  # meanwhile, and before the other end knows the box
            self._free(box)
            return
        slots = [Span(*slot) for slot in outbox.slots]
        offer = BoxOffer(box.number, uuid, box.target, outbox.handle, outbox.event_handles, slots, nonce)
        box.offered = True
        self._around.post(offer)
        self._around.later(OFFER_PATIENCE, self._refuse, box, f"no answer to an offer in {OFFER_PATIENCE:g} s")

    def _refuse(self, box: _Box, reason: str) -> None:
        if box.open or box.refused or self._closed:
            return
        box.refused = reason
        if not self._forced:
            self._around.on_chosen(STAGING, reason)
        with self._lock:
            waiting, box.waiting = box.waiting, deque()
        for sending in waiting:
            sending.box = None
            self._go_on(sending)

    def _find_offered(self, number: int) -> _Box:
        box = self._find_box(number)
        if not box.offered:
            raise ValueError(f"box {number} was not offered")
        return box

    def _find_box(self, number: int) -> _Box:
        for box in list(self._boxes.values()):
            if box.number == number:
                return box
        raise ValueError(f"box {number} was not offered")

    def choose(self, way: str, reason: str) -> None:
        """ipc or staging, and why it is not ipc. On the loop; does nothing if the way was settled before."""
        if self.way:
            return
        self._why = reason
        self.way = way
        if way != IPC:
            self._around.on_chosen(way, reason)
        for sending in list(self._sending.values()):
            self._go_on(sending)

    def _line_up(self, sending: _Sending) -> None:
        box = self._box(sending.index, sending.target)
        if box is not None:
            with self._lock:
                sending.box = box
                box.waiting.append(sending)

    # --- sending what is left, on the loop ----------------------------------------------------------------------------

    def _go_on(self, sending: _Sending) -> None:
        if self._closed or sending.stopped or not sending.call or not self.way:
            return
        begun = sending.running or sending.fetched
        if sending.box is None and self.way == IPC and sending.target >= 0 and not begun:
            self._line_up(sending)  # it was sent just before the way was settled
        box = sending.box
        if box is not None and box.refused:  # it began to wait while the box was being refused
            self._leave(box, sending)
            box = sending.box = None
        if box is not None:
            self._pump(box)
        elif self._forced and sending.target >= 0:
            refusals = [box.refused for box in list(self._boxes.values()) if box.refused]
            reason = self._why or next(iter(refusals), "it has no outbox")
            self._end_sending(sending, f"device_channel='ipc', and that cannot be had: {reason}")
        elif not sending.running:
            sending.running = True
            self._around.in_background(self._send_pieces, sending)

    def _pump(self, box: _Box) -> None:
        """Fill the free slots of a box with the transfers that wait for it."""
        while box.open and box.waiting and not self._closed:
            sending = box.waiting[0]
            if sending.stopped:  # `_end_sending` tells the other end
                self._leave(box, sending)
                continue
            if not sending.call:
                return
            try:
                self._send_chunks(box, sending)
            except Exception as error:
                sending.stopped = True
                self._around.post(Stop(sending.number, f"its sender cannot copy it: {error}"))
            if sending.sent < sending.total and not sending.stopped:
                return
            self._leave(box, sending)
            self._sending.pop(sending.number, None)

    def _leave(self, box: _Box, sending: _Sending) -> None:
        with self._lock:
            if sending in box.waiting:
                box.waiting.remove(sending)

    def _send_chunks(self, box: _Box, sending: _Sending) -> None:
        self._begin(sending)
        chunks: list[FilledSlot] = []
        sending.sent = self._fill(
            box, sending.source, sending.sent, sending.total, sending.stream, chunks, sending.first
        )
        if chunks:
            self._around.post(FilledSlots(sending.number, chunks))

    def _begin(self, sending: _Sending) -> None:
        """Give the transfer a stream of its own, which does not delay the sender's."""
        if sending.stream is None:
            driver = self._accelerator
            sending.stream = driver.fresh(sending.index)
            driver.wait(sending.ready, sending.stream)
            driver.keep(sending.source, sending.stream)

    def _end_sending(self, sending: _Sending, reason: str) -> None:
        """Send nothing more of it. reason: for the other end, if it waits for more."""
        sending.stopped = True
        known = self._sending.pop(sending.number, None) is not None
        if sending.box is not None:
            self._leave(sending.box, sending)
            self._pump(sending.box)
        if known and reason and not self._closed:
            self._around.post(Stop(sending.number, reason))

    def _send_pieces(self, sending: _Sending) -> None:
        """In a thread: bring pieces to the host and send them, while the other end takes them.

        The copy of one piece to the host runs while the one before it is sent.
        """
        ahead: deque[tuple[int, Tensor, Event]] = deque()
        try:
            self._begin(sending)
            while not sending.stopped and not self._closed:
                while len(ahead) < 2 and sending.sent < sending.total and sending.fetched - sending.used < WINDOW:
                    ahead.append(self._fetch(sending))
                if not ahead:
                    break
                start, host, event = ahead.popleft()
                self._accelerator.synchronize(event)
                self.ways[STAGING]._count_sent(host.numel())
                self._around.post_buffer(Piece(sending.number, start), host.numpy().data)
                del host
        except Exception as error:
            sending.fetched -= 1
            self._around.on_loop(self._end_sending, sending, f"its sender cannot copy it to the host: {error}")
        sending.fetched -= len(ahead)
        self._around.on_loop(self._pause, sending)

    def _fetch(self, sending: _Sending) -> tuple[int, Tensor, Event]:
        driver, start = self._accelerator, sending.sent
        size = min(self._piece_size, sending.total - start)
        host = driver.pinned(size)
        at = start - sending.first
        driver.move(host, sending.source[at : at + size], sending.stream)
        sending.sent += size
        sending.fetched += 1
        return start, host, driver.mark(sending.stream)

    def _pause(self, sending: _Sending) -> None:
        """The thread has sent what it may send now."""
        sending.running = False
        if sending.unwanted or sending.sent >= sending.total:
            self._settle(sending)
        elif sending.fetched - sending.used < WINDOW:
            self._go_on(sending)

    def _settle(self, sending: _Sending) -> None:
        """Nothing more is sent through the host: the transfer ends when all pieces were used."""
        if sending.running or sending.used < sending.fetched:
            return
        self._sending.pop(sending.number, None)
        if sending.unwanted and not self._closed:
            self._around.post(Stop(sending.number, "it was not wanted"))

    # --- messages of the other end, on the loop -----------------------------------------------------------------------

    def on_opened(self, number: int) -> None:
        """The other end has opened that box, and found the nonce. Raises ValueError for a box that was not offered."""
        box = self._find_offered(number)
        if box.outbox is None:
            return
        box.refused = ""  # the answer may have come after OFFER_PATIENCE
        box.open = True
        self._around.on_chosen(IPC, "")
        self._pump(box)

    def on_refused(self, number: int, reason: str) -> None:
        """The other end cannot open that box."""
        box = self._find_offered(number)
        if box.open:
            raise ValueError(f"box {number} was opened")
        self._refuse(box, f"the other end cannot open it: {reason}")
        self._free(box)

    def on_slots(self, slots: Any) -> None:
        """The other end gives these slots back. Also in a thread that reads the connection. Raises ValueError or
        TypeError for slots that were not lent."""
        boxes = list(self._boxes.values())
        for number, slot in slots:
            if not type(number) is type(slot) is int:
                raise TypeError(f"no slot: {number!r:.40}, {slot!r:.40}")
            if not 0 <= number < len(boxes):
                raise ValueError(f"box {number} was not offered")
            box = boxes[number]  # boxes are numbered in the order of their creation
            if box.outbox is not None:  # None: the other end has closed it meanwhile
                box.outbox.give(slot)
        for box in boxes:
            if box.waiting:  # a transfer that begins to wait after this check gets slots when its message is posted
                self._around.on_loop(self._pump, box)

    def on_got(self, number: int) -> None:
        """A piece of that transfer was used."""
        sending = self._sending.get(number)
        if sending is None:
            return
        sending.used += 1
        if sending.unwanted or sending.sent >= sending.total:
            self._settle(sending)
        else:
            self._go_on(sending)

    def on_unwanted(self, number: int) -> None:
        """Nothing more of that transfer is wanted."""
        sending = self._sending.get(number)
        if sending is None:
            self._around.post(Stop(number, "it was not wanted"))
            return
        sending.stopped = sending.unwanted = True
        if sending.box is not None:
            self._leave(sending.box, sending)
            self._pump(sending.box)
        self._settle(sending)

    def on_closed(self, numbers: list[int]) -> None:
        """The other end leaves, and has closed these boxes."""
        for number in numbers:
            box = self._find_box(number)
            box.open, box.refused = False, "the other worker has closed it"
            self._free(box)
            for sending in list(box.waiting):
                if sending.call:  # the others go by staging once their message is posted
                    self._end_sending(sending, box.refused)

    def _free(self, box: _Box) -> None:
        """Close an outbox that the other end does not have open."""
        outbox, box.outbox = box.outbox, None
        if outbox is not None:
            self._around.in_background(outbox.close)

    @property
    def boxes(self) -> int:
        """How many outboxes the other end may have open."""
        return sum(box.outbox is not None for box in list(self._boxes.values()))

    def memory(self) -> list[tuple[int, int]]:
        """Device and bytes of each outbox. Any thread."""
        found = [(box.index, box.outbox) for box in list(self._boxes.values())]
        return [(index, outbox.size) for index, outbox in found if outbox is not None]

    @property
    def lent(self) -> int:
        """How many slots of the outboxes are not free."""
        return sum(box.outbox.lent for box in list(self._boxes.values()) if box.outbox is not None)

    @property
    def transfers(self) -> int:
        """How many are not completely sent."""
        return len(self._sending)

    def close(self) -> list[Outbox]:
        """Send nothing more. Returns the outboxes, which the other process may still use."""
        self._closed = True
        self._sending.clear()
        boxes = list(self._boxes.values())  # a copy first: a thread may be adding one
        self._boxes.clear()
        for box in boxes:
            box.waiting.clear()
        return [box.outbox for box in boxes if box.outbox is not None]
