"""The messages about published values, and their limits. Without I/O.

The messages are arguments and results of calls of the runtime's own, as MessagePack arrays of their fields. Each is
read by its declaration: a call with an invalid one ends with ProtocolError.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeVar

from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, encode

from ..errors import ProtocolError, RpcUsageError
from .frames import MAX_SEGMENTS
from .identity import NAME_LIMIT as WORKER_NAME_LIMIT
from .trace_context import TraceContext

#: Characters that a name has less of.
NAME_LIMIT = 128
#: Versions of a subscription that one message may name: far more than are lent, as further ones are copied.
VERSIONS_LIMIT = 4096
#: Versions count from 1 to this.
LAST_VERSION = (1 << 62) - 1
_NAME = re.compile(r"[A-Za-z0-9\-_:./]+")

M = TypeVar("M")
_Name = Annotated[str, Meta(max_length=NAME_LIMIT - 1, pattern=rf"\A{_NAME.pattern}\Z")]
_Worker = Annotated[str, Meta(max_length=WORKER_NAME_LIMIT)]
_Number = Annotated[int, Meta(ge=0, le=LAST_VERSION)]
_Versions = Annotated[list[_Number], Meta(max_length=VERSIONS_LIMIT)]
_Span = Annotated[list[_Number], Meta(min_length=2, max_length=2)]
_Spans = Annotated[list[_Span], Meta(max_length=MAX_SEGMENTS)]


class Lease(Struct, frozen=True, array_like=True):
    """The right to publish a name: in the store of the group, and in the publisher's message to all members."""

    #: The name.
    name: _Name
    #: How many have had the name, including this one. Of two leases the later one has more turns.
    turn: _Number
    #: The id of the worker that has it.
    publisher: _Number
    #: The name of that worker.
    worker: _Worker
    #: Its first version.
    first: _Number


class Unpublished(Struct, frozen=True, array_like=True):
    """The sender does not publish that name any more: subscriptions to it end, and others may lease it."""

    name: _Name
    #: That of the lease that has ended.
    turn: _Number


class Want(Struct, frozen=True, array_like=True):
    """Ask for the newest version of that name, once it is newer than `have`."""

    name: _Name
    #: The number of the subscription, at the subscriber.
    subscription: _Number
    #: The newest version that the subscriber has whole; 0 for none.
    have: _Number
    #: Whether it can map memory of this host.
    maps: bool
    #: Versions that it does not use any more.
    released: _Versions
    #: Whether it fetches the version in pieces, for all readers of its host.
    leads: bool


class AskLeader(Struct, frozen=True, array_like=True, tag=0):
    """Instead of a version: ask the worker that fetches for all readers of your host; it may be you."""

    name: _Name
    #: Its id.
    leader: _Number
    #: The newest version that there is; 0 for none.
    newest: _Number


class PieceWanted(Struct, frozen=True, array_like=True):
    """Ask for these bytes of a version, once the receiver has them; they come as a tensor."""

    name: _Name
    version: _Number
    #: Where they begin, and how many they are.
    start: _Number
    length: _Number


class VersionArrived(Struct, frozen=True, array_like=True):
    """The sender has that version whole. It came from the host's leader, which does not report it."""

    name: _Name
    subscription: _Number
    version: _Number


class StillFetching(Struct, frozen=True, array_like=True):
    """The sender goes on fetching for the readers of its host."""

    name: _Name


class VersionsReleased(Struct, frozen=True, array_like=True):
    """These versions of that subscription are not used any more."""

    name: _Name
    #: 0 for versions that the worker has fetched in pieces, and does not fetch from here any more.
    subscription: _Number
    versions: _Versions


class SubscriptionClosed(Struct, frozen=True, array_like=True):
    """That subscription has ended; tensors of these versions are still alive."""

    name: _Name
    subscription: _Number
    held: _Versions


class SlotOffer(Struct, frozen=True, array_like=True):
    """The memory file that a version lies in."""

    #: The number of the slot, at its owner.
    slot: _Number
    #: Its file descriptor in the process that answers.
    fd: _Number
    #: Bytes of the file.
    size: _Number
    #: The first bytes of the file.
    nonce: bytes


