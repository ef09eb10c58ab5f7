"""What the runtime needs of the devices of this process: two interfaces, and the buffer that lies on a device.

`Accelerator` is memory, streams and events within one process: what every kind of device of torch has. `Interprocess`
is what CUDA has besides: memory and events that two processes share. `torch_accelerator.py` and `cuda_runtime.py` are
the real ones; the tests have others, without a device (`tests/fakes`).

What holds for both
1. Work is enqueued on a stream and done later, in order within the stream, in any order between streams. Only
   `synchronize` waits for it, and so is never called on a loop.
2. `wait` makes a stream wait for what the event recorded last when `wait` was called, not for what it records later. An
   event that was never recorded holds up nothing.
3. The current streams belong to the thread. A step of a loop that sets them puts them back before it ends.
4. Memory of `empty` belongs to the stream that was current on its device; before it is used on another one, `keep` says
   so, and it is not used again before that stream has come so far.
5. A tensor's *carrier* is the tensor that torch's functions for storages work on: for real devices the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from ..protocol.packing import shown

Tensor = torch.Tensor
# What the implementation has for them; nobody else looks inside.
Stream = Any
Event = Any


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBuffer:
    """Bytes on a device of this process.

    carrier: flat, uint8, contiguous. index: of the device it lies on. target: where it belongs at the receiver, like
    ``cuda:1``; ``cpu`` for the host's memory. ready: what a stream has to wait for before it reads them; None: for
    what the current stream of the thread that made this has been given.
    """

    carrier: Tensor
    index: int
    target: str
    ready: Event | None = None

    def __len__(self) -> int:
        """In bytes."""
        return self.carrier.numel()


@lru_cache(128)
def device_index(target: object) -> int:
    """Of a target like ``cuda:1`` its number; -1 for the host. Raises ValueError, or TypeError for what has no hash."""
    if type(target) is not str:
        raise ValueError(f"{shown(target)} is no device")
    if target == "cpu":
        return -1
    _, colon, number = target.partition(":")
    if not colon or not number.isdigit():
        raise ValueError(f"{shown(target)} is no device")
    return int(number)


class Interprocess(Protocol):
    """Memory and events shared with another process of the host. Addresses and sizes in bytes.

    All may be called from any thread, and raise RuntimeError with what the driver said. `allocate`, `free`, `open`,
    `close`, `events`, `open_events` and `close_events` may block for milliseconds, or while the device is busy:
    not on a loop.
    """

    def uuid(self, index: int) -> str:
        """The device's own name, whatever number a process knows it by."""

    def obstacle(self, index: int) -> str:
        """Why memory and events of that device cannot be shared between processes; empty if they can."""

    def reaches(self, index: int, uuid: str) -> bool:
        """Whether device `index` can read the memory of the device with that uuid."""

    def allocate(self, index: int, size: int) -> int:
        """Memory that can be exported; not out of torch's pools."""

    def free(self, index: int, address: int) -> None:
        """Give it back. Nobody may have it open any more."""

    def export(self, index: int, address: int) -> bytes:
        """What another process opens it by."""

    def open(self, index: int, handle: bytes) -> int:
        """The address, for device `index`, of memory of another process. Once for each handle and process."""

    def close(self, index: int, address: int) -> None:
        """Let go of what `open` gave."""

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Enqueue a copy between addresses that the stream's device reaches."""

    def events(self, index: int, count: int) -> list[Event]:
        """Events that can be exported. They live until `close_events`, or as long as the process."""

    def export_event(self, event: Event) -> bytes:
        """What another process opens it by."""

    def open_events(self, index: int, handles: Sequence[bytes]) -> list[Event]:
        """Events that another process made together, for device `index`; either process may record them and wait for
        them."""

    def close_events(self, events: Sequence[Event]) -> None:
        """Let go of events that were made or opened together: what was enqueued with them is done, and nobody else uses
        them."""

    def record(self, event: Event, stream: Stream, *, again: bool = False) -> None:
        """What the stream has been given so far is what those who wait from now on wait for. again: after a record that
        was interrupted, and of which nobody knows how far it came."""

    def wait(self, event: Event, stream: Stream) -> None:
        """What the stream is given from now on comes after what the event recorded last."""

    def query(self, event: Event) -> bool:
        """Whether that is done."""

    def release(self, event: Event) -> None:
        """The other process is dead, and its devices with it: nobody waits for what it has recorded. Never blocks."""


class Accelerator(Protocol):
    """The devices of one kind. All may be called from any thread; only `synchronize` blocks."""

    @property
    def kind(self) -> str:
        """As in ``torch.device.type``."""

    @property
    def interprocess(self) -> Interprocess | None:
        """None if these devices have no such thing."""

    def count(self) -> int:
        """How many there are; numbered from 0."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a strided tensor of torch's own types that lies on one of these."""

    def carrier(self, tensor: Tensor) -> Tensor:
        """Of a tensor that it `holds`. Shares its memory, and has its storage, strides and offset."""

    def tensor(self, carrier: Tensor, index: int) -> Tensor:
        """The tensor of a carrier, on that device."""

    def empty(self, size: int, index: int) -> Tensor:
        """A flat uint8 carrier of so many bytes; memory of the current stream. Raises torch.OutOfMemoryError."""

    def pinned(self, size: int) -> Tensor:
        """A flat uint8 tensor on the host that copies to and from a device go past the processor."""

    def move(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy between carriers or tensors of `pinned`, of the same size; their memory is not reused before.

        A source or target in ordinary memory of the host is allowed, and may make it wait for the copy.
        """

    def current(self, index: int) -> Stream:
        """The current stream of this thread on that device."""

    def fresh(self, index: int) -> Stream:
        """A stream other than the default one, in turn out of a pool."""

    def is_idle(self, stream: Stream) -> bool:
        """Whether it has done all that it was given."""

    def entered(self, streams: Sequence[Stream]) -> AbstractContextManager[object]:
        """Within it these are the current streams of this thread, each on its device."""

    def keep(self, carrier: Tensor, stream: Stream) -> None:
        """The memory is in use on that stream, too: see 4."""

    def mark(self, stream: Stream) -> Event:
        """An event of this process that has recorded the stream."""

    def wait(self, event: Event, stream: Stream) -> None:
        """What the stream is given from now on comes after what the event has recorded."""

    def synchronize(self, event: Event) -> None:
        """Block this thread, and no other, until it is done."""
