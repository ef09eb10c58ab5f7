"""Channels: the ways that the buffers of a message take from one worker to another.

A message is a body and some buffers. Each buffer goes by the first channel that takes it, in this order:

    channel        reaches               how                                       borrows the sender's memory until
    shared memory  workers of this host  a copy in a block that both have mapped   `send` returns
    bulk           every worker          chunks on a connection of their own       the last chunk was written
    inline         every worker          behind the body, in the same frame        the frame was written

Buffers that lie on a device have a channel of their own (`device`), with this interface but for what it calls them.

A channel knows nothing of calls, tensors or sockets. It has two ends, one in either worker, which tell each other what
they must by messages of their own (`on_message`).

Who owns a buffer
1. Until `send` the sender. From then until the time in the table its memory is borrowed: it is kept alive, and read.
   The sender may drop it, and had better not change it.
2. `send` that returns None for a buffer, or raises, has not borrowed it.
3. Between the two ends the bytes belong to the channel. `withdraw` gives up what was sent and not received.
4. What `receive` returns, at once or through `arrived`, belongs to the receiver alone: writable, and valid as long as
   it lives, whatever becomes of the channel, the sender, or its process.
5. An `arrived` is called once, with the buffer or with an error; after `close` none is called any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..protocol.frames import Buffer
from .accelerator import DeviceBuffer

# Bytes on the host or on a device.
AnyBuffer = Buffer | DeviceBuffer

# What the other end needs in order to receive one buffer: plain data, a part of the message.
Wire = list[Any]
# Is called with the number of the wire in the message, and with its buffer or the reason why there is none.
Arrived = Callable[[int, Buffer | Exception], None]


@dataclass
class Traffic:
    """What went through one channel, such as shared memory, from the start of the worker on.

    sent, bytes_sent: buffers of tensors, and their bytes, that it took to other workers. received, bytes_received:
    those that came through it. refused: how many it did not take, by the reason; another channel took these.
    """

    # Counted without a lock, in steps that no other thread gets between: none has a call in it.
    sent: int = 0
    bytes_sent: int = 0
    received: int = 0
    bytes_received: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def _count_sent(self, size: int) -> None:
        """One buffer of `size` bytes was taken on."""
        self.sent += 1
        self.bytes_sent += size

    def _count_received(self, size: int) -> None:
        """One buffer of `size` bytes has arrived."""
        self.received += 1
        self.bytes_received += size

    def _add(self, other: Traffic) -> None:
        """Count what another end has moved, too."""
        self.sent += other.sent
        self.bytes_sent += other.bytes_sent
        self.received += other.received
        self.bytes_received += other.bytes_received
        self.refused.update(other.refused.copy())  # while that is looked through, other threads may refuse something


def count_refused(refused: Counter[str], reason: str) -> None:
    """One buffer was not taken, for that reason. Counted as `Traffic`."""
    refused.setdefault(reason, 0)  # else a function of Python's would say that there was none so far
    refused[reason] += 1


def size_said(size: object) -> int:
    """The size that a wire says. TypeError if that is no number of bytes: whoever sends may say anything."""
    if type(size) is not int:
        raise TypeError(f"a buffer of {size!r:.40} bytes")
    return size


class Channel(Protocol):
    """One end of a way to one other worker. See the module.

    `send` and `withdraw` from any thread, the rest on one thread, the loop's.
    """

    @property
    def name(self) -> str:
        """For statistics and logs."""

    @property
    def traffic(self) -> Traffic:
        """What has gone this way."""

    def send(self, buffers: Sequence[Buffer], riders: list[Buffer]) -> list[Wire | None]:
        """Begin to send buffers of one message. None: that one has to go another way.

        riders: what travels in the frame of the message; a channel may add to it.
        """

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """Nobody wants these any more. named: the message that names them was sent, and may arrive."""

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Buffer | None]:
        """The buffers of one message; None for one that is not all here: `arrived` is called with it, maybe before
        this returns.

        Raises ProtocolError for a wire that no `send` gave.
        """

    def size_of(self, wire: Wire, riders: Sequence[Buffer]) -> int:
        """How many bytes the buffer of that wire has, as the wire says. Any thread. TypeError, ValueError or IndexError
        for a wire that no `send` gave."""

    def on_message(self, fields: list[object]) -> None:
        """A message from the other end of the channel. Raises ProtocolError for one that it cannot have sent."""

    def close(self) -> None:
        """Nothing more arrives, and what is sent goes nowhere. Idempotent."""
