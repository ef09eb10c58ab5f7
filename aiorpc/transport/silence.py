"""Whether the host at the other end of a TCP connection still answers: a host that vanished closes no connection.

The system is asked (``TCP_INFO``), not the other process. A process that is stopped, or whose loop is blocked, reads
nothing, and the window of its connection closes; but its host still acknowledges what reaches it, and answers the
probes of a closed window. ``TCP_USER_TIMEOUT`` would take a window that stays closed for a dead host, so it is not
used. Keep-alive watches idle connections (`sockets.tune_tcp`).
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

# The kernel's tcp_info: eight bytes, of which the first is the state and the fourth the number of unanswered probes;
# then words of four bytes, among them the number of unacknowledged segments, and the milliseconds since the last
# acknowledgement.
_INFO = struct.Struct("@B2xB4x16xI28xI")
_ESTABLISHED = 1


class Heard(NamedTuple):
    """What the system knows of the other end of a connection."""

    #: Whether something was sent that a live host would have answered by now.
    owes: bool
    #: Seconds since anything was acknowledged.
    ago: float
    #: Whether either side has closed it, or it has broken.
    over: bool = False


def hear(sock: socket.socket) -> Heard | None:
    """What the system knows of that connection; None if it has ended, or is not TCP."""
    if sock.family == socket.AF_UNIX:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    state, probes, unacknowledged, milliseconds = _INFO.unpack(info)
    # One probe may have left a moment ago. Data that have just left do not count: `Silence` begins at its first look.
    return Heard(unacknowledged > 0 or probes > 1, milliseconds / 1000, state != _ESTABLISHED)


class Silence:
    """For how long one connection has owed an answer, as seen by looks from time to time."""

    def __init__(self) -> None:
        self._since: float | None = None  # the first look that saw an answer owed, without one since

    def look(self, heard: Heard, now: float) -> float:
        """Seconds of silence until now; 0.0 if no answer is owed."""
        if not heard.owes:
            self._since = None
            return 0.0
        heard_at = now - heard.ago
        self._since = now if self._since is None else max(self._since, heard_at)
        return now - self._since
