"""From a socket to a worker that has proved who it is: the handshake on both sides, bounded in time and in memory.

These are the only messages that do not pass a link, as there is no link before they are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ... import foreign
from ...channels.inline import allocate
from ...errors import PeerRefused, ProtocolError, RendezvousError, RpcError, UnknownWorker, WorkerClosed
from ...protocol import handshake
from ...protocol.frames import FIRST_READ_SIZE, MAX_SEGMENTS, READ_SIZE, Frame, FrameDecoder
from ...protocol.handshake import Handshake
from ...protocol.identity import WorkerRecord
from ...protocol.states import HandshakeState
from ...transport import sockets
from ...transport.connection import Connection
from ...transport.lasting import LastingConnection
from ...transport.tls import TlsLayer
from ..callee import service as callee
from ..callee.service import Service
from ..caller.peer import Peer
from ..caller.peers import Peers
from ..engine.engine import Engine
from ..engine.host import provably_dead
from ..links.link import Link
from .group import Group, failure
from .listening import Listeners
from .mending import Home as MendingHome
from .mending import Line, Mender

logger = logging.getLogger("aiorpc")

# Seconds between two tries to connect: the first such pause, and the longest.
FIRST_PAUSE, LAST_PAUSE = 0.005, 0.5
# Characters of a reason to refuse somebody that go into the log.
REASON_LIMIT = 300
# So many refusals are logged in so many seconds; all are counted (`Statistics.connections_refused`).
REFUSALS_LOGGED, REFUSALS_EVERY = 100, 60.0
# How many bytes the runtime adds to a body at most: for errors (calls/failures.py), and for the way of each buffer
# (links/link.py).
OWN_WORDS = (2 << 20) + 48 * MAX_SEGMENTS
# Of the descriptors that the process may have, strangers take none beyond this share: handlers open files and sockets.
_FOR_STRANGERS = 0.8


class Home(callee.Home, MendingHome, Protocol):
    """What connecting needs of the worker."""

    mender: Mender

    peers: Peers
    group: Group
    services: set[Service]


def _descriptors() -> int:
    """How many descriptors this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 31


def _connection(engine: Engine, sock: socket.socket, label: str, *, opener: bool) -> LastingConnection:
    decoder = FrameDecoder(max_body=handshake.MAX_BODY, read_size=FIRST_READ_SIZE, allocate=allocate)
    tls = None
    if engine.credentials is not None and sock.family != socket.AF_UNIX:
        context, own = engine.credentials.context(opener=opener)
        tls = TlsLayer(context, decoder, opener=opener, own=own)
    connection = LastingConnection(engine.loop, sock, decoder, label=label, tls=tls)
    engine.connections.add(connection)
    return connection


def _seals(engine: Engine, connection: Connection) -> bool:
    """Whether what follows the handshake bears seals. With TLS they would do once more what that does."""
    return engine.options.authenticate_frames and not connection.local and connection.tls is None


def _lasts(engine: Engine, connection: Connection) -> bool:
    """Whether this side wants the connection to outlive its socket."""
    return bool(engine.options.reconnect_grace) and not connection.local


def _objection(engine: Engine, connection: Connection, record: WorkerRecord) -> str | None:
    """Why the other side of a TLS connection cannot be that worker; None if it can, or without TLS."""
    if engine.credentials is None or connection.tls is None or connection.tls.peer is None:
        return None
    return engine.credentials.objection(connection.tls.peer, record.name, record.role)


def _is_proved(connection: Connection, record: WorkerRecord) -> bool:
    """Whether the certificate of the other side proves that it is that worker, and no other one of its group."""
    shown = connection.tls.peer if connection.tls is not None else None
    return shown is not None and shown.is_of(record.name)


def _trust(engine: Engine, decoder: FrameDecoder) -> None:
    """The worker at the other end has proved itself: from now on the limits of the options hold."""
    decoder.max_body = engine.options.max_frame_bytes + OWN_WORDS
    decoder.max_segment = engine.options.max_tensor_bytes
    decoder.max_frame = engine.options.max_incoming_bytes
    decoder.read_size = READ_SIZE


