"""CUDA's runtime library by ctypes: memory and events that two processes share, as an `Interprocess`.

torch uses the same library, so addresses, streams and errors are in common. It is the copy that torch has loaded;
another one is never opened. Memory comes from cudaMalloc and not from torch's pools, whose memory cannot always be
exported (expandable segments, cudaMallocAsync).

Three things that the library leaves to its user
1. It works on the thread's current device, and makes a context (500 MB) on it if there is none: each call here sets the
   device that it is about, and then restores the thread's own as torch does.
2. A handle names a whole allocation of the driver, and the driver puts small ones together: sizes are multiples of
   2 MiB.
3. It keeps an error until it is read, and torch would later take it for its own: it is cleared here.
"""

from __future__ import annotations

import ctypes
import glob
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from .accelerator import Stream
from .signals import Signal, make_signals, open_signals

HANDLE_SIZE = 64
GRANULE = 2 << 20  # in bytes

MEMCPY_DEFAULT = 4  # the direction follows from the addresses
LAZY_ENABLE_PEER_ACCESS = 1
ATTRIBUTE_COMPUTE_MODE = 20
ATTRIBUTE_UNIFIED_ADDRESSING = 41
COMPUTE_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}  # 0: the default one
HOST_FLAGS = 1 | 2  # locked for all devices, and with an address for them
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201  # of the driver: the thread has none yet

_Guard = Callable[[int], AbstractContextManager[object]]
_NOTHING = nullcontext()


class MemoryHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``: passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_SIZE),)


_int, _address = ctypes.c_int, ctypes.c_void_p
_int_out, _address_out = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)

# name -> the types of its arguments; each returns a cudaError_t. Without them ctypes would cut addresses to 32 bits.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "cudaGetDeviceCount": (_int_out,),
    "cudaMalloc": (_address_out, ctypes.c_size_t),
    "cudaFree": (_address,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(MemoryHandle), _address),
    "cudaIpcOpenMemHandle": (_address_out, MemoryHandle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_address,),
    "cudaMemcpyAsync": (_address, _address, ctypes.c_size_t, _int, _address),
    "cudaDeviceCanAccessPeer": (_int_out, _int, _int),
    "cudaDeviceGetAttribute": (_int_out, _int, _int),
    "cudaGetLastError": (),
    "cudaHostRegister": (_address, ctypes.c_size_t, ctypes.c_uint),
    "cudaHostGetDevicePointer": (_address_out, _address, ctypes.c_uint),
    "cudaHostUnregister": (_address,),
    "cudaSetDevice": (_int,),
}
# Functions of the driver's library. Arguments: a stream, an address, a value, flags.
DRIVER_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuStreamWriteValue32_v2": (_address, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_address, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint),
}
DRIVER = "libcuda.so.1"
TEXTS = ("cudaGetErrorString", "cudaGetErrorName")


def mapped_libraries(maps: Iterable[str]) -> list[str]:
    """The runtime libraries among the lines of a ``/proc/<pid>/maps``, each once."""
    found = (re.search(r"(/\S.*/libcudart[^/]*\.so[^/ ]*)$", line.rstrip("\n")) for line in maps)
    return list(dict.fromkeys(match[1] for match in found if match))


def bundled_libraries(packages: Path, major: str) -> list[str]:
    """Those that torch's wheels bring along, in the folder of installed packages: where torch itself looks."""
    folders = (f"nvidia/cu{major}/lib", "nvidia/cuda_runtime/lib", "torch/lib")
    return [
        str(packages / folder / name)
        for folder in folders
        for name in sorted(glob.glob(f"libcudart*.so.{major}*", root_dir=packages / folder))
    ]


def choose_library(mapped: list[str], bundled: list[str], major: str) -> str | None:
    """The library that torch works with: a mapped one of torch's version of CUDA, or the one that torch's wheels bring.

    A process may have several mapped, of other packages. None if none fits.
    """
    fitting = [path for path in mapped if f".so.{major}" in path] if mapped else bundled
    return next((path for path in fitting if path in bundled), fitting[0] if fitting else None)


