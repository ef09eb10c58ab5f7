"""The shared-memory channel's own: packing, what it refuses and why, offers and warm pages, copies out, and release."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiorpc.channels import Wire, shared
from aiorpc.channels.arena import ALIGN, Block
from aiorpc.channels.segments import HEADER
from aiorpc.channels.shared import COLD_SIZE, COPY_OUT, COPY_SIZE, MOST_WAITING, PACK_LEAST, PACK_MOST
from aiorpc.channels.shared_messages import MESSAGES, SegmentOffer, SegmentRefused
from aiorpc.errors import ProtocolError
from aiorpc.options import SHARE_SIZE
from aiorpc.protocol.frames import Buffer
from tests.channels.ends import MIB, Message, SharedEnds, borrowed, pattern

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 8 * MIB
SHARE = LIMIT // 4  # what one peer may hold before it copies out


@pytest.fixture
def ends() -> Iterator[SharedEnds]:
    """Both ends warm, in arenas of `LIMIT`."""
    pair = SharedEnds(limit=LIMIT, warm=6 * MIB)
    yield pair
    pair.dispose()


@pytest.fixture
def cold() -> Iterator[SharedEnds]:
    """Nothing allocated, offered or mapped yet."""
    pair = SharedEnds(limit=LIMIT, warm=0)
    yield pair
    pair.dispose()


def send(ends: SharedEnds, *sizes: int) -> Message:
    """A message of buffers of these sizes, posted."""
    message = ends.send([borrowed(pattern(seed, size)) for seed, size in enumerate(sizes)])
    ends.post(message)
    return message


def delivered(ends: SharedEnds, *sizes: int) -> Message:
    message = send(ends, *sizes)
    ends.settle()
    message.check()
    return message


def taken(ends: SharedEnds, *sizes: int) -> list[bool]:
    """Which of them were taken; the message is withdrawn."""
    message = ends.send([bytes(size) for size in sizes])
    ends.withdraw(message)
    return [wire is not None for wire in message.wires]


def blocks(message: Message) -> list[list[Any]]:
    """The blocks of a message, in order, each once."""
    found: list[list[Any]] = []
    for wire in message.taken:
        if wire[:4] not in found:
            found.append(wire[:4])
    return found


def idle(ends: SharedEnds) -> bool:
    return not any(ends.under_way().values())


# --- packing ----------------------------------------------------------------------------------------------------------


def test_short_buffers_are_worth_a_block_together(ends: SharedEnds) -> None:
    """From PACK_LEAST bytes in all; empty ones are never taken."""
    half = PACK_LEAST // 2
    assert taken(ends, half, half) == [True, True]
    assert taken(ends, half, half - 1) == [False, False]
    assert taken(ends, half, 0, half) == [True, False, True]
    assert taken(ends, PACK_LEAST, 0) == [True, False] and taken(ends, PACK_LEAST - 1, 0) == [False, False]
    assert taken(ends, 0, 0) == [False, False] and taken(ends, 0) == [False]


@pytest.mark.parametrize("size", [SHARE_SIZE - 1, 100_000, 5000, 64, 1])
def test_what_a_block_of_short_ones_holds_is_bounded(ends: SharedEnds, size: int) -> None:
    """PACK_MOST bytes of buffers at most; each begins at a multiple of ALIGN, behind the one before."""
    count = min(1000, 3 * PACK_MOST // size)
    message = ends.send([bytes(size)] * count)
    if size * count < PACK_LEAST:
        assert message.taken == []
        return
    ends_of: dict[int, int] = {}
    bytes_of: dict[int, int] = {}
    for wire in message.taken:
        *_, generation, _, start, length = wire if len(wire) == 7 else [*wire, 0, wire[2]]
        assert length == size and start % ALIGN == 0 and start >= ends_of.get(generation, 0)
        ends_of[generation] = start + length
        bytes_of[generation] = bytes_of.get(generation, 0) + length
        assert start + length <= wire[2]
    assert max(bytes_of.values()) <= PACK_MOST
    ends.post(message)
    ends.settle()
    message.outcomes.clear()
    assert idle(ends)


def test_a_part_keeps_its_block_and_no_other(ends: SharedEnds) -> None:
    """Of many, in several blocks: the one that is kept, and all of what it stands in, stay lent."""
    message = delivered(ends, *[100_000] * 15, 300_000)
    assert len(blocks(message)) == 3
    kept = message.buffers()[5]
    block = message.taken[5][:4]
    message.outcomes.clear()
    ends.settle()
    assert ends.ends[0].lender.leases == 1 and ends.ends[0].lender.lent == block[2]
    assert bytes(kept) == pattern(5, 100_000)
    slice_of_it = kept[5:10]
    del kept
    ends.settle()
    assert ends.ends[0].lender.leases == 1 and bytes(slice_of_it) == pattern(5, 100_000)[5:10]
    del slice_of_it
    assert idle(ends)


def test_a_copy_that_fails_leaves_nothing_lent(ends: SharedEnds) -> None:
    """In the middle of a message: `send` that raises has borrowed nothing of it."""
    unreadable = memoryview(bytes(2 * SHARE_SIZE))[::2]  # its bytes do not lie one behind the other
    with pytest.raises(BufferError):
        ends.send([bytes(SHARE_SIZE), unreadable])
    assert ends.ends[0].traffic.sent == 1 and idle(ends)
    delivered(ends, SHARE_SIZE)


# --- refused, and why -------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting() -> Iterator[SharedEnds]:
    """Nothing allocated, offered or mapped yet; and whoever sends from the first end may wait, but not for ever."""
    pair = SharedEnds(warm=0)
    pair.around[0].seconds = 60.0
    yield pair
    pair.dispose()


def sent_by_thread(ends: SharedEnds, *buffers: Buffer) -> tuple[threading.Thread, list[Wire | None]]:
    """A thread that sends them from the first end, and what that gives once it has ended."""
    wires: list[Wire | None] = []
    thread = threading.Thread(target=lambda: wires.extend(ends.ends[0].send(buffers, [])))
    thread.start()
    return thread, wires


@pytest.mark.parametrize("size", [COLD_SIZE, 3 * COLD_SIZE + 1])
def test_a_long_buffer_goes_into_cold_memory_that_is_mapped_meanwhile(waiting: SharedEnds, size: int) -> None:
    """The very first one: nothing is warm or known to the other end when it is sent."""
    data = pattern(1, size)
    thread, wires = sent_by_thread(waiting, data)
    while thread.is_alive():
        waiting.settle()
    (wire,) = wires
    assert wire is not None and not waiting.ends[0].traffic.refused and not waiting.around[0].cold
    (buffer,) = waiting.ends[1].receive([wire], [], lambda index, outcome: pytest.fail("it is there"))
    assert buffer is not None and bytes(buffer) == data
    del buffer
    assert not any(waiting.under_way().values())


def test_what_is_not_mapped_in_time_is_waited_for_once(waiting: SharedEnds) -> None:
    """The buffer goes another way; so do the next ones, at once, until the other end has mapped the segment."""
    end = waiting.ends[0]
    waiting.around[0].seconds = 0.001
    assert end.send([bytes(COLD_SIZE)], []) == [None]
    waiting.around[0].seconds = 60.0
    assert end.send([bytes(COLD_SIZE)], []) == [None]
    assert end.traffic.refused == {"not mapped": 2} and not end.lender.lent
    waiting.settle()
    (wire,) = end.send([bytes(COLD_SIZE)], [])
    assert wire is not None
    end.withdraw([wire], named=False)


def test_nobody_waits_for_a_closed_end(waiting: SharedEnds) -> None:
    """Whoever waits when it is closed goes on, and holds nothing."""
    thread, wires = sent_by_thread(waiting, bytes(COLD_SIZE))
    for _ in range(60_000):
        if waiting.ends[0]._offered:
            break
        time.sleep(0.001)
    waiting.ends[0].close()
    thread.join()
    assert wires == [None] and not waiting.arenas[0].used


def test_a_peer_holds_its_part_at_most(ends: SharedEnds) -> None:
    """Beyond a quarter of the arena it is asked to copy out; what it holds at all is bounded, and so is the rest."""
    held = [ends.send([bytes(MIB)]) for _ in range(8)]
    flags = [message.taken[0][4] for message in held if message.taken]
    assert flags == [int((number + 1) * MIB > SHARE) for number in range(len(flags))]
    assert 2 < len(flags) <= 6
    reasons = set(ends.ends[0].traffic.refused)
    assert reasons and reasons <= {"share", "cold"}
    assert ends.ends[0].lender.lent == len(flags) * MIB
    for message in held:
        ends.withdraw(message)
    assert idle(ends)


# --- copied out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SHARE_SIZE, COPY_SIZE - 1, COPY_SIZE, COPY_SIZE + 1])
def test_long_copies_are_made_in_a_thread(ends: SharedEnds, size: int) -> None:
    """From COPY_SIZE on; shorter ones at once. Either way the block goes back although the bytes are kept."""
    held = ends.send([bytes(SHARE)])
    message = send(ends, size)
    assert message.taken[0][4] == 1
    ends.step("messages 0")
    assert [len(outcome) for outcome in message.outcomes] == [0 if size >= COPY_SIZE else 1]
    ends.settle()
    message.check()
    assert ends.ends[0].lender.leases == 1 and ends.ends[1].borrower.blocks == 0
    (buffer,) = message.buffers()
    assert not buffer.readonly
    ends.withdraw(held)


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """This process gets no more of something than that from the system."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_a_copy_that_cannot_be_made_is_told() -> None:
    """Its message gets the error, once, and the block goes back; the next one arrives.

    In a process of its own: what other tests had, and gave back just now, would be room for the copy.
    """
    program = "from tests.channels.test_shared import try_a_copy; try_a_copy()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def try_a_copy() -> None:
    """Have a message copied where there is no memory for it."""
    size = 96 * MIB  # more than the allocator keeps of what was freed, and than a peer may hold without a copy
    ends = SharedEnds(limit=128 * MIB, warm=size + MIB)
    try:
        message = send(ends, size)
        ends.step("messages 0")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        with limited(resource.RLIMIT_AS, pages * resource.getpagesize() + size // 4):
            ends.step("thread 1")
        ends.settle()
        ((error,),) = message.outcomes
        assert isinstance(error, MemoryError)
        message.outcomes.clear()
        del error
        gc.collect()  # the error's traceback
        delivered(ends, SHARE_SIZE)
        assert idle(ends)
    finally:
        ends.dispose()


@pytest.mark.parametrize("steps", ["", "thread 1"])
def test_a_copy_under_way_at_the_end_comes_to_nothing(ends: SharedEnds, steps: str) -> None:
    """Closed before it is made, or before it is handed over: `arrived` is not called. (The harness looks.)"""
    ends.send([bytes(SHARE)])
    message = send(ends, COPY_SIZE)
    ends.step("messages 0")
    if steps:
        ends.step(steps)
    ends.close(1)
    ends.settle()
    assert message.outcomes == [[]]


# --- offers and answers -----------------------------------------------------------------------------------------------


def test_a_segment_that_cannot_be_mapped_is_refused(cold: SharedEnds) -> None:
    """The offering end is told why, once; nothing is taken, then or later."""
    end = cold.ends[0]
    cold.arenas[0].grow(MIB)
    with limited(resource.RLIMIT_NOFILE, 0):
        for _ in range(3):
            assert end.send([bytes(SHARE_SIZE)], []) == [None]
            cold.settle()
    assert end.send([bytes(SHARE_SIZE)], []) == [None]
    (reason,) = cold.around[0].refusals
    assert os.strerror(errno.EMFILE) in reason
    assert end.traffic.refused == {"not mapped": 4, "refused": 1}


@pytest.mark.parametrize("wrong", ["nonce", "size", "fd"])
def test_a_segment_that_is_another_one_is_refused(cold: SharedEnds, wrong: str) -> None:
    """Of another nonce, size or file: the offer comes back refused."""
    cold.arenas[0].grow(MIB)
    (segment,) = cold.arenas[0].segments
    read, write = os.pipe()
    offer: dict[str, Any] = {"fd": segment.fd, "size": segment.size, "nonce": segment.nonce}
    offer[wrong] = {"nonce": bytes(16), "size": segment.size // 2, "fd": read}[wrong]
    cold.ends[1].on_message(MESSAGES.write(SegmentOffer(0, **offer)))
    cold.settle()
    os.close(read)
    os.close(write)
    assert len(cold.around[0].refusals) == 1 and cold.ends[1].borrower.segments == frozenset()


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["hello"],
        [None],
        ["offer"],
        ["offer", 0, 3, 4096],
        ["offer", 0, 3, 4096, b"", 1],
        ["offer", 0, 3, 4096, 1 << 40],
        ["offer", float("inf"), 3, 4096, bytes(16)],
        ["mapped"],
        ["mapped", 77],
        ["mapped", None],
        ["mapped", float("inf")],
        ["refused"],
        ["warm", 0, 1],
        ["warm", 0, 1, float("inf")],
        ["warm", 0, 1, "x"],
        ["release", [[0, HEADER, 5, 77]]],
    ],
)
def test_messages_that_cannot_be_are_refused(ends: SharedEnds, fields: list[Any]) -> None:
    """Of an unknown kind, with too little, too much or the wrong data, about what was never offered or lent."""
    with pytest.raises(ProtocolError):
        ends.ends[0].on_message(fields)
    delivered(ends, SHARE_SIZE)


