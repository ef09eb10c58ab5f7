"""A worker that drains: what it still takes, what it waits for, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import PeerLeft, RpcBackendOptions, RpcUsageError, Worker, WorkerClosed
from aiorpc.draining import check_bound
from aiorpc.options import DRAIN_TIMEOUT
from aiorpc.protocol.states import WorkerState
from aiorpc.testing import cluster
from tests.runtime.inside import set_bounds
from tests.runtime.waiting import LIMIT, until

OPTIONS = RpcBackendOptions(rpc_timeout=LIMIT, drain_timeout=LIMIT)
KINDS = pytest.mark.parametrize("dynamic", [False, True])
_gates: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def gate() -> asyncio.Event:
    """Keeps handlers until it is set."""
    _gates["it"] = asyncio.Event()
    return _gates["it"]


async def wait_at_the_gate() -> str:
    await _gates["it"].wait()
    return "done"


async def put_later(name: str) -> None:
    """An accepted call that puts an item into a queue of its own worker once the gate opens."""
    await _gates["it"].wait()
    await aiorpc.current().queue(name, owner=aiorpc.current().name).put("late")


def under_way(worker: Worker) -> bool:
    return any(call.direction == "served" for call in worker.pending_calls())


@KINDS
async def test_a_worker_that_drains_leaves_by_itself(dynamic: bool, gate: asyncio.Event) -> None:
    """It refuses new calls with PeerLeft, answers the one that it has, and leaves; the other goes on."""
    async with cluster(3, dynamic=dynamic, options=OPTIONS) as (first, drained, third):
        held = first.call("worker1", wait_at_the_gate)
        await until(lambda: under_way(drained))
        draining = asyncio.ensure_future(drained.drain())
        await until(lambda: drained.state is WorkerState.DRAINING)
        assert drained.leaving and not drained.closed and not draining.done()
        with pytest.raises(PeerLeft, match=r"worker1 .* is draining: it takes no more calls, and ran nothing"):
            await first.call("worker1", abs, -1)
        with pytest.raises(WorkerClosed, match="as its program has asked it to"):
            drained.call("worker0", abs, -1)
        gate.set()
        assert await held == "done"
        report = await draining
        assert not report.timed_out and not report.unfinished and report.lost == ()
        assert drained.state is WorkerState.CLOSED
        assert await third.call("worker0", abs, -3) == 3
        with pytest.raises(PeerLeft, match="has shut down"):
            await third.call("worker1", abs, -1)


@KINDS
@pytest.mark.parametrize("leader", [0, 1])
async def test_a_shutdown_that_waits_becomes_a_drain(dynamic: bool, leader: int) -> None:
    """Both return the same report. In a free group the worker that hosts the store would have stayed."""
    async with cluster(3, dynamic=dynamic, options=OPTIONS) as workers:
        worker = workers[leader]
        shutting = asyncio.ensure_future(worker.shutdown())
        await until(lambda: worker.leaving or worker.closed)
        reports = await asyncio.gather(worker.drain(), worker.drained(), shutting, worker.drain())
        assert all(report is reports[2] for report in reports)
        assert await workers[2].call(workers[1 - leader].name, abs, -3) == 3


async def test_a_host_of_the_store_does_not_stay() -> None:
    """Others that know each other go on without the store."""
    async with cluster(2, dynamic=True, options=OPTIONS) as (host, other):
        assert (await host.drain()).lost == ()
        assert host.closed and await other.call("worker1", abs, -3) == 3


async def test_the_time_of_a_drain_is_bounded() -> None:
    """The report says what was under way; a shutdown at once ends a drain earlier."""
    async with cluster(3, options=OPTIONS) as (first, drained, hurried):
        held = [first.call(worker.name, wait_at_the_gate) for worker in (drained, hurried)]
        await until(lambda: under_way(drained) and under_way(hurried))
        queue: aiorpc.Queue[int] = drained.Queue("q")
        await queue.put(1)
        report = await drained.drain(timeout=0.1)
        assert report.timed_out
        assert "wait_at_the_gate for worker0" in report.unfinished[0] and report.unfinished[1] == "1 item in queue 'q'"
        draining = asyncio.ensure_future(hurried.drain(0))
        await until(lambda: hurried.state is WorkerState.DRAINING)
        assert (await hurried.shutdown(graceful=False)).timed_out and (await draining).timed_out
        for call in held:
            with pytest.raises(PeerLeft):
                await call


async def test_items_of_a_queue_are_waited_for(gate: asyncio.Event) -> None:
    """Others put no more, those that wait for room are refused, and getters get what is there, and what a call of its
    worker still puts; then the owner leaves, and getters hear that."""
    async with cluster(2, options=OPTIONS) as (other, owner):
        queue, items = owner.Queue("q", maxsize=2), other.queue("q", owner="worker1")
        late = other.call("worker1", put_later, "q")
        await items.put(0)
        await items.put(1)
        waiting = items.put(2)
        await until(lambda: queue._served.counts().putters)
        draining = asyncio.ensure_future(owner.drain())
        with pytest.raises(PeerLeft, match="'worker1', the owner of queue 'q', is draining: its queue takes no more"):
            await waiting
        with pytest.raises(PeerLeft, match="takes no more items"):
            await items.put(3)
        assert await items.get() == 0
        gate.set()
        await late
        assert not draining.done()
        assert [await items.get(), await items.get()] == [1, "late"]
        last = items.get()
        assert not (await draining).timed_out
        with pytest.raises(PeerLeft):
            await last


async def test_large_items_are_kept_until_they_are_got() -> None:
    """They stay with the worker that has put them into the queue of another."""
    async with cluster(3, options=OPTIONS) as (owner, producer, consumer):
        owner.Queue("q")
        items = torch.arange(100_000)
        await producer.queue("q", owner="worker0").put(items)
        draining = asyncio.ensure_future(producer.drain())
        await until(lambda: producer.state is WorkerState.DRAINING)
        await asyncio.sleep(0.2)
        assert not draining.done()
        assert torch.equal(await consumer.queue("q", owner="worker0").get(), items)
        assert not (await draining).timed_out


async def test_groups_choose_another_worker_from_the_word_on(gate: asyncio.Event) -> None:
    """A caller that has a connection is told before it calls: without retries none of its calls is refused."""
    async with cluster(3, dynamic=True, options=OPTIONS) as (caller, drained, other):
        held = caller.call("worker1", wait_at_the_gate)
        await until(lambda: under_way(drained))
        draining = asyncio.ensure_future(drained.drain())
        await until(lambda: caller._node.peers.find("worker1").drains)
        group = caller.group(["worker1", "worker2"])
        assert {await group.any(name_here) for _ in range(6)} == {"worker2"}
        assert await caller.group(["worker1"], retries=0).call(name_here) is not None
        gate.set()
        await asyncio.gather(draining, held)
        assert other.state is WorkerState.RUNNING


@KINDS
async def test_workers_that_drain_together_answer_each_other(dynamic: bool, gate: asyncio.Event) -> None:
    """As when a job is cancelled: what a program waits for ends after the grace, apart from calls."""
    async with cluster(2, dynamic=dynamic, options=OPTIONS) as (caller, callee):
        set_bounds(caller, grace=0.01)
        call = caller.call("worker1", wait_at_the_gate)
        item = caller.Queue("q").get()
        await until(lambda: under_way(callee))
        draining = asyncio.gather(caller.drain(), callee.drain())
        with pytest.raises(WorkerClosed, match="waits no longer"):
            await item
        gate.set()
        assert await call == "done"
        assert not any(report.timed_out for report in await draining)


def name_here() -> str:
    return aiorpc.current().name


async def test_an_error_of_a_block_does_not_cut_a_drain_short(gate: asyncio.Event) -> None:
    """The block of a worker that drains ends with WorkerClosed: what it has accepted is finished all the same."""
    store = HashStore()
    async with contextlib.AsyncExitStack() as stack:
        worker = Worker("a", world_size=2, rank=0, store=store, options=OPTIONS)
        other = Worker("b", world_size=2, rank=1, store=store, options=OPTIONS)
        starting = asyncio.ensure_future(other.start())
        with pytest.raises(WorkerClosed):
            async with worker:
                await starting
                stack.push_async_callback(other.shutdown, False)
                held = other.call("a", wait_at_the_gate)
                await until(lambda: under_way(worker))
                worker._begin_to_drain("SIGTERM")
                await until(lambda: worker.state is WorkerState.DRAINING)
                asyncio.get_running_loop().call_later(0.1, gate.set)
                with pytest.raises(WorkerClosed, match="as SIGTERM has asked it to"):
                    worker.call("b", abs, -1)
                worker.call("b", abs, -1)
        assert await held == "done"


async def test_before_it_has_joined_there_is_nothing_to_drain() -> None:
    """A worker that was not started drains at once; one that joins gives up; nobody waits for a worker that is not
    there."""
    worker = Worker("a", world_size=2, rank=0, store=HashStore(), options=OPTIONS)
    assert (await worker.drain()).lost == ()
    with pytest.raises(WorkerClosed, match="was not awaited"):
        await worker.drained()
    starting = asyncio.ensure_future(worker.start())
    await until(lambda: worker.state is WorkerState.STARTING)
    with pytest.raises(WorkerClosed, match="has not joined"):
        await worker.drained()
    await worker.drain()
    with pytest.raises(WorkerClosed, match="was shut down before it had joined"):
        await starting


@pytest.mark.parametrize(("seconds", "fits"), [(DRAIN_TIMEOUT, True), (26.0, True), (26.1, False), (0.0, False)])
def test_a_bound_above_that_of_the_launcher_is_refused(
    seconds: float, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of torchrun, which always kills after 30 s. Of Slurm sites set it: a warning. Elsewhere it is not known."""
    options = RpcBackendOptions(drain_timeout=seconds)
    with contextlib.nullcontext() if fits else pytest.raises(RpcUsageError, match=r"torchrun kills .* at most 26 s"):
        check_bound(options, {"TORCHELASTIC_RUN_ID": "x"})
    check_bound(RpcBackendOptions(drain_timeout=seconds, drain_on=()), {"TORCHELASTIC_RUN_ID": "x"})
    check_bound(options, {})
    assert not caplog.records
    check_bound(options, {"SLURM_JOB_ID": "7"})
    assert [("KillWait" in record.getMessage()) for record in caplog.records] == [True] * (not fits)


