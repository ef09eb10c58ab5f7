"""Cases of workers, peers, groups, queues, publications and decorators. See `calls`."""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from typing import Any, assert_type

import torch

import aiorpc as rpc

from .functions import Model, acted, add, count, doubled, fetch, later, lines, pair


async def worker(worker: rpc.Worker) -> None:
    """The verbs of a worker."""
    assert_type(worker.call("w", add, 1), rpc.Future[int])
    assert_type(await worker.call("w", fetch, "k"), bytes)
    assert_type(await worker.call("w", later, 1), float)
    assert_type(await worker.call("w", doubled, 1), float)
    assert_type(worker.remote("w", Model, 3), rpc.RRef[Model])
    assert_type([item async for item in worker.stream("w", lines, "p")], list[str])

    worker.call("w", add, "1")  # type: ignore
    worker.call("w", fetch)  # type: ignore
    worker.remote("w", Model, "3")  # type: ignore
    worker.stream("w", count)  # type: ignore


async def peer() -> None:
    """The verbs of a peer's handle, and the methods of an object that it serves."""
    peer = rpc.peer("w", timeout=3)
    assert_type(peer.call(add, 1), rpc.Future[int])
    assert_type(await peer.call(fetch, "k"), bytes)
    assert_type(await peer.call(later, 1), float)
    assert_type(await peer.call(doubled, 1), float)
    assert_type(peer.remote(Model, 3), rpc.RRef[Model])
    assert_type([item async for item in peer.stream(count, 3)], list[int])
    assert_type(peer.object("model").score(1), rpc.Future[Any])
    assert_type(peer.object("model").rpc_sync().score(1), Any)
    assert_type(peer.object("model").remote().score(1), rpc.RRef[Any])

    peer.call(add, "1")  # type: ignore
    peer.call("w", add, 1)  # type: ignore
    peer.remote(Model)  # type: ignore
    peer.stream(add, 1)  # type: ignore
    peer.object("model").score(1) + 1  # type: ignore


async def group() -> None:
    """The verbs of a group, and what they give for each member."""
    group = rpc.group("actor*", quorum=0.5)
    outcomes = await group.call(add, 1)
    assert_type(outcomes.values(), list[int])
    assert_type(outcomes.answers, dict[str, int])
    assert_type(outcomes["a0"].result(), int)
    assert_type(outcomes["a0"].value, int | None)
    assert_type((await group.call(fetch, "k")).values(), list[bytes])
    assert_type((await group.call(doubled, 1)).values(), list[float])
    assert_type(group.rpc_sync(add, args=(1,)).values(), list[int])
    assert_type((await group.rpc_async(later, args=(1,), quorum=2)).values(), list[float])
    async for member, outcome in group.call(add, 1):
        assert_type(member, str)
        assert_type(outcome.result(), int)
    assert_type(await group.any(fetch, "k"), bytes)
    assert_type([result async for result in group.map(add, [1, 2])], list[int])
    assert_type([result async for result in group.map(fetch, ["k"])], list[bytes])
    assert_type([item async for item in group.stream(lines, "p")], list[tuple[str, str]])
    refs = group.remote(Model, 3)
    assert_type(refs["a0"], rpc.RRef[Model])
    assert_type((await refs).values(), list[Model])
    assert_type((await refs.rpc_async().score(1)).values(), list[Any])
    assert_type((await group.object("model").score(1)).values(), list[Any])

    group.call(add, "1")  # type: ignore
    group.any(fetch, 1)  # type: ignore
    group.map(add, ["1"])  # type: ignore
    group.stream(count, "3")  # type: ignore
    group.remote(Model, "3")  # type: ignore
    outcomes.values().append("1")  # type: ignore


async def queue() -> None:
    """A queue, and the handle of another worker's."""
    queue = rpc.Queue[int]("numbers", maxsize=3)
    assert_type(await queue.get(), int)
    assert_type(await queue.get_many(3), list[int])
    assert_type(queue.get_nowait().wait(), int)
    assert_type(await queue.put(1), None)
    assert_type(await queue.qsize(), int)
    handle: rpc.types.QueueHandle[str] = rpc.queue("names", owner="w")
    assert_type(await handle.get(), str)
    with queue as entered:
        assert_type(entered, rpc.Queue[int])

    queue.put("1")  # type: ignore
    handle.put_nowait(1)  # type: ignore
    await queue.get() + "1"  # type: ignore


async def publish(weights: dict[str, torch.Tensor]) -> None:
    """A publication, and a subscription to it."""
    publication = await rpc.publish("policy", weights)
    assert_type(publication, rpc.types.Publication)
    versions: rpc.types.Subscription[dict[str, torch.Tensor]] = rpc.subscribe("policy")
    async for version in versions:
        assert_type(version, rpc.types.PublishedVersion[dict[str, torch.Tensor]])
        assert_type(version.value["w"], torch.Tensor)
        assert_type(version.publisher, rpc.WorkerInfo)
    assert_type(versions.newest(), rpc.types.PublishedVersion[dict[str, torch.Tensor]] | None)
    async with rpc.subscribe("policy") as opened:
        assert_type((await anext(opened)).value, Any)

    rpc.publish(1, weights)  # type: ignore
    publication.delivered("all")  # type: ignore
    rpc.subscribe("policy", timeout="3")  # type: ignore


async def decorators(x: torch.Tensor) -> None:
    """What is decorated may be called here as before."""
    assert_type(doubled([1, 2]), list[float])
    assert_type(await acted([x]), torch.Tensor)
    assert_type(later(1), torch.futures.Future[float])

    doubled(1)  # type: ignore
    rpc.async_execution(add)  # type: ignore
    rpc.batched(max_size=4)(add)  # type: ignore
    rpc.batched(max_size=4)(count)  # type: ignore
    rpc.batched(max_size="4")  # type: ignore
    pair(*doubled([1]))  # type: ignore


class Policy:
    """A method that serves many callers."""

    @rpc.batched(max_size=4, max_wait=0.01)
    def act(self, states: list[torch.Tensor]) -> list[int]:
        """One action for each."""
        return [0 for _ in states]


async def methods(policy: Policy, x: torch.Tensor) -> None:
    """A batched method, here and there."""
    assert_type(policy.act([x]), list[int])
    assert_type(await rpc.call("w", policy.act, x), int)

    policy.act(x)  # type: ignore
