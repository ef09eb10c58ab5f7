"""Traces of OpenTelemetry for the calls of a worker that runs.

    with trace_calls(rpc.current(), provider):
        await rpc.call("worker1", work)

The option ``traces=True`` does the same with the global provider, from the beginning to the end of the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import RpcUsageError
from .observability.switching import make_tracer
from .worker import Worker

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from .runtime.engine.engine import Engine

__all__ = ["Tracing", "trace_calls"]


class Tracing:
    """The traces of a worker, until `close` or the end of a ``with`` block. Any thread."""

    def __init__(self, engine: Engine, provider: TracerProvider | None) -> None:
        self._engine = engine
        self._tracer = make_tracer(engine, provider)
        with engine.observing:
            if engine.tracer is not None:
                raise RpcUsageError(f"worker {engine.name!r} is traced already; one tracer sees each call")
            engine.tracer = self._tracer

    def close(self) -> None:
        """Make no more spans. Calls under way end theirs. Idempotent."""
        with self._engine.observing:
            if self._engine.tracer is self._tracer:
                self._engine.tracer = None
        self._tracer.close()

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def trace_calls(worker: Worker, tracer_provider: TracerProvider | None = None) -> Tracing:
    """Make a span for each call of a worker from now on, those that it makes and those that it serves. Any thread.

    tracer_provider: gets the spans, such as a ``TracerProvider`` of the SDK; None: the global one.

    Raised here: WorkerClosed if the worker has not joined; RpcUsageError if it is traced already, as by the option
    ``traces``, and if OpenTelemetry is not installed (``pip install 'aiorpc-torch[otel]'``).
    """
    return Tracing(worker._node.engine, tracer_provider)


def __dir__() -> list[str]:
    return __all__
