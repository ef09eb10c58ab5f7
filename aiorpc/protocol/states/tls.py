"""The life of TLS on one connection, as one side sees it."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class TlsState(Label):
    """See `TLS`."""

    SHAKING = "shaking hands"
    OPEN = "open"
    SHUT = "shut"
    FAILED = "failed"


class TlsEvent(Label):
    """What the state of TLS depends on."""

    PROVED = "both certificates are right"
    ENDED = "the other side says that it sends no more"
    WRONG = "what came is no TLS, was changed, or has no certificate that we accept"


_S, _E = TlsState, TlsEvent

TLS: Table[TlsState, TlsEvent] = Table(
    "TLS of a connection",
    about=(
        "It comes before the handshake, whose frames are the first that it carries. The end of the connection is no "
        "event: an end without a GOODBYE of the other side is a break, even if TLS was closed properly."
    ),
    initial=_S.SHAKING,
    meanings={
        _S.SHAKING: "The certificates are not checked. No frame is sent or taken.",
        _S.OPEN: "The other end has the key of a certificate of our authority. Frames go both ways.",
        _S.SHUT: "Nothing more comes.",
        _S.FAILED: "Nothing is sent or taken except the alert with the reason.",
    },
    transitions=(
        Transition(_S.SHAKING, _E.PROVED, _S.OPEN, "The opener sends HELLO, if the certificate names the worker."),
        Transition(_S.OPEN, _E.ENDED, _S.SHUT, "The connection is closed."),
        *from_each((_S.SHAKING, _S.OPEN), _E.WRONG, _S.FAILED, "An alert goes out. The connection is closed."),
    ),
    final=(_S.SHUT, _S.FAILED),
)
