"""The arena: blocks never overlap, free ranges join again, stale blocks are refused, memory comes and goes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.channels import segments as segments_module
from aiorpc.channels.arena import ALIGN, GROW_SIZE, POISON, PREPARED, Arena, Block
from aiorpc.channels.segments import HEADER, NONCE_SIZE, create_segment
from aiorpc.channels.space import KIB, MIB, PAGE, SLAB, SLOTS, Place, Space
from tests.channels.growing import GrowingArena
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


def exit_status(pid: int) -> int:
    """How a forked child ended; one that does not end is killed."""
    watch = os.pidfd_open(pid)
    try:
        if not select.select([watch], [], [], 10)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(watch)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


@settings(deadline=None)
@given(STEPS)
def test_the_space_knows_how_much_is_free(steps: list[int]) -> None:
    """What is given out and what is free make up the whole at every moment; a request that fits is never refused."""
    space, whole = Space(), 32 * MIB
    space.extents.give(0, 0, whole)
    live: list[Place] = []
    for step in steps:
        if step < 0 and live:
            space.give(live.pop(step % len(live)))
        elif step > 0:
            longest = max((size for _, _, size in space.extents), default=0)
            place = space.take(step)
            assert place is not None or longest < step + PAGE
            live += [place] if place else []
        slabs = {(place.slab.segment, place.slab.start) for place in live if place.slab}
        large = sum(place.room for place in live if not place.slab)
        free = sum(size for _, _, size in space.extents)
        # At most one empty slab of each size is kept.
        assert 0 <= whole - free - large - len(slabs) * SLAB <= len(SLOTS) * SLAB


def test_the_smallest_and_lowest_range_is_used_first() -> None:
    """Warm pages are used again: of the ranges that suffice the smallest, and of equal ones the lowest."""
    space = Space()
    for start, size in ((0, 8 * MIB), (16 * MIB, 4 * MIB), (32 * MIB, 4 * MIB)):
        space.extents.give(0, start, size)
    starts = [place.start for _ in range(3) if (place := space.take(4 * MIB))]
    assert starts == [16 * MIB, 32 * MIB, 0]


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


@pytest.mark.parametrize("size", [0, -1])
def test_there_is_no_block_without_bytes(size: int) -> None:
    """An empty buffer has no place; nothing is set up for it."""
    with opened() as arena:
        assert arena.allocate(size) is None and arena.last_refusal == "empty"
        assert arena.segments == ()


def test_small_blocks_do_without_slabs_where_there_is_no_room_for_one() -> None:
    """A limit below the size of a slab still serves, down to the last page."""
    with opened(128 * KIB) as arena:
        blocks = [allocated(arena, 40 * KIB) for _ in range(3)]
        assert arena.allocate(40 * KIB) is None
        assert allocated(arena, PAGE).offset == 3 * 40 * KIB + HEADER
        assert [block.offset for block in blocks] == [HEADER + n * 40 * KIB for n in range(3)]


def test_segments_double() -> None:
    """Each segment is twice as large as the one before, and one that must hold more is as large as that."""
    with opened(200 * MIB, segment_size=4 * MIB) as arena:
        for _ in range(3):
            allocated(arena, 4 * MIB - HEADER)
        allocated(arena, 33 * MIB)
        assert [segment.size for segment in arena.segments] == [4 * MIB, 8 * MIB, 33 * MIB + HEADER]
        assert arena.size == sum(segment.size for segment in arena.segments)


def test_a_segment_that_is_prepared_takes_no_memory() -> None:
    """It is there once, is cold, counts, and is what the first block comes out of."""
    with opened(PREPARED * 4 * MIB, segment_size=4 * MIB, kind=Arena) as arena:
        arena.prepare()
        arena.prepare()
        assert arena.size == 4 * MIB and arena.resident <= HEADER and arena.allocate(MIB) is None
        block = arena.allocate_cold(MIB)
        assert block is not None and len(arena.segments) == 1


def test_no_segment_is_prepared_where_it_would_be_missing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the limit is small, the system holds the memory at once, or gives none; who needs some is told why then."""
    with opened(PREPARED * 4 * MIB - PAGE, segment_size=4 * MIB) as arena:
        arena.prepare()
        assert arena.size == 0
    with opened(PREPARED * 4 * MIB, segment_size=4 * MIB) as arena:
        with monkeypatch.context() as strict:
            strict.setattr(segments_module, "_strict_overcommit", lambda: True)
            arena.prepare()
        with monkeypatch.context() as refusing:
            refusing.setattr(os, "memfd_create", refused)
            arena.prepare()
        assert arena.size == 0 and arena.allocate_cold(MIB) is not None
    arena.prepare()  # closed
    assert arena.size == 0


