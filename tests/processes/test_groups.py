"""Groups of workers in processes: a member that is killed is named, the others answer, and its memory comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.authority import Authority
from tests.processes.workers import LIMIT, group, rounds, until

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
        with pytest.raises(rpc.errors.GroupError) as caught:
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
        others, memory = worker.group("w[123]"), worker._node.memory
        sent = torch.ones(2 << 20, dtype=torch.int64)
        for _ in range(100):  # until the memory is there, and all have mapped it; while they connect each gets its own
            (await others.call(keep, sent)).values()
            if memory.leases == 3 and memory.arena.blocks == 1:
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
        await until(lambda: any(len(each.arrived) == 2 for each in worker._node.barriers._barriers.values()))
        children["w2"].kill()
        for waiting in (here, there):
            with pytest.raises(rpc.PeerLost, match="w2"):
                await waiting
        await asyncio.gather(worker.group("w[01]").barrier(), worker.call("w1", at_barrier, "w[01]"))


async def at_barrier(pattern: str = "w*") -> None:
    await rpc.group(pattern).barrier()


class Load:
    """Work of all kinds for a group, over and over, until `over`; what is wrong with its results is raised.

    done: how often each kind was done. killed: who may be lost.
    """

    def __init__(self, worker: rpc.Worker, names: list[str], seed: int) -> None:
        self.over = False
        self.done: Counter[str] = Counter()
        self.killed: set[str] = set()
        self._worker = worker
        self._names = names
        self._random = Random(seed)
        self._sent = torch.ones(1 << 19)

    def start(self) -> list[asyncio.Task[None]]:
        """A task for each kind."""
        kinds = (self._call, self._take_few, self._cancel, self._map, self._stream, self._leave, self._refer)
        return [asyncio.create_task(self._repeat(kind)) for kind in kinds]

    async def _repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        while not self.over:
            await kind()
            self.done[kind.__name__] += 1

    def _check(self, outcomes: rpc.types.Outcomes, value: object) -> None:
        assert set(outcomes.errors) == set(outcomes.lost) <= self.killed, outcomes.errors
        assert set(outcomes.answers.values()) == {value}

    async def _call(self) -> None:
        self._check(await self._worker.group(self._names).call(total, self._sent), len(self._sent))

    async def _take_few(self) -> None:
        outcomes = await self._worker.group(self._names, quorum=1).call(wait_a_little, 1)
        assert set(outcomes.lost) <= self.killed

    async def _cancel(self) -> None:
        call = self._worker.group(self._names).call(wait_a_little, self._sent)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, self._random.random() * 0.03)

    async def _map(self) -> None:
        group = self._worker.group(self._names, retries=10, backoff=0.01)
        assert [result async for result in group.map(square, range(20))] == [number**2 for number in range(20)]

    async def _stream(self) -> None:
        try:
            async for _ in self._worker.group("w[1-9]").stream(count, 40):
                pass
        except rpc.errors.GroupError as error:
            assert set(error.lost) <= self.killed
            assert not error.failed + error.missing, error

    async def _leave(self) -> None:
        async for _ in self._worker.group(self._names).call(wait_a_little, 1):
            if self._random.random() < 0.5:
                break

    async def _refer(self) -> None:
        try:
            refs = self._worker.group("w[1-9]").remote(list, [1, 2])
            self._check(await refs.rpc_async().__len__(), 2)
        except rpc.PeerLost as error:
            assert error.worker in self.killed


async def wait_a_little(value: Any) -> Any:
    await asyncio.sleep(0.01)
    return value


async def count(limit: int) -> AsyncIterator[int]:
    for number in range(limit):
        yield number
        await asyncio.sleep(0)


def collect() -> None:
    gc.collect()


def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum())


@pytest.mark.long
@pytest.mark.parametrize("seed", rounds(4))
async def test_what_groups_do_goes_on_while_members_are_killed(seed: int) -> None:
    """All kinds of work at once: it ends, names no others as lost than those, and no memory stays lent."""
    random = Random(seed)
    names = [f"w{number}" for number in range(1, 6)]
    doomed = random.sample(names, 4)
    async with group(6, ended=tuple(doomed), rpc_timeout=LIMIT) as (worker, children):
        load = Load(worker, names, seed)
        tasks = load.start()
        for name in doomed:
            await asyncio.sleep(random.random() * 0.5)
            load.killed.add(name)
            children[name].kill()
        done = load.done.copy()
        await until(lambda: any(task.done() for task in tasks) or all(load.done[kind] > done[kind] for kind in done))
        load.over = True
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)
        gc.collect()
        memory = worker._node.memory

        async def all_is_back() -> bool:
            await worker.group("w[1-9]").call(collect)  # tensors of calls that were called off may be in circles there
            return (memory.leases, memory.arena.blocks) == (0, 0)

        await until(all_is_back)
        assert not worker.pending_calls()
