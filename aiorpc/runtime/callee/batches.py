"""Running batches of calls (`batching`) one after the other, in the pool or as tasks."""

from __future__ import annotations

import asyncio
import contextvars
from functools import partial

from torch import is_grad_enabled, set_grad_enabled

from ...errors import WorkerClosed
from ...interrupts import is_interrupt
from ...protocol.states import CallOutcome
from ..calls.batching import Batch
from ..calls.current import CommonHome, ServedCall, current_call, current_node
from ..gradients.contexts import current_autograd


class NotRun(WorkerClosed):
    """A batch was not run because its worker has shut down."""


def run_batch(node: CommonHome, batch: Batch | None) -> None:
    """Run a due batch at its turn; do nothing for None. In the pool, or on the loop."""
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
        pass  # its callers have got it, and this thread goes on
    finally:
        if is_grad_enabled() is not with_gradients:  # torch keeps it for the thread, not for the context
            set_grad_enabled(with_gradients)
        _ended(node, batch)


def _start(node: CommonHome, batch: Batch) -> None:
    task = node.engine.tasks.spawn(_run(batch), context=_context_of(node, batch))
    task.add_done_callback(partial(_task_ended, node, batch))


def _task_ended(node: CommonHome, batch: Batch, _: object) -> None:
    # A task cancelled before its first step has not told its callers.
    batch.abort(_not_run(node))
    _ended(node, batch)


async def _run(batch: Batch) -> None:
    try:
        await batch.run_async()
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # Its callers have got it. In a task the first two would end the loop, and the last would be lost.
        if is_interrupt(error):
            raise


def _ended(node: CommonHome, batch: Batch) -> None:
    """Run the batch that waited for the end of this one."""
    if batch.span is not None:
        if batch.error is not None:
            batch.span.failed(batch.error)
        batch.span.ended(CallOutcome.VALUE if batch.error is None else CallOutcome.ERROR)
    following = batch.end()
    while following is not None and node.engine.lifetime.closed:
        following.abort(_not_run(node))
        following = following.end() if following.begin() else None
    if following is not None and following.is_async:
        run_batch(node, following)
    elif following is not None:
        # A job of its own: it waits its turn for a thread, and the stack does not grow.
        node.engine.pool.submit(run_batch, node, following)


def _not_run(node: CommonHome) -> NotRun:
    return NotRun(f"worker {node.engine.name!r} shut down before the batch was run")


def _context_of(node: CommonHome, batch: Batch) -> contextvars.Context:
    """The context in which a batch runs.

    It has no current call, because a batch serves many. The worker is current, and the autograd context if all calls
    have the same.
    """
    scope = contextvars.copy_context()
    scope.run(current_call.set, None)
    within = {getattr(token, "autograd", None) for token in batch.tokens()}
    scope.run(current_autograd.set, within.pop() if len(within) == 1 else None)
    scope.run(current_node.set, node)
    if node.engine.tracer is not None:
        calls = [each for each in batch.tokens() if isinstance(each, ServedCall)]
        spans = [each.span for each in calls if each.span is not None]
        batch.span = node.engine.tracer.batch(calls[0].function, spans) if spans else None
        if batch.span is not None:
            scope.run(batch.span.enter)
    return scope
