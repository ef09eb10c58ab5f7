"""Memory and events that processes share, on devices that do not exist: in memfds, with the rules of CUDA IPC."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from .memory import POISON
from .streams import Stream

if TYPE_CHECKING:
    from .cuda import FakeCuda

HANDLE_SIZE = 64
# magic, pid, descriptor, bytes of memory or number of the event, nonce, who the device is
HANDLE = struct.Struct("<4sIIQ16s16s")
_MEMORY, _EVENT = b"FMEM", b"FEVT"
_PAGE = 4096
# In front of memory: nonce, whether it was freed, who has it open.
_FREED, _OPENERS, _MAX_OPENERS = 2, 3, 64
# An event: what was recorded last, what is done, whether its process destroyed it, and what was recorded by a process
# that let go of it before that was done.
_RECORDED, _COMPLETED, _DESTROYED, _ORPHANED, _WORDS = 0, 1, 2, 3, 4
_EVENTS = 2048
_EVENT_BYTES = _PAGE + _EVENTS * _WORDS * 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """A mapped memfd, of this process or another: a page of words, then bytes. Keeps no descriptor but for `fd`."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            os.close(fd)
            raise RuntimeError(f"mmap: {os.strerror(ctypes.get_errno())}")
        self.start = int(address)
        self.base: int = self.start + _PAGE
        self.words = (ctypes.c_uint64 * (_PAGE // 8)).from_address(self.start)

    @classmethod
    def create(cls, size: int) -> Segment:
        """One of this process, with a nonce."""
        fd = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size + _PAGE)
        segment = cls(fd, size + _PAGE)
        ctypes.memmove(segment.start, os.urandom(16), 16)
        return segment

    @classmethod
    def of(cls, pid: int, fd: int, size: int, nonce: bytes) -> Segment:
        """One of another process. RuntimeError if it is gone."""
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"invalid device context: process {pid} is gone or has freed it ({error})") from None
        if os.fstat(own).st_size != size + _PAGE:
            os.close(own)
            raise RuntimeError("invalid handle: the memory was freed")
        segment = cls(own, size + _PAGE)
        if segment.nonce() != nonce:
            segment.unmap()
            raise RuntimeError("invalid handle: the memory was freed")
        return segment

    def nonce(self) -> bytes:
        """Tells it from another one that got the same descriptor."""
        return ctypes.string_at(self.start, 16)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes that have it."""
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def openers(self) -> list[int]:
        """Processes that have it open and live."""
        pids = (self.words[_OPENERS + number] for number in range(_MAX_OPENERS))
        return [pid for pid in pids if pid and _is_alive(pid)]

    def enter(self, old: int, new: int) -> None:
        """Put a process into the list of openers, or take it out."""
        with self.locked():
            for number in range(_OPENERS, _OPENERS + _MAX_OPENERS):
                if self.words[number] == old:
                    self.words[number] = new
                    return
        raise RuntimeError("too many processes have the memory open")

    def close_descriptor(self) -> None:
        """Keep the mapping alone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def unmap(self) -> None:
        """Nobody may use it any more."""
        self.close_descriptor()
        _libc.munmap(self.start, self.size)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


class Memory:
    """A range that `allocate` or `open` gave."""

    def __init__(self, index: int, segment: Segment, size: int, handle: bytes, opened: bool) -> None:
        self.index = index
        self.segment = segment
        self.size = size
        self.handle = handle
        self.opened = opened


class InterprocessEvent:
    """An event in memory of the process that made it."""

    def __init__(self, fake: FakeCuda, index: int, address: int, handle: bytes, own: bool) -> None:
        self.fake = fake
        self.index = index
        self.handle = handle
        self.own = own
        # The pages of events stay mapped until the process ends.
        self.words = (ctypes.c_uint64 * _WORDS).from_address(address)
        self.last = 0  # recorded through this object

    def __repr__(self) -> str:
        return f"<{'' if self.own else 'opened '}interprocess event of device {self.index}>"

    def __del__(self) -> None:
        fake = self.fake
        if fake.closed:
            return
        if self.own:
            self.words[_DESTROYED] = 1
        elif self.last > self.words[_COMPLETED]:
            self.words[_ORPHANED] = self.last


