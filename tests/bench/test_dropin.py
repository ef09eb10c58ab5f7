"""The measurement of an old program on both: how it is started, what fails it, and a small run of the real thing."""

from __future__ import annotations

import json
import sys

import pytest

from bench import dropin
from bench.sides import SIDES

FIGURES = {"calls": 1.0, "episodes": 2.0, "training": 3.0, "transfers": 4.0}


@pytest.mark.long
@pytest.mark.slow
def test_small_run_of_both_sides_gives_figures() -> None:
    """The real program on both, one short round: every loop has its rate."""
    assert sys.executable
    for side in SIDES:
        figures = dropin.run(side, 0.02)
        assert set(figures) == set(FIGURES), json.dumps(figures)
        assert all(rate > 0 for rate in figures.values())
