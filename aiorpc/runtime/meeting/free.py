"""Agreeing on who is in a group that workers join and leave at any time, on top of a key-value store.

Blocking; every wait polls within a `Patience`. The keys are those of the first generation: ``1/roster`` is the list of
the members, and ``1/ids`` counts those to whom an id was given.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...devices import DeviceClaims, check_device_maps
from ...errors import RendezvousError
from ...locks import Lock
from ...logs import logger
from ...protocol.identity import ID_LIMIT, WorkerRecord
from ...protocol.ids import IdSet
from ...protocol.leaving import REMEMBERED
from ..engine.host import host_identity, provably_dead
from .fixed import check_unmixed
from .key_value import KeyValueClient
from .membership import Member, Proof, same_process
from .patience import Patience

# So many workers may join in the time between two looks at the list, and more.
_LEAP = 1024
MakeRecord = Callable[[int], WorkerRecord]


class _Roster(NamedTuple):
    """The list, as it stands in the store. used: the ids of those who left while others stayed.

    left: the incarnations of the last ones who have struck themselves off.
    """

    version: int = 0
    members: Sequence[Member] = ()
    used: IdSet = IdSet()
    left: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        """The form `from_json` reads."""
        members = [member.to_json() for member in self.members]
        return {"version": self.version, "members": members, "used": self.used.ranges(), "left": [*self.left]}

    @classmethod
    def from_json(cls, value: Any) -> _Roster:
        """The list; ValueError, TypeError or LookupError if something else stands there."""
        version, members, left = value["version"], value["members"], value["left"]
        if type(version) is not int or type(members) is not list or type(left) is not list:
            raise ValueError("no roster")
        found = [Member.from_json(item) for item in members]
        return cls(version, found, IdSet.from_ranges(value["used"]), ["" + each for each in left])


def _ids(members: Sequence[Member]) -> IdSet:
    return IdSet(member.record.id for member in members)


class FreeWorld:
    """A group that workers join and leave at any time.

    All who are in it stand in one list under one key, oldest first, changed by compare and set: names and ids are
    unique because each change sees the whole list. A member that died on this host is dropped by the next to join.
    """

    generation = 1
    _ROSTER = "1/roster"

    def __init__(self, kv: KeyValueClient, rank: int | None, *, proof: Proof) -> None:
        self.kv = kv
        self.rank = rank
        self.proof = proof
        self._here = host_identity()
        self._lock = Lock()  # several threads look at the list
        self.newest: _Roster = _Roster()  # that was seen of the list
        self.struck: set[str] = set()  # incarnations of those who are gone, whether the store heard of it or not
        self._own: Member | None = None  # this worker, as it stood in the list last, and with whom
        self._beside = _Roster()
        self._off_since: float | None = None  # when it was first seen that others have struck it off
        self._leaves = self._replaced = False

    def join(
        self, make_record: MakeRecord, claims: DeviceClaims, patience: Patience, made: WorkerRecord | None = None
    ) -> list[Member]:
        """Enter the list under a free id; the members there are now.

        made: what was made before, when the store was not reached any more: it may have entered the list by that.
        RendezvousError if the name or rank is taken, or a group of fixed size lives here. DeviceMapError if the claims
        do not fit with those of the others.
        """
        check_unmixed(self.kv, self._here, patience, lambda: make_record(self.rank or 0).describe())
        if made is not None and any(member.record == made for member in self._read().members):
            record = made
        else:
            record = make_record(self._free_id() if self.rank is None else self.rank)

        def enter(members: list[Member], used: IdSet) -> list[Member]:
            # Its own is there already where it has not heard so, as the connection to the store broke.
            alive = [member for member in self.alive(members) if member.record != record]
            if alive and record.id in used:
                raise RendezvousError(
                    f"rank {record.id} belonged to a worker that has left this group, and its members remember it; "
                    f"leave the rank of {record.name} out, or give another"
                )
            for member in alive:
                member.check(self.proof.key, self.generation)
            for other in (member.record for member in alive):
                if other.name == record.name:
                    hint = same_process(other, record)
                    raise RendezvousError(
                        f"name {record.name!r} is not unique: {other.describe()} has it. {hint}".strip()
                    )
                if other.id == record.id:
                    raise RendezvousError(f"rank {record.id} is taken by {other.describe()}, so {record.name} cannot")
            members = [*alive, self.proof.member(record, claims, self.generation)]
            check_device_maps({member.record.name: member.claims for member in members}, fixed=False)
            return members

        return self._change(enter, patience)

    def founded(self) -> bool:
        """Whether anybody has ever been in this list."""
        return self.kv.has(self._ROSTER)

    def leave(self, record: WorkerRecord) -> None:
        """Take a record off the list; nothing happens if it is not there."""
        self._strike_off(record)

    def say_farewell(self, record: WorkerRecord) -> None:
        """This worker, whose record that is, leaves in good order."""
        self._leaves = True
        self._strike_off(record, leaver=record.incarnation)

    def _strike_off(self, record: WorkerRecord, leaver: str = "") -> None:
        def strike(members: list[Member], _: IdSet) -> list[Member]:
            return [member for member in members if member.record.incarnation != record.incarnation]

        if any(member.record.incarnation == record.incarnation for member in self._read().members):
            self._change(strike, Patience(10.0), leaver=leaver)

    def stay(self, record: WorkerRecord, seconds: float, *, parted: bool) -> None:
        """Enter the list again if others have struck this worker, whose record that is, off it for so many seconds.

        Whoever cannot reach a member strikes it off. The others may reach it, but no joining member would find it any
        more.
        parted: it has lost all whom it knew. Then those who stand in the list go on without it. Of somebody who has its
        name or its id meanwhile it is told once.
        """
        roster, now = self.newest, time.monotonic()
        own = next((member for member in roster.members if member.record.incarnation == record.incarnation), None)
        if own is not None:
            self._own, self._beside, self._off_since = own, roster, None
            return
        self._off_since = now if self._off_since is None else self._off_since
        out = self._leaves or self._replaced or (parted and self.alive(roster.members))
        if self._own is None or out or now < self._off_since + seconds:
            return
        back, remember = self._own, self._beside.used.union(_ids(self._beside.members))
        successors: list[WorkerRecord] = []

        def enter(members: list[Member], _: IdSet) -> list[Member]:
            there = [member.record for member in self.alive(members)]
            successors[:] = [other for other in there if record.name == other.name or record.id == other.id]
            return members if self._leaves or successors else [*members, back]

        self._change(enter, Patience(10.0), remember=remember)
        self._off_since = None
        said = "worker %s was struck off the list of its group by a member that cannot reach it; %s"
        if successors and successors[0].incarnation != record.incarnation:
            self._replaced = True
            there_now = f"{successors[0].describe()} stands there now, and joining members find that"
            logger.warning(said, record.name, there_now)
        elif not successors and not self._leaves:
            logger.warning(said, record.name, "it lives, and has entered that again, so that joining members find it")

    def has_left(self, record: WorkerRecord) -> bool:
        """Whether it has taken itself off the list, as one of the last who did."""
        return record.incarnation in self._read().left

    def resume(
        self, before: FreeWorld, record: WorkerRecord, patience: Patience, written: Mapping[str, str] | None = None
    ) -> bool:
        """Enter the list of the store that was there before into this one, or this worker into the list that is here.

        before: this worker's view of that store. written: what this worker had set under other keys there, which comes
        first, so that whoever finds this worker finds that as well. False if others have begun a group of their own
        here. RendezvousError if somebody has joined here under this worker's name.
        """
        _, old, used, _ = before.newest
        self._own, self._beside = before._own, before._beside
        self.struck |= before.struck
        known = {member.record.incarnation for member in old}
        stay = [member for member in old if member.record.incarnation not in self.struck]
        taken = used.union(_ids(old))
        # This worker may not have seen the last ones who came: the next id is one that none of them can have.
        self.kv.swap("1/ids", "", str((max(taken, default=-1) // _LEAP + 2) * _LEAP))
        here = self._read().members
        if here and not any(member.record.incarnation in known for member in here):
            return False
        self._check_name(here, record)
        for key, value in (written or {}).items():
            if self.kv.swap(f"{self.generation}/{key}", "", value) != value:
                logger.warning("worker %s: somebody else has set %s at the store that is here now", record.name, key)

        def enter(members: list[Member], _: IdSet) -> list[Member]:
            self._check_name(members, record)
            there = {member.record.incarnation for member in members}
            back = [member for member in stay if not members or member.record.incarnation == record.incarnation]
            return [*members, *(member for member in back if member.record.incarnation not in there)]

        self._change(enter, patience, remember=taken)
        return True

    def _check_name(self, members: Sequence[Member], record: WorkerRecord) -> None:
        """RendezvousError if another member that may live has this worker's name.

        It came before this one was heard of here: whoever entered the list may not have known of this one yet.
        """
        for other in (member.record for member in self.alive(members)):
            if other.name == record.name and other.incarnation != record.incarnation:
                raise RendezvousError(
                    f"{other.describe()} has joined under the name of {record.describe()}, while that was not heard of "
                    "there: a name leads to one worker. End one of the two, or give it another name"
                )

    abandon = say_farewell  # it is in the list as soon as it has joined, and others may have found it there

    def members(self) -> list[Member]:
        """Who is in the list now, oldest first. RendezvousError if one does not bear the seal of AIORPC_SECRET."""
        members = self._read().members
        for member in self.alive(members):
            member.check(self.proof.key, self.generation)
        # Of the dead some may be left of another group.
        return [member for member in members if member.is_known(self.proof.key, self.generation)]

    def alive(self, members: Sequence[Member]) -> list[Member]:
        """Those of the members that are not known to be dead."""
        return [member for member in members if not provably_dead(member.record, self._here)]

    def _free_id(self) -> int:
        """A number no member has or had; the counter never goes back."""
        _, members, used, _ = self._read()
        taken = used.union(_ids(members))
        while (candidate := self.kv.count("1/ids") - 1) in taken:
            pass
        if candidate >= ID_LIMIT:
            raise RendezvousError(
                f"{ID_LIMIT} workers have joined this group, or have tried to, each under an id of its own: there are "
                "no more. Meet at another port, or remove the rendezvous file"
            )
        return candidate

    def _change(
        self,
        change: Callable[[list[Member], IdSet], list[Member]],
        patience: Patience,
        remember: IdSet = IdSet(),  # noqa: B008  # nobody adds to it
        leaver: str = "",
    ) -> list[Member]:
        """Replace the list by what `change` makes of it and of the ids that left; the new list.

        remember: ids that were used in the list of an earlier store. leaver: the incarnation of who leaves by this.
        """
        before = self.kv.get(self._ROSTER) or ""
        for _ in patience.tries():
            version, old, used, gone = self._parse(before)
            members = change([*old], used)
            # Those who were there remember the ids of those who left. With nobody left, all may be used again.
            stay = {member.record.id for member in members}
            left = IdSet(member.record.id for member in old if member.record.id not in stay)
            used = (used.union(left) if self._any_stay(old, members) else IdSet()).union(remember)
            # The version makes each text unique, so a list that changed and changed back is still seen to differ.
            gone = [*gone, leaver][-REMEMBERED:] if leaver and leaver not in gone else gone
            changed = _Roster(version + 1, members, used, gone)
            after = json.dumps(changed.to_json())
            held = self.kv.swap(self._ROSTER, before, after)
            if held == after:
                self._keep(changed)
                return members
            before = held
        raise RendezvousError(f"the list of workers could not be changed within {patience.seconds:g} s")

    @staticmethod
    def _any_stay(old: Sequence[Member], new: Sequence[Member]) -> bool:
        before = {member.record.incarnation for member in old}
        return any(member.record.incarnation in before for member in new)

    def _read(self) -> _Roster:
        """The list as it stands in the store."""
        roster = self._parse(self.kv.get(self._ROSTER) or "")
        self._keep(roster)
        return roster

    def _keep(self, roster: _Roster) -> None:
        with self._lock:  # a thread that has read before may come later
            if roster.version >= self.newest.version:
                self.newest = roster
                # Who is gone and not in the list any more needs not be kept out of it.
                self.struck.intersection_update({member.record.incarnation for member in roster.members})

    def _parse(self, text: str) -> _Roster:
        return self.kv.load(self._ROSTER, text, _Roster.from_json) if text else _Roster()
