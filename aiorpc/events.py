"""What a worker tells its program: news of the group, and the steps of its calls.

``async for event in worker.events()`` yields news of the group, as one worker has them.
`worker.observe_calls(observer)` shows the steps of calls to a `CallObserver`.

An event is about a worker and asks nothing of the program. The errors of calls to such a worker are others:
`aiorpc.PeerLost` goes with `WorkerLost`, `aiorpc.PeerLeft` with `WorkerLeft`. `aiorpc.WorkerClosed` is about the
program's own worker, of which no event is told: its events end.
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
