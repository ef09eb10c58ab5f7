"""Connecting to a worker, up to the end of the handshake; and what both sides of a handshake share.

The handshake's messages do not pass a link, because the link is made after them. The acceptor's side is `accepting.py`.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ... import foreign
from ...channels.inline import allocate
from ...errors import PeerRefused, ProtocolError, RendezvousError, RpcError, UnknownWorker, WorkerClosed
from ...logs import logger
from ...protocol import handshake
from ...protocol.frames import FIRST_READ_SIZE, MAX_SEGMENTS, READ_SIZE, Frame, FrameDecoder
from ...protocol.handshake import Handshake
from ...protocol.identity import WorkerRecord
from ...protocol.states import HandshakeState, PeerState
from ...transport import sockets
from ...transport.connection import Connection
from ...transport.tls import TlsLayer
from ...undoing import on_error
from ..callee import service as callee
from ..caller.addressee import farewell
from ..caller.peer import Peer
from ..engine.engine import Engine
from ..engine.host import provably_dead
from ..links.link import Link
from .group import Group, failure
from .interface import MembershipContext
from .resumption import Line, SessionResumption

# Seconds between two tries to connect: the first such pause, and the longest.
FIRST_PAUSE, LAST_PAUSE = 0.005, 0.5
# Seconds for the first message of a listener after a connection broke. A worker sends it at once and whole.
FIRST_WORD = 4.0
# The most bytes that the runtime adds to a body: for errors (calls/failures.py), and for each buffer's channel
# (links/link.py).
OWN_WORDS = (2 << 20) + 48 * MAX_SEGMENTS
# The system's errors for an address without a listener.
_NOBODY_LISTENS = (ConnectionRefusedError, FileNotFoundError)
# The system's errors if this process or host lacks resources for a socket; they say nothing about the other end.
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LACKING_EVERY = 60.0  # seconds between two warnings of that


class ConnectionContext(callee.ServiceContext, MembershipContext, Protocol):
    """What connecting and accepting need of the worker."""

    resumption: SessionResumption
    group: Group


def make_connection(engine: Engine, sock: socket.socket, label: str, *, opener: bool) -> Connection:
    """A connection over that socket, with the limits for strangers; with TLS, where this worker has it."""
    decoder = FrameDecoder(max_body=handshake.MAX_BODY, read_size=FIRST_READ_SIZE, allocate=allocate)
    tls = None
    if engine.credentials is not None and sock.family != socket.AF_UNIX:
        context, own = engine.credentials.context(opener=opener)
        tls = TlsLayer(context, decoder, opener=opener, own=own)
    connection = Connection(engine.loop, sock, decoder, label=label, tls=tls)
    if engine.poll is not None:
        connection.on_heard = engine.poll.heard
    engine.connections.add(connection)
    return connection


def seals(engine: Engine, connection: Connection) -> bool:
    """Whether frames after the handshake bear seals. TLS makes them needless."""
    return engine.options.authenticate_frames and not connection.local and connection.tls is None


def lasts(engine: Engine, connection: Connection) -> bool:
    """Whether this side wants the connection to outlive its socket."""
    return bool(engine.options.reconnect_grace) and not connection.local


def objection_to(engine: Engine, connection: Connection, record: WorkerRecord) -> str | None:
    """Why the other side of a TLS connection cannot be that worker; None if it can, or without TLS."""
    if engine.credentials is None or connection.tls is None or connection.tls.peer is None:
        return None
    return engine.credentials.objection(connection.tls.peer, record.name, record.role)


def trust(engine: Engine, decoder: FrameDecoder) -> None:
    """Apply the limits of the options: the worker at the other end has proved itself."""
    decoder.max_body = engine.options.max_frame_bytes + OWN_WORDS
    decoder.max_segment = engine.options.max_tensor_bytes
    decoder.max_frame = engine.options.max_incoming_bytes
    decoder.read_size = READ_SIZE


class Connector:
    """Opens the connections of one worker. On its loop."""

    def __init__(self, context: ConnectionContext, secret: bytes) -> None:
        self._context = context
        self._engine = context.engine
        self._secret = secret
        self._numbers = itertools.count(1)  # of links
        self._finding: set[Peer] = set()
        self._opening: set[asyncio.Future[None]] = set()  # handshakes that are under way
        self._lacking_said = -LACKING_EVERY

    def connect(self, peer: Peer) -> None:
        """Begin to find a peer's worker and to connect to it. If that fails, the peer is lost.

        Idempotent.
        """
        if peer.state is PeerState.CONNECTING and peer not in self._finding:
            self._finding.add(peer)
            self._engine.tasks.spawn(self._connect(peer))

    def open_pipe(self, link: Link) -> None:
        """Begin to open the second connection of a link, the same way as its first one."""
        self._engine.tasks.spawn(self._open_pipe(link))

    async def settle(self) -> None:
        """Before this worker leaves: wait for handshakes, whose other ends would otherwise miss the goodbye and take it
        for dead.

        A goodbye can follow only after a handshake.
        """
        if self._opening:
            await asyncio.wait(self._opening, timeout=self._engine.bounds.opening)
            await asyncio.sleep(0)  # `_connect` makes its peer ready

    async def _connect(self, peer: Peer) -> None:
        context, engine = self._context, self._engine
        try:
            try:
                record = await context.peers.locate(peer)
                if record is None:
                    return
                connection = await self._open(record, peer)
            finally:
                self._finding.discard(peer)
        except Exception as error:
            if peer.record is not None and not engine.closed:
                await self._lose(peer, peer.record, f"it cannot be reached: {error}", error, error)
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
        context.group.watch(record)
        peer.ready(connection)

    async def _open_pipe(self, link: Link) -> None:
        """Open a link's second connection, or report why that fails.

        If the first connection outlives its socket, network errors are retried: while the network is down, the first
        connection carries nothing either.
        """
        session, patience, pause = link.connection.lasting, self._engine.bounds.pipe, FIRST_PAUSE
        limit = time.monotonic() + patience
        while not link.closed:
            try:
                async with asyncio.timeout(max(0.0, limit - time.monotonic())):
                    await self._try_pipe(link)
                return
            except (OSError, TimeoutError, RpcError) as error:
                final = session is None or not isinstance(error, OSError) or isinstance(error, _NOBODY_LISTENS)
                late = f"it was not open within {patience:g} s"  # asyncio's TimeoutError has no text
                reason = f"{type(error).__name__}: {error}" if str(error) else late
            now = time.monotonic()
            if session is not None and session.suspended:
                limit = now + patience
            elif final or now > limit:
                link.second.refused(reason)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _try_pipe(self, link: Link) -> None:
        sock = await _reach(self._engine, link.record, ("unix" if link.connection.local else "tcp",))
        opening = _Opening(self._engine, link.connection.session, link.record, sock, link.number, pipe=True)
        opening.on_closed = partial(link.second.closed, opening.connection)
        opening.on_lasting = partial(self._watch, link.record, link.number, None)
        await opening.run(link.second.attach)

    async def _open(self, record: WorkerRecord, peer: Peer) -> Connection:
        """Open a connection to a worker, ready for calls, trying again with ever longer pauses for a bounded time.

        On this host the time for refused connections is short: only the worker itself can refuse them, and its process
        may live on. While this process lacks descriptors there is no bound: no member is lost then, and calls have
        their deadlines. Raises OSError and PeerRefused.
        """
        engine = self._engine
        limit = time.monotonic() + engine.bounds.connect
        refused: float | None = None  # since when every try was refused
        pause = FIRST_PAUSE
        if record.host != engine.record.host:  # for the errors of calls that time out meanwhile
            peer.trouble = f"no answer yet from {record.tcp_host}:{record.tcp_port}"
        while True:
            began, met = time.monotonic(), False
            try:
                sock = await self._reach_in_time(record)
                met = True
                number = next(self._numbers)
                opening = _Opening(engine, self._secret, record, sock, number)
                opening.on_closed = partial(self._closed, peer, opening.connection)
                opening.on_lasting = partial(self._watch, record, number, peer)
                self._opening.add(opening.done)
                try:
                    return await opening.run(partial(peer.attach, number))
                finally:
                    self._opening.discard(opening.done)
            except PeerRefused as error:
                peer.trouble = foreign.text_of(error)
                if not self._context.group.may_not_know_this(record) or time.monotonic() > limit:
                    raise
                refused = None
            except OSError as error:
                if peer.gone is not None:
                    raise
                peer.trouble = foreign.text_of(error)
                now = time.monotonic()
                if error.errno in _LACKING:
                    self._say_lacking(record, error, now)
                    limit = now + engine.bounds.connect
                if not isinstance(error, _NOBODY_LISTENS):
                    refused = None
                elif refused is None:
                    refused = now
                ended = refused is not None and now > refused + engine.bounds.refused
                if ended and record.host != engine.record.host:  # a device on the way may refuse for a while
                    ended, refused = await self._context.group.look_for_farewell(record), None
                refuses_us = isinstance(error, PermissionError)  # for good
                # If this process was stopped during a handshake, the other side has ended that.
                late = (began if met else now) > limit
                if ended or refuses_us or late or provably_dead(record, engine.record.host):
                    raise ConnectionError(f"{record.describe()} does not take connections: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _say_lacking(self, record: WorkerRecord, error: OSError, now: float) -> None:
        if now - self._lacking_said >= LACKING_EVERY:
            self._lacking_said = now
            said = "worker %s cannot connect to %s: %s; it tries on, and says so once a minute at most"
            logger.warning(said, self._engine.name, record.describe(), error)

    async def _reach_in_time(self, record: WorkerRecord) -> socket.socket:
        """A socket that leads to a worker, in bounded time. Raises OSError and RpcError."""
        engine = self._engine
        try:
            # The system would try for minutes.
            async with asyncio.timeout(engine.bounds.connect):
                return await _reach(engine, record, engine.options.transports)
        except TimeoutError as error:
            if str(error):  # the system's own
                raise
            raise TimeoutError(
                f"no answer from {record.tcp_host}:{record.tcp_port} within {engine.bounds.connect:g} s "
                "(a firewall? see the options address and port_range)"
            ) from error

    def _watch(self, record: WorkerRecord, number: int, peer: Peer | None, connection: Connection) -> None:
        line = Line(connection, record, number, pipe=peer is None, opener=True, peer=peer)
        self._context.resumption.watch(line)

    async def reach(self, record: WorkerRecord) -> socket.socket:
        """A TCP socket that leads to a worker. Raises OSError and RpcError."""
        return await _reach(self._engine, record, ("tcp",))

    async def reopen(self, line: Line, sock: socket.socket) -> None:
        """Resume a broken connection over a new socket, if this end opened it.

        The acceptor instead asks whether the opener is there, with a handshake that ends before any proof. It returns
        after an answer, or after a silent while: the opener may be busy. Raises OSError and RpcError.
        """
        session, engine, record = line.connection.session, self._engine, line.record
        if line.opener:
            goes_on = line.connection
            opening = _Opening(engine, session, record, sock, line.link_number, pipe=line.pipe, goes_on=goes_on)
        else:
            opening = _Opening(engine, self._secret, record, sock, 0, asks=True)
        timer, began = engine.loop.call_later(FIRST_WORD, opening.look), time.monotonic()
        try:
            await opening.run(None)
            line.reached = time.monotonic()
        except TimeoutError:  # the host was there, and fell silent
            line.reached = max(line.reached, began)
            raise
        finally:
            timer.cancel()
            if opening.answered:  # even if it broke again
                line.reached = line.answered = time.monotonic()
            if not line.opener:
                opening.connection.abort()

    async def probe(self, record: WorkerRecord) -> None:
        """Connect to a worker once, and close. Raises OSError or RpcError if it takes no connections."""
        (await _reach(self._engine, record, self._engine.options.transports)).close()

    def _closed(self, peer: Peer, connection: Connection, cause: BaseException | None) -> None:
        """A connection that this worker opened has ended."""
        self._engine.counters.add_connection(connection)
        # Only this end knows why it refused to read; report that before other signs of the end.
        if peer.link is not None and not isinstance(cause, ProtocolError):
            peer.link.when_drained(partial(self._link_ended, peer, cause))
        else:
            self._link_ended(peer, cause)

    def _link_ended(self, peer: Peer, cause: BaseException | None) -> None:
        peer.link_ended()
        if cause is not None and peer.record is not None and not self._engine.closed:
            reason = f"the connection to it broke: {foreign.text_of(cause)}"
            if isinstance(cause, ProtocolError) or provably_dead(peer.record, self._engine.record.host):
                self._on_lost(peer, peer.record, reason, None, cause)
            else:  # it may be about to leave, and its goodbye late
                self._engine.tasks.spawn(self._lose(peer, peer.record, reason, None, cause))

    async def _lose(
        self, peer: Peer, record: WorkerRecord, reason: str, error: BaseException | None, cause: BaseException
    ) -> None:
        """A worker cannot be reached any more: take it for lost, unless it has left. error: the cause of the
        PeerLost."""
        if await self._context.group.look_for_farewell(record):
            peer.fail(peer.parting or farewell(record))  # `Group._part` may wait for answers, which cannot come
            return
        await self._context.group.await_end(record)
        if not self._engine.closed:
            self._on_lost(peer, record, reason, error, cause)

    def _on_lost(
        self, peer: Peer, record: WorkerRecord, reason: str, error: BaseException | None, cause: BaseException
    ) -> None:
        reason = self._context.group.cause_of(record, reason)
        self._context.group.on_lost(record, reason, error)
        # The calls must end also if the group knew it (a connection to ourselves, a second peer of that worker).
        peer.fail(failure(record, reason, cause))


async def _reach(engine: Engine, record: WorkerRecord, transports: Sequence[str]) -> socket.socket:
    """A socket that leads to a worker: a unix socket on this host, if both have one, otherwise TCP."""
    missing: OSError | None = None
    if "unix" in transports and record.unix_path and record.host == engine.record.host:
        try:
            return await sockets.connect_unix(record.unix_path)
        except FileNotFoundError as error:  # of another container, maybe
            missing = error
        # No other error leads to TCP: there the worker no longer listens, and another process may.
    if "tcp" in transports and record.tcp_port:
        if record.tls != engine.record.tls:
            has = "has TLS, and this worker has none" if record.tls else "has no TLS, and this worker has"
            raise PeerRefused(f"{record.describe()} {has}; give all workers of the group tls=, or none")
        return await sockets.connect_tcp(record.tcp_host, record.tcp_port)
    # No OSError if nothing was tried: an OSError would be retried in vain.
    raise missing or RpcError(f"{record.describe()} and this worker have no transport in common")


class _Opening:
    """The opener's side of one handshake. on_closed: called at the end of the connection, once it was ready.

    on_lasting: called with a connection that both sides want to outlive its socket. goes_on: the connection that gets
    this socket. asks: the handshake ends once the other side has named itself. answered: whether it has, by its
    certificate or its HELLO; the proof comes only at the end of the handshake.
    """

    answered = False

    def __init__(
        self,
        engine: Engine,
        secret: bytes,
        record: WorkerRecord,
        sock: socket.socket,
        link: int,
        *,
        pipe: bool = False,
        goes_on: Connection | None = None,
        asks: bool = False,
    ) -> None:
        self._engine = engine
        self._record = record
        self.connection = make_connection(engine, sock, f"{engine.name} to {record.name}", opener=True)
        self._process = sockets.peer_pid(sock)
        sealed = seals(engine, self.connection)
        self.handshake = Handshake(
            engine.record,
            secret,
            expect=record,
            link=link,
            pipe=pipe,
            sealed=sealed,
            safe=engine.safe,
            lasting=lasts(engine, self.connection),
            received=None if goes_on is None else goes_on.received,
            takes=engine.options.max_incoming_bytes,
        )
        self._goes_on = goes_on
        self._asks = asks
        self._secret = secret  # of the group; for a second connection the link's session
        self.done: asyncio.Future[None] = engine.loop.create_future()
        self.on_closed: Callable[[BaseException | None], None] | None = None
        self.on_lasting: Callable[[Connection], None] | None = None
        self._attach: Callable[[Connection], None] | None = None

    async def run(self, attach: Callable[[Connection], None] | None) -> Connection:
        """Do the handshake. attach: called at its end, before any later frame is read; None if another connection goes
        on.
        """
        connection = self.connection
        self._attach = attach
        connection.on_frames = self._on_frames
        connection.on_closed = self._on_closed
        connection.on_open = self._on_open
        connection.start()
        if connection.tls is None:
            self._on_open()
        with on_error(connection.abort):
            # Without a bound: the other side may be stopped or busy. Calls have deadlines, and death ends the socket.
            await self.done
        return connection

    def look(self) -> None:
        """Some seconds after the beginning: end the handshake if the other side has sent bytes, but no HELLO.

        With an OSError, because the rest of a HELLO may have been lost. With `asks`, silence is an answer.
        """
        if self.handshake.state not in (HandshakeState.START, HandshakeState.SENT) or self.done.done():
            return
        if self.connection.bytes_received and self.connection.tls is None:
            self.connection.abort(ConnectionError("what listens there has not said what a worker says first"))
        elif self._asks:
            self.done.set_result(None)

    def _on_open(self) -> None:
        """Begin the handshake: at once, or with TLS after the other side has shown its certificate. Raises
        PeerRefused."""
        tls = self.connection.tls
        if tls is not None:
            objection = objection_to(self._engine, self.connection, self._record)
            if objection is not None:
                raise PeerRefused(objection)
            self.answered = True
            self.handshake.binding = tls.binding()
        self.connection.send(self.handshake.start(), urgent=True)

    def _on_frames(self, frames: list[Frame]) -> None:
        for index, frame in enumerate(frames):
            reply = self.handshake.feed(frame)
            self.answered = True
            if self._asks:
                if not self.done.done():
                    self.done.set_result(None)
                return
            if reply:
                self.connection.send(reply, urgent=True)
            if self.handshake.sealed:
                self._seal(frames[index + 1 :])
            if self.handshake.state is HandshakeState.READY and not self.done.done():
                trust(self._engine, self.connection.decoder)
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
        connection.takes_at_once = self.handshake.theirs
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
                # Instead of a sealed WELCOME the other side sent a refusal: it has not our key.
                cause = PeerRefused(f"{handshake.WRONG_SECRET}: {cause}")
            self.done.set_exception(cause or ConnectionError("closed during the handshake"))
        elif self.on_closed is not None:
            self.on_closed(cause)
