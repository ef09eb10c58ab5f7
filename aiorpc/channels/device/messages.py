"""The messages between the two ends of a device channel, and the descriptor of a buffer that travels on it.

A transfer is one buffer on its way; a box is the outbox of one of the sender's devices, and a slot a place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...protocol.families import Family, reader_of


class Span(NamedTuple):
    """Where a slot is in its box."""

    start: int
    size: int


class Slot(NamedTuple):
    """A slot of a box."""

    box: int
    slot: int


class FilledSlot(NamedTuple):
    """A part of a transfer that lies in a slot."""

    box: int
    slot: int
    #: Where it belongs in the transfer, in bytes.
    start: int
    #: Its size in bytes.
    size: int


class DeviceTransfer(NamedTuple):
    """In an envelope: a buffer that goes to a device, or comes from one."""

    #: The number of the transfer.
    transfer: int
    #: Its destination: "cuda:1", or "cpu".
    target: str
    #: Its size in bytes.
    size: int
    #: The slots that hold its first part; or, in one process, the number under which it is handed over.
    chunks: list[FilledSlot] | int


class BoxOffer(NamedTuple):
    """Open this box. Its first slot begins with the nonce."""

    box: int
    #: Of the device that it is on.
    uuid: str
    #: The index of the device at the receiver that its contents go to.
    target: int
    #: The driver's handle of its memory.
    handle: bytes
    #: The driver's handles of the events of its slots.
    event_handles: list[bytes]
    slots: list[Span]
    nonce: bytes


class Opened(NamedTuple):
    """The box is open, and the nonce was there."""

    box: int


class BoxRefused(NamedTuple):
    """The box cannot be opened."""

    box: int
    reason: str


class FilledSlots(NamedTuple):
    """More of a transfer lies in these slots."""

    transfer: int
    chunks: list[FilledSlot]


class Piece(NamedTuple):
    """More of a transfer, through the host: a message of its own, with the piece as its one buffer."""

    transfer: int
    #: Where it belongs in the transfer, in bytes.
    start: int


class Got(NamedTuple):
    """One piece has been used: send another one."""

    transfer: int


class Slots(NamedTuple):
    """The reader gives these slots back."""

    slots: list[Slot]


class Stop(NamedTuple):
    """From the sender, with a reason: nothing more comes. From the reader, without one: nothing more is wanted, which
    the sender answers with a Stop of its own."""

    transfer: int
    reason: str


class Closed(NamedTuple):
    """The sender of this message has closed these boxes."""

    boxes: list[int]


Message = BoxOffer | Opened | BoxRefused | FilledSlots | Piece | Got | Slots | Stop | Closed
MESSAGES: Family[Message] = Family(
    "device memory",
    {
        "offer": BoxOffer,
        "opened": Opened,
        "refused": BoxRefused,
        "chunks": FilledSlots,
        "piece": Piece,
        "got": Got,
        "slots": Slots,
        "stop": Stop,
        "closed": Closed,
    },
)
#: Makes a DeviceTransfer of plain data; raises TypeError.
read_transfer: Callable[[object], DeviceTransfer] = reader_of(DeviceTransfer)
