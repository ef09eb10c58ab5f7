"""The engine of a worker: the base of all of its parts, which needs none of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context
from functools import partial
from typing import Any, Protocol

from ...errors import Overloaded, WorkerClosed, WouldBlockLoop
from ...locks import Lock
from ...options import RpcBackendOptions, seconds
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...rights import SAFE_RULE, Rights
from ...transport.certificates import Credentials
from ...transport.connection import Connection
from .bounds import Bounds
from .busy_poll import MOMENT, LoopPoll
from .call_events import CallObservers
from .call_tracing import CallTracer
from .counters import Counters
from .host import cores
from .lifetime import Lifetime, loop_has_ended
from .observing import Observer
from .pool import NoThread, ThreadPool
from .shares import Shares, threads_in_all
from .steps import Steps
from .tally import Tally
from .tasks import Tasks
from .transfer_events import TransferObservers


class Waits(Protocol):
    """Waits of users that are no calls, as at one worker's side of a queue."""

    def end_waits(self, why: Callable[[str], WorkerClosed]) -> list[str]:
        """This worker leaves: end the waits of its program, and not those of its handlers.

        why: makes the error of each wait. Returns descriptions of the ended waits. On the loop.
        """


class Leftover(Protocol):
    """What other workers may still fetch from a worker that leaves. On the loop."""

    def part(self) -> None:
        """This worker takes nothing new any more."""

    def left(self) -> str:
        """What is still to be fetched, for people; empty for nothing."""


