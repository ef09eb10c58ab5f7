"""The lives of a worker, a peer, a call and the rest, as tables: state, event, next state. No I/O.

A table for another life belongs here, or beside the code that decides it, and in `TABLES` of tests/documents.py.
"""

from .call import MADE, SERVED, CallOutcome, CallState, CallStep
from .handshake import ACCEPTOR, OPENER, HandshakeEvent, HandshakeState
from .leaving import LEAVING, ROUNDS, Leaving, Rounds, Step, Turn
from .message import MESSAGE, MessageEvent, MessageState
from .peer import PEER, PeerEvent, PeerState
from .retried import RETRIED, RetriedEvent, RetriedState
from .returning import PLACE, RETURNING, PlaceEvent, PlaceState, ReturnEvent, Returning
from .session import SESSION, SessionEvent, SessionState
from .table import IllegalTransition, Table, Transition, from_each
from .tls import TLS, TlsEvent, TlsState
from .transfer import TRANSFER, TransferEvent, TransferState
from .worker import WORKER, WorkerEvent, WorkerState

__all__ = [
    "ACCEPTOR",
    "LEAVING",
    "MADE",
    "MESSAGE",
    "OPENER",
    "PEER",
    "PLACE",
    "RETRIED",
    "RETURNING",
    "ROUNDS",
    "SERVED",
    "SESSION",
    "TLS",
    "TRANSFER",
    "WORKER",
    "CallOutcome",
    "CallState",
    "CallStep",
    "HandshakeEvent",
    "HandshakeState",
    "IllegalTransition",
    "Leaving",
    "MessageEvent",
    "MessageState",
    "PeerEvent",
    "PeerState",
    "PlaceEvent",
    "PlaceState",
    "RetriedEvent",
    "RetriedState",
    "ReturnEvent",
    "Returning",
    "Rounds",
    "SessionEvent",
    "SessionState",
    "Step",
    "Table",
    "TlsEvent",
    "TlsState",
    "TransferEvent",
    "TransferState",
    "Transition",
    "Turn",
    "WorkerEvent",
    "WorkerState",
    "from_each",
]
