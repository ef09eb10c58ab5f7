"""Autograd contexts: opening and leaving them, and the verbs of one.

Leaving a context tells every worker that took part, and waits for them, for a few seconds at most: a worker that does
not answer forgets the context when it learns that we are gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..runtime.current import current_call, deadline, registry
from ..runtime.gradients import current_autograd
from ..runtime.worker import Worker
from .passes import Pass, ask

Tensor = torch.Tensor
T = TypeVar("T")

# Seconds for telling all workers that a context was left.
LEAVE_PATIENCE = 5.0


class Context(int):
    """An autograd context: its id, which is what other functions take, with the verbs of the one who opened it.

    Travels as a plain int.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def backward(self, roots: Sequence[Tensor], retain_graph: bool = False) -> Future[None]:
        """Start a backward pass; to be awaited, or waited for. See `aiorpc.autograd.backward`."""
        return start_backward(int(self), roots, retain_graph)

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients at this worker, by leaf. See `aiorpc.autograd.get_gradients`."""
        return registry.get().gradients.get(int(self)).gradients()


class context:
    """``with context() as context_id``, or ``async with context() as ctx``: what is inside is recorded.

    Calls made inside, and what their handlers call, belong to the context; several may be open at once, and never mix.
    Leaving it drops the graph and the gradients on all workers. On the worker's loop only ``async with`` is possible.
    """

    def __init__(self) -> None:
        self._worker: Worker
        self._id = 0
        self._token: contextvars.Token[int | None]

    def _open(self, worker: Worker) -> Context:
        worker.check_open()
        self._worker = worker
        self._id = worker.gradients.open().id
        self._token = current_autograd.set(self._id)
        return Context(self._id)

    def __enter__(self) -> Context:
        worker = registry.get()
        worker.refuse_on_loop("`with autograd.context()`", "async with autograd.context() as ctx")
        return self._open(worker)

    def __exit__(self, *exc_info: object) -> None:
        current_autograd.reset(self._token)
        if self._must_tell():
            on_loop(self._worker, leave(self._worker, self._id), "leaving an autograd context").wait()

    async def __aenter__(self) -> Context:
        return self._open(registry.get())

    async def __aexit__(self, *exc_info: object) -> None:
        current_autograd.reset(self._token)
        if self._must_tell():
            await on_loop(self._worker, leave(self._worker, self._id), "leaving an autograd context")

    def _must_tell(self) -> bool:
        """Whether others know of it; if not, it has ended here and now."""
        known = self._worker.gradients.find(self._id)
        if known is not None and known.known and not self._worker.closed:
            return True
        self._worker.gradients.leave(self._id)
        return False


async def leave(worker: Worker, context_id: int) -> None:
    """The context has ended: here, and on all workers that know of it."""
    limit = time.monotonic() + LEAVE_PATIENCE
    told = {worker.id}
    todo = {peer.record.id for peer in worker.gradients.leave(context_id) if peer.record is not None} - told
    while todo and time.monotonic() < limit:
        told |= todo
        calls = [_tell(worker, worker_id, context_id, limit) for worker_id in todo]
        answers = await asyncio.gather(*calls)
        todo = {other for answer in answers for other in answer} - told


async def _tell(worker: Worker, worker_id: int, context_id: int, limit: float) -> Iterable[int]:
    """Who else that worker knows to have taken part."""
    try:
        others: list[int] = await ask(worker, worker_id, forget, context_id, until=limit)
    except RpcError:  # it is gone, or forgets when it learns that we are
        return ()
    return others


async def forget(context_id: int) -> list[int]:
    """Handler: a context has ended. Which workers it is known to that this one knows of."""
    call = current_call.get()
    assert call is not None, "only called by workers"
    return [peer.record.id for peer in call.worker.gradients.leave(context_id) if peer.record is not None]


def start_backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> Future[None]:
    """Start a pass; any thread. Raises RpcUsageError for roots, or a context, that cannot be."""
    worker = registry.get()
    worker.check_open()
    if isinstance(context_id, bool) or not isinstance(context_id, int):
        raise RpcUsageError(f"a context is named by its id, an int, not {context_id!r:.80}")
    limit = worker.default_timeout or None
    if current_call.get() is not None:
        left = deadline()
        limit = left if limit is None or (left is not None and left < limit) else limit
    until = None if limit is None else time.monotonic() + limit
    one = Pass(worker, worker.gradients.get(context_id), roots, retain_graph, until)
    return on_loop(worker, one.run(), f"the backward pass of context {int(context_id)}")


def on_loop(worker: Worker, coroutine: Coroutine[Any, Any, T], what: str) -> Future[T]:
    """A Future of a coroutine that runs on the worker's loop, in no call and no context. Any thread."""
    future: Future[T] = Future()
    future._loop, future._executor, future._what = worker.loop, worker.pool, what

    async def run() -> None:
        try:
            value = await coroutine
        except asyncio.CancelledError:
            future._settle(None, RpcError(f"{what} was broken off: worker {worker.name!r} shuts down"))
            raise
        except BaseException as error:
            future._settle(None, error)
        else:
            future._settle(value)

    worker.run_on_loop(lambda: worker.tasks.spawn(run()))
    return future
