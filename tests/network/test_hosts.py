"""Two hosts and a network between them: forming a group, large tensors and small calls, loss and delay, a cut link."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import pytest
import torch

import aiorpc as rpc

from ..processes import bodies
from ..processes.workers import Children, Link, wait_for
from .hosts import ADDRESSES, Network, Relayed, linked
from .members import MIB, group, host_and_partners, is_pattern, length, pattern, retransmitted, timed

KINDS = pytest.mark.parametrize("kind", ["veth", "relay"])
UNDER_WAY = 4 * MIB  # bytes after which a large transfer counts as begun


def result_of(children: Children, lost: dict[str, list[str]] | None = None, timeout: float = 40.0) -> Any:
    """What w0's script returned. All end by themselves and have lost nobody, or those named."""
    results = {child.place.name: child.hear(timeout) for child in children}
    children.check_ended()
    assert {name: gone for name, (_, gone) in results.items() if gone} == (lost or {})
    return results["w0"][0]


# --- forming a group --------------------------------------------------------------------------------------------------


async def look_around(worker: rpc.Worker, link: Link) -> tuple[list[tuple[str, set[str]]], list[Any]]:
    """Calls of all kinds in a group of three, and then what each of them sees of the hosts."""
    tensor = pattern(MIB)
    answers = [
        await rpc.call("w1", bodies.call_back, "w2", 5),
        await rpc.call("w2", bodies.call_back, "w0", 6),
        [int(item) async for item in rpc.stream("w2", numbers, 40)] == list(range(40)),
        await rpc.remote("w2", bodies.Counter, 5).rpc_async().add(1),
        torch.equal(await rpc.call("w1", bodies.echo, tensor), tensor),
        torch.equal(await rpc.call("w2", bodies.echo, tensor.t()), tensor.t()),
        torch.equal(await rpc.call("w2", bodies.call_back, "w1", tensor), tensor),
    ]
    return [await rpc.call(name, host_and_partners) for name in ("w0", "w1", "w2")], answers


def numbers(n: int) -> Any:
    """A stream that ends."""
    yield from range(n)


@KINDS
@pytest.mark.parametrize("options", [{}, {"transports": ("tcp",)}], ids=["default", "tcp"])
def test_a_group_on_two_hosts_forms_works_and_leaves(kind: str, options: dict[str, Any]) -> None:
    """By default TCP is for the other host alone; workers of one host meet over unix sockets, unless told otherwise."""
    with (
        linked(kind) as network,
        group(network, look_around, hosts=(network.left, network.right), **options) as children,
    ):
        seen, answers = result_of(children)
        (here, partners), (also_here, _), (there, partners_there) = seen
        assert answers == [5, 6, True, 6, True, True, True]
        assert here == also_here != there
        left, right = ADDRESSES
        assert partners == ({left, right} if options else {right})
        assert partners_there == {left}


async def call_and_wait(worker: rpc.Worker, link: Link) -> Any:
    """A call that is not answered, and a large tensor; what became of the two, and of the next call."""
    await rpc.call("w1", bodies.add, 1, 2)
    calls = [rpc.call("w1", bodies.ablock), rpc.call("w1", length, pattern(32 * MIB))]
    link.tell("sent")
    async with asyncio.timeout(30):
        errors = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
        errors += await asyncio.gather(rpc.call("w1", bodies.add, 1, 2), return_exceptions=True)
    link.tell([(type(error).__name__, getattr(error, "worker", "")) for error in errors])


def test_death_on_the_other_host_is_seen_at_once() -> None:
    """In the middle of a large transfer, by the end of the connections alone: long before the network's timeout."""
    with linked("veth", rate=100) as network, group(network, call_and_wait) as children:
        assert children["w0"].hear() == "sent"
        wait_for(lambda: network.right.received() > UNDER_WAY)
        children["w1"].kill()
        killed = time.monotonic()
        assert children["w0"].hear() == [("PeerLost", "w1")] * 3
        assert time.monotonic() - killed < 10  # of 20 s until silence counts as loss
        assert children["w0"].hear() == (None, ["w1"])
        children.check_ended(but=("w1",))


