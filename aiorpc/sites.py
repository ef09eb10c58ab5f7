"""Places in the user's program, and the log of failures that the program did not look at."""

from __future__ import annotations

import contextlib
import sys
import time
from types import CodeType, FrameType

from . import foreign
from .errors import RpcCancelled, WorkerClosed
from .logs import logger

# The log gets at most LINES failures of one thing in LINES_EVERY seconds: one line of a program may make ten thousand
# calls, which fail at once when their worker dies. The last _THINGS things are counted.
LINES, LINES_EVERY, _THINGS = 10, 60.0, 1024

# Where in the user's program a call was made: code and instruction. The line is computed only for a text.
CallSite = tuple[CodeType, int]


def call_site(frame: FrameType) -> CallSite:
    """The present place of a frame."""
    return frame.f_code, frame.f_lasti


def describe_site(site: CallSite | None) -> str:
    """A place as text: file, line, function; empty for None."""
    if site is None:
        return ""
    code, instruction = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_qualname}"


def outside(package: str) -> FrameType:
    """The nearest frame on the stack outside of a module or package: the program's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}."):
        frame = frame.f_back
    return frame


class Spates:
    """Limits the log lines of repeated failures. Any thread, also in the garbage collector: no locks.

    Concurrent threads may log one line more or less.
    """

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}  # since when, and how often; the last failure is last

    def line(self, what: str) -> str | None:
        """The end of the log line for a failure of `what`; None if the failure is not to be logged."""
        now = time.monotonic()
        since, count = self._logged.pop(what, (now, 0))
        if now - since >= LINES_EVERY:
            since, count = now, 0
        count += 1
        self._logged[what] = since, count
        if len(self._logged) > _THINGS:
            with contextlib.suppress(KeyError, RuntimeError):  # another thread has done so
                del self._logged[next(iter(self._logged))]
        if count > LINES:
            return None
        return f". So have others; more are not logged within {LINES_EVERY:g} s" if count == LINES else ""


#: The limits of this process.
spates: Spates = Spates()


class Unobserved:
    """Logs a failure that is garbage-collected before the program looked at it. what: names it. seen: stops the log."""

    __slots__ = ("error", "seen", "what")

    def __init__(self, what: str, error: BaseException) -> None:
        self.what: str = what
        self.error: BaseException = error
        self.seen: bool = False

    def __del__(self) -> None:
        # This worker's own cancelling or leaving is no failure to log.
        if not self.seen and not foreign.is_a(self.error, (RpcCancelled, WorkerClosed)):
            more = spates.line(self.what)
            if more is not None:
                logger.error("%s failed and nobody looked: %s%s", self.what, foreign.said(self.error), more)
