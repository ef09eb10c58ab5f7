"""Failures that nobody looked at are logged, with the place of the call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc.collecting import wait_all
from aiorpc.futures import Future, outcome
from aiorpc.sites import LINES, Unobserved
from tests import settling
from tests.settling import (
    made_here,
)


def test_unobserved_failure_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """A failed call that nobody looked at is logged when it is dropped: what, where made, which error."""
    future = made_here()
    future._settle(None, ValueError("lost in space"))
    with caplog.at_level(logging.ERROR, "aiorpc"):
        del future
        gc.collect()
    (record,) = caplog.records
    message = record.getMessage()
    assert "the call of f" in message
    assert f"{settling.__file__}:" in message
    assert "in made_here" in message
    assert "ValueError: lost in space" in message


def test_what_fails_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of one line of the program some failures are logged, and the last of them says so; those of others are, too."""

    def lines(what: str, times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            Unobserved(what, ValueError("lost in space"))
        return [record.getMessage() for record in caplog.records]

    many = lines("what fails a lot", 100 * LINES)
    assert len(many) == LINES
    assert ["not logged" in each for each in many] == [False] * (LINES - 1) + [True]
    assert len(lines("something else", 1)) == 1
    assert not lines("what fails a lot", 1)


def test_what_a_callback_of_then_raises_is_logged_if_nobody_looks(caplog: pytest.LogCaptureFixture) -> None:
    """It has looked at the error of the call, which is then the child's, with the place of the call; once."""
    future = made_here()
    child = future.then(lambda done: done.value())
    with caplog.at_level(logging.ERROR, "aiorpc"):
        future._settle(None, ValueError("lost in space"))
        del future, child
        gc.collect()
    (record,) = caplog.records
    message = record.getMessage()
    assert "then(" in message and "in made_here" in message and "ValueError: lost in space" in message


def raises_value_error(look: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="seen"):
        look()


@pytest.mark.parametrize(
    "look",
    [
        lambda future: future.exception(),
        lambda future: outcome(future),
        lambda future: future.then(lambda done: done.exception()),
        lambda future: raises_value_error(future.wait),
        lambda future: raises_value_error(future.value),
        lambda future: raises_value_error(lambda: wait_all([future])),
    ],
)
def test_observed_failure_is_not_logged(
    look: Callable[[Future[Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever looked at the error, in whatever way, has dealt with it."""
    future = made_here()
    future._settle(None, ValueError("seen"))
    look(future)
    del future
    gc.collect()
    assert not caplog.records


def test_cancelled_and_answered_calls_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A cancelled call is nobody's surprise, nor is one that was answered or never ended."""
    futures = [made_here() for _ in range(3)]
    futures[0].cancel()
    futures[1].set_result(1)
    futures.clear()
    gc.collect()
    assert not caplog.records
