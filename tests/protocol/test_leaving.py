"""Leaving together: each invariant of `aiorpc/protocol/leaving.py` by itself, then all of them in random walks."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.ids import IdSet
from aiorpc.protocol.leaving import (
    REMEMBERED,
    WATCHERS,
    Activity,
    AnswerEnters,
    Attend,
    AwaitIdle,
    CloseDoor,
    Follow,
    Forget,
    Go,
    GroupTable,
    Joined,
    Left,
    Lost,
    Output,
    Outputs,
    Overdue,
    Poll,
    ReportLost,
    Rest,
    SendEnter,
)
from aiorpc.protocol.states import LEAVING, Leaving, Rounds
from tests.tiers import examples

W = [
    WorkerRecord(
        name=f"w{number}",
        id=number,
        incarnation=f"{number:x}",
        host="here",
        hostname="here",
        pid=1 + number,
        main="main",
        unix_path="",
        tcp_host="",
        tcp_port=0,
    )
    for number in range(6)
]
IDLE, BUSY = Activity(True, 3), Activity(False, 3)
FINISHING: Outputs = [CloseDoor(alone=True), AwaitIdle()]


# -- each by itself ----------------------------------------------------------------------------------------------------


def make(worker: int, size: int = 3, *, free: bool = False) -> GroupTable:
    return GroupTable(worker, W[:size], free=free)


def lead(size: int = 3) -> GroupTable:
    """A leader whose members have all entered, itself last: it has begun to poll."""
    table = make(0, size)
    assert table.leave() == [SendEnter(W[0])]
    for member in range(1, size):
        assert table.enter(member) == []
    assert table.enter(0) == [Poll(tuple(W[:size]), first=True)]
    return table


def answers(table: GroupTable, *activities: Activity | None) -> dict[int, Activity | None]:
    return dict(zip((record.id for record in table.live()), activities, strict=True))


def test_l1_nobody_is_let_go_before_all_have_entered() -> None:
    """L1: the rounds begin with the last ENTER."""
    table = make(0)
    assert table.enter(1) == table.enter(0) == table.enter(1) == []
    assert table.enter(2) == [Poll(tuple(W[:3]), first=True)]
    assert table.polled(answers(table, IDLE, IDLE, IDLE), overdue=False) == [Poll(tuple(W[:3]), first=False)]
    assert table.polled(answers(table, IDLE, IDLE, IDLE), overdue=False) == [AnswerEnters((1, 0, 2))]


@pytest.mark.parametrize("leader", [0, 1])
def test_l1_a_loss_ends_nobodys_waiting_for_the_living(leader: int) -> None:
    """L1: whether a member or the leader was lost: the rounds begin with the ENTER of the last that lives."""
    table = make(leader, 4)
    table.leave()
    table.enter(2)
    if leader:
        table.lose(W[0], "why")
        table.enter_failed(0)
    else:
        table.lose(W[1], "why")
    assert table.enter(leader) == []
    assert table.leaving is Leaving.ENTERED and table.rounds is Rounds.GATHERING
    assert table.enter(3) == [Poll((W[leader], W[2], W[3]), first=True)]


QUIET = (IDLE, IDLE)
NOT_QUIET: dict[str, tuple[tuple[Activity | None, ...], tuple[Activity | None, ...]]] = {
    "busy in both": ((IDLE, BUSY), (IDLE, BUSY)),
    "busy before": ((IDLE, BUSY), QUIET),
    "busy now": (QUIET, (IDLE, BUSY)),
    "woken between": (QUIET, (IDLE, Activity(True, 4))),
    "silent in both": ((IDLE, None), (IDLE, None)),
    "silent before": ((IDLE, None), QUIET),
}


@pytest.mark.parametrize("case", NOT_QUIET)
def test_l2_only_two_equal_idle_rounds_let_go(case: str) -> None:
    """L2: a call that is under way, or was between the rounds, or may be, makes the leader ask again after a pause."""
    table = lead(2)
    before, now = NOT_QUIET[case]
    assert table.polled(answers(table, *before), overdue=False) == [Poll((W[0], W[1]), first=False)]
    assert table.polled(answers(table, *now), overdue=False) == [Rest()]
    assert table.rested() == [Poll((W[0], W[1]), first=False)]


def test_l2_a_bound_lets_go_all_the_same() -> None:
    """L2: once the rounds have taken too long, whoever had calls under way is named."""
    table = lead(2)
    table.polled(answers(table, IDLE, None), overdue=False)
    assert table.polled(answers(table, IDLE, None), overdue=True) == [Overdue((1,)), AnswerEnters((1, 0))]
    table = lead(2)
    assert table.polled(answers(table, BUSY, IDLE), overdue=True) == [Overdue((0,)), AnswerEnters((1, 0))]


def test_l3_all_are_let_go_once_they_are_idle() -> None:
    """L3: after any number of rounds, two quiet ones are enough; the time of the rounds has no say in that."""
    table = lead(2)
    table.polled(answers(table, BUSY, IDLE), overdue=False)
    for _ in range(5):
        assert table.polled(answers(table, BUSY, IDLE), overdue=False) == [Rest()]
        assert table.rested() == [Poll((W[0], W[1]), first=False)]
    assert table.polled(answers(table, *QUIET), overdue=False) == [Rest()]
    table.rested()
    assert table.polled(answers(table, *QUIET), overdue=True) == [AnswerEnters((1, 0))]
    assert table.enter_answered() == [Go(complete=True)]
    assert table.enter(1) == [AnswerEnters((1,))]


def test_l4_a_death_is_waited_for_by_nobody() -> None:
    """L4: the leader begins without the one that was lost, and goes on without it in the middle of its rounds."""
    table = make(0)
    table.enter(1)
    table.enter(0)
    outputs = table.lose(W[2], "for the test")
    assert outputs[-1] == Poll((W[0], W[1]), first=True) and Lost(W[2], "for the test", None) in outputs
    found = answers(table, IDLE, IDLE)
    assert AnswerEnters((1,)) in table.lose(W[1], "for the test")
    assert table.polled(found, overdue=False) == [Poll((W[0],), first=False)]
    assert table.polled({0: IDLE}, overdue=False) == [AnswerEnters((0,))]


def test_l4_a_member_enters_again_at_the_next_leader() -> None:
    """L4: also when the next leader is that member, and whether the old one died or left."""
    table = make(2)
    assert table.leave() == [SendEnter(W[0])]
    table.lose(W[0], "for the test")
    assert table.enter_failed(0) == [SendEnter(W[1])]
    table.depart(W[1])
    assert table.enter_failed(1)[-1] == SendEnter(W[2])
    assert table.enter(2) == [Poll((W[2],), first=True)]


def test_l4_who_leads_after_a_goodbye_looks_after_the_rest() -> None:
    """L4: once it has asked to leave, for then it waits for them; once."""
    table = make(1)
    assert table.depart(W[0]) == [Left(W[0])]
    assert table.leave() == [Follow(W[2]), SendEnter(W[1])]
    table = make(1, 4)
    table.leave()
    table.lose(W[2], "why")
    assert table.depart(W[0]) == [Left(W[0])]
    assert table.enter_failed(0) == [Follow(W[3]), ReportLost(W[3], W[2], "why"), SendEnter(W[1])]
    table = make(1)
    table.lose(W[0], "why")
    assert table.leave() == [SendEnter(W[1])]


def test_l5_the_live_member_with_the_lowest_id_leads() -> None:
    """L5: whether those before it died or left."""
    table = make(2, 4)
    assert (table.leader, table.leads) == (0, False)
    table.depart(W[0])
    assert (table.leader, table.leads) == (1, False)
    table.lose(W[1], "for the test")
    assert (table.leader, table.leads) == (2, True)
    assert [record.id for record in table.live()] == [2, 3]


def test_l5_a_lost_leader_is_replaced() -> None:
    """L5: the next one follows the others, and tells them; the others make themselves known to it."""
    lost = Lost(W[0], "why", None)
    told = ReportLost(W[2], W[0], "why")
    assert make(1).lose(W[0], "why") == [Follow(W[2]), told, lost]
    assert make(2).lose(W[0], "why") == [Attend(W[1]), lost]


def test_l5_a_member_of_a_free_group_is_known_to_the_oldest() -> None:
    """L5: it makes itself known to a few, however many there are; without the list, to all."""
    assert make(0, 6, free=True).start() == []
    assert make(2, 6, free=True).start() == [Attend(W[0]), Attend(W[1])]
    table = make(5, 6, free=True)
    assert table.start() == [Attend(record) for record in W[:WATCHERS]]
    assert table.turn() == []
    assert table.unlisted(9) == [Attend(W[4])] and table.unlisted(9) == []
    table = make(5, 6, free=True)
    assert [table.unlisted(2) for _ in range(4)] == [[*map(Attend, each)] for each in (W[:2], W[2:4], W[4:5], [])]
    assert make(0).turn() == make(0).unlisted(9) == []


def test_l5_the_next_oldest_take_the_place_of_watchers() -> None:
    """L5: once this worker looks, and not at each departure. The oldest one follows all that are left."""
    table = make(5, 6, free=True)
    table.start()
    table.lose(W[0], "why")
    table.depart(W[3])
    assert table.turn() == [Attend(W[4])] and table.turn() == []
    oldest = make(1, 6, free=True)
    oldest.start()
    oldest.lose(W[0], "why")
    assert oldest.turn() == [Follow(record) for record in W[2:]] and oldest.turn() == []
    leaving = make(1, 6, free=True)
    leaving.leave()
    leaving.lose(W[0], "why")
    assert leaving.turn() == []


@pytest.mark.parametrize("size", [1_000, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.slow])])
def test_joining_and_the_news_of_a_death_cost_a_member_a_bounded_number_of_messages(size: int) -> None:
    """However many members a free group has: as they join, as a watcher dies, and as another member does."""
    records = [replace(W[0], name=f"w{number}", id=number, incarnation=f"{number:x}") for number in range(size)]
    sampled = [0, 1, WATCHERS, WATCHERS + 1, *random.Random(7).sample(range(2 * WATCHERS, size), 8), size - 1]
    for number in sampled:
        table = GroupTable(number, records[: number + 1], free=True)
        assert len(table.start()) <= WATCHERS
        for later in records[number + 1 :]:
            assert table.join(later) == [Joined(later)] and table.turn() == []
        for victim in (records[2], records[size // 2]):
            told = [*table.lose(victim, "why"), *table.turn()]
            lost, messages = (
                [each for each in told if isinstance(each, Lost)],
                [each for each in told if isinstance(each, (Attend, Follow, ReportLost))],
            )
            assert len(lost) == (number != victim.id) and len(messages) <= 1


def test_l7_the_leader_tells_the_others_of_a_loss() -> None:
    """L7: nobody else does, and nobody in a free group, where the list shows it."""
    lost = Lost(W[2], "why", None)
    assert make(0, 4).lose(W[2], "why") == [ReportLost(W[1], W[2], "why"), ReportLost(W[3], W[2], "why"), lost]
    assert make(1, 4).lose(W[2], "why") == [lost]
    assert make(0, 4, free=True).lose(W[2], "why") == [lost]


def test_l8_a_member_goes_once() -> None:
    """L8: later news of it, and of this worker itself, is none."""
    table, error = make(0), OSError("broken")
    assert table.lose(W[1], "why", error)[-1] == Lost(W[1], "why", error)
    assert table.lose(W[1], "again") == table.depart(W[1]) == []
    assert table.lose(W[0], "why") == table.depart(W[0]) == []
    assert table.lost == {1: W[1].info} and set(table.gone) == {1}


def test_of_many_that_are_gone_a_free_group_remembers_the_latest() -> None:
    """Any number may come and go: what is kept does not grow, and who is gone is never taken for a newcomer."""
    table, count = make(0, 1, free=True), 3 * REMEMBERED
    guests = [replace(W[1], id=number, name=f"g{number}") for number in range(1, count + 1)]
    forgotten = []
    for number, guest in enumerate(guests):
        assert table.join(guest) == [Joined(guest)]
        outputs = table.lose(guest, "why") if number % 2 else table.depart(guest)
        forgotten += [output.member for output in outputs if isinstance(output, Forget)]
        assert table.join(guest) == table.lose(guest, "again") == table.depart(guest) == []
    assert forgotten == guests[:-REMEMBERED]
    assert [*table.members.values()] == [W[0], *guests[-REMEMBERED:]] and table.live() == [W[0]]
    assert [*table.lost] == [guest.id for guest in guests[-REMEMBERED:] if guest.id % 2 == 0]
    assert table.gone.ranges() == [(1, count + 1)]


def test_a_large_free_group_remembers_all_that_were_there_at_once() -> None:
    """However many they were: when all have gone, each of them can be told."""
    table = make(0, 1, free=True)
    guests = [replace(W[1], id=number, name=f"g{number}") for number in range(1, 3 * REMEMBERED)]
    for guest in guests:
        table.join(guest)
    assert not [output for guest in guests for output in table.depart(guest) if isinstance(output, Forget)]
    assert len(table.members) == 3 * REMEMBERED


def test_a_member_of_a_free_group_closes_its_door_at_once() -> None:
    """Others are no concern of it, unless it hosts their store: then it stays, and serves, until all have gone."""
    table = make(1, free=True)
    assert table.leave() == FINISHING and table.idle() == [Go(complete=True)]
    table = make(1, free=True)
    assert table.leave(hosts_store=True) == [] and table.leaving is Leaving.STAYING
    assert table.depart(W[0]) == [Left(W[0])]
    assert table.lose(W[2], "why") == [Lost(W[2], "why", None), *FINISHING]
    assert table.join(W[3]) and table.idle() == [] and table.leaving is Leaving.STAYING
    assert table.depart(W[3]) == [Left(W[3]), *FINISHING]
    assert table.idle() == [Go(complete=True)]
    table = make(0, 1, free=True)
    assert table.leave(hosts_store=True) == FINISHING and table.idle() == [Go(complete=True)]


@pytest.mark.parametrize("free", [False, True])
def test_a_worker_that_drains_leaves_without_the_others(free: bool) -> None:
    """At work, while it waits for the others, and while it hosts their store; once, and whatever else ends the wait."""
    working, waiting, hosting = make(1, free=free), make(1, free=free), make(1, free=free)
    waiting.leave(hosts_store=True)
    hosting.leave(hosts_store=True)
    for table in (working, waiting, hosting):
        assert table.drain() == FINISHING and table.drain() == []
        assert table.idle() == [Go(complete=True)]
        assert table.drain() == table.idle() == table.give_up() == table.enter_answered() == []
        assert table.enter_failed(0) == [] and table.leaving is Leaving.LEFT


def test_a_leave_of_all_goes_on_when_a_member_drains() -> None:
    """Its door is closed already; and a leader that drains lets nobody go before its goodbye."""
    table = make(1)
    table.leave()
    table.all_entered(0)
    assert table.drain() == [] and table.enter_answered() == [Go(complete=True)]
    leader = make(0)
    leader.drain()
    assert [leader.enter(member) for member in (1, 2, 3)] == [[], [], []]
    assert leader.idle() == [Go(complete=True)]


def test_a_host_that_drains_does_not_stay() -> None:
    """In a free group the others need the store that it hosts: a drain that comes as its calls end ends that, too."""
    table = make(1, free=True)
    table.depart(W[0])
    table.depart(W[2])
    table.depart(W[3])
    assert table.leave(hosts_store=True) == FINISHING
    table.join(replace(W[3], id=9))
    assert table.drain() == [] and table.idle() == [Go(complete=True)]


def test_l3_a_poll_closes_the_door() -> None:
    """L3: of a member that has entered, once, and by the word of its leader alone; what comes next is as before."""
    table = make(1)
    assert table.all_entered(0) == []  # it works
    table.leave()
    assert table.all_entered(2) == []
    assert table.all_entered(0) == [CloseDoor(alone=False)] and table.all_entered(0) == []
    assert table.leaving is Leaving.FINISHING
    table.lose(W[0], "why")
    assert table.enter_failed(0)[-1] == SendEnter(W[1])
    assert table.all_entered(1) == []
    assert table.enter_answered() == [Go(complete=True)]


def test_giving_up_ends_every_wait_once() -> None:
    """Whatever is waited for; a bound that passes in the moment of the answer changes nothing."""
    entered, finishing, staying, polled = make(1), make(1, free=True), make(1, free=True), make(1)
    entered.leave()
    finishing.leave()
    staying.leave(hosts_store=True)
    polled.leave()
    polled.all_entered(0)
    for table in (entered, finishing, staying, polled):
        assert table.give_up() == [Go(complete=False)] and table.give_up() == []
        assert table.leaving is Leaving.LEFT


STEPS = [(row.source, row.event) for row in LEAVING.transitions]


# -- a small world: workers, connections, what a runtime does with a table, and an oracle that knows everything --------


class Violation(AssertionError):
    """An invariant was broken."""


def require(condition: bool, *what: object) -> None:
    if not condition:
        raise Violation(*what)


@dataclass(eq=False)
class Request:
    """A call of the runtime (enter, poll) or of a user (job), until it is answered or fails. parent: who made it so."""

    kind: str
    source: int
    to: int
    parent: Request | None = None
    running: bool = False  # a job that has arrived
    over: bool = False


@dataclass(eq=False)
class Node:
    """What the runtime of one worker keeps beside its table. calls: made and served by users, in all."""

    table: GroupTable
    working: bool = True  # its user has not asked it to leave
    started: bool = False
    stalled: bool = False
    calls: int = 0
    enters: dict[int, list[Request]] = field(default_factory=dict)
    found: dict[int, Activity | None] | None = None  # the answers of the round that is under way
    asked: int = 0
    bounded: bool = False  # its user has given a timeout, which has passed
    shut: bool = False  # its door is closed


Frame = tuple[str, object]
Event = Callable[[], object]  # returns False if it is too early for it


class World:
    """Workers joined by one FIFO queue per ordered pair. local: whether they can watch each other's processes.

    Whoever connects to another hears its goodbye or its end on that connection, behind all that it has sent.
    Some queues, drawn by lot, are slow; or, where the world is unlucky, each poll waits until its receiver is idle.
    """

    def __init__(self, size: int, source: random.Random, table: type[GroupTable] = GroupTable, *, local: bool) -> None:
        self.source = source
        self.local = local
        self.nodes = [Node(table(number, W[:size], free=False)) for number in range(size)]
        self.records = W[:size]
        self.coming: set[int] = set()  # newcomers that are no members yet
        self.alive = set(range(size))
        self.dead: set[int] = set()
        self.quitters: set[int] = set()  # that left before the others
        self.all_entered = False  # a leader has begun its rounds
        self.forced = False  # a bound let a whole group go
        self.overdue = False  # that may happen
        self.leaderless = False  # a leader has left before the others
        self.busy = {number for number in range(size) if source.random() < 0.2}  # with such a thread
        self.let_go = 0  # how many left because they were told that they may
        self.queues: dict[tuple[int, int], deque[Frame]] = {}
        self.connected: set[tuple[int, int]] = set()
        self.watching: set[tuple[int, int]] = set()
        self.slow = {pair for pair in itertools.product(range(size), repeat=2) if source.random() < 0.2}
        self.unlucky = False  # polls come when nothing is to be seen
        self.events: list[tuple[int, Event]] = []
        self.requests: dict[Request, None] = {}
        self.news: set[tuple[int, int]] = set()
        for number in range(size):
            self.later(number, partial(self.start, number))

    # what a runtime does

    def start(self, worker: int) -> None:
        """It begins to serve: some time after the others may have met it."""
        if not self.nodes[worker].started:
            self.nodes[worker].started = True
            self.carry_out(worker, self.nodes[worker].table.start())

    def carry_out(self, worker: int, outputs: Outputs) -> None:
        self.forced = self.forced or any(isinstance(output, Overdue) for output in outputs)
        for output in outputs:
            if worker not in self.alive:
                return
            self._check_receiver(worker, output)
            getattr(self, "_do_" + type(output).__name__)(worker, output)

    def _do_Attend(self, worker: int, output: Attend) -> None:
        self.send(worker, output.to.id, "attend", self.records[worker])

    def _do_Follow(self, worker: int, output: Follow) -> None:
        if not self.local:
            self.send(worker, output.to.id, "attend", self.records[worker])
            return
        self.watching.add((worker, output.to.id))
        if output.to.id not in self.alive:
            self.notice(worker, output.to.id)

    def _do_ReportLost(self, worker: int, output: ReportLost) -> None:
        self.send(worker, output.to.id, "report", output.member)

    def _do_Lost(self, worker: int, output: Lost) -> None:
        require((worker, output.member.id) not in self.news, "L8: gone twice", worker, output)
        self.news.add((worker, output.member.id))
        self.queues.pop((output.member.id, worker), None)
        for request in list(self.requests):
            if request.to == worker and request.source == output.member.id:
                self._end(request)
            elif request.source == worker and request.to == output.member.id:
                self.later(worker, partial(self.fail, request))

    _do_Left = _do_Lost

    def _do_SendEnter(self, worker: int, output: SendEnter) -> None:
        self._request(Request("enter", worker, output.to.id))

    def _do_AnswerEnters(self, worker: int, output: AnswerEnters) -> None:
        waiting = [member for member in output.members if member not in self.nodes[worker].table.gone]
        if waiting:
            self._check_let_go(worker)
        for member in output.members:
            for request in self.nodes[worker].enters.pop(member, []):
                if member in waiting:
                    self.send(worker, member, "entered", request)

    def _do_Poll(self, worker: int, output: Poll) -> None:
        node = self.nodes[worker]
        require(node.found is None, "L5: two rounds at once", worker)
        if output.first:
            working = [each for each in self.alive - self.coming if self.nodes[each].working]
            require(not working, "L1: has all close their doors while others work", worker, working)
            self.all_entered = True
        require(worker == min(self.alive - self.coming), "L5: polls, and does not lead", worker)
        node.found, node.asked = {}, len(output.members)
        for record in output.members:
            if record.id == worker:
                self.later(worker, lambda: self._answer_poll(worker, worker, self.polled(worker, worker)))
            else:
                self._request(Request("poll", worker, record.id))

    def _do_Rest(self, worker: int, output: Rest) -> None:
        self.later(worker, lambda: self.carry_out(worker, self.nodes[worker].table.rested()))

    def _do_Overdue(self, worker: int, output: Overdue) -> None:
        pass

    def _do_CloseDoor(self, worker: int, output: CloseDoor) -> None:
        require(not output.alone, "L3: it leaves with all others", worker)
        require(not self.nodes[worker].shut, "L3: a door is closed once", worker)
        require(self.all_entered, "L1: closes its door while others work", worker)
        self.nodes[worker].shut = True

    def _do_Go(self, worker: int, output: Go) -> None:
        self.let_go += output.complete
        if not self.nodes[worker].bounded:
            self._check_let_go(worker)
        self.quit(worker)

    def _answer_poll(self, worker: int, member: int, activity: Activity | None) -> None:
        node = self.nodes[worker]
        assert node.found is not None
        node.found[member] = activity
        if len(node.found) == node.asked:
            found, node.found = node.found, None
            overdue = self.overdue and self.source.random() < 0.1
            self.carry_out(worker, node.table.polled(found, overdue=overdue))

    def _request(self, request: Request) -> None:
        self.requests[request] = None
        self.send(request.source, request.to, request.kind, request)

    def _end(self, request: Request) -> None:
        request.over, request.running = True, False
        self.requests.pop(request, None)

    def fail(self, request: Request) -> None:
        """A call that its peer owes an answer fails: at once if the peer was lost, later if it has left."""
        if request.over:
            return
        self._end(request)
        if request.kind == "enter":
            self.carry_out(request.source, self.nodes[request.source].table.enter_failed(request.to))
        elif request.kind == "poll":
            self._answer_poll(request.source, request.to, None)

    def send(self, source: int, to: int, kind: str, body: object) -> None:
        if to in self.alive:
            self.connected |= {(source, to), (to, source)}
            self.queues.setdefault((source, to), deque()).append((kind, body))
        elif (source, to) not in self.connected:
            self.notice(source, to)  # it cannot be reached

    def later(self, worker: int, event: Event) -> None:
        self.events.append((worker, event))

    def notice(self, worker: int, gone: int) -> None:
        """That worker finds out by itself, some time, that another one has ended."""

        self.later(worker, partial(self._look, worker, gone))

    def _look(self, worker: int, gone: int) -> bool:
        if gone not in self.dead and self.queues.get((gone, worker)):
            return False  # the goodbye that it wrote before it ended is read first
        self.carry_out(worker, self.nodes[worker].table.lose(self.records[gone], "gone"))
        return True

    def quit(self, worker: int) -> None:
        """It leaves, with a goodbye to all that are connected to it."""
        self.leaderless = self.leaderless or worker == min(self.alive - self.coming)
        self._remove(worker)
        for other in self.alive:
            if (worker, other) in self.connected:
                self.queues.setdefault((worker, other), deque()).append(("goodbye", self.records[worker]))

    def kill(self, worker: int) -> None:
        """It dies. Of what it sent to each other worker some still arrives; then comes the end of the connection."""
        self._remove(worker)
        self.dead.add(worker)
        for other in self.alive:
            queue = self.queues.setdefault((worker, other), deque())
            keep = self.source.randint(0, len(queue))
            while len(queue) > keep:
                queue.pop()
            if (worker, other) in self.connected:
                queue.append(("end", self.records[worker]))
            if not queue:
                del self.queues[worker, other]

    def _remove(self, worker: int) -> None:
        self.alive.discard(worker)
        self.events = [(each, event) for each, event in self.events if each != worker]
        self.coming.discard(worker)
        for other in range(len(self.nodes)):
            self.queues.pop((other, worker), None)
            if other in self.alive and (other, worker) in self.watching:
                self.notice(other, worker)
        for request in list(self.requests):
            if request.to == worker:
                request.running = False
            if request.source == worker and not request.running:
                self._end(request)

    # frames arriving

    def deliver(self, source: int, to: int) -> None:
        queue = self.queues[source, to]
        kind, body = queue.popleft()
        if not queue:
            del self.queues[source, to]
        getattr(self, "_take_" + kind)(source, to, body)

    def _take_attend(self, source: int, to: int, record: WorkerRecord) -> None:
        self.carry_out(to, self.nodes[to].table.join(record))

    def _take_report(self, source: int, to: int, record: WorkerRecord) -> None:
        self.carry_out(to, self.nodes[to].table.lose(record, "reported"))

    def _take_end(self, source: int, to: int, record: WorkerRecord) -> None:
        self.carry_out(to, self.nodes[to].table.lose(record, "its connection broke"))

    def _take_goodbye(self, source: int, to: int, record: WorkerRecord) -> None:
        self.carry_out(to, self.nodes[to].table.depart(record))

    def _take_enter(self, source: int, to: int, request: Request) -> None:
        self.nodes[to].enters.setdefault(source, []).append(request)
        self.carry_out(to, self.nodes[to].table.enter(source))

    def _take_entered(self, source: int, to: int, request: Request) -> None:
        if not request.over:
            self._end(request)
            self.carry_out(to, self.nodes[to].table.enter_answered())

    def _take_poll(self, source: int, to: int, request: Request) -> None:
        self.send(to, source, "polled", (request, self.polled(to, source)))

    def _take_polled(self, source: int, to: int, body: tuple[Request, Activity]) -> None:
        request, activity = body
        if not request.over:
            self._end(request)
            self._answer_poll(to, source, activity)

    def _take_job(self, source: int, to: int, request: Request) -> None:
        self.nodes[to].calls += 1
        if source in self.alive and not request.over:
            request.running = True

    def _take_done(self, source: int, to: int, request: Request) -> None:
        self._end(request)

    # what users do

    def jobs(self, worker: int) -> list[Request]:
        """The calls that it serves."""
        return [each for each in self.requests if each.running and each.to == worker]

    def polled(self, worker: int, leader: int) -> Activity:
        self.carry_out(worker, self.nodes[worker].table.all_entered(leader))
        return self.activity(worker)

    def activity(self, worker: int) -> Activity:
        busy = any(each.kind == "job" and each.source == worker for each in self.requests) or self.jobs(worker)
        return Activity(not busy, self.nodes[worker].calls)

    def start_job(self, worker: int, to: int, parent: Request | None = None) -> None:
        """parent: what a handler serves that makes the call; None for the user's program, which a closed door stops."""
        table = self.nodes[worker].table
        if parent is None and self.nodes[worker].shut:
            return
        if to in table.members and to not in table.gone:
            self.nodes[worker].calls += 1
            self._request(Request("job", worker, to, parent))

    def finish_job(self, request: Request) -> None:
        request.running = False
        self.send(request.to, request.source, "done", request)

    def leave(self, worker: int) -> None:
        self.start(worker)
        self.nodes[worker].working = False
        self.carry_out(worker, self.nodes[worker].table.leave())

    def give_up(self, worker: int) -> None:
        self.nodes[worker].bounded = True
        self.carry_out(worker, self.nodes[worker].table.give_up())

    # the oracle

    def _check_receiver(self, worker: int, output: Output) -> None:
        table = self.nodes[worker].table
        told = output.members if isinstance(output, Poll) else (getattr(output, "to", None),)
        for record in told:
            require(record is None or record.id not in table.gone, "L6: told to the gone", worker, output)
        if isinstance(output, (Follow, ReportLost)):
            leads = worker == min({record.id for record in table.members.values()} - table.gone)
            require(leads, "L5: leads out of turn", worker, output)

    def _check_let_go(self, worker: int) -> None:
        if self.forced:
            return
        working = [each for each in self.alive - self.coming if self.nodes[each].working]
        require(not working, "L1: let go while others work", worker, working)
        under_way = [each for each in self.requests if each.kind == "job" and self._counts(each)]
        require(not under_way, "L2: let go while a call is under way", worker, under_way)

    def _counts(self, request: Request | None) -> bool:
        """Whether a call, and all that led to it, is between workers that live."""
        while request is not None:
            if request.source not in self.alive or request.to not in self.alive:
                return False
            request = request.parent
        return True

    # to the end

    def moves(self, *, slow: bool = True, stalled: bool = False) -> list[Callable[[], object]]:
        """All that can happen by itself now. slow, stalled: also what is slow, and at those that stall."""
        awake = {each for each in self.alive if stalled or not self.nodes[each].stalled}
        pairs = [pair for pair in self.queues if pair[1] in awake and (slow or not self._is_slow(pair))]
        events = [
            entry for entry in self.events if entry[0] in awake and (slow or (entry[0], entry[0]) not in self.slow)
        ]
        moves: list[Callable[[], object]] = [partial(self.deliver, *pair) for pair in pairs]
        return moves + [partial(self._happen, entry) for entry in events]

    def _is_slow(self, pair: tuple[int, int]) -> bool:
        if self.unlucky:
            return self.queues[pair][0][0] == "poll" and not self.activity(pair[1]).idle
        return pair in self.slow

    def _happen(self, entry: tuple[int, Event]) -> None:
        if entry[1]() is not False and entry in self.events:
            self.events.remove(entry)

    def settle(self) -> None:
        """Nothing new begins until all know of all losses."""
        for _ in range(500 * len(self.nodes)):
            moves = self.moves(stalled=True)
            if not moves or not self._unknown_losses():
                break
            self.source.choice(moves)()
        require(not self._unknown_losses(), "L7: never heard of a loss", self._unknown_losses())

    def _unknown_losses(self) -> list[tuple[int, int]]:
        if self.leaderless:
            return []
        members = self.alive - self.coming
        return [(each, dead) for each in members for dead in self.dead if self._should_know(each, dead)]

    def _should_know(self, worker: int, dead: int) -> bool:
        table = self.nodes[worker].table
        return dead in table.members and dead not in table.gone

    def finish(self) -> None:
        """All users have asked to leave, all calls end, and nobody stalls any more: then all are let go.

        Some have threads that go on to make calls all the time, as far as they are let.
        """
        for _ in range(2000 * len(self.nodes)):
            for worker in sorted(self.alive - self.coming):
                if worker in self.alive and self.nodes[worker].working:
                    self.leave(worker)
            if not self.alive:
                return
            running = [each for each in self.requests if each.running]
            moves = self.moves(stalled=True)
            moves += [partial(self.finish_job, each) for each in running]
            busy = sorted(self.alive & self.busy)
            moves += [partial(self.start_job, each, self.source.choice(sorted(self.alive))) for each in busy]
            require(bool(moves), "L4: waits for ever", {each: self.nodes[each].table.leaving for each in self.alive})
            self.source.choice(moves)()
        raise Violation("L3: rounds without end")


