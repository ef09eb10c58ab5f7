"""Where a batch of calls (`batching`) is run, in the pool or as a task, and that the next one follows it."""

from __future__ import annotations

import asyncio
import contextvars
from functools import partial

from torch import is_grad_enabled, set_grad_enabled

from ...errors import WorkerClosed
from ...interrupts import is_interrupt
from ..calls.batching import Batch
from ..calls.current import CommonHome, current_call, current_node
from ..gradients.contexts import current_autograd


class NotRun(WorkerClosed):
    """A batch of a worker that has shut down was not run, and will not be: its callers are told so."""


def run_batch(node: CommonHome, batch: Batch | None) -> None:
    """Run a batch that is due, as soon as it is its turn; do nothing for None. In the pool, or on the loop."""
    if batch is None or not batch.begin():
        return
    if node.engine.lifetime.closed:
        batch.abort(_not_run(node))
        _ended(node, batch)
    elif batch.is_async:
        node.engine.call_on_loop(_start, node, batch)
    elif node.engine.pool.is_pool_thread():
        _run_here(node, batch)
    else:
        node.engine.pool.submit(_run_here, node, batch)


def _run_here(node: CommonHome, batch: Batch) -> None:
    with_gradients = is_grad_enabled()
    try:
        _context_of(node, batch).run(batch.run)
    except (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
        pass  # its callers have got it, and it is no request to end this thread
    finally:
        if is_grad_enabled() is not with_gradients:  # as of its context: torch keeps that for the thread
            set_grad_enabled(with_gradients)
        _ended(node, batch)


def _start(node: CommonHome, batch: Batch) -> None:
    task = node.engine.tasks.spawn(_run(batch), context=_context_of(node, batch))
    task.add_done_callback(partial(_task_ended, node, batch))


def _task_ended(node: CommonHome, batch: Batch, _: object) -> None:
    # A task that is cancelled before its first step never gets to tell its callers.
    batch.abort(_not_run(node))
    _ended(node, batch)


async def _run(batch: Batch) -> None:
    try:
        await batch.run_async()
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # Its callers have got it. Raised in a task the first two would end the loop, and the last would not be heard.
        if is_interrupt(error):
            raise


def _ended(node: CommonHome, batch: Batch) -> None:
    """Have the batch run that has waited for the end of this one."""
    following = batch.end()
    while following is not None and node.engine.lifetime.closed:
        following.abort(_not_run(node))
        following = following.end() if following.begin() else None
    if following is not None and following.is_async:
        run_batch(node, following)
    elif following is not None:
        # As a job of its own, not within this one: behind what waits for a thread, and not ever deeper in the stack.
        node.engine.pool.submit(run_batch, node, following)


def _not_run(node: CommonHome) -> NotRun:
    return NotRun(f"worker {node.engine.name!r} shut down before the batch was run")


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
