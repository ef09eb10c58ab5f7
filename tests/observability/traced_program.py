"""A worker of three, traced as AIORPC_TRACES=1 says: ``python -m tests.observability.traced_program RANK STORE``.

Its spans go to the receiver that OTEL_EXPORTER_OTLP_ENDPOINT names. Worker a makes calls, the others serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import aiorpc as rpc

NAMES = "abc"


async def work(value: int) -> int:
    """Calls worker c."""
    return await rpc.call("c", double, value)


def double(value: int) -> int:
    """Is called by worker b."""
    return 2 * value


async def count() -> AsyncIterator[int]:
    """Two items."""
    yield 1
    yield 2


def fail() -> None:
    """Raises."""
    raise ValueError("wanted")


async def put() -> None:
    """Puts an item into the queue of worker a."""
    await rpc.queue("samples", owner="a").put("item")


async def calls() -> None:
    """What worker a does."""
    with trace.get_tracer("program").start_as_current_span("step"):
        assert await rpc.call("b", work, 21) == 42
        assert [item async for item in rpc.stream("b", count)] == [1, 2]
        with contextlib.suppress(ValueError):
            await rpc.call("c", fail)
    await rpc.group(["b", "c"]).call(double, 1)
    samples: rpc.Queue[str] = rpc.Queue("samples")
    await rpc.call("b", put)
    await samples.get()


async def main(rank: int, store: str) -> None:
    """Join, and leave with the others."""
    provider = TracerProvider(resource=Resource({"service.name": f"worker-{NAMES[rank]}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    async with rpc.init(NAMES[rank], rank=rank, world_size=len(NAMES), init_method=f"file://{store}"):
        if rank == 0:
            await calls()
    provider.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
