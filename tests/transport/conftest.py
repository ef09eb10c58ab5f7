"""Connections over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from tests.transport.ends import End


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    """Two connections, tied together, that read; small socket buffers, so that writes are often partial."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    pair = End(left, "left"), End(right, "right")
    for end in pair:
        end.connection.start()
    yield pair
    for end in pair:
        end.connection.abort()


@pytest.fixture
async def half() -> AsyncIterator[tuple[End, socket.socket]]:
    """A connection and the bare socket at its other end."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    right.setblocking(False)
    end = End(left, "half")
    end.connection.start()
    with right:
        yield end, right
        end.connection.abort()
