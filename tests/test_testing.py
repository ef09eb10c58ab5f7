"""The clusters for users' tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc import RpcBackendOptions
from aiorpc.testing import blocking_cluster, cluster, process_cluster
from tests.ports import free_port


def add(a: int, b: int = 1) -> int:
    return a + b


def where() -> str:
    return aiorpc.current()._node.engine.record.incarnation


async def nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


async def test_workers_have_names_and_ids_in_order() -> None:
    """worker0, worker1... with ids 0, 1..., on the running loop."""
    async with cluster(3) as workers:
        assert [(worker.name, worker.id) for worker in workers] == [("worker0", 0), ("worker1", 1), ("worker2", 2)]
        assert all(worker.loop is asyncio.get_running_loop() for worker in workers)


async def test_options_for_all_or_for_each() -> None:
    """One set of options is used by all workers, a sequence gives each its own."""
    async with cluster(2, options=RpcBackendOptions(rpc_timeout=7.0)) as workers:
        assert [worker._node.engine.default_timeout for worker in workers] == [7.0, 7.0]
    each = [RpcBackendOptions(rpc_timeout=5.0), RpcBackendOptions(rpc_timeout=6.0)]
    async with cluster(2, options=each) as workers:
        assert [worker._node.engine.default_timeout for worker in workers] == [5.0, 6.0]


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
async def test_an_impossible_size_is_refused(size: int) -> None:
    """A cluster has at least one worker."""
    with pytest.raises(aiorpc.RpcUsageError, match="at least 1 worker"):
        async with cluster(size):
            pass


async def test_roles_are_one_for_each() -> None:
    """They stand in the records; another number of them is refused, and a lone text."""
    async with cluster(2, roles=["learner", "actor"]) as workers:
        assert [worker._node.engine.record.role for worker in workers] == ["learner", "actor"]
    for roles in (["learner"], "ab"):
        with pytest.raises(aiorpc.RpcUsageError, match="roles must be"):
            async with cluster(2, roles=roles):
                pass


async def test_the_end_is_clean_when_the_body_raises() -> None:
    """The body's error comes out; all workers are closed; calls under way fail."""
    with pytest.raises(ZeroDivisionError):
        async with cluster(2) as workers:
            call = workers[0].call("worker1", nap, 60.0)
            await workers[0].call("worker1", add, 1)
            raise ZeroDivisionError
    assert all(worker.closed for worker in workers)
    with pytest.raises((aiorpc.WorkerClosed, aiorpc.PeerLeft)):
        await call


async def test_the_end_waits_for_calls_under_way() -> None:
    """A call that is under way when the block ends is served to its end."""
    async with cluster(2) as workers:
        call = workers[0].call("worker1", nap, 0.05)
    assert await call == 0.05


async def test_a_worker_may_leave_inside_the_block() -> None:
    """A worker that the test itself has shut down is no problem at the end."""
    async with cluster(2) as workers:
        await workers[1].shutdown(graceful=False)
    assert all(worker.closed for worker in workers)


async def test_a_worker_that_cannot_start_ends_the_cluster() -> None:
    """What the start of one worker raises comes out, with all others closed."""
    bad = [RpcBackendOptions(), RpcBackendOptions(transports=("tcp",), bind_address="203.0.113.1")]
    with pytest.raises((OSError, aiorpc.RpcError)):
        async with cluster(2, options=bad):
            pass


async def test_others_join_a_dynamic_cluster() -> None:
    """With dynamic=True a further worker joins at the same store."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        async with aiorpc.init("late", store=store) as late:
            assert await workers[0].call("late", add, 1) == 2
            assert await late.call("worker1", add, 2) == 3
        assert late.closed


async def test_clusters_one_after_the_other_and_side_by_side() -> None:
    """Clusters do not see each other: handlers run on the worker of the caller's own cluster."""
    async with cluster(2) as first, cluster(2) as second:
        for workers in (first, second):
            assert await workers[0].call("worker1", where) == workers[1]._node.engine.record.incarnation
    async with cluster(2) as third:
        assert await third[1].call("worker0", where) == third[0]._node.engine.record.incarnation


def test_a_blocking_cluster_needs_no_loop() -> None:
    """Its workers are called by code that blocks, and are closed behind the block."""
    with blocking_cluster(3) as workers:
        assert [worker.call("worker2", add, worker.id).wait() for worker in workers] == [1, 2, 3]
    assert all(worker.closed for worker in workers)


async def test_futures_of_a_blocking_cluster_are_awaited_on_any_loop(blocking_workers: list[aiorpc.Worker]) -> None:
    """An async test uses it as well, although its workers have loops of their own."""
    assert await blocking_workers[0].call("worker1", add, 1) == 2
    assert asyncio.get_running_loop() not in {worker.loop for worker in blocking_workers}


@pytest.fixture
def blocking_workers() -> Iterator[list[aiorpc.Worker]]:
    with blocking_cluster(2) as workers:
        yield workers


def test_a_blocking_cluster_does_not_wait_for_calls_under_way() -> None:
    """At its end they fail."""
    with blocking_cluster(2) as workers:
        call = workers[0].call("worker1", nap, 60.0)
        assert workers[0].call("worker1", add, 1).wait() == 2
    with pytest.raises((aiorpc.WorkerClosed, aiorpc.PeerLeft)):
        call.wait()


def test_a_blocking_cluster_that_cannot_start_leaves_nothing() -> None:
    """What the start of a worker raises comes out."""
    bad = RpcBackendOptions(transports=("tcp",), bind_address="203.0.113.1")
    with pytest.raises((OSError, aiorpc.RpcError)), blocking_cluster(2, options=[RpcBackendOptions(), bad]):
        pass


@pytest.mark.slow
def test_workers_in_processes() -> None:
    """Each has a process; one that is killed is lost, and another process takes its name."""
    with process_cluster(2) as group:
        pids = {name: process.pid for name, process in group.processes.items()}
        assert {name: group.worker.call(name, os.getpid).wait() for name in pids} == pids
        with pytest.raises(aiorpc.RpcUsageError, match="lives"):
            group.start("worker1")
        group.kill("worker1")
        with pytest.raises(aiorpc.PeerLost):
            group.worker.call("worker1", os.getpid).wait()
        group.start("worker1")
        assert group.worker.call("worker1", os.getpid).wait() not in (*pids.values(), os.getpid())
        processes = list(group.processes.values())
    for process in processes:
        with pytest.raises(ValueError, match="closed"):
            process.is_alive()


@pytest.mark.slow
def test_a_process_that_cannot_join_says_why() -> None:
    """Its error comes out, with its name: here the one port that there is has been taken by this process."""
    port = free_port()
    options = RpcBackendOptions(transports=("tcp",), port_range=(port, port))
    reason = r"'worker0' cannot join: .*port"
    with pytest.raises(aiorpc.errors.RendezvousError, match=reason), process_cluster(1, options=options):
        pass
