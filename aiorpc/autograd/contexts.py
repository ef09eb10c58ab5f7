"""Autograd contexts: opening and leaving them, and the verbs of one.

Leaving a context tells every worker that took part, and waits for them, for a few seconds at most: a worker that does
not answer forgets the context when it learns that we are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..runtime.current import current_call, deadline, registry
from ..runtime.gradients import current_autograd
from ..runtime.worker import Worker
from .parts import ask
from .passes import Pass

Tensor = torch.Tensor

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
        one = make_pass(int(self), roots, retain_graph)
        registry.get().pool.submit(one.start)
        return one.done

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
        for calls in self._leave():
            for call in calls:
                with contextlib.suppress(RpcError):
                    call.wait()

    async def __aenter__(self) -> Context:
        return self._open(registry.get())

    async def __aexit__(self, *exc_info: object) -> None:
        for calls in self._leave():
            await asyncio.gather(*calls, return_exceptions=True)

    def _leave(self) -> Iterator[list[Future[list[int]]]]:
        """It has ended: here, and on all workers that know of it. Yields calls to wait for; their answers name others
        to tell."""
        current_autograd.reset(self._token)
        worker = self._worker
        limit = time.monotonic() + LEAVE_PATIENCE
        told = {worker.id}
        todo = {peer.record.id for peer in worker.gradients.leave(self._id) if peer.record is not None} - told
        while todo and not worker.closed and time.monotonic() < limit:
            told |= todo
            calls = [ask(worker, worker_id, forget, self._id, until=limit) for worker_id in todo]
            yield calls
            # Whoever did not answer is gone, or forgets when it learns that we are.
            answers = [call.value() for call in calls if call.done() and call.exception() is None]
            todo = {other for answer in answers for other in answer} - told


async def forget(context_id: int) -> list[int]:
    """Handler: a context has ended. Which workers it is known to that this one knows of."""
    call = current_call.get()
    assert call is not None, "only called by workers"
    return [peer.record.id for peer in call.worker.gradients.leave(context_id) if peer.record is not None]


def make_pass(context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> Pass:
    """A pass that has not started; any thread. Raises RpcUsageError for roots, or a context, that cannot be."""
    worker = registry.get()
    worker.check_open()
    if isinstance(context_id, bool) or not isinstance(context_id, int):
        raise RpcUsageError(f"a context is named by its id, an int, not {context_id!r:.80}")
    limit = worker.default_timeout or None
    if current_call.get() is not None:
        left = deadline()
        limit = left if limit is None or (left is not None and left < limit) else limit
    until = None if limit is None else time.monotonic() + limit
    return Pass(worker, worker.gradients.get(context_id), roots, retain_graph, until)
