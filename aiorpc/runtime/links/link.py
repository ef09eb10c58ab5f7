"""A link: one end of the traffic with one other worker. Frames go over its connection, large buffers by channels.

Which channel takes which buffer of a message that leaves is decided in `distribution`. A message that arrives as a
PARCEL is opened here: who serves or answers calls sees the message with all its buffers, as if they had come with it.
What the two ends of a link say to each other, on channel 0 of CHANNEL, is in `messages`.

Every message of a worker leaves through `Link.send` and arrives through `Link.on_frames`, with the exception of those
of the handshake, which comes before there is a link. Observers are asked there, and messages are counted there.

Invariants
1. A message is handed over once, whole, or not at all. While buffers of it are missing, it is held here with all later
   frames of the same call behind it; other calls do not wait.
2. A message of which a buffer cannot be had is handed over as failed; its call fails, and no other.
3. A second connection that breaks and is not mended takes the first along: what was on it is lost.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ...channels import shared
from ...channels.arena import Block
from ...channels.bulk import Bulk
from ...channels.device import Devices
from ...channels.device.messages import MESSAGES as DEVICE_MESSAGES
from ...channels.device.messages import Slot, Slots
from ...channels.routes import Route
from ...channels.shared import SharedMemory
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
from .accelerators import Accelerators
from .distribution import Distribution, Prepared
from .memory import Memory
from .messages import DEVICE, LINK, MESSAGES, SHARED, Attach, Introduce, Pipe
from .on_devices import LinkDevices
from .reassembly import Assembly, Message, Reassembly
from .returns import Returns
from .second import SecondConnection

# The kinds of frames that are for the link itself: `Link.admit` has to see them.
OF_LINKS = frozenset((CHANNEL, PARCEL, CHUNK, RELEASE))
# Whose buffers are counted by the channels that they arrive by.
_COUNTED = frozenset((PARCEL, CHUNK))
_new: Any = tuple.__new__  # what Frame(...) does, without its call into Python
# What the bodies of messages begin with that give back slots of outboxes.
_SLOTS = write(messages.ChannelMessage(DEVICE, DEVICE_MESSAGES.write(Slots([]))))[:-1]
KindMethod = Callable[[Frame], None]  # the method for one kind of messages
# With at most so many calls under way, each message is written at once by the thread that made it. With more, the loop
# writes, and joins messages that come meanwhile: waking the loop costs as much as a write, and takes the interpreter
# away from that thread.
FEW = 8
# Seconds that a thread waits until the other end has mapped memory into which a large buffer was copied; it takes about
# one millisecond. After that the buffer goes another way.
MAP_PATIENCE = 0.25
# Seconds between two looks whether the second connection has brought what was written before the first one ended.
DRAIN_PAUSE = 0.01


class MessageSink(Protocol):
    """Who gets the messages of a link: the caller's side (`Peer`) or the callee's side (`Service`).

    It is called on the loop; with answers of calls also in a thread that waits for them. methods: by the kind of a
    message, the method for that kind; a message of any other kind ends the connection.
    """

    @property
    def methods(self) -> dict[int, KindMethod]: ...

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


class Link:
    """See the module. `send`, `post`, `say` and `flush` from any thread, the rest on the loop."""

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
        self._memory = home.memory
        self.connection = connection
        self.record = record
        self.number = number
        self.released: Sequence[object] = ()  # what `flush` would send
        self.opener = opener
        options = home.engine.options
        self.second: SecondConnection = SecondConnection(self)
        self.returns: Returns = Returns(home.engine, self._give_back_all, self._borrows)
        self.bulk: Bulk = Bulk(
            limit=options.max_tensor_bytes,
            total=options.max_incoming_bytes,
            wake=self.second.wake,
            least=options.min_bulk_bytes,
        )
        self.route_back: Route | None = None  # for tensors on devices, from the acceptor to the opener
        self.on_devices: LinkDevices = LinkDevices(self)
        self.devices: Devices = self.on_devices.channel
        self.slots: deque[Slot] = self.devices.released  # the same of the device channel: slots of outboxes
        self.distribution: Distribution = Distribution(
            self.engine, self.bulk, self.devices, record, connection.takes_at_once
        )
        self._reassembly = Reassembly(self, options.max_incoming_bytes)
        self.held: dict[int, Assembly] = self._reassembly.held  # the messages that wait for buffers, by call
        self._receiver = receiver
        self._methods = receiver.methods
        # Counted without a lock, like `Counters`.
        self.messages_sent: int = 0
        self.messages_received: int = 0
        self._seen: tuple[Frame, Parcel] | None = None  # by `opened_anywhere`; `_open` is next, as a rule
        self.closed: bool = False
        connection.decoder.place = self.bulk.place
        connection.on_cut = self.bulk.displace
        connection.on_frames, connection.takes = self.on_frames, self.opened_anywhere
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
        unsent: Unsent | None = None,
    ) -> None:
        """Send a message: the one way out of a worker. Any thread; it never blocks.

        call: what is kept of the call that the message belongs to. prepared: what the frame was made of, for a message
        whose buffers were given to channels. undo: what to take back if an observer drops the message. pipe: the second
        connection, for messages that go over that one. urgent, more, unsent: see `FrameWriter.send`. passed: whether
        all observers have let it go.
        """
        if not passed and self.engine.observers:
            # Without `more`: if an observer lets it go later, the message that it was to leave with has left before it.
            send = partial(self.send, kind, call_id, frame, urgent=urgent, call=call, prepared=prepared, pipe=pipe)
            passed_on = partial(send, passed=True, unsent=unsent)
            self._ask_observers(kind, call_id, frame, call, prepared, undo, passed_on)
            return
        self.messages_sent += 1
        if pipe is not None:
            pipe.send(frame)
            return
        if (self.released or self.slots) and kind not in (CHANNEL, RELEASE):
            self.flush(more=True)
        if prepared is None:
            self.connection.send(frame, urgent=urgent, more=more, unsent=unsent)
            return
        if not prepared.unsent:  # withdrawn: its sender was interrupted while an observer had it
            return
        away = self.distribution.remember(prepared) if prepared.remembered else ()
        try:
            self.connection.send(frame, urgent=urgent, unsent=prepared.unsent)
            if prepared.unsent:  # the connection has ended
                self.distribution.withdraw(prepared)
            elif away:
                self.devices.posted(away, call_id)
        except BaseException:
            if away and not prepared.unsent:  # a signal handler has raised it: others wait until these have gone on
                self.devices.posted(away, call_id)
            raise

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
            passage = frame_passage(kind, call_id, frame, call, self.record)
        else:
            size = len(prepared.body) + prepared.size
            passage = Passage(prepared.kind, call_id, prepared.body, size, call, self.record)

        def drop() -> None:
            if prepared is not None:
                self.distribution.withdraw(prepared)
            if undo is not None:
                undo.unsend()

        ask(self.engine.observers, passage, send, drop)

    # --- the entrance -------------------------------------------------------------------------------------------------

    def on_frames(self, frames: Sequence[Frame], *, pipe: Connection | None = None, again: bool = False) -> None:
        """Frames have arrived: the one way into a worker. On the loop, or in the thread that has read them.

        pipe: the second connection, if they came over that. again: whether they were held here before, and so have been
        counted and shown to observers already. Raises ProtocolError, which ends the connection.
        """
        if not again:
            self.messages_received += len(frames)
        methods = self._methods
        for frame in frames:
            if pipe is not None:
                self.second.on_frame(pipe, frame)
                continue
            kind = frame.kind
            if frame.segments and not again and kind not in _COUNTED:
                self.distribution.arrived(frame.segments)
            if self.held or kind in OF_LINKS:
                message = self.admit(frame)
                if message is None:
                    continue
                frame, kind = message, message.kind
            method = methods.get(kind)
            if method is None:
                raise ProtocolError(f"{frame} does not belong on this side of a connection")
            method(frame)

    def take_over(self, frame: Frame, again: bool = False) -> None:
        """A frame that a thread has read, and left. again: it may have been handled, or in part. On the loop."""
        try:
            if again and frame.kind == RELEASE:
                self.on_release(frame, again=True)
            else:
                self.on_frames([frame])
        except ProtocolError as error:
            self.connection.abort(error)

    # --- sending, from any thread -------------------------------------------------------------------------------------

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

    def flush(self, *, more: bool = False) -> None:
        """Give back the blocks and slots that were released here. more: another frame follows at once. Any thread."""
        sharing = self.distribution.shared
        if self.released and sharing is not None:
            sharing.flush(more=more)
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
        if frame.kind == RELEASE:
            self.on_release(frame)
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
        """The message in a PARCEL, or None if it has to wait: it is handed over later. Raises ProtocolError."""
        seen, self._seen = self._seen, None
        if seen is not None and seen[0] is not frame:
            seen = None
        parcel = seen[1] if seen is not None else read_parcel(frame.body)
        if len(parcel.wires) == 1 and parcel.wires[0][0] == DEVICE:
            if seen is not None or self.devices.is_here(parcel.wires[0][1]):
                return self._reassembly.open_one(frame, parcel)
            return self._reassembly.open(frame, parcel)
        sharing = self.distribution.shared
        if len(parcel.wires) == 1 and sharing is not None:  # most large messages are of this kind
            ((channel, wire),) = parcel.wires
            try:
                buffer = sharing.receive_one(wire) if channel == SHARED else None
            except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
                raise ProtocolError(f"{frame} that is none: {type(error).__name__}: {error}") from None
            if buffer is not None:
                message: Frame = _new(Frame, (parcel.kind, frame.call_id, parcel.body, [buffer]))
                return message
        return self._reassembly.open(frame, parcel)

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

    def on_release(self, frame: Frame, again: bool = False) -> None:
        """A RELEASE frame. again: a thread may have begun with it. Any thread. Raises ProtocolError."""
        sharing = self.distribution.shared
        if sharing is None:
            raise ProtocolError("a release of shared memory, of which there is none")
        sharing.on_release(read_release(frame.body).blocks, again=again)

    def opened_anywhere(self, frame: Frame, *kinds: int) -> Parcel | None:
        """What a PARCEL says if it is of one of these kinds, of answers if none is named, and all there. Any thread.

        What lies on a device is not there for those who wait for answers: they may be interrupted as they take it.
        """
        sharing = self.distribution.shared
        if sharing is None and not (kinds and self.devices.opened):
            return None
        try:
            parcel = read_parcel(frame.body)
        except ProtocolError:  # the loop will see for itself
            return None
        if parcel.kind not in (kinds or (REPLY, ERROR)) or len(parcel.wires) != 1:
            return None
        ((channel, wire),) = parcel.wires
        if channel == DEVICE:
            if not kinds or not self.devices.is_here(wire):
                return None
        elif channel != SHARED or sharing is None or not sharing.is_here(wire):
            return None
        self._seen = frame, parcel
        return parcel

    @staticmethod
    def gives_slots(frame: Frame) -> bool:
        """Whether a CHANNEL frame gives back slots of outboxes, and so need not be the loop's. Any thread."""
        return bytes(frame.body[: len(_SLOTS)]) == _SLOTS

    def has_taken(self, frame: Frame) -> bool:
        """Whether the memory of a PARCEL that this thread was about to handle is here now. After an interruption."""
        sharing = self.distribution.shared
        return sharing is not None and all(sharing.has_taken(wire) for _, wire in read_parcel(frame.body).wires)

    def _on_channel(self, frame: Frame, failure: Exception | None = None) -> None:
        """A CHANNEL frame. failure: why its buffer cannot be had. Raises ProtocolError."""
        code, fields = read_channel(frame.body)
        if code == LINK:
            self._on_message(fields)
        elif code == DEVICE:
            self.on_devices.on_frame(frame, fields, failure)
        elif code == SHARED and self.distribution.shared is None:
            return  # the other end sent it before it knew that this end cannot share memory
        elif code in self.distribution.channels:
            self.distribution.channels[code].on_message(fields)
        else:
            raise ProtocolError(f"a message for channel {code}, which does not exist")

    # --- which channels -----------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        mine: dict[str, object] = {Devices.name: self.on_devices.descriptor()}
        if self.connection.local and self.engine.options.shared_memory:
            mine[SharedMemory.name] = shared.descriptor()
        self.say(LINK, MESSAGES.write(Introduce(mine)))

    def _on_message(self, fields: list[object]) -> None:
        match MESSAGES.read(fields):
            case Introduce(theirs):
                self._choose(theirs)
            case Pipe(reason):
                self.second.on_message(reason)
            case Attach():
                raise ProtocolError("a second connection announced over the first one")

    def _choose(self, theirs: dict[str, object]) -> None:
        """The other end has told what it can use: both ends now come to the same choice of channels.

        Whether memory really is shared is proved by the first segment (`channels/shared.py`).
        """
        self.on_devices.choose(theirs.get(Devices.name))
        if not self.connection.local or not self.engine.options.shared_memory or self.distribution.shared is not None:
            return
        reason = shared.obstacle(theirs.get(SharedMemory.name))
        if reason is not None:
            self._memory.cannot_share(self.record, reason)
            return
        channel = SharedMemory(
            self._memory.arena,
            self.record.pid,
            _Surroundings(self),
            least=self.engine.options.min_shared_bytes,
            keeper=self._memory.keeper,
        )
        self.distribution.share(channel)
        self.released = channel.released
        self._memory.add(channel, self.record, prepare=self.opener)  # who calls sends more, and first

    def open_pipe(self) -> None:
        """Begin to open the second connection."""
        self._home.open_pipe(self)

    def other_end(self) -> Link | None:
        """The other end of this link if that is in this process, else None."""
        return self._home.other_end(self)

    def post_piece(self, number: int, body: bytes, buffer: Buffer) -> None:
        """Send a message of the link itself that has a buffer. Any thread."""
        self.post(self.distribution.prepare(CHANNEL, number, body, [buffer]))

    def say(self, channel: int, fields: list[object], *, more: bool = False, unsent: Unsent | None = None) -> None:
        """Send what a channel says. more: another frame follows at once. unsent: see `FrameWriter.send`."""
        frame = encode_frame(CHANNEL, 0, write(messages.ChannelMessage(channel, fields)))
        self.send(CHANNEL, 0, frame, more=more, unsent=unsent)

    def give_back(self, blocks: Sequence[Block], unsent: Unsent, *, more: bool) -> None:
        """Tell the other end that these blocks are its own again. more: another frame follows at once. Any thread."""
        self.send(RELEASE, 0, encode_frame(RELEASE, 0, pack((blocks,))), more=more, unsent=unsent)  # a Release

    def _give_back_all(self) -> bool:
        """`flush`; whether there was anything."""
        any_released = bool(self.released or self.slots)
        self.flush()
        return any_released

    def _borrows(self) -> bool:
        """Whether memory of the other end may be in use here."""
        return self.distribution.shared is not None and self.distribution.shared.borrower.borrowed

    # --- the end ------------------------------------------------------------------------------------------------------

    def when_drained(self, then: Callable[[], None], limit: float = 0.0) -> None:
        """Call `then` as soon as no message is held any more whose buffers can still come.

        It is for the end of the first connection: what was written to the second one before that may arrive after it.
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
        return self.bulk.sending > 0 or self.devices.busy

    @property
    def owing(self) -> bool:
        """Whether something was not written yet, or may have to be sent again as a connection has broken."""
        pipe = self.pipe
        return self.connection.owing or (pipe is not None and pipe.owing)

    def close(self) -> None:
        """The connection has ended, or we leave. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.returns.close()
        self._reassembly.close()
        self.distribution.close()
        self.on_devices.close()
        if self.pipe is not None and self.pipe is not self.connection:
            self.pipe.close()
        if self.distribution.shared is not None:
            self._memory.ended(self.distribution.shared)
        self._home.ended(self)


class _Surroundings:
    """A link, as its shared-memory channel sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.on_loan = link.returns.watch
        self.on_loop = link.engine.call_on_loop
        self.in_background = link.engine.in_background
        self.on_cold = link._memory.want
        self.give_back = link.give_back

    def may_wait(self) -> bool:
        # Nor does a loop of the program's own, where the worker has another one (`dedicated_loop`).
        return threading.get_ident() != self._link.engine.thread and asyncio._get_running_loop() is None

    def wait(self, wait: Callable[[float], object]) -> None:
        # Two workers that send to each other wait in all of their background threads, which shall map, too.
        pools = self._link.engine.pool, self._link.engine.background
        for pool in pools:
            pool.enter_blocked()
        try:
            wait(MAP_PATIENCE)
        finally:
            for pool in pools:
                pool.exit_blocked()

    def on_refused(self, reason: str) -> None:
        self._link._memory.cannot_share(self._link.record, reason)

    def post(self, fields: list[object]) -> None:
        self._link.say(SHARED, fields)
