"""Spans of OpenTelemetry, with its SDK: kinds, names, parents, links and outcomes of calls of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import Overloaded, RpcBackendOptions, RpcTimeout, RpcUsageError, Worker, tracing
from aiorpc.observability import conventions
from aiorpc.opentelemetry import Tracing, trace_calls
from aiorpc.testing import Faults, cluster
from aiorpc.tracing import TraceContext
from tests.runtime.waiting import until

CLIENT, SERVER, INTERNAL = SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL
PRODUCER, CONSUMER = SpanKind.PRODUCER, SpanKind.CONSUMER
HERE = __name__
REMOTE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=x")
UNSAMPLED = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")


class Spans:
    """The spans of traced workers."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def all(self) -> Sequence[ReadableSpan]:
        """Those that have ended."""
        return self.exporter.get_finished_spans()

    def of(self, name: str, kind: SpanKind) -> list[ReadableSpan]:
        """Those of that name and kind. name: for a function of this file without the module."""
        wanted = f"{HERE}/{name}" if name in globals() else name
        return [span for span in self.all() if (span.name, span.kind) == (wanted, kind)]

    async def one(self, name: str, kind: SpanKind) -> ReadableSpan:
        """The only one of that name and kind, once it has ended."""
        return (await self.some(name, kind, 1))[0]

    async def some(self, name: str, kind: SpanKind, count: int) -> list[ReadableSpan]:
        """So many of that name and kind, once they have ended."""
        await until(lambda: len(self.of(name, kind)) >= count)
        found = self.of(name, kind)
        assert len(found) == count
        return found

    async def pair(self, name: str) -> tuple[ReadableSpan, ReadableSpan]:
        """The spans of a call at its caller, and at the worker that served it: the second is a child of the first."""
        made, served = await self.one(name, CLIENT), await self.one(name, SERVER)
        assert parent_of(served) == context_of(made)
        assert served.parent is not None and served.parent.is_remote
        assert times(made)[0] <= times(served)[0] and times(served)[1] <= times(made)[1] + 1_000_000_000
        return made, served


def context_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> set[tuple[int, int]]:
    return {(link.context.trace_id, link.context.span_id) for link in span.links}


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def said(span: ReadableSpan, name: str) -> object:
    """An attribute; None for none."""
    return (span.attributes or {}).get(name)


@pytest.fixture
async def spans(trio: list[Worker]) -> AsyncIterator[Spans]:
    """Of three workers."""
    found = Spans()
    with contextlib.ExitStack() as stack:
        for worker in trio:
            stack.enter_context(trace_calls(worker, found.provider))
        yield found


# --- handlers ---------------------------------------------------------------------------------------------------------


def current() -> tuple[int, int]:
    """The span that the code runs in."""
    found = trace.get_current_span().get_span_context()
    return found.trace_id, found.span_id


def plain() -> tuple[int, int]:
    return current()


async def awaited() -> tuple[int, int]:
    await asyncio.sleep(0)
    return current()


def returns_coroutine() -> Any:
    return awaited()


@rpc.async_execution
def deferred() -> rpc.Future[tuple[int, int]]:
    future: rpc.Future[tuple[int, int]] = rpc.Future()
    future.set_result(current())
    return future


def items() -> Iterator[tuple[int, int]]:
    yield current()
    yield current()


async def async_items() -> AsyncIterator[tuple[int, int]]:
    yield current()
    await asyncio.sleep(0)
    yield current()


async def for_ever() -> None:
    await asyncio.Event().wait()


async def endless() -> AsyncIterator[int]:
    while True:
        yield 1


def fail() -> None:
    raise ValueError("wanted")


async def failing_items() -> AsyncIterator[int]:
    yield 1
    raise ValueError("wanted")


async def nested(to: str) -> tuple[int, int]:
    return await rpc.call(to, awaited)


def nested_blocking(to: str) -> tuple[int, int]:
    return rpc.rpc_sync(to, plain)


class Counter:
    """The value of a reference, or a served object."""

    def where(self) -> tuple[int, int]:
        """The span that it runs in."""
        return current()


