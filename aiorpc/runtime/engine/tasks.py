"""The tasks of one worker: none outlives it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Starts tasks and ends what is left of them. On the loop.

    alive: all of them. Who serves a call enters its task there, and takes it out as it ends, in place of `spawn`, whose
    callback at the end would cost each call another turn of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.alive: set[asyncio.Task[Any]] = set()

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], *, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        """Start a task, which ends with the worker at the latest. context: the one that it runs in, empty if None."""
        task = self._loop.create_task(coroutine, context=context or contextvars.Context())
        self.alive.add(task)
        task.add_done_callback(self.alive.discard)
        return task

    async def end(self, limit: float) -> None:
        """Cancel all tasks but the one that calls this, and wait for them for at most `limit` seconds.

        Nothing once the loop is closed: none of them goes on.
        """
        if self._loop.is_closed():
            return
        current = asyncio.current_task()
        tasks = [task for task in self.alive if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit)
