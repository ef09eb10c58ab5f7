"""What workers are asked to do in these tests; importable on both sides."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import aiorpc as rpc


def add(a: Any, b: Any) -> Any:
    """A plain handler."""
    return a + b


async def aadd(a: Any, b: Any) -> Any:
    """The same on the loop."""
    return a + b


def echo(value: Any) -> Any:
    """Give it back."""
    return value


def pid() -> int:
    """Of the worker's process."""
    return os.getpid()


def block(seconds: float = 60.0) -> None:
    """A handler thread that does not answer for a while."""
    time.sleep(seconds)


async def ablock(seconds: float = 60.0) -> None:
    """A task that does not answer for a while."""
    await asyncio.sleep(seconds)


def hold_the_interpreter(seconds: float) -> float:
    """Keep the interpreter lock: nothing else in that process runs Python meanwhile, its loop neither."""
    started = time.monotonic()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return time.monotonic() - started


async def acount(n: int) -> AsyncIterator[int]:
    """A stream of n numbers, and then silence."""
    for i in range(n):
        yield i
    await asyncio.sleep(60)


def count(n: int) -> Iterator[int]:
    """A stream of n numbers, and then silence, in a thread."""
    yield from range(n)
    time.sleep(60)


class Counter:
    """A remote object."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, n: int) -> int:
        """Count on."""
        self.value += n
        return self.value

    def block(self, seconds: float = 60.0) -> None:
        """A method that does not answer for a while."""
        time.sleep(seconds)


def call_other(to: str, seconds: float) -> Any:
    """Call a third worker from a handler, blocking."""
    return rpc.rpc_sync(to, block, args=(seconds,))


def fork_and_hold_sockets(seconds: float) -> int:
    """Fork a child without exec and without a word to Python's hooks: it keeps all our descriptors open."""
    libc = ctypes.CDLL(None)
    child = int(libc.fork())
    if child == 0:
        libc.sleep(int(seconds))
        libc._exit(0)
    return child


def descriptor_count() -> int:
    """Open descriptors of the worker's process."""
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Resident memory of the worker's process, in bytes, without what the allocator keeps of what was freed."""
    ctypes.CDLL(None).malloc_trim(0)  # glibc kept 60 to 170 MB of 1 MB values that several threads had made and freed
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def aresident() -> int:
    """The same on the loop."""
    return resident()


def total(values: list[torch.Tensor]) -> float:
    """Sum of all elements."""
    return float(sum(value.sum() for value in values))


def call_back(to: str, value: Any) -> Any:
    """Call somebody from a handler, blocking."""
    return rpc.rpc_sync(to, echo, args=(value,))


class Gate:
    """Lets so many calls of a worker's process gather before any of them is answered."""

    waiting = 0
    full = asyncio.Event()


async def gather(value: Any, count: int) -> Any:
    """Give the value back once so many of these calls are here at the same time."""
    Gate.waiting += 1
    if Gate.waiting == count:
        Gate.full.set()
    await asyncio.wait_for(Gate.full.wait(), 30)
    return value


def marked(size: int, marks: dict[int, int]) -> torch.Tensor:
    """A tensor of so many bytes, zero but for the marks: position to value."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    for position, value in marks.items():
        tensor[position] = value
    return tensor


def marks_of(tensor: torch.Tensor, positions: list[int]) -> tuple[int, dict[int, int]]:
    """Length of such a tensor, and what stands at these positions."""
    return len(tensor), {position: int(tensor[position]) for position in positions}
