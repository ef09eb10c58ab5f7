"""Deadlines of Futures that are awaited on one loop and settled by another loop, which may not run."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import Any, Protocol, TypeAlias

#: Seconds between two checks by a waiting thread or loop whether its Future was forgotten.
LOOK = 1.0


class Overseen(Protocol):
    """An awaited Future (`futures.Future`)."""

    def _end_overdue(self, now: float) -> float: ...

    def _refuse_idle_loop(self, awaited: bool) -> None: ...


#: Awaited Futures of a loop, by the asyncio Future that waits for each.
Watched: TypeAlias = dict[asyncio.Future[Any], Overseen]


class _Overseer:
    """Checks the deadlines of Futures that are awaited on this loop and settled by another one, which may be blocked or
    not run.

    There is one timer for all of them, because a timer for each would cost more than awaiting it. A waiter in `watched`
    gets an error if its Future will never settle here.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.watched: Watched = {}
        self.looking = False

    def look_later(self) -> None:
        self.looking = True
        loop = self.loop()
        assert loop is not None, "it runs"
        loop.call_later(LOOK, self._look)

    def _look(self) -> None:
        self.looking = False
        now = time.monotonic()
        for waiter, future in list(self.watched.items()):
            try:
                future._end_overdue(now)
                future._refuse_idle_loop(True)
            except Exception as error:  # it never settles: this thread has to run that loop, or the process was forked
                if not waiter.done():
                    waiter.set_exception(error)
        if self.watched:
            self.look_later()


class _Here(threading.local):
    """The overseer of the loop that ran last in this thread."""

    overseer: _Overseer | None = None


_here = _Here()


def oversee(future: Overseen, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any]) -> Watched:
    """Watch a Future of another loop that is awaited on the running one. Delete the waiter from the result at last."""
    overseer = _here.overseer
    if overseer is None or overseer.loop() is not loop:
        overseer = _here.overseer = _Overseer(loop)
    overseer.watched[waiter] = future
    if not overseer.looking:
        overseer.look_later()
    return overseer.watched
