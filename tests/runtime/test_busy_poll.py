"""Staying awake for a moment: when somebody does, and until when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from aiorpc import RpcBackendOptions
from aiorpc.runtime.engine import busy_poll
from aiorpc.runtime.engine.busy_poll import LEAST_TAKEN, MOST_SKIPPED, STREAK, BackOff, LoopPoll
from aiorpc.testing import cluster

from .waiting import LIMIT, until

LONG = 60.0  # seconds: a moment that does not pass meanwhile


def skips(back_off: BackOff) -> int:
    """How often there is no look now."""
    count = 0
    while not back_off.worth():
        count += 1
    return count


def test_failures_make_it_rare_and_successes_bring_it_back() -> None:
    """It sleeps for twice as many times with each failure, and for half as many with each streak of successes."""
    back_off = BackOff()
    found = []
    for _ in range(15):
        found.append(skips(back_off))
        back_off.failed()
    assert found[:6] == [0, 1, 3, 7, 15, 31]
    assert found[-1] == MOST_SKIPPED
    assert skips(back_off) == MOST_SKIPPED
    for _ in range(10 * STREAK):
        back_off.succeeded()
    back_off.failed()
    assert skips(back_off) == 2 * (MOST_SKIPPED >> 10) + 1
    for _ in range(100):
        for _ in range(STREAK - 1):  # no streak
            back_off.succeeded()
        back_off.failed()
    assert skips(back_off) == MOST_SKIPPED


def test_a_core_that_is_wanted_costs_more() -> None:
    """The first failure of that kind already, and as many as others from then on."""
    back_off = BackOff()
    back_off.failed(LEAST_TAKEN)
    assert skips(back_off) == LEAST_TAKEN
    back_off.failed(LEAST_TAKEN)
    assert skips(back_off) == 2 * LEAST_TAKEN + 1


class Wakes:
    """A loop's poll, with what it asks."""

    def __init__(self, moment: float = LONG) -> None:
        self.wanted = False
        self.poll = LoopPoll(asyncio.get_running_loop(), moment, lambda: self.wanted)

    @property
    def awake(self) -> bool:
        return self.poll._awake

    @property
    def failures(self) -> int:
        return self.poll._back_off._failed


@pytest.fixture
async def wakes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wakes]:
    """With a moment that does not pass. It is ended, so that the loop sleeps again."""
    monkeypatch.setattr(busy_poll, "_TAKEN", LONG)  # a busy machine takes the core away, which is another test's
    made = Wakes()
    yield made
    made.wanted = True
    await until(lambda: not made.awake)


async def test_a_loop_stays_awake_after_a_message(wakes: Wakes) -> None:
    """It takes turn after turn, until threads need the interpreter; that is no failure."""
    wakes.poll.heard()
    for _ in range(20):
        await asyncio.sleep(0)
        assert wakes.awake
    wakes.wanted = True
    await until(lambda: not wakes.awake)
    assert wakes.failures == 0
    wakes.wanted = False
    wakes.poll.heard()
    assert (wakes.awake, wakes.failures) == (True, 0)


async def test_a_moment_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a message the loop sleeps again; after the next one it does so at once, and then it tries again."""
    monkeypatch.setattr(busy_poll, "_TAKEN", LONG)
    short = Wakes(1e-4)
    for failures in (1, 3):
        short.poll.heard()
        await until(lambda: not short.awake)
        assert short.failures == failures
        for _ in range(failures):
            short.poll.heard()
            assert (short.awake, short.failures) == (False, failures)


async def test_a_message_begins_the_moment_anew(wakes: Wakes) -> None:
    """What has come while it was awake is a success, and counts from the beginning."""
    wakes.poll._back_off.failed()
    assert skips(wakes.poll._back_off) == 1
    wakes.poll.heard()
    for _ in range(STREAK):
        wakes.poll._waited = LONG * 2
        wakes.poll.heard()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert wakes.awake and wakes.failures == 0
    assert wakes.poll._waited < 1.0


async def test_no_context_of_callers_is_kept(wakes: Wakes) -> None:
    """It may be heard within anything; what runs later does so with nobody's variables."""
    assert len(wakes.poll._context) == 0
    wakes.poll.heard()
    for _ in range(3):
        await asyncio.sleep(0)
    assert wakes.awake and len(wakes.poll._context) == 0


async def answer() -> int:
    return 7


def answer_in_a_thread() -> int:
    return 7


@pytest.mark.parametrize("handler", [answer, answer_in_a_thread])
async def test_calls_keep_workers_awake(monkeypatch: pytest.MonkeyPatch, handler: Callable[[], object]) -> None:
    """One after the other: neither loop sleeps in between, or the thread that stands by does not."""
    monkeypatch.setattr(busy_poll, "_TAKEN", LONG)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    successes: list[BackOff] = []
    original = BackOff.succeeded

    def succeeded(self: BackOff) -> None:
        successes.append(self)
        original(self)

    monkeypatch.setattr(BackOff, "succeeded", succeeded)
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as workers, asyncio.timeout(LIMIT):
        callee = workers[1]._node
        mine: set[BackOff] = set()
        while not mine & set(successes):
            assert await workers[0].call("worker1", handler) == 7
            poll = callee.engine.poll
            assert poll is not None
            mine = {poll._back_off}
            mine.update(each._runner.standing.back_off for each in callee.services if each._runner.standing)


@pytest.mark.parametrize("cores, busy_wait", [(2, 0.0), (1, 0.004)])
async def test_where_nobody_stays_awake(monkeypatch: pytest.MonkeyPatch, cores: int, busy_wait: float) -> None:
    """busy_wait=0, and a single core, which is left to whoever has to answer: loops and threads sleep at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    async with cluster(2, options=RpcBackendOptions(busy_wait=busy_wait)) as workers:
        assert await workers[0].call("worker1", answer) == 7
        for worker in workers:
            engine = worker._node.engine
            assert engine.poll is None and engine.pool.lookout._moment == 0
            assert all(connection.on_heard is None for connection in engine.connections)
