"""Locks, as signal handlers raise where they are taken and given back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from aiorpc import locks
from tests.transport.ends import Interruption, interrupted


def is_free(lock: Any) -> bool:
    """Whether another thread can take it."""
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(lock.acquire(False)))
    thread.start()
    thread.join()
    return taken == [True]


@pytest.fixture
def handler() -> Iterator[None]:
    """A handler of SIGVTALRM raises."""

    def interrupt(*_: object) -> NoReturn:
        raise Interruption

    before = signal.signal(signal.SIGVTALRM, interrupt)
    yield
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("make", [locks.Lock, locks.RLock])
def test_a_lock_is_given_back_wherever_a_signal_handler_raises(make: Callable[[], Any]) -> None:
    """On Python 3.14 it may raise between the lock and the body of the `with`, and did so every other time."""
    for _ in range(30):
        lock = make()
        with contextlib.suppress(Interruption):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
            while True:
                with lock:
                    pass
        assert is_free(lock)


def test_a_lock_that_is_held_is_kept_by_whoever_is_interrupted_within() -> None:
    """An RLock that is entered again: the inner `with` gives back what it has taken, and no more."""

    def work() -> None:
        with lock:
            pass

    lock: Any = locks.RLock()
    at = 0
    with lock:
        while interrupted(work, at, __file__, locks.__file__, signals=True) is not None:
            at += 1
            assert not is_free(lock)
    assert at and is_free(lock)
