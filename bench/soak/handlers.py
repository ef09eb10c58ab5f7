"""What the members of a soak ask each other to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import aiorpc as rpc


async def noop() -> None:
    """What latency is measured with."""


def add(a: int, b: int) -> int:
    """In a thread of the pool."""
    return a + b


async def add_on_loop(a: int, b: int) -> int:
    """The same on the loop."""
    return a + b


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """There and back."""
    return tensor


def square(tensor: torch.Tensor) -> torch.Tensor:
    """What a gradient goes through."""
    return tensor * tensor


def rows(count: int) -> Iterator[torch.Tensor]:
    """A stream from a thread."""
    for number in range(count):
        yield torch.full((256,), float(number))


async def rows_on_loop(count: int) -> AsyncIterator[torch.Tensor]:
    """The same from the loop."""
    for number in range(count):
        yield torch.full((256,), float(number))


@rpc.batched(max_size=16, max_wait=0.005)
def doubled(values: list[int]) -> list[int]:
    """Of several callers at once."""
    return [2 * value for value in values]


class Tally:
    """What references are to."""

    def __init__(self, value: int) -> None:
        self.value = value

    def add(self, number: int) -> int:
        """Count on."""
        self.value += number
        return self.value


async def add_for(tally: Any, number: int) -> int:
    """At a third worker: use a reference that came along."""
    return int(await tally.rpc_async().add(number))


async def wait() -> None:
    """Longer than any caller waits."""
    await asyncio.sleep(600)


def fail(text: str) -> None:
    """Raise what the caller sees."""
    raise ValueError(text)
