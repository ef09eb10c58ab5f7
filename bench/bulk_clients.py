"""What a client process measures of large tensors, the same code on both sides.

An answer is dropped before the next call, so that its memory can be used again, and after the clock has stopped.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import functions
from .clients import check_echo
from .sides import SERVER, RpcModule
from .stats import BenchError, summary

WARM_UP_SECONDS = 0.5
WARM_UP_CALLS = 4
AGAIN_CALLS = 1  # that do not count, of a pair that was warm before it was stopped for the other side's turn
FIRST_NOOPS = 5
RELEASE_SECONDS = 5.0
MB = 1 << 20


@functools.lru_cache(maxsize=1)
def payloads(size: int, count: int = 1) -> tuple[torch.Tensor, ...]:
    """So many different float32 tensors of that many bytes each; only the latest are kept."""
    return tuple(torch.arange(size // 4, dtype=torch.float32).add_(number) for number in range(count))


@functools.lru_cache(maxsize=1)
def resnet50() -> dict[str, torch.Tensor]:
    """The state_dict of a ResNet-50 for 1000 classes."""
    from aiorpc.examples._shared import resnet

    torch.manual_seed(0)
    return resnet.resnet("resnet50", num_classes=1000).state_dict()


def warm_up(rpc: RpcModule, size: int, seconds: float = WARM_UP_SECONDS, least: int = WARM_UP_CALLS) -> None:
    """Send and echo until memory and connections of both ends have carried such tensors, and look at what comes back.

    That takes so many seconds, and `least` calls of either kind.
    """
    args = payloads(size)
    check_echo(functions.echo, args, rpc.rpc_sync(SERVER, functions.echo, args=args))
    end = time.perf_counter() + seconds
    calls = 0
    while calls < least or time.perf_counter() < end:
        for function in (functions.sink, functions.echo):
            rpc.rpc_sync(SERVER, function, args=args)
        calls += 1


def latency(rpc: RpcModule, function: Callable[..., Any], size: int, seconds: float, least: int) -> dict[str, float]:
    """Microseconds of one blocking call with a tensor after another. The pair is warm (`warm_up`)."""
    args = payloads(size)
    return summary(timed(lambda: rpc.rpc_sync(SERVER, function, args=args), seconds, least))


def timed(call: Callable[[], object], seconds: float, least: int) -> list[int]:
    """Nanoseconds of each call for so long, and of `least` calls at least; some before that do not count."""
    clock = time.perf_counter_ns
    for _ in range(AGAIN_CALLS):
        call()
    samples: list[int] = []
    end = clock() + int(seconds * 1e9)
    after = 0
    while len(samples) < least or after < end:
        before = clock()
        answer = call()
        after = clock()
        del answer
        samples.append(after - before)
    return samples


def first_sends(rpc: RpcModule, sizes: Sequence[int]) -> dict[str, float]:
    """Microseconds of the first tensor of each size, by its bytes as text."""
    tensors = [torch.arange(size // 4, dtype=torch.float32) for size in sizes]  # their own pages are there beforehand
    for _ in range(FIRST_NOOPS):
        rpc.rpc_sync(SERVER, functions.noop)
    taken: dict[str, float] = {}
    for size, tensor in zip(sizes, tensors, strict=True):
        before = time.perf_counter_ns()
        elements = rpc.rpc_sync(SERVER, functions.sink, args=(tensor,))
        taken[str(size)] = (time.perf_counter_ns() - before) / 1e3
        if elements != tensor.numel():
            raise BenchError(f"{elements} of {tensor.numel()} elements arrived")
    return taken


def concurrent(rpc: RpcModule, size: int, ways: int, seconds: float, least: int) -> dict[str, float]:
    """GB/s (10^9) of so many different tensors sent at once, all waited for, again and again: by the median time."""
    tensors = payloads(size, ways)

    def send_all() -> None:
        for future in [rpc.rpc_async(SERVER, functions.sink, args=(tensor,)) for tensor in tensors]:
            future.wait()

    found = summary(timed(send_all, seconds, least))
    return {"rate": size * ways / found["p50"] / 1e3, "samples": found["samples"]}


def state_dict(rpc: RpcModule, seconds: float, least: int) -> dict[str, float]:
    """State_dicts per second, one blocking call after another, by the median time."""
    weights = resnet50()
    if rpc.rpc_sync(SERVER, functions.checksum, args=(weights,)) != functions.checksum(weights):
        raise BenchError("the state_dict arrived different")
    found = summary(timed(lambda: rpc.rpc_sync(SERVER, functions.sink_state_dict, args=(weights,)), seconds, least))
    return {"rate": 1e6 / found["p50"], "samples": found["samples"]}


def burst(rpc: Any, size: int, ways: int) -> dict[str, float]:
    """The arena of this worker of aiorpc, in MB (2^20): new; then, warm, before, during and after a burst of sends."""
    tensors = payloads(size, ways)
    rpc.rpc_sync(SERVER, functions.noop)
    new = rpc.current().statistics().shared_size
    _until_warm(rpc, tensors[0])
    before = rpc.current().statistics().shared_size
    futures = [rpc.rpc_async(SERVER, functions.sink, args=(tensor,)) for tensor in tensors]
    during, lent = _watch(rpc, futures)
    for future in futures:
        future.wait()
    _until_released(rpc)
    after = rpc.current().statistics()
    return {
        "new": new / MB,
        "before": before / MB,
        "during": during / MB,
        "after": after.shared_size / MB,
        "pages": after.shared_resident / MB,
        "lent most": lent / MB,
        "lent after": float(after.shared_lent),
    }


def _until_warm(rpc: Any, tensor: torch.Tensor) -> None:
    end = time.monotonic() + WARM_UP_SECONDS
    calls = 0
    while calls < WARM_UP_CALLS or time.monotonic() < end:
        rpc.rpc_sync(SERVER, functions.sink, args=(tensor,))
        calls += 1
    _until_released(rpc)


def _watch(rpc: Any, futures: Sequence[Any]) -> tuple[int, int]:
    """The largest size of the arena, and the most that was lent of it, until all are done."""
    size = lent = 0
    while True:
        now = rpc.current().statistics()
        size, lent = max(size, now.shared_size), max(lent, now.shared_lent)
        if all(future.done() for future in futures):
            return size, lent
        time.sleep(0.001)


def _until_released(rpc: Any) -> None:
    """Wait until nothing is lent, for a while: what is left then is a figure."""
    end = time.monotonic() + RELEASE_SECONDS
    while rpc.current().statistics().shared_lent and time.monotonic() < end:
        time.sleep(0.005)