class FakeInterprocess:
    """`aiorpc.channels.accelerator.Interprocess`. What breaks a rule is a violation of the fake and a RuntimeError."""

    def __init__(self, fake: FakeCuda, peer_access: bool | set[tuple[str, str]], refused: bool) -> None:
        self._fake = fake
        self._peer_access = peer_access
        self._refused = refused
        self.mapped: dict[int, Memory] = {}
        self._pages: list[Segment] = []
        self._events = _EVENTS  # of the last page in use
        self._opened_pages: dict[tuple[int, int, bytes], Segment] = {}

    def uuid(self, index: int) -> str:
        """The name that was given to the fake."""
        return self._fake.uuids[index]

    def obstacle(self, index: int) -> str:
        """Whether the fake was made without."""
        self._fake.uuids[index]
        return "the fake device was told to refuse" if self._refused else ""

    def reaches(self, index: int, uuid: str) -> bool:
        """The same device, or one of this process that it has access to."""
        return uuid in self._fake.uuids and self._has_access(index, uuid)

    def allocate(self, index: int, size: int) -> int:
        """In a memfd."""
        self.begin("allocate", index)
        segment = Segment.create(size)
        ctypes.memset(segment.base, POISON, size)
        handle = self._handle(_MEMORY, segment, size, index)
        with self._fake.machine.lock:
            self.mapped[segment.base] = Memory(index, segment, size, handle, False)
        return segment.base

    def free(self, index: int, address: int) -> None:
        """Waits like `close`. Poisons it: who still reads sees that."""
        self.begin("free", index)
        memory = self._take(index, address, opened=False)
        with memory.segment.locked():
            openers = memory.segment.openers()
            memory.segment.words[_FREED] = 1
            ctypes.memset(address, POISON, memory.size)
        memory.segment.unmap()
        if openers:
            self._refuse(f"free: processes {openers} have the memory open")

    def export(self, index: int, address: int) -> bytes:
        """64 bytes."""
        self.begin("export", index)
        memory = self.mapped.get(address)
        if memory is None or memory.index != index or memory.opened:
            self._refuse(f"export: no memory of device {index} was allocated at {address:#x}")
        return memory.handle

    def open(self, index: int, handle: bytes) -> int:
        """Maps it. Refused in the process that exported it, twice, and without access to the device."""
        self.begin("open", index)
        pid, fd, size, nonce, who = self._read(_MEMORY, handle)
        if any(memory.handle == handle for memory in self.mapped.values()):
            self._refuse("open: this process has that memory open already, or allocated it")
        self._require_access("open", index, who)
        segment = Segment.of(pid, fd, size, nonce)
        if segment.words[_FREED]:
            segment.unmap()
            raise RuntimeError("invalid handle: the memory was freed")
        segment.enter(0, os.getpid())
        with self._fake.machine.lock:
            self.mapped[segment.base] = Memory(index, segment, size, bytes(handle), True)
        return segment.base

    def close(self, index: int, address: int) -> None:
        """Waits for all that the device was given, as CUDA's does."""
        self.begin("close", index)
        memory = self._take(index, address, opened=True)
        memory.segment.enter(os.getpid(), 0)
        memory.segment.unmap()

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Between ranges that were given out, each of them whole, and that the stream's device reaches."""
        self.begin("copy", stream.index)
        with self._fake.machine.lock:
            for address in (target, source):
                if obstacle := self._trouble(address, size, stream.index):
                    self._refuse(f"copy on {stream}: {obstacle}")
            ranges = ((target, size), (source, size))
            self._fake.machine.enqueue(stream, "copy", lambda: self._copy(target, source, size), ranges=ranges)

    def event(self, index: int) -> InterprocessEvent:
        """In shared memory from the start."""
        self.begin("event", index)
        with self._fake.machine.lock:
            if self._events == _EVENTS:
                self._pages.append(Segment.create(_EVENT_BYTES - _PAGE))
                self._events = 0
            page, number = self._pages[-1], self._events
            self._events += 1
        handle = self._handle(_EVENT, page, number, index)
        return InterprocessEvent(self._fake, index, _address(page, number), handle, True)

    def events(self, index: int, count: int) -> list[InterprocessEvent]:
        """Several."""
        return [self.event(index) for _ in range(count)]

    def open_events(self, index: int, handles: Sequence[bytes]) -> list[InterprocessEvent]:
        """Several."""
        return [self.open_event(index, handle) for handle in handles]

    def close_events(self, events: Sequence[InterprocessEvent]) -> None:
        """They go with their objects."""

    def release(self, event: InterprocessEvent) -> None:
        """What the other process has recorded counts as done. Nothing is asked of the device."""
        event.words[_COMPLETED] = event.words[_RECORDED]

    def export_event(self, event: InterprocessEvent) -> bytes:
        """64 bytes. Only of an event of this process."""
        self.begin("export_event", event.index)
        if not event.own:
            self._refuse(f"export_event: {event}")
        return event.handle

    def open_event(self, index: int, handle: bytes) -> InterprocessEvent:
        """Refused in the process that exported it."""
        self.begin("open_event", index)
        pid, fd, number, nonce, who = self._read(_EVENT, handle)
        self._require_access("open_event", index, who)
        with self._fake.machine.lock:
            page = self._opened_pages.get((pid, fd, nonce))
            if page is None:
                page = self._opened_pages[pid, fd, nonce] = Segment.of(pid, fd, _EVENT_BYTES - _PAGE, nonce)
                page.close_descriptor()
        event = InterprocessEvent(self._fake, index, _address(page, number), bytes(handle), False)
        self._require_alive("open_event", event)
        return event

    def record(self, event: InterprocessEvent, stream: Stream, *, again: bool = False) -> None:
        """Counts at the call; done when the stream comes to it."""
        self.begin("record", stream.index)
        if event.index != stream.index:
            self._refuse(f"record: {event} on {stream}: that is another device")
        self._require_alive("record", event)
        words = event.words
        with self._fake.machine.lock:
            generation = event.last = words[_RECORDED] + 1
            words[_RECORDED] = generation

            def done() -> None:
                if words[_COMPLETED] < generation:
                    words[_COMPLETED] = generation

            self._fake.machine.enqueue(stream, f"record {event}", done)

    def wait(self, event: InterprocessEvent, stream: Stream) -> None:
        """For what is recorded now."""
        self.begin("interprocess.wait", stream.index)
        self._require_alive("wait", event)
        words = event.words
        generation = words[_RECORDED]
        own, last = event.own, event.last

        def ready() -> bool:
            if words[_COMPLETED] >= generation:
                return True
            if words[_DESTROYED] and not own:
                raise RuntimeError("the event was destroyed by its process")
            if words[_ORPHANED] >= generation > last:
                raise RuntimeError("the process that recorded the event let go of it before that was done")
            return False

        self._fake.machine.enqueue(stream, f"wait for {event}", ready=ready)

    def query(self, event: InterprocessEvent) -> bool:
        """Whether it has done what it recorded last."""
        self.begin("query", event.index)
        self._require_alive("query", event)
        words = event.words
        return bool(words[_COMPLETED] >= words[_RECORDED])

    def shut_down(self) -> None:
        """After the machine has stopped: unmap memory, and close all descriptors."""
        for memory in self.mapped.values():
            if memory.opened:
                memory.segment.enter(os.getpid(), 0)
            memory.segment.unmap()
        self.mapped.clear()
        for page in self._pages:  # mapped still: events that are left have words there
            page.close_descriptor()

    def begin(self, name: str, index: int) -> None:
        self._fake.count_call(name)
        self._fake.require_device(index)
        if self._refused or self._fake.closed:
            raise RuntimeError(f"{name}: the fake device {'was told to refuse' if self._refused else 'is closed'}")

    def _refuse(self, violation: str) -> NoReturn:
        self._fake.report(violation)
        raise RuntimeError(violation)

    def _has_access(self, index: int, uuid: str) -> bool:
        mine = self._fake.uuids[index]
        if uuid == mine:
            return True
        return self._peer_access if isinstance(self._peer_access, bool) else (mine, uuid) in self._peer_access

    def _require_access(self, name: str, index: int, who: bytes) -> None:
        mine = self._fake.uuids[index]
        theirs = [uuid for uuid in self._fake.uuids if _digest(uuid) == who]
        if _digest(mine) != who and not any(self._has_access(index, uuid) for uuid in theirs):
            self._refuse(f"{name}: device {index} ({mine}) has no access to the memory of {theirs or 'its device'}")

    def _require_alive(self, name: str, event: InterprocessEvent) -> None:
        if event.words[_DESTROYED]:
            self._refuse(f"{name}: {event} was destroyed by its process")

    def _handle(self, magic: bytes, segment: Segment, number: int, index: int) -> bytes:
        who = _digest(self._fake.uuids[index])
        return HANDLE.pack(magic, os.getpid(), segment.fd, number, segment.nonce(), who).ljust(HANDLE_SIZE, b"\0")

    def _read(self, magic: bytes, handle: bytes) -> tuple[int, int, int, bytes, bytes]:
        if len(handle) != HANDLE_SIZE or handle[:4] != magic:
            raise RuntimeError("invalid handle")
        _, pid, fd, number, nonce, who = HANDLE.unpack_from(handle)
        if pid == os.getpid():
            self._refuse("opened in the process that exported it")
        return pid, fd, number, nonce, who

    def _take(self, index: int, address: int, opened: bool) -> Memory:
        """Strike a range off, once the device has done what it was given."""
        name = "close" if opened else "free"
        memory = self.mapped.get(address)
        if memory is None or memory.opened != opened or memory.index != index:
            self._refuse(f"{name}: {address:#x} is not such memory of device {index}")
        if not self._fake.machine.settle(index):
            self._refuse(f"{name}: device {index} did not come to an end with what it was given")
        with self._fake.machine.lock:
            del self.mapped[address]
        return memory

    def _trouble(self, address: int, size: int, index: int) -> str:
        """Why a device cannot use a range; empty if it can."""
        for start, memory in self.mapped.items():
            if start <= address < start + memory.size:
                if address + size > start + memory.size:
                    return f"{size} bytes at {address:#x} go past the end of their memory"
                if memory.opened:
                    return "" if memory.index == index else f"the memory was opened for device {memory.index}"
                return "" if self._has_access(index, self._fake.uuids[memory.index]) else "no access to that device"
        return self._fake.trouble(address, size, index, self._has_access)

    def _copy(self, target: int, source: int, size: int) -> None:
        for address in (target, source):
            if not self._fake.is_mapped(address, size) and not any(
                start <= address < start + memory.size for start, memory in self.mapped.items()
            ):
                raise RuntimeError(f"the memory at {address:#x} is gone")
        ctypes.memmove(target, source, size)


def _digest(uuid: str) -> bytes:
    return hashlib.blake2b(uuid.encode(), digest_size=16).digest()


def _address(page: Segment, number: int) -> int:
    return page.base + number * _WORDS * 8