# --- large tensors and small calls ------------------------------------------------------------------------------------


async def talk_meanwhile(worker: rpc.Worker, link: Link, size: int) -> tuple[bool, float, list[float]]:
    """A tensor there and back, and small calls one after the other; seconds of all."""
    tensor = pattern(size)
    await rpc.call("w1", bodies.aadd, 0, 0)
    began = time.monotonic()
    echo = asyncio.ensure_future(timed(rpc.call("w1", bodies.echo, tensor), began))
    small: list[float] = []
    while not echo.done():
        answer, seconds = await timed(rpc.call("w1", bodies.aadd, len(small), 1), time.monotonic())
        assert answer == len(small) + 1
        small.append(seconds)
        await asyncio.sleep(0.005)
    back, seconds = await echo
    return torch.equal(back, tensor), seconds, small


def test_small_calls_go_on_beside_a_large_tensor() -> None:
    """They are answered while it is under way, each in a small part of its time, in both directions."""
    size = 64 * MIB
    with linked("veth", rate=500) as network, group(network, talk_meanwhile, size) as children:
        intact, seconds, small = result_of(children)
    assert intact
    assert seconds > 2 * size * 8 / 500e6 * 0.8, "the link has no limit"
    assert len(small) >= 20
    assert statistics.median(small) < seconds / 20
    assert max(small) < seconds / 4


async def send_all(worker: rpc.Worker, link: Link, sizes: list[int]) -> list[tuple[bool, float]]:
    """Tensors of these sizes at once, in this order; whether each arrived whole, and when its answer was there."""
    tensors = [pattern(size, seed) for seed, size in enumerate(sizes)]
    await rpc.call("w1", bodies.aadd, 0, 0)
    began = time.monotonic()
    calls = [
        rpc.call("w1", is_pattern, tensor, size, seed)
        for seed, (tensor, size) in enumerate(zip(tensors, sizes, strict=True))
    ]
    return list(await asyncio.gather(*[timed(call, began) for call in calls]))


def test_large_tensors_share_the_link() -> None:
    """Four of one size, sent at once, arrive at about the same time: each had a quarter of the link all the while."""
    with linked("veth", rate=200) as network, group(network, send_all, [8 * MIB] * 4) as children:
        arrived = result_of(children)
    assert [intact for intact, _ in arrived] == [True] * 4
    times = [seconds for _, seconds in arrived]
    assert max(times) > 32 * MIB * 8 / 200e6 * 0.8, "the link has no limit"
    assert max(times) < 2 * min(times), times


def test_a_tensor_does_not_wait_for_a_larger_one() -> None:
    """1 MB sent right behind 32 MB is there long before that."""
    with linked("veth", rate=200) as network, group(network, send_all, [32 * MIB, MIB]) as children:
        (intact, late), (also_intact, early) = result_of(children)
    assert intact and also_intact
    assert early < late / 3


async def exchange(worker: rpc.Worker, link: Link, size: int, count: int) -> list[bool]:
    """Each tensor is an argument and a result of both workers."""
    tensors = [pattern(size, seed) for seed in range(count)]
    answers = await asyncio.gather(*[rpc.call("w1", bodies.call_back, "w0", tensor) for tensor in tensors])
    return [torch.equal(answer, tensor) for answer, tensor in zip(answers, tensors, strict=True)]


def test_large_tensors_cross() -> None:
    """Both sides have much to send at the same time, more than any buffer on the way holds: no side waits for ever."""
    with linked("veth", rate=200) as network, group(network, exchange, 4 * MIB, 4) as children:
        assert result_of(children) == [True] * 4


# --- loss and delay ---------------------------------------------------------------------------------------------------


