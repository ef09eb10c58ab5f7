"""The deadlines of pending calls: one timer for all calls of a worker.

Nothing is stored here for a single call. The calls are kept elsewhere, each with its deadline; `scan` looks at all of
them, ends those that are due, and says when the next one is. A look takes time in proportion to the number of calls, so
the pause between two looks is a multiple of the time that the last one took. Most calls have a deadline that lies
behind the next look: such a call costs one comparison here.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable

from .lifetime import loop_has_ended

_SOON = 0.0005  # a look is not planned for less than this, in seconds
_SHARE = 20  # looks take at most one part in this many of the loop's time


class Deadlines:
    """Calls `scan(now)` on the loop whenever a deadline may have passed.

    scan: ends what is due at `now` and returns the earliest deadline of the rest, or infinity. clock: says what time it
    is, in seconds; that of all deadlines.

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
        # Not that of whoever adds a call: looks follow each other, and what he serves would be kept for as long.
        self._context = contextvars.Context()
        self.next: float = float("inf")
        self._earliest = 0.0  # no look before this
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    def add(self, deadline: float) -> None:
        """A call with that deadline (seconds of the clock) is pending from now on. Any thread.

        The call must stand where `scan` looks before this is called. WorkerClosed if the loop is closed.
        """
        if deadline < self.next and not self._closed:
            self.next = deadline
            try:
                self._loop.call_soon_threadsafe(self._plan, deadline, context=self._context)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                self.next = float("inf")  # no look follows: later calls have to hear of it, too
                raise loop_has_ended("this worker") from None

    def close(self) -> None:
        """Look no more; on the loop."""
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
