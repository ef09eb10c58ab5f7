"""Outboxes: how they are cut, which slots are lent, and that copies through them are in order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

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


def test_the_smallest_slot_that_fits_is_lent(box: Outbox) -> None:
    """A longer one only when those are out; of those that are too short none."""
    rooms = [room for _, room in box.slots]
    kinds = sorted(set(rooms))
    for room in kinds:
        for size in (room, room - 1):
            slot = box.take(size)
            assert slot is not None and rooms[slot] == room
            box.give(slot)
    taken = [box.take(1) for _ in rooms]
    assert None not in taken and len(set(taken)) == len(rooms)
    assert [rooms[slot] for slot in taken if slot is not None] == rooms, "not the shortest first"
    assert box.take(1) is None and box.lent == len(rooms)
    for slot in taken:
        assert slot is not None
        box.give(slot)
    assert box.lent == 0
    longest = [box.take(kinds[-1]) for _ in range(rooms.count(kinds[-1]))]
    assert None not in longest and box.take(kinds[-1]) is None and box.take(kinds[-2] + 1) is None
    assert box.take(kinds[-2]) is not None


def test_more_than_a_slot_holds_gets_the_longest_or_none(box: Outbox) -> None:
    """Short ones are not for pieces of what is long."""
    rooms = [room for _, room in box.slots]
    taken = [box.take(1024 * MIB) for _ in range(rooms.count(rooms[-1]))]
    assert [rooms[slot] for slot in taken if slot is not None] == [rooms[-1]] * len(taken)
    assert box.take(1024 * MIB) is None
    assert box.take(1) is not None


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


class Noting:
    """A driver that keeps the events that it was asked for."""

    def __init__(self, driver: NeighbourInterprocess) -> None:
        self.driver = driver
        self.made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def events(self, index: int, count: int) -> Any:
        self.made += self.driver.events(index, count)
        return list(self.made)


def test_waiters_of_a_sender_that_died_are_let_go(fake: NeighbourCuda) -> None:
    """What it recorded and will never do counts as done; streams that come later wait for nothing."""
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0)) as reader, reader.in_thread():
        driver = Noting(driver_of(fake))
        box = Outbox(cast(NeighbourInterprocess, driver), 0, 4 * MIB)
        inbox = Inbox(driver_of(reader), 0, box.handle, box.event_handles, box.slots)
        for event in driver.made:
            event.words[0] += 1  # recorded, by a device that never comes so far
        target = reader.empty(64 * KIB, 0)
        held = reader.current(0)
        inbox.get(0, target.data_ptr(), 8, held)
        mark = reader.mark(held)
        inbox.release_waiters()
        reader.synchronize(mark)
        assert mark.done
        inbox.close()
        box.close()
        driver.made.clear()
        assert reader.violations == []


def test_an_outbox_that_cannot_be_made_leaves_no_events(fake: NeighbourCuda) -> None:
    """Their memory would stay registered until the process ends."""
    driver = Noting(driver_of(fake))
    closed: list[Any] = []

    def export_event(event: Any) -> bytes:
        raise RuntimeError("not that one")

    driver.__dict__.update(export_event=export_event, close_events=closed.extend)  # in front of the driver's
    with pytest.raises(RuntimeError, match="not that one"):
        Outbox(cast(NeighbourInterprocess, driver), 0, 4 * MIB)
    assert closed == driver.made != []
    closed.clear()
    driver.made.clear()
