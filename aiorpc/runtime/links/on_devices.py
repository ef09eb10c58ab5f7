"""The part of a link that is for tensors on devices: its device channel, and where their copies arrive.

Buffers on devices never ride with the frame of their message. Pieces of them that go by way of the CPU are messages of
the link themselves, with numbers of their own (`PIECES`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from ...channels.accelerator import Event, Tensor
from ...channels.device import Devices
from ...channels.device.messages import MESSAGES, Message
from ...channels.device.outbox import BoxEnd
from ...channels.routes import Route
from ...errors import ProtocolError
from ...protocol.frames import Buffer, Frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import ChannelMessage, write
from ...transport.send_queue import Unsent
from ..engine.engine import Engine
from .accelerators import Accelerators
from .messages import DEVICE
from .returns import Returns

# Messages that bring pieces of tensors on devices have numbers from here on, so that they are never those of calls.
PIECES = 1 << 63


class LinkForDevices(Protocol):
    """A link, as its part for devices sees it."""

    route_back: Route | None

    @property
    def engine(self) -> Engine: ...

    @property
    def accelerators(self) -> Accelerators: ...

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def opener(self) -> bool: ...

    def other_end(self) -> LinkForDevices | None:
        """The other end of the link, if that is in this process."""

    @property
    def on_devices(self) -> LinkDevices: ...

    @property
    def returns(self) -> Returns: ...

    def say(self, channel: int, fields: list[object], *, more: bool = False, unsent: Unsent | None = None) -> None:
        """Send what a channel says."""

    def post_piece(self, number: int, body: bytes, buffer: Buffer) -> None:
        """Send a message of the link itself that has a buffer."""


class LinkDevices:
    """See the module. It is what the device channel knows of the link, too."""

    def __init__(self, link: LinkForDevices) -> None:
        options, accelerators = link.engine.options, link.accelerators
        self._link = link
        self._accelerators = accelerators
        self._pieces = itertools.count(PIECES)
        self._numbers = itertools.count(1)
        self._left: dict[int, tuple[Tensor, Event]] = {}  # for the other end, in the same process
        self.in_background: Callable[..., None] = accelerators.in_background
        self.on_loop: Callable[..., None] = link.engine.call_on_loop
        self.on_release: Callable[[], None] = link.returns.watch
        self.channel: Devices = Devices(
            accelerators.accelerator,
            self,
            way=accelerators.way(link.record),
            forced=options.device_channel == "ipc",
            box_size=options.device_buffer,
            limit=options.max_tensor_bytes,
        )

    # --- for the link, on the loop ------------------------------------------------------------------------------------

    def descriptor(self) -> dict[str, object]:
        """What the other end is told about our devices."""
        return self._accelerators.descriptor(self._link.record.name, opener=self._link.opener)

    def choose(self, theirs: object) -> None:
        """The other end has told about its devices: choose a way. Raises ProtocolError."""
        if type(theirs) is not dict:
            raise ProtocolError(f"a worker that says of its devices {theirs!r:.40}")
        if not self._link.opener:
            self._link.route_back = self._accelerators.route_back(self._link.record.name, theirs)
        self.channel.choose(*self._accelerators.choose(self._link.record, theirs))

    def on_frame(self, frame: Frame, fields: list[object], failure: Exception | None) -> None:
        """A CHANNEL frame for the device channel. failure: why its buffer cannot be had. Raises ProtocolError."""
        if frame.call_id < PIECES:
            self.channel.on_message(fields)
        elif failure is None and len(frame.segments) != 1:
            raise ProtocolError(f"{frame}, a piece of a tensor that has not one buffer")
        else:
            self.channel.on_piece(fields, failure or frame.segments[0])

    def close(self) -> None:
        """The link has ended."""
        self.channel.close()
        self._left.clear()

    # --- for the channel, see its protocol ----------------------------------------------------------------------------

    def post(self, message: Message, *, more: bool = False, unsent: Unsent | None = None) -> None:
        self._link.say(DEVICE, MESSAGES.write(message), more=more, unsent=unsent)

    def post_buffer(self, message: Message, buffer: Buffer) -> None:
        self._link.post_piece(next(self._pieces), write(ChannelMessage(DEVICE, MESSAGES.write(message))), buffer)

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        self.on_loop(self._link.engine.loop.call_later, seconds, function, *args)

    def on_chosen(self, way: str, reason: str) -> None:
        self._accelerators.on_chosen(self._link.record, way, reason)

    def hand_over(self, carrier: Tensor, event: Event) -> int:
        number = next(self._numbers)
        self._left[number] = (carrier, event)
        return number

    def take_over(self, number: int) -> tuple[Tensor, Event] | None:
        other = self._link.other_end()
        return None if other is None else other.on_devices._left.pop(number, None)

    def take_back(self, number: int) -> None:
        self._left.pop(number, None)

    def hold(self, boxes: Sequence[BoxEnd]) -> None:
        self.on_loop(self._accelerators.hold, self._link.record, boxes)

    def ended(self, boxes: Sequence[BoxEnd]) -> None:
        self._accelerators.ended(self._link.record, boxes)
