"""Accepting connections: serving members that prove themselves, and refusing strangers. See also `connecting.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from functools import partial

from ... import foreign
from ...errors import PeerRefused, ProtocolError
from ...logs import logger
from ...protocol import handshake
from ...protocol.frames import Buffer, Frame
from ...protocol.handshake import Handshake
from ...protocol.identity import WorkerRecord
from ...protocol.states import HandshakeState
from ...transport import sockets
from ...transport.connection import Connection
from ..callee.service import Service
from ..engine.host import most_descriptors
from .connecting import ConnectionContext, lasts, make_connection, objection_to, seals, trust
from .listening import Listeners
from .resumption import Line

# At most so many refusals and ended connections of members are logged in so many seconds. All refusals are counted
# (`Statistics.connections_refused`).
REFUSALS_LOGGED, REFUSALS_EVERY = 100, 60.0
# Ended connections whose session is kept, because their second connection may be on its way.
_ENDED = 64
# Seconds between two warnings that the system gives no connection.
UNTAKEN_EVERY = 60.0
# The share of the process's descriptors that strangers may take: handlers need descriptors, too.
_FOR_STRANGERS = 0.8


def _is_proved(connection: Connection, record: WorkerRecord) -> bool:
    """Whether the other side's certificate names that one worker of the group."""
    shown = connection.tls.peer if connection.tls is not None else None
    return shown is not None and shown.is_of(record.name)


