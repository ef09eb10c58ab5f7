"""Messages that leave with the next one to the same worker, or by themselves a little later if there is none.

To send a message wakes the other end up, and its answer wakes up the loop here. Where the next message follows soon, as
in a program that trains step after step, both can be had with that one.

    state     until
    idle      a message is to leave later: `add`
    watching  a look has found none
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..engine.engine import Engine
from ..engine.soon import Soon


class Flushed(Protocol):
    """The worker that messages wait for (`Peer`)."""

    def flush(self) -> None:
        """Send what is queued. On the loop."""


class Trailing:
    """See the module. `add` from any thread, the rest on the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peers: set[Flushed] = set()
        self._watching = False
        self._watch = Soon(engine.call_on_loop, self._begin)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: Flushed) -> None:
        """A message to that worker is queued, and not sent. Any thread."""
        self._peers.add(peer)
        if not self._watching:
            self._watch()

    def _begin(self) -> None:
        if self._timer is None:
            self._plan()

    def _plan(self) -> None:
        self._watching = True
        self._timer = self._engine.loop.call_later(self._engine.bounds.trailing_pause, self._look)

    def _look(self) -> None:
        self._timer = None
        self._watching = False  # before the look: who adds something later asks again
        found = False
        while self._peers:
            self._peers.pop().flush()
            found = True
        if found:  # more will follow: so the loop is not woken up for each
            self._plan()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
