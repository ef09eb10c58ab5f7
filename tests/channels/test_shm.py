"""Lending between processes: bytes arrive, each block is released once and not early, and nobody's death leaks."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import random
import re
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.channels.arena import ALIGN, Arena, Block
from aiorpc.channels.keeping import Keeper
from aiorpc.channels.segments import HEADER, NONCE_SIZE, Bytes, Segment
from aiorpc.channels.shm import Borrower, Copies, Lender
from aiorpc.channels.space import KIB, MIB, PAGE
from aiorpc.errors import ProtocolError
from aiorpc.protocol.messages import Release, read_release, write
from tests.channels.ends import GrowingArena
from tests.shared_files import named_shared_files
from tests.tiers import examples

LIMIT = 64 * MIB
WAIT = 20.0  # seconds: for what a process has to do


class Pair:
    """Both halves in one process, over mappings of their own, and how often the borrower said that it has a loan."""

    def __init__(
        self,
        limit: int = LIMIT,
        *,
        assist: Callable[[Callable[[], None]], None] | None = None,
        kind: type[Arena] = GrowingArena,
        **options: Any,
    ) -> None:
        self.arena = kind(limit, segment_size=4 * MIB, poison=True, assist=assist)
        self.lender = Lender(self.arena, **options)
        self.loans: list[int] = []
        self.borrower = Borrower(lambda: self.loans.append(1))

    def lend(self, data: bytes) -> list[int]:
        """The numbers of a block with these bytes, as they travel; its segment is mapped."""
        lent = self.lender.lend(data)
        assert lent is not None, self.lender.refused
        map_all(self.borrower, self.arena.segments, os.getpid())
        return list(lent[0])

    def adopt(self, data: bytes) -> Bytes:
        return self.borrower.adopt(self.lend(data))

    def settle(self) -> int:
        """The release of what has died reaches the lender; how many blocks."""
        blocks = self.borrower.drain()
        self.lender.released(blocks)
        return len(blocks)

    def close(self) -> None:
        self.borrower.close()
        self.arena.close()


def map_all(borrower: Borrower, segments: tuple[Segment, ...], pid: int) -> None:
    for segment in segments:
        borrower.map(segment.index, f"/proc/{pid}/fd/{segment.fd}", segment.size, segment.nonce)


@contextmanager
def paired(limit: int = LIMIT, **options: Any) -> Iterator[Pair]:
    pair = Pair(limit, **options)
    try:
        yield pair
    finally:
        pair.close()


class Child:
    """A forked process that runs one function with lines of JSON to and from it; killed at the end."""

    def __init__(self, body: Callable[[Child], None]) -> None:
        to_child, from_child = os.pipe(), os.pipe()
        self.pid = os.fork()
        child = self.pid == 0
        self._read, self._write = (to_child[0], from_child[1]) if child else (from_child[0], to_child[1])
        for fd in {*to_child, *from_child} - {self._read, self._write}:
            os.close(fd)
        self._rest = b""
        if child:
            self._run(body)

    def _run(self, body: Callable[[Child], None]) -> None:
        status = 1
        try:
            body(self)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def send(self, message: Any) -> None:
        os.write(self._write, json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """The next message of the other side. Raises EOFError when it has ended, TimeoutError when it says nothing."""
        deadline = time.monotonic() + WAIT
        while b"\n" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(self._read, 65536)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        with pytest.raises(EOFError):
            self.receive()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return status

    def close(self) -> None:
        if self.pid:
            self.kill()
        os.close(self._read)
        os.close(self._write)


@contextmanager
def forked(body: Callable[[Child], None]) -> Iterator[Child]:
    child = Child(body)
    try:
        yield child
    finally:
        child.close()


def described(segments: tuple[Segment, ...]) -> list[list[Any]]:
    """What a borrower in another process needs to map the segments, as plain data."""
    return [[s.index, f"/proc/{os.getpid()}/fd/{s.fd}", s.size, s.nonce.hex()] for s in segments]


def map_described(borrower: Borrower, segments: list[list[Any]]) -> None:
    for index, path, size, nonce in segments:
        borrower.map(index, path, size, bytes.fromhex(nonce))


# ---- what keeps a block alive


def ndarray(block: Bytes) -> torch.Tensor:
    """The way of the inline channel."""
    return torch.from_numpy(numpy.ndarray((4, block.size // 16), numpy.float32, block))


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held
        self.cycle = self


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["send", "view", "drop", "cycle", "thread", "collect", "settle"]), st.integers(0, 1000)),
    min_size=20,
    max_size=100,
)
# From one view to another, of arrays and of tensors.
FROM_ARRAY: tuple[Callable[[Any], Any], ...] = (
    torch.from_numpy,
    lambda view: torch.frombuffer(view, dtype=torch.uint8),
    lambda view: view[1:],
    lambda view: view[::2],
    lambda view: numpy.asarray(memoryview(view)),
    lambda view: numpy.ndarray((len(view),), numpy.int8, view) if view.flags.c_contiguous else view,
    lambda view: view.view(numpy.uint8).T,
)
FROM_TENSOR: tuple[Callable[[Any], Any], ...] = (
    lambda view: view[1:],
    lambda view: view[::3],
    lambda view: view.detach(),
    lambda view: view.numpy(),
    lambda view: torch.from_dlpack(view),
    lambda view: view.view(1, -1).t().squeeze(1),
    lambda view: torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())[view.storage_offset() :],
)


class Receiver:
    """Views of what was sent, each with the byte that all of it must show."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.views: list[tuple[Any, int]] = []
        self.sent = self.back = 0

    def do(self, action: str, number: int) -> None:
        """One action on the view that the number picks."""
        at = number % len(self.views) if self.views else 0
        if action == "send":
            self.send(number)
        elif action == "settle":
            self.back += self.pair.settle()
        elif action == "collect":
            gc.collect(number % 3)
        elif action == "view" and self.views:
            view, value = self.views[at]
            changes = FROM_TENSOR if isinstance(view, torch.Tensor) else FROM_ARRAY
            if len(view) > 8 and (isinstance(view, torch.Tensor) or view.flags.c_contiguous):
                self.views.append((changes[number % len(changes)](view), value))
        elif action == "drop":
            del self.views[at : at + 1]
        elif action == "cycle" and self.views:
            Holder(self.views.pop(at))
        elif action == "thread":
            self.drop_in_thread(at)

    def send(self, number: int) -> None:
        value = 1 + self.sent % 200
        lent = self.pair.lender.lend(bytes((value,)) * (1 + number * 70))
        if lent is not None:
            map_all(self.pair.borrower, self.pair.arena.segments, os.getpid())
            self.views.append((self.pair.borrower.adopt(list(lent[0]), copy=number % 5 == 0), value))
            self.sent += 1

    def drop_in_thread(self, at: int) -> None:
        dropped = self.views[at:]
        del self.views[at:]
        thread = threading.Thread(target=dropped.clear)
        thread.start()
        thread.join(10)

    def check(self) -> None:
        """Every view shows what was sent; no block came back that the lender does not know of."""
        for view, value in self.views:
            assert len(view) == 0 or (int(view[0]), int(view[-1])) == (value, value)  # never poison
        assert self.pair.lender.leases == self.sent - self.back


