"""What the members of a round run for each other. Each run is written down at once, so that a kill takes none along."""

from __future__ import annotations

import asyncio
import os
import struct
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import torch

import aiorpc as rpc

_RUN = struct.Struct("<QQ")


class Mark(NamedTuple):
    """Which operation a call belongs to. file: where its runs are written down."""

    file: str
    number: int

    def note(self) -> None:
        """It runs here."""
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _RUN.pack(self.number, os.getpid()))
        finally:
            os.close(descriptor)


def runs_in(file: Path) -> Counter[tuple[int, int]]:
    """How often each operation ran in each process: by number and process id."""
    return Counter(_RUN.iter_unpack(file.read_bytes())) if file.exists() else Counter()


async def add_one(mark: Mark, value: int) -> int:
    """On the loop."""
    mark.note()
    return value + 1


def add_two(mark: Mark, value: int) -> int:
    """In a thread."""
    mark.note()
    return value + 2


def through(to: str, mark: Mark, value: int) -> int:
    """A nested call, blocking."""
    return int(rpc.rpc_sync(to, add_two, args=(mark, value)))


async def asleep(mark: Mark, seconds: float) -> None:
    """What nobody waits for to its end."""
    mark.note()
    await asyncio.sleep(seconds)


async def numbers(mark: Mark, count: int, size: int) -> AsyncIterator[torch.Tensor]:
    """A stream of tensors."""
    mark.note()
    for each in range(count):
        yield torch.full((size,), each)


def echo(mark: Mark, tensor: torch.Tensor) -> torch.Tensor:
    """Give it back."""
    mark.note()
    return tensor


@rpc.batched(max_size=4, max_wait=0.005)
def all_doubled(rows: list[tuple[Mark, int]]) -> list[int]:
    """Twice the number, for several callers at once."""
    for mark, _ in rows:
        mark.note()
    return [2 * value for _, value in rows]


class Total:
    """A remote object."""

    def __init__(self, mark: Mark, start: int) -> None:
        mark.note()
        self.value = start

    def add(self, value: int) -> int:
        """Count on."""
        self.value += value
        return self.value


def use(total: rpc.RRef[Total], value: int) -> int:
    """At a third member: somebody else's object."""
    return int(total.rpc_sync().add(value))


def times(mark: Mark, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """One step of a pass over several members."""
    mark.note()
    return tensor * factor


def pid() -> int:
    """Of the member's process."""
    return os.getpid()
