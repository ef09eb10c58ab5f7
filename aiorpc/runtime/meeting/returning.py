"""The store's part in taking the place of a lost member. Blocking; see `protocol/leaving.py`.

Keys beside those of `fixed.py`, G being the number of the generation, all of one group that has formed:

    G/slot/RANK/LIFE      holder number LIFE of the place of that rank; taken once, by compare and set
    G/ids                 counts the joining members: each has a new id
    G/answer/ID           the leader's answer to the joining member of that id: it is admitted, or why not
    G/there/ID            the joining member of that id has become a member

A claim stands until its process gives up (G/end/ID) or is proved dead. If no member of the group lives, no claim is
answered, and the joining members form the next generation.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...devices import DeviceClaims
from ...errors import RendezvousError, StoreGone
from ...protocol.identity import WorkerRecord
from ...protocol.leaving import Roster
from ...undoing import on_error
from ..engine.host import host_identity, provably_dead, sees
from .fixed import CLOSED, has_formed
from .key_value import KeyValueClient
from .membership import SET_IT, Member, Proof, same_process
from .patience import Patience

# Seconds to wait for the leader while the member whose place is claimed looks alive from here.
_LIVING_PATIENCE = 2.0
# Seconds between two looks at the members, also for the first byte of a listener; and for an address to answer.
_LOOK_PAUSE, _ANSWER = 0.25, 1.0


@dataclass(frozen=True)
class Answer:
    """The leader's answer to a joining member: an admission or a refusal. by: the incarnation of the leader.

    members: the ids of the living members. lost: those of lost members, with the causes. left: those of members that
    left. seal: as of `Member`.
    """

    by: str
    refused: str = ""
    members: tuple[int, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    left: tuple[int, ...] = ()
    seal: str = ""

    def sealed(self, key: bytes | None, generation: int, joiner: str) -> Answer:
        """With the seal for the joining member of that incarnation; unchanged without AIORPC_SECRET."""
        return self if key is None else replace(self, seal=self._seal(key, generation, joiner))

    def is_genuine(self, key: bytes | None, generation: int, joiner: str) -> bool:
        """Whether its seal is right."""
        return key is None or hmac.compare_digest(self._seal(key, generation, joiner).encode(), self.seal.encode())

    def _seal(self, key: bytes, generation: int, joiner: str) -> str:
        said = json.dumps(["aiorpc answer", generation, joiner, *self.to_json()[:-1]])
        return hmac.digest(key, said.encode(), "sha256").hex()

    def to_json(self) -> list[object]:
        """The form `from_json` reads."""
        lost = [[*each] for each in self.lost]
        return [self.by, self.refused, [*self.members], lost, [*self.left], self.seal]

    @classmethod
    def from_json(cls, value: Any) -> Answer:
        """The answer; ValueError, TypeError or LookupError if `value` is none."""
        by, refused, members, lost, left, seal = value
        ids = (*members, *(member for member, _ in lost), *left)
        if not all(type(each) is int for each in ids) or not seal.isascii():
            raise ValueError("no answer to a joining member")
        causes = tuple((member, "" + cause) for member, cause in lost)
        return cls("" + by, "" + refused, tuple(members), causes, tuple(left), "" + seal)


@dataclass(frozen=True)
class Admission:
    """The admission of a joining member: the leader that admits it, and the group's members."""

    by: WorkerRecord
    members: tuple[Member, ...]
    lost: tuple[tuple[WorkerRecord, str], ...]
    left: tuple[WorkerRecord, ...]

    @property
    def roster(self) -> Roster:
        """The group, as the leader sees it."""
        return Roster(tuple(member.record for member in self.members), self.lost, self.left)


def _listens_as_workers_do(host: str, port: int) -> bool:
    """Whether a listener there waits for the first byte, as workers do. If not, another program has the port now."""
    try:
        with socket.create_connection((host, port), _ANSWER) as connection:
            connection.settimeout(_LOOK_PAUSE)
            try:
                connection.recv(1)
            except TimeoutError:
                return True
    except OSError:
        pass
    return False


