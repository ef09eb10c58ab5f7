"""Deadlines on a loop whose timers fire when the test says so, and on real loops from many threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import pytest

from aiorpc.runtime.engine.deadlines import Deadlines

INFINITY = float("inf")
LONG = 20.0


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A loop and a clock that move only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []
        self.wakeups = 0

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any, context: Context | None = None) -> None:
        self.wakeups += 1
        (context or copy_context()).run(callback, *args)

    def call_later(self, delay: float, callback: Callable[[], None], *, context: Context | None = None) -> Timer:
        timer = Timer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    @property
    def waiting(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]

    def advance(self, seconds: float) -> None:
        """Let time pass, and run what became due, in order."""
        end = self.now + seconds
        while due := [timer for timer in self.waiting if timer.when <= end]:
            timer = min(due, key=lambda each: each.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.callback()
        self.now = end


class Calls:
    """Pending calls with deadlines, as a worker has them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.pending: dict[int, float] = {}
        self.expired: list[tuple[int, float]] = []
        self.looks = 0
        self.now = now

    def scan(self, now: float) -> float:
        self.looks += 1
        for number, deadline in list(self.pending.items()):
            if deadline <= now:
                del self.pending[number]
                self.expired.append((number, now))
        return min(self.pending.values(), default=INFINITY)


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def calls(loop: FakeLoop) -> Calls:
    return Calls(lambda: loop.now)


@pytest.fixture
def watch(loop: FakeLoop, calls: Calls) -> Deadlines:
    return watching(loop, calls.scan)


def watching(loop: FakeLoop, scan: Callable[[float], float]) -> Deadlines:
    return Deadlines(loop, scan, clock=lambda: loop.now)  # type: ignore[arg-type]  # a loop that moves when told to


def call(watch: Deadlines, calls: Calls, number: int, deadline: float) -> None:
    calls.pending[number] = deadline
    watch.add(deadline)


def test_call_expires_at_its_deadline(loop: FakeLoop, calls: Calls, watch: Deadlines) -> None:
    """Not before, and within a millisecond after."""
    call(watch, calls, 1, loop.now + 5)
    loop.advance(4.999)
    assert calls.expired == []
    loop.advance(0.002)
    assert calls.expired == [(1, 1005.0)]
    assert loop.waiting == []


def test_earlier_deadline_added_later_comes_first(loop: FakeLoop, calls: Calls, watch: Deadlines) -> None:
    """A call with a shorter timeout does not wait for the longer ones made before it."""
    start = loop.now
    call(watch, calls, 1, start + 60)
    call(watch, calls, 2, start + 1)
    call(watch, calls, 3, start + 30)
    loop.advance(100)
    assert [(number, round(when - start, 2)) for number, when in calls.expired] == [(2, 1), (3, 30), (1, 60)]


def test_passed_deadline_expires_at_the_next_look(loop: FakeLoop, calls: Calls, watch: Deadlines) -> None:
    """A deadline that has passed when it is added expires almost at once."""
    call(watch, calls, 1, loop.now - 5)
    loop.advance(0.001)
    assert [number for number, _ in calls.expired] == [1]


def test_usual_calls_cost_no_wakeup(loop: FakeLoop, calls: Calls, watch: Deadlines) -> None:
    """Calls with one timeout, answered in time, wake the loop once, and one timer serves them all."""
    for number in range(1000):
        call(watch, calls, number, loop.now + 60)
        calls.pending.pop(number)
        loop.now += 0.01
    assert loop.wakeups == 1
    assert len(loop.waiting) == 1
    loop.advance(100)
    assert calls.looks == 1


def test_nothing_pending_keeps_no_timer(loop: FakeLoop, calls: Calls, watch: Deadlines) -> None:
    """After the last call there is no more look, until the next call asks for one."""
    call(watch, calls, 1, loop.now + 1)
    loop.advance(2)
    looks = calls.looks
    loop.advance(1000)
    assert calls.looks == looks
    call(watch, calls, 2, loop.now + 1)
    loop.advance(2)
    assert [number for number, _ in calls.expired] == [1, 2]


def test_looks_are_kept_apart_by_what_they_cost(loop: FakeLoop, calls: Calls) -> None:
    """When a look takes long, because much is pending, the next waits in proportion: the loop stays free."""

    def slow(now: float) -> float:
        loop.now += 0.1
        return calls.scan(now)

    watch = watching(loop, slow)
    for number in range(200):
        call(watch, calls, number, loop.now + number * 0.01)
    began = loop.now
    loop.advance(20)
    assert len(calls.expired) == 200
    assert calls.looks * 0.1 < 0.1 * (loop.now - began)


def test_failing_look_does_not_end_the_watch(loop: FakeLoop, calls: Calls) -> None:
    """An error while one call is ended does not keep later calls from their deadlines."""
    bugs = [ValueError("bug")]

    def broken_once(now: float) -> float:
        if bugs:
            raise bugs.pop()
        return calls.scan(now)

    watch = watching(loop, broken_once)
    call(watch, calls, 1, loop.now + 1)
    with pytest.raises(ValueError, match="bug"):
        loop.advance(2)
    call(watch, calls, 2, loop.now + 1)
    loop.advance(2)
    assert sorted(number for number, _ in calls.expired) == [1, 2]


def test_close_looks_no_more(loop: FakeLoop, calls: Calls, watch: Deadlines) -> None:
    """After close no timer waits, and calls added by threads that come too late are ignored."""
    call(watch, calls, 1, loop.now + 1)
    watch.close()
    watch.close()
    call(watch, calls, 2, loop.now + 1)
    loop.advance(100)
    assert calls.looks == 0


def test_call_added_during_a_look_is_seen(loop: FakeLoop, calls: Calls) -> None:
    """A call made between the look at the pending ones and its end has its deadline watched all the same."""

    def look(now: float) -> float:
        following = calls.scan(now)
        if calls.looks == 1:
            call(deadlines, calls, 2, now + 3)
        return following

    deadlines = watching(loop, look)
    call(deadlines, calls, 1, loop.now + 1)
    loop.advance(10)
    assert [number for number, _ in calls.expired] == [1, 2]


async def test_calls_of_many_threads_all_expire() -> None:
    """Eight threads add deadlines while the loop looks: none is forgotten, none comes early or very late."""
    late: list[float] = []
    lock = threading.Lock()
    pending: dict[int, float] = {}

    def scan(now: float) -> float:
        with lock:
            for number, deadline in list(pending.items()):
                if deadline <= now:
                    late.append(now - pending.pop(number))
            return min(pending.values(), default=INFINITY)

    watch = Deadlines(asyncio.get_running_loop(), scan)

    def work(thread: int) -> None:
        for number in range(100):
            deadline = time.monotonic() + 0.001 * ((number * 7 + thread) % 20)
            with lock:
                pending[thread * 1000 + number] = deadline
            watch.add(deadline)

    await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(8)))
    async with asyncio.timeout(LONG):
        while len(late) < 800:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.001)
    watch.close()
    assert min(late) >= 0
    assert max(late) < 5
