"""Busy polling: staying awake for a moment while messages follow each other quickly.

A sleeping thread takes tens of microseconds to wake up, and an idle core as long again: more than the rest of a short
call. So a loop after reading, and a thread that stands by for its next job, poll for `MOMENT` seconds before they
sleep. After a failed poll the next one is skipped; each failure doubles the number of skipped polls, up to
`MOST_SKIPPED`, and `STREAK` successes in a row halve it. So rare messages cost hardly any processor time, and quick
ones find the loop awake. It resembles the halt polling of the Linux kernel (Documentation/virt/guest-halt-polling.rst),
which adapts the length of the poll instead of its frequency.

After each look the core is offered to other threads (sched_yield). If one takes it, the poll has failed, and at least
`LEAST_TAKEN` polls are skipped, because a computing thread keeps the core for milliseconds. So on a busy machine hardly
any poll takes place.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextvars import Context

# Seconds: the default limit of the kernel's halt polling.
MOMENT = 200e-6
# Polls skipped at most after a failure.
MOST_SKIPPED = 4095
# Polls skipped at least after another thread took the core.
LEAST_TAKEN = 63
# Successes in a row that halve the number of skipped polls.
STREAK = 4
# Seconds of sched_yield that mean that another thread had the core: a computing one keeps it for longer.
_TAKEN = 50e-6
# Seconds that a turn of the loop counts at most: running callbacks is no waiting.
_TURN = 20e-6


class BackOff:
    """Whether to poll, by the success of earlier polls. See the module. For one thread at a time."""

    __slots__ = ("_failed", "_skipped", "_streak")

    def __init__(self) -> None:
        self._failed = 0  # polls skipped after the last failure
        self._skipped = 0  # polls still to skip
        self._streak = 0

    def worth(self) -> bool:
        """Whether to poll this time. Call it once for each time."""
        if self._skipped:
            self._skipped -= 1
            return False
        return True

    def succeeded(self) -> None:
        """Something came during the poll."""
        if self._failed:
            self._streak += 1
            if self._streak == STREAK:
                self._streak = 0
                self._failed //= 2

    def failed(self, least: int = 1) -> None:
        """Nothing came; so many polls are skipped at least."""
        self._streak = 0
        self._failed = self._skipped = min(max(2 * self._failed + 1, least), MOST_SKIPPED)


def give_way(now: float) -> float | None:
    """Offer the core to other threads; the time after that, None if one took it. now: of `time.monotonic`."""
    os.sched_yield()  # without the interpreter lock
    after = time.monotonic()
    return after if after - now < _TAKEN else None


class LoopPoll:
    """Keeps a loop awake for a moment after each message, if that pays. On the loop.

    moment: seconds; running other callbacks does not count. yields: whether threads need the interpreter more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, moment: float, yields: Callable[[], bool]) -> None:
        self._loop = loop
        self._yields = yields
        self._moment = moment
        self._back_off = BackOff()
        self._context = Context()  # empty: it is no one's code
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
        """Runs in each turn while awake: a loop with a ready callback does not sleep."""
        self._awake = False  # first, for the case that a signal handler raises here
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
