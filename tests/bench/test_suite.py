"""How long a run may take, and what is left out where a machine is too slow for it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from bench.stage import Plan, Stage
from bench.suite import MEASUREMENTS, SPARE, choose, dues


def test_all_measurements_together_have_the_limit() -> None:
    """Each has its share, behind those before it; what is spare, whoever needs it first."""
    ends = dues(choose(None), 600.0)
    assert ends == sorted(ends) and ends[-1] == pytest.approx(600.0)


def test_one_measurement_has_no_more_than_its_share_and_uncompared_ones_no_limit() -> None:
    """Those that are not part of a whole run take what they need, also without a limit."""
    (memory,) = choose(["memory"])
    own = (1.0 - SPARE) * memory.share / sum(each.share for each in MEASUREMENTS)
    expected = pytest.approx(600.0 * (SPARE + own))
    assert dues([memory], 600.0) == [expected]
    assert dues(choose(["tls", "memory"]), 600.0) == [math.inf, expected]
    assert dues(choose(["functions"]), math.inf) == [math.inf]
    assert dues([memory], math.inf) == [math.inf]


def test_quick_and_whole_runs_end_in_time() -> None:
    """A quarter of an hour, and four minutes, with what it takes to begin and to write."""
    assert Plan().limit <= 870 and Plan.quick().limit <= 230


def count(stage: Stage, rounds: int) -> dict[str, int]:
    return {label: len(found) for label, found in stage.alternate({"a": dict, "b": dict}, rounds).items()}


def test_rounds_are_left_out_once_it_is_due() -> None:
    """One that counts there always is, and of each side as many; without a limit there are all."""
    stage = Stage(replace(Plan(), rounds=3))
    assert (count(stage, 5), stage.cut) == ({"a": 5, "b": 5}, False)
    stage.due = time.monotonic() - 1.0
    assert (count(stage, 5), stage.cut) == ({"a": 1, "b": 1}, True)
    assert len(list(stage.rounds(5, first=-1))) == 0