def test_a_block_is_released_once(ends: SharedEnds) -> None:
    """Saying so again is refused, and harms no later block in its place."""
    message = delivered(ends, SHARE_SIZE)
    block = Block(*message.taken[0][:4])
    message.outcomes.clear()
    ends.settle()
    with pytest.raises(ProtocolError, match="not lent"):
        ends.ends[0].on_release([block])
    again = delivered(ends, SHARE_SIZE)
    assert tuple(again.taken[0][:3]) == block[:3]  # the same place
    with pytest.raises(ProtocolError, match="not lent"):
        ends.ends[0].on_release([block])
    again.check()


@pytest.mark.parametrize("start", [-1, 300_000, 1 << 63, None, 0.0, "0"])
def test_parts_outside_of_their_block_are_refused(ends: SharedEnds, start: Any) -> None:
    """Whatever they say; the block is released again."""
    message = ends.send([bytes(50_000)] * 4)
    wire = [*message.taken[0][:5], start, 50_000]
    with pytest.raises(ProtocolError):
        ends.ends[1].receive([wire], [], lambda index, outcome: None)
    ends.settle()
    assert idle(ends)


# --- release ----------------------------------------------------------------------------------------------------------


def test_last_views_may_die_in_any_thread(ends: SharedEnds) -> None:
    """Each block goes back once."""
    messages = [delivered(ends, 300_000) for _ in range(6)]
    threads = [threading.Thread(target=message.outcomes.clear) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends.ends[1].released) == 6 and idle(ends)


