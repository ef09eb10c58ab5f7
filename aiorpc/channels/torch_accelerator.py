"""The devices that torch has, as an `Accelerator`: CUDA, and other kinds whose module has streams and events as CUDA's.

This module starts no device; the first memory, stream or event on it does.

Current streams and devices are read and set by ``torch.accelerator``, in a third of the Python functions of the module
of a kind. Its stream class lacks what `Interprocess` needs, so streams that are given out are of the module's class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn import Parameter

from ..undoing import on_error
from .accelerator import Accelerator, Event, Interprocess, Stream
from .cuda_runtime import find_runtime

Tensor = torch.Tensor
# In bytes. A shorter source in ordinary memory of the host goes through pinned memory on its way to a device.
PINNED_DETOUR = 4 << 20
# Streams of a device that are handed out in turn: as many as torch's pool has.
POOL_STREAMS = 32
# Objects for current streams that are kept: torch's pools, and some of the program's own.
KNOWN_STREAMS = 256


def find_accelerator() -> Accelerator | None:
    """The accelerator of ``torch.accelerator``, for CUDA with its runtime library; None without a device.

    Makes no context on a device.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    return TorchAccelerator(found.type, interprocess=find_runtime() if found.type == "cuda" else None)


class TorchAccelerator:
    """Devices of one kind. See `Accelerator`.

    module: torch's module for them; None: found by the kind.
    """

    def __init__(
        self, kind: str = "cuda", *, interprocess: Interprocess | None = None, module: ModuleType | Any = None
    ) -> None:
        self.kind = kind
        self.interprocess = interprocess
        self._module = torch.get_device_module(kind) if module is None else module
        general = module is None and torch.accelerator.current_accelerator() == torch.device(kind)
        self._current: ModuleType | Any = torch.accelerator if general else _as_accelerator(self._module)
        self._count = -1
        self._pools: dict[int, Iterator[Stream]] = {}
        self._known: dict[tuple[int, int], Stream] = {}  # by device and number of the stream
        # Only CUDA needs to be told to sleep, instead of spinning, while it synchronises.
        self._event_options = {"blocking": True} if kind == "cuda" else {}

    def count(self) -> int:
        """How many there are; numbered from 0."""
        if self._count < 0:
            self._count = int(self._module.device_count())
        return self._count

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a strided tensor of torch's own types on one of these devices."""
        return (
            (type(tensor) is Tensor or type(tensor) is Parameter)
            and tensor.device.type == self.kind
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
        )

    def carrier(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def tensor(self, carrier: Tensor, index: int) -> Tensor:
        """The carrier itself."""
        return carrier

    def empty(self, size: int, index: int) -> Tensor:
        """A flat uint8 tensor of so many bytes; memory of the current stream. Raises torch.OutOfMemoryError."""
        device = torch.device(self.kind, index)
        if torch.is_inference_mode_enabled():
            return self._empty(size, device=device)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def pinned(self, size: int) -> Tensor:
        """A flat uint8 tensor on the host, page-locked. Making a new one can take milliseconds; torch reuses them."""
        return self._empty(size, device="cpu", pin_memory=True)

    def _empty(self, size: int, device: torch.device | str, *, pin_memory: bool = False) -> Tensor:
        # A tensor made in inference mode can only be written in that mode, and the caller's thread may be in it.
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory)

    def move(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy on the stream, of the same size; the memory is not reused before.

        For that torch's allocator of pinned memory keeps it, and `keep` the device's. Ordinary memory has no such
        allocator: a source of up to `PINNED_DETOUR` bytes is first copied to pinned memory; otherwise this waits.
        """
        if not source.numel():
            return
        with self.entered((stream,)):
            if self._ordinary(source) and source.numel() <= PINNED_DETOUR:
                source = self.pinned(source.numel()).copy_(source)
            target.copy_(source, non_blocking=not self._ordinary(source) and not self._ordinary(target))
        for side in (target, source):
            if side.device.type != "cpu":
                self.keep(side, stream)

    def _ordinary(self, tensor: Tensor) -> bool:
        """Whether it is memory of the host that a device cannot copy asynchronously."""
        return tensor.device.type == "cpu" and not tensor.is_pinned()

    def current(self, index: int) -> Stream:
        """The current stream of this thread on that device."""
        key = index, self._current.current_stream(index).stream_id
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= KNOWN_STREAMS:  # the program makes new streams again and again
                self._known.clear()
            known = self._known[key] = self._module.current_stream(index)
        return known

    def fresh(self, index: int) -> Stream:
        """A stream other than the default one, in turn out of torch's pool of 32."""
        pool = self._pools.get(index)
        if pool is None:  # two threads may both make one, of the same streams
            streams = [self._module.Stream(device=index) for _ in range(POOL_STREAMS)]
            pool = self._pools[index] = itertools.cycle(streams)
        return next(pool)

    def is_idle(self, stream: Stream) -> bool:
        """Whether it has done all work that it was given."""
        return bool(stream.query())

    def entered(self, streams: Sequence[Stream]) -> AbstractContextManager[object]:
        """A context: these are the current streams of this thread, each on its device; the current device stays.

        It may be entered again, also inside itself, by one thread at a time.
        """
        return _Entered(self._current, streams)

    def keep(self, carrier: Tensor, stream: Stream) -> None:
        """The stream uses the memory, too: it is reused only after what the stream has been given when it is freed."""
        carrier.record_stream(stream)

    def mark(self, stream: Stream) -> Event:
        """An event of this process that has recorded the stream."""
        event = self._module.Event(**self._event_options)
        event.record(stream)
        return event

    def wait(self, event: Event, stream: Stream) -> None:
        """The stream does what it is given from now on after what the event has recorded."""
        event.wait(stream)

    def synchronize(self, event: Event) -> None:
        """Block this thread, asleep and without the interpreter lock, until it is done."""
        event.synchronize()


def _as_accelerator(module: ModuleType | Any) -> SimpleNamespace:
    """The functions of ``torch.accelerator`` for a kind that it does not serve."""
    return SimpleNamespace(
        current_stream=module.current_stream,
        set_stream=module.set_stream,
        current_device_index=module.current_device,
        device_index=module.device,
    )


class _Entered:
    """Streams that are current for a while.

    `torch.cuda.StreamContext` will not do: it takes one stream, and going back to the previous device starts that
    device if it is unused (500 MB).
    """

    __slots__ = ("_before", "_current", "_streams")

    def __init__(self, current: ModuleType | Any, streams: Sequence[Stream]) -> None:
        self._current = current
        self._streams = streams
        self._before: list[list[tuple[Stream, bool]]] = []

    def __enter__(self) -> None:
        before: list[tuple[Stream, bool]] = []
        self._before.append(before)
        for_thread = self._current
        with on_error(self.__exit__):
            for stream in self._streams:
                current = for_thread.current_stream(stream.device_index)
                other = current.stream_id != stream.stream_id  # by number: they may be of two classes
                if other:
                    self._set(stream)
                before.append((current, other))

    def __exit__(self, *exc_info: object) -> None:
        for stream, other in reversed(self._before.pop()):
            # If nothing was set here, code inside may have set another stream.
            if other or self._current.current_stream(stream.device_index).stream_id != stream.stream_id:
                self._set(stream)

    def _set(self, stream: Stream) -> None:
        """Setting a stream makes its device current; the guard restores the current device."""
        for_thread, index = self._current, stream.device_index
        if index == for_thread.current_device_index():
            for_thread.set_stream(stream)
            return
        with for_thread.device_index(index):
            for_thread.set_stream(stream)
