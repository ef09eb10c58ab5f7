"""Polling on the loop for events that do not wake it, while there may be some.

Waking the loop takes the interpreter from running threads, and a message of its own also wakes the other end. One look
handles all events that follow each other soon.

    state   until
    idle    a request for a look: `ask`, `begin`
    near    the look after the shortest pause; requests meanwhile wake no thread
    far     the look after a longer pause, which a request meanwhile brings forward
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .coalesced import CoalescedCallback
from .engine import Engine


class Looking:
    """See the module. `ask` from any thread, the rest on the loop.

    look: handles the events, and returns the seconds until the next look; None to wait for a request. shortest: returns
    the seconds between a request and its look. pause: the seconds before the next or the latest look. near: whether the
    next look comes after the shortest pause.
    """

    def __init__(self, engine: Engine, look: Callable[[], float | None], shortest: Callable[[], float]) -> None:
        self._engine = engine
        self._look = look
        self._shortest = shortest
        self._begin_soon = CoalescedCallback(engine.call_on_loop, self.begin)
        self._timer: asyncio.TimerHandle | None = None
        self.near: bool = False
        self.pause: float = 0.0

    def ask(self) -> None:
        """Request a look: there may be an event. Any thread."""
        if not self.near:
            self._begin_soon()

    def begin(self) -> None:
        """As `ask`, on the loop."""
        if not self.near:
            self._plan(self._shortest())

    def _plan(self, pause: float) -> None:
        self.close()
        self.near = pause <= self._shortest()
        self.pause = pause
        self._timer = self._engine.loop.call_later(pause, self._run)

    def _run(self) -> None:
        self._timer = None
        self.near = False  # before the look: later events need another request
        pause = self._look()
        if pause is not None:
            self._plan(pause)

    def close(self) -> None:
        """Cancel the next look."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
