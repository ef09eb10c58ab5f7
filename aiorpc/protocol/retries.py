"""When a call is tried again, how long the pause before that is, and when there is no further try. No I/O, no clock.

The pause is exponential with full jitter: of random length up to a bound that doubles with each try. Callers that have
failed together then come back at different times, which causes the least work for all (Brooker, "Exponential Backoff
and Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import sys
from random import Random
from typing import NamedTuple, TypeGuard

from ..errors import RpcUsageError
from .states import RETRIED, RetriedEvent, RetriedState

MOST = 1000  # tries of one call, at most


class Backoff(NamedTuple):
    """Bounds of the pauses between tries, in seconds: of the first one, and of all."""

    first: float = 0.1
    longest: float = 10.0


def check_retries(retries: object) -> int:
    """Return how often a call is tried again; RpcUsageError for an invalid number."""
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MOST:
        raise RpcUsageError(f"retries must be an integer from 0 to {MOST}, not {retries!r:.40}")
    return retries


def check_backoff(backoff: object) -> Backoff:
    """Bounds from a program's value: seconds of the first pause, or of the first and the longest. RpcUsageError."""
    first, longest = backoff if isinstance(backoff, (tuple, list)) and len(backoff) == 2 else (backoff, None)
    if not _is_duration(first) or not (longest is None or _is_duration(longest)):
        raise RpcUsageError(
            "backoff must be the seconds that the first pause has at most, or a pair with those of the longest one, "
            f"not {backoff!r:.40}"
        )
    return Backoff(float(first), max(float(first), Backoff().longest) if longest is None else float(longest))


def _is_duration(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


class Tries:
    """The tries of one call; see the module. One thread at a time.

    state: in the table RETRIED. made: tries that were begun. deadline: when the call ends, in seconds of the clock that
    `failed` gets; None: never.
    """

    def __init__(self, retries: int, backoff: Backoff, deadline: float | None, random: Random) -> None:
        self.state: RetriedState = RETRIED.initial
        self.made: int = 1
        self.deadline = deadline
        self._retries = retries
        self._backoff = backoff
        self._random = random

    def failed(self, now: float) -> float | None:
        """A try has failed, and another one may succeed: seconds until that; None if there is none."""
        # A bound past which doubling would only overflow.
        bound = min(self._backoff.longest, self._backoff.first * 2.0 ** min(self.made - 1, 1000))
        pause = self._random.uniform(0.0, bound)
        if self.made > self._retries or (self.deadline is not None and now + pause >= self.deadline):
            self.state = RETRIED.next(self.state, RetriedEvent.USED_UP)
            return None
        self.state = RETRIED.next(self.state, RetriedEvent.FAILED)
        return pause

    def again(self) -> bool:
        """The pause is over: whether to make a try now; not if the call has ended meanwhile."""
        if self.state is not RetriedState.PAUSED:
            return False
        self.state = RETRIED.next(self.state, RetriedEvent.PAUSE_OVER)
        self.made += 1
        return True

    def end(self, event: RetriedEvent) -> bool:
        """The call ends; False if it had ended."""
        if self.state is RetriedState.ENDED:
            return False
        self.state = RETRIED.next(self.state, event)
        return True
