"""The arena: blocks never overlap, free ranges join again, stale blocks are refused, memory comes and goes."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.channels.arena import ALIGN, Arena, Block
from aiorpc.channels.segments import HEADER, NONCE_SIZE, Mapping, OwnedDescriptor, create_segment, map_private
from aiorpc.channels.space import MIB, PAGE, SLAB, SLOTS, Place, Space
from tests.channels.ends import GrowingArena
from tests.tiers import examples

SIZES = st.one_of(st.integers(1, 100), st.integers(1, 2 * MIB), st.sampled_from(SLOTS), st.integers(1, 12 * MIB))
# Each step: allocate so many bytes, or (negative) free the block at that place of those alive.
STEPS = st.lists(st.one_of(SIZES, st.integers(-1000, -1)), min_size=30, max_size=150)


@contextmanager
def opened(
    limit: int = 64 * MIB, *, segment_size: int = 8 * MIB, poison: bool = False, kind: type[Arena] = GrowingArena
) -> Iterator[Arena]:
    """An arena for one test."""
    arena = kind(limit, segment_size=segment_size, poison=poison)
    try:
        yield arena
    finally:
        arena.close()


def allocated(arena: Arena, size: int) -> Block:
    """A block that must be there."""
    block = arena.allocate(size)
    assert block is not None, arena.last_refusal
    return block


def content(arena: Arena, block: Block) -> bytes:
    """What stands in the block's place now."""
    array = arena.segments[block.segment].mapping.array
    return bytes(array[block.offset : block.offset + block.size])


