"""What a script does: work in a thread of its own, with a worker as the current one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from aiorpc import Worker
from aiorpc.runtime.calls.current import current_node

T = TypeVar("T")


def as_script(worker: Worker, function: Callable[..., T], *args: Any) -> Callable[[], T]:
    """The call as a script's part, for a thread: with that worker as the current one."""

    def body() -> T:
        current_node.set(worker._node)
        return function(*args)

    return body


async def run(worker: Worker, function: Callable[..., T], *args: Any) -> T:
    """A script's part, in a thread of its own."""
    return await asyncio.to_thread(as_script(worker, function, *args))
