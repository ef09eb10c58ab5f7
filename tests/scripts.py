"""A worker as the current one: of a test, or of a script's part in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from aiorpc import Worker
from aiorpc.runtime.calls.current import current_node

T = TypeVar("T")


def make_current(worker: Worker) -> None:
    """The verbs without a worker are that one's from now on, in this task or thread."""
    current_node.set(worker._node)


def set_bounds(worker: Worker, **bounds: Any) -> None:
    """Other bounds than a worker has, where a test cannot wait as long as a program may have to."""
    worker._node.engine.bounds = replace(worker._node.engine.bounds, **bounds)


def as_script(worker: Worker, function: Callable[..., T], *args: Any) -> Callable[[], T]:
    """The call as a script's part, for a thread: with that worker as the current one."""

    def body() -> T:
        make_current(worker)
        return function(*args)

    return body


async def run(worker: Worker, function: Callable[..., T], *args: Any) -> T:
    """A script's part, in a thread of its own."""
    return await asyncio.to_thread(as_script(worker, function, *args))
