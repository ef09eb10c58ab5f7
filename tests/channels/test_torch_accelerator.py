"""Torch's devices as an accelerator, as far as that can be seen without one; `tests/gpu` has the rest.

A module in the way of torch.cuda stands in for the device where only the bookkeeping is looked at: which streams and
which device are current, when, and what is made to wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

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