# -- any interleaving --------------------------------------------------------------------------------------------------


class Actions:
    """What may happen in a world besides its moves, each with a weight."""

    def __init__(self, world: World, *, deaths: int, quits: int, bounds: bool) -> None:
        self.world = world
        self.source = world.source
        self.deaths, self.quits, self.bounds = deaths, quits, bounds

    def _any(self) -> int:
        return self.source.choice(sorted(self.world.alive - self.world.coming))

    def move(self) -> None:
        moves = self.world.moves(slow=self.source.random() < 0.1) or self.world.moves()
        if moves:
            self.source.choice(moves)()

    def start_job(self) -> None:
        """A call: by a handler that runs there, or by the user of a worker, also one that has asked it to leave."""
        worker, to = self._any(), self.source.randrange(len(self.world.nodes))
        serving = self.world.jobs(worker)
        if serving and self.source.random() < 0.7:
            self.world.start_job(worker, to, self.source.choice(serving))
        else:
            self.world.start_job(worker, to)

    def finish_job(self) -> None:
        running = [each for each in self.world.requests if each.running and not self.world.nodes[each.to].stalled]
        if running:
            self.world.finish_job(self.source.choice(running))

    def pass_on(self) -> None:
        """A handler makes a call and does not wait for its answer."""
        running = [each for each in self.world.requests if each.running]
        if running:
            job = self.source.choice(running)
            self.world.start_job(job.to, self.source.randrange(len(self.world.nodes)), job)
            self.world.finish_job(job)

    def leave(self) -> None:
        worker = self._any()
        if self.world.nodes[worker].working:
            self.world.leave(worker)

    def kill(self) -> None:
        """One dies, or two at once: then one of them may have seen nothing of the other's death."""
        for _ in range(self.source.choice((1, 1, 2))):
            if self.deaths and len(self.world.alive - self.world.coming) > 1:
                self.deaths -= 1
                self.world.kill(self.source.choice((self._any(), min(self.world.alive))))

    def quit(self) -> None:
        """A shutdown that is not graceful."""
        if self.quits and len(self.world.alive - self.world.coming) > 1:
            self.quits -= 1
            worker = self._any()
            self.world.quitters.add(worker)
            self.world.quit(worker)

    def stall(self) -> None:
        node = self.world.nodes[self._any()]
        node.stalled = not node.stalled

    def poll_unheard(self) -> None:
        """A poll has timed out; its answer may come later, to nobody."""
        polls = [each for each in self.world.requests if each.kind == "poll"]
        if polls:
            self.world.fail(self.source.choice(polls))

    def give_up(self) -> None:
        """The bound that the user gave has passed."""
        worker = self._any()
        if not self.world.nodes[worker].working and self.bounds:
            self.world.give_up(worker)


