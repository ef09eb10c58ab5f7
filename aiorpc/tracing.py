"""The trace context of calls (W3C Trace Context), for OpenTelemetry's propagators and others.

    with tracing.using(TraceContext.from_headers(carrier)):
        await rpc.call("worker1", work)

    def work():  # on worker1
        context = tracing.current()  # the same; what it calls takes it along

A call without a context costs nothing, and has only a nil on the wire.
"""

from __future__ import annotations

from .protocol.trace_context import TraceContext
from .runtime.calls.tracing import current, using

__all__ = ["TraceContext", "current", "using"]


def __dir__() -> list[str]:
    return __all__
