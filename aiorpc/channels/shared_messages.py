"""The messages between the two ends of a shared-memory channel, and the descriptors of buffers that travel on it."""

from __future__ import annotations

from typing import NamedTuple

from ..protocol.families import Family


class SegmentOffer(NamedTuple):
    """Map this segment of the sender's arena; the sender wants to send through it."""

    #: The number of the segment.
    segment: int
    #: Its file descriptor in the process that offers it.
    fd: int
    #: Its size in bytes.
    size: int
    #: The first bytes of the segment, which prove that the receiver has mapped the same memory.
    nonce: bytes


class Mapped(NamedTuple):
    """The segment is mapped, and the nonce was there: blocks of the segment may come."""

    segment: int


class SegmentRefused(NamedTuple):
    """The segment cannot be mapped: send the bytes another way."""

    segment: int
    #: Why, for a log.
    reason: str


class Warm(NamedTuple):
    """These pages of a segment are present now: map them before they are needed."""

    segment: int
    #: Where they begin, in bytes.
    start: int
    #: How many bytes they are.
    size: int


Message = SegmentOffer | Mapped | SegmentRefused | Warm
MESSAGES: Family[Message] = Family(
    "shared memory", {"offer": SegmentOffer, "mapped": Mapped, "refused": SegmentRefused, "warm": Warm}
)


class Lent(NamedTuple):
    """In an envelope: a buffer that is a block of an arena by itself."""

    segment: int
    #: Where the block begins in the segment, in bytes.
    offset: int
    #: Its size in bytes.
    size: int
    #: The number of the allocation in that place.
    generation: int
    #: 0: use it in place. 1: copy it out at once, as the sender needs the block. 2: map it privately, as others have
    #: the block, too.
    copy_out: int


class LentPart(NamedTuple):
    """In an envelope: a buffer that shares its block with others of the same message. It begins with Lent's fields."""

    segment: int
    #: See Lent.
    offset: int
    size: int
    generation: int
    copy_out: int
    #: Where the buffer begins in the block, in bytes.
    start: int
    #: Its size in bytes.
    length: int
