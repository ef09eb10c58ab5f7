"""Which worker and which call the running code belongs to, and which workers live in this process.

The registry is the one thing that this process knows about all of its workers; everything else belongs to one worker.
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
from ..engine.engine import Engine
from ..engine.forked import end_child
from ..engine.lifetime import Lifetime
from ..engine.pool import ThreadPool
from .functions import Handler
from .permits import Permits

# So many seconds the handlers of this process have to end once it exits.
_LAST_SECONDS = 0.5
# Stands in place of the arguments of a call once they were taken.
NO_VALUES = Values([])
_LEAST = 0.001  # seconds that are left where none are: 0 is no limit


class CommonHome(Protocol):
    """A running worker (`aiorpc.runtime.node.Node`), as far as every room may know it."""

    @property
    def engine(self) -> Engine: ...

    def in_forked_child(self) -> None:
        """This process is a child that the worker's process has forked: let go of what is the parent's."""

    def at_exit(self) -> None:
        """The interpreter exits although the worker has not shut down."""

    def at_end(self) -> None:
        """The interpreter exits, and all else that runs then is through: end the thread of the loop."""

    def loop_closed(self) -> None:
        """Its loop was closed although the worker has not shut down: take it down without the loop."""


N = TypeVar("N", bound=CommonHome)


class Cancellable(Protocol):
    """The credit of a stream, at which its producer waits before each item. On the loop. count: what is left of it."""

    @property
    def count(self) -> int: ...

    def add(self, count: int) -> None: ...

    def stop(self) -> None: ...


class ServedCall:
    """One call that is being served, from its message to its answer; see `protocol.states.SERVED`.

    The thread or task of the handler may read it. The loop writes it, or the thread that has read its message, with two
    exceptions: the one that answers writes `replied`; the one that prepares or runs the handler writes the arguments,
    `begun`, `on_cancel` and `credits`.

    node: the worker that serves it. caller, caller_id, record: the worker that made it, the id in its record, and that
    record, as it was proved. permits: what that worker may have run; None: everything. function: its name, "?" until it
    was found. handler: what is run, once it was found. names, arguments, segments, once: as in its message; the runner
    takes the arguments and drops them here, so that nothing keeps memory that only they hold. size: bytes that it had
    as it came. credit: how many items of a stream the caller wants first; None if it is no stream. credits: what a
    generator that runs waits at. deadline, started: ``time.monotonic()`` seconds. origin: the first call of the chain.
    trace: its trace context; None for none. autograd: the autograd context that it was made in. creates: the reference
    whose value the result becomes. batch: the number of the batch in which it runs, 0 for none.
    begun: whether the handler was called, as far as the caller has to know. cancelled: whether the caller has given up,
    and the handler is to stop. unwaited: why no one waits for the outcome; empty as long as its caller does. replied:
    whether it was answered, or goes on although its caller is gone: what is left of it is the handler's own.
    landing: where those of its arguments arrive that lie on devices. arrival: of the value that the handler is a method
    of; the handler's streams wait for it. on_cancel: called on the loop when the caller gives up. task: what runs a
    coroutine or an asynchronous generator. thread: the id of the thread that runs the handler, 0 for none. told, woken:
    whether that thread has heard that the caller has given up, and whether it was woken for that.
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

    @property
    def over(self) -> bool:
        """Whether its caller has given up. Never once it was answered, as what goes on then is the handler's own."""
        if self.cancelled or self.replied:
            return self.cancelled
        return self.deadline is not None and time.monotonic() > self.deadline

    def enter_wait(self, wake: Callable[[], object]) -> None:
        """See `callbacks.Served`. Nothing in a thread that the handler has started: that is none of its caller's."""
        if self.thread != threading.get_ident():
            return

        def tell() -> None:
            if not self.told:
                self.told = self.woken = True
                wake()

        self.on_cancel = tell
        if self.woken:  # by then it waited no more
            wake()
        elif self.cancelled:  # looked at behind that: who cancels it looks for it, or this does
            tell()

    def exit_wait(self) -> str:
        """See `callbacks.Served`. Once, as the task of a coroutine is cancelled once: what it waits for to clean up
        goes on."""
        if self.thread != threading.get_ident():
            return ""
        self.on_cancel = None
        woken, self.woken = self.woken or (self.cancelled and not self.told), False
        self.told = self.told or woken
        return f"the caller of {self.function} has given up" if woken else ""

    def drop_arguments(self) -> None:
        """Let go of the arguments, which were taken or are not wanted: shared memory that only they hold goes back."""
        self.arguments = NO_VALUES
        if type(self.segments) is list:
            self.segments.clear()  # what still holds the message holds this list
        self.segments = ()


current_call: ContextVar[ServedCall | None] = cast("ContextVar[ServedCall | None]", served)
current_node: ContextVar[CommonHome | None] = ContextVar("aiorpc_node", default=None)


