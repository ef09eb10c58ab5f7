"""Agreeing on who is in a group of fixed size, on top of a key-value store.

Blocking; every wait polls within a `Patience`. The keys, G being the number of a generation (one init and shutdown of
the whole group; the store may outlive many):

    generation            the generation that workers now join
    last/RANK             the generation this rank was last in, written once its holder agrees to the world size
    G/world               world size and rank of the first comer; the others must agree
    G/slot/RANK           who holds the rank; taken once, by compare and set
    G/end/RANK            its holder has left, or gave up
    G/left/RANK           its holder leaves in good order; of joining members the id, as in `returning.py`
    G/verdict             set once: complete, or why this generation failed
    G/done                how many ranks have learnt the verdict
    G/refused             the last worker that came without a world size, for the errors of those that wait

Every rank obeys the verdict, so no rank can believe in a group that another has given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ...devices import DeviceClaims, check_device_maps
from ...errors import RendezvousError, StoreGone
from ...protocol.identity import WorkerRecord, legible
from ..engine.host import host_identity, is_gone, provably_dead, sees
from .key_value import KeyValueClient
from .membership import SET_IT, Member, Proof, same_process
from .patience import Patience

CLOSED = "The group runs, and is closed: a group of fixed size takes no further worker while its members live. "
_SHOWN = 500  # characters of what others have written there
_COMPLETE = "complete"
_TIMEOUT = "timeout"
_ABORT = "abort"
_VOID = "void"


@dataclass(frozen=True)
class _Verdict:
    """How a generation ended its gathering: what, why, when (Unix time), and by which process."""

    kind: str
    text: str
    time: float
    host: str
    pid: int

    @classmethod
    def from_json(cls, value: Any) -> _Verdict:
        """The form that `_settle` writes; ValueError or TypeError if it is another."""
        kind, text, at, host, pid = value
        if kind not in (_COMPLETE, _TIMEOUT, _ABORT, _VOID) or type(pid) is not int or pid < 0:
            raise ValueError("no verdict")
        return cls(kind, "" + text, 0.0 + at, "" + host, pid)


def _world_from_json(value: Any) -> tuple[int, str]:
    """World size, and the worker that set it."""
    size, who = value
    if type(size) is not int or not 0 < size < 1 << 31:
        raise ValueError("no world size")
    return size, "" + who


def has_formed(kv: KeyValueClient, generation: int, world_size: int) -> bool:
    """Whether that generation is a group of that size whose members have all been there."""
    world, verdict = kv.get(f"{generation}/world"), kv.get(f"{generation}/verdict")
    if world is None or verdict is None:
        return False
    size, _ = kv.load(f"{generation}/world", world, _world_from_json)
    return size == world_size and kv.load(f"{generation}/verdict", verdict, _Verdict.from_json).kind == _COMPLETE


def check_unique_names(records: Sequence[WorkerRecord]) -> None:
    """RendezvousError naming the ranks that share a name, if any do."""
    holders: dict[str, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        holders[record.name].append(record)
    for name, same in holders.items():
        if len(same) > 1:
            who = " and ".join(record.describe() for record in same)
            ranks = " and ".join(str(record.id) for record in same)
            raise RendezvousError(
                f"name {name!r} is not unique: ranks {ranks} have it: {who}. Give each a name of its own, for example "
                f"by the pattern {name.rstrip('0123456789') + '{rank}'!r}"
            )


def check_unmixed(kv: KeyValueClient, here: str, patience: Patience, knocks: Callable[[], str]) -> None:
    """RendezvousError if a group of fixed size lives at this store, which no further worker can join.

    knocks: describes the worker that wants to join. The store keeps that for the errors of workers that still wait.
    """
    generation = kv.number("generation")
    key = f"{generation}/world"
    world = kv.get(key) if generation else None
    for rank in range(kv.load(key, world, _world_from_json)[0] if world is not None else 0):
        if patience.stop.is_set() or patience.left() <= 0:
            raise RendezvousError(f"a group of {rank} workers and more was still being looked at when time was up")
        slot = f"{generation}/slot/{rank}"
        entry = kv.get(slot)
        holder = kv.load(slot, entry, Member.from_json).record if entry is not None else None
        if holder is None or provably_dead(holder, here):
            continue
        if kv.get(f"{generation}/end/{rank}") != holder.incarnation:
            kv.put(f"{generation}/refused", f"{knocks()} came without a world_size, and was refused")
            raise RendezvousError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                f"{holder.describe()} belongs to a group of fixed size; give a world_size to join one"
            )


class FixedWorld:
    """A group whose size all its members know beforehand."""

    def __init__(self, kv: KeyValueClient, rank: int, world_size: int, *, proof: Proof, hosts_store: bool) -> None:
        self.kv = kv
        self.rank = rank
        self.world_size = world_size
        self.generation: int = 0
        self._proof = proof
        self._hosts_store = hosts_store
        self._here = host_identity()
        self._entry = ""  # what this worker wrote into its slot
        self._members: list[Member] = []
        self._doubt = ""  # why an earlier generation had failed, if that may have been this very try

    def join(self, record: WorkerRecord, claims: DeviceClaims, patience: Patience) -> list[Member]:
        """Take this rank's place and wait for the others; all members, by rank.

        RendezvousError, on every rank that has come: a second holder of a rank, two members of one name, different
        world sizes, or a member whose time was up. DeviceMapError, on all: claims that do not fit.
        """
        while True:
            late = self._take_slot(record, claims, patience)
            verdict = self._await_verdict(record, patience)
            if verdict.kind == _VOID or (late and self._is_stale(verdict, patience)):
                self._note_doubt(verdict)
                self._end()
                self._advance(patience)
                continue
            return self._obey(verdict)

    def leave(self, record: WorkerRecord) -> None:
        """Give up the record's place, which frees its rank in the next generation."""
        self.kv.put(self._key(f"end/{record.id}"), record.incarnation)

    def say_farewell(self, record: WorkerRecord) -> None:
        """Write that this member leaves in good order; its place is not free before `leave`."""
        self.kv.put(self._key(f"left/{record.id}"), record.incarnation)

    def has_left(self, record: WorkerRecord) -> bool:
        """Whether it left in good order. `end` alone also stands for lost members and for joining members that gave
        up."""
        return self.kv.get(self._key(f"left/{record.id}")) == record.incarnation

    def has_ended(self, record: WorkerRecord) -> bool:
        """Whether a member has left in any way, or is proved dead."""
        return self._has_ended(self.generation, record)

    def enter(self, generation: int, members: list[Member]) -> None:
        """This worker takes the place of a lost member of that generation, which has those members."""
        self.generation, self._members = generation, members

    def abandon(self, record: WorkerRecord) -> None:
        """Give up the place of a record that has not joined, if it has one."""
        held = self._holder(self.generation, self.rank)
        if held is not None and held.incarnation == record.incarnation:
            self.leave(record)

    def members(self) -> list[Member]:
        """The members found at `join`."""
        return self._members

    def wait_until_known(self, ranks: int, seconds: float, counter: str = "done") -> None:
        """Wait until so many ranks have read the verdict, at most so many seconds: the store's host does so before it
        goes."""
        for _ in Patience(seconds).tries():
            if self.kv.number(self._key(counter)) >= ranks:
                return

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def _holder(self, generation: int, rank: int) -> WorkerRecord | None:
        """The holder of that rank in that generation, from the store."""
        key = f"{generation}/slot/{rank}"
        entry = self.kv.get(key)
        return self.kv.load(key, entry, Member.from_json).record if entry is not None else None

    def _advance(self, patience: Patience) -> None:
        self._enter_generation(self.generation, self.generation + 1)
        if patience.left() <= 0:
            raise RendezvousError(f"rank {self.rank} found no generation to join within {patience.seconds:g} s")

    def _enter_generation(self, last: int, following: int) -> None:
        held = self.kv.swap("generation", str(last) if last else "", str(following))
        self.generation = self.kv.read_number("generation", held)

    def _take_slot(self, record: WorkerRecord, claims: DeviceClaims, patience: Patience) -> bool:
        """Hold this rank's slot in the current generation. True if that generation had its verdict already."""
        self._enter_generation(0, 1)
        while True:
            entry = self._entry = json.dumps(self._proof.member(record, claims, self.generation).to_json())
            self._check_previous(record)
            late = self.kv.has(self._key("verdict"))
            key = self._key(f"slot/{self.rank}")
            held = self.kv.swap(key, "", entry)
            if held == entry:
                break
            holder = self.kv.load(key, held, Member.from_json).record
            if not self._has_ended(self.generation, holder):
                self._refuse_second(record, holder, self.generation)
            # Other ranks may wait for the dead holder: the verdict moves them to the next generation.
            self._settle(_VOID, f"{holder.describe()} is gone")
            self._advance(patience)
        self._check_world(record)
        self.kv.put(f"last/{self.rank}", str(self.generation))
        return late

    def _check_previous(self, record: WorkerRecord) -> None:
        """Refuse this worker if the rank's last holder still lives in an older generation."""
        last = self.kv.number(f"last/{self.rank}")
        holder = self._holder(last, self.rank) if 0 < last < self.generation else None
        if holder is not None and not self._has_ended(last, holder):
            self._refuse_second(record, holder, last)

    def _has_ended(self, generation: int, holder: WorkerRecord) -> bool:
        ended = self.kv.get(f"{generation}/end/{holder.id}") == holder.incarnation
        return ended or provably_dead(holder, self._here)

    def _closed(self, generation: int) -> str:
        """For errors: says that the group of that generation runs, or nothing."""
        text = self.kv.get(f"{generation}/verdict")
        if text is None or self._verdict(text).kind != _COMPLETE:
            return ""
        return CLOSED

    def _refuse_second(self, record: WorkerRecord, holder: WorkerRecord, generation: int) -> None:
        text = (
            f"rank {self.rank} was taken twice: by {holder.describe()} and by {record.describe()}. "
            f"{self._closed(generation)}{same_process(holder, record)}If the first is gone without a trace, meet at "
            "another port or remove the rendezvous file"
        )
        self._settle(_ABORT, text)
        raise RendezvousError(text)

    def _check_world(self, record: WorkerRecord) -> None:
        mine = json.dumps([self.world_size, record.describe()])
        first = self.kv.swap(self._key("world"), "", mine)
        size, who = self.kv.load(self._key("world"), first, _world_from_json)
        problem = ""
        if size != self.world_size:
            problem = f"world_size differs: {who} says {size}, {record.describe()} says {self.world_size}"
        elif self.rank >= self.world_size:
            problem = f"rank {self.rank} of {record.describe()} is not below the world_size of {self.world_size}"
        elif self._proof.lacks_secret:  # the others would wait for this worker
            problem = f"AIORPC_SECRET is not set, and {record.describe()} has require_secret=True: {SET_IT}"
        if problem:
            problem = f"{problem}. {self._closed(self.generation)}".strip().removesuffix(".")
            self._settle(_ABORT, problem)
            self._fail(problem, self.world_size)

    def _settle(self, kind: str, text: str = "") -> _Verdict:
        """Propose a verdict; return the verdict that holds, the first proposed."""
        verdict = _Verdict(kind, text, time.time(), self._here, os.getpid())
        return self._verdict(self.kv.swap(self._key("verdict"), "", json.dumps(astuple(verdict))))

    def _verdict(self, text: str) -> _Verdict:
        return self.kv.load(self._key("verdict"), text, _Verdict.from_json)

    def _await_verdict(self, record: WorkerRecord, patience: Patience) -> _Verdict:
        slots = [self._key(f"slot/{rank}") for rank in range(self.world_size)]
        for _ in patience.tries():
            held = self.kv.get(self._key("verdict"))
            if held is not None:
                return self._verdict(held)
            self.kv.check_open()
            members = self._read(slots)
            if members:
                dead = [each.record.describe() for each in members if self._has_ended(self.generation, each.record)]
                if dead:  # they may be started again, and then join the next generation
                    return self._settle(_VOID, f"{', '.join(dead)} died or gave up while joining")
                if self._all_agree() or self._are_wrong(members):
                    return self._settle(_COMPLETE)
            elif patience.tell is not None:
                patience.tell(sum(map(self.kv.has, slots)), self.world_size)
        held = self.kv.get(self._key("verdict"))  # a host whose time is up takes the store away
        return self._verdict(held) if held is not None else self._settle(_TIMEOUT, self._missing(record, patience))

    def _are_wrong(self, members: list[Member]) -> bool:
        """Whether there is a member that `_check_members` refuses, so waiting is in vain."""
        known = (member.is_known(self._proof.key, self.generation) for member in members)
        return not all(known) or [member.record.id for member in members] != [*range(self.world_size)]

    def _all_agree(self) -> bool:
        """Whether all holders agree to the world size. A holder that does not is about to refuse the group."""
        lasts = [f"last/{rank}" for rank in range(self.world_size)]
        return {*(self.kv.find_all(lasts) or ())} == {str(self.generation)}

    def _read(self, slots: list[str]) -> list[Member]:
        """The holders of these slots; empty while one is free."""
        entries = self.kv.find_all(slots)
        return [] if entries is None else self._load(slots, entries)

    def _load(self, slots: list[str], entries: list[str]) -> list[Member]:
        return [self.kv.load(key, entry, Member.from_json) for key, entry in zip(slots, entries, strict=True)]

    def _missing(self, record: WorkerRecord, patience: Patience) -> str:
        held = [self._holder(self.generation, rank) for rank in range(self.world_size)]
        agreed = str(self.generation)
        missing = [rank for rank in range(self.world_size) if self.kv.get(f"last/{rank}") != agreed]
        here = ", ".join(holder.describe() for holder in held if holder is not None)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        waited = f"{record.describe()} waited {patience.seconds:g} s for {ranks} of {self.world_size}; here: {here}"
        refused = self.kv.get(self._key("refused"))
        if refused is not None:
            waited += f". {legible(refused[:_SHOWN])}: give all workers the same world_size, or none of them"
        return f"{waited}. {self._doubt}" if self._doubt else waited

    def _is_stale(self, verdict: _Verdict, patience: Patience) -> bool:
        """Whether a verdict found on arrival belongs to an earlier group, not to the gathering one."""
        old = abs(time.time() - verdict.time) > (patience.seconds or 60.0)
        return verdict.kind != _ABORT or old or (sees(self._here, verdict.host) and is_gone(verdict.pid))

    def _note_doubt(self, verdict: _Verdict) -> None:
        """Keep the reason of a failure that this rank passes over as stale, by clocks of two hosts, which may differ.
        The store does not tell whether it was the group that now gathers. Members of a new try come; if none does, the
        failure was this try's, and the error of this rank repeats the reason.
        """
        if verdict.kind == _ABORT and not sees(self._here, verdict.host):
            ago = time.time() - verdict.time
            when = f"{ago:.0f} s before" if ago >= 0 else f"{-ago:.0f} s after"
            self._doubt = (
                f"The others may have failed before it came: by the clock of another host, {when} that of this one, "
                f"one of them said: {verdict.text}"
            )

    def _obey(self, verdict: _Verdict) -> list[Member]:
        if verdict.kind != _COMPLETE:
            self._fail(verdict.text, self.world_size if verdict.kind == _ABORT else None)
        slots = [self._key(f"slot/{rank}") for rank in range(self.world_size)]
        entries = self.kv.get_all(slots)
        self._members = self._load(slots, entries)
        try:
            self._check_own_slot(entries[self.rank])
            self._check_members()
            check_unique_names([member.record for member in self._members])
            check_device_maps({member.record.name: member.claims for member in self._members})
        except RendezvousError:
            self._give_up(self.world_size)
            raise
        self.kv.count(self._key("done"), at_most=True)
        return self._members

    def _check_own_slot(self, entry: str) -> None:
        if entry != self._entry:
            raise RendezvousError(
                f"the store holds another record of rank {self.rank} than the one that this worker wrote there: "
                "a stranger has written into the store. Find out who, and set AIORPC_SECRET for all"
            )

    def _check_members(self) -> None:
        for rank, member in enumerate(self._members):
            member.check(self._proof.key, self.generation)
            if member.record.id != rank:
                raise RendezvousError(
                    f"the store has {member.record.describe()} in the place of rank {rank}: a stranger "
                    "has written into the store"
                )

    def _fail(self, text: str, ranks: int | None) -> None:
        with contextlib.suppress(StoreGone):  # the store's host may have failed before, for the same reason
            self._give_up(ranks)
        raise RendezvousError(text)

    def _give_up(self, ranks: int | None) -> None:
        """Let go of the slot. The store's host first lets so many ranks, or all that have come, read why."""
        self._end()
        self.kv.count(self._key("done"), at_most=True)
        if self._hosts_store:
            here = [self.kv.has(self._key(f"slot/{rank}")) for rank in range(self.world_size)]
            self.wait_until_known(sum(here) if ranks is None else ranks, 1.0)

    def _end(self) -> None:
        holder = self._holder(self.generation, self.rank)
        if holder is not None:
            self.leave(holder)
