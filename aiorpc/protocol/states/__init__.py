"""The lives of a worker, a peer, a call and the rest, as tables: state, event, next state. No I/O.

A table for another life belongs here, or beside the code that decides it, and in `TABLES` of tests/documents.py.
"""

from .handshake import ACCEPTOR, OPENER, HandshakeEvent, HandshakeState
from .message import MESSAGE, MessageEvent, MessageState
from .peer import PEER, PeerEvent, PeerState
from .served import SERVED, ServedEvent, ServedState
from .table import IllegalTransition, Table, Transition, from_each
from .transfer import TRANSFER, TransferEvent, TransferState
from .worker import WORKER, WorkerEvent, WorkerState

__all__ = [
    "ACCEPTOR",
    "MESSAGE",
    "OPENER",
    "PEER",
    "SERVED",
    "TRANSFER",
    "WORKER",
    "HandshakeEvent",
    "HandshakeState",
    "IllegalTransition",
    "MessageEvent",
    "MessageState",
    "PeerEvent",
    "PeerState",
    "ServedEvent",
    "ServedState",
    "Table",
    "TransferEvent",
    "TransferState",
    "Transition",
    "WorkerEvent",
    "WorkerState",
    "from_each",
]
