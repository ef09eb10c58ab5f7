"""CUDA's runtime library by ctypes, without a device: finding it, its functions, and what is made of its errors.

The library itself is real where there is one; without a device each call that needs one fails, with the driver's own
words. That copies and events work is seen in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import glob
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiorpc.channels.cuda_runtime import (
    HANDLE_SIZE,
    SIGNATURES,
    CudaRuntime,
    MemoryHandle,
    bundled_libraries,
    choose_library,
    find_library,
    find_runtime,
    mapped_libraries,
    open_runtime,
)

# Where NVIDIA's installers put it. A process whose torch has no CUDA may load any: there is no other to get in its way.
INSTALLED = "/usr/local/cuda*/lib*/libcudart.so.1[23]"


def library_path() -> str | None:
    """torch's own, or one that is installed."""
    return find_library() or next(iter(sorted(glob.glob(INSTALLED))), None)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """A real runtime library."""
    path = library_path()
    if path is None:
        pytest.skip("no CUDA runtime library on this machine")
    return ctypes.CDLL(path)


@pytest.fixture
def runtime(library: ctypes.CDLL) -> CudaRuntime:
    """Calls reach the real library at once."""
    return CudaRuntime(library, device=lambda index: nullcontext(), current=lambda: -1)


without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_the_library_has_each_function(library: ctypes.CDLL) -> None:
    """By the names in the table."""
    missing = [name for name in SIGNATURES if not hasattr(library, name)]
    assert not missing


def test_a_handle_has_the_size_that_the_driver_writes() -> None:
    """64 bytes; any less and the driver would write behind it."""
    assert ctypes.sizeof(MemoryHandle) == HANDLE_SIZE == 64
    assert bytes(MemoryHandle.from_buffer_copy(bytes(range(64)))) == bytes(range(64))


@without_device
@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("cudaGetDeviceCount", lambda runtime: runtime.count()),
        ("cudaMalloc", lambda runtime: runtime.allocate(3, 1)),
        ("cudaFree", lambda runtime: runtime.free(3, 1 << 40)),
        ("cudaIpcGetMemHandle", lambda runtime: runtime.export(3, 1 << 40)),
        ("cudaIpcOpenMemHandle", lambda runtime: runtime.open(3, bytes(64))),
        ("cudaIpcCloseMemHandle", lambda runtime: runtime.close(3, 1 << 40)),
    ],
)
def test_an_error_names_call_device_and_reason(runtime: CudaRuntime, name: str, act: Any) -> None:
    """In the library's own words, with the number; nothing crashes on what it is given."""
    with pytest.raises(RuntimeError, match=rf"^{name}( on cuda:3)?: \w.* \(cudaError\w+, [1-9]\d*\)$") as caught:
        act(runtime)
    assert ("on cuda:3" in str(caught.value)) == (name != "cudaGetDeviceCount")