@rpc.batched(max_size=2, max_wait=30)
def batch(values: list[int]) -> list[int]:
    return [current()[1] for _ in values]


@rpc.batched(max_size=2, max_wait=30)
async def async_batch(values: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [current()[1] for _ in values]


# --- kinds of calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [plain, awaited, returns_coroutine, deferred])
async def test_a_call_has_two_spans(trio: list[Worker], spans: Spans, handler: Any) -> None:
    """That of the caller is a root here; that of the handler is its child, and current in it."""
    inside = await trio[0].call("worker1", handler)
    made, served = await spans.pair(handler.__name__)
    assert inside == context_of(served) and made.parent is None
    assert said(made, "rpc.system.name") == said(served, "rpc.system.name") == "aiorpc"
    assert said(made, "rpc.method") == said(served, "rpc.method") == made.name == f"{HERE}/{handler.__name__}"
    assert (said(made, "aiorpc.peer"), said(served, "aiorpc.peer")) == ("worker1", "worker0")
    record = trio[1]._node.engine.record
    assert said(made, "network.peer.address") == record.unix_path
    assert made.status.status_code is StatusCode.UNSET and said(made, "rpc.status_code") is None
    scope = made.instrumentation_scope
    assert scope is not None and scope.attributes is not None and scope.schema_url == conventions.SCHEMA_URL
    assert (scope.name, scope.attributes["aiorpc.worker"]) == ("aiorpc", "worker0")
    assert current() == (0, 0)


async def test_the_caller_runs_in_a_span(trio: list[Worker], spans: Spans) -> None:
    """Which is then the parent; and in a task of it."""
    with spans.provider.get_tracer("program").start_as_current_span("step") as step:
        await asyncio.create_task(_call(trio[0], awaited))
    made, _ = await spans.pair("awaited")
    assert parent_of(made) == (step.get_span_context().trace_id, step.get_span_context().span_id)


async def _call(worker: Worker, handler: Any) -> Any:
    return await worker.call("worker1", handler)


async def test_a_context_of_no_span_is_the_parent(trio: list[Worker], spans: Spans) -> None:
    """That of `tracing.using`, with its vendor's state."""
    with tracing.using(REMOTE):
        await trio[0].call("worker1", awaited)
    made, served = await spans.pair("awaited")
    assert made.parent is not None and f"{made.parent.span_id:016x}" in REMOTE.traceparent
    assert served.context is not None and served.context.trace_state.to_header() == REMOTE.tracestate


@pytest.mark.parametrize(("handler", "inner"), [(nested, "awaited"), (nested_blocking, "plain")])
async def test_nested_calls(trio: list[Worker], spans: Spans, handler: Any, inner: str) -> None:
    """The call of a handler is a child of its served call."""
    await trio[0].call("worker1", handler, "worker2")
    _, served = await spans.pair(handler.__name__)
    made, _ = await spans.pair(inner)
    assert parent_of(made) == context_of(served)
    assert said(made, "aiorpc.peer") == "worker2"


@pytest.mark.parametrize("handler", [items, async_items])
async def test_a_stream_is_one_span(trio: list[Worker], spans: Spans, handler: Any) -> None:
    """As long as the stream; it is current at each item, and nowhere in the consumer."""
    inside: list[Any] = []
    async for item in trio[0].stream("worker1", handler):
        assert current() == (0, 0)
        assert not spans.of(handler.__name__, CLIENT) or len(inside) == 1  # it may end with the last item
        inside.append(item)
    _, served = await spans.pair(handler.__name__)
    assert inside == [context_of(served)] * 2


async def test_a_stream_that_its_consumer_ends(trio: list[Worker], spans: Spans) -> None:
    """It is cancelled, which is no error."""
    async with trio[0].stream("worker1", endless) as stream:
        async for _ in stream:
            break
    for span in await spans.pair("endless"):
        assert span.status.status_code is StatusCode.UNSET and said(span, "rpc.status_code") == "cancelled"


async def test_a_stream_that_fails(trio: list[Worker], spans: Spans) -> None:
    """Its error is that of both spans."""
    with pytest.raises(ValueError, match="wanted"):
        async for _ in trio[0].stream("worker1", failing_items):
            pass
    for span in await spans.pair("failing_items"):
        assert said(span, "error.type") == "ValueError"


def make() -> Counter:
    return Counter()


async def test_references(trio: list[Worker], spans: Spans) -> None:
    """The call that makes the value, those of its methods, and its fetches; what counts references has no spans."""
    reference = trio[0].remote("worker1", make)
    inside = await reference.rpc_async().where()
    await spans.pair("make")
    made, served = await spans.one("where", CLIENT), await spans.one("Counter.where", SERVER)
    assert parent_of(served) == context_of(made) and inside == context_of(served)
    await reference
    await spans.pair("to_here")
    del reference
    assert len(spans.all()) == 6


async def test_a_served_object(trio: list[Worker], spans: Spans) -> None:
    """Its method is named after the class where it is served, and after the object where it is called."""
    trio[1].serve("counter", Counter())
    inside = await trio[0].peer("worker1").object("counter").where()
    made, served = await spans.one("counter.where", CLIENT), await spans.one("Counter.where", SERVER)
    assert parent_of(served) == context_of(made) and inside == context_of(served)


async def test_tries_are_one_span(trio: list[Worker], spans: Spans) -> None:
    """Those that have failed are events of it, and the one that is served is its child."""
    with Faults(trio[0]) as faults:
        faults.fail(times=2, error=Overloaded("as if it was"))
        await trio[0].peer("worker1", retries=3, backoff=0.001).call(awaited)
    made, _ = await spans.pair("awaited")
    assert [event.name for event in made.events] == ["aiorpc.retry"] * 2
    event = made.events[0].attributes
    assert event is not None and event["error.type"] == "aiorpc.errors.Overloaded" and event["aiorpc.peer"] == "worker1"
    assert made.status.status_code is StatusCode.UNSET


async def test_tries_that_are_used_up(trio: list[Worker], spans: Spans) -> None:
    """The last error is that of the span."""
    with Faults(trio[0]) as faults:
        faults.fail(times=2, error=Overloaded("as if it was"))
        with pytest.raises(Overloaded):
            await trio[0].peer("worker1", retries=1, backoff=0.001).call(awaited)
    made = await spans.one("awaited", CLIENT)
    assert (said(made, "rpc.status_code"), said(made, "error.type")) == ("refused", "aiorpc.errors.Overloaded")
    assert not spans.of("awaited", SERVER)


async def test_a_call_with_retries_that_is_cancelled(trio: list[Worker], spans: Spans) -> None:
    """Its span ends."""
    call = trio[0].peer("worker1", retries=1).call(for_ever)
    await until(lambda: trio[1].pending_calls())
    call.cancel()
    assert said((await spans.pair("for_ever"))[0], "rpc.status_code") == "cancelled"


async def test_a_group(trio: list[Worker], spans: Spans) -> None:
    """One span at the caller; those of the members are its children, however the call reaches them."""
    for _ in range(2):
        await trio[0].group(["worker1", "worker2"]).call(plain)
    made = await spans.some("plain", CLIENT, 2)
    served = await spans.some("plain", SERVER, 4)
    parents = [parent_of(span) for span in served]
    assert sorted(parents) == sorted([context_of(span) for span in made] * 2)  # type: ignore[type-var]


async def test_a_group_in_a_context_of_autograd(trio: list[Worker], spans: Spans) -> None:
    """Each member gets a message of its own then; it is one span all the same."""
    await trio[0].call("worker0", group_in_context)
    made = await spans.one("plain", CLIENT)
    assert {parent_of(span) for span in await spans.some("plain", SERVER, 2)} == {context_of(made)}


async def group_in_context() -> None:
    async with rpc.autograd.context():
        await rpc.group(["worker1", "worker2"]).call(plain)


async def test_a_member_that_fails(trio: list[Worker], spans: Spans) -> None:
    """It is an event of the group's span, which has no error as long as the call has none."""
    await trio[0].group(["worker1", "worker2"]).call(fail)
    made = await spans.one("fail", CLIENT)
    assert [event.name for event in made.events] == ["aiorpc.member_failed"] * 2
    assert made.status.status_code is StatusCode.UNSET
    assert all(said(each, "error.type") == "ValueError" for each in await spans.some("fail", SERVER, 2))
    with pytest.raises(rpc.errors.GroupError):
        await trio[0].group(["worker1", "worker2"], quorum=2).call(fail)
    assert said((await spans.some("fail", CLIENT, 2))[1], "error.type") == "aiorpc.errors.GroupError"


async def test_references_of_a_group(trio: list[Worker], spans: Spans) -> None:
    """A call of all values is one span, and so is a fetch."""
    references = await trio[0].call("worker0", fetch_group)
    assert references == 2
    made = await spans.one("where", CLIENT)
    assert {parent_of(span) for span in await spans.some("Counter.where", SERVER, 2)} == {context_of(made)}
    made = await spans.one("to_here", CLIENT)
    assert {parent_of(span) for span in await spans.some("to_here", SERVER, 2)} == {context_of(made)}


async def fetch_group() -> int:
    group = rpc.group(["worker1", "worker2"])
    references = group.remote(make)
    await references.rpc_async().where()
    return len(await references)


@pytest.mark.parametrize("handler", [batch, async_batch])
async def test_a_batch_links_its_calls(trio: list[Worker], spans: Spans, handler: Any) -> None:
    """Each call has its spans; the run has one of its own, which is current in the function."""
    inside = await asyncio.gather(*(worker.call("worker2", handler, 1) for worker in trio[:2]))
    name = handler.__name__
    run = await spans.one(name, INTERNAL)
    served = await spans.some(name, SERVER, 2)
    assert links_of(run) == {context_of(span) for span in served} and run.parent is None
    assert set(inside) == {context_of(run)[1]}


@rpc.batched(max_size=1)
def failing_batch(values: list[int]) -> list[int]:
    raise ValueError("wanted")


async def test_a_batch_that_fails(trio: list[Worker], spans: Spans) -> None:
    """Its run and each call of it have the error."""
    with pytest.raises(ValueError, match="wanted"):
        await trio[0].call("worker2", failing_batch, 1)
    for span in (await spans.one("failing_batch", INTERNAL), *await spans.pair("failing_batch")):
        assert said(span, "error.type") == "ValueError" and span.status.status_code is StatusCode.ERROR


# --- queues and published values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item", [1, [object], torch.ones(100_000)], ids=["a number", "pickled", "kept by its producer"]
)
@pytest.mark.parametrize("copy", [True, False])
async def test_an_item_links_its_put(trio: list[Worker], spans: Spans, item: Any, copy: bool) -> None:
    """The consumer's span has a link to that of the producer, through an owner that knows of neither."""
    queue = trio[0].Queue("samples")
    await trio[1].queue("samples", owner="worker0").put(item, copy=copy)
    await trio[2].queue("samples", owner="worker0").get()
    put, get = await spans.one("put samples", PRODUCER), await spans.one("get samples", CONSUMER)
    assert links_of(get) == {context_of(put)} and get.parent is None
    assert said(put, "aiorpc.name") == "samples"
    assert await queue.qsize() == 0
    assert {span.name for span in spans.all()} <= {"put samples", "get samples", "samples.qsize", "ServedQueue.qsize"}