@dataclass
class Lifecycle:
    """A kind of walk. deaths: at most. work, leave: weights of actions before and after most users are done.

    jobs: calls that are under way when they are. steps: of that second part. unlucky: see `World`.
    """

    deaths: int
    work: dict[str, int]
    leave: dict[str, int]
    sizes: tuple[int, int] = (2, 5)
    jobs: int = 0
    steps: int = 80
    unlucky: bool = False


TROUBLE = {"kill": 1, "stall": 1, "poll_unheard": 2, "give_up": 1}
LIVES = [
    Lifecycle(
        deaths=2,
        work={"move": 30, "start_job": 8, "finish_job": 4, "leave": 2, "quit": 1, **TROUBLE},
        leave={"move": 30, "start_job": 6, "finish_job": 8, **TROUBLE},
    ),
    # Few connections besides the star, so that a death is seen by few.
    Lifecycle(
        deaths=4,
        work={"move": 12, "start_job": 2, "finish_job": 1, "leave": 1, "quit": 1, **TROUBLE, "kill": 2},
        leave={"move": 12, **TROUBLE},
    ),
    # One call that hops from worker to worker while the leader asks them one after the other, each when it is idle.
    Lifecycle(
        deaths=0,
        work={"move": 1},
        leave={"move": 30, "pass_on": 10},
        sizes=(4, 5),
        jobs=1,
        steps=150,
        unlucky=True,
    ),
]
WALKS = 2400