class PlacesInStore:
    """The places of one generation in the store. proof: of this worker, for its own claim."""

    def __init__(self, kv: KeyValueClient, generation: int, world_size: int, proof: Proof) -> None:
        self.kv = kv
        self.generation = generation
        self.world_size = world_size
        self.proof = proof
        self.key: bytes | None = proof.key
        self._here = host_identity()

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def lives(self, rank: int) -> list[Member]:
        """All holders and claimants of that place, in order; entries with a wrong seal are left out."""
        found: list[Member] = []
        for life in itertools.count():
            key = self._key(f"slot/{rank}/{life}" if life else f"slot/{rank}")
            entry = self.kv.get(key)
            if entry is None:
                break
            member = self._load(key, entry)
            if self._is_genuine(member, rank):
                found.append(member)
        return found

    def _is_genuine(self, member: Member, rank: int) -> bool:
        sealed = member.own_secret or self.key is None
        return sealed and member.is_known(self.key, self.generation) and member.record.rank == rank

    def _load(self, key: str, entry: str) -> Member:
        return self.kv.load(key, entry, Member.from_json)

    def holder(self, rank: int) -> Member | None:
        """The latest member in that place, which may have ended; None if there was none."""
        lives = self.lives(rank)
        there = [each for each in lives if each.record.id == rank or self._is_there(each.record)]
        return there[-1] if there else None

    def claimant(self, rank: int) -> Member | None:
        """The joining member that claims the place and may still become a member; None if there is none."""
        lives = self.lives(rank)
        last = lives[-1] if lives else None
        if last is None or last.record.id == rank or self._is_there(last.record) or self.has_ended(last.record):
            return None
        return last

    def _is_there(self, record: WorkerRecord) -> bool:
        return self.kv.get(self._key(f"there/{record.id}")) == record.incarnation

    def has_left(self, record: WorkerRecord) -> bool:
        """Whether the store says that it has ended: it left, or its successor wrote so."""
        return self.kv.get(self._key(f"end/{record.id}")) == record.incarnation

    def has_ended(self, record: WorkerRecord) -> bool:
        """Whether it has left, or is proved dead."""
        return self.has_left(record) or provably_dead(record, self._here)

    def end(self, record: WorkerRecord) -> None:
        """Write that it has ended."""
        self.kv.put(self._key(f"end/{record.id}"), record.incarnation)

    def settle_in(self, record: WorkerRecord, before: WorkerRecord) -> None:
        """A joining member has become a member: write so, and that the one before it has ended."""
        self.kv.put(self._key(f"there/{record.id}"), record.incarnation)
        self.end(before)

    # --- the joining member
    # -------------------------------------------------------------------------------------------------

    def claim(self, record: WorkerRecord, claims: DeviceClaims) -> Member:
        """Claim the place of the record's rank under a new id; the entry in the store.

        RendezvousError if another living worker claims it already.
        """
        number = self.world_size - 1 + self.kv.count(self._key("ids"))
        record = replace(record, id=number)
        member = self.proof.member(record, claims, self.generation)
        entry = json.dumps(member.to_json())
        life = 1
        while (held := self.kv.swap(key := self._key(f"slot/{record.rank}/{life}"), "", entry)) != entry:
            other = self._load(key, held)
            over = self._is_there(other.record) or self.has_ended(other.record)
            if self._is_genuine(other, record.rank) and not over:
                if other.record.incarnation == record.incarnation:
                    return other  # written before the connection to the store broke
                raise RendezvousError(
                    f"rank {record.rank} was taken twice: {other.record.describe()} is about to take the place of the "
                    f"member that is gone, and so wants {record.describe()}"
                )
            life += 1
        return member

    def answer(self, joiner: WorkerRecord) -> Answer | None:
        """The leader's answer to a joining member, if there is one."""
        key = self._key(f"answer/{joiner.id}")
        text = self.kv.get(key)
        answer = None if text is None else self.kv.load(key, text, Answer.from_json)
        genuine = answer is not None and answer.is_genuine(self.key, self.generation, joiner.incarnation)
        return answer if genuine else None

    def admission(self, answer: Answer) -> Admission:
        """The admission in an answer, with the records of the members that it names."""
        known = {each.record.id: each for rank in range(self.world_size) for each in self.lives(rank)}
        try:
            by = next(each.record for each in known.values() if each.record.incarnation == answer.by)
            members = tuple(known[member] for member in answer.members)
            lost = tuple((known[member].record, cause) for member, cause in answer.lost)
            left = tuple(known[member].record for member in answer.left)
        except (StopIteration, KeyError):
            raise self.kv.rubbish(self._key("answer"), "an answer with an unknown id") from None
        return Admission(by, members, lost, left)

    def named(self, incarnation: str) -> str:
        """The member of that incarnation, for people."""
        lives = (each.record for rank in range(self.world_size) for each in self.lives(rank))
        return next((each.describe() for each in lives if each.incarnation == incarnation), "a member")

    def is_over(self, joiner: WorkerRecord) -> bool:
        """Whether no other member of the group is left: each has ended, or shows no sign of life while a joining member
        claims its place."""
        for rank in range(self.world_size):
            holder = None if rank == joiner.rank else self.holder(rank)
            if holder is None or self.has_ended(holder.record):
                continue
            claimant = self.claimant(rank)
            if claimant is None or self.sign_of_life(holder.record, claimant.record):
                return False
        return True

    def sign_of_life(self, record: WorkerRecord, joiner: WorkerRecord) -> str:
        """The evidence from here that a worker lives, for the joining member that wants its place; "" if there is
        none."""
        if sees(self._here, record.host):
            alive = not provably_dead(record, self._here)
            return f"process {record.pid} of this host runs" if alive else ""
        if (record.tcp_host, record.tcp_port) == (joiner.tcp_host, joiner.tcp_port):
            return ""  # the joining member itself listens there, as after a reboot with the same ports
        if record.tcp_port and _listens_as_workers_do(record.tcp_host, record.tcp_port):
            return f"it takes connections at {record.tcp_host}:{record.tcp_port}"
        return ""

    # --- the members --------------------------------------------------------------------------------------------------

    def applicants(self, ranks: Sequence[int]) -> list[WorkerRecord]:
        """The workers that claim the places of these ranks and may still become members."""
        found = [self.claimant(rank) for rank in ranks]
        return [each.record for each in found if each is not None]

    def reply(self, joiner: WorkerRecord, answer: Answer) -> None:
        """Write the answer to a joining member."""
        sealed = answer.sealed(self.key, self.generation, joiner.incarnation)
        self.kv.put(self._key(f"answer/{joiner.id}"), json.dumps(sealed.to_json()))


