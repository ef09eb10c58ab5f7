"""Shared memory between real processes: both ways, and when one of them is killed."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch

import aiorpc as rpc
from aiorpc.options import SHARE_SIZE

from . import bodies
from .workers import group, until

COUNT = SHARE_SIZE // 4 + 1024
_kept: list[Any] = []


def large(seed: int = 0) -> torch.Tensor:
    """A tensor that goes through shared memory."""
    return torch.arange(seed, seed + COUNT, dtype=torch.float32)


def keep(value: Any) -> None:
    """Hold it until the process ends."""
    _kept.append(value)


def shared_sent() -> int:
    """How many buffers that worker has sent through shared memory."""
    return rpc.current().statistics().channels["shared memory"].sent


def shared_lent() -> int:
    """Bytes that others hold of that worker's memory."""
    return rpc.current().statistics().shared_lent


async def warm(worker: rpc.Worker, name: str) -> None:
    """Call until both ways go through shared memory, and what was lent is back."""

    async def both_share() -> bool:
        assert torch.equal(await rpc.call(name, bodies.echo, large()), large())
        return worker.statistics().channels["shared memory"].sent > 0 and await rpc.call(name, shared_sent) > 0

    await until(both_share)
    await until_all_back(worker, name)


async def until_all_back(worker: rpc.Worker, name: str | None = None) -> None:
    """Return once nothing is lent any more, by this worker and by that one."""

    async def all_back() -> bool:
        return worker.statistics().shared_lent == 0 and (name is None or await rpc.call(name, shared_lent) == 0)

    await until(all_back)


async def test_large_tensors_pass_through_shared_memory_both_ways() -> None:
    """Between two processes, to handlers of both kinds; what is dropped on either side goes back."""
    async with group(2) as (worker, _):
        await warm(worker, "w1")
        before = worker.statistics().channels["shared memory"].sent, await rpc.call("w1", shared_sent)
        for seed in range(50):
            assert torch.equal(await rpc.call("w1", bodies.add, large(seed), 1), large(seed + 1))
            assert torch.equal(await rpc.call("w1", bodies.aadd, large(seed), 1), large(seed + 1))
        assert worker.statistics().channels["shared memory"].sent == before[0] + 100
        assert await rpc.call("w1", shared_sent) == before[1] + 100
        assert set(worker.statistics().channels["shared memory"].refused) <= {"not mapped", "cold"}
        await until_all_back(worker, "w1")


async def test_what_a_killed_process_held_is_taken_back() -> None:
    """Its tensors, in use by nobody any more, are free again, and serve the others."""
    async with group(3, ended=("w1",)) as (worker, children):
        await warm(worker, "w1")
        await warm(worker, "w2")
        for seed in range(5):
            await rpc.call("w1", keep, large(seed))
        assert worker.statistics().shared_lent == 5 * large().nbytes
        children["w1"].kill()
        await until_all_back(worker)
        assert worker._node.memory.arena.used == 0
        assert torch.equal(await rpc.call("w2", bodies.echo, large()), large())


def break_connections() -> None:
    """Handler: all connections of that worker end without a word, and its process lives on."""
    worker = rpc.current()
    for connection in list(worker._node.engine.connections):
        worker.loop.call_soon_threadsafe(connection.abort)


async def test_a_connection_that_ends_before_its_process_leaves_nothing_lent() -> None:
    """While the process is not proved gone its memory stays lent; the proof comes with its end, and needs no call."""
    async with group(2, ended=("w1",)) as (worker, children):
        await warm(worker, "w1")
        await rpc.call("w1", keep, large())
        with contextlib.suppress(rpc.PeerLost):  # its answer may be too late
            await rpc.call("w1", break_connections)
        await until(lambda: [info.name for info in worker.worker_infos()] == ["w0"] and not worker._node.links.all())
        assert worker.statistics().shared_lent == large().nbytes
        children["w1"].kill()
        await until_all_back(worker)


async def test_what_came_from_a_killed_process_stays_readable() -> None:
    """The memory is the receiver's for as long as it looks at it, whatever became of the sender."""
    async with group(2, ended=("w1",)) as (worker, children):
        await warm(worker, "w1")
        before = await rpc.call("w1", shared_sent)
        kept = [await rpc.call("w1", bodies.add, large(seed), 0) for seed in range(5)]
        assert await rpc.call("w1", shared_sent) == before + 5
        children["w1"].kill()
        await until(lambda: [info.name for info in worker.worker_infos()] == ["w0"])
        for seed, tensor in enumerate(kept):
            assert torch.equal(tensor, large(seed))
            tensor += 1
            assert torch.equal(tensor, large(seed + 1))
        del kept, tensor
        gc.collect()