class Acceptor:
    """Takes connections from the listeners, and serves those whose other end proves that it knows the secret. On the
    loop.
    """

    def __init__(self, context: ConnectionContext, listeners: Listeners, secret: bytes) -> None:
        self.context = context
        self.secret = secret
        self._engine = context.engine
        self._name = context.engine.name
        self._listeners = listeners
        self._handshakes: dict[_Accepting, None] = {}  # oldest first
        self._ended: dict[tuple[str, int], bytes] = {}  # sessions by incarnation and number of the link, oldest first
        self._logged, self._logged_since = 0, 0.0  # lines logged since then
        self._untaken_said = -UNTAKEN_EVERY  # time of the last warning

    def start(self) -> None:
        """Begin to take connections. Handlers run in copies of the current context."""
        for sock in self._listeners.sockets():
            self._engine.loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        # A few at a time: a client that connects in a loop must not starve the event loop.
        for _ in range(16):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # The connection stays in the backlog and the listener readable: without a pause the loop would spin.
                self._say_untaken(error)
                self._engine.loop.remove_reader(listener.fileno())
                self._engine.loop.call_later(self._engine.bounds.accept_pause, self._resume, listener)
                return
            reason = self._unwanted(sock)
            if reason is not None:
                self.refuse(reason, sockets.origin(sock))
                sock.close()
                continue
            self._handshakes[_Accepting(self, self._moved_down(sock))] = None

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._engine.loop.add_reader(listener.fileno(), self._accept, listener)

    def _say_untaken(self, error: OSError) -> None:
        # A lack of descriptors lasts, and accepting is tried twice a second.
        now = time.monotonic()
        if now - self._untaken_said >= UNTAKEN_EVERY:
            self._untaken_said = now
            said = "worker %s cannot take a connection: %s; it tries on, and says so once a minute at most"
            logger.warning(said, self._engine.name, error)

    def _unwanted(self, sock: socket.socket) -> str | None:
        if sock.family == socket.AF_UNIX:
            if sockets.peer_uid(sock) not in (os.getuid(), None):
                return "a process of another user connected"
        else:
            with contextlib.suppress(OSError):
                sockets.tune_tcp(sock)
        # The oldest handshake goes, not the newest: members need milliseconds.
        if len(self._handshakes) >= self._engine.bounds.handshakes:
            self._make_room(f"{len(self._handshakes)} others were in their handshake")
        return None

    def _moved_down(self, sock: socket.socket) -> socket.socket:
        """The socket, with a low descriptor: the system gives the lowest, so a high one says that few are left."""
        if not self._handshakes or sock.fileno() < most_descriptors() * _FOR_STRANGERS:
            return sock
        self._make_room("few descriptors were left in this process")
        with sock:
            return sock.dup()

    def _make_room(self, cause: str) -> None:
        oldest = next(iter(self._handshakes))
        oldest.connection.abort(ConnectionError(f"it had not proved itself when {cause}"))

    def reason_against(
        self, connection: Connection, process: int | None, record: WorkerRecord, opens: bool
    ) -> str | None:
        """Why a worker that has proved itself is refused; None if it is not.

        process: the pid that the kernel gives for a unix socket; None over TCP. opens: whether it opens a link, of
        which each member has few; a second connection or a new socket opens none.
        """
        objection = objection_to(self._engine, connection, record)
        if objection is not None:
            return objection
        if self.context.group.contradicts(record):
            return f"worker {record.name!r} does not say of itself what stands in the roster of worker {self._name!r}"
        if process is not None and (process, self._engine.record.host) != (record.pid, record.host):
            return f"process {process} is not the process of worker {record.name!r}, {record.pid}, whose name it uses"
        if self.context.group.is_lost(record):
            return f"worker {record.name!r} was given up as lost; it cannot come back in this incarnation"
        crowded = opens and self._is_at_limit(record) and self._unused(record) is None
        return self._too_many(record) if crowded else None

    def _is_at_limit(self, record: WorkerRecord) -> bool:
        """Whether a member has as many links to this worker as it may have.

        Links that have ended do not count, although the loop may notice their end a second later. Otherwise a member
        that lost its connections, or whose name strangers used, would be refused and lost for good.
        """
        most = self._engine.bounds.member_connections
        here = [each.connection for each in self.context.services if each.record.incarnation == record.incarnation]
        return len(here) >= most and sum(not connection.is_over() for connection in here) >= most

    def _unused(self, record: WorkerRecord) -> Connection | None:
        """The oldest connection of a member that the member does not seem to know.

        The end of its handshake was lost with its socket: a member sends something over each new connection at once.
        The connection waits for its opener (`SessionResumption`), which opens another one instead.
        """
        known = [each for each in self.context.services if each.record.incarnation == record.incarnation]
        for each in sorted(known, key=lambda each: each.link.number):
            session = each.connection.lasting
            if session is not None and not session.received:
                return each.connection
        return None

    def _too_many(self, record: WorkerRecord) -> str:
        most = self._engine.bounds.member_connections
        return f"worker {record.name!r} has {most} connections here already, and no member gets more"

    def make_way(self, record: WorkerRecord) -> None:
        """Make room for one more connection of a member that has proved itself. Raises PeerRefused if it gets no
        more."""
        while self._is_at_limit(record):
            unused = self._unused(record)
            if unused is None:  # several handshakes ran at once
                raise PeerRefused(self._too_many(record))
            self.context.resumption.replace(unused)

    def session_of(self, record: WorkerRecord, link_number: int) -> bytes | None:
        """The session of a link, with which its second connection proves itself; None if there is no such link.

        A link that has just ended has one, too: its late second connection is told from a stranger's and not counted as
        refused.
        """
        link = self.context.links.find(record, link_number, opener=False)
        return link.connection.session if link is not None else self._ended.get((record.incarnation, link_number))

    def goes_on(self, record: WorkerRecord, link_number: int, pipe: bool) -> int:
        """The opener of a connection has a new socket for it: return how many frames have arrived. Raises
        PeerRefused."""
        connection = self.broken(record, link_number, pipe)
        connection.halt()
        return connection.received

    def stays(self, record: WorkerRecord, link_number: int, pipe: bool, cause: BaseException | None) -> None:
        """After `goes_on`: the new socket ended unused, and the connection stays suspended."""
        why = handshake.shown(foreign.text_of(cause)) if cause is not None else "that was closed here"
        with contextlib.suppress(PeerRefused):  # the connection has ended meanwhile
            connection = self.broken(record, link_number, pipe)
            connection.stay(ConnectionResetError(f"it could not go on over its new socket: {why}"))

    def broken(self, record: WorkerRecord, link_number: int, pipe: bool) -> Connection:
        """The connection for which its opener has a new socket. Raises PeerRefused if there is none."""
        link = self.context.links.find(record, link_number, opener=False)
        connection = None if link is None else link.second.attached if pipe else link.connection
        if not isinstance(connection, Connection) or connection.lasting is None or connection.closed:
            raise PeerRefused("the connection that is to go on has ended here")
        return connection

    def refuse(self, reason: str, origin: str) -> None:
        """Count and log a refused stranger. A crowd of them is only counted.

        origin: the address that the system gives, which the stranger cannot choose.
        """
        self._engine.counters.refused += 1
        self._say("worker %s refused a connection: %s%s", self._engine.name, reason, origin and f" (from {origin})")

    def _say(self, line: str, name: str, reason: str, origin: str = "") -> None:
        """Log a line, unless too many were logged lately. name: before the reason in the line. origin: after it."""
        now = time.monotonic()
        if now - self._logged_since >= REFUSALS_EVERY:
            self._logged, self._logged_since = 0, now
        self._logged += 1
        if self._logged > REFUSALS_LOGGED:
            return
        said = handshake.shown(reason)  # may contain the stranger's own words
        last = "; more of them are only counted for now" if self._logged == REFUSALS_LOGGED else ""
        logger.warning(line, name, said, origin + last)

    def ended(self, accepting: _Accepting) -> None:
        """A handshake is over, whether it has succeeded or not."""
        self._handshakes.pop(accepting, None)

    def close(self) -> None:
        """Take no more connections, and close those in their handshake.

        The listeners close, too: clients get a refusal instead of waiting for an answer.
        """
        for sock in self._listeners.sockets():
            self._engine.loop.remove_reader(sock.fileno())
        self._listeners.close()
        for accepting in list(self._handshakes):
            accepting.connection.abort()

    def serve(self, record: WorkerRecord, connection: Connection, link_number: int, sure: bool) -> Service:
        """Serve a member that has connected and proved itself.

        sure: the kernel or a certificate of that one worker has proved which member it is.
        """
        service = Service(self.context, record, connection, link_number, sure)
        self.context.services.add(service)
        self.context.group.on_met(record)
        self.context.peers.of(record)
        self.context.group.watch(record)
        return service

    def served(self, service: Service, cause: BaseException | None) -> None:
        """A serving connection has ended."""
        self.context.services.discard(service)
        self._engine.counters.add_connection(service.connection)
        self._ended[service.record.incarnation, service.link.number] = service.connection.session
        if len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]
        service.close()
        if isinstance(cause, ProtocolError) and not service.sure:  # another sign may report the loss
            said = f"{self._name} ended a connection of {service.record.name}"
            self._say("worker %s: %s%s", said, foreign.text_of(cause))
        if cause is not None:
            self.context.group.on_broken(service, f"its connection broke: {foreign.text_of(cause)}")