class JoiningInStore:
    """The workers that want vacant places, as one member of the group sees and answers them in the store.

    record: of this member. serve: lets a joining member find the secret that the members made; None if it was given
    one. check_there: raises StoreGone if the store has gone.
    """

    def __init__(
        self,
        places: PlacesInStore,
        record: WorkerRecord,
        serve: Callable[[WorkerRecord], None] | None,
        check_there: Callable[[], None],
    ) -> None:
        self._places = places
        self._record = record
        self._serve = serve
        self._check_there = check_there

    def applicants(self, ranks: Sequence[int]) -> list[WorkerRecord]:
        """The joining members that claim the places of these ranks. StoreGone if the store has gone."""
        self._check_there()
        return self._places.applicants(ranks)

    def admit(self, joiner: WorkerRecord, roster: Roster) -> None:
        """As the leader, admit a joining member: write who is in the group, and give it the secret."""
        if self._serve is not None:
            if joiner.host != self._record.host and self._places.proof.require_secret is not False:
                self.turn_away(
                    joiner,
                    "it is on another host than the leader, or of another user, and AIORPC_SECRET is not set: "
                    f"{SET_IT}",
                )
                return
            self._serve(joiner)
        members = tuple(member.id for member in roster.members)
        lost = tuple((member.id, cause) for member, cause in roster.lost)
        left = tuple(member.id for member in roster.left)
        self._places.reply(joiner, Answer(self._record.incarnation, "", members, lost, left))

    def turn_away(self, joiner: WorkerRecord, reason: str) -> None:
        """As the leader, refuse a joining member, with the reason."""
        self._places.reply(joiner, Answer(self._record.incarnation, refused=reason))


