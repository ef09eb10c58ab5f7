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
    """A task of the worker's own, which takes its first step in a later turn of the loop, after the caller's.

    The loop is not asked for it: it may have a factory of the program's for tasks, such as
    ``asyncio.eager_task_factory``, which would run the task in the midst of whoever begins it.
    """
    return asyncio.Task(coroutine, loop=loop, context=context)


async def until_done(task: asyncio.Future[T]) -> None:
    """Wait for something that takes a bounded time, and is not to be left before its end, however often whoever waits
    is cancelled: who calls this was cancelled already, and raises that behind it."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))


class Tasks:
    """Starts tasks and ends what is left of them. On the loop.

    alive: all of them. Who serves a call enters its task there, and takes it out as it ends, in place of `spawn`, whose
    callback at the end would cost each call another turn of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.alive: set[asyncio.Task[object]] = set()

    def spawn(self, coroutine: Coro[T], *, context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """Start a task, which ends with the worker at the latest. context: the one that it runs in, empty if None."""
        task = begin(coroutine, self._loop, context or contextvars.Context())
        self.alive.add(task)
        task.add_done_callback(self.alive.discard)
        return task

    async def done_or_set(self, task: asyncio.Task[object], event: asyncio.Event) -> None:
        """Wait until that task is done, or that event is set, whichever comes first."""
        waiting = self.spawn(event.wait())
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

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
