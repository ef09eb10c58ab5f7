"""Staying awake for a moment, where messages follow each other quickly.

Whoever sleeps takes tens of microseconds to wake up, and an idle core as long again: more than all else in a short
call. So a loop that has read something, and a thread that stands by for its next job, look for what comes next for
`MOMENT` seconds before they sleep. That pays only as long as it succeeds. Who has looked in vain sleeps the next time,
and for twice as many times with each failure, up to `MOST_SKIPPED`; `STREAK` successes in a row halve that again. So
where messages come seldom hardly any time is spent, and where they come quickly nobody sleeps. The Linux kernel decides
in this way for how long an idle processor polls before it halts (halt polling,
Documentation/virt/guest-halt-polling.rst); it changes the length of the moment, where here it is how often there is
one.

After each look the core is offered to others (sched_yield). If somebody takes it, it is wanted, and that is a failure
that costs more, as whoever computes keeps it for milliseconds: there is none for `LEAST_TAKEN` times at least. On a
machine that has more to do than cores, everybody sleeps as ever.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextvars import Context

# Seconds: what the kernel's halt polling takes at most by default.
MOMENT = 200e-6
# Events at most for which there is no moment after a failure.
MOST_SKIPPED = 4095
# For so many there is none at least, where others wanted the core.
LEAST_TAKEN = 63
# Successes in a row after which failures count half.
STREAK = 4
# Seconds after which the core was somebody else's meanwhile: no thread is put back so soon behind one that computes.
_TAKEN = 50e-6
# Seconds that a turn of the loop counts at most: what it has run beside this was no waiting.
_TURN = 20e-6


class BackOff:
    """Whether to look for what comes next, by how that went before. See the module. For one thread at a time."""

    __slots__ = ("_failed", "_skipped", "_streak")

    def __init__(self) -> None:
        self._failed = 0  # how often to sleep after the next failure: twice as often
        self._skipped = 0  # how often there still is none
        self._streak = 0

    def worth(self) -> bool:
        """Whether to look this time. To be asked once for each time."""
        if self._skipped:
            self._skipped -= 1
            return False
        return True

    def succeeded(self) -> None:
        """What came next came while somebody looked."""
        if self._failed:
            self._streak += 1
            if self._streak == STREAK:
                self._streak = 0
                self._failed //= 2

    def failed(self, least: int = 1) -> None:
        """Nothing came; there is none for so many times at least."""
        self._streak = 0
        self._failed = self._skipped = min(max(2 * self._failed + 1, least), MOST_SKIPPED)


def give_way(now: float) -> float | None:
    """Offer the core to others; the time after that, None if it was taken. now: that of `time.monotonic`."""
    os.sched_yield()  # without the interpreter lock
    after = time.monotonic()
    return after if after - now < _TAKEN else None


class LoopPoll:
    """Keeps a loop awake for a moment after each message, where that pays. On the loop.

    moment: seconds. The loop runs whatever else it has to run meanwhile; that does not count as waiting.
    yields: whether threads need the interpreter more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, moment: float, yields: Callable[[], bool]) -> None:
        self._loop = loop
        self._yields = yields
        self._moment = moment
        self._back_off = BackOff()
        self._context = Context()  # of nobody's code
        self._awake = False
        self._heard = False
        self._waited = 0.0
        self._looked = 0.0

    def heard(self) -> None:
        """Something has come."""
        if self._awake:
            self._heard = True
        elif self._back_off.worth():
            self._stay_awake()

    def _stay_awake(self) -> None:
        self._waited = 0.0
        self._looked = time.monotonic()
        self._loop.call_soon(self._look, context=self._context)
        self._heard = False
        self._awake = True

    def _look(self) -> None:
        """In each turn while it is awake: a loop that has something to run does not sleep before it looks for more."""
        self._awake = False  # so that the next message begins anew where a signal handler raises here
        now = time.monotonic()
        if self._heard:
            self._heard = False
            self._waited = 0.0
            self._back_off.succeeded()
        else:
            self._waited += min(now - self._looked, _TURN)
        if self._yields():
            return
        if self._waited >= self._moment:
            self._back_off.failed()
        elif (looked := give_way(now)) is None:
            self._back_off.failed(LEAST_TAKEN)
        else:
            self._looked = looked
            self._loop.call_soon(self._look, context=self._context)
            self._awake = True
