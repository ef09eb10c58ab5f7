"""A worker: one loop, its peers, its connections; its life is in life.py.

All state belongs to the loop; other threads hand work over with `call_on_loop`, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's stubs

from .. import foreign
from ..channels import Traffic
from ..channels.accelerator import Accelerator
from ..channels.torch_accelerator import find_accelerator
from ..errors import RpcUsageError, WorkerClosed, WouldBlockLoop
from ..futures import Future
from ..options import RpcBackendOptions, seconds
from ..protocol.identity import WorkerInfo, WorkerRecord, check_name
from ..transport.connection import Connection
from .callee.service import Service
from .caller.handle import PeerHandle
from .caller.peer import Peer
from .caller.peers import Peers, To
from .caller.streams import Stream
from .engine.current import current_worker
from .engine.deadlines import Deadlines
from .engine.lag import LoopMonitor
from .engine.loops import LoopThread, run_in_thread
from .engine.pool import ThreadPool
from .engine.tasks import Tasks
from .gradients.contexts import Gradients
from .group.connecting import Acceptor, connect, open_pipe
from .group.events import Events, Listener
from .group.group import Group, ShutdownReport, failure
from .life import Life, State
from .links.accelerators import Accelerators
from .links.link import Link
from .links.memory import Memory
from .meeting.rendezvous import Rendezvous
from .references.rref import References, RRef
from .statistics import Counters, PendingCall, Statistics, collect, traffic

T = TypeVar("T")


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
        # For those who build on a worker, to be set before it starts.
        self.handle_class: type[RRef[Any]] = RRef  # of references that arrive, and of results of `remote`
        self.on_handler_error: Callable[[BaseException], None] | None = None  # once it is answered; any thread
        # The error of a call of that function, as its caller gets it.
        self.read_error: Callable[[str, BaseException], BaseException] = lambda function, error: error
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
        self.steps: set[asyncio.Task[Any]] = set()  # of `in_thread`
        self.thread = 0  # of its loop
        self._acceptor = Acceptor(self)
        self._life = Life(self, self._acceptor, rank=rank, world_size=world_size, store=store)
        self.own_loop: LoopThread | None = None
        self.hosted_by: LoopThread | None = None  # the thread that `init_rpc` started for it
        self.link_numbers = itertools.count(1)
        self._token: contextvars.Token[Worker | None] | None = None

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
    def on_loop(self) -> bool:
        """Whether the calling code runs on the worker's loop, right now: it may await, and must not block."""
        return threading.get_ident() == self.thread and asyncio._get_running_loop() is self.loop

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
        if self.options.dedicated_loop and self.own_loop is None:
            self.own_loop = LoopThread(self.name)
            self.own_loop.on_end = self.loop_ended
            try:
                return await self.own_loop.run_async(self.start())
            except BaseException:
                self.own_loop.close()
                raise
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.tasks = Tasks(self.loop)
        await self._life.join()
        return self

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a blocking step of the rendezvous in a thread of its own; it has its own timeout. On the loop.

        Cancelled, it goes on to its end, for which whoever closes the worker waits.
        """
        step = self.loop.create_task(run_in_thread(function, f"aiorpc-{self.name}-rendezvous"))
        self.steps.add(step)
        step.add_done_callback(self._stepped)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self._life.stop_waiting.set()
            raise

    def _stepped(self, step: asyncio.Task[Any]) -> None:
        self.steps.discard(step)
        if not step.cancelled():
            step.exception()  # if whoever waited was cancelled, it is nobody's news

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
        if self.on_loop:
            raise WouldBlockLoop(f"{verb} would block the event loop that has to bring the answer; use `{instead}`")

    # --- peers --------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """WorkerClosed if no verb can be used any more. Any thread."""
        if self.closed:
            if self._life.forked:
                raise WorkerClosed("this process was forked from the worker's; start a worker of its own here")
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
        self.counters.add_connection(service.connection)
        service.close()
        service.link.close()
        if cause is not None:
            self.group.on_lost(service.peer, f"its connection broke: {foreign.text_of(cause)}")

    def connection_closed(self, peer: Peer, connection: Connection, cause: BaseException | None) -> None:
        """A connection that we had opened has ended."""
        self.counters.add_connection(connection)
        if peer.link is not None:
            peer.link.when_drained(partial(self._link_ended, peer, cause))
        else:
            self._link_ended(peer, cause)

    def _link_ended(self, peer: Peer, cause: BaseException | None) -> None:
        if peer.link is not None:
            peer.link.close()
            peer.link = None
        if cause is not None and peer.record is not None and not self.closed:
            reason = f"the connection to it broke: {foreign.text_of(cause)}"
            self.group.on_lost(peer.record, reason)
            # Where that was no news (a connection to ourselves, a second peer of that worker) its calls must end too.
            peer.fail(failure(peer.record, reason, cause))

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
        return traffic(self)

    def count_traffic(self, link: Link) -> None:
        """A link has ended; what it has moved still counts."""
        self.counters.add_link(link)

    def events(self) -> Listener:
        """Workers that join, leave or are lost from now on, for ``async for``; ends when this worker shuts down.

        To be called from any thread, and iterated on any loop. `aclose`, or dropping it, ends it early.
        """
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

    def scan_deadlines(self, now: float) -> float:
        """See `Peer.scan_deadlines`: of all peers."""
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

    def describe_running(self) -> str:
        """What may hold up the loop, or a shutdown: for messages. Any thread."""
        running = [call.function for call in self.pending_calls() if call.direction == "served"]
        return f"a handler among {', '.join(running[:5])}" if running else "no handler"

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def shutdown(self, graceful: bool = True, timeout: float = 0.0) -> ShutdownReport:
        """Leave the group. Idempotent: later calls wait for the first one. On the worker's loop.

        graceful: serve until every live member has entered its own shutdown and no call is under way; bounded from the
        moment that all have entered, a member was lost, or the timeout passed. In a group without a size: until no call
        is under way here, bounded by the timeout alone. timeout: seconds, 0 for no limit.
        Returns who was lost and what was still referred to. After it no thread, task or socket of the worker is left,
        but for a thread inside torch if the store of the rendezvous has not answered for 5 s (a warning says so).
        """
        report = self._life.report()
        if report is not None:
            return report
        if asyncio.get_running_loop() is not self.loop:
            if self.own_loop is None:
                raise RpcUsageError(f"{self!r} runs on another loop; shut it down there")
            try:
                return await self.own_loop.run_async(self.shutdown(graceful, timeout))
            finally:
                self.own_loop.close()
        return await self._life.shutdown(graceful, timeout)

    def loop_ended(self, cause: BaseException | None) -> Coroutine[Any, Any, None]:
        """Its loop has ended without it: it is closed at once. What is left to do, for one more run of the loop."""
        return self._life.loop_ended(cause)

    async def _close(self) -> None:
        """Let go of everything, whatever the state; on the loop."""
        await self._life.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: let go of the parent's descriptors; every verb raises. No lock is taken."""
        self._life.in_forked_child()

    def close_at_exit(self) -> None:
        """The interpreter exits with this worker alive: say goodbye if that is quickly done. No thread is started."""
        self._life.at_exit()

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
