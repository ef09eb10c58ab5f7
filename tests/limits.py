"""A limit on the time each phase of a test may take, by the operating system's timer.

The signal interrupts what the main thread does, also an event loop that sleeps. ``SystemExit`` is what both asyncio and
uvloop let through from anywhere; any other exception could end up in a task that nobody looks at.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

DEFAULT_LIMIT = 60.0
SLOW_LIMIT = 240.0
LONGEST = 580.0  # faulthandler_timeout, in pyproject.toml, ends all that takes longer
REPEAT = 1.0  # seconds: again, should cleaning up hang as well


class _TimeLimitPassed(SystemExit):
    """Raised in the main thread by the timer."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail the running test after ``seconds``, with the stacks of all threads on stderr. Main thread only."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
    try:
        yield
    except _TimeLimitPassed:
        signal.setitimer(signal.ITIMER_REAL, 0)
        pytest.fail(f"ran for more than {seconds:g} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def busy() -> float:
    """How many times as long things take now as on an idle machine: one, or how many want each core.

    For bounds on what has to be soon: tight where that can be told, and no matter of luck where much else is running.
    """
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1.0


def limit_of(item: pytest.Item) -> float:
    """Seconds one phase of this test may take: its ``time_limit`` marker, or the default for its kind, while `busy`."""
    marker = item.get_closest_marker("time_limit")
    default = SLOW_LIMIT if item.get_closest_marker("slow") else DEFAULT_LIMIT
    idle = default if marker is None else float(marker.args[0])
    return max(idle, min(idle * busy(), LONGEST))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    raise _TimeLimitPassed("time limit")
