"""The end of a TCP socket whose last word has been written: it is not closed before the other side has read that.

The system answers with a reset to what arrives at a socket that is closed, or was unread when it was, and a reset
throws away what is still on its way to the other side. A goodbye would be lost to whoever has just sent something. So
this side says that it sends no more, and takes what comes, to drop it, until the other side closes as well. A unix
socket needs nothing of that: what was written there is at the other side already.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# Read at once, and in one turn of the loop at most, in bytes.
_BUFFER, _TURN = 64 * 1024, 1024 * 1024


class Lingering:
    """See the module. On the loop, which must not look at the socket otherwise.

    done: called once the other side has closed, or its host says that nobody has the connection any more. Whoever made
    this bounds the time, and calls `end` before the socket is closed.
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
        """Look at the socket no more."""
        self._loop.remove_reader(self._sock.fileno())
