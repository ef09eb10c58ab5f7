"""Some rounds of `python -m tests.chaos`, and that what it looks at is seen."""

from __future__ import annotations

import pytest

from .load import OPERATIONS
from .plans import KINDS, Fault, Plan, make_plan
from .rounds import play


def test_a_round_follows_from_its_seed() -> None:
    """And every kind of fault comes up."""
    plans = [make_plan(1, number, list(KINDS)) for number in range(200)]
    assert plans == [make_plan(1, number, list(KINDS)) for number in range(200)]
    assert len(set(map(str, plans))) > 190
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_a_round(free: bool) -> None:
    """One member is stopped, and another one killed, under load."""
    faults = Fault(0.05, "stop", 1, 0.2), Fault(0.2, "kill", 2)
    verdict = play(Plan(1, 0, 3, free, "file", ("unix", "tcp"), 0.3, tuple(OPERATIONS), faults))
    assert not verdict.wrong
    assert verdict.operations


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_more_rounds(number: int) -> None:
    """As the command plays them."""
    assert not play(make_plan(1, number, list(KINDS))).wrong
