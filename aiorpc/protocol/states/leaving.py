"""How a worker leaves its group, and how a leader lets the others go. `protocol.leaving` uses these tables."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class Leaving(Label):
    """See `LEAVING`."""

    WORKING = "working"
    ENTERED = "entered"
    FINISHING = "finishing"
    STAYING = "staying"
    LEFT = "left"


class Step(Label):
    """What takes this worker from one state of its leaving to the next."""

    ENTER = "its user leaves, in a group of fixed size"
    FINISH = "its user leaves, in a free group"
    NEEDED = "others need the store that it hosts"
    ALL_ENTERED = "the leader reports that all members leave"
    ANSWERED = "the leader lets it go"
    LEADER_GONE = "the leader went without an answer"
    REFUSED = "the leader is there, and could not take the ENTER"
    IDLE = "what was accepted before the door closed is over"
    ALONE = "the last of the others went"
    DRAIN = "it leaves by itself, whatever the others do"
    GIVE_UP = "a bound is passed, or the wait is cancelled"


_L, _S = Leaving, Step

LEAVING: Table[Leaving, Step] = Table(
    "leaving of a worker",
    about=(
        "What a worker waits for between `shutdown` and its end. In ENTERED and STAYING others still need it: it "
        "serves them, and its own program may go on. From FINISHING on its door is closed: what begins then is "
        "refused. The one difference between groups is when that is: in a free group at once, in one of fixed size "
        "when all leave. A worker that drains is in FINISHING at once, in both."
    ),
    initial=_L.WORKING,
    meanings={
        _L.WORKING: "Its user has not asked for it.",
        _L.ENTERED: "The leader knows, or is being informed; others still work.",
        _L.STAYING: "It hosts the store of a free group, which the others still need.",
        _L.FINISHING: "Its door is closed. It waits for the calls that it had accepted; its own calls have a grace.",
        _L.LEFT: "Nothing more is waited for.",
    },
    transitions=(
        Transition(_L.WORKING, _S.ENTER, _L.ENTERED, "ENTER goes to the leader; a leader sends it to itself."),
        Transition(_L.WORKING, _S.FINISH, _L.FINISHING, "The door closes."),
        *from_each((_L.WORKING, _L.FINISHING), _S.NEEDED, _L.STAYING),
        Transition(_L.STAYING, _S.ALONE, _L.FINISHING, "The door closes."),
        Transition(_L.ENTERED, _S.ALL_ENTERED, _L.FINISHING, "The door closes."),
        *from_each((_L.ENTERED, _L.FINISHING), _S.ANSWERED, _L.LEFT),
        Transition(_L.ENTERED, _S.LEADER_GONE, _L.ENTERED, "ENTER goes to the next leader."),
        Transition(_L.FINISHING, _S.LEADER_GONE, _L.FINISHING, "ENTER goes to the next leader."),
        *from_each((_L.ENTERED, _L.FINISHING), _S.REFUSED, _L.FINISHING, "The door closes; it leaves by itself."),
        *from_each((_L.WORKING, _L.ENTERED, _L.STAYING), _S.DRAIN, _L.FINISHING, "The door closes; others go on."),
        Transition(_L.FINISHING, _S.IDLE, _L.LEFT),
        *from_each((_L.ENTERED, _L.FINISHING, _L.STAYING), _S.GIVE_UP, _L.LEFT, "It leaves without the others."),
    ),
    final=[_L.LEFT],
)


class Rounds(Label):
    """See `ROUNDS`."""

    GATHERING = "gathering"
    FIRST_ROUND = "first round"
    NEXT_ROUND = "next round"
    RESTING = "resting"


class Turn(Label):
    """What takes the leader from one state of its rounds to the next."""

    COMPLETE = "the last live member has entered, or the last one without ENTER is gone"
    BUSY = "a round does not show that nothing is under way"
    QUIET = "a round shows it, together with the one before"
    OVERDUE = "the rounds have taken too long"
    RESTED = "the pause is over"
    JOINING = "a round is over, and a joining member that has not entered has taken a place meanwhile"


_R, _T = Rounds, Turn

ROUNDS: Table[Rounds, Turn] = Table(
    "rounds of a leader",
    about=(
        "How the leader of a group of fixed size finds out that no member works any more. It has no final state, as "
        "the leader may have to look again: it ends with the worker."
    ),
    initial=_R.GATHERING,
    meanings={
        _R.GATHERING: "A member has not entered, or all that entered have their answer.",
        _R.FIRST_ROUND: "All are asked; there is nothing yet to compare the answers with.",
        _R.NEXT_ROUND: "All are asked again.",
        _R.RESTING: "A member works; after a pause all are asked again.",
    },
    transitions=(
        Transition(_R.GATHERING, _T.COMPLETE, _R.FIRST_ROUND),
        Transition(_R.FIRST_ROUND, _T.BUSY, _R.NEXT_ROUND),
        Transition(_R.NEXT_ROUND, _T.BUSY, _R.RESTING),
        Transition(_R.NEXT_ROUND, _T.QUIET, _R.GATHERING, "All that have entered are let go."),
        *from_each((_R.FIRST_ROUND, _R.NEXT_ROUND), _T.OVERDUE, _R.GATHERING, "All that have entered are let go."),
        Transition(_R.RESTING, _T.RESTED, _R.NEXT_ROUND),
        *from_each((_R.FIRST_ROUND, _R.NEXT_ROUND), _T.JOINING, _R.GATHERING, "The leader waits for its ENTER."),
    ),
    final=(),
)
