"""Switching traces on: for a worker whose options or environment ask for them, or for one that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import RpcUsageError
from ..options import RpcBackendOptions
from ..runtime.engine.call_tracing import CallTracer
from ..runtime.engine.engine import Engine

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def wants_traces(options: RpcBackendOptions, environment: Mapping[str, str]) -> bool:
    """Whether a worker is to be traced. RpcUsageError for a value of AIORPC_TRACES that is neither 0 nor 1."""
    if options.traces is not None:
        return options.traces
    said = environment.get("AIORPC_TRACES") or "0"
    if said not in ("0", "1"):
        raise RpcUsageError(f"AIORPC_TRACES must be 0 or 1, not {said!r:.80}")
    return said == "1"


def check_traces() -> None:
    """Raise RpcUsageError if OpenTelemetry is not installed."""
    try:
        from . import traces  # noqa: F401
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise RpcUsageError(
            "traces (traces=True, AIORPC_TRACES=1 or aiorpc.opentelemetry) need OpenTelemetry, which is not installed: "
            "pip install 'aiorpc-torch[otel]'"
        ) from None


def make_tracer(engine: Engine, provider: TracerProvider | None = None) -> CallTracer:
    """The tracer of a worker's calls. provider: None takes the global one. RpcUsageError as of `check_traces`."""
    check_traces()
    from .traces import CallSpans

    return CallSpans(engine, provider)
