"""How long waits at the store last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from ...errors import RendezvousError

_FIRST_PAUSE, LAST_PAUSE = 0.002, 0.05
LONGEST_ATTEMPT = 30.0


class Patience:
    """A deadline, and an event that ends all waiting.

    seconds: how long from now; 0 means no limit. stop: waits end with RendezvousError once it is set. place, trouble:
    what is waited for, and what last went wrong, for the error of a caller that ends the wait from outside; empty if
    unknown. Any thread may read them. tell: called with how many of how many members have come, while others are
    awaited; None if nothing shows it.
    """

    def __init__(self, seconds: float, stop: threading.Event | None = None) -> None:
        self.seconds = seconds
        self.place = self.trouble = ""
        self.tell: Callable[[int, int], None] | None = None
        self._deadline = time.monotonic() + seconds if seconds else float("inf")
        self.stop: threading.Event = stop or threading.Event()

    def left(self) -> float:
        """Seconds left, not below 0; infinite without a limit."""
        return max(0.0, self._deadline - time.monotonic())

    def attempt(self) -> float:
        """Seconds for one of several attempts."""
        return max(0.05, min(self.left(), LONGEST_ATTEMPT))

    def tries(self) -> Iterator[None]:
        """Yield at least once, then again after ever longer pauses, until the time is up."""
        pause = _FIRST_PAUSE
        while True:
            if self.stop.is_set():
                raise RendezvousError("joining the group was stopped")
            yield
            left = self.left()
            if left <= 0:
                return
            self.stop.wait(min(pause, left))
            pause = min(pause * 1.5, LAST_PAUSE)
