"""Leaving when something is in the way: unread sockets, silent members, cancellation, handlers that shut down."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

import aiorpc
from aiorpc import (
    PeerClosed,
    RendezvousError,
    RpcBackendOptions,
    RpcError,
    RpcUsageError,
    ShutdownReport,
    Worker,
    WorkerClosed,
    WorkerLeft,
)
from aiorpc.protocol.states import WorkerState
from aiorpc.runtime import life, node
from aiorpc.runtime.engine import engine
from aiorpc.runtime.group import group
from aiorpc.runtime.group.listening import Listeners
from aiorpc.runtime.meeting.membership import FreeWorld
from aiorpc.runtime.meeting.stores import StoreGone
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.runtime.waiting import until

LARGE = torch.zeros(1 << 22)  # 16 MiB: more than a socket takes
LONG = 5.0


class Gate:
    """Keeps handlers until it is opened. entered: how many wait there."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = 0

    def wait(self) -> None:
        self.entered += 1
        assert self.open.wait(10)


_gates: dict[str, Gate] = {}


@pytest.fixture
def gate() -> Iterator[Gate]:
    _gates["it"] = Gate()
    yield _gates["it"]
    _gates["it"].open.set()


def wait_at_the_gate() -> None:
    _gates["it"].wait()


async def for_ever() -> None:
    await asyncio.Event().wait()


async def leave() -> ShutdownReport:
    return await aiorpc.current().shutdown(graceful=False)


def stop_reading(reader: Worker, sender: str) -> None:
    """From now on what that worker sends stays in the socket, as with a stopped process."""
    (service,) = (each for each in reader.node.services if each.record.name == sender)
    reader.loop.remove_reader(service.connection._fd)


async def alone(**options: Any) -> Worker:
    return await aiorpc.init("a", rank=0, world_size=1, store=HashStore(), options=RpcBackendOptions(**options))


# --- what others see --------------------------------------------------------------------------------------------------


async def test_goodbye_behind_much_data_arrives(trio: list[Worker]) -> None:
    """A worker that leaves at once, with a large call still in its socket, has left; it is not lost."""
    _, leaver, seer = trio
    assert await leaver.call("worker2", abs, -3) == 3
    events = seer.events()
    heard = asyncio.ensure_future(anext(events))
    await until(lambda: seer.node.news.listeners)
    call = leaver.call("worker2", torch.numel, LARGE)
    await leaver.shutdown(graceful=False)
    assert isinstance(call.exception(), WorkerClosed)
    assert await asyncio.wait_for(heard, LONG) == WorkerLeft(leaver.info)
    await events.aclose()


