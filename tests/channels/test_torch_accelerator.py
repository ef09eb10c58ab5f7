"""Torch's devices as an accelerator, as far as that can be seen without one; `tests/gpu` has the rest.

A module in the way of torch.cuda stands in for the device where only the bookkeeping is looked at: which streams and
which device are current, when, and what is made to wait.
"""

from __future__ import annotations

import ctypes
import glob
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
from aiorpc.channels.torch_accelerator import (
    KNOWN_STREAMS,
    TorchAccelerator,
    find_accelerator,
)


@dataclass(frozen=True)
class Lane:
    """A stream, as far as it is asked for here."""

    device_index: int
    stream_id: int


class Devices:
    """Two devices in the way of torch.cuda: current streams and current device of each thread; 0 was never started."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.broken: Lane | None = None
        self.made = 0
        self.set = 0

    def device_count(self) -> int:
        return 2

    def Stream(self, device: int) -> Lane:  # torch's name
        self.made += 1
        return Lane(device, self.made)

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def current_stream(self, index: int) -> Lane:
        lane: Lane = self._streams.get(index, Lane(index, 0))
        return lane

    @property
    def _streams(self) -> dict[int, Lane]:
        streams: dict[int, Lane] = self._local.__dict__.setdefault("streams", {})
        return streams

    def set_stream(self, lane: Lane) -> None:
        if lane == self.broken:
            raise RuntimeError("no such stream")
        self.set += 1
        self._local.device = lane.device_index
        self._streams[lane.device_index] = lane

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self.current_device()
        self._local.device = index
        try:
            yield
        finally:
            self._local.device = before

    def state(self) -> tuple[int, list[int]]:
        """The current device, and the numbers of the current streams."""
        return self.current_device(), [self.current_stream(index).stream_id for index in range(2)]


@pytest.fixture
def devices() -> Devices:
    return Devices()


@pytest.fixture
def accelerator(devices: Devices) -> TorchAccelerator:
    return TorchAccelerator("cuda", module=devices)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_there_is_none() -> None:
    """find_accelerator says None in place of failing."""
    assert find_accelerator() is None


def test_streams_are_current_inside_and_nothing_has_changed_outside(
    accelerator: TorchAccelerator, devices: Devices
) -> None:
    """Both devices get their stream; afterwards streams and device are those of before."""
    devices.set_stream(Lane(1, 7))
    with accelerator.entered([Lane(0, 1), Lane(1, 2)]):
        assert devices.state() == (1, [1, 2])
    assert devices.state() == (1, [0, 7])


def test_entering_leaves_the_current_device_alone(accelerator: TorchAccelerator, devices: Devices) -> None:
    """A stream of another device does not make it the current one, neither inside nor afterwards."""
    with accelerator.entered([Lane(1, 2)]):
        assert devices.state() == (0, [0, 2])
    assert devices.state() == (0, [0, 0])


def test_a_stream_that_cannot_be_set_leaves_all_as_it_was(accelerator: TorchAccelerator, devices: Devices) -> None:
    """What was entered before the failure is left again."""
    devices.broken = Lane(1, 2)
    with pytest.raises(RuntimeError, match="no such stream"), accelerator.entered([Lane(0, 1), devices.broken]):
        raise AssertionError("entered")
    assert devices.state() == (0, [0, 0])


def test_the_current_stream_is_that_of_now(accelerator: TorchAccelerator, devices: Devices) -> None:
    """However often it was asked for before, and however many there were."""
    for number in [*range(2 * KNOWN_STREAMS), 5, 0, 5]:
        devices.set_stream(Lane(0, number))
        assert accelerator.current(0) == Lane(0, number)
    assert accelerator.current(1) == Lane(1, 0)


PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(2, 3),
    "transposed": lambda: torch.zeros(2, 3).t(),
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "parameter": lambda: nn.Parameter(torch.zeros(2)),
    "requires grad": lambda: torch.zeros(2).requires_grad_(),
    "empty": lambda: torch.empty(0),
}
OTHER: dict[str, Callable[[], torch.Tensor]] = {
    "another device": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "sparse rows": lambda: torch.zeros(2, 3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(2), 0.5, 3, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.strided),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
    "subclass": lambda: torch.zeros(2).as_subclass(Own),
}


class Own(torch.Tensor):
    """A subclass."""


@pytest.fixture
def host() -> TorchAccelerator:
    """One whose kind is the CPU: its tensors can be had anywhere."""
    return TorchAccelerator("cpu", module=Devices())


@pytest.mark.parametrize("name", PLAIN)
def test_it_holds_strided_tensors_of_its_kind(host: TorchAccelerator, name: str) -> None:
    """Such a tensor is its own carrier."""
    tensor = PLAIN[name]()
    assert host.holds(tensor)
    assert host.tensor(host.carrier(tensor), 0) is tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # torch's own
@pytest.mark.parametrize("name", OTHER)
def test_it_holds_no_others(host: TorchAccelerator, name: str) -> None:
    """What is not described by bytes, shape and strides, or lies elsewhere."""
    assert not host.holds(OTHER[name]())


def test_memory_made_in_inference_mode_can_be_written_outside_of_it(host: TorchAccelerator) -> None:
    """The caller's thread may be in inference mode; the thread that copies is not."""
    with torch.inference_mode():
        memory = host.empty(8, 0)
    memory.copy_(torch.arange(8, dtype=torch.uint8))
    assert (memory.dtype, memory.shape, memory.tolist()) == (torch.uint8, (8,), list(range(8)))


# --- cuda's runtime library by ctypes, without a device ---------------------------------------------------------------


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
