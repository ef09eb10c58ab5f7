"""The end of a TCP socket: after its last byte was written it stays open until the other side has read that.

The system answers with a reset to what arrives at a closed socket, or was unread when it was closed, and a reset drops
what is still on its way to the other side: a goodbye would be lost if the other side has just sent something. Therefore
this side shuts down its writing side, and reads and drops what comes until the other side closes as well. A unix socket
needs none of this: what was written is at the other side already.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# Bytes of one read, and of one turn of the loop, at most.
_BUFFER, _TURN = 64 * 1024, 1024 * 1024


class Lingering:
    """See the module. On the loop, which must not watch the socket otherwise.

    done: called once the other side has closed, or its host reports that the connection is gone there. The owner bounds
    the time, and calls `end` before the socket is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, done: Callable[[], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._done = done
        self._buffer = bytearray(_BUFFER)
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # it is not connected any more
            loop.call_soon(done)
        else:
            loop.add_reader(sock.fileno(), self._drop)

    def _drop(self) -> None:
        try:
            for _ in range(_TURN // _BUFFER):
                if not self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT):
                    break
            else:
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self._done()

    def end(self) -> None:
        """Stop watching the socket."""
        self._loop.remove_reader(self._sock.fileno())
