"""The life of a session: what outlives the sockets of a connection between hosts."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class SessionState(Label):
    """See `SESSION`."""

    OPEN = "open"
    SUSPENDED = "suspended"
    ENDED = "ended"


class SessionEvent(Label):
    """What the state of a session depends on."""

    BROKEN = "its socket has broken, and the other process may live; or it was idle, and both ends let go of it"
    RESUMED = "the other end has proved itself over a new socket"
    ENDED = "its connection is closed or given up"


_S, _E = SessionState, SessionEvent

SESSION: Table[SessionState, SessionEvent] = Table(
    "session of a connection",
    about=(
        "Connections over TCP have one, if `reconnect_grace` is not 0 at either end. Each end has its own state: one "
        "may notice the broken socket before the other one does."
    ),
    initial=_S.OPEN,
    meanings={
        _S.OPEN: "Frames go both ways. Those that the other end has not acknowledged are kept.",
        _S.SUSPENDED: "There is no socket. What is sent waits; what was not acknowledged is kept.",
        _S.ENDED: "Nothing is kept.",
    },
    transitions=(
        Transition(_S.OPEN, _E.BROKEN, _S.SUSPENDED, "The opener connects again, the acceptor waits for it."),
        Transition(
            _S.SUSPENDED,
            _E.RESUMED,
            _S.OPEN,
            "What the other end has not received is sent again, then what has waited.",
        ),
        *from_each(
            (_S.OPEN, _S.SUSPENDED),
            _E.ENDED,
            _S.ENDED,
            "In good order, or because the grace is over, the other process is dead, or it refuses to go on.",
        ),
    ),
    final=(_S.ENDED,),
)
