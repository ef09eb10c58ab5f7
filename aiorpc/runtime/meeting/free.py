"""Agreeing on who is in a group that workers join and leave at any time, on top of a key-value store.

Blocking; every wait polls within a `Patience`. The keys are those of generation 1: ``1/roster`` is the list of the
members, ``1/ids`` counts the ids given out, and ``1/changes`` the changes of the list, so that a regular look reads one
number while nothing changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import msgspec

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
# Seconds that one worker takes to enter the list, about. Seconds without a change of the list, before it is another
# one's turn; in addition for each that is ahead of that one; and the most of these: ids may be missing.
_TURN, _STALLED, _STALLED_EACH, _STALLED_LAST = 0.004, 0.1, 0.02, 0.5
# Seconds of the first pause of workers that change the list at once; each further one may be twice as long.
_FIRST_PAUSE = 0.005
# The list is read again after so many looks without a change: who changed it may have died before it counted that.
_LOOKS = 20
MakeRecord = Callable[[int], WorkerRecord]
#: By what stands in the list of a member: the member that was read from it.
Read = dict[bytes, Member]


class Listed(NamedTuple):
    """The members in the list, oldest first. left: the ids of those that left in good order while others stayed."""

    members: Sequence[WorkerRecord]
    left: IdSet


class _Form(msgspec.Struct):
    """The list as JSON. An entry of a member is read by itself, and only once: the others are as they were."""

    version: int
    members: list[msgspec.Raw]
    used: list[tuple[int, int]]
    left: list[tuple[int, int]]


class _Roster(NamedTuple):
    """The content of the list. used: the ids of members that left while others stayed.

    left: the ids among these of members that left in good order. read: the members, as of `Read`.
    """

    version: int = 0
    members: Sequence[Member] = ()
    used: IdSet = IdSet()
    left: IdSet = IdSet()
    read: Read = {}  # noqa: RUF012  # never changed

    def to_json(self) -> str:
        """The form `from_json` reads."""
        entries = {id(member): entry for entry, member in self.read.items()}
        members = [msgspec.Raw(entries.get(id(each)) or msgspec.json.encode(each.to_json())) for each in self.members]
        form = _Form(self.version, members, self.used.ranges(), self.left.ranges())
        return msgspec.json.encode(form).decode()

    @classmethod
    def from_json(cls, read: Read, form: _Form) -> _Roster:
        """The list; ValueError, TypeError or LookupError if `form` is none. read: members that were read before."""
        found: Read = {}
        for entry in map(bytes, form.members):
            known = read.get(entry)
            found[entry] = Member.from_json(json.loads(entry)) if known is None else known
        used, left = IdSet.from_ranges(form.used), IdSet.from_ranges(form.left)
        return cls(form.version, list(found.values()), used, left, found)


_decode_form = msgspec.json.Decoder(_Form).decode


def _read_form(text: str) -> _Form:
    try:
        return _decode_form(text)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


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
        self._random = Random()  # of its own: a program may seed the module's alike in all processes
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

        return self._change(enter, patience, joins=record.id if self.rank is None else None)

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
        return record.id in roster.left and all(
            each.record.incarnation != record.incarnation for each in roster.members
        )

    def resume(
        self, before: FreeWorld, record: WorkerRecord, patience: Patience, written: Mapping[str, str] | None = None
    ) -> bool:
        """Write the list of the previous store into this store, or, if this store has a list, add this worker to it.

        before: this worker's view of the previous store. written: what this worker had set there under other keys. It
        is written first: a worker that finds this one finds these keys, too. False if others have begun a group of
        their own here. RendezvousError if another worker has joined here under this worker's name.
        """
        old, used = before.newest.members, before.newest.used
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
        roster = self._read()
        taken = roster.used.union(_ids(roster.members))
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
        that joins, if ids come in order.
        """
        pause = 0.0
        for _ in patience.tries():
            if joins is not None:
                self._await_turn(joins, patience)
            else:
                patience.stop.wait(min(self._random.uniform(0.0, pause), patience.left()))
                pause = 2 * pause or _FIRST_PAUSE
            before = self.kv.get(self._ROSTER) or ""
            old = self._parse(before)
            self._keep(old)
            members = change([*old.members], old.used)
            changed = self._changed(old, members, remember, leaver)
            after = changed.to_json()
            if self.kv.swap(self._ROSTER, before, after) == after:
                self._keep(changed)
                self.kv.count(self._CHANGES)
                return members
        raise RendezvousError(f"the list of workers could not be changed within {patience.seconds:g} s")

    def _await_turn(self, joins: int, patience: Patience) -> None:
        """Let those with lower ids into the list first: many that change it at once only hinder each other.

        Some of these may have died. While the list stays as it is, the next one goes on first, and then those behind.
        """
        first = seen = self.kv.number(self._CHANGES)
        roster, since = self._read(), time.monotonic()
        ahead = joins - 1 - max(roster.used.union(_ids(roster.members)), default=joins - 1)
        while (left := first + ahead - seen) > 0 and patience.left():
            if time.monotonic() > since + _STALLED + min(left * _STALLED_EACH, _STALLED_LAST):
                return
            patience.stop.wait(min(_TURN * left, _STALLED))
            before, seen = seen, self.kv.number(self._CHANGES)
            since = time.monotonic() if seen != before else since

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
        left = left.union(IdSet([leaver.id])) if leaver else left
        return _Roster(old.version + 1, members, used, left, old.read)

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
        read = partial(_Roster.from_json, self._read_before)
        roster = self.kv.load(self._ROSTER, text, read, _read_form)
        self._read_before = roster.read
        return roster
