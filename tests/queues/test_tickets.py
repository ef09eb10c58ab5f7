"""Tickets: what was given is known again, and nothing else; what is kept for that has a limit."""

from __future__ import annotations

import pytest

from aiorpc.queues import tickets
from aiorpc.queues.items import Taken
from aiorpc.queues.tickets import TICKET, Tickets, split_tickets


def given(owner: Tickets, worker: int, *items: bytes) -> list[Taken]:
    """These items, as they are given to that worker."""
    return [*map(Taken, split_tickets(owner.issue(worker, items)), items)]


def test_what_was_given_comes_back_once() -> None:
    """In any order and any company; some of it in vain brings none of it back."""
    owner = Tickets()
    first, second, third = given(owner, 1, b"a", b"b", b"b")
    assert owner.redeem(1, 0, [third, first])
    assert not owner.redeem(1, 0, [second, first]) and not owner.redeem(1, 0, [second, second])
    assert owner.redeem(1, 0, [second]) and not owner.redeem(1, 0, [second])


def test_nobody_else_can_make_a_ticket() -> None:
    """For another worker, another item, another number, or another queue."""
    owner, other = Tickets(), Tickets()
    first, second = given(owner, 1, b"a", b"b")
    assert not owner.redeem(2, 0, [first])
    assert not owner.redeem(1, 0, [Taken(first.ticket, b"b")])
    assert not owner.redeem(1, 0, [Taken(second.ticket[:8] + first.ticket[8:], b"a")])
    assert not owner.redeem(1, 0, given(other, 1, b"a"))
    assert not owner.redeem(1, 0, [Taken(bytes(TICKET), b"a")])
    assert owner.redeem(1, 0, [first, second])


def test_what_came_back_is_remembered_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it nothing as old as what was forgotten comes back: an item is not there twice.

    Nothing of a worker that is gone is remembered, and the one in its place has nothing to put back.
    """
    monkeypatch.setattr(tickets, "_MOST_RETURNED", 4)
    owner = Tickets()
    late, *items = given(owner, 1, *[b"item"] * 9)
    for each in items:
        assert owner.redeem(1, 0, [each])
    used, floor = owner._used[0]
    assert len(used) == 4 and floor == 5
    assert not any(owner.redeem(1, 0, [each]) for each in (late, *items))
    assert owner.redeem(1, 0, given(owner, 1, b"new"))
    owner.forget(0)
    assert not owner._used and not owner.redeem(2, 0, items)
