"""Connections of a free group over TCP that are idle let go of their sockets, and of nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol import leaving
from aiorpc.transport.connection import Connection
from tests.authority import Authority
from tests.processes import bodies
from tests.runtime.inside import act_as, set_bounds
from tests.runtime.waiting import until, until_no_references

LIMIT = 10.0
BOTH = pytest.mark.parametrize("with_tls", [False, True], ids=["sealed", "tls"])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> rpc.Tls:
    return Authority(tmp_path_factory.mktemp("authority")).tls("w*")


@pytest.fixture
def with_tls() -> bool:
    """Whether the connections are encrypted, where a test does not say."""
    return False


@pytest.fixture
async def far(with_tls: bool, certificate: rpc.Tls, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    """Four workers that speak TCP alone; the first watches, and the second is the current one."""
    monkeypatch.setattr(leaving, "WATCHERS", 1)
    options = RpcBackendOptions(transports=("tcp",), tls=certificate if with_tls else None)
    store = HashStore()
    workers = [await Worker(f"w{number}", store=store, options=options) for number in range(4)]
    for each in workers:
        set_bounds(each, rest=0.2)
    await until(lambda: all(len(each.worker_infos()) == 4 for each in workers))
    act_as(workers[1])
    yield workers
    for each in reversed(workers):
        with suppress(rpc.WorkerClosed):
            await each.shutdown()


def opened(worker: Worker, to: str) -> Connection:
    connection = worker._node.peers.find(to).connection
    assert connection is not None
    return connection


def accepted(worker: Worker, by: str) -> Connection:
    return next(each.connection for each in worker._node.services if each.record.name == by)


async def rested(workers: list[Worker], opener: int = 1, acceptor: int = 2) -> None:
    await until(lambda: opened(workers[opener], f"w{acceptor}").resting)
    await until(lambda: accepted(workers[acceptor], f"w{opener}").resting)


@BOTH
async def test_an_idle_connection_has_no_socket_and_what_it_carried_is_there(far: list[Worker]) -> None:
    """References, and functions that go by number; the connection to the watcher stays."""
    ref = rpc.remote("w2", bodies.add, 1, 2)
    assert await ref == 3
    events = far[2].events()
    for _ in range(3):
        await rested(far)
        assert {opened(far[1], "w2")._port.fd, accepted(far[2], "w1")._port.fd} == {-1}
        assert not opened(far[1], "w0").resting
        answers = await asyncio.gather(rpc.call("w2", bodies.add, 3, 4), rpc.call("w2", bodies.add, 5, 6))
        assert sum(answers) == 18 and await ref == 3
        assert not (opened(far[1], "w2").suspended or accepted(far[2], "w1").suspended)
    await rested(far)
    del ref
    await until_no_references(far)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(events), 0.1)
    assert far[1].statistics().connections_suspended == 0


async def test_a_connection_in_use_does_not_rest(far: list[Worker]) -> None:
    """A call under way, a stream and a wait for an item, although nothing goes over it."""
    act_as(far[2])
    queue: rpc.Queue[int] = rpc.Queue("items")
    act_as(far[1])
    waiting = asyncio.ensure_future(rpc.queue("items", owner="w2").get())
    await asyncio.sleep(1.5)
    assert not opened(far[1], "w2").resting
    await queue.put(7)
    assert await waiting == 7
    await rested(far)


@BOTH
async def test_both_connections_of_a_link_rest(far: list[Worker]) -> None:
    """Large tensors have one of their own, and come back over it."""
    sent = torch.ones(3_000_000)
    for _ in range(2):
        assert torch.equal(await rpc.call("w2", bodies.add, sent, 1), sent + 1)
        link = far[1]._node.peers.find("w2").link
        assert link is not None and link.pipe is not None and link.pipe is not link.connection
        await rested(far)
        assert link.pipe.resting


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "leaves"])
@pytest.mark.parametrize("end", [1, 2], ids=["opener", "acceptor"])
async def test_the_end_of_a_member_is_heard_of_while_its_connection_rests(
    far: list[Worker], dies: bool, end: int
) -> None:
    assert await rpc.call("w2", bodies.add, 1, 2) == 3
    await rested(far)
    events, began = far[3 - end].events(), time.monotonic()
    await (far[end]._drop() if dies else far[end].shutdown())
    assert dies or time.monotonic() < began + 1.0
    async with asyncio.timeout(LIMIT):
        event = await anext(events)
    assert isinstance(event, rpc.events.WorkerLost if dies else rpc.events.WorkerLeft)
    assert event.worker.name == f"w{end}"


async def test_a_call_over_a_resting_connection_to_a_dead_member_fails(far: list[Worker]) -> None:
    assert await rpc.call("w2", bodies.add, 1, 2) == 3
    await rested(far)
    await far[2]._drop()
    with pytest.raises(rpc.PeerLost):
        await rpc.call("w2", bodies.add, 1, 2)


async def test_nothing_rests_without_the_list(far: list[Worker]) -> None:
    assert await rpc.call("w2", bodies.add, 1, 2) == 3
    await rested(far)
    for each in far:
        each._node.group.on_unlisted()
        each._node.resumption.wake()
    await until(lambda: not (opened(far[1], "w2").suspended or accepted(far[2], "w1").suspended))
