"""A worker: one loop, its peers, its life.

    state      entered by                        what is possible
    NEW        `Worker(...)`                     nothing yet
    STARTING   `start`                           rendezvous, listening; others may connect, nobody is answered
    RUNNING    the rendezvous and the secret     calls in both directions
    LEAVING    `shutdown`                        graceful: everything, until the group is done
    CLOSED     the end of `shutdown`, a failed   every verb raises WorkerClosed; Futures that were pending have failed
               start, a fork (in the child)

All state belongs to the loop; other threads hand work over with `call_on_loop`, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from ..channels.inline import allocate
from ..errors import (
    PeerClosed,
    PeerLost,
    PeerRefused,
    RendezvousError,
    RpcError,
    RpcUsageError,
    UnknownWorker,
    WorkerClosed,
    WouldBlockLoop,
)
from ..futures import Future
from ..options import RpcBackendOptions, seconds
from ..protocol.frames import Frame
from ..protocol.identity import WorkerInfo, WorkerRecord, check_name
from ..transport import sockets
from ..transport.connection import Connection
from .connecting import Acceptor, open_connection
from .current import current_worker, registry
from .deadlines import Deadlines
from .dispatch import Service
from .group import Event, Group, ShutdownReport, WorkerJoined, WorkerLeft, WorkerLost
from .host import host_identity, main_identity
from .lag import LoopMonitor
from .loops import LoopThread
from .peer import Peer
from .pool import ThreadPool
from .references import References, RRef
from .rendezvous import Rendezvous
from .statistics import Counters, PendingCall, Statistics
from .streams import Stream
from .watch import ProcessWatch

logger = logging.getLogger("aiorpc")
T = TypeVar("T")

To = str | int | WorkerInfo
# A reply that was already on its way when its sender said goodbye on another connection gets this long, in seconds.
_GOODBYE_GRACE = 1.0
_POOL_GRACE = 1.0


class State(Enum):
    """See the module."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    CLOSED = "closed"