@settings(max_examples=examples(60), deadline=None)
@given(ACTIONS)
def test_blocks_are_released_once_and_never_early(actions: list[tuple[str, int]]) -> None:
    """Views of all kinds, threads, cycles, any order: each block comes back once, none while somebody looks at it."""
    with paired(8 * MIB) as pair:
        receiver = Receiver(pair)
        for action, number in actions:
            receiver.do(action, number)
            receiver.check()
        receiver.views.clear()
        gc.collect()
        receiver.do("settle", 0)
        receiver.check()
        assert receiver.back == receiver.sent == len(pair.loans)
        assert pair.arena.used == pair.lender.lent == pair.lender.leases == pair.borrower.blocks == 0


# ---- the lender


def test_past_its_share_a_peer_is_asked_to_copy() -> None:
    """Up to its share of the limit a peer may keep blocks, past it the flag is set, until it gave some back."""
    with paired(8 * MIB, share=0.25, soft=1.0) as pair:
        first = pair.lender.lend(bytes(2 * MIB))
        assert first is not None and first[1] is False
        second = pair.lender.lend(bytes(64 * KIB))
        assert second is not None and second[1] is True
        pair.lender.released([first[0]])
        third = pair.lender.lend(bytes(64 * KIB))
        assert third is not None and third[1] is False


