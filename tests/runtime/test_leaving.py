"""Leaving when something is in the way: unread sockets, silent members, cancellation, handlers that shut down."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import PeerLeft, RpcBackendOptions, RpcError, RpcUsageError, Worker, WorkerClosed
from aiorpc.errors import RendezvousError
from aiorpc.events import WorkerLeft
from aiorpc.protocol.frames import REPLY
from aiorpc.runtime.engine.observing import Passage
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from aiorpc.types import ShutdownReport, WorkerState
from tests.runtime.inside import set_bounds
from tests.runtime.observers import seen, standing_still
from tests.runtime.stores import Stuck, WatchedStore
from tests.runtime.waiting import until, wait_until

LARGE = torch.zeros(1 << 22)  # 16 MiB: more than a socket takes
LONG = 30.0
APART = RpcBackendOptions(dedicated_loop=True, lag_warning=0.0)


class Gate:
    """Keeps handlers until it is opened. entered: how many wait there."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = 0

    def wait(self) -> None:
        self.entered += 1
        assert self.open.wait(30)


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


def private_files() -> set[Path]:
    """What the workers of this user keep in their directory: their sockets and heartbeats, and their key."""
    return set(sockets.private_directory().iterdir())


async def alone(**options: Any) -> Worker:
    return await aiorpc.init("a", rank=0, world_size=1, store=HashStore(), options=RpcBackendOptions(**options))


# --- what others see --------------------------------------------------------------------------------------------------


async def test_goodbye_behind_much_data_arrives(trio: list[Worker]) -> None:
    """A worker that leaves at once, with a large call still in its socket, has left; it is not lost."""
    _, leaver, seer = trio
    assert await leaver.call("worker2", abs, -3) == 3
    events = seer.events()
    heard = asyncio.ensure_future(anext(events))
    await until(lambda: seer._node.events.listeners)
    call = leaver.call("worker2", torch.numel, LARGE)
    await leaver.shutdown(graceful=False)
    assert isinstance(call.exception(), WorkerClosed)
    assert await asyncio.wait_for(heard, LONG) == WorkerLeft(leaver.info)
    await events.aclose()


async def test_shutdown_does_not_wait_for_a_peer_that_does_not_read() -> None:
    """It gives such a peer a bounded time, and returns with every socket closed."""
    in_its_frame = RpcBackendOptions(shared_memory=0, min_bulk_bytes=1 << 40)
    async with cluster(2, options=[in_its_frame, APART]) as pair:
        assert await pair[0].call("worker1", abs, -3) == 3
        set_bounds(pair[0], connections=0.05)
        connections = list(pair[0]._node.engine.connections)
        with standing_still(pair[1]):
            call = pair[0].call("worker1", torch.numel, LARGE)
            assert any(connection.unsent for connection in connections)
            await asyncio.wait_for(pair[0].shutdown(graceful=False), LONG)
            assert len(connections) == 2 and all(connection.ended for connection in connections)
            assert isinstance(call.exception(), WorkerClosed)


async def test_a_member_that_does_not_answer_is_not_idle(pair: list[Worker]) -> None:
    """Stopped or busy, it may have calls under way: the leader asks again until it has an answer."""
    answers = 0

    def passes(passage: Passage) -> bool:
        nonlocal answers
        if passage.kind != REPLY or not passage.call.function.endswith(":poll"):
            return True
        answers += 1
        return answers > 5

    set_bounds(pair[0], poll=0.02)
    with seen(pair[1], passes):
        reports = await asyncio.gather(*(each.shutdown() for each in pair))
    assert answers > 6 and [report.timed_out for report in reports] == [False, False]


