"""The trace context of a call: its handler sees it, and what the handler calls takes it along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiorpc
from aiorpc import Overloaded, RpcUsageError, Worker, tracing
from aiorpc.testing import Faults
from aiorpc.tracing import TraceContext
from tests.runtime.bad_member import call_of, calling, say
from tests.runtime.waiting import until

CONTEXT = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=x")
OTHER = TraceContext("00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-00f067aa0ba902b7-00")


def seen() -> TraceContext | None:
    return tracing.current()


async def seen_async() -> TraceContext | None:
    return await asyncio.create_task(asyncio.to_thread(tracing.current))


def nested(to: str) -> list[Any]:
    return [tracing.current(), aiorpc.rpc_sync(to, seen)]


async def nested_async(to: str) -> list[Any]:
    group = aiorpc.group([to])
    return [
        await aiorpc.call(to, seen),
        *(outcome.value for outcome in await group.call(seen)),
        [item async for item in aiorpc.stream(to, seen_twice)][1],
        await aiorpc.peer(to, retries=1).call(seen),
        await aiorpc.remote(to, seen),
    ]


async def seen_twice() -> AsyncIterator[TraceContext | None]:
    yield tracing.current()
    yield tracing.current()


def another(to: str) -> list[Any]:
    with tracing.using(OTHER):
        first = aiorpc.rpc_sync(to, seen)
    with tracing.using(None):
        return [first, aiorpc.rpc_sync(to, seen), tracing.current()]


@pytest.mark.parametrize("handler", [seen, seen_async])
async def test_a_handler_sees_the_context_of_its_call(trio: list[Worker], handler: Any) -> None:
    """And nothing where there is none."""
    with tracing.using(CONTEXT):
        assert tracing.current() == CONTEXT
        call = trio[0].call("worker1", handler)
    assert await call == CONTEXT
    assert tracing.current() is None and await trio[0].call("worker1", handler) is None


@pytest.mark.parametrize("handler", [nested, nested_async])
async def test_calls_of_all_kinds_carry_it_on(trio: list[Worker], handler: Any) -> None:
    """Blocking and awaited ones, calls of groups, streams, retries and creations."""
    with tracing.using(CONTEXT):
        found = await trio[0].call("worker1", handler, "worker2")
    assert set(found) == {CONTEXT} and len(found) > 1
    assert set(await trio[0].call("worker1", handler, "worker2")) == {None}


async def test_a_handler_chooses_another_context(trio: list[Worker]) -> None:
    """For what it calls, as a span of its own does; or none."""
    with tracing.using(CONTEXT):
        assert await trio[0].call("worker1", another, "worker2") == [OTHER, None, None]


async def test_calls_at_the_same_time_do_not_mix(trio: list[Worker]) -> None:
    """Each task has its own."""

    async def one(context: TraceContext | None) -> bool:
        with tracing.using(context):
            await asyncio.sleep(0)
            return await trio[0].call("worker1", nested, "worker2") == [context, context]

    assert all(await asyncio.gather(*(one(context) for context in [CONTEXT, OTHER, None] * 10)))


async def test_a_later_try_takes_it_along(trio: list[Worker]) -> None:
    """However that was begun, and outside of the block."""
    with Faults(trio[0]) as faults:
        faults.fail(times=2, error=Overloaded("as if it was"))
        with tracing.using(CONTEXT):
            call = trio[0].peer("worker1", retries=2, backoff=0.001).call(seen)
        assert await call == CONTEXT


noted: list[TraceContext | None] = []


def note() -> None:
    noted.append(tracing.current())


@pytest.mark.parametrize("bad", [TraceContext("no"), TraceContext("", "a=1"), TraceContext(CONTEXT[0], "no")])
async def test_what_is_no_context(trio: list[Worker], bad: TraceContext) -> None:
    """Here it is an error; from a peer it is ignored, as far as it is none, and the call runs."""
    with pytest.raises(RpcUsageError, match="W3C"), tracing.using(bad):
        pass
    assert await trio[1].call("worker0", len, "abc") == 3
    noted.clear()
    call = call_of(f"{__name__}:note")
    call.trace = bad
    say(calling(trio[1], "worker0"), "CALL", 1 << 40, call)
    await until(lambda: bool(noted))
    assert noted == [TraceContext(CONTEXT[0]) if bad[0] == CONTEXT[0] else None]