def test_one_peer_cannot_take_all() -> None:
    """A peer that gives nothing back leaves room for the others, and the refusal is counted."""
    with paired(8 * MIB) as pair:
        while pair.lender.lend(bytes(512 * KIB)):
            assert pair.lender.lent <= 6 * MIB
        assert pair.lender.refused == {"share": 1} and pair.lender.lent == 6 * MIB
        assert Lender(pair.arena).lend(bytes(512 * KIB)) is not None


GARBAGE: list[Any] = [
    None,
    5,
    b"abcd",
    [],
    [0],
    [0, 0, 0, 0],
    [0, 4096, 100, 999],
    ["a", 1, 2, 3],
    [[], [], [], []],
    {},
]


@pytest.mark.parametrize("wire", GARBAGE, ids=repr)
def test_a_release_of_what_is_not_lent_breaks_the_protocol(wire: Any) -> None:
    """Whatever a peer sends in place of its own block; what is lent stays lent."""
    with paired() as pair:
        pair.lend(b"x" * 100)
        malformed: list[Any] = [[wire], wire or "none"]
        for blocks in malformed:
            with pytest.raises(ProtocolError):
                read = read_release(write(Release(blocks))).blocks
                pair.lender.released([Block(*block) for block in read])
        assert pair.lender.leases == 1 and pair.arena.blocks == 1


def test_a_block_is_released_to_its_own_lender_once() -> None:
    """A second release, one with changed numbers, and one by another peer are refused."""
    with paired() as pair:
        block = Block(*pair.lend(b"x" * 100))
        changes = [{"generation": block.generation + 1}, {"size": 99}, {"segment": 1}]
        for wrong in [block._replace(**change) for change in changes]:
            with pytest.raises(ProtocolError, match="not lent"):
                pair.lender.released([wrong])
        with pytest.raises(ProtocolError, match="not lent"):
            Lender(pair.arena).released([block])
        pair.lender.released([block])
        with pytest.raises(ProtocolError, match="not lent"):
            pair.lender.released([block])


def test_a_retired_lender_keeps_its_leases() -> None:
    """After the connection is gone nothing is lent, and what is lent is not used again until the process is gone."""
    with paired() as pair:
        view = pair.adopt(b"x" * 1000)
        pair.lender.retire()
        assert pair.lender.lend(b"y" * 1000) is None and pair.lender.refused == {"retired": 1}
        assert pair.lender.leases == 1 and pair.arena.blocks == 1
        other = Lender(pair.arena).lend(b"y" * 1000)
        assert other is not None and bytes(view) == b"x" * 1000
        pair.lender.reclaim()
        assert pair.lender.leases == pair.lender.lent == 0 and pair.arena.blocks == 1


# ---- the borrower


@pytest.mark.parametrize(
    "wire",
    [
        *GARBAGE[:5],
        (0, HEADER, 64, 1),
        [1, HEADER, 64, 1],
        [-1, HEADER, 64, 1],
        [0, 0, 64, 1],
        [0, HEADER - ALIGN, 64, 1],
        [0, HEADER + 1, 64, 1],
        [0, HEADER, 0, 1],
        [0, HEADER, -64, 1],
        [0, HEADER, 4 * MIB, 1],
        [0, 4 * MIB, 64, 1],
        [0, 1 << 70, 64, 1],
        [0, -HEADER, 64, 1],
        [0, HEADER, 1 << 70, 1],
        [0, HEADER, 64.0, 1],
        [False, HEADER, 64, True],
        [0, HEADER, 64],
        [0, HEADER, 64, 1, 1],
        ["0", HEADER, 64, 1],
    ],
    ids=repr,
)
def test_what_names_no_block_breaks_the_protocol(wire: Any) -> None:
    """Another segment, outside of it, crooked or not numbers at all: refused, and nothing is released for it."""
    with paired() as pair:
        pair.lend(b"x" * 100)
        for copy in (False, True):
            with pytest.raises(ProtocolError):
                pair.borrower.adopt(wire, copy)
        assert pair.loans == [] and pair.borrower.blocks == 0


