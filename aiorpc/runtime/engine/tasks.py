"""The tasks of one worker: none outlives it."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Starts tasks and ends what is left of them. On the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], *, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        """A task that ends with the worker at the latest. context: an empty one if None."""
        task = self._loop.create_task(coroutine, context=context or contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def serve(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that serves a call, in the running context; it ends with `served`.

        Not `spawn`, whose callback at the end would cost each call another turn of the loop.
        """
        if sys.version_info >= (3, 12):
            # The first step runs at once: a handler that awaits nothing costs no turn of the loop.
            task = asyncio.Task(coroutine, loop=self._loop, eager_start=True)
        else:
            task = self._loop.create_task(coroutine)
        if not task.done():
            self._tasks.add(task)
        return task

    def drop(self, task: asyncio.Task[None]) -> None:
        """A task of `serve` will end without having begun."""
        self._tasks.discard(task)

    def served(self) -> None:
        """The running task has served its call."""
        self._tasks.discard(asyncio.current_task(self._loop))  # None is not in the set

    async def end(self, limit: float) -> None:
        """Cancel what runs, but the running task itself, and wait for it for at most `limit` seconds."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit)