class Recording:
    """In place of the library: functions that make a note of how they are called and say what they are told to.

    By the name of a function: the codes that it returns, one for each call, or what it writes to its first argument, as
    a function of the others.
    """

    def __init__(self, **told: list[int] | Callable[..., int]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._told = told

    def __getitem__(self, name: str) -> Any:
        def function(*arguments: Any) -> Any:
            if name.startswith("cudaGetError"):
                return b"text" if name.endswith("String") else b"name"
            self.calls.append((name, arguments))
            told = self._told.get(name)
            if callable(told):
                arguments[0].value = told(*arguments[1:])
                return 0
            return told.pop(0) if told else 0

        return function

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Lane:
    """A stream, as far as it is asked for here."""

    def __init__(self, device_index: int, cuda_stream: int) -> None:
        self.device_index, self.cuda_stream = device_index, cuda_stream


def recorded(library: Recording, driver: Recording | None = None) -> tuple[CudaRuntime, list[int]]:
    """A runtime over it, and the devices that it made current."""
    entered: list[int] = []

    def device(index: int) -> AbstractContextManager[object]:
        entered.append(index)
        return nullcontext()

    libraries: tuple[Any, Any] = library, driver or Recording()
    return CudaRuntime(*libraries, device=device, current=lambda: 9), entered


def test_each_call_is_made_on_its_device() -> None:
    """The default stream has one number on all devices, and a context is made on whichever is current."""
    library = Recording()
    runtime, entered = recorded(library)
    runtime.allocate(0, 5)
    runtime.free(1, 10)
    runtime.export(2, 10)
    runtime.open(3, bytes(64))
    runtime.close(4, 10)
    runtime.copy(10, 20, 30, Lane(5, 0))
    assert entered == [0, 1, 2, 3, 4, 5]
    runtime.copy(10, 20, 30, Lane(9, 0))
    assert entered == [0, 1, 2, 3, 4, 5], "it is current"
    assert library.calls[-1] == ("cudaMemcpyAsync", (10, 20, 30, 4, 0))


@pytest.mark.parametrize(("asked", "got"), [(0, 2), (1, 2), (2 << 20, 2), ((2 << 20) + 1, 4), (64 << 20, 64)])
def test_allocations_are_whole_pages_of_the_driver(asked: int, got: int) -> None:
    """A handle names a whole allocation of the driver, and smaller ones share one."""
    library = Recording()
    recorded(library)[0].allocate(0, asked)
    assert library.calls[0][1][1] == got << 20


def test_torchs_pools_are_emptied_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hold all that is left; a second refusal is final."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    library = Recording(cudaMalloc=[2, 0])
    recorded(library)[0].allocate(0, 1)
    assert (library.names, len(emptied)) == (["cudaMalloc", "cudaGetLastError", "cudaMalloc"], 1)
    with pytest.raises(RuntimeError, match=r"cudaMalloc on cuda:1: text \(name, 2\)"):
        recorded(Recording(cudaMalloc=[2, 2]))[0].allocate(1, 1)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_handle_of_another_size_is_refused(runtime: CudaRuntime, size: int) -> None:
    """Before the driver sees it."""
    with pytest.raises(RuntimeError, match=f"64 bytes, not {size}"):
        runtime.open(0, bytes(size))
    with pytest.raises(RuntimeError, match=f"64 bytes, not {size}"):
        runtime.open_events(0, [bytes(size)])


@pytest.mark.parametrize(
    ("name", "attributes", "reason"),
    [
        ("NVIDIA H200", {20: 0, 41: 1}, ""),
        ("NVIDIA H200 MIG 1g.18gb", {20: 0, 41: 1}, "is a MIG instance"),
        ("NVIDIA H200", {20: 3, 41: 1}, "compute mode of NVIDIA H200 is exclusive process"),
        ("NVIDIA H200", {20: 0, 41: 0}, "no unified addressing"),
    ],
)
def test_what_stands_in_the_way_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, attributes: dict[int, int], reason: str
) -> None:
    """The name of the device and its attributes are all that is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    library = Recording(cudaDeviceGetAttribute=lambda number, index: attributes[number])
    obstacle = recorded(library)[0].obstacle(0)
    assert reason in obstacle
    assert bool(reason) == bool(obstacle)


def test_a_driver_without_stream_memory_operations_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no driver at all, as far as it can be loaded."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    library: Any = Recording(cudaDeviceGetAttribute=lambda number, index: {20: 0, 41: 1}[number])
    runtime = CudaRuntime(library, device=lambda index: nullcontext())
    assert "no stream memory operations" in runtime.obstacle(0)


def test_words_are_written_and_waited_for_on_the_streams_device() -> None:
    """By the driver's own functions; a thread that has no context yet gets one, which the runtime would see to."""
    library, driver = Recording(), Recording(cuStreamWriteValue32_v2=[201, 0], cuStreamWaitValue32_v2=[1])
    runtime, entered = recorded(library, driver)
    runtime.write_value(4096, 7, Lane(2, 50))
    assert entered == [2]
    assert driver.calls == [("cuStreamWriteValue32_v2", (50, 4096, 7, 0))] * 2
    assert library.calls == [("cudaSetDevice", (2,))]
    with pytest.raises(RuntimeError, match=r"cuStreamWaitValue32_v2 on cuda:1: the driver refuses it \(CUresult 1\)"):
        runtime.wait_value(4096, 7, Lane(1, 50))