async def test_an_item_with_a_reference(trio: list[Worker], spans: Spans) -> None:
    """It waits unpacked at its producer."""
    queue = trio[0].Queue("samples")
    await trio[1].call("worker1", put_reference)
    await queue.get()
    put, get = await spans.one("put samples", PRODUCER), await spans.one("get samples", CONSUMER)
    assert links_of(get) == {context_of(put)}
    assert parent_of(put) == context_of(await spans.one("put_reference", SERVER))


async def put_reference() -> None:
    await rpc.queue("samples", owner="worker0").put(rpc.RRef(1))


@pytest.mark.parametrize("traced", [0, 1])
@pytest.mark.parametrize("item", [1, torch.ones(100_000)], ids=["small", "kept by its producer"])
async def test_a_queue_of_which_one_end_is_traced(pair: list[Worker], traced: int, item: Any) -> None:
    """The item comes all the same, and with it nothing to link."""
    spans = Spans()
    queue, remote = pair[0].Queue("samples"), pair[1].queue("samples", owner="worker0")
    with trace_calls(pair[traced], spans.provider):
        await remote.put(item, copy=False)
        assert torch.equal(torch.as_tensor(await queue.get()), torch.as_tensor(item))
        await until(spans.all)
    assert [(span.name, len(span.links)) for span in spans.all()] == [(["get samples", "put samples"][traced], 0)]


