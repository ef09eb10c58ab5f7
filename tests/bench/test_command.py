"""``python -m bench`` as a user runs it, and what happens when a worker process misbehaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.report import read_json
from bench.suite import MEASUREMENTS, choose

ROOT = Path(__file__).resolve().parents[2]


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: the fork server it starts ends with it.
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)


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


def test_only_keeps_the_order_of_the_suite() -> None:
    """Measurements run in the suite's order, however they were asked for."""
    assert [each.name for each in choose(["memory", "noop_blocking"])] == ["noop_blocking", "memory"]


def test_null_run_measures_torch_against_itself(tmp_path: Path) -> None:
    """The harness itself works from start to files without aiorpc, and says that it was not measured."""
    out = tmp_path / "null"
    done = run_module("bench", "--null", "--quick", "--rounds", "1", "--only", "noop_blocking", "--out", str(out))
    assert done.returncode == 0, done.stderr
    outcome = read_json(out.with_suffix(".json"))
    assert [row.quantity for row in outcome.rows] == ["p50", "p99"]
    assert all(value > 0 for row in outcome.rows for value in (*row.aiorpc, *row.torch, *row.ratios))
    assert "for the noise" in outcome.facts["sides"]


def test_smoke_run_gives_a_ratio_for_blocking_and_awaited_calls(tmp_path: Path) -> None:
    """A tiny run of both sides gives figures with ratios, exits 0 and writes its file."""
    out = tmp_path / "smoke"
    names = "noop_blocking,noop_awaited"
    done = run_module("bench", "--quick", "--rounds", "1", "--only", names, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = read_json(out.with_suffix(".json"))
    assert {row.measurement for row in outcome.rows} == {"noop_blocking", "noop_awaited"}
    assert all(row.ratio is not None for row in outcome.rows)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", "no such luck"),
        ("dies", "client of torch (blocking) (pid "),
        ("hangs", "client of torch (blocking) gave no answer within 3 s"),
    ],
)
def test_misbehaving_worker_is_named_and_none_is_left(how: str, expected: str) -> None:
    """A worker process that raises, is killed or hangs gives an error naming it, in bounded time, and all are ended."""
    done = run_module("tests.bench.misbehaving", how)
    assert done.returncode == 0, done.stderr
    assert "client of torch (blocking)" in done.stdout
    assert expected in done.stdout
    assert done.stdout.splitlines()[-1] == "left: []"
