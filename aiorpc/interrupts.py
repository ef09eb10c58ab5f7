"""Signals, and other Python code that runs in the middle of the runtime's. The model, in ten lines:

1. Ctrl-C ends the wait of a blocking verb with KeyboardInterrupt; the worker stays usable. Anywhere else inside of the
   runtime it is deferred, to the next wait or to the border of the runtime, for `PATIENCE` seconds at most.
2. That needs a handler of ours, and no look on the path of a call. The first worker installs it if it is started in the
   main thread and SIGINT has Python's default handler; the last one gives that back. Other handlers stay untouched.
3. An exception of a program's own handler ends a wait, too. In code of the program that the runtime runs (a callback,
   `__reduce__`) it is that code's error. Elsewhere it reaches the program unchanged and closes the worker: verbs raise
   WorkerClosed with its name, the others see a goodbye.
4. A signal handler, a finalizer or a trace function may block in a verb wherever it interrupts this thread: before it
   blocks, it gives back the turns at sockets of the frames below it (`give_back`).

A wait is a call of `acquire` or `pause`, which hold nothing. A frame of the runtime is a frame of a module of aiorpc.
A thread sends a deferred signal again each millisecond: the next signal finds another instruction.

Turns. A thread that waits for an answer reads the socket itself, and a thread that sends writes it. `give_back` empties
the turns of its thread, and the loop goes on from there. The invariant: each visible step of a turn is one call of C
that takes an argument from the turn. The interrupted frame goes on later, and its next such step raises
`TurnEnded` and does nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

# Seconds for which SIGINT is deferred. A thread that comes to no wait meanwhile is interrupted where it is.
PATIENCE = 1.0
# Seconds until a deferred SIGINT is sent again.
_AGAIN = 0.001
# Modules of aiorpc that are programs.
_PROGRAMS = tuple(f"{__package__}.{name}" for name in ("commands", "examples", "testing", "__main__"))
# Where the steps of turns are.
_STEPS = f"{__package__}.transport."
#: What a call of C raises that takes an argument from a turn which has ended.
TurnEnded = IndexError


# --- waits ------------------------------------------------------------------------------------------------------------


def acquire(lock: threading.Lock, timeout: float = -1) -> bool:
    """Wait for a lock that another thread releases. Returns whether it did within `timeout` seconds."""
    give_back()
    return lock.acquire(timeout=timeout)


def pause() -> None:
    """Let other threads run, in a wait that does not sleep."""
    os.sched_yield()  # without the interpreter lock


_WAITS: frozenset[CodeType] = frozenset((acquire.__code__, pause.__code__))


def has_ended_wait(error: BaseException) -> bool:
    """Whether an error that the calling frame has caught was raised in a wait: nothing is half done then."""
    trace = BaseException.__dict__["__traceback__"].__get__(error)
    while trace is not None and _is_runtime(trace.tb_frame):
        if trace.tb_frame.f_code in _WAITS:
            return True
        trace = trace.tb_next
    return False


def _is_runtime(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.startswith(f"{__package__}.") and not name.startswith(_PROGRAMS)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


class _Interrupts:
    """The handler of SIGINT. All but `_send_again` runs in the main thread."""

    def __init__(self) -> None:
        self._since = 0.0  # when the deferred SIGINT came; 0 if none is deferred
        self._sender = 0  # id of the process in which a thread will send it again

    def follow(self, alive: bool) -> None:
        """Install the handler, or restore Python's. alive: whether there are workers. Any thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        with contextlib.suppress(ValueError):  # this is not the main interpreter
            if alive and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self.handle)
            elif not alive and signal.getsignal(signal.SIGINT) == self.handle:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def handle(self, _: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, now or later."""
        now = time.monotonic()
        if _may_interrupt(frame) or (self._since and now - self._since > PATIENCE):
            self._since = 0.0
            raise KeyboardInterrupt
        self._since = self._since or now
        if self._sender != os.getpid():
            self._sender = os.getpid()
            _thread.start_new_thread(self._send_again, ())  # `threading` takes locks that this thread may hold

    def _send_again(self) -> None:
        time.sleep(_AGAIN)
        self._sender = 0
        if self._since and signal.getsignal(signal.SIGINT) == self.handle:
            main = threading.main_thread().ident
            assert main is not None, "it has started"
            signal.pthread_kill(main, signal.SIGINT)


def _may_interrupt(frame: FrameType | None) -> bool:
    """Whether the frame is outside of the runtime, or in a wait."""
    while frame is not None:
        if _is_runtime(frame):
            return frame.f_code in _WAITS
        frame = frame.f_back
    return True


_interrupts = _Interrupts()
follow: Callable[[bool], None] = _interrupts.follow


def ends_program(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt in the main thread, where Ctrl-C arrives."""
    return issubclass(type(error), KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, and not a KeyboardInterrupt that the program has raised."""
    if not issubclass(type(error), KeyboardInterrupt):
        return False
    last = _last(BaseException.__dict__["__traceback__"].__get__(error))
    return last is not None and last.tb_frame.f_code is _Interrupts.handle.__code__


def _last(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


# --- turns ------------------------------------------------------------------------------------------------------------


class SocketTurn(list[Any]):
    """The arguments of a turn's calls of C; empty once the turn has ended. end: lets others go on; idempotent."""

    __slots__ = ("end",)

    def __init__(self, end: Callable[[], None], *parts: Any) -> None:
        super().__init__(parts)
        self.end: Callable[[], None] = end

    def has_raised(self, error: BaseException) -> bool:
        """Whether the turn has ended and `error` is the resulting TurnEnded, not a signal handler's error."""
        last = _last(error.__traceback__)
        return not self and last is not None and last.tb_frame.f_globals["__name__"].startswith(_STEPS)


class _SocketTurns(threading.local):
    def __init__(self) -> None:
        self.mine: list[SocketTurn] = []


_turns = _SocketTurns()


def begin(turn: SocketTurn) -> None:
    """The calling thread is about to take a turn; `leave` has to follow."""
    _turns.mine.append(turn)


def leave(turn: SocketTurn) -> None:
    """The turn is over."""
    mine = _turns.mine
    while mine and mine[-1] is not turn:  # an interrupted frame above did not leave its turn
        mine.pop()
    mine.pop()


def give_back() -> None:
    """The calling thread is about to block: end its turns.

    They stay in the list until `leave`: an interrupted frame may be about to take its lock, and goes on until it looks
    at its turn.
    """
    for turn in _turns.mine:
        turn.clear()
        turn.end()
