"""Whether a store is still there, seen without torch, whose clients block or fill the log when it has gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import Protocol

from ...transport.sockets import tune_tcp
from ...undoing import on_error

# The first bytes of torch's client: VALIDATE with its magic number, then PING, which the server echoes.
_VALIDATE, _PING, _NONCE_SIZE = b"\x00" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d", 4
# A server of another kind answers this at once; a torch store hangs up.
_OTHER_LANGUAGE = b"HEAD / HTTP/1.0\r\n\r\n"
_ASK_OTHERWISE = 1.0  # seconds without an answer, after which it is tried
# In the kernel's `sockaddr` the port, in its `tcp_info` the bytes received.
_PEER_SIZE, _PORT = 128, slice(2, 4)
_INFO_SIZE, _RECEIVED = 136, slice(128, 136)
# Rounds after which a client's own connection stays unknown, and how many different numbers of asks there are.
_ROUNDS, _TIMES = 8, 8
# Seconds for a store to answer, because the server has one thread for all. Milliseconds for its host to acknowledge
# sent data; less than `Bounds.store`, which leaves time to say goodbye over another connection.
ANSWER, UNHEARD = 20, 3000


class Watch(Protocol):
    """Looks at one store. Any thread."""

    def gone(self) -> str:
        """Why the store has gone; empty while it is there."""

    def close(self) -> None:
        """Release its resources. Idempotent."""


class FileWatch:
    """Looks whether a file is still at its path."""

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
    """Looks at a connection to the server of a store, which ends with the server, or breaks.

    connection: the client's own (`connection_of`), or another one (`connection_beside`).
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def gone(self) -> str:
        """Whether the connection has ended."""
        try:
            there = self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return "" if there else "the process that served it has ended"
        except BlockingIOError:
            return ""
        except OSError as error:
            return str(error)

    def close(self) -> None:
        """End the connection, and operations that wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __del__(self) -> None:  # of a client that came too late for its `bounded` call
        self._socket.close()


def connection_of(ask: Callable[[], object], port: int) -> socket.socket | None:
    """A duplicate of a torch client's socket, which the caller closes; None if the socket cannot be identified.

    ask: makes one request of the client to its server, which listens at the port; the answers are of equal length. The
    client's socket is the one whose received bytes grow with the number of requests. If other sockets to the port grow,
    too, more rounds follow, each with another number of requests. The client's repr would tell the socket, too, but
    torch looks up both ends' names for it, which takes many seconds if a name server does not answer.

    The socket's options bound waits for a vanished server: keep-alive while idle, limits for acknowledgement and
    answers otherwise; then the client raises. torch alone would wait a quarter of an hour, or without limit.
    """
    times, possible = 1, dict[tuple[int, int], float]()
    for turn in range(_ROUNDS):
        before = _received(port)
        for _ in range(times):
            ask()
        sizes = {each: (size - before.get(each, size)) / times for each, size in _received(port).items()}
        possible = {each: size for each, size in sizes.items() if size > 0 and (not turn or possible.get(each) == size)}
        if len(possible) <= 1:
            break
        times = 2 + secrets.randbelow(_TIMES)
    if len(possible) != 1:
        return None
    [(descriptor, _)] = possible
    blocking = os.get_blocking(descriptor)
    connection = socket.socket(fileno=os.dup(descriptor))
    with on_error(connection.close):
        connection.settimeout(None)
        os.set_blocking(descriptor, blocking)  # both descriptors share one open file
        tune_tcp(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", ANSWER, 0))
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD)
    return connection


def _received(port: int) -> dict[tuple[int, int], int]:
    """The bytes that have arrived on each connection of this process to that port, by its descriptor and inode.

    Empty without /proc, as in some containers.
    """
    # A socket object would do, but a default timeout of the program would change torch's descriptor, too.
    library, found = ctypes.CDLL(None), dict[tuple[int, int], int]()
    try:
        descriptors = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return found
    for descriptor in descriptors:
        peer, info = ctypes.create_string_buffer(_PEER_SIZE), ctypes.create_string_buffer(_INFO_SIZE)
        size, info_size = ctypes.c_uint(_PEER_SIZE), ctypes.c_uint(_INFO_SIZE)
        if library.getpeername(descriptor, peer, ctypes.byref(size)) or int.from_bytes(peer.raw[_PORT], "big") != port:
            continue
        option = socket.IPPROTO_TCP, socket.TCP_INFO
        if not library.getsockopt(descriptor, *option, info, ctypes.byref(info_size)):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found[descriptor, os.fstat(descriptor).st_ino] = int.from_bytes(info.raw[_RECEIVED], sys.byteorder)
    return found


def connection_beside(address: str, port: int) -> socket.socket:
    """Another, idle connection to the same server."""
    connection = socket.create_connection((address, port), 5.0)
    connection.setblocking(False)
    tune_tcp(connection)
    return connection


def stranger(connection: socket.socket, patience: float) -> str:
    """A description of the server at the other end of a fresh connection, if it is certainly no torch store; else
    empty.

    patience: seconds. OSError if the connection breaks, TimeoutError without an answer. The connection is used up.
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
