"""Where in the user's program something was made, and the log of failures that the program did not look at."""

from __future__ import annotations

import contextlib
import sys
import time
from types import CodeType, FrameType

from . import foreign
from .errors import RpcCancelled, WorkerClosed
from .logs import logger

# Of the same thing so many failures are logged in so many seconds: one line of a program may make ten thousand calls,
# which fail at once when their worker dies. Of so many things it is known how often that was, the latest ones.
LINES, LINES_EVERY, _THINGS = 10, 60.0, 1024

# Where in the user's program a call was made: code and instruction. The line is computed only for a text.
CallSite = tuple[CodeType, int]


def call_site(frame: FrameType) -> CallSite:
    """The place that a frame is at."""
    return frame.f_code, frame.f_lasti


def describe_site(site: CallSite | None) -> str:
    """A place as text: file, line, function; empty where it is not known."""
    if site is None:
        return ""
    code, instruction = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_qualname}"


def outside(package: str) -> FrameType:
    """The nearest frame on the stack that runs no code of that module or package: the program's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}."):
        frame = frame.f_back
    return frame


class Spates:
    """Keeps what fails again and again from filling the log. Any thread, also in the garbage collector: no locks.

    Threads that ask at once may have one line more or less.
    """

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}  # since when, and how often; what failed last is last

    def line(self, what: str) -> str | None:
        """What to put behind a line of the log that says that this has failed; None if there is to be no such line."""
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


#: What of this process is in the log.
spates: Spates = Spates()


class Unobserved:
    """Logs a failure when it is collected before anybody looked at it. what: has failed. seen: set by who looks."""

    __slots__ = ("error", "seen", "what")

    def __init__(self, what: str, error: BaseException) -> None:
        self.what: str = what
        self.error: BaseException = error
        self.seen: bool = False

    def __del__(self) -> None:
        # A failure that this worker has brought about itself, by cancelling or by leaving, is not logged.
        if not self.seen and not foreign.is_a(self.error, (RpcCancelled, WorkerClosed)):
            more = spates.line(self.what)
            if more is not None:
                logger.error("%s failed and nobody looked: %s%s", self.what, foreign.said(self.error), more)
