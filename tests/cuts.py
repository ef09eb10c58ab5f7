"""TCP connections that break, as a network breaks them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path


def cut(rng: random.Random | None = None, share: float = 1.0, spared: int | None = None) -> None:
    """Break that share of the TCP connections of this process, as seen from both of their ends.

    spared: a port, at either end, whose connections stay.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not entry.is_socket():
                continue
            end = socket.socket(fileno=os.dup(int(entry.name)))
        with contextlib.suppress(OSError), end:
            if end.family == socket.AF_UNIX or spared in (end.getpeername()[1], end.getsockname()[1]):
                continue
            if rng is None or rng.random() < share:
                end.shutdown(socket.SHUT_RDWR)
