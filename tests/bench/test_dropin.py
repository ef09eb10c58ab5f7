"""The measurement of an old program on both: how it is started, what fails it, and a small run of the real thing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import dropin
from bench.sides import SIDES
from bench.stats import BenchError

FIGURES = {"calls": 1.0, "episodes": 2.0, "training": 3.0, "transfers": 4.0}


def write(path: Path, text: str) -> Path:
    """A program in the place of the measured one."""
    path.write_text(text, encoding="utf-8")
    return path


def test_program_knows_torch_alone() -> None:
    """It is an old program: nothing in it names aiorpc, and its functions are in a file of their own."""
    imports = [line for line in dropin.PROGRAM.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert [line for line in imports if "torch.distributed" in line]
    assert not [line for line in imports if "aiorpc" in line or "bench" in line or "from ." in line]


def test_program_that_fails_is_no_measurement(tmp_path: Path) -> None:
    """The error has what the program said."""
    program = write(tmp_path / "bad.py", "raise SystemExit('a reason')")
    with pytest.raises(BenchError, match="torch ended with 1:\na reason"):
        dropin.run("torch", 0.1, program)


@pytest.mark.long
@pytest.mark.slow
def test_small_run_of_both_sides_gives_figures() -> None:
    """The real program on both, one short round: every loop has its rate."""
    assert sys.executable
    for side in SIDES:
        figures = dropin.run(side, 0.02)
        assert set(figures) == set(FIGURES), json.dumps(figures)
        assert all(rate > 0 for rate in figures.values())
