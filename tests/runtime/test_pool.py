"""The thread pool: order, limits, nested waits, ending, forks; and that no job is lost or run twice."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiorpc.errors import WorkerClosed
from aiorpc.runtime.engine.pool import ThreadPool
from tests.limits import busy
from tests.runtime.waiting import wait_until

LIMIT_S = 20.0


class Gate:
    """A job that counts its runs and holds its thread until opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self) -> None:
        self.entered.release()
        assert self.open.wait(LIMIT_S)

    def wait_entered(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=LIMIT_S)


@pytest.fixture
def pools() -> Iterator[Callable[..., ThreadPool]]:
    """Makes pools that are closed at the end, all their jobs done."""
    made: list[ThreadPool] = []

    def make(limit: int, linger: float = 0.05, busy: float = 0.0) -> ThreadPool:
        made.append(ThreadPool("test", limit, linger=linger, busy=busy))
        return made[-1]

    yield make
    for pool in made:
        assert pool.close(LIMIT_S) == 0
        assert pool.threads == 0


def test_jobs_start_in_the_order_they_were_submitted(pools: Callable[..., ThreadPool]) -> None:
    """One thread runs the jobs first in, first out."""
    pool = pools(1)
    order: list[int] = []
    for index in range(1000):
        pool.submit(order.append, index)
    wait_until(lambda: len(order) == 1000)
    assert order == list(range(1000))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_than_limit_jobs_run_at_once(pools: Callable[..., ThreadPool], limit: int) -> None:
    """Limit jobs run together, the next waits until one ends."""
    pool = pools(limit)
    gate = Gate()
    for _ in range(limit + 3):
        pool.submit(gate)
    gate.wait_entered(limit)
    assert not gate.entered.acquire(timeout=0.05)
    assert (pool.threads, pool.queued, pool.idle) == (limit, 3, 0)
    gate.open.set()
    gate.wait_entered(3)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_a_job_that_raises_is_logged_and_the_pool_goes_on(
    pools: Callable[..., ThreadPool], caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """What a job raises goes to the log; the same thread runs the next job."""
    pool = pools(1)
    after = threading.Event()

    def fail() -> None:
        raise error

    with caplog.at_level(logging.ERROR, logger="aiorpc"):
        pool.submit(fail)
        pool.submit(after.set)
        assert after.wait(LIMIT_S)
    assert "a job of pool test raised" in caplog.text
    assert pool.threads == 1


def test_jobs_nested_fifty_deep_finish_with_two_threads(pools: Callable[..., ThreadPool]) -> None:
    """Each job waits for a job it submits; the waiting ones do not count against the limit."""
    pool = pools(2)
    finished: list[int] = []

    def nest(depth: int, done: threading.Event) -> None:
        if depth < 50:
            inner = threading.Event()
            pool.submit(nest, depth + 1, inner)
            pool.enter_blocked()
            try:
                assert inner.wait(LIMIT_S)
            finally:
                pool.exit_blocked()
        finished.append(depth)
        done.set()

    events = [threading.Event() for _ in range(3)]
    for event in events:
        pool.submit(nest, 0, event)
    assert all(event.wait(LIMIT_S) for event in events)
    assert len(finished) == 3 * 51
    wait_until(lambda: pool.threads <= 2 and pool.idle == pool.threads)
    assert pool.blocked == 0


def test_a_wait_makes_room_for_a_job_already_queued(pools: Callable[..., ThreadPool]) -> None:
    """A job refused for the limit runs as soon as the running one announces that it waits."""
    pool = pools(1)
    begin, release, ran = threading.Event(), threading.Event(), threading.Event()

    def waiter() -> None:
        assert begin.wait(LIMIT_S)
        pool.enter_blocked()
        assert release.wait(LIMIT_S)
        pool.exit_blocked()

    pool.submit(waiter)
    pool.submit(ran.set)
    wait_until(lambda: pool.threads == 1 and pool.queued == 1)
    assert not ran.is_set()
    begin.set()
    assert ran.wait(LIMIT_S)
    assert pool.blocked == 1
    release.set()
    wait_until(lambda: pool.threads == 1 and pool.idle == 1)


def test_surplus_threads_take_no_job_above_the_limit(pools: Callable[..., ThreadPool]) -> None:
    """After waits ended, threads above the limit start nothing until the count is back."""
    pool = pools(2, linger=30.0)
    begin, gate = threading.Event(), Gate()

    def waiter() -> None:
        pool.enter_blocked()
        assert begin.wait(LIMIT_S)
        pool.exit_blocked()

    for _ in range(6):
        pool.submit(waiter)
    wait_until(lambda: pool.blocked == 6)
    for _ in range(8):
        pool.submit(gate)
    gate.wait_entered(2)
    begin.set()
    wait_until(lambda: pool.idle == 6)
    assert not gate.entered.acquire(timeout=0.05)
    assert pool.queued == 6
    gate.open.set()
    gate.wait_entered(6)


def test_close_ends_idle_threads_at_once(pools: Callable[..., ThreadPool]) -> None:
    """Idle threads are gone when close returns; a second close returns the same."""
    pool = pools(3)
    gate = Gate()
    for _ in range(3):
        pool.submit(gate)
    gate.wait_entered(3)
    gate.open.set()
    wait_until(lambda: pool.idle == 3)
    assert pool.close(LIMIT_S) == 0
    assert pool.threads == 0
    assert pool.close(0.0) == 0


def test_submit_after_close_is_refused(pools: Callable[..., ThreadPool]) -> None:
    """A closed pool takes no job and says so."""
    pool = pools(1)
    pool.close(0.0)
    with pytest.raises(WorkerClosed, match="pool test is closed"):
        pool.submit(print)


def test_close_waits_no_longer_than_its_timeout(pools: Callable[..., ThreadPool]) -> None:
    """Jobs that do not end are counted, queued ones too, and still run to their end afterwards."""
    pool = pools(2)
    gate = Gate()
    for _ in range(3):
        pool.submit(gate)
    gate.wait_entered(2)
    start = time.monotonic()
    assert pool.close(0.05) == 3
    assert time.monotonic() - start < 5 * busy()
    gate.open.set()
    gate.wait_entered(1)
    assert pool.close(LIMIT_S) == 0


def test_close_from_a_job_does_not_wait_for_itself(pools: Callable[..., ThreadPool]) -> None:
    """A handler that shuts its worker down gets an answer, its own job not counted."""
    pool = pools(2)
    left: list[int] = []
    pool.submit(lambda: left.append(pool.close(LIMIT_S)))
    wait_until(lambda: bool(left))
    assert left == [0]


def test_a_forked_child_cannot_use_the_pool(pools: Callable[..., ThreadPool]) -> None:
    """In the child submit raises and close does nothing; the parent's pool goes on."""
    pool = pools(1)
    ran = threading.Event()
    pool.submit(ran.set)
    assert ran.wait(LIMIT_S)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"ran"
        try:
            pool.submit(print)
        except WorkerClosed:
            answer = b"refused" if pool.close(5.0) == 0 else b"close"
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"refused"
    os.waitpid(child, 0)
    again = threading.Event()
    pool.submit(again.set)
    assert again.wait(LIMIT_S)


EXIT_PROGRAM = """
import atexit, threading, time
from aiorpc.runtime.engine.pool import ThreadPool
pool = ThreadPool("exit", 2)
started = threading.Event()
pool.submit(lambda: (started.set(), time.sleep(60)))
pool.submit(lambda: None)
assert started.wait(20)
class Late:
    def __del__(self): pool.close(0.01)
late = Late()
atexit.register(lambda: print("left", pool.close(0.05)))
"""


@pytest.mark.long
def test_close_is_quiet_at_interpreter_exit() -> None:
    """A program with a running job ends at once, with no output but its own."""
    result = subprocess.run(
        [sys.executable, "-c", EXIT_PROGRAM],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "left 1\n", "")


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(7, marks=pytest.mark.long)])
def test_every_job_runs_exactly_once_under_stress(pools: Callable[..., ThreadPool], limit: int) -> None:
    """Several submitters, jobs that submit and wait for others, short switch interval: none lost, none doubled."""
    pool = pools(limit, linger=0.002)
    runs = [0] * 6000
    peak: list[int] = []

    def leaf(index: int, done: threading.Event) -> None:
        runs[index] += 1
        done.set()

    def nested(index: int, inner: int) -> None:
        done = threading.Event()
        pool.submit(leaf, inner, done)
        pool.enter_blocked()
        assert done.wait(LIMIT_S)
        pool.exit_blocked()
        runs[index] += 1

    def submitter(first: int) -> None:
        for index in range(first, first + 1500, 3):
            pool.submit(nested, index, index + 1)
            pool.submit(leaf, index + 2, threading.Event())
            if index % 90 == 0:
                peak.append(pool.threads)
                time.sleep(0.0005)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=submitter, args=(first,)) for first in range(0, 6000, 1500)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        wait_until(lambda: sum(runs) >= 6000)
    finally:
        sys.setswitchinterval(interval)
    wait_until(lambda: pool.idle == pool.threads <= limit)
    assert runs == [1] * 6000
    assert pool.queued == pool.blocked == 0


# Waiting without sleep.


# Interruption.
