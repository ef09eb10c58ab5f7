"""The time limit interrupts whatever the main thread does."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.limits import time_limit

SHORT = 0.05


def block_on_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=30)


def compute() -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("block", [block_on_a_lock, compute])
def test_blocked_thread_is_interrupted(block: Callable[[], None]) -> None:
    """A wait on a lock and a busy loop both end at the limit."""
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"more than 0.05 s"), time_limit(SHORT):
        block()
    assert time.monotonic() - started < 20


def test_sleeping_loop_is_interrupted(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """An event loop with nothing to do ends at the limit, on both kinds of loop."""
    started = time.monotonic()
    with (
        pytest.raises(pytest.fail.Exception, match=r"more than 0.05 s"),
        time_limit(SHORT),
        asyncio.Runner(loop_factory=loop_factory) as runner,
    ):
        runner.run(asyncio.sleep(30))
    assert time.monotonic() - started < 20


def test_quick_work_is_left_alone() -> None:
    """Within the limit nothing happens, and the timer is off afterwards."""
    with time_limit(SHORT):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
