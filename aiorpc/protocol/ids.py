"""Sets of ids that were counted up: stored as ranges, they take little memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set


class IdSet(Set[int]):
    """Integers, as ranges. A group may have had any number of members: those that are gone are a few ranges.

    Ids can be added, and stay.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # of each range: the number after its last one
        for number in ids:
            self.add(number)

    @classmethod
    def from_ranges(cls, ranges: Iterable[Sequence[int]]) -> IdSet:
        """The reverse of `ranges`. ValueError unless each is two integers, and they are in order and apart."""
        made, last = cls(), None
        for start, end in ranges:
            if type(start) is not int or type(end) is not int or end <= start or (last is not None and start <= last):
                raise ValueError(f"{start!r:.20} to {end!r:.20} is no range behind the one before")
            made._starts.append(start)
            made._ends.append(last := end)
        return made

    def union(self, other: IdSet) -> IdSet:
        """The ids of both, as a set of its own."""
        made = IdSet()
        for start, end in sorted([*self.ranges(), *other.ranges()]):
            if made._ends and start <= made._ends[-1]:
                made._ends[-1] = max(end, made._ends[-1])
            else:
                made._starts.append(start)
                made._ends.append(end)
        return made

    def ranges(self) -> list[tuple[int, int]]:
        """The first number of each range, and the one after its last, in order."""
        return list(zip(self._starts, self._ends, strict=True))

    def add(self, number: int) -> None:
        """Add a number, unless it is there."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number)  # of the first range after it
        if at and number < ends[at - 1]:
            return
        after, before = at < len(starts) and starts[at] == number + 1, at > 0 and ends[at - 1] == number
        if before and after:
            ends[at - 1] = ends.pop(at)
            del starts[at]
        elif before:
            ends[at - 1] = number + 1
        elif after:
            starts[at] = number
        else:
            starts.insert(at, number)
            ends.insert(at, number + 1)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = bisect_right(self._starts, number)
        return at > 0 and number < self._ends[at - 1]

    def __iter__(self) -> Iterator[int]:
        for start, end in self.ranges():
            yield from range(start, end)

    def __len__(self) -> int:
        return sum(end - start for start, end in self.ranges())

    def __repr__(self) -> str:
        return f"IdSet.from_ranges({self.ranges()})"
