"""The life of a call: at its caller (`MADE`) and at the worker that serves it (`SERVED`).

A call begins in one function of each side and ends in one (`PendingCalls`, `ServedCalls`); the code that takes it out
of the dict ends it. The path of a call does not use these tables. Tests check the events of real calls against them.
"""

from __future__ import annotations

from enum import StrEnum

from .table import Label, Table, Transition, from_each


class CallOutcome(StrEnum):
    """How a call ended.

    VALUE: with its result. ERROR: with the exception of its function. TIMEOUT: its time was up. CANCELLED: its caller
    gave up. LOST: the other worker is gone, or this one leaves. REFUSED: nothing was run, here or there, and the error
    has the reason.
    """

    VALUE = "value"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LOST = "lost"
    REFUSED = "refused"


class CallState(Label):
    """See `MADE` and `SERVED`."""

    STARTED = "started"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class CallStep(Label):
    """What the state of a call depends on."""

    WAITS = "it has to wait"
    RUNS = "it goes on"
    VALUE = "value"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LOST = "lost"
    REFUSED = "refused"


_S, _E = CallState, CallStep
_NOT_ENDED = (_S.STARTED, _S.QUEUED, _S.RUNNING)
_ANY = "any thread"

MADE: Table[CallState, CallStep] = Table(
    "call that was made",
    about=(
        "A call is in `PendingCalls.calls` from `begin` to `end`. Each try of a call with retries is a call of its own."
    ),
    initial=_S.STARTED,
    meanings={
        _S.STARTED: "It is written, and pending.",
        _S.QUEUED: "It waits for a connection to its worker.",
        _S.RUNNING: "It was handed to the connection.",
        _S.ENDED: "Its Future has the outcome, or is about to get it.",
    },
    transitions=(
        Transition(_S.STARTED, _E.WAITS, _S.QUEUED, "", _ANY),
        *from_each((_S.STARTED, _S.QUEUED), _E.RUNS, _S.RUNNING, "", _ANY),
        Transition(_S.RUNNING, _E.VALUE, _S.ENDED, "REPLY came.", _ANY),
        Transition(_S.RUNNING, _E.ERROR, _S.ENDED, "ERROR came, or an answer with a lost buffer.", _ANY),
        *from_each(_NOT_ENDED, _E.TIMEOUT, _S.ENDED, "The callee is asked to stop.", _ANY),
        *from_each(_NOT_ENDED, _E.CANCELLED, _S.ENDED, "The callee is asked to stop.", _ANY),
        *from_each(_NOT_ENDED, _E.LOST, _S.ENDED, "The connection has ended for good.", _ANY),
        *from_each(_NOT_ENDED, _E.REFUSED, _S.ENDED, "It cannot be sent, or the callee did not run it.", _ANY),
    ),
    final=(_S.ENDED,),
)

SERVED: Table[CallState, CallStep] = Table(
    "served call",
    about=(
        "A call is in `ServedCalls.calls` from `begin` to `end`. A reply whose caller gave up while it was being made "
        "still goes out, as it may carry references: the caller takes those and drops the rest. A result that comes "
        "later is dropped here. A call of `remote` goes on without its connection, and so does every call with the "
        "drop-in; nothing goes out when it ends."
    ),
    initial=_S.STARTED,
    meanings={
        _S.STARTED: "It has come. Its function is looked up.",
        _S.QUEUED: "It waits for a thread, for a batch, or until its caller reads its answers.",
        _S.RUNNING: "Its handler was called.",
        _S.ENDED: "One REPLY or ERROR was sent, or nothing, as its caller does not wait for it any more.",
    },
    transitions=(
        *from_each((_S.STARTED, _S.QUEUED), _E.WAITS, _S.QUEUED, "", _ANY),
        *from_each((_S.STARTED, _S.QUEUED), _E.RUNS, _S.RUNNING, "", "the handler's thread"),
        Transition(_S.STARTED, _E.VALUE, _S.ENDED, "The value of a reference, or the answer of an earlier try."),
        Transition(_S.RUNNING, _E.VALUE, _S.ENDED, "REPLY goes out.", "the handler's thread"),
        Transition(_S.RUNNING, _E.ERROR, _S.ENDED, "ERROR goes out.", "the handler's thread"),
        *from_each((_S.STARTED, _S.QUEUED), _E.REFUSED, _S.ENDED, "ERROR goes out. Nothing was run.", _ANY),
        *from_each(_NOT_ENDED, _E.TIMEOUT, _S.ENDED, "CANCEL came, as the caller's time is up.", _ANY),
        *from_each(_NOT_ENDED, _E.CANCELLED, _S.ENDED, "CANCEL came. The handler is told.", _ANY),
        *from_each(_NOT_ENDED, _E.LOST, _S.ENDED, "The connection has ended. The handler is told.", _ANY),
    ),
    final=(_S.ENDED,),
)
