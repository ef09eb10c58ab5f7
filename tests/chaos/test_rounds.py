"""Some rounds of `python -m tests.chaos`, and that what it looks at is seen."""

from __future__ import annotations

from collections import Counter

import pytest

from .invariants import judge, miscounted
from .load import OPERATIONS, Outcome
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


LOST = {7: "w1"}


@pytest.mark.parametrize(
    ("outcome", "fine"),
    [
        (Outcome(1, "call", "w1"), True),
        (Outcome(1, "call", "w1", error="PeerLost", worker="w1", pid=7), True),
        (Outcome(1, "call", "w1", error="PeerLost", worker="w1", pid=8), False),
        (Outcome(1, "call", "w2", error="PeerLost", worker="w2", pid=7), False),
        (Outcome(1, "call", "w1", error="RpcTimeout", worker="w1"), False),
        (Outcome(1, "call", "w1", error="WrongValue"), False),
        (Outcome(1, "call", "w3", error="PeerLeft", text="w3 has shut down"), True),
        (Outcome(1, "call", "w1", error="PeerLeft", text="w1 has shut down"), False),
        (Outcome(1, "call", "w3", error="PeerLost", worker="w3", pid=9), False),
        (Outcome(1, "call", "w1", error="StoreGone", text="Nothing was sent."), False),
        (Outcome(1, "call", "w4", error="UnknownWorker", text="no worker 'w4' that this worker knows of"), True),
        (Outcome(1, "reference", "w1", error="UnknownWorker", text="worker 'w4' has not joined yet"), True),
        (Outcome(1, "reference", "w1", error="UnknownWorker", text="worker 'w2' has not joined yet"), False),
        (Outcome(1, "call", "w2", error="UnknownWorker", text="no worker 'w2' that this worker knows of"), False),
    ],
)
def test_errors_name_who_was_killed(outcome: Outcome, fine: bool) -> None:
    """Or who has left, as that, and nobody who is there; a newcomer may not know of w4. Nothing else is an end."""
    assert bool(judge(outcome, LOST, {9: "w3"}, missed={"w4"})) is not fine


@pytest.mark.parametrize(
    ("outcome", "runs", "fine"),
    [
        (Outcome(1, "call", "w1"), {(1, 7): 1}, True),
        (Outcome(1, "call", "w1"), {}, False),
        (Outcome(1, "call", "w1"), {(1, 7): 2}, False),
        (Outcome(1, "call", "w1"), {(1, 7): 1, (1, 8): 1}, False),
        (Outcome(1, "retried", "w1", retried=True), {(1, 7): 1, (1, 8): 1}, True),
        (Outcome(1, "retried", "w1", retried=True), {(1, 7): 2}, False),
        (Outcome(1, "cancelled", "w1"), {}, True),
        (Outcome(1, "call", "w1", error="PeerLost"), {(1, 7): 1}, True),
        (Outcome(1, "call", "w1", error="PeerLost", unsent=True), {(1, 7): 1}, False),
        (Outcome(2, "call", "w1"), {(1, 7): 2, (2, 7): 1}, False),
    ],
)
def test_runs_are_counted(outcome: Outcome, runs: dict[tuple[int, int], int], fine: bool) -> None:
    """Once if it went well, never if nothing was sent, and never twice in one process."""
    assert list(miscounted([outcome], Counter(runs))) == [] if fine else list(miscounted([outcome], Counter(runs)))
