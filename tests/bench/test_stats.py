"""Figures, spreads, ratios and targets of the benchmark suite."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.stats import BenchError, Failure, Outcome, Row, Spread, percentile, summary


def row(ours: tuple[float, ...], theirs: tuple[float, ...], *, target: float | None = 3.0) -> Row:
    return Row("noop_blocking", "p50", "µs", "lower", ours, theirs, target)


def test_spread_is_median_and_extremes() -> None:
    """Rounds are summed up as median, minimum and maximum, whatever their order."""
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_spread_of_nothing_is_an_error() -> None:
    """A figure that no round gave is an error, not a zero."""
    with pytest.raises(BenchError):
        Spread.of([])


@pytest.mark.parametrize(("percent", "expected"), [(0, 0), (50, 50), (99, 99), (100, 99)])
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    """Percentiles are samples that were really taken, and the hundredth is the largest."""
    assert percentile(list(reversed(range(100))), percent) == expected


def test_summary_is_in_microseconds() -> None:
    """Durations in nanoseconds come out in microseconds, with how many there were."""
    assert summary([1_000, 2_000, 3_000]) == {"p50": 2.0, "p99": 3.0, "mean": 2.0, "samples": 3.0}


def test_ratio_above_one_means_aiorpc_was_better_in_both_directions() -> None:
    """A shorter time and a higher rate both give a ratio above 1."""
    rate = Row("inflight512", "calls/s", "1/s", "higher", (80.0,), (10.0,))
    assert row((100.0,), (400.0,)).ratios == (4.0,)
    assert rate.ratios == (8.0,)


def test_ratios_are_taken_in_pairs_before_their_median() -> None:
    """A machine that slows down for a whole round moves both figures of the pair and leaves its ratio alone."""
    disturbed = row((100.0, 1000.0, 110.0), (400.0, 4000.0, 440.0))
    assert disturbed.ratios == (4.0, 4.0, 4.0)
    assert disturbed.ratio == Spread(4.0, 4.0, 4.0)


def test_target_is_judged_by_the_median_ratio() -> None:
    """The median decides; without a target there is no verdict."""
    assert row((100.0, 100.0, 100.0), (290.0, 300.0, 900.0)).passed is True
    assert row((100.0, 100.0, 100.0), (290.0, 299.0, 900.0)).passed is False
    assert row((100.0,), (900.0,), target=None).passed is None


def test_target_without_anything_to_compare_is_missed() -> None:
    """A target cannot be reached by not measuring the other side."""
    assert row((100.0,), ()).ratio is None
    assert row((100.0,), ()).passed is False


def test_limit_is_judged_by_the_median_of_one_side() -> None:
    """What only aiorpc can do is held against a limit; without figures it is missed, and a target counts as well."""
    late = Row("loop_lag", "largest", "ms", "lower", (5.0, 19.0, 90.0), limit=20.0)
    assert late.passed is True
    assert replace(late, aiorpc=(5.0, 21.0, 22.0)).passed is False
    assert replace(late, aiorpc=()).passed is False
    assert replace(late, aiorpc=(0.0,), limit=0.0).passed is True
    assert replace(late, target=2.0).passed is False


def test_rows_of_older_files_are_read() -> None:
    """A file from before a field existed reads as if the field had its default."""
    written = row((100.0,), (400.0,)).to_json()
    del written["limit"], written["payload"]
    assert Row.from_json(written) == row((100.0,), (400.0,))


def test_outcome_survives_its_json() -> None:
    """What is read from the file is what was measured, micro signs and missing sides included."""
    outcome = Outcome(
        {"cpu": "some CPU", "command": "python -m bench"},
        (row((1.5, 2.5), (3.0, 4.0)), Row("memory", "per call", "bytes", "lower", (7.0,), note="only ours", size=4)),
        (Failure("workers", "BenchError: worker3 died"),),
        12.5,
        {"noop_blocking": 12.5},
    )
    text = json.dumps(outcome.to_json())
    assert Outcome.from_json(json.loads(text)) == outcome


def test_json_carries_what_follows_from_the_figures() -> None:
    """A reader of the file need not compute ratios and verdicts."""
    written = row((100.0,), (400.0,)).to_json()
    assert written["ratio"] == {"median": 4.0, "minimum": 4.0, "maximum": 4.0}
    assert written["passed"] is True
