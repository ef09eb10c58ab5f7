"""The lives of the two sides of a handshake."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class HandshakeState(Label):
    """See `OPENER` and `ACCEPTOR`."""

    START = "start"
    SENT = "sent"
    PROVED = "proved"
    CHALLENGED = "challenged"
    READY = "ready"
    FAILED = "failed"


class HandshakeEvent(Label):
    """What the state of a handshake depends on."""

    BEGUN = "`start` is called"
    HELLO = "HELLO came, and is right"
    PROOF = "PROOF came, and is right"
    WELCOME = "WELCOME came, and its proof is right"
    REFUSED = "REFUSED came, or a frame that is wrong or out of turn"


_S, _E = HandshakeState, HandshakeEvent
_AFTER = (
    "READY is the end: the proof is not asked for twice. A frame of a handshake that comes in READY or FAILED is an "
    "error of its sender, and changes no state. The end of the connection is no event: its handshake ends with it."
)
_REFUSED = "The connection is closed."

OPENER: Table[HandshakeState, HandshakeEvent] = Table(
    "handshake of the opener",
    about=_AFTER,
    initial=_S.START,
    meanings={
        _S.START: "Nothing was said.",
        _S.SENT: "Our HELLO is out, with our record and the worker that we want.",
        _S.PROVED: "Our PROOF is out; their WELCOME has to prove that they know the secret. No call is sent yet.",
        _S.READY: "The other side is known, and knows us.",
        _S.FAILED: "The other side is not accepted.",
    },
    transitions=(
        Transition(_S.START, _E.BEGUN, _S.SENT, "HELLO goes out."),
        Transition(_S.SENT, _E.HELLO, _S.PROVED, "PROOF goes out."),
        Transition(_S.PROVED, _E.WELCOME, _S.READY, "The limits of the options hold from now on."),
        *from_each((_S.START, _S.SENT, _S.PROVED), _E.REFUSED, _S.FAILED, _REFUSED),
    ),
    final=(_S.READY, _S.FAILED),
)

ACCEPTOR: Table[HandshakeState, HandshakeEvent] = Table(
    "handshake of the acceptor",
    about=_AFTER,
    initial=_S.START,
    meanings={
        _S.START: "Nothing was said.",
        _S.CHALLENGED: "Our HELLO is out, without our record. Their proof is missing.",
        _S.READY: "The other side is known, and knows us.",
        _S.FAILED: "The other side is not accepted.",
    },
    transitions=(
        Transition(_S.START, _E.HELLO, _S.CHALLENGED, "HELLO goes out."),
        Transition(
            _S.CHALLENGED,
            _E.PROOF,
            _S.READY,
            "WELCOME goes out, with our proof. The limits of the options hold from now on.",
        ),
        *from_each((_S.START, _S.CHALLENGED), _E.REFUSED, _S.FAILED, "REFUSED goes out. " + _REFUSED),
    ),
    final=(_S.READY, _S.FAILED),
)
