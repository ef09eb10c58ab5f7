"""Planted troubles: handlers that bring a group to a standstill."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import AsyncIterator

import torch

import aiorpc as rpc

lock = threading.Lock()
loop_lock = asyncio.Lock()


def hold(after: str) -> None:
    """Hold the lock of this worker, and call a worker that wants its own."""
    with lock:
        time.sleep(0.3)  # all workers have theirs by then
        rpc.rpc_sync(after, take)


def take() -> None:
    """Wait for the lock of this worker."""
    with lock:
        pass


async def hold_on_loop(after: str) -> None:
    """The same with a lock of asyncio."""
    async with loop_lock:
        await asyncio.sleep(0.3)
        await rpc.call(after, take_on_loop)


async def take_on_loop() -> None:
    async with loop_lock:
        pass


async def block_the_loop(seconds: float) -> None:
    """A handler on the loop that does not let the loop go on."""
    time.sleep(seconds)  # noqa: ASYNC251


def hold_the_interpreter(seconds: int) -> None:
    """A function of C that keeps the interpreter lock, as a badly written extension does."""
    ctypes.PyDLL(None).sleep(seconds)


def wait(seconds: float) -> None:
    """A handler that takes its time."""
    time.sleep(seconds)


def relay(after: str) -> None:
    """Use the lock of this worker for a moment, and then a worker that does the same."""
    with lock:
        time.sleep(0.02)
    rpc.rpc_sync(after, take)


async def count(most: int) -> AsyncIterator[int]:
    """A stream that its reader takes slowly."""
    for number in range(most):
        yield number


def fork(seconds: float) -> int:
    """Fork a process that lives for a while."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    return child


def size_of(value: torch.Tensor) -> int:
    return value.numel()


_subscriptions: list[rpc.types.Subscription[torch.Tensor]] = []


async def read_weights() -> int:
    """Subscribe; the first version's number."""
    _subscriptions.append(rpc.subscribe("weights", timeout=20))
    got: rpc.types.PublishedVersion[torch.Tensor] = await anext(_subscriptions[0])
    return got.version


async def end_reading() -> None:
    """End the subscriptions."""
    for each in _subscriptions:
        await each.aclose()
    _subscriptions.clear()
