"""The device channel in the registry of channels: what a worker announces of its devices, and the channel's context."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ...channels import ChannelContext, ChannelLink
from ...channels.accelerator import Event, Tensor
from ...channels.device import DIRECT, IPC, STAGING, Devices
from ...channels.device.messages import MESSAGES, Message
from ...channels.device.outbox import BoxEnd
from ...channels.routes import Route
from ...protocol.frames import Buffer
from .accelerators import Accelerators
from .channel_link import ChannelEnd
from .links import Links


class DeviceContext(ChannelContext):
    """See the module. A worker without devices has this channel, too: tensors from another worker's device may be sent
    to it, and answers may go to a device. The link opens it at once, and `introduced` settles the way."""

    name: str = Devices.name
    priority = 0
    on_devices = True

    def __init__(self, worker: Links) -> None:
        self._options = worker.engine.options
        self._accelerators = worker.accelerators

    @property
    def names(self) -> tuple[str, ...]:
        """One for each way."""
        return DIRECT, IPC, STAGING

    def descriptor(self, link: ChannelLink) -> object:
        """The devices here, and the opener's map."""
        return self._accelerators.descriptor(link.record.name, opener=link.opener)

    def obstacle(self, opener: object, acceptor: object) -> str:
        """Always empty: if there is no better way, buffers go through the host."""
        for each in (opener, acceptor):
            if type(each) is not dict:
                raise TypeError("it says nothing of devices")
        return ""

    def open(self, link: ChannelLink) -> Devices:
        """An end for the devices of the worker."""
        assert isinstance(link, ChannelEnd), "it belongs to a link of this package"
        accelerators, options = self._accelerators, self._options
        channel = Devices(
            accelerators.accelerator,
            LinkDevices(link, accelerators),
            way=accelerators.way(link.record),
            forced=options.device_channel == IPC,
            box_size=options.device_buffer,
            limit=options.max_tensor_bytes,
        )
        accelerators.add(channel, link.link.connection)
        return channel


class LinkDevices:
    """The surroundings of a link's device channel; see `device.surroundings.Surroundings`."""

    def __init__(self, end: ChannelEnd, accelerators: Accelerators) -> None:
        self._end = end
        self._accelerators = accelerators
        self._numbers = itertools.count(1)
        self._left: dict[int, tuple[Tensor, Event]] = {}  # for the other end, in this process
        self.in_background: Callable[..., None] = accelerators.in_background
        self.on_loop: Callable[..., None] = end.on_loop
        self.later: Callable[..., None] = end.later
        self.on_release: Callable[[], None] = end.watch

    def post(self, message: Message, *, more: bool = False) -> None:
        self._end.post(MESSAGES.write(message), more=more)

    def post_buffer(self, message: Message, buffer: Buffer) -> None:
        self._end.post_buffer(MESSAGES.write(message), buffer)

    def introduced(self, theirs: dict[str, Any]) -> tuple[Route | None, str, str]:
        record = self._end.record
        route = None if self._end.opener else self._accelerators.route_back(record.name, theirs)
        return route, *self._accelerators.choose(record, theirs)

    def on_chosen(self, way: str, reason: str) -> None:
        self._accelerators.on_chosen(self._end.record, way, reason)

    def hand_over(self, carrier: Tensor, event: Event) -> int:
        number = next(self._numbers)
        self._left[number] = (carrier, event)
        return number

    def take_over(self, number: int) -> tuple[Tensor, Event] | None:
        other = self._end.other_end()
        around = other.around if isinstance(other, Devices) else None
        return around._left.pop(number, None) if isinstance(around, LinkDevices) else None

    def take_back(self, number: int) -> None:
        self._left.pop(number, None)

    def hold(self, boxes: Sequence[BoxEnd]) -> None:
        self.on_loop(self._accelerators.hold, self._end.record, boxes)

    def ended(self, boxes: Sequence[BoxEnd]) -> None:
        self._left.clear()
        self._accelerators.ended(self._end.record, boxes)
