"""What a client process measures with the blocking verbs, the same code on both sides.

Each function gets the side's module first and returns a dictionary of numbers. All are time-boxed by ``seconds``, so
that a slow side cannot stretch a run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import functions
from .sides import SERVER, RpcFuture, RpcModule
from .stats import BenchError, summary

WARM_UP_CALLS = 50
BURN_MARGIN = 0.5  # seconds the computing handler outlives the box, so that the last samples are beside it too


def payload(elements: int) -> torch.Tensor:
    """A float32 tensor of that many elements; four of them are the 2x2 matrix."""
    tensor = torch.arange(elements, dtype=torch.float32)
    return tensor.reshape(2, 2) if elements == 4 else tensor


def arguments(elements: int | None) -> tuple[torch.Tensor, ...]:
    """The arguments of a call: nothing, or one tensor."""
    return () if elements is None else (payload(elements),)


def latency(
    rpc: RpcModule, function: Callable[..., Any], seconds: float, elements: int | None = None
) -> dict[str, float]:
    """Microseconds of one blocking call after another."""
    args = arguments(elements)
    for _ in range(WARM_UP_CALLS):
        check_echo(function, args, rpc.rpc_sync(SERVER, function, args=args))
    return summary(_timed_calls(rpc, function, args, seconds))


def check_echo(function: Callable[..., Any], args: Sequence[torch.Tensor], answer: object) -> None:
    """A side that answers wrongly has no speed."""
    if function in (functions.echo, functions.async_echo) and not torch.equal(args[0], answer):  # type: ignore[arg-type]  # both echo a tensor
        raise BenchError(f"echo of {tuple(args[0].shape)} came back different")


def _timed_calls(rpc: RpcModule, function: Callable[..., Any], args: Sequence[Any], seconds: float) -> list[int]:
    clock, call = time.perf_counter_ns, rpc.rpc_sync
    samples: list[int] = []
    end = clock() + int(seconds * 1e9)
    after = 0
    while after < end:
        before = clock()
        call(SERVER, function, args=args)
        after = clock()
        samples.append(after - before)
    return samples


def in_flight(rpc: RpcModule, function: Callable[..., Any], seconds: float, window: int) -> dict[str, float]:
    """Calls per second with ``window`` calls always under way; the oldest is waited for before the next is sent."""
    pending: deque[RpcFuture] = deque(rpc.rpc_async(SERVER, function) for _ in range(window))
    begin = time.perf_counter()
    end = begin + seconds
    calls = 0
    while time.perf_counter() < end:
        pending.popleft().wait()
        pending.append(rpc.rpc_async(SERVER, function))
        calls += 1
    elapsed = time.perf_counter() - begin
    for future in pending:
        future.wait()
    return {"rate": calls / elapsed, "samples": float(calls)}


def beside_compute(rpc: RpcModule, seconds: float) -> dict[str, float]:
    """Microseconds of blocking no-op calls while another handler thread of the server computes in pure Python.

    turns: of its loop, for each second of it.
    """
    computing = rpc.rpc_async(SERVER, functions.burn, args=(seconds + BURN_MARGIN,))
    deadline = time.monotonic() + BURN_MARGIN
    while not rpc.rpc_sync(SERVER, functions.burning):
        if time.monotonic() > deadline:
            raise BenchError("the computing handler did not start in time")
    samples = _timed_calls(rpc, functions.noop, (), seconds)
    if computing.done():
        samples.pop()  # the last call may have outlived the computation
    turns = computing.wait() / (seconds + BURN_MARGIN)
    return {**summary(samples), "turns": turns}


def round_robin(rpc: RpcModule, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Microseconds of a blocking call of one caller that goes round all the others."""
    for name in names:
        rpc.rpc_sync(name, functions.noop)
    clock, samples = time.perf_counter_ns, []
    end = clock() + int(seconds * 1e9)
    while clock() < end:
        for name in names:
            before = clock()
            rpc.rpc_sync(name, functions.noop)
            samples.append(clock() - before)
    return summary(samples)


def converge(rpc: RpcModule, to: str, seconds: float) -> dict[str, float]:
    """Blocking calls of one of many callers of the same worker: how many, and when on the machine's own clock."""
    rpc.rpc_sync(to, functions.noop)
    begin = time.monotonic()
    end = begin + seconds
    calls = 0
    while time.monotonic() < end:
        rpc.rpc_sync(to, functions.noop)
        calls += 1
    return {"calls": float(calls), "begin": begin, "end": time.monotonic()}


def touch(rpc: RpcModule, names: Sequence[str], calls: int = 1) -> None:
    """Call each of these workers, which makes the connection if there is none."""
    for name in names:
        for _ in range(calls):
            rpc.rpc_sync(name, functions.noop)


def warm_threads(rpc: RpcModule, to: str, calls: int) -> None:
    """Have so many calls under way at once that every handler thread of the callee has run."""
    for future in [rpc.rpc_async(to, functions.noop) for _ in range(calls)]:
        future.wait()


def resident_bytes(rpc: RpcModule) -> int:
    """Resident memory of the process that runs this."""
    return functions.resident_bytes()


def private_bytes(rpc: RpcModule) -> int:
    """What of it no other process has as well: the libraries that were loaded before the fork are shared."""
    return functions.private_bytes()
