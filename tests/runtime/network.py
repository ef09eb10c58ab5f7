"""A network between workers of this process that is bad: it delays, trickles, stands still, cuts, and goes on.

A worker is reached through it at an address of its own (`Network.place`). What has come to one end of a connection
need not have come to the other one as it is cut, and each direction may stand still by itself.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.ports import free_port

_RESET = struct.pack("ii", 1, 0)  # to linger for no time: what closes is a reset
_ROOM = 1 << 18  # bytes of one direction that are under way at most
_TICK = 0.001  # seconds between two looks where nothing moves
_NEVER = float("inf")
_DISTURBANCES = ("cut", "cut many", "end", "stop", "stop one way", "stop and cut", "delay", "trickle", "away", "mend")


class _Way:
    """One direction. held: what is under way, and when each is due. until: it stands still. rate: bytes in a tick."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.held: deque[tuple[float, bytes]] = deque()
        self.mend()
        self.ended = False

    def mend(self) -> None:
        self.until, self.delay, self.rate = 0.0, 0.0, _ROOM

    def move(self) -> bool:
        """Forward what is due; whether anything has moved. Raises OSError if the connection has broken."""
        now, moved, left = time.monotonic(), False, self.rate
        if not self.ended and sum(len(data) for _, data in self.held) < _ROOM:
            with contextlib.suppress(BlockingIOError):
                data = self.source.recv(1 << 16)
                self.held.append((now + self.delay, data))
                self.ended, moved = not data, True
        while self.held and now >= max(self.until, self.held[0][0]) and left > 0:
            due, data = self.held.popleft()
            if not data:
                self.sink.shutdown(socket.SHUT_WR)
                return True
            try:
                sent = self.sink.send(data[:left])
            except BlockingIOError:
                sent = 0
            left -= sent
            moved = moved or sent > 0
            if sent < len(data):
                self.held.appendleft((due, data[sent:]))
                break
        return moved


class _Line:
    """A connection. port: of the worker that it leads to. end: when it is to be cut."""

    def __init__(self, client: socket.socket, server: socket.socket, port: int) -> None:
        self.ends, self.port, self.end = (client, server), port, _NEVER
        self.ways = (_Way(client, server), _Way(server, client))
        for each in self.ends:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def cut(self, *, reset: bool = True) -> None:
        for each in self.ends:
            if reset:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.close()


class Network:
    """See the module. Made by `network`."""

    def __init__(self) -> None:
        self._listeners: dict[socket.socket, int] = {}
        self._lines: list[_Line] = []
        self._away: dict[int, float] = {}  # by port: until when nobody gets there
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def place(self) -> dict[str, Any]:
        """The options of one more worker, which is reached through this."""
        port = free_port()
        with self._lock:
            address = f"127.0.0.{len(self._listeners) + 2}"
            listener = socket.create_server((address, port))
            listener.setblocking(False)
            self._listeners[listener] = port
        return {"address": address, "bind_address": "127.0.0.1", "port_range": (port, port)}

    def disturb(self, chance: random.Random, longest: float) -> None:
        """One thing that happens to some connection, or to some worker. longest: seconds that anything stands still."""
        with self._lock:
            if not self._lines:
                return
            line, what = chance.choice(self._lines), chance.choice(_DISTURBANCES)
            way, until = chance.choice(line.ways), time.monotonic() + chance.uniform(0, longest)
            if what == "cut":
                line.end = 0.0
            elif what == "cut many":
                for each in self._lines:
                    each.end = chance.choice((0.0, each.end))
            elif what == "end":
                self._lines.remove(line)
                line.cut(reset=False)
            elif what == "stop":
                line.ways[0].until = line.ways[1].until = until
            elif what == "stop one way":
                way.until = until
            elif what == "stop and cut":
                way.until, line.end = _NEVER, until
            elif what == "delay":
                way.delay = chance.choice((0.005, 0.03))
            elif what == "trickle":
                way.rate = chance.choice((100, 3000, 20_000))
            elif what == "away":
                self._away[line.port] = until
                for each in self._lines:
                    each.end = 0.0 if each.port == line.port else each.end
            else:
                for each in self._lines:
                    for direction in each.ways:
                        direction.mend()

    def mend(self) -> None:
        """From now on all is well; what was to be cut is cut."""
        with self._lock:
            self._away.clear()
            for line in self._lines:
                line.end = 0.0 if line.end < _NEVER else line.end
                for way in line.ways:
                    way.mend()

    def close(self) -> None:
        """End it all."""
        self._closed.set()
        self._thread.join()
        for line in self._lines:
            line.cut()
        for listener in self._listeners:
            listener.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                moved = self._accept()
                for line in [*self._lines]:
                    try:
                        if time.monotonic() >= line.end:
                            raise ConnectionResetError
                        moved = any([way.move() for way in line.ways]) or moved
                        over = all(way.ended and not way.held for way in line.ways)
                        broken = False
                    except OSError:
                        over = broken = True
                    if over:
                        self._lines.remove(line)
                        line.cut(reset=broken)
            if not moved:
                self._closed.wait(_TICK)

    def _accept(self) -> bool:
        some = False
        for listener, port in self._listeners.items():
            with contextlib.suppress(BlockingIOError):
                client, _ = listener.accept()
                some = True
                try:
                    if self._away.get(port, 0.0) > time.monotonic():
                        raise ConnectionResetError
                    self._lines.append(_Line(client, socket.create_connection(("127.0.0.1", port)), port))
                except OSError:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    client.close()
        return some


@contextmanager
def network() -> Iterator[Network]:
    """One for the workers of a test."""
    made = Network()
    try:
        yield made
    finally:
        made.close()
