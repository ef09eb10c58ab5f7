"""A network that goes away and comes back: nothing is lost, nothing is run twice, and the end of patience is named."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc

from ..authority import Authority
from ..processes.workers import Link, wait_for
from .hosts import Relayed, linked
from .members import MIB, group, is_pattern, pattern
from .test_hosts import KINDS, UNDER_WAY, block_loop, result_of

runs: list[int] = []


async def count(number: int) -> int:
    """Handler: how often it was run is found out later."""
    runs.append(number)
    return number


async def counted() -> list[int]:
    """Handler: the numbers that `count` was run with, in order."""
    return runs


def numbers(n: int) -> Any:
    """A stream that ends, of small tensors."""
    for each in range(n):
        yield torch.full((1000,), each)


async def work_through(worker: rpc.Worker, link: Link, size: int, small: int) -> tuple[Any, ...]:
    """Large tensors there and back, small calls beside them, a stream; until all of it is done."""
    tensor = pattern(size)
    news: list[str] = []

    async def listen() -> None:
        async for event in worker.events():
            news.append(type(event).__name__)

    listening = asyncio.create_task(listen())
    assert await rpc.call("w1", is_pattern, pattern(8 * MIB), 8 * MIB)
    large = rpc.call("w1", is_pattern, tensor, size)
    link.tell("sent")
    limit = asyncio.Semaphore(16)

    async def one(each: int) -> int:
        async with limit:
            await asyncio.sleep(0.01)
            return int(await rpc.call("w1", count, each))

    answers = await asyncio.gather(*[one(each) for each in range(small)])
    items = [int(item[0]) async for item in rpc.stream("w1", numbers, 50)]
    intact = await large
    ran = await rpc.call("w1", counted)
    listening.cancel()
    return intact, answers == list(range(small)), items == list(range(50)), sorted(ran) == list(range(small)), set(news)


@pytest.mark.long
@pytest.mark.parametrize("protection", ["sealed", "open", "tls"])
def test_a_quarter_of_a_gigabyte_arrives_whole(tmp_path: Path, protection: str) -> None:
    """Though the line is down for three seconds in the midst of it; of small calls beside it each runs once."""
    outage, size = 3.0, 256 * MIB
    options: dict[str, Any] = {"reconnect_grace": 60.0, "rpc_timeout": 150.0}
    options |= {"authenticate_frames": False} if protection == "open" else {}
    if protection == "tls":
        options["tls"] = Authority(tmp_path).tls("w*")
    with (
        linked("veth", rate=400) as network,
        group(network, work_through, size, 300, patience=2, **options) as children,
    ):
        assert children["w0"].hear() == "sent"
        wait_for(lambda: network.right.received() > size // 2, 60.0)
        network.cut()
        cut = time.monotonic()
        wait_for(lambda: time.monotonic() > cut + outage, outage + 10)
        assert network.right.received() < size
        network.mend()
        *whole, news = result_of(children, timeout=100.0)
        assert whole == [True] * 4
        assert {"WorkerSuspended", "WorkerResumed"} <= news and "WorkerLost" not in news


@pytest.mark.long
@KINDS
@pytest.mark.parametrize(("outage", "patience"), [(3, 20), (14, 20), (30, 20), (8, 3)])
def test_an_outage_costs_nothing_but_its_time(kind: str, outage: float, patience: int) -> None:
    """Whatever TCP makes of it: no call fails, each runs once, and a large tensor arrives whole."""
    options: dict[str, Any] = {"reconnect_grace": 60.0, "rpc_timeout": 150.0}
    with (
        linked(kind, rate=400) as network,
        group(network, work_through, 128 * MIB, 300, patience=patience, **options) as children,
    ):
        assert children["w0"].hear() == "sent"
        wait_for(lambda: network.right.received() > UNDER_WAY)
        network.cut()
        cut = time.monotonic()
        wait_for(lambda: time.monotonic() > cut + outage, outage + 10)
        network.mend()
        intact, answered, streamed, once, news = result_of(children, timeout=100.0)
    assert (intact, answered, streamed, once) == (True,) * 4
    assert "WorkerLost" not in news
    if patience < outage:
        assert {"WorkerSuspended", "WorkerResumed"} <= news


async def call_the_blocked(worker: rpc.Worker, link: Link) -> list[Any]:
    """A worker blocks its loop while the network is away, and longer."""
    await rpc.call("w1", count, 1)
    blocked = rpc.call("w1", block_loop, 9.0)
    await asyncio.sleep(0.5)
    link.tell("blocked")
    return [await blocked, await rpc.call("w1", count, 2)]


@pytest.mark.long
def test_a_worker_that_is_busy_when_the_network_is_back_is_waited_for() -> None:
    """Its host takes connections, so the grace is not what counts."""
    with linked("relay") as network, group(network, call_the_blocked, patience=3, reconnect_grace=3.0) as children:
        assert children["w0"].hear() == "blocked"
        network.cut()
        cut = time.monotonic()
        wait_for(lambda: time.monotonic() > cut + 2.5)
        network.mend()
        assert result_of(children) == ["done", 2]


async def wait_for_the_end(worker: rpc.Worker, link: Link) -> list[str]:
    """A call that is not answered; what became of it, and what was said meanwhile."""
    news = []

    async def listen() -> None:
        async for event in worker.events():
            news.append(type(event).__name__)

    listening = asyncio.create_task(listen())
    await rpc.call("w1", count, 1)
    call = rpc.call("w1", asyncio.sleep, 100)
    link.tell("sent")
    with pytest.raises(rpc.PeerLost) as caught:
        await call
    assert caught.value.worker == "w1"
    async with asyncio.timeout(10):
        while len(news) < 2:  # noqa: ASYNC110  # the news come on their own way
            await asyncio.sleep(0.01)
    listening.cancel()
    return news


@pytest.mark.long
@KINDS
def test_an_outage_that_lasts_is_a_loss(kind: str) -> None:
    """First the worker is suspended, then it is lost, by its name."""
    with linked(kind) as network, group(network, wait_for_the_end, patience=2, reconnect_grace=1.0) as children:
        assert children["w0"].hear() == "sent"
        network.cut()
        assert result_of_both(children) == ["WorkerSuspended", "WorkerLost"]


def result_of_both(children: Any) -> Any:
    """What w0's script returned; each side has lost the other one."""
    results = {child.place.name: child.hear(60.0) for child in children}
    children.check_ended()
    assert {name: lost for name, (_, lost) in results.items()} == {"w0": ["w1"], "w1": ["w0"]}
    return results["w0"][0]


async def publish(name: str) -> int:
    """Handler: publish something, for which the store of the group is asked."""
    return (await rpc.publish(name, 1)).version


async def publish_elsewhere(worker: rpc.Worker, link: Link) -> list[int]:
    """The other worker publishes before and after the test has done what it does."""
    versions = [await rpc.call("w1", publish, "before")]
    link.tell("published")
    assert await asyncio.to_thread(link.hear) == "forgotten"
    versions.append(await rpc.call("w1", publish, "after"))
    return versions


def test_a_store_is_asked_over_another_connection_once_the_network_has_forgotten_the_first() -> None:
    """As a firewall forgets one that is idle, of which it tells nobody."""
    with (
        linked("relay") as network,
        group(network, publish_elsewhere, patience=2, reconnect_grace=20.0, rpc_timeout=30.0) as children,
    ):
        assert children["w0"].hear() == "published"
        assert isinstance(network, Relayed)
        network.forget()
        children["w0"].tell("forgotten")
        assert result_of(children) == [1, 1]
