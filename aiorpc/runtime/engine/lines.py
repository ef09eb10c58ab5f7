"""A regular look at all TCP connections of a worker: to notice vanished hosts, and to acknowledge frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from ...transport import sockets
from ...transport.connection import Connection

# Looks within the longest silence, and the longest pause between two looks in seconds.
_LOOKS = 10
_LONGEST_PAUSE = 1.0
# A connection that can be resumed is given up so many times sooner.
_SOONER = 3


class LineWatch:
    """Breaks off connections whose other host owes an answer for too long (`sockets.TCP_TIMEOUT`). On the loop.

    A stopped or busy worker is not silent in this sense: its host answers for it (`transport.silence`).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Iterable[Connection]) -> None:
        self._loop = loop
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        pause = min(_LONGEST_PAUSE, sockets.TCP_TIMEOUT / _LOOKS)
        self._timer = self._loop.call_later(pause, self._look)

    def stop(self) -> None:
        """Stop looking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.start()
        now = time.monotonic()
        for connection in list(self._connections):
            silence = connection.silence(now)
            # A new socket costs little, and shows soonest whether the host lives.
            limit = sockets.TCP_TIMEOUT if connection.on_suspended is None else sockets.TCP_TIMEOUT / _SOONER
            if silence >= limit:
                connection.break_off(silence)
            else:
                connection.look()
