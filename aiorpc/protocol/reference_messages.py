"""What the reference tables of two workers say to each other, and what a table tells its runtime to do.

`docs/counting.md` has the table of messages; `references` says when each is sent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ProtocolError

Message = tuple[object, ...]
Wire = tuple[int, int, int, int, int]


class ReferenceId(NamedTuple):
    """A reference or a fork of one: the worker that named it, and that worker's running number."""

    worker: int
    number: int


class Tag(enum.IntEnum):
    """First item of every message between tables. What follows is in `FIELDS`."""

    ADD = 1
    ADDED = 2
    GONE = 3
    CHILD_OK = 4
    DEL = 5
    ASK = 6
    NEVER = 7
    ABANDON = 8


FIELDS: dict[Tag, tuple[type, ...]] = {
    Tag.ADD: (ReferenceId, ReferenceId),  # rref, fork
    Tag.ADDED: (ReferenceId, ReferenceId),  # rref, fork
    Tag.GONE: (ReferenceId, ReferenceId, str),  # rref, fork, reason
    Tag.CHILD_OK: (ReferenceId,),  # child
    Tag.DEL: (ReferenceId, ReferenceId),  # rref, fork
    Tag.ASK: (ReferenceId,),  # rref
    Tag.NEVER: (ReferenceId,),  # rref
    Tag.ABANDON: (ReferenceId, ReferenceId, bool, str),  # rref, fork, CREATE may still arrive, reason
}

FREED = "the owner has freed the value: a worker that passed the reference on was lost before the receiver was counted"
REFUSED = "the value will not be created"
UNSENT = "the call that was to create the value was never sent"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message`, a flat tuple of ints, bools and strings, to worker `to`, behind what it was sent before."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Free:
    """No holder is left, or the value will never come: drop it, also if it comes later; who waits for it here fails.

    May be said again for the same reference: when somebody registered after the value was freed, and was refused.
    """

    rref: ReferenceId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner counts this fork. Said at most once, and not after `drop`."""

    rref: ReferenceId
    fork: ReferenceId


@dataclass(frozen=True, slots=True)
class Broken:
    """This fork can never be used: pending and later uses fail with `reason`. Said at most once, not after `drop`."""

    rref: ReferenceId
    fork: ReferenceId
    reason: str


Output = Send | Free | Confirmed | Broken
Outputs = list[Output]


class Role(enum.StrEnum):
    """What a line of `ReferenceTable.live` is about."""

    OWNER = "owner"  # a handle here to a value here
    USER = "user"  # a handle here to a value elsewhere
    FORK = "fork"  # a handle elsewhere to a value here
    WAITING = "waiting"  # a handle elsewhere to a value whose creation has not arrived here
    TOMBSTONE = "tombstone"  # a value that will never exist here; its creator's last word is awaited


@dataclass(frozen=True, slots=True)
class Record:
    """One live reference as this worker knows it. `fork` is None, and `holder` the creator, for a tombstone.

    holder: worker id of who has the handle. pins: forks passed on that are not counted yet. dropped: the handle here
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
    placeholders: values whose creation is awaited. tombstones: values that will never exist.
    """

    owned: int
    users: int
    pending: int
    forks: int
    pins: int
    placeholders: int
    tombstones: int


def shortened(item: object) -> str:
    """A value as errors show it."""
    return f"{item!r:.100}"


def is_number(item: object) -> bool:
    """Whether it can be an id on the wire."""
    return type(item) is int and 0 <= item < 1 << 63


def compose(tag: Tag, fields: Sequence[object]) -> Message:
    """A message of that tag; `parse` gives tag and fields back."""
    message: list[object] = [int(tag)]
    for field in fields:
        if type(field) is ReferenceId:
            message += field
        else:
            message.append(field)
    return tuple(message)


def parse(message: object) -> tuple[Tag, list[object]]:
    """The tag and the fields of a message, or ProtocolError."""
    if not isinstance(message, (tuple, list)) or not message or isinstance(message[0], bool):
        raise ProtocolError(f"not a reference message: {shortened(message)}")
    try:
        tag = Tag(message[0])
    except ValueError:
        raise ProtocolError(f"unknown reference message {shortened(message[0])}") from None
    fields, items = [], list(message[1:])
    for kind in FIELDS[tag]:
        width = 2 if kind is ReferenceId else 1
        taken, items = items[:width], items[width:]
        fields.append(_field(kind, taken, tag))
    if items:
        raise ProtocolError(f"{tag.name} message is too long")
    return tag, fields


def _field(kind: type, taken: list[object], tag: Tag) -> object:
    if kind is ReferenceId and len(taken) == 2 and all(map(is_number, taken)):
        return ReferenceId(*taken)  # type: ignore[arg-type]  # checked on the line above
    if kind is not ReferenceId and taken and type(taken[0]) is kind:
        return taken[0]
    raise ProtocolError(f"{tag.name} message is malformed")
