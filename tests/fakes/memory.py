"""Memory of a device that does not exist: a caching allocator with the ownership that torch's has."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

import torch

from .streams import Machine, Mark, Stream

POISON = 0xDD
ROUND = 512


class Block:
    """Memory that was given out. size: of what was asked for; room: of what it takes."""

    def __init__(self, address: int, size: int, room: int, stream: Stream) -> None:
        self.address = address
        self.size = size
        self.room = room
        self.stream = stream
        self.kept: set[Stream] = set()
        self.reference: weakref.ref[memoryview] | None = None


class Pool:
    """Memory of one device. It belongs to the stream that it was asked for on.

    When the last tensor on it dies it is filled with poison on that stream, after what the streams had been given that
    `keep` named, and given out again: first what came back last.
    """

    def __init__(self, machine: Machine, index: int, capacity: int, report: Callable[[str], None]) -> None:
        self._machine = machine
        self._report = report
        self._index = index
        self._root = memoryview(mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.start = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._root))
        self.capacity = capacity
        self._extents: list[tuple[int, int]] = [(self.start, capacity)]  # never given out, or joined again
        self._free: dict[tuple[Stream, int], list[Block]] = {}
        self._live: dict[int, Block] = {}
        self._addresses: list[int] = []
        self._waiting: list[tuple[Block, list[Mark]]] = []
        # Filled by the garbage collector at any moment, in any thread: it takes no lock.
        self._dead: deque[Block] = deque()
        machine.housekeeping.append(self._collect)

    def allocate(self, size: int, stream: Stream) -> torch.Tensor:
        """A flat uint8 carrier, full of poison. Raises torch.OutOfMemoryError."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        room = -(-size // ROUND) * ROUND
        with self._machine.lock:
            self._collect()
            address = self._reuse(stream, room)
            block = Block(address, size, room, stream)
            self._live[address] = block
            insort(self._addresses, address)
            offset = address - self.start
            view = self._root[offset : offset + size]
            dead = self._dead
            block.reference = weakref.ref(view, lambda _: dead.append(block))
            return torch.frombuffer(view, dtype=torch.uint8)

    def find(self, address: int, size: int) -> Block | None:
        """The living block that holds this range; with the machine's lock."""
        self._collect()
        position = bisect_right(self._addresses, address)
        if not position:
            return None
        block = self._live[self._addresses[position - 1]]
        return block if address + size <= block.address + block.size else None

    def holds(self, address: int) -> bool:
        """Whether this is an address of the device, given out or not."""
        return self.start <= address < self.start + self.capacity

    def in_use(self) -> int:
        """Bytes that were given out and did not come back."""
        with self._machine.lock:
            self._collect()
            return sum(block.size for block in self._live.values()) + sum(block.size for block, _ in self._waiting)

    def _reuse(self, stream: Stream, room: int) -> int:
        for attempt in range(2):
            blocks = self._free.get((stream, room))
            if blocks:
                return blocks.pop().address
            for number, (address, length) in enumerate(self._extents):
                if length >= room:
                    self._extents[number] = (address + room, length - room)
                    ctypes.memset(address, POISON, room)
                    return address
            if attempt == 0:
                self._join()
        raise torch.OutOfMemoryError(f"fake device {self._index} has no {room} bytes left of {self.capacity}")

    def _join(self) -> None:
        """Make one of neighbours that are free. Waits for the device, as torch does before it gives up."""
        self._machine.drain(10)
        self._collect()
        self._machine.drain(10)
        free = [(block.address, block.room) for blocks in self._free.values() for block in blocks]
        self._free.clear()
        joined: list[tuple[int, int]] = []
        for address, length in sorted(free + [extent for extent in self._extents if extent[1]]):
            if joined and sum(joined[-1]) == address:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((address, length))
        self._extents = joined

    def _collect(self) -> None:
        """Take back what has died; with the machine's lock."""
        if self._machine.closed:
            return
        while self._dead:
            block = self._dead.popleft()
            block.reference = None
            del self._live[block.address]
            self._addresses.remove(block.address)
            marks = [self._machine.mark_now(stream) for stream in block.kept if stream is not block.stream]
            self._waiting.append((block, marks))
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for block, marks in waiting:
            if all(mark.done for mark in marks):
                self._retire(block)
            else:
                self._waiting.append((block, marks))

    def _retire(self, block: Block) -> None:
        """Poison it on its stream. Who asks for memory on that stream gets it at once: it comes after the poison."""
        used = [(stream, operation.name, operation) for stream, operation in self._machine.pending(*_range(block))]

        def poison() -> None:
            with self._machine.lock:
                for stream, name, operation in used:
                    if stream is not block.stream and operation in stream.queue:
                        self._report(
                            f"{name} on {stream} uses memory of {block.stream} that was freed and is given out again: "
                            "`keep` was left out"
                        )
            ctypes.memset(block.address, POISON, block.room)

        self._machine.enqueue_now(block.stream, "poison", poison)
        self._free.setdefault((block.stream, block.room), []).append(block)


def _range(block: Block) -> tuple[int, int]:
    return block.address, block.room