def test_memory_that_has_no_address_for_devices_is_not_left_registered() -> None:
    """It would stay locked until the process ends."""
    library = Recording(cudaHostGetDevicePointer=[1])
    with pytest.raises(RuntimeError, match="cudaHostGetDevicePointer"):
        recorded(library)[0].register(4096, 4096)
    assert library.names == ["cudaHostRegister", "cudaHostGetDevicePointer", "cudaGetLastError", "cudaHostUnregister"]


def test_a_device_reaches_itself_and_peers_that_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By uuid; a device that this process does not see cannot be asked about."""
    runtime, _ = recorded(
        Recording(
            cudaGetDeviceCount=lambda: 3, cudaDeviceCanAccessPeer=lambda index, other: int((index, other) == (0, 1))
        )
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc"[index]))
    assert [runtime.reaches(0, uuid) for uuid in "abcd"] == [True, True, False, False]
    assert [runtime.reaches(1, uuid) for uuid in "abcd"] == [False, True, False, False]


MAPS = """\
7f00-7f01 r-xp 00000000 00:22 17 /venv/my packages/nvidia/cu13/lib/libcudart.so.13
7f01-7f02 r--p 00000000 00:22 17 /venv/my packages/nvidia/cu13/lib/libcudart.so.13
7f02-7f03 r--p 00000000 00:22 18 /other/libcudart-d0da41ae.so.12.4.1
7f03-7f04 r--p 00000000 00:22 19 /gone/libcudart.so.13 (deleted)
7f04-7f05 r--p 00000000 00:22 20 /usr/lib/libc.so.6
7f05-7f06 rw-p 00000000 00:00 0
7f06-7f07 r--p 00000000 00:22 20 /usr/lib/libcudart_helper/notes.txt
"""


def test_mapped_libraries_are_found_once_each() -> None:
    """Names with a space or a hash too; a file that was deleted cannot be opened again."""
    assert mapped_libraries(MAPS.splitlines(keepends=True)) == [
        "/venv/my packages/nvidia/cu13/lib/libcudart.so.13",
        "/other/libcudart-d0da41ae.so.12.4.1",
    ]


def test_bundled_libraries_are_those_of_torchs_version(tmp_path: Path) -> None:
    """In the folders of NVIDIA's wheels, and in torch's own."""
    names = ["nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/lib/libcudart_static.a", "torch/lib/libc10.so"]
    names += ["nvidia/cuda_runtime/lib/libcudart.so.12", "torch/lib/libcudart-d0da41ae.so.12.4.1"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert bundled_libraries(tmp_path, "13") == [str(tmp_path / names[0])]
    assert bundled_libraries(tmp_path, "12") == [str(tmp_path / names[3]), str(tmp_path / names[4])]
    assert bundled_libraries(tmp_path, "11") == []


@pytest.mark.parametrize(
    ("mapped", "bundled", "chosen"),
    [
        (["/a/libcudart.so.13"], [], "/a/libcudart.so.13"),
        (["/b/libcudart.so.12", "/a/libcudart.so.13"], [], "/a/libcudart.so.13"),
        (["/b/libcudart.so.13", "/a/libcudart.so.13"], ["/a/libcudart.so.13"], "/a/libcudart.so.13"),
        (["/b/libcudart.so.12"], ["/a/libcudart.so.13"], None),
        ([], ["/a/libcudart.so.13"], "/a/libcudart.so.13"),
        ([], [], None),
    ],
)
def test_no_second_runtime_is_opened(mapped: list[str], bundled: list[str], chosen: str | None) -> None:
    """What is mapped and fits comes first; with others mapped and none that fits nothing is guessed."""
    assert choose_library(mapped, bundled, "13") == chosen


def test_a_torch_without_cuda_has_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies on the machine."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_library() is None
    assert find_runtime() is None


@pytest.mark.parametrize("content", [b"no library", None])
def test_a_library_that_is_none_is_left_alone(tmp_path: Path, content: bytes | None) -> None:
    """Not to be loaded, or without the functions: the channel then does without it."""
    path = tmp_path / "libcudart.so.13"
    if content is not None:
        path.write_bytes(content)
    assert open_runtime(str(path)) is None


def test_a_library_without_the_functions_is_left_alone() -> None:
    """Such as the C library, which is always there."""
    assert ctypes.CDLL("libc.so.6")
    assert open_runtime("libc.so.6") is None
