"""The worker's end of its heartbeat: see `heartbeat`, which has the format and the other end."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..locks import Lock
from ..logs import logger
from ..protocol.states import WorkerState
from ..runtime.node import Node
from ..transport import sockets
from ..undoing import on_error
from . import heartbeat
from .heartbeat import Heart


class Heartbeat:
    """Beats whenever the timer of `LoopMonitor` runs, four times a second; see `node.Attachment` for the methods.

    name: of the worker. Where the file cannot be made, as where the private directory is full, that is logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()  # a descriptor that was closed in another thread may be another file's
        self._file: int | None = None
        self._link: Path | None = None
        self._node: Node | None = None

    def open(self, stop: threading.Event) -> None:
        """From now on the worker is seen, as one that joins."""
        with self._lock:
            if stop.is_set():
                return
            try:
                self._make()
            except OSError as error:
                logger.warning("worker %s cannot be probed from outside: %s", self._name, error)

    def _make(self) -> None:
        directory = sockets.private_directory()
        self._file = os.memfd_create(heartbeat.title_of(self._name))
        with on_error(self._close):
            self._write(heartbeat.JOINING)
            heart = Heart(self._name, os.getpid(), self._file)
            link = directory / heart.link
            link.unlink(missing_ok=True)  # of an earlier process with these numbers
            link.symlink_to(heart.path)
            self._link = link

    def attach(self, node: Node) -> None:
        """Beat with the loop from now on."""
        self._node = node
        node.monitor.on_tick = self._beat

    def close(self) -> None:
        """The worker is seen no more."""
        with self._lock:
            self._close()
        self._node = None

    def close_in_child(self) -> None:
        """Let go of the descriptor; the link is the parent's."""
        self._link = None
        self._close()

    def _close(self) -> None:
        link, self._link = self._link, None
        file, self._file = self._file, None
        if link is not None:
            with suppress(OSError):
                link.unlink()
        if file is not None:
            os.close(file)

    def _beat(self) -> None:
        """On the loop."""
        node = self._node
        if node is not None:
            with self._lock:
                self._write(state_of(node))

    def _write(self, state: int) -> None:
        if self._file is not None:
            os.pwrite(self._file, heartbeat.FORMAT.pack(heartbeat.MAGIC, time.monotonic_ns(), state), 0)


def state_of(node: Node) -> int:
    """The state of a worker as a probe tells it."""
    lifetime = node.engine.lifetime
    match lifetime.state:
        case WorkerState.RUNNING if not node.group.is_member:
            return heartbeat.JOINING
        case WorkerState.RUNNING | WorkerState.LEAVING:
            # A program that has nothing else to do calls `shutdown` at once, and its worker serves until all are done.
            return heartbeat.DRAINING if lifetime.parting else heartbeat.READY
        case WorkerState.DRAINING:
            return heartbeat.DRAINING
        case WorkerState.NEW | WorkerState.STARTING:
            return heartbeat.JOINING
    return heartbeat.CLOSING
