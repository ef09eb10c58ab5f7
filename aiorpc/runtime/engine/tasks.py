"""The tasks of one worker: none outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import TypeVar

from ..._typing import Coro

T = TypeVar("T")


def begin(
    coroutine: Coro[T], loop: asyncio.AbstractEventLoop, context: contextvars.Context | None = None
) -> asyncio.Task[T]:
    """A task of the worker, which takes its first step in a later turn of the loop.

    It bypasses the loop's task factory: the program's may be ``asyncio.eager_task_factory``, which would run the task
    within the caller.
    """
    return asyncio.Task(coroutine, loop=loop, context=context)


async def until_done(task: asyncio.Future[T]) -> None:
    """Wait for the end of a bounded step, however often the calling task is cancelled. The caller raises CancelledError
    afterwards."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))


class Tasks:
    """Starts tasks and ends what is left of them. On the loop.

    alive: all of them. Served calls add and remove their tasks themselves: the callback of `spawn` would cost each call
    another turn of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.alive: set[asyncio.Task[object]] = set()

    def spawn(self, coroutine: Coro[T], *, context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """Start a task, which ends with the worker at the latest. context: of the task, empty if None."""
        task = begin(coroutine, self._loop, context or contextvars.Context())
        self.alive.add(task)
        task.add_done_callback(self.alive.discard)
        return task

    async def done_or_set(self, task: asyncio.Task[object], event: asyncio.Event) -> None:
        """Wait until the task is done or the event is set."""
        waiting = self.spawn(event.wait())
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def end(self, limit: float) -> None:
        """Cancel all tasks but the calling one, and wait for them for at most `limit` seconds.

        Does nothing once the loop is closed.
        """
        if self._loop.is_closed():
            return
        current = asyncio.current_task()
        tasks = [task for task in self.alive if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit)
