"""Channels: the ways that the buffers of a message take from one worker to another.

A message is a body and some buffers. Each buffer goes by the first channel that takes it, in this order:

    channel        reaches               how                                       borrows the sender's memory until
    shared memory  workers of this host  a copy in a block that both have mapped   `send` returns
    bulk           every worker          chunks on a connection of their own       the last chunk was written
    inline         every worker          behind the body, in the same frame        the frame was written

Buffers that lie on a device go by a channel of their own (`device`).

Bulk and inline belong to each link. All others come from the registry (`runtime/links/channel_registry.py`), those of
other packages by the entry point group `aiorpc.channels`: a `ChannelContext` says what a worker has of its channel and
whether two workers reach each other by it, and opens an end of it for each link.

A channel knows nothing of calls, tensors or sockets. It has two ends, one in either worker, which tell each other what
they must by messages of their own (`on_message`).

Who owns a buffer
1. Until `send` the sender. From then until the time in the table the channel borrows the memory: it keeps it alive and
   reads it. The sender may drop it, and should not change it.
2. A `send` that returns None for a buffer, or raises, has not borrowed it.
3. Between the two ends the bytes belong to the channel. `withdraw` gives up what was sent and not received.
4. What `receive` returns, at once or through `arrived`, belongs to the receiver alone: writable, and valid as long as
   it lives, even after the channel, the sender or its process has ended.
5. An `arrived` is called once, with the buffer or with an error; after `close` none is called any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ProtocolError
from ..protocol.frames import Buffer
from ..protocol.identity import WorkerRecord
from .accelerator import DeviceBuffer
from .landing import Landing
from .routes import Route

# Bytes on the host or on a device.
AnyBuffer = Buffer | DeviceBuffer

# What the other end needs in order to receive one buffer: plain data, a part of the message.
Wire = list[Any]
# Called with the position of the wire in the message, and with its buffer or the reason why there is none.
Arrived = Callable[[int, Buffer | Exception], None]


@dataclass
class Traffic:
    """What went through one channel, such as shared memory, from the start of the worker on.

    sent, bytes_sent: buffers of tensors, and their bytes, that it took to other workers. received, bytes_received:
    those that came through it. refused: how many it did not take, by the reason; another channel took these.
    """

    # Counted without a lock: no other thread gets between the bytecodes of a step, which contain no call.
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
        self.refused.update(other.refused.copy())  # other threads may count in the original meanwhile


def count_refused(refused: Counter[str], reason: str) -> None:
    """One buffer was not taken, for that reason. Counted as `Traffic`."""
    refused.setdefault(reason, 0)  # Counter.__missing__ would let other threads in between
    refused[reason] += 1


class Channel:
    """One end of a way to one other worker. See the module. A subclass must define the methods that raise
    NotImplementedError here; the others are for channels that have nothing of the kind.

    `send`, `send_one`, `to_copy`, `withdraw`, `posted`, `give_up`, `is_here`, `on_release` and `flush` are called from
    any thread, `receive_one` from the loop or from a thread that has read the message, the rest on the loop.

    traffic: what has gone this way. released: what `flush` gives back to the other end, one entry per block or slot.
    """

    #: For statistics and logs.
    name: str = ""
    #: Whether it carries buffers on devices; such a channel carries no others.
    on_devices: bool = False
    #: Whether it reads the sender's memory after `send` has returned, and the receiver takes memory of its own for the
    #: bytes (`max_incoming_bytes`).
    borrows: bool = True
    #: Whether `posted` has something to do.
    tracks: bool = False
    #: The first fields of those messages of the channel that may be taken in any thread.
    anywhere: Sequence[list[object]] = ()
    #: Which tensors on devices go to the other end with answers; set once the ends know of each other.
    route: Route | None = None

    def __init__(self) -> None:
        self.traffic: Traffic = Traffic()
        self.released: deque[Any] = deque()

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Any], riders: list[Buffer], copies: Any = None) -> list[Wire | None]:
        """Begin to send the buffers of one message. None in the result: that buffer has to go another way.

        riders: buffers that travel in the frame of the message; a channel may add to it. copies: of buffers that also
        go to other workers (`shm.Copies`).
        """
        raise NotImplementedError

    def send_one(self, buffer: Any, copies: Any = None) -> Wire | None:
        """`send` for a message of one buffer, without riders."""
        return self.send([buffer], [], copies)[0]

    def to_copy(self, buffers: Sequence[Buffer]) -> int:
        """Bytes that `send` would copy before it returns."""
        return 0

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """These are not wanted any more. named: the message that names them was sent, and may arrive."""
        raise NotImplementedError

    def posted(self, wires: Sequence[Wire], call: int) -> None:
        """The message that names these was handed to the connection. call: the number of its call."""

    def give_up(self, call: int) -> None:
        """Nothing that was posted for that call is wanted any more."""

    @property
    def busy(self) -> bool:
        """Whether something is still to be sent that the other end waits for."""
        return False

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Any]:
        """The buffers of one message; None for each that is not complete: `arrived` is called with it, maybe before
        this returns.

        Raises ProtocolError for a wire that no `send` gave; TypeError, ValueError, IndexError and KeyError count as
        ProtocolError. For a channel for devices the streams of the message are current meanwhile.
        """
        raise NotImplementedError

    def receive_one(self, wire: Wire, landing: Landing | None = None) -> Any:
        """The buffer of a message with one buffer, if it is here; otherwise None. landing: for a channel for
        devices, where the buffer arrives."""
        return None

    def is_here(self, wire: Wire) -> bool:
        """Whether `receive_one` has that buffer, in any thread."""
        return False

    # --- what the ends say to each other ------------------------------------------------------------------------------

    def introduced(self, theirs: Any) -> None:
        """The other end's descriptor has come; `ChannelContext.obstacle` has checked it."""

    def on_message(self, fields: list[object]) -> None:
        """A message from the other end of the channel. Raises ProtocolError for an impossible message."""
        raise ProtocolError(f"a message for the channel {self.name}, which takes none")

    def on_buffer(self, fields: list[object], buffer: Buffer | Exception) -> None:
        """A message with a buffer from the other end, or the reason why that is lost. Raises ProtocolError as above."""
        raise ProtocolError(f"a message with a buffer for the channel {self.name}, which takes none")

    def on_release(self, released: Sequence[Sequence[int]]) -> None:
        """The other end has given these back. Raises ProtocolError for what it does not have."""
        raise ProtocolError(f"the channel {self.name} lends nothing")

    def flush(self, *, more: bool = False) -> None:
        """Give back what was `released`, if anything was. more: a message follows at once."""

    @property
    def borrowed(self) -> bool:
        """Whether there may be something in `released` later."""
        return False

    # --- looking, and the end -----------------------------------------------------------------------------------------

    def traffics(self) -> dict[str, Traffic]:
        """What has gone this way, by the names of the context."""
        return {self.name: self.traffic}

    def close(self) -> None:
        """Nothing more arrives, and what is sent goes nowhere. Idempotent."""


