"""The trace context of calls made here: that of `using`, or else of the served call.

Connections and threads keep the context in which they were made, so a plain context variable of a program would reach
its handlers. So `using` notes the served call of its code, and holds for that call alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ...errors import RpcUsageError
from ...protocol.trace_context import TraceContext, valid
from .current import current_call

# The caller and number of the served call, None without one; and the context of `using` there.
_used: ContextVar[tuple[tuple[int, int] | None, TraceContext | None] | None] = ContextVar("aiorpc_trace", default=None)


def current() -> TraceContext | None:
    """The trace context of a call made here; None if there is none.

    In a handler it is that of the served call, unless the code is inside of `using`. In a `batched` function, which
    serves many calls, there is none.
    """
    call = current_call.get()
    used = _used.get()
    if used is not None and used[0] == (None if call is None else (call.caller_id, call.call_id)):
        return used[1]
    return None if call is None else call.trace


@contextmanager
def using(context: TraceContext | None) -> Iterator[None]:
    """Inside of ``with using(context):`` calls take that context along; None: they take none.

    It holds for the task or the thread, and for tasks that begin inside. Calls of all kinds take it: retries, streams,
    calls of groups and those that create references. Do not `yield` inside of it in an asynchronous generator, which
    continues in another context.

    Raised here: RpcUsageError for a context that W3C's rules forbid.
    """
    if context is not None and valid(context) != context:
        raise RpcUsageError(f"{context!r:.700} is no trace context of W3C: see aiorpc.tracing.TraceContext")
    call = current_call.get()
    token = _used.set((None if call is None else (call.caller_id, call.call_id), context))
    try:
        yield
    finally:
        _used.reset(token)
