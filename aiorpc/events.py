"""Membership events of the group, and call events of a worker.

``async for event in worker.events()`` yields membership events, as this worker sees them.
`worker.observe_calls(observer)` shows the steps of calls to a `CallObserver`. An event needs no action of the program.
Calls to the worker of an event fail with errors of their own: `aiorpc.PeerLost` goes with `WorkerLost`,
`aiorpc.PeerLeft` with `WorkerLeft`. There is no event for the end of the program's own worker: its events end, and its
verbs raise `aiorpc.WorkerClosed`.
"""

from __future__ import annotations

from .protocol.states import CallOutcome
from .runtime.engine.call_events import CallEvent, CallObserver, Observation
from .runtime.group.events import (
    Listener,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerReplaced,
    WorkerResumed,
    WorkerSuspended,
)

__all__ = [
    "CallEvent",
    "CallObserver",
    "CallOutcome",
    "Listener",
    "Observation",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerLost",
    "WorkerReplaced",
    "WorkerResumed",
    "WorkerSuspended",
]


def __dir__() -> list[str]:
    return __all__
