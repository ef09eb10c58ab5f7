"""How late the loop is, and what blocks it: a timer on the loop, and a thread that notices when it is overdue."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from ...logs import logger
from ...threads import current_frames

_FRAMES = 4
_DEDICATED = "options.dedicated_loop for a program whose own steps block the loop"
_WEIGHT = 0.1
_JOIN_SECONDS = 2.0


@dataclass(eq=False, slots=True)
class _Tick:
    """One awaited run of the timer. A new object for each run keeps loop and thread from mixing up two runs."""

    due: float
    excused: float = 0.0
    warned: bool = False


class LoopMonitor:
    """Measures how late a loop's timers run, and warns when something blocks it.

    loop: asyncio's or uvloop's. interval: seconds between two looks, of the timer and of the thread. warn_after:
    seconds the loop may be blocked before one warning (logger ``aiorpc``) says for how long, by what, and what to do;
    0: no thread and no warnings. describe: the handler that the runtime believes to be running, empty for none; called
    in the thread. apart: whether the loop has a thread for itself, in which the program runs no steps of its own;
    called in the thread. name: of the worker, and of the thread, ``aiorpc-watch-<name>``. on_closed: called in the
    thread when it finds that the loop was closed without a call of `stop`.

    Imports and garbage collections are named as such, each at most once: they happen in any program on a busy machine.

    Time in which the process was stopped or got no processor is not held against a handler, nor is time in which the
    loop was not running. ``start`` and ``stop`` belong on the loop's thread, or anywhere while the loop does not run.
    The figures may be read from any thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        interval: float = 0.25,
        warn_after: float,
        describe: Callable[[], str],
        apart: Callable[[], bool] = lambda: False,
        name: str = "loop",
        on_closed: Callable[[], object] | None = None,
    ) -> None:
        if interval <= 0 or warn_after < 0:
            raise ValueError(f"interval must be > 0 and warn_after >= 0 seconds, not {interval} and {warn_after}")
        self._loop = loop
        self._interval = interval
        self._warn_after = warn_after
        self._describe = describe
        self._apart = apart
        self._named: set[str] = set()  # causes already named that are named once
        self._collections = 0  # full collections at the thread's last look
        self._name = name
        self._on_closed = on_closed
        self._handle: asyncio.Handle | None = None
        self._tick: _Tick | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._cpu_clock: int | None = None
        self._seen: tuple[float, float | None] = time.monotonic(), None  # when the thread looked, and `_cpu_used` then
        self.on_tick: Callable[[], object] | None = None
        """Called on the loop whenever the timer runs."""
        self.lag_max: float = 0.0
        """Seconds the timer was late at worst."""
        self.lag_mean: float = 0.0
        """Seconds the timer is late, a moving average over about ten intervals."""
        self.blocked_count: int = 0
        """Times the loop was blocked for more than ``warn_after`` (0 if that is 0)."""

    def silent(self) -> float:
        """Seconds since when the timer is overdue; 0.0 while it is not, and while the loop does not run. Any thread."""
        tick = self._tick
        late = 0.0 if tick is None else time.monotonic() - tick.due - tick.excused
        return late if late > self._interval and self._loop.is_running() else 0.0

    def start(self) -> None:
        """Begin to measure. Nothing if it has begun."""
        if self._handle is not None:
            return
        # A new one: a watchdog that hung in ``describe`` and outlived a stop must still end.
        self._stopped = threading.Event()
        self._handle = self._loop.call_soon(self._first)
        if self._warn_after > 0:
            name = f"aiorpc-watch-{self._name}"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the timer and the thread; waits for the thread, at most two seconds. Idempotent."""
        self._stopped.set()
        self._tick = None
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    # On the loop.

    def _first(self) -> None:
        self._loop_thread = threading.get_ident()
        self._cpu_clock = _thread_clock(self._loop_thread)
        self._schedule()

    def _schedule(self) -> None:
        if self._stopped.is_set():
            return
        self._tick = _Tick(time.monotonic() + self._interval)
        self._handle = self._loop.call_later(self._interval, self._ticked)

    def _ticked(self) -> None:
        tick = self._tick
        if tick is None:
            return
        if self.on_tick is not None:
            self.on_tick()
        # uvloop counts from the beginning of the loop's turn, so a tick may also come a little early.
        now = time.monotonic()
        lag = max(0.0, now - tick.due - tick.excused)
        if lag and self._thread is not None:  # the thread may wake up later, and excuse this too late
            lag = max(0.0, lag - self._excused(now))
        self.lag_max = max(self.lag_max, lag)
        self.lag_mean += _WEIGHT * (lag - self.lag_mean)
        if 0 < self._warn_after < lag:
            self.blocked_count += 1
        self._schedule()

    # In the thread.

    def _watch(self) -> None:
        stopped = self._stopped
        self._seen = time.monotonic(), self._cpu_used()
        self._collections = _collections()
        while not stopped.wait(self._interval) and not self._loop.is_closed():
            now, tick = time.monotonic(), self._tick
            if tick is not None:
                tick.excused += self._excused(now)
            # A collection stops all threads, this one, too.
            held_up, collections = now - self._seen[0] > self._warn_after + self._interval, _collections()
            collected, self._collections = held_up and collections != self._collections, collections
            # After the excuse: a tick between the two excuses the time twice, and not never.
            self._seen = now, self._cpu_used()
            if tick is not None:
                self._judge(tick, now, collected)
        if self._on_closed is not None and not stopped.is_set():
            self._on_closed()

    def _excused(self, now: float) -> float:
        """Seconds since the thread's last look that are no handler's fault.

        The thread is late itself: the process was stopped or starved, unless the loop's thread used the processor all
        the while, which means that it held the interpreter lock in one long C call.
        """
        before, computed = self._seen
        used = self._cpu_used()
        if not self._loop.is_running():
            return now - before
        cpu = 0.0 if computed is None or used is None else used - computed
        return max(0.0, now - before - self._interval - cpu)

    def _judge(self, tick: _Tick, now: float, collected: bool) -> None:
        blocked = now - tick.due - tick.excused
        if tick.warned or blocked <= self._warn_after or tick is not self._tick or not self._loop.is_running():
            return
        tick.warned = True
        frames = _frames_of(self._loop_thread)
        module = _imported(frames)
        common = "a garbage collection" if collected else f"the import of {module}" if module else ""
        if common:
            kind = "collection" if collected else "import"
            if kind in self._named:
                return
            self._named.add(kind)
            what, advice = common, "That is no fault of a handler, and is reported once"
        else:
            what, advice = self._advise()
        logger.of(self._name).warning(
            "the event loop has been blocked for %.2f s by %s (at %s): nothing else on this loop runs meanwhile. %s",
            blocked,
            what,
            _innermost(frames),
            advice,
        )

    def _advise(self) -> tuple[str, str]:
        """What blocks the loop, and what to do about it."""
        apart = self._apart()
        try:
            handler = self._describe()
        except Exception as error:
            handler = f"an unknown handler ({type(error).__name__} while asking)"
        if handler:
            own = "" if apart else f", or set {_DEDICATED}"
            return handler, f"Make it a plain `def` handler, which runs in a thread{own}"
        if apart:
            return "no handler", "Something was put on the worker's own loop there: run it in a thread"
        return "a step of the program's own", f"Run it in a thread, as by asyncio.to_thread, or set {_DEDICATED}"

    def _cpu_used(self) -> float | None:
        """Processor time of the loop's thread so far, in seconds; None where that cannot be told, or not yet."""
        if self._cpu_clock is None:
            return None
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:
            return None


def _thread_clock(ident: int) -> int | None:
    try:
        return time.pthread_getcpuclockid(ident)
    except (AttributeError, OSError):
        return None


def _collections() -> int:
    """How many full garbage collections there were."""
    count: int = gc.get_stats()[-1]["collections"]
    return count


def _frames_of(thread: int) -> list[FrameType]:
    """The frames of a thread, innermost first."""
    frame: FrameType | None = current_frames().get(thread)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _imported(frames: Sequence[FrameType]) -> str:
    """The module whose import these frames are in, the outermost one; empty if there is none."""
    for frame in reversed(frames):
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
            return str(frame.f_locals.get("name", "a module"))
    return ""


def _innermost(frames: Sequence[FrameType]) -> str:
    """The innermost of these frames, innermost first, as ``file:line function``."""
    places = [f"{os.path.basename(each.f_code.co_filename)}:{each.f_lineno} {each.f_code.co_name}" for each in frames]
    return " < ".join(places[:_FRAMES]) or "an unknown place"
