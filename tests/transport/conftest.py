"""Connections over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tests.transport.ends import End, Watched, takes_little


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    """Two connections, tied together, that read; small socket buffers, so that writes are often partial."""
    left, right = socket.socketpair()
    pair = End(left, "left"), End(right, "right")
    for end in pair:
        takes_little(end.sock)
        end.connection.start()
    yield pair
    for end in pair:
        end.connection.abort()


@pytest.fixture
async def half() -> AsyncIterator[tuple[End, socket.socket]]:
    """A connection and the bare socket at its other end."""
    left, right = socket.socketpair()
    right.setblocking(False)
    end = End(left, "half")
    takes_little(end.sock)
    end.connection.start()
    with right:
        yield end, right
        end.connection.abort()


@pytest.fixture
async def watched() -> AsyncIterator[tuple[End, Watched, socket.socket]]:
    """As `half`, with the socket of the connection that is watched."""
    left, right = socket.socketpair()
    right.setblocking(False)
    sock = Watched(left)
    end = End(cast(socket.socket, sock), "watched")
    takes_little(left)
    end.connection.start()
    with right:
        yield end, sock, right
        end.connection.abort()
