"""Slots: many map one file privately, and it is written to again only when all have let go."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os

import pytest

from aiorpc.channels import segments
from aiorpc.channels.arena import Arena
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
