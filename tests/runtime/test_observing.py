"""Observers see each message that passes a link, on its way out and in: its kind, call, peer, size and channels."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol.frames import Kind
from aiorpc.runtime.caller.future import CallFuture
from aiorpc.runtime.calls.current import ServedCall
from aiorpc.runtime.engine.observing import Passage
from aiorpc.testing import cluster
from tests.runtime.waiting import LIMIT, until

MIB = 1 << 20
OF_CALLS = (Kind.CALL, Kind.REPLY, Kind.ERROR, Kind.ITEM, Kind.CREDIT, Kind.CANCEL)
# (channel that large buffers go by, options that lead there)
WAYS = {
    "shared memory": RpcBackendOptions(shared_memory=16 * MIB),
    "bulk": RpcBackendOptions(transports=("tcp",)),
}


class Watcher:
    """Notes what passes, and lets it pass."""

    def __init__(self) -> None:
        self.left: list[Passage] = []
        self.arrived: list[Passage] = []

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        self.left.append(passage)
        send()

    def arriving(self, passage: Passage) -> None:
        self.arrived.append(passage)

    def holds(self) -> bool:
        return False


def echo(value: torch.Tensor) -> torch.Tensor:
    """Handler."""
    return value


def fail() -> None:
    """Handler."""
    raise ValueError("wanted")


async def count() -> AsyncIterator[torch.Tensor]:
    """Handler."""
    for number in range(3):
        yield torch.full((number * 100_000 + 1,), 1.0)


def seen(passages: list[Passage]) -> Counter[tuple[Kind, int, bytes, int, tuple[str, ...]]]:
    """What can be compared of the messages about calls."""
    return Counter(
        (Kind(each.kind), each.call_id, each.body, each.size, tuple(each.channels))
        for each in passages
        if each.kind in OF_CALLS
    )


@pytest.mark.parametrize("channel", WAYS)
async def test_a_message_is_shown_alike_at_both_ends(channel: str) -> None:
    """Whatever way its buffers take: of the same size, by the same channels, and of the same call."""
    async with cluster(2, options=WAYS[channel]) as workers:
        for worker, other in zip(workers, ("worker1", "worker0"), strict=True):
            await worker.call(other, echo, torch.ones(2, 2))  # before there is a connection, no channel is chosen
        watchers = [Watcher(), Watcher()]
        for worker, watcher in zip(workers, watchers, strict=True):
            worker._node.engine.observers = (watcher,)
        large = torch.ones(2 * MIB)
        async with asyncio.timeout(LIMIT):  # until memory is mapped, or a second connection is there
            while not any(channel in each.channels for each in watchers[1].arrived):
                assert torch.equal(await workers[0].call("worker1", echo, large), large)
        await workers[0].call("worker1", echo, torch.ones(2, 2))
        with pytest.raises(ValueError, match="wanted"):
            await workers[0].call("worker1", fail)
        assert [len(item) async for item in workers[0].stream("worker1", count)] == [1, 100_001, 200_001]
        here, there = watchers
        await until(lambda: seen(here.left) == seen(there.arrived) and seen(there.left) == seen(here.arrived))
        assert {each.kind for each in here.arrived} >= {Kind.REPLY, Kind.ERROR, Kind.ITEM}
        sizes = [each.size for each in there.arrived if channel in each.channels]
        assert sizes and all(size > large.nbytes for size in sizes)


async def test_who_and_which_call(pair: list[Worker]) -> None:
    """The peer is named, and the call is the one that the runtime keeps, until it has ended."""
    watchers = [Watcher(), Watcher()]
    for worker, watcher in zip(pair, watchers, strict=True):
        worker._node.engine.observers = (watcher,)
    future = pair[0].call("worker1", echo, torch.ones(2))
    assert isinstance(future, CallFuture)
    await future
    here, there = watchers
    (reply,) = [each for each in here.arrived if each.kind == Kind.REPLY and each.call_id == future.call_id]
    assert reply.call is future and reply.record.name == "worker1"
    (asked,) = [each for each in here.left if each.kind == Kind.CALL and each.call_id == future.call_id]
    assert isinstance(asked.call, CallFuture) and asked.call is future
    (came,) = [each for each in there.arrived if each.kind == Kind.CALL and each.call_id == future.call_id]
    assert came.call is None and came.record.name == "worker0"
    (answered,) = [each for each in there.left if each.kind == Kind.REPLY and each.call_id == future.call_id]
    assert isinstance(answered.call, ServedCall) and answered.call.call_id == future.call_id