async def test_several_items_of_one_get(trio: list[Worker], spans: Spans) -> None:
    """A link for each."""
    queue = trio[0].Queue("samples")
    for number in range(3):
        await trio[1].queue("samples", owner="worker0").put(number)
    assert await queue.get_many(3) == [0, 1, 2]
    puts = await spans.some("put samples", PRODUCER, 3)
    assert links_of(await spans.one("get samples", CONSUMER)) == {context_of(span) for span in puts}


async def test_a_get_that_gets_nothing(trio: list[Worker], spans: Spans) -> None:
    """Its time is up, or it is cancelled."""
    queue = trio[0].Queue("samples", timeout=0.01)
    with pytest.raises(RpcTimeout):
        await queue.get()
    assert said(await spans.one("get samples", CONSUMER), "rpc.status_code") == "timeout"
    task = asyncio.ensure_future(trio[1].queue("samples", owner="worker0", timeout=0).get())
    await asyncio.sleep(0)
    task.cancel()
    assert said((await spans.some("get samples", CONSUMER, 2))[1], "rpc.status_code") == "cancelled"


async def test_an_item_that_cannot_be_sent(trio: list[Worker], spans: Spans) -> None:
    """The error of `put` is recorded."""
    queue = trio[0].Queue("samples")
    with pytest.raises(rpc.errors.SerializationError):
        await queue.put(threading.Lock())
    assert said(await spans.one("put samples", PRODUCER), "error.type") == "aiorpc.errors.SerializationError"


