"""Who may publish a name: whoever has entered a claim to it in the store of the group, until that worker is gone.

A claim is made once for each name and publisher. It is changed by compare and set, so two that claim a name at once are
told apart. A claim is taken over only when its worker is known to be gone, or has released it; the later claim has more
turns. One that was released stands in the store without an incarnation, and with the last version in place of the
first, so that whoever claims the name next counts on behind it.
"""

from __future__ import annotations

import json
from typing import Any

from ...errors import RpcUsageError
from ...protocol.identity import WorkerRecord
from ...protocol.publication import LAST_VERSION, Claim
from ..meeting.rendezvous import Rendezvous

_TRIES = 8
_RELEASED = ""  # in place of the incarnation of a worker


def make_claim(rendezvous: Rendezvous, name: str, record: WorkerRecord, newest: int, gone: set[int]) -> Claim:
    """Claim a name for a worker. Blocking, in bounds.

    newest: the newest version of that name that any member is known to have. gone: the ids of members that are. Raises
    RpcUsageError if another worker has the name; RendezvousError if the store cannot be asked.
    """
    expected, turn, first = "", 1, newest + 1
    for _ in range(_TRIES):
        mine = json.dumps([turn, record.id, record.name, record.incarnation, first])
        found = rendezvous.swap(f"published/{name}", expected, mine)
        if found == mine:
            return Claim(name, turn, record.id, record.name, first)
        turn, holder, worker, incarnation, begun = _parse(rendezvous, name, found)
        if incarnation == record.incarnation:
            return Claim(name, turn, record.id, record.name, begun)
        if not _is_gone(rendezvous, holder, incarnation, gone):
            raise taken(name, worker, holder)
        expected, turn, first = found, turn + 1, max(newest, begun) + 1
    raise RpcUsageError(f"{name!r} was claimed by other workers {_TRIES} times in a row")


def release_claim(rendezvous: Rendezvous, claim: Claim, record: WorkerRecord, last: int) -> None:
    """Make a name free that this worker has claimed. last: its last version, 0 for none. Blocking, in bounds.

    Nothing if the store holds another claim by now. RendezvousError if the store cannot be asked.
    """
    mine = json.dumps([claim.turn, record.id, record.name, record.incarnation, claim.first])
    free = json.dumps([claim.turn, record.id, record.name, _RELEASED, max(last, 1)])
    rendezvous.swap(f"published/{claim.name}", mine, free, lasting=False)


def taken(name: str, worker: str, holder: int) -> RpcUsageError:
    """The error for a name that a worker, of that name and id, has."""
    return RpcUsageError(
        f"{name!r} is published by worker {worker!r} (id {holder}), and a name has one publisher: let that one "
        "publish, or take another name. When that worker has unpublished it, has left or was lost, the name is free"
    )


def find_claim(rendezvous: Rendezvous, name: str) -> Claim | None:
    """The claim to a name that stands in the store, whether its worker lives or not. Blocking, in bounds.

    None if nobody has ever had the name, or if the last one who had it has released it.
    """
    found = rendezvous.look_up(f"published/{name}")
    if found is None:
        return None
    turn, holder, worker, incarnation, first = _parse(rendezvous, name, found)
    if incarnation == _RELEASED:
        return None
    return Claim(name, turn, holder, worker, first)


def _parse(rendezvous: Rendezvous, name: str, text: str) -> tuple[int, int, str, str, int]:
    def shape(value: Any) -> tuple[int, int, str, str, int]:
        turn, holder, worker, incarnation, first = value
        if not type(turn) is type(holder) is type(first) is int or not type(worker) is type(incarnation) is str:
            raise ValueError("no claim")
        if not (0 < turn < LAST_VERSION and 0 < first < LAST_VERSION):
            raise ValueError("no numbers of a claim")
        return turn, holder, worker, incarnation, first

    return rendezvous.load(f"published/{name}", text, shape)


def _is_gone(rendezvous: Rendezvous, holder: int, incarnation: str, gone: set[int]) -> bool:
    if holder in gone or incarnation == _RELEASED:
        return True
    # Of a free group the store knows who is in it; a member may have gone before this worker came.
    return rendezvous.dynamic and all(each.incarnation != incarnation for each in rendezvous.members())
