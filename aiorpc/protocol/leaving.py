"""Who is in a group, who leads it, and how all leave together: the decisions, without I/O and without time.

A group of fixed size is a star: every member makes itself known to the leader, the live member with the lowest id. The
leader sees a member die and tells the others; when it dies itself, the next one leads. In a free group every member
makes itself known to the oldest ones (`WATCHERS`), which see it die; the others see in the list of the group who comes
and goes. Without that list all members connect with all. A worker leaves by one rule: it closes its door, and goes once
the calls that it had accepted by then are over. A member
of a free group does so as soon as its program asks. A fixed group leaves together, as torch programs expect: each
member goes on serving until all have entered, and then all close their doors. A member that drains leaves by itself, in
both; the others go on, and another process may take its place.

    member                         leader
    ENTER (a call)         -->     notes it; once every live member has entered:
    closes its door        <--     POLL (calls): idle? how many calls so far?   ... two equal, idle rounds in a row
    leaves                 <--     answers all ENTERs
    GOODBYE                        GOODBYE

Why two rounds: an idle worker wakes up only by a call, and behind a closed door calls start only at workers that are
not idle. If all were idle in both rounds and no member's count of calls changed between them, nothing was under way in
between. Without the door a thread that makes calls back to back could keep all members without end.

One `GroupTable` per worker. Its methods take events and return what is to be done, in order; they never block, and must
be called by one thread at a time. The leader's own ENTER is a message to itself. The guarantees, with their tests in
`tests/protocol/test_leaving.py`:

1. No member leaves before every live member has entered, after any losses, unless its user bounds the waiting.
   `test_l1_nobody_is_let_go_before_all_have_entered`, `test_l1_a_loss_ends_nobodys_waiting_for_the_living`
2. No member is let go while a call is under way between live members, unless a bound was passed.
   `test_l2_only_two_equal_idle_rounds_let_go`
3. Once all live members have entered and the calls are over that were accepted by then, all are let go in a bounded
   number of steps, even if their programs begin new calls meanwhile.
   `test_l3_all_are_let_go_once_they_are_idle`, `test_l3_a_poll_closes_the_door`
4. A death leaves no live member waiting: a member that waited for the dead one goes on without it, and a member that
   had entered at a dead leader enters at the next one.
   `test_l4_a_death_is_waited_for_by_nobody`, `test_l4_a_member_enters_again_at_the_next_leader`,
   `test_l4_who_leads_after_a_goodbye_looks_after_the_rest`
5. The leader is the live member with the lowest id, and only a member that believes itself the leader polls, answers or
   reports. `test_l5_the_live_member_with_the_lowest_id_leads`, `test_l5_a_lost_leader_is_replaced`. In a free group
   each member is known to the oldest live ones, also after losses.
   `test_l5_a_member_of_a_free_group_is_known_to_the_oldest`, `test_l5_the_next_oldest_take_the_place_of_watchers`
6. Nothing is sent to a member that is known to be gone. `test_l6_nothing_is_told_to_the_gone`
7. In a fixed group a loss becomes known to all live members, as long as no leader has left before the others.
   `test_l7_the_leader_tells_the_others_of_a_loss`, `test_l7_a_new_leader_tells_of_earlier_losses`
8. The loss or goodbye of a member is reported once, and is final. `test_l8_a_member_goes_once`
9. The leader admits a joining member in the place of a lost one. It is a member once all living ones know it.
   `test_l9_the_leader_admits_whom_a_lost_member_leaves_room`, `test_l9_who_has_left_leaves_room_as_well`,
   `test_l9_a_newcomer_is_welcome_once_all_know_it`, `test_l9_a_newcomer_is_waited_for_as_any_member`,
   `test_l9_nobody_comes_once_the_group_is_let_go`, `test_l9_a_newcomer_whose_leader_is_lost_is_out`,
   `test_l9_who_leads_since_a_goodbye_looks_after_all_once_one_comes`

How a joining member comes (it meets the leader in the store; all later messages go over proved connections):

    joining member                       store              leader                               others
    claims the rank     -->        claim      <--     reads, while a place is vacant
    reads               <--        answer     <--     ADMIT: who is in the group
    ARRIVE (a call)     ------------------------->    treats it as a member
                                                      INTRODUCE (calls)         -->        treat it as a member
    its `init` returns  <-------------------------    answers ARRIVE, once all have answered or are gone

If the leader is lost during that, only some may know the joining member. Its number is then void: it ends, as if it had
died, and begins anew as another joining member, if it has time. Members that knew the first one find it dead; the next
leader at once, because a leader watches all members that it knows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .identity import WorkerInfo, WorkerRecord
from .ids import IdSet
from .places import Places
from .states import LEAVING, RETURNING, ROUNDS, Leaving, PlaceState, ReturnEvent, Returning, Rounds, Step, Turn

#: So many of the oldest members of a free group have a connection from each other member. Up to one more are a full
#: mesh, and one of them may be stopped.
WATCHERS = 4
#: Least number of departed members of a free group that are remembered.
REMEMBERED = 64


class Activity(NamedTuple):
    """The answer to a poll. calls: how many calls of users the worker has made and served so far."""

    idle: bool
    calls: int


@dataclass(frozen=True, slots=True)
class Attend:
    """Tell `to` that this worker is a member, over a connection that is then kept."""

    to: WorkerRecord


@dataclass(frozen=True, slots=True)
class Follow:
    """Make sure that this worker hears of the death of `to`.

    Its process is watched if that is possible from here; otherwise a connection is kept to it, as for Attend.
    """

    to: WorkerRecord


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Tell `to` that another member was lost. cause: for people."""

    to: WorkerRecord
    member: WorkerRecord
    cause: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is new here: tell the program."""

    member: WorkerRecord


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is lost: all that waits for it here fails. error: the exception behind it, if any."""

    member: WorkerRecord
    cause: str
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Left:
    """A member has left in good order: all that waits for it here fails, once no answer can be on its way any more."""

    member: WorkerRecord