class Connector:
    """Opens the connections of one worker. On its loop."""

    def __init__(self, home: Home, secret: bytes) -> None:
        self._home = home
        self._engine = home.engine
        self._secret = secret
        self._numbers = itertools.count(1)  # of links

    def connect(self, peer: Peer) -> None:
        """Begin to find the worker of a peer and to connect to it; if that cannot be done, the peer is lost."""
        self._engine.tasks.spawn(self._connect(peer))

    def open_pipe(self, link: Link) -> None:
        """Begin to open the second connection of a link, the same way as its first one."""
        self._engine.tasks.spawn(self._open_pipe(link))

    async def _connect(self, peer: Peer) -> None:
        home, engine = self._home, self._engine
        try:
            record = await home.peers.locate(peer)
            if record is None:
                return
            connection = await self._open(record, peer)
        except Exception as error:
            if peer.record is not None and not engine.closed:
                cause = f"it cannot be reached: {error}"
                home.group.on_lost(peer.record, cause, error)
                peer.fail(failure(peer.record, cause, error))  # `on_lost` does not, if the loss was known already
            elif isinstance(error, UnknownWorker):
                peer.fail(error)
            elif engine.closed:
                peer.fail(WorkerClosed(f"worker {engine.name!r} cannot reach {peer.name!r}: {error}"))
            else:  # only the store knows where it is
                peer.fail(RendezvousError(f"worker {engine.name!r} cannot find {peer.name!r}: {error}"))
            return
        if peer.gone is not None:
            connection.abort()
            return
        home.group.watch(record)
        peer.ready(connection)

    async def _open_pipe(self, link: Link) -> None:
        try:
            transport = "unix" if link.connection.local else "tcp"
            async with asyncio.timeout(self._engine.bounds.pipe):
                sock = await _reach(self._engine, link.record, (transport,))
                opening = _Opening(self._engine, link.connection.session, link.record, sock, link.number, pipe=True)
                opening.on_closed = link.second.closed
                opening.on_lasting = partial(self._watch, link.record, link.number, None)
                await opening.run(link.second.attach)
        except (OSError, TimeoutError, RpcError) as error:
            link.second.refused(f"{type(error).__name__}: {error}")

    async def _open(self, record: WorkerRecord, peer: Peer) -> Connection:
        """Open a connection to a worker, ready for calls, trying again with ever longer pauses for a bounded time.

        Raises OSError and PeerRefused.
        """
        engine = self._engine
        limit = time.monotonic() + engine.bounds.connect
        pause = FIRST_PAUSE
        while True:
            try:
                # The system tries for minutes where nobody answers.
                async with asyncio.timeout(engine.bounds.connect):
                    sock = await _reach(engine, record, engine.options.transports)
                number = next(self._numbers)
                opening = _Opening(engine, self._secret, record, sock, number)
                opening.on_closed = partial(self._closed, peer, opening.connection)
                opening.on_lasting = partial(self._watch, record, number, peer)
                return await opening.run(partial(peer.attach, number))
            except PeerRefused:
                raise
            except OSError as error:
                if peer.gone is not None:
                    raise
                if time.monotonic() > limit or provably_dead(record, engine.record.host):
                    raise ConnectionError(f"{record.describe()} does not take connections: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _watch(self, record: WorkerRecord, number: int, peer: Peer | None, connection: LastingConnection) -> None:
        line = Line(connection, record, number, pipe=peer is None, opener=True, peer=peer)
        self._home.mender.watch(line)

    async def reach(self, record: WorkerRecord) -> socket.socket:
        """A TCP socket that leads to a worker. Raises OSError and RpcError."""
        return await _reach(self._engine, record, ("tcp",))

    async def reopen(self, line: Line, sock: socket.socket) -> None:
        """Have a connection that has broken go on over a socket that leads there. Raises OSError and RpcError."""
        session, number = line.connection.session, line.link_number
        opening = _Opening(self._engine, session, line.record, sock, number, pipe=line.pipe, goes_on=line.connection)
        await opening.run(None)

    async def probe(self, record: WorkerRecord) -> None:
        """Connect to a worker once, and let go. Raises OSError or RpcError if nobody takes connections there."""
        (await _reach(self._engine, record, self._engine.options.transports)).close()

    def _closed(self, peer: Peer, connection: Connection, cause: BaseException | None) -> None:
        """A connection that we had opened has ended."""
        self._engine.counters.add_connection(connection)
        if peer.link is not None:
            peer.link.when_drained(partial(self._link_ended, peer, cause))
        else:
            self._link_ended(peer, cause)

    def _link_ended(self, peer: Peer, cause: BaseException | None) -> None:
        peer.link_ended()
        if cause is not None and peer.record is not None and not self._engine.closed:
            reason = f"the connection to it broke: {foreign.text_of(cause)}"
            self._home.group.on_lost(peer.record, reason)
            # Where that was no news (a connection to ourselves, a second peer of that worker) its calls must end too.
            peer.fail(failure(peer.record, reason, cause))


async def _reach(engine: Engine, record: WorkerRecord, transports: Sequence[str]) -> socket.socket:
    """A socket that leads to a worker: a unix socket on this host, if both have one, otherwise TCP."""
    missing: OSError | None = None
    if "unix" in transports and record.unix_path and record.host == engine.record.host:
        try:
            return await sockets.connect_unix(record.unix_path)
        except FileNotFoundError as error:  # of another container, maybe
            missing = error
        # Nothing else is tried over TCP: there it no longer listens, and whoever does is somebody else.
    if "tcp" in transports and record.tcp_port:
        if record.tls != engine.record.tls:
            has = "has TLS, and this worker has none" if record.tls else "has no TLS, and this worker has"
            raise PeerRefused(f"{record.describe()} {has}; give all workers of the group tls=, or none")
        return await sockets.connect_tcp(record.tcp_host, record.tcp_port)
    # This is no OSError where nothing was tried: it would be tried again, and that would not help.
    raise missing or RpcError(f"{record.describe()} and this worker have no transport in common")


class _Opening:
    """Our side of a handshake that we began. on_closed: told of the end of the connection, once it is ready.

    on_lasting: told of a connection that both sides want to outlive its socket. goes_on: the connection that gets the
    socket of this one.
    """

    def __init__(
        self,
        engine: Engine,
        secret: bytes,
        record: WorkerRecord,
        sock: socket.socket,
        link: int,
        *,
        pipe: bool = False,
        goes_on: LastingConnection | None = None,
    ) -> None:
        self._engine = engine
        self._record = record
        self.connection = _connection(engine, sock, f"{engine.name} to {record.name}", opener=True)
        self._process = sockets.peer_pid(sock)
        sealed = _seals(engine, self.connection)
        self.handshake = Handshake(
            engine.record,
            secret,
            opener=True,
            expect=record,
            link=link,
            pipe=pipe,
            sealed=sealed,
            safe=engine.safe,
            lasting=_lasts(engine, self.connection),
            received=None if goes_on is None else goes_on.received,
        )
        self._goes_on = goes_on
        self._secret = secret  # for a second connection, what the first one has left
        self.done: asyncio.Future[None] = engine.loop.create_future()
        self.on_closed: Callable[[BaseException | None], None] | None = None
        self.on_lasting: Callable[[LastingConnection], None] | None = None
        self._attach: Callable[[Connection], None] | None = None

    async def run(self, attach: Callable[[Connection], None] | None) -> Connection:
        """Do the handshake. attach: called as soon as it is done, before any later frame is looked at.

        None where another connection goes on: then that one is told.
        """
        connection = self.connection
        self._attach = attach
        connection.on_frames = self._on_frames
        connection.on_closed = self._on_closed
        connection.on_open = self._on_open
        connection.start()
        if connection.tls is None:
            self._on_open()
        try:
            # Without a bound: the other side may be stopped, or hold its interpreter. Calls have their deadlines, and
            # the end of the socket or of the process tells of death.
            await self.done
        except BaseException:
            connection.abort()
            raise
        return connection

    def _on_open(self) -> None:
        """The handshake may begin: at once, or when the other side has shown its certificate. Raises PeerRefused."""
        tls = self.connection.tls
        if tls is not None:
            objection = _objection(self._engine, self.connection, self._record)
            if objection is not None:
                raise PeerRefused(objection)
            self.handshake.binding = tls.binding()
        self.connection.send(self.handshake.start(), urgent=True)

    def _on_frames(self, frames: list[Frame]) -> None:
        for index, frame in enumerate(frames):
            reply = self.handshake.feed(frame)
            if reply:
                self.connection.send(reply, urgent=True)
            if self.handshake.sealed:
                self._seal(frames[index + 1 :])
            if self.handshake.state is HandshakeState.READY and not self.done.done():
                _trust(self._engine, self.connection.decoder)
                self._ready(frames[index + 1 :])
                return

    def _ready(self, behind: list[Frame]) -> None:
        connection = self.connection
        if self._goes_on is not None:
            if behind:
                raise ProtocolError("the acceptor of a connection that goes on spoke first")
            self._goes_on.go_on(connection, self.handshake.theirs, opener=True)
            self.done.set_result(None)
            return
        self.done.set_result(None)
        connection.session = self._secret if self.handshake.pipe else self.handshake.session()
        if self.handshake.lasting:
            connection.last(self._engine.options.max_unacknowledged_bytes)
            if self.on_lasting is not None:
                self.on_lasting(connection)
        assert self._attach is not None
        self._attach(connection)
        connection.hand_on(behind)  # a goodbye may follow at once

    def _seal(self, behind: list[Frame]) -> None:
        if self.handshake.state is HandshakeState.PROVED:
            if behind:
                raise ProtocolError("something without a seal came behind the handshake")
            self.connection.unseal(self.handshake.keys()[1])
        elif self.handshake.state is HandshakeState.READY:
            self.connection.seal(self.handshake.keys()[0])

    def _on_closed(self, cause: BaseException | None) -> None:
        if not self.done.done():
            if isinstance(cause, ProtocolError) and self.handshake.state is HandshakeState.PROVED:
                # What comes instead of a sealed WELCOME is from somebody who has not our key: a refusal, as a rule.
                cause = PeerRefused(f"{handshake.WRONG_SECRET}: {cause}")
            self.done.set_exception(cause or ConnectionError("closed during the handshake"))
        elif self.on_closed is not None:
            self.on_closed(cause)


class Acceptor:
    """Takes connections from the listeners, and serves those whose other end proves that it knows the secret.

    Its methods belong to the loop.
    """

    def __init__(self, home: Home, listeners: Listeners, secret: bytes) -> None:
        self.home = home
        self.secret = secret
        self._engine = home.engine
        self._name = home.engine.name
        self._listeners = listeners
        self._handshakes: dict[_Accepting, None] = {}  # oldest first
        self._logged, self._logged_since = 0, 0.0  # lines about refusals, in this stretch of time

    def start(self) -> None:
        """Begin to take connections, in the running context: handlers run in copies of it."""
        for sock in self._listeners.sockets():
            self._engine.loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        # A few at a time: whoever connects in a loop must not keep the loop from its other work.
        for _ in range(16):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # It stays in the backlog, and the listener readable: the loop would do nothing but look again.
                logger.warning("worker %s cannot take a connection: %s", self._engine.name, error)
                self._engine.loop.remove_reader(listener.fileno())
                self._engine.loop.call_later(self._engine.bounds.accept_pause, self._resume, listener)
                return
            reason = self._unwanted(sock)
            if reason is not None:
                self.refuse(reason)
                sock.close()
                continue
            self._handshakes[_Accepting(self, self._moved_down(sock))] = None

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._engine.loop.add_reader(listener.fileno(), self._accept, listener)

    def _unwanted(self, sock: socket.socket) -> str | None:
        if sock.family == socket.AF_UNIX:
            if sockets.peer_uid(sock) not in (os.getuid(), None):
                return "a process of another user connected"
        else:
            with contextlib.suppress(OSError):
                sockets.tune_tcp(sock)
        # The oldest goes, not the newest: members are done within milliseconds.
        if len(self._handshakes) >= self._engine.bounds.handshakes:
            self._make_room(f"{len(self._handshakes)} others were in their handshake")
        return None

    def _moved_down(self, sock: socket.socket) -> socket.socket:
        """The socket, with a low descriptor: the system gives the lowest, so a high one says that few are left."""
        if not self._handshakes or sock.fileno() < _descriptors() * _FOR_STRANGERS:
            return sock
        self._make_room("few descriptors were left in this process")
        with sock:
            return sock.dup()

    def _make_room(self, cause: str) -> None:
        oldest = next(iter(self._handshakes))
        oldest.connection.abort(ConnectionError(f"it had not proved itself when {cause}"))

    def reason_against(self, connection: Connection, process: int | None, record: WorkerRecord) -> str | None:
        """Why a worker that has proved itself is refused all the same; None if it is not.

        process: which one has connected, as the kernel says of a unix socket; None over TCP.
        """
        objection = _objection(self._engine, connection, record)
        if objection is not None:
            return objection
        if self.home.group.contradicts(record):
            return f"worker {record.name!r} does not say of itself what stands in the roster of worker {self._name!r}"
        if process is not None and (process, self._engine.record.host) != (record.pid, record.host):
            return f"process {process} is not the process of worker {record.name!r}, {record.pid}, whose name it uses"
        if record.id in self.home.group.lost:
            return f"worker {record.name!r} was given up as lost; it cannot come back in this incarnation"
        return None

    def session_of(self, record: WorkerRecord, link_number: int) -> bytes | None:
        """What the first connection of that link has left for its second one; None if there is no such link."""
        link = self.home.links.find(record, link_number, opener=False)
        return link.connection.session if link is not None else None

    def goes_on(self, record: WorkerRecord, link_number: int, pipe: bool) -> int:
        """The opener of a connection has a new socket for it: how many frames have come here. Raises PeerRefused."""
        connection = self.broken(record, link_number, pipe)
        connection.halt()
        return connection.received

    def broken(self, record: WorkerRecord, link_number: int, pipe: bool) -> LastingConnection:
        """The connection that its opener has a new socket for. Raises PeerRefused if there is none."""
        link = self.home.links.find(record, link_number, opener=False)
        connection = None if link is None else link.second.attached if pipe else link.connection
        if not isinstance(connection, LastingConnection) or connection.lasting is None or connection.closed:
            raise PeerRefused("the connection that is to go on has ended here")
        return connection

    def refuse(self, reason: str) -> None:
        """A stranger was turned away: count it and log it. A crowd of them fills no log: it is counted alone."""
        self._engine.counters.refused += 1
        now = time.monotonic()
        if now - self._logged_since >= REFUSALS_EVERY:
            self._logged, self._logged_since = 0, now
        self._logged += 1
        if self._logged > REFUSALS_LOGGED:
            return
        # Some of it may be the stranger's own words: it is one line of bounded length, whatever they are.
        said = "".join(each if each.isprintable() else "?" for each in reason[:REASON_LIMIT])
        last = "; more of them are only counted for now" if self._logged == REFUSALS_LOGGED else ""
        logger.warning("worker %s refused a connection: %s%s", self._engine.name, said, last)

    def ended(self, accepting: _Accepting) -> None:
        """A handshake is over, whether it has succeeded or not."""
        self._handshakes.pop(accepting, None)

    def close(self) -> None:
        """Take no more connections; those in their handshake are closed."""
        for sock in self._listeners.sockets():
            self._engine.loop.remove_reader(sock.fileno())
        for accepting in list(self._handshakes):
            accepting.connection.abort()

    def serve(self, record: WorkerRecord, connection: Connection, link_number: int, sure: bool) -> Service:
        """A worker has connected to us and proved that it is a member; serve it.

        link_number: the number of the link. sure: the kernel, or a certificate for that one worker, has said that it is
        the one that it says it is.
        """
        service = Service(self.home, record, connection, link_number, sure)
        self.home.services.add(service)
        self.home.peers.of(record)
        self.home.group.watch(record)
        return service

    def served(self, service: Service, cause: BaseException | None) -> None:
        """A connection on which we served has ended."""
        self.home.services.discard(service)
        self._engine.counters.add_connection(service.connection)
        service.close()
        if isinstance(cause, ProtocolError) and not service.sure:  # who was lost, and why, may be told by another sign
            text = foreign.text_of(cause)[:REASON_LIMIT]
            logger.warning("worker %s ended a connection of %s: %s", self._name, service.record.name, text)
        if cause is not None:
            self.home.group.on_broken(service, f"its connection broke: {foreign.text_of(cause)}")


class _Accepting:
    """Our side of a handshake that somebody else began.

    A connection that has ended refers to nobody (`Connection.close`), and `Handshake` not to this object: so what a
    stranger took is free again as soon as it is gone, also in a program that has turned the collector off.
    """

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        engine = acceptor.home.engine
        self.acceptor = acceptor
        self._home = acceptor.home
        self.connection = _connection(engine, sock, f"to {engine.name}", opener=False)
        self._process = sockets.peer_pid(sock)
        sealed = _seals(engine, self.connection)
        self.handshake = Handshake(
            engine.record,
            acceptor.secret,
            opener=False,
            accept=partial(acceptor.reason_against, self.connection, self._process),
            sealed=sealed,
            session_of=acceptor.session_of,
            safe=engine.safe,
            lasting=_lasts(engine, self.connection),
            goes_on=acceptor.goes_on,
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
                reply = self.handshake.feed(frame)
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
            _trust(self._home.engine, self.connection.decoder)
            if self.handshake.resumes:
                broken = self.acceptor.broken(record, self.handshake.link, self.handshake.pipe)
                broken.go_on(self.connection, self.handshake.theirs, opener=False)
                return
            self.connection.session = self.handshake.session()
            if self.handshake.lasting:
                self.connection.last(self._home.engine.options.max_unacknowledged_bytes)
                line = Line(self.connection, record, self.handshake.link, pipe=self.handshake.pipe, opener=False)
                self._home.mender.watch(line)
            if self.handshake.pipe:
                self._become_pipe(record)
                return
            sure = self._process is not None or _is_proved(self.connection, record)
            service = self.acceptor.serve(record, self.connection, self.handshake.link, sure)
            self._serving = partial(self.acceptor.served, service)

    def _become_pipe(self, record: WorkerRecord) -> None:
        link = self._home.links.find(record, self.handshake.link, opener=False)
        if link is None:  # its first connection has ended meanwhile
            self.connection.abort()
            return
        self._serving = link.second.closed
        link.second.attach(self.connection)

    def _too_slow(self, patience: float) -> None:
        self.connection.abort(TimeoutError(f"it did not prove itself within {patience:g} s"))

    def _on_closed(self, cause: BaseException | None) -> None:
        self._timer.cancel()
        self.acceptor.ended(self)
        if self._serving is not None:
            self._serving(cause)
        elif cause is not None and not isinstance(cause, (ConnectionResetError, BrokenPipeError)):
            self.acceptor.refuse(foreign.text_of(cause))
        else:
            self._home.engine.counters.given_up += 1