class Return:
    """One joining member's way into a group that has formed: its claim, and the wait for the leader's answer.

    member: the joining member. admission: of the leader, once it has answered.
    """

    admission: Admission

    def __init__(self, places: PlacesInStore, member: Member, before: WorkerRecord, left: bool) -> None:
        """left: whether the member before has left in good order; the others may be about to leave, too."""
        self._places = places
        self._left = left
        self._before = before
        self.member = member
        self.record: WorkerRecord = member.record

    @property
    def generation(self) -> int:
        """Of the group."""
        return self._places.generation

    def wait(self, patience: Patience) -> bool:
        """Wait for admission; False if the group is over, and the next one forms. RendezvousError: it is refused."""
        places, began, looked = self._places, time.monotonic(), 0.0
        for _ in patience.tries():
            answer = places.answer(self.record)
            if answer is not None and answer.refused:
                raise self._refused(f"says {places.named(answer.by)}, which leads the group: {answer.refused}")
            if answer is not None:
                self.admission = places.admission(answer)
                return True
            places.kv.check_open()
            if time.monotonic() - looked < _LOOK_PAUSE and not self._left:
                continue
            sign = "" if self._left else places.sign_of_life(self._before, self.record)
            over = places.kv.number("generation") > places.generation or places.is_over(self.record)
            if over and not sign:
                places.end(self._before)  # its successor is the proof
                return False
            if sign and time.monotonic() - began > _LIVING_PATIENCE:
                raise self._refused(
                    f"and the first lives: {sign}. {CLOSED}{same_process(self._before, self.record)}".strip()
                )
            looked = time.monotonic()
        raise self._refused(
            f"and no member of the group that runs has let it in within {patience.seconds:g} s; that is for "
            f"its leader, once {self._before.name!r} is gone for it"
        )

    def _refused(self, why: str) -> RendezvousError:
        if self._left:
            before = f"the place of {self._before.describe()}, which has left"
            return RendezvousError(f"{self.record.describe()} cannot have {before}, {why}")
        both = f"by {self._before.describe()} and by {self.record.describe()}"
        return RendezvousError(f"rank {self.record.rank} was taken twice: {both}, {why}")

    def settle_in(self) -> None:
        """Call it when all members know this worker."""
        self._places.settle_in(self.record, self._before)

    def give_up(self) -> None:
        """Take the claim back."""
        with contextlib.suppress(StoreGone):
            self._places.end(self.record)


def come_back(places: PlacesInStore, record: WorkerRecord, claims: DeviceClaims, patience: Patience) -> Return | None:
    """Take the place of that record's rank in a group that has formed; None if no such group runs or it has no such
    place.

    RendezvousError, which says who has the place, if it cannot be had.
    """
    formed = places.generation and has_formed(places.kv, places.generation, places.world_size)
    if not formed or places.proof.lacks_secret:  # `FixedWorld.join` raises for a worker without the secret
        return None
    before = places.holder(record.rank)
    if before is None or before.record.incarnation == record.incarnation:
        return None
    left = places.has_left(before.record)
    if left and places.is_over(record):  # all have left together; the next generation forms
        return None
    member = places.claim(record, claims)
    made = Return(places, member, before.record, left)
    with on_error(made.give_up):
        if made.wait(patience):
            return made
    made.give_up()
    return None
