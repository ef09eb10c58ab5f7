"""Seeing what a worker does: numbers, pending calls at both ends, and who blocks the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.testing import cluster
from tests.runtime.waiting import until

_gates: dict[str, threading.Event] = {}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    _gates["it"] = threading.Event()
    yield _gates["it"]
    _gates["it"].set()


def wait() -> bool:
    return _gates["it"].wait(30)


async def wait_async() -> bool:
    await until(_gates["it"].is_set)
    return True


def fail() -> None:
    raise ValueError


async def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251  # what the test is about


async def test_messages_are_counted_where_they_leave_and_arrive(pair: list[Worker]) -> None:
    """A call and its reply are one message each way; what the workers say to each other by themselves comes on top."""
    await pair[0].call("worker1", len, "abc")  # by now there is a connection
    before = [worker.statistics() for worker in pair]
    for _ in range(10):
        await pair[0].call("worker1", len, "abc")
    after = [worker.statistics() for worker in pair]
    for was, now in zip(before, after, strict=True):
        assert 10 <= now.messages_sent - was.messages_sent < 20
        assert 10 <= now.messages_received - was.messages_received < 20


async def test_calls_are_counted_at_both_ends(pair: list[Worker]) -> None:
    """Made and answered by the caller, served and failed by the callee; the runtime's own calls do not count."""
    for _ in range(10):
        await pair[0].call("worker1", len, "abc")
    with pytest.raises(ValueError):
        await pair[0].call("worker1", fail)
    made, served = pair[0].statistics(), pair[1].statistics()
    assert (made.calls_made, made.calls_pending, made.calls_served) == (11, 0, 0)
    assert (served.calls_made, served.calls_served, served.calls_failed, served.calls_running) == (0, 11, 1, 0)
    assert (made.calls_answered, served.calls_answered) == (11, 0)
    assert 0 < made.latency_p50 <= made.latency_p99 < 10


async def test_bytes_and_connections(pair: list[Worker]) -> None:
    """A tensor's bytes appear at both ends, also after the connection has ended."""
    await pair[0].call("worker1", torch.numel, torch.zeros(250_000))
    sent, received = pair[0].statistics(), pair[1].statistics()
    assert 1_000_000 < sent.bytes_sent < 1_010_000
    await until(lambda: pair[1].statistics().bytes_received > 1_000_000)
    assert sent.connections >= 1 and received.connections >= 1
    assert sent.connections_refused == 0


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_what_goes_with_a_frame_is_counted_at_both_ends(transport: str) -> None:
    """Buffers that no other channel takes: what one end has sent inline, the other one has received so."""
    options = RpcBackendOptions(transports=(transport,), shared_memory=0)
    async with cluster(2, options=options) as workers:
        short = torch.zeros(20_000)
        for size in (1, 2):  # a lone one, and several
            assert await workers[0].call("worker1", len, [short] * size) == size
        assert torch.equal(await workers[0].call("worker1", torch.neg, short), -short)
        there, here = (worker.statistics().channels["inline"] for worker in workers)
        assert (here.received, here.bytes_received) == (there.sent, there.bytes_sent)
        assert (there.received, there.bytes_received) == (here.sent, here.bytes_sent) == (1, short.nbytes)


async def test_a_value_that_is_fetched_counts_at_both_ends(pair: list[Worker]) -> None:
    """As made by whoever fetches it, and as served by its owner."""
    reference: aiorpc.RRef[list[int]] = pair[0].remote("worker1", list)
    for _ in range(3):
        assert await reference == []
    made, served = pair[0].statistics(), pair[1].statistics()
    assert made.calls_made == made.calls_answered == served.calls_served == 4