class Engine:
    """Loop, threads, options, own record, counters and state of one worker.

    It is made on the worker's loop as soon as the worker's record is known. Any thread may read its attributes. Each
    method says which threads may call it.

    pool: threads for handlers that may block. background: threads for long work of the runtime itself; handlers, which
    may block all threads of the pool, must not hold up the answers that they wait for. connections: all connections,
    also those in their handshake, because a forked child closes its copies. shares: each caller's share of the pool's
    threads. rights: which functions this worker runs for which callers. safe: whether the worker reads no pickles
    (option ``serialization``). kept: objects at which consumers wait, and their tasks; otherwise the garbage collector
    could take a waiting task. waits: of its program and its handlers, beside calls. leftovers: what a worker that
    drains waits for, beside calls; on the loop. poll: keeps the loop awake for a
    moment after each message; None without the option ``busy_wait``. bounds: only tests replace them. observers: see
    each message of the worker. Links read the tuple without a lock, so it is replaced as a whole. call_observers: see
    each step of each call, transfer_observers each transfer by a channel; both are replaced in the same way. tally:
    what metrics count; None without them. tracer: makes the spans of calls; None: traces are off. numbers: of group
    calls, calls with retries, batches and recordings. began: ``time.monotonic()`` seconds.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        options: RpcBackendOptions,
        record: WorkerRecord,
        steps: Steps,
        *,
        prepare: Callable[[], object],
        credentials: Credentials | None = None,
        on_handler_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """On the worker's loop.

        prepare: called first in each thread of the pools, to set its context variables. credentials: for TLS on TCP
        connections; None without TLS. on_handler_error: called with each error of a handler after it was sent as an
        answer, in any thread.
        """
        self.lifetime = lifetime
        self.name: str = lifetime.name
        self.options = options
        self.safe: bool = options.serialization == "safe"
        # Safe mode runs only named functions.
        self.rights: Rights = Rights(SAFE_RULE if self.safe and options.allow is None else options.allow)
        self.record = record
        self.id: int = record.id  # in the group: the rank, if it replaces no lost member
        self.credentials = credentials
        self.steps = steps
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.thread: int = threading.get_ident()
        self.default_timeout: float = options.rpc_timeout
        self.bounds: Bounds = Bounds()
        self.counters: Counters = Counters()
        self.tasks: Tasks = Tasks(self.loop)
        self.began: float = time.monotonic()
        self.kept: set[object] = set()
        self.waits: weakref.WeakSet[Waits] = weakref.WeakSet()  # on the loop
        self.leftovers: set[Leftover] = set()
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.on_handler_error = on_handler_error
        self.observers: tuple[Observer, ...] = ()  # links call them in this order
        self.call_observers: CallObservers = ()
        self.transfer_observers: TransferObservers = ()
        self.tally: Tally | None = None
        self.tracer: CallTracer | None = None
        self.observing: AbstractContextManager[Any] = Lock()  # held while that tuple is replaced
        self.numbers: itertools.count[int] = itertools.count(1)
        # On one core busy polling would delay the other end.
        busy = options.busy_wait if cores() >= 2 else 0.0
        threads = options.num_worker_threads
        self.pool: ThreadPool = ThreadPool(self.name, threads_in_all(threads), prepare=prepare, busy=busy)
        self.shares: Shares = Shares(self.pool, threads)
        self.poll: LoopPoll | None = LoopPoll(self.loop, min(busy, MOMENT), self.pool.is_active) if busy else None
        self.background: ThreadPool = ThreadPool(f"{self.name}-background", 2, prepare=prepare)

    @property
    def info(self) -> WorkerInfo:
        """Name and id."""
        return self.record.info

    @property
    def closed(self) -> bool:
        """Whether the worker makes and serves no calls any more."""
        return self.lifetime.closed

    @property
    def on_loop(self) -> bool:
        """Whether the calling code runs on the worker's loop: it may await, and must not block."""
        return asyncio._get_running_loop() is self.loop

    def timeout(self, value: float, default: float | None = None) -> float:
        """Seconds for one call: the default if the value is negative. RpcUsageError if it is no duration.

        default: seconds; None for the worker's own.
        """
        try:
            unset = value < 0
        except TypeError:  # no number
            unset = False
        if unset:
            return self.default_timeout if default is None else default
        return seconds(value, "timeout")

    def refuse_on_loop(self, verb: str, instead: str) -> None:
        """Raise WouldBlockLoop if this thread runs the worker's loop, or would have to. Nothing was sent before.

        WorkerClosed if it has run the loop, which is closed.
        """
        if self.on_loop:
            raise WouldBlockLoop(f"{verb} would block the event loop that has to bring the answer; use `{instead}`")
        self.refuse_idle_loop(verb, instead)

    def refuse_idle_loop(self, verb: str, instead: str) -> None:
        """Raise WouldBlockLoop if the worker's loop belongs to this thread and does not run.

        WorkerClosed if it has run the loop, which is closed.
        """
        if threading.get_ident() != self.thread:
            return
        if self.loop.is_closed():
            raise loop_has_ended(f"worker {self.name!r}")
        if not self.loop.is_running():  # another thread may run it now
            raise WouldBlockLoop(
                f"{verb} would never end: the loop of worker {self.name!r} is this thread's, and does not run now; "
                f"run `{instead}` on it, as `loop.run_until_complete(...)` does, or let the worker have a loop and a "
                "thread of its own (option dedicated_loop)"
            )

    def why_late(self, late: float) -> str:
        """The last sentence of an error: why a thread, and not the loop, ended a call so many seconds after its
        deadline. Any thread.
        """
        loop = f"The event loop of worker {self.name!r}, which takes the answers,"
        if not self.loop.is_running():
            return (
                f"{loop} does not run: keep it running while threads make calls, or let the worker have a loop and a "
                "thread of its own (option dedicated_loop)."
            )
        return f"{loop} has not come to it for {late:.2g} s: something blocks it, or it has too much to do."

    # --- handing work over, from any thread ---------------------------------------------------------------------------

    def call_on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the loop, in one of its next turns. Does nothing once the loop is closed.

        It runs with an empty context: in that turn calls of other workers may arrive.
        """
        try:
            if asyncio._get_running_loop() is self.loop:  # another thread than its maker may run it
                self.loop.call_soon(function, *args, context=Context())
            else:
                self.loop.call_soon_threadsafe(function, *args, context=Context())
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def run_on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the loop: at once if this thread runs the loop, or made it while no thread runs it;
        otherwise in one of its next turns.
        """
        if asyncio._get_running_loop() is self.loop or (
            threading.get_ident() == self.thread and not self.loop.is_running()
        ):
            function(*args)
        else:
            self.call_on_loop(function, *args)

    def in_background(self, function: Callable[..., None], *args: object) -> None:
        """Run a long function in a background thread. Does nothing once the worker is closing."""
        try:
            self.background.submit(function, *args)
        except NoThread:  # a late loop is better than a lost step
            self.call_on_loop(function, *args)
        except WorkerClosed:
            return

    def in_forked_child(self) -> None:
        """In a forked child: the threads of the pools do not go on there."""
        self.pool.in_forked_child()
        self.background.in_forked_child()

    # --- the end, on the loop, or on any thread once the loop is closed -----------------------------------------------

    async def close(self, patience: float) -> int:
        """End tasks and threads, and wait for busy ones.

        Returns how many handler threads still run. patience: seconds to wait for them.
        """
        try:
            await self.tasks.end(self.bounds.tasks)
        finally:  # also where the loop is closed, and nothing can be awaited
            if self.tracer is not None:
                self.tracer.close()
        self.background.close(0.0)
        try:
            return await self.steps.run(partial(self._end_threads, time.monotonic() + patience))
        except Overloaded:  # no thread to wait in: they end without a wait
            return self._end_threads(0.0)

    def _end_threads(self, until: float) -> int:
        left = self.pool.close(max(0.0, until - time.monotonic()))
        self.background.close(max(0.0, until - time.monotonic()))
        return left
