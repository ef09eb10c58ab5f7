"""A link: one end of the traffic with one other worker. Frames go over its connection, large buffers by channels.

A message whose buffers all fit into its frame is that frame. Any other travels as a PARCEL, which names for each buffer
its channel and what that needs to receive it, and is unwrapped here: who serves or answers calls sees the message with
all its buffers, as if they had come with it.

    PARCEL   kind of the message, [[channel, *wire] for each buffer], body of the message; segments: the riders
    CHANNEL  channel, *fields: a message from one end of a channel to the other; channel 0 is the link itself:
             0, "hello", {channel: descriptor}    what I can use; comes first
             0, "pipe", ...                       about the second connection, see second.py

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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...channels import AnyBuffer, Channel, Traffic, Wire, shared
from ...channels.accelerator import DeviceBuffer
from ...channels.bulk import Bulk
from ...channels.device import Devices
from ...channels.inline import Inline
from ...channels.landing import Landing
from ...channels.routes import Route
from ...channels.shared import SharedMemory
from ...errors import ProtocolError
from ...protocol.codec import pack, unpack
from ...protocol.frames import CHUNK, PARCEL, Buffer, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...transport.connection import Connection
from .devices import DEVICE, PIECES, LinkDevices
from .second import PIPE, SecondConnection

if TYPE_CHECKING:
    from ..worker import Worker


HELLO = "hello"
# Who a CHANNEL frame is for, and what takes a buffer of a PARCEL; and DEVICE.
LINK, SHARED, BULK, INLINE = range(4)
# Frames that `Link.admit` has to see.
OF_LINKS = frozenset((int(Kind.CHANNEL), PARCEL, CHUNK))
# What is copied on a loop at most, in bytes; a thread copies the rest.
LOOP_COPY = 1024 * 1024
# With so many calls under way each message is written at once, by the thread that made it; with more the loop joins
# what comes meanwhile. Waking the loop costs as much as a write, and takes the interpreter from that thread.
FEW = 8
# What was released travels with the next message, or by itself after this many seconds.
RELEASE_PAUSE = 0.01
# Seconds in which the second connection brings what was written before the first one ended. Looked at so often.
DRAIN_GRACE = 1.0
DRAIN_PAUSE = 0.01


class Receiver(Protocol):
    """Who gets the messages of a link. On the loop."""

    def on_frames(self, frames: list[Frame]) -> None:
        """Frames and whole messages."""

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """A message without its buffers, and why."""


class Parcel(NamedTuple):
    """A message ready to be posted, or withdrawn. wires: (channel, wire) of buffers that do not go with the frame."""

    frame: list[Buffer]
    call_id: int
    wires: Sequence[tuple[int, Wire]]


class Message(Frame):
    """A message that was put together. landing: where those of its buffers arrive that lie on devices."""

    landing: Landing | None = None

    def landed(self, landing: Landing | None) -> Message:
        """Say where; returns itself."""
        self.landing = landing
        return self


class _Held:
    """A message that waits for buffers, and what came behind it."""

    __slots__ = ("behind", "body", "buffers", "failure", "kind", "landing", "missing")

    def __init__(self, kind: int, body: bytes, count: int) -> None:
        self.kind = kind
        self.body = body
        self.buffers: list[Any] = [None] * count
        self.missing = 0
        self.failure: Exception | None = None
        self.landing: Landing | None = None
        self.behind: list[Frame] = []


class Link:
    """See the module. `prepare`, `post`, `withdraw` and `flush` from any thread, the rest on the loop."""

    def __init__(
        self,
        worker: Worker,
        connection: Connection,
        record: WorkerRecord,
        receiver: Receiver,
        *,
        number: int,
        opener: bool,
    ) -> None:
        self.worker = worker
        self.connection = connection
        self.record = record
        self.number = number
        self.held: dict[int, _Held] = {}
        self.released: Sequence[Any] = ()  # what `flush` would send
        self.shared: SharedMemory | None = None
        self.opener = opener
        options = worker.options
        self.second = SecondConnection(self)
        self.bulk = Bulk(limit=options.max_tensor_bytes, wake=self.second.wake, least=options.min_bulk_bytes)
        self.inline = Inline()
        self.route_back: Route | None = None  # for tensors on devices, from the acceptor to the opener
        self.on_devices = LinkDevices(self)
        self.devices = self.on_devices.channel
        self.slots = self.devices.released  # as `released`, of the device channel
        # The buffers of a message are worth no channel below this, in bytes; nor is one that comes alone.
        self._least_alone = min(options.min_shared_bytes, options.min_bulk_bytes)
        self._least = min(shared.PACK_LEAST, self._least_alone)
        self._receiver = receiver
        # In order of priority; `devices` beside them takes what lies on a device, and nothing else.
        self._channels: dict[int, Channel] = {BULK: self.bulk, INLINE: self.inline}
        self._underway: dict[int, Sequence[tuple[int, Wire]]] = {}  # of calls that may still be given up
        self._timed = False
        self.closed = False
        connection.decoder.place = self.bulk.place
        self._introduce()

    # --- sending, from any thread -------------------------------------------------------------------------------------

    def too_long_for_loop(self, buffers: Sequence[AnyBuffer]) -> bool:
        """Whether `prepare` would block the loop that runs in this thread, and another thread should call it."""
        return (
            threading.get_ident() == self.worker.thread
            and self.shared is not None
            and sum(len(buffer) for buffer in buffers if type(buffer) is not DeviceBuffer) > LOOP_COPY
        )

    def rides(self, buffers: Sequence[Any]) -> bool:
        """Whether they go with the frame of their message, as a lone short one does: `prepare` would only say so."""
        if len(buffers) > 1 or len(buffers[0]) >= self._least_alone or type(buffers[0]) is DeviceBuffer:
            return False
        self.inline.count(buffers)
        return True

    def prepare(
        self, kind: int, call_id: int, body: bytes, buffers: Sequence[AnyBuffer], *, copy: bool = False
    ) -> Parcel:
        """Give the buffers of a message to their channels. What it returns has to be posted or withdrawn.

        copy: the buffers may change as soon as this returns. Else they are borrowed until they are written; those on
        devices never are.
        """
        if any(type(buffer) is DeviceBuffer for buffer in buffers):
            return self._prepare_with_devices(kind, call_id, body, buffers, copy)
        host: Sequence[Any] = buffers
        sharing = self.shared
        if sharing is not None and len(host) == 1:
            wire = sharing.send_one(host[0])
            if wire is not None:  # as below; most large messages are of this kind
                body = pack((kind, ((SHARED, *wire),), body))
                return Parcel(encode_frame(PARCEL, call_id, body), call_id, ((SHARED, wire),))
            sharing = None  # it was asked
        if sum(map(len, host)) < (self._least if len(host) > 1 else self._least_alone):
            if copy:
                host = [bytes(buffer) for buffer in host]
            self.inline.count(host)
            return Parcel(encode_frame(kind, call_id, body, host), call_id, ())
        wires, riders = self._distribute(host, copy, sharing is not None)
        apart = _apart(wires)
        if apart:
            kind, body = PARCEL, pack([kind, wires, body])
        return Parcel(encode_frame(kind, call_id, body, riders), call_id, apart)

    def _prepare_with_devices(
        self, kind: int, call_id: int, body: bytes, buffers: Sequence[AnyBuffer], copy: bool
    ) -> Parcel:
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
        return Parcel(encode_frame(PARCEL, call_id, pack([kind, wires, body]), riders), call_id, _apart(wires))

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

    def post(self, parcel: Parcel, *, urgent: bool = False) -> None:
        """Send a message that was prepared."""
        away: list[Wire] = []
        for code, wire in parcel.wires:
            if code == DEVICE:
                away.append(wire)
            elif code == BULK and parcel.call_id < PIECES:
                # Several of a stream, of which each item is a message.
                self._underway[parcel.call_id] = [*self._underway.get(parcel.call_id, ()), (code, wire)]
        if self.released or self.slots:
            self.flush(more=True)
        self.connection.send(parcel.frame, urgent=urgent)
        if away:
            self.devices.posted(away, parcel.call_id)

    def withdraw(self, parcel: Parcel) -> None:
        """That message will not be posted."""
        self._withdraw(parcel.wires, named=False)

    def give_up(self, call_id: int) -> None:
        """Nobody wants any more what was posted for that call."""
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
        """All chunks are written: nothing that was posted can be given up any more."""
        self._underway.clear()

    def flush(self, *, more: bool = False) -> None:
        """Say what was released, if anything was. more: another frame follows at once."""
        if self.released and self.shared is not None:
            self.shared.flush(more=more)
        if self.slots:
            self.devices.flush(more=more)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def admit(self, frame: Frame) -> Frame | None:
        """The message that a frame brings. None: the frame was the link's own, or waits and is handed over later."""
        if frame.kind == CHUNK:  # its call id is the number of a transfer
            self.on_chunk(frame)
            return None
        held = self.held.get(frame.call_id)
        if held is not None:  # an earlier message of that call
            held.behind.append(frame)
            return None
        if frame.kind == PARCEL:
            message = self._open(frame)
            if message is None or message.kind != Kind.CHANNEL:
                return message
            frame = message
        if frame.kind == Kind.CHANNEL:
            self._on_channel(frame)
            return None
        return frame

    def _open(self, frame: Frame) -> Frame | None:
        """The message in a PARCEL, or None if it has to wait: it is handed over later. Raises ProtocolError."""
        try:
            kind, wires, body = unpack(frame.body)
            if len(wires) == 1 and wires[0][0] == SHARED and self.shared is not None:
                buffer = self.shared.receive_one(wires[0][1:])
                if buffer is not None:
                    return Frame(kind, frame.call_id, body, [buffer])
            held = _Held(int(kind), bytes(body), len(wires))
            if any(wire[0] == DEVICE for wire in wires):
                self._receive_on_devices(frame, wires, held)
            else:
                self._receive(frame, wires, held)
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise ProtocolError(f"{frame} that is none: {type(error).__name__}: {error}") from None
        if held.missing == 0 and held.failure is None:
            return Message(held.kind, frame.call_id, held.body, held.buffers).landed(held.landing)
        self.held[frame.call_id] = held
        self._hand_over(frame.call_id, held)
        return None

    def _receive_on_devices(self, frame: Frame, wires: list[Any], held: _Held) -> None:
        landing: Landing | None = None
        try:
            landing = held.landing = self.worker.accelerators.land()
        except RuntimeError as error:  # received all the same: its sender waits for that, and others lent memory for it
            held.failure = error
        try:
            with landing.entered() if landing is not None else nullcontext():
                self._receive(frame, wires, held)
        except RuntimeError as error:
            if isinstance(error, ProtocolError):
                raise
            held.missing, held.failure = 0, error  # the device's: that message's trouble

    def _receive(self, frame: Frame, wires: list[Any], held: _Held) -> None:
        for code in sorted({wire[0] for wire in wires}):
            places = [place for place, wire in enumerate(wires) if wire[0] == code]
            arrived = partial(self._arrived, frame.call_id, held, places)
            held.missing += len(places)
            channel: Any = self.devices if code == DEVICE else self._channels[code]
            buffers = channel.receive([wires[place][1:] for place in places], frame.segments, arrived)
            for place, buffer in zip(places, buffers, strict=True):
                if buffer is not None:
                    held.buffers[place] = buffer
                    held.missing -= 1

    def _arrived(self, call_id: int, held: _Held, places: list[int], index: int, outcome: Buffer | Exception) -> None:
        held.missing -= 1
        if isinstance(outcome, Exception):
            held.failure = outcome
        else:
            held.buffers[places[index]] = outcome
        self._hand_over(call_id, held)

    def _hand_over(self, call_id: int, held: _Held) -> None:
        if held.missing or self.closed or self.held.get(call_id) is not held:
            return
        del self.held[call_id]
        frame: Frame = Message(held.kind, call_id, held.body, held.buffers).landed(held.landing)
        try:
            if held.kind == Kind.CHANNEL:
                self._on_channel(frame, held.failure)
            elif held.failure is not None:
                self._receiver.on_failed(frame._replace(segments=()), held.failure)
                self._receiver.on_frames(held.behind)
            else:
                self._receiver.on_frames([frame, *held.behind])
        except ProtocolError as error:  # whoever brought the last buffer has nothing to do with it
            self.connection.abort(error)

    def on_chunk(self, frame: Frame) -> None:
        """A CHUNK frame, on either connection. Raises ProtocolError."""
        if not self.closed:
            self.bulk.on_frame(frame)

    def _on_channel(self, frame: Frame, failure: Exception | None = None) -> None:
        """A CHANNEL frame. failure: why its buffer cannot be had. Raises ProtocolError."""
        code, *fields = unpack(frame.body) or [None]
        if code == LINK:
            self._on_message(fields)
        elif code == DEVICE:
            self.on_devices.on_frame(frame, fields, failure)
        elif code == SHARED and self.shared is None:
            return  # it was on its way when we found that we cannot
        elif type(code) is int and code in self._channels:
            self._channels[code].on_message(fields)
        else:
            raise ProtocolError(f"a message for channel {code!r:.20}, which does not exist")

    # --- which channels -----------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        mine = {Devices.name: self.on_devices.descriptor()}
        if self.connection.local and self.worker.options.shared_memory:
            mine[SharedMemory.name] = shared.descriptor()
        self.connection.send(self.own_frame(HELLO, mine))

    def _on_message(self, fields: list[Any]) -> None:
        match fields:
            case [str(tag), dict(theirs)] if tag == HELLO:
                self._choose(theirs)
            case [str(tag), str(reason)] if tag == PIPE:
                self.second.on_message(reason)
            case _:
                raise ProtocolError(f"a message about channels that is none: {fields!r:.100}")

    def _choose(self, theirs: dict[str, Any]) -> None:
        """Both ends come to the same choice; whether memory really is shared, a first segment proves (shared.py)."""
        self.on_devices.choose(theirs.get(Devices.name))
        if not self.connection.local or not self.worker.options.shared_memory or self.shared is not None:
            return
        reason = shared.obstacle(theirs.get(SharedMemory.name))
        if reason is not None:
            self.worker.memory.cannot_share(self.record, reason)
            return
        channel = self.shared = SharedMemory(
            self.worker.memory.arena, self.record.pid, _Surroundings(self), least=self.worker.options.min_shared_bytes
        )
        self.released = channel.released
        self._channels = {SHARED: channel, **self._channels}  # another one: other threads may be looking through it
        self.worker.memory.add(channel, self.record)

    def own_frame(self, *fields: Any) -> list[Buffer]:
        """A message of the link itself to its other end."""
        return encode_frame(Kind.CHANNEL, 0, pack([LINK, *fields]))

    def say(self, message: list[Any], *, more: bool = False) -> None:
        """Send a message of a channel, which begins with its number. more: another frame follows at once."""
        self.connection.send(encode_frame(Kind.CHANNEL, 0, pack(message)), more=more)

    def flush_later(self) -> None:
        """Something was released. From any thread, and from inside the garbage collector."""
        if not self._timed:
            self._timed = True
            self.worker.call_on_loop(self.worker.loop.call_later, RELEASE_PAUSE, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timed = False
        self.flush()

    # --- the end ------------------------------------------------------------------------------------------------------

    def when_drained(self, then: Callable[[], None], limit: float = 0.0) -> None:
        """Call it as soon as nothing is held that can still come, although the first connection has said its last.

        What was written to the second one before that may come after it; `limit` bounds the wait.
        """
        now = time.monotonic()
        limit = limit or now + DRAIN_GRACE
        over = self.pipe is None or self.pipe is self.connection or self.pipe.ended
        if over or not self.held or self.closed or self.worker.closed or now >= limit:
            then()
        else:
            self.worker.loop.call_later(DRAIN_PAUSE, self.when_drained, then, limit)

    @property
    def pipe(self) -> Connection | None:
        """What chunks go over: the second connection, or the first for want of one; None until that is settled."""
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
        self.held.clear()
        self._underway.clear()
        for channel in list(self._channels.values()):
            channel.close()
        self.on_devices.close()
        if self.pipe is not None and self.pipe is not self.connection:
            self.pipe.close()
        if self.shared is not None:
            self.worker.memory.ended(self.shared)
        self.worker.count_traffic(self)


def _apart(wires: list[Any]) -> list[tuple[int, Wire]]:
    """Those that do not go with the frame."""
    return [(wire[0], wire[1:]) for wire in wires if wire is not None and wire[0] != INLINE]


class _Surroundings:
    """A link, as its shared-memory channel sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.on_release = link.flush_later
        self.on_loop = link.worker.call_on_loop
        self.in_background = link.worker.in_background
        self.on_cold = link.worker.memory.want

    def on_refused(self, reason: str) -> None:
        self._link.worker.memory.cannot_share(self._link.record, reason)

    def post(self, fields: list[Any], *, more: bool = False) -> None:
        self._link.say([SHARED, *fields], more=more)
