"""Progress of long steps, shown in a terminal or a notebook by rich, or by tqdm where that is missing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from .errors import RpcUsageError


class Bar(Protocol):
    """One bar. Any thread. Leaving its ``with`` block, or `close`, takes it away; closing again does nothing."""

    def show(self, done: int, total: int) -> None:
        """So many of so many are done."""

    def close(self) -> None:
        """Take it away."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Closing:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """See `Bar`."""


class _RichBar(_Closing):
    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        # A console of its own, as one shows one bar at a time. What is done is of no interest: it goes away.
        self._progress = Progress(*columns, console=Console(file=sys.stderr), transient=True)
        self._task = self._progress.add_task(title, total=None)
        self._progress.start()

    def show(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()


class _TqdmBar(_Closing):
    def __init__(self, title: str) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(desc=title, leave=False, bar_format="{desc}: {n_fmt}/{total_fmt} {bar} {elapsed}")

    def show(self, done: int, total: int) -> None:
        self._bar.n, self._bar.total = done, total
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def begin(title: str) -> Bar:
    """A bar, which shows at once. Raises RpcUsageError if neither rich nor tqdm is installed."""
    return _kind()(title)


def check(wanted: bool) -> bool:
    """`wanted`, if it can be had. Raises RpcUsageError if not; see `begin`."""
    if wanted:
        _kind()
    return wanted


def _kind() -> Callable[[str], Bar]:
    with contextlib.suppress(ImportError):
        import rich.progress  # noqa: F401  # whether it can be had

        return _RichBar
    with contextlib.suppress(ImportError):
        import tqdm  # noqa: F401

        return _TqdmBar
    raise RpcUsageError("progress=True needs rich or tqdm: pip install 'aiorpc-torch[progress]'")
