"""Which worker and which call the running code belongs to, and which workers live in this process.

The registry is the only state that the process's workers share.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar, cast

from ...callbacks import served
from ...channels.landing import Arrival, Landing
from ...errors import NotInitialized, RpcCancelled, RpcUsageError
from ...interrupts import follow
from ...locks import Lock
from ...logs import logger
from ...protocol.frames import Buffer, Frame
from ...protocol.identity import WorkerInfo, WorkerRecord
from ...protocol.messages import Call, Values
from ...protocol.reference_messages import ReferenceId
from ...protocol.trace_context import TraceContext, valid
from ..engine.call_tracing import ServedSpan
from ..engine.engine import Engine
from ..engine.forked import end_child
from ..engine.lifetime import Lifetime
from ..engine.pool import ThreadPool
from .functions import Handler
from .permits import Permits

# Seconds for handlers to end when the process exits.
_LAST_SECONDS = 0.5
# In place of the arguments of a call after they were taken.
NO_VALUES = Values([])
_LEAST = 0.001  # seconds, in place of 0, which means no limit


class CommonHome(Protocol):
    """A running worker (`aiorpc.runtime.node.Node`), for every package."""

    @property
    def engine(self) -> Engine: ...

    def in_forked_child(self) -> None:
        """In a forked child of the worker's process: release the parent's resources."""

    def at_exit(self) -> None:
        """The interpreter exits although the worker has not shut down."""

    def at_end(self) -> None:
        """The interpreter exits, after all other exit functions: end the thread of the loop."""

    def loop_closed(self) -> None:
        """The loop was closed before the worker shut down: take the worker down without it."""


N = TypeVar("N", bound=CommonHome)


class Cancellable(Protocol):
    """The credit of a stream: its producer waits there before each item. On the loop. count: the credit left."""

    @property
    def count(self) -> int: ...

    def add(self, count: int) -> None: ...

    def stop(self) -> None: ...


class ServedCall:
    """One served call, from its message to its answer; see `protocol.states.SERVED`.

    The handler's thread or task may read it. The loop, or the thread that read its message, writes it, with two
    exceptions: the answering thread writes `replied`; the thread that prepares or runs the handler writes the
    arguments, `begun`, `on_cancel` and `credits`.

    node: the worker that serves it. caller, caller_id, record: the worker that made it, its id, and its proved record.
    permits: the rights of that worker; None: all. function: its name, "?" until it was found. handler: found by the
    name. names, arguments, segments, once: as in its message; the runner takes the arguments and drops them here, which
    frees their memory. size: bytes of the message on arrival. credit: how many items of a stream the caller wants
    first; None if it is no stream. credits: of a running generator. deadline, started: ``time.monotonic()`` seconds.
    origin: the first call of the chain. trace: its trace context; None for none. autograd: the autograd context of the
    call. creates: the reference whose value the result becomes. batch: the number of its batch, 0 for none. begun:
    whether the handler was called, as far as the caller has to know. cancelled: whether the caller has given up, and
    the handler is to stop. unwaited: why no caller waits for the outcome; empty if one does. replied: whether it was
    answered, or goes on although its caller is gone: the rest of it is the handler's own. landing: for arguments on
    devices. arrival: of the value whose method the handler is; the handler's streams wait for it. on_cancel: called on
    the loop when the caller gives up. task: runs the coroutine or asynchronous generator. thread: the id of the
    handler's thread, 0 for none. told, woken: whether that thread knows that the caller has given up, and whether it
    was woken for that. span: its own, if calls are traced.
    """

    autograd: int | None
    credit: int | None
    names: list[str] | None
    once: Sequence[int] | None
    woken: bool
    told: bool
    arguments: Values

    __slots__ = (
        "arguments",
        "arrival",
        "autograd",
        "batch",
        "begun",
        "call_id",
        "caller",
        "caller_id",
        "cancelled",
        "creates",
        "credit",
        "credits",
        "deadline",
        "function",
        "handler",
        "landing",
        "names",
        "node",
        "on_cancel",
        "once",
        "origin",
        "permits",
        "record",
        "replied",
        "segments",
        "size",
        "span",
        "started",
        "system",
        "task",
        "thread",
        "told",
        "trace",
        "unwaited",
        "woken",
    )

    def __init__(
        self, node: CommonHome, caller: WorkerInfo, frame: Frame, message: Call, permits: Permits | None = None
    ) -> None:
        self.names = message.names
        self.autograd = message.autograd
        self.credit = message.credit
        self.once = message.once
        self.arguments = message.payload
        remaining = message.remaining
        self.node: CommonHome = node
        self.caller: WorkerInfo = caller
        self.caller_id: int = caller.id
        self.record: WorkerRecord | None = None
        self.permits: Permits | None = permits
        self.call_id: int = frame.call_id
        self.segments: Sequence[Buffer] = frame.segments
        self.size: int = 0
        self.started: float = time.monotonic()
        self.deadline: float | None = None if remaining is None else self.started + remaining
        self.trace: TraceContext | None = None if message.trace is None else valid(message.trace)
        self.origin: tuple[int, int] = message.origin or (caller.id, frame.call_id)
        self.function: str = "?"
        self.handler: Handler | None = None
        self.begun: bool = False
        self.cancelled: bool = False
        self.unwaited: str = ""
        self.replied: bool = False
        self.system: bool = False
        self.landing: Landing | None = None
        self.arrival: Arrival | None = None
        self.creates: ReferenceId | None = None
        self.on_cancel: Callable[[], object] | None = None
        self.credits: Cancellable | None = None
        self.task: asyncio.Task[None] | None = None
        self.thread: int = 0
        self.batch: int = 0
        self.told = self.woken = False
        self.span: ServedSpan | None = None

    @property
    def over(self) -> bool:
        """Whether its caller has given up. After the answer this stays False unless it was cancelled before."""
        if self.cancelled or self.replied:
            return self.cancelled
        return self.deadline is not None and time.monotonic() > self.deadline

    def enter_wait(self, wake: Callable[[], object]) -> None:
        """See `callbacks.Served`. Does nothing in threads that the handler has started: the caller does not cancel
        these."""
        if self.thread != threading.get_ident():
            return

        def tell() -> None:
            if not self.told:
                self.told = self.woken = True
                wake()

        self.on_cancel = tell
        if self.woken:  # cancelled between two waits
            wake()
        elif self.cancelled:  # read after `on_cancel` was set: one of the two threads sees the other
            tell()

    def exit_wait(self) -> str:
        """See `callbacks.Served`. A text only once, as a task is cancelled once: waits of its clean-up go on."""
        if self.thread != threading.get_ident():
            return ""
        self.on_cancel = None
        woken, self.woken = self.woken or (self.cancelled and not self.told), False
        self.told = self.told or woken
        return f"the caller of {self.function} has given up" if woken else ""

    def drop_arguments(self) -> None:
        """Drop the arguments, which were taken or are not wanted, and with them their shared memory."""
        self.arguments = NO_VALUES
        if type(self.segments) is list:
            self.segments.clear()  # other holders of the message hold this list
        self.segments = ()


current_call: ContextVar[ServedCall | None] = cast("ContextVar[ServedCall | None]", served)
current_node: ContextVar[CommonHome | None] = ContextVar("aiorpc_node", default=None)


class Registry(Generic[N]):
    """The workers of this process. only: the worker for verbs, if it is certain; otherwise call `get`.

    It is certain in a process that has had no other worker. Otherwise running code may belong to an earlier worker: a
    handler that outlived it, or work that such a handler began. That code must not act for the present worker.

    The interpreter's switch interval belongs to the process: it is the shortest that a worker asks for, and the earlier
    value after the last worker's end.

    A closed loop sends no event, so methods beside `only` look for closed loops, and take their workers down. The error
    of `get` names such a worker's end.

    hosted: the `Worker` of `aiorpc.sync`, from before it joins until its thread has ended. servers: what workers share
    that serves others, such as their metrics, by its address; `sharing` is held while it changes.
    """

    def __init__(self) -> None:
        # Sets are replaced, not changed: other threads may be iterating over them.
        self._nodes: weakref.WeakSet[N] = weakref.WeakSet()
        self._pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()  # also of workers that left with running handlers
        self._forks_told = self._exit_told = False  # whether the two are registered
        self._lock = Lock()
        self.only: N | None = None
        self._lone: N | None = None  # the only worker alive
        self._several = False  # whether other workers, or their pools, are left
        self.hosted: Any = None
        self.servers: dict[str, Any] = {}
        self.sharing: Any = Lock()
        self._ended: Lifetime | None = None  # of the last worker, if it ended by itself
        self._left: Lifetime | None = None  # of the last worker that ended, for errors
        self._found = self._given = 0.0  # switch intervals in seconds: the program's, and ours

    def add(self, node: N) -> None:
        """Add a worker, which may become the current one."""
        self.take_down_closed()
        with self._lock:
            self._ended = self._left = None
            if not self._forks_told:
                self._forks_told = True
                os.register_at_fork(after_in_child=self._after_fork)
            if not self._exit_told:
                self._exit_told = True
                atexit.unregister(self._at_exit)  # a forked child inherits it, but not from multiprocessing
                atexit.register(self._at_exit)
            self._several = bool(self._pools)
            self._nodes = weakref.WeakSet([*self._nodes, node])
            self._pools = weakref.WeakSet([*self._pools, node.engine.pool])
            self._update()

    def remove(self, node: N) -> None:
        """The worker has shut down."""
        with self._lock:
            if node in self._nodes:
                self._left = node.engine.lifetime
                if node.engine.lifetime.loop_ended or node.engine.lifetime.broken:
                    self._ended = node.engine.lifetime
            self._nodes = weakref.WeakSet(each for each in self._nodes if each is not node)
            self._update()

    def forget(self, lifetime: Lifetime | None = None) -> None:
        """The program knows that this worker, whose loop has ended, is gone. None: any worker."""
        if lifetime is None or lifetime is self._ended:
            self._ended = None

    def host(self, worker: object) -> Any:
        """Set the hosted worker and return None; if there is one already, return that."""
        with self._lock:
            if self.hosted is None:
                self.hosted = worker
                return None
            return self.hosted

    def unhost(self, worker: object) -> None:
        """The thread of the hosted worker has ended."""
        with self._lock:
            if self.hosted is worker:
                self.hosted = None

    def nodes(self) -> list[N]:
        """All live workers of the process."""
        self.take_down_closed()
        return list(self._nodes)

    def take_down_closed(self) -> None:
        """Take workers with closed loops down. It may wait for their store for a short time. Any thread."""
        for node in list(self._nodes):
            if node.engine.loop.is_closed():
                node.loop_closed()
                self.remove(node)

    def get(self) -> N:
        """The worker for module-level verbs. NotInitialized if there is none, or several and no context.

        WorkerClosed if there was one whose loop has ended.
        """
        only = self.only
        if only is not None and (not only.engine.loop.is_closed() or only.engine.closed):
            return only
        call = current_call.get()
        if call is not None and not call.node.engine.lifetime.forked:
            return call.node  # type: ignore[return-value]  # all nodes are of one class
        node: N | None = current_node.get()  # type: ignore[assignment]  # as above
        if node is not None and not node.engine.closed and not node.engine.loop.is_closed():
            return node
        if node is not None and node.engine.pool.is_pool_thread() and not node.engine.lifetime.forked:
            return node
        lone = self._lone
        if lone is not None and (not lone.engine.loop.is_closed() or lone.engine.closed):
            return lone
        nodes = self.nodes()
        if len(nodes) == 1:  # the others had closed loops
            return nodes[0]
        if not nodes:
            ended = self._ended
            if ended is not None:
                raise ended.why_closed()
            since = "" if self._left is None else f" since worker {self._left.name!r} has shut down"
            raise NotInitialized(
                f"RPC has not been initialized{since}. Call init_rpc() or enter `async with aiorpc.init(...)` first."
            )
        names = ", ".join(sorted(node.engine.name for node in nodes))
        raise NotInitialized(
            f"this process has several workers ({names}) and nothing says which one is meant; use worker.call(...), "
            "or run inside its `async with` block or one of its handlers"
        )

    def _update(self) -> None:
        nodes = list(self._nodes)
        follow(bool(nodes))
        logger.be_of(node.engine.name for node in nodes)
        self._lone = nodes[0] if len(nodes) == 1 else None
        self.only = None if self._several else self._lone
        now = sys.getswitchinterval()
        if now != self._given:  # the program has set it
            self._found = now
        wanted = [node.engine.options.switch_interval for node in nodes]
        self._given = min([self._found, *filter(None, wanted)])
        if self._given != now:
            sys.setswitchinterval(self._given)
            self._given = sys.getswitchinterval()  # rounded to microseconds

    def _after_fork(self) -> None:
        # Only this thread lives on in the child: locks of other threads stay locked.
        self._lock, self.sharing = Lock(), Lock()
        self.servers = {}
        self.hosted = None  # its thread did not survive
        for node in list(self._nodes):
            node.in_forked_child()
        call = current_call.get()
        if call is not None and call.node.engine.thread == threading.get_ident():
            # A coroutine handler has forked: the loop must not go on here when it awaits.
            call.node.engine.loop.call_soon(end_child, where(call))
        # Nothing ends at exit, and the child may start a worker. Verbs still find `_lone`, and raise.
        self._nodes, self._pools = weakref.WeakSet(), weakref.WeakSet()
        self._several = False
        self._exit_told = False

    def _at_exit(self) -> None:
        for node in list(self._nodes):
            node.at_exit()
        limit = time.monotonic() + _LAST_SECONDS
        for pool in list(self._pools):
            pool.end_jobs(max(0.0, limit - time.monotonic()))

    def at_end(self) -> None:
        """The interpreter ends, and waits for no thread. Registered by `aiorpc._exiting`."""
        for node in list(self._nodes):
            node.at_end()


registry: Registry[CommonHome] = Registry()


def where(call: ServedCall) -> str:
    """Function, worker and caller, for messages."""
    return f"{call.function} on worker {call.node.engine.name!r}, called by {call.caller.name!r},"


def _serving() -> ServedCall:
    call = current_call.get()
    if call is None:
        raise RpcUsageError("only a handler that serves a call can ask this")
    return call


def is_nested(node: CommonHome) -> bool:
    """Whether this code belongs to an unanswered call that this worker serves."""
    call = current_call.get()
    return call is not None and not call.replied and call.node is node


def within_call(engine: Engine, timeout: float) -> float:
    """The shorter of a timeout and the time left of the served call, in seconds; 0 for no limit.

    For waits in handlers that are no calls: an item that came after the deadline would be lost with the result.
    """
    call = current_call.get()
    if call is None or call.replied or call.node.engine is not engine or call.deadline is None:
        return timeout
    rest = max(call.deadline - time.monotonic(), _LEAST)
    return min(timeout, rest) if timeout else rest


def permits() -> Permits | None:
    """In a handler that calls a function of its arguments: the caller's rights; None for all."""
    call = current_call.get()
    return None if call is None else call.permits


def caller() -> WorkerInfo:
    """In a handler: which worker made this call.

    Raised here: RpcUsageError outside of a handler, and in a `batched` function, which serves many calls.
    """
    return _serving().caller


def cancelled() -> bool:
    """In a handler: whether the caller has given up: it cancelled the call, timed out, or died.

    The result is dropped then. Only that of `remote` stays if the caller has died or left: other holders of the
    reference get it.

    Raised here: RpcUsageError outside of a handler, and in a `batched` function, which serves many calls.
    """
    call = _serving()
    call.told = call.told or call.over
    return call.over or bool(call.unwaited)


def check_cancelled() -> None:
    """In a handler: raise RpcCancelled if the caller has given up.

    Raised here: RpcCancelled; RpcUsageError outside of a handler, and in a `batched` function, which serves many calls.
    """
    if cancelled():
        raise RpcCancelled(f"the caller of {_serving().function} has given up")


def deadline() -> float | None:
    """In a handler: seconds left until the caller gives up; None if it has no deadline, or has its answer already.

    Raised here: RpcUsageError outside of a handler, and in a `batched` function, which serves many calls.
    """
    call = _serving()
    limit = None if call.replied else call.deadline
    return None if limit is None else max(0.0, limit - time.monotonic())
