"""Futures to be settled, and threads that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from aiorpc.futures import Future, outcome

# Long enough that only a hang reaches it.
LONG = 20.0
MOST = 3000  # instructions: more than any of this takes


def pending(loop: asyncio.AbstractEventLoop | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future._loop = loop
    return future


def settled(value: Any = None, error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    _complete(future, value, error)
    return future


def torch_future(value: Any = None, error: Exception | None = None) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    _complete(future, value, error)
    return future


def _complete(future: torch.futures.Future[Any], value: Any, error: Exception | None) -> None:
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def see(future: Future[Any]) -> tuple[str, object]:
    """How the Future ended: name of the error's type or "value", and its text or the value."""
    value, error = outcome(future)
    return ("value", value) if error is None else (type(error).__name__, str(error))


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; fail after LONG seconds."""
    limit = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    """The same on a loop."""
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110  # nothing announces these conditions
            await asyncio.sleep(0.001)


@contextmanager
def running(target: Callable[..., object], *args: object) -> Iterator[list[Any]]:
    """Run `target` in a thread meanwhile; what it returned or raised is in the list once the block is left."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(target(*args))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        thread.join(LONG)
        assert not thread.is_alive()


def all_at_once(*jobs: Callable[[], object]) -> list[Any]:
    """Start the jobs in one thread each, as nearly together as can be; what they returned or raised."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        barrier.wait(LONG)
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result(LONG) for done in [pool.submit(run, job) for job in jobs]]


def made_here() -> Future[Any]:
    future = pending()
    future._subject = "the call of f"
    future._site = (made_here.__code__, 0)
    return future


def outcome_of(future: Future[Any]) -> tuple[str, object]:
    """Wait for it, and say how it ended."""
    with contextlib.suppress(ValueError):
        future.wait(LONG)
    return see(future)


class Joined:
    """An arrival that remembers the threads that joined."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def join(self) -> None:
        self.threads.append(threading.get_ident())


def arriving(value: Any = 1) -> tuple[Future[Any], Joined]:
    """A pending Future of a value that is still being made on some streams."""
    future, joined = pending(), Joined()
    future._arrival = joined
    return future, joined