async def test_shutdown_does_not_wait_for_a_peer_that_does_not_read(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives such a peer a bounded time, and returns with every socket closed."""
    monkeypatch.setattr(node, "_CONNECTION_GRACE", 0.05)
    assert await pair[0].call("worker1", abs, -3) == 3
    deaf, connections = list(pair[1].node.engine.connections), list(pair[0].node.engine.connections)
    assert len(deaf) == len(connections) == 2
    for connection in deaf:
        pair[1].loop.remove_reader(connection._fd)
    call = pair[0].call("worker1", torch.numel, LARGE)
    await asyncio.wait_for(pair[0].shutdown(graceful=False), LONG)
    assert all(connection.ended for connection in connections)
    assert isinstance(call.exception(), WorkerClosed)
    for connection in deaf:
        connection.start()


async def test_a_member_that_does_not_answer_is_not_idle(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped or busy, it may have calls under way: the leader asks again until it has an answer."""
    tries = 0
    activity = pair[1].node.activity

    def silent() -> tuple[bool, int]:
        nonlocal tries
        tries += 1
        if tries <= 5:
            raise RuntimeError("no answer")
        return activity()

    monkeypatch.setattr(pair[1].node, "activity", silent)
    reports = await asyncio.gather(*(each.shutdown() for each in pair))
    assert tries > 6 and [report.timed_out for report in reports] == [False, False]


async def test_a_member_that_hears_no_poll_keeps_the_group_together(
    pair: list[Worker], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls to itself are seen by nobody else: no answer for several polls does not say that there are none."""
    monkeypatch.setattr(group, "_POLL_TIMEOUT", 0.02)
    assert await pair[0].call("worker1", abs, -3) == 3
    call = pair[1].call("worker1", wait_at_the_gate)
    await until(lambda: gate.entered)
    leaving = [asyncio.ensure_future(each.shutdown()) for each in pair]
    await until(lambda: len(pair[0].node.group._entered) == 2)
    (service,) = (each for each in pair[1].node.services if each.record.name == "worker0")
    stop_reading(pair[1], "worker0")
    before = pair[0].statistics().calls_timed_out
    await until(lambda: pair[0].statistics().calls_timed_out >= before + 4 or any(each.done() for each in leaving))
    assert not any(each.done() for each in leaving)
    gate.open.set()
    await call
    service.connection.start()
    assert [report.timed_out for report in await asyncio.gather(*leaving)] == [False, False]


async def test_work_that_does_not_end_keeps_nobody_for_ever(
    pair: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Once all have entered, calls under way have as long as a call may take; then all leave, and one line says so."""
    assert await pair[0].call("worker1", abs, -3) == 3
    call = pair[1].peer("worker0", timeout=0).call(for_ever)
    await until(lambda: pair[0].statistics().calls_running == 1)
    pair[0].options.rpc_timeout = 0.1
    with caplog.at_level(logging.WARNING, "aiorpc"):
        await asyncio.wait_for(asyncio.gather(*(each.shutdown() for each in pair)), LONG)
    assert isinstance(call.exception(), (PeerClosed, WorkerClosed))
    (record,) = caplog.records
    assert "still had calls under way" in record.getMessage() and "worker0" in record.getMessage()


async def test_a_loss_bounds_the_wait_for_those_who_work_on() -> None:
    """A member that never enters is waited for only until `loss_grace` after somebody was lost."""
    async with cluster(3, options=RpcBackendOptions(loss_grace=0.1)) as (a, b, c):
        leaving = asyncio.ensure_future(a.shutdown())
        await until(lambda: a.id in a.node.group._entered)
        a.node.group.on_lost(c.node.engine.record, "for the test")
        report = await asyncio.wait_for(leaving, LONG)
        assert report == ShutdownReport(lost=(c.info,), timed_out=True)
        assert b.state.value == "running"
        await asyncio.gather(b.shutdown(graceful=False), c.shutdown(graceful=False))


# --- cancelled, from a handler, again ---------------------------------------------------------------------------------


async def test_a_handler_may_shut_its_worker_down(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """The closing cancels the handler that asked for it, and goes on to its end."""
    monkeypatch.setattr(engine, "TASKS_GRACE", 0.05)
    with pytest.raises(PeerClosed, match="worker1"):
        await pair[0].call("worker1", leave)
    assert await asyncio.wait_for(pair[1].shutdown(), LONG) == ShutdownReport()
    assert pair[1].node.engine.pool.threads == 0 and not os.path.exists(pair[1].node.engine.record.unix_path)


async def test_shutdown_that_is_cancelled_while_it_closes_ends_all_the_same(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a worker is never left: who waits is cancelled once all is closed, and later calls get the report."""
    monkeypatch.setattr(node, "POOL_GRACE", 0.1)
    a = await alone()
    call = a.call("a", wait_at_the_gate)
    await until(lambda: gate.entered)
    assert a.node.rendezvous is not None and a.node.rendezvous._held is not None
    secret = a.node.rendezvous._held.path
    assert secret is not None and secret.exists()
    leaving = asyncio.ensure_future(a.shutdown(graceful=False))
    await until(lambda: a.closed)
    assert not leaving.done()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not secret.exists() and not os.path.exists(a.node.engine.record.unix_path)
    assert await asyncio.wait_for(a.shutdown(), LONG) == ShutdownReport()
    assert isinstance(call.exception(), WorkerClosed)
    gate.open.set()
    await until(lambda: a.node.engine.pool.threads == 0)


async def test_graceful_shutdown_that_is_cancelled_leaves_at_once() -> None:
    """A timeout around it, or Ctrl-C, ends the waiting for others, not the closing; a second call gets the report."""
    async with cluster(2) as workers:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(workers[0].shutdown(), 0.05)
        assert workers[0].closed and not os.path.exists(workers[0].node.engine.record.unix_path)
        assert (await workers[0].shutdown()).timed_out
        with pytest.raises(RpcError):
            await workers[1].call("worker0", abs, -3)


async def test_shutdown_again_with_a_loop_of_its_own() -> None:
    """A worker whose loop has ended gives its report again, also at the end of its `async with`."""
    async with aiorpc.init(
        "a", rank=0, world_size=1, store=HashStore(), options=RpcBackendOptions(dedicated_loop=True)
    ) as a:
        assert await a.call("a", abs, -3) == 3
        report = await a.shutdown()
        assert await a.shutdown() is report
    assert await a.shutdown() is report


async def test_init_that_is_cancelled_with_a_loop_of_its_own_cleans_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends after the clean-up, not under it: no socket is left, and no task is destroyed while pending."""
    opened: list[Listeners] = []

    def listen(*args: Any, **options: Any) -> Listeners:
        opened.append(Listeners(*args, **options))
        return opened[0]

    monkeypatch.setattr(life, "Listeners", listen)
    a = aiorpc.init(
        "a", rank=0, world_size=2, store=HashStore(), options=RpcBackendOptions(dedicated_loop=True, rpc_timeout=20)
    )
    joining = asyncio.ensure_future(a.start())
    await until(lambda: len(opened) == 1 and len(opened[0].sockets()) == 2)
    path = opened[0].unix_path
    with caplog.at_level(logging.WARNING):
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
    assert not os.path.exists(path) and a.closed
    assert not caplog.records


async def give_up_once_joining(worker: Worker, in_place: Callable[[], object]) -> None:
    """Begin to start it, and give up once it has its place among the members."""
    joining = asyncio.ensure_future(worker.start())
    await until(in_place)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining


async def test_init_that_is_given_up_can_be_tried_again() -> None:
    """In the same process: the others meet the second worker of that rank, not the first."""
    store = HashStore()

    def make(rank: int) -> Worker:
        return aiorpc.init(f"w{rank}", rank=rank, world_size=2, store=store)

    await give_up_once_joining(make(1), lambda: store.check(["aiorpc/1/slot/1"]))
    a, b = make(0), make(1)
    await asyncio.wait_for(asyncio.gather(a.start(), b.start()), LONG)
    assert await asyncio.wait_for(a.call("w1", abs, -3), LONG) == 3
    assert a.node.group.members[1] == b.node.engine.record
    await asyncio.gather(a.shutdown(), b.shutdown())


async def test_init_that_is_given_up_leaves_nobody_in_a_group_without_a_size() -> None:
    """Its name is free, and the others do not look for it, whatever the store was doing for it just then."""
    store, stuck, join = HashStore(), Stuck(), FreeWorld.join

    def join_late(world: FreeWorld, *args: Any) -> Any:
        members = join(world, *args)
        stuck()
        return members

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FreeWorld, "join", join_late)
        await give_up_once_joining(aiorpc.init("a", store=store), stuck.entered.is_set)
    async with aiorpc.init("a", store=store) as a:
        assert [info.name for info in a.worker_infos()] == ["a"]
        stuck.open.set()
        assert await a.call("a", abs, -3) == 3
    await until(lambda: not rendezvous_threads())


async def test_events_of_a_worker_that_has_left_are_over() -> None:
    """Whoever begins to listen after the end hears nothing, and does not wait."""
    a = await alone()
    await a.shutdown()
    async with asyncio.timeout(LONG):
        assert [event async for event in a.events()] == []


# --- the rendezvous ---------------------------------------------------------------------------------------------------


class Stuck:
    """A step of the rendezvous that does not return until `open`; `entered` says that it is in."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.entered.set()
        assert self.open.wait(10)


def rendezvous_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith("-rendezvous")]


@pytest.mark.parametrize("graceful", [False, True])
async def test_a_store_that_does_not_answer_is_left_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graceful: bool
) -> None:
    """Its process is stopped, say: leaving is bounded all the same, says so, and takes the group's secret along."""
    monkeypatch.setattr(life, "_STORE_GRACE", 0.1)
    stuck = Stuck()
    async with cluster(1, dynamic=True) as (worker,):
        assert worker.node.rendezvous is not None and worker.node.rendezvous._held is not None
        secret = worker.node.rendezvous._held.path
        assert secret is not None and secret.exists()
        monkeypatch.setattr(worker.node.rendezvous, "leave", stuck)
        await asyncio.wait_for(worker.shutdown(graceful), LONG)
        assert stuck.entered.is_set() and worker.closed
        assert "worker worker0 left without a word to the store of" in caplog.text
        assert not secret.exists()
        stuck.open.set()
    await until(lambda: not rendezvous_threads())


async def test_leaving_waits_for_what_is_under_way_at_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is left inside of torch when the interpreter ends takes the process down."""
    stuck = Stuck()
    async with cluster(1, dynamic=True) as (worker,):
        monkeypatch.setattr(worker.node.rendezvous, "serve_secret_requests", stuck)
        assert await asyncio.to_thread(stuck.entered.wait, 10)
        leaving = asyncio.ensure_future(worker.shutdown())
        await until(lambda: worker.closed)
        await asyncio.wait((leaving,), timeout=0.1)
        assert not leaving.done()
        stuck.open.set()
        await leaving
        assert not rendezvous_threads()


async def test_nobody_looks_at_a_store_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch logs every look at it, and it does not come back. What it has for now is no reason to look no more."""
    looks = []

    def gone() -> None:
        looks.append(1)
        raise RendezvousError("not just now") if len(looks) == 1 else StoreGone("it has gone")

    monkeypatch.setattr(life, "_SERVING_PAUSE", 0.001)
    async with cluster(1, dynamic=True) as (worker,):
        monkeypatch.setattr(worker.node.rendezvous, "serve_secret_requests", gone)
        await until(lambda: len(looks) == 2)
        await asyncio.sleep(0.05)
    assert len(looks) == 2


async def test_without_the_store_unknown_workers_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names who is missing and why; the worker itself is well."""

    def gone() -> None:
        raise StoreGone("the store no longer answers")

    async with cluster(1, dynamic=True) as (worker,):
        monkeypatch.setattr(worker.node.rendezvous, "members", gone)
        with pytest.raises(RendezvousError, match="'worker0' cannot find 'nobody': the store no longer answers"):
            await worker.call("nobody", abs, -3)
        with pytest.raises(RendezvousError, match="the store no longer answers"):
            worker.remote("nobody", dict)
        assert await worker.call("worker0", abs, -3) == 3


async def test_no_directory_for_sockets_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user made it first, say; the worker that could not join is closed."""

    def refuse() -> None:
        raise PermissionError("/tmp/x is not a directory that only this user can enter")

    monkeypatch.setattr(sockets, "private_directory", refuse)
    worker = aiorpc.init("a", rank=0, world_size=1, store=HashStore())
    with pytest.raises(RendezvousError, match="worker 'a' has no directory for its sockets: /tmp/x is not"):
        await worker
    assert worker.closed


async def test_shutdown_while_it_joins_gives_that_up() -> None:
    """`start` says so at once, and nothing of the worker is left; later calls have nothing to do."""
    a = aiorpc.init("a", rank=0, world_size=2, store=HashStore(), options=RpcBackendOptions(rpc_timeout=30))
    joining = asyncio.ensure_future(a.start())
    await until(lambda: a.state is WorkerState.STARTING)
    assert await asyncio.wait_for(a.shutdown(), LONG) == ShutdownReport()
    with pytest.raises(WorkerClosed, match="before it had joined"):
        await joining
    assert a.state is WorkerState.CLOSED
    assert await a.shutdown() == ShutdownReport()
    with pytest.raises(WorkerClosed):
        a.call("a", abs, -1)


async def test_shutdown_from_another_loop_is_refused_while_it_joins() -> None:
    """A worker that joins on one loop is shut down there; who tries elsewhere is told, and harms nothing."""
    a = aiorpc.init("a", rank=0, world_size=2, store=HashStore(), options=RpcBackendOptions(rpc_timeout=30))
    joining = asyncio.ensure_future(a.start())
    await until(lambda: a.state is WorkerState.STARTING and a._life.loop is not None)
    with pytest.raises(RpcUsageError, match="another loop"):
        await asyncio.to_thread(lambda: asyncio.run(a.shutdown()))
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert a.state is WorkerState.CLOSED


async def test_a_worker_that_is_dropped_while_it_joins_is_closed() -> None:
    """As one that dies then."""
    a = aiorpc.init("a", rank=0, world_size=2, store=HashStore(), options=RpcBackendOptions(rpc_timeout=30))
    joining = asyncio.ensure_future(a.start())
    await until(lambda: a.state is WorkerState.STARTING)
    await a.drop()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert a.state is WorkerState.CLOSED
