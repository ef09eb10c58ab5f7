"""A link: one end of the traffic with one other worker. Frames go over its connection, large buffers by channels.

`distribution` decides which channel takes which buffer of a message that leaves. An envelope (PARCEL) that arrives is
opened here: the receiver sees the message with all its buffers, as if they had come with it. The messages of the two
ends about the link itself, on channel 0 of CHANNEL, are in `messages`.

Every message of a worker leaves through `Link.send`, or `Link.post` if its buffers went to channels. It arrives
through `Link.on_frames`; the handshake comes before there is a link. These methods ask the observers and count the
messages.

Invariants
1. A message is handed over once, whole, or not at all. While buffers of it are missing, it is held here with all later
   frames of the same call behind it; other calls do not wait.
2. A message with a lost buffer is handed over as failed; its call fails, and no other.
3. The end of the second connection, if it is not resumed, ends the first: what was on it is lost.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

from ...channels import Channel
from ...channels.routes import Route
from ...errors import ProtocolError
from ...protocol import messages
from ...protocol.codec import Outgoing
from ...protocol.frames import CHANNEL, CHUNK, ERROR, PARCEL, RELEASE, REPLY, Buffer, Frame, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import Parcel, read_channel, read_parcel, read_release, write
from ...protocol.packing import pack
from ...transport.connection import Connection
from ...transport.send_queue import Unsent
from ..engine.engine import Engine
from ..engine.observing import Passage, ask, frame_passage
from ..engine.transfer_events import BufferTransfer, tell_transfer
from .accelerators import Accelerators
from .channel_link import PIECES, ChannelEnd
from .channel_registry import InstalledChannel, agree, at_once
from .distribution import Distribution, Prepared
from .messages import BULK, LINK, MESSAGES, Attach, Introduce, Pipe
from .reassembly import Assembly, Message, Reassembly
from .returns import Returns
from .second import SecondConnection

# The kinds of frames for the link itself: `Link.admit` has to see them.
OF_LINKS = frozenset((CHANNEL, PARCEL, CHUNK, RELEASE))
# Kinds whose buffers are counted by their channels.
_COUNTED = frozenset((PARCEL, CHUNK))
KindMethod = Callable[[Frame], None]  # the method for one kind of messages
# With at most so many calls under way, each message is written at once by the thread that made it. With more, the loop
# writes, and joins messages that come meanwhile: waking the loop costs as much as a write, and takes the interpreter
# away from that thread.
FEW = 8
# First bytes of a channel's message that tell which message it is.
_BEGINNING = 32
# Seconds between two looks whether the second connection has brought what was written before the first one ended.
DRAIN_PAUSE = 0.01


class MessageSink(Protocol):
    """The receiver of a link's messages: the caller's side (`Peer`) or the callee's side (`Service`).

    It is called on the loop; with answers of calls also in a thread that waits for them. methods: by the kind of a
    message, the method for that kind; a message of any other kind ends the connection.
    """

    @property
    def methods(self) -> dict[int, KindMethod]: ...

    @property
    def on_failed(self) -> Callable[[Frame, Exception], None]:
        """Takes a message with a lost buffer, without its buffers, and the reason."""


class Home(Protocol):
    """What a link needs of its worker (`Links`)."""

    engine: Engine
    accelerators: Accelerators
    channels: list[InstalledChannel]

    @property
    def open_pipe(self) -> Callable[[Link], None]:
        """Begins to open the second connection of a link."""

    @property
    def other_end(self) -> Callable[[Link], Link | None]:
        """Finds the other end of a link if it is in this process."""

    def ended(self, link: Link) -> None:
        """The link is closed."""


class Link:
    """See the module. `send`, `post`, `say` and `flush` from any thread, the rest on the loop.

    distribution: has the channels. second: has the bulk channel. held: the messages that wait for buffers, by call.
    route_back: which tensors on devices go from the acceptor to the opener, once a channel for them has set it.
    """

    def __init__(
        self,
        home: Home,
        connection: Connection,
        record: WorkerRecord,
        receiver: MessageSink,
        *,
        number: int,
        opener: bool,
    ) -> None:
        self.engine: Engine = home.engine
        self.accelerators: Accelerators = home.accelerators
        self._home = home
        self.connection = connection
        self.record = record
        self.number = number
        self.opener = opener
        self.closed: bool = False
        self.route_back: Route | None = None
        self.pieces: itertools.count[int] = itertools.count(PIECES)
        self.second: SecondConnection = SecondConnection(self)
        self.returns: Returns = Returns(home.engine, self._give_back_all, self._borrows)
        self._released: list[deque[Any]] = []  # of each channel: what `flush` would send
        self._anywhere: tuple[bytes, ...] = ()  # the beginnings of channels' messages that any thread may take
        self.distribution: Distribution = Distribution(
            self.engine, {BULK: self.second.bulk}, record, connection.takes_at_once
        )
        self._opened: dict[str, Channel] = {}  # the channels out of the registry, by name
        self._agreed = False  # whether the other end has introduced itself
        self._reassembly = Reassembly(self, home.engine.options.max_incoming_bytes)
        self.held: dict[int, Assembly] = self._reassembly.held
        self._receiver = receiver
        self._methods = receiver.methods
        # Counted without a lock, like `Counters`.
        self.messages_sent: int = 0
        self.messages_received: int = 0
        self._seen: tuple[Frame, Parcel] | None = None  # by `opened_anywhere`; `_open` usually follows
        connection.decoder.place = self.second.bulk.place
        connection.on_cut = self.second.bulk.displace
        connection.on_frames, connection.takes = self.on_frames, self.opened_anywhere
        self._use(at_once(home.channels))
        self._mine: dict[str, object] = self._introduce()  # the introduction is the first frame

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
        undo: Outgoing | None = None,
        passed: bool = False,
        unsent: Unsent | None = None,
    ) -> None:
        """Send a message. Any thread; it never blocks.

        call: the entry of the call that the message belongs to. undo: taken back if an observer drops the message.
        urgent, more, unsent: see `FrameWriter.send`. passed: whether all observers have let it go.
        """
        if not passed and self.engine.observers:
            # Without `more`: if an observer lets it go later, the message that it was to leave with has left before it.
            leave = partial(self._leave, kind, frame, urgent, False, unsent)
            ask(self.engine.observers, frame_passage(kind, call_id, frame, call, self.record), leave, _undo(undo))
        else:
            self._leave(kind, frame, urgent, more, unsent)

    def _leave(self, kind: int, frame: Sequence[Buffer], urgent: bool, more: bool, unsent: Unsent | None) -> None:
        self.messages_sent += 1
        if any(self._released) and kind not in (CHANNEL, RELEASE):
            self.flush(more=True)
        self.connection.send(frame, urgent=urgent, more=more, unsent=unsent)

    def post(
        self,
        prepared: Prepared,
        *,
        urgent: bool = False,
        call: object = None,
        undo: Outgoing | None = None,
        passed: bool = False,
    ) -> None:
        """Send a message that was prepared. Any thread. The parameters are those of `send`."""
        if not passed and self.engine.observers:
            size = len(prepared.body) + prepared.size
            passage = Passage(prepared.kind, prepared.call_id, prepared.body, size, call, self.record)

            def drop() -> None:
                self.distribution.withdraw(prepared)
                _undo(undo)()

            ask(self.engine.observers, passage, partial(self._leave_prepared, prepared, urgent), drop)
            return
        self._leave_prepared(prepared, urgent)

    def _leave_prepared(self, prepared: Prepared, urgent: bool) -> None:
        if not prepared.unsent:  # withdrawn while an observer had it
            return
        self._leave(prepared.kind, prepared.frame, urgent, False, prepared.unsent)
        if prepared.unsent:  # dropped: the connection has ended
            self.distribution.withdraw(prepared)
        elif prepared.wires:
            self.distribution.posted(prepared)

    def send_over(self, pipe: Connection, kind: int, frame: Sequence[Buffer]) -> None:
        """Send a message over the second connection. On the loop."""

        def leave() -> None:
            self.messages_sent += 1
            pipe.send(frame)

        if self.engine.observers:
            ask(self.engine.observers, frame_passage(kind, 0, frame, None, self.record), leave, _undo(None))
        else:
            leave()

    # --- the entrance -------------------------------------------------------------------------------------------------

    def on_frames(self, frames: Sequence[Frame], *, again: bool = False) -> None:
        """Frames have arrived: the one way into a worker. On the loop, or in the thread that has read them.

        again: whether they were held here before, and so have been counted and shown to observers already. Raises
        ProtocolError, which ends the connection.
        """
        count = 0 if again else len(frames)
        self.messages_received += count  # without a call in between: threads read both connections at once
        methods = self._methods
        for frame in frames:
            if self.held or frame.segments or frame.kind in OF_LINKS:
                self._look_into(frame, again)
            else:
                methods.get(frame.kind, _belongs_elsewhere)(frame)

    def on_pipe_frames(self, pipe: Connection, frames: Sequence[Frame]) -> None:
        """Frames have arrived over the second connection. On the loop. Raises ProtocolError."""
        count = len(frames)
        self.messages_received += count  # as above
        for frame in frames:
            self.second.on_frame(pipe, frame)

    def _look_into(self, frame: Frame, again: bool) -> None:
        """Hand on what is the link's or may have to wait; buffers that came with their frame are counted."""
        if frame.segments and not again and frame.kind not in _COUNTED:
            self.distribution.arrived(frame.segments)
        message = self.admit(frame) if self.held or frame.kind in OF_LINKS else frame
        if message is not None:
            self._methods.get(message.kind, _belongs_elsewhere)(message)

    def take_over(self, frame: Frame) -> None:
        """Take a frame that a thread has read and left. On the loop."""
        try:
            self.on_frames([frame])
        except ProtocolError as error:
            self.connection.abort(error)

    # --- sending, from any thread -------------------------------------------------------------------------------------

    def flush(self, *, more: bool = False) -> None:
        """Give back what was borrowed from the other end and is released. more: another frame follows at once. Any
        thread."""
        for channel in self._opened.values():
            if channel.released:
                channel.flush(more=more)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def admit(self, frame: Frame) -> Frame | None:
        """The message that a frame brings; None if the frame is for the link itself, or has to wait here.

        A frame that waits is handed over later, from `_hand_over`.
        """
        if frame.kind == CHUNK:  # its call id is the number of a transfer
            self.second.on_chunk(frame)
            return None
        if frame.kind == RELEASE:
            channel = self.distribution.channels.get(frame.call_id)
            if channel is None:
                raise ProtocolError(f"something is given back to channel {frame.call_id}, which does not exist")
            channel.on_release(read_release(frame.body).blocks)
            return None
        held = self.held.get(frame.call_id)
        if held is not None:  # an earlier message of that call
            self._reassembly.put_behind(frame, held)
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
        """The message in an envelope, or None if it has to wait: it is handed over later. Raises ProtocolError."""
        seen, self._seen = self._seen, None
        if seen is not None and seen[0] is not frame:
            seen = None
        parcel = seen[1] if seen is not None else read_parcel(frame.body)
        if len(parcel.wires) == 1:  # the common case of large messages
            ((number, wire),) = parcel.wires
            try:
                channel = self.distribution.channels[number]
                if channel.on_devices:
                    if seen is not None or channel.is_here(wire):
                        return self._reassembly.open_one(frame, parcel, channel)
                    return self._reassembly.open(frame, parcel)
                buffer = channel.receive_one(wire)
            except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
                raise ProtocolError(f"{frame} is malformed: {type(error).__name__}: {error}") from None
            if buffer is not None:
                return Frame(parcel.kind, frame.call_id, parcel.body, [buffer])
        return self._reassembly.open(frame, parcel)

    def deliver(self, message: Message, assembly: Assembly) -> None:
        """A held message is whole, or has failed: hand it over, and the frames behind it."""
        if self.engine.transfer_observers and assembly.failure is None:
            self._tell(message, assembly)
        try:
            if message.kind == CHANNEL:
                self._on_channel(message, assembly.failure)
            elif assembly.failure is not None:
                self._receiver.on_failed(message._replace(segments=()), assembly.failure)
                self.on_frames(assembly.behind, again=True)
            else:
                self.on_frames([message, *assembly.behind], again=True)
        except ProtocolError as error:  # the caller has brought the last buffer, and is not to blame
            self.connection.abort(error)

    def _tell(self, message: Message, assembly: Assembly) -> None:
        """Show a message whose buffers have come after it to the observers of transfers."""
        channels = self.distribution.channels
        names = tuple(dict.fromkeys(channels[code].name for code, _ in assembly.parcel.wires if code in channels))
        size = sum(map(len, message.segments))
        event = BufferTransfer(
            "received", self.record.name, message.call_id, names, size, assembly.since, time.monotonic(), False
        )
        tell_transfer(self.engine.transfer_observers, event)

    def opened_anywhere(self, frame: Frame, *kinds: int) -> Parcel | None:
        """An envelope of one of these kinds, by default of answers, whose buffer is here; None otherwise. Any thread.

        A buffer on a device does not count for those who wait for answers: taking it may be interrupted.
        """
        try:
            parcel = read_parcel(frame.body)
            if parcel.kind not in (kinds or (REPLY, ERROR)) or len(parcel.wires) != 1:
                return None
            ((number, wire),) = parcel.wires
            channel = self.distribution.channels[number]
            if (channel.on_devices and not kinds) or not channel.is_here(wire):
                return None
        except (ProtocolError, TypeError, ValueError, IndexError, KeyError):  # the loop will get the same error
            return None
        self._seen = frame, parcel
        return parcel

    def any_thread_takes(self, frame: Frame) -> bool:
        """Whether any thread may take this CHANNEL frame. Any thread."""
        return bytes(frame.body[:_BEGINNING]).startswith(self._anywhere)

    def _on_channel(self, frame: Frame, failure: Exception | None = None) -> None:
        """A CHANNEL frame. failure: why its buffer is lost. Raises ProtocolError."""
        number, fields = read_channel(frame.body)
        if number == LINK:
            self._on_message(fields)
            return
        channel = self.distribution.channels.get(number)
        if channel is None:
            raise ProtocolError(f"a message for channel {number}, which does not exist")
        if frame.call_id < PIECES:
            channel.on_message(fields)
        elif failure is None and len(frame.segments) != 1:
            raise ProtocolError(f"{frame}, a piece of a tensor that has not one buffer")
        else:
            channel.on_buffer(fields, failure or frame.segments[0])

    # --- which channels -----------------------------------------------------------------------------------------------

    def _introduce(self) -> dict[str, object]:
        """Announce and return the channels of this end."""
        mine: dict[str, object] = {}
        for number, context in self._home.channels:
            said = context.descriptor(ChannelEnd(self, number))
            if said is not None:
                mine[context.name] = said
        self.say(LINK, MESSAGES.write(Introduce(mine)))
        return mine

    def _on_message(self, fields: list[object]) -> None:
        match MESSAGES.read(fields):
            case Introduce(theirs):
                self._choose(theirs)
            case Pipe(reason):
                self.second.on_message(reason)
            case Attach():
                raise ProtocolError("a second connection announced over the first one")

    def _choose(self, theirs: dict[str, object]) -> None:
        """The other end has introduced itself: choose the channels. Both ends come to the same choice."""
        if self._agreed:
            raise ProtocolError("a second introduction")
        self._agreed = True
        agreed = agree(self._home.channels, ChannelEnd(self, 0), self._mine, theirs)
        self._use(agreed)
        for _, context in agreed:
            channel = self._opened[context.name]
            channel.introduced(theirs[context.name])
            self.route_back = channel.route or self.route_back

    def _use(self, registered: list[InstalledChannel]) -> None:
        """Open these channels unless they are open, and use them in this order before those of the link."""
        channels: dict[int, Channel] = {}
        for number, context in registered:
            if context.name not in self._opened:
                self._opened[context.name] = context.open(ChannelEnd(self, number))
            channels[number] = self._opened[context.name]
        self._released = [channel.released for channel in channels.values()]
        self._anywhere = tuple(
            write(messages.ChannelMessage(number, [*fields, None]))[:-1]
            for number, channel in channels.items()
            for fields in channel.anywhere
        )
        self.distribution.use({**channels, **self.distribution.channels})

    def channel(self, number: int | str) -> Channel | None:
        """The channel of that number or name, if the link has it."""
        return self._opened.get(number) if isinstance(number, str) else self.distribution.channels.get(number)

    def open_pipe(self) -> None:
        """Begin to open the second connection."""
        self._home.open_pipe(self)

    def other_end(self) -> Link | None:
        """The other end of this link if it is in this process; None otherwise."""
        return self._home.other_end(self)

    def post_piece(self, channel: int, number: int, fields: list[object], buffer: Buffer) -> None:
        """Send a message of a channel, with a buffer. Any thread."""
        body = write(messages.ChannelMessage(channel, fields))
        self.post(self.distribution.prepare(CHANNEL, number, body, [buffer]))

    def say(self, channel: int, fields: list[object], *, more: bool = False) -> None:
        """Send a message of a channel. more: another frame follows at once. Any thread."""
        frame = encode_frame(CHANNEL, 0, write(messages.ChannelMessage(channel, fields)))
        self.send(CHANNEL, 0, frame, more=more)

    def give_back(self, channel: int, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """Give borrowed blocks or slots back to the other end. The call id of a RELEASE is the number of the channel.

        more: another frame follows at once. Any thread.
        """
        self.send(RELEASE, channel, encode_frame(RELEASE, channel, pack((released,))), more=more)  # a Release

    def _give_back_all(self) -> bool:
        """`flush`; returns whether there was anything."""
        any_released = any(self._released)
        self.flush()
        return any_released

    def _borrows(self) -> bool:
        """Whether memory of the other end may be in use here."""
        return any(channel.borrowed for channel in self._opened.values())

    # --- the end ------------------------------------------------------------------------------------------------------

    def when_drained(self, then: Callable[[], None], limit: float = 0.0) -> None:
        """Call `then` as soon as no held message waits for buffers that can still come.

        For the end of the first connection: frames written earlier to the second one may arrive after it.
        limit: when the wait ends in any case (``time.monotonic()`` seconds), 0 for the usual bound from now on.
        """
        now = time.monotonic()
        limit = limit or now + self.engine.bounds.drain
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
        return self.distribution.busy

    @property
    def owing(self) -> bool:
        """Whether something is not written yet, or may have to be sent again after a broken connection."""
        pipe = self.pipe
        return self.connection.owing or (pipe is not None and pipe.owing)

    def close(self) -> None:
        """The connection has ended, or the worker leaves. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.returns.close()
        self._reassembly.close()
        self.distribution.close()
        if self.pipe is not None and self.pipe is not self.connection:
            self.pipe.close()
        self._home.ended(self)


def _belongs_elsewhere(frame: Frame) -> NoReturn:
    raise ProtocolError(f"{frame} does not belong on this side of a connection")


def _undo(out: Outgoing | None) -> Callable[[], None]:
    """A function that undoes what encoding a message did, for a message that will not leave."""
    return out.unsend if out is not None else lambda: None
