"""What the servers run, on both sides. Imported by name, so these must stay importable module-level functions."""

from __future__ import annotations

import asyncio
import functools
import gc
import resource
import sys
import threading
import time
from dataclasses import dataclass, field

import torch

from .ticker import Ticker


def noop() -> None:
    """The Python function that does nothing, run by a handler thread."""


async def async_noop() -> None:
    """The same as a coroutine, run by the worker's loop."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Answer with what came."""
    return tensor


async def async_echo(tensor: torch.Tensor) -> torch.Tensor:
    """The same as a coroutine."""
    return tensor


def sink(tensor: torch.Tensor) -> int:
    """Take a tensor and give a tiny answer."""
    return tensor.numel()


def sink_state_dict(state: dict[str, torch.Tensor]) -> int:
    """Take the weights of a model and give a tiny answer."""
    return len(state)


def checksum(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sum of each tensor; the same on either end, as the order of additions is."""
    return {name: float(tensor.double().sum()) for name, tensor in state.items()}


@dataclass
class Server:
    """What one server process remembers between calls.

    held: unset futures; release: ends ``wait_for_release``; ticker: what ``start_ticker`` started.
    """

    held: list[torch.futures.Future[None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    burning: bool = False
    ticker: Ticker | None = None


@functools.cache
def server() -> Server:
    """The one record of this process, made on first use."""
    return Server()


def burn(seconds: float) -> int:
    """Compute in pure Python for so long without a pause: no I/O, no sleep, never giving up the interpreter itself."""
    server().burning = True
    end = time.monotonic() + seconds
    turns = 0
    while time.monotonic() < end:
        for _ in range(1000):
            turns += 1
    server().burning = False
    return turns


def burning() -> bool:
    """Whether ``burn`` is running here."""
    return server().burning


def new_held(future: torch.futures.Future[None]) -> torch.futures.Future[None]:
    """Remember an unset future; used by the decorated handlers of either side."""
    with server().lock:
        server().held.append(future)
    return future


async def wait_for_release() -> None:
    """A coroutine handler that is pending until ``release_waiting``."""
    state = server()
    state.waiting += 1
    await state.release.wait()
    state.waiting -= 1


async def release_waiting() -> None:
    """End every ``wait_for_release``; runs on the loop, which the event belongs to."""
    state = server()
    state.release.set()
    state.release = asyncio.Event()


def held_count() -> int:
    """Calls pending here, of either kind."""
    state = server()
    return len(state.held) + state.waiting


def release_held() -> None:
    """Complete every future that was held."""
    with server().lock:
        futures, server().held = server().held, []
    for future in futures:
        future.set_result(None)


async def start_ticker() -> None:
    """Watch the loop that runs this."""
    server().ticker = Ticker()


async def stop_ticker() -> float:
    """The largest lag in seconds since ``start_ticker``."""
    ticker, server().ticker = server().ticker, None
    assert ticker is not None
    return await ticker.stop()


def allocated_blocks() -> int:
    """Memory blocks of Python's allocator that are in use in this process, after a garbage collection."""
    gc.collect()
    return sys.getallocatedblocks()


def private_bytes() -> int:
    """Resident memory of this process in bytes that it shares with no other one, after a garbage collection."""
    gc.collect()
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        lines = [line.split() for line in file]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:"))


def resident_bytes() -> int:
    """Resident memory of this process in bytes, after a garbage collection."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * resource.getpagesize()
