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
import itertools
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's stubs

from ..channels import Traffic, layout
from ..channels.accelerator import Accelerator
from ..channels.bulk import Bulk
from ..channels.device import DIRECT, IPC, STAGING
from ..channels.inline import Inline
from ..channels.shared import SharedMemory
from ..channels.torch_accelerator import find_accelerator
from ..errors import (
    RendezvousError,
    RpcUsageError,
    WorkerClosed,
    WouldBlockLoop,
)
from ..futures import Future
from ..options import RpcBackendOptions, seconds
from ..protocol.identity import WorkerInfo, WorkerRecord, check_name
from ..transport import sockets
from ..transport.connection import Connection
from .accelerators import Accelerators
from .connecting import Acceptor, connect, open_pipe
from .current import current_worker, registry
from .deadlines import Deadlines
from .dispatch import Service
from .events import Event, Events
from .gradients import Gradients
from .group import Group, ShutdownReport, failure
from .handle import PeerHandle
from .host import host_identity, main_identity
from .lag import LoopMonitor
from .link import Link
from .loops import LoopThread, run_in_thread
from .memory import Memory
from .peer import Peer
from .peers import Peers, To
from .pool import ThreadPool
from .references import References, RRef
from .rendezvous import Rendezvous
from .statistics import Counters, PendingCall, Statistics, collect
from .streams import Stream
from .tasks import Tasks

logger = logging.getLogger("aiorpc")
T = TypeVar("T")

