"""Agreeing on who is in a group, on top of a key-value store: a world of fixed size, and one that workers join freely.

Blocking; every wait polls within a `Patience`. Keys of the fixed world, G being the number of a generation (one
init and shutdown of the whole group; the store may outlive many):

    generation            the generation that workers now join
    last/RANK             the generation this rank was last in
    G/world               world size and rank of the first comer; the others must agree
    G/slot/RANK           who holds the rank; taken once, by compare and set
    G/end/RANK            its holder has left, or gave up
    G/verdict             set once: complete, or why this generation failed
    G/done                how many ranks have learnt the verdict

Every rank obeys the verdict, so no rank can believe in a group that another has given up.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from ...devices import DeviceClaims, check_device_maps
from ...errors import DeviceMapError, PeerRefused, ProtocolError, RendezvousError
from ...protocol.handshake import VERSION
from ...protocol.identity import WorkerRecord
from ..engine.host import host_identity, is_gone, provably_dead
from .stores import Board, Patience

MakeRecord = Callable[[int], WorkerRecord]

SET_IT = (
    "set AIORPC_SECRET (or secret_file) for all workers, to the same random text of at least 16 bytes (openssl rand "
    "-hex 32)"
)
CLOSED = "The group runs, and is closed: a group of fixed size takes nobody else while its members live. "
_NO_WORKER = "something that is no worker"
_COMPLETE = "complete"
_TIMEOUT = "timeout"
_ABORT = "abort"
_VOID = "void"


@dataclass(frozen=True)
class Proof:
    """By what a worker lets itself be known as a member, and by what it knows the others.

    key: made of AIORPC_SECRET; None without. require_secret: the option. certificates: without AIORPC_SECRET they will
    do, as every connection shows one that bears the name of its worker.
    """

    key: bytes | None = field(default=None, repr=False)
    require_secret: bool | None = None
    certificates: bool = False

    @property
    def lacks_secret(self) -> bool:
        """Whether the worker cannot join, as it requires a secret and has none."""
        return self.require_secret is True and self.key is None

    def member(self, record: WorkerRecord, claims: DeviceClaims, generation: int, *, trusted: bool = False) -> Member:
        """The worker of that record, as it enters that generation."""
        own = self.key is not None
        member = Member(record, own, trusted and own, claims, "", self.require_secret, self.certificates)
        return member.sealed(self.key, generation)


@dataclass(frozen=True)
class Member:
    """A member as it stands in the store: its record, and what the others need only to join.

    own_secret: the worker brought AIORPC_SECRET. trusted: it holds the group's secret. claims: what it says of its
    devices; not in the record, which goes over each connection. require_secret: its option of that name. certificates:
    it takes them for the proof of membership, where there is no AIORPC_SECRET. seal: made of all that with
    AIORPC_SECRET; "" without.
    """

    record: WorkerRecord
    own_secret: bool = False
    trusted: bool = False
    claims: DeviceClaims = field(default_factory=DeviceClaims)
    seal: str = ""
    require_secret: bool | None = None
    certificates: bool = False

    def sealed(self, key: bytes | None, generation: int) -> Member:
        """As a member that has AIORPC_SECRET enters it into that generation; as it is without one."""
        return self if key is None else replace(self, seal=self._seal(key, generation))

    def check(self, key: bytes | None, generation: int) -> None:
        """RendezvousError if it is not known to be a member."""
        if not self.is_known(key, generation):
            raise RendezvousError(
                f"what the rendezvous store says of {self.record.describe()} was not written by a worker with our "
                "AIORPC_SECRET: either that differs between the workers, or somebody else has written into the store"
            )

    def is_known(self, key: bytes | None, generation: int) -> bool:
        """Whether it bears the seal that it ought to. One that says it has no key is: `Rendezvous` refuses mixtures."""
        if key is None or not self.own_secret:
            return True
        return hmac.compare_digest(self._seal(key, generation).encode(), self.seal.encode())

    def _seal(self, key: bytes, generation: int) -> str:
        asked = [self.require_secret, self.certificates]
        said = ["aiorpc member", generation, self.record.to_wire(), self.own_secret, self.claims.to_json(), *asked]
        return hmac.digest(key, json.dumps(said).encode(), "sha256").hex()

    def to_json(self) -> list[object]:
        """The form `from_json` reads."""
        asked = [self.require_secret, self.certificates]
        return [self.record.to_wire(), self.own_secret, self.trusted, self.claims.to_json(), self.seal, *asked, VERSION]

    @classmethod
    def from_json(cls, value: object) -> Member:
        """The member; RendezvousError if something else stands there, PeerRefused if it is of another version."""
        # The version stands at the end for ever; what is before it may differ.
        if isinstance(value, list) and value and type(value[-1]) is int and value[-1] != VERSION:
            raise PeerRefused(
                f"a worker has come that speaks version {value[-1]} of the protocol, we speak {VERSION}; use one "
                "aiorpc everywhere"
            )
        if not isinstance(value, list) or len(value) != 8 or not isinstance(value[4], str) or not value[4].isascii():
            raise RendezvousError(_NO_WORKER)
        try:
            record, claims = WorkerRecord.from_wire(value[0]), DeviceClaims.from_json(value[3])
            required = value[5] if isinstance(value[5], bool) else None
            return cls(record, value[1] is True, value[2] is True, claims, value[4], required, value[6] is True)
        except (ProtocolError, DeviceMapError) as error:
            raise RendezvousError(f"{_NO_WORKER} ({error})") from None


def _load(board: Board, key: str, text: str) -> Member:
    return board.load(key, text, Member.from_json)


@dataclass(frozen=True)
class _Verdict:
    """How a generation ended its gathering: what, why, when (Unix time), and which process said so."""

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
    """World size, and who said so."""
    size, who = value
    if type(size) is not int or not 0 < size < 1 << 31:
        raise ValueError("no world size")
    return size, "" + who


def _roster_from_json(value: Any) -> tuple[int, list[Member], set[int]]:
    """Version, members, and the ids of those who left while others stayed."""
    version, members, used = value["version"], value["members"], value["used"]
    if type(version) is not int or type(members) is not list or not all(type(each) is int for each in used):
        raise ValueError("no roster")
    return version, [Member.from_json(item) for item in members], {*used}


def has_formed(board: Board, generation: int, world_size: int) -> bool:
    """Whether that generation is a group of that size whose members have all been there."""
    world, verdict = board.get(f"{generation}/world"), board.get(f"{generation}/verdict")
    if world is None or verdict is None:
        return False
    size, _ = board.load(f"{generation}/world", world, _world_from_json)
    return size == world_size and board.load(f"{generation}/verdict", verdict, _Verdict.from_json).kind == _COMPLETE


def same_process(holder: WorkerRecord, record: WorkerRecord) -> str:
    """For errors: what to do if a process has joined twice, as one whose cell was run again."""
    if (holder.host, holder.pid) != (record.host, record.pid):
        return ""
    return (
        f"Both are of this very process: it has the worker {holder.name!r} already, and goes on with that. To join "
        "anew, as when a cell is run again, leave first: `await worker.shutdown()`, or `rpc.shutdown()`. "
    )


def check_unique_names(records: Sequence[WorkerRecord]) -> None:
    """RendezvousError naming the ranks that share a name, if any do."""
    holders: dict[str, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        holders[record.name].append(record)
    for name, same in holders.items():
        if len(same) > 1:
            who = " and ".join(record.describe() for record in same)
            ranks = " and ".join(str(record.id) for record in same)
            raise RendezvousError(f"name {name!r} is not unique: ranks {ranks} have it: {who}")


def check_unmixed(board: Board, here: str, patience: Patience) -> None:
    """RendezvousError if a group of fixed size lives at this store: nobody can join it."""
    generation = board.number("generation")
    key = f"{generation}/world"
    world = board.get(key) if generation else None
    for rank in range(board.load(key, world, _world_from_json)[0] if world is not None else 0):
        if patience.stop.is_set() or patience.left() <= 0:
            raise RendezvousError(f"a group of {rank} workers and more was still being looked at when time was up")
        entry = board.get(f"{generation}/slot/{rank}")
        holder = _load(board, f"{generation}/slot/{rank}", entry).record if entry is not None else None
        if holder is None or provably_dead(holder, here):
            continue
        if board.get(f"{generation}/end/{rank}") != holder.incarnation:
            raise RendezvousError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                f"{holder.describe()} belongs to a group of fixed size; give a world_size to join one"
            )


class FixedWorld:
    """A group whose size all its members know beforehand."""

    def __init__(self, board: Board, rank: int, world_size: int, *, proof: Proof, hosts_store: bool) -> None:
        self.board = board
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self._proof = proof
        self._hosts_store = hosts_store
        self._here = host_identity()
        self._entry = ""  # what we wrote into our slot
        self._members: list[Member] = []

    def join(self, record: WorkerRecord, claims: DeviceClaims, patience: Patience) -> list[Member]:
        """Take this rank's place and wait for the others; all members, by rank.

        RendezvousError, on every rank that is there: a second holder of a rank, two members of one name, different
        world sizes, or a member that waited long enough and gave up. DeviceMapError, on all: claims that do not fit.
        """
        while True:
            late = self._take_slot(record, claims, patience)
            verdict = self._await_verdict(record, patience)
            if verdict.kind == _VOID or (late and self._is_stale(verdict, patience)):
                self._end()
                self._advance(patience)
                continue
            return self._obey(verdict)

    def leave(self, record: WorkerRecord) -> None:
        """Give up the record's place, so that its rank can be taken in the next generation."""
        self.board.put(self._key(f"end/{record.id}"), record.incarnation)

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

    def wait_until_known(self, ranks: int, seconds: float) -> None:
        """What the store's host does before it goes: let so many ranks learn the verdict, within so many seconds."""
        for _ in Patience(seconds).tries():
            if self.board.number(self._key("done")) >= ranks:
                return

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def _holder(self, generation: int, rank: int) -> WorkerRecord | None:
        """Whose that rank is in that generation, as the store says."""
        key = f"{generation}/slot/{rank}"
        entry = self.board.get(key)
        return _load(self.board, key, entry).record if entry is not None else None

    def _advance(self, patience: Patience) -> None:
        self.board.swap("generation", str(self.generation), str(self.generation + 1))
        self.generation = self.board.number("generation")
        if patience.left() <= 0:
            raise RendezvousError(f"rank {self.rank} found no generation to join within {patience.seconds:g} s")

    def _take_slot(self, record: WorkerRecord, claims: DeviceClaims, patience: Patience) -> bool:
        """Hold this rank's slot in the current generation. True if that generation had its verdict already."""
        self.board.swap("generation", "", "1")
        self.generation = self.board.number("generation")
        while True:
            entry = self._entry = json.dumps(self._proof.member(record, claims, self.generation).to_json())
            self._check_previous(record)
            late = self.board.has(self._key("verdict"))
            key = self._key(f"slot/{self.rank}")
            held = self.board.swap(key, "", entry)
            if held == entry:
                break
            holder = _load(self.board, key, held).record
            if not self._has_ended(self.generation, holder):
                self._refuse_second(record, holder, self.generation)
            # Somebody may be waiting for the one that is gone: let them come along to the next generation.
            self._settle(_VOID, f"{holder.describe()} is gone")
            self._advance(patience)
        self.board.put(f"last/{self.rank}", str(self.generation))
        self._check_world(record)
        return late

    def _check_previous(self, record: WorkerRecord) -> None:
        """A rank whose last holder is still in an older generation has two processes now."""
        last = self.board.number(f"last/{self.rank}")
        holder = self._holder(last, self.rank) if 0 < last < self.generation else None
        if holder is not None and not self._has_ended(last, holder):
            self._refuse_second(record, holder, last)

    def _has_ended(self, generation: int, holder: WorkerRecord) -> bool:
        ended = self.board.get(f"{generation}/end/{holder.id}") == holder.incarnation
        return ended or provably_dead(holder, self._here)

    def _closed(self, generation: int) -> str:
        """For errors: that the group of that generation runs, if it does."""
        text = self.board.get(f"{generation}/verdict")
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
        first = self.board.swap(self._key("world"), "", mine)
        size, who = self.board.load(self._key("world"), first, _world_from_json)
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
        """Propose a verdict; return the one that holds, which is the first that was proposed."""
        verdict = _Verdict(kind, text, time.time(), self._here, os.getpid())
        return self._verdict(self.board.swap(self._key("verdict"), "", json.dumps(astuple(verdict))))

    def _verdict(self, text: str) -> _Verdict:
        return self.board.load(self._key("verdict"), text, _Verdict.from_json)

    def _await_verdict(self, record: WorkerRecord, patience: Patience) -> _Verdict:
        slots = [self._key(f"slot/{rank}") for rank in range(self.world_size)]
        for _ in patience.tries():
            held = self.board.get(self._key("verdict"))
            if held is not None:
                return self._verdict(held)
            self.board.check_open()
            if self.board.has(*slots):
                records = [member.record for member in self._read(slots)]
                dead = [each.describe() for each in records if self._has_ended(self.generation, each)]
                if dead:  # they may be started again: they are met in the next generation
                    return self._settle(_VOID, f"{', '.join(dead)} died or gave up while joining")
                return self._settle(_COMPLETE)
        return self._settle(_TIMEOUT, self._missing(record, patience))

    def _read(self, slots: list[str]) -> list[Member]:
        return [_load(self.board, key, entry) for key, entry in zip(slots, self.board.get_all(slots), strict=True)]

    def _missing(self, record: WorkerRecord, patience: Patience) -> str:
        held = [self._holder(self.generation, rank) for rank in range(self.world_size)]
        missing = [rank for rank, holder in enumerate(held) if holder is None]
        here = ", ".join(holder.describe() for holder in held if holder is not None)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{record.describe()} waited {patience.seconds:g} s for {ranks} of {self.world_size}; here: {here}"

    def _is_stale(self, verdict: _Verdict, patience: Patience) -> bool:
        """True if a verdict found on arrival says nothing about the group that now gathers."""
        old = abs(time.time() - verdict.time) > (patience.seconds or 60.0)
        return verdict.kind != _ABORT or old or (verdict.host == self._here and is_gone(verdict.pid))

    def _obey(self, verdict: _Verdict) -> list[Member]:
        if verdict.kind != _COMPLETE:
            here = sum(self.board.has(self._key(f"slot/{rank}")) for rank in range(self.world_size))
            self._fail(verdict.text, self.world_size if verdict.kind == _ABORT else here)
        self._members = self._read([self._key(f"slot/{rank}") for rank in range(self.world_size)])
        try:
            self._check_own_slot()
            self._check_members()
            check_unique_names([member.record for member in self._members])
            check_device_maps({member.record.name: member.claims for member in self._members})
        except RendezvousError:
            self._give_up(self.world_size)
            raise
        self.board.count(self._key("done"))
        return self._members

    def _check_own_slot(self) -> None:
        if self.board.get(self._key(f"slot/{self.rank}")) != self._entry:
            raise RendezvousError(
                f"the store holds another record of rank {self.rank} than the one that this worker wrote there: "
                "somebody who is no member has written into the store. Find out who, and set AIORPC_SECRET for all"
            )

    def _check_members(self) -> None:
        for rank, member in enumerate(self._members):
            member.check(self._proof.key, self.generation)
            if member.record.id != rank:
                raise RendezvousError(
                    f"the store has {member.record.describe()} in the place of rank {rank}: somebody who is no member "
                    "has written into the store"
                )

    def _fail(self, text: str, ranks: int) -> None:
        self._give_up(ranks)
        raise RendezvousError(text)

    def _give_up(self, ranks: int) -> None:
        """Let go of the slot; the store's host lets so many ranks hear of the reason before it goes."""
        self._end()
        self.board.count(self._key("done"))
        if self._hosts_store:
            self.wait_until_known(ranks, 1.0)

    def _end(self) -> None:
        holder = self._holder(self.generation, self.rank)
        if holder is not None:
            self.leave(holder)