async def call_through_loss(
    worker: rpc.Worker, link: Link, size: int
) -> tuple[bool, list[int], list[int], list[float]]:
    """A tensor there and back, many calls at once, a stream; then calls one by one, and their seconds."""
    tensor = pattern(size)
    echo = rpc.call("w1", bodies.echo, tensor)
    answers = await asyncio.gather(*[rpc.call("w1", bodies.aadd, n, 1) for n in range(200)])
    items = [int(item) async for item in rpc.stream("w1", numbers, 40)]
    intact = torch.equal(await echo, tensor)
    single = []
    for _ in range(5):
        began = time.monotonic()  # before the call is made: this thread may have to wait right after it has sent
        single.append((await timed(rpc.call("w1", bodies.aadd, 1, 2), began))[1])
    return intact, answers, items, single


@KINDS
def test_loss_and_delay_change_nothing_but_the_time(kind: str) -> None:
    """1 % of the packets lost and 20 ms each way: all arrives whole and in order."""
    with linked(kind, delay=0.02, loss=0.01) as network, group(network, call_through_loss, 8 * MIB) as children:
        intact, answers, items, single = result_of(children)
        assert network.lost() > 0
    assert intact
    assert answers == list(range(1, 201))
    assert items == list(range(40))
    assert min(single) > 0.04, "there is no delay"


# --- a cut link -------------------------------------------------------------------------------------------------------


@KINDS
def test_a_cut_link_is_noticed_in_the_middle_of_a_transfer(kind: str) -> None:
    """The caller's pending calls, large and small, get PeerLost within the timeout's bounds; both sides then leave."""
    with linked(kind, rate=100) as network, group(network, call_and_wait, patience=2, reconnect_grace=2.0) as children:
        assert children["w0"].hear() == "sent"
        wait_for(lambda: network.right.received() > UNDER_WAY)
        network.cut()
        assert children["w0"].hear() == [("PeerLost", "w1")] * 3
        assert children["w0"].hear() == (None, ["w1"])
        assert children["w1"].hear() == (None, ["w0"])
        children.check_ended()


async def push_to_the_busy(worker: rpc.Worker, link: Link, seconds: float) -> list[Any]:
    """Large tensors, and small calls as many as fit, for a worker that blocks its loop."""
    await rpc.call("w1", length, pattern(8 * MIB))  # now there is a connection for large ones
    blocked = rpc.call("w1", block_loop, seconds)
    await asyncio.sleep(0.1)
    large = [rpc.call("w1", length, pattern(60 * MIB)) for _ in range(2)]
    small = [rpc.call("w1", length, pattern(128 * 1024)) for _ in range(200)]
    return [await blocked, *await asyncio.gather(*large), set(await asyncio.gather(*small))]


async def block_loop(seconds: float) -> str:
    """Handler: nothing is read meanwhile."""
    await asyncio.to_thread(int)
    time.sleep(seconds)  # noqa: ASYNC251  # as a program's own step would
    return "done"


@pytest.mark.long
@pytest.mark.slow
def test_a_busy_worker_is_not_dead() -> None:
    """Its loop is blocked for several times the timeout while much is pushed to it: its host answers for it."""
    with linked("veth") as network, group(network, push_to_the_busy, 6.0, patience=2) as children:
        assert result_of(children, timeout=100.0) == ["done", 60 * MIB, 60 * MIB, {128 * 1024}]


