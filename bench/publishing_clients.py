"""What the publisher of weights and its readers do, on both sides; the functions of readers are called by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aiorpc

from .sides import RpcModule

NAME = "weights"
MB = 1 << 20
TENSORS = 64
WARM_UP = 3


@dataclass
class _Reader:
    """What a reader process remembers between calls. computing: ends the thread that computes and reads meanwhile."""

    subscription: aiorpc.types.Subscription | None = None
    before: int = 0
    value: Any = None
    computing: threading.Event = field(default_factory=threading.Event)


_reader = _Reader()


def weights(size: int) -> dict[str, torch.Tensor]:
    """So many bytes, in tensors of one size."""
    return {f"layer{number}": torch.full((size // 4 // TENSORS,), float(number)) for number in range(TENSORS)}


# --- in a reader ------------------------------------------------------------------------------------------------------


def subscribe() -> None:
    """Begin to read."""
    _reader.subscription = aiorpc.subscribe(NAME)


def unsubscribe() -> None:
    """Read no more."""
    assert _reader.subscription is not None, "it has subscribed"
    _reader.computing.set()
    _reader.subscription.close()


def look(state: dict[str, torch.Tensor]) -> float:
    """Read one element of each tensor."""
    return sum(tensor[-1].item() for tensor in state.values())


def read() -> float:
    """Wait for the next version, and look at it."""
    assert _reader.subscription is not None, "it has subscribed"
    return look(next(_reader.subscription).value)


def remember_memory() -> None:
    """Begin to count what memory this process takes."""
    _reader.before = _share_of_memory()


def read_all() -> int:
    """Wait for the next version and read every byte of it; bytes of memory that the process takes now and did not.

    What several processes have in common counts for each of them with its share (PSS).
    """
    assert _reader.subscription is not None, "it has subscribed"
    _reader.value = next(_reader.subscription).value
    for tensor in _reader.value.values():
        tensor.sum()
    return _share_of_memory() - _reader.before


def memory_taken() -> int:
    """The same once more, when all have read."""
    return _share_of_memory() - _reader.before


def let_go() -> None:
    """Drop what was read."""
    _reader.value = None


def _share_of_memory() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


def compute() -> None:
    """Compute with each version until `unsubscribe`, in a thread."""
    threading.Thread(target=_compute, daemon=True).start()


def _compute() -> None:
    assert _reader.subscription is not None, "it has subscribed"
    for version in _reader.subscription:
        matrix = next(iter(version.value.values()))[: 128 * 128].reshape(128, 128)
        for _ in range(20):
            matrix @ matrix
        if _reader.computing.is_set():
            return


# --- in the publisher -------------------------------------------------------------------------------------------------


def begin(rpc: RpcModule, readers: Sequence[str]) -> None:
    """Have all of them subscribe."""
    for name in readers:
        rpc.rpc_sync(name, subscribe)


def end(rpc: RpcModule, readers: Sequence[str]) -> None:
    """Have all of them read no more."""
    for name in readers:
        rpc.rpc_sync(name, unsubscribe)


def publish(rpc: RpcModule, readers: Sequence[str], size: int, times: int) -> float:
    """Milliseconds until the last reader has looked at a version: the median of so many."""
    state = weights(size)

    def once() -> float:
        reading = [rpc.rpc_async(name, read) for name in readers]
        begun = time.perf_counter()
        aiorpc.publish(NAME, state).wait()
        for each in reading:
            each.wait()
        return 1e3 * (time.perf_counter() - begun)

    return median([once() for _ in range(WARM_UP + times)])


def send(rpc: RpcModule, readers: Sequence[str], size: int, times: int) -> float:
    """The same by one call for each reader."""
    state = weights(size)

    def once() -> float:
        begun = time.perf_counter()
        for each in [rpc.rpc_async(name, look, args=(state,)) for name in readers]:
            each.wait()
        return 1e3 * (time.perf_counter() - begun)

    return median([once() for _ in range(times + (1 if times == 1 else WARM_UP))])


def median(values: list[float]) -> float:
    """Of the last ones: the first take new memory."""
    kept = sorted(values[min(WARM_UP, len(values) - 1) :])
    return kept[len(kept) // 2]


def memory(rpc: RpcModule, readers: Sequence[str], size: int) -> float:
    """Bytes of memory that all readers take for a version, by the bytes of one."""
    state = weights(size)
    for name in readers:
        rpc.rpc_sync(name, remember_memory)
    aiorpc.publish(NAME, state).wait()
    for each in [rpc.rpc_async(name, read_all) for name in readers]:
        each.wait()
    taken = [int(rpc.rpc_sync(name, memory_taken)) for name in readers]
    for name in readers:
        rpc.rpc_sync(name, let_go)
    return sum(taken) / size


def pace(rpc: RpcModule, readers: Sequence[str], size: int, period: float, times: int) -> float:
    """Processor time of this process for a version, all threads together, by that of a bare copy.

    One version each `period` seconds, while the readers compute.
    """
    state = weights(size)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    for name in readers:
        rpc.rpc_sync(name, compute)
    copies: list[float] = []
    versions: list[float] = []
    for number in range(WARM_UP + times):
        begun = time.process_time()
        aiorpc.publish(NAME, state).wait()
        time.sleep(period / 2)  # what readers answer counts as well
        middle = time.process_time()
        for name, tensor in state.items():
            target[name].copy_(tensor)
        after = time.process_time()
        time.sleep(period / 2)
        if number >= WARM_UP:
            versions.append(middle - begun)
            copies.append(after - middle)
    return sum(versions) / sum(copies)
