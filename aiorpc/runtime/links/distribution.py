"""Giving the buffers of messages to the channels of one link, and taking back those that are not wanted any more.

A message whose buffers all go with its frame is that frame. Any other becomes an envelope (PARCEL), which has for each
buffer its channel and its descriptor. The opposite is `reassembly`.

Invariants
1. A message whose buffers were given to channels is posted or withdrawn, exactly once: `Prepared.unsent` tells whether
   this is still to happen.
2. No message leaves that is longer than the other end accepts at once: that would end the connection, and fail all its
   calls. Buffers in a channel that does not borrow do not count, nor do messages of the link itself.
3. Nothing is copied on the loop that takes longer than a millisecond (`Distribution.too_long_for_loop`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...channels import AnyBuffer, Channel, Traffic, Wire
from ...channels.accelerator import DeviceBuffer
from ...channels.inline import Inline
from ...channels.shared import PACK_LEAST
from ...channels.shm import Copies
from ...errors import SerializationError
from ...protocol import messages
from ...protocol.frames import CHANNEL, PARCEL, Buffer, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import write
from ...protocol.packing import pack
from ...transport.send_queue import FRAME_COST, Unsent
from ..engine.engine import Engine
from ..engine.transfer_events import BufferTransfer, tell_transfer
from .messages import INLINE

# A loop copies at most so many bytes for one message; more is copied by a thread.
LOOP_COPY = 1024 * 1024

_Given = tuple[int, Wire]  # the number of a channel, and its descriptor of the buffer


class Prepared(NamedTuple):
    """A message whose buffers were given to their channels: it has to be posted or withdrawn, exactly once.

    kind, body: of the message itself, even if its frame is an envelope. wires: (channel, wire) of the buffers that do
    not go with the frame. size: bytes of all buffers. unsent: not empty until it is posted or withdrawn.
    """

    kind: int
    call_id: int
    body: bytes
    frame: list[Buffer]
    unsent: Unsent
    wires: Sequence[_Given] = ()
    size: int = 0


class Distribution:
    """See the module. Any thread, except where a method says otherwise.

    channels: by their number. sharing: those for the host's memory that do not borrow, in the order in which they are
    asked; the others come after these. traffic: of all channels by name.
    """

    def __init__(
        self, engine: Engine, channels: Mapping[int, Channel], record: WorkerRecord, takes_at_once: int
    ) -> None:
        """channels: those of the link from its start. record: of the other end. takes_at_once: bytes of tensors that
        the other end accepts in one message."""
        options = engine.options
        self._inline = Inline()
        self._engine = engine
        self._record = record
        self._takes_at_once = takes_at_once
        # Below so many bytes the buffers of a message go with its frame: a lone buffer, and several together. Not more
        # than the other end takes at once, whose length must be checked.
        self._least_alone = min(options.min_shared_bytes, options.min_bulk_bytes, takes_at_once)
        self._least = min(PACK_LEAST, self._least_alone)
        self.use({**channels, INLINE: self._inline})

    def use(self, channels: dict[int, Channel]) -> None:
        """Use these channels from now on, in this order. On the loop."""
        # New objects: other threads may be iterating over the old ones.
        host = [(number, channel) for number, channel in channels.items() if not channel.on_devices]
        self.sharing: list[tuple[int, Channel]] = [each for each in host if not each[1].borrows]
        self._host = [*self.sharing, *[each for each in host if each[1].borrows]]
        self._devices = [(number, channel) for number, channel in channels.items() if channel.on_devices]
        self.channels: dict[int, Channel] = channels

    # --- giving -------------------------------------------------------------------------------------------------------

    def too_long_for_loop(self, buffers: Sequence[AnyBuffer]) -> bool:
        """Whether `prepare` would block the loop that runs in this thread, and another thread should call it."""
        on_loop = asyncio._get_running_loop() is self._engine.loop
        if not on_loop or not self.sharing or sum(map(len, buffers)) <= LOOP_COPY:
            return False
        host = [buffer for buffer in buffers if not isinstance(buffer, DeviceBuffer)]
        return any(channel.to_copy(host) > LOOP_COPY for _, channel in self.sharing)

    def rides(self, buffers: Sequence[Any]) -> bool:
        """Whether the buffers go with the frame of their message without any channel, as a lone short one does.

        Then they are counted, and `prepare` need not be called.
        """
        if len(buffers) > 1 or len(buffers[0]) >= self._least_alone or type(buffers[0]) is DeviceBuffer:
            return False
        self._inline.count(buffers)
        return True

    def prepare(
        self,
        kind: int,
        call_id: int,
        body: bytes,
        buffers: Sequence[AnyBuffer],
        *,
        copy: bool = False,
        copies: Copies | None = None,
    ) -> Prepared:
        """Give the buffers of a message to their channels. The result has to be posted or withdrawn.

        copy: whether the buffers may change as soon as this returns. Otherwise they are borrowed until they are
        written. Buffers on devices are never borrowed. copies: of buffers that also go to other workers.
        """
        if self._engine.transfer_observers:
            started = time.monotonic()
            prepared = self._prepare(kind, call_id, body, buffers, copy, copies)
            if prepared.wires:
                self._tell(prepared, started)
            return prepared
        return self._prepare(kind, call_id, body, buffers, copy, copies)

    def _tell(self, prepared: Prepared, started: float) -> None:
        """Show the observers of transfers which channels took the buffers of a message, since `started`."""
        taken = [self.channels[number] for number in dict.fromkeys(number for number, _ in prepared.wires)]
        event = BufferTransfer(
            "sent",
            self._record.name,
            prepared.call_id,
            tuple(channel.name for channel in taken),
            prepared.size,
            started,
            time.monotonic(),
            any(not channel.borrows for channel in taken),
        )
        tell_transfer(self._engine.transfer_observers, event)

    def _prepare(
        self,
        kind: int,
        call_id: int,
        body: bytes,
        buffers: Sequence[AnyBuffer],
        copy: bool,
        copies: Copies | None,
    ) -> Prepared:
        if len(buffers) == 1:  # the common case of large messages
            (buffer,) = buffers
            for number, channel in self._devices if type(buffer) is DeviceBuffer else self.sharing:
                wire = channel.send_one(buffer, copies)
                if wire is not None:
                    lone = ((number, wire),)
                    frame = encode_frame(PARCEL, call_id, pack((kind, lone, body)))  # a Parcel
                    return Prepared(kind, call_id, body, frame, [frame], lone, len(buffer))
        if DeviceBuffer not in map(type, buffers):
            least = self._least if len(buffers) > 1 else self._least_alone
            if sum(map(len, buffers)) < least:
                return self._prepare_short(kind, call_id, body, buffers, copy)
        wires: list[Any] = [None] * len(buffers)
        riders: list[Buffer] = []
        try:
            self._distribute(kind, body, buffers, wires, riders, copy, copies)
            apart = _apart(wires)
            if apart:
                frame = encode_frame(PARCEL, call_id, write(messages.Parcel(kind, wires, body)), riders)
            else:
                frame = encode_frame(kind, call_id, body, riders)
        except Exception:
            self._withdraw(_apart([each for each in wires if each is not None]), named=False)
            raise
        return Prepared(kind, call_id, body, frame, [frame], apart, sum(map(len, buffers)))

    def _prepare_short(self, kind: int, call_id: int, body: bytes, buffers: Sequence[Any], copy: bool) -> Prepared:
        """A message whose buffers all go with its frame."""
        buffers = [bytes(buffer) for buffer in buffers] if copy else buffers
        self._inline.count(buffers)
        frame = encode_frame(kind, call_id, body, buffers)
        return Prepared(kind, call_id, body, frame, [frame], (), sum(map(len, buffers)))

    def check_length(self, buffers: Sequence[Buffer], body: bytes) -> None:
        """Check that the other end accepts so much outside of shared memory. Raises SerializationError."""
        most, sizes = self._takes_at_once, list(map(len, buffers))
        size = sum(sizes)
        if size + len(body) + FRAME_COST <= most:
            return
        # If buffers come apart from the frame, the frame is held there until they have come.
        with_frame = sum([each for each in sizes if each < self._engine.options.min_bulk_bytes])
        if size > most or (with_frame < size and with_frame + len(body) + FRAME_COST > most):
            raise SerializationError(
                f"has {size} bytes of tensors, and {self._record.describe()} takes no more than {most} of one "
                "message (max_incoming_bytes)"
            )

    def _distribute(
        self,
        kind: int,
        body: bytes,
        buffers: Sequence[Any],
        wires: list[Any],
        riders: list[Buffer],
        copy: bool,
        copies: Copies | None,
    ) -> None:
        """Give each buffer to the first channel that takes it: sets the channel and wire of each, and the riders."""
        away = [place for place, buffer in enumerate(buffers) if type(buffer) is DeviceBuffer]
        for number, channel in self._devices if away else ():
            places = [place for place in away if wires[place] is None]
            self._give(number, channel, [buffers[place] for place in places], places, wires, riders, copies)
        checked = kind == CHANNEL
        tried = len(buffers) == 1  # by `prepare`
        for number, channel in self._host:
            places = [place for place, wire in enumerate(wires) if wire is None]
            if not places:
                return
            if not channel.borrows and tried:
                continue
            if channel.borrows and not checked:  # before any buffer leaves
                checked = True
                self.check_length([buffers[place] for place in places], body)
            given = [buffers[place] for place in places]
            if copy and channel.borrows:
                given = list(map(bytes, given))
            self._give(number, channel, given, places, wires, riders, copies)

    def _give(
        self,
        number: int,
        channel: Channel,
        buffers: Sequence[Any],
        places: list[int],
        wires: list[Any],
        riders: list[Buffer],
        copies: Copies | None,
    ) -> None:
        for place, wire in zip(places, channel.send(buffers, riders, copies), strict=True):
            if wire is not None:
                wires[place] = number, wire

    def posted(self, prepared: Prepared) -> None:
        """A message is on its way: the rest of its buffers may follow, or be given up with its call."""
        for number, wire in prepared.wires:
            channel = self.channels[number]
            if channel.tracks:
                channel.posted((wire,), prepared.call_id)

    def arrived(self, buffers: Sequence[Buffer]) -> None:
        """Count buffers that have arrived with a frame without any channel."""
        for buffer in buffers:
            self._inline.traffic._count_received(len(buffer))

    # --- taking back --------------------------------------------------------------------------------------------------

    def withdraw(self, prepared: Prepared) -> None:
        """That message will not be posted. Does nothing if it was posted or withdrawn already."""
        if prepared.unsent:
            prepared.unsent.clear()
            self._withdraw(prepared.wires, named=False)

    def give_up(self, call_id: int) -> None:
        """Take back what was posted for that call and is not written yet."""
        for channel in self.channels.values():
            if channel.tracks:
                channel.give_up(call_id)

    def _withdraw(self, wires: Sequence[_Given], *, named: bool) -> None:
        for number in dict.fromkeys(number for number, _ in wires):
            self.channels[number].withdraw([wire for code, wire in wires if code == number], named=named)

    # --- looking ------------------------------------------------------------------------------------------------------

    def traffic(self) -> dict[str, Traffic]:
        """What has gone by which channel, by name."""
        found: dict[str, Traffic] = {}
        for channel in self.channels.values():
            found |= channel.traffics()
        return found

    @property
    def busy(self) -> bool:
        """Whether buffers are under way that the other end waits for."""
        return any(channel.busy for channel in self.channels.values())

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The link has ended. On the loop."""
        for channel in self.channels.values():
            channel.close()


def _apart(wires: Sequence[_Given]) -> list[_Given]:
    """The buffers that do not go with the frame."""
    return [(code, wire) for code, wire in wires if code != INLINE]
