"""``python -m bench.soak``: what it calls growth, and a run of some seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.soak.verdict import judge
from tests.bench.test_command import run_module

TIMES = [float(number) for number in range(100)]


def test_growth_after_the_warm_up_is_found() -> None:
    """In noise that is larger than the growth of any one step, and with outliers; what comes and goes is no growth."""
    rng = random.Random(1)
    noise = [rng.uniform(-5, 5) + (100 if number % 17 == 0 else 0) for number in range(100)]
    leak = judge("a", "uss", TIMES, [100 + 0.3 * time + more for time, more in zip(TIMES, noise, strict=True)])
    assert leak is not None and leak.grew and 18 < leak.growth < 27
    level = judge("a", "uss", TIMES, [100 + more for more in noise])
    assert level is not None and not level.grew and abs(level.growth) < 5


@pytest.mark.long
@pytest.mark.slow
def test_a_short_run_works_from_start_to_files(tmp_path: Path) -> None:
    """All kinds of work are done by all kinds of members; whether something grows cannot be told in seconds."""
    done = run_module("bench.soak", "--minutes", "0.4", "--out", str(tmp_path / "soak"), timeout=230)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["work"]["failed"] == {}, found["errors"]
    assert {"hub", "near", "far", "cut", "returning", "store"} == {*found["members"]}
    assert all(series["time"] for series in found["members"].values())
    assert (tmp_path / "soak.png").stat().st_size > 10_000
