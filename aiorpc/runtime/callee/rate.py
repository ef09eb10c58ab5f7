"""The limit on one caller's calls per second."""

from __future__ import annotations


class Rate:
    """A token bucket (J. Turner, "New directions in communications", 1986) that holds the tokens of one second.

    So a caller may make up for one second without calls. Not thread-safe.
    """

    def __init__(self, per_second: float, now: float) -> None:
        """per_second: more than 0. now: ``time.monotonic()`` seconds."""
        self._per_second = per_second
        self._most = self._tokens = max(1.0, per_second)
        self._seen = now

    def take(self, now: float) -> bool:
        """A call has come at that time: whether it is within the rate."""
        self._tokens = min(self._most, self._tokens + (now - self._seen) * self._per_second)
        self._seen = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def owe(self, now: float) -> float:
        """A call has come at that time, and is served in any case: how many seconds too early it was."""
        self._tokens = min(self._most, self._tokens + (now - self._seen) * self._per_second) - 1.0
        self._seen = now
        return max(0.0, -self._tokens / self._per_second)
