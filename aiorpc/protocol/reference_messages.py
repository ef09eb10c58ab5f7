"""The messages between the reference tables of two workers, and the outputs of a table for its runtime.

`docs/inside/counting.md` has the table of messages; `references` sends them.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, NamedTuple

from msgspec import Meta

from .families import Family

LARGEST = (1 << 63) - 1  # of the numbers in an id; a key has one bit more
_KEYS = struct.Struct("=512Q")
Number = Annotated[int, Meta(ge=0, le=LARGEST)]


class ReferenceId(NamedTuple):
    """A reference or a fork of one."""

    #: The worker that named it.
    worker: Number
    #: That worker's running number.
    number: Number
    #: Random for a reference: a worker that was not given it cannot name it. 0 for a fork, which is useless alone.
    key: Annotated[int, Meta(ge=0)] = 0

    def __repr__(self) -> str:
        """Without the key, which must not get into logs and errors."""
        return f"({self.worker}, {self.number})"


LENT = ReferenceId(0, 0, 1)  # in place of a fork, which never has a key: this handle is not counted


def unguessable() -> Iterator[int]:
    """Keys of references. One call in C takes each; it asks the system for many at once."""
    return chain.from_iterable(map(_KEYS.unpack, iter(partial(os.urandom, _KEYS.size), None)))


def fork_of_creator(rref: ReferenceId) -> ReferenceId:
    """The fork of the worker that has named a reference."""
    return ReferenceId(rref.worker, rref.number + 1)


class PassedReference(NamedTuple):
    """A remote reference inside of a call, a result or an item of a stream."""

    rref: ReferenceId
    #: The worker that has the value.
    owner: Number
    #: The receiver's fork, which the sender has named; (0, 0, 1), `LENT`, for a reference that a call lends to its
    #: owner, and keeps until the call has ended.
    fork: ReferenceId
    #: Its position among the values; nil if it is inside a pickled one.
    position: int | None = None


def all_lent(passed: Sequence[PassedReference]) -> bool:
    """Whether none of these is counted, so no message about them will follow."""
    return all(each.fork == LENT for each in passed)


class Add(NamedTuple):
    """Count this fork, which another worker than you has passed to me."""

    rref: ReferenceId
    fork: ReferenceId


class Added(NamedTuple):
    """That fork is counted."""

    rref: ReferenceId
    fork: ReferenceId


class Gone(NamedTuple):
    """That fork cannot be counted, or does not count any more: there is no value for it."""

    rref: ReferenceId
    fork: ReferenceId
    #: For users of the reference.
    reason: str


class ChildOk(NamedTuple):
    """The fork that you have passed to me is counted, or will never be: you need not keep yours for it."""

    child: ReferenceId


class Del(NamedTuple):
    """The last handle of that fork has died here."""

    rref: ReferenceId
    fork: ReferenceId


class Ask(NamedTuple):
    """Have you created that reference, which another worker wants to have counted?"""

    rref: ReferenceId


class Never(NamedTuple):
    """No call of mine will create that reference any more."""

    rref: ReferenceId


class Abandon(NamedTuple):
    """I have given up the creation of that reference."""

    rref: ReferenceId
    fork: ReferenceId
    #: Whether the call that creates it may still arrive.
    coming: bool
    #: For other users of the reference.
    reason: str


Message = Add | Added | Gone | ChildOk | Del | Ask | Never | Abandon

MESSAGES: Family[Message] = Family(
    "references",
    {
        "ADD": Add,
        "ADDED": Added,
        "GONE": Gone,
        "CHILD_OK": ChildOk,
        "DEL": Del,
        "ASK": Ask,
        "NEVER": Never,
        "ABANDON": Abandon,
    },
)

FREED = "the owner has freed the value: a worker that passed the reference on was lost before the receiver was counted"
PASSED_TWICE = "the worker that passed the reference on has given the same fork of it to another worker, too"
REFUSED = "the value will not be created"
# Characters of a reason that are kept and passed on: there may be one for each reference.
REASON_LIMIT = 1000
UNSENT = "the call that was to create the value was never sent"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to worker `to`, after all earlier ones."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Free:
    """No holder is left, or the value will never come: drop it, even if it comes later, and fail those who wait here.

    May be repeated for the same reference: a worker may register after the value was freed, and is refused.
    """

    rref: ReferenceId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner counts this fork. At most once, and not after `drop`."""

    rref: ReferenceId
    fork: ReferenceId


@dataclass(frozen=True, slots=True)
class Broken:
    """This fork can never be used: pending and later uses fail with `reason`. At most once, not after `drop`."""

    rref: ReferenceId
    fork: ReferenceId
    reason: str


Output = Send | Free | Confirmed | Broken
Outputs = list[Output]


class Role(enum.StrEnum):
    """The kind of an entry of `ReferenceTable.live`."""

    OWNER = "owner"  # a handle here to a value here
    USER = "user"  # a handle here to a value elsewhere
    FORK = "fork"  # a handle elsewhere to a value here
    WAITING = "waiting"  # a handle elsewhere to a value whose creation has not arrived here
    TOMBSTONE = "tombstone"  # a value that will never exist here; its creator's last message is awaited


@dataclass(frozen=True, slots=True)
class Record:
    """One live reference as this worker knows it. `fork` is None, and `holder` the creator, for a tombstone.

    holder: id of the worker with the handle. pins: forks passed on that are not counted yet. dropped: the handle here
    has died, and the fork waits for its confirmation or its pins.
    """

    rref: ReferenceId
    owner: int
    fork: ReferenceId | None
    role: Role
    holder: int
    confirmed: bool
    pins: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a table; all 0 when nothing is referred to.

    owned: values that exist here. users: handles here to values elsewhere. pending: handles here not confirmed yet.
    forks: handles the owner side counts, those here included. pins: forks passed on that are not counted yet.
    placeholders: values whose creation is awaited. tombstones: values that will never exist. granted: of `forks`, those
    that were counted when this worker, the owner, passed them on.
    """

    owned: int
    users: int
    pending: int
    forks: int
    pins: int
    placeholders: int
    tombstones: int
    granted: int = 0


def read(fields: list[object]) -> Message:
    """The message with these fields. Raises ProtocolError."""
    message = MESSAGES.read(fields)
    if isinstance(message, Gone | Abandon) and len(message.reason) > REASON_LIMIT:
        message = message._replace(reason=message.reason[:REASON_LIMIT])
    return message
