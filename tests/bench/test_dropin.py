"""The measurement of an old program on both: how it is started, what fails it, and a small run of the real thing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from bench import dropin, dropin_program
from bench.sides import SIDES
from bench.stage import Figures, Plan, Stage
from bench.stats import BenchError

FIGURES = {"calls": 1.0, "episodes": 2.0, "training": 3.0, "transfers": 4.0}


class MadeUpStage:
    """A stage whose rounds give these figures, by side."""

    def __init__(self, **figures: Figures) -> None:
        self.plan = Plan()
        self._figures = figures

    def side(self, side: str) -> str:
        """The side itself."""
        return side

    def pause(self) -> None:
        """No workers run."""

    def alternate_anew(self, cases: Mapping[str, object], rounds: int) -> dict[str, list[Figures]]:
        """That many rounds of each case."""
        return {name: [self._figures[name]] * rounds for name in cases}


def write(path: Path, text: str) -> Path:
    """A program in the place of the measured one."""
    path.write_text(text, encoding="utf-8")
    return path


def test_program_knows_torch_alone() -> None:
    """It is an old program: nothing in it names aiorpc, and its functions are in a file of their own."""
    imports = [line for line in dropin.PROGRAM.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert [line for line in imports if "torch.distributed" in line]
    assert not [line for line in imports if "aiorpc" in line or "bench" in line or "from ." in line]


@pytest.mark.parametrize(
    ("times", "passed"), [(2.5, [True] * 4), (1.5, [False, False, False, True]), (0.9, [False] * 4)]
)
def test_twice_where_calls_dominate_and_never_slower(times: float, passed: list[bool]) -> None:
    """Targets: two for small messages, one for large tensors."""
    ours = {name: times * value for name, value in FIGURES.items()}
    rows = dropin.dropin(cast(Stage, MadeUpStage(aiorpc=ours, torch=FIGURES)))
    assert [row.passed for row in rows] == passed


def test_program_that_fails_is_no_measurement(tmp_path: Path) -> None:
    """The error has what the program said."""
    program = write(tmp_path / "bad.py", "raise SystemExit('a reason')")
    with pytest.raises(BenchError, match="torch ended with 1:\na reason"):
        dropin.run("torch", 0.1, program)


def test_program_that_hangs_is_ended(tmp_path: Path) -> None:
    """After the limit, with what it said until then."""
    text = "import sys, time\nprint('still here', file=sys.stderr, flush=True)\ntime.sleep(100)"
    program = write(tmp_path / "slow.py", text)
    with pytest.raises(BenchError, match="more than 2 s:\nstill here"):
        dropin.run("torch", 0.1, program, limit=2.0)


@pytest.mark.long
def test_sides_differ_in_the_command_alone(tmp_path: Path) -> None:
    """torch's side imports nothing of aiorpc; ours has its modules in the place of torch's."""
    text = """
import json, sys
import torch.distributed.rpc as rpc
print(json.dumps({"aiorpc": "aiorpc" in sys.modules, "module": rpc.rpc_sync.__module__, "arguments": sys.argv[1:]}))
"""
    program = write(tmp_path / "which.py", text)
    found = {side: cast(dict[str, object], dropin.run(side, 0.5, program)) for side in SIDES}
    assert not found["torch"]["aiorpc"] and str(found["torch"]["module"]).startswith("torch.")
    assert found["aiorpc"]["aiorpc"] and str(found["aiorpc"]["module"]).startswith("aiorpc.")
    assert all(cast(list[str], each["arguments"])[2:] == ["--seconds", "0.5"] for each in found.values())


def test_this_checkout_comes_first() -> None:
    """Once on the path, before what was there."""
    root = str(dropin.PROGRAM.parents[1])
    found = dropin.environment({"PYTHONPATH": os.pathsep.join(["there", root]), "A": "1"})
    assert found == {"PYTHONPATH": os.pathsep.join([root, "there"]), "A": "1"}


def test_rate_counts_whole_steps_after_warming_up() -> None:
    """At least one of each, also where there is no time."""
    done: list[int] = []
    assert dropin_program.rate(lambda: done.append(1), 0.0, counts=3) > 0
    assert len(done) == 2


def test_nothing_beside_the_program_hides_a_module_of_python() -> None:
    """It is started as a script, so that what lies in its folder is found before all else."""
    assert not {path.stem for path in dropin.PROGRAM.parent.iterdir()} & sys.stdlib_module_names


@pytest.mark.long
@pytest.mark.slow
def test_small_run_of_both_sides_gives_figures() -> None:
    """The real program on both, one short round: every loop has its rate."""
    assert sys.executable
    for side in SIDES:
        figures = dropin.run(side, 0.02)
        assert set(figures) == set(FIGURES), json.dumps(figures)
        assert all(rate > 0 for rate in figures.values())
