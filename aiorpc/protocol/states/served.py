"""The life of a call at the worker that serves it.

Serving is on the path of every call, which must not cost a call of Python more: no code asks this table. A call is
RUNNING while it is in `Service.calls`, taking it out decides who ends it, and tests compare that with the table.
"""

from __future__ import annotations

from .table import LOOP, Label, Table, Transition


class ServedState(Label):
    """See `SERVED`."""

    RUNNING = "running"
    ANSWERED = "answered"
    CANCELLED = "cancelled"


class ServedEvent(Label):
    """What the state of a served call depends on."""

    RETURNED = "the handler returned"
    RAISED = "the handler raised"
    REFUSED = "it is not run"
    GIVEN_UP = "CANCEL came"
    DISCONNECTED = "the connection ended"
    ORPHANED = "the connection ended, and it goes on"
    CLOSED = "we shut down"


_S, _E = ServedState, ServedEvent
_HANDLER = "the handler's thread"

SERVED: Table[ServedState, ServedEvent] = Table(
    "served call",
    about=(
        "A call is RUNNING exactly while it is in `Service.calls`; whoever takes it out ends it, on whatever thread. "
        "A reply whose caller gave up while it was being made still goes out, as it may carry references: the caller "
        "takes those and drops the rest. A result that comes later is dropped here."
    ),
    initial=_S.RUNNING,
    meanings={
        _S.RUNNING: "It waits for its function, a thread or its handler.",
        _S.ANSWERED: "One REPLY or ERROR was sent.",
        _S.CANCELLED: "Nobody wants the result. The handler was told, and may run on.",
    },
    transitions=(
        Transition(_S.RUNNING, _E.RETURNED, _S.ANSWERED, "REPLY goes out; ERROR if it cannot be sent.", _HANDLER),
        Transition(_S.RUNNING, _E.RAISED, _S.ANSWERED, "ERROR goes out.", _HANDLER),
        Transition(
            _S.RUNNING,
            _E.REFUSED,
            _S.ANSWERED,
            "ERROR goes out: there are too many calls, no such function, arguments did not arrive, or time is up.",
            "any thread",
        ),
        Transition(_S.RUNNING, _E.GIVEN_UP, _S.CANCELLED, "The handler is cancelled, or its stream stopped.", LOOP),
        Transition(_S.RUNNING, _E.DISCONNECTED, _S.CANCELLED, "The same.", LOOP),
        Transition(_S.RUNNING, _E.CLOSED, _S.CANCELLED, "The same, once the connection has ended.", LOOP),
        Transition(
            _S.RUNNING,
            _E.ORPHANED,
            _S.RUNNING,
            "What `remote` began, and with the drop-in everything, goes on; nothing goes out when it ends.",
            LOOP,
        ),
    ),
    final=(_S.ANSWERED, _S.CANCELLED),
)
