"""``python -m bench`` as a user runs it, and what happens when a worker process misbehaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import machine
from bench.__main__ import main
from bench.report import read_json
from bench.stats import Row
from bench.suite import MEASUREMENTS

ROOT = Path(__file__).resolve().parents[2]


def run_module(name: str, *arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    # A process of its own: the fork server it starts ends with it.
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def test_list_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` measures nothing and names everything ``--only`` takes."""
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [each.name for each in MEASUREMENTS]


def test_unknown_measurement_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped name ends the command at once and shows the right ones."""
    with pytest.raises(SystemExit) as ended:
        main(["--only", "noop_bloking"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "noop_bloking" in said
    assert "noop_blocking" in said


@pytest.mark.long
@pytest.mark.slow
def test_null_run_measures_torch_against_itself(tmp_path: Path) -> None:
    """The harness itself works from start to files without aiorpc, and says that it was not measured."""
    out = tmp_path / "null"
    done = run_module("bench", "--null", "--quick", "--rounds", "1", "--only", "noop_blocking", "--out", str(out))
    assert done.returncode == 0, done.stderr
    outcome = read_json(out.with_suffix(".json"))
    assert [row.quantity for row in outcome.rows] == ["p50", "p99"]
    assert all(value > 0 for row in outcome.rows for value in (*row.aiorpc, *row.torch, *row.ratios))
    assert "for the noise" in outcome.facts["sides"]
    assert machine.line(outcome.facts) and outcome.took.keys() == {"noop_blocking"}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    """Rows by measurement of a tiny run of the real thing, which compares both sides and exits 0."""
    out = tmp_path_factory.mktemp("bench") / "small"
    names = "noop_blocking,noop_awaited,state_dict,loop_lag,burst"
    done = run_module("bench", "--quick", "--rounds", "1", "--only", names, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, list[Row]] = {}
    for row in read_json(out.with_suffix(".json")).rows:
        rows.setdefault(row.measurement, []).append(row)
    assert list(rows) == names.split(",")
    return rows


@pytest.mark.long
@pytest.mark.slow
def test_blocking_and_awaited_calls_are_compared(small_run: dict[str, list[Row]]) -> None:
    """Each of their figures has a ratio."""
    assert all(row.ratio is not None for name in ("noop_blocking", "noop_awaited") for row in small_run[name])


@pytest.mark.long
@pytest.mark.slow
def test_large_tensors_are_compared_and_judged(small_run: dict[str, list[Row]]) -> None:
    """Both sides by their speed, aiorpc's loop by its lag; and nothing is lent in the end."""
    assert small_run["state_dict"][0].ratio is not None
    assert [row.limit for row in small_run["loop_lag"]] == [20.0, 20.0, None, 20.0, 20.0]
    left = small_run["burst"][-1]
    assert (left.quantity, left.aiorpc, left.passed) == ("lent, after", (0.0,), True)
