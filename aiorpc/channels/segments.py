"""Segments: memory files that processes of one host map, and the system calls that they need.

A mapping is shared with other workers, but never with a child that this process forks: at a fork each mapping becomes
private in the child, at the same address (`_Mapped`). The child reads the old contents; its writes stay its own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import numpy.typing

from ..undoing import on_error
from .space import MIB, PAGE, SLAB

Bytes = numpy.typing.NDArray[numpy.uint8]

HEADER = PAGE  # bytes of a segment that the nonce has for itself; blocks begin on a page
NONCE_SIZE = 16

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
_STEP = 4 * MIB  # of memory touched at a time
# A file that is shortened would kill the processes that read what was cut off.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_NOEXEC_SEAL = 8  # of memfd_create; kernels before 6.3 do not know it, and later ones may insist on it
#: Of fcntl: afterwards only existing mappings write to the file, and no pages can be taken from it.
SEAL_FUTURE_WRITE = 0x10
MADV_DONTNEED = 4

# The ioctl of /proc/self/pagemap that finds pages by their kind, since Linux 6.7. Its argument is twelve numbers.
_PAGEMAP_SCAN, _SCAN_ARGUMENT, _SCANNED = 0xC0606610, struct.Struct("=12Q"), struct.Struct("=3Q")
_PAGE_OF_FILE, _PAGE_PRESENT, _PAGE_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_MOST_STRETCHES = 64  # of written pages; if there are more, all pages are dropped together

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


class OwnedDescriptor:
    """The number of an open file, which is closed when the last reference to this object goes. In any thread.

    `weakref.finalize` fails at the interpreter's exit if another thread, such as one of ours that prepares memory,
    registers or uses up a finalizer meanwhile.
    """

    __slots__ = ("fd",)
    _close = staticmethod(os.close)  # at the interpreter's exit the module's names may be gone

    def __init__(self, fd: int) -> None:
        self.fd: int = fd

    def close(self) -> None:
        """Close it now. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)

    __del__ = close


class _Memory(mmap.mmap):
    """A mapped file, with a descriptor of it while it is mapped, which a forked child uses to map it anew.

    An mmap of a file would keep another descriptor. This one is anonymous, and the file is mapped in its place.
    """

    file: OwnedDescriptor

    def map(self, fd: int) -> None:
        """Map a file in its place, shared, and keep a descriptor of it. Raises OSError."""
        self.file = OwnedDescriptor(os.dup(fd))
        address = numpy.frombuffer(self, numpy.uint8).ctypes.data
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(address, len(self), access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), "a file cannot be mapped")

    def make_private(self) -> None:
        """In a forked child, before anything of the program runs: make the mapping private.

        That takes two system calls of the child, for any size.
        """
        address = numpy.frombuffer(self, numpy.uint8).ctypes.data
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        if _libc.mmap(address, len(self), access, flags, self.file.fd, 0) == _FAILED:
            # The system has no memory to promise. Then a write kills the child; it never changes the parent's memory.
            _libc.mprotect(address, len(self), mmap.PROT_READ)
        self.file.close()


class _Mapped:
    """All mappings of shared memory of this process: a fork concerns the process, and tensors over such memory outlive
    their worker. This and the list of workers are the only state of the whole process."""

    def __init__(self) -> None:
        self._memories: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self._hooked = False

    def add(self, memory: _Memory) -> None:
        """A forked child gets it as private memory."""
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(after_in_child=self._after_fork)
        self._memories.add(memory)

    def _after_fork(self) -> None:
        memories, self._memories = list(self._memories), weakref.WeakSet()
        for memory in memories:
            memory.make_private()


_mapped = _Mapped()


