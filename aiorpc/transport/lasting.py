"""A connection over TCP that outlives its socket.

What is counted, kept and acknowledged is `protocol.session`; here it is done to a socket. When that breaks, the
connection is suspended: it has no socket, what is sent waits in its queue, and whoever holds the connection notices
nothing. Somebody else makes a new one, whose other end proves itself as usual, and gives its socket to this one
(`go_on`), with its decoder and its seals or TLS: keys are always those of the handshake before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..interrupts import SocketTurn
from ..protocol.frames import Buffer, Frame, FrameDecoder
from ..protocol.session import Session
from ..protocol.states import SessionEvent
from .connection import Connection
from .silence import Silence
from .tls import TlsLayer


class LastingConnection(Connection):
    """See the module. Before `last` it is a connection like any other. On the loop.

    on_suspended: while there is none, the end of its socket is its own; else `go_on` follows, or `abort`. on_resumed:
    called when it goes on. silent_for: how long its host had not answered when its socket was given up, in seconds.
    lacking: as it went on last, what told the first frame that the other end had not received from others; None if it
    had received all.
    """

    bytes_sent: int
    bytes_received: int
    decoder: FrameDecoder
    tls: TlsLayer | None
    lasting: Session | None
    on_suspended: Callable[[OSError], None] | None
    on_cut: Callable[[int, int], None] | None
    on_resumed: Callable[[], None] | None = None
    silent_for: float = 0.0
    lacking: tuple[int, bytes] | None = None
    _full = False  # nothing is written until something has come
    _awaiting = False  # it goes on, and the opener has not spoken yet; an ACK is due all that time, so writers ask here
    _untold = False  # it was halted, and whoever mends it has not heard of that
    _ack: Sequence[Buffer] = ()  # the last one that was queued

    def last(self, limit: int) -> None:
        """From now on what is sent is kept until it is acknowledged, and the connection outlives its socket.

        To be called behind the last frame of the handshake, at both ends. limit: bytes that are kept at most.
        ConnectionError if something of the handshake is still on its way.
        """
        self.flush()
        if self.queue:
            raise ConnectionError("the other side takes nothing")
        self.lasting = session = Session(limit)
        self.queue.keep(session)

    @property
    def suspended(self) -> bool:
        """Whether it has no socket, and waits for one."""
        return self.lasting is not None and self.lasting.suspended

    @property
    def must_hear(self) -> bool:
        session = self.lasting
        # What is written on in the next turn needs no more: all frames of this turn may have come together.
        return self._full and session is not None and (self._awaiting or session.size >= session.limit)

    @property
    def owing(self) -> bool:
        session = self.lasting
        if session is None or not session.suspended:
            return super().owing
        return bool(session.received and (session.kept or self.queue))  # who has said nothing waits for nothing

    @property
    def received(self) -> int:
        """How many frames have come since the handshake, to tell the other end when it goes on."""
        assert self.lasting is not None, "only a lasting connection goes on"
        return self.lasting.received

    # --- acknowledging ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Acknowledge what has come, if nothing has said so yet. To be called once in a while."""
        session = self.lasting
        if session is not None and session.fresh:
            session.due, session.said_at = True, self.bytes_received
            self._acknowledge()

    def _counted(self, frames: list[Frame], session: Session) -> list[Frame]:
        frames = session.arrived(frames, self.bytes_received, self.queue.begun_frames)
        if session.due:
            self._loop.call_soon(self._acknowledge)
        self._awaiting = False
        if self._full and session.size < session.limit:
            self._loop.call_soon(self._empty)
        return frames

    def _acknowledge(self) -> None:
        session = self.lasting
        if session is None or not session.due or self._closed or session.suspended or self._awaiting:
            return
        if not self._lock.acquire(False):  # whoever writes may have looked for it already
            self._loop.call_soon(self._acknowledge)
            return
        try:
            if not self.queue.frames and self.queue.between:
                self._prepend_ack(session, SocketTurn(self._give_writing_back, None))
        finally:
            self._lock.release()
        if self._full:
            self._empty()
        else:
            self.flush()

    def _prepend_ack(self, session: Session, turn: SocketTurn) -> None:
        ack = session.ack()
        self._ack = ack if turn else self._ack  # no call: the loop may have queued another one in that
        self.queue.prepend(ack, turn)
        session.told(ack)

    def _may_begin(self, session: Session, turn: SocketTurn) -> bool:
        if not self.queue.between:
            return True
        if not self._awaiting:
            if session.due:
                self._prepend_ack(session, turn)
                return True
            if self.queue.frames and self.queue.frames[0] is self._ack:  # else two that are full would wait for ever
                return True
        # And no call: the turn may end in one.
        self._full = self._blocked = True if turn else False  # noqa: SIM210
        # The loop may just have taken an acknowledgement, or the word of the opener, and not have seen this yet.
        if session.size < session.limit and not self._awaiting:
            self._full = self._blocked = False
            return True
        if session.unsettled:  # else nothing might ever come
            self._call_on_loop(self._settle, session)
        return False

    def _settle(self, session: Session) -> None:
        session.settle()
        if session.size < session.limit:
            self._empty()

    def _empty(self) -> None:
        """Write on, if that waited for an acknowledgement."""
        if self._full and not self._closed and not self.suspended and not self._awaiting:
            self._full = self._blocked = False
            self.flush()

    # --- the end of a socket ------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        session = self.lasting
        if session is None or self._closed or self._closing or self.on_suspended is None:
            super()._fail(error)
        elif session.suspended:
            return  # a thread has still tried to write
        elif isinstance(error, OSError):
            self._suspend(session)
            self.on_suspended(error)
        else:
            super()._fail(error)

    def break_off(self, silence: float) -> None:
        """The other host has not answered for so many seconds: the connection is suspended, or ends."""
        self.silent_for = silence
        self._fail(TimeoutError(f"its host has not answered for {silence:.0f} s"))
        self.silent_for = 0.0

    def halt(self) -> None:
        """The other end has a new socket for it: nothing that comes over the old one counts.

        `go_on` follows, and whoever mends it need not hear of this; or `stay`, if that cannot be.
        """
        if self.lasting is not None and not self.suspended:
            self._suspend(self.lasting)
            self._untold = True

    def stay(self, cause: OSError) -> None:
        """It does not go on after `halt`: it is mended or ends as any other that is suspended."""
        untold, self._untold = self._untold, False
        if untold and self.suspended and self.on_suspended is not None:
            self.on_suspended(cause)

    def _suspend(self, session: Session) -> None:
        session.enter(SessionEvent.BROKEN)
        self._blocked, self._full = True, False
        with self._reading, self._lock:  # as in `_finish`
            self._blocked = True  # a writer may have been interrupted
            self._forget_socket()
            self._fd = -1
            self._sock.close()
            self._unread.clear()  # it comes again
            self._left = False
            if self._epoll is not None:
                self._epoll.close()
                self._epoll, self._sharing = None, False

    def _share_reading(self) -> None:
        if self._fd < 0:
            self._sharing = False
        else:
            super()._share_reading()

    # --- a new socket -------------------------------------------------------------------------------------------------

    def go_on(self, other: LastingConnection, received: int, *, opener: bool) -> None:
        """Go on over the socket of another connection, whose handshake has just proved that it is of this session.

        The other connection is spent. received: how many frames of ours the other end has. The opener speaks first,
        and the acceptor waits for that: what came right behind its WELCOME might be read together with that, by the
        limits for strangers. Raises ProtocolError if that number cannot be, ConnectionError if the handshake is not
        written as a whole; this one stays suspended then, and the other one is as it was.
        """
        session = self.lasting
        assert session is not None, "only a lasting connection goes on"
        self.halt()  # this end may not have noticed yet that the old socket is of no use
        other.flush()
        if other.queue:
            raise ConnectionError("the other side takes nothing")
        with self._reading, self._lock:
            self.queue.go_on(other.queue, received)
            self.lacking = self.queue.first()
            unfinished, place = self.decoder.unfinished, self.decoder.place
            if unfinished is not None and self.on_cut is not None:
                self.on_cut(*unfinished)
            other._forget_socket()
            self._sock, self._fd, self._epoll, self._sharing = other._sock, other._fd, None, False
            self.decoder = other.decoder
            self.tls = other.tls
            self._unsealer, self._source = other._unsealer, other._source
            self.decoder.place = place
            self._turn = other._turn
            self._silence = Silence()
            self.bytes_sent += other.bytes_sent
            self.bytes_received += other.bytes_received
            other._closed = True
            other._fd = -1
            other.on_frames = other.on_closed = other.on_drained = other.on_open = None
            self._awaiting = self._full = self._blocked = not opener
            session.due = True
        self._untold = False
        if not self._paused:
            self._loop.add_reader(self._fd, self._readable)
        if self.on_resumed is not None:
            self.on_resumed()
        self._acknowledge()

    def _finish(self, cause: BaseException | None) -> None:
        super()._finish(cause)
        self.on_suspended = self.on_resumed = self.on_cut = None