# What is still running after these many seconds is left to itself.
_POOL_GRACE = 1.0
_TASKS_GRACE = 1.0
_CONNECTION_GRACE = 1.0
_DEVICES_GRACE = 1.0


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
        accelerator: Accelerator | None = None,
    ) -> None:
        """accelerator: the devices that tensors may lie on; CUDA's, where there are any, if None."""
        self.name = check_name(name)
        self.options = (options or RpcBackendOptions()).copy()
        self.options.validate()
        self.init_method = init_method or self.options.init_method
        self.state = State.NEW
        self.counters = Counters()
        self.accelerators = Accelerators(self, accelerator or find_accelerator())
        self.peers = Peers(self)
        self.gradients = Gradients(self)
        self.news = Events()
        self.services: set[Service] = set()
        # All there are, in their handshake or later: a forked child has to let go of them.
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.rendezvous: Rendezvous | None = None
        self.monitor: LoopMonitor | None = None
        self.default_timeout = self.options.rpc_timeout
        self.pool: ThreadPool
        # Threads of their own for what takes too long on the loop: handlers that block must hold up no answer.
        self.background: ThreadPool
        self.loop: asyncio.AbstractEventLoop
        self.record: WorkerRecord
        self.references: References
        self.memory: Memory
        self.deadlines: Deadlines
        self.group: Group
        self.tasks: Tasks
        self.secret = b""
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self.thread = 0  # of its loop
        self._acceptor = Acceptor(self)
        self._own_loop: LoopThread | None = None
        self.hosted_by: LoopThread | None = None  # the thread that `init_rpc` started for it
        self.link_numbers = itertools.count(1)
        self._past_traffic: dict[str, Traffic] = {}
        self._stop_waiting = threading.Event()
        self._shutdown: asyncio.Task[ShutdownReport] | None = None
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
    def leaving(self) -> bool:
        """Whether it shuts down just now; it serves until its group is done."""
        return self.state is State.LEAVING

    @property
    def dynamic(self) -> bool:
        """Whether workers join and leave the group at any time (``world_size=None``)."""
        return self.rendezvous is not None and self.rendezvous.dynamic

    @property
    def hosts_store(self) -> bool:
        """Whether this process serves the rendezvous store."""
        return self.rendezvous is not None and self.rendezvous.hosts_store

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
        self.thread = threading.get_ident()
        self.tasks = Tasks(self.loop)
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
        layout.warm_up()
        directory = sockets.private_directory()
        sockets.remove_stale(directory)
        rendezvous = self.rendezvous = await self.in_thread(self._open_rendezvous)
        unix_path, host, port = self._acceptor.listen(directory, rendezvous.local_address())
        self.pool = ThreadPool(self.name, self.options.num_worker_threads, prepare=lambda: current_worker.set(self))
        self.background = ThreadPool(f"{self.name}-background", 2, prepare=lambda: current_worker.set(self))
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

        claims = self.accelerators.claims
        records = await self.in_thread(lambda: rendezvous.join(make_record, claims))
        self.record = next(record for record in records if record.incarnation == incarnation)
        self.secret = await self.in_thread(lambda: rendezvous.agree_secret(self.record, records, directory))
        self.references = References(self)
        self.memory = Memory(self)
        await self.accelerators.start({self.name: claims, **rendezvous.claims})
        self.group = Group(self, records)
        for record in records:
            self.peers.add(record)
        # Handlers run in a copy of the context in which the reader was registered: not in that of whoever started us.
        contextvars.Context().run(self._acceptor.start)
        self.monitor = LoopMonitor(
            self.loop, warn_after=self.options.lag_warning, describe=self._describe_running, name=self.name
        )
        self.monitor.start()
        if rendezvous.dynamic:
            self.tasks.spawn(self._serve_rendezvous(rendezvous))

    def _open_rendezvous(self) -> Rendezvous:
        return Rendezvous.open(
            self.init_method,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self.options.rpc_timeout,
            stop=self._stop_waiting,
            store=self._store,
        )

    async def _serve_rendezvous(self, rendezvous: Rendezvous) -> None:
        """In a group that is joined freely: hand newcomers from other hosts what they need."""
        while True:
            await asyncio.sleep(0.25)
            with contextlib.suppress(RendezvousError):
                await self.in_thread(rendezvous.serve_secret_requests)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a blocking step of the rendezvous in a thread of its own; it has its own timeout. On the loop."""
        try:
            return await run_in_thread(function, f"aiorpc-{self.name}-rendezvous")
        except asyncio.CancelledError:
            self._stop_waiting.set()
            raise

    # --- verbs --------------------------------------------------------------------------------------------------------

    def call(self, to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` on a worker; returns a Future at once. See `aiorpc.call`."""
        return self.peers.find(to).call(function, args, kwargs, self.default_timeout)

    def remote(self, to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """An RRef of the result of ``function(*args, **kwargs)``, which stays on that worker; returns at once."""
        return self.references.create(self.peers.find(to), function, args, kwargs, self.default_timeout, depth=2)

    def stream(self, to: To, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
        """The items of a generator function that runs on a worker. See `aiorpc.stream`."""
        return self.open_stream(self.peers.find(to), function, args, kwargs, self.default_timeout)

    def peer(self, to: To, *, timeout: float | None = None) -> PeerHandle:
        """A handle of a worker, with options for the calls made through it."""
        self.peers.find(to)
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
        if threading.get_ident() == self.thread and asyncio._get_running_loop() is self.loop:
            raise WouldBlockLoop(f"{verb} would block the event loop that has to bring the answer; use `{instead}`")

    # --- peers --------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """WorkerClosed if no verb can be used any more. Any thread."""
        if self._forked:
            raise WorkerClosed("this process was forked from the worker's; start a worker of its own here")
        if self.closed:
            raise WorkerClosed(f"worker {self.name!r} has shut down; it makes no more calls")

    def get_worker_info(self, name: str | None = None) -> WorkerInfo:
        """Name and id of this worker, or of the one of that name. UnknownWorker if there is none yet."""
        self.check_open()
        if name is None:
            return self.info
        peer = self.peers.find(name)
        self.peers.id_of(peer)
        assert peer.record is not None
        return peer.record.info

    def worker_infos(self) -> list[WorkerInfo]:
        """All members this worker knows, itself included, by id; without those that have left or were lost."""
        return sorted((record.info for record in self.group.live()), key=lambda info: info.id)

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self, peer: Peer) -> None:
        """Begin to connect to a peer; on the loop."""
        self.tasks.spawn(connect(self, peer))

    def add_service(self, record: WorkerRecord, connection: Connection, link: int) -> Service:
        """A worker has connected to us and proved who it is; serve it. link: its number for this connection."""
        service = Service(self, record, connection, link)
        self.services.add(service)
        self.peers.of(record)
        self.group.watch(record)
        return service

    def service_closed(self, service: Service, cause: BaseException | None) -> None:
        """A connection on which we served has ended."""
        self.services.discard(service)
        self._count_bytes(service.connection)
        service.close()
        service.link.close()
        if cause is not None:
            self.group.on_lost(service.peer, f"its connection broke: {cause}")

    def connection_closed(self, peer: Peer, connection: Connection, cause: BaseException | None) -> None:
        """A connection that we had opened has ended."""
        self._count_bytes(connection)
        if peer.link is not None:
            peer.link.when_drained(partial(self._link_ended, peer, cause))
        else:
            self._link_ended(peer, cause)

    def _link_ended(self, peer: Peer, cause: BaseException | None) -> None:
        if peer.link is not None:
            peer.link.close()
            peer.link = None
        if cause is not None and peer.record is not None and not self.closed:
            self.group.on_lost(peer.record, f"the connection to it broke: {cause}")
            # Where that was no news (a connection to ourselves, a second peer of that worker) its calls must end too.
            peer.fail(failure(peer.record, f"the connection to it broke: {cause}", cause))

    def open_pipe(self, link: Link) -> None:
        """Begin to open the second connection of a link."""
        self.tasks.spawn(open_pipe(self, link))

    def find_link(self, record: WorkerRecord, number: int, *, opener: bool) -> Link | None:
        """Our end of the link of that number with that worker. opener: whether we have opened it. Any thread."""
        for link in self.links():
            if link.number == number and link.opener == opener and link.record.incarnation == record.incarnation:
                return link
        return None

    def links(self) -> list[Link]:
        """All there are. Any thread."""
        mine = [peer.link for peer in self.peers.all() if peer.link is not None]
        return mine + [service.link for service in list(self.services)]

    def traffic(self) -> dict[str, Traffic]:
        """What went by which channel, by its name. Any thread."""
        total = {name: Traffic() for name in (SharedMemory.name, Bulk.name, Inline.name, DIRECT, IPC, STAGING)}
        for name, traffic in list(self._past_traffic.items()):
            total[name].add(traffic)
        for link in self.links():
            for name, traffic in link.traffic().items():
                total[name].add(traffic)
        return total

    def count_traffic(self, link: Link) -> None:
        """A link has ended; what it has moved still counts."""
        for name, traffic in link.traffic().items():
            self._past_traffic.setdefault(name, Traffic()).add(traffic)
        if link.pipe is not None and link.pipe is not link.connection:
            self._count_bytes(link.pipe)

    def _count_bytes(self, connection: Connection) -> None:
        self.counters.bytes_sent += connection.bytes_sent
        self.counters.bytes_received += connection.bytes_received

    def events(self) -> AsyncGenerator[Event, None]:
        """Workers that join, leave or are lost from now on; ends when this worker shuts down. On any loop."""
        return self.news.listen()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def call_on_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Run something on the loop, soon. Any thread; nothing happens once the loop is closed."""
        try:
            if threading.get_ident() == self.thread:
                self.loop.call_soon(function, *args)
            else:
                self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def in_background(self, fn: Callable[..., None], *args: Any) -> None:
        """Run something that takes long in a thread, soon. Any thread; nothing happens once we leave."""
        with contextlib.suppress(WorkerClosed):
            self.background.submit(fn, *args)

    def run_on_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Run something on the loop: at once if this is its thread, else soon."""
        if threading.get_ident() == self.thread:
            function(*args)
        else:
            self.call_on_loop(function, *args)

    def _scan_deadlines(self, now: float) -> float:
        return min((peer.scan_deadlines(now) for peer in self.peers.all()), default=float("inf"))

    # --- looking ------------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether no call of users is under way, in either direction."""
        return (
            not any(peer.user_calls() for peer in self.peers.all())
            and not any(service.user_calls() for service in self.services)
            and not any(link.busy for link in self.links())
        )

    def activity(self) -> tuple[bool, int]:
        """Whether it is idle, and how many calls of users it has seen; what graceful shutdown compares."""
        return self.is_idle(), self.counters.made + self.counters.served_users

    def statistics(self) -> Statistics:
        """What this worker has done and is doing. Any thread."""
        return collect(self)

    def pending_calls(self) -> list[PendingCall]:
        """The calls under way at this worker, those it made and those it serves, oldest first. Any thread."""
        calls = [call for peer in self.peers.all() for call in peer.pending_calls()]
        calls += [call for service in list(self.services) for call in service.pending_calls()]
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
        if self._shutdown is not None and self._shutdown.done() and not self._shutdown.cancelled():
            return self._shutdown.result()
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
            # Closing itself is bounded, and never cut short: half of it would be left for good.
            if self.state is State.LEAVING:
                self._shutdown.cancel()
            await asyncio.wait((self._shutdown,))
            raise

    async def _leave(self, graceful: bool, timeout: float) -> ShutdownReport:
        self.state = State.LEAVING
        complete = True
        leaked: tuple[Any, ...] = ()
        try:
            if graceful:
                try:
                    complete = await self.group.leave(timeout)
                except asyncio.CancelledError:  # see `shutdown`; later calls of it are not cancelled, they get a report
                    complete = False
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
        self.news.end()
        self._acceptor.close()
        await self.accelerators.let_go(_DEVICES_GRACE)
        for service in list(self.services):
            service.say_goodbye()
        for peer in self.peers.all():
            peer.close()
        if hasattr(self, "group"):
            self.group.close()
        if hasattr(self, "deadlines"):
            self.deadlines.close()
        if hasattr(self, "references"):
            self.references.close()
            self.gradients.close()
            self.memory.close()
        if self.monitor is not None:
            self.monitor.stop()
        if hasattr(self, "tasks"):
            await self.tasks.end(_TASKS_GRACE)
        if hasattr(self, "pool"):
            self.background.close(0.0)
            left = await self.in_thread(lambda: self.pool.close(_POOL_GRACE if running else 0.1))
            if left:
                logger.warning("worker %s shut down while %d handler threads were still running", self.name, left)
        await self._end_connections()
        await self.accelerators.close(_DEVICES_GRACE)
        if self.rendezvous is not None:
            await self.in_thread(self._close_rendezvous)

    async def _end_connections(self) -> None:
        """Wait until what is queued has been written; a peer that does not read must not keep us."""
        limit = time.monotonic() + _CONNECTION_GRACE
        while any(not each.ended for each in self.connections) and time.monotonic() < limit:  # noqa: ASYNC110  # their ends signal nobody
            await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.abort()

    def _close_rendezvous(self) -> None:
        assert self.rendezvous is not None
        try:
            if hasattr(self, "record"):
                self.rendezvous.leave(self.record)
            self.rendezvous.close()
        except (RuntimeError, OSError) as error:
            logger.debug("leaving the rendezvous: %s", error)

    def after_fork_in_child(self) -> None:
        """In a forked child: let go of the parent's descriptors; every verb raises. No lock is taken."""
        self._forked = True
        self.state = State.CLOSED
        for connection in list(self.connections):
            connection.close_in_child()
        self._acceptor.close_in_child()
        if hasattr(self, "group"):
            self.group.close_in_child()
            self.memory.close_in_child()
            self.accelerators.close_in_child()

    def close_at_exit(self) -> None:
        """The interpreter exits with this worker alive: say goodbye if that is quickly done. No thread is started."""
        # The loop may go on a little in its thread: what it sees of the others' reaction is no news any more.
        self.state = State.CLOSED
        self._acceptor.unlink()
        if self.rendezvous is not None:
            with contextlib.suppress(OSError):
                self.rendezvous.remove_secret()
        for peer in self.peers.all():
            peer.goodbye()
        for service in list(self.services):
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
