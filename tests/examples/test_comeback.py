"""The server that is killed and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.programs import matches, run_program

LIMIT = 120.0  # seconds for three processes that import torch, one behind the others


@pytest.mark.long
@pytest.mark.time_limit(150)
def test_it_goes_on_from_its_checkpoint_in_another_process(tmp_path: Path) -> None:
    """One process is lost in the middle; the last step is right, and made by another one."""
    program = ["-m", "aiorpc.examples.comeback", "--steps", "12", "--kill-at", "4"]
    outcome = run_program(program, tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    spoken = (
        r"\[worker0\] step 4: lost the server",
        r"\[worker1\] the server goes on after step 4",
        r"\[worker0\] 12 steps, the last in another process; the error is 0\.00\d\d",
    )
    assert matches(outcome.out, spoken), outcome.out


@pytest.mark.parametrize("options", [[], ["-OO"]], ids=["docstrings", "none"])
def test_no_steps_are_refused(options: list[str], tmp_path: Path) -> None:
    """It would go on for ever, as no step would be the last. Also where Python has no docstrings."""
    outcome = run_program([*options, "-m", "aiorpc.examples.comeback", "--steps", "-3"], tmp_path, timeout=LIMIT)
    assert outcome.code == 2 and "--steps must be at least 1" in outcome.err