def refuse(number: int) -> Callable[..., int]:
    """A system call that always fails."""

    def call(*arguments: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@settings(deadline=None)
@given(STEPS)
def test_places_never_overlap_and_everything_joins_again(steps: list[int]) -> None:
    """Whatever is taken and given back: places are apart, aligned and inside, and at the end the space is whole."""
    space, bounds = Space(), {0: (PAGE, 8 * MIB), 1: (PAGE, 24 * MIB)}
    for segment, (start, size) in bounds.items():
        space.extents.give(segment, start, size)
    live: list[Place] = []
    for step in steps:
        if step < 0:
            if live:
                space.give(live.pop(step % len(live)))
            continue
        place = space.take(step)
        if place is None:
            continue
        start, size = bounds[place.segment]
        assert step <= place.room and start <= place.start and place.start + place.room <= start + size
        assert place.start % ALIGN == 0 and (place.room % PAGE == 0)
        for other in live:
            apart = place.start + place.room <= other.start or other.start + other.room <= place.start
            assert other.segment != place.segment or apart
        live.append(place)
    for place in live:
        space.give(place)
    space.drop_empty_slabs()
    assert sorted(space.extents) == [(segment, *bounds[segment]) for segment in bounds]


@settings(max_examples=examples(40), deadline=None)
@given(STEPS, st.booleans())
def test_blocks_keep_their_bytes(steps: list[int], poison: bool) -> None:
    """Each live block holds what was written to it, whatever happens to the others."""
    with opened(poison=poison) as arena:
        live: dict[Block, bytes] = {}
        for number, step in enumerate(steps):
            if step < 0 and live:
                block = list(live)[step % len(live)]
                assert content(arena, block) == live.pop(block)
                arena.free(block)
            elif step > 0 and (new := arena.allocate(step)):
                assert new.offset % ALIGN == 0 and new.offset >= HEADER and new not in live
                live[new] = bytes((number % 251,)) * step
                arena.write(new, live[new])
        assert arena.size <= arena.limit and arena.blocks == len(live)
        assert arena.used >= sum(block.size for block in live)
        for block, data in live.items():
            assert content(arena, block) == data
            arena.free(block)
        assert arena.used == arena.blocks == 0


def test_a_block_of_another_generation_is_refused() -> None:
    """Freed twice, made up, or of a place that is in use again: neither freed nor written."""
    with opened() as arena:
        old = allocated(arena, 50_000)
        arena.free(old)
        new = allocated(arena, 50_000)
        assert (old.segment, old.offset) == (new.segment, new.offset) and old != new
        for stale in (old, new._replace(size=1), new._replace(offset=new.offset + ALIGN), new._replace(generation=99)):
            with pytest.raises(ValueError, match="not in use"):
                arena.free(stale)
            with pytest.raises(ValueError, match="not in use"):
                arena.write(stale, b"x")
        arena.free(new)
        with pytest.raises(ValueError, match="not in use"):
            arena.free(new)


def test_at_the_limit_there_is_no_block() -> None:
    """None with the reason instead of an error, and blocks again once there is room."""
    with opened(8 * MIB, segment_size=4 * MIB) as arena:
        assert arena.allocate(8 * MIB) is None and arena.last_refusal == "limit"
        first = allocated(arena, 3 * MIB)
        second = allocated(arena, 3 * MIB)
        assert arena.allocate(3 * MIB) is None and arena.last_refusal == "limit"
        assert [segment.size for segment in arena.segments] == [4 * MIB, 4 * MIB]
        arena.free(first)
        assert allocated(arena, 3 * MIB)[:2] == first[:2]
        assert second.segment == 1


def refused(*args: object) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.time_limit(30)
def test_threads_share_an_arena() -> None:
    """Threads that allocate, write, look and free at the same time never see each other's bytes."""
    problems: list[str] = []

    def work(arena: Arena, seed: int) -> None:
        chance, live = random.Random(seed), list[tuple[Block, bytes]]()
        for number in range(300):
            block = arena.allocate(chance.choice((5_000, 60_000, 300_000, 1_500_000)))
            if block is not None:
                data = bytes((seed * 40 + number % 40,)) * block.size
                arena.write(block, data)
                live.append((block, data))
            if live and (block is None or len(live) > 6):
                block, data = live.pop(chance.randrange(len(live)))
                if content(arena, block) != data:
                    problems.append(f"{block} changed")
                arena.free(block)
        for block, _ in live:
            arena.free(block)

    with opened(32 * MIB, segment_size=2 * MIB, poison=True) as arena:
        threads = [threading.Thread(target=work, args=(arena, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(25)
        assert not problems and arena.used == arena.blocks == 0
        assert arena.size <= arena.limit


@pytest.mark.parametrize("assisted", [False, True])
@pytest.mark.parametrize("size", [MIB + 1, 9 * MIB + 1])
def test_cold_memory_is_written_first_and_warm_afterwards(size: int, assisted: bool) -> None:
    """Its pages come with the write, whole; once it is free the block is room like any other."""
    threads: list[threading.Thread] = []

    def assist(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    arena = Arena(64 * MIB, segment_size=32 * MIB, assist=assist if assisted else None)
    try:
        block = arena.allocate_cold(size)
        assert block is not None and arena.resident < MIB and arena.used >= size
        data = bytes(range(251)) * (size // 251 + 1)
        arena.write(block, memoryview(data)[:size])
        assert content(arena, block) == data[:size] and size <= arena.resident < size + MIB
        arena.free(block)
        again = arena.allocate(size)
        assert again is not None and again[:3] == block[:3]
        arena.write(again, bytes(size))
        assert content(arena, again) == bytes(size) and arena.allocate(size) is None
    finally:
        for thread in threads:
            thread.join()
        arena.close()


def test_trimming_gives_back_what_was_idle() -> None:
    """Memory unused since the last call goes back to the system down to the floor; live bytes are untouched."""
    with opened(256 * MIB) as arena:
        kept, small = allocated(arena, MIB + 1), allocated(arena, 50_000)
        arena.write(kept, b"k" * kept.size)
        arena.write(small, b"s" * small.size)
        burst = [allocated(arena, 20 * MIB) for _ in range(3)]
        for block in burst:
            arena.write(block, bytes(block.size))
            arena.free(block)
        full = arena.resident
        assert full >= 20 * MIB
        assert arena.trim(0) == 0  # in use until now
        floor = 10 * MIB
        assert arena.trim(floor) > 0 and floor - SLAB <= arena.resident <= floor
        assert arena.trim(0) > 0 and arena.resident <= 8 * MIB
        assert arena.trim(0) == 0
        assert content(arena, kept) == b"k" * kept.size and content(arena, small) == b"s" * small.size
        again = allocated(arena, 40 * MIB)
        arena.write(again, b"a" * again.size)
        assert content(arena, again)[-100:] == b"a" * 100


def test_the_segment_is_sealed_and_bears_its_nonce() -> None:
    """It can neither be cut nor grow, by nobody; its first bytes are the nonce, another one each time."""
    with opened() as arena:
        allocated(arena, 8 * MIB)
        allocated(arena, 8 * MIB)
        for segment in arena.segments:
            for size in (0, PAGE, 2 * segment.size):
                with pytest.raises(PermissionError):
                    os.ftruncate(segment.fd, size)
            assert os.pread(segment.fd, NONCE_SIZE, 0) == segment.nonce
            assert not os.get_inheritable(segment.fd)
        assert len({segment.nonce for segment in arena.segments}) == 2


def test_an_unnamed_file_takes_the_place_of_a_refused_memory_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the system call is refused the folder of the environment is used, and nothing is left in it."""
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))
    monkeypatch.setenv("AIORPC_SHM_DIR", str(tmp_path))
    with opened() as arena:
        block = allocated(arena, 5 * MIB)
        arena.write(block, b"x" * block.size)
        assert content(arena, block) == b"x" * block.size
        assert arena.segments[0].reserved and arena.resident >= 8 * MIB
        assert os.readlink(f"/proc/self/fd/{arena.segments[0].fd}").startswith(str(tmp_path))
        arena.free(block)
        assert arena.trim(0) == arena.trim(0) == 0  # it might not be had again
        assert list(tmp_path.iterdir()) == []


def test_without_any_memory_there_is_no_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None with the reason, and the system is not asked each time."""
    monkeypatch.setattr(os, "memfd_create", refuse(errno.ENOSYS))
    monkeypatch.setenv("AIORPC_SHM_DIR", str(tmp_path / "nowhere"))
    with opened() as arena:
        assert arena.allocate(1000) is None
        assert arena.last_refusal == f"memory: {os.strerror(errno.ENOENT)}"
        monkeypatch.setenv("AIORPC_SHM_DIR", str(tmp_path))
        assert arena.allocate(1000) is None
        assert arena.last_refusal == f"memory: {os.strerror(errno.ENOENT)}"


def test_a_closed_arena_gives_and_takes_nothing() -> None:
    """No block afterwards; blocks that come back late are no error; closing again is none."""
    with opened() as arena:
        block = allocated(arena, 1000)
        arena.close()
        assert arena.closed
        assert arena.allocate(1000) is None
        assert arena.last_refusal == "closed"
        arena.free(block)
        with pytest.raises(ValueError, match="not in use"):
            arena.write(block, b"x")
        assert arena.grow(PAGE) == []
        assert arena.trim(0) == arena.used == arena.size == arena.resident == arena.blocks == 0


def test_closing_does_not_take_memory_from_a_reader() -> None:
    """A view of the memory stays valid, and the memory goes with it."""
    with opened() as arena:
        block = allocated(arena, 1000)
        arena.write(block, b"x" * 1000)
        view = numpy.frombuffer(arena.segments[0].mapping.memory, numpy.uint8, 1000, block.offset)
        arena.close()
        assert bytes(view) == b"x" * 1000


# --- mapped memory and forks ------------------------------------------------------------------------------------------


def mapped(count: int) -> list[Mapping]:
    """So many mappings of one file of sevens."""
    segment = create_segment(0, MIB)
    segment.mapping.array[:] = 7
    mappings = [segment.mapping, *(Mapping(segment.fd, segment.size) for _ in range(count - 1))]
    os.close(segment.fd)
    return mappings


def sevens(mapping: Mapping) -> bool:
    """Whether nobody has written anything else there."""
    return bool((mapping.array == 7).all())


def in_child(body: Callable[[], bool]) -> int:
    """Run this in a forked child; the status with which that ends: 0 if the body returned True."""
    pid = os.fork()
    if pid == 0:
        status = 3
        signal.alarm(20)
        try:
            status = int(not body())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def descriptors() -> int:
    """How many this process has of such files."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "aiorpc" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that listed the folder
            continue
    return found


def test_a_descriptor_is_closed_once_by_who_closes_it_or_with_the_last_who_has_it() -> None:
    """Its number may belong to another file by then, which stays open."""
    held = descriptors()
    segment = create_segment(0, MIB)
    owned, dropped = OwnedDescriptor(segment.fd), OwnedDescriptor(os.dup(segment.fd))
    del segment, dropped  # the mapping has one of its own
    assert descriptors() == held + 1
    number = owned.fd
    owned.close()
    other = os.open("/dev/null", os.O_RDONLY)
    assert (other, descriptors()) == (number, held)
    owned.close()
    del owned
    os.close(other)  # raises if it was closed


def test_child_writes_for_itself_alone() -> None:
    """It reads what was there and what it has written itself; the parent's bytes stay, in all mappings of the file."""
    first, other = mapped(2)

    def body() -> bool:
        as_it_was = sevens(first) and sevens(other)
        first.array[:] = 0
        return as_it_was and not first.array.any() and sevens(other)

    assert in_child(body) == 0
    assert sevens(first) and sevens(other)


def test_view_that_outlives_its_mapping_is_private_in_a_child() -> None:
    """A tensor over the memory is all that is left of it, as after the end of its worker."""
    tensor = torch.from_numpy(numpy.frombuffer(mapped(1)[0].memory, numpy.uint8))

    def body() -> bool:
        array = tensor.numpy()  # not by torch, whose threads are not there in a child
        as_it_was = bool((array == 7).all())
        array[:] = 0
        return as_it_was and not array.any()

    assert in_child(body) == 0
    assert bool((tensor == 7).all())


def test_child_keeps_no_descriptor_of_its_own() -> None:
    """That by which it maps the memory anew is closed then; the parent's live as long as the memory."""
    before = descriptors()
    mappings = mapped(1)
    there = descriptors()
    assert there > before
    assert in_child(lambda: descriptors() < there) == 0
    assert descriptors() == there
    mappings.clear()
    assert descriptors() == before


def test_private_blocks_take_no_descriptors() -> None:
    """A process may have a thousand of them from each other one, and often no more than a thousand descriptors."""
    (mapping,) = mapped(1)
    before = descriptors()
    blocks = [map_private(mapping.memory.file.fd, HEADER + number * PAGE, PAGE) for number in range(50)]
    assert descriptors() == before
    blocks[0][:] = 8
    assert sevens(mapping) and (blocks[1] == 7).all() and (blocks[0] == 8).all()
    address = blocks[0].ctypes.data
    assert is_mapped(address)
    del blocks
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    """Whether there is a file of ours at that address."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return "aiorpc" in line
    return False
