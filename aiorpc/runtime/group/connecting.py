"""From a socket to a proved peer: the handshake on both sides, with a bound on how long and how much it may take."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...channels.inline import allocate
from ...errors import PeerRefused, ProtocolError, RendezvousError, RpcError, WorkerClosed
from ...protocol import handshake
from ...protocol.frames import MAX_SEGMENTS, Frame, FrameDecoder
from ...protocol.handshake import Handshake
from ...protocol.identity import WorkerRecord
from ...transport import sockets
from ...transport.connection import Connection
from ..engine.host import provably_dead
from .group import failure

if TYPE_CHECKING:
    from ..caller.peer import Peer
    from ..links.link import Link
    from ..worker import Worker

logger = logging.getLogger("aiorpc")

HANDSHAKE_TIMEOUT = 10.0
CONNECT_TIMEOUT = 30.0
PIPE_TIMEOUT = 10.0
FIRST_PAUSE, LAST_PAUSE = 0.005, 0.5
ACCEPT_PAUSE = 0.5
# Connections that may be in their handshake at once; strangers must not use up our descriptors.
MAX_HANDSHAKES = 256
# What the runtime adds to a body, in bytes at most: errors (failures.py), and for each buffer its way (link.py).
OWN_WORDS = (2 << 20) + 48 * MAX_SEGMENTS


def _connection(worker: Worker, sock: socket.socket, label: str) -> Connection:
    decoder = FrameDecoder(max_body=handshake.MAX_BODY, allocate=allocate)
    connection = Connection(worker.loop, sock, decoder, label=label)
    worker.connections.add(connection)
    return connection


def _trust(worker: Worker, decoder: FrameDecoder) -> None:
    """The peer has proved itself: from now on the limits of the options hold."""
    decoder.max_body = worker.options.max_frame_bytes + OWN_WORDS
    decoder.max_segment = worker.options.max_tensor_bytes


async def connect(worker: Worker, peer: Peer) -> None:
    """Find the worker of a peer and connect to it; if that cannot be done, the peer is lost. On the loop."""
    try:
        record = await worker.peers.locate(peer)
        if record is None:
            return
        connection = await open_connection(worker, record, peer)
    except Exception as error:
        if peer.record is not None and not worker.closed:
            cause = f"it cannot be reached: {error}"
            worker.group.on_lost(peer.record, cause, error)
            peer.fail(failure(peer.record, cause, error))  # where the loss was no news
        elif worker.closed:
            peer.fail(WorkerClosed(f"worker {worker.name!r} cannot reach {peer.name!r}: {error}"))
        else:  # only the store knows where it is
            peer.fail(RendezvousError(f"worker {worker.name!r} cannot find {peer.name!r}: {error}"))
        return
    if peer.gone is not None:
        connection.abort()
        return
    worker.group.watch(record)
    peer.ready(connection)


async def open_pipe(worker: Worker, link: Link) -> None:
    """Open the second connection of a link, the same way as its first one. On the loop."""
    try:
        transport = "unix" if link.connection.local else "tcp"
        async with asyncio.timeout(PIPE_TIMEOUT):
            sock = await _reach(worker, link.record, (transport,))
            opening = _Opening(worker, link.record, sock, link.number, pipe=True)
            opening.on_closed = link.second.closed
            await opening.run(link.second.attach)
    except (OSError, TimeoutError, RpcError) as error:
        link.second.refused(f"{type(error).__name__}: {error}")


async def open_connection(worker: Worker, record: WorkerRecord, peer: Peer) -> Connection:
    """A connection to a worker, ready for calls; retried with back-off, for a time. Raises OSError or PeerRefused."""
    limit = time.monotonic() + CONNECT_TIMEOUT
    pause = FIRST_PAUSE
    while True:
        try:
            # The system tries for minutes where nobody answers.
            async with asyncio.timeout(CONNECT_TIMEOUT):
                sock = await _reach(worker, record, worker.options.transports)
            number = next(worker.link_numbers)
            opening = _Opening(worker, record, sock, number)
            opening.on_closed = partial(worker.connection_closed, peer, opening.connection)
            return await opening.run(partial(peer.attach, number))
        except PeerRefused:
            raise
        except OSError as error:
            if peer.gone is not None:
                raise
            if time.monotonic() > limit or provably_dead(record, worker.record.host):
                raise ConnectionError(f"{record.describe()} does not take connections: {error}") from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


async def _reach(worker: Worker, record: WorkerRecord, transports: Sequence[str]) -> socket.socket:
    """A socket that leads there: on this host a unix socket, where both have one, else TCP."""
    missing: OSError | None = None
    if "unix" in transports and record.unix_path and record.host == worker.record.host:
        try:
            return await sockets.connect_unix(record.unix_path)
        except FileNotFoundError as error:  # of another container, maybe
            missing = error
        # Nothing else is tried over TCP: there it no longer listens, and whoever does is somebody else.
    if "tcp" in transports and record.tcp_port:
        return await sockets.connect_tcp(record.tcp_host, record.tcp_port)
    # No OSError where nothing was tried: trying again would not help.
    raise missing or RpcError(f"{record.describe()} and this worker have no transport in common")


class _Opening:
    """Our side of a handshake that we began. on_closed: told of the end of the connection, once it is ready."""

    def __init__(
        self, worker: Worker, record: WorkerRecord, sock: socket.socket, link: int, *, pipe: bool = False
    ) -> None:
        self.worker = worker
        self.connection = _connection(worker, sock, f"{worker.name} to {record.name}")
        sealed = worker.options.authenticate_frames and not self.connection.local
        self.handshake = Handshake(
            worker.record, worker.secret, opener=True, expect=record, link=link, pipe=pipe, sealed=sealed
        )
        self.done: asyncio.Future[None] = worker.loop.create_future()
        self.on_closed: Callable[[BaseException | None], None] | None = None
        self._attach: Callable[[Connection], None] | None = None

    async def run(self, attach: Callable[[Connection], None]) -> Connection:
        """Prove ourselves, and have the other side do so. attach: called before its first frame is looked at."""
        connection = self.connection
        self._attach = attach
        connection.on_frames = self._on_frames
        connection.on_closed = self._on_closed
        connection.start()
        connection.send(self.handshake.start(), urgent=True)
        try:
            # Without a bound: the other side may be stopped, or hold its interpreter. Calls have their deadlines, and
            # the end of the socket or of the process tells of death.
            await self.done
        except BaseException:
            connection.abort()
            raise
        return connection

    def _on_frames(self, frames: list[Frame]) -> None:
        for index, frame in enumerate(frames):
            reply = self.handshake.feed(frame)
            if reply:
                self.connection.send(reply, urgent=True)
            if self.handshake.sealed:
                self._seal(frames[index + 1 :])
            if self.handshake.state is handshake.State.READY and not self.done.done():
                _trust(self.worker, self.connection.decoder)
                self.done.set_result(None)
                assert self._attach is not None
                self._attach(self.connection)
                if self.connection.on_frames is not None:
                    self.connection.on_frames(frames[index + 1 :])  # a goodbye may follow at once
                return

    def _seal(self, behind: list[Frame]) -> None:
        if self.handshake.state is handshake.State.PROVED:
            if behind:
                raise ProtocolError("something without a seal came behind the handshake")
            self.connection.unseal(self.handshake.keys()[1])
        elif self.handshake.state is handshake.State.READY:
            self.connection.seal(self.handshake.keys()[0])

    def _on_closed(self, cause: BaseException | None) -> None:
        if not self.done.done():
            self.done.set_exception(cause or ConnectionError("closed during the handshake"))
        elif self.on_closed is not None:
            self.on_closed(cause)


class Acceptor:
    """Takes connections from the listeners and serves those that prove the secret."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._listeners: list[tuple[socket.socket, str]] = []
        self._handshakes: dict[_Accepting, None] = {}  # oldest first

    def listen(self, directory: Path, address: str, *, confined: bool = False) -> tuple[str, str, int]:
        """Open the listeners of the options: path of the unix socket, host and port for TCP; "" and 0 without.

        directory: for the unix socket. address: the one that reaches the rendezvous. confined: all are on this host,
        so there is none for TCP beside a unix socket. Others may connect from now on, and wait until `start`.
        RendezvousError when no address or port of the options can be had.
        """
        options = self.worker.options
        unix_path, port = "", 0
        host = options.bind_address or address
        if "unix" in options.transports:
            sock, unix_path = sockets.listen_unix(directory)
            self._listeners.append((sock, unix_path))
        if "tcp" in options.transports and not (confined and unix_path):
            try:
                sock = sockets.listen_tcp(host, options.port_range)
            except OSError as error:
                raise RendezvousError(f"worker {self.worker.name!r} cannot be reached by others: {error}") from error
            self._listeners.append((sock, ""))
            port = sock.getsockname()[1]
        # All interfaces may be listened on, but that is no address to give to anybody.
        return unix_path, address if sockets.is_wildcard(host) else host, port

    def close_tcp(self) -> None:
        """Do without TCP, if there is a unix socket: all members are on this host. Before `start`."""
        if any(path for _, path in self._listeners):
            for sock, path in self._listeners:
                if not path:
                    sock.close()
            self._listeners = [(sock, path) for sock, path in self._listeners if path]

    def start(self) -> None:
        """Begin to take connections, in the running context: handlers run in copies of it."""
        for sock, _ in self._listeners:
            self.worker.loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        # A few at a time: whoever connects in a loop must not keep the loop from its other work.
        for _ in range(16):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # It stays in the backlog, and the listener readable: the loop would do nothing but look again.
                logger.warning("worker %s cannot take a connection: %s", self.worker.name, error)
                self.worker.loop.remove_reader(listener.fileno())
                self.worker.loop.call_later(ACCEPT_PAUSE, self._resume, listener)
                return
            reason = self._unwanted(sock)
            if reason is not None:
                self.refuse(reason)
                sock.close()
                continue
            self._handshakes[_Accepting(self, sock)] = None

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.worker.loop.add_reader(listener.fileno(), self._accept, listener)

    def _unwanted(self, sock: socket.socket) -> str | None:
        if sock.family == socket.AF_UNIX:
            if sockets.peer_uid(sock) not in (os.getuid(), None):
                return "a process of another user connected"
        else:
            with contextlib.suppress(OSError):
                sockets.tune_tcp(sock)
        if len(self._handshakes) >= MAX_HANDSHAKES:
            # The oldest goes, not the newest: members are done within milliseconds.
            next(iter(self._handshakes)).connection.abort(
                ConnectionError(f"it had not proved itself when {MAX_HANDSHAKES} others were in their handshake")
            )
        return None

    def refuse(self, reason: str) -> None:
        """A stranger was turned away: count each, log each once."""
        self.worker.counters.refused += 1
        logger.warning("worker %s refused a connection: %s", self.worker.name, reason)

    def ended(self, accepting: _Accepting) -> None:
        """A handshake is over, one way or the other."""
        self._handshakes.pop(accepting, None)

    def close(self) -> None:
        """Take no more connections; those in their handshake are closed."""
        for sock, _ in self._listeners:
            self.worker.loop.remove_reader(sock.fileno())
            sock.close()
        self.unlink()
        for accepting in list(self._handshakes):
            accepting.connection.abort()

    def unlink(self) -> None:
        """Remove the unix socket's file. Any thread."""
        for _, path in self._listeners:
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def close_in_child(self) -> None:
        """After a fork: let go of the descriptors, which are the parent's."""
        for sock, _ in self._listeners:
            if sock.fileno() >= 0:
                os.close(sock.detach())


