"""Ids that only grow: any number of workers may have joined before, and what is made of their ids still fits."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

import aiorpc as rpc
from aiorpc import Worker
from aiorpc.protocol import leaving
from tests.processes import bodies
from tests.runtime.stores import ROSTER
from tests.runtime.waiting import until, until_no_references

#: Where numbers of 15, 16, 31 and 32 bits end, and where a group is after as many joins as are asked for.
JOINS = [(1 << 14) - 2, (1 << 15) - 2, (1 << 16) - 2, 100_000, (1 << 31) - 4]


@pytest.fixture
def store() -> Store:
    return HashStore()


async def ask_further(to: str) -> int:
    """A call that makes another one."""
    return int(await rpc.call(to, bodies.add, 1, 2))


async def use(counter: Any) -> int:
    """A reference that somebody else has named, to a value of a third worker."""
    return int(await counter.rpc_async().add(4))


def items(count: int) -> Any:
    yield from range(count)


async def all_kinds_of_work() -> None:
    """By a current worker, with the others."""
    assert await rpc.call("c", ask_further, "a") == 3
    assert [item async for item in rpc.stream("b", items, 3)] == [0, 1, 2]
    counter = rpc.remote("b", bodies.Counter, 1)
    assert await rpc.call("c", use, counter) == 5
    assert (await counter).value == 5
    large = torch.arange(100_000)
    assert torch.equal(await rpc.call("b", bodies.echo, large), large)
    async with rpc.autograd.context() as context:
        leaf = torch.full((4,), 2.0, requires_grad=True)
        there = await rpc.call("b", torch.mul, leaf, leaf)
        beyond = await rpc.call("c", torch.mul, there, there)
        await context.backward([beyond.sum()])
        assert context.gradients()[leaf].tolist() == [32.0] * 4
        assert 0 < int(context) < 1 << 63
    assert await rpc.peer("c", retries=1, idempotent=True).call(bodies.add, 1, 2) == 3


@pytest.mark.parametrize("joins", JOINS)
async def test_all_works_after_any_number_of_joins(store: Store, joins: int) -> None:
    """Ids of 31 bits are in messages, in references, and above the numbers of autograd contexts and traces."""
    store.set(ROSTER.replace("roster", "ids"), str(joins))
    async with Worker("a", store=store) as a, Worker("b", store=store) as b, Worker("c", store=store) as c:
        assert [worker.id for worker in (a, b, c)] == [joins, joins + 1, joins + 2]
        await a.call("a", all_kinds_of_work)
        await until_no_references([a, b, c])


async def come_and_go(store: Store, names: list[str], others: list[Worker]) -> None:
    """Guests, one after the other, that call and are called."""
    for number, name in enumerate(names):
        async with Worker(name, store=store) as guest:
            assert await guest.call("a", bodies.add, 1, 2) == 3
            for other in others:
                assert await other.call(name, bodies.aadd, 1, 2) == 3
            if number % 4 == 3:  # others find it dead
                await guest.shutdown(graceful=False)


@pytest.mark.parametrize("alike", [True, False], ids=["one name", "many names"])
async def test_what_is_kept_of_a_group_does_not_grow_with_joins(
    store: Store, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the store nor in who stays: of those who are gone only the latest are remembered."""
    monkeypatch.setattr(leaving, "REMEMBERED", 8)
    options = rpc.RpcBackendOptions(newcomer_grace=0.0)
    async with Worker("a", store=store, options=options) as a, Worker("b", store=store) as b:
        names = [f"guest{0 if alike else number}" for number in range(30)]
        await come_and_go(store, names, [a, b])
        for worker in (a, b):
            assert len(worker._node.peers.all()) <= 8 + 2 and len(worker._node.group.members) <= 8 + 2
        await until(lambda: len(json.loads(store.get(ROSTER))["members"]) == 2)
        assert json.loads(store.get(ROSTER))["used"] == [[2, 32]]
        assert store.num_keys() <= 5
        for name in names[-1], names[0]:
            with pytest.raises(rpc.errors.UnknownWorker if name == "guest0" and not alike else rpc.PeerLeft):
                await a.call(name, bodies.add, 1, 2)
        with pytest.raises(rpc.errors.UnknownWorker):
            await a.call(2, bodies.add, 1, 2)


@pytest.mark.long
@pytest.mark.slow
async def test_a_thousand_joins_leave_no_object_behind(store: Store) -> None:
    """Nothing that the collector knows of: what each join leaves in those who stay is forgotten."""
    async with Worker("a", store=store) as a, Worker("b", store=store) as b:
        await come_and_go(store, ["guest"] * 2 * leaving.REMEMBERED, [a, b])
        gc.collect()
        before = len(gc.get_objects())
        await come_and_go(store, ["guest"] * 1000, [a, b])
        gc.collect()
        assert len(gc.get_objects()) - before < 1000


async def test_a_group_whose_ids_are_used_up_takes_nobody(store: Store) -> None:
    """It says so to who wants to join, and leaves nothing in the store that others would stumble over."""
    store.set(ROSTER.replace("roster", "ids"), str((1 << 31) - 1))
    async with Worker("a", store=store) as a:
        assert a.id == (1 << 31) - 1
        with pytest.raises(rpc.errors.RendezvousError, match="2147483648 workers have joined"):
            await Worker("b", store=store).start()
        assert [info.name for info in a.worker_infos()] == ["a"]
        assert await a.call("a", bodies.add, 1, 2) == 3
