"""What workers say to each other about published values, and which names and numbers there can be. Without I/O.

The messages are arguments and results of calls of the runtime's own. Each is packed into bytes (`write`), so that it is
the same with pickles and without them, and is compared with its declaration where it arrives (`read`).
"""

from __future__ import annotations

import math
import re
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta

from ..errors import ProtocolError, RpcUsageError
from .families import Family
from .frames import MAX_SEGMENTS
from .packing import pack, unpack

#: Characters that a name has less of.
NAME_LIMIT = 128
#: Versions that one message may say of a subscription: far more than it is lent, which copies what comes beyond a few.
VERSIONS_LIMIT = 4096
#: Versions count from 1 on, and go no further than this.
LAST_VERSION = (1 << 62) - 1
_NAME = rf"\A[A-Za-z0-9\-_:./]{{1,{NAME_LIMIT - 1}}}\Z"

Name = Annotated[str, Meta(pattern=_NAME)]
#: Numbers of versions, workers, subscriptions and bytes.
Number = Annotated[int, Meta(ge=0, le=LAST_VERSION)]
Span = Annotated[list[Number], Meta(min_length=2, max_length=2)]
Versions = Annotated[list[Number], Meta(max_length=VERSIONS_LIMIT)]


class Claim(NamedTuple):
    """Who may publish a name, as it stands in the store of the group, and as the one who may says to all members."""

    #: The name.
    name: Name
    #: How many have had the name, this one counted. Of two claims the one with more turns is the later one.
    turn: Number
    #: The id of the worker that has it.
    publisher: Number
    #: What that worker is called.
    worker: str
    #: Its first version.
    first: Number


class Unpublished(NamedTuple):
    """I do not publish that name any more: subscriptions to it end, and others may claim it."""

    name: Name
    #: That of the claim that has ended.
    turn: Number


class Want(NamedTuple):
    """Give me the newest version of that name, once it is newer than what I have."""

    name: Name
    #: The number of the subscription, at the worker that has it.
    subscription: Number
    #: The newest version that it has whole; 0 for none.
    have: Number
    #: Whether it can map memory of this host.
    maps: bool
    #: Versions that it does not use any more.
    released: Versions
    #: Whether it asks for all readers of its host, to fetch the version in pieces.
    leads: bool


class AskLeader(NamedTuple):
    """In place of a version: ask that worker, which fetches for all readers of your host; it may be you."""

    name: Name
    #: Its id.
    leader: Number
    #: The newest version that there is; 0 for none.
    newest: Number


class PieceWanted(NamedTuple):
    """Give me these bytes of a version, once you have them; they come as a tensor."""

    name: Name
    version: Number
    #: Where they begin, and how many they are.
    start: Number
    length: Number


class VersionArrived(NamedTuple):
    """I have that version whole. It has come from the worker that fetches for my host, which does not say so for me."""

    name: Name
    subscription: Number
    version: Number


class StillFetching(NamedTuple):
    """I go on fetching for the readers of my host."""

    name: Name


class VersionsReleased(NamedTuple):
    """Nobody uses these versions of that subscription any more."""

    name: Name
    #: 0 for what the worker has fetched in pieces, and does not fetch from here any more.
    subscription: Number
    versions: Versions


class SubscriptionClosed(NamedTuple):
    """That subscription has ended; tensors of these versions are still alive."""

    name: Name
    subscription: Number
    held: Versions


class SlotOffer(NamedTuple):
    """The memory file that a version lies in."""

    #: The number of the slot, at its owner.
    slot: Number
    #: Its file descriptor in the process that answers.
    fd: Number
    #: Bytes of the file.
    size: Number
    #: What it begins with.
    nonce: bytes


