"""Slots: many map one file privately, and it is written to again only when all have let go."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Callable

import pytest

from aiorpc.channels import segments
from aiorpc.channels.arena import Arena
from aiorpc.channels.descriptors import Descriptors
from aiorpc.channels.slots import SharedSlot, SharedSlots, SlotView
from aiorpc.channels.space import MIB, PAGE
from aiorpc.errors import ProtocolError

SIZE = 3 * MIB


def view_of(slot: SharedSlot) -> SlotView:
    """As another process would map it."""
    return SlotView(f"/proc/self/fd/{slot.fd}", slot.size, slot.nonce)


def offered(size: int, seals: int) -> tuple[int, bytes]:
    """A memory file with a nonce and nothing else, and with those seals."""
    fd, nonce = os.memfd_create("t", os.MFD_ALLOW_SEALING), os.urandom(16)
    os.ftruncate(fd, size)
    os.pwrite(fd, nonce, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, nonce


def test_a_slot_whose_memory_is_not_there_is_not_read() -> None:
    """Its reader would have to give memory for all of it."""
    size = 1 << 30
    fd, nonce = offered(size, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | segments.SEAL_FUTURE_WRITE)
    try:
        view = SlotView(f"/proc/self/fd/{fd}", size, nonce)
        with pytest.raises(ProtocolError, match="bytes of shared memory, of which there are"):
            view.adopt(size - PAGE, lambda: None)
    finally:
        os.close(fd)


def test_a_slot_whose_memory_can_be_taken_away_is_none() -> None:
    """Its owner could punch holes into it, once a reader has looked."""
    fd, nonce = offered(SIZE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        with pytest.raises(ProtocolError, match="can take away"):
            SlotView(f"/proc/self/fd/{fd}", SIZE, nonce)
    finally:
        os.close(fd)


def test_a_view_may_be_written_to_and_shows_the_slot_anew_later() -> None:
    """What one reader writes neither the slot nor another reader has; once forgotten, nor has he."""
    slots = SharedSlots(Arena(16 * MIB))
    slot = slots.take(SIZE)
    assert slot is not None
    slot.bytes(SIZE)[:] = 1
    released: list[int] = []
    mine, theirs = view_of(slot), view_of(slot)
    array, other = mine.adopt(SIZE, lambda: released.append(1)), theirs.adopt(SIZE, lambda: None)
    array[:] = 7
    assert slot.bytes(SIZE)[0] == other[0] == mine.read(SIZE)[0] == 1
    with pytest.raises(ProtocolError, match="in use"):
        mine.adopt(SIZE, lambda: None)
    part = array[5:9]
    del array
    assert not released
    del part
    assert released == [1] and not mine.adopted
    slot.bytes(SIZE)[:] = 2
    assert mine.adopt(SIZE, lambda: None)[0] == 2
    del other
    gc.collect()
    slots.close()


def test_nobody_else_can_write_to_a_slot() -> None:
    """The file is sealed against others, and against being shortened."""
    slots = SharedSlots(Arena(16 * MIB))
    slot = slots.take(SIZE)
    assert slot is not None
    fd = os.open(f"/proc/self/fd/{slot.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, slot.size)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    with pytest.raises(ProtocolError):
        SlotView(f"/proc/self/fd/{slot.fd}", slot.size, bytes(16))
    slots.close()


def test_slots_are_used_again_and_keep_to_the_limit() -> None:
    """Free ones come first; for want of room those of other sizes go; what was free for long goes back."""
    arena = Arena(16 * MIB)
    slots = SharedSlots(arena)
    first, second = slots.take(6 * MIB), slots.take(6 * MIB)
    assert first is not None and second is not None
    assert slots.take(6 * MIB) is None and slots.used == 2
    slots.give(first)
    assert slots.take(5 * MIB) is first
    slots.give(first)
    slots.give(second)
    assert slots.take(15 * MIB) is not None and slots.numbers() == [3]
    assert not arena.set_aside(4 * MIB)
    slots.close()
    again = SharedSlots(Arena(16 * MIB))
    slot = again.take(SIZE)
    assert slot is not None
    again.give(slot)
    again.trim()
    assert again.size > 0
    again.trim()
    assert again.size == 0 and again.numbers() == []
    again.close()


# --- the budget of descriptors ----------------------------------------------------------------------------------------


DESCRIPTORS_SIZE = 5 * MIB


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
    slot = slots.take(DESCRIPTORS_SIZE)
    assert slot is not None
    assert len(os.listdir("/proc/self/fd")) == before + 1 and descriptors.used == 1
    array = slot.bytes(DESCRIPTORS_SIZE)
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
    large = slots.take(DESCRIPTORS_SIZE)
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
