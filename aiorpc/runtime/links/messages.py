"""The messages between the two ends of a link about the link itself: on channel 0 of CHANNEL."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.families import Family

# The receiver of a message on CHANNEL: the link itself or one of its channels. PARCEL and RELEASE use the same numbers.
# The channels of other packages are numbered by each link (`channel_registry`).
LINK, SHARED, BULK, INLINE, DEVICE = range(5)


class Introduce(NamedTuple):
    """The channels that the sender can use. It comes first."""

    #: For each channel, by its name, its descriptor for the other end.
    channels: dict[str, object]


class Pipe(NamedTuple):
    """About the second connection. From the acceptor: it needs one. From the opener: there will be none."""

    #: Why there will be none; empty from the acceptor.
    reason: str


class Attach(NamedTuple):
    """From the opener, first on a second connection."""


Message = Introduce | Pipe | Attach
MESSAGES: Family[Message] = Family("a link", {"hello": Introduce, "pipe": Pipe, "attach": Attach})