def refused(*args: object) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: memoryview(data).cast("f")])
def test_any_buffer_can_be_written(kind: Callable[[bytes], bytes]) -> None:
    """Read-only, writable and shaped ones; less than the block holds leaves its rest alone."""
    with opened() as arena:
        block = allocated(arena, 400)
        arena.write(block, b"." * 400)
        arena.write(block, kind(b"abcd" * 50))
        assert content(arena, block) == b"abcd" * 50 + b"." * 200
        with pytest.raises(ValueError, match="do not fit"):
            arena.write(block, bytes(401))


def test_freed_bytes_are_poisoned() -> None:
    """With poison, whoever still looks at a freed block sees it."""
    with opened(poison=True) as arena:
        for size in (1000, 3 * MIB):
            block = allocated(arena, size)
            arena.write(block, bytes(size))
            arena.free(block)
            assert set(content(arena, block)) == {POISON}


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    """Threads that want to run get their turn at once, where the interpreter can give it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
def test_other_threads_run_during_a_copy() -> None:
    """A large copy holds neither the lock of the arena nor that of the interpreter."""
    with opened(300 * MIB) as arena:
        block, source = allocated(arena, 128 * MIB), memoryview(bytearray(128 * MIB))
        copies: list[tuple[float, float]] = []
        turns: list[float] = []

        def copy() -> None:
            for _ in range(6):
                start = time.monotonic()
                arena.write(block, source)
                copies.append((start, time.monotonic()))

        thread = threading.Thread(target=copy)
        thread.start()
        while thread.is_alive():
            arena.free(allocated(arena, 100_000))
            turns.append(time.monotonic())
        thread.join()
        # In the middle of a copy, not at its edges.
        middles = [(start + (end - start) * 0.2, end - (end - start) * 0.2) for start, end in copies]
        assert any(first < turn < last for first, last in middles for turn in turns)


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


def test_growing_makes_room_that_is_warm() -> None:
    """Its pages are there before the first block, which needs no growth; what blocks hold is not changed by it."""
    with opened(64 * MIB, segment_size=16 * MIB, kind=Arena) as arena:
        assert arena.allocate(3 * MIB) is None and arena.last_refusal == "cold"
        assert arena.grow(3 * MIB) == [(0, HEADER, GROW_SIZE)]
        assert arena.resident == HEADER + GROW_SIZE
        block = arena.allocate(3 * MIB)
        assert block is not None and arena.resident == HEADER + GROW_SIZE
        arena.write(block, b"x" * block.size)
        assert arena.grow(20 * MIB) == [(1, HEADER, 20 * MIB)] and arena.size == 48 * MIB
        assert content(arena, block) == b"x" * block.size
        assert arena.allocate(20 * MIB) is not None and arena.allocate(12 * MIB) is None


def test_growing_ends_at_the_limit() -> None:
    """No range is made warm, and the reason is the limit."""
    with opened(16 * MIB, segment_size=16 * MIB, kind=Arena) as arena:
        assert arena.grow(16 * MIB) == []
        assert [size for *_, size in (arena.grow(GROW_SIZE) + arena.grow(4 * MIB))] == [GROW_SIZE, GROW_SIZE - HEADER]
        assert arena.grow(PAGE) == []
        assert arena.allocate(16 * MIB) is None and arena.last_refusal == "limit"


def test_what_was_given_back_is_no_room_until_it_is_warm_again() -> None:
    """A block is never put where its copy would have to take pages from the system one by one."""
    with opened(32 * MIB, segment_size=32 * MIB, kind=Arena) as arena:
        arena.grow(20 * MIB)
        arena.trim(0)
        assert arena.trim(0) > 0
        assert arena.allocate(20 * MIB) is None and arena.last_refusal == "cold"
        assert arena.grow(20 * MIB) and arena.allocate(20 * MIB) is not None
        assert len(arena.segments) == 1 and arena.resident >= 20 * MIB


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


def test_cold_memory_ends_at_the_limit() -> None:
    """And with the arena: no block then, and the reason."""
    with opened(8 * MIB) as arena:
        assert arena.allocate_cold(9 * MIB) is None and arena.last_refusal == "limit"
        assert arena.allocate_cold(5 * MIB) is not None
        assert arena.allocate_cold(5 * MIB) is None and arena.last_refusal == "limit"
        arena.close()
        assert arena.allocate_cold(MIB) is None and arena.last_refusal == "closed"


def test_pages_are_touched_without_the_newer_system_call() -> None:
    """Advice that the kernel does not know: reading a byte of each page has the same effect."""
    segment = create_segment(0, 8 * MIB)
    try:
        segment.mapping.touch(MIB, 3 * MIB, 9999)
        assert segment.resident() == PAGE + 2 * MIB
    finally:
        os.close(segment.fd)


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


def test_memory_in_steady_use_is_not_trimmed() -> None:
    """A block that comes and goes keeps its warm pages."""
    with opened(64 * MIB) as arena:
        for _ in range(4):
            block = allocated(arena, 6 * MIB)
            arena.write(block, bytes(6 * MIB))
            arena.free(block)
            assert arena.trim(0) == 0
        assert arena.resident >= 6 * MIB


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


def test_an_older_kernel_makes_a_memory_file_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that it does not know is left out."""
    create = os.memfd_create

    def older(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    with opened() as arena:
        allocated(arena, 1000)
        assert fcntl.fcntl(arena.segments[0].fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


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


def test_a_tiny_folder_gives_smaller_segments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the wanted size is refused a smaller one that suffices is taken; where none suffices there is no block."""
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))
    monkeypatch.setenv("AIORPC_SHM_DIR", str(tmp_path))
    statistics = list(os.statvfs(tmp_path))
    statistics[4] = 3 * MIB // statistics[1]  # blocks that are free
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(statistics))
    with opened() as arena:
        assert allocated(arena, 1000).segment == 0
        assert arena.segments[0].size == MIB
        assert arena.allocate(2 * MIB) is None
        assert arena.last_refusal == f"memory: {os.strerror(errno.ENOSPC)}"


def test_a_folder_that_runs_full_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that could not be set up to the end is closed again."""
    monkeypatch.setattr(os, "pwrite", refuse(errno.ENOSPC))
    with opened() as arena:
        assert arena.allocate(1000) is None
        assert arena.last_refusal == f"memory: {os.strerror(errno.ENOSPC)}"


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


class Interrupting(Block):
    """A block that runs something when the arena compares it with its own, which it does under its lock."""

    interrupt: Callable[[], None]

    def __ne__(self, other: object) -> bool:
        self.interrupt()
        return super().__ne__(other)


def test_a_forked_child_lets_go_without_the_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the child the arena is closed, even when a thread of the parent held its locks; the parent's works on."""
    with opened() as arena:
        block, other = allocated(arena, 1000), Interrupting(*allocated(arena, 1000))
        fd = arena.segments[0].fd
        pids: list[int] = []
        create = os.memfd_create

        def fork() -> None:
            """While a block is given back, and the arena grows."""
            pids.append(os.fork())
            if pids[-1] == 0:
                status = 1
                try:
                    arena.close_in_child()
                    given = arena.allocate(1000)
                    status = 2 if given or os.path.exists(f"/proc/self/fd/{fd}") else 0
                finally:
                    os._exit(status)

        def interrupted(name: str, flags: int) -> int:
            arena.free(other)
            return create(name, flags)

        other.interrupt = fork
        monkeypatch.setattr(os, "memfd_create", interrupted)
        allocated(arena, 2 * arena.size)
        (pid,) = pids
        assert exit_status(pid) == 0
        arena.write(block, b"x" * 1000)
        assert content(arena, block) == b"x" * 1000
        arena.free(block)
