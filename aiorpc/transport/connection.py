"""A framed connection over one stream socket: read on the loop (`reading`), written from any thread (`writing`).

This is its begin, its pauses and its end. `on_closed` runs once, on the loop, after the last frame was handed out.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ..errors import ProtocolError
from ..interrupts import SocketTurn
from ..protocol.frames import Buffer, Frame, FrameDecoder
from ..protocol.handshake import MOST
from ..protocol.seal import Seal
from ..protocol.session import Session
from .lingering import Lingering
from .port import Port
from .reading import FrameReader
from .resumption import Resumption
from .send_queue import SendQueue, Unsent
from .silence import Silence, hear
from .sockets import unread
from .tls import TlsLayer
from .writing import FrameWriter

# Seconds for writing the rest, and for the other side to close as well.
CLOSING = 1.0


class _Send(Protocol):
    """`FrameWriter.send`."""

    def __call__(
        self, frame: Sequence[Buffer], *, urgent: bool = False, more: bool = False, unsent: Unsent | None = None
    ) -> None: ...


class _LeaveToLoop(Protocol):
    """`FrameReader.leave_to_loop`."""

    def __call__(self, patience: float = 0) -> None: ...


def _of_port(name: str) -> Any:
    """An attribute of the port, for users of the connection."""

    def get(connection: Connection) -> Any:
        return getattr(connection._port, name)

    def set_(connection: Connection, value: Any) -> None:
        setattr(connection._port, name, value)

    return property(get, set_)


class Connection:
    """See the module. Made of a reader, a writer, TLS if used, and the part that lets it outlive its socket.

    All callbacks except `takes` and `on_stood` run on the loop; an exception of one closes the connection.

    on_frames: called with the frames that have arrived. on_closed: called once with the cause, None when `close` was
    called here. on_drained: called when all that was queued has been written. on_heard: called after each read.
    on_open: with TLS, called once when the other side has shown its certificate; nothing may be sent before that.
    takes: whether a waiter may have an envelope, as an answer; any thread. on_stood: called with the frames that a
    standing thread has read; false: it has not used them.
    on_suspended: called with the cause when its socket has broken, if it may be resumed over another one. on_resumed:
    called when it is. on_wanted: set while it rests (`rest`), called when something waits to be written. on_cut: called
    then with the transfer and the bytes of a chunk that had come in part, and will come again. queue: what waits to be
    written. label: its name in the log. takes_at_once: bytes of tensors of one message that the other end accepts, from
    its handshake. session: what the handshake has left for second connections,
    and for other sockets.
    """

    on_frames: Callable[[list[Frame]], None] | None = _of_port("on_frames")
    takes: Callable[[Frame], object] | None = _of_port("takes")
    on_stood: Callable[[list[Frame]], bool] | None = _of_port("on_stood")
    on_heard: Callable[[], None] | None = _of_port("on_heard")
    on_open: Callable[[], None] | None = _of_port("on_open")
    on_drained: Callable[[], None] | None = _of_port("on_drained")
    on_suspended: Callable[[OSError], None] | None = _of_port("on_suspended")
    on_resumed: Callable[[], None] | None = _of_port("on_resumed")
    on_wanted: Callable[[], None] | None = _of_port("on_wanted")
    on_cut: Callable[[int, int], None] | None = _of_port("on_cut")
    tls: TlsLayer | None = _of_port("tls")
    lasting: Session | None = _of_port("session")
    bytes_sent: int = _of_port("bytes_sent")
    bytes_received: int = _of_port("bytes_received")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decoder: FrameDecoder,
        *,
        label: str,
        tls: TlsLayer | None = None,
    ) -> None:
        self._port = port = Port(loop, sock, tls)
        self._writer = writer = FrameWriter(port)
        self._reader = reader = FrameReader(port, writer, decoder, label)
        self._resumption = resumption = Resumption(port, reader, writer)
        port.owner = self
        self.label = label
        self.queue: SendQueue = writer.queue
        self.send: _Send = writer.send
        self.push: Callable[[], None] = writer.push
        self.flush: Callable[[], None] = writer.flush
        self.unseal: Callable[[bytes], None] = reader.unseal
        self.hand_on: Callable[[list[Frame]], None] = reader.hand_on
        self.read_here: Callable[[Callable[[], bool]], Sequence[Frame]] = reader.read_here
        self.read_on_loop: Callable[[], None] = reader.read_on_loop
        self.attach: Callable[[select.epoll], bool] = reader.attach
        self.read_once: Callable[[], None] = reader.read_once
        self.keep_from_loop: Callable[[], bool] = reader.keep_from_loop
        self.leave_to_loop: _LeaveToLoop = reader.leave_to_loop
        self.readable: Callable[[], None] = reader.readable
        self.last: Callable[[int], None] = resumption.last
        self.look: Callable[[], None] = resumption.look
        self.may_begin: Callable[[Session, SocketTurn], bool] = resumption.may_begin
        self.counted: Callable[[list[Frame], Session], list[Frame]] = resumption.counted
        self.halt: Callable[[], None] = resumption.halt
        self.stay: Callable[[OSError], None] = resumption.stay
        self.on_closed: Callable[[BaseException | None], None] | None = None
        self.session = b""
        self.takes_at_once = MOST
        #: For how long its host had not answered when its socket was given up, in seconds.
        self.silent_for: float = 0.0
        #: Whether it has no socket because nothing was sent for long; its users clear this.
        self.resting: bool = False
        self._limit: asyncio.TimerHandle | None = None  # of closing
        self._lingering: Lingering | None = None  # all is written; what arrives is dropped
        self._silence = Silence()

    def start(self) -> None:
        """Begin to read. On the loop's thread, with `on_frames` and `on_closed` set."""
        self._port.loop.add_reader(self._port.fd, self.readable)
        if self.tls is not None:
            self.tls.start()
            self._reader.attend_to(self.tls)

    def seal(self, key: bytes) -> None:
        """MAC all that is sent from now on. On the loop's thread, when the other side has all that was sent before."""
        self.flush()
        if self.queue:
            raise ProtocolError("something is still on its way that would have to go without a seal")
        self.queue.seal(Seal(key))

    @property
    def local(self) -> bool:
        """Whether the other end is on this host for sure: a unix socket."""
        return self._port.patient

    def silence(self, now: float) -> float:
        """Seconds for which the other host has owed an answer; see `silence.Silence.look`. On the loop's thread."""
        heard = None if self._port.closed else hear(self._port.sock)
        if heard is None:
            return 0.0
        if heard.over and not self._port.paused:
            self.readable()  # uvloop does not report all errors of a socket
        return self._silence.look(heard, now)

    def is_over(self) -> bool:
        """Whether the system knows that it has ended; it is closed soon. On the loop.

        A paused one stays until it is resumed. uvloop does not report all errors of a socket.
        """
        heard = None if self._port.closed or self._port.paused else hear(self._port.sock)
        if heard is None or not heard.over:
            return self._port.closed
        self._port.loop.call_soon(self.readable)  # later: its last frames must not interrupt the caller
        return True

    @property
    def decoder(self) -> FrameDecoder:
        """The decoder of what arrives."""
        return self._reader.decoder

    @property
    def unsent(self) -> int:
        """Frames that wait to be written."""
        return len(self.queue)

    @property
    def threads_may_read(self) -> bool:
        """Whether threads may stand by for it (`attach`)."""
        return self._reader.threads_may_read

    @property
    def must_hear(self) -> bool:
        """Whether nothing is written until something has been read: pausing it then would block it without end."""
        return self._resumption.must_hear

    @property
    def owing(self) -> bool:
        """Whether something is not written yet, or is kept for a new socket and may not have reached the other end."""
        session = self._port.session
        if session is None or not session.suspended or self.resting:
            return bool(self.queue) and not self._port.closed
        return bool(session.received and (session.kept or self.queue))  # an end that has sent nothing waits for nothing

    @property
    def ended(self) -> bool:
        """Whether its socket is closed."""
        return self._port.closed

    @property
    def closed(self) -> bool:
        return self._port.closed or self._port.closing

    def pause(self) -> None:
        """Read nothing more for now; what has been read is still handed out. On the loop's thread. Idempotent."""
        if not self._port.paused and not self._port.closed:
            self._port.paused = True
            if self._port.fd >= 0:
                self._port.loop.remove_reader(self._reader.looked_at())

    def resume(self) -> None:
        """Read on after `pause`. On the loop's thread. Idempotent."""
        if self._port.paused and not self._port.closed and self._lingering is None:
            self._port.paused = False
            if self._port.fd >= 0:
                self._port.loop.add_reader(self._reader.looked_at(), self.readable)

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, as far as the socket takes it, then close. On the loop's thread.

        Over TCP the other side closes first, once it has read all of it; see `lingering`.
        """
        if self.closed:
            return
        if self.resting:  # nothing is under way, and no socket is opened to say so
            self._finish(None)
            return
        self._port.closing = True
        # The limit: a peer that does not read must not keep us from leaving.
        self._limit = self._port.loop.call_later(CLOSING, self._finish, None)
        self._writer.write()
        with self._writer.lock:  # another thread may be writing; its rest is in the queue afterwards
            unsent = bool(self.queue)
        if not unsent:
            self.all_written()

    def all_written(self) -> None:
        """All that was queued before `close` is written."""
        if self._port.patient or self._port.fd < 0:
            self._finish(None)
        elif self._lingering is None and not self._port.closed:
            self._reader.forget_socket()
            self._port.paused = self._writer.blocked = True
            self._lingering = Lingering(self._port.loop, self._port.sock, partial(self._finish, None))

    def abort(self, cause: BaseException | None = None) -> None:
        """Close at once; what is queued is dropped. On the loop's thread."""
        self._finish(cause)

    def close_in_child(self) -> None:
        """After a fork: close the descriptor without a word to the peer or the loop, which belong to the parent."""
        self._port.closed = True
        self.queue.clear()
        if self._port.sock.fileno() >= 0:
            os.close(self._port.sock.detach())
        if self._reader.epoll is not None:
            self._reader.epoll.close()

    def write_failed(self, error: BaseException, sock: socket.socket) -> None:
        """That socket takes nothing more."""
        if sock is not self._port.sock:  # it has been replaced since
            return
        # The other side's last frames, such as a goodbye, may be unread. Read on without giving others a turn, but not
        # more than the socket holds now: a peer that has closed only its reading side may send without end.
        with self._reader.reading:
            last = self._port.bytes_received + sum(map(len, self._reader.unread)) + unread(self._port.sock)
            while True:
                if self.closed:
                    break
                self.resume()  # the receiver of frames has to take these although it is full
                before = self._port.bytes_received
                self._reader.turn = self._reader.turn_frames = max(0, last - before)
                self.readable()
                if self._port.bytes_received < last and (self._port.paused or self._port.bytes_received > before):
                    continue
                break
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Its socket has broken: it is suspended if it may be resumed over another one, and ends otherwise."""
        port, session = self._port, self._port.session
        lasts = session is not None and not self.closed and self.on_suspended is not None
        if lasts and session is not None and session.suspended:  # a thread has tried to write meanwhile
            return
        if lasts and session is not None and self.on_suspended is not None and isinstance(error, OSError):
            self._resumption.suspend(session)
            self.on_suspended(error)
        else:
            self._finish(None if port.closing else error)

    def _finish(self, cause: BaseException | None) -> None:
        if self._port.closed:
            return
        self._port.closed = True
        if self._limit is not None:
            self._limit.cancel()
        if self._lingering is not None:
            self._lingering.end()
            self._lingering = None
        self._reader.forget_socket()
        # A thread that writes or reads holds a lock; closing under it could make it use another file's descriptor.
        with self._reader.reading, self._writer.lock:
            self.queue.clear()
            self._port.sock.close()
            if self._reader.epoll is not None:
                self._reader.epoll.close()
        on_closed, self.on_closed = self.on_closed, None
        self._port.forget_callbacks()
        if on_closed is not None:
            on_closed(cause)

    # --- another socket -----------------------------------------------------------------------------------------------

    @property
    def suspended(self) -> bool:
        """Whether it has no socket, and waits for a new one."""
        session = self._port.session
        return session is not None and session.suspended

    def rest(self) -> None:
        """Let go of the socket, of which nothing is expected, until there is another one; the rest stays as it is.

        Only a lasting connection can; the other end has to know, see `on_suspended`. On the loop's thread.
        """
        self.resting = True
        self._resumption.halt()

    @property
    def received(self) -> int:
        """How many frames have come since the handshake; the other end needs the number to resume."""
        session = self._port.session
        assert session is not None, "only a lasting connection goes on"
        return session.received

    @property
    def lacking(self) -> tuple[int, bytes] | None:
        """The first frame that the other end had not received at the last resumption, in terms of `SendQueue.first`;
        None if it had received all."""
        return self._resumption.lacking

    def break_off(self, silence: float) -> None:
        """The other host has not answered for so many seconds: the connection is suspended, or ends."""
        self.silent_for = silence
        self.fail(TimeoutError(f"its host has not answered for {silence:.0f} s"))
        self.silent_for = 0.0

    def go_on(self, other: Connection, received: int, *, opener: bool) -> None:
        """Go on over the socket of another connection; see `Resumption.go_on`."""
        self._resumption.go_on(other._resumption, received, opener=opener)
        other.on_closed = None
        self._silence = Silence()
        self._resumption.resumed()
