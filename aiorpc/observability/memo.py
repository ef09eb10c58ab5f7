"""The last lines of the log ``aiorpc`` of this process, for programs that look at its workers from outside."""

from __future__ import annotations

import logging
from collections import deque

from ..runtime.node import registry

#: So many lines are kept, each so long.
_LINES, _LENGTH = 100, 500
_NAME = "memo"


def memo() -> Memo:
    """That of this process. It keeps lines while the process has workers."""
    kept = registry.servers.setdefault(_NAME, Memo())
    assert isinstance(kept, Memo), "nothing else has that name"
    return kept


class Memo(logging.Filter):
    """Keeps the text of what the logger is told, and lets all of it pass. Any thread.

    A filter: if the logger had a handler, Python would not print warnings of a program without a log of its own. Text
    alone is kept, as the arguments of a record hold objects of the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._formatter = logging.Formatter()

    def open(self) -> None:
        """Keep what is logged from now on."""
        logging.getLogger("aiorpc").addFilter(self)

    def close(self) -> None:
        """Keep nothing more, and forget what was kept."""
        logging.getLogger("aiorpc").removeFilter(self)
        self._lines.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line."""
        try:
            text = record.getMessage()
        except Exception:  # an argument of the program's cannot be shown; the handlers say so
            text = str(record.msg)
        line = f"{self._formatter.formatTime(record)} {record.levelname} {text}"
        self._lines.append(line if len(line) <= _LENGTH else f"{line[:_LENGTH]}...")
        return True

    def lines(self) -> list[str]:
        """Those that were kept, oldest first."""
        return list(self._lines)
