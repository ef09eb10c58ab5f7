"""The figures over the number of workers, and how flat they are."""

from __future__ import annotations

from bench import functions
from bench.scaling import CURVES, MEMORY, START_UP, Found, flatness


def found(size: int, figures: tuple[float, ...]) -> Found:
    result: Found = {curve: {"aiorpc": figures, "torch": ()} for curve in CURVES}
    result[MEMORY]["aiorpc"] = figures[:1]
    result[START_UP]["aiorpc"] = tuple(size * each for each in figures)
    return result


def test_flatness_is_the_last_by_the_first_round_by_round() -> None:
    """The start-up is told for each worker, as it grows with them."""
    rows = flatness({32: found(32, (3.0, 8.0)), 2: found(2, (2.0, 4.0)), 4: found(4, (9.0, 9.0))})
    assert [row.aiorpc for row in rows] == [(1.5, 2.0), (1.5, 2.0), (1.5, 2.0), (1.5,)]
    assert all(row.quantity.endswith(", 32 workers by 2") and row.size is None for row in rows)
    assert [", for each worker," in row.quantity for row in rows] == [True, False, False, False]


def test_private_memory_is_a_part_of_the_resident() -> None:
    """What libraries share with other processes is no part of it."""
    assert 0 < functions.private_bytes() <= functions.resident_bytes() + (64 << 20)
