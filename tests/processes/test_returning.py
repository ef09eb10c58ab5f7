"""A process that is killed and started again takes its place in a group that goes on: the same name, another worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.limits import busy

from . import bodies
from .workers import Child, Children, meeting_file, places, processes, serve, until

SOON = 5.0  # seconds until a new process has the place, from its `init` on
PATIENCE = 30.0
SIZE = 3


@asynccontextmanager
async def group(rank: int, ended: tuple[str, ...], **options: Any) -> AsyncIterator[tuple[rpc.Worker, Children]]:
    """This process has that rank; the others serve in theirs. ended: who is expected to be killed."""
    with processes() as children, meeting_file() as init_method:
        where = places(SIZE, init_method)
        for place in where:
            if place.rank != rank:
                children.start(place, serve, options)
        chosen = rpc.RpcBackendOptions(**options)
        name = where[rank].name
        async with rpc.init(name, rank=rank, world_size=SIZE, init_method=init_method, options=chosen) as worker:
            yield worker, children
        await asyncio.to_thread(lambda: children.check_ended(but=ended))


async def kill(worker: rpc.Worker, child: Child) -> None:
    """Kill it, and wait until that is known here."""
    child.kill()
    await until(lambda: any(info.name == child.place.name for info in worker._node.group.lost.values()))


async def come_back(children: Children, *names: str, **options: Any) -> None:
    """Start new processes in these places, and wait until all know them; fails if that takes too long."""
    began = time.monotonic()
    for name in names:
        old = children[name]
        children.start(old.place, serve, options)
    for name in names:
        await until(lambda name=name: answers(name, children[name].pid), PATIENCE)  # type: ignore[misc]  # of a lambda with a default
    assert time.monotonic() - began < SOON * busy()


def pid_of(name: str) -> int:
    """Of the process behind a name, as this worker finds it."""
    return int(rpc.rpc_sync(name, bodies.pid))


def pid_of_member() -> int:
    """Of this process; 0 before its `init` has returned, as all know it then. `serve` leaves at once after that."""
    return os.getpid() if rpc.current().state.value == "leaving" else 0


async def answers(name: str, pid: int) -> bool:
    """Whether the process behind that name is that one, and a member that all others know."""
    try:
        return bool(await rpc.peer(name, timeout=PATIENCE).call(pid_of_member) == pid)
    except rpc.PeerLost:
        return False


async def test_a_member_is_killed_and_started_again_twice() -> None:
    """It can be called by name from everywhere; what the old process had stays lost, gradients under way end."""
    async with group(0, ("w2",)) as (worker, children):
        news = worker.events()
        old = rpc.remote("w2", bodies.Counter, 5)
        assert await old.rpc_async().add(1) == 6
        under_way: list[Any] = [
            rpc.call("w2", bodies.ablock),
            asyncio.ensure_future(asyncio.to_thread(backward_through, "w2")),
        ]
        await until(lambda: running("w2", 2))
        children["w2"].kill()
        for each in under_way:
            with pytest.raises(rpc.PeerLost, match="w2"):
                await asyncio.wait_for(each, PATIENCE)
        await come_back(children, "w2")
        kinds = [type(await asyncio.wait_for(anext(news), PATIENCE)) for _ in range(2)]
        assert kinds == [rpc.events.WorkerLost, rpc.events.WorkerReplaced]
        assert await rpc.call("w1", pid_of, "w2") == children["w2"].pid
        with pytest.raises(rpc.PeerLost, match="w2"):
            await old.rpc_async().add(1)
        first = rpc.remote("w2", bodies.Counter, 1)
        assert await first.rpc_async().add(1) == 2
        await kill(worker, children["w2"])
        await come_back(children, "w2")
        for lost in (old, first):
            with pytest.raises(rpc.PeerLost, match="w2"):
                await lost.rpc_async().add(1)
        assert await rpc.call("w1", pid_of, "w2") == children["w2"].pid
        await news.aclose()
        del old, first


def backward_through(name: str) -> None:
    """A backward pass that waits in that worker for ever, as its leaf is behind a hook that does."""
    weight = torch.ones(3, requires_grad=True)
    with rpc.autograd.context() as context:
        loss = rpc.rpc_sync(name, slow_to_differentiate, (weight,)).sum()
        rpc.autograd.backward(context, [loss])


class Slow(torch.autograd.Function):
    """The identity, whose gradient takes very long."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        bodies.block()


def slow_to_differentiate(value: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(Slow.apply(value))  # type: ignore[no-untyped-call]  # torch's


async def running(worker: str, count: int) -> bool:
    """Whether a worker says that it runs so many calls."""
    return int(await rpc.call(worker, served_calls)) >= count


def served_calls() -> int:
    """Calls under way at this worker, this one apart."""
    return sum(call.direction == "served" for call in rpc.current().pending_calls()) - 1


@pytest.mark.parametrize("transports", [("unix",), pytest.param(("tcp",), marks=pytest.mark.long)], ids=str)
async def test_the_leader_is_killed_and_started_again_with_another_one(transports: tuple[str, ...]) -> None:
    """Two at once, one of them the leader: who is left lets both in, and goes on leading."""
    async with group(1, ("w0", "w2"), transports=transports) as (worker, children):
        assert await rpc.call("w0", bodies.add, 1, 2) == 3
        for name in ("w0", "w2"):
            children[name].kill()
        await until(lambda: len(worker._node.group.lost) == 2)
        await come_back(children, "w0", "w2", transports=transports)
        assert worker._node.group.leads
        pids = {"w0": children["w0"].pid, "w1": os.getpid(), "w2": children["w2"].pid}
        for name, other in (("w0", "w2"), ("w2", "w0"), ("w0", "w1")):
            assert await rpc.call(name, pid_of, other) == pids[other]
        assert [info.name for info in worker.worker_infos()] == ["w0", "w1", "w2"]


@pytest.mark.long
async def test_a_process_too_many_is_refused() -> None:
    """The one that is there goes on; the other one's `init` raises, and names it."""
    async with group(0, ("w1",)) as (_, children):
        pid = children["w1"].pid
        second = children.start(children["w1"].place, serve, {})
        with pytest.raises(AssertionError, match=rf"w1 \(rank 1, pid {pid} .*the first lives: process {pid} of this"):
            await second.ahear(PATIENCE)
        assert await rpc.call("w1", bodies.pid) == pid
