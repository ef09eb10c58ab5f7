"""The budget of descriptors: who holds how many, and what becomes of slots when there are no more."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiorpc.channels.arena import Arena
from aiorpc.channels.descriptors import Descriptors
from aiorpc.channels.slots import SharedSlots
from aiorpc.channels.space import MIB

SIZE = 5 * MIB


def test_a_share_ends_with_who_has_it() -> None:
    """There are as many as the limit says, which may change; the first that does without is told of, once."""
    limit, told = 2, list[int]()
    descriptors = Descriptors(lambda: limit, told.append)
    shares = [descriptors.take(), descriptors.take(), descriptors.take()]
    assert [share is not None for share in shares] == [True, True, False] and descriptors.used == 2
    shares.pop(0)
    assert descriptors.used == 1
    limit = 1
    assert descriptors.take() is None
    descriptors.refused()
    descriptors.refused()
    assert told == [1]


def test_a_slot_has_one_descriptor_and_gives_it_back() -> None:
    """Also of the files that stay open for arrays over them, until these have gone."""
    before = len(os.listdir("/proc/self/fd"))
    descriptors = Descriptors()
    slots = SharedSlots(Arena(64 * MIB), descriptors)
    slot = slots.take(SIZE)
    assert slot is not None
    assert len(os.listdir("/proc/self/fd")) == before + 1 and descriptors.used == 1
    array = slot.bytes(SIZE)
    slots.close()
    del slot
    array[:] = 1
    del array
    assert len(os.listdir("/proc/self/fd")) == before and descriptors.used == 0


def test_free_slots_are_given_back_at_once_where_descriptors_are_wanted() -> None:
    """For one that they are too small for; where all are in use there is none, and nothing is open that was not."""
    told: list[int] = []
    slots = SharedSlots(Arena(64 * MIB), Descriptors(lambda: 2, told.append))
    small = [slots.take(MIB), slots.take(MIB)]
    assert None not in small and slots.take(MIB) is None and told == [2]
    for slot in small:
        assert slot is not None
        slots.give(slot)
    large = slots.take(SIZE)
    assert large is not None and len(slots.numbers()) == 2
    slots.close()


def test_free_slots_are_few() -> None:
    """However many versions there were, each longer than the one before: what nobody needs is closed by others."""
    later: list[Callable[[], None]] = []
    arena = Arena(512 * MIB)
    slots = SharedSlots(arena, Descriptors(), later.append)
    for number in range(40):
        slot = slots.take((number + 1) * 100_000)
        assert slot is not None
        slots.give(slot)
    assert len(slots.numbers()) <= 5
    for work in later:
        work()
    held = slots.size
    assert arena.set_aside(arena.limit - held) and not arena.set_aside(1)
    slots.close()


def test_as_many_free_slots_stay_as_are_in_use() -> None:
    """Many names whose values are published again and again take turns with them."""
    slots = SharedSlots(Arena(64 * MIB))
    taken = [slots.take(100_000) for _ in range(20)]
    for slot in taken[:10]:
        assert slot is not None
        slots.give(slot)
    assert len(slots.numbers()) == 20
    slots.close()