class FreeWorld:
    """A group that workers join and leave at any time.

    All who are in it stand in one list under one key, oldest first, changed by compare and set: names and ids are
    unique because each change sees the whole list. A member that died on this host is dropped by the next to join.
    """

    generation = 1
    _ROSTER = "1/roster"

    def __init__(self, board: Board, rank: int | None, *, proof: Proof) -> None:
        self.board = board
        self.rank = rank
        self.proof = proof
        self._here = host_identity()
        self.last = ""  # the list as it was read last
        self.struck: set[str] = set()  # incarnations of those who are gone, whether the store heard of it or not

    def join(self, make_record: MakeRecord, claims: DeviceClaims, patience: Patience) -> list[Member]:
        """Enter the list under a free id; the members there are now.

        RendezvousError if the name or rank is taken, or a group of fixed size lives here. DeviceMapError if the claims
        do not fit with those of the others.
        """
        check_unmixed(self.board, self._here, patience)
        record = make_record(self._free_id() if self.rank is None else self.rank)

        def enter(members: list[Member], used: set[int]) -> list[Member]:
            alive = self.alive(members)
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
            members = [*alive, self.proof.member(record, claims, self.generation, trusted=True)]
            check_device_maps({member.record.name: member.claims for member in members}, fixed=False)
            return members

        return self._change(enter, patience)

    def founded(self) -> bool:
        """Whether anybody has ever been in this list."""
        return self.board.has(self._ROSTER)

    def leave(self, record: WorkerRecord) -> None:
        """Take a record off the list; nothing happens if it is not there."""

        def strike(members: list[Member], _: set[int]) -> list[Member]:
            return [member for member in members if member.record.incarnation != record.incarnation]

        self._change(strike, Patience(10.0))

    def resume(self, before: FreeWorld, record: WorkerRecord, patience: Patience) -> bool:
        """Enter the list of the store that was there before into this one, or this worker into the list that is here.

        before: this worker's view of that store. False if others have begun a group of their own here.
        """
        _, old, used = self._parse(before.last)
        self.struck |= before.struck
        known = {member.record.incarnation for member in old}
        stay = [member for member in old if member.record.incarnation not in self.struck]
        taken = used | {member.record.id for member in old}
        self.board.swap("1/ids", "", str(max(taken, default=-1) + 1))
        text = self.board.get(self._ROSTER) or ""
        _, here, _ = self._parse(text)
        if here and not any(member.record.incarnation in known for member in here):
            return False

        def enter(members: list[Member], _: set[int]) -> list[Member]:
            there = {member.record.incarnation for member in members}
            back = [member for member in stay if not members or member.record.incarnation == record.incarnation]
            return [*members, *(member for member in back if member.record.incarnation not in there)]

        self._change(enter, patience, remember=taken)
        return True

    abandon = leave  # it is in the list as soon as it has joined

    def trust(self, record: WorkerRecord, patience: Patience) -> None:
        """Note that this member holds the group's secret."""

        def mark(members: list[Member], _: set[int]) -> list[Member]:
            same = record.incarnation
            return [replace(m, trusted=m.trusted or m.record.incarnation == same) for m in members]

        self._change(mark, patience)

    def members(self) -> list[Member]:
        """Who is in the list now, oldest first. RendezvousError if one does not bear the seal of AIORPC_SECRET."""
        self.last = self.board.get(self._ROSTER) or ""
        _, members, _ = self._parse(self.last)
        for member in self.alive(members):
            member.check(self.proof.key, self.generation)
        # Of the dead some may be left of another group.
        return [member for member in members if member.is_known(self.proof.key, self.generation)]

    def alive(self, members: Sequence[Member]) -> list[Member]:
        """Those of the members that are not known to be dead."""
        return [member for member in members if not provably_dead(member.record, self._here)]

    def _free_id(self) -> int:
        """A number no member has or had; the counter never goes back."""
        _, members, used = self._parse(self.board.get(self._ROSTER) or "")
        taken = used | {member.record.id for member in members}
        while (candidate := self.board.count("1/ids") - 1) in taken:
            pass
        return candidate

    def _change(
        self,
        change: Callable[[list[Member], set[int]], list[Member]],
        patience: Patience,
        remember: AbstractSet[int] = frozenset(),
    ) -> list[Member]:
        """Replace the list by what `change` makes of it and of the ids that left; the new list.

        remember: ids that were used in the list of an earlier store.
        """
        before = self.board.get(self._ROSTER) or ""
        for _ in patience.tries():
            version, old, used = self._parse(before)
            members = change(old, used)
            stay = {member.record.id for member in members}
            # Those who were there remember the ids of those who left. With nobody left, all may be used again.
            used = (used | {member.record.id for member in old}) - stay if self._any_stay(old, members) else set()
            used |= remember - stay
            # The version makes each text unique, so a list that changed and changed back is still seen to differ.
            after = json.dumps(
                {"version": version + 1, "members": [member.to_json() for member in members], "used": sorted(used)}
            )
            held = self.board.swap(self._ROSTER, before, after)
            if held == after:
                self.last = after
                return members
            before = held
        raise RendezvousError(f"the list of workers could not be changed within {patience.seconds:g} s")

    @staticmethod
    def _any_stay(old: list[Member], new: list[Member]) -> bool:
        before = {member.record.incarnation for member in old}
        return any(member.record.incarnation in before for member in new)

    def _parse(self, text: str) -> tuple[int, list[Member], set[int]]:
        """Its version, the members, and the ids of those who left while others stayed."""
        return self.board.load(self._ROSTER, text, _roster_from_json) if text else (0, [], set())
