"""Outboxes: how they are cut, which slots are lent, and that copies through them are in order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.channels.device.outbox import Inbox, Outbox, cut
from tests.channels.device.ends import UUIDS, NeighbourCuda, NeighbourInterprocess
from tests.channels.ends import KIB, MIB
from tests.tiers import examples

SIZES = [4 * MIB, 6 * MIB, 8 * MIB, 32 * MIB, 62 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]


@pytest.fixture
def fake() -> Iterator[NeighbourCuda]:
    """Two devices. Nothing is left of what was allocated, and no rule was broken."""
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0002)) as fake, fake.in_thread():
        yield fake
        assert fake.violations == []
        assert driver_of(fake).mapped == {}


@pytest.fixture
def box(fake: NeighbourCuda) -> Iterator[Outbox]:
    """The shortest there is."""
    box = Outbox(driver_of(fake), 0, 4 * MIB)
    yield box
    box.close()


def driver_of(fake: NeighbourCuda) -> NeighbourInterprocess:
    assert isinstance(fake.interprocess, NeighbourInterprocess)
    return fake.interprocess


def check_slots(size: int) -> None:
    slots = cut(size)
    assert [room for _, room in slots] == sorted(room for _, room in slots)
    end = 0
    for start, room in sorted(slots):
        assert start >= end, "slots overlap"
        assert room > 0 and start % (64 * KIB) == 0
        end = start + room
    assert end <= size
    assert end > size - 4 * 64 * KIB, "more than the rest of a division is not used"
    assert min(room for _, room in slots) == 64 * KIB
    assert sum(room > MIB // 2 for _, room in slots) >= 4


@pytest.mark.parametrize("size", SIZES)
def test_slots_lie_inside_and_apart(size: int) -> None:
    """Sorted by their size, aligned, and all of the memory is used."""
    check_slots(size)


@pytest.mark.parametrize("slot", [-1, 1000, 3])
def test_a_slot_that_is_not_lent_cannot_be_given_back(box: Outbox, slot: int) -> None:
    """Nor one that does not exist; and not twice. What is lent does not change."""
    with pytest.raises(ValueError, match="slot"):
        box.give(slot)
    taken = box.take(1)
    assert taken is not None
    box.give(taken)
    with pytest.raises(ValueError, match="not lent"):
        box.give(taken)
    assert box.lent == 0
    everything = [box.take(1) for _ in box.slots]
    assert len(set(everything)) == len(box.slots) and box.take(1) is None


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 32), operations=st.integers(1, 300))
def test_no_slot_is_lent_twice(seed: int, operations: int) -> None:
    """Takes and gives in any order: one owner each, and what was given back is to be had again."""
    chance = random.Random(seed)
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0)) as fake, fake.in_thread():
        box = Outbox(driver_of(fake), 0, 4 * MIB)
        rooms = [room for _, room in box.slots]
        lent: set[int] = set()
        for _ in range(operations):
            if lent and chance.random() < 0.45:
                slot = chance.choice(sorted(lent))
                lent.remove(slot)
                box.give(slot)
                continue
            size = chance.choice([1, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 100 * MIB])
            taken = box.take(size)
            wanted = min(size, rooms[-1])
            free = sorted(rooms[slot] for slot in range(len(rooms)) if slot not in lent and rooms[slot] >= wanted)
            assert (rooms[taken] if taken is not None else None) == (free[0] if free else None)
            if taken is not None:
                assert taken not in lent
                lent.add(taken)
            assert box.lent == len(lent)
        box.close()
        assert fake.violations == []


@pytest.mark.parametrize("name", ["allocate", "export", "event", "export_event"])
def test_a_box_that_cannot_be_made_leaves_nothing(fake: NeighbourCuda, name: str) -> None:
    """Whatever the driver refuses; the fixture looks for memory that is left. The next one can be made."""
    fake.fail(name)
    with pytest.raises(RuntimeError, match="told to fail"):
        Outbox(driver_of(fake), 0, 4 * MIB)
    Outbox(driver_of(fake), 0, 4 * MIB).close()


@pytest.mark.parametrize("name", ["open", "open_event"])
def test_a_box_that_cannot_be_opened_leaves_nothing(fake: NeighbourCuda, box: Outbox, name: str) -> None:
    """And may be opened later."""
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0)) as other, other.in_thread():
        other.fail(name)
        with pytest.raises(RuntimeError, match="told to fail"):
            Inbox(driver_of(other), 0, box.handle, box.event_handles, box.slots)
        assert driver_of(other).mapped == {}
        inbox = Inbox(driver_of(other), 0, box.handle, box.event_handles, box.slots)
        inbox.close()
        inbox.close()
        assert other.violations == [] and driver_of(other).mapped == {}


@pytest.mark.parametrize("size", [0, -1, 64 * KIB + 1])
def test_no_more_than_a_slot_holds_is_read(fake: NeighbourCuda, box: Outbox, size: int) -> None:
    """ValueError, and nothing was enqueued."""
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0)) as other, other.in_thread():
        inbox = Inbox(driver_of(other), 0, box.handle, box.event_handles, box.slots)
        target = other.empty(MIB, 0)
        with pytest.raises(ValueError, match="bytes of a slot"):
            inbox.get(0, target.data_ptr(), size, other.current(0))
        assert other.calls["copy"] == 0
        inbox.close()


@pytest.mark.parametrize("seed", range(3))
def test_copies_through_slots_that_are_lent_again_at_once_are_in_order(seed: int) -> None:
    """A slot goes back as soon as the reader has enqueued its copy; on any streams, and nobody on the host waits."""
    chance = random.Random(seed)
    with (
        NeighbourCuda(seed=seed, uuids=UUIDS, lag=(0.0, 0.001)) as sender,
        NeighbourCuda(seed=seed + 9, uuids=UUIDS[::-1], lag=(0.0, 0.001)) as reader,
        sender.in_thread(),
        reader.in_thread(),
    ):
        box = Outbox(driver_of(sender), 0, 4 * MIB)
        inbox = Inbox(driver_of(reader), 0, box.handle, box.event_handles, box.slots)
        received = []
        for number in range(120):
            stream, other = sender.fresh(0), reader.fresh(0)
            size = chance.choice([1, 100, 64 * KIB])
            with sender.entered([stream]):
                source = sender.carrier(sender.fake_tensor(torch.full((size,), number, dtype=torch.uint8), 0))
            slot = box.take(size)
            assert slot is not None
            assert box.put(slot, source, 0, stream) == size
            with reader.entered([other]):
                target = reader.empty(size, 0)
            inbox.get(slot, target.data_ptr(), size, other)
            box.give(slot)
            received.append((number, target, other))
        assert sender.calls["synchronize"] == reader.calls["synchronize"] == 0
        for number, target, other in received:
            with reader.entered([other]):
                assert set(reader.tensor(target, 0).cpu().tolist()) == {number}
        del received, target, source
        inbox.close()
        box.close()
        assert sender.violations == [] and reader.violations == []