@pytest.mark.long
@pytest.mark.slow
def test_a_host_that_vanishes_while_its_worker_is_busy_is_found() -> None:
    """The window of its connections is closed then; the probes are no longer answered."""
    with linked("relay") as network, group(network, call_the_busy, patience=2, reconnect_grace=2.0) as children:
        assert children["w0"].hear() == "blocked"
        before = network.right.received()
        children["w0"].tell("push")  # only now: the window takes but so much
        wait_for(lambda: network.right.received() > before + MIB // 8)
        network.cut()
        assert children["w0"].hear(60.0) == ["PeerLost"] * 3
        children["w1"].kill()
        assert children["w0"].hear() == (None, ["w1"])
        children.check_ended(but=("w1",))


async def call_the_busy(worker: rpc.Worker, link: Link) -> None:
    """Large tensors for a worker that blocks its loop; what became of the calls."""
    await rpc.call("w1", length, pattern(8 * MIB))  # now there is a connection for large ones
    calls = [rpc.call("w1", block_loop, 60.0)]
    await asyncio.sleep(0.1)
    link.tell("blocked")
    await asyncio.to_thread(link.hear)
    calls += [rpc.call("w1", length, pattern(60 * MIB)) for _ in range(2)]  # type: ignore[call-overload]
    link.tell([type(error).__name__ for error in await asyncio.gather(*calls, return_exceptions=True)])


async def fetch(worker: rpc.Worker, link: Link) -> Any:
    """A large result; what became of it."""
    await rpc.call("w1", bodies.add, 1, 2)
    call = rpc.call("w1", pattern, 32 * MIB)
    link.tell("sent")
    async with asyncio.timeout(30):
        errors = await asyncio.gather(call, return_exceptions=True)
    link.tell([(type(error).__name__, getattr(error, "worker", "")) for error in errors])


@pytest.mark.long
def test_a_cut_link_is_noticed_by_the_one_who_only_receives() -> None:
    """A result under way: its receiver has nothing to send, and keep-alive tells it."""
    with linked("relay", rate=100) as network, group(network, fetch, patience=2, reconnect_grace=2.0) as children:
        assert children["w0"].hear() == "sent"
        wait_for(lambda: network.left.received() > UNDER_WAY)
        network.cut()
        assert children["w0"].hear() == [("PeerLost", "w1")]
        assert children["w0"].hear() == (None, ["w1"])
        assert children["w1"].hear() == (None, ["w0"])
        children.check_ended()


async def send_into_a_stall(worker: rpc.Worker, link: Link, size: int) -> list[Any]:
    """A large tensor, and a small call once the test has spoken; what became of both, errors as their type's name."""
    await rpc.call("w1", bodies.add, 1, 2)
    calls = [rpc.call("w1", is_pattern, pattern(size), size)]
    link.tell("sent")
    await asyncio.to_thread(link.hear)
    async with asyncio.timeout(30):
        calls.append(rpc.call("w1", bodies.add, 1, 2))
        results = await asyncio.gather(*calls, return_exceptions=True)
    return [type(result).__name__ if isinstance(result, BaseException) else result for result in results]


def test_one_connection_that_stalls_is_not_waited_for() -> None:
    """As behind a firewall that forgets one of them: the large tensor arrives some other way, or the peer is lost."""
    with linked("relay", rate=100) as network, group(network, send_into_a_stall, 32 * MIB, patience=2) as children:
        assert children["w0"].hear() == "sent"
        wait_for(lambda: network.right.received() > UNDER_WAY)
        assert isinstance(network, Relayed)
        network.stall()
        children["w0"].tell("stalled")
        results = {child.place.name: child.hear() for child in children}
        children.check_ended()
        assert network.lost() > 0
    outcome, lost = results["w0"]
    assert (outcome, lost) in (([True, 3], []), (["PeerLost", 3], ["w1"]), (["PeerLost", "PeerLost"], ["w1"]))
    assert results["w1"] in ((None, []), (None, ["w0"]))


async def echo_patiently(worker: rpc.Worker, link: Link, size: int) -> bool:
    """A tensor there and back, however long it takes."""
    tensor = pattern(size)
    echo = rpc.call("w1", bodies.echo, tensor)
    link.tell("sent")
    return torch.equal(await echo, tensor)


@KINDS
def test_a_transfer_survives_an_outage(kind: str) -> None:
    """A link that comes back within the timeout: the tensor arrives whole, and nobody is lost."""
    with linked(kind, rate=200) as network, group(network, echo_patiently, 16 * MIB) as children:
        assert children["w0"].hear() == "sent"
        cut_until_noticed(network, children["w0"].pid)
        assert result_of(children) is True


def cut_until_noticed(network: Network, sender: int) -> None:
    """Cut the link in the middle of what the process sends, until its host has tried again in vain, twice."""
    wait_for(lambda: network.right.received() > UNDER_WAY)
    network.cut()
    arrived = network.right.received()
    before = retransmitted(sender)
    wait_for(lambda: retransmitted(sender) >= before + 2)
    assert network.right.received() - arrived < MIB, "the link is not cut"
    network.mend()
