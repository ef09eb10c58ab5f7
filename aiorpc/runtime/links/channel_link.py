"""The interface of a link for one of its channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...channels import Channel
from ...protocol.frames import Buffer
from ...protocol.identity import WorkerRecord
from ...transport.connection import Connection
from ..engine.engine import Engine
from .returns import Returns

# Messages of channels with a buffer are numbered from here on; calls have smaller numbers.
PIECES = 1 << 63


class LinkFacts(Protocol):
    """What each part of a link knows of it."""

    @property
    def engine(self) -> Engine: ...

    @property
    def connection(self) -> Connection: ...

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def opener(self) -> bool: ...


class LinkForChannels(LinkFacts, Protocol):
    """What the ends of channels need of a link."""

    @property
    def returns(self) -> Returns: ...

    @property
    def pieces(self) -> itertools.count[int]: ...

    def other_end(self) -> LinkForChannels | None:
        """The other end of the link, if it is in this process."""

    def channel(self, number: int) -> Channel | None:
        """The channel of that number, if the link has it."""

    def say(self, channel: int, fields: list[object], *, more: bool = False) -> None:
        """Send a message of a channel."""

    def post_piece(self, channel: int, number: int, fields: list[object], buffer: Buffer) -> None:
        """Send a message of a channel, with a buffer."""

    def give_back(self, channel: int, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """Give borrowed blocks or slots back to the other end."""


class ChannelEnd:
    """See `channels.ChannelLink`. number: the channel's number in messages of this link."""

    def __init__(self, link: LinkForChannels, number: int) -> None:
        self.link = link
        self.number = number
        self.record: WorkerRecord = link.record
        self.opener: bool = link.opener
        self.local: bool = link.connection.local
        self.watch: Callable[[], None] = link.returns.watch
        self.on_loop: Callable[..., None] = link.engine.call_on_loop
        self.in_background: Callable[..., None] = link.engine.in_background

    def post(self, fields: list[object], *, more: bool = False) -> None:
        """See `ChannelLink`."""
        self.link.say(self.number, fields, more=more)

    def post_buffer(self, fields: list[object], buffer: Buffer) -> None:
        """See `ChannelLink`."""
        self.link.post_piece(self.number, next(self.link.pieces), fields, buffer)

    def give_back(self, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """See `ChannelLink`."""
        self.link.give_back(self.number, released, more=more)

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """See `ChannelLink`."""
        self.on_loop(self.link.engine.loop.call_later, seconds, function, *args)

    def other_end(self) -> Channel | None:
        """The other end of the channel, if it is in this process. On the loop."""
        other = self.link.other_end()
        return None if other is None else other.channel(self.number)
