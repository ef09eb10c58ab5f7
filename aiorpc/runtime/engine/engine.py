"""The engine of a worker: everything that all parts of the worker run on, and that needs none of these parts."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Protocol

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
from .counters import Counters
from .host import cores
from .lifetime import Lifetime, loop_has_ended
from .observing import Observer
from .pool import NoThread, ThreadPool
from .shares import Shares, threads_in_all
from .steps import Steps
from .tasks import Tasks


class Waits(Protocol):
    """What users wait for that is no call, as at one worker's side of a queue."""

    def end_waits(self, why: Callable[[str], WorkerClosed]) -> list[str]:
        """This worker leaves: end what its program waits for, and not what its handlers wait for.

        why: the error, for each. Returns what has ended, for people. On the loop.
        """


class Engine:
    """Loop, threads, options, own record, counters and state of one worker.

    It is made on the worker's loop as soon as the worker's record is known, and imports none of the rooms above it. Any
    thread may read its attributes. Each method says which threads may call it.

    pool: threads for handlers that may block. background: threads for work of the runtime itself that would hold up the
    loop for too long. They are apart from the pool because handlers may block all threads of the pool, and must not
    hold up the answers that they wait for.
    connections: all connections that exist, including those in their handshake, because a forked child has to close
    its copies of all of them.
    shares: which threads of the pool the calls of each caller have.
    rights: what this worker runs for whom.
    safe: whether the worker reads no pickles (option ``serialization``).
    kept: what consumers wait at, and tasks of theirs. A loop itself keeps none, and whoever brings what they wait for
    holds it weakly: the garbage collector would take a task that nobody else holds in the midst of its wait.
    waits: of its program and its handlers, beside calls.
    poll: what keeps the loop awake for a moment after each message; None if nothing does (option ``busy_wait``).
    bounds: replaced as a whole, by tests alone.
    observers: who is shown each message of the worker. Links read the tuple without a lock, so it is replaced as a
    whole and never changed. call_observers: the same of those that are shown each step of each call.
    numbers: what group calls, calls with retries and batches have their numbers from.
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
        """To be called on the worker's loop.

        prepare: called first in each thread of the pools, to set its context variables. credentials: what TLS uses on
        TCP connections; None if they are plain. on_handler_error: called with each error of a handler after that was
        sent as an answer, in any thread.
        """
        self.lifetime = lifetime
        self.name: str = lifetime.name
        self.options = options
        self.safe: bool = options.serialization == "safe"
        # Where nothing is unpickled, nothing is run either that nobody has named.
        self.rights: Rights = Rights(SAFE_RULE if self.safe and options.allow is None else options.allow)
        self.record = record
        self.id: int = record.id  # its number in the group: the rank, if it is no replacement
        self.credentials = credentials
        self.steps = steps
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.thread: int = threading.get_ident()
        self.default_timeout: float = options.rpc_timeout
        self.bounds: Bounds = Bounds()
        self.counters: Counters = Counters()
        self.tasks: Tasks = Tasks(self.loop)
        self.kept: set[object] = set()
        self.waits: weakref.WeakSet[Waits] = weakref.WeakSet()  # on the loop
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.on_handler_error = on_handler_error
        self.observers: tuple[Observer, ...] = ()  # links ask them in this order
        self.call_observers: CallObservers = ()
        self.observing = Lock()  # for changes of that tuple
        self.numbers: itertools.count[int] = itertools.count(1)
        # A lone core is left to whoever has to answer.
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
        """Whether the calling code runs on the worker's loop, right now: it may await, and must not block."""
        return asyncio._get_running_loop() is self.loop

    def timeout(self, value: float, default: float | None = None) -> float:
        """Seconds for one call: those by default if the value is negative. RpcUsageError if it is no duration.

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
        """Raise WouldBlockLoop if this thread runs the worker's loop, or would have to; nothing has been sent then.

        WorkerClosed if it has run the loop, which is closed.
        """
        if self.on_loop:
            raise WouldBlockLoop(f"{verb} would block the event loop that has to bring the answer; use `{instead}`")
        self.refuse_idle_loop(verb, instead)

    def refuse_idle_loop(self, verb: str, instead: str) -> None:
        """Raise WouldBlockLoop if this thread would have to run the worker's loop, and does not.

        WorkerClosed if it has run the loop, which is closed.
        """
        if threading.get_ident() != self.thread:
            return
        if self.loop.is_closed():
            raise loop_has_ended(f"worker {self.name!r}")
        if not self.loop.is_running():  # another thread may have taken it over
            raise WouldBlockLoop(
                f"{verb} would never end: the loop of worker {self.name!r} is this thread's, and does not run now; "
                f"run `{instead}` on it, as `loop.run_until_complete(...)` does, or let the worker have a loop and a "
                "thread of its own (option dedicated_loop)"
            )

    def why_late(self, late: float) -> str:
        """Why a thread says that the time of a call was up, so many seconds after it was, and not the loop. Any thread.

        For an error, which ends with it.
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
        """Run something on the loop, in one of its next turns. Once the loop is closed, nothing happens.

        Not with the context variables of whoever asks: what arrives in that turn may be a call of somebody else.
        """
        try:
            if asyncio._get_running_loop() is self.loop:  # any thread may run it, also another one than has made it
                self.loop.call_soon(function, *args, context=Context())
            else:
                self.loop.call_soon_threadsafe(function, *args, context=Context())
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def run_on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Run something on the loop: at once if this thread runs it, or has made it and nobody runs it now; else in one
        of its next turns.
        """
        if asyncio._get_running_loop() is self.loop or (
            threading.get_ident() == self.thread and not self.loop.is_running()
        ):
            function(*args)
        else:
            self.call_on_loop(function, *args)

    def in_background(self, function: Callable[..., None], *args: object) -> None:
        """Run something that takes long in a background thread. Once the worker is closing, nothing happens."""
        try:
            self.background.submit(function, *args)
        except NoThread:  # the loop is late meanwhile, but whoever waits for this does not wait for ever
            self.call_on_loop(function, *args)
        except WorkerClosed:
            return

    def in_forked_child(self) -> None:
        """In a forked child: the threads of the pools do not go on there."""
        self.pool.in_forked_child()
        self.background.in_forked_child()

    # --- the end, on the loop, or anywhere once that is closed --------------------------------------------------------

    async def close(self, patience: float) -> int:
        """End tasks and threads, and wait for those that are at work.

        Returns how many handler threads are left to themselves. patience: how many seconds these are waited for.
        """
        await self.tasks.end(self.bounds.tasks)
        self.background.close(0.0)
        try:
            return await self.steps.run(partial(self._end_threads, time.monotonic() + patience))
        except Overloaded:  # there is no thread to wait for them in: they end all the same
            return self._end_threads(0.0)

    def _end_threads(self, until: float) -> int:
        left = self.pool.close(max(0.0, until - time.monotonic()))
        self.background.close(max(0.0, until - time.monotonic()))
        return left