class Registry(Generic[N]):
    """The workers that live in this process. only: the worker that verbs act on, if that is sure; else ask `get`.

    It is sure in a process that has had no other worker. Else what runs may belong to one that has gone: a handler that
    went on after its worker had left, or what such a one has begun. It must not act for the worker that is there now.

    How long a thread may keep the interpreter from others is a matter of the process, too: the shortest interval that
    any of its workers asks for, and what it was before when the last one has gone.

    A loop does not say that it was closed, so methods that use more than `only` look for that: such a worker is none.
    A verb that finds no other one says what has become of it (`get`).

    hosted: the `Worker` that `aiorpc.sync` runs, from before it joins until its thread has ended.
    """

    def __init__(self) -> None:
        # New sets, and not changed ones: other threads may be looking through the old ones just now, in Python.
        self._nodes: weakref.WeakSet[N] = weakref.WeakSet()
        self._pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()  # also of workers that left with handlers at work
        self._forks_told = self._exit_told = False  # whether `_after_fork` and `_at_exit` are registered
        self._lock = Lock()
        self.only: N | None = None
        self._lone: N | None = None  # the one that lives now, if there is one and no more
        self._several = False  # whether anything is left of others that the process has, or has had
        self.hosted: Any = None
        self._ended: Lifetime | None = None  # of the last worker, if it ended by itself and it was not has for
        self._left: Lifetime | None = None  # of the worker that has gone last, for errors
        self._found = self._given = 0.0  # switch intervals: as it was found, and as it was set

    def add(self, node: N) -> None:
        """From now on the worker can be the current one."""
        self.take_down_closed()
        with self._lock:
            self._ended = self._left = None
            if not self._forks_told:
                self._forks_told = True
                os.register_at_fork(after_in_child=self._after_fork)
            if not self._exit_told:
                self._exit_told = True
                atexit.unregister(self._at_exit)  # a forked child has it from its parent, but for multiprocessing's
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
        """The program has asked for the worker whose loop has ended, as for one that has shut down. None: for any."""
        if lifetime is None or lifetime is self._ended:
            self._ended = None

    def host(self, worker: object) -> Any:
        """Make that the hosted worker if there is none, and return None; else return the one that there is."""
        with self._lock:
            if self.hosted is None:
                self.hosted = worker
                return None
            return self.hosted

    def unhost(self, worker: object) -> None:
        """The thread of that worker has ended."""
        with self._lock:
            if self.hosted is worker:
                self.hosted = None

    def nodes(self) -> list[N]:
        """All live workers of the process."""
        self.take_down_closed()
        return list(self._nodes)

    def take_down_closed(self) -> None:
        """Take workers down whose loop was closed; it may wait for their store for a short time. Any thread."""
        for node in list(self._nodes):
            if node.engine.loop.is_closed():
                node.loop_closed()
                self.remove(node)

    def get(self) -> N:
        """The worker that module-level verbs act on. NotInitialized if there is none, or several and no context.

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
        if len(nodes) == 1:  # the others were none
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
        if now != self._given:  # it was not set here, or the program has set it since
            self._found = now
        wanted = [node.engine.options.switch_interval for node in nodes]
        self._given = min([self._found, *filter(None, wanted)])
        if self._given != now:
            sys.setswitchinterval(self._given)
            self._given = sys.getswitchinterval()  # in whole microseconds

    def _after_fork(self) -> None:
        # Only this thread lives on in the child: locks held by others stay held, so take none of them.
        self._lock = Lock()
        self.hosted = None  # its thread is the parent's
        for node in list(self._nodes):
            node.in_forked_child()
        call = current_call.get()
        if call is not None and call.node.engine.thread == threading.get_ident():
            # The fork of a coroutine that is a handler: the loop must not go on here when that awaits something.
            call.node.engine.loop.call_soon(end_child, where(call))
        # Nothing to end at exit, and a worker of the child's own may start; verbs still find the lone one, and raise.
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
        """The interpreter is about to end, and waits for no thread."""
        for node in list(self._nodes):
            node.at_end()


registry: Registry[CommonHome] = Registry()
# Now, and so behind what programs register: until then workers refuse calls in good order.
atexit.register(registry.at_end)


def where(call: ServedCall) -> str:
    """What serves that call, for messages."""
    return f"{call.function} on worker {call.node.engine.name!r}, called by {call.caller.name!r},"


def _serving() -> ServedCall:
    call = current_call.get()
    if call is None:
        raise RpcUsageError("only a handler that serves a call can ask this")
    return call


def is_nested(node: CommonHome) -> bool:
    """Whether this code belongs to a call that this worker serves and has not answered."""
    call = current_call.get()
    return call is not None and not call.replied and call.node is node


def within_call(engine: Engine, timeout: float) -> float:
    """Of so many seconds, 0 for no limit, those that the call still has that is served here, if these are fewer.

    For a wait in a handler that is no call, which would have the rest by itself: what came behind the deadline would be
    lost with the result.
    """
    call = current_call.get()
    if call is None or call.replied or call.node.engine is not engine or call.deadline is None:
        return timeout
    rest = max(call.deadline - time.monotonic(), _LEAST)
    return min(timeout, rest) if timeout else rest


def permits() -> Permits | None:
    """In a handler that calls what it was given: what its caller may have run; None for everything."""
    call = current_call.get()
    return None if call is None else call.permits


def caller() -> WorkerInfo:
    """In a handler: which worker made this call.

    Raised here: RpcUsageError outside of a handler, and in a `batched` function, which serves many calls.
    """
    return _serving().caller


def cancelled() -> bool:
    """In a handler: whether the caller has given up, that is cancelled the call, timed out, or died.

    The result is dropped then, but for that of `remote` whose caller has died or left: it goes to those that hold the
    reference.

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
