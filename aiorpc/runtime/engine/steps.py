"""Blocking steps of one worker: each runs in a thread of its own, and is waited for before the worker is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from ...threads import run_in_thread
from .tasks import begin

T = TypeVar("T")


class Steps:
    """Runs steps that block, such as those of the rendezvous, beside the loop. Its methods belong to the loop.

    stop: to be set when the worker gives up joining, or ends; steps that wait for other workers look at it, and end.
    Not with each step that is given up: whoever asks the store something may lose interest in that alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.stop: threading.Event = threading.Event()
        self._loop = loop
        self._name = name
        self._running: set[asyncio.Task[object]] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Run the function in a thread of its own; what it returns is returned, and what it raises is raised.

        The function has to bound its time by itself. If whoever awaits this is cancelled the step goes on to its end,
        for which `wait` waits. Once the loop is closed it runs here: nothing could await it.
        """
        if self._loop.is_closed():
            return function()
        step = begin(run_in_thread(function, f"aiorpc-{self._name}-rendezvous"), self._loop)
        self._running.add(step)
        step.add_done_callback(self._ended)
        return await asyncio.shield(step)

    @property
    def loop_closed(self) -> bool:
        """Whether the loop is closed, so that nothing can be waited for."""
        return self._loop.is_closed()

    def _ended(self, step: asyncio.Task[object]) -> None:
        self._running.discard(step)
        if not step.cancelled():
            step.exception()  # look at it, or asyncio would log it if whoever waited was cancelled

    async def wait(self, seconds: float) -> bool:
        """Wait for the steps that are under way, for at most so many seconds. Whether none is any more."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        return not self._running
