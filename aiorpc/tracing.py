"""The trace context of calls (W3C Trace Context): what OpenTelemetry's propagators and others put in and take out.

    with tracing.using(TraceContext.from_headers(carrier)):
        await rpc.call("worker1", work)

    def work():  # on worker1
        context = tracing.current()  # the same; what it calls takes it along

A call without a context costs nothing, and has no byte of it on the wire but for a nil.
"""

from __future__ import annotations

from .protocol.trace_context import TraceContext
from .runtime.calls.tracing import current, using

__all__ = ["TraceContext", "current", "using"]


def __dir__() -> list[str]:
    return __all__
