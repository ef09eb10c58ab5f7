"""Who may publish a name: the worker that has entered a lease of it in the store of the group, until it is gone.

A lease is made once for each name and publisher. The store changes it by compare and set, so of two workers that lease
a name at once one wins. A worker takes a lease over only if its holder is known to be gone or has released it; the
later lease has more turns. A released lease stays in the store without an incarnation, and with the last version in
place of the first: the next publisher counts on from there.

The store also has a limit of each lease: its publisher raises it before its versions get there. So a worker that takes
a name over knows without asking any member that no version above the limit exists, and ignores higher numbers that
members report.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...errors import RpcUsageError
from ...protocol.identity import WorkerRecord
from ...protocol.publication import LAST_VERSION, Lease
from ..meeting.rendezvous import Rendezvous

#: How many versions a publisher may be ahead of the limit's last raise.
RESERVED = 1 << 16

_TRIES = 8
_RELEASED = ""  # in place of the incarnation of a worker


class StandingLease(NamedTuple):
    """The store's entry for a name. limit: no version of this or an earlier lease is higher."""

    lease: Lease
    incarnation: str
    limit: int


def make_lease(rendezvous: Rendezvous, name: str, record: WorkerRecord, newest: int, gone: set[int]) -> StandingLease:
    """Lease a name for a worker. Blocking, in bounds.

    newest: the newest version that any member reports; it counts up to the limit in the store. gone: the ids of gone
    members, whose leases do not count. Raises RpcUsageError if another worker has the name; RendezvousError if the
    store cannot be asked.
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
    """Raise the limit of this worker's lease; returns the lease, unchanged if the store holds another one by now.
    Blocking, in bounds. Raises RendezvousError if the store cannot be asked.
    """
    higher = stands._replace(limit=limit)
    held = rendezvous.swap(f"published/{stands.lease.name}", _text(stands), _text(higher))
    return higher if held == _text(higher) else stands


def release_lease(rendezvous: Rendezvous, stands: StandingLease, last: int) -> None:
    """Release this worker's lease of a name. last: its last version, 0 for none. Blocking, in bounds.

    Does nothing if the store holds another lease by now. Raises RendezvousError if the store cannot be asked.
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
    """The error for a name that another worker publishes. worker, holder: its name and id."""
    return RpcUsageError(
        f"{name!r} is published by worker {worker!r} (id {holder}), and a name has one publisher: let that one "
        "publish, or take another name. When that worker has unpublished it, has left or was lost, the name is free"
    )


def find_lease(rendezvous: Rendezvous, name: str) -> StandingLease | None:
    """The lease to a name in the store, whether its worker lives or not. Blocking, in bounds.

    None if no worker has ever had the name, or if the last one has released it. Raises RendezvousError if the store
    cannot be asked, or holds no valid lease.
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
    # The store knows the members of a free group; the holder may have gone before this worker joined.
    return rendezvous.dynamic and all(each.incarnation != stands.incarnation for each in rendezvous.members())
