"""The launcher of the examples: workers as torchrun makes them, bounded waits, and errors that name the worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc.examples._shared.launch import Place, WorkerFailed, launch, place_from_environment
from tests.examples import roles

pytestmark = pytest.mark.slow
NAMES = ("zero", "one", "two")


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def failure(role: Callable[[Place, str], Any], *, timeout: float = 60.0, **more: Any) -> tuple[WorkerFailed, float]:
    """The error of a launch that must fail, and how many seconds it took."""
    started = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        launch(role, "some words", NAMES, timeout=timeout, **more)
    return caught.value, time.monotonic() - started


def test_a_worker_finds_what_torchrun_would_set() -> None:
    """Each process has its rank, the world size and one meeting point; rank 0's result is returned."""
    result = launch(roles.describe, "some words", NAMES, timeout=60.0)
    assert result["rank"] == 0 and result["settings"] == "some words"
    assert (result["RANK"], result["WORLD_SIZE"], result["MASTER_ADDR"]) == ("0", "3", "127.0.0.1")
    assert 0 < int(result["MASTER_PORT"]) < 65_536
    assert result["OMP_NUM_THREADS"] == "1"


def test_a_worker_that_raises_ends_the_run_with_its_traceback() -> None:
    """The error has the worker's name and traceback, and does not wait for those that go on."""
    error, seconds = failure(roles.raise_on_one)
    assert error.workers == ("one",)
    assert "one (rank 1, pid " in str(error) and "ValueError: some words" in str(error)
    assert seconds < 30.0


def test_a_killed_worker_is_named_before_those_that_missed_it() -> None:
    """The dead one is the cause, the errors of others that it caused come after it."""
    error, seconds = failure(roles.die_on_two)
    assert error.workers == ("two", "one")
    assert "two (rank 2, pid " in str(error).splitlines()[0] and "was killed by SIGKILL" in str(error).splitlines()[0]
    assert seconds < 30.0


def test_a_worker_that_leaves_without_a_result_is_an_error() -> None:
    """Exit without a word is told with its code."""
    error, _ = failure(roles.exit_on_one)
    assert "one (rank 1, pid " in str(error) and "exited with code 7" in str(error)


def test_a_bad_end_after_the_work_is_an_error() -> None:
    """A process that ends with an error code after it returned its result does not go unseen."""
    error, _ = failure(roles.fail_at_exit)
    assert error.workers == ("one",) and "exited with code 9" in str(error)


def test_the_time_limit_ends_workers_that_hang() -> None:
    """When the time is over all are named and ended, even if they ignore SIGTERM."""
    error, seconds = failure(roles.wait_for_ever, timeout=2.0, exit_timeout=1.0)
    assert error.workers == NAMES and "the run had 2 s" in str(error)
    assert seconds < 30.0


def test_nothing_is_started_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """With RANK and WORLD_SIZE in the environment this process runs its own role."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert place_from_environment() == Place(2, 5)
    assert launch(lambda place, _: (place, os.getpid()), None, NAMES, timeout=1.0) == (Place(2, 5), os.getpid())
