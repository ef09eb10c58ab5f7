"""Who may publish a name: the worker that has entered a lease of it in the store of the group, until it is gone.

A lease is made once for each name and publisher. It is changed by compare and set, so two that lease a name at once are
told apart. A lease is taken over only when its worker is known to be gone, or has released it; the later lease has more
turns. One that was released stands in the store without an incarnation, and with the last version in place of the
first, so that the next publisher of the name counts on behind it.

The store also has a limit of each lease: its publisher raises it before its versions get there. So a worker that takes
a name over knows without asking any member that no version above the limit exists, and what members say of the newest
version counts up to the limit alone.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...errors import RpcUsageError
from ...protocol.identity import WorkerRecord
from ...protocol.publication import LAST_VERSION, Lease
from ..meeting.rendezvous import Rendezvous

#: How many versions a publisher may be ahead of what the store knows.
RESERVED = 1 << 16

_TRIES = 8
_RELEASED = ""  # in place of the incarnation of a worker


class StandingLease(NamedTuple):
    """What the store has of a name. limit: no version of that lease, or of one before, is higher."""

    lease: Lease
    incarnation: str
    limit: int


def make_lease(rendezvous: Rendezvous, name: str, record: WorkerRecord, newest: int, gone: set[int]) -> StandingLease:
    """Lease a name for a worker. Blocking, in bounds.

    newest: the newest version of that name that any member says it has, which counts up to the limit that stands in the
    store. gone: the ids of members whose leases do not count, as they are gone. Raises RpcUsageError if another worker
    has the name; RendezvousError if the store cannot be asked.
    """
    expected, turn, first = "", 1, 1
    for _ in range(_TRIES):
        mine = StandingLease(Lease(name, turn, record.id, record.name, first), record.incarnation, first + RESERVED)
        found = rendezvous.swap(f"published/{name}", expected, _text(mine))
        stands = _parse(rendezvous, name, found)
        if stands.incarnation == record.incarnation:
            return stands
        if not _is_gone(rendezvous, stands, gone):
            raise taken(name, stands.lease.worker, stands.lease.publisher)
        expected, turn = found, stands.lease.turn + 1
        first = min(max(newest, stands.lease.first), stands.limit) + 1
    raise RpcUsageError(f"{name!r} was leased by other workers {_TRIES} times in a row")


def raise_limit(rendezvous: Rendezvous, stands: StandingLease, limit: int) -> StandingLease:
    """The lease of this worker with a higher limit; as it was if the store holds another one by now. Blocking, in
    bounds. RendezvousError if the store cannot be asked."""
    higher = stands._replace(limit=limit)
    held = rendezvous.swap(f"published/{stands.lease.name}", _text(stands), _text(higher))
    return higher if held == _text(higher) else stands


def release_lease(rendezvous: Rendezvous, stands: StandingLease, last: int) -> None:
    """Make a name free that this worker has leased. last: its last version, 0 for none. Blocking, in bounds.

    Nothing if the store holds another lease by now. RendezvousError if the store cannot be asked.
    """
    last = max(last, 1)
    free = StandingLease(replace(stands.lease, first=last), _RELEASED, last)
    expected = _text(stands)
    for _ in range(_TRIES):
        held = rendezvous.swap(f"published/{stands.lease.name}", expected, _text(free), lasting=False)
        found = _parse(rendezvous, stands.lease.name, held) if held else free
        if found.incarnation != stands.incarnation:
            return
        expected = held  # its limit was raised, and the answer of the store was lost


def taken(name: str, worker: str, holder: int) -> RpcUsageError:
    """The error for a name that a worker, of that name and id, has."""
    return RpcUsageError(
        f"{name!r} is published by worker {worker!r} (id {holder}), and a name has one publisher: let that one "
        "publish, or take another name. When that worker has unpublished it, has left or was lost, the name is free"
    )


def find_lease(rendezvous: Rendezvous, name: str) -> StandingLease | None:
    """The lease to a name that stands in the store, whether its worker lives or not. Blocking, in bounds.

    None if no worker has ever had the name, or if the last one has released it. RendezvousError if the store cannot be
    asked, or holds what is no lease.
    """
    found = rendezvous.look_up(f"published/{name}")
    if found is None:
        return None
    stands = _parse(rendezvous, name, found)
    return None if stands.incarnation == _RELEASED else stands


def _text(stands: StandingLease) -> str:
    lease = stands.lease
    return json.dumps([lease.turn, lease.publisher, lease.worker, stands.incarnation, lease.first, stands.limit])


def _parse(rendezvous: Rendezvous, name: str, text: str) -> StandingLease:
    def shape(value: Any) -> StandingLease:
        turn, holder, worker, incarnation, first, limit = value
        if not type(turn) is type(holder) is type(first) is type(limit) is int:
            raise ValueError("no lease")
        if not type(worker) is type(incarnation) is str:
            raise ValueError("no lease")
        if not (0 < turn < LAST_VERSION and 0 <= holder <= LAST_VERSION and 0 < first <= limit < LAST_VERSION):
            raise ValueError("no numbers of a lease")
        return StandingLease(Lease(name, turn, holder, worker, first), incarnation, limit)

    return rendezvous.load(f"published/{name}", text, shape)


def _is_gone(rendezvous: Rendezvous, stands: StandingLease, gone: set[int]) -> bool:
    if stands.lease.publisher in gone or stands.incarnation == _RELEASED:
        return True
    # Of a free group the store knows who is in it; a member may have gone before this worker came.
    return rendezvous.dynamic and all(each.incarnation != stands.incarnation for each in rendezvous.members())
