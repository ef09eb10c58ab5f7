"""The life of a peer: the caller's side of another worker."""

from __future__ import annotations

from .table import LOOP, Label, Table, Transition, from_each


class PeerState(Label):
    """See `PEER`."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    SUSPENDED = "suspended"
    GONE = "gone"


class PeerEvent(Label):
    """What a peer's state depends on."""

    FIRST_MESSAGE = "a message for it"
    NOBODY_WAITS = "it has not joined yet, and no message waits any more"
    CONNECTED = "the handshake is done"
    BROKEN = "its connection broke, and its process may live"
    RESUMED = "the connection goes on"
    UNREACHABLE = "it cannot be found or reached"
    GOODBYE = "it said goodbye"
    LOST = "its process died or its connection broke"
    CLOSED = "we shut down"


_S, _E = PeerState, PeerEvent
_ALIVE = (_S.IDLE, _S.CONNECTING, _S.READY, _S.SUSPENDED)

PEER: Table[PeerState, PeerEvent] = Table(
    "peer",
    about=(
        "The state changes under the peer's lock. GONE is final: a worker that comes back under the same name is a new "
        "peer. Several reasons for it may come one after the other: the first one counts, and the later ones are no "
        "events."
    ),
    initial=_S.IDLE,
    meanings={
        _S.IDLE: "There is no connection, and none is wanted.",
        _S.CONNECTING: "Messages wait, in order. Towards its end the link is there, and frames may come.",
        _S.READY: "Messages go out at once, from any thread.",
        _S.SUSPENDED: "Like READY; what is sent waits in the connection until it is resumed (`SESSION`).",
        _S.GONE: "Calls fail at once with the reason.",
    },
    transitions=(
        Transition(
            _S.IDLE, _E.FIRST_MESSAGE, _S.CONNECTING, "The message waits; the loop begins to connect.", "any thread"
        ),
        Transition(
            _S.CONNECTING,
            _E.NOBODY_WAITS,
            _S.IDLE,
            "The search in the rendezvous ends; the next message begins it again.",
            LOOP,
        ),
        Transition(_S.CONNECTING, _E.CONNECTED, _S.READY, "What has waited goes out, in order.", LOOP),
        Transition(_S.READY, _E.BROKEN, _S.SUSPENDED, "The loop connects again, until the grace is over.", LOOP),
        Transition(_S.SUSPENDED, _E.RESUMED, _S.READY, "What was not acknowledged goes out again.", LOOP),
        Transition(
            _S.CONNECTING,
            _E.UNREACHABLE,
            _S.GONE,
            "Pending calls fail with PeerLost or PeerRefused; with RendezvousError if it was never found.",
            LOOP,
        ),
        *from_each(
            _ALIVE,
            _E.GOODBYE,
            _S.GONE,
            "Pending calls fail with PeerLeft, at most 1 s later: a reply may be under way on another connection.",
            LOOP,
        ),
        *from_each(_ALIVE, _E.LOST, _S.GONE, "Pending calls fail with PeerLost.", LOOP),
        *from_each(_ALIVE, _E.CLOSED, _S.GONE, "Pending calls fail with WorkerClosed.", LOOP),
    ),
    final=(_S.GONE,),
)
