"""Blocking steps of one worker: each runs in a thread of its own, and the end of the worker waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from ...threads import run_in_thread
from .tasks import begin

T = TypeVar("T")


class Steps:
    """Runs blocking steps, such as those of the rendezvous, in threads. Its methods belong to the loop.

    stop: set when the worker gives up joining, or ends; steps that wait for other workers look at it, and end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.stop: threading.Event = threading.Event()
        self._loop = loop
        self._name = name
        self._running: set[asyncio.Task[object]] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Run the function in a thread of its own; its result or error.

        The function has to bound its time by itself. If the awaiting task is cancelled, the step goes on, and `wait`
        waits for it. Once the loop is closed, the function runs in the calling thread.
        """
        if self._loop.is_closed():
            return function()
        step = begin(run_in_thread(function, f"aiorpc-{self._name}-rendezvous"), self._loop)
        self._running.add(step)
        step.add_done_callback(self._ended)
        return await asyncio.shield(step)

    @property
    def loop_closed(self) -> bool:
        """Whether the loop is closed, and nothing can be awaited."""
        return self._loop.is_closed()

    def _ended(self, step: asyncio.Task[object]) -> None:
        self._running.discard(step)
        if not step.cancelled():
            step.exception()  # keeps asyncio from logging it

    async def wait(self, seconds: float) -> bool:
        """Wait for running steps, for at most so many seconds. Whether none is left."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        return not self._running
