"""Tensors from random parts, shown, copied, made dense and computed with in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def campaign(seed: int, count: int) -> int:
    """How many of so many inputs were let in. AssertionError with the input that has ended the process."""
    command = [sys.executable, "-m", "tests.fuzz.parts", f"{seed}", f"{count}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tried = [line for line in done.stderr.splitlines() if len(line) == 200]
    assert done.returncode == 0, f"status {done.returncode} after {tried[-1:]}: {done.stderr[-2000:]}"
    return int(done.stdout)


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_no_tensor_that_is_let_in_ends_the_process() -> None:
    """A third of them or more are let in."""
    assert campaign(1, 300) > 100


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.random
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("seed", range(4))
def test_no_tensor_of_very_many_ends_the_process(seed: int) -> None:
    """The same, of other seeds."""
    assert campaign(100 + seed, 3000) > 900
