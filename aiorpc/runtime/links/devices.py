"""The part of a link that is for tensors on devices: its device channel, and where their copies arrive.

Buffers on devices never ride with the frame of their message. Pieces of them that go by way of the CPU are messages of
the link themselves, with numbers of their own (`PIECES`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...channels.accelerator import Event, Tensor
from ...channels.device import Devices
from ...channels.device.outbox import Inbox, Outbox
from ...channels.routes import returning
from ...errors import ProtocolError
from ...protocol.codec import pack
from ...protocol.frames import Buffer, Frame, Kind
from ..engine.current import registry
from .accelerators import Handover

if TYPE_CHECKING:
    from .link import Link

# The channel's number in CHANNEL and PARCEL frames; those of the others are in link.py.
DEVICE = 4
# Added to the numbers of messages that bring pieces of tensors on devices: not those of calls.
PIECES = 1 << 63


class LinkDevices:
    """See the module. It is what the device channel knows of the link, too."""

    def __init__(self, link: Link) -> None:
        options, accelerators = link.worker.options, link.worker.accelerators
        self._link = link
        self._accelerators = accelerators
        self._pieces = itertools.count(PIECES)
        self._handover = Handover()
        self.in_background = accelerators.in_background
        self.on_loop = link.worker.call_on_loop
        self.on_release = link.flush_later
        self.channel = Devices(
            accelerators.accelerator,
            self,
            way=accelerators.way(link.record),
            forced=options.device_channel == "ipc",
            box_size=options.device_buffer,
            limit=options.max_tensor_bytes,
        )

    # --- for the link, on the loop ------------------------------------------------------------------------------------

    def descriptor(self) -> dict[str, Any]:
        """What the other end is told of our devices."""
        return self._accelerators.descriptor(self._link.record.name, opener=self._link.opener)

    def choose(self, theirs: Any) -> None:
        """The other end has told of its devices. Raises ProtocolError."""
        if type(theirs) is not dict:
            raise ProtocolError(f"a worker that says of its devices {theirs!r:.40}")
        if not self._link.opener:
            names = self._accelerators.their_map(theirs)
            self._link.route_back = returning(self._accelerators.accelerator, names, self._link.record.name) or None
        self.channel.choose(*self._accelerators.choose(self._link.record, theirs))

    def on_frame(self, frame: Frame, fields: list[Any], failure: Exception | None) -> None:
        """A CHANNEL frame for the device channel. failure: why its buffer cannot be had. Raises ProtocolError."""
        if frame.call_id < PIECES:
            self.channel.on_message(fields)
        else:
            self.channel.on_piece(fields, failure or frame.segments[0])

    def close(self) -> None:
        """The link has ended."""
        self.channel.close()
        self._handover.clear()

    def _other_end(self) -> LinkDevices | None:
        """Of this link, if that is in this process."""
        link = self._link
        for worker in registry.workers():
            if worker.record.incarnation == link.record.incarnation:
                other = worker.find_link(link.worker.record, link.number, opener=not link.opener)
                return None if other is None else other.on_devices
        return None

    # --- for the channel, see its protocol ----------------------------------------------------------------------------

    def post(self, fields: list[Any], *, more: bool = False) -> None:
        self._link.say([DEVICE, *fields], more=more)

    def post_buffer(self, fields: list[Any], buffer: Buffer) -> None:
        link = self._link
        link.post(link.prepare(Kind.CHANNEL, next(self._pieces), pack([DEVICE, *fields]), [buffer]))

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        self.on_loop(self._link.worker.loop.call_later, seconds, function, *args)

    def on_chosen(self, way: str, reason: str) -> None:
        self._accelerators.on_chosen(self._link.record, way, reason)

    def hand_over(self, carrier: Tensor, event: Event) -> int:
        return self._handover.leave(carrier, event)

    def take_over(self, number: int) -> tuple[Tensor, Event] | None:
        other = self._other_end()
        return None if other is None else other._handover.take(number)

    def take_back(self, number: int) -> None:
        self._handover.take(number)

    def ended(self, outboxes: Sequence[Outbox], inboxes: Sequence[Inbox]) -> None:
        self._accelerators.ended(self._link.record, outboxes, inboxes)
