"""The descriptors that one worker may have open for the memory of published values: a share of those of its process.

Who has none of it left does without: a version without a slot of its own goes as any other bytes do.
"""

from __future__ import annotations

from collections.abc import Callable


class Descriptors:
    """See the module. Any thread.

    limit: gives how many there may be, as the limit of a process may change. on_full: called the first time that some
    memory had to do without.
    """

    def __init__(self, limit: Callable[[], int] = lambda: 1 << 31, on_full: Callable[[int], None] = lambda _: None):
        self._limit = limit
        self._on_full = on_full
        self._said = False
        # One entry for each that is open: to append and to pop is one step each, also in the garbage collector.
        self._open: list[None] = []

    @property
    def used(self) -> int:
        """How many are open."""
        return len(self._open)

    def take(self) -> DescriptorShare | None:
        """Leave to open one, which ends with the object that is returned; None if there are as many as there may be."""
        return DescriptorShare(self._open) if len(self._open) < self._limit() else None

    def refused(self) -> None:
        """Some memory does without, as nothing could be given back for it."""
        if not self._said:
            self._said = True
            self._on_full(self._limit())


class DescriptorShare:
    """Leave to have one descriptor open, for as long as this lives."""

    __slots__ = ("_open",)

    def __init__(self, taken: list[None]) -> None:
        self._open = taken
        taken.append(None)

    def __del__(self) -> None:
        self._open.pop()
