"""What stands between workers and a store: it forwards, and breaks connections as it is told."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_RESET = struct.pack("ii", 1, 0)  # to linger for no time: what closes is a reset


class Forwarder:
    """One thread, which forwards to a port of this host. Made by `forwarded`.

    turns: how often a client has spoken after the server has, and before. loses: is asked at each "request" and each
    "answer" whether it is lost, with its connection.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.turns = 0
        self.loses: Callable[[str], bool] = lambda what: False
        self._silent = False
        self._dead: set[socket.socket] = set()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._spoke: dict[socket.socket, bool] = {}  # of a client: whether it spoke last
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def forget(self) -> None:
        """Nothing passes any more over the connections that there are, and nobody is told; new ones are forwarded."""
        with self._lock:
            self._dead |= self._pairs.keys()

    def lose(self, what: str, turn: int = 0) -> Callable[[], bool]:
        """Lose one of the next requests, or answers: which one. What is returned says whether that has come."""
        left = turn + 1

        def loses(kind: str) -> bool:
            nonlocal left
            left -= kind == what
            return left == 0 and kind == what

        self.loses = loses
        return lambda: left <= 0

    def silence(self, silent: bool) -> None:
        """Whether nothing passes over connections that are made from now on."""
        with self._lock:
            self._silent = silent

    def reset(self) -> None:
        """Reset all connections, at both ends."""
        with self._lock:
            for client in [*self._clients]:
                self._break(client)

    def close(self) -> None:
        """End it all."""
        self._wake.send(b"x")
        self._thread.join()
        self.reset()
        for each in (self._listener, self._wake, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._pairs:
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.to))
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        self._pairs |= {client: server, server: client}
        self._clients.add(client)
        self._spoke[client] = False
        if self._silent:
            self._dead |= {client, server}
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        sink = self._pairs[source]
        client = source if source in self._clients else sink
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._break(client)
            return
        if source in self._dead:
            return
        if self._spoke[client] != (source is client):
            self.turns += source is client
            self._spoke[client] = source is client
            if self.loses("request" if source is client else "answer"):
                self._break(client)
                return
        with contextlib.suppress(OSError):
            sink.sendall(data)

    def _break(self, client: socket.socket) -> None:
        server = self._pairs.pop(client)
        del self._pairs[server], self._spoke[client]
        self._clients.discard(client)
        self._dead -= {client, server}
        for each in (client, server):
            self._selector.unregister(each)
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.close()


@contextmanager
def forwarded(to: int) -> Iterator[Forwarder]:
    """One that forwards to that port."""
    forwarder = Forwarder(to)
    try:
        yield forwarder
    finally:
        forwarder.close()
