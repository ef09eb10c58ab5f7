"""What workers in tests of rights serve, and what it leads to that they do not."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from os import mkdir
from typing import Any

import torch

import aiorpc as rpc

__all__ = ["Box", "Net", "mkdir", "os"]


def add(a: Any, b: Any) -> Any:
    return a + b


async def aadd(a: Any, b: Any) -> Any:
    return a + b


@rpc.async_execution
def add_later(a: Any, b: Any) -> rpc.Future[Any]:
    future: rpc.Future[Any] = rpc.Future()
    future.set_result(a + b)
    return future


@rpc.batched(max_size=1)
def add_each(a: list[Any], b: list[Any]) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]


def count(n: int) -> Iterator[int]:
    yield from range(n)


async def acount(n: int) -> AsyncIterator[int]:
    for each in range(n):
        yield each


def _private() -> int:
    return 1


@rpc.exposed
def marked() -> int:
    return 2


@rpc.exposed
@rpc.batched(max_size=1)
def marked_batch(a: list[int]) -> list[int]:
    return a


@rpc.async_execution
@rpc.exposed
def marked_later(a: int) -> rpc.Future[int]:
    return add_later(a, 0)


@rpc.exposed
class Marked:
    """Has its own things, and one of somebody else's."""

    borrowed = os.mkdir

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.kept = os.mkdir

    @staticmethod
    def static(a: int) -> int:
        return a

    def get(self) -> int:
        return self.value

    def _hidden(self) -> None: ...


class Base:
    """Inherited from."""

    def inherited(self) -> str:
        return "inherited"


class Box(Base):
    """Has things of all kinds."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.attribute = os.mkdir
        self.other = Other()

    def get(self) -> Any:
        return self.value

    def put(self, value: Any) -> None:
        self.value = value

    @property
    def asked(self) -> Any:
        asked.set()
        return self.get

    def __len__(self) -> int:
        return 7


asked = threading.Event()


class Other:
    """Its values are not served."""

    def get(self) -> str:
        return "other"


class Net(torch.nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def table() -> torch.Tensor:
    return torch.ones(4, 2, requires_grad=True).exp()


def scripted(x: int) -> int:
    return x + 1


def give_box(value: Any) -> rpc.RRef[Box]:
    """A reference that its caller has not made."""
    return rpc.RRef(Box(value))


def call_back(to: str, *args: Any) -> Any:
    """Call `add` there."""
    return rpc.rpc_sync(to, add, args)