@pytest.mark.parametrize(
    ("grace", "seconds", "error"),
    [
        ("29", DRAIN_TIMEOUT, None),
        ("28", DRAIN_TIMEOUT, "drain_timeout is 25 s, .* AIORPC_GRACE says, kills a process 28 s .* at most 24 s"),
        ("3", 1.0, r"3 s after SIGTERM: set drain_on=\(\)"),
        ("3600", 0.0, "no limit"),
        ("inf", 0.0, None),
        ("soon", 1.0, "AIORPC_GRACE must be the seconds"),
        ("-1", 1.0, "AIORPC_GRACE must be the seconds"),
    ],
)
def test_a_launcher_may_say_its_grace(
    grace: str, seconds: float, error: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a variable, which counts for more than what is known of torchrun and Slurm. A worker is not even made."""
    monkeypatch.setenv("AIORPC_GRACE", grace)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with contextlib.nullcontext() if error is None else pytest.raises(RpcUsageError, match=error):
        Worker("a", options=RpcBackendOptions(drain_timeout=seconds))
    assert not caplog.records


@pytest.mark.parametrize("given", ["SIGTERM", ["SIGINT"], ["SIGKILL"], ["TERM"], [15], {"SIGTERM"}])
def test_signals_are_named(given: object) -> None:
    """As a list of names: those by which another process ends one, and not Ctrl-C."""
    with pytest.raises(RpcUsageError, match="drain_on"):
        RpcBackendOptions(drain_on=given)  # type: ignore[arg-type]  # that is what is tried
