"""Progress of a long run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int = 16) -> str:
    """A bar of ``width`` characters, filled by ``share`` (0 to 1; what is beyond is cut)."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    try:
        "█▏".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ("#" * (eighths // 8)).ljust(width)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(width)[:width]


class Steps:
    """Counts the steps of a run and shows a line for each; a context manager.

    title: the word before the bar. total: how many steps there will be. show: False prints nothing at all.
    """

    def __init__(self, title: str, total: int, *, show: bool = True) -> None:
        self._show = show
        self._bar: Progress | None = None
        if show and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console())
            self._task = self._bar.add_task(title, total=total)

    def done(self, line: str, count: int | None = None) -> None:
        """One more step is done, or so many in all; ``line`` says how it went."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
            if count is None:
                self._bar.advance(self._task)
            else:
                self._bar.update(self._task, completed=count)
        elif self._show:
            print(line, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
