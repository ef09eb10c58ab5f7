"""Messages some of whose buffers come apart from their frame: held until they are whole, or have failed.

The states of such a message are the table `protocol.states.MESSAGE`. While one is held, later frames of the same call
wait behind it: the receiver sees the messages of a call in their order; other calls do not wait. All on the loop.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from ...channels import Channel
from ...channels.landing import Landing
from ...errors import ProtocolError, RpcError
from ...protocol.frames import Buffer, Frame
from ...protocol.messages import Parcel
from ...protocol.states import MESSAGE, MessageEvent, MessageState
from ...transport.send_queue import FRAME_COST
from .accelerators import Accelerators
from .distribution import Distribution


class Message(Frame):
    """A message that was put together. landing: where its buffers on devices arrive."""

    landing: Landing | None = None


class Assembly:
    """A message that waits for buffers, and the frames behind it. size: bytes that all of these take. since: when it
    began to wait (``time.monotonic()`` seconds)."""

    __slots__ = ("behind", "buffers", "failure", "landing", "missing", "parcel", "since", "size", "state")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel: Parcel = parcel
        self.buffers: list[Any] = [None] * len(parcel.wires)
        self.missing: int = 0
        self.failure: Exception | None = None
        self.landing: Landing | None = None
        self.behind: list[Frame] = []
        self.size: int = 0
        self.since: float = time.monotonic()
        self.state: MessageState = MESSAGE.initial

    def enter(self, event: MessageEvent) -> None:
        """Apply an event to its state."""
        self.state = MESSAGE.next(self.state, event)


class LinkForReassembly(Protocol):
    """The link whose messages these are."""

    @property
    def accelerators(self) -> Accelerators: ...

    @property
    def distribution(self) -> Distribution: ...

    def deliver(self, message: Message, assembly: Assembly) -> None:
        """A held message is whole, or has failed: hand it over, and the frames behind it."""


class Reassembly:
    """Of one link. held: the messages that wait, by call. limit: bytes that these and the frames behind may take."""

    def __init__(self, link: LinkForReassembly, limit: int = 1 << 62) -> None:
        self.held: dict[int, Assembly] = {}
        self._link = link
        self._limit = limit
        self._size = 0

    def open(self, frame: Frame, parcel: Parcel) -> Message | None:
        """The message in an envelope; None if it has to wait, and is delivered later. Raises ProtocolError."""
        held = Assembly(parcel)
        try:
            channels = self._link.distribution.channels
            if any(channels[code].on_devices for code, _ in parcel.wires):
                self._receive_on_devices(frame, held)
            else:
                self._receive(frame, held)
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise ProtocolError(f"{frame} is malformed: {type(error).__name__}: {error}") from None
        if held.state is MessageState.OPENED:
            held.enter(_first_event(held))
        if held.state is MessageState.HANDED_OVER:
            return _message(frame.call_id, held)
        self._keep(frame, held)
        self.held[frame.call_id] = held
        self._hand_over(frame.call_id, held)
        return None

    def put_behind(self, frame: Frame, held: Assembly) -> None:
        """Hand that frame over after the held message. Raises ProtocolError."""
        self._keep(frame, held)
        held.behind.append(frame)

    def _keep(self, frame: Frame, held: Assembly) -> None:
        size = FRAME_COST + len(frame.body) + sum(map(len, frame.segments))
        held.size += size
        self._size += size
        if self._size > self._limit:
            raise ProtocolError(
                f"{self._size} bytes of messages have come that wait for buffers, or behind one that does; the limit "
                f"is {self._limit} (max_incoming_bytes)"
            )

    def open_one(self, frame: Frame, parcel: Parcel, channel: Channel) -> Message | None:
        """The message in an envelope with one buffer for a device, which is here; None if that fails: then it is
        delivered as failed. Not only on the loop. Raises ProtocolError."""
        try:
            landing = self._link.accelerators.land()
        except RuntimeError:
            return self.open(frame, parcel)
        assert landing is not None, "a box is open"
        entered = False
        try:
            with landing.entered():
                entered = True
                buffer = channel.receive_one(parcel.wires[0][1], landing)
        except ProtocolError:
            raise
        except (RpcError, RuntimeError) as error:  # an error of the device fails this message alone
            if not entered:
                return self.open(frame, parcel)
            held = Assembly(parcel)
            held.failure = error
            held.enter(MessageEvent.LAST_FAILED)
            self._link.deliver(_message(frame.call_id, held), held)
            return None
        message = Message(parcel.kind, frame.call_id, parcel.body, [buffer])
        message.landing = landing
        return message

    def _receive_on_devices(self, frame: Frame, held: Assembly) -> None:
        landing: Landing | None = None
        entered = False
        try:
            landing = held.landing = self._link.accelerators.land()
        except RuntimeError as error:  # receive it nevertheless: its sender waits, and others have lent memory
            held.failure = error
        try:
            with landing.entered() if landing is not None else nullcontext():
                entered = True
                self._receive(frame, held)
        except RuntimeError as error:
            if isinstance(error, ProtocolError):
                raise
            if not entered:  # receive it nevertheless
                held.failure = error
                self._receive(frame, held)
                return
            held.missing, held.failure = 0, error  # an error of the device fails this message alone
            held.enter(MessageEvent.DEVICE_FAILED)

    def _receive(self, frame: Frame, held: Assembly) -> None:
        """Ask each channel for its buffers, and store those that it has."""
        by = self._link.distribution
        places_by: dict[int, list[int]] = {}
        for place, (code, _) in enumerate(held.parcel.wires):
            places_by.setdefault(code, []).append(place)
        for code, places in sorted(places_by.items()):
            arrived = partial(self._arrived, frame.call_id, held, places)
            held.missing += len(places)
            channel = by.channels[code]
            wires = [wire for each, wire in held.parcel.wires if each == code]
            buffers = channel.receive(wires, frame.segments, arrived)
            for place, buffer in zip(places, buffers, strict=True):
                if buffer is not None:
                    held.buffers[place] = buffer
                    held.missing -= 1

    def _arrived(
        self, call_id: int, held: Assembly, places: list[int], index: int, outcome: Buffer | Exception
    ) -> None:
        """A channel has one more buffer, or the reason why it is lost."""
        if held.state in MESSAGE.final:  # failed with its device, or dropped with the link
            return
        held.missing -= 1
        failed = isinstance(outcome, Exception)
        if isinstance(outcome, Exception):
            held.failure = outcome
        else:
            held.buffers[places[index]] = outcome
        if held.state is not MessageState.OPENED:  # `open` decides when all channels have been asked
            if held.missing:
                held.enter(MessageEvent.ONE_FAILED if failed else MessageEvent.ONE_CAME)
            else:
                held.enter(MessageEvent.LAST_FAILED if failed else MessageEvent.LAST_CAME)
        self._hand_over(call_id, held)

    def _hand_over(self, call_id: int, held: Assembly) -> None:
        if held.state in MESSAGE.final and self.held.get(call_id) is held:
            del self.held[call_id]
            self._size -= held.size
            self._link.deliver(_message(call_id, held), held)

    def close(self) -> None:
        """The link has ended: drop what is held."""
        for held in self.held.values():
            held.enter(MessageEvent.CLOSED)
        self.held.clear()
        self._size = 0


def _first_event(held: Assembly) -> MessageEvent:
    """The event after all channels have been asked."""
    if held.failure is not None:
        return MessageEvent.ONE_FAILED if held.missing else MessageEvent.LAST_FAILED
    return MessageEvent.SOME_MISSING if held.missing else MessageEvent.ALL_THERE


def _message(call_id: int, held: Assembly) -> Message:
    message = Message(held.parcel.kind, call_id, held.parcel.body, held.buffers)
    message.landing = held.landing
    return message
