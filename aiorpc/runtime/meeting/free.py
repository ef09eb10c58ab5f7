"""Agreeing on who is in a group that workers join and leave at any time, on top of a key-value store.

Blocking; every wait polls within a `Patience`. The keys are those of generation 1: ``1/roster`` is the list of the
members, ``1/ids`` counts the ids given out, and ``1/changes`` the changes of the list, so that a regular look reads one
number while nothing changes.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...devices import DeviceClaims, check_device_maps
from ...errors import RendezvousError
from ...locks import Lock
from ...logs import logger
from ...protocol.identity import ID_LIMIT, WorkerRecord
from ...protocol.ids import IdSet
from ..engine.host import host_identity, provably_dead
from .fixed import check_unmixed
from .key_value import KeyValueClient
from .membership import Member, Proof, same_process
from .patience import Patience

# More than the workers that can join between two looks at the list.
_LEAP = 1024
# Seconds that one worker takes to enter the list, about; and the longest wait for a turn.
_TURN, _LONGEST_TURN = 0.004, 1.0
# Seconds of the first pause of workers that change the list at once; each further one may be twice as long.
_FIRST_PAUSE = 0.005
# The list is read again after so many looks without a change: who changed it may have died before it counted that.
_LOOKS = 20
MakeRecord = Callable[[int], WorkerRecord]
#: By incarnation: what stands in the list of a member, and the member that was read from it.
Read = dict[str, tuple[object, Member]]


class Listed(NamedTuple):
    """The members in the list, oldest first. left: the ids of those that left in good order while others stayed."""

    members: Sequence[WorkerRecord]
    left: IdSet


class _Roster(NamedTuple):
    """The content of the list. used: the ids of members that left while others stayed.

    left: the ids among these of members that left in good order.
    """

    version: int = 0
    members: Sequence[Member] = ()
    used: IdSet = IdSet()
    left: IdSet = IdSet()

    def to_json(self, read: Read) -> dict[str, object]:
        """The form `from_json` reads. read: members that were read, whose entries stay as they are."""
        entries: list[object] = []
        for member in self.members:
            entry, known = read.get(member.record.incarnation, (None, None))
            entries.append(entry if known is member else member.to_json())
        used, left = self.used.ranges(), self.left.ranges()
        return {"version": self.version, "members": entries, "used": used, "left": left}

    @classmethod
    def from_json(cls, read: Read, value: Any) -> _Roster:
        """The list; ValueError, TypeError or LookupError if `value` is none.

        read: the members that were read before, and afterwards those of this list.
        """
        version, items = value["version"], value["members"]
        if type(version) is not int or type(items) is not list:
            raise ValueError("no roster")
        members = []
        for item in items:
            known = read.get(_incarnation_in(item))
            members.append(known[1] if known is not None and known[0] == item else Member.from_json(item))
        read.clear()
        read.update((each.record.incarnation, (item, each)) for item, each in zip(items, members, strict=True))
        return cls(version, members, IdSet.from_ranges(value["used"]), IdSet.from_ranges(value["left"]))


def _incarnation_in(item: object) -> str:
    """The incarnation in the entry of a member; empty if there is none."""
    match item:
        case [[_, _, str(incarnation), *_], *_]:
            return incarnation
    return ""


def _ids(members: Sequence[Member]) -> IdSet:
    return IdSet(member.record.id for member in members)


class FreeWorld:
    """A group that workers join and leave at any time.

    One list under one key has all members, oldest first. It is changed by compare and set: names and ids are unique
    because each change sees the whole list. A member that died on this host is dropped by the next to join.
    """

    generation = 1
    _ROSTER, _CHANGES = "1/roster", "1/changes"

    def __init__(self, kv: KeyValueClient, rank: int | None, *, proof: Proof) -> None:
        self.kv = kv
        self.rank = rank
        self.proof = proof
        self._here = host_identity()
        self._lock = Lock()  # several threads look at the list
        self.newest: _Roster = _Roster()  # version of the list that was read
        self.struck: set[str] = set()  # incarnations of members that are gone, also where the store lacks that
        self._own: Member | None = None  # this worker's last entry in the list
        self._beside = _Roster()
        self._read_before: Read = {}
        self._checked: dict[str, Member] = {}  # members with a right seal, by incarnation
        self._changes, self._looks = "", 0  # the count at the last look at the list, and the looks since
        self._off_since: float | None = None  # when this worker first saw that others had struck it off
        self._leaves = self._replaced = False

    def join(
        self, make_record: MakeRecord, claims: DeviceClaims, patience: Patience, made: WorkerRecord | None = None
    ) -> list[Member]:
        """Enter the list under a free id; the members there are now.

        made: the record of an earlier try, which the connection's end interrupted: it may be in the list already.
        RendezvousError if the name or rank is taken, or a group of fixed size lives here. DeviceMapError if the claims
        do not fit with those of the others.
        """
        check_unmixed(self.kv, self._here, patience, lambda: make_record(self.rank or 0).describe())
        if made is not None and any(member.record == made for member in self._read().members):
            record = made
        else:
            record = make_record(self._free_id() if self.rank is None else self.rank)

        def enter(members: list[Member], used: IdSet) -> list[Member]:
            # This worker is in the list already if the connection broke before the store's answer came.
            alive = [member for member in self.alive(members) if member.record != record]
            if alive and record.id in used:
                raise RendezvousError(
                    f"rank {record.id} belonged to a worker that has left this group, and its members remember it; "
                    f"leave the rank of {record.name} out, or give another"
                )
            self._check(alive)
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

        return self._change(enter, patience, joins=record.id)

    def founded(self) -> bool:
        """Whether the list has ever had a member."""
        return self.kv.has(self._ROSTER)

    def leave(self, record: WorkerRecord) -> None:
        """Take a record off the list, if it is there."""
        self._strike_off(record)

    def say_farewell(self, record: WorkerRecord) -> None:
        """Take this worker, which has that record, off the list: it leaves in good order."""
        self._leaves = True
        self._strike_off(record, leaver=record)

    def _strike_off(self, record: WorkerRecord, leaver: WorkerRecord | None = None) -> None:
        def strike(members: list[Member], _: IdSet) -> list[Member]:
            return [member for member in members if member.record.incarnation != record.incarnation]

        if any(member.record.incarnation == record.incarnation for member in self._read().members):
            self._change(strike, Patience(10.0), leaver=leaver)

    def stay(self, record: WorkerRecord, seconds: float, *, parted: bool) -> None:
        """Enter the list again if other members have kept this worker off it for so many seconds. record: this
        worker's.

        A member that cannot reach another one strikes it off. The rest may reach it, but joining members would not find
        it. parted: this worker has lost all members; then it stays off the list, whose members go on without it. A
        warning is logged once if another worker has taken its name or id.
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
        """Whether it has taken itself off the list."""
        roster = self._read()
        return record.id in roster.left and all(each.record.incarnation != record.incarnation for each in roster.members)

    def resume(
        self, before: FreeWorld, record: WorkerRecord, patience: Patience, written: Mapping[str, str] | None = None
    ) -> bool:
        """Write the list of the previous store into this store, or, if this store has a list, add this worker to it.

        before: this worker's view of the previous store. written: what this worker had set there under other keys. It
        is written first: a worker that finds this one finds these keys, too. False if others have begun a group of
        their own here. RendezvousError if another worker has joined here under this worker's name.
        """
        _, old, used, _ = before.newest
        self._own, self._beside = before._own, before._beside
        self.struck |= before.struck
        known = {member.record.incarnation for member in old}
        stay = [member for member in old if member.record.incarnation not in self.struck]
        taken = used.union(_ids(old))
        # This worker may not have seen the last members that joined: the next id leaps over theirs.
        self.kv.swap("1/ids", "", str((max(taken, default=-1) // _LEAP + 2) * _LEAP))
        here = self._read().members
        if here and not any(member.record.incarnation in known for member in here):
            return False
        self._check_name(here, record)
        for key, value in (written or {}).items():
            if self.kv.swap(f"{self.generation}/{key}", "", value) != value:
                logger.warning("worker %s: another worker has set %s at the store that is here now", record.name, key)

        def enter(members: list[Member], _: IdSet) -> list[Member]:
            self._check_name(members, record)
            there = {member.record.incarnation for member in members}
            back = [member for member in stay if not members or member.record.incarnation == record.incarnation]
            return [*members, *(member for member in back if member.record.incarnation not in there)]

        self._change(enter, patience, remember=taken)
        return True

    def _check_name(self, members: Sequence[Member], record: WorkerRecord) -> None:
        """RendezvousError if another member that may live has this worker's name.

        It joined before this worker came to this store, and so could not know of it.
        """
        for other in (member.record for member in self.alive(members)):
            if other.name == record.name and other.incarnation != record.incarnation:
                raise RendezvousError(
                    f"{other.describe()} has joined under the name of {record.describe()}, while that was not heard of "
                    "there: a name leads to one worker. End one of the two, or give it another name"
                )

    abandon = say_farewell  # a joined worker is in the list, and others may have found it there

    def members(self) -> list[Member]:
        """The members in the list now, oldest first. RendezvousError if one lacks the seal of AIORPC_SECRET."""
        members = self._read().members
        strange = [member for member in members if not self._is_known(member)]
        self._check(self.alive(strange))
        # Dead members of another group may still be in the list.
        return [member for member in members if member not in strange] if strange else [*members]

    def look(self) -> Listed | None:
        """The list, if it may have changed since the last look; else None. RendezvousError as of `members`."""
        changes = self.kv.get(self._CHANGES) or ""
        self._looks += 1
        if changes == self._changes and self._looks < _LOOKS:
            return None
        records = [member.record for member in self.members()]
        self._changes, self._looks = changes, 0
        return Listed(records, self.newest.left)

    def _is_known(self, member: Member) -> bool:
        """As `Member.is_known`; each member's seal is computed once."""
        if self._checked.get(member.record.incarnation) is member:
            return True
        known = member.is_known(self.proof.key, self.generation)
        if known:
            self._checked[member.record.incarnation] = member
        return known

    def _check(self, members: Sequence[Member]) -> None:
        """RendezvousError if a seal is wrong."""
        for member in members:
            if not self._is_known(member):
                member.check(self.proof.key, self.generation)

    def alive(self, members: Sequence[Member]) -> list[Member]:
        """Those of the members that are not known to be dead."""
        dead: dict[tuple[str, int], bool] = {}  # a process may have several members
        for record in (member.record for member in members):
            if (record.host, record.pid) not in dead:
                dead[record.host, record.pid] = provably_dead(record, self._here)
        return [member for member in members if not dead[member.record.host, member.record.pid]]

    def _free_id(self) -> int:
        """An id that no member has or had; the counter never goes back."""
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
        remember: IdSet = IdSet(),  # noqa: B008  # immutable
        leaver: WorkerRecord | None = None,
        joins: int | None = None,
    ) -> list[Member]:
        """Replace the list by the result of `change`, which gets the list and the used ids; the new list.

        remember: ids used in an earlier store. leaver: a member that leaves in good order. joins: the id of a worker
        that joins. Those with lower ids are let in first: many that change the list at once only hinder each other.
        """
        pause = _FIRST_PAUSE
        for attempt, _ in enumerate(patience.tries()):
            if joins is not None:
                ahead = joins - 1 - max(_ids(self.newest.members), default=joins - 1)
                wait = min(max(0, ahead) * _TURN, _LONGEST_TURN)
            else:
                wait = random.uniform(0.0, pause) if attempt else 0.0
                pause *= 2
            patience.stop.wait(min(wait, patience.left()))
            before = self.kv.get(self._ROSTER) or ""
            old = self._parse(before)
            self._keep(old)
            members = change([*old.members], old.used)
            changed = self._changed(old, members, remember, leaver)
            after = json.dumps(changed.to_json(self._read_before))
            if self.kv.swap(self._ROSTER, before, after) == after:
                self._keep(changed)
                self.kv.count(self._CHANGES)
                return members
        raise RendezvousError(f"the list of workers could not be changed within {patience.seconds:g} s")

    def _changed(
        self, old: _Roster, members: Sequence[Member], remember: IdSet, leaver: WorkerRecord | None
    ) -> _Roster:
        """The list with those members in place of the old ones. The version makes each text unique: a list that
        changed and changed back is still seen to differ."""
        # Members that stay remember the ids of members that left. If none stays, all ids are free again.
        stay = {member.record.id for member in members}
        parted = IdSet(member.record.id for member in old.members if member.record.id not in stay)
        any_stay = self._any_stay(old.members, members)
        used = (old.used.union(parted) if any_stay else IdSet()).union(remember)
        left = old.left if any_stay or not members else IdSet()
        return _Roster(old.version + 1, members, used, left.union(IdSet([leaver.id])) if leaver else left)

    @staticmethod
    def _any_stay(old: Sequence[Member], new: Sequence[Member]) -> bool:
        before = {member.record.incarnation for member in old}
        return any(member.record.incarnation in before for member in new)

    def _read(self) -> _Roster:
        """The list in the store."""
        roster = self._parse(self.kv.get(self._ROSTER) or "")
        self._keep(roster)
        return roster

    def _keep(self, roster: _Roster) -> None:
        with self._lock:  # a thread may come here later with an older version
            if roster.version >= self.newest.version:
                self.newest = roster
                # Members that are off the list need not be kept out of it.
                self.struck.intersection_update({member.record.incarnation for member in roster.members})

    def _parse(self, text: str) -> _Roster:
        if not text:
            return _Roster()
        read = dict(self._read_before)  # several threads come here
        roster = self.kv.load(self._ROSTER, text, partial(_Roster.from_json, read))
        self._read_before = read
        return roster
