"""The state of a worker, which all of its parts can read."""

from __future__ import annotations

from collections.abc import Callable

from ... import foreign
from ...errors import WorkerClosed
from ...protocol.messages import is_error_name
from ...protocol.states import WORKER, WorkerEvent, WorkerState


class Lifetime:
    """The state of one worker; the table `protocol.states.WORKER` has the events, and the thread of each.

    closed: the worker makes no calls: it has not joined yet, or it is CLOSING or CLOSED. leaving: it is leaving, and
    serves until its group is done; or it drains. shut: its door is closed, and its program can begin nothing more; also
    true if it is closed. parting: it takes nothing new from others, either. forked: this is a child of the worker's
    process. loop_ends, loop_ended: its loop is about to end without a shutdown; the worker ended for that reason.
    exits: the worker ended because its process exits. Any thread may read them. `closed`, `leaving` and `shut` follow
    from the state and the door; they are attributes because each call reads `shut`.

    asked_by: what has asked it to leave, for errors. failed: the name of the error that ended its program; "" for none.
    broken: the error that interrupted a step of the runtime, as text; "" for none. on_broken: begins to close the
    worker; any thread calls it. may_begin: whether the calling code may begin something although the door is closed, as
    in a call that is served here.
    """

    loop_ended: bool

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: WorkerState = WORKER.initial
        self.closed: bool = True
        self.leaving: bool = False
        self.shut: bool = True
        self.parting: bool = False
        self.may_begin: Callable[[], bool] = bool
        self._door_closed = False
        self.asked_by: str = "its program"
        self.failed: str = ""
        self.forked: bool = False
        self.loop_ends = self.loop_ended = False
        self.exits: bool = False
        self.broken: str = ""
        self.on_broken: Callable[[], None] | None = None

    def enter(self, event: WorkerEvent) -> None:
        """Apply an event to the state. On the thread that the table names for the event."""
        self.state = WORKER.next(self.state, event)
        self.leaving = self.state is WorkerState.LEAVING or self.drains
        self.closed = not self.leaving and self.state is not WorkerState.RUNNING
        self.shut = self.closed or self._door_closed
        self.forked = self.forked or event is WorkerEvent.FORKED
        self.loop_ended = self.loop_ended or event is WorkerEvent.LOOP_ENDED
        self.exits = self.exits or event is WorkerEvent.EXITED

    def fail(self, error: type[BaseException] | None) -> None:
        """The program of this worker has ended by an error of that class, whose name the goodbye carries."""
        if isinstance(error, type) and issubclass(error, (Exception, KeyboardInterrupt)):
            self.failed = error.__name__ if is_error_name(error.__name__) else "Exception"

    def break_down(self, error: BaseException) -> None:
        """Close the worker after that error has interrupted a step of the runtime: nothing begins any more. Idempotent.
        Any thread.
        """
        if self.broken or self.closed:
            return
        self.broken = foreign.said(error)
        self.fail(type(error))
        self._door_closed = self.shut = True
        if self.on_broken is not None:
            self.on_broken()

    def close_door(self, *, alone: bool) -> None:
        """Refuse new work of this worker's program from now on. alone: and that of others. On the loop."""
        self._door_closed = self.shut = True
        self.parting = self.parting or alone

    @property
    def drains(self) -> bool:
        """Whether the worker leaves by itself: it takes no new calls, and finishes those that it has. Any thread."""
        return self.state is WorkerState.DRAINING

    @property
    def ended(self) -> bool:
        """Whether the worker is CLOSING or CLOSED."""
        return self.state is WorkerState.CLOSING or self.state is WorkerState.CLOSED

    def check_open(self) -> None:
        """Raise WorkerClosed, with the reason, if verbs cannot be used now. Any thread."""
        if self.closed:
            raise self.why_closed()

    def check_begin(self, *, begun: bool = False) -> None:
        """Raise WorkerClosed, with the reason, if nothing can begin now; work of a handler is part of its call.

        begun: whether it continues earlier work, or is the runtime's own. Any thread.
        """
        self.check_open()
        if self.broken:
            raise self.why_closed()
        if self.shut and not begun and not self.may_begin():
            if self.loop_ends:
                raise loop_has_ended(f"worker {self.name!r}")
            raise WorkerClosed(
                f"worker {self.name!r} is leaving, as {self.asked_by} has asked it to: it finishes what was begun "
                "before, and begins nothing more"
            )

    def check_not_forked(self) -> None:
        """Raise WorkerClosed in a forked child, where no thread runs the loop."""
        if self.forked:
            raise self.why_closed()

    def why_closed(self) -> WorkerClosed:
        """The error of a verb that cannot be used now. Any thread."""
        if self.forked:
            return WorkerClosed("this process was forked from the worker's; start a worker of its own here")
        if self.broken:
            return WorkerClosed(
                f"worker {self.name!r} is closed, as an exception has interrupted it in the midst of a step: "
                f"{self.broken}. A signal handler may raise while a verb waits; at other times let it set a flag"
            )
        if self.state is WorkerState.NEW:
            return WorkerClosed(
                f"worker {self.name!r} has not joined its group, because it was not awaited: write `await "
                "rpc.init(...)` or `async with rpc.init(...)`"
            )
        if self.state is WorkerState.STARTING:
            return WorkerClosed(f"worker {self.name!r} has not joined its group yet; await it, or use `async with`")
        if self.loop_ended:
            return loop_has_ended(f"worker {self.name!r}")
        if self.exits:
            return WorkerClosed(
                f"worker {self.name!r} has left, as its process exits: what `atexit` is to run while it can still make "
                "calls has to be registered after it was started"
            )
        return WorkerClosed(f"worker {self.name!r} has shut down; it makes no more calls")


def loop_has_ended(worker: str) -> WorkerClosed:
    """The error of verbs after the end of the worker's loop."""
    return WorkerClosed(
        f"{worker} is closed, as its event loop has ended: start a new worker, and shut it down before its loop ends, "
        "as `async with rpc.init(...)` does"
    )


def no_longer_waits(worker: str, seconds: float, what: str) -> WorkerClosed:
    """The error of a program's waits that a leaving worker ends."""
    return WorkerClosed(
        f"worker {worker!r} is leaving, and waits no longer for {what}: what its program waits for as it leaves has "
        f"{seconds:g} s. Await it before you leave, or cancel it"
    )
