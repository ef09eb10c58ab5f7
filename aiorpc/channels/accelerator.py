"""What the runtime needs of the devices of this process: two interfaces, and the buffer that lies on a device.

`Accelerator` is memory, streams and events within one process, which every kind of device of torch has. `Interprocess`
is what CUDA adds: memory and events that two processes share. `torch_accelerator.py` and `cuda_runtime.py` are
the real ones; the tests have others, without a device (`tests/fakes`).

What holds for both
1. Work is enqueued on a stream and done later, in order within the stream, in any order between streams. Only
   `synchronize` waits for it, so it is never called on a loop.
2. `wait` makes a stream wait for what the event recorded last when `wait` was called, not for what it records later. An
   event that was never recorded delays nothing.
3. The current streams belong to the thread. A step of a loop that sets them puts them back before it ends.
4. Memory of `empty` belongs to the stream that was current on its device. Call `keep` before using it on another
   stream; then it is not reused before that stream has passed this point.
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
# Objects of the implementation; no other code looks inside.
Stream = Any
Event = Any


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBuffer:
    """Bytes on a device of this process.

    carrier: flat, uint8, contiguous. index: of the device it lies on. target: where it belongs at the receiver, like
    ``cuda:1``; ``cpu`` for the host's memory. ready: the event that a stream must wait for before it reads the bytes;
    None: the work given so far to the current stream of the thread that made this.
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

    All may be called from any thread, and raise RuntimeError with the driver's error. `allocate`, `free`, `open`,
    `close`, `events`, `open_events` and `close_events` may block for milliseconds, or while the device is busy:
    not on a loop.
    """

    def uuid(self, index: int) -> str:
        """The device's own name, the same in all processes."""

    def obstacle(self, index: int) -> str:
        """Why memory and events of that device cannot be shared between processes; empty if they can."""

    def reaches(self, index: int, uuid: str) -> bool:
        """Whether device `index` can read the memory of the device with that uuid."""

    def allocate(self, index: int, size: int) -> int:
        """Memory that can be exported; not out of torch's pools."""

    def free(self, index: int, address: int) -> None:
        """Give it back. No process may still have it open."""

    def export(self, index: int, address: int) -> bytes:
        """The handle with which another process opens it."""

    def open(self, index: int, handle: bytes) -> int:
        """The address, for device `index`, of memory of another process. Once for each handle and process."""

    def close(self, index: int, address: int) -> None:
        """Let go of what `open` gave."""

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Enqueue a copy between addresses that the stream's device reaches."""

    def events(self, index: int, count: int) -> list[Event]:
        """Events that can be exported. They live until `close_events`, or as long as the process."""

    def export_event(self, event: Event) -> bytes:
        """The handle with which another process opens it."""

    def open_events(self, index: int, handles: Sequence[bytes]) -> list[Event]:
        """Events that another process made together, for device `index`; either process may record them and wait for
        them."""

    def close_events(self, events: Sequence[Event]) -> None:
        """Let go of events that were made or opened together. The work enqueued with them must be done, and the other
        process must not use them any more."""

    def record(self, event: Event, stream: Stream, *, again: bool = False) -> None:
        """A `wait` from now on waits for the work that the stream has been given so far. again: repeat a record that
        was interrupted at an unknown point."""

    def wait(self, event: Event, stream: Stream) -> None:
        """The stream does what it is given from now on after what the event recorded last."""

    def query(self, event: Event) -> bool:
        """Whether the recorded work is done."""

    def release(self, event: Event) -> None:
        """The other process is dead, and so is its work: end all waits for what it has recorded. Never blocks."""


class Accelerator(Protocol):
    """The devices of one kind. All may be called from any thread; only `synchronize` blocks."""

    @property
    def kind(self) -> str:
        """As in ``torch.device.type``."""

    @property
    def interprocess(self) -> Interprocess | None:
        """None if these devices share nothing with other processes."""

    def count(self) -> int:
        """How many there are; numbered from 0."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a strided tensor of torch's own types on one of these devices."""

    def carrier(self, tensor: Tensor) -> Tensor:
        """Of a tensor that it `holds`. Shares its memory, and has its storage, strides and offset."""

    def tensor(self, carrier: Tensor, index: int) -> Tensor:
        """The tensor of a carrier, on that device."""

    def empty(self, size: int, index: int) -> Tensor:
        """A flat uint8 carrier of so many bytes; memory of the current stream. Raises torch.OutOfMemoryError."""

    def pinned(self, size: int) -> Tensor:
        """A flat uint8 tensor on the host in pinned memory: copies to and from a device do not occupy the processor."""

    def move(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy between carriers or tensors of `pinned`, of the same size; their memory is not reused before.

        A source or target in ordinary memory of the host is allowed, and may block until the copy is done.
        """

    def current(self, index: int) -> Stream:
        """The current stream of this thread on that device."""

    def fresh(self, index: int) -> Stream:
        """A stream other than the default one, from a pool, in turn."""

    def is_idle(self, stream: Stream) -> bool:
        """Whether it has done all work that it was given."""

    def entered(self, streams: Sequence[Stream]) -> AbstractContextManager[object]:
        """Within it these are the current streams of this thread, each on its device."""

    def keep(self, carrier: Tensor, stream: Stream) -> None:
        """That stream uses the memory, too: see 4."""

    def mark(self, stream: Stream) -> Event:
        """An event of this process that has recorded the stream."""

    def wait(self, event: Event, stream: Stream) -> None:
        """The stream does what it is given from now on after what the event has recorded."""

    def synchronize(self, event: Event) -> None:
        """Block this thread until it is done."""
