"""The life of a worker."""

from __future__ import annotations

from .table import LOOP, Label, Table, Transition, from_each


class WorkerState(Label):
    """The state of a worker. The table `WORKER` has the transitions.

    NEW: it was made, and does nothing yet. STARTING: it is joining; calls are not answered yet. RUNNING: calls go in
    both directions. LEAVING: it is shutting down, and still serves. DRAINING: it leaves by itself: it takes no new
    calls, and finishes those that it has. CLOSING: verbs raise WorkerClosed; threads and tasks end. CLOSED: it has
    left; no thread, task or socket of it is left.
    """

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    DRAINING = "draining"
    CLOSING = "closing"
    CLOSED = "closed"


class WorkerEvent(Label):
    """What a worker's state depends on."""

    START = "`start` is called"
    JOINED = "the group is complete"
    NOT_JOINED = "joining failed or was cancelled"
    SHUTDOWN = "`shutdown` is called"
    DRAIN = "`drain` is called, or a signal asks for it"
    LEFT = "the group is done, or is not waited for"
    DROPPED = "a test ends it without leaving"
    LOOP_ENDED = "the event loop that it runs on has ended"
    ENDED = "all parts have ended"
    FORKED = "the process was forked, in the child"
    EXITED = "the interpreter exits"


_S, _E = WorkerState, WorkerEvent
_ALIVE = (_S.STARTING, _S.RUNNING, _S.LEAVING, _S.DRAINING, _S.CLOSING)

WORKER: Table[WorkerState, WorkerEvent] = Table(
    "worker",
    about=(
        "`shutdown` before `start` has nothing to do, and changes nothing. A worker that is CLOSED is never started "
        "again. Closing takes time: from CLOSING on every verb raises WorkerClosed, and `shutdown` returns at CLOSED. "
        "A loop that was closed with the worker still on it gives no notice: the next user of the worker, or the "
        "thread that watches the loop, takes the worker down without the loop, by the events of a shutdown."
    ),
    initial=_S.NEW,
    meanings={
        _S.NEW: "Nothing is possible yet; the process has nothing of it but memory.",
        _S.STARTING: "It meets the others and listens. They may connect; calls are not answered yet.",
        _S.RUNNING: "Calls go in both directions.",
        _S.LEAVING: "Like RUNNING, until the group is done.",
        _S.DRAINING: "New calls are refused. What was accepted is finished; then it leaves, whatever the others do.",
        _S.CLOSING: "Verbs raise WorkerClosed. Pending calls fail, queued frames are written, threads and tasks end.",
        _S.CLOSED: "Verbs raise WorkerClosed. No thread, task or socket of it is left.",
    },
    transitions=(
        Transition(_S.NEW, _E.START, _S.STARTING, "The rendezvous begins.", LOOP),
        Transition(_S.STARTING, _E.JOINED, _S.RUNNING, "It can be the current worker of its process.", LOOP),
        Transition(_S.STARTING, _E.NOT_JOINED, _S.CLOSING, "`start` raises the reason once it is CLOSED.", LOOP),
        Transition(_S.STARTING, _E.SHUTDOWN, _S.CLOSING, "Joining is given up; `start` raises WorkerClosed.", LOOP),
        Transition(
            _S.RUNNING,
            _E.SHUTDOWN,
            _S.LEAVING,
            "Graceful: it serves while others still work. Otherwise LEAVING is left at once.",
            LOOP,
        ),
        *from_each((_S.RUNNING, _S.LEAVING), _E.DRAIN, _S.DRAINING, "It waits for no other member.", LOOP),
        *from_each(
            (_S.LEAVING, _S.DRAINING),
            _E.LEFT,
            _S.CLOSING,
            "Also when the time is up, a member was lost, or the wait for `shutdown` was cancelled.",
            LOOP,
        ),
        *from_each((_S.RUNNING, _S.LEAVING, _S.DRAINING), _E.DROPPED, _S.CLOSING, "The others see a death.", LOOP),
        *from_each(
            (_S.STARTING, _S.RUNNING, _S.LEAVING, _S.DRAINING),
            _E.LOOP_ENDED,
            _S.CLOSING,
            "Pending calls fail at once; the others see a loss, not a goodbye.",
            LOOP,
        ),
        Transition(_S.CLOSING, _E.ENDED, _S.CLOSED, "`shutdown` returns the report.", LOOP),
        *from_each(
            _ALIVE,
            _E.FORKED,
            _S.CLOSED,
            "The child closes the parent's descriptors, without a lock and without sending anything.",
            "the only thread of the child",
        ),
        *from_each(
            _ALIVE,
            _E.EXITED,
            _S.CLOSED,
            "It says goodbye if that needs no waiting, and removes its socket's file.",
            "the main thread",
        ),
    ),
    final=(_S.CLOSED,),
)