def find_library() -> str | None:
    """The path of the runtime library that this process's torch uses; None without CUDA, or if it is not found."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.partition(".")[0]
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            mapped = mapped_libraries(maps)
    except OSError:
        mapped = []
    return choose_library(mapped, bundled_libraries(Path(torch.__file__).parents[1], major), major)


def find_runtime() -> CudaRuntime | None:
    """The runtime of this process, if it is found and complete."""
    path = find_library()
    return None if path is None else open_runtime(path)


def open_runtime(path: str) -> CudaRuntime | None:
    """The runtime library of that path, if it can be loaded and is complete."""
    try:
        library = ctypes.CDLL(path)
        try:
            return CudaRuntime(library, ctypes.CDLL(DRIVER))
        except (OSError, AttributeError):  # no driver, or one without these functions
            return CudaRuntime(library)
    except (OSError, AttributeError):  # not to be loaded; without one of the functions
        return None


class CudaRuntime:
    """See `Interprocess`. device: the guard that makes a device current for a while."""

    def __init__(
        self,
        library: ctypes.CDLL,
        driver: ctypes.CDLL | None = None,
        *,
        device: _Guard = torch.cuda.device,
        current: Callable[[], int] = torch.cuda.current_device,
    ) -> None:
        """driver: its library; without it processes share no events. current: gives the thread's current device."""
        self._functions = _declared(library, SIGNATURES)
        self._driver_functions = {} if driver is None else _declared(driver, DRIVER_SIGNATURES)
        self._texts: list[Callable[[int], bytes]] = []
        for name in TEXTS:
            function = library[name]
            function.argtypes, function.restype = (ctypes.c_int,), ctypes.c_char_p
            self._texts.append(function)
        self._device = device
        self._current = current
        self._uuids: dict[int, str] = {}

    # Devices.

    def count(self) -> int:
        """How many devices this process sees."""
        count = ctypes.c_int()
        self._call("cudaGetDeviceCount", None, count)
        return count.value

    def uuid(self, index: int) -> str:
        """The device's own name, the same in all processes. Of a MIG instance it may be the whole GPU's."""
        if index not in self._uuids:
            self._uuids[index] = str(torch.cuda.get_device_properties(index).uuid)
        return self._uuids[index]

    def obstacle(self, index: int) -> str:
        """Why memory and events of that device cannot be shared between processes; empty if no obstacle is known.

        Sharing may still fail, for example between containers with process namespaces of their own.
        """
        name = torch.cuda.get_device_name(index)
        if " MIG " in f"{name} ":  # the driver's names for instances: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
            return f"{name} is a MIG instance"
        mode = self._attribute(ATTRIBUTE_COMPUTE_MODE, index)
        if mode:
            return f"the compute mode of {name} is {COMPUTE_MODES.get(mode, mode)}"
        if not self._driver_functions:
            return f"the driver of {name} has no stream memory operations"
        if not self._attribute(ATTRIBUTE_UNIFIED_ADDRESSING, index):
            return f"{name} has no unified addressing"
        return ""

    def reaches(self, index: int, uuid: str) -> bool:
        """Whether device `index` can read the memory of the device with that uuid.

        No for a device that this process does not see: the library cannot be asked about it, and a copy from its memory
        might fault.
        """
        if uuid == self.uuid(index):
            return True
        peers = (other for other in range(self.count()) if other != index and self.uuid(other) == uuid)
        return any(self._can_access(index, other) for other in peers)

    def _can_access(self, index: int, other: int) -> bool:
        answer = ctypes.c_int()
        self._call("cudaDeviceCanAccessPeer", index, answer, index, other)
        return bool(answer.value)

    def _attribute(self, number: int, index: int) -> int:
        value = ctypes.c_int()
        self._call("cudaDeviceGetAttribute", index, value, number, index)
        return value.value

    # Memory.

    def allocate(self, index: int, size: int) -> int:
        """Memory that can be exported, rounded up to 2 MiB; not from torch's pools, which are emptied if necessary."""
        size = max(1, -(-size // GRANULE)) * GRANULE
        address = ctypes.c_void_p()
        with self._device(index):
            code = self._try("cudaMalloc", address, size)
            if code == OUT_OF_MEMORY:
                torch.cuda.empty_cache()
                code = self._try("cudaMalloc", address, size)
            self._check("cudaMalloc", index, code)
        return self._value(address)

    def free(self, index: int, address: int) -> None:
        """Give it back. No process may still have it open. Waits for all work of the device."""
        with self._device(index):
            self._call("cudaFree", index, address)

    def export(self, index: int, address: int) -> bytes:
        """The handle with which another process opens it: 64 bytes."""
        handle = MemoryHandle()
        with self._device(index):
            self._call("cudaIpcGetMemHandle", index, handle, address)
        return bytes(handle)

    def open(self, index: int, handle: bytes) -> int:
        """The address, for device `index`, of memory of another process. Once for each handle and process."""
        address = ctypes.c_void_p()
        with self._device(index):
            self._call("cudaIpcOpenMemHandle", index, address, _memory_handle(handle), LAZY_ENABLE_PEER_ACCESS)
        return self._value(address)

    def close(self, index: int, address: int) -> None:
        """Let go of what `open` gave. Waits for all work of the device."""
        with self._device(index):
            self._call("cudaIpcCloseMemHandle", index, address)

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Enqueue a copy between addresses that the stream's device reaches."""
        index = stream.device_index
        with self._on(index):
            self._call("cudaMemcpyAsync", index, target, source, size, MEMCPY_DEFAULT, stream.cuda_stream)

    def _on(self, index: int) -> AbstractContextManager[object]:
        """Make the device current in order to enqueue on one of its streams; nothing to do if it is current already.

        The default stream has the number 0 on each device: only the current device tells which one is meant.
        """
        return _NOTHING if self._current() == index else self._device(index)

    # Events: see `signals`.

    def events(self, index: int, count: int) -> list[Signal]:
        """Events that can be exported. They live until `close_events`, or as long as the process."""
        with self._device(index):
            return make_signals(self, index, count)

    def export_event(self, event: Signal) -> bytes:
        """The handle with which another process opens it: 64 bytes."""
        return event.handle

    def open_events(self, index: int, handles: Sequence[bytes]) -> list[Signal]:
        """Events that another process has made together, for device `index`."""
        with self._device(index):
            return open_signals(self, index, handles)

    def close_events(self, events: Sequence[Signal]) -> None:
        """Let go of events that were made or opened together. The work enqueued with them must be done."""
        if events:
            with self._device(events[0].index):
                events[0].close()  # the memory of all of them

    def record(self, event: Signal, stream: Stream, *, again: bool = False) -> None:
        """A `wait` from now on waits for the work that the stream has been given so far."""
        event.record(stream, again=again)

    def wait(self, event: Signal, stream: Stream) -> None:
        """The stream does what it is given from now on after what the event recorded last."""
        event.wait(stream)

    def query(self, event: Signal) -> bool:
        """Whether the recorded work is done."""
        return event.done()

    def release(self, event: Signal) -> None:
        """The other process is dead: end all waits for what it has recorded."""
        event.release()

    def register(self, address: int, size: int) -> int:
        """See `Memops`."""
        found = ctypes.c_void_p()
        self._call("cudaHostRegister", None, address, size, HOST_FLAGS)
        try:
            self._call("cudaHostGetDevicePointer", None, found, address, 0)
        except RuntimeError:
            self.unregister(address)
            raise
        return self._value(found)

    def unregister(self, address: int) -> None:
        """See `Memops`."""
        self._call("cudaHostUnregister", None, address)

    def write_value(self, address: int, value: int, stream: Stream) -> None:
        """See `Memops`."""
        self._enqueue("cuStreamWriteValue32_v2", address, value, stream)

    def wait_value(self, address: int, value: int, stream: Stream) -> None:
        """See `Memops`."""
        self._enqueue("cuStreamWaitValue32_v2", address, value, stream)

    def _enqueue(self, name: str, address: int, value: int, stream: Stream) -> None:
        index = stream.device_index
        with self._on(index):
            function = self._driver_functions[name]
            code = function(stream.cuda_stream, address, value, 0)
            if code == INVALID_CONTEXT:  # the thread has no context yet; the driver, unlike the runtime, makes none
                self._call("cudaSetDevice", index, index)
                code = function(stream.cuda_stream, address, value, 0)
        if code:
            raise RuntimeError(f"{name} on cuda:{index}: the driver refuses it (CUresult {code})")

    # Calls.

    def _try(self, name: str, *arguments: object) -> int:
        """The error's number, 0 for none. Objects of ctypes are passed as pointers where a pointer is declared."""
        code = self._functions[name](*arguments)
        if code:
            self._functions["cudaGetLastError"]()  # forgets it
        return code

    def _call(self, name: str, index: int | None, /, *arguments: object) -> None:
        self._check(name, index, self._try(name, *arguments))

    def _check(self, name: str, index: int | None, code: int) -> None:
        if code:
            text, error = (function(code).decode(errors="replace") for function in self._texts)
            place = "" if index is None else f" on cuda:{index}"
            raise RuntimeError(f"{name}{place}: {text} ({error}, {code})")

    def _value(self, address: ctypes.c_void_p) -> int:
        return address.value or 0


def _declared(library: ctypes.CDLL, signatures: dict[str, tuple[type, ...]]) -> dict[str, Callable[..., int]]:
    """Functions of a library by their names, with their types. AttributeError if it lacks one."""
    functions: dict[str, Callable[..., int]] = {}
    for name, arguments in signatures.items():
        function = library[name]  # an object of our own: other packages may have declared other types
        function.argtypes, function.restype = arguments, ctypes.c_int
        functions[name] = function
    return functions


def _memory_handle(handle: bytes) -> MemoryHandle:
    if len(handle) != HANDLE_SIZE:
        raise RuntimeError(f"a handle of CUDA has {HANDLE_SIZE} bytes, not {len(handle)}")
    return MemoryHandle.from_buffer_copy(handle)
