"""What goes wrong at joining is told there: joining twice, a group that runs, other versions."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc import RpcBackendOptions, RpcError, WorkerClosed
from aiorpc.errors import RendezvousError
from aiorpc.protocol.handshake import VERSION
from aiorpc.protocol.states import WorkerState
from aiorpc.runtime import lifecycle
from aiorpc.runtime.engine import loops
from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.ports import free_port
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
    theirs = ["something", {"else": 0}, VERSION + 1]
    if size is None:
        store.set(ROSTER, json.dumps({"version": 1, "members": [theirs], "used": [], "left": []}))
    else:
        store.set("aiorpc/generation", "1")
        store.set("aiorpc/1/slot/1", json.dumps(theirs))
    with pytest.raises(RendezvousError, match=rf"version {VERSION + 1} of the protocol, we speak {VERSION}"):
        options = RpcBackendOptions(rpc_timeout=LIMIT)
        await aiorpc.init("w", rank=0 if size else None, world_size=size, store=store, options=options)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
async def test_a_name_that_is_long_to_look_up_is_told(monkeypatch: pytest.MonkeyPatch, rank: int, failing: int) -> None:
    """Joining ends in the midst of a look-up, which says nothing then: the place is told, and what is known of it.

    failing: so many look-ups fail at once, before one takes for ever.
    """
    look_up, port, over, asked = socket.getaddrinfo, free_port(), threading.Event(), []

    def slow(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "nosuch.invalid":
            return look_up(host, *args, **kwargs)
        asked.append(host)
        if len(asked) > failing:
            over.wait(LIMIT)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(lifecycle, "Bounds", partial(Bounds, overtime=0.1))
    monkeypatch.setattr(lifecycle, "_GIVING_UP", 0.1)
    for name, value in {"MASTER_ADDR": "nosuch.invalid", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    told = rf"could not join within 0.5 s \(rpc_timeout\): the store at tcp://nosuch.invalid:{port} does not answer: "
    told += r"the name 'nosuch.invalid' cannot be resolved .*no such name" if failing else r".*'nosuch.invalid'"
    try:
        with pytest.raises(RendezvousError, match=told):
            await aiorpc.init("w", options=RpcBackendOptions(rpc_timeout=0.5))
    finally:
        over.set()
        await until(lambda: not [each for each in threading.enumerate() if each.name.startswith("aiorpc-w-")])


async def test_a_host_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes any bytes for it: its workers join, and show it so that no terminal suffers."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h\udcff\n\x1b[31m" + "x" * 5000)
    async with cluster(2) as workers:
        assert await workers[0].call("worker1", len, "abc") == 3
        record = workers[0]._node.peers.find("worker1").record
        assert record is not None and " on h???[31mxxx" in record.describe()


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


@pytest.mark.parametrize("way", ["init_rpc", "dedicated_loop", "a loop of the user's"])
@pytest.mark.parametrize("lacking", ["threads", "descriptors"])
async def test_a_worker_that_the_system_gives_too_little_cannot_join(
    way: str, lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That is a RendezvousError with the reason; once there is enough, the next one joins."""
    start, directory = threading.Thread.start, tmp_path / "store"

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("aiorpc-"):
            raise RuntimeError("can't start new thread")
        start(self)

    def no_more(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def join(number: int) -> None:
        where = f"file://{directory}{number}"
        if way == "init_rpc":
            options = RpcBackendOptions(init_method=where)
            init = partial(aiorpc.init_rpc, "w", rank=0, world_size=1, rpc_backend_options=options)
            await asyncio.to_thread(init)
            await asyncio.to_thread(aiorpc.shutdown)
        else:
            options = RpcBackendOptions(dedicated_loop=way == "dedicated_loop")
            async with aiorpc.init("w", rank=0, world_size=1, init_method=where, options=options):
                pass

    with monkeypatch.context() as patch:
        if lacking == "threads":
            patch.setattr(threading.Thread, "start", refuse)
        else:
            patch.setattr(loops, "new_loop", no_more)
            patch.setattr(sockets, "remove_stale", no_more)
        with pytest.raises(RendezvousError, match=r"worker 'w' .*(can't start new thread|Too many open files)"):
            await join(0)
    await join(1)


async def test_a_worker_leaves_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word to the store; its own threads end all the same."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("aiorpc-"):
            raise RuntimeError("can't start new thread")
        start(self)

    worker = await aiorpc.init("w", rank=0, world_size=1, store=HashStore())
    assert await worker.call("w", len, "abc") == 3
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        report = await worker.shutdown()
    assert report.lost == () and worker.state is WorkerState.CLOSED
    await until(lambda: not any(each.name.startswith("aiorpc-w-") for each in threading.enumerate()))
