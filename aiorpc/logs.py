"""The log of aiorpc: each line begins with the worker that speaks, and no log handler of a program can do harm."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import Any

from .foreign import traceback_of


class Log(logging.LoggerAdapter[logging.Logger]):
    """Writes to the logger ``aiorpc``. Any thread.

    A line that does not begin with the worker that speaks gets its name: with Python's default logging the lines of
    several processes could not be told apart otherwise. The speaker is the worker that `of` has named, else the worker
    of this process, if it has, or had last, one and no more.

    A handler or a filter of the program's own that raises does not disturb the code that logs: the error goes to
    stderr, as `logging.Handler.handleError` tells it. What has a traceback is for `foreign.log_error`, which tries once
    more without.
    """

    def __init__(self, speaker: str = "") -> None:
        super().__init__(logging.getLogger("aiorpc"))
        self._speaker = speaker
        self._workers: frozenset[str] = frozenset()
        self._left = True  # whether none of them is there any more

    def of(self, worker: str) -> Log:
        """The same log, in which that worker speaks."""
        return Log(worker)

    def be_of(self, workers: Iterable[str]) -> None:
        """These are the workers of this process from now on. Those that have left still have something to say, until
        all have and another one comes.
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
        """The text of a line, with the name of who speaks in front of it if it is not there."""
        speaker = self._speaker or (next(iter(self._workers)) if len(self._workers) == 1 else "")
        line = text % args if args else text
        if not speaker or line.startswith((f"worker {speaker}: ", f"worker {speaker} ", f"worker {speaker!r} ")):
            return text
        return f"worker {speaker}: {text}"


#: The one of this process.
logger: Log = Log()
