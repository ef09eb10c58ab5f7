"""A look at all TCP connections of a worker, once in a while: for hosts that have vanished, and to acknowledge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from ...transport import sockets
from ...transport.connection import Connection

# So many looks are made until a silence has lasted too long, at least one each second.
_LOOKS = 10
_LONGEST_PAUSE = 1.0
# So many times sooner a connection is given up that goes on over another one.
_SOONER = 3


class LineWatch:
    """Breaks connections off whose other host owes an answer for too long (`sockets.TCP_TIMEOUT`). On the loop.

    A worker that is stopped or busy is not silent in this sense: its host answers for it (`transport.silence`).
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
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.start()
        now = time.monotonic()
        for connection in list(self._connections):
            silence = connection.silence(now)
            # To connect anew costs little, and is the best way to find out.
            limit = sockets.TCP_TIMEOUT if connection.on_suspended is None else sockets.TCP_TIMEOUT / _SOONER
            if silence >= limit:
                connection.break_off(silence)
            else:
                connection.look()
