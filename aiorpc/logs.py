"""The log of aiorpc: each line begins with its worker, and a program's log handler cannot harm the runtime."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import Any

from .foreign import traceback_of


class Log(logging.LoggerAdapter[logging.Logger]):
    """Writes to the logger ``aiorpc``. Any thread.

    A line that does not begin with its worker's name gets it as a prefix; with Python's default logging the lines of
    several processes could not be told apart otherwise. The worker is the argument of `of`; by default the only worker
    of this process. If a handler or a filter of the program raises, its error goes to stderr, as by
    `logging.Handler.handleError`. `foreign.log_error` logs errors with tracebacks, and tries again without.
    """

    def __init__(self, speaker: str = "") -> None:
        super().__init__(logging.getLogger("aiorpc"))
        self._speaker = speaker
        self._workers: frozenset[str] = frozenset()
        self._left = True  # whether none of them is there any more

    def of(self, worker: str) -> Log:
        """The same log, for lines of a worker."""
        return Log(worker)

    def be_of(self, workers: Iterable[str]) -> None:
        """Set the workers of this process. Workers that have left may still log, until all have left and another one
        comes.
        """
        present = frozenset(workers)
        if present:
            self._workers = present if self._left else self._workers | present
        self._left = not present

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See `logging.Logger.log`."""
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # this function is not the caller that logs
        try:
            self.logger.log(level, self._begun(str(msg), args), *args, **kwargs)
        except BaseException as broken:
            if kwargs.get("exc_info"):
                raise
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):  # it may be closed
                    print(f"--- Logging error ---\n{traceback_of(broken)}", end="", file=sys.stderr)

    def _begun(self, text: str, args: tuple[object, ...]) -> str:
        """The text of a line, with the worker's name in front."""
        speaker = self._speaker or (next(iter(self._workers)) if len(self._workers) == 1 else "")
        line = text % args if args else text
        if not speaker or line.startswith((f"worker {speaker}: ", f"worker {speaker} ", f"worker {speaker!r} ")):
            return text
        return f"worker {speaker}: {text}"


#: The log of this process.
logger: Log = Log()
