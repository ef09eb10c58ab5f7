"""A link, as one of its channels sees it."""

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

# Messages of channels that have a buffer are numbered from here on, so that their numbers are never those of calls.
PIECES = 1 << 63


class LinkForChannels(Protocol):
    """A link, as far as its channels are concerned."""

    @property
    def engine(self) -> Engine: ...

    @property
    def connection(self) -> Connection: ...

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def opener(self) -> bool: ...

    @property
    def returns(self) -> Returns: ...

    @property
    def pieces(self) -> itertools.count[int]: ...

    def other_end(self) -> LinkForChannels | None:
        """The other end of the link, if that is in this process."""

    def channel(self, number: int) -> Channel | None:
        """The channel of that number, if the link has it."""

    def say(self, channel: int, fields: list[object], *, more: bool = False) -> None:
        """Send what a channel says."""

    def post_piece(self, channel: int, number: int, fields: list[object], buffer: Buffer) -> None:
        """Send what a channel says, with a buffer."""

    def give_back(self, channel: int, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """Tell the other end that these are its own again."""


class ChannelEnd:
    """See `channels.ChannelLink`. number: by which the messages of this link name the channel."""

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
        """See `ChannelLink`, as of all others."""
        self.link.say(self.number, fields, more=more)

    def post_buffer(self, fields: list[object], buffer: Buffer) -> None:
        """As above."""
        self.link.post_piece(self.number, next(self.link.pieces), fields, buffer)

    def give_back(self, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """As above."""
        self.link.give_back(self.number, released, more=more)

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """As above."""
        self.on_loop(self.link.engine.loop.call_later, seconds, function, *args)

    def other_end(self) -> Channel | None:
        """The other end of the channel, if that is in this process. On the loop."""
        other = self.link.other_end()
        return None if other is None else other.channel(self.number)
