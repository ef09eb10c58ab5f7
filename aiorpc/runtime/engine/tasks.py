"""The tasks of one worker: none outlives it."""

from __future__ import annotations

import asyncio
import contextvars
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
        """Start a task, which ends with the worker at the latest. context: the one that it runs in, empty if None."""
        task = self._loop.create_task(coroutine, context=context or contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def serve(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that serves a call, in a copy of the running context. It has to call `served` as it ends.

        It is not started by `spawn`, because the callback at its end would cost each call another turn of the loop.
        """
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        return task

    def drop(self, task: asyncio.Task[None]) -> None:
        """Forget a task of `serve` that is cancelled before its first step, and so will not call `served`."""
        self._tasks.discard(task)

    def served(self) -> None:
        """The running task has served its call."""
        self._tasks.discard(asyncio.current_task(self._loop))  # None is not in the set

    async def end(self, limit: float) -> None:
        """Cancel all tasks but the one that calls this, and wait for them for at most `limit` seconds."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit)
