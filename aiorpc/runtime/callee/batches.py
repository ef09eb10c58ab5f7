"""Where a batch of calls (`batching`) is run: in the pool, or as a task."""

from __future__ import annotations

import contextvars

from ... import foreign
from ...errors import WorkerClosed
from ..calls.batching import Batch
from ..calls.current import CommonHome, current_call, current_node
from ..gradients.contexts import current_autograd


def run_batch(node: CommonHome, batch: Batch | None) -> None:
    """Run a batch that is due; do nothing for None. Called in the pool, or by a timer on the loop."""
    if batch is None:
        return
    if batch.is_async:
        node.engine.call_on_loop(_start, node, batch)
    elif node.engine.pool.is_pool_thread():
        _context_of(node, batch).run(batch.run)
    else:
        node.engine.pool.submit(_context_of(node, batch).run, batch.run)


def _start(node: CommonHome, batch: Batch) -> None:
    task = node.engine.tasks.spawn(_run(batch), context=_context_of(node, batch))
    # A task that is cancelled before its first step never gets to tell its callers.
    error = WorkerClosed(f"worker {node.engine.name!r} shut down before the batch was run")
    task.add_done_callback(lambda _: batch.abort(error))


async def _run(batch: Batch) -> None:
    try:
        await batch.run_async()
    except (SystemExit, KeyboardInterrupt) as error:  # its callers have got it; raised in a task it would end the loop
        if foreign.is_interrupt(error):
            raise


def _context_of(node: CommonHome, batch: Batch) -> contextvars.Context:
    """The context in which a batch runs.

    It serves many calls, so none of them is the current one. The worker is current, and so is the autograd context of
    the calls if they all have the same.
    """
    scope = contextvars.copy_context()
    scope.run(current_call.set, None)
    within = {getattr(token, "autograd", None) for token in batch.tokens()}
    scope.run(current_autograd.set, within.pop() if len(within) == 1 else None)
    scope.run(current_node.set, node)
    return scope
