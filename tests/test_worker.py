"""A worker has the verbs of the module as methods, which act for it whichever worker is current."""

from __future__ import annotations

import inspect

import pytest

import aiorpc as rpc
from aiorpc.testing import cluster

#: Of the module alone: what makes the worker, blocks for it, or is about a call and not about a worker.
WITHOUT_WORKER = {"init", "init_rpc", "launched", "current", "rpc_sync", "rpc_async", "collect_all", "wait_all"}
NOT_VERBS = {
    *("async_execution", "batched", "exposed", "register_safe"),
    *("caller", "cancelled", "check_cancelled", "deadline"),
}


def test_a_worker_has_what_the_module_has() -> None:
    """Each verb, and the classes that belong to a worker, with the same parameters."""
    verbs = {name for name in rpc.__all__ if inspect.isfunction(getattr(rpc, name))} - NOT_VERBS - WITHOUT_WORKER
    assert {"queue", "serve", "publish", "stream"} <= verbs
    assert [name for name in sorted(verbs | {"RRef", "Queue"}) if not hasattr(rpc.Worker, name)] == []
    for name in verbs - {"remote", "get_worker_info", "shutdown"}:  # torch's forms are the module's alone
        own = list(inspect.signature(getattr(rpc.Worker, name)).parameters)[1:]
        assert own == list(inspect.signature(getattr(rpc, name)).parameters), name


#: The workers of a test, for its handler.
WORKERS: list[rpc.Worker] = []


async def use_the_first() -> list[str]:
    """A handler of the second worker."""
    first, second = WORKERS
    assert rpc.current() is second
    reference, queue = first.RRef([1]), first.Queue("mine", 2)
    handle = first.queue("mine", owner="worker0")
    await handle.put("item")
    assert (await reference, await queue.get(), queue.maxsize) == ([1], "item", 2)
    return [reference.owner_name(), queue.owner, handle.owner]


async def test_references_and_queues_are_those_of_the_worker_that_is_asked() -> None:
    """Of two in one process, also in a handler of the other one, where that is the current worker."""
    async with cluster(2) as workers:
        WORKERS[:] = workers
        queues = [workers[0].Queue("other")]
        with pytest.raises(rpc.RpcUsageError, match="has a queue, or serves an object, of the name 'other' already"):
            workers[0].Queue("other")
        assert await workers[0].call("worker1", use_the_first) == ["worker0"] * 3
        await workers[1].queue("other", owner="worker0").put(2)
        assert await queues[0].get() == 2
        WORKERS.clear()
    for make in (lambda: workers[0].RRef(1), lambda: workers[0].Queue("q"), lambda: workers[0].queue("q", owner="a")):
        with pytest.raises(rpc.WorkerClosed):
            make()
