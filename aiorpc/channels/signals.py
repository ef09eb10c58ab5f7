"""Events that two processes share and CUDA streams record and wait for: words in memory of the host.

A stream records an event by writing a number to a word, and waits for it until the word has reached the number: CUDA's
*stream memory operations* (cuStreamWriteValue32, cuStreamWaitValue32). CUDA's own events do not outlive their process:
if it dies before its device has done what it recorded, streams of other processes wait without end (pytorch#15974,
observed on an H200 with driver 580). A word can be written by any process: a survivor writes the missing number.

For each of its two processes, maker and opener, an event has a word for what the device has done and one for what was
recorded, and a word for who recorded last. Only the owner of what the event guards records it, and passes the ownership
on by a message: a process therefore reads what the other one wrote before.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Protocol

from ..errors import ProtocolError
from .accelerator import Stream
from .segments import NONCE_SIZE, Mapping, create_segment
from .shm import check_file
from .space import PAGE

HANDLE_SIZE = 64
# kind, pid, descriptor, bytes of the memory, number of the event, nonce of the memory
_HANDLE = struct.Struct(f"<4siiII{NONCE_SIZE}s")
_KIND = b"asig"
_HEADER = 64  # bytes before the first event: the nonce
_CELL = 32  # bytes of an event
_MOST_BYTES = 1 << 20  # of memory that another process names
# Words of an event: done by the maker, done by the opener, recorded by the maker, by the opener, who recorded last.
_MAKER, _OPENER = 0, 1
_RECORDED, _LAST, _WORDS = 2, 4, 5
_MASK = 0xFFFFFFFF


class Memops(Protocol):
    """The driver's operations on such memory. All raise RuntimeError with the driver's error."""

    def register(self, address: int, size: int) -> int:
        """Lock memory of the host for all devices; returns the address that devices use."""

    def unregister(self, address: int) -> None:
        """Unlock it. The work enqueued with it must be done."""

    def write_value(self, address: int, value: int, stream: Stream) -> None:
        """Enqueue a write of 32 bits, after all that the stream was given before."""

    def wait_value(self, address: int, value: int, stream: Stream) -> None:
        """Enqueue a wait until the 32 bits there are the value or less than 2**31 after it."""


class _Page:
    """Memory of some events, registered and mapped until `close` or the end of the process: streams write to it and
    wait for it, even if the objects are gone."""

    def __init__(self, memops: Memops, mapping: Mapping) -> None:
        self.mapping = mapping
        self.address: int = memops.register(mapping.address, mapping.size)
        self._memops = memops
        _registered.add(self)

    def close(self) -> None:
        """Let go of the memory. The work enqueued with its events must be done. Idempotent."""
        if self in _registered:
            _registered.discard(self)
            self._memops.unregister(self.mapping.address)


# The driver registers memory for the whole process; a worker may leave some behind.
_registered: set[_Page] = set()


class Signal:
    """One event. index: of the device of this process that records it and waits for it."""

    __slots__ = ("_address", "_memops", "_page", "_side", "_words", "handle", "index")

    def __init__(self, memops: Memops, page: _Page, number: int, side: int, index: int, handle: bytes) -> None:
        place = _HEADER + number * _CELL
        self.index: int = index
        self.handle: bytes = handle
        self._memops = memops
        self._page = page
        self._side = side
        self._address = page.address + place
        self._words = (ctypes.c_uint32 * _WORDS).from_address(page.mapping.address + place)

    def record(self, stream: Stream, *, again: bool = False) -> None:
        """A `wait` from now on waits for the work that the stream has been given so far. again: an earlier record may
        have been interrupted after its write: skip its number."""
        words, side = self._words, self._side
        count = (words[_RECORDED + side] + (2 if again else 1)) & _MASK
        self._memops.write_value(self._address + 4 * side, count, stream)
        words[_RECORDED + side] = count
        words[_LAST] = side

    def wait(self, stream: Stream) -> None:
        """The stream does what it is given from now on after what was recorded last."""
        side = self._words[_LAST] & 1
        if not self._is_done(side):
            self._memops.wait_value(self._address + 4 * side, self._words[_RECORDED + side], stream)

    def done(self) -> bool:
        """Whether the work recorded last is done."""
        return self._is_done(self._words[_LAST] & 1)

    def _is_done(self, side: int) -> bool:
        return (self._words[side] - self._words[_RECORDED + side]) & _MASK < 1 << 31  # as the driver compares

    def close(self) -> None:
        """Let go of the memory of this event, and of all that were made or opened with it. The work enqueued with them
        must be done. Idempotent."""
        self._page.close()

    def release(self) -> None:
        """The other process is dead, and so is its devices' work: count what it recorded as done."""
        other = 1 - self._side
        self._words[other] = self._words[_RECORDED + other]


def make_signals(memops: Memops, index: int, count: int) -> list[Signal]:
    """Events of this process, none of them recorded. Raises RuntimeError, OSError."""
    size = -(-(_HEADER + count * _CELL) // PAGE) * PAGE
    segment = create_segment(0, size)
    os.close(segment.fd)  # the mapping has its own
    page = _Page(memops, segment.mapping)
    fd = segment.mapping.memory.file.fd

    def handle(number: int) -> bytes:
        return _HANDLE.pack(_KIND, os.getpid(), fd, size, number, segment.nonce).ljust(HANDLE_SIZE, b"\0")

    return [Signal(memops, page, number, _MAKER, index, handle(number)) for number in range(count)]


def open_signals(memops: Memops, index: int, handles: Sequence[bytes]) -> list[Signal]:
    """Events of another process, which it has made together. RuntimeError if they cannot be opened."""
    found = [_read(handle) for handle in handles]
    if not found:
        return []
    kinds = {each[:-1] for each in found}
    if len(kinds) > 1:
        raise RuntimeError("handles of events that were not made together")
    pid, fd, size, nonce = kinds.pop()
    numbers = [each[-1] for each in found]
    if pid == os.getpid():
        raise RuntimeError("these events are of this process")
    if size % PAGE or size > _MOST_BYTES or _HEADER + (max(numbers) + 1) * _CELL > size:
        raise RuntimeError(f"{size} bytes have no event {max(numbers)}")
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise RuntimeError(f"the memory of events of process {pid} cannot be opened: {error.strerror}") from None
    try:
        if not check_file(own, size, nonce):
            raise RuntimeError("the memory of events is not sealed")
        mapping = Mapping(own, size)
    except (OSError, ProtocolError) as error:
        raise RuntimeError(f"the memory of events of process {pid} cannot be used: {error}") from None
    finally:
        os.close(own)
    page = _Page(memops, mapping)
    return [
        Signal(memops, page, number, _OPENER, index, handle) for number, handle in zip(numbers, handles, strict=True)
    ]


def _read(handle: bytes) -> tuple[int, int, int, bytes, int]:
    """Pid, descriptor, size, nonce, number."""
    if len(handle) != HANDLE_SIZE:
        raise RuntimeError(f"a handle of an event has {HANDLE_SIZE} bytes, not {len(handle)}")
    kind, pid, fd, size, number, nonce = _HANDLE.unpack_from(handle)
    if kind != _KIND:
        raise RuntimeError("this is no handle of an event")
    return pid, fd, size, nonce, number
