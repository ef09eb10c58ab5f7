"""The table, the JSON file and the picture."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import hardware, machine, report
from bench.stats import Failure, Outcome, Row

ROOT = Path(__file__).resolve().parents[2]


SPEED = {machine.PYTHON: "107 ns", machine.MEMORY: "8.02 GB/s", machine.WAKE_UP: "7.24 µs"}


@pytest.fixture
def outcome() -> Outcome:
    rows = (
        Row("noop_blocking", "p50", "µs", "lower", (100.0, 110.0, 120.0), (400.0, 440.0, 480.0), 3.0),
        Row("inflight512", "calls/s", "1/s", "higher", (50_000.0,), (10_000.0,), 8.0, "script"),
        *(Row("workers", "start-up", "s", "lower", (0.2,), (0.4,), size=size) for size in (2, 4)),
        Row("memory", "per pending call", "bytes", "lower", (900.0,)),
    )
    found = hardware.facts(["--quick"], 3, 0.25) | SPEED
    failures = (Failure("batch_rl", "BenchError: observer2 died"),)
    return Outcome(found, rows, failures, 12.0, {"noop_blocking": 2.0, "workers": 9.6})


def test_cells_show_spreads_ratio_and_verdict(outcome: Outcome) -> None:
    """A row shows both sides with their extremes, the ratio, the target and whether it was reached."""
    assert report.cells(outcome.rows[0]) == (
        "noop_blocking",
        "p50",
        "110 [100..120] µs",
        "440 [400..480] µs",
        "4.00x",
        ">= 3x",
        "pass",
    )
    assert report.cells(outcome.rows[1])[2:] == ("50,000 1/s", "10,000 1/s", "5.00x", ">= 8x", "FAIL")


def test_closing_lines_name_what_was_missed_and_what_failed(outcome: Outcome) -> None:
    """After the table one reads the misses, the failures, the machine, where the time went and the command."""
    lines = report.closing_lines(outcome)
    assert lines[0] == "1 of 2 targets reached"
    assert lines[1] == "missed: inflight512 (calls/s, script)"
    assert "observer2 died" in lines[2]
    assert any("cores" in line and "torch" in line for line in lines)
    assert machine.line(SPEED) in lines
    assert lines[-2] == "Seconds of each: workers 10, noop_blocking 2"
    assert lines[-1].startswith("python -m bench --quick")


def test_json_file_reads_back(outcome: Outcome, tmp_path: Path) -> None:
    """The file holds the whole outcome; its folder is made."""
    path = tmp_path / "made" / "bench.json"
    report.write_json(outcome, path)
    assert report.read_json(path) == outcome


DRAW = """
import sys
from pathlib import Path
from bench import picture, report
picture.draw(report.read_json(Path(sys.argv[1])), Path(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(0, 5, id="all"),
        pytest.param(0, 2, id="bars", marks=pytest.mark.long),
        pytest.param(2, 4, id="curves", marks=pytest.mark.long),
    ],
)
def test_picture_is_drawn(outcome: Outcome, tmp_path: Path, first: int, last: int) -> None:
    """The picture is a PNG with bars and curves; it is drawn with only one kind of row too."""
    pytest.importorskip("matplotlib", exc_type=ImportError)
    data, drawn = tmp_path / "bench.json", tmp_path / "bench.png"
    report.write_json(replace(outcome, rows=outcome.rows[first:last]), data)
    # In a process of its own, because matplotlib keeps its fonts' files open.
    command = [sys.executable, "-W", "error", "-c", DRAW, str(data), str(drawn)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert drawn.read_bytes().startswith(b"\x89PNG")


DRAW_SIZES = DRAW.replace("picture.draw", "print(picture.draw_sizes").rstrip() + ")\n"


def draw_sizes(outcome: Outcome, folder: Path) -> tuple[str, Path]:
    pytest.importorskip("matplotlib", exc_type=ImportError)
    data, drawn = folder / "bench.json", folder / "sizes.png"
    report.write_json(outcome, data)
    command = [sys.executable, "-W", "error", "-c", DRAW_SIZES, str(data), str(drawn)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), drawn
