"""Measurements of gradients across workers: what a client does, what is judged, and a small run of the real thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.memory import ENDS
from bench.report import read_json

ROOT = Path(__file__).resolve().parents[2]


SMALL_RUN = """
import sys
from dataclasses import replace
from pathlib import Path
from bench import gradients, report, suite
from bench.stage import Plan
gradients.WIDTH = gradients.BATCH = gradients.SHARD_WIDTH = gradients.SHARD_BATCH = 8
gradients.WARM_UP = gradients.MEMORY_WARM_UP = 3
gradients.CHAINS = (1, 3)
plan = replace(Plan.quick(), rounds=1, cohort_rounds=1, seconds=0.02, transfers=2, iterations=20)
names = [each.name for each in suite.MEASUREMENTS if each.name.startswith("autograd_")]
outcome = suite.run(suite.choose(names), plan, [])
report.write_json(outcome, Path(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_small_run_of_both_sides_gives_figures(tmp_path: Path) -> None:
    """A tiny run of the real thing: both sides compared in everything, and no context left."""
    out = tmp_path / "gradients.json"
    # A process of its own: the fork server it starts ends with it.
    command = [sys.executable, "-c", SMALL_RUN, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = read_json(out)
    assert outcome.failures == ()
    rows = {(row.measurement, row.quantity): row for row in outcome.rows}
    assert {name for name, _ in rows} == {f"autograd_{name}" for name in ("step", "shards", "chain", "memory")}
    assert all(len(row.aiorpc) == len(row.torch) == 1 for row in rows.values())
    assert all(row.ratio is not None for (name, _), row in rows.items() if name in ("autograd_step", "autograd_shards"))
    for end in ENDS:
        left = rows["autograd_memory", f"contexts left, {end}"]
        assert (left.aiorpc, left.passed) == ((0.0,), True)
