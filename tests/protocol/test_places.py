"""New processes in the places of lost members: each decision by itself, then random walks over deaths and returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.leaving import (
    Activity,
    Admit,
    Announce,
    AnswerEnters,
    Attend,
    Follow,
    GroupTable,
    Joined,
    Left,
    Lost,
    Poll,
    Refuse,
    Replaced,
    Roster,
    SendEnter,
    Welcome,
)
from aiorpc.protocol.places import Places
from aiorpc.protocol.states import PlaceState, Returning, Rounds

from .test_leaving import IDLE, Actions, Node, Request, W, World, act, answers, lead, make, require


def joiner(rank: int, number: int) -> WorkerRecord:
    """A worker in the place of W[rank]."""
    return replace(W[rank], id=number, rank=rank, incarnation=f"{number:x}", pid=100 + number)


N2 = joiner(2, 3)
LOST2 = Roster((W[0], W[1]), ((W[2], "why"),))


def with_vacancy(worker: int = 0) -> GroupTable:
    table = make(worker)
    table.lose(W[2], "why")
    return table


def coming(number: int = 3, rank: int = 2, size: int = 3) -> GroupTable:
    """The table of a newcomer."""
    members = [record for record in W[:size] if record.id != rank]
    return GroupTable(number, [*members, joiner(rank, number)], free=False, joiner=True)


# -- each by itself ----------------------------------------------------------------------------------------------------


def test_l9_the_leader_admits_whom_a_lost_member_leaves_room() -> None:
    """L9: and nobody else does; it may be asked again by another one as long as the first has not arrived."""
    assert with_vacancy(1).apply(N2) == []
    table = with_vacancy()
    assert table.apply(N2) == [Admit(N2, LOST2)] and table.expects(N2)
    other = joiner(2, 4)
    assert table.apply(other) == [Admit(other, LOST2)] and not table.expects(N2)
    assert table.arrive(N2) == [Refuse(N2, "it was not admitted, or another one was")]


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (joiner(1, 3), "w1 (rank 1, pid 2 on here) lives, and has that place"),
        (replace(N2, name="x"), "rank 2 is the place of 'w2', and not of 'x'"),
        (joiner(2, 2), "it has the number 2, which is no new one"),
        (replace(N2, rank=7), "the group has no rank 7"),
    ],
)
def test_l9_whoever_cannot_have_the_place_is_told_why(who: WorkerRecord, reason: str) -> None:
    """L9: the place of one that lives, under another name, with an old number, or none at all."""
    table = with_vacancy()
    table.members.pop(2)  # as if that number were new
    assert table.apply(who) == [Refuse(who, reason)]


def test_l9_who_has_left_leaves_room_as_well() -> None:
    """L9: a rolling restart; until the members that have entered are let go, and nobody needs another one."""
    table = make(0)
    table.depart(W[2])
    assert table.admits and table.places.vacant() == [2]
    assert table.apply(N2) == [Admit(N2, Roster((W[0], W[1]), (), (W[2],)))]
    table = lead(2)
    for _ in range(2):
        table.polled(answers(table, IDLE, IDLE), overdue=False)
    table.depart(W[1])
    assert not table.admits and table.apply(joiner(1, 2)) == []


def test_l9_who_leads_since_a_goodbye_looks_after_all_once_one_comes() -> None:
    """L9: so far all might have been about to leave; and the others make themselves known to it."""
    table = make(1)
    table.depart(W[0])
    late = joiner(0, 3)
    assert table.apply(late) == [Admit(late, Roster((W[1], W[2]), (), (W[0],)))]
    assert table.arrive(late) == [Follow(W[2]), Replaced(late, W[0]), Announce(W[2], late)]
    other = make(2)
    other.depart(W[0])
    assert other.introduce(late) == [Replaced(late, W[0]), Attend(W[1])]


def test_l9_a_newcomer_is_welcome_once_all_know_it() -> None:
    """L9: all are told, and whoever is gone meanwhile is waited for no longer."""
    table = make(0, 4)
    table.lose(W[2], "why")
    late = joiner(2, 4)
    table.apply(late)
    assert table.arrive(late) == [Replaced(late, W[2]), Announce(W[1], late), Announce(W[3], late)]
    assert table.introduced(1, 4) == [] and table.introduced(1, 4) == []
    outputs = table.lose(W[3], "too")
    roster = Roster((W[0], W[1], late), ((W[2], "why"), (W[3], "too")))
    assert Welcome(late, roster) in outputs
    assert table.introduced(3, 4) == []
    alone = make(0, 2)
    alone.lose(W[1], "why")
    late = joiner(1, 2)
    alone.apply(late)
    assert alone.arrive(late)[-1] == Welcome(late, Roster((W[0], late), ((W[1], "why"),)))


def test_l9_a_newcomer_is_told_who_has_left() -> None:
    """L9: they are no members that it may wait for, and others may have their places."""
    table = make(0, 4)
    table.lose(W[2], "why")
    table.depart(W[1])
    late = joiner(2, 4)
    roster = Roster((W[0], W[3]), ((W[2], "why"),), (W[1],))
    assert table.apply(late) == [Admit(late, roster)]
    new = coming(4, size=2)
    assert new.admitted(roster) == [Joined(W[3]), Joined(W[2]), Left(W[1]), Lost(W[2], "why", None)]
    assert new.live() == [W[0], late, W[3]] and new.places.state(1) is PlaceState.VACANT


def test_l9_a_member_takes_the_newcomer_once() -> None:
    """L9: calls go to it from then on; the leader may say so twice."""
    table = make(1)
    assert table.in_the_way(N2) == W[2]
    table.lose(W[2], "why")
    assert table.in_the_way(N2) is None
    assert table.introduce(N2) == [Replaced(N2, W[2])] and table.introduce(N2) == []
    assert table.live() == [W[0], W[1], N2] and table.leader == 0
    table.lose(N2, "again")
    assert table.places.state(2) is PlaceState.VACANT


def test_l9_a_newcomer_is_waited_for_as_any_member() -> None:
    """L9: also when it comes in the middle of the rounds."""
    table = make(0)
    table.leave()
    table.lose(W[2], "why")
    table.enter(1)
    assert table.enter(0) == [Poll((W[0], W[1]), first=True)]
    table.apply(N2)
    table.arrive(N2)
    assert table.polled(answers_of(0, 1), overdue=False) == [] and table.rounds is Rounds.GATHERING
    assert table.enter(3) == [Poll((W[0], W[1], N2), first=True)]
    table.polled(answers(table, IDLE, IDLE, IDLE), overdue=False)
    assert table.polled(answers(table, IDLE, IDLE, IDLE), overdue=False) == [AnswerEnters((1, 0, 3))]


def answers_of(*members: int) -> dict[int, Activity | None]:
    return dict.fromkeys(members, IDLE)


def test_l9_nobody_comes_once_the_group_is_let_go() -> None:
    """L9: neither one that asks, nor one that was admitted before."""
    table = lead(3)
    table.lose(W[2], "why")
    table.apply(N2)
    assert table.polled(answers_of(0, 1), overdue=False) == [Poll((W[0], W[1]), first=False)]
    assert table.polled(answers_of(0, 1), overdue=False) == [AnswerEnters((1, 0))]
    assert table.apply(joiner(2, 4)) == []
    (refusal,) = table.arrive(N2)
    assert isinstance(refusal, Refuse) and "all members are leaving just now" in refusal.reason


def test_l9_a_newcomer_whose_leader_is_lost_is_out() -> None:
    """L9: it makes itself known to nobody; the next leader, if it has heard of it, looks after it and finds out."""
    table = coming()
    assert table.admitted(LOST2) == [Joined(W[2]), Lost(W[2], "why", None)]
    assert table.lose(W[0], "too") == [Lost(W[0], "too", None)]
    table.turned_away()
    assert table.returning is Returning.OUT
    heard = with_vacancy(1)
    heard.introduce(N2)
    assert Follow(N2) in heard.lose(W[0], "too")
    assert heard.apply(N2) == []
    assert Lost(N2, "its connection broke", None) in heard.lose(N2, "its connection broke")
    again = joiner(2, 4)
    assert heard.apply(again) == [Admit(again, heard._roster())]


def test_l9_a_newcomer_whose_leader_has_changed_at_the_end_makes_itself_known() -> None:
    """L9: all know it by then."""
    table = coming()
    table.admitted(LOST2)
    other = joiner(0, 4)
    roster = Roster((W[1], N2, other), ((W[2], "why"), (W[0], "too")))
    assert table.welcomed(roster) == [Joined(other), Lost(W[0], "too", None), Attend(W[1])]
    assert table.places.holders[0] == other and table.leave() == [SendEnter(W[1])]


def test_a_place_whose_member_is_replaced_knows_the_later_one() -> None:
    """What is heard of the one before changes nothing any more."""
    places = Places([*W[:3], N2])
    places.part(W[2])
    assert places.state(2) is PlaceState.HELD and places.vacant() == []
    places.part(N2)
    assert places.vacant() == [2]


# -- any interleaving --------------------------------------------------------------------------------------------------


class Returns(World):
    """A world to which new processes come in the places of the dead, and of those that left alone.

    They meet the leader at a store that never fails.

    claims: by rank, the newcomer that claims it. replies: by newcomer, who has admitted it and what was said.
    """

    def __init__(self, size: int, source: random.Random, table: type[GroupTable] = GroupTable, *, local: bool) -> None:
        super().__init__(size, source, table, local=local)
        self.make_table = table
        self.size = size
        self.claims: dict[int, int] = {}
        self.replies: dict[int, tuple[int, Roster]] = {}
        self.replied: set[tuple[int, int]] = set()
        self.arrivals: dict[tuple[int, int], Request] = {}
        self.returned: set[int] = set()

    def _should_know(self, worker: int, dead: int) -> bool:
        # Of one that was never welcome nobody need hear, but the leader, and who has to do with it.
        return super()._should_know(worker, dead) and (dead < self.size or dead in self.returned)

    def come(self, rank: int) -> None:
        """A new process claims that rank, if its last holder is gone."""
        lives = [number for number, record in enumerate(self.records) if record.rank == rank]
        if lives[-1] not in self.dead | self.quitters:
            return
        number = len(self.nodes)
        record = joiner(rank, number)
        self.records.append(record)
        self.nodes.append(Node(self.make_table(number, [record], free=False, joiner=True), started=True))
        self.alive.add(number)
        self.coming.add(number)
        self.claims[rank] = number

    def moves(self, *, slow: bool = True, stalled: bool = False) -> list[Callable[[], object]]:
        moves = super().moves(slow=slow, stalled=stalled)
        for number in self.claims.values():
            if number not in self.alive:
                continue
            record = self.records[number]
            for each in sorted(self.alive - self.coming):
                table = self.nodes[each].table
                if (each, number) not in self.replied and table.admits and record.rank in table.places.vacant():
                    moves.append(partial(self.look, each, number))
            if self.nodes[number].table.returning is Returning.ASKING and number in self.replies:
                moves.append(partial(self.read, number))
        if not self.alive - self.coming:
            moves += [partial(self.vanish, number) for number in sorted(self.coming)]
        return moves

    def look(self, worker: int, number: int) -> None:
        """The leader sees a claim."""
        outputs = self.nodes[worker].table.apply(self.records[number])
        if outputs:
            self.replied.add((worker, number))
        self.carry_out(worker, outputs)
        if not outputs and not self._hopes():
            self.vanish(number)

    def _hopes(self) -> bool:
        return any(not self.nodes[each].table._is_over() for each in self.alive - self.coming)

    def read(self, number: int) -> None:
        """The newcomer sees that it is admitted."""
        by, roster = self.replies[number]
        self.carry_out(number, self.nodes[number].table.admitted(roster))
        if number in self.alive:
            self._request(Request("arrive", number, by))

    def vanish(self, number: int) -> None:
        """The newcomer gives up."""
        if number in self.alive:
            self.nodes[number].table.turned_away()
            self.kill(number)

    def _do_Admit(self, worker: int, output: Admit) -> None:
        self.replies[output.joiner.id] = (worker, output.roster)

    def _do_Refuse(self, worker: int, output: Refuse) -> None:
        request = self.arrivals.pop((worker, output.joiner.id), None)
        if request is not None:
            self.send(worker, output.joiner.id, "turned", request)

    def _do_Replaced(self, worker: int, output: Replaced) -> None:
        require(output.before.id in self.dead | self.quitters, "L9: takes the place of one that lives", worker, output)
        require(output.member.rank == output.before.rank, "L9: another place", worker, output)

    def _do_Announce(self, worker: int, output: Announce) -> None:
        self.send(worker, output.to.id, "introduce", output.joiner)

    def _do_Welcome(self, worker: int, output: Welcome) -> None:
        request = self.arrivals.pop((worker, output.joiner.id), None)
        if request is None or request.over:
            return
        members = self.alive - self.coming
        unaware = [each for each in members if output.joiner.id not in self.nodes[each].table.members]
        require(not unaware, "L9: welcome, and not known to all", worker, unaware)
        self.send(worker, output.joiner.id, "welcome", (request, output.roster))

    def _do_Joined(self, worker: int, output: Joined) -> None:
        require(worker in self.coming, "a group of fixed size has new members", worker, output)

    def _take_attend(self, source: int, to: int, record: WorkerRecord) -> None:
        known = record.id in self.nodes[to].table.members or to in self.coming  # which knows that it cannot know all
        require(known, "L9: makes itself known to who does not know it", source, to)
        super()._take_attend(source, to, record)

    def _take_arrive(self, source: int, to: int, request: Request) -> None:
        self.arrivals[to, source] = request
        self.carry_out(to, self.nodes[to].table.arrive(self.records[source]))

    def _take_turned(self, source: int, to: int, request: Request) -> None:
        self._end(request)
        self.vanish(to)

    def _take_welcome(self, source: int, to: int, body: tuple[Request, Roster]) -> None:
        request, roster = body
        if not request.over:
            self._end(request)
            self.returned.add(to)
            self.carry_out(to, self.nodes[to].table.welcomed(roster))
            self.coming.discard(to)

    def _take_introduce(self, source: int, to: int, record: WorkerRecord) -> None:
        self.later(to, partial(self._hear, source, to, record))

    def _hear(self, source: int, to: int, record: WorkerRecord) -> bool:
        table = self.nodes[to].table
        if source in table.gone:
            return True
        if table.leader != source:
            return False
        holder = table.in_the_way(record)
        if holder is not None:
            left = holder.id in self.quitters  # as stands in the store
            self.carry_out(to, table.depart(holder) if left else table.lose(holder, "it was replaced"))
        if to not in self.alive:
            return True
        objection = record.id not in table.members and table.places.objection(record)
        require(not objection or record.id in self.dead, "L9: a living newcomer is refused", to, record, objection)
        if not objection:
            self.carry_out(to, table.introduce(record))
        self.send(to, source, "introduced", record)
        return True

    def _take_introduced(self, source: int, to: int, record: WorkerRecord) -> None:
        self.carry_out(to, self.nodes[to].table.introduced(source, record.id))

    def _take_report(self, source: int, to: int, record: WorkerRecord) -> None:
        if record.id in self.nodes[to].table.members:
            super()._take_report(source, to, record)

    def fail(self, request: Request) -> None:
        over = request.over
        super().fail(request)
        if request.kind == "arrive" and not over and request.source in self.coming:
            self.vanish(request.source)


class ReturnsActions(Actions):
    """JoiningMembers, too."""

    world: Returns

    def come(self) -> None:
        """One or two at once."""
        for _ in range(self.source.choice((1, 1, 2))):
            self.world.come(self.source.randrange(self.world.size))

    def kill_newcomer(self) -> None:
        """In the midst of its coming."""
        if self.world.coming:
            self.world.kill(self.source.choice(sorted(self.world.coming)))


WALKS = 250
MORE = 1500  # of them in the long tier
WORK = {"move": 40, "start_job": 4, "finish_job": 3, "leave": 1, "kill": 3, "quit": 2, "come": 6}
WORK |= {"kill_newcomer": 1, "stall": 1}
LEAVE = {"move": 40, "finish_job": 6, "kill": 1, "come": 3, "kill_newcomer": 1, "stall": 1}


def walk(seed: int, table: type[GroupTable] = GroupTable) -> Returns:
    """A random life of two to five places, to its end. Raises Violation when an invariant breaks."""
    source = random.Random(seed)
    world = Returns(source.randint(2, 5), source, table, local=source.random() < 0.4)
    actions = ReturnsActions(world, deaths=source.randint(1, 6), quits=source.randrange(3), bounds=False)
    act(actions, WORK, steps=120)
    for worker in sorted(world.alive - world.coming):
        if worker in world.alive and world.nodes[worker].working and source.random() < 0.7:
            world.leave(worker)
    act(actions, LEAVE, steps=60)
    world.settle()
    world.finish()
    return world


def test_every_invariant_holds_in_random_walks_with_returns() -> None:
    """L1 to L9: members die, also leaders and two at once, and new ones come, also twice into one place."""
    check_walks(range(WALKS))


@pytest.mark.long
def test_every_invariant_holds_in_more_random_walks_with_returns() -> None:
    """L1 to L9 once more."""
    check_walks(range(WALKS, MORE))


def check_walks(seeds: range) -> None:
    worlds = [walk(seed) for seed in seeds]
    assert sum(len(world.returned) for world in worlds) > len(seeds) // 2
    assert sum(len(world.returned) > 1 for world in worlds) > len(seeds) // 20
