"""Whether a store is still there, seen without torch: its clients block, or fill the log, where it has gone."""

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

# What torch's client says at first, and asks: VALIDATE with its magic number, then PING, which is answered by the same.
_VALIDATE, _PING, _NONCE_SIZE = b"\x00" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d", 4
# What a server of another kind answers at once, and a torch store by hanging up.
_OTHER_LANGUAGE = b"HEAD / HTTP/1.0\r\n\r\n"
_ASK_OTHERWISE = 1.0  # seconds without an answer after which that is tried
# Of the kernel's `sockaddr` the port, and of its `tcp_info` the bytes that have arrived.
_PEER_SIZE, _PORT = 128, slice(2, 4)
_INFO_SIZE, _RECEIVED = 136, slice(128, 136)
# After so many rounds it is not known which connection is a client's own. So many numbers of times there are to draw.
_ROUNDS, _TIMES = 8, 8
# Seconds for a store to answer: the server has one thread for all. And milliseconds for its host to acknowledge what
# was sent; less than `Bounds.store`, so that who leaves can still say so over another connection.
ANSWER, UNHEARD = 20, 3000


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
    """Looks at a connection to the server of a store. Its end is the end of the server, or it has broken.

    connection: the one over which the store is asked, as `connection_of` has it; else one of `connection_beside`.
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
        """End the connection, and what is waited for over it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __del__(self) -> None:  # of a client that was made when nobody waited for it any more
        self._socket.close()


def connection_of(ask: Callable[[], object], port: int) -> socket.socket | None:
    """The socket of a torch client, to be closed beside it; None if it is not known which one that is.

    ask: has the client ask its server, which listens at the port, and returns when the answer is there, which is always
    as long. It is called once, and where others of this process had answers from there meanwhile in further rounds,
    another number of times in each: the socket is the one where so many answers have arrived. What the client prints as
    would tell it, too, but torch looks up the names of both ends for that, which takes many seconds where a name server
    does not answer.

    Whoever is at its other end is noticed to have vanished: while nothing is said by keep-alive, else as nothing is
    acknowledged, or no answer comes; then the client raises. torch would wait for as long as the system tries, which is
    a quarter of an hour, or for ever.
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
        os.set_blocking(descriptor, blocking)  # torch's and this one are the same to the system
        tune_tcp(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", ANSWER, 0))
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD)
    return connection


def _received(port: int) -> dict[tuple[int, int], int]:
    """The bytes that have arrived on each connection of this process to that port, by its descriptor and inode.

    Nothing where /proc does not say what there is, as in a container without it.
    """
    # A socket object would do, but where the program has a default timeout it changes what torch's own does.
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
    """Another connection to the same server, over which nothing is said."""
    connection = socket.create_connection((address, port), 5.0)
    connection.setblocking(False)
    tune_tcp(connection)
    return connection


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
