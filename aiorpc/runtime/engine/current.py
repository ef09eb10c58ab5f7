"""Which worker and which call the running code belongs to, and which workers live in this process.

The registry is the one thing that this process knows about all of its workers; everything else belongs to one worker.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ...errors import NotInitialized, RpcCancelled, RpcUsageError
from ...protocol.identity import WorkerInfo

if TYPE_CHECKING:
    from ..worker import Worker

logger = logging.getLogger("aiorpc")


class CallContext:
    """One call that is being served. Readable from the handler's thread or task; written by the loop."""

    __slots__ = (
        "arrival",
        "autograd",
        "call_id",
        "caller",
        "cancelled",
        "creates",
        "credits",
        "deadline",
        "function",
        "landing",
        "on_cancel",
        "replied",
        "started",
        "system",
        "trace",
        "worker",
    )

    def __init__(
        self, worker: Worker, caller: WorkerInfo, call_id: int, function: str, deadline: float | None, trace: int
    ) -> None:
        self.worker = worker
        self.caller = caller
        self.call_id = call_id
        self.function = function
        self.deadline = deadline  # absolute, time.monotonic() seconds
        self.trace = trace
        self.started = time.monotonic()
        self.cancelled = False
        self.replied = False
        self.system = False
        self.landing: Any = None  # where those of its arguments arrive that lie on devices
        self.arrival: Any = None  # of the value that the handler is a method of: the handler's streams wait for it
        self.autograd: int | None = None  # the id of the autograd context that the call was made in
        self.creates: Any = None  # ids of the reference whose value the result becomes
        self.on_cancel: Any = None  # called on the loop when the caller gives up
        self.credits: Any = None  # a stream's: how many items may be sent


current_call: ContextVar[CallContext | None] = ContextVar("aiorpc_call", default=None)
current_worker: ContextVar[Worker | None] = ContextVar("aiorpc_worker", default=None)


class Registry:
    """The workers that live in this process."""

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._hooked = False
        self._lock = threading.Lock()
        self._only: Worker | None = None

    def add(self, worker: Worker) -> None:
        """From now on the worker can be the current one."""
        with self._lock:
            if not self._hooked:
                self._hooked = True
                os.register_at_fork(after_in_child=self._after_fork)
                atexit.register(self._at_exit)
            self._workers.add(worker)
            self._update()

    def remove(self, worker: Worker) -> None:
        """The worker has shut down."""
        with self._lock:
            self._workers.discard(worker)
            self._update()

    def workers(self) -> list[Worker]:
        """All live workers of the process."""
        return list(self._workers)

    def get(self) -> Worker:
        """The worker that module-level verbs act on. NotInitialized if there is none, or several and no context."""
        if self._only is not None:
            return self._only
        call = current_call.get()
        if call is not None:
            return call.worker
        worker = current_worker.get()
        if worker is not None and not worker.closed:
            return worker
        workers = self.workers()
        if not workers:
            raise NotInitialized(
                "RPC has not been initialized. Call init_rpc() or enter `async with aiorpc.init(...)` first."
            )
        names = ", ".join(sorted(worker.name for worker in workers))
        raise NotInitialized(
            f"this process has several workers ({names}) and nothing says which one is meant; use worker.call(...), "
            "or run inside its `async with` block or one of its handlers"
        )

    def _update(self) -> None:
        workers = list(self._workers)
        self._only = workers[0] if len(workers) == 1 else None

    def _after_fork(self) -> None:
        # Only this thread lives on in the child: locks held by others stay held, so take none of them.
        self._lock = threading.Lock()
        for worker in list(self._workers):
            worker.after_fork_in_child()
        # Nothing to end here at exit, and a worker of the child's own may start; verbs still find `_only`, and raise.
        self._workers.clear()

    def _at_exit(self) -> None:
        for worker in self.workers():
            worker.close_at_exit()


registry = Registry()


def _serving() -> CallContext:
    call = current_call.get()
    if call is None:
        raise RpcUsageError("only a handler that serves a call can ask this")
    return call


def caller() -> WorkerInfo:
    """In a handler: which worker made this call.

    RpcUsageError elsewhere, and in a `batched` function, which serves many calls.
    """
    return _serving().caller


def cancelled() -> bool:
    """In a handler: whether the caller has given up (cancelled, timed out or died); its result will be dropped.

    RpcUsageError elsewhere, and in a `batched` function, which serves many calls.
    """
    call = _serving()
    return call.cancelled or (call.deadline is not None and time.monotonic() > call.deadline)


def check_cancelled() -> None:
    """In a handler: raise RpcCancelled if the caller has given up.

    RpcUsageError elsewhere, and in a `batched` function, which serves many calls.
    """
    if cancelled():
        raise RpcCancelled(f"the caller of {_serving().function} has given up")


def deadline() -> float | None:
    """In a handler: seconds left until the caller gives up, None if it never does.

    RpcUsageError elsewhere, and in a `batched` function, which serves many calls.
    """
    limit = _serving().deadline
    return None if limit is None else max(0.0, limit - time.monotonic())
