"""A framed connection over one stream socket: read on the loop (`reading`), written from any thread (`writing`).

This is its begin, its pauses and its end. `on_closed` runs once, on the loop, after the last frame was handed out.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial

from ..errors import ProtocolError
from ..protocol.frames import Frame, FrameDecoder
from ..protocol.handshake import MOST
from ..protocol.seal import Seal
from .lingering import Lingering
from .reading import FrameReader
from .silence import Silence, hear
from .sockets import unread
from .tls import TlsLayer

# Seconds for the last words of a connection, and for the other side to close it, too.
CLOSING = 1.0


class Connection(FrameReader):
    """See the module.

    on_closed: called once on the loop with the cause, None when `close` was called here.
    """

    on_drained: Callable[[], None] | None
    on_frames: Callable[[list[Frame]], None] | None
    on_heard: Callable[[], None] | None
    on_open: Callable[[], None] | None
    on_stood: Callable[[list[Frame]], bool] | None
    takes: Callable[[Frame], object] | None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decoder: FrameDecoder,
        *,
        label: str,
        tls: TlsLayer | None = None,
    ) -> None:
        super().__init__(loop, sock, decoder, label=label, tls=tls)
        self.on_closed: Callable[[BaseException | None], None] | None = None
        self.session = b""  # what its handshake has left for second connections, and for other sockets
        # Bytes of tensors of one message that the other end takes, as its handshake has said.
        self.takes_at_once = MOST
        # Called when its socket has broken, with the cause, if it may go on over another one; see `LastingConnection`.
        self.on_suspended: Callable[[OSError], None] | None = None
        # Called then with the transfer and the bytes of a chunk that had come in part, and will come again.
        self.on_cut: Callable[[int, int], None] | None = None
        self._limit: asyncio.TimerHandle | None = None  # of closing
        self._lingering: Lingering | None = None  # all is written, and nothing is looked at any more
        self._silence = Silence()

    def start(self) -> None:
        """Begin to read. On the loop's thread, with `on_frames` and `on_closed` set."""
        self._loop.add_reader(self._fd, self._readable)
        if self.tls is not None:
            self.tls.start()
            self._attend_to(self.tls)

    def seal(self, key: bytes) -> None:
        """Seal all that is sent from now on. On the loop's thread, when the other side has all that was sent before."""
        self.flush()
        if self.queue:
            raise ProtocolError("something is still on its way that would have to go without a seal")
        self.queue.seal(Seal(key))

    @property
    def local(self) -> bool:
        """Whether the other end is on this host for sure: a unix socket."""
        return self._patient

    def silence(self, now: float) -> float:
        """Seconds for which the other host has owed an answer; see `silence.Silence.look`. On the loop's thread."""
        heard = None if self._closed else hear(self._sock)
        if heard is None:
            return 0.0
        if heard.over and not self._paused:
            self._readable()  # uvloop does not tell of all errors of a socket
        return self._silence.look(heard, now)

    def is_over(self) -> bool:
        """Whether the system knows that it has ended; it is closed soon. On the loop.

        Not one that is paused: it stays until it goes on. uvloop does not tell of all errors of a socket.
        """
        heard = None if self._closed or self._paused else hear(self._sock)
        if heard is None or not heard.over:
            return self._closed
        self._loop.call_soon(self._readable)  # what it still has to say is no matter of the caller
        return True

    @property
    def must_hear(self) -> bool:
        """Whether nothing is written until something has been read: to pause it then would be for ever."""
        return False

    @property
    def owing(self) -> bool:
        """Whether something was not written yet, or waits for a new socket and may not have got to the other end."""
        return bool(self.queue) and not self._closed

    @property
    def ended(self) -> bool:
        """Whether its socket is closed."""
        return self._closed

    @property
    def closed(self) -> bool:
        return self._closed or self._closing

    def pause(self) -> None:
        """Read nothing more for now; what has been read is still handed out. On the loop's thread. Idempotent."""
        if not self._paused and not self._closed:
            self._paused = True
            if self._fd >= 0:
                self._loop.remove_reader(self._looked_at())

    def resume(self) -> None:
        """Read on after `pause`. On the loop's thread. Idempotent."""
        if self._paused and not self._closed and self._lingering is None:
            self._paused = False
            if self._fd >= 0:
                self._loop.add_reader(self._looked_at(), self._readable)

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, as far as the socket takes it, then close. On the loop's thread.

        Over TCP the other side closes first, once it has all of it; see `lingering`.
        """
        if self.closed:
            return
        self._closing = True
        # A peer that does not read must not keep us from leaving.
        self._limit = self._loop.call_later(CLOSING, self._finish, None)
        self._write()
        with self._lock:  # another thread may be writing; what it could not write is in the queue afterwards
            unsent = bool(self.queue)
        if not unsent:
            self._stop_writing()

    def _stop_writing(self) -> None:
        """All that was to be said before the connection is closed is written."""
        if self._patient or self._fd < 0:
            self._finish(None)
        elif self._lingering is None and not self._closed:
            self._forget_socket()
            self._paused = self._blocked = True
            self._lingering = Lingering(self._loop, self._sock, partial(self._finish, None))

    def abort(self, cause: BaseException | None = None) -> None:
        """Close at once; what is queued is dropped. On the loop's thread."""
        self._finish(cause)

    def close_in_child(self) -> None:
        """After a fork: let go of the descriptor without a word to the peer or the loop, which are the parent's."""
        self._closed = True
        self.queue.clear()
        if self._sock.fileno() >= 0:
            os.close(self._sock.detach())
        if self._epoll is not None:
            self._epoll.close()

    def _write_failed(self, error: BaseException, sock: socket.socket) -> None:
        if sock is not self._sock:  # that one has been replaced since
            return
        # What the other side said before it went may still be unread, and a goodbye makes all the difference. It comes
        # behind all else, so nobody else gets a turn before; it is not more than the socket holds now. Of one that has
        # only closed its ear there may always be more.
        with self._reading:
            last = self.bytes_received + sum(map(len, self._unread)) + unread(self._sock)
            while True:
                if self.closed:
                    break
                self.resume()  # whoever had enough has to take this, too
                before = self.bytes_received
                self._turn = self._turn_frames = max(0, last - before)
                self._readable()
                if self.bytes_received < last and (self._paused or self.bytes_received > before):
                    continue
                break
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._finish(None if self._closing else error)

    def _finish(self, cause: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        if self._limit is not None:
            self._limit.cancel()
        if self._lingering is not None:
            self._lingering.end()
            self._lingering = None
        self._forget_socket()
        # A thread in the middle of a write or read holds a lock; closing under it could meet another descriptor.
        with self._reading, self._lock:
            self.queue.clear()
            self._sock.close()
            if self._epoll is not None:
                self._epoll.close()
        on_closed, self.on_closed = self.on_closed, None
        # It refers to nobody any more: whoever let go of it is free at once, and no collector has to find the circle.
        self.on_frames = self.on_stood = self.on_drained = self.on_open = self.takes = self.on_heard = None
        if on_closed is not None:
            on_closed(cause)

    def _forget_socket(self) -> None:
        """Have the loop look at the socket no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._looked_at())
            self._loop.remove_writer(self._fd)

    def _looked_at(self) -> int:
        """The descriptor by which the loop is told of what comes."""
        return self._fd if self._epoll is None else self._epoll.fileno()