class ChannelLink(Protocol):
    """A link, as an end of a channel sees it. record: of the other worker. opener: whether this worker has opened it.
    local: whether it is over a unix socket, which means that both workers are on one host."""

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def opener(self) -> bool: ...

    @property
    def local(self) -> bool: ...

    def post(self, fields: list[object], *, more: bool = False) -> None:
        """Send a message to the other end (`Channel.on_message`). more: another frame follows at once. Any thread."""

    def post_buffer(self, fields: list[object], buffer: Buffer) -> None:
        """The same with a buffer, which goes by any channel that takes it (`Channel.on_buffer`). Any thread."""

    def give_back(self, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """Tell the other end that these are its own again (`Channel.on_release`): four numbers each. Any thread."""

    def watch(self) -> None:
        """The channel has borrowed something: from now on `Channel.flush` is called now and then. Any thread."""

    def on_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Run something on the worker's loop. Any thread."""

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """The same after so many seconds. Any thread."""

    def in_background(self, function: Callable[..., None], *args: Any) -> None:
        """Run something that takes long in a thread. Any thread."""


class ChannelContext:
    """What one worker has of a channel. Made when the worker starts; all but `close` is called on its loop.

    The descriptor must not contain secrets: every member of the group gets it.
    """

    #: Both ends know the channel by it, in descriptors, logs and statistics.
    name: str = ""
    #: Channels are asked in this order, the highest first. Bulk has 0, shared memory 100.
    priority: int = 50
    #: See `Channel.on_devices`.
    on_devices: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names in statistics."""
        return (self.name,)

    def descriptor(self, link: ChannelLink) -> object:
        """What the other end of the link needs to know: plain data. None: the channel is not for that link."""
        raise NotImplementedError

    def obstacle(self, opener: Any, acceptor: Any) -> str:
        """Why the two ends of a link with these descriptors do not reach each other; empty if they do.

        It depends on the descriptors alone, so both ends come to the same answer. One of them comes from another
        process: check types and ranges; any exception ends the connection.
        """
        raise NotImplementedError

    def open(self, link: ChannelLink) -> Channel:
        """This worker's end of the channel, for that link; `Channel.introduced` follows."""
        raise NotImplementedError

    def refused(self, link: ChannelLink, reason: str) -> None:
        """The two ends do not reach each other. reason: empty if the other one has no such channel for this link."""

    def close(self) -> None:
        """The worker ends. All channels are closed."""
