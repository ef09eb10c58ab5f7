"""The rate at which one caller may call, on a clock of the tests."""

from __future__ import annotations

import random

from aiorpc.runtime.callee.rate import Rate


def test_as_many_as_are_allowed_and_those_of_one_second_at_once() -> None:
    """Ten a second: ten at once, then one every tenth of a second; a pause gives back one second's and no more."""
    rate = Rate(10, 100.0)
    assert [rate.take(100.0) for _ in range(11)] == [True] * 10 + [False]
    assert not rate.take(100.05) and rate.take(100.15) and not rate.take(100.15)
    assert [rate.take(1000.0) for _ in range(11)] == [True] * 10 + [False]


def test_less_than_one_a_second() -> None:
    """The first at once, the next when its time has come."""
    rate = Rate(0.5, 0.0)
    assert rate.take(0.0) and not rate.take(1.5) and rate.take(2.5)


def test_never_more_than_the_rate_and_one_second_of_it() -> None:
    """In any stretch of time, however calls come."""
    random_numbers, rate, now = random.Random(7), Rate(20, 0.0), 0.0
    allowed: list[float] = []
    for _ in range(5000):
        now += random_numbers.expovariate(50)
        if rate.take(now):
            allowed.append(now)
    for first in range(0, len(allowed), 97):
        for last in range(first, len(allowed), 89):
            assert last - first + 1 <= 20 * (allowed[last] - allowed[first]) + 20 + 1e-6
    assert len(allowed) > 0.9 * 20 * now


def test_what_is_served_in_any_case_is_early() -> None:
    """By as long as its token is missing, and those before it; a pause makes up for it."""
    rate = Rate(10, 0.0)
    assert [rate.owe(0.0) for _ in range(10)] == [0.0] * 10
    assert rate.owe(0.0) == 0.1 and rate.owe(0.0) == 0.2
    assert rate.owe(0.3) == 0.0 and rate.owe(0.3) == 0.1
    assert [rate.owe(100.0) for _ in range(10)] == [0.0] * 10
