"""``python -m bench.thousands``: what the simulation says of a group as it is, and of the plan."""

from __future__ import annotations

from bench import thousands
from tests.bench.test_command import run_module


def test_the_plan_costs_each_newcomer_the_same() -> None:
    """With the list a newcomer's requests grow with the group; with a log they do not, and news comes at once."""
    found = {way: [thousands.simulate(size, *how) for size in (64, 512)] for way, how in thousands.WAYS.items()}
    listed, logged = found["list"], found["log and tree"]
    assert listed[1][1] > 2 * listed[0][1] and abs(logged[1][1] - logged[0][1]) < 0.2
    assert max(each[-1] for each in logged) < thousands.GATHER + 0.02 < listed[0][-1]
    assert listed[0][-1] < thousands.PAUSE + 0.02 < listed[1][-1] / 4


def test_the_command_prints_a_table() -> None:
    done = run_module("bench.thousands", "256")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