def test_a_block_cannot_be_adopted_twice_at_once() -> None:
    """It would be released twice; after its release the same place may come again."""
    with paired() as pair:
        wire = pair.lend(b"x" * 100)
        view = pair.borrower.adopt(wire)
        with pytest.raises(ProtocolError, match="in use"):
            pair.borrower.adopt(wire)
        assert bytes(view) == b"x" * 100
        del view
        pair.settle()
        again = pair.lend(b"y" * 100)
        assert again[:2] == wire[:2] and bytes(pair.borrower.adopt(again)) == b"y" * 100


def refused_map(pair: Pair, path: str, size: int, nonce: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        Borrower(lambda: None).map(0, path, size, nonce)
    return str(caught.value)


def test_another_memory_than_the_peers_is_refused(tmp_path: Path) -> None:
    """A wrong nonce (another host's or process's number), size or kind of file; and it says which."""
    with paired() as pair:
        pair.lend(b"x")
        segment = pair.arena.segments[0]
        path = f"/proc/self/fd/{segment.fd}"
        assert "nonce" in refused_map(pair, path, segment.size, bytes(NONCE_SIZE))
        assert "nonce" in refused_map(pair, path, segment.size, b"")
        assert "bytes" in refused_map(pair, path, segment.size + PAGE, segment.nonce)
        assert "bytes" in refused_map(pair, "/dev/null", segment.size, segment.nonce)
        (tmp_path / "short").write_bytes(segment.nonce)
        assert "bytes" in refused_map(pair, str(tmp_path / "short"), NONCE_SIZE, segment.nonce)
        with pytest.raises(FileNotFoundError):
            pair.borrower.map(1, str(tmp_path / "nowhere"), segment.size, segment.nonce)
        os.mkfifo(tmp_path / "pipe")
        assert "bytes" in refused_map(pair, str(tmp_path / "pipe"), segment.size, segment.nonce)
        assert pair.borrower.segments == {0}


def test_memory_that_the_peer_could_cut_is_refused() -> None:
    """A memory file without its seals is refused: the peer could shorten it under the reader."""
    fd, nonce = os.memfd_create("t", os.MFD_ALLOW_SEALING), bytes(range(NONCE_SIZE))
    try:
        os.pwrite(fd, nonce.ljust(MIB), 0)
        with pytest.raises(ProtocolError, match="not sealed"):
            Borrower(lambda: None).map(0, f"/proc/self/fd/{fd}", MIB, nonce)
    finally:
        os.close(fd)


def sealed(size: int, nonce: bytes, flags: int = 0) -> int:
    """The descriptor of a memory file that nobody can cut, of so many bytes that it need not have."""
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    if not flags:
        os.pwrite(fd, nonce, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def why_not_mapped(fd: int, size: int, nonce: bytes) -> str:
    """What a borrower says of that file, which is closed then."""
    try:
        with pytest.raises(ProtocolError) as caught:
            Borrower(lambda: None).map(0, f"/proc/self/fd/{fd}", size, nonce)
    finally:
        os.close(fd)
    return str(caught.value)


def test_a_nonce_of_zeros_is_none() -> None:
    """So a file reads where nothing was ever written to it."""
    assert "nonce" in why_not_mapped(sealed(MIB, bytes(NONCE_SIZE)), MIB, bytes(NONCE_SIZE))


def test_pages_of_another_size_are_not_mapped() -> None:
    """The system may have promised huge pages that it has not: to touch one ends the process."""
    size = 1 << 30
    try:
        fd = sealed(size, bytes(NONCE_SIZE), os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this system has no huge pages: {error}")
    assert re.match(r"a segment in pages of \d{7,} bytes", why_not_mapped(fd, size, bytes(NONCE_SIZE)))


def test_a_block_of_memory_that_is_not_there_is_refused() -> None:
    """The reader would have to give memory for all of it."""
    nonce, size = bytes(range(NONCE_SIZE)), 1 << 30
    fd = sealed(size, nonce)
    borrower = Borrower(lambda: None)
    try:
        borrower.map(0, f"/proc/self/fd/{fd}", size, nonce)
        with pytest.raises(ProtocolError, match="bytes of shared memory, of which there are"):
            borrower.adopt([0, 4096, size - 4096, 1])
    finally:
        os.close(fd)
        borrower.close()


@pytest.mark.parametrize("folder", ["/dev/shm", None])
def test_a_file_that_is_cut_harms_nobody(tmp_path: Path, folder: str | None) -> None:
    """Of one that cannot be sealed blocks are read, and copied out: what is missing is an error, and no signal."""
    nonce = bytes(range(NONCE_SIZE))
    fd = os.open(folder or str(tmp_path), os.O_TMPFILE | os.O_RDWR, 0o600)
    borrower = Borrower(lambda: None)
    try:
        os.pwrite(fd, nonce.ljust(HEADER) + b"x" * MIB, 0)
        borrower.map(0, f"/proc/self/fd/{fd}", HEADER + MIB, nonce)
        adopted = borrower.adopt([0, HEADER, MIB, 1])
        assert bytes(adopted) == b"x" * MIB
        assert [block.generation for block in borrower.drain()] == [1]
        os.ftruncate(fd, HEADER + PAGE)
        assert bytes(adopted) == b"x" * MIB
        with pytest.raises(ProtocolError, match="cut off"):
            borrower.adopt([0, HEADER, MIB, 2])
    finally:
        borrower.close()
        os.close(fd)


# ---- processes


def borrow(arena_segments: list[list[Any]]) -> Callable[[Child], None]:
    """A process that adopts what it is told to and answers with what it sees.

    Through numpy: torch's own threads do not survive a fork.
    """

    def body(parent: Child) -> None:
        borrower = Borrower(lambda: None)
        map_described(borrower, arena_segments)
        held: list[Bytes] = []
        while (order := parent.receive()) != "end":
            if order == "drop":
                held.clear()
                parent.send(borrower.drain())
            elif order == "look":
                parent.send([int(array.sum()) for array in held])
            elif order == "write":
                for array in held:
                    array[:] = 7
                del array
                parent.send(len(held))
            else:
                held.append(borrower.adopt(order))
                parent.send(held[-1][:10].tolist())

    return body


def test_bytes_cross_between_two_processes() -> None:
    """Another process sees what was lent, may write to it, and gives it back."""
    with paired() as pair:
        wire = pair.lend(bytes(range(200)) * 1000)
        with forked(borrow(described(pair.arena.segments))) as child:
            child.send(wire)
            assert child.receive() == list(range(10))
            child.send("write")
            assert child.receive() == 1
            child.send("look")
            assert child.receive() == [7 * 200_000]
            child.send("drop")
            (released,) = child.receive()
            assert list(released) == wire
            pair.lender.released([Block(*released)])
            assert pair.arena.used == 0
            child.send("end")
            assert child.wait() == 0


def test_a_killed_borrower_leaves_nothing_lent() -> None:
    """Its blocks are used again once its process is proved gone, and not before."""
    with paired() as pair:
        wires = [pair.lend(bytes((n,)) * 300_000) for n in range(5)]
        with forked(borrow(described(pair.arena.segments))) as child:
            for wire in wires:
                child.send(wire)
                child.receive()
            pair.lender.retire()
            assert pair.lender.leases == 5 and pair.arena.blocks == 5
            child.kill()
            pair.lender.reclaim()
            assert pair.lender.leases == pair.lender.lent == pair.arena.used == 0


def lend_forever(parent: Child) -> None:
    """A process that lends one block after the other until it is killed."""
    arena = GrowingArena(LIMIT, segment_size=4 * MIB)
    lender = Lender(arena)
    lent = lender.lend(b"k" * MIB)
    assert lent is not None
    parent.send([described(arena.segments), list(lent[0])])
    while True:
        more = lender.lend(b"m" * 200_000)
        if more is not None:
            lender.taken_back(more[0])


def test_a_killed_lender_leaves_adopted_tensors_readable() -> None:
    """In the middle of its copies: what was adopted keeps its bytes, and all memory goes with it."""
    before = named_shared_files()
    borrower = Borrower(lambda: None)
    with forked(lend_forever) as child:
        segments, wire = child.receive()
        map_described(borrower, segments)
        tensor = torch.from_numpy(borrower.adopt(wire))
        assert named_shared_files() <= before
        child.kill()
        assert bool((tensor == ord("k")).all())
        tensor.fill_(1)
        assert int(tensor.sum()) == MIB
        borrower.close()
        assert int(tensor.sum()) == MIB
        del tensor
    assert "memfd:aiorpc" not in Path("/proc/self/maps").read_text()
    assert named_shared_files() <= before


@pytest.mark.time_limit(30)
def test_peers_killed_at_any_moment_leave_the_arena_whole() -> None:
    """Borrowers that are killed while they adopt and release: what is left is reclaimed, never a block too many."""
    chance = random.Random(7)

    def adopt_and_drop(parent: Child) -> None:
        borrower = Borrower(lambda: None)
        map_described(borrower, parent.receive())
        held: list[Bytes] = []
        while True:
            held.append(borrower.adopt(parent.receive()))
            del held[: chance.randrange(3)]
            parent.send(borrower.drain())

    with paired() as pair:
        pair.lend(b"first")
        pair.lender.reclaim()
        for _ in range(10):
            lender = Lender(pair.arena)
            with forked(adopt_and_drop) as child:
                child.send(described(pair.arena.segments))
                for _ in range(chance.randrange(1, 12)):
                    lent = lender.lend(bytes(chance.randrange(1, 300_000)))
                    assert lent is not None
                    child.send(list(lent[0]))
                    if chance.random() < 0.8:
                        lender.released([Block(*each) for each in child.receive()])
                child.kill()
            lender.retire()
            lender.reclaim()
            assert pair.arena.used == 0
        assert len(pair.arena.segments) == 1


def test_a_peer_cannot_cut_the_memory() -> None:
    """Through its own descriptor the other process can neither shorten nor lengthen the segment, nor unseal it."""
    with paired() as pair:
        pair.lend(b"x" * 1000)
        segment = pair.arena.segments[0]
        path = f"/proc/{os.getpid()}/fd/{segment.fd}"

        def cut(parent: Child) -> None:
            fd, errors = os.open(path, os.O_RDWR), list[int]()
            for size in (0, PAGE, segment.size + PAGE):
                try:
                    os.ftruncate(fd, size)
                except OSError as error:
                    errors.append(error.errno or 0)
            parent.send(errors)

        with forked(cut) as child:
            assert child.receive() == [errno.EPERM] * 3
            assert child.wait() == 0


# --- a buffer that several peers get ----------------------------------------------------------------------------------


SIZE = 2 << 20


class CopiesPair:
    """A lender and a borrower of this process, as of two ends of a link."""

    def __init__(self, arena: Arena) -> None:
        self.lender = Lender(arena, share=0.9, soft=0.9, most=0.9)
        self.borrower = Borrower(lambda: None)
        segment = arena.segments[0]
        self.borrower.map(0, f"/proc/self/fd/{segment.fd}", segment.size, segment.nonce)

    def take(self, data: memoryview, copies: Copies) -> Bytes:
        """What the borrower has of the data."""
        lent = self.lender.lend(data, copies=copies)
        assert lent is not None, self.lender.refused
        return self.borrower.adopt(list(lent[0]), private=True)

    def give_back(self) -> None:
        """What the borrower has let go of is the lender's again."""
        self.lender.released(self.borrower.drain())


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 << 20, poison=True)
    made.grow(8 << 20)
    yield made
    made.close()


@pytest.fixture
def pairs(arena: Arena) -> Iterator[list[CopiesPair]]:
    made = [CopiesPair(arena) for _ in range(3)]
    yield made
    for pair in made:
        pair.borrower.close()


def test_all_get_one_block(arena: Arena, pairs: list[CopiesPair]) -> None:
    """It is counted once, and free when the last of them has released it, in whatever order."""
    data = numpy.arange(SIZE, dtype=numpy.uint8)
    view = data.data
    copies = Copies(arena)
    taken = {pair: pair.take(view, copies) for pair in pairs}
    assert arena.blocks == 1
    assert SIZE <= arena.used < SIZE + 4096 * 2
    copies.close()
    for pair in (pairs[1], pairs[0], pairs[2]):
        assert arena.blocks == 1
        assert numpy.array_equal(taken[pair], data)
        del taken[pair]
        pair.give_back()
        assert pair.lender.leases == 0
    assert (arena.blocks, arena.used) == (0, 0)


def test_what_one_writes_the_others_do_not_see(arena: Arena, pairs: list[CopiesPair]) -> None:
    """Also not who gets the block later."""
    data = numpy.zeros(SIZE, numpy.uint8).data
    copies = Copies(arena)
    first = pairs[0].take(data, copies)
    second = pairs[1].take(data, copies)
    first[:] = 1
    second[SIZE // 2 :] = 2
    third = pairs[2].take(data, copies)
    assert (first.sum(), second[: SIZE // 2].sum(), third.sum()) == (SIZE, 0, 0)
    copies.close()


def test_a_peer_that_is_lost_gives_back_its_share(arena: Arena, pairs: list[CopiesPair]) -> None:
    """And no more than that: the others still have theirs."""
    copies = Copies(arena)
    data = numpy.ones(SIZE, numpy.uint8).data
    taken = [pair.take(data, copies) for pair in pairs]
    copies.close()
    pairs[0].lender.reclaim()
    pairs[0].lender.reclaim()
    assert arena.blocks == 1
    assert taken[1].all()
    pairs[1].lender.reclaim()
    del taken[2]
    pairs[2].give_back()
    assert arena.blocks == 0


# --- memory that is kept in the arena until somebody asks for it ------------------------------------------------------


KEEPING_LIMIT = 64 * MIB
KEEPING_SIZE = 300_000


class Kept:
    """A keeper with warm memory, a lender of the same arena, and what the keeper has said."""

    def __init__(self, warm: int = 32 * MIB, **options: Any) -> None:
        self.arena = Arena(KEEPING_LIMIT, segment_size=KEEPING_LIMIT, poison=True)
        if warm:
            self.arena.grow(warm)
        self.cold: list[int] = []
        self.told: list[int] = []
        self.keeper = Keeper(self.arena, lambda: self.told.append(1), self.cold.append, **options)
        self.lender = Lender(self.arena)
        self.borrower = Borrower(lambda: None)
        for segment in self.arena.segments:
            self.borrower.map(segment.index, f"/proc/{os.getpid()}/fd/{segment.fd}", segment.size, segment.nonce)

    def keep(self, size: int = KEEPING_SIZE) -> Bytes:
        """Memory with some bytes in it."""
        array = self.keeper.keep(size)
        assert array is not None
        array[:] = numpy.arange(size, dtype=numpy.uint8)
        return array

    def lend(self, array: Bytes) -> Block:
        """As a message would."""
        lent = self.lender.lend(array.data, kept=self.keeper.find(array.data))
        assert lent is not None, self.lender.refused
        return lent[0]

    def give_back(self) -> None:
        """What the borrower has no more."""
        self.lender.released(self.borrower.drain())


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.keeper.close()
    made.borrower.close()
    made.arena.close()


@pytest.mark.parametrize("first", ["here", "there"])
def test_it_is_free_when_neither_end_has_it(kept: Kept, first: str) -> None:
    """Whoever lets go of it first: the bytes stay as long as the other one has them."""
    array = kept.keep()
    expected = bytes(array)
    there = kept.borrower.adopt(list(kept.lend(array)))
    if first == "here":
        del array
        assert kept.keeper.collect()
        assert bytes(there) == expected
        del there
        kept.give_back()
    else:
        del there
        kept.give_back()
        assert bytes(array) == expected
        del array
        assert kept.keeper.collect()
    assert (kept.arena.used, kept.arena.blocks, kept.keeper.keeps, kept.lender.leases) == (0, 0, {}, 0)


def test_a_peer_gets_a_copy_as_long_as_it_has_it_already(kept: Kept) -> None:
    """A block is lent to one peer once at a time, as each is given back once; another peer gets it meanwhile."""
    array = kept.keep()
    first, second = kept.lend(array), kept.lend(array)
    assert first.offset != second.offset
    other = Lender(kept.arena).lend(array.data, kept=kept.keeper.find(array.data))
    assert other is not None and other[0] == first
    for block in (first, second):
        assert bytes(kept.borrower.adopt(list(block))) == bytes(array)
    kept.give_back()
    assert kept.lender.leases == 0
    assert kept.lend(array) == first


def test_what_is_kept_outlives_the_arena(kept: Kept) -> None:
    """Its memory is mapped as long as somebody has it, and nothing is given back to an arena that is closed."""
    array = kept.keep()
    expected = bytes(array)
    kept.arena.close()
    assert bytes(array) == expected
    del array
    assert kept.keeper.collect()
    kept.keeper.close()
    assert not kept.keeper.collect()