async def test_readers_link_the_publication(trio: list[Worker], spans: Spans) -> None:
    """Each taken version has a span, with a link to the one that published it."""
    versions = [worker.subscribe("weights") for worker in trio[1:]]
    await trio[0].publish("weights", {"layer": torch.ones(100_000)})
    for each in versions:
        await anext(each)
        each.close()
    published = await spans.one("publish weights", PRODUCER)
    for span in await spans.some("receive weights", CONSUMER, 2):
        assert links_of(span) == {context_of(published)}


async def test_a_value_that_cannot_be_published(trio: list[Worker], spans: Spans) -> None:
    """The error is recorded."""
    with pytest.raises(rpc.errors.SerializationError):
        await trio[0].publish("weights", threading.Lock())
    assert said(await spans.one("publish weights", PRODUCER), "error.type") == "aiorpc.errors.SerializationError"


# --- outcomes ---------------------------------------------------------------------------------------------------------


async def test_an_error_is_recorded(trio: list[Worker], spans: Spans) -> None:
    """With its class and its text, on both sides."""
    with pytest.raises(ValueError, match="wanted"):
        await trio[0].call("worker1", fail)
    for span in await spans.pair("fail"):
        assert span.status.status_code is StatusCode.ERROR and "wanted" in (span.status.description or "")
        assert (said(span, "rpc.status_code"), said(span, "error.type")) == ("error", "ValueError")
        (event,) = span.events
        assert event.name == "exception" and event.attributes is not None
        assert event.attributes["exception.type"] == "ValueError"