@dataclass(frozen=True, slots=True)
class Forget:
    """A member was gone for so long that nothing needs to be remembered of it."""

    member: WorkerRecord


@dataclass(frozen=True, slots=True)
class Roster:
    """The group for a joining member, from the leader: the members that live, those that were lost, and why.

    left: those that have left before it came.
    """

    members: tuple[WorkerRecord, ...]
    lost: tuple[tuple[WorkerRecord, str], ...]
    left: tuple[WorkerRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Admit:
    """Write into the store that this joining member may take the place that it claims, and who is in the group."""

    joiner: WorkerRecord
    roster: Roster


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer in the store, or to its ARRIVE, that this joining member cannot have the place, and why."""

    joiner: WorkerRecord
    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A joining member has the place of a member that is gone: from now on calls by name and rank go to it."""

    member: WorkerRecord
    before: WorkerRecord


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell `to` of that joining member, by a call. The event `introduced` follows, or the loss of `to`."""

    to: WorkerRecord
    joiner: WorkerRecord


@dataclass(frozen=True, slots=True)
class Welcome:
    """All members know that joining member: answer its ARRIVE with the present roster."""

    joiner: WorkerRecord
    roster: Roster


@dataclass(frozen=True, slots=True)
class SendEnter:
    """Tell the leader `to`, which may be this worker, that our program is done. An event follows:

    `enter_answered` when the call returned, `enter_failed` when it raised, as it must when the leader is gone.
    """

    to: WorkerRecord


@dataclass(frozen=True, slots=True)
class AnswerEnters:
    """These members may leave: answer their ENTERs. A call of a dead member has to end, too."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Poll:
    """Ask these members, this worker among them, for their activity. The event `polled` follows.

    first: whether the time limit of all rounds starts with this one.
    """

    members: tuple[WorkerRecord, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait a little, longer each time within the same rounds. The event `rested` follows."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """All are let go although these members still have calls under way, or have not answered: log it."""

    busy: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseDoor:
    """From now on refuse what this worker's program begins; calls that it waits for get a grace.

    alone: whether it leaves by itself: then new calls of others are refused, too. Otherwise the others close their
    doors as well, and what still comes belongs to calls that they had accepted.
    """

    alone: bool


@dataclass(frozen=True, slots=True)
class AwaitIdle:
    """Wait until no call of users is under way at this worker. The event `idle` follows."""


@dataclass(frozen=True, slots=True)
class Go:
    """Leave now. complete: whether all work is over, as far as this worker knows. At most once."""

    complete: bool


Output = (
    Attend
    | Follow
    | ReportLost
    | Joined
    | Lost
    | Left
    | Forget
    | Admit
    | Refuse
    | Replaced
    | Announce
    | Welcome
    | SendEnter
    | AnswerEnters
    | Poll
    | Rest
    | Overdue
    | CloseDoor
    | AwaitIdle
    | Go
)
Outputs = list[Output]


class GroupTable:
    """One worker's view of its group.

    worker_id: this worker's id. members: the known records, its own included. free: members join and leave at any time.
    joiner: this worker takes the place of a departed member, and the others do not know it yet.
    Ids of workers are never reused.
    """

    def __init__(self, worker_id: int, members: Iterable[WorkerRecord], *, free: bool, joiner: bool = False) -> None:
        self.worker_id = worker_id
        self.free = free
        self.members: dict[int, WorkerRecord] = {record.id: record for record in members}
        self.lost: dict[int, WorkerInfo] = {}
        self.gone: IdSet = IdSet()  # of all that were lost or have left
        self._departed: deque[WorkerRecord] = deque()  # of a free group: the departed members that are remembered
        self._largest = len(self.members)
        self.leaving: Leaving = Leaving.WORKING
        self.rounds: Rounds = Rounds.GATHERING
        self.places: Places = Places(self.members.values())
        self.returning: Returning = RETURNING.initial if joiner else Returning.MEMBER
        self._introducing: dict[int, set[int]] = {}  # by joining member: the members that have not answered yet
        self._middle = self.leader  # the leader to which we have last made ourselves known
        self._attended: set[int] = set()  # of a free group: the members to which this worker has made itself known
        self._losses: list[tuple[WorkerRecord, str]] = []
        self._hosts_store = False
        self._waiting: dict[int, None] = {}  # members that have entered and wait for the answer, in that order
        self._answered: set[int] = set()
        self._previous: dict[int, Activity | None] | None = None  # the answers of the last round

    @property
    def leader(self) -> int:
        """The id of the member that coordinates a group of fixed size; in a free group of the oldest."""
        if self.free:  # the list has the oldest first, and later members come behind
            return next((each for each in list(self.members) if each not in self.gone), self.worker_id)
        return min((record.id for record in self.live()), default=self.worker_id)

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader."""
        return self.leader == self.worker_id

    def live(self) -> list[WorkerRecord]:
        """The members that have neither left nor been lost, including this worker. Any thread."""
        return [record for record in list(self.members.values()) if record.id not in self.gone]

    # -- members come and go ----------------------------------------------------------------------------------------

    def start(self) -> Outputs:
        """This worker is ready to serve: make it known to the leader; in a free group, to the oldest members."""
        self._middle = self.leader
        if self.free:
            return self._attend(self._oldest())
        if self.leads:
            # A member may die before it has made itself known to us.
            return [Follow(record) for record in self._others()]
        return [Attend(self.members[self.leader])]

    def turn(self) -> Outputs:
        """In a free group, from time to time: old members may be gone, and the next ones watch in their place.

        Not at once, because many may leave one after the other. A member that leaves does not need them. The oldest one
        looks after all others: one of them may have died before it turned to this worker.
        """
        if not self.free or self.leaving not in (Leaving.WORKING, Leaving.STAYING):
            return []
        before, self._middle = self._middle, self.leader
        outputs = self._attend(self._oldest())
        if self.leads and before != self.worker_id:
            outputs += [Follow(record) for record in self._others()]
        return outputs

    def unlisted(self, at_once: int) -> Outputs:
        """The list of a free group is gone: while it is, members hear of each other only over their connections.

        at_once: to so many of them this worker turns now; the list may be there again soon.
        """
        unmet = (record for record in self._others() if record.id not in self._attended)
        return self._attend(itertools.islice(unmet, at_once)) if self.free else []

    def _oldest(self) -> list[WorkerRecord]:
        """The watchers of a free group that are older than this worker: the others turn to it."""
        live = (record for record in self.members.values() if record.id not in self.gone)
        return list(itertools.takewhile(lambda record: record.id != self.worker_id, itertools.islice(live, WATCHERS)))

    def _attend(self, members: Iterable[WorkerRecord]) -> Outputs:
        """Make this worker known to those that do not know it yet."""
        unmet = [record for record in members if record.id not in self._attended]
        self._attended.update(record.id for record in unmet)
        return [Attend(record) for record in unmet]

    def join(self, record: WorkerRecord) -> Outputs:
        """A member announces itself, or the rendezvous names it. Nothing follows if it was known."""
        if record.id in self.members or record.id in self.gone:
            return []
        self.members[record.id] = record
        self._largest = max(self._largest, len(self.members) - len(self._departed))
        return [Joined(record)]

    def lose(self, record: WorkerRecord, cause: str, error: BaseException | None = None) -> Outputs:
        """A member died or cannot be reached. Nothing follows if it is gone already, or if it is this worker."""
        if record.id in self.gone or record.id == self.worker_id:
            return []
        led = record.id == self.leader
        self.gone.add(record.id)
        self.lost[record.id] = record.info
        self.places.part(record)
        if not self.free:
            self._losses.append((record, cause))
        outputs = self._take_over() if led else self._report(self._losses[-1:])
        parted = [*self._part(record.id), Lost(record, cause, error), *self._after_parting()]
        return [*outputs, *parted, *self._forget(record)]

    def depart(self, record: WorkerRecord) -> Outputs:
        """A member has said goodbye. Nothing follows if it is gone already, or if it is this worker."""
        if record.id in self.gone or record.id == self.worker_id:
            return []
        if self.free:  # it may have left before it was known here
            self.members.setdefault(record.id, record)
        self.gone.add(record.id)
        self.places.part(record)
        return [*self._part(record.id), Left(record), *self._after_parting(), *self._forget(record)]

    def _forget(self, departed: WorkerRecord) -> Outputs:
        """In a free group, where any number of workers may come and go, only the latest departed are remembered:

        as many as there ever were members at once, and at least `REMEMBERED`. Of the others only the ids stay.
        """
        if not self.free:
            return []
        self._departed.append(departed)
        if len(self._departed) <= max(REMEMBERED, self._largest):
            return []
        forgotten = self._departed.popleft()
        self.members.pop(forgotten.id, None)
        self.lost.pop(forgotten.id, None)
        self._attended.discard(forgotten.id)
        return [Forget(forgotten)]

    def _others(self) -> list[WorkerRecord]:
        return [record for record in self.live() if record.id != self.worker_id]

    def _take_over(self) -> Outputs:
        """The leader is gone: a new one takes its place, and repeats the reports that the old one may not have sent."""
        if self.free or self.returning is not Returning.MEMBER:  # the others do not know this worker yet
            return []
        return [*self.start(), *self._report(self._losses)]

    def _report(self, losses: Iterable[tuple[WorkerRecord, str]]) -> Outputs:
        if self.free or not self.leads:
            return []
        return [ReportLost(other, record, cause) for record, cause in losses for other in self._others()]

    def _part(self, member: int) -> Outputs:
        """Drop what this worker, as the leader, has of a departed member: its ENTER, and its open announcements."""
        self._answered.discard(member)
        self._introducing.pop(member, None)
        welcome = [each for joiner in list(self._introducing) for each in self.introduced(member, joiner)]
        if member not in self._waiting:
            return welcome
        del self._waiting[member]
        return [AnswerEnters((member,)), *welcome]

    def _after_parting(self) -> Outputs:
        """A member is gone: it may have been the last one that the others waited for."""
        if self.leaving is Leaving.STAYING and not self._others():
            return self._finish(Step.ALONE)
        return self._begin_rounds()

    # -- joining members in vacant places, as the leader ------------------------------------------------------------

    @property
    def admits(self) -> bool:
        """Whether this worker must look for joining members: it leads a group that goes on, and a place is vacant."""
        return not self.free and self.leads and not self._is_over() and bool(self.places.vacant())

    def apply(self, joiner: WorkerRecord) -> Outputs:
        """A claim for a place is in the store. Nothing follows if this worker cannot decide it, or not now."""
        if self.free or not self.leads or self._is_over() or joiner.id in self.members:
            return []
        objection = self.places.objection(joiner)
        if objection:
            return [Refuse(joiner, objection)]
        self.places.promise(joiner)
        return [Admit(joiner, self._roster())]

    def _roster(self) -> Roster:
        left = [each for each in self.members.values() if each.id in self.gone and each.id not in self.lost]
        return Roster(tuple(self.live()), tuple(self._losses), tuple(left))

    def expects(self, stranger: WorkerRecord) -> bool:
        """Whether an unknown worker may be a member: this one has admitted it, or is new itself and does not know
        all."""
        return self.returning is not Returning.MEMBER or self.places.promised.get(stranger.rank) == stranger

    def arrive(self, joiner: WorkerRecord) -> Outputs:
        """A joining member has proved itself, and asks to become a member."""
        if self._is_over():
            return [Refuse(joiner, "all members are leaving just now; it can be in the group that they form next")]
        if self.places.promised.get(joiner.rank) != joiner:
            return [Refuse(joiner, "it was not admitted, or another one was")]
        # A leader since the goodbye of the last one has not watched the others so far; now the group goes on.
        outputs: Outputs = self._take_over() if self._middle != self.worker_id else []
        others = self._others()
        outputs.append(Replaced(joiner, self.places.take(joiner)))
        self.members[joiner.id] = joiner
        self._introducing[joiner.id] = {each.id for each in others}
        outputs += [Announce(each, joiner) for each in others]
        return outputs if others else [*outputs, *self._welcome(joiner.id)]

    def introduced(self, member: int, joiner: int) -> Outputs:
        """A member knows that joining member, or is gone."""
        waited_for = self._introducing.get(joiner, set())
        if member not in waited_for:
            return []
        waited_for.discard(member)
        return [] if waited_for else self._welcome(joiner)

    def _welcome(self, joiner: int) -> Outputs:
        del self._introducing[joiner]
        return [Welcome(self.members[joiner], self._roster())]

    def _is_over(self) -> bool:
        """Whether this worker has let the others go, or goes itself."""
        return bool(self._answered) or self.leaving is Leaving.LEFT

    # -- joining members, as another member, and as the joining member ----------------------------------------------

    def introduce(self, joiner: WorkerRecord) -> Outputs:
        """The leader reports that a joining member has the place of a departed one."""
        if joiner.id in self.members:
            return []
        before = self.places.introduce(joiner)
        self.members[joiner.id] = joiner
        return [Replaced(joiner, before), *(self._take_over() if self._middle != self.leader else [])]

    def in_the_way(self, joiner: WorkerRecord) -> WorkerRecord | None:
        """The member in the place of that joining member, if it is not known to be gone."""
        holder = self.places.holders.get(joiner.rank)
        taken = holder is not None and holder.id < joiner.id and self.places.state(joiner.rank) is PlaceState.HELD
        return holder if taken else None

    def admitted(self, roster: Roster) -> Outputs:
        """This worker is a joining member, and the leader has admitted it, with that roster."""
        outputs = self._learn(roster)
        self._return(ReturnEvent.ADMITTED)
        self._middle = self.leader
        return outputs

    def _learn(self, roster: Roster) -> Outputs:
        """Take the leader's roster: other joining members may have come, and members may be gone."""
        outputs: Outputs = []
        for record in (*roster.members, *(lost for lost, _ in roster.lost), *roster.left):
            if record.id not in self.members:
                self.members[record.id] = record
                outputs.append(Joined(record))
        self.places = Places(self.members.values())
        for record in self.members.values():
            if record.id in self.gone:
                self.places.part(record)
        outputs += [output for left in roster.left for output in self.depart(left)]
        return outputs + [output for lost, cause in roster.lost for output in self.lose(lost, cause)]

    def turned_away(self) -> None:
        """This worker cannot be a member: it is refused, or lost with the leader those that know of it."""
        gone = self.returning is Returning.ARRIVING and self._middle in self.gone
        self._return(ReturnEvent.LEADER_GONE if gone else ReturnEvent.TURNED_AWAY)

    def welcomed(self, roster: Roster) -> Outputs:
        """All members know this worker; the roster lists them."""
        outputs = self._learn(roster)
        self._return(ReturnEvent.WELCOMED)
        return outputs if self.leader == self._middle else [*outputs, *self._take_over()]

    def _return(self, event: ReturnEvent) -> None:
        self.returning = RETURNING.next(self.returning, event)

    # -- leaving, as a member ---------------------------------------------------------------------------------------

    def leave(self, *, hosts_store: bool = False) -> Outputs:
        """The user of this worker has asked it to leave. Only once.

        hosts_store: whether this process serves the store, which ends with it: then no worker could join or be found.
        """
        if not self.free:
            self._step(Step.ENTER)
            return self._send_enter()
        self._hosts_store = hosts_store
        return [] if self._stays() else self._finish(Step.FINISH)

    def all_entered(self, leader: int) -> Outputs:
        """That member polls this worker: all members leave, if it is the leader."""
        if self.leaving is not Leaving.ENTERED or leader != self.leader:
            return []
        self._step(Step.ALL_ENTERED)
        return [CloseDoor(alone=False)]

    def drain(self) -> Outputs:
        """This worker leaves by itself, once what it has accepted is over. Nothing follows if its door is closed, apart
        from its going: a store that it hosts ends with it.
        """
        self._hosts_store = False
        if self.leaving is Leaving.FINISHING or self.leaving is Leaving.LEFT:
            return []
        return self._finish(Step.DRAIN)

    def enter_answered(self) -> Outputs:
        """The leader has answered the ENTER of this worker."""
        return self._go(Step.ANSWERED)

    def enter_failed(self, leader: int) -> Outputs:
        """The ENTER of this worker at that leader has raised an error."""
        if self.leaving is Leaving.LEFT:  # it has drained
            return []
        if leader in self.gone:
            self._step(Step.LEADER_GONE)
            return self._send_enter()
        return self._finish(Step.REFUSED)

    def idle(self) -> Outputs:
        """No call of users is under way at this worker any more. Follows AwaitIdle."""
        return [] if self._stays() else self._go(Step.IDLE)

    def _stays(self) -> bool:
        """Whether others need the store, including members that have just come."""
        if self.free and self._hosts_store and self._others():
            self._step(Step.NEEDED)
        return self.leaving is Leaving.STAYING

    def _finish(self, step: Step) -> Outputs:
        self._step(step)
        return [CloseDoor(alone=True), AwaitIdle()]

    def give_up(self) -> Outputs:
        """This worker stops waiting for the others. Nothing follows if it has been let go before."""
        return self._go(Step.GIVE_UP)

    def _send_enter(self) -> Outputs:
        """To the present leader. If this worker leads because others have left, it begins only here to watch the rest.

        At their goodbye it would have been too early: if all leave one by one, each would take those that have just
        left without a word to it for lost.
        """
        outputs = self._take_over() if self.leads and self._middle != self.worker_id else []
        return [*outputs, SendEnter(self.members[self.leader])]

    def _go(self, step: Step) -> Outputs:
        if self.leaving is Leaving.LEFT:  # two of a bound, the leader's answer and the end of its calls may coincide
            return []
        self._step(step)
        return [Go(complete=step is not Step.GIVE_UP)]

    def _step(self, step: Step) -> None:
        self.leaving = LEAVING.next(self.leaving, step)

    # -- leaving, as the leader -------------------------------------------------------------------------------------

    def enter(self, member: int) -> Outputs:
        """That member has entered. It may know that this worker leads before this worker itself does.

        Then nothing follows until the members with lower ids are gone here, too.
        """
        if member in self._answered:
            return [AnswerEnters((member,))]
        self._waiting[member] = None
        return self._begin_rounds()

    def polled(self, answers: Mapping[int, Activity | None], *, overdue: bool) -> Outputs:
        """A round is over.

        answers: of each polled member, None if it has not answered. overdue: whether the time is up. A member without
        an answer does not count as idle: its process may be stopped, or a handler holds the interpreter.
        """
        if not self._have_all_entered():
            self._turn(Turn.JOINING)
            return []
        previous, self._previous = self._previous, self._found(answers)
        busy = [member for member, activity in self._previous.items() if activity is None or not activity.idle]
        if not busy and self._previous == previous:
            self._turn(Turn.QUIET)
            return self._let_go()
        if overdue:
            self._turn(Turn.OVERDUE)
            return [Overdue(tuple(busy)), *self._let_go()]
        self._turn(Turn.BUSY)
        if self.rounds is Rounds.NEXT_ROUND:
            return [self._poll(first=False)]
        return [Rest()]

    def rested(self) -> Outputs:
        """The pause of Rest is over."""
        self._turn(Turn.RESTED)
        return [self._poll(first=False)]

    def _begin_rounds(self) -> Outputs:
        """Poll all members, if all live ones have entered and some still wait for the answer."""
        if self.rounds is not Rounds.GATHERING or not self._waiting or not self._have_all_entered():
            return []
        self._turn(Turn.COMPLETE)
        self._previous = None
        return [self._poll(first=True)]

    def _have_all_entered(self) -> bool:
        return all(record.id in self._waiting or record.id in self._answered for record in self.live())

    def _poll(self, *, first: bool) -> Poll:
        return Poll(tuple(self.live()), first)

    def _found(self, answers: Mapping[int, Activity | None]) -> dict[int, Activity | None]:
        """The answers of a round without those of members that have gone meanwhile."""
        return {member: activity for member, activity in answers.items() if member not in self.gone}

    def _let_go(self) -> Outputs:
        members = tuple(self._waiting)
        self._answered.update(members)
        self._waiting.clear()
        return [AnswerEnters(members)]

    def _turn(self, turn: Turn) -> None:
        self.rounds = ROUNDS.next(self.rounds, turn)
