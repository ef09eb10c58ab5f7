"""The device channel: tensors that lie on a device, from one worker's device to another's, or to its host's memory.

It has three ways, and takes all device buffers:

    way      between                        how
    direct   workers of one process         copied on the sender's stream, handed over with an event
    ipc      processes that can share       through an outbox on the sender's device (outbox.py)
             device memory
    staging  all others                     through pinned memory of the host, piece by piece, by the host's channels

`send` copies on the current streams of the calling thread: the sender may write to the tensor right after. What does
not fit into the outbox at once is cloned on the device and follows when there is room. `receive` enqueues its copies on
the current streams, and has received a buffer when the last copy is enqueued. `receive_one` is the short path for a
buffer that lies completely in slots.

The messages of the two ends are in `messages`. A transfer is one buffer on its way; a box is the outbox of one of the
sender's devices.

Invariants
1. A slot's event is recorded before the slot is named, and by the reader before the slot is given back.
2. Nothing here waits for a device, except in threads (`Surroundings.in_background`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ...errors import ProtocolError
from ...logs import logger
from ...protocol.frames import Buffer
from .. import Arrived, Channel, Traffic, Wire
from ..accelerator import Accelerator, DeviceBuffer
from ..landing import Landing
from .messages import (
    MESSAGES,
    BoxOffer,
    BoxRefused,
    Closed,
    FilledSlots,
    Got,
    Opened,
    Piece,
    Slots,
    Stop,
)
from .receiver import Received, Receiver
from .sender import PIECE_SIZE, Sender
from .surroundings import DIRECT, IPC, STAGING, Surroundings

_SLOTS = MESSAGES.write(Slots([]))[:1]  # the first field of such a message

__all__ = ["DIRECT", "IPC", "STAGING", "Devices", "Surroundings"]


class Devices(Channel):
    """One end. See the package. `send`, `withdraw`, `posted`, `flush` and `is_here` from any thread, the rest on the
    loop. `on_message` (for slots) and `receive_one` also run in a thread that reads the connection.

    accelerator: None without devices; then only buffers for the host can be received. way: "direct", "ipc" or
    "staging"; empty: `choose` decides later. forced: no other way may be used. box_size: bytes of an outbox. limit:
    bytes of the longest buffer that is received. piece_size: bytes of a piece that goes through the host.
    """

    name = "device"
    on_devices = True
    borrows = False
    tracks = True
    anywhere: Sequence[list[object]] = (_SLOTS,)

    def __init__(
        self,
        accelerator: Accelerator | None,
        surroundings: Surroundings,
        *,
        way: str,
        forced: bool = False,
        box_size: int,
        limit: int,
        piece_size: int = PIECE_SIZE,
    ) -> None:
        super().__init__()
        self.ways: dict[str, Traffic] = {DIRECT: Traffic(), IPC: Traffic(), STAGING: Traffic()}
        self._sender = Sender(
            accelerator, surroundings, self.ways, way=way, forced=forced, box_size=box_size, piece_size=piece_size
        )
        self._receiver = Receiver(accelerator, surroundings, self.ways, limit=limit)
        self.around: Surroundings = surroundings
        self._closed = False
        self._let_go = self._gone = False
        self.released: deque[Any] = self._receiver.released

    def send(self, buffers: Sequence[DeviceBuffer], riders: list[Buffer], copies: object = None) -> list[Wire | None]:
        """Copy them, or begin to. Raises torch.OutOfMemoryError if there is no room on the device for a clone."""
        wires: list[Wire | None] = []
        try:
            for buffer in buffers:
                wires.append(self.send_one(buffer))
        except Exception:
            self.withdraw([wire for wire in wires if wire is not None], named=False)
            raise
        return wires

    def send_one(self, buffer: DeviceBuffer, copies: object = None) -> Wire:
        """As `send`, for one buffer."""
        wire = self._sender.send(buffer)
        self.traffic._count_sent(len(buffer))
        return wire

    def posted(self, wires: Sequence[Wire], call: int) -> None:
        """The message that names these is on its way: the rest of them may follow. call: the number of its call."""
        self._sender.posted(wires, call)

    def give_up(self, call: int) -> None:
        """Send nothing more of what was posted for that call. Any thread."""
        self._sender.give_up(call)

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """Free what an unsent message took. `give_up` ends what was posted."""
        if not named:
            self._sender.withdraw(wires)

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Received]:
        """Take memory for them on the current streams, and enqueue the copies of what has been sent so far."""
        received = self._receiver.receive(wires, arrived)
        for _, _, size, _ in wires:
            self.traffic._count_received(size)
        return received

    def receive_one(self, wire: Wire, landing: Landing | None = None) -> DeviceBuffer:
        """As `receive`, for a wire that `is_here`, with the streams of the landing current; raises the device's
        errors."""
        buffer = self._receiver.receive_one(wire, landing.streams if landing is not None else {})
        self.traffic._count_received(wire[2])
        return buffer

    def is_here(self, wire: Wire) -> bool:
        """Whether the wire is a whole transfer to a device, all of it in slots of open boxes. Any thread."""
        return self._receiver.is_here(wire)

    def flush(self, *, more: bool = False) -> None:
        """Tell the other end which slots it may use again, if any. more: a message follows at once. Any thread."""
        self._receiver.flush(more=more)

    def on_message(self, fields: list[object]) -> None:
        """A message of the other end. Those that give slots back also in other threads: see the class. Raises
        ProtocolError."""
        if self._closed:
            return
        message: object = fields
        sender, receiver = self._sender, self._receiver
        try:
            if fields[:1] == _SLOTS and len(fields) == 2:  # the most frequent message
                sender.on_slots(fields[1])
                return
            message = MESSAGES.read(fields)
            match message:
                case FilledSlots(number, chunks):
                    receiver.on_chunks(number, chunks)
                case Got(number):
                    sender.on_got(number)
                case Opened(box):
                    sender.on_opened(box)
                case BoxRefused(box, reason):
                    sender.on_refused(box, reason)
                case Closed(boxes):
                    sender.on_closed(boxes)
                    self.around.in_background(self.let_go)
                case Stop(number, ""):
                    sender.on_unwanted(number)
                case Stop(number, reason):
                    receiver.on_stop(number, reason)
                case BoxOffer():
                    self.around.in_background(receiver.open, message)
                case Piece():
                    raise ValueError("it has no buffer")
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise ProtocolError(f"a message about device memory that cannot be: {message!r:.100}: {error}") from None

    def introduced(self, theirs: Any) -> None:
        """The other end's descriptor has come: choose a way."""
        route, way, reason = self.around.introduced(theirs)
        self.route = route
        self.choose(way, reason)

    def on_buffer(self, fields: list[object], buffer: Buffer | Exception) -> None:
        """A piece from the other end, or the reason why it is lost. Raises ProtocolError."""
        if self._closed:
            return
        message = MESSAGES.read(fields)
        if not isinstance(message, Piece):
            raise ProtocolError(f"{message!r:.100} with a buffer")
        if isinstance(buffer, Exception):
            self._receiver.on_lost(message.transfer, buffer)
        else:
            self._receiver.on_piece(message.transfer, message.start, buffer)

    def let_go(self) -> None:
        """One of the two workers leaves: close what was opened here, and report it. In a thread."""
        if self._let_go:
            return
        self._let_go = True
        inboxes = self._receiver.take_inboxes()
        self.around.hold([*inboxes.values()])
        closed = []
        for number, inbox in inboxes.items():
            try:
                inbox.close()
            except RuntimeError as error:  # not reported as closed: the other end must not free what may still be open
                logger.debug("closing device memory of another worker: %s", error)
            else:
                closed.append(number)
        self.around.post(Closed(closed))
        self._gone = True

    def choose(self, way: str, reason: str) -> None:
        """Settle which way is taken; see `Sender.choose`."""
        self._sender.choose(way, reason)

    @property
    def opened(self) -> int:
        """How many outboxes of the other end are open here."""
        return self._receiver.opened

    @property
    def shared(self) -> bool:
        """Whether, after `let_go`, either end may still have memory of the other's open."""
        return not self._gone or self._sender.boxes > 0

    def memory(self) -> list[tuple[int, int]]:
        """Device and bytes of each outbox. Any thread."""
        return self._sender.memory()

    @property
    def boxes(self) -> int:
        """How many outboxes the other end may have open."""
        return self._sender.boxes

    @property
    def busy(self) -> bool:
        """Whether something of a transfer is still to be sent."""
        return self._sender.transfers > 0

    def traffics(self) -> dict[str, Traffic]:
        """What has gone which way."""
        return self.ways

    @property
    def under_way(self) -> dict[str, int]:
        """What is held for transfers: how many are not all sent, not all here, here before their message, and not
        wanted any more; and how many slots are lent."""
        sender, receiver = self._sender, self._receiver
        return {
            "sending": sender.transfers,
            "receiving": receiver.transfers,
            "early": receiver.early,
            "unwanted": receiver.unwanted,
            "slots": sender.lent,
        }

    def close(self) -> None:
        """The connection has ended. What was received stays valid; outboxes are freed when the other end is done."""
        if self._closed:
            return
        self._closed = True
        self.around.ended([*self._sender.close(), *self._receiver.close()])