class _Accepting:
    """The acceptor's side of one handshake.

    It makes no reference cycles: an ended connection drops its references (`Connection.close`), and `Handshake` has
    none to this object. So a stranger's memory is free at once, even if the garbage collector is off.
    """

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        engine = acceptor.context.engine
        self.acceptor = acceptor
        self._context = acceptor.context
        self.connection: Connection = make_connection(engine, sock, f"to {engine.name}", opener=False)
        self._process = sockets.peer_pid(sock)
        self._origin = sockets.origin(sock)  # now: a closed socket does not tell it
        sealed = seals(engine, self.connection)
        self.handshake: Handshake = Handshake(
            engine.record,
            acceptor.secret,
            accept=partial(acceptor.reason_against, self.connection, self._process),
            sealed=sealed,
            session_of=acceptor.session_of,
            safe=engine.safe,
            lasting=lasts(engine, self.connection),
            goes_on=acceptor.goes_on,
            takes=engine.options.max_incoming_bytes,
        )
        patience = engine.bounds.handshake
        self._timer = engine.loop.call_later(patience, self._too_slow, patience)
        self._serving: Callable[[BaseException | None], None] | None = None
        self.connection.on_frames = self._on_frames
        self.connection.on_closed = self._on_closed
        self.connection.on_open = self._on_open
        self.connection.start()

    def _on_open(self) -> None:
        if self.connection.tls is not None:
            self.handshake.binding = self.connection.tls.binding()

    def _on_frames(self, frames: list[Frame]) -> None:
        try:
            for frame in frames:
                reply = self._fed(frame)
                if self.handshake.sealed and self.handshake.state is HandshakeState.READY:
                    ours, theirs = self.handshake.keys()
                    self.connection.unseal(theirs)
                    self.connection.seal(ours)
                if reply:
                    self.connection.send(reply, urgent=True)
        except (PeerRefused, ProtocolError) as error:
            if self.handshake.sealed and self.handshake.proved:
                self.connection.seal(self.handshake.keys()[0])
            self.connection.send(handshake.refusal(str(error)), urgent=True)
            raise ProtocolError(str(error)) from error
        record = self.handshake.peer
        if record is not None:
            self._timer.cancel()
            self.acceptor.ended(self)
            trust(self._context.engine, self.connection.decoder)
            if self.handshake.resumes:
                broken = self.acceptor.broken(record, self.handshake.link, self.handshake.pipe)
                broken.go_on(self.connection, self.handshake.theirs, opener=False)
                return
            self.connection.session, self.connection.takes_at_once = self.handshake.session(), self.handshake.theirs
            if self.handshake.lasting:
                self.connection.last(self._context.engine.options.max_unacknowledged_bytes)
                line = Line(self.connection, record, self.handshake.link, pipe=self.handshake.pipe, opener=False)
                self._context.resumption.watch(line)
            if self.handshake.pipe:
                self._become_pipe(record)
                return
            self.acceptor.make_way(record)
            sure = self._process is not None or _is_proved(self.connection, record)
            service = self.acceptor.serve(record, self.connection, self.handshake.link, sure)
            self._serving = partial(self.acceptor.served, service)

    def _fed(self, frame: Frame) -> list[Buffer]:
        """The handshake's reply to a frame. Any unexpected error that a stranger causes becomes a ProtocolError.

        Unexpected errors are logged with tracebacks and without a limit, so a stranger could fill the log.
        """
        try:
            return self.handshake.feed(frame)
        except (PeerRefused, ProtocolError, OSError):
            raise
        except Exception as error:
            if self.handshake.proved:  # a member's, or our own mistake: keep the traceback
                raise
            raise ProtocolError(f"its handshake cannot be read: {foreign.said(error)}") from error

    def _become_pipe(self, record: WorkerRecord) -> None:
        link = self._context.links.find(record, self.handshake.link, opener=False)
        if link is None:  # the first connection has ended meanwhile
            self.connection.abort()
            return
        self._serving = partial(link.second.closed, self.connection)
        former = link.second.attached
        link.second.attach(self.connection)
        if former is not None and former is not link.second.attached:
            self._context.resumption.replace(former)

    def _too_slow(self, patience: float) -> None:
        self.connection.abort(TimeoutError(f"it did not prove itself within {patience:g} s"))

    def _on_closed(self, cause: BaseException | None) -> None:
        self._timer.cancel()
        self.acceptor.ended(self)
        if self.handshake.resumes and self.handshake.peer is not None:
            self.acceptor.stays(self.handshake.peer, self.handshake.link, self.handshake.pipe, cause)
        if self._serving is not None:
            self._serving(cause)
        elif cause is not None and not isinstance(cause, (ConnectionResetError, BrokenPipeError)):
            self.acceptor.refuse(foreign.text_of(cause), self._origin)
        elif self.connection.bytes_received or not self.connection.local:
            # A silent client of a unix socket only looked for a listener (`remove_stale`).
            self._context.engine.counters.given_up += 1
