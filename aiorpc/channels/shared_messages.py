"""What the two ends of a shared-memory channel say to each other, and what a message says of a buffer that goes so."""

from __future__ import annotations

from typing import NamedTuple

from ..protocol.families import Family


class SegmentOffer(NamedTuple):
    """Map this segment of my arena; I should like to send through it."""

    #: The number of the segment.
    segment: int
    #: Its file descriptor in the process that offers it.
    fd: int
    #: Its size in bytes.
    size: int
    #: What it begins with: whoever finds that has mapped the same memory.
    nonce: bytes


class Mapped(NamedTuple):
    """That is done, and the nonce was there: blocks of the segment may come."""

    segment: int


class SegmentRefused(NamedTuple):
    """It cannot be done: send the bytes another way."""

    segment: int
    #: Why, for a log.
    reason: str


class Warm(NamedTuple):
    """These pages of a segment are there now; have them in your tables before you need them."""

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
    """In a PARCEL: a buffer that is a block of an arena by itself."""

    segment: int
    #: Where the block begins in the segment, in bytes.
    offset: int
    #: Its size in bytes.
    size: int
    #: Which of the allocations in that place it is.
    generation: int
    #: 1 if the receiver should copy it out at once, so that the block can be used again; 2 if others have the block as
    #: well, and the receiver maps it for itself alone; else 0.
    copy_out: int


class LentPart(NamedTuple):
    """In a PARCEL: a buffer that shares its block with others of the same message. It begins as Lent does."""

    segment: int
    #: As of Lent.
    offset: int
    size: int
    generation: int
    copy_out: int
    #: Where the buffer begins in the block, in bytes.
    start: int
    #: Its size in bytes.
    length: int
