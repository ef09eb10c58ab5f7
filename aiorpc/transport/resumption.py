"""A connection over TCP that outlives its socket.

`protocol.session` counts, keeps and acknowledges frames; this module applies it to a socket. When the socket breaks,
the connection is suspended: it has no socket, what is sent waits in its queue, and the users of the connection notice
nothing. A new connection, whose other end proves itself as usual, gives its socket to this one (`go_on`), with its
decoder and its MACs or TLS: keys are always those of the newest handshake.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..interrupts import SocketTurn
from ..protocol.frames import Buffer, Frame
from ..protocol.session import Session
from ..protocol.states import SessionEvent
from .port import Port
from .reading import FrameReader
from .writing import FrameWriter


class Resumption:
    """The session part of a connection; see the module. It does nothing before `last`. On the loop, except `may_begin`.

    lacking: see `Connection.lacking`.
    """

    def __init__(self, port: Port, reader: FrameReader, writer: FrameWriter) -> None:
        self.lacking: tuple[int, bytes] | None = None
        self._port = port
        self._reader = reader
        self._writer = writer
        self._full = False  # too much is unacknowledged: nothing is written until something has come
        # After a resumption, until the opener has sent something. An ACK is due meanwhile, so writers ask here.
        self._awaiting = False
        self._untold = False  # it was halted without a call of `on_suspended`
        self._ack: Sequence[Buffer] = ()  # the last one that was queued

    def last(self, limit: int) -> None:
        """From now on what is sent is kept until it is acknowledged, and the connection outlives its socket.

        Called after the last frame of the handshake, at both ends. limit: bytes that are kept at most.
        ConnectionError if something of the handshake is still on its way.
        """
        self._writer.flush()
        if self._writer.queue:
            raise ConnectionError("the other side takes nothing")
        self._port.session = session = Session(limit)
        self._writer.queue.keep(session)

    @property
    def must_hear(self) -> bool:
        """Whether nothing is written until something has been read."""
        session = self._port.session
        # Not if the next turn writes on anyway: all frames of this turn may have come together.
        return self._full and session is not None and (self._awaiting or session.size >= session.limit)

    # --- acknowledging ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Acknowledge what has come, if no ACK has done so. Called once in a while."""
        session = self._port.session
        if session is not None and session.fresh:
            session.due, session.said_at = True, self._port.bytes_received
            self._acknowledge()

    def counted(self, frames: list[Frame], session: Session) -> list[Frame]:
        """See `port.Owner`."""
        frames = session.arrived(frames, self._port.bytes_received, self._writer.queue.begun_frames)
        if session.due:
            self._port.loop.call_soon(self._acknowledge)
        self._awaiting = False
        if self._full and session.size < session.limit:
            self._port.loop.call_soon(self._empty)
        return frames

    def _acknowledge(self) -> None:
        session = self._port.session
        if session is None or not session.due or self._port.closed or session.suspended or self._awaiting:
            return
        if not self._writer.lock.acquire(False):  # the writer may have passed its check for a due ACK
            self._port.loop.call_soon(self._acknowledge)
            return
        try:
            if not self._writer.queue.frames and self._writer.queue.between:
                self._prepend_ack(session, SocketTurn(self._writer.give_writing_back, None))
        finally:
            self._writer.lock.release()
        if self._full:
            self._empty()
        else:
            self._writer.flush()

    def _prepend_ack(self, session: Session, turn: SocketTurn) -> None:
        ack = session.ack()
        self._ack = ack if turn else self._ack  # no call: the loop may have queued another one meanwhile
        self._writer.queue.prepend(ack, turn)
        session.told(ack)

    def may_begin(self, session: Session, turn: SocketTurn) -> bool:
        """See `port.Owner`."""
        if not self._writer.queue.between:
            return True
        frames = self._writer.queue.frames
        if not self._awaiting:
            if session.due:
                self._prepend_ack(session, turn)
                return True
            if frames and frames[0] is self._ack:  # two full ends without it would wait for each other
                return True
        # Without a call: the turn may end in one.
        self._full = self._writer.blocked = True if turn else False  # noqa: SIM210
        # The loop may just have taken an acknowledgement, or the opener's first frame, without seeing this yet.
        if session.size < session.limit and not self._awaiting:
            self._full = self._writer.blocked = False
            return True
        if session.unsettled:  # the frames of an interrupted step: no acknowledgement of them might come
            self._port.call_on_loop(self._settle, session)
        return False

    def _settle(self, session: Session) -> None:
        session.settle()
        if session.size < session.limit:
            self._empty()

    def _empty(self) -> None:
        """Write on, if writing waited for an acknowledgement."""
        if self._full and not self._port.closed and not self._suspended and not self._awaiting:
            self._full = self._writer.blocked = False
            self._writer.flush()

    # --- the end of a socket ------------------------------------------------------------------------------------------

    @property
    def _suspended(self) -> bool:
        session = self._port.session
        return session is not None and session.suspended

    def halt(self) -> None:
        """The other end has a new socket for it: what comes over the old one does not count.

        `go_on` follows, without `on_suspended`; or `stay`, if that fails.
        """
        session = self._port.session
        if session is not None and not session.suspended:
            self.suspend(session)
            self._untold = True

    def stay(self, cause: OSError) -> None:
        """`go_on` failed after `halt`: it is resumed or ends as any other suspended connection."""
        untold, self._untold = self._untold, False
        if untold and self._suspended and self._port.on_suspended is not None:
            self._port.on_suspended(cause)

    def suspend(self, session: Session) -> None:
        """Its socket has broken: close it, and wait for another one."""
        session.enter(SessionEvent.BROKEN)
        self._writer.blocked, self._full = True, False
        with self._reader.reading, self._writer.lock:  # as in `_finish`
            self._writer.blocked = True  # a writer may have been interrupted
            self._reader.forget_socket()
            self._port.fd = -1
            self._port.sock.close()
            self._reader.unread.clear()  # it comes again
            self._reader.left = False
            if self._reader.epoll is not None:
                self._reader.epoll.close()
                self._reader.epoll, self._reader.sharing = None, False

    # --- a new socket -------------------------------------------------------------------------------------------------

    def go_on(self, other: Resumption, received: int, *, opener: bool) -> None:
        """Resume over the socket of another connection, whose handshake has just proved that it is of this session.

        The other connection is used up; `resumed` follows. received: how many frames of ours the other end has. The
        opener speaks first, and the acceptor waits for that: otherwise frames right behind its WELCOME might be read
        under the limits for strangers. Raises ProtocolError if that number is impossible, ConnectionError if the
        handshake is not completely written; then this one stays suspended, and the other one is unchanged.
        """
        port, reader, writer = self._port, self._reader, self._writer
        session, theirs = port.session, other._port
        assert session is not None, "only a lasting connection goes on"
        self.halt()  # this end may not have noticed yet that the old socket is broken
        other._writer.flush()
        if other._writer.queue:
            raise ConnectionError("the other side takes nothing")
        with reader.reading, writer.lock:
            writer.queue.go_on(other._writer.queue, received)
            self.lacking = writer.queue.first()
            unfinished, place = reader.decoder.unfinished, reader.decoder.place
            if unfinished is not None and port.on_cut is not None:
                port.on_cut(*unfinished)
            other._reader.forget_socket()
            port.sock, port.fd, port.tls = theirs.sock, theirs.fd, theirs.tls
            port.bytes_sent += theirs.bytes_sent
            port.bytes_received += theirs.bytes_received
            reader.go_on(other._reader)
            reader.decoder.place = place
            theirs.closed, theirs.fd = True, -1
            theirs.forget_callbacks()
            self._awaiting = self._full = writer.blocked = not opener
            session.due = True
        self._untold = False

    def resumed(self) -> None:
        """It has a socket again: read on, and acknowledge what has come."""
        if not self._port.paused:
            self._port.loop.add_reader(self._port.fd, self._reader.readable)
        if self._port.on_resumed is not None:
            self._port.on_resumed()
        self._acknowledge()