class _Accepting:
    """Our side of a handshake that somebody else began."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        worker = acceptor.worker
        self.acceptor = acceptor
        self.worker = worker
        self.connection = _connection(worker, sock, f"to {worker.name}")
        sealed = worker.options.authenticate_frames and not self.connection.local
        self.handshake = Handshake(worker.record, worker.secret, opener=False, accept=self._is_wanted, sealed=sealed)
        self._timer = worker.loop.call_later(HANDSHAKE_TIMEOUT, self._too_slow)
        self._serving: Callable[[BaseException | None], None] | None = None
        self.connection.on_frames = self._on_frames
        self.connection.on_closed = self._on_closed
        self.connection.start()

    def _is_wanted(self, record: WorkerRecord) -> str | None:
        if record.id in self.worker.group.lost:
            return f"worker {record.name!r} was given up as lost; it cannot come back in this incarnation"
        return None

    def _on_frames(self, frames: list[Frame]) -> None:
        try:
            for frame in frames:
                reply = self.handshake.feed(frame)
                if self.handshake.sealed and self.handshake.state is handshake.State.READY:
                    ours, theirs = self.handshake.keys()
                    self.connection.unseal(theirs)
                    self.connection.seal(ours)
                if reply:
                    self.connection.send(reply, urgent=True)
        except (PeerRefused, ProtocolError) as error:
            self.connection.send(handshake.refusal(str(error)), urgent=True)
            raise ProtocolError(str(error)) from error
        record = self.handshake.peer
        if record is not None:
            self._timer.cancel()
            self.acceptor.ended(self)
            _trust(self.worker, self.connection.decoder)
            if self.handshake.pipe:
                self._become_pipe(record)
                return
            service = self.worker.add_service(record, self.connection, self.handshake.link)
            self.connection.on_frames = service.on_frames
            self._serving = lambda cause: self.worker.service_closed(service, cause)

    def _become_pipe(self, record: WorkerRecord) -> None:
        link = self.worker.find_link(record, self.handshake.link, opener=False)
        if link is None:  # its first connection has ended meanwhile
            self.connection.abort()
            return
        self._serving = link.second.closed
        link.second.attach(self.connection)

    def _too_slow(self) -> None:
        self.connection.abort(TimeoutError(f"it did not prove itself within {HANDSHAKE_TIMEOUT:g} s"))

    def _on_closed(self, cause: BaseException | None) -> None:
        self._timer.cancel()
        self.acceptor.ended(self)
        if self._serving is not None:
            self._serving(cause)
        elif cause is not None and not isinstance(cause, (ConnectionResetError, BrokenPipeError)):
            self.acceptor.refuse(str(cause))
