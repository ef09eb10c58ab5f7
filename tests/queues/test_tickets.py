"""Tickets: what was given is known again, and nothing else; what is kept for that has a limit."""

from __future__ import annotations

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
