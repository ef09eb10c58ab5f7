"""A link: one end of the traffic with one other worker. Frames go over its connection, large buffers by channels.

A message whose buffers all fit into its frame is that frame. Any other travels as a PARCEL, which names for each buffer
its channel and what that needs to receive it, and is unwrapped here: who serves or answers calls sees the message with
all its buffers, as if they had come with it. What the two ends of a link say to each other, on channel 0 of CHANNEL, is
in `messages`.

Every message of a worker leaves through `Link.send` and arrives through `Link.on_frames`, with the exception of those
of the handshake, which comes before there is a link. Observers are asked there, and messages are counted there.

Invariants
1. A message is handed over once, whole, or not at all. While buffers of it are missing, it is held here with all later
   frames of the same call behind it; other calls do not wait.
2. A message of which a buffer cannot be had is handed over as failed; its call fails, and no other.
3. A second connection that breaks takes the first along: what was on it is lost.
4. Nothing is copied on the loop that takes longer than a millisecond (`too_long_for_loop`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ...channels import AnyBuffer, Channel, Traffic, Wire, shared
from ...channels.accelerator import DeviceBuffer
from ...channels.bulk import Bulk
from ...channels.device import Devices
from ...channels.inline import Inline
from ...channels.landing import Landing
from ...channels.routes import Route
from ...channels.shared import SharedMemory
from ...errors import ProtocolError
from ...protocol import messages
from ...protocol.codec import Outgoing
from ...protocol.frames import CHANNEL, CHUNK, PARCEL, Buffer, Frame, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import read_channel, read_parcel, write
from ...transport.connection import Connection
from ..engine.engine import Engine
from ..engine.observing import Passage
from . import observed
from .accelerators import Accelerators
from .memory import Memory
from .messages import MESSAGES, Attach, Introduce, Pipe
from .on_devices import DEVICE, PIECES, LinkDevices
from .reassembly import Assembly, Message, Reassembly
from .second import SecondConnection

# Who a CHANNEL frame is for, and what takes a buffer of a PARCEL; and DEVICE.
LINK, SHARED, BULK, INLINE = range(4)
# The kinds of frames that are for the link itself: `Link.admit` has to see them.
OF_LINKS = frozenset((CHANNEL, PARCEL, CHUNK))
Handler = Callable[[Frame], None]
# A loop copies at most so many bytes for one message; more is copied by a thread.
LOOP_COPY = 1024 * 1024
# With at most so many calls under way, each message is written at once by the thread that made it. With more, the loop
# writes, and joins messages that come meanwhile: waking the loop costs as much as a write, and takes the interpreter
# away from that thread.
FEW = 8
# What was released travels with the next message, or by itself after this many seconds.
RELEASE_PAUSE = 0.01
# After the first connection has ended, the second one has so many seconds to bring what was written before that. The
# pause is that between two looks.
DRAIN_GRACE = 1.0
DRAIN_PAUSE = 0.01


class Receiver(Protocol):
    """Who gets the messages of a link: the caller's side (`Peer`) or the callee's side (`Service`).

    Its methods are called on the loop; answers of calls also in a thread that waits for them. handlers: the method that
    takes a message, by the kind of message; a message of any other kind ends the connection.
    """

    @property
    def handlers(self) -> dict[int, Handler]: ...

    @property
    def on_failed(self) -> Callable[[Frame, Exception], None]:
        """Takes a message whose buffers cannot be had: the message without them, and the reason."""


class Home(Protocol):
    """What a link needs of the worker that it belongs to (`Links`)."""

    engine: Engine
    memory: Memory
    accelerators: Accelerators

    @property
    def open_pipe(self) -> Callable[[Link], None]:
        """Begins to open the second connection of a link."""

    @property
    def other_end(self) -> Callable[[Link], Link | None]:
        """Finds the other end of a link if that is in this process."""

    def ended(self, link: Link) -> None:
        """The link is closed."""


class Prepared(NamedTuple):
    """A message whose buffers were given to their channels: it has to be posted or withdrawn, exactly once.

    kind, body: of the message itself, even if its frame is a PARCEL. wires: (channel, wire) of the buffers that do not
    go with the frame. size: bytes of all buffers.
    """

    kind: int
    call_id: int
    body: bytes
    frame: list[Buffer]
    wires: Sequence[tuple[int, Wire]] = ()
    size: int = 0


class Link:
    """See the module. `prepare`, `post`, `withdraw` and `flush` from any thread, the rest on the loop."""

    device_code = DEVICE

    def __init__(
        self,
        home: Home,
        connection: Connection,
        record: WorkerRecord,
        receiver: Receiver,
        *,
        number: int,
        opener: bool,
    ) -> None:
        self.engine = home.engine
        self.accelerators = home.accelerators
        self._home = home
        self._memory = home.memory
        self.connection = connection
        self.record = record
        self.number = number
        self._reassembly = Reassembly(self)
        self.held = self._reassembly.held  # the messages that wait for buffers, by call
        self.released: Sequence[Any] = ()  # what `flush` would send
        self.shared: SharedMemory | None = None
        self.opener = opener
        options = home.engine.options
        self.second = SecondConnection(self)
        self.bulk = Bulk(limit=options.max_tensor_bytes, wake=self.second.wake, least=options.min_bulk_bytes)
        self.inline = Inline()
        self.route_back: Route | None = None  # for tensors on devices, from the acceptor to the opener
        self.on_devices = LinkDevices(self)
        self.devices = self.on_devices.channel
        self.slots = self.devices.released  # the same of the device channel: slots of outboxes
        # Below so many bytes the buffers of a message go with its frame: a lone buffer, and several together.
        self._least_alone = min(options.min_shared_bytes, options.min_bulk_bytes)
        self._least = min(shared.PACK_LEAST, self._least_alone)
        self._receiver = receiver
        # In order of priority; `devices` beside them takes what lies on a device, and nothing else.
        self._channels: dict[int, Channel] = {BULK: self.bulk, INLINE: self.inline}
        self._underway: dict[int, Sequence[tuple[int, Wire]]] = {}  # of calls that may still be given up
        self._timed = False
        self._handlers = receiver.handlers
        # Counted without a lock, like `Counters`.
        self.messages_sent = 0
        self.messages_received = 0
        self.closed = False
        connection.decoder.place = self.bulk.place
        connection.on_frames = self.on_frames
        self._introduce()  # before anybody else can send: what this end can use has to come first

    # --- the exit -----------------------------------------------------------------------------------------------------

    def send(
        self,
        kind: int,
        call_id: int,
        frame: Sequence[Buffer],
        *,
        urgent: bool = False,
        more: bool = False,
        call: object = None,
        prepared: Prepared | None = None,
        undo: Outgoing | None = None,
        pipe: Connection | None = None,
        passed: bool = False,
    ) -> None:
        """Send a message: the one way out of a worker. Any thread; it never blocks.

        call: what is kept of the call that the message belongs to. prepared: what the frame was made of, for a message
        whose buffers were given to channels. undo: what to take back if an observer drops the message. pipe: the second
        connection, for messages that go over that one. urgent, more: see `Connection.send`. passed: whether all
        observers have let it go.
        """
        if not passed and self.engine.observers:
            # Without `more`: if an observer lets it go later, the message that it was to leave with has left before it.
            again = partial(self.send, kind, call_id, frame, urgent=urgent, call=call, prepared=prepared, pipe=pipe)
            self._ask_observers(kind, call_id, frame, call, prepared, undo, partial(again, passed=True))
            return
        self.messages_sent += 1
        if pipe is not None:
            pipe.send(frame)
            return
        if (self.released or self.slots) and kind != CHANNEL:
            self.flush(more=True)
        if prepared is None or not prepared.wires:
            self.connection.send(frame, urgent=urgent, more=more)
        else:
            self._send_apart(prepared, urgent)

    def _send_apart(self, prepared: Prepared, urgent: bool) -> None:
        away: list[Wire] = []
        for code, wire in prepared.wires:
            if code == DEVICE:
                away.append(wire)
            elif code == BULK and prepared.call_id < PIECES:
                # Added to those that are there: each item of a stream is a message of the same call.
                self._underway[prepared.call_id] = [*self._underway.get(prepared.call_id, ()), (code, wire)]
        self.connection.send(prepared.frame, urgent=urgent)
        if away:
            self.devices.posted(away, prepared.call_id)

    def _ask_observers(
        self,
        kind: int,
        call_id: int,
        frame: Sequence[Buffer],
        call: object,
        prepared: Prepared | None,
        undo: Outgoing | None,
        send: Callable[[], None],
    ) -> None:
        if prepared is None:
            passage = observed.frame_passage(kind, call_id, frame, call, self.record)
        else:
            apart = [self._name_of(code) for code, _ in prepared.wires]
            size = len(prepared.body) + prepared.size
            passage = Passage(prepared.kind, call_id, prepared.body, size, call, self.record, apart)

        def drop() -> None:
            if prepared is not None:
                self.withdraw(prepared)
            if undo is not None:
                undo.unsend()

        observed.ask(self.engine.observers, passage, send, drop)

    def _name_of(self, code: int) -> str:
        return Devices.name if code == DEVICE else self._channels[code].name

    # --- the entrance -------------------------------------------------------------------------------------------------

    def on_frames(self, frames: Sequence[Frame], *, pipe: Connection | None = None, again: bool = False) -> None:
        """Frames have arrived: the one way into a worker. On the loop, or in a thread that waits for these answers.

        pipe: the second connection, if they came over that. again: whether they were held here before, and so have been
        counted and shown to observers already. Raises ProtocolError, which ends the connection.
        """
        if not again:
            self.messages_received += len(frames)
            if self.engine.observers:
                observed.tell(self.engine.observers, frames, self.record)
        handlers = self._handlers
        for frame in frames:
            if pipe is not None:
                self.second.on_frame(pipe, frame)
                continue
            kind = frame.kind
            if self.held or kind in OF_LINKS:
                message = self.admit(frame)
                if message is None:
                    continue
                frame, kind = message, message.kind
            handle = handlers.get(kind)
            if handle is None:
                raise ProtocolError(f"{frame} does not belong on this side of a connection")
            handle(frame)

    # --- sending, from any thread -------------------------------------------------------------------------------------

    def too_long_for_loop(self, buffers: Sequence[AnyBuffer]) -> bool:
        """Whether `prepare` would block the loop that runs in this thread, and another thread should call it."""
        return (
            threading.get_ident() == self.engine.thread
            and self.shared is not None
            and sum(len(buffer) for buffer in buffers if type(buffer) is not DeviceBuffer) > LOOP_COPY
        )

    def rides(self, buffers: Sequence[Any]) -> bool:
        """Whether the buffers just go with the frame of their message, as a lone short one does.

        They are counted then, and `prepare` need not be called.
        """
        if len(buffers) > 1 or len(buffers[0]) >= self._least_alone or type(buffers[0]) is DeviceBuffer:
            return False
        self.inline.count(buffers)
        return True

    def prepare(
        self, kind: int, call_id: int, body: bytes, buffers: Sequence[AnyBuffer], *, copy: bool = False
    ) -> Prepared:
        """Give the buffers of a message to their channels. What it returns has to be posted or withdrawn.

        copy: whether the buffers may change as soon as this returns. Otherwise they are borrowed until they are
        written. Buffers on devices are never borrowed.
        """
        if any(type(buffer) is DeviceBuffer for buffer in buffers):
            return self._prepare_with_devices(kind, call_id, body, buffers, copy)
        host: Sequence[Any] = buffers
        sharing = self.shared
        if sharing is not None and len(host) == 1:
            wire = sharing.send_one(host[0])
            if wire is not None:  # a short cut through what follows: most large messages have one buffer
                whole = write(messages.Parcel(kind, ((SHARED, *wire),), body))
                frame = encode_frame(PARCEL, call_id, whole)
                return Prepared(kind, call_id, body, frame, ((SHARED, wire),), len(host[0]))
            sharing = None  # it has refused the buffer, and need not be asked again
        if sum(map(len, host)) < (self._least if len(host) > 1 else self._least_alone):
            if copy:
                host = [bytes(buffer) for buffer in host]
            self.inline.count(host)
            return Prepared(kind, call_id, body, encode_frame(kind, call_id, body, host), (), sum(map(len, host)))
        wires, riders = self._distribute(host, copy, sharing is not None)
        return self._prepared(kind, call_id, body, wires, riders, buffers)

    def _prepare_with_devices(
        self, kind: int, call_id: int, body: bytes, buffers: Sequence[AnyBuffer], copy: bool
    ) -> Prepared:
        away = [buffer for buffer in buffers if isinstance(buffer, DeviceBuffer)]
        host: list[Buffer] = [buffer for buffer in buffers if not isinstance(buffer, DeviceBuffer)]
        sent = [[DEVICE, *wire] for wire in self.devices.send(away, []) if wire is not None]
        try:
            wires, riders = self._distribute(host, copy, self.shared is not None)
        except BaseException:
            self._withdraw(_apart(sent), named=False)
            raise
        here, there = iter(wires), iter(sent)
        wires = [next(there if isinstance(buffer, DeviceBuffer) else here) for buffer in buffers]
        return self._prepared(kind, call_id, body, wires, riders, buffers)

    def _prepared(
        self, kind: int, call_id: int, body: bytes, wires: list[Any], riders: list[Buffer], buffers: Sequence[AnyBuffer]
    ) -> Prepared:
        apart = _apart(wires)
        if apart:
            frame = encode_frame(PARCEL, call_id, write(messages.Parcel(kind, wires, body)), riders)
        else:
            frame = encode_frame(kind, call_id, body, riders)
        return Prepared(kind, call_id, body, frame, apart, sum(map(len, buffers)))

    def _distribute(self, buffers: Sequence[Buffer], copy: bool, share: bool) -> tuple[list[Any], list[Buffer]]:
        """Give each buffer to the first channel that takes it: ``[channel, *wire]`` for each, and the riders."""
        wires: list[Any] = [None] * len(buffers)
        riders: list[Buffer] = []
        try:
            for code, channel in self._channels.items():
                left = [index for index, wire in enumerate(wires) if wire is None]
                if code == SHARED and not share:
                    continue
                given = [bytes(buffers[index]) if copy and code != SHARED else buffers[index] for index in left]
                for index, wire in zip(left, channel.send(given, riders), strict=True):
                    if wire is not None:
                        wires[index] = [code, *wire]
        except BaseException:
            self._withdraw(_apart(wires), named=False)
            raise
        return wires, riders

    def post(
        self,
        prepared: Prepared,
        *,
        urgent: bool = False,
        call: object = None,
        undo: Outgoing | None = None,
        passed: bool = False,
    ) -> None:
        """Send a message that was prepared. call, undo, passed: as of `send`."""
        kind, call_id, frame = prepared.kind, prepared.call_id, prepared.frame
        self.send(kind, call_id, frame, urgent=urgent, call=call, prepared=prepared, undo=undo, passed=passed)

    def withdraw(self, prepared: Prepared) -> None:
        """That message will not be posted."""
        self._withdraw(prepared.wires, named=False)

    def give_up(self, call_id: int) -> None:
        """Take back what was posted for that call, as far as it has not been written: nobody wants it any more."""
        self._withdraw(self._underway.pop(call_id, ()), named=True)
        if self.devices.busy:
            self.devices.give_up(call_id)

    def _withdraw(self, wires: Sequence[tuple[int, Wire]], *, named: bool) -> None:
        for code, channel in self._channels.items():
            given_up = [wire for wire_code, wire in wires if wire_code == code]
            if given_up:
                channel.withdraw(given_up, named=named)
        away = [wire for code, wire in wires if code == DEVICE]
        if away:
            self.devices.withdraw(away, named=named)

    def all_sent(self) -> None:
        """All chunks are written, so nothing that was posted can be taken back any more."""
        self._underway.clear()

    def flush(self, *, more: bool = False) -> None:
        """Give back the blocks and slots that were released here. more: another frame follows at once. Any thread."""
        if self.released and self.shared is not None:
            self.shared.flush(more=more)
        if self.slots:
            self.devices.flush(more=more)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def admit(self, frame: Frame) -> Frame | None:
        """The message that a frame brings; None if the frame is for the link itself, or has to wait here.

        A frame that waits is handed over later, from `_hand_over`.
        """
        if frame.kind == CHUNK:  # its call id is the number of a transfer
            self.on_chunk(frame)
            return None
        held = self.held.get(frame.call_id)
        if held is not None:  # an earlier message of that call
            held.behind.append(frame)
            return None
        if frame.kind == PARCEL:
            message = self._open(frame)
            if message is None or message.kind != CHANNEL:
                return message
            frame = message
        if frame.kind == CHANNEL:
            self._on_channel(frame)
            return None
        return frame

    def _open(self, frame: Frame) -> Frame | None:
        """The message in a PARCEL, or None if it has to wait: it is handed over later. Raises ProtocolError."""
        parcel = read_parcel(frame.body)
        wires = parcel.wires
        if (
            len(wires) == 1 and wires[0][0] == SHARED and self.shared is not None
        ):  # most large messages are of this kind
            try:
                buffer = self.shared.receive_one(wires[0][1:])
            except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
                raise ProtocolError(f"{frame} that is none: {type(error).__name__}: {error}") from None
            if buffer is not None:
                return Frame(parcel.kind, frame.call_id, parcel.body, [buffer])
        return self._reassembly.open(frame, parcel)

    @property
    def channels(self) -> Mapping[int, Channel]:
        """The channels by their number, but for that of devices."""
        return self._channels

    def land(self) -> Landing | None:
        """Fresh streams for a message that brings tensors to devices. RuntimeError if the device has an error."""
        return self.accelerators.land()

    def deliver(self, message: Message, assembly: Assembly) -> None:
        """A message that was held is whole, or has failed; what came behind it follows."""
        try:
            if message.kind == CHANNEL:
                self._on_channel(message, assembly.failure)
            elif assembly.failure is not None:
                self._receiver.on_failed(message._replace(segments=()), assembly.failure)
                self.on_frames(assembly.behind, again=True)
            else:
                self.on_frames([message, *assembly.behind], again=True)
        except ProtocolError as error:  # whoever brought the last buffer has nothing to do with it
            self.connection.abort(error)

    def on_chunk(self, frame: Frame) -> None:
        """A CHUNK frame, on either connection. Raises ProtocolError."""
        if not self.closed:
            self.bulk.on_frame(frame)

    def _on_channel(self, frame: Frame, failure: Exception | None = None) -> None:
        """A CHANNEL frame. failure: why its buffer cannot be had. Raises ProtocolError."""
        code, fields = read_channel(frame.body)
        if code == LINK:
            self._on_message(fields)
        elif code == DEVICE:
            self.on_devices.on_frame(frame, fields, failure)
        elif code == SHARED and self.shared is None:
            return  # the other end sent it before it knew that this end cannot share memory
        elif code in self._channels:
            self._channels[code].on_message(fields)
        else:
            raise ProtocolError(f"a message for channel {code}, which does not exist")

    # --- which channels -----------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        mine = {Devices.name: self.on_devices.descriptor()}
        if self.connection.local and self.engine.options.shared_memory:
            mine[SharedMemory.name] = shared.descriptor()
        self.say(LINK, MESSAGES.write(Introduce(mine)))

    def _on_message(self, fields: list[Any]) -> None:
        match MESSAGES.read(fields):
            case Introduce(theirs):
                self._choose(theirs)
            case Pipe(reason):
                self.second.on_message(reason)
            case Attach():
                raise ProtocolError("a second connection announced over the first one")

    def _choose(self, theirs: dict[str, Any]) -> None:
        """The other end has told what it can use: both ends now come to the same choice of channels.

        Whether memory really is shared is proved by the first segment (`channels/shared.py`).
        """
        self.on_devices.choose(theirs.get(Devices.name))
        if not self.connection.local or not self.engine.options.shared_memory or self.shared is not None:
            return
        reason = shared.obstacle(theirs.get(SharedMemory.name))
        if reason is not None:
            self._memory.cannot_share(self.record, reason)
            return
        channel = self.shared = SharedMemory(
            self._memory.arena, self.record.pid, _Surroundings(self), least=self.engine.options.min_shared_bytes
        )
        self.released = channel.released
        # A new dictionary, and not a changed one: other threads may be looking through the old one just now.
        self._channels = {SHARED: channel, **self._channels}
        self._memory.add(channel, self.record)

    def open_pipe(self) -> None:
        """Begin to open the second connection."""
        self._home.open_pipe(self)

    def other_end(self) -> Link | None:
        """The other end of this link if that is in this process, else None."""
        return self._home.other_end(self)

    def post_piece(self, number: int, body: bytes, buffer: Buffer) -> None:
        """Send a message of the link itself that has a buffer. Any thread."""
        self.post(self.prepare(CHANNEL, number, body, [buffer]))

    def say_pipe(self, reason: str) -> None:
        """Tell the other end about the second connection, over the first one."""
        self.say(LINK, MESSAGES.write(Pipe(reason)))

    def greet(self, pipe: Connection) -> None:
        """Tell the other end, over a second connection, that this is it."""
        greeting = encode_frame(CHANNEL, 0, write(messages.Channel(LINK, MESSAGES.write(Attach()))))
        self.send(CHANNEL, 0, greeting, pipe=pipe)

    def check_greeting(self, frame: Frame) -> None:
        """It comes first over a second connection. Raises ProtocolError if it is not what `greet` sends."""
        code, fields = read_channel(frame.body)
        if code != LINK or not isinstance(MESSAGES.read(fields), Attach):
            raise ProtocolError(f"{frame} does not begin a connection for chunks")

    def send_chunk(self, pipe: Connection, frame: Sequence[Buffer]) -> None:
        """Send a piece of a large buffer over that connection."""
        self.send(CHUNK, 0, frame, pipe=pipe)

    def say(self, channel: int, fields: list[Any], *, more: bool = False) -> None:
        """Send what a channel says. more: another frame follows at once."""
        self.send(CHANNEL, 0, encode_frame(CHANNEL, 0, write(messages.Channel(channel, fields))), more=more)

    def flush_later(self) -> None:
        """Something was released here: `flush` follows soon. From any thread, and from inside the garbage collector.

        No lock may be taken: the collector may run in a thread that holds it.
        """
        if not self._timed:
            self._timed = True
            self.engine.call_on_loop(self.engine.loop.call_later, RELEASE_PAUSE, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timed = False
        self.flush()

    # --- the end ------------------------------------------------------------------------------------------------------

    def when_drained(self, then: Callable[[], None], limit: float = 0.0) -> None:
        """Call `then` as soon as no message is held any more whose buffers can still come.

        It is for the end of the first connection: what was written to the second one before that may arrive after it.
        limit: when the wait ends in any case (``time.monotonic()`` seconds), 0 for the usual bound from now on.
        """
        now = time.monotonic()
        limit = limit or now + DRAIN_GRACE
        over = self.pipe is None or self.pipe is self.connection or self.pipe.ended
        if over or not self.held or self.closed or self.engine.closed or now >= limit:
            then()
        else:
            self.engine.loop.call_later(DRAIN_PAUSE, self.when_drained, then, limit)

    @property
    def pipe(self) -> Connection | None:
        """The connection for chunks: the second one, or the first if there can be no other; None until then."""
        return self.second.connection

    @property
    def busy(self) -> bool:
        """Whether buffers are under way that a peer waits for."""
        return self.bulk.sending > 0 or self.devices.busy

    def traffic(self) -> dict[str, Traffic]:
        """What has gone by which channel, by its name."""
        return {channel.name: channel.traffic for channel in list(self._channels.values())} | self.devices.ways

    def close(self) -> None:
        """The connection has ended, or we leave. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._reassembly.close()
        self._underway.clear()
        for channel in list(self._channels.values()):
            channel.close()
        self.on_devices.close()
        if self.pipe is not None and self.pipe is not self.connection:
            self.pipe.close()
        if self.shared is not None:
            self._memory.ended(self.shared)
        self._home.ended(self)


def _apart(wires: list[Any]) -> list[tuple[int, Wire]]:
    """The wires of the buffers that do not go with the frame, each with its channel."""
    return [(wire[0], wire[1:]) for wire in wires if wire is not None and wire[0] != INLINE]


class _Surroundings:
    """A link, as its shared-memory channel sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.on_release = link.flush_later
        self.on_loop = link.engine.call_on_loop
        self.in_background = link.engine.in_background
        self.on_cold = link._memory.want

    def on_refused(self, reason: str) -> None:
        self._link._memory.cannot_share(self._link.record, reason)

    def post(self, fields: list[Any], *, more: bool = False) -> None:
        self._link.say(SHARED, fields, more=more)
