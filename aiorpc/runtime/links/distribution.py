"""Giving the buffers of messages to the channels of one link, and taking back what nobody wants any more.

A message whose buffers all go with its frame is that frame. Any other becomes a PARCEL, which names for each buffer its
channel and what that needs to receive it. The opposite is `reassembly`.

Invariants
1. A message whose buffers were given to channels is posted or withdrawn, exactly once, whatever a signal handler
   raises meanwhile: `Prepared.unsent` says whether that is still to come.
2. No message leaves that is longer than the other end takes at once: the connection would end, and all calls with it.
   What lies in shared memory or on devices does not count, nor do messages of the link itself.
3. Nothing is copied on the loop that takes longer than a millisecond (`Distribution.too_long_for_loop`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...channels import AnyBuffer, Channel, Traffic, Wire, shared
from ...channels.accelerator import DeviceBuffer
from ...channels.bulk import Bulk
from ...channels.device import Devices
from ...channels.inline import Inline
from ...channels.shared import SharedMemory
from ...channels.shm import Copies
from ...errors import SerializationError
from ...protocol import messages
from ...protocol.frames import CHANNEL, PARCEL, Buffer, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import write
from ...protocol.packing import pack
from ...transport.send_queue import FRAME_COST, Unsent
from ..engine.engine import Engine
from .messages import BULK, DEVICE, INLINE, SHARED
from .on_devices import PIECES

# A loop copies at most so many bytes for one message; more is copied by a thread.
LOOP_COPY = 1024 * 1024

_new: Any = tuple.__new__  # what Prepared(...) does, without its call into Python
_Given = tuple[int, Wire]  # the number of a channel, and what that needs at the other end


class Prepared(NamedTuple):
    """A message whose buffers were given to their channels: it has to be posted or withdrawn, exactly once.

    kind, body: of the message itself, even if its frame is a PARCEL. wires: (channel, wire) of the buffers that do not
    go with the frame. size: bytes of all buffers. remembered: whether `remember` has something to do. unsent: has
    something in it until it is posted or withdrawn.
    """

    kind: int
    call_id: int
    body: bytes
    frame: list[Buffer]
    unsent: Unsent
    wires: Sequence[_Given] = ()
    size: int = 0
    remembered: bool = True


class Distribution:
    """See the module. Any thread, where a method does not say otherwise.

    channels: by their number, in order of priority. devices: the channel beside these, which takes what lies on a
    device, and nothing else. shared: shared memory, once both ends have agreed on it.
    """

    def __init__(self, engine: Engine, bulk: Bulk, devices: Devices, record: WorkerRecord, takes_at_once: int) -> None:
        """record: of the other end. takes_at_once: bytes of tensors that it takes in one message."""
        options = engine.options
        self.devices = devices
        self.shared: SharedMemory | None = None
        self._inline = Inline()
        self.channels: dict[int, Channel] = {BULK: bulk, INLINE: self._inline}
        self._engine = engine
        self._record = record
        self._takes_at_once = takes_at_once
        # Below so many bytes the buffers of a message go with its frame: a lone buffer, and several together.
        # What is no shorter than the other end takes is looked at, too.
        self._least_alone = min(options.min_shared_bytes, options.min_bulk_bytes, takes_at_once)
        self._least = min(shared.PACK_LEAST, self._least_alone)
        self._underway: dict[int, Sequence[_Given]] = {}  # of calls that may still be given up

    def share(self, channel: SharedMemory) -> None:
        """Both ends can share memory: from now on that channel is asked first. On the loop."""
        self.shared = channel
        # A new dictionary, and not a changed one: other threads may be looking through the old one just now.
        self.channels = {SHARED: channel, **self.channels}

    # --- giving -------------------------------------------------------------------------------------------------------

    def too_long_for_loop(self, buffers: Sequence[AnyBuffer]) -> bool:
        """Whether `prepare` would block the loop that runs in this thread, and another thread should call it."""
        on_loop = asyncio._get_running_loop() is self._engine.loop
        if not on_loop or self.shared is None or sum(map(len, buffers)) <= LOOP_COPY:
            return False
        return self.shared.to_copy([buffer for buffer in buffers if not isinstance(buffer, DeviceBuffer)]) > LOOP_COPY

    def rides(self, buffers: Sequence[Any]) -> bool:
        """Whether the buffers just go with the frame of their message, as a lone short one does.

        They are counted then, and `prepare` need not be called.
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
        """Give the buffers of a message to their channels. What it returns has to be posted or withdrawn.

        copy: whether the buffers may change as soon as this returns. Otherwise they are borrowed until they are
        written. Buffers on devices are never borrowed. copies: of buffers that other workers get, too.
        """
        host: Sequence[Any] = buffers
        sharing = self.shared
        if sharing is not None and len(host) == 1 and type(host[0]) is not DeviceBuffer:
            wire = sharing.send_one(host[0], copies)
            if wire is not None:  # a short cut through what follows: most large messages have one buffer
                lone = ((SHARED, wire),)
                try:
                    frame = encode_frame(PARCEL, call_id, pack((kind, lone, body)))  # a Parcel
                    size = len(host[0])
                    prepared: Prepared = _new(Prepared, (kind, call_id, body, frame, [frame], lone, size, False))
                    return prepared
                except BaseException:
                    self._withdraw(lone, named=False)
                    raise
            sharing = None  # it has refused the buffer, and need not be asked again
        if len(buffers) == 1 and type(buffers[0]) is DeviceBuffer:  # a short cut for these, too
            given: tuple[_Given, ...] = ()
            try:
                away, whole = self.devices.send_one(buffers[0])
                given = ((DEVICE, away),)
                frame = encode_frame(PARCEL, call_id, pack((kind, given, body)))
                return Prepared(kind, call_id, body, frame, [frame], given, away[2], not whole)
            except BaseException:
                self._withdraw(given, named=False)
                raise
        if DeviceBuffer in map(type, buffers):
            return self._prepare_with_devices(kind, call_id, body, buffers, copy)
        if sum(map(len, host)) < (self._least if len(host) > 1 else self._least_alone):
            if copy:
                host = [bytes(buffer) for buffer in host]
            self._inline.count(host)
            frame = encode_frame(kind, call_id, body, host)
            return Prepared(kind, call_id, body, frame, [frame], (), sum(map(len, host)))
        wires, riders = self._distribute(kind, body, host, copy, sharing is not None, copies)
        try:
            return self._prepared(kind, call_id, body, wires, riders, buffers)
        except BaseException:
            self._withdraw(_apart(wires), named=False)
            raise

    def _prepare_with_devices(
        self, kind: int, call_id: int, body: bytes, buffers: Sequence[AnyBuffer], copy: bool
    ) -> Prepared:
        away = [buffer for buffer in buffers if isinstance(buffer, DeviceBuffer)]
        host: list[Buffer] = [buffer for buffer in buffers if not isinstance(buffer, DeviceBuffer)]
        sent = self.devices.send(away, [])
        given: list[_Given] = []
        try:
            there = iter([(DEVICE, wire) for wire in sent])
            given, riders = self._distribute(kind, body, host, copy, self.shared is not None)
            here = iter(given)
            wires = [next(there if isinstance(buffer, DeviceBuffer) else here) for buffer in buffers]
            return self._prepared(kind, call_id, body, wires, riders, buffers)
        except BaseException:
            self._withdraw([*[(DEVICE, wire) for wire in sent], *_apart(given)], named=False)
            raise

    def _prepared(
        self,
        kind: int,
        call_id: int,
        body: bytes,
        wires: list[_Given],
        riders: list[Buffer],
        buffers: Sequence[AnyBuffer],
    ) -> Prepared:
        apart = _apart(wires)
        if apart:
            frame = encode_frame(PARCEL, call_id, write(messages.Parcel(kind, wires, body)), riders)
        else:
            frame = encode_frame(kind, call_id, body, riders)
        return Prepared(kind, call_id, body, frame, [frame], apart, sum(map(len, buffers)))

    def check_length(self, buffers: Sequence[Buffer], body: bytes) -> None:
        """Whether the other end takes so much that does not lie in shared memory. Raises SerializationError."""
        most, sizes = self._takes_at_once, list(map(len, buffers))
        size = sum(sizes)
        if size + len(body) + FRAME_COST <= most:
            return
        # The frame is held there, if any of them come apart from it.
        with_frame = sum([each for each in sizes if each < self._engine.options.min_bulk_bytes])
        if size > most or (with_frame < size and with_frame + len(body) + FRAME_COST > most):
            raise SerializationError(
                f"has {size} bytes of tensors, and {self._record.describe()} takes no more than {most} of one "
                "message (max_incoming_bytes)"
            )

    def _distribute(
        self, kind: int, body: bytes, buffers: Sequence[Buffer], copy: bool, share: bool, copies: Copies | None = None
    ) -> tuple[list[_Given], list[Buffer]]:
        """Give each buffer to the first channel that takes it: channel and wire of each, and the riders."""
        wires: list[Any] = [None] * len(buffers)
        riders: list[Buffer] = []
        sent: Sequence[Wire | None] = ()
        try:
            for code, channel in self.channels.items():
                sent = ()
                if code == SHARED and not share:
                    continue
                left = [index for index, wire in enumerate(wires) if wire is None]
                if not left:
                    break
                if code == BULK and kind != CHANNEL:  # before any of them leaves
                    self.check_length([buffers[index] for index in left], body)
                given = [bytes(buffers[index]) if copy and code != SHARED else buffers[index] for index in left]
                sharing = self.shared if code == SHARED else None
                sent = channel.send(given, riders) if sharing is None else sharing.send(given, riders, copies)
                for index, wire in zip(left, sent, strict=True):
                    if wire is not None:
                        wires[index] = code, wire
        except BaseException:
            given_away = [each for each in wires if each is not None]
            # What the last channel took, if a signal handler has raised before all of it was noted.
            given_away += [(code, wire) for wire in sent if wire is not None and (code, wire) not in given_away]
            self._withdraw(_apart(given_away), named=False)
            raise
        return wires, riders

    def remember(self, prepared: Prepared) -> list[Wire]:
        """A message is about to be sent: remember what of it may still be taken back.

        Returns the wires of its buffers on devices, of which the device channel is told once it is sent.
        """
        away: list[Wire] = []
        for code, wire in prepared.wires:
            if code == DEVICE:
                away.append(wire)
            elif code == BULK and prepared.call_id < PIECES:
                # Added to those that are there: each item of a stream is a message of the same call.
                self._underway[prepared.call_id] = [*self._underway.get(prepared.call_id, ()), (code, wire)]
        return away

    def arrived(self, buffers: Sequence[Buffer]) -> None:
        """Buffers have arrived with a frame that says nothing about channels: they are counted, as `rides` counts."""
        for buffer in buffers:
            self._inline.traffic._count_received(len(buffer))

    def _channel(self, code: int) -> Channel | Devices:
        return self.devices if code == DEVICE else self.channels[code]

    # --- taking back --------------------------------------------------------------------------------------------------

    def withdraw(self, prepared: Prepared) -> None:
        """That message will not be posted. Nothing if it has been, or was withdrawn already."""
        if not prepared.unsent:
            return
        prepared.unsent.clear()
        underway = self._underway.get(prepared.call_id)
        if underway is not None:
            self._underway[prepared.call_id] = [each for each in underway if each not in prepared.wires]
        self._withdraw(prepared.wires, named=False)

    def give_up(self, call_id: int) -> None:
        """Take back what was posted for that call, as far as it has not been written: nobody wants it any more."""
        self._withdraw(self._underway.pop(call_id, ()), named=True)
        if self.devices.busy:
            self.devices.give_up(call_id)

    def _withdraw(self, wires: Sequence[_Given], *, named: bool) -> None:
        for code, channel in self.channels.items():
            given_up = [wire for wire_code, wire in wires if wire_code == code]
            if given_up:
                channel.withdraw(given_up, named=named)
        away = [wire for code, wire in wires if code == DEVICE]
        if away:
            self.devices.withdraw(away, named=named)

    def all_sent(self) -> None:
        """All chunks are written, so nothing that was posted can be taken back any more."""
        self._underway.clear()

    # --- looking ------------------------------------------------------------------------------------------------------

    def traffic(self) -> dict[str, Traffic]:
        """What has gone by which channel, by its name."""
        return {channel.name: channel.traffic for channel in list(self.channels.values())} | self.devices.ways

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The link has ended. On the loop."""
        self._underway.clear()
        for channel in list(self.channels.values()):
            channel.close()


def _apart(wires: Sequence[_Given]) -> list[_Given]:
    """Those of the buffers that do not go with the frame."""
    return [(code, wire) for code, wire in wires if code != INLINE]