class Edition(NamedTuple):
    """A version, as it is given to one reader: how it is to be read, and where its bytes are."""

    version: Annotated[int, Meta(ge=1, le=LAST_VERSION)]
    #: The id of the worker that has published it, and what that is called.
    publisher: Number
    worker: str
    #: How many bytes all of its buffers take together.
    size: Number
    #: Where each of its buffers begins in them, and how long it is.
    spans: Annotated[list[Span], Meta(max_length=MAX_SEGMENTS)]
    #: Where the bytes are; nil if they come with the answer.
    offer: SlotOffer | None
    #: Whether the reader is to copy them and release them at once, because it has not released others.
    copy: bool
    #: The numbers of all slots that the worker has: the reader unmaps the others.
    slots: list[Number]
    #: The main module of the worker that has published it: others read the second form of what it says of its value.
    main: str
    #: For who leads: the worker that has the pieces, or will have them; nil for others.
    source: Number | None
    #: The roles of the worker that has published it and of those that have handed it on, as the one who answers knows.
    roles: list[str]


class LatestWanted(NamedTuple):
    """What do you have of that name?"""

    name: Name


class LeaveWanted(NamedTuple):
    """May I publish that name, as far as you would read it?"""

    name: Name


class DigestWanted(NamedTuple):
    """What is the digest of that version that you have published?"""

    name: Name
    version: Number


class Latest(NamedTuple):
    """What the worker has of that name."""

    name: Name
    #: The newest version that it has published or read; 0 for none.
    newest: Number
    #: The newest one that it can hand on, although it has not published it; 0 for none.
    kept: Number


Message = (
    LatestWanted
    | LeaveWanted
    | DigestWanted
    | Latest
    | Claim
    | Unpublished
    | Want
    | AskLeader
    | PieceWanted
    | VersionArrived
    | StillFetching
    | VersionsReleased
    | SubscriptionClosed
    | Edition
)
M = TypeVar("M", bound=Message)
MESSAGES: Family[Message] = Family(
    "published values",
    {
        "latest wanted": LatestWanted,
        "leave wanted": LeaveWanted,
        "digest wanted": DigestWanted,
        "latest": Latest,
        "claim": Claim,
        "unpublished": Unpublished,
        "want": Want,
        "ask": AskLeader,
        "piece": PieceWanted,
        "arrived": VersionArrived,
        "fetching": StillFetching,
        "released": VersionsReleased,
        "closed": SubscriptionClosed,
        "edition": Edition,
    },
)


def write(message: Message) -> bytes:
    """The message as it travels."""
    return pack(MESSAGES.write(message))


def read(declared: type[M], said: object) -> M:
    """The message of that class that somebody has sent. Raises ProtocolError for anything else."""
    message = read_any(said)
    if not isinstance(message, declared):
        raise ProtocolError(f"a {type(message).__name__} about published values, in place of a {declared.__name__}")
    return message


def read_any(said: object) -> Message:
    """The message that somebody has sent. Raises ProtocolError for what is none."""
    if type(said) is not bytes:
        raise ProtocolError(f"a message about published values that is none: {type(said).__name__}")
    message = MESSAGES.read(unpack(said))
    if isinstance(message, Edition) and any(start + length > message.size for start, length in message.spans):
        raise ProtocolError("a buffer outside of the version that it is part of")
    return message


def is_name(name: object) -> bool:
    """Whether something can be published under that name."""
    return isinstance(name, str) and re.search(_NAME, name) is not None


def check_name(name: object) -> str:
    """Return the name if something can be published under it; RpcUsageError otherwise."""
    if not isinstance(name, str) or not is_name(name):
        raise RpcUsageError(
            f"what is published has a name of less than {NAME_LIMIT} letters, digits, '-', '_', ':', '.' and '/', "
            f"not {name!r:.150}"
        )
    return name


def needed(quorum: float | None, readers: int) -> int:
    """How many readers a quorum is: a number of them, or a share above 0 and up to 1.0 of those there are; None: all.

    A share is one reader at least, where there is any. Raises RpcUsageError for what is neither.
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
    """How many of so many a share asks for, rounded up: one at least, where there is any."""
    return min(members, max(1, math.ceil(share * members - 1e-9)))  # of ten 0.3 are three, not four
