"""The life of a call that may be tried more than once, at its caller."""

from __future__ import annotations

from .table import LOOP, Label, Table, Transition, from_each


class RetriedState(Label):
    """See `RETRIED`."""

    TRYING = "trying"
    PAUSED = "paused"
    ENDED = "ended"


class RetriedEvent(Label):
    """What the state of such a call depends on."""

    ANSWERED = "a try ended with a value, or with an error that no further try can mend"
    FAILED = "a try failed, and another one may succeed"
    PAUSE_OVER = "the pause is over"
    USED_UP = "a try failed, and there are none left, or no time"
    GIVEN_UP = "its caller gave up"
    CLOSED = "we shut down"


_S, _E = RetriedState, RetriedEvent

RETRIED: Table[RetriedState, RetriedEvent] = Table(
    "call with retries",
    about=(
        "Each try is a call of its own (`CallFuture`), and there is one at a time. The program has one Future for all "
        "of them, with one deadline. `caller/retrying.py` decides which errors are worth another try."
    ),
    initial=_S.TRYING,
    meanings={
        _S.TRYING: "A try is made, or is under way.",
        _S.PAUSED: "Nothing is under way; the next try waits for its time.",
        _S.ENDED: "The Future has its value or its error.",
    },
    transitions=(
        Transition(_S.TRYING, _E.FAILED, _S.PAUSED, "A pause of random length begins.", "any thread"),
        Transition(_S.PAUSED, _E.PAUSE_OVER, _S.TRYING, "The worker is looked up again, by its name.", LOOP),
        Transition(_S.TRYING, _E.ANSWERED, _S.ENDED, "The outcome of the try is that of the call.", "any thread"),
        Transition(_S.TRYING, _E.USED_UP, _S.ENDED, "The last error, with how often it was tried.", "any thread"),
        *from_each(
            (_S.TRYING, _S.PAUSED), _E.GIVEN_UP, _S.ENDED, "A try that is under way is cancelled.", "any thread"
        ),
        *from_each((_S.TRYING, _S.PAUSED), _E.CLOSED, _S.ENDED, "WorkerClosed.", LOOP),
    ),
    final=(_S.ENDED,),
)