# --- the end ----------------------------------------------------------------------------------------------------------


# --- who may share ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (None, "does not share"),
        ([], "does not share"),
        ({"user": -1}, "another user"),
        ({}, "another user"),
        ({"user": os.getuid()}, "process namespace"),
        ({"user": os.getuid(), "processes": "pid:[1]"}, "process namespace"),
    ],
)
def test_processes_that_cannot_share_are_told_apart(theirs: Any, why: str) -> None:
    """Without trying, by what they say of themselves; whoever says what this process says, may."""
    mine = shared.descriptor()
    assert why in shared.obstacle(mine, theirs) and why in shared.obstacle(theirs, mine)
    assert shared.obstacle(mine, shared.descriptor()) == ""


def test_a_message_has_no_more_bytes_than_are_shared(ends: SharedEnds) -> None:
    """Of what is copied out nobody sees that it is named twice: a short message would take any amount of memory."""
    end = ends.ends[1]
    wires = [[0, HEADER, MIB, number, COPY_OUT, 0, 64] for number in range(1, 1000)]
    with pytest.raises(ProtocolError, match="blocks of more bytes than there are"):
        end.receive(wires, [], lambda index, outcome: None)
    assert len(end.receive(wires[:3], [], lambda index, outcome: None)) == 3
    end.released.clear()  # they were never lent


def test_offers_and_answers_have_an_end(ends: SharedEnds) -> None:
    """Each is answered, and each refusal may be logged; of a segment there is one."""
    end = ends.ends[1]

    def post(fields: list[Any], *, more: bool = False) -> None:
        """Nothing reads it."""

    ends.around[1].post = post  # type: ignore[method-assign]  # as it says
    with pytest.raises(ProtocolError, match=f"more than {MOST_WAITING} segments are offered"):
        for number in range(MOST_WAITING + 1):
            end.on_message(MESSAGES.write(SegmentOffer(number, 0, HEADER, bytes(16))))
            ends.settle()
    refusals = len(ends.around[1].refusals)
    with pytest.raises(ProtocolError, match="one too many"):
        for number in range(2):
            end.on_message(MESSAGES.write(SegmentRefused(5, f"{number}" * 5000)))
    with pytest.raises(ProtocolError, match="one too many"):
        for number in range(2 * MOST_WAITING):
            end.on_message(MESSAGES.write(SegmentRefused(1000 + number, "why")))
    told = ends.around[1].refusals[refusals:]
    assert len(told) <= MOST_WAITING and max(map(len, told)) < 1100
