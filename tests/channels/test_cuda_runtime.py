"""CUDA's runtime library by ctypes, without a device: finding it, its functions, and what is made of its errors.

The library itself is real where there is one; without a device each call that needs one fails, with the driver's own
words. That copies and events work is seen in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import glob
from contextlib import nullcontext
from pathlib import Path
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


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_handle_of_another_size_is_refused(runtime: CudaRuntime, size: int) -> None:
    """Before the driver sees it."""
    with pytest.raises(RuntimeError, match=f"64 bytes, not {size}"):
        runtime.open(0, bytes(size))
    with pytest.raises(RuntimeError, match=f"64 bytes, not {size}"):
        runtime.open_events(0, [bytes(size)])


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