class Worker:
    """One member of a group of workers. Made by `aiorpc.init`; awaiting it joins, ``async with`` joins and leaves.

    Verbs (`call`, `remote`, `stream`, `peer`) may be used from any thread while it runs.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        init_method: str | None = None,
        options: RpcBackendOptions | None = None,
        store: Store | None = None,
    ) -> None:
        self.name = check_name(name)
        self.options = (options or RpcBackendOptions()).copy()
        self.options.validate()
        self.init_method = init_method or self.options.init_method
        self.state = State.NEW
        self.counters = Counters()
        self.default_timeout = self.options.rpc_timeout
        self.pool: ThreadPool
        self.loop: asyncio.AbstractEventLoop
        self.record: WorkerRecord
        self.references: References
        self.deadlines: Deadlines
        self.group: Group
        self.secret = b""
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._thread = 0
        self._rendezvous: Rendezvous | None = None
        self._listeners: list[tuple[socket.socket, str]] = []
        self._acceptor: Acceptor | None = None
        self._peers: dict[str | int, Peer] = {}
        self._services: set[Service] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch: ProcessWatch | None = None
        self._monitor: LoopMonitor | None = None
        self._events: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event | None]]] = []
        self._own_loop: LoopThread | None = None
        self.hosted_by: LoopThread | None = None  # the thread that `init_rpc` started for it
        self._stop_waiting = threading.Event()
        self._shutdown: asyncio.Task[ShutdownReport] | None = None
        self._peers_lock = threading.Lock()
        self._token: contextvars.Token[Worker | None] | None = None
        self._forked = False
        self._old_switch_interval: float | None = None

    # --- identity -----------------------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """The rank, or the id that the rendezvous gave."""
        return self.record.id

    @property
    def info(self) -> WorkerInfo:
        """Name and id."""
        return self.record.info

    @property
    def closed(self) -> bool:
        """Whether it has shut down (or never started)."""
        return self.state not in (State.RUNNING, State.LEAVING)

    @property
    def dynamic(self) -> bool:
        """Whether workers join and leave the group at any time (``world_size=None``)."""
        return self._rendezvous is not None and self._rendezvous.dynamic

    @property
    def hosts_store(self) -> bool:
        """Whether this process serves the rendezvous store."""
        return self._rendezvous is not None and self._rendezvous.hosts_store

    def __repr__(self) -> str:
        return f"<aiorpc.Worker {self.name!r} {self.state.value}>"

    # --- joining ------------------------------------------------------------------------------------------------------

    async def start(self) -> Worker:
        """Join the group, on the running loop. Raises RendezvousError within ``rpc_timeout`` when that cannot be."""
        if self.state is not State.NEW:
            raise RpcUsageError(f"{self!r} was started before; make a new one")
        if self.options.dedicated_loop and self._own_loop is None:
            self._own_loop = LoopThread(self.name)
            try:
                return await self._own_loop.run_async(self.start())
            except BaseException:
                self._own_loop.close()
                raise
        self.state = State.STARTING
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        try:
            await self._join()
        except BaseException:
            self._stop_waiting.set()
            await self._close()
            raise
        self.state = State.RUNNING
        if self.options.switch_interval is not None:
            self._old_switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(self.options.switch_interval)
        registry.add(self)
        self.group.start()
        return self

    async def _join(self) -> None:
        directory = sockets.private_directory()
        sockets.remove_stale(directory)
        rendezvous = self._rendezvous = await self._in_thread(self._open_rendezvous)
        unix_path, host, port = self._listen(directory, rendezvous.local_address())
        self.pool = ThreadPool(self.name, self.options.num_worker_threads, prepare=lambda: current_worker.set(self))
        self.deadlines = Deadlines(self.loop, self._scan_deadlines)
        incarnation = secrets.token_hex(16)

        def make_record(number: int) -> WorkerRecord:
            return WorkerRecord(
                name=self.name,
                id=number,
                incarnation=incarnation,
                host=host_identity(),
                hostname=socket.gethostname(),
                pid=os.getpid(),
                main=main_identity(),
                unix_path=unix_path,
                tcp_host=self.options.address or host,
                tcp_port=port,
            )

        records = await self._in_thread(lambda: rendezvous.join(make_record))
        self.record = next(record for record in records if record.incarnation == incarnation)
        self.secret = await self._in_thread(lambda: rendezvous.agree_secret(self.record, records, directory))
        self.references = References(self)
        self.group = Group(self, records)
        for record in records:
            self._add_peer(record)
        self._watch = ProcessWatch(self.loop, self._on_process_exit)
        # Handlers run in a copy of the context in which the reader was registered: not in that of whoever started us.
        listeners = [sock for sock, _ in self._listeners]
        self._acceptor = contextvars.Context().run(Acceptor, self, listeners)
        self._monitor = LoopMonitor(
            self.loop, warn_after=self.options.lag_warning, describe=self._describe_running, name=self.name
        )
        self._monitor.start()
        if rendezvous.dynamic:
            self.spawn(self._serve_rendezvous(rendezvous))

    def _open_rendezvous(self) -> Rendezvous:
        return Rendezvous.open(
            self.init_method,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self.options.rpc_timeout,
            stop=self._stop_waiting,
            store=self._store,
        )

    def _listen(self, directory: Path, address: str) -> tuple[str, str, int]:
        unix_path, port = "", 0
        host = self.options.bind_address or address
        if "unix" in self.options.transports:
            sock, unix_path = sockets.listen_unix(directory)
            self._listeners.append((sock, unix_path))
        if "tcp" in self.options.transports:
            try:
                sock = sockets.listen_tcp(host, self.options.port_range)
            except OSError as error:
                raise RendezvousError(f"worker {self.name!r} cannot be reached by others: {error}") from error
            self._listeners.append((sock, ""))
            port = sock.getsockname()[1]
        # All interfaces may be listened on, but that is no address to give to anybody.
        return unix_path, address if sockets.is_wildcard(host) else host, port

    async def _serve_rendezvous(self, rendezvous: Rendezvous) -> None:
        """In a group that is joined freely: hand newcomers from other hosts what they need."""
        while True:
            await asyncio.sleep(0.25)
            with contextlib.suppress(RendezvousError):
                await self._in_thread(rendezvous.serve_secret_requests)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Run a blocking step in a thread of its own: it may take as long as its own timeout says."""
        done = self.loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        def run() -> None:
            value, failure = None, None
            try:
                value = function()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(finish, value, failure)

        thread = threading.Thread(target=run, name=f"aiorpc-{self.name}-rendezvous", daemon=True)
        thread.start()
        try:
            result: T = await done
        except asyncio.CancelledError:
            self._stop_waiting.set()
            raise
        thread.join()
        return result

    # --- verbs --------------------------------------------------------------------------------------------------------

    def call(self, to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` on a worker; returns a Future at once. See `aiorpc.call`."""
        return self.find_peer(to).call(function, args, kwargs, self.default_timeout)

    def remote(self, to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """An RRef of the result of ``function(*args, **kwargs)``, which stays on that worker; returns at once."""
        return self.references.create(self.find_peer(to), function, args, kwargs, self.default_timeout, depth=2)

    def stream(self, to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
        """The items of a generator function that runs on a worker. See `aiorpc.stream`."""
        return self.open_stream(self.find_peer(to), function, args, kwargs, self.default_timeout)

    def peer(self, to: To, *, timeout: float | None = None) -> PeerHandle:
        """A handle of a worker, with options for the calls made through it."""
        self.find_peer(to)
        return PeerHandle(self, to, self.default_timeout if timeout is None else seconds(timeout, "timeout"))

    def open_stream(
        self, peer: Peer, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Stream:
        """A stream from a peer; its timeout bounds the wait for each item."""
        stream = Stream(peer, self.options.stream_window, timeout)
        stream.start(peer.call(function, args, kwargs, 0.0, extra=self.options.stream_window, stream=stream, depth=3))
        return stream

    def timeout(self, value: float) -> float:
        """Seconds for one call: the worker's default if negative."""
        return self.default_timeout if value < 0 else seconds(value, "timeout")

    def refuse_on_loop(self, verb: str, instead: str) -> None:
        """Raise WouldBlockLoop if this thread runs the worker's loop; nothing has been sent then."""
        if threading.get_ident() == self._thread and asyncio._get_running_loop() is self.loop:
            raise WouldBlockLoop(f"{verb} would block the event loop that has to bring the answer; use `{instead}`")

    # --- peers --------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """WorkerClosed if no verb can be used any more. Any thread."""
        if self._forked:
            raise WorkerClosed("this process was forked from the worker's; start a worker of its own here")
        if self.closed:
            raise WorkerClosed(f"worker {self.name!r} has shut down; it makes no more calls")

    def find_peer(self, to: To) -> Peer:
        """The peer of that name, id or WorkerInfo. UnknownWorker if the group cannot have it. Any thread."""
        key: str | int = to if type(to) is str else to.name if isinstance(to, WorkerInfo) else to
        peer = self._peers.get(key)
        if peer is not None and (peer.gone is None or not self.dynamic or self.closed) and _is_key(key):
            return peer
        self.check_open()
        if not _is_key(key):
            raise RpcUsageError(f"a worker is named by a name, a rank or a WorkerInfo, not by {to!r}")
        if not self.dynamic or not isinstance(key, str):
            known = ", ".join(sorted(record.name for record in self.group.members.values()))
            raise UnknownWorker(f"could not find destination worker {to!r}; the group has {known}")
        with self._peers_lock:
            peer = self._peers.get(key)
            if peer is None or peer.gone is not None:
                peer = self._peers[key] = Peer(self, check_name(key), None)
            return peer

    def peer_of(self, record: WorkerRecord) -> Peer:
        """The peer of a record that a worker proved or the rendezvous gave."""
        peer = self._peers.get(record.id)
        return peer if peer is not None else self._add_peer(record)

    def peer_by_id(self, worker_id: int) -> Peer:
        """The peer with that id; one that nobody has told us of is found when it is first used. Any thread."""
        peer = self._peers.get(worker_id)
        if peer is None:
            with self._peers_lock:
                peer = self._peers.setdefault(worker_id, Peer(self, f"#{worker_id}", None))
        return peer

    def id_of(self, peer: Peer) -> int:
        """The id of a peer. UnknownWorker if it has not joined yet."""
        if peer.record is None and self._rendezvous is not None and self.dynamic:
            record = self._rendezvous.find(peer.name)
            if record is not None:
                self._adopt(peer, record)
        if peer.record is None:
            raise UnknownWorker(f"worker {peer.name!r} has not joined yet; a reference needs a worker that is there")
        return peer.record.id

    def _add_peer(self, record: WorkerRecord) -> Peer:
        with self._peers_lock:
            peer = self._peers.get(record.id)
            if peer is None:
                waiting = self._peers.get(record.name)
                peer = waiting if waiting is not None and waiting.record is None else Peer(self, record.name, record)
            peer.record = peer.record or record
            peer.name = record.name
            self._peers[record.id] = peer
            named = self._peers.get(record.name)
            if named is None or named.gone is not None or named.record is None:
                self._peers[record.name] = peer
        return peer

    def _adopt(self, peer: Peer, record: WorkerRecord) -> None:
        peer.record = record
        self._peers.setdefault(record.id, peer)

    async def locate(self, peer: Peer) -> WorkerRecord:
        """The record of a peer, waiting for it to join if it has not. On the loop; ends when the peer is given up."""
        pause = 0.01
        while peer.record is None:
            assert self._rendezvous is not None
            rendezvous = self._rendezvous
            records = await self._in_thread(rendezvous.members)
            for record in records:
                if record.name == peer.name or f"#{record.id}" == peer.name:
                    self._adopt(peer, record)
                    self.on_joined(record)
                    break
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.5)
        return peer.record

    def info_of(self, worker_id: int) -> WorkerInfo:
        """Name and id of a worker of the group."""
        peer = self.peer_by_id(worker_id)
        return peer.record.info if peer.record is not None else WorkerInfo(peer.name, worker_id)

    def describe_id(self, worker_id: int) -> str:
        """A worker's name for errors and reports."""
        peer = self._peers.get(worker_id)
        return peer.name if peer is not None else f"#{worker_id}"

    def get_worker_info(self, name: str | None = None) -> WorkerInfo:
        """Name and id of this worker, or of the one of that name. UnknownWorker if there is none yet."""
        self.check_open()
        if name is None:
            return self.info
        peer = self.find_peer(name)
        self.id_of(peer)
        assert peer.record is not None
        return peer.record.info

    def worker_infos(self) -> list[WorkerInfo]:
        """All members this worker knows, itself included, by id; without those that have left or were lost."""
        return sorted((record.info for record in self.group.live()), key=lambda info: info.id)

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self, peer: Peer) -> None:
        """Begin to connect to a peer; on the loop."""
        self.spawn(self._connect(peer))

    async def _connect(self, peer: Peer) -> None:
        try:
            record = await self.locate(peer)
            connection = await open_connection(self, record, peer)
        except (OSError, RuntimeError) as error:
            if peer.record is not None and not self.closed:
                self.on_lost(peer.record, f"it cannot be reached: {error}", error)
            else:
                peer.fail(WorkerClosed(f"worker {self.name!r} cannot reach {peer.name!r}: {error}"))
            return
        self.watch_process(record)
        peer.ready(connection)

    def add_service(self, record: WorkerRecord, connection: Connection) -> Service:
        """A worker has connected to us and proved who it is; serve it."""
        service = Service(self, record, connection)
        self._services.add(service)
        self.peer_of(record)
        self.watch_process(record)
        return service

    def allocate(self, size: int) -> memoryview:
        """Memory for a large tensor that is about to arrive."""
        return allocate(size)

    def service_closed(self, service: Service, cause: BaseException | None) -> None:
        """A connection on which we served has ended."""
        self._services.discard(service)
        self._count_bytes(service.connection)
        service.close()
        if cause is not None:
            self.on_lost(service.peer, f"its connection broke: {cause}")

    def connection_closed(self, peer: Peer, connection: Connection, cause: BaseException | None) -> None:
        """A connection that we had opened has ended."""
        self._count_bytes(connection)
        if cause is not None and peer.record is not None:
            self.on_lost(peer.record, f"the connection to it broke: {cause}")

    def _count_bytes(self, connection: Connection) -> None:
        self.counters.bytes_sent += connection.bytes_sent
        self.counters.bytes_received += connection.bytes_received

    def watch_process(self, record: WorkerRecord) -> bool:
        """See that worker's process die, whether or not we are connected; False if that cannot be done from here."""
        if self._watch is None or record.host != self.record.host:
            return False
        return record.pid == os.getpid() or self._watch.add(record)

    # --- other workers come and go, on the loop -----------------------------------------------------------------------

    def on_joined(self, record: WorkerRecord) -> None:
        """A worker that we did not know is there."""
        self._add_peer(record)
        if self.group.joined(record):
            self._publish(WorkerJoined(record.info))

    def _on_process_exit(self, record: WorkerRecord) -> None:
        # What it wrote before it ended may still be in the sockets; their end of file usually comes first.
        self.loop.call_later(0.05, self.on_lost, record, "its process ended")

    def on_lost(self, record: WorkerRecord, cause: str, error: BaseException | None = None) -> None:
        """A worker died or cannot be reached: everything that waits for it fails."""
        if self.closed or record.id == self.id or not self.group.gone(record, True, cause):
            return
        if self.state is State.RUNNING:
            logger.warning("worker %s was lost: %s", record.describe(), cause)
        self.peer_of(record).fail(_failure(record, cause, error))
        self._forget(record, lost=True)
        self._publish(WorkerLost(record.info, cause))

    def on_goodbye(self, record: WorkerRecord | None, frame: Frame) -> None:
        """A worker leaves in good order."""
        if self.closed or record is None or not self.group.gone(record, False, "goodbye"):
            return
        peer = self.peer_of(record)
        error = PeerClosed(f"{record.describe()} has shut down")
        if peer.pending:
            self.loop.call_later(_GOODBYE_GRACE, peer.fail, error)
        else:
            peer.fail(error)
        self._forget(record, lost=False)
        self._publish(WorkerLeft(record.info))

    def _forget(self, record: WorkerRecord, *, lost: bool) -> None:
        if self._watch is not None:
            self._watch.remove(record)
        for service in list(self._services):
            if service.peer.incarnation == record.incarnation:
                service.connection.abort()
        self.references.on_gone(record.id, lost)
        if lost and self.dynamic and self._rendezvous is not None:
            self.spawn(self._strike_off(self._rendezvous, record))

    async def _strike_off(self, rendezvous: Rendezvous, record: WorkerRecord) -> None:
        with contextlib.suppress(RendezvousError):
            await self._in_thread(lambda: rendezvous.leave(record))

    async def events(self) -> AsyncGenerator[Event, None]:
        """Workers that join, leave or are lost from now on; ends when this worker shuts down. On any loop."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        subscriber = (asyncio.get_running_loop(), queue)
        self._events.append(subscriber)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._events.remove(subscriber)

    def _publish(self, event: Event | None) -> None:
        for loop, queue in self._events:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def call_on_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Run something on the loop, soon. Any thread; nothing happens once the loop is closed."""
        try:
            if threading.get_ident() == self._thread:
                self.loop.call_soon(function, *args)
            else:
                self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], *, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        """A task that ends with the worker at the latest; on the loop."""
        task = self.loop.create_task(coroutine, context=context or contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def serve(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that serves a call, in the running context; it ends with `served`. On the loop.

        Not `spawn`, whose callback at the end would cost each call another turn of the loop.
        """
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        return task

    def drop(self, task: asyncio.Task[None]) -> None:
        """A task of `serve` will end without having begun."""
        self._tasks.discard(task)

    def served(self) -> None:
        """The running task has served its call."""
        self._tasks.discard(asyncio.current_task(self.loop))  # None is not in the set

    def _scan_deadlines(self, now: float) -> float:
        return min((peer.scan_deadlines(now) for peer in set(self._peers.values())), default=float("inf"))

    # --- looking ------------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether no call of users is under way, in either direction."""
        return not any(peer.user_calls() for peer in set(self._peers.values())) and not any(
            service.user_calls() for service in self._services
        )

    def activity(self) -> tuple[bool, int]:
        """Whether it is idle, and how many calls of users it has seen; what graceful shutdown compares."""
        return self.is_idle(), self.counters.made + self.counters.served_users

    def statistics(self) -> Statistics:
        """What this worker has done and is doing. Any thread."""
        counters, monitor = self.counters, self._monitor
        peers = set(self._peers.values())
        connections = [peer.connection for peer in peers if peer.connection is not None and not peer.connection.closed]
        connections += [service.connection for service in list(self._services)]
        references = self.references.counts()
        return Statistics(
            calls_made=counters.made,
            calls_answered=counters.answered(),
            calls_pending=sum(peer.user_calls() for peer in peers),
            calls_timed_out=counters.timed_out,
            late_answers=counters.late_answers,
            latency_p50=counters.quantile(0.5),
            latency_p99=counters.quantile(0.99),
            calls_served=counters.served_users,
            calls_running=sum(service.user_calls() for service in list(self._services)),
            calls_failed=counters.failed,
            calls_cancelled=counters.cancelled,
            connections=len(connections),
            connections_refused=counters.refused,
            bytes_sent=counters.bytes_sent + sum(connection.bytes_sent for connection in connections),
            bytes_received=counters.bytes_received + sum(connection.bytes_received for connection in connections),
            threads=self.pool.threads,
            threads_idle=self.pool.idle,
            threads_blocked=self.pool.blocked,
            jobs_queued=self.pool.queued,
            references_owned=references.owned,
            references_held=references.users,
            references_pending=references.pending,
            loop_lag_mean=monitor.lag_mean if monitor is not None else 0.0,
            loop_lag_max=monitor.lag_max if monitor is not None else 0.0,
            loop_blocked=monitor.blocked_count if monitor is not None else 0,
        )

    def pending_calls(self) -> list[PendingCall]:
        """The calls under way at this worker, those it made and those it serves, oldest first. Any thread."""
        calls = [call for peer in set(self._peers.values()) for call in peer.pending_calls()]
        calls += [call for service in list(self._services) for call in service.pending_calls()]
        return sorted(calls, key=lambda call: -call.seconds)

    def _describe_running(self) -> str:
        running = [call.function for call in self.pending_calls() if call.direction == "served"]
        return f"a handler among {', '.join(running[:5])}" if running else "no handler"

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def shutdown(self, graceful: bool = True, timeout: float = 0.0) -> ShutdownReport:
        """Leave the group. Idempotent: later calls wait for the first one. On the worker's loop.

        graceful: serve until every live member has entered its own shutdown and no call is under way; bounded from the
        moment that all have entered, a member was lost, or the timeout passed. timeout: seconds, 0 for no limit.
        Returns who was lost and what was still referred to. After it no thread, task or socket of the worker is left.
        """
        if self.state in (State.NEW, State.CLOSED) and self._shutdown is None:
            return ShutdownReport()
        if asyncio.get_running_loop() is not self.loop:
            if self._own_loop is None:
                raise RpcUsageError(f"{self!r} runs on another loop; shut it down there")
            try:
                return await self._own_loop.run_async(self.shutdown(graceful, timeout))
            finally:
                self._own_loop.close()
        if self._shutdown is None:
            self._shutdown = asyncio.ensure_future(self._leave(graceful, seconds(timeout, "timeout")))
        try:
            return await asyncio.shield(self._shutdown)
        except asyncio.CancelledError:
            # Whoever waited is cancelled (Ctrl-C, a timeout): leave at once instead of gracefully.
            if not self._shutdown.done():
                self._shutdown.cancel()
                await asyncio.gather(self._shutdown, return_exceptions=True)
            raise

    async def _leave(self, graceful: bool, timeout: float) -> ShutdownReport:
        self.state = State.LEAVING
        complete = True
        leaked: tuple[Any, ...] = ()
        try:
            if graceful:
                complete = await self.group.leave(timeout)
            self.references.flush()
            leaked = tuple(self.references.leaked())
        finally:
            lost = tuple(self.group.lost.values())
            await self._close()
        for reference in leaked:
            logger.info("still referred to at shutdown of %s: %s", self.name, reference)
        if lost:
            names = ", ".join(info.name for info in lost)
            logger.warning("worker %s shut down; lost on the way: %s", self.name, names)
        return ShutdownReport(lost, not complete, leaked)

    async def _close(self) -> None:
        """Let go of everything, whatever the state; on the loop."""
        if self.state is State.CLOSED:
            return
        running = self.state is State.LEAVING
        self.state = State.CLOSED
        registry.remove(self)
        if self._old_switch_interval is not None:
            sys.setswitchinterval(self._old_switch_interval)
        self._publish(None)
        if self._acceptor is not None:
            self._acceptor.close()
        for service in list(self._services):
            service.say_goodbye()
        for peer in set(self._peers.values()):
            peer.close()
        for sock, path in self._listeners:
            sock.close()
            if path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        self._clean_up_after_the_lost()
        if self._watch is not None:
            self._watch.close()
        if hasattr(self, "deadlines"):
            self.deadlines.close()
        if hasattr(self, "references"):
            self.references.close()
        if self._monitor is not None:
            self._monitor.stop()
        await self._end_tasks()
        if hasattr(self, "pool"):
            left = await self._in_thread(lambda: self.pool.close(_POOL_GRACE if running else 0.1))
            if left:
                logger.warning("worker %s shut down while %d handler threads were still running", self.name, left)
        if self._rendezvous is not None:
            await self._in_thread(self._close_rendezvous)

    def _clean_up_after_the_lost(self) -> None:
        for member in self.group.lost if hasattr(self, "group") else ():
            record = self.group.members.get(member)
            if record is not None and record.unix_path and record.host == self.record.host:
                sockets.remove_if_stale(Path(record.unix_path))

    async def _end_tasks(self) -> None:
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _close_rendezvous(self) -> None:
        assert self._rendezvous is not None
        try:
            if hasattr(self, "record"):
                self._rendezvous.leave(self.record)
            self._rendezvous.close()
        except (RuntimeError, OSError) as error:
            logger.debug("leaving the rendezvous: %s", error)

    def after_fork_in_child(self) -> None:
        """In a forked child: let go of the parent's descriptors; every verb raises. No lock is taken."""
        self._forked = True
        self.state = State.CLOSED
        for service in list(self._services):
            service.connection.close_in_child()
        for peer in set(self._peers.values()):
            if peer.connection is not None:
                peer.connection.close_in_child()
        for sock, _ in self._listeners:
            if sock.fileno() >= 0:
                os.close(sock.detach())
        if self._watch is not None:
            self._watch.close_in_child()

    def close_at_exit(self) -> None:
        """The interpreter exits with this worker alive: say goodbye if that is quickly done. No thread is started."""
        # The loop may go on a little in its thread: what it sees of the others' reaction is no news any more.
        self.state = State.CLOSED
        for _, path in self._listeners:
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if self._rendezvous is not None:
            with contextlib.suppress(OSError):
                self._rendezvous.remove_secret()
        for peer in set(self._peers.values()):
            peer.goodbye()
        for service in list(self._services):
            service.goodbye()

    # --- the user's way in and out ------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Worker]:
        """Join the group."""
        return self.start().__await__()

    async def __aenter__(self) -> Worker:
        """Join the group; inside the block this worker is the current one."""
        await self.start()
        self._token = current_worker.set(self)
        return self

    async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        """Leave: gracefully, or at once if the block ended with an error (others see a goodbye)."""
        if self._token is not None:
            with contextlib.suppress(ValueError):  # a fixture may leave in another context than it entered
                current_worker.reset(self._token)
        await self.shutdown(graceful=exc is None)


def _failure(record: WorkerRecord, cause: str, error: BaseException | None) -> RpcError:
    """What is raised by everything that waits for a lost worker."""
    if isinstance(error, PeerRefused):
        failure: RpcError = PeerRefused(f"{record.describe()}: {error}")
    else:
        text = f"{record.describe()} was lost: {cause}"
        host, pid = record.hostname, record.pid
        failure = PeerLost(text, worker=record.name, rank=record.id, host=host, pid=pid, cause=cause)
    failure.__cause__ = error
    return failure


def _is_key(key: object) -> bool:
    """Whether it can name a worker: 1.0 and True are equal to 1, and would find its entry."""
    return isinstance(key, (str, int)) and not isinstance(key, bool)


class PeerHandle:
    """A worker with options for the calls made through this handle; see `aiorpc.peer`. Any thread."""

    def __init__(self, worker: Worker, to: To, timeout: float) -> None:
        self._worker = worker
        self._to = to
        self._timeout = timeout

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `aiorpc.call`, with this handle's options."""
        return self._worker.find_peer(self._to).call(function, args, kwargs, self._timeout)

    def remote(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """An RRef of the function's result on that worker, with this handle's options."""
        worker = self._worker
        return worker.references.create(worker.find_peer(self._to), function, args, kwargs, self._timeout, depth=2)

    def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
        """As `aiorpc.stream`, with this handle's options."""
        worker = self._worker
        return worker.open_stream(worker.find_peer(self._to), function, args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"<aiorpc.peer {self._to!r}, timeout {self._timeout:g} s>"
