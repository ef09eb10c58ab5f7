"""A worker's share of the process's file descriptors, for the memory of published values.

Without a descriptor a version gets no slot of its own, and its bytes go by other channels.
"""

from __future__ import annotations

from collections.abc import Callable


class Descriptors:
    """See the module. Any thread.

    limit: gives how many descriptors there may be now. on_full: called once, the first time that the limit is reached.
    """

    def __init__(self, limit: Callable[[], int] = lambda: 1 << 31, on_full: Callable[[int], None] = lambda _: None):
        self._limit = limit
        self._on_full = on_full
        self._said = False
        # One entry for each open descriptor. Append and pop are atomic, also in the garbage collector.
        self._open: list[None] = []

    @property
    def used(self) -> int:
        """How many are open."""
        return len(self._open)

    def take(self) -> DescriptorShare | None:
        """A share for one descriptor, which ends with the returned object; None at the limit."""
        return DescriptorShare(self._open) if len(self._open) < self._limit() else None

    def refused(self) -> None:
        """Some memory gets no descriptor."""
        if not self._said:
            self._said = True
            self._on_full(self._limit())


class DescriptorShare:
    """The right to have one descriptor open, as long as this object lives."""

    __slots__ = ("_open",)

    def __init__(self, taken: list[None]) -> None:
        self._open = taken
        taken.append(None)

    def __del__(self) -> None:
        self._open.pop()
