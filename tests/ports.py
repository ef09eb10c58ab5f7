"""TCP ports of the loopback interface for tests that have to say a port before somebody listens there."""

from __future__ import annotations

import secrets
import socket

LOWEST, HIGHEST = 20_000, 32_000  # below those that systems give to whoever asks for any: nobody else comes by one


def free_range(count: int) -> tuple[int, int]:
    """Neighbouring ports that were all free just now: the first and the last. Each time others."""
    for _ in range(1000):
        first = LOWEST + secrets.randbelow(HIGHEST - LOWEST - count)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first, first + count - 1
    raise AssertionError(f"no {count} free ports beside each other")


def free_port() -> int:
    """A port that was free just now, and that the system gives to nobody."""
    return free_range(1)[0]