async def test_what_is_under_way_is_seen_at_both_ends(pair: list[Worker], gate: threading.Event) -> None:
    """pending_calls lists calls made and calls served, oldest first, with function, peer, time, deadline and line."""
    calls = [pair[0].call("worker1", wait), pair[0].peer("worker1", timeout=0).call(wait_async)]
    await until(lambda: len(pair[1].pending_calls()) == 2)
    made, served = pair[0].pending_calls(), pair[1].pending_calls()
    assert [(call.direction, call.worker) for call in made] == [("made", "worker1")] * 2
    assert [(call.direction, call.worker) for call in served] == [("served", "worker0")] * 2
    for end in (made, served):
        assert [call.function.rpartition(":")[2] for call in end] == ["wait", "wait_async"]
        assert end[0].seconds >= end[1].seconds >= 0
        assert end[0].deadline is not None and 50 < end[0].deadline <= 60 and end[1].deadline is None
    assert all(__file__ in call.made_at for call in made)
    assert pair[0].statistics().calls_pending == 2 and pair[1].statistics().calls_running == 2
    assert pair[1].statistics().threads >= 1
    gate.set()
    await asyncio.gather(*calls)
    assert pair[0].pending_calls() == [] and pair[1].pending_calls() == []


async def test_threads_and_the_queue(gate: threading.Event) -> None:
    """Threads, those that only wait, and jobs that wait for one."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=2)) as workers:
        calls = [workers[0].call("worker1", wait) for _ in range(5)]
        await until(lambda: workers[1].statistics().jobs_queued == 3)
        assert workers[1].statistics().threads == 2 and workers[1].statistics().threads_idle == 0
        nested = workers[1].call("worker0", block_for, "worker1")
        await until(lambda: workers[0].statistics().threads_blocked == 1)
        gate.set()
        await asyncio.gather(*calls, nested)
        await until(lambda: workers[1].statistics().threads_idle >= 1)
        assert workers[1].statistics().jobs_queued == 0


def block_for(to: str) -> Any:
    return aiorpc.rpc_sync(to, wait)


async def test_references_are_counted(pair: list[Worker]) -> None:
    """Values owned, and handles held."""
    rrefs: list[aiorpc.RRef[list[int]]] = [pair[0].remote("worker1", list) for _ in range(3)]
    for rref in rrefs:
        await rref
    assert pair[0].statistics().references_held == 3 and pair[1].statistics().references_owned == 3
    del rrefs, rref
    await until(lambda: pair[1].statistics().references_owned == 0)


async def test_cancelled_timed_out_and_late(pair: list[Worker], gate: threading.Event) -> None:
    """Each end counts what it saw."""
    await pair[0].call("worker1", len, "abc")  # by now there is a connection: what times out without one is not sent
    pair[0].call("worker1", wait_async).cancel()
    with pytest.raises(aiorpc.RpcTimeout):
        await pair[0].peer("worker1", timeout=0.02).call(wait_async)
    await until(lambda: pair[1].statistics().calls_cancelled == 2)
    assert pair[0].statistics().calls_timed_out == 1


async def test_a_blocked_loop_is_reported_with_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, naming the handler, the place, how long, and what to do about it; the figures have it too."""
    options = RpcBackendOptions(lag_warning=0.2, dedicated_loop=True)
    async with cluster(2, options=options) as workers:
        await workers[0].call("worker1", len, "abc")
        with caplog.at_level(logging.WARNING, "aiorpc"):
            await workers[0].call("worker1", block_the_loop, 1.0)
        await until(lambda: workers[1].statistics().loop_blocked >= 1)
        assert workers[1].statistics().loop_lag_max > 0.2
        assert workers[0].statistics().loop_blocked == 0
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert "block_the_loop" in messages[0] and "test_statistics.py" in messages[0] and "`def` handler" in messages[0]


async def test_statistics_from_any_thread(pair: list[Worker]) -> None:
    """While calls go on."""
    stop = threading.Event()

    def look() -> int:
        count = 0
        while not stop.is_set():
            pair[1].statistics()
            pair[0].pending_calls()
            count += 1
        return count

    looking = asyncio.ensure_future(asyncio.to_thread(look))
    for _ in range(10):
        await asyncio.gather(*(pair[0].call("worker1", abs, n) for n in range(50)))
    stop.set()
    assert await looking > 0