def walk(seed: int, table: type[GroupTable] = GroupTable) -> World:
    """A random life of two to five workers, to its end. Raises Violation when an invariant breaks."""
    source, life = random.Random(seed), LIVES[seed % len(LIVES)]
    world = World(source.randint(*life.sizes), source, table, local=source.random() < 0.4)
    actions = Actions(world, deaths=life.deaths, quits=source.randrange(2), bounds=source.random() < 0.1)
    world.unlucky = life.unlucky
    world.overdue = source.random() < 0.1
    act(actions, life.work, steps=40)
    act(actions, {"start_job": 1}, steps=life.jobs)
    for worker in sorted(world.alive):
        if world.nodes[worker].working and source.random() < 0.9:
            world.leave(worker)
    act(actions, life.leave, steps=life.steps)
    world.settle()
    world.finish()
    return world


def act(actions: Actions, weights: dict[str, int], steps: int) -> None:
    for name in actions.source.choices(list(weights), weights=list(weights.values()), k=steps):
        if actions.world.alive - actions.world.coming:
            getattr(actions, name)()


@pytest.mark.random
def test_every_invariant_holds_in_random_walks() -> None:
    """L1 to L8: calls, leaves, deaths, stalls and bounds in any order; each death seen at another time by each."""
    walks = examples(WALKS)
    worlds = [walk(seed) for seed in range(walks)]
    assert sum(world.let_go for world in worlds) > 2 * walks
    for what in ("dead", "forced", "leaderless"):
        assert sum(bool(getattr(world, what)) for world in worlds) > walks // 100, what


