"""What goes wrong at joining is told there: joining twice, a group that runs, other versions."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc import RpcBackendOptions, RpcError, WorkerClosed
from aiorpc.errors import RendezvousError
from aiorpc.testing import cluster
from tests.runtime.stores import ROSTER
from tests.runtime.waiting import LIMIT, until


@pytest.mark.parametrize("size", [None, 1])
async def test_a_cell_that_is_run_twice_is_told_as_that(size: int | None) -> None:
    """The worker that is there goes on; after it has left the cell can be run again."""
    store = HashStore()
    again = partial(aiorpc.init, "w", rank=None if size is None else 0, world_size=size, store=store)
    worker = await again()
    with pytest.raises(RendezvousError, match=r"w \(rank 0.*Both are of this very process.*await worker.shutdown\(\)"):
        await again()
    assert await worker.call("w", len, "abc") == 3
    await worker.shutdown()
    await (await again()).shutdown()


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (2, 3)])
async def test_a_group_that_runs_is_closed_and_says_so(rank: int, size: int) -> None:
    """Who comes later is told so at once, whatever rank it asks for."""
    store = HashStore()
    async with cluster(2, store=store) as workers:
        with pytest.raises(RendezvousError, match="The group runs, and is closed"):
            await asyncio.wait_for(aiorpc.init("late", rank=rank, world_size=size, store=store).start(), LIMIT)
        assert await workers[0].call("worker1", len, "abc") == 3


@pytest.mark.parametrize("size", [None, 2])
async def test_another_version_shows_at_joining(size: int | None) -> None:
    """Where members meet, and not at the first call; whatever else has changed in what that version writes."""
    store = HashStore()
    theirs = ["something", {"else": 0}, 9999]
    if size is None:
        store.set(ROSTER, json.dumps({"version": 1, "members": [theirs], "used": [], "left": []}))
    else:
        store.set("aiorpc/generation", "1")
        store.set("aiorpc/1/slot/1", json.dumps(theirs))
    with pytest.raises(RendezvousError, match=r"version 9999 of the protocol, we speak \d+"):
        options = RpcBackendOptions(rpc_timeout=LIMIT)
        await aiorpc.init("w", rank=0 if size else None, world_size=size, store=store, options=options)


async def test_a_worker_that_nobody_has_awaited_says_so() -> None:
    """It has not shut down: it was never there."""
    worker = aiorpc.init("w", init_method="file://never-joined")
    with pytest.raises(WorkerClosed, match=r"'w' has not joined its group, because it was not awaited: write `await"):
        worker.call("w", len, "abc")


async def test_a_refusal_is_logged_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    """As soon as the members meet, before any call of theirs."""
    options = [RpcBackendOptions(transports=("tcp",), authenticate_frames=seals) for seals in (True, False)]
    with caplog.at_level(logging.WARNING, "aiorpc"):
        async with cluster(2, options=options, dynamic=True) as workers:
            await until(lambda: "refused a connection" in caplog.text and "was lost" in caplog.text)
            with pytest.raises(RpcError, match="give authenticate_frames the same value"):
                await asyncio.wait_for(workers[1].call("worker0", len, "abc"), LIMIT)


async def test_joining_is_told_step_by_step(caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG, for whoever wonders what a worker waits for."""
    with caplog.at_level(logging.DEBUG, "aiorpc"):
        async with cluster(1) as (worker,):
            with pytest.raises(aiorpc.RpcTimeout):
                await worker.peer("worker0", timeout=0.01).call(asyncio.sleep, 30)
    for said in (
        "worker worker0: reached the store",
        "worker worker0: met worker0 (rank 0",
        "has joined",
        "the time of",
    ):
        assert said in caplog.text
