"""CUDA devices that do not exist: `FakeCuda` is an `aiorpc.channels.accelerator.Accelerator` for tests without a GPU.

The memory of a device is memory of this process; what processes share lies in memfds. Streams are queues that one
thread works through, each operation late by a random time, and in an order among the streams that is as bad as it can
be: the stream that was given work last goes first, others are held up for a while. Memory goes back to the stream that
it was asked for on as soon as its last tensor dies, is filled with 0xDD there, and is given out again at once.

Two processes whose fakes have the same uuids have the same devices. What breaks a rule of CUDA or of the interfaces is
put into `violations`, and raises RuntimeError where it happens at a call. Tests assert that there are none.

What a test that passes with this proves: that the program gives streams their work in an order that is right whatever
the streams do (within the schedules that were tried: lag and seed decide), that memory is kept as long as a stream uses
it, that handles and events are opened, used and let go of by the rules, and that it comes back from failures.

What it does not prove: anything about CUDA itself. Not that the driver behaves as the rules here say, nor what its
calls cost, what they return, when they block, what a kernel or a peer that is killed half-way leaves behind, or how
fast anything is. A missing wait that no schedule made visible stays unseen. There is no autograd on a `FakeTensor`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .interprocess import FakeInterprocess
from .memory import POISON, Pool
from .streams import Machine, Mark, Range, Stream
from .tensors import FakeTensor, ghost

__all__ = ["POISON", "FakeCuda", "FakeInterprocess", "FakeTensor", "Stream"]

Tensor = torch.Tensor
POOL_STREAMS = 4  # few, so that they are used again soon
MiB = 1 << 20


class FakeCuda:
    """Some devices for one process. Its methods, and those of a subclass of `interprocess_type`, may be overridden.

    seed: of the order and the lag of operations. uuids: names of the devices, for other processes. ipc: False makes all
    calls of `interprocess` fail and `obstacle` say so; None takes `interprocess` away. peer_access: True for access of
    all devices to each other, or pairs of uuids: who, to whose memory. lag: seconds, least and most. policy:
    "adversarial" or "fair". memory: bytes of each device. patience: seconds a stream waits for an event at most.
    """

    interprocess_type: type[FakeInterprocess] = FakeInterprocess

    def __init__(
        self,
        devices: int = 2,
        seed: int = 0,
        uuids: Sequence[str] | None = None,
        ipc: bool | None = True,
        peer_access: bool | set[tuple[str, str]] = True,
        lag: tuple[float, float] = (0.0, 0.003),
        policy: str = "adversarial",
        memory: int = 512 * MiB,
        patience: float = 30.0,
    ) -> None:
        self.uuids = list(uuids) if uuids is not None else [f"FAKE-{number}" for number in range(devices)]
        self.violations: list[str] = []
        # By method; `wait` of the interprocess events is "interprocess.wait".
        self.calls: Counter[str] = Counter()
        # Threads that waited for a device by `synchronize`, or by a `move` to ordinary memory; not those that asked a
        # tensor for a value.
        self.waiters: set[int] = set()
        self.closed = False
        self.machine = Machine(seed=seed, lag=lag, patience=patience, policy=policy, report=self.report)
        self.failures: dict[str, int] = {}
        self._local = threading.local()
        self.default_streams = [Stream(index, "default stream") for index in range(len(self.uuids))]
        self._streams = [
            [Stream(index, f"stream {number}") for number in range(1, POOL_STREAMS + 1)]
            for index in range(len(self.uuids))
        ]
        self._turns = [0] * len(self.uuids)
        self._pools = [Pool(self.machine, index, memory, self.report) for index in range(len(self.uuids))]
        self._pinned: dict[int, tuple[int, Any]] = {}
        self._interprocess = None if ipc is None else self.interprocess_type(self, peer_access, not ipc)

    def __enter__(self) -> FakeCuda:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The interface

    @property
    def kind(self) -> str:
        """As of the real ones."""
        return "cuda"

    @property
    def interprocess(self) -> FakeInterprocess | None:
        """None if made with ``ipc=None``."""
        return self._interprocess

    def count(self) -> int:
        """How many there are."""
        return len(self.uuids)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of this fake."""
        return type(tensor) is FakeTensor and tensor.fake is self

    def carrier(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU over its memory, a Parameter or in need of a gradient as it is."""
        assert isinstance(tensor, FakeTensor)
        carrier = tensor.raw.detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(carrier, requires_grad=tensor.requires_grad)
        return carrier.requires_grad_() if tensor.requires_grad else carrier

    def tensor(self, carrier: Tensor, index: int) -> Tensor:
        """The other way round. A violation if it is not memory of that device."""
        self.require_device(index)
        if carrier.untyped_storage().nbytes() and not self._pools[index].holds(carrier.untyped_storage().data_ptr()):
            self.report(f"tensor: the carrier is not memory of device {index}")
        tensor: Tensor = FakeTensor(carrier, self, index, carrier.requires_grad)
        return torch.nn.Parameter(tensor, carrier.requires_grad) if type(carrier) is torch.nn.Parameter else tensor

    def empty(self, size: int, index: int) -> Tensor:
        """Full of poison."""
        self.require_device(index)
        try:
            self.count_call("empty")
        except RuntimeError:
            raise torch.OutOfMemoryError(f"fake device {index} was told to have no memory") from None
        return self._pools[index].allocate(size, self.current(index))

    def pinned(self, size: int) -> Tensor:
        """Ordinary memory that is remembered as pinned, full of poison."""
        self.count_call("pinned")
        tensor = torch.full((size,), POISON, dtype=torch.uint8, device="cpu")
        storage = tensor.untyped_storage()
        with self.machine.lock:
            # Weakly by torch's own count; what has died is dropped now and then.
            self._pinned = {start: entry for start, entry in self._pinned.items() if not entry[1].expired()}
            if size:
                self._pinned[storage.data_ptr()] = (size, StorageWeakRef(storage))
        return tensor

    def move(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Like torch's copy with the stream current; memory of devices is kept for it."""
        self.count_call("move")
        if target.numel() != source.numel():
            raise RuntimeError(f"move of {source.numel()} bytes to {target.numel()}")
        with self.entered([stream]):
            for carrier in (target, source):
                if self.device_of(carrier) is not None:
                    self._keep(carrier, stream)
            to = self.device_of(target)
            if to is None and not self._is_pinned(target):
                self.waiters.add(threading.get_ident())
            self.transfer(target, to, source, self.device_of(source), True)

    def current(self, index: int) -> Stream:
        """The default one unless within `entered`."""
        self.require_device(index)
        return self._entered().get(index, self.default_streams[index])

    def fresh(self, index: int) -> Stream:
        """One of four, in turn."""
        self.require_device(index)
        self.count_call("fresh")
        with self.machine.lock:
            self._turns[index] += 1
            return self._streams[index][self._turns[index] % POOL_STREAMS]

    def is_idle(self, stream: Stream) -> bool:
        """Nothing is left in its queue."""
        with self.machine.lock:
            return not stream.queue

    @contextmanager
    def entered(self, streams: Sequence[Stream]) -> Iterator[None]:
        """For this thread."""
        mine = self._entered()
        before = dict(mine)
        mine.update({stream.index: stream for stream in streams})
        try:
            yield
        finally:
            mine.clear()
            mine.update(before)

    def keep(self, carrier: Tensor, stream: Stream) -> None:
        """The block comes back only after what the stream has been given when it dies."""
        self.count_call("keep")
        if carrier.untyped_storage().nbytes() and not self._keep(carrier, stream):
            self.report("keep: the carrier is not memory of a device")

    def mark(self, stream: Stream) -> Mark:
        """Done when the stream comes to it."""
        self.count_call("mark")
        return self.machine.mark(stream)

    def wait(self, event: Mark, stream: Stream) -> None:
        """Also for streams of other devices."""
        self.count_call("wait")
        self.machine.wait(event, stream)

    def synchronize(self, event: Mark) -> None:
        """Remembers the thread in `waiters`."""
        self.count_call("synchronize")
        self.waiters.add(threading.get_ident())
        self.machine.synchronize(event)

    # For tests

    def fake_tensor(self, tensor: Tensor, index: int = 0) -> FakeTensor:
        """A copy of a CPU tensor on a device, on its current stream; needs a gradient if that does."""
        copy = self.like(tensor.detach().to("meta"), index)
        copy.copy_(tensor.detach(), non_blocking=True)
        copy.requires_grad_(tensor.requires_grad)
        return copy

    def fail(self, name: str, times: int = 1) -> None:
        """Let the next calls of a method fail: RuntimeError, of `empty` torch.OutOfMemoryError."""
        with self.machine.lock:
            self.failures[name] = self.failures.get(name, 0) + times

    def in_use(self, index: int) -> int:
        """Bytes of the device that tensors have, or streams on their behalf."""
        return self._pools[index].in_use()

    def abandon(self) -> None:
        """Streams wait for nothing any more."""
        self.machine.abandon()

    def close(self, timeout: float = 10.0) -> None:
        """Finish within some seconds what streams were given, end the thread, close all descriptors."""
        if self.closed:
            return
        self.machine.close(timeout)
        self.closed = True
        self.machine.housekeeping.clear()  # which refers to what refers to the machine
        if self._interprocess is not None:
            self._interprocess.shut_down()

    def report(self, violation: str) -> None:
        """Put it among the violations."""
        self.violations.append(violation)

    # For the other modules here

    def count_call(self, name: str) -> None:
        """Count it; RuntimeError if it was to fail."""
        with self.machine.lock:
            self.calls[name] += 1
            if not self.failures.get(name):
                return
            self.failures[name] -= 1
        raise RuntimeError(f"{name}: the fake device was told to fail")

    def require_device(self, index: int) -> None:
        """RuntimeError if there is none of that number."""
        if not 0 <= index < len(self.uuids):
            raise RuntimeError(f"invalid device ordinal: {index} of {len(self.uuids)}")

    def like(self, meta: Tensor, index: int) -> FakeTensor:
        """A new tensor of that shape."""
        memory = self._pools[index].allocate(meta.untyped_storage().nbytes(), self.current(index))
        raw = torch.empty(0, dtype=meta.dtype, device="cpu")
        raw.set_(memory.untyped_storage(), 0, meta.size(), meta.stride())
        return FakeTensor(raw, self, index)

    def tensor_of(self, value: Tensor, index: int) -> FakeTensor:
        """A new tensor with these values."""
        result = self.like(value.to("meta"), index)
        self.transfer(result.raw, index, value, None, True)
        return result

    def launch(self, index: int, name: str, run: Callable[[], None], operands: Sequence[Tensor]) -> None:
        """Enqueue an operation on the current stream."""
        self.machine.enqueue(self.current(index), name, run, ranges=[_extent(operand) for operand in operands])

    def settle(self, index: int) -> None:
        """Wait for the current stream, as an operation does that gives the host a value."""
        self.machine.synchronize(self.machine.mark(self.current(index)))

    def transfer(self, target: Tensor, to: int | None, source: Tensor, of: int | None, non_blocking: bool) -> None:
        """Copy between carriers on devices, and tensors of the host (None), on the current streams, as torch does."""
        if to is not None and of is not None:
            self._transfer_between(target, to, source, of)
        elif to is not None:
            taken = source if self._is_pinned(source) else source.detach().clone()
            there = ghost(target)
            self.launch(to, "copy to the device", lambda: _assign(there, taken), [target])
            if not non_blocking:
                self.settle(to)
        elif of is not None:
            here = ghost(source)
            wanted = target.detach()  # kept until it is done, as torch keeps what is pinned
            self.launch(of, "copy to the host", lambda: _assign(wanted, here), [source])
            if not (non_blocking and self._is_pinned(target)):
                self.settle(of)
        else:
            target.copy_(source)

    def trouble(self, address: int, size: int, index: int, has_access: Callable[[int, str], bool]) -> str:
        """Why a device cannot use a range that is not of `interprocess`; empty if it can. With the machine's lock."""
        for owner, pool in enumerate(self._pools):
            if pool.holds(address):
                if pool.find(address, size) is None:
                    return f"{size} bytes at {address:#x} are not of one tensor's memory on device {owner}"
                return "" if has_access(index, self.uuids[owner]) else f"no access to device {owner}"
        return "" if self._is_pinned_at(address, size) else f"nothing was given out at {address:#x}"

    def is_mapped(self, address: int, size: int) -> bool:
        """Whether it is memory of a device, or pinned."""
        return any(pool.holds(address) for pool in self._pools) or self._is_pinned_at(address, size)

    def _entered(self) -> dict[int, Stream]:
        """The streams of this thread that are not the default ones."""
        streams: dict[int, Stream] = self._local.__dict__.setdefault("streams", {})
        return streams

    def _transfer_between(self, target: Tensor, to: int, source: Tensor, of: int) -> None:
        there, here = ghost(target), ghost(source)
        if to == of:
            self.launch(to, "copy", lambda: _assign(there, here), [target, source])
            return
        ours, theirs = self.current(of), self.current(to)
        self.machine.wait(self.machine.mark(theirs), ours)
        self.launch(of, "copy to another device", lambda: _assign(there, here), [target, source])
        self.machine.wait(self.machine.mark(ours), theirs)

    def _keep(self, carrier: Tensor, stream: Stream) -> bool:
        start, size = _extent(carrier)
        if not size:
            return True
        with self.machine.lock:
            for pool in self._pools:
                if pool.holds(start) and (block := pool.find(start, size)):
                    block.kept.add(stream)
                    return True
        return False

    def device_of(self, tensor: Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        return next((index for index, pool in enumerate(self._pools) if pool.holds(address)), None)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return self._is_pinned_at(*_extent(tensor))

    def _is_pinned_at(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length and not storage.expired()
            for start, (length, storage) in self._pinned.items()
        )


def _assign(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _extent(tensor: Tensor) -> Range:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
