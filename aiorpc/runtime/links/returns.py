"""Giving back what was borrowed: memory of the other end of a link that nobody uses here any more.

Nobody is told when the last view of a block has died (`channels/shm.py`): that may be in the midst of anything, also
where an exception is lost. What is sent takes along what can be given back; where nothing is sent, this looks now and
then, as long as something is borrowed: soon after something has come or was given back, and more and more seldom
after that.
"""

from __future__ import annotations

from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.looking import Looking

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
        self._looking = Looking(engine, self._look, self._shortest)
        self.watch: Callable[[], None] = self._looking.ask  # something was borrowed here, or let go
        self.close: Callable[[], None] = self._looking.close

    def _shortest(self) -> float:
        return self._engine.bounds.release_pause

    def _look(self) -> float | None:
        shortest = self._shortest()
        if self._flush():
            return shortest
        return max(shortest, min(2 * self._looking.pause, LONGEST)) if self._borrowed() else None
