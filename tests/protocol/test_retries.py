"""When a call is tried again: pauses, the one deadline, and each end, on random walks through the table."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.errors import RpcUsageError
from aiorpc.protocol.retries import MOST, Backoff, Tries, check_backoff, check_retries
from aiorpc.protocol.states import RETRIED, IllegalTransition, RetriedEvent, RetriedState

ENDS = [RetriedEvent.ANSWERED, RetriedEvent.USED_UP, RetriedEvent.GIVEN_UP, RetriedEvent.CLOSED]


def test_pauses_are_random_up_to_a_bound_that_doubles() -> None:
    """Full jitter: from nothing to the bound, which doubles to its own bound, each pause drawn from the same source."""
    backoff = Backoff(0.1, 2.0)
    pauses = []
    for seed in range(400):
        tries = Tries(10, backoff, None, Random(seed))
        drawn: list[float] = []
        for _ in range(10):
            pause = tries.failed(0.0)
            assert pause is not None and tries.again()
            drawn.append(pause)
        assert tries.failed(0.0) is None and tries.state is RetriedState.ENDED and tries.made == 11
        pauses.append(drawn)
    for place, each in enumerate(zip(*pauses, strict=True)):
        bound = min(2.0, 0.1 * 2**place)
        assert max(each) <= bound and max(each) > 0.95 * bound and min(each) < 0.05 * bound
        assert abs(sum(each) / len(each) - bound / 2) < 0.1 * bound
    again = Tries(10, backoff, None, Random(7))
    assert [again.failed(0.0)] == pauses[7][:1]  # what the seed says


@given(
    st.integers(0, 5),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.none() | st.floats(0, 100),
    st.lists(st.sampled_from(["failed", "again", *ENDS]), max_size=20),
    st.randoms(use_true_random=False),
)
def test_random_walks(
    retries: int, first: float, longest: float, deadline: float | None, steps: list[Any], random: Random
) -> None:
    """It is never tried more often than asked for, never past the deadline, and an end is final."""
    now, tries = 0.0, Tries(retries, Backoff(first, longest), deadline, random)
    for step in steps:
        before = tries.state
        if step == "again":
            assert tries.again() is (before is RetriedState.PAUSED)
        elif step == "failed":
            if before is not RetriedState.TRYING:
                with pytest.raises(IllegalTransition):
                    tries.failed(now)
                return
            pause = tries.failed(now)
            assert (pause is None) is (tries.state is RetriedState.ENDED)
            if pause is not None:
                assert 0 <= pause <= min(longest, first * 2**tries.made)
                now += pause
                assert deadline is None or now < deadline
        elif RETRIED.after(before, step) is not None or before is RetriedState.ENDED:
            assert tries.end(step) is (before is not RetriedState.ENDED)
        assert 1 <= tries.made <= retries + 1


@pytest.mark.parametrize(
    "backoff",
    [
        -0.1,
        "1",
        None,
        True,
        math.nan,
        math.inf,
        pytest.param(10**400, id="huge"),
        (1,),
        (1, 2, 3),
        (1, -1),
        [1, "2"],
        (math.nan, 1),
        object(),
    ],
)
def test_no_backoff(backoff: Any) -> None:
    """RpcUsageError names the option."""
    with pytest.raises(RpcUsageError, match="backoff must be"):
        check_backoff(backoff)


def test_bounds_of_pauses() -> None:
    """One number bounds the first pause; a pair bounds all of them, too."""
    assert check_retries(0) == 0 and check_retries(MOST) == MOST
    assert check_backoff(0.5) == Backoff(0.5, 10.0) and check_backoff(60) == Backoff(60.0, 60.0)
    assert check_backoff((0, 3)) == Backoff(0.0, 3.0) and check_backoff(Backoff()) == Backoff(0.1, 10.0)