class Mapping:
    """A file mapped into memory, shared, readable and writable. It stays mapped while something refers to it.

    In a forked child it is private, see the module.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Map `size` bytes of `fd`, which may be closed afterwards. Raises OSError."""
        self.memory: _Memory = _Memory(-1, size, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        self.memory.map(fd)
        _mapped.add(self.memory)
        self.size = size
        # This array is an export of the mmap, which therefore cannot be closed.
        self.array: Bytes = numpy.frombuffer(self.memory, numpy.uint8)
        self.address: int = self.array.ctypes.data

    def write(self, data: memoryview, at: int) -> None:
        """Write to the file, without the mapping. Releases the GIL. Raises OSError when there is no memory for it."""
        while data:
            count = os.pwrite(self.memory.file.fd, data, at)
            data, at = data[count:], at + count

    def touch(
        self, start: int, end: int, advice: int = MADV_POPULATE_WRITE, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Make these pages present, without changing their contents. Only a hint: a refusal is ignored.

        stop: asked now and then whether to give up.
        """
        for at in range(start // PAGE * PAGE, end, _STEP):
            if stop():
                return
            size = min(_STEP, end - at)
            if _libc.madvise(self.address + at, size, advice) == 0:  # releases the GIL, unlike mmap's
                continue
            if ctypes.get_errno() != errno.EINVAL:
                return
            self.memory[at : at + size : PAGE]  # before Linux 5.14: reading a page of such a file makes it present


def map_private(fd: int, start: int, size: int) -> Bytes:
    """Bytes of a file, mapped for this process alone: writes do not reach the file. Raises OSError.

    A page is shared with the file until it is written to; no other process may write to it meanwhile.
    """
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    return numpy.frombuffer(_private(fd, start + size - first, first), numpy.uint8, size, start - first)


def _private(fd: int, size: int, start: int = 0) -> mmap.mmap:
    # An mmap of a file keeps a descriptor of it, and a process may map more blocks than it may have descriptors. This
    # one is anonymous, and the file is mapped in its place; it is unmapped with the mmap.
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(-1, size, flags, access)
    address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
    if _libc.mmap(address, size, access, flags | _MAP_FIXED, fd, start) == _FAILED:
        raise OSError(ctypes.get_errno(), "a file cannot be mapped")
    return memory


class PrivateMapping:
    """A file mapped for one reader: readable and writable, and its writes stay here.

    A page takes memory of its own once it is written to. The mapping stays while something refers to it, also in a
    forked child, for which it is private as well.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Map `size` bytes of `fd`, which may be closed afterwards. Raises OSError."""
        self.memory: mmap.mmap = _private(fd, size)
        self.size = size
        self._array: Bytes = numpy.frombuffer(self.memory, numpy.uint8)  # keeps the mmap from being closed

    def forget_writes(self) -> None:
        """Drop the written pages: they show the contents of the file again. The mapping must not be in use.

        The others stay mapped if the system can tell them apart: each would cost the next reader a fault.
        """
        begin: int = self._array.ctypes.data
        for start, end in _written(begin, begin + self.size):
            if _libc.madvise(start, end - start, MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), "the pages of a private mapping cannot be dropped")


def _written(begin: int, end: int) -> list[tuple[int, int]]:
    """The ranges of a private mapping of a file that were written to; all of it if the system cannot tell.

    A written page does not belong to the file any more, in memory or swapped out.
    """
    end = -(-end // PAGE) * PAGE
    found = bytearray(_MOST_STRETCHES * _SCANNED.size)
    place = ctypes.addressof((ctypes.c_char * len(found)).from_buffer(found))
    inverted, kinds = _PAGE_OF_FILE, _PAGE_PRESENT | _PAGE_SWAPPED
    argument = (_SCAN_ARGUMENT.size, 0, begin, end, 0, place, _MOST_STRETCHES, 0, inverted, _PAGE_OF_FILE, kinds, kinds)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            count = fcntl.ioctl(pages, _PAGEMAP_SCAN, bytearray(_SCAN_ARGUMENT.pack(*argument)))
    except OSError:
        return [(begin, end)]
    if count >= _MOST_STRETCHES:
        return [(begin, end)]
    return [_SCANNED.unpack_from(found, at * _SCANNED.size)[:2] for at in range(count)]


@dataclass(frozen=True, eq=False)
class Segment:
    """One memory file of the arena. size: bytes. nonce: its first bytes, which prove to a peer that it is this memory.

    reserved: all of its memory is taken from the start, because getting it later could fail in the middle of a copy.
    """

    index: int
    fd: int
    size: int
    nonce: bytes
    mapping: Mapping = field(repr=False)
    reserved: bool = False
    states: bytearray = field(repr=False, default_factory=bytearray)

    def resident(self) -> int:
        """Bytes of memory that it takes up. Raises OSError once it is closed."""
        return os.fstat(self.fd).st_blocks * 512


def create_segment(index: int, size: int, *, may_reserve: bool = True) -> Segment:
    """A segment of `size` bytes, in a sealed memory file, or, where the system refuses that, in a file without a name.

    That file is in `AIORPC_SHM_DIR`, by default /dev/shm. Raises OSError if neither is possible, or if its memory would
    have to be taken from the start and must not be (may_reserve).
    """
    if not may_reserve and _strict_overcommit():
        raise OSError(errno.ENOMEM, "memory would be held before it is needed")
    try:
        fd, reserved = _memory_file(size, _SEALS), _strict_overcommit()
    except (OSError, AttributeError):  # the system has no such call, or a filter of system calls refuses it
        if not may_reserve:
            raise
        fd, reserved = _unnamed_file(size), True
    with on_error(os.close, fd):
        if reserved:
            os.posix_fallocate(fd, 0, size)
        nonce = os.urandom(NONCE_SIZE)
        os.pwrite(fd, nonce, 0)
        return Segment(index, fd, size, nonce, Mapping(fd, size), reserved, bytearray(-(-size // SLAB)))


def create_read_only(size: int) -> tuple[Mapping, bytes]:
    """A memory file that this process alone can write to, through the mapping that keeps it; and its first bytes.

    Raises OSError if the system has no such files. A file in a folder will not do: other processes could write to it.
    """
    try:
        fd = _memory_file(size, 0)  # sealed below, once it is mapped
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    try:
        if _strict_overcommit():
            os.posix_fallocate(fd, 0, size)
        nonce = os.urandom(NONCE_SIZE)
        os.pwrite(fd, nonce, 0)
        mapping = Mapping(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | SEAL_FUTURE_WRITE)
    finally:
        os.close(fd)
    return mapping, nonce


def _memory_file(size: int, seals: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("aiorpc", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("aiorpc", flags)
    with on_error(os.close, fd):
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _unnamed_file(size: int) -> int:
    folder = os.environ.get("AIORPC_SHM_DIR") or "/dev/shm"
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), folder)
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with on_error(os.close, fd):
        space = os.fstatvfs(fd)
        if size > space.f_bavail * space.f_frsize // 2:  # leave half to other programs
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        os.ftruncate(fd, size)
    return fd


def _strict_overcommit() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def punch(fd: int, start: int, size: int) -> bool:
    """Give the memory of a range back to the system; it reads as zeros then. False: not possible."""
    punched: int = _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size))
    return punched == 0
