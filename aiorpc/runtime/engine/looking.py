"""Looking now and then, on the loop, for what it is not told of, as long as there may be something.

Whoever wakes the loop takes the interpreter from those who run, and a message of its own wakes the other end up, too.
Where more of the same follows soon, all of it can be seen to by one look.

    state   until
    idle    somebody asks for a look: `ask`, `begin`
    near    the look after the shortest pause; whoever asks meanwhile wakes nobody
    far     the look after a longer pause, which whoever asks meanwhile brings forward
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .coalesced import CoalescedCallback
from .engine import Engine


class Looking:
    """See the module. `ask` from any thread, the rest on the loop.

    look: does what there is to do, and says after how many seconds to look again; None if not before somebody asks.
    shortest: gives how many seconds there are between asking and looking. pause: those before the latest look, or the
    next one. near: whether that comes after the shortest pause.
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
        """There may be something from now on. Any thread."""
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
        self.near = False  # before the look: whoever has something later asks again
        pause = self._look()
        if pause is not None:
            self._plan(pause)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
