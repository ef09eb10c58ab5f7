"""Where a batch of calls (`batching`) is run: in the pool, or as a task."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

from ... import foreign
from ...errors import WorkerClosed
from ..calls.batching import Batch
from ..engine.current import current_call, current_worker
from ..gradients.contexts import current_autograd

if TYPE_CHECKING:
    from ..worker import Worker


def run_batch(worker: Worker, batch: Batch | None) -> None:
    """Run a full batch; nothing for none. From the pool, or from a timer on the loop."""
    if batch is None:
        return
    if batch.is_async:
        worker.call_on_loop(_start, worker, batch)
    elif worker.pool.is_pool_thread():
        _context_of(worker, batch).run(batch.run)
    else:
        worker.pool.submit(_context_of(worker, batch).run, batch.run)


def _start(worker: Worker, batch: Batch) -> None:
    task = worker.tasks.spawn(_run(batch), context=_context_of(worker, batch))
    # A task that is cancelled before its first step never gets to tell its callers.
    error = WorkerClosed(f"worker {worker.name!r} shut down before the batch was run")
    task.add_done_callback(lambda _: batch.abort(error))


async def _run(batch: Batch) -> None:
    try:
        await batch.run_async()
    except (SystemExit, KeyboardInterrupt) as error:  # its callers have it; from a task it would end the loop
        if foreign.is_interrupt(error):
            raise


def _context_of(worker: Worker, batch: Batch) -> contextvars.Context:
    """A batch serves many calls: none of them is the current one, but the worker is, and their autograd context if all
    are of one."""
    scope = contextvars.copy_context()
    scope.run(current_call.set, None)
    within = {getattr(token, "autograd", None) for token in batch.tokens()}
    scope.run(current_autograd.set, within.pop() if len(within) == 1 else None)
    scope.run(current_worker.set, worker)
    return scope
