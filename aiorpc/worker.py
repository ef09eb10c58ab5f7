"""`Worker`, which the program makes.

It exists before it joins. Once it has joined, its `Node` has its parts. Its `Lifecycle` joins and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch.distributed import Store

from . import progress as bars
from . import queues
from ._typing import Coro, Function, Items, Later, P, T
from .channels.accelerator import Accelerator
from .channels.torch_accelerator import find_accelerator
from .draining import check_bound, follow
from .errors import RpcUsageError, WorkerClosed
from .futures import Future
from .notebooks import html_table
from .observability.beating import Heartbeat
from .observability.endpoint import Visibility
from .observability.metrics import Metrics
from .observability.recorder import Recording
from .observability.switching import check_traces, make_tracer, wants_traces
from .options import RpcBackendOptions, seconds
from .protocol.identity import WorkerInfo, check_name
from .protocol.retries import Backoff
from .protocol.states import WorkerState
from .queues import QueueHandle
from .rights import check_role
from .runtime.callee.objects import Objects, ServedObject
from .runtime.caller.future import CallFuture
from .runtime.caller.handle import PeerHandle, make_handle, retry_options
from .runtime.caller.peer import Peer
from .runtime.caller.peers import To
from .runtime.caller.reworded import RewordedFuture, Words
from .runtime.caller.stream import Stream, open_stream
from .runtime.calls.batched import Batched
from .runtime.calls.current import CommonHome, current_node
from .runtime.calls.options import WAITING_CALL
from .runtime.calls.pending import PendingCall
from .runtime.engine.call_events import CallObserver, Observation, check_observer
from .runtime.engine.loops import LoopThread
from .runtime.fanout.members import make_members
from .runtime.fanout.options import GroupOptions, Quorum, check_quorum
from .runtime.fanout.peer_group import PeerGroup
from .runtime.group.events import Events, Listener
from .runtime.group.group import ShutdownReport, present
from .runtime.hooks import Hooks
from .runtime.lifecycle import Lifecycle
from .runtime.links.accelerators import claims_of
from .runtime.meeting.launchers import filled, role_of
from .runtime.meeting.secret import Secret
from .runtime.node import Node, Plan
from .runtime.publication.subscription import Publication, Subscription
from .runtime.references import rref
from .runtime.statistics import Statistics, collect

#: Of the calls under way a notebook shows so many.
_SHOWN_CALLS = 20


class _Coming(RewordedFuture):
    """The WorkerInfo of a worker, once a call to it has been answered."""

    def __init__(self, peer: Peer, call: CallFuture, words: Words) -> None:
        self._peer = peer
        super().__init__(call, words)

    def _value_of(self, call: Future[Any]) -> WorkerInfo | None:
        record = self._peer.record
        return None if call._error is not None or record is None else record.info


class Worker:
    """One member of a group of workers. Made by `aiorpc.init`; awaiting it joins, ``async with`` joins and leaves.

    Its verbs (`call`, `remote`, `stream`, `peer` and so on) are those of the module, for this worker. They may be used
    from any thread while it runs. Before it has joined and after it has left they raise WorkerClosed.
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
        hooks: Hooks | None = None,
        role: str = "",
        progress: bool = False,
        secret: Secret | None = None,
    ) -> None:
        """accelerator: of the devices that tensors may lie on; None for CUDA, if there is any. secret: of the group, in
        place of any that the user gives."""
        self._progress = bars.check(progress)
        self.role: str = check_role(role or role_of(os.environ))
        self.name: str = check_name(filled(name, self.role, rank, os.environ))
        if options is not None and not isinstance(options, RpcBackendOptions):
            raise RpcUsageError(f"options must be an RpcBackendOptions or None, not {options!r:.80}")
        if store is not None and not isinstance(store, Store):
            raise RpcUsageError(
                f"store must be a store of torch.distributed, such as TCPStore(...), or None, not {store!r:.80}"
            )
        self.options: RpcBackendOptions = (options or RpcBackendOptions()).copy()
        self.init_method: str = init_method or self.options.init_method
        self._hosted_by: LoopThread | None = None  # the thread that `init_rpc` started for it
        self._events = Events()
        self._objects = Objects(self.name)
        driver = accelerator or find_accelerator()
        check_bound(self.options, os.environ)
        traced = wants_traces(self.options, os.environ)
        if traced:
            check_traces()
        self._lifecycle = Lifecycle(
            Plan(
                worker=self,
                name=self.name,
                options=self.options,
                init_method=self.init_method,
                rank=rank,
                world_size=world_size,
                store=store,
                accelerator=driver,
                claims=claims_of(self.options, driver),
                hooks=hooks or Hooks(),
                events=self._events,
                objects=self._objects,
                role=self.role,
                secret=secret,
                attachments=(
                    Heartbeat(self.name),
                    Visibility(),
                    Metrics(self.name, self.options.metrics),
                ),
                make_tracer=make_tracer if traced else None,
            )
        )
        self._own_loop: LoopThread | None = None
        self._token: contextvars.Token[CommonHome | None] | None = None

    # --- identity -----------------------------------------------------------------------------------------------------

    @property
    def _node(self) -> Node:
        """The parts of the running worker. WorkerClosed if it has not joined."""
        node = self._lifecycle.node
        if node is None:
            raise self._lifecycle.lifetime.why_closed()
        return node

    @property
    def state(self) -> WorkerState:
        """The worker's state, from `WorkerState.NEW` to `WorkerState.CLOSED`."""
        return self._lifecycle.lifetime.state

    @property
    def id(self) -> int:
        """The rank, or the id that the rendezvous gave. WorkerClosed if it has not joined."""
        return self.info.id

    @property
    def info(self) -> WorkerInfo:
        """Name and id. WorkerClosed if it has not joined."""
        return self._node.engine.info

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on. WorkerClosed if it has not joined."""
        return self._node.engine.loop

    @property
    def closed(self) -> bool:
        """Whether the worker makes no calls: it has shut down, or has not joined yet."""
        return self._lifecycle.lifetime.closed

    @property
    def leaving(self) -> bool:
        """Whether the worker is shutting down and still serves, until its group is done."""
        return self._lifecycle.lifetime.leaving

    @property
    def dynamic(self) -> bool:
        """Whether workers join and leave the group at any time (``world_size=None``)."""
        return self._node.rendezvous.dynamic

    @property
    def hosts_store(self) -> bool:
        """Whether this process serves the rendezvous store."""
        return self._node.rendezvous.hosts_store

    @property
    def metrics_address(self) -> str | None:
        """``host:port`` where its metrics are read by HTTP; None without the option ``metrics``. WorkerClosed if it has
        not joined."""
        return self._node.metrics_address or None

    def _repr_html_(self) -> str:
        """For notebooks: what it is, and the calls under way, the oldest first."""
        node, state = self._lifecycle.node, self.state.value
        title = f"worker {self.name}" + (f", role {self.role}" if self.role else "")
        if node is None or self.closed:
            return html_table(f"{title}: {state}", (), ())
        place = self.init_method if node.rendezvous.dynamic else f"{node.rendezvous.world_size} workers"
        title += f": {state}, id {self.id}, {len(node.group.live())} members, {place}"
        calls = sorted(self.pending_calls(), key=lambda call: -call.seconds)[:_SHOWN_CALLS]
        rows = [(call.direction, call.worker, call.function, f"{call.seconds:.1f} s", call.made_at) for call in calls]
        return html_table(title, ("call", "worker", "function", "under way", "made at"), rows)

    def __repr__(self) -> str:
        return f"<aiorpc.Worker {self.name!r} {self.state.value}>"

    def __reduce__(self) -> NoReturn:
        """Not supported, also for copies: there is one worker of a name."""
        raise RpcUsageError(
            f"worker {self.name!r} stays in its process, and cannot be copied, pickled or sent; a function that is "
            "called has the worker that it runs on from aiorpc.current()"
        )

    # --- joining ------------------------------------------------------------------------------------------------------

    async def start(self) -> Worker:
        """Join the group, on the running loop. ``await worker`` and ``async with worker`` do it.

        Raised here: RendezvousError within ``rpc_timeout`` seconds when the group cannot be formed; RpcUsageError if it
        was started before; WorkerClosed if it is shut down before it has joined.
        """
        if not self._progress:
            return await self._start()
        with bars.begin(f"{self.name} joins") as bar:
            self._lifecycle.tell = bar.show
            return await self._start()

    async def _start(self) -> Worker:
        if not self.options.dedicated_loop:
            self._lifecycle.begin()
            await self._lifecycle.join()
            follow()
            return self
        own = LoopThread(self.name)
        own.on_end = self._loop_ended
        try:
            own.start()
            self._lifecycle.begin()
            self._own_loop = own
            await own.run_async(self._lifecycle.join())
        except BaseException:
            if self.state is WorkerState.RUNNING:  # cancelled just when it had joined
                with contextlib.suppress(asyncio.CancelledError):
                    await self.shutdown(graceful=False, timeout=0.0)
            own.close()
            raise
        follow()
        return self

    # --- verbs --------------------------------------------------------------------------------------------------------

    @overload
    def call(self, to: To, function: Batched[..., object, T], /, *args: object, **kwargs: object) -> Future[T]: ...

    @overload
    def call(self, to: To, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    @overload
    def call(self, to: To, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def call(self, to: To, function: Function, /, *args: object, **kwargs: object) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` on a worker; returns a Future at once. See `aiorpc.call`."""
        node = self._node
        return node.peers.find(to).call(function, args, kwargs, node.engine.default_timeout)

    @overload
    def remote(self, to: To, function: Batched[..., object, T], /, *args: object, **kwargs: object) -> rref.RRef[T]: ...

    @overload
    def remote(self, to: To, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> rref.RRef[T]: ...

    @overload
    def remote(self, to: To, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> rref.RRef[T]: ...

    def remote(self, to: To, function: Function, /, *args: object, **kwargs: object) -> rref.RRef[Any]:
        """An RRef of the result of ``function(*args, **kwargs)``, which stays on worker `to`; returns at once."""
        node = self._node
        timeout = node.engine.default_timeout
        return node.references.create(node.peers.find(to), function, args, kwargs, timeout, depth=2)

    def stream(self, to: To, function: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        """The items of a generator function that runs on a worker. See `aiorpc.stream`."""
        node = self._node
        return open_stream(node.peers.find(to), function, args, kwargs, node.engine.default_timeout)

    def peer(
        self,
        to: To,
        *,
        timeout: float | None = None,
        wait: bool = False,
        retries: int = 0,
        backoff: float | tuple[float, float] = Backoff(),
        idempotent: bool = False,
    ) -> PeerHandle:
        """A handle of a worker, with options for the calls made through it. See `aiorpc.peer`."""
        node = self._node
        node.peers.find(to)
        limit = node.engine.default_timeout if timeout is None else seconds(timeout, "timeout")
        return make_handle(node, to, limit, wait, retries, backoff, idempotent)

    def group(
        self,
        to: str | Sequence[To] | None = None,
        *,
        role: str | None = None,
        timeout: float | None = None,
        quorum: Quorum | None = None,
        wait: bool = False,
        retries: int = 0,
        backoff: float | tuple[float, float] = Backoff(),
        idempotent: bool = False,
        progress: bool = False,
    ) -> PeerGroup:
        """Several workers, to be called together, with options for these calls. See `aiorpc.group`."""
        node = self._node
        limit = node.engine.default_timeout if timeout is None else seconds(timeout, "timeout")
        retry = retry_options(wait, retries, backoff, idempotent)
        options = GroupOptions(limit, check_quorum(quorum), retry, bars.check(progress))
        return PeerGroup(node, make_members(node, to, role), options)

    def serve(self, name: str, value: object, *, replace: bool = False) -> ServedObject:
        """Let other workers call methods of an object under a name. See `aiorpc.serve`. Also before it has joined."""
        if isinstance(value, rref.RRef):
            raise RpcUsageError(f"{name!r} is to be a reference: serve the value itself, at its owner")
        return self._objects.serve(name, value, self._lifecycle.lifetime, replace=replace)

    def queue(self, name: str, *, owner: str, timeout: float | None = None) -> QueueHandle[Any]:
        """A handle of a queue, for use by this worker. See `aiorpc.queue`."""
        self._check_open()
        handle: QueueHandle[Any] = QueueHandle(name, owner, timeout)
        return handle._bind(self._node)

    def Queue(self, name: str, maxsize: int = 0, *, timeout: float | None = None) -> queues.Queue[Any]:
        """A queue that this worker owns. See `aiorpc.Queue`."""
        self._check_open()
        return queues.Queue._of(self._node, name, maxsize, timeout)

    def RRef(self, value: T) -> rref.RRef[T]:
        """A reference to a value of this worker. See `aiorpc.RRef`."""
        self._check_open()
        return self._node.references.refer_to(value, 2)

    def wait_for(self, to: To, *, timeout: float | None = None) -> Future[WorkerInfo]:
        """The WorkerInfo of a worker, once it has joined and answers. See `aiorpc.wait_for`."""
        node = self._node
        limit = node.engine.default_timeout if timeout is None else seconds(timeout, "timeout")
        node.engine.lifetime.check_begin()
        peers = node.peers
        peer = peers.find(to)
        call = peer.call(present, (), None, limit, system=True, options=WAITING_CALL)
        call.parked = True
        try:  # leaving that began just before has ended the waits that it knew; this one was not parked yet
            node.engine.lifetime.check_begin()
        except WorkerClosed:
            call.cancel()
            raise
        return _Coming(peer, call, partial(peers.not_come, peer))

    def publish(self, name: str, value: object) -> Future[Publication]:
        """Give a value to all subscribers of a name, as its next version. See `aiorpc.publish`."""
        return self._node.publications.publish(name, value)

    def unpublish(self, name: str) -> Future[None]:
        """Stop publishing a name. See `aiorpc.unpublish`."""
        return self._node.publications.unpublish(name)

    def subscribe(
        self, name: str, *, timeout: float | None = None, map_location: str | torch.device | None = None
    ) -> Subscription[Any]:
        """The newest versions of a published value. See `aiorpc.subscribe`."""
        return self._node.publications.subscribe(name, timeout, map_location)

    # --- looking ------------------------------------------------------------------------------------------------------

    def get_worker_info(self, name: str | None = None) -> WorkerInfo:
        """Name and id of this worker, or of another one. See `aiorpc.get_worker_info`."""
        self._check_open()
        if name is None:
            return self.info
        peers = self._node.peers
        return peers.info_of(peers.find(name))

    def worker_infos(self) -> list[WorkerInfo]:
        """All live members that this worker knows, itself included, by id."""
        return self._node.worker_infos()

    def _check_open(self) -> None:
        """Raise WorkerClosed if verbs cannot be used: not yet, or not any more. Any thread."""
        self._lifecycle.lifetime.check_open()

    def events(self) -> Listener:
        """News of the group from now on, for ``async for``; ends when this worker shuts down.

        Workers that join, leave, are lost, or take the place of a lost one; connections that break and come back. The
        types are in `aiorpc.events`. The last 65,536 events wait to be taken; the log reports dropped ones. From any
        thread, and iterated on any loop. `aclose`, or dropping it, ends it early.
        """
        return self._events.listen()

    def observe_calls(self, observer: CallObserver) -> Observation:
        """Show each step of each call of this worker to an observer from now on, those it makes and those it serves.

        observer: see `aiorpc.events.CallObserver`. The `Observation` ends it: by `close`, or as a context manager.
        Without observers calls cost nothing more. Any thread.

        Raised here: WorkerClosed if it has not joined, RpcUsageError for an observer that lacks a method.
        """
        check_observer(observer)
        return Observation(self._node.engine, observer)

    def record(self, path: str | os.PathLike[str], *, seconds: float = 60.0, profile: bool = False) -> Recording:
        """Write what all workers of the group do to a file, on one time axis. See `aiorpc.record`."""
        return Recording(self._node, path, seconds, profile)

    def statistics(self) -> Statistics:
        """Counters and gauges of this worker. Any thread.

        Raised here: WorkerClosed if it has not joined.
        """
        return collect(self._node)

    def pending_calls(self) -> list[PendingCall]:
        """The calls under way at this worker, those it made and those it serves, the oldest first. Any thread."""
        return self._node.pending_calls()

    def is_idle(self) -> bool:
        """Whether no call of users is under way, in either direction. Any thread."""
        return self._node.is_idle()

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def shutdown(self, graceful: bool = True, timeout: float | None = None) -> ShutdownReport:
        """Leave the group: drain, then go. Idempotent: later calls wait for the first one. On the worker's loop.

        A graceful shutdown closes the door, finishes what was accepted before, and leaves. In a free group the door
        closes now. In a fixed group it closes when every live member has called its own shutdown; calls under way then
        have ``rpc_timeout``. When the door has closed, new calls of this worker's program raise WorkerClosed, and its
        waits do so after 3 s.

        graceful: False leaves at once, even while a graceful shutdown waits.
        timeout: seconds for all that, 0 for no limit; the option ``shutdown_timeout`` if None.

        Returns the lost members and the references that were still alive. After it no thread, task or socket of the
        worker is left, except for a thread inside torch if the store has not answered for 5 s (with a warning). A
        worker that is still joining gives up: `start` raises WorkerClosed. A worker whose loop was closed meanwhile, as
        ``asyncio.run`` does, is closed on any other loop.

        Raised here: RpcUsageError on another loop than the worker's.
        """
        limit = self.options.shutdown_timeout if timeout is None else timeout
        return await self._leave(partial(self._lifecycle.shutdown, graceful, limit))

    async def drain(self, timeout: float | None = None) -> ShutdownReport:
        """Leave by itself: refuse new calls, finish what was accepted, and go. On the worker's loop.

        In a fixed group, too, where `shutdown` waits for all: the others go on, and another process may take the place.
        A worker that hosts the store of its group does not stay for it. New calls of others raise PeerLeft there, with
        which calls with ``retries=`` go on, and groups choose another worker. Items put into its queues by others are
        refused, too. The calls that it has accepted, with the calls that these make, streams and batches run to their
        end, and so do the calls that its program has made; items in its queues, and large ones that it keeps for queues
        of others, wait to be got. For the rest its program is treated as by `shutdown`.

        timeout: seconds for all that, 0 for no limit; the option ``drain_timeout`` if None. When the time is up the
        worker leaves, and the report says what was `unfinished`.

        Idempotent: later calls, and those of `shutdown`, wait for the first one; ``shutdown(graceful=False)`` ends it.
        A signal drains in the same way: see the option ``drain_on``. A handler that awaits it waits for itself, and so
        until the time is up: let it start a task.

        Raised here: RpcUsageError on another loop than the worker's.
        """
        limit = self.options.drain_timeout if timeout is None else timeout
        return await self._leave(partial(self._lifecycle.drain, limit))

    async def drained(self) -> ShutdownReport:
        """Wait until this worker has left, whatever begins that: a signal, `drain`, or `shutdown`.

        For programs that only serve. A cancelled wait changes nothing. Returns what `shutdown` does. On the worker's
        loop.

        Raised here: WorkerClosed if it has not joined; RpcUsageError on another loop than the worker's.
        """
        if self.state in (WorkerState.NEW, WorkerState.STARTING):
            self._check_open()
        return await self._leave(self._lifecycle.left)

    async def _leave(self, how: Callable[[], Coro[ShutdownReport]]) -> ShutdownReport:
        """Leave, or wait for it, unless that is over."""
        report = self._lifecycle.report()
        own = self._own_loop
        if report is not None:
            if (
                own is not None and not own.is_here and self.closed
            ):  # it was shut down on its own loop, which still runs
                own.close()
            return report
        if own is not None and asyncio.get_running_loop() is not own.loop:
            try:
                return await own.run_async(self._leave(how))
            finally:
                if self.closed:  # not if the shutdown was refused or cancelled: the worker needs its loop
                    own.close()
                    follow()
        if self._lifecycle.loop is not None and asyncio.get_running_loop() is not self._lifecycle.loop:
            raise RpcUsageError(f"{self!r} runs on another loop; shut it down there")
        try:
            return await how()
        finally:
            if self.closed:
                follow()

    def _begin_to_drain(self, asked_by: str) -> None:
        """Drain within the option ``drain_timeout``. asked_by: the name of a signal. Any thread; does not wait."""
        loop = self._lifecycle.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the worker
                loop.call_soon_threadsafe(self._lifecycle.begin_to_drain, self.options.drain_timeout, asked_by)

    @property
    def _thread(self) -> LoopThread | None:
        """The thread that was made for its loop; None if it runs on a user's loop."""
        return self._hosted_by or self._own_loop

    async def _drop(self) -> None:
        """Drop everything without leaving, as if the process had died: for tests. On the worker's loop."""
        await self._lifecycle.drop()

    def _loop_ended(self, cause: BaseException | None) -> Coroutine[Any, Any, None]:
        """The loop has ended although the worker is running: close the worker at once.

        Returns a coroutine with the rest, which needs one more run of the loop.
        """
        return self._lifecycle.loop_ended(cause)

    def _loop_closed(self, *, wait: bool = True) -> None:
        """The loop was closed although the worker runs: close the worker without it. See `Lifecycle.loop_closed`."""
        self._lifecycle.loop_closed(wait=wait)

    def _report(self) -> ShutdownReport | None:
        """The result of `shutdown` if it has nothing left to do; None if it has. Any thread."""
        return self._lifecycle.report()

    # --- the user's way in and out ------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Worker]:
        """Join the group."""
        return self.start().__await__()

    if not TYPE_CHECKING:  # type checkers must not see it

        def __enter__(self) -> NoReturn:
            raise TypeError(
                "a worker is entered by `async with rpc.init(...)`, in an `async def`; in a script without a loop: "
                "rpc.init_rpc(...), and rpc.shutdown() at the end"
            )

        def __exit__(self, *_: object) -> None:
            """Python looks for it first."""

    async def __aenter__(self) -> Worker:
        """Join the group, unless it has; inside the block this worker is the current one."""
        here = self._own_loop is not None or self._lifecycle.loop is asyncio.get_running_loop()
        if self._token is not None or self.closed or not here:  # it may drain already, asked by a signal
            await self.start()
        self._token = current_node.set(self._node)
        return self

    async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        """Leave: gracefully, or at once if the block ended with an error (others see a goodbye)."""
        if self._token is not None:
            with contextlib.suppress(ValueError):  # a fixture may exit in another context
                current_node.reset(self._token)
        # While it drains, verbs of its program raise WorkerClosed: that ends the block, and not the drain.
        drains = self._lifecycle.lifetime.drains and isinstance(exc, Exception)
        if not (drains and isinstance(exc, WorkerClosed)):
            self._lifecycle.lifetime.fail(None if exc is None else type(exc))
        await self.shutdown(graceful=exc is None or drains)
