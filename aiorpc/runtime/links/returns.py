"""Giving back borrowed memory of the other end of a link that is not used here any more.

The death of the last view of a block (`channels/shm.py`) may happen at any moment and starts nothing. Each frame that
is sent takes along what can be given back. While something is borrowed this also looks from time to time: soon after
something was borrowed or given back, and less and less often after that.
"""

from __future__ import annotations

from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.looking import Looking

# Seconds between two looks at most: the longest delay of a return.
LONGEST = 0.5


class Returns:
    """See the module. `watch` from any thread, the rest on the loop.

    flush: gives back what was released, and returns whether there was any. borrowed: whether there may be more later.
    """

    def __init__(self, engine: Engine, flush: Callable[[], bool], borrowed: Callable[[], bool]) -> None:
        self._engine = engine
        self._flush = flush
        self._borrowed = borrowed
        self._looking = Looking(engine, self._look, self._shortest)
        self.watch: Callable[[], None] = self._looking.ask  # something was borrowed here, or released
        self.close: Callable[[], None] = self._looking.close

    def _shortest(self) -> float:
        return self._engine.bounds.release_pause

    def _look(self) -> float | None:
        shortest = self._shortest()
        if self._flush():
            return shortest
        return max(shortest, min(2 * self._looking.pause, LONGEST)) if self._borrowed() else None
