"""Groups of workers in processes: a member that is killed is named, the others answer, and its memory comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.authority import Authority
from tests.processes.workers import LIMIT, group, until

FILES: dict[str, torch.Tensor] = {}


def whoami() -> str:
    return rpc.current().name


async def end_at(name: str) -> str:
    """The worker of that name is killed in the midst of the call."""
    if rpc.current().name == name:
        os.kill(os.getpid(), signal.SIGKILL)
    return rpc.current().name


def keep(tensor: torch.Tensor) -> int:
    """Keep it, and write to it."""
    tensor[-1] = os.getpid()
    FILES["kept"] = tensor
    return int(tensor.sum())


def kept() -> tuple[int, bool]:
    """What was written to it, and whether it is mapped privately, from shared memory."""
    tensor = FILES["kept"]
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= at < end:
            return int(tensor[-1]) - os.getpid(), "p " in line[:60] and "aiorpc" in line
    return 0, False


def drop() -> None:
    FILES.clear()


async def test_a_member_that_is_killed_is_lost_and_the_others_answer() -> None:
    """Its outcome says so; who is waited for with a quorum is not missed; the next call is to the rest."""
    async with group(5, ended=("w3",)) as (worker, _):
        everybody = worker.group("w*")
        assert (await everybody.call(whoami)).values() == ["w0", "w1", "w2", "w3", "w4"]
        outcomes = await everybody.call(end_at, "w3")
        assert outcomes.lost == ("w3",)
        assert list(outcomes.answers) == ["w0", "w1", "w2", "w4"]
        assert isinstance(outcomes["w3"].error, rpc.PeerLost)
        with pytest.raises(rpc.GroupError) as caught:
            await worker.group(["w1", "w3"], quorum=2).call(whoami)
        assert caught.value.lost == ("w3",)
        assert (await everybody.call(whoami)).values() == ["w0", "w1", "w2", "w4"]
        results = [result async for result in worker.group("w[1-4]").map(square, range(8))]
        assert results == [number**2 for number in range(8)]


def square(number: int) -> int:
    return number**2


async def test_a_large_tensor_is_in_shared_memory_once_until_the_last_one_has_left_it() -> None:
    """Each writes to what it alone sees; a member that is killed gives back its share and no more."""
    async with group(4, ended=("w2",)) as (worker, children):
        others, memory = worker.group("w[123]"), worker.node.memory
        sent = torch.ones(2 << 20, dtype=torch.int64)
        for _ in range(100):  # until the memory is there, and all have mapped it
            (await others.call(keep, sent)).values()
            if memory.leases == 3:
                break
            (await others.call(drop)).values()
            await until(lambda: memory.leases == 0)
        assert memory.arena.blocks == 1
        assert (await others.call(kept)).values() == [(0, True)] * 3
        assert sent.sum() == len(sent)
        children["w2"].kill()
        await until(lambda: memory.leases == 2)
        assert memory.arena.blocks == 1
        (await worker.group("w[13]").call(drop)).values()
        await until(lambda: memory.arena.blocks == 0)


@pytest.mark.parametrize("way", ["tcp", "tls"])
async def test_groups_over_the_network(way: str, tmp_path: Path) -> None:
    """Calls, large tensors, references and barriers with nothing but TCP, plain or as TLS."""
    options: dict[str, Any] = {"transports": ("tcp",), "shared_memory": 0}
    if way == "tls":
        authority = Authority(tmp_path / "authority")
        options["tls"] = authority.tls("w*")
    async with group(3, **options) as (worker, _):
        others = worker.group("w[12]")
        for size in (10, 1 << 20):
            assert (await others.call(total, torch.ones(size))).values() == [size, size]
        refs = others.remote(torch.nn.Identity)
        assert (await refs.rpc_async().forward(3)).values() == [3, 3]
        await asyncio.gather(worker.group("w*").barrier(), *(worker.call(name, at_barrier) for name in ("w1", "w2")))


async def test_a_barrier_of_processes_ends_with_a_member() -> None:
    """At once for all who wait."""
    async with group(3, ended=("w2",)) as (worker, children):
        here = worker.group("w*").barrier()
        there = worker.call("w1", at_barrier)
        await until(lambda: any(len(each.arrived) == 2 for each in worker.node.barriers._barriers.values()))
        children["w2"].kill()
        for waiting in (here, there):
            with pytest.raises(rpc.PeerLost, match="w2"):
                await waiting
        await asyncio.gather(worker.group("w[01]").barrier(), worker.call("w1", at_barrier, "w[01]"))


async def at_barrier(pattern: str = "w*") -> None:
    await rpc.group(pattern).barrier()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
async def test_calls_to_members_that_are_killed_one_by_one_all_end(seed: int) -> None:
    """Under load, with large tensors: an outcome is a value, or of a member that was killed; no memory stays lent."""
    random = Random(seed)
    names = [f"w{number}" for number in range(1, 7)]
    doomed = random.sample(names, 5)
    async with group(7, ended=tuple(doomed), rpc_timeout=LIMIT) as (worker, children):
        others = worker.group(names)
        sent = torch.ones(1 << 20)
        killed: set[str] = set()

        async def call_on_and_on() -> int:
            calls = 0
            while len(killed) < len(doomed) or calls < 20:
                outcomes = await others.call(total, sent)
                calls += 1
                assert set(outcomes.errors) == set(outcomes.lost) <= killed, outcomes.errors
                assert set(outcomes.answers.values()) == {len(sent)}
            return calls

        tasks = [asyncio.ensure_future(call_on_and_on()) for _ in range(4)]
        for name in doomed:
            await asyncio.sleep(random.random() * 0.2)
            killed.add(name)
            children[name].kill()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
        memory = worker.node.memory
        await until(lambda: (memory.leases, memory.arena.blocks) == (0, 0))
        assert not worker.pending_calls()


def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum())
