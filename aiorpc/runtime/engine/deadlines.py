"""The deadlines of pending calls: one timer for all calls of a worker.

Nothing is stored here for a single call. `scan` looks at all calls, ends those that are due, and returns the next
deadline. A look takes time in proportion to the number of calls, so the pause between two looks is a multiple of the
duration of the last one. Most calls have a deadline after the next look, and cost one comparison here.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable

from .lifetime import loop_has_ended

_SOON = 0.0005  # seconds before a look at least
_SHARE = 20  # looks take at most 1/20 of the loop's time


class Deadlines:
    """Calls `scan(now)` on the loop whenever a deadline may have passed.

    scan: ends the calls due at `now` and returns the earliest deadline of the rest, or infinity. clock: the clock of
    all deadlines, in seconds.

    `next` is the time of the next look: a call with a later deadline need not be added. The loop sets it to infinity
    before it looks. So a thread that adds a call too late for that look sees infinity, and asks for another one; no
    deadline is forgotten between the two.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scan: Callable[[float], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._scan = scan
        self._clock = clock
        # Empty: looks follow each other, and the context of a call's handler would stay alive with them.
        self._context = contextvars.Context()
        self.next: float = float("inf")
        self._earliest = 0.0  # no look before this
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    def add(self, deadline: float) -> None:
        """A call with that deadline (seconds of the clock) is pending from now on. Any thread.

        `scan` must find the call before this is called. WorkerClosed if the loop is closed.
        """
        if deadline < self.next and not self._closed:
            self.next = deadline
            try:
                self._loop.call_soon_threadsafe(self._plan, deadline, context=self._context)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                self.next = float("inf")  # no look follows: later calls have to fail, too
                raise loop_has_ended("this worker") from None

    def close(self) -> None:
        """Stop looking; on the loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self, deadline: float) -> None:
        if self._closed:
            return
        now = self._clock()
        when = max(deadline, self._earliest, now + _SOON)
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_later(when - now, self._look, context=self._context)

    def _look(self) -> None:
        self._timer = None
        self.next = float("inf")
        began = self._clock()
        following = float("inf")
        try:
            following = self._scan(began)
        finally:
            ended = self._clock()
            self._earliest = ended + _SHARE * (ended - began)
            if following < self.next:
                self.next = following
            if self.next < float("inf"):
                self._plan(self.next)
