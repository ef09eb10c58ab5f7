"""Deadlines of Futures that are awaited on one loop, and have to be settled by another loop that may not run."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import Any, Protocol, TypeAlias

#: Seconds between two looks of a waiting thread or loop whether its Future could have been forgotten.
LOOK = 1.0


class Overseen(Protocol):
    """What is awaited (`futures.Future`)."""

    def _end_overdue(self, now: float) -> float: ...

    def _refuse_idle_loop(self, awaited: bool) -> None: ...


#: What is awaited on a loop, by what waits for it there.
Watched: TypeAlias = dict[asyncio.Future[Any], Overseen]


class _Overseer:
    """Sees to the deadlines of Futures that are awaited on this loop, and that another one has to settle.

    That loop may be blocked, or may not run at all: then the time of a call would never be up. There is one
    timer for all of them, as one for each would cost more than all else that is done to await it. watched: what waits
    gets the error if what it waits for will never settle here.
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
            except Exception as error:  # it never comes: this thread is to run that loop, or the process was forked
                if not waiter.done():
                    waiter.set_exception(error)
        if self.watched:
            self.look_later()


class _Here(threading.local):
    """The overseer of the loop that ran last in this thread. It is of that loop, and of no worker."""

    overseer: _Overseer | None = None


_here = _Here()


def oversee(future: Overseen, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any]) -> Watched:
    """What another loop has to settle is awaited on the running one. Returns where to take the waiter out of then."""
    overseer = _here.overseer
    if overseer is None or overseer.loop() is not loop:
        overseer = _here.overseer = _Overseer(loop)
    overseer.watched[waiter] = future
    if not overseer.looking:
        overseer.look_later()
    return overseer.watched
