"""What the two ends of a link say to each other about the link itself: on channel 0 of CHANNEL."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.families import Family

# Who a message on CHANNEL is for, the link itself or one of its channels; these have the same numbers in PARCELs and
# RELEASEs. The channels of other packages are numbered by each link (`channel_registry`).
LINK, SHARED, BULK, INLINE, DEVICE = range(5)


class Introduce(NamedTuple):
    """What channels I can use. It comes first."""

    #: For each channel, by its name, what its other end has to know.
    channels: dict[str, object]


class Pipe(NamedTuple):
    """About the second connection. From the acceptor: I need one. From the opener: there will be none, for a reason."""

    #: Empty from the acceptor.
    reason: str


class Attach(NamedTuple):
    """From the opener, first on a second connection: here it is."""


Message = Introduce | Pipe | Attach
MESSAGES: Family[Message] = Family("a link", {"hello": Introduce, "pipe": Pipe, "attach": Attach})
