"""Which trace context a call that is made here takes along: that of `using`, else that of the call that is served.

A context variable of a program would reach its handlers, too, as connections and threads keep the context that they
were made in. So `using` notes which call its code belongs to, and holds for that one alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ...errors import RpcUsageError
from ...protocol.trace_context import TraceContext, valid
from .current import current_call

# The caller and the number of the call that is served, None for none; and the context of `using` there.
_used: ContextVar[tuple[tuple[int, int] | None, TraceContext | None] | None] = ContextVar("aiorpc_trace", default=None)


def current() -> TraceContext | None:
    """The context that a call takes along which is made here; None if there is none.

    In a handler it is that with which the call has come, unless the code is inside of `using`. In a `batched` function,
    which serves many calls, there is none.
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
    calls of groups and those that create references. It is for synchronous blocks and coroutines; in an asynchronous
    generator do not `yield` inside of it, since the code that goes on there has another context.

    Raised here: RpcUsageError for a context that is not as W3C has it.
    """
    if context is not None and valid(context) != context:
        raise RpcUsageError(f"{context!r:.700} is no trace context of W3C: see aiorpc.tracing.TraceContext")
    call = current_call.get()
    token = _used.set((None if call is None else (call.caller_id, call.call_id), context))
    try:
        yield
    finally:
        _used.reset(token)
