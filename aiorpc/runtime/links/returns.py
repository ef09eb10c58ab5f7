"""Giving back what was borrowed: memory of the other end of a link that nobody uses here any more.

Nobody is told when the last view of a block has died (`channels/shm.py`): that may be in the midst of anything, also
where an exception is lost. What is sent takes along what can be given back; where nothing is sent, this looks now and
then, as long as something is borrowed: soon after something has come or was given back, and more and more seldom
after that.

    state      until
    idle       something is borrowed or let go: `watch`
    attentive  a look has found nothing: `_look`
    leisurely  something is borrowed or let go
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.soon import Soon

# Seconds between two looks at most: memory that was in use for long is given back so late at worst.
LONGEST = 0.5


class Returns:
    """See the module. `watch` from any thread, the rest on the loop.

    flush: gives back what was let go, and says whether there was any. borrowed: whether there may be more later.
    """

    def __init__(self, engine: Engine, flush: Callable[[], bool], borrowed: Callable[[], bool]) -> None:
        self._engine = engine
        self._flush = flush
        self._borrowed = borrowed
        self._attentive = False
        self._attend = Soon(engine.call_on_loop, self._begin)
        self._pause = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Something was borrowed here, or let go. Any thread."""
        if not self._attentive:
            self._attend()

    def _begin(self) -> None:
        self.close()
        self._attentive = True
        self._plan(self._engine.bounds.release_pause)

    def _plan(self, pause: float) -> None:
        self._pause = pause
        self._timer = self._engine.loop.call_later(pause, self._look)

    def _look(self) -> None:
        self._timer = None
        self._attentive = False  # before the look: whoever borrows something later asks again
        given_back = self._flush()
        if given_back or self._borrowed():
            least = self._engine.bounds.release_pause
            self._attentive = given_back
            self._plan(least if given_back else max(least, min(2 * self._pause, LONGEST)))

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
