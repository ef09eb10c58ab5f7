"""Figures, spreads, ratios and targets of the benchmark suite."""

from __future__ import annotations

import json
from dataclasses import replace

from bench.stats import Failure, Outcome, Row, Spread


def row(ours: tuple[float, ...], theirs: tuple[float, ...], *, target: float | None = 3.0) -> Row:
    return Row("noop_blocking", "p50", "µs", "lower", ours, theirs, target)


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


def test_limit_is_judged_by_the_median_of_one_side() -> None:
    """What only aiorpc can do is held against a limit; without figures it is missed, and a target counts as well."""
    late = Row("loop_lag", "largest", "ms", "lower", (5.0, 19.0, 90.0), limit=20.0)
    assert late.passed is True
    assert replace(late, aiorpc=(5.0, 21.0, 22.0)).passed is False
    assert replace(late, aiorpc=()).passed is False
    assert replace(late, aiorpc=(0.0,), limit=0.0).passed is True
    assert replace(late, target=2.0).passed is False


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
