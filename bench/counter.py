"""Counting the Python functions that a process runs, in all of its threads."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class FunctionCounter:
    """Counts every Python function that is entered, and every coroutine or generator that is resumed.

    Each thread has counts of its own, so that none is lost when two threads count at once.
    """

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}  # also keeps them, so that no two have the same id
        self._counts: dict[tuple[int, int], int] = {}
        self._marks: list[dict[tuple[int, int], int]] = []

    def install(self) -> None:
        """Count in this thread from now on, and in every thread that is started after this."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            key = threading.get_ident(), id(code)
            try:
                self._counts[key] += 1
            except KeyError:
                self._codes[id(code)] = code
                self._counts[key] = 1

    def mark(self) -> None:
        """Remember the counts as they are now. It runs no other Python function, however much was counted."""
        self._marks.append(self._counts.copy())

    def between_marks(self) -> list[Counter[str]]:
        """How often each function ran from the first mark to the second, from the third to the fourth, and so on.

        Functions are named by `described`. All marks are forgotten.
        """
        marks, self._marks = self._marks, []
        return [self._difference(before, after) for before, after in zip(marks[::2], marks[1::2], strict=True)]

    def _difference(self, before: dict[tuple[int, int], int], after: dict[tuple[int, int], int]) -> Counter[str]:
        found: Counter[str] = Counter()
        for key, count in after.items():
            if ran := count - before.get(key, 0):
                found[described(self._codes[key[1]])] += ran
        return found


def described(code: CodeType) -> str:
    """Where a function is, and its name; files of this project from its root, others from their last two folders."""
    path = Path(code.co_filename)
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else path.parts[-3:]
    return f"{'/'.join(parts)}:{code.co_firstlineno} {code.co_qualname}"


@functools.cache
def counter() -> FunctionCounter:
    """The one counter of this process, made on first use."""
    return FunctionCounter()


def mark() -> None:
    """Mark the counts of the process that runs this; as a handler, in one of its threads."""
    counter().mark()


async def async_mark() -> None:
    """The same on its loop."""
    counter().mark()


def between_marks() -> list[Counter[str]]:
    """What the process that runs this has counted between marks."""
    return counter().between_marks()
