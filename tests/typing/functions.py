"""The functions that the cases call: one of each kind that a verb takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TypeVar

import torch

import aiorpc as rpc

T = TypeVar("T")


class Model:
    """A class that is called as a function, and whose methods are."""

    def __init__(self, size: int, *, bias: bool = True) -> None:
        self.size = size
        self.bias = bias

    def score(self, x: torch.Tensor) -> float:
        """A plain method."""
        return float(x.sum())

    async def load(self, path: str) -> int:
        """One that awaits."""
        return len(path)


def add(a: int, b: int = 1, *, note: str = "") -> int:
    """A plain function, with a default and a keyword."""
    return a + b


def pair(a: int, b: str) -> tuple[int, str]:
    """One with arguments of two types."""
    return a, b


def name() -> str:
    """One without arguments."""
    return "w"


def nothing() -> None:
    """One that returns nothing."""


def same(value: T) -> T:
    """A generic one."""
    return value


async def fetch(key: str) -> bytes:
    """One that awaits."""
    return key.encode()


@rpc.async_execution
def later(a: int) -> torch.futures.Future[float]:
    """One whose result comes with a Future of torch."""
    return torch.futures.Future()


@rpc.async_execution
def relayed(to: str, a: int) -> rpc.Future[int]:
    """One whose result comes with a Future of another call."""
    return rpc.call(to, add, a)


@rpc.batched(max_size=4, max_wait=0.01)
def doubled(values: list[int]) -> list[float]:
    """One that serves many callers at once."""
    return [2.0 * value for value in values]


@rpc.batched(max_size=4, max_wait=0.01)
async def acted(states: list[torch.Tensor]) -> torch.Tensor:
    """One that awaits, and returns rows of a tensor."""
    return torch.stack(states)


def count(limit: int) -> Iterator[int]:
    """A generator."""
    yield from range(limit)


async def lines(path: str) -> AsyncIterator[str]:
    """An asynchronous generator."""
    yield path


def total(values: Sequence[float]) -> float:
    """Takes a sequence."""
    return sum(values)