async def test_work_that_does_not_end_keeps_nobody_for_ever(
    pair: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Once all have entered, calls under way have as long as a call may take; then all leave, and one line says so."""
    assert await pair[0].call("worker1", abs, -3) == 3
    call = pair[1].peer("worker0", timeout=0).call(for_ever)
    await until(lambda: pair[0].statistics().calls_running == 1)
    pair[0].options.rpc_timeout = 0.5
    with caplog.at_level(logging.WARNING, "aiorpc"):
        await asyncio.wait_for(asyncio.gather(*(each.shutdown() for each in pair)), LONG)
    assert isinstance(call.exception(), (PeerLeft, WorkerClosed))
    (record,) = caplog.records
    assert "still had calls under way" in record.getMessage() and "worker0" in record.getMessage()


@pytest.mark.parametrize("dead", [0, 3])
async def test_a_loss_lets_nobody_go_whom_a_living_member_needs(dead: int) -> None:
    """Those that have entered serve the one that works; when that enters, too, all leave, and say who was lost."""
    async with cluster(4) as workers:
        *servers, works = [each for each in workers if each.id != dead]
        leaving = [asyncio.ensure_future(each.shutdown()) for each in servers]
        await until(lambda: len(workers[0]._node.group.departure.entered) >= 2)
        await workers[dead]._drop()
        await until(lambda: all(dead in each._node.group.lost for each in workers if each.id != dead))
        for each in servers:
            assert await works.call(each.info, abs, -3) == 3
        await asyncio.wait(leaving, timeout=0.1)
        assert not any(each.done() for each in leaving)
        reports = await asyncio.wait_for(asyncio.gather(*leaving, works.shutdown()), LONG)
        assert reports == [ShutdownReport(lost=(workers[dead].info,))] * 3


async def test_a_bound_on_the_wait_for_those_who_work_on() -> None:
    """`shutdown_timeout` is the timeout of a shutdown that has none of its own."""
    async with cluster(2, options=RpcBackendOptions(shutdown_timeout=0.1)) as (a, b):
        assert (await asyncio.wait_for(a.shutdown(), LONG)).timed_out
        assert b.state.value == "running"


async def test_who_leaves_before_the_leader_has_heard_of_it_is_not_waited_for() -> None:
    """It has no connection on which it could say goodbye; the leader sees in the store that it has left."""
    store = HashStore()
    leader, leaver = (Worker(name, rank=rank, world_size=2, store=store) for rank, name in enumerate("ab"))

    async def come_and_go() -> None:
        await leaver.start()
        await leaver.shutdown(graceful=False)

    await asyncio.wait_for(asyncio.gather(leader.start(), come_and_go()), LONG)
    assert await asyncio.wait_for(leader.shutdown(), LONG) == ShutdownReport()


async def test_a_call_whose_answer_is_being_unpickled_is_under_way(gate: Gate) -> None:
    """A large answer is unpickled in the background: until that is done the worker is not idle, and does not leave."""
    async with cluster(2, dynamic=True) as (worker, _):
        call = worker.call("worker1", unpickled_at_the_gate)
        await until(lambda: gate.entered)
        assert not worker.is_idle() and worker.statistics().calls_pending == 1
        leaving = asyncio.ensure_future(worker.shutdown())
        await asyncio.wait((leaving,), timeout=0.1)
        assert not leaving.done()
        gate.open.set()
        assert await asyncio.wait_for(call, LONG) == 200_000
        assert await asyncio.wait_for(leaving, LONG) == ShutdownReport()


class Unpickled:
    """Its pickle is large, and unpickling it calls that."""

    def __init__(self, function: Callable[[bytes], Any]) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, (bytes(200_000),)


def unpickled_at_the_gate() -> Any:
    return Unpickled(len_at_the_gate)


def len_at_the_gate(data: bytes) -> int:
    wait_at_the_gate()
    return len(data)


# --- cancelled, from a handler, again ---------------------------------------------------------------------------------


async def test_a_handler_may_shut_its_worker_down(pair: list[Worker]) -> None:
    """The closing cancels the handler that asked for it, and goes on to its end."""
    set_bounds(pair[1], tasks=0.05)
    with pytest.raises(PeerLeft, match="worker1"):
        await pair[0].call("worker1", leave)
    assert await asyncio.wait_for(pair[1].shutdown(), LONG) == ShutdownReport()
    assert pair[1]._node.engine.pool.threads == 0 and not os.path.exists(pair[1]._node.engine.record.unix_path)


async def test_shutdown_that_is_cancelled_while_it_closes_ends_all_the_same(gate: Gate) -> None:
    """Half a worker is never left: who waits is cancelled once all is closed, and later calls get the report."""
    a = await alone()
    set_bounds(a, threads=0.1)
    call = a.call("a", wait_at_the_gate)
    await until(lambda: gate.entered)
    leaving = asyncio.ensure_future(a.shutdown(graceful=False))
    await until(lambda: a.closed)
    assert not leaving.done()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not os.path.exists(a._node.engine.record.unix_path)
    assert await asyncio.wait_for(a.shutdown(), LONG) == ShutdownReport()
    assert isinstance(call.exception(), WorkerClosed)
    gate.open.set()
    await until(lambda: a._node.engine.pool.threads == 0)


async def test_graceful_shutdown_that_is_cancelled_leaves_at_once() -> None:
    """A timeout around it, or Ctrl-C, ends the waiting for others, not the closing; a second call gets the report."""
    async with cluster(2) as workers:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(workers[0].shutdown(), 0.05)
        assert workers[0].closed and not os.path.exists(workers[0]._node.engine.record.unix_path)
        assert (await workers[0].shutdown()).timed_out
        with pytest.raises(RpcError):
            await workers[1].call("worker0", abs, -3)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_shutdown_at_once_ends_a_graceful_one_that_waits(begun: bool) -> None:
    """Who leaves at once waits for nobody, also where somebody else has begun to leave with patience; both hear it."""
    async with cluster(2) as workers:
        call = workers[0].peer("worker0", timeout=0).call(for_ever)
        patient = asyncio.ensure_future(workers[0].shutdown())
        if begun:
            await until(lambda: workers[0].leaving)
        else:
            await asyncio.sleep(0)
        report = await asyncio.wait_for(workers[0].shutdown(graceful=False), LONG)
        assert report.lost == () and await patient == report and workers[0].closed
        with pytest.raises(WorkerClosed):
            await call


async def test_a_block_of_a_worker_that_was_awaited_before_is_the_end_of_it() -> None:
    """As `async with await connect()` is of other libraries; a worker that is in its block already has one alone."""
    async with await aiorpc.init("alone", rank=0, world_size=1, store=HashStore()) as worker:
        assert aiorpc.current() is worker
        with pytest.raises(RpcUsageError, match="was started before"):
            await worker.__aenter__()
    assert worker.state is WorkerState.CLOSED
    with pytest.raises(RpcUsageError, match="was started before"):
        await worker.__aenter__()


async def test_shutdown_again_with_a_loop_of_its_own() -> None:
    """A worker whose loop has ended gives its report again, also at the end of its `async with`."""
    async with aiorpc.init(
        "a", rank=0, world_size=1, store=HashStore(), options=RpcBackendOptions(dedicated_loop=True)
    ) as a:
        assert await a.call("a", abs, -3) == 3
        report = await a.shutdown()
        assert await a.shutdown() is report
    assert await a.shutdown() is report


async def test_init_that_is_cancelled_with_a_loop_of_its_own_cleans_up(caplog: pytest.LogCaptureFixture) -> None:
    """The loop ends after the clean-up, not under it: no socket is left, and no task is destroyed while pending."""
    store, before = HashStore(), private_files()
    a = aiorpc.init(
        "a", rank=0, world_size=2, store=store, options=RpcBackendOptions(dedicated_loop=True, rpc_timeout=20)
    )
    joining = asyncio.ensure_future(a.start())
    await until(lambda: store.check(["aiorpc/1/slot/0"]))
    assert private_files() - before
    with caplog.at_level(logging.WARNING):
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
    assert private_files() <= before and a.closed
    assert not caplog.records


async def test_init_with_a_loop_of_its_own_that_is_cancelled_as_it_has_joined_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the loop that awaits it hears of that: as above, and its own loop does not end under it."""
    a = aiorpc.init("a", rank=0, world_size=1, store=HashStore(), options=APART)
    joining = asyncio.ensure_future(a.start())
    await asyncio.sleep(0)
    wait_until(lambda: a.state is WorkerState.RUNNING)  # this loop stands still
    assert joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert a.state is WorkerState.CLOSED
    assert not caplog.records


async def cancel_again_and_again(task: asyncio.Task[Any]) -> None:
    """In each turn of the loop, until it has ended."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


@pytest.mark.parametrize("options", [RpcBackendOptions(), APART], ids=["one loop", "apart"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_init_that_is_cancelled_again_and_again_cleans_up(
    options: RpcBackendOptions, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever is cancelled hears so behind the end of the worker, however often that is."""
    store, before = HashStore(), private_files()
    a = aiorpc.init("a", rank=0, world_size=2, store=store, options=options)
    joining = asyncio.ensure_future(a.start())
    if not at_once:
        await until(lambda: store.check(["aiorpc/1/slot/0"]))
    await asyncio.sleep(0)
    await cancel_again_and_again(joining)
    assert a.state is WorkerState.CLOSED
    assert private_files() == before and not caplog.records


@pytest.mark.parametrize("options", [RpcBackendOptions(), APART], ids=["one loop", "apart"])
async def test_a_block_that_is_cancelled_again_and_again_is_left_behind_the_end_of_its_worker(
    options: RpcBackendOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancelled in it, and while it leaves: nothing of the worker is left, and the others have seen it leave."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (first,):
        late = aiorpc.init("late", store=store, options=options)
        before = asyncio.all_tasks()

        async def stay() -> None:
            async with late:
                assert await late.call("worker0", abs, -3) == 3
                assert await first.call("late", abs, -3) == 3
                await for_ever()

        staying = asyncio.ensure_future(stay())
        await until(lambda: late.state is WorkerState.RUNNING and late.statistics().calls_served)
        await cancel_again_and_again(staying)
        assert late.state is WorkerState.CLOSED
        await until(lambda: [info.name for info in first.worker_infos()] == ["worker0"])
        await until(lambda: asyncio.all_tasks() <= before)
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
    assert a._node.group.members[1] == b._node.engine.record
    await asyncio.gather(a.shutdown(), b.shutdown())


async def test_init_that_is_given_up_leaves_nobody_in_a_group_without_a_size() -> None:
    """Its name is free, and the others do not look for it, whatever the store was doing for it just then."""
    stuck = Stuck(first=True)

    class SlowToAnswer(WatchedStore):
        """It enters the first member in the list, and does not say so."""

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            value = super().compare_set(key, expected, desired)
            stuck("compare_set", (key,))
            return value

    store = SlowToAnswer()
    await give_up_once_joining(aiorpc.init("a", store=store), stuck.entered.is_set)
    async with aiorpc.init("a", store=store) as a:
        assert [info.name for info in a.worker_infos()] == ["a"]
        stuck.open.set()
        assert await a.call("a", abs, -3) == 3
    await until(lambda: not rendezvous_threads())


# --- the rendezvous ---------------------------------------------------------------------------------------------------


def rendezvous_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith("-rendezvous")]


@pytest.mark.parametrize("graceful", [False, True])
async def test_a_store_that_does_not_answer_is_left_without_a_word(
    caplog: pytest.LogCaptureFixture, graceful: bool
) -> None:
    """Its process is stopped, say: leaving is bounded all the same, and says so."""
    store, stuck = WatchedStore(), Stuck()
    async with cluster(1, dynamic=True, store=store) as (worker,):
        set_bounds(worker, store=0.1)
        store.look = stuck
        await asyncio.wait_for(worker.shutdown(graceful), LONG)
        assert stuck.entered.is_set() and worker.closed
        assert "worker worker0 left without a word to the store of" in caplog.text
        stuck.open.set()
    await until(lambda: not rendezvous_threads())


async def test_leaving_waits_for_what_is_under_way_at_the_store() -> None:
    """A thread that is left inside of torch when the interpreter ends takes the process down."""
    store, stuck = WatchedStore(), Stuck(first=True)
    async with cluster(1, dynamic=True, store=store) as (worker,):
        store.look = stuck
        assert await asyncio.to_thread(stuck.entered.wait, 10)
        leaving = asyncio.ensure_future(worker.shutdown())
        await until(lambda: worker.closed)
        await asyncio.wait((leaving,), timeout=0.1)
        assert not leaving.done()
        stuck.open.set()
        await leaving
        assert not rendezvous_threads()


async def test_without_the_store_unknown_workers_cannot_be_found() -> None:
    """The error names who is missing and why; the worker itself is well."""

    def go(operation: str, keys: tuple[str, ...]) -> None:
        raise RuntimeError("it has gone")

    store = WatchedStore()
    async with cluster(1, dynamic=True, store=store) as (worker,):
        store.look = go
        why = "the store at .given. no longer answers: it has gone"
        with pytest.raises(RendezvousError, match=f"'worker0' cannot find 'nobody': {why}"):
            await worker.call("nobody", abs, -3)
        with pytest.raises(RendezvousError, match=why):
            worker.remote("nobody", dict)
        assert await worker.call("worker0", abs, -3) == 3


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
    store = HashStore()
    a = aiorpc.init("a", rank=0, world_size=2, store=store, options=RpcBackendOptions(rpc_timeout=30))
    joining = asyncio.ensure_future(a.start())
    await until(lambda: store.check(["aiorpc/1/slot/0"]))
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
    await a._drop()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert a.state is WorkerState.CLOSED
