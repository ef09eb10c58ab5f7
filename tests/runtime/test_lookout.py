"""Threads that stand by for their next job, those that look for it without sleeping, and that no job is lost by it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import pytest

from aiorpc.runtime.engine import busy_poll
from aiorpc.runtime.engine import pool as pool_module
from aiorpc.runtime.engine.pool import ThreadPool
from aiorpc.runtime.engine.wakeup import WakeUp
from tests.runtime.pools import LIMIT_S, Gate, Source, standing
from tests.runtime.waiting import wait_until


def attached(pool: ThreadPool) -> set[tuple[int, int]]:
    """Which threads would be told of which sources, by their ids."""
    wakeups = [wake for wake in pool._wakes if isinstance(wake, WakeUp)]
    return {(id(wakeup), id(wakeup.watched())) for wakeup in wakeups}


def test_a_thread_brings_its_next_job_itself(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """The thread that has run a job of a source is told of the next one, and counts as idle meanwhile."""
    pool = pools(4)
    source = sources(pool)
    pool.submit(source.run)
    for number in range(1, 20):
        wait_until(lambda: standing(pool) == 1)
        assert (pool.threads, pool.idle) == (1, 1)
        source.put()
        wait_until(lambda expected=number + 1: len(source.threads) == expected)  # type: ignore[misc]  # no type for a default
    assert source.brought == 19
    assert set(source.threads) == {"aiorpc-test-1"}


def test_other_jobs_get_a_thread_of_their_own(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """Where only threads that stand by are idle, one more is started; at the limit one of them is woken."""
    pool = pools(2)
    source = sources(pool)
    pool.submit(source.run)
    wait_until(lambda: standing(pool) == 1)
    gate = Gate()
    pool.submit(gate)
    gate.wait_entered(1)
    assert pool.threads == 2 and standing(pool) == 1
    second = Gate()
    pool.submit(second)
    second.wait_entered(1)
    assert pool.threads == 2 and standing(pool) == 0
    source.put()  # nobody waits for it now
    gate.open.set()
    second.open.set()
    wait_until(lambda: pool.idle == 2)
    assert source.drain() == 1
    wait_until(lambda: len(source.threads) == 2)


def test_a_job_that_a_thread_brings_respects_the_limit(
    pools: Callable[..., ThreadPool], sources: Callable[..., Source]
) -> None:
    """With one thread, its own job and those of others run one after the other, first in first out."""
    pool = pools(1)
    running: list[int] = []
    most: list[int] = []

    def job() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.0005)
        running.pop()

    source = sources(pool, job)
    pool.submit(source.run)
    for _ in range(100):
        source.put()
        pool.submit(job)
    wait_until(lambda: source.drain() >= 0 and len(most) == 201)
    assert max(most) == 1


def test_one_source_after_the_other(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """A thread stands by for the source of its last job, and is not told of what another one has."""
    pool = pools(1)
    first, second = sources(pool), sources(pool)
    for source in (first, second) * 3:
        pool.submit(source.run)
        wait_until(lambda: standing(pool) == 1)
        source.put()
        wait_until(lambda: standing(pool) == 1 and not select.select([source.read], [], [], 0)[0])  # noqa: B023  # waited for at once
        (other,) = {first, second} - {source}
        before = other.brought
        other.put()
        time.sleep(0.01)
        assert other.brought == before
        assert os.read(other.read, 10) == b"x"
    assert first.brought == second.brought == 3


def test_no_thread_begins_to_stand_by_where_jobs_come_from_many(
    pools: Callable[..., ThreadPool], sources: Callable[..., Source]
) -> None:
    """With more sources than threads may stand by nobody gets two jobs of one in a row, so others read for all."""
    pool = pools(16)
    many = [sources(pool) for _ in range(12)]
    for _ in range(3):
        for source in many:
            pool.submit(source.run)
    wait_until(lambda: sum(len(source.threads) for source in many) == 36)
    wait_until(lambda: pool.idle == pool.threads)
    assert standing(pool) <= 8
    before = attached(pool)  # one that was the second at its source may stand by for that later
    for source in many:
        pool.submit(source.run)
        wait_until(lambda: pool.idle == pool.threads)
    assert attached(pool) == before and standing(pool) <= 8


def test_a_thread_stands_by_for_a_while(
    pools: Callable[..., ThreadPool], sources: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a job it sleeps like any other, and what comes then is for others to read."""
    monkeypatch.setattr(pool_module, "_STANDING", 0.02)
    pool = pools(2)
    source = sources(pool)
    pool.submit(source.run)
    wait_until(lambda: standing(pool) == 1)
    wait_until(lambda: standing(pool) == 0)
    assert pool.idle == pool.threads == 1
    source.put()
    assert source.drain() == 1
    wait_until(lambda: len(source.threads) == 2)
    assert source.brought == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_source_raises_ends_no_thread(
    pools: Callable[..., ThreadPool],
    sources: Callable[..., Source],
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    """It is logged, and the thread goes on."""
    pool = pools(1)
    source = sources(pool)

    def fail() -> None:
        raise error

    source.bring = fail  # type: ignore[method-assign]  # as if what comes could not be read
    pool.submit(source.run)
    wait_until(lambda: standing(pool) == 1)
    source.put()
    wait_until(lambda: standing(pool) == 0)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(LIMIT_S)
    assert "could not stand by" in caplog.text
    caplog.clear()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that look without sleeping do so for long."""
    monkeypatch.setattr(pool_module, "MOMENT", LIMIT_S)
    monkeypatch.setattr(busy_poll, "_TAKEN", LIMIT_S)


@pytest.mark.usefixtures("patient")
def test_a_thread_looks_before_it_sleeps(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """It finds what comes for itself, as one that sleeps, and says each time that it looks no more."""
    pool = pools(4, busy=LIMIT_S)
    source = sources(pool)
    pool.submit(source.run)
    for number in range(1, 20):
        wait_until(lambda expected=number: source.kept == expected and pool.idle == 1)  # type: ignore[misc]  # no type for a default
        assert (standing(pool), pool.is_active()) == (1, True)
        source.put()
        wait_until(lambda expected=number + 1: len(source.threads) == expected)  # type: ignore[misc]  # no type for a default
    assert source.brought == 19
    assert source.back_off.worth()
    wait_until(lambda: pool.lookout.looks())
    pool.close(LIMIT_S)
    assert source.left == source.kept == 20
    assert not pool.is_active()


@pytest.mark.usefixtures("patient")
def test_a_thread_that_looks_takes_other_jobs(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """At the limit it is woken like any other that is idle, and nobody else is kept from the source."""
    pool = pools(1, busy=LIMIT_S)
    source = sources(pool)
    pool.submit(source.run)
    wait_until(lambda: pool.lookout.looks())
    ran = threading.Event()
    pool.submit(ran.set)
    assert ran.wait(LIMIT_S)
    wait_until(lambda: source.left == 1)
    assert source.kept == 1 and source.brought == 0


@pytest.mark.usefixtures("patient")
def test_one_thread_looks_at_a_time(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """The others stand by asleep."""
    gate = Gate()
    pool = pools(4, busy=LIMIT_S)
    first, second = sources(pool), sources(pool, gate)
    pool.submit(second.run)  # first, so that no thread that begins to look finds a job
    gate.wait_entered(1)
    pool.submit(first.run)
    wait_until(lambda: pool.lookout.looks())
    gate.open.set()
    wait_until(lambda: standing(pool) == 2)
    second.put()
    wait_until(lambda: second.brought == 1)
    assert (first.kept, second.kept) == (1, 0)


def test_one_thread_stands_by_for_a_source(pools: Callable[..., ThreadPool], sources: Callable[..., Source]) -> None:
    """Of two that have run its jobs at once: the other one would be woken in place of the one that looks."""
    gate = Gate()
    pool = pools(4)
    source = sources(pool, gate)
    pool.submit(source.run)
    pool.submit(source.run)
    gate.wait_entered(2)
    gate.open.set()
    wait_until(lambda: len(source.threads) == 2 and pool.idle == 2 and standing(pool) == 1)
    source.put()
    wait_until(lambda: source.brought == 1 and len(source.threads) == 3)


@pytest.mark.usefixtures("patient")
def test_a_source_that_raises_hears_of_the_end(
    pools: Callable[..., ThreadPool], sources: Callable[..., Source], caplog: pytest.LogCaptureFixture
) -> None:
    """Else the loop would never be told again."""
    pool = pools(1, busy=LIMIT_S)
    source = sources(pool)

    def fail() -> None:
        raise ValueError("on purpose")

    source.bring = fail  # type: ignore[method-assign]  # as if what comes could not be read
    pool.submit(source.run)
    wait_until(lambda: pool.lookout.looks())
    source.put()
    wait_until(lambda: source.left == 1)
    assert "could not stand by" in caplog.text
    caplog.clear()


def test_no_thread_stands_by_where_descriptors_are_few(
    pools: Callable[..., ThreadPool], sources: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps like any other, and that is not tried again."""
    tried: list[int] = []
    monkeypatch.setattr(WakeUp, "make", lambda: tried.append(1))
    pool = pools(2)
    source = sources(pool)
    for number in range(1, 4):
        pool.submit(source.run)
        wait_until(lambda expected=number: len(source.threads) == expected)  # type: ignore[misc]  # no type for a default
        wait_until(lambda: pool.idle == pool.threads)
        assert standing(pool) == 0
    assert tried == [1]


def test_close_ends_threads_that_stand_by(sources: Callable[..., Source], pools: Callable[..., ThreadPool]) -> None:
    """At once, and their descriptors are gone."""
    before = len(os.listdir("/proc/self/fd"))
    pool = pools(4)
    source = sources(pool)
    pool.submit(source.run)
    wait_until(lambda: standing(pool) == 1)
    assert len(os.listdir("/proc/self/fd")) == before + 4
    started = time.monotonic()
    assert pool.close(LIMIT_S) == 0
    assert time.monotonic() - started < LIMIT_S / 2
    assert pool.threads == 0
    assert len(os.listdir("/proc/self/fd")) == before + 2  # the source's own


def test_no_job_is_lost_beside_threads_that_stand_by(
    pools: Callable[..., ThreadPool], sources: Callable[..., Source]
) -> None:
    """Jobs of two sources, of which a third thread reads what nobody waits for, and jobs of others; all are run."""
    pool = pools(3)
    two = [sources(pool), sources(pool)]
    ran: list[int] = []
    count = 1500

    def others() -> None:
        for _ in range(count):
            pool.submit(ran.append, 1)
            if len(ran) % 7 == 0:
                time.sleep(0.0001)

    def put(source: Source) -> None:
        for number in range(count):
            source.put()
            if number % 5 == 0:
                time.sleep(0.0003)

    threads = [threading.Thread(target=others), *(threading.Thread(target=put, args=(source,)) for source in two)]
    for source in two:
        pool.submit(source.run)
    for thread in threads:
        thread.start()
    wait_until(
        lambda: (
            sum(source.drain() for source in two) >= 0
            and len(ran) == count
            and all(len(source.threads) == count + 1 for source in two)
        )
    )
    for thread in threads:
        thread.join(LIMIT_S)
    assert any(source.brought for source in two)