async def test_a_cancelled_call(trio: list[Worker], spans: Spans) -> None:
    """Both spans end, and say so."""
    call = trio[0].call("worker1", for_ever)
    await until(lambda: trio[1].pending_calls())
    call.cancel()
    made, served = await spans.pair("for_ever")
    assert said(made, "rpc.status_code") == said(served, "rpc.status_code") == "cancelled"
    assert (said(made, "error.type"), said(served, "error.type")) == ("aiorpc.errors.RpcCancelled", "cancelled")


async def test_a_call_whose_time_is_up(trio: list[Worker], spans: Spans) -> None:
    """The same."""
    with pytest.raises(RpcTimeout):
        await trio[0].peer("worker1", timeout=0.05).call(for_ever)
    made, served = await spans.pair("for_ever")
    assert said(made, "rpc.status_code") == said(served, "rpc.status_code") == "timeout"
    assert said(made, "error.type") == "aiorpc.errors.RpcTimeout"


async def test_a_call_that_cannot_be_sent(trio: list[Worker], spans: Spans) -> None:
    """It has the span of its caller alone."""
    with pytest.raises(rpc.errors.SerializationError):
        await trio[0].call("worker1", str, threading.Lock())
    made = await spans.one("builtins/str", CLIENT)
    assert (said(made, "rpc.status_code"), said(made, "error.type")) == (
        "refused",
        "aiorpc.errors.SerializationError",
    )


async def test_a_function_that_is_not_there(trio: list[Worker], spans: Spans) -> None:
    """Its name is that of a caller, and so is no name of a span."""
    with pytest.raises(rpc.errors.RpcError):
        await trio[0].peer("worker1").object("nothing").method()
    served = await spans.one("_OTHER", SERVER)
    assert said(served, "rpc.method_original") == "nothing.method"
    assert said(served, "error.type") == "aiorpc.errors.UnknownObject"


async def test_a_lost_worker() -> None:
    """The call ends with that."""
    spans = Spans()
    async with cluster(2) as pair:
        with trace_calls(pair[0], spans.provider):
            call = pair[0].call("worker1", for_ever)
            await until(lambda: pair[1].pending_calls())
            await pair[1]._drop()
            with pytest.raises(rpc.PeerLost):
                await call
            made = await spans.one("for_ever", CLIENT)
    assert (said(made, "rpc.status_code"), said(made, "error.type")) == ("lost", "aiorpc.errors.PeerLost")


# --- sampling, and tracers that fail ----------------------------------------------------------------------------------


async def test_workers_that_were_made_in_a_span() -> None:
    """It is no parent of calls that are made outside of it, although connections and threads keep its context."""
    spans = Spans()
    with spans.provider.get_tracer("program").start_as_current_span("start"):
        workers = cluster(2)
        pair = await workers.__aenter__()
    for worker in pair:
        trace_calls(worker, spans.provider)
    try:
        assert await pair[0].call("worker1", nested_blocking, "worker0")
        made, served = await spans.pair("nested_blocking")
        assert made.parent is None and parent_of((await spans.pair("plain"))[0]) == context_of(served)
    finally:
        await workers.__aexit__(None, None, None)


async def test_an_unsampled_trace_goes_on(trio: list[Worker], spans: Spans) -> None:
    """With the flag 00, through a handler too, and without any span."""
    with tracing.using(UNSAMPLED):
        found = await trio[0].call("worker1", nested, "worker2")
    assert f"{found[0]:032x}" == UNSAMPLED.traceparent[3:35]
    await trio[0].call("worker1", plain)
    await spans.pair("plain")
    assert {span.name for span in spans.all()} == {f"{HERE}/plain"}


async def test_a_sampler_that_takes_nothing(pair: list[Worker]) -> None:
    """The callee hears that nothing is recorded, and records nothing either."""
    off, on = Spans(), Spans()
    off.provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    with trace_calls(pair[0], off.provider), trace_calls(pair[1], on.provider):
        found = await pair[0].call("worker1", seen)
    assert found is not None and int(found.traceparent[-2:], 16) & 1 == 0
    assert not on.all()


