"""Which entries of a pass wait for gradients, and which targets wait for these."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from aiorpc.autograd.awaited import Awaited
from aiorpc.runtime.gradients.reach import SentName


def names_of(count: int) -> list[SentName]:
    """So many names."""
    return [SentName(1, place) for place in range(count)]


@given(
    masks=st.lists(st.integers(0, 2**9 - 1), max_size=20),
    order=st.randoms(use_true_random=False),
    sought=st.integers(0, 2**9 - 1),
)
def test_targets_wait_for_all_entries_that_lead_to_them(masks: list[int], order: Random, sought: int) -> None:
    """As if all entries were looked at each time."""
    names = names_of(len(masks))
    awaited = Awaited(names, masks)
    missing = dict(zip(names, masks, strict=True))
    for name in [*order.sample(names, len(names)), SentName(7, 7), *names[:1]]:
        assert awaited.missing.keys() == missing.keys()
        assert awaited.blocked == union(missing.values())
        assert awaited.targets == union(masks)
        assert awaited.leading_to(sought) == [each for each, mask in zip(names, masks, strict=True) if mask & sought]
        awaited.came([name])
        missing.pop(name, None)
    assert not awaited.missing and not awaited.blocked


def union(masks: Iterable[int]) -> int:
    """What any of them has."""
    united = 0
    for mask in masks:
        united |= mask
    return united


class Counted(int):
    """A mask that counts how often masks are united, or looked at."""

    times = 0

    def __or__(self, other: int) -> Counted:
        Counted.times += 1
        return Counted(int(self) | int(other))

    def __and__(self, other: int) -> int:
        Counted.times += 1
        return int(self) & int(other)


def test_what_one_gradient_costs_hardly_grows_with_their_number() -> None:
    """In a chain of calls each gradient that comes makes one more target ready: a few steps for each."""
    costs = {}
    for count in (256, 2048):
        names = names_of(count)
        awaited = Awaited(names, [Counted(1 << place) for place in range(count)])
        Counted.times = 0
        for name in reversed(names):
            awaited.came([name])
            assert awaited.leading_to(1 << name.place) == [name]
        costs[count] = Counted.times / count
    assert costs[2048] < 2 * costs[256]
