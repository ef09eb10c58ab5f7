"""When memory that was borrowed is given back although nothing is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.runtime.links.returns import LONGEST, Returns
from tests.runtime.test_deadlines import FakeLoop

LEAST = Bounds().release_pause


class Borrowing:
    """What is borrowed, and what of it was let go."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.held = self.let_go = 0
        self.looks: list[float] = []
        self.given_back: list[float] = []
        engine: Any = SimpleNamespace(loop=self.loop, bounds=Bounds(), call_on_loop=self.loop.call_soon_threadsafe)
        self.returns = Returns(engine, self._flush, lambda: bool(self.held or self.let_go))

    def _flush(self) -> bool:
        self.looks.append(self.loop.now)
        count, self.let_go = self.let_go, 0
        self.given_back += [self.loop.now] * count
        return bool(count)

    def borrow(self) -> None:
        self.held += 1
        self.returns.watch()

    def let_one_go(self) -> None:
        self.held -= 1
        self.let_go += 1


def test_nobody_looks_where_nothing_is_borrowed() -> None:
    """Neither before nor after; the last look finds nothing."""
    borrowing = Borrowing()
    assert not borrowing.loop.waiting
    borrowing.borrow()
    borrowing.let_one_go()
    borrowing.loop.advance(10.0)
    assert len(borrowing.given_back) == 1 and len(borrowing.looks) == 2 and not borrowing.loop.waiting


@pytest.mark.parametrize("held", [0.0, 0.003, 0.05, 0.3, 20.0])
def test_it_comes_back_at_most_as_late_as_it_was_in_use(held: float) -> None:
    """And not later than `LONGEST`, nor sooner than is worth a message of its own."""
    borrowing = Borrowing()
    borrowing.borrow()
    borrowing.loop.advance(held)
    borrowing.let_one_go()
    ended = borrowing.loop.now
    borrowing.loop.advance(10.0)
    (at,) = borrowing.given_back
    assert at - ended <= min(max(LEAST, 2 * held), LONGEST) + 1e-9
    assert len(borrowing.looks) < 10 + held / LONGEST


def test_what_comes_and_goes_is_not_held_up_by_what_stays() -> None:
    """Something is in use for long, and looked at seldom; what comes then goes back soon, by one timer alone."""
    borrowing = Borrowing()
    borrowing.borrow()
    borrowing.loop.advance(20.0)
    for _ in range(5):
        borrowing.borrow()
        assert len(borrowing.loop.waiting) == 1
        borrowing.let_one_go()
        ended = borrowing.loop.now
        borrowing.loop.advance(LEAST)
        assert borrowing.given_back[-1] <= ended + LEAST + 1e-9
    borrowing.returns.close()
    assert not borrowing.loop.waiting