class Edition(Struct, frozen=True, array_like=True, tag=1):
    """A version for one reader: how to read it, and where its bytes are."""

    version: Annotated[int, Meta(ge=1, le=LAST_VERSION)]
    #: The id of the worker that has published it, and its name.
    publisher: _Number
    worker: _Worker
    #: The bytes of all of its buffers together.
    size: _Number
    #: Where each of its buffers begins in them, and how long it is.
    spans: _Spans
    #: Where the bytes are; nil if they come with the answer.
    offer: SlotOffer | None
    #: Whether the reader must copy them and release them at once, because it has not released others.
    copy: bool
    #: The numbers of all slots that the worker has: the reader unmaps the others.
    slots: _Versions
    #: The main module of the publisher: readers with another one read the second form of the value's description.
    main: str
    #: For a leader: the worker that has the pieces, or will have them; nil for others.
    source: _Number | None
    #: The roles of the publisher and of those that have handed it on, as the answering worker knows them.
    roles: list[_Worker]
    #: The trace context in which it was published; nil for none.
    trace: TraceContext | None = None

    def __post_init__(self) -> None:
        if any(start + length > self.size for start, length in self.spans):
            raise ValueError("a buffer outside of the version that it is part of")


class LatestWanted(Struct, frozen=True, array_like=True):
    """Ask for the versions that the receiver has of that name."""

    name: _Name


class LeaveWanted(Struct, frozen=True, array_like=True):
    """Ask whether the receiver's rights allow the sender to publish that name."""

    name: _Name


class DigestWanted(Struct, frozen=True, array_like=True):
    """Ask for the digest of a version that the receiver has published."""

    name: _Name
    version: _Number


class Latest(Struct, frozen=True, array_like=True):
    """The versions that the sender has of that name."""

    name: _Name
    #: The newest version that it has published or read; 0 for none.
    newest: _Number
    #: The newest one that it can hand on without having published it; 0 for none.
    kept: _Number


MESSAGES = (
    LatestWanted,
    LeaveWanted,
    DigestWanted,
    Latest,
    Lease,
    Unpublished,
    Want,
    AskLeader,
    PieceWanted,
    VersionArrived,
    StillFetching,
    VersionsReleased,
    SubscriptionClosed,
    Edition,
)
#: Decoders of answers, which no handler declares.
LATEST: Decoder[Latest] = Decoder(Latest)
EDITION: Decoder[Edition] = Decoder(Edition)
VERSION: Decoder[Edition | AskLeader] = Decoder(Edition | AskLeader)


def write(message: Struct) -> bytes:
    """The message in bytes."""
    return encode(message)


def read(decoder: Decoder[M], answer: object) -> M:
    """The message in another worker's answer. Raises ProtocolError for anything else."""
    try:
        return decoder.decode(answer)  # type: ignore[arg-type]  # it raises TypeError for what has no bytes
    except (MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"an answer about published values is malformed: {error!s:.200}") from None


def is_name(name: object) -> bool:
    """Whether something can be published under that name."""
    return isinstance(name, str) and len(name) < NAME_LIMIT and _NAME.fullmatch(name) is not None


def check_name(name: object) -> str:
    """Return the name if something can be published under it; RpcUsageError otherwise."""
    if not isinstance(name, str) or not is_name(name):
        raise RpcUsageError(
            f"what is published has a name of less than {NAME_LIMIT} letters, digits, '-', '_', ':', '.' and '/', "
            f"not {name!r:.150}"
        )
    return name


def needed(quorum: float | None, readers: int) -> int:
    """How many readers a quorum is: a number of them, or a share above 0 and up to 1.0 of all readers; None: all.

    A share is at least one reader, if there are any. Raises RpcUsageError for other values.
    """
    if quorum is None:
        return readers
    if isinstance(quorum, bool) or not isinstance(quorum, (int, float)) or not quorum > 0:
        raise RpcUsageError(f"quorum is a number of readers, or a share of them up to 1.0, not {quorum!r:.80}")
    if isinstance(quorum, int):
        return quorum
    if quorum > 1:
        raise RpcUsageError(f"quorum={quorum!r} is no share, which is at most 1.0; a number of readers is an int")
    return share_of(quorum, readers)


def share_of(share: float, members: int) -> int:
    """A share of so many, rounded up: at least one, if there are any."""
    return min(members, max(1, math.ceil(share * members - 1e-9)))  # of ten 0.3 are three, not four
