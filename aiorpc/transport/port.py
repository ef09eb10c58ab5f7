"""The socket of one connection, and what the parts of the connection share.

Its reader (`reading`), its writer (`writing`) and its session part (`resumption`) use this, and do not know the
connection that is made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from contextvars import Context
from typing import Protocol

from ..interrupts import SocketTurn
from ..protocol.frames import Frame
from ..protocol.session import Session
from .tls import TlsLayer

# Bytes of a unix socket's send buffer: a large buffer fits, and its writer need not wait for the reader, a third of the
# time for 1 MB. The system caps it (net.core.wmem_max); memory is taken only while something is under way.
SEND_BUFFER = 4 * 1024 * 1024
# Seconds to wait in one system call for the other end of a unix socket while a large buffer is under way: a turn of the
# loop for each socketful costs more than the copy. Not between hosts, where the next bytes may take longer.
PATIENCE = 0.002


class Owner(Protocol):
    """What the connection does for its parts. On the loop."""

    def readable(self) -> None:
        """Read what has come."""

    def fail(self, error: BaseException) -> None:
        """What has come cannot be read, or the socket has broken: the connection ends, or waits for another socket."""

    def write_failed(self, error: BaseException, sock: socket.socket) -> None:
        """That socket takes nothing more."""

    def all_written(self) -> None:
        """All that was queued before the connection is closed is written."""

    def may_begin(self, session: Session, turn: SocketTurn) -> bool:
        """Whether a frame may be begun although an ACK is due or much is unacknowledged. By the writer, in its turn."""

    def counted(self, frames: list[Frame], session: Session) -> list[Frame]:
        """Frames that have come, to be handed on now, without those for the session."""

    def look(self) -> None:
        """Acknowledge what threads have read; the loop does not count these frames."""


class Port:
    """See the module. The callbacks are those of `Connection`, which sets `owner` and removes all at its end.

    patient: whether it is a unix socket, on which large buffers are waited for. session: what outlives the socket, once
    there is one. closing: only what is queued is still sent. paused: nothing is read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: TlsLayer | None) -> None:
        self.patient: bool = sock.family == socket.AF_UNIX
        # Blocking for the system: each system call has a flag that says whether it waits.
        sock.setblocking(True)
        if self.patient:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # TCP sizes its buffers by itself
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, int(PATIENCE * 1e6)))
        self.loop = loop
        self.sock = sock
        self.fd: int = sock.fileno()
        self.tls = tls
        self.session: Session | None = None
        self.closed = self.closing = self.paused = False
        self.bytes_sent: int = 0
        self.bytes_received: int = 0
        self.owner: Owner | None = None
        self.on_frames: Callable[[list[Frame]], None] | None = None
        self.takes: Callable[[Frame], object] | None = None
        self.on_stood: Callable[[list[Frame]], bool] | None = None
        self.on_heard: Callable[[], None] | None = None
        self.on_open: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.on_suspended: Callable[[OSError], None] | None = None
        self.on_resumed: Callable[[], None] | None = None
        self.on_wanted: Callable[[], None] | None = None
        self.on_cut: Callable[[int, int], None] | None = None

    def forget_callbacks(self) -> None:
        """The connection has ended. Without references the circle needs no garbage collector."""
        self.owner = None
        self.on_frames = self.on_stood = self.on_drained = self.on_open = self.takes = self.on_heard = None
        self.on_suspended = self.on_resumed = self.on_cut = self.on_wanted = None

    def call_on_loop(self, callback: Callable[..., None], *args: object) -> None:
        """Any thread. Does nothing once the loop is closed."""
        # An empty context: a turn that reads must not get the context variables of the writer.
        here = asyncio._get_running_loop() is self.loop
        call = self.loop.call_soon if here else self.loop.call_soon_threadsafe
        with contextlib.suppress(RuntimeError):  # the loop is closed, and this connection with it
            call(callback, *args, context=Context())
