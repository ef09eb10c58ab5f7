"""Messages that leave with the next message to the same worker, or by themselves a little later.

A message wakes up the other end, and its answer the loop here. In a program that trains step after step the next
message follows soon, and saves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..engine.engine import Engine
from ..engine.looking import Looking


class Flushed(Protocol):
    """The worker that messages wait for (`Peer`)."""

    def flush(self) -> None:
        """Send queued messages. On the loop."""


class Piggybacked:
    """The peers with queued messages. `add` from any thread, the rest on the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peers: set[Flushed] = set()
        self._looking = Looking(engine, self._look, self._pause)
        self.close: Callable[[], None] = self._looking.close

    def add(self, peer: Flushed) -> None:
        """A message to a peer is queued and not sent. Any thread."""
        self._peers.add(peer)
        self._looking.ask()

    def _pause(self) -> float:
        return self._engine.bounds.piggyback_pause

    def _look(self) -> float | None:
        if not self._peers:
            return None
        while self._peers:
            self._peers.pop().flush()
        return self._pause()  # more will follow: keep looking, without a wake-up for each