async def seen() -> TraceContext | None:
    return tracing.current()


class Broken(Sampler):
    """Raises."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        raise RuntimeError("of a sampler")

    def get_description(self) -> str:
        return "broken"


async def test_a_tracer_that_raises(pair: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and changes nothing for calls."""
    provider = TracerProvider(sampler=Broken())
    with trace_calls(pair[0], provider), trace_calls(pair[1], provider):
        assert await pair[0].call("worker1", awaited) == (0, 0)
        with tracing.using(REMOTE):
            assert await pair[0].call("worker1", seen) == REMOTE
        assert [item async for item in pair[0].stream("worker1", items)] == [(0, 0)] * 2
        queue = pair[0].Queue("samples")
        await queue.put(1)
        assert await queue.get() == 1
        await until(lambda: "the tracer of its calls raised" in caplog.text)
    assert "of a sampler" in caplog.text


# --- switching --------------------------------------------------------------------------------------------------------


async def test_nothing_is_traced_after_the_end(pair: list[Worker]) -> None:
    """A call under way ends its span; a later one has none."""
    spans = Spans()
    tracing_of_caller = trace_calls(pair[0], spans.provider)
    call = pair[0].call("worker1", for_ever)
    await until(lambda: pair[1].pending_calls())
    tracing_of_caller.close()
    tracing_of_caller.close()
    await pair[0].call("worker1", awaited)
    call.cancel()
    await spans.one("for_ever", CLIENT)
    assert [span.name for span in spans.all()] == [f"{HERE}/for_ever"]


async def test_a_worker_is_traced_once(pair: list[Worker]) -> None:
    """Whoever asks for it again is told."""
    spans = Spans()
    with trace_calls(pair[0], spans.provider) as first:
        assert isinstance(first, Tracing)
        with pytest.raises(RpcUsageError, match="worker 'worker0' is traced already"):
            trace_calls(pair[0])


async def test_spans_of_a_worker_that_leaves_are_ended() -> None:
    """Those of its last calls too, which nothing has waited for."""
    spans = Spans()
    async with cluster(2) as pair:
        for worker in pair:
            trace_calls(worker, spans.provider)
        await asyncio.gather(*(pair[0].call("worker1", plain) for _ in range(100)))
    assert len(spans.of("plain", CLIENT)) == len(spans.of("plain", SERVER)) == 100


def test_spans_of_a_worker_whose_loop_was_closed_are_ended() -> None:
    """As `asyncio.run` does, whose program has not left its group."""
    spans = Spans()

    async def program() -> None:
        worker = await rpc.init("alone", world_size=1, rank=0, store=HashStore())
        trace_calls(worker, spans.provider)
        assert await worker.call("alone", plain)

    asyncio.run(program())
    with contextlib.suppress(rpc.errors.RpcError):
        rpc.current()  # takes the worker down
    assert {span.kind for span in spans.all()} == {CLIENT, SERVER}


async def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the variable, which the option overrides."""

    async def is_traced(traces: bool | None) -> bool:
        async with cluster(1, options=RpcBackendOptions(traces=traces)) as (worker,):
            return worker._node.engine.tracer is not None

    assert await is_traced(True) and not await is_traced(None)
    monkeypatch.setenv("AIORPC_TRACES", "1")
    assert await is_traced(None) and not await is_traced(False)
    monkeypatch.setenv("AIORPC_TRACES", "yes")
    with pytest.raises(RpcUsageError, match="AIORPC_TRACES must be 0 or 1, not 'yes'"):
        await is_traced(None)


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import aiorpc as rpc
try:
    rpc.init("a", options=rpc.RpcBackendOptions(traces=True))
except rpc.RpcUsageError as error:
    print(error)
rpc.init("a")
print("aiorpc.observability.traces" in sys.modules)
"""


def test_a_missing_package_is_named() -> None:
    """With what to install; and without the option nothing of OpenTelemetry is imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "pip install 'aiorpc-torch[otel]'" in done.stdout and done.stdout.endswith("False\n")
