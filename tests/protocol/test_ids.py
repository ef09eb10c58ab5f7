"""Sets of ids, as ranges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.protocol.ids import IdSet
from tests.tiers import examples

NUMBERS = st.lists(st.integers(-3, 25))


@settings(max_examples=examples(300))
@given(NUMBERS, NUMBERS)
def test_it_is_as_a_set(first: list[int], second: list[int]) -> None:
    """Whatever is added in whatever order; its ranges are in order, apart, and lead to the same set."""
    ids, others = IdSet(first), IdSet(second)
    assert set(ids) == {*first} and len(ids) == len({*first})
    assert all((number in ids) == (number in {*first}) for number in range(-4, 27))
    assert set(ids.union(others)) == {*first, *second} and set(ids) == {*first}
    ends = [number for each in ids.union(others).ranges() for number in each]
    assert ends == sorted({*ends})
    assert IdSet.from_ranges(ids.ranges()) == ids


def test_many_that_come_and_go_are_a_few_ranges() -> None:
    """As many as a member lives: those who are gone lie between those who are there."""
    ids, there = IdSet(), {7, 30_000}
    for number in range(100_000):
        if number not in there:
            ids.add(number)
    assert ids.ranges() == [(0, 7), (8, 30_000), (30_001, 100_000)]
    assert 7 not in ids and 8 in ids


@pytest.mark.parametrize("ranges", [[[0]], [[0, "1"]], [[0, 0]], [[3, 5], [5, 7]], [[3, 5], [1, 2]], [[0, 1, 2]], 5])
def test_what_are_no_ranges_is_refused(ranges: object) -> None:
    """It comes from a store that anybody may have written to."""
    with pytest.raises((ValueError, TypeError)):
        IdSet.from_ranges(ranges)  # type: ignore[arg-type]  # on purpose