# --- sets of ids, as ranges -------------------------------------------------------------------------------------------


NUMBERS = st.lists(st.integers(-3, 25))


@settings(max_examples=examples(300))
@given(NUMBERS, NUMBERS)
def test_it_is_as_a_set(first: list[int], second: list[int]) -> None:
    """Whatever is added in whatever order; its ranges are in order, apart, and lead to the same set."""
    ids, others = IdSet(first), IdSet(second)
    assert set(ids) == {*first} and len(ids) == len({*first})
    assert all((number in ids) == (number in {*first}) for number in range(-4, 27))
    assert set(ids.union(others)) == {*first, *second} and set(ids) == {*first}
    ends = [number for each in ids.union(others).ranges() for number in each]
    assert ends == sorted({*ends})
    assert IdSet.from_ranges(ids.ranges()) == ids


def test_many_that_come_and_go_are_a_few_ranges() -> None:
    """As many as a member lives: those who are gone lie between those who are there."""
    ids, there = IdSet(), {7, 30_000}
    for number in range(100_000):
        if number not in there:
            ids.add(number)
    assert ids.ranges() == [(0, 7), (8, 30_000), (30_001, 100_000)]
    assert 7 not in ids and 8 in ids


@pytest.mark.parametrize("ranges", [[[0]], [[0, "1"]], [[0, 0]], [[3, 5], [5, 7]], [[3, 5], [1, 2]], [[0, 1, 2]], 5])
def test_what_are_no_ranges_is_refused(ranges: object) -> None:
    """It comes from a store that anybody may have written to."""
    with pytest.raises((ValueError, TypeError)):
        IdSet.from_ranges(ranges)  # type: ignore[arg-type]  # on purpose
