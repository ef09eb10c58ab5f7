"""What the loop has to do soon is asked for once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiorpc.runtime.engine.coalesced import CoalescedCallback


class Loop:
    """Takes what is to be run, and runs it when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def post(self, job: Callable[[], Any]) -> None:
        self.jobs.append(job)

    def turn(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


def test_many_ask_and_it_runs_once() -> None:
    """Until it has run; after that it can be asked for again, also by itself."""
    loop, ran = Loop(), list[int]()

    def work() -> None:
        ran.append(len(ran))
        if len(ran) == 1:
            soon()

    soon = CoalescedCallback(loop.post, work)
    for _ in range(3):
        soon()
    assert len(loop.jobs) == 1
    loop.turn()
    assert ran == [0] and len(loop.jobs) == 1
    loop.turn()
    assert ran == [0, 1] and not loop.jobs and not soon.asked
