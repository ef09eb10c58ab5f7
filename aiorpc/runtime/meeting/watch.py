"""Whether a store is still there, seen without torch: its clients block, or fill the log, where it has gone."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Protocol

# What torch's client says at first, and asks: VALIDATE with its magic number, then PING, which is answered by the same.
_VALIDATE, _PING, _NONCE_SIZE = b"\x00" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d", 4
# What a server of another kind answers at once, and a torch store by hanging up.
_OTHER_LANGUAGE = b"HEAD / HTTP/1.0\r\n\r\n"
_ASK_OTHERWISE = 1.0  # seconds without an answer after which that is tried


class Watch(Protocol):
    """Looks at one store. Any thread."""

    def gone(self) -> str:
        """What has become of the store; empty as long as it is there."""

    def close(self) -> None:
        """Let go of what it takes to look. Idempotent."""


class FileWatch:
    """Looks whether a file is where it was."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = self._look()

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    def gone(self) -> str:
        """Whether it was removed, or another one put in its place."""
        try:
            return "" if self._look() == self._identity else "another file was put in its place"
        except FileNotFoundError:
            return "its file was removed"
        except OSError as error:
            return str(error)

    def close(self) -> None:
        """Nothing is held."""


class ServerWatch:
    """Holds a connection to the server of a store, over which nothing is said: its end is the end of the server."""

    def __init__(self, address: str, port: int) -> None:
        self._socket = socket.create_connection((address, port), 5.0)
        self._socket.setblocking(False)

    def gone(self) -> str:
        """Whether the connection has ended."""
        try:
            return "" if self._socket.recv(1, socket.MSG_PEEK) else "the process that served it has ended"
        except BlockingIOError:
            return ""
        except OSError as error:
            return str(error)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def stranger(connection: socket.socket, patience: float) -> str:
    """What is at the other end of a fresh connection, if it is no torch store for certain; empty otherwise.

    patience: seconds. OSError if the connection breaks, TimeoutError if nothing is said. The connection is used up.
    """
    limit = min(patience, _ASK_OTHERWISE)
    connection.settimeout(limit)
    nonce = secrets.token_bytes(_NONCE_SIZE)
    connection.sendall(_VALIDATE + _PING + nonce)
    answer = b""
    while len(answer) < _NONCE_SIZE:
        piece = connection.recv(64)
        if not piece:
            raise ConnectionResetError("it hung up")
        answer += piece
    return "" if answer == nonce else _described(answer)


def other_language(host: str, port: int, patience: float) -> str:
    """What a server that does not answer a torch client says when it is asked as a web server; empty if nothing."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), patience) as connection:
        connection.settimeout(min(patience, _ASK_OTHERWISE))
        connection.sendall(_OTHER_LANGUAGE)
        answer = connection.recv(64)
        return _described(answer) if answer else ""
    return ""


def _described(answer: bytes) -> str:
    said = "".join(chr(each) if 32 <= each < 127 else "?" for each in answer[:40])
    return f"what listens there is no store: another program has that port. It says {said!r}"
