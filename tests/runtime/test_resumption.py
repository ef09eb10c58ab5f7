"""Connections over TCP that break and are mended: calls, streams, references, gradients and large tensors go on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import Worker
from aiorpc.protocol.frames import Buffer, Frame, Kind
from aiorpc.protocol.handshake import Handshake
from aiorpc.protocol.states import PeerState
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.authority import Authority
from tests.cuts import cut
from tests.processes import bodies
from tests.runtime.inside import act_as
from tests.runtime.observers import standing_still
from tests.runtime.waiting import until, until_no_references

TCP: dict[str, Any] = {"transports": ("tcp",)}


@contextlib.contextmanager
def away() -> Any:
    """Nobody can be reached over TCP from here, as without a network."""

    async def connect(host: str, port: int) -> socket.socket:
        raise OSError(101, "Network is unreachable")

    original, sockets.connect_tcp = sockets.connect_tcp, connect
    try:
        yield
    finally:
        sockets.connect_tcp = original


KINDS: dict[str, dict[str, Any]] = {"sealed": {}, "open": {"authenticate_frames": False}, "tls": {}}
#: Seconds between two cuts, on average: a handshake has to get through between some of them.
PAUSES = {"sealed": 0.02, "open": 0.02, "tls": 0.1}
ALSO_TLS = pytest.mark.parametrize("kind", ["sealed", "tls"])
ALL_KINDS = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> rpc.Tls:
    return Authority(tmp_path_factory.mktemp("authority")).tls("worker*")


@pytest.fixture
def kind() -> str:
    """What protects the bytes on the wire, where a test has not several."""
    return "sealed"


@pytest.fixture
def options(kind: str, certificate: rpc.Tls) -> rpc.RpcBackendOptions:
    """Of workers that speak TCP alone, and have time to meet again while connections break on a busy machine."""
    tls = certificate if kind == "tls" else None
    return rpc.RpcBackendOptions(**TCP, **KINDS[kind], tls=tls, reconnect_grace=120.0)


@pytest.fixture
async def far(options: rpc.RpcBackendOptions) -> AsyncIterator[list[Worker]]:
    """Two workers that speak TCP alone; the first is the current one."""
    async with cluster(2, options=options) as workers:
        act_as(workers[0])
        assert await rpc.call("worker1", bodies.add, 1, 2) == 3
        assert (workers[0]._node.engine.record.tls == "1.3") == (options.tls is not None)
        yield workers


runs: Counter[int] = Counter()


async def count(number: int) -> int:
    """Handler: how often it is run with a number is counted."""
    runs[number] += 1
    return number


def numbers(n: int) -> Any:
    """A stream that ends, of tensors."""
    for each in range(n):
        yield torch.full((1000,), each)


async def under_cuts(work: Any, seed: int, pause: float = 0.02) -> Any:
    """The result of some work, while connections are cut again and again."""
    rng = random.Random(seed)
    task = asyncio.ensure_future(work)
    while not task.done():
        cut(rng, 0.5)
        await asyncio.wait([task], timeout=pause * rng.random() * 2)
    return await task


async def call_all(many: int, at_once: int) -> list[int]:
    limit = asyncio.Semaphore(at_once)

    async def one(number: int) -> int:
        async with limit:
            return int(await rpc.call("worker1", count, number))

    return list(await asyncio.gather(*[one(number) for number in range(many)]))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
async def test_the_time_in_which_a_worker_stands_still_does_not_count(place: int) -> None:
    """Whichever end it is: it tries once more when it goes on, and the other one has waited as for one that is busy."""
    grace = 1.0
    apart = rpc.RpcBackendOptions(**TCP, reconnect_grace=grace, lag_warning=0.0)
    options = [replace(apart, dedicated_loop=place == each) for each in range(2)]
    async with cluster(2, options=options) as workers:
        assert await workers[0].call("worker1", abs, -3) == 3
        with contextlib.ExitStack() as stack:
            with away():
                cut()
                await until(lambda: all(each.statistics().connections_suspended for each in workers))
                stack.enter_context(standing_still(workers[place]))
                began = time.monotonic()
            await until(lambda: time.monotonic() > began + 1.5 * grace)
        for each, other in (workers, workers[::-1]):
            assert await each.call(other.info, abs, -3) == 3
            assert not each._node.group.lost


@ALSO_TLS
async def test_each_call_runs_once(far: list[Worker], kind: str) -> None:
    """However often the connections break, in either direction."""
    runs.clear()
    assert await under_cuts(call_all(1000, 50), 1, PAUSES[kind]) == list(range(1000))
    assert runs == Counter(range(1000))
    assert far[0].statistics().connections_resumed > 0


@pytest.mark.long
@ALL_KINDS
async def test_ten_thousand_calls_and_a_hundred_cuts(far: list[Worker]) -> None:
    """One in a hundred calls is made while a connection breaks."""
    runs.clear()
    rng = random.Random(3)

    async def one(number: int) -> int:
        call = rpc.call("worker1", count, number)
        if number % 100 == 50:
            await asyncio.sleep(0.001 * rng.random())
            cut(rng, 0.5)
        return int(await call)

    for start in range(0, 10_000, 25):
        batch = range(start, start + 25)
        assert list(await asyncio.gather(*[one(number) for number in batch])) == list(batch)
    assert runs == Counter(range(10_000))


@ALSO_TLS
async def test_streams_references_and_blocking_calls_go_on(far: list[Worker], kind: str) -> None:
    """Items come in order, references are counted right, and threads that read their own answers lose none."""

    def block() -> list[int]:
        return [int(rpc.rpc_sync("worker1", bodies.add, (number, 1))) for number in range(200)]

    async def work() -> None:
        items = [int(item[-1]) async for item in rpc.stream("worker1", numbers, 200)]
        assert items == list(range(200))
        counters = [rpc.remote("worker1", bodies.Counter, number) for number in range(50)]
        assert [await each.rpc_async().add(1) for each in counters] == list(range(1, 51))

    threads = asyncio.to_thread(block)
    _, blocked = await under_cuts(asyncio.gather(work(), threads), 2, PAUSES[kind])
    assert blocked == list(range(1, 201))
    await until_no_references(far)


async def test_gradients_go_on(far: list[Worker]) -> None:
    """A backward pass over both workers, while connections break, has the gradients that it has without."""

    async def work() -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            async with rpc.autograd.context() as context:
                leaf = torch.full((4,), 2.0, requires_grad=True)
                there = await rpc.call("worker1", torch.mul, leaf, leaf)
                await context.backward([there.sum()])
                found.append(context.gradients()[leaf])
        return found

    for gradient in await under_cuts(work(), 3):
        assert torch.equal(gradient, torch.full((4,), 4.0))


@ALL_KINDS
async def test_large_tensors_go_on_where_they_were(far: list[Worker], kind: str) -> None:
    """There and back, over a second connection that breaks again and again; a piece comes twice at most."""
    size = 3_000_000
    tensors = [torch.randint(0, 100, (size,)) for _ in range(2)]
    calls = [rpc.call("worker1", bodies.echo, tensor) for tensor in tensors]
    before = far[0].statistics().bytes_received
    echoed = await under_cuts(asyncio.gather(*calls), 4, max(PAUSES[kind], 0.05))
    assert all(torch.equal(tensor, back) for tensor, back in zip(tensors, echoed, strict=True))
    here = far[0].statistics()
    # What was sent and has not been acknowledged is sent again after each break, and no more.
    again = here.connections_resumed * (here.channels["bulk"].bytes_sent + (1 << 20))
    assert here.bytes_received - before < 2 * 8 * size * 1.1 + again


class Weights:
    """A tensor that is changed in place, and given away as it is."""

    def __init__(self, size: int) -> None:
        self.value = torch.zeros(size)

    def get(self) -> torch.Tensor:
        """Not a copy."""
        return self.value

    def step(self) -> None:
        """All elements grow by one."""
        self.value.add_(1)


@pytest.mark.parametrize(("size", "steps"), [(1000, 25), pytest.param(500_000, 40, marks=pytest.mark.long)])
async def test_what_a_caller_has_got_is_not_sent_again(far: list[Worker], size: int, steps: int) -> None:
    """So a returned tensor may be changed in place behind that, whatever was acknowledged before the network broke."""
    weights: Any = rpc.remote("worker1", Weights, size)

    async def work(weights: Any) -> None:
        number = 0
        while number < steps or far[0].statistics().connections_resumed < 2:
            assert number < 100_000, "nothing was cut"
            assert torch.equal(await weights.rpc_async().get(), torch.full((size,), float(number)))
            await weights.rpc_async().step()
            number += 1

    await under_cuts(work(weights), 5)
    del weights
    await until_no_references(far)


async def test_callers_see_that_a_worker_is_suspended(far: list[Worker]) -> None:
    """In the events, the statistics and the state; a call is made meanwhile, another one runs into its deadline."""
    news = []

    async def listen() -> None:
        async for event in far[0].events():
            news.append(event)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    peer = far[0]._node.peers.of(far[1]._node.engine.record)
    runs.clear()
    with away():
        cut()
        await until(lambda: peer.state is PeerState.SUSPENDED)
        call = far[0].call("worker1", count, 7)
        with pytest.raises(rpc.RpcTimeout):
            await far[0].peer("worker1", timeout=0.05).call(count, 8)
        given_up = far[0].call("worker1", count, 9)
        given_up.cancel()
        assert not call.done()
    assert await call == 7
    await until(lambda: len(news) >= 2)
    assert [type(event) for event in news] == [rpc.events.WorkerSuspended, rpc.events.WorkerResumed]
    assert {event.worker.name for event in news} == {"worker1"}
    await until(lambda: peer.state is PeerState.READY)
    statistics = far[0].statistics()
    assert statistics.connections_suspended == statistics.connections_resumed > 0
    assert runs[7] == 1
    listening.cancel()


async def test_the_end_of_the_grace_is_a_loss() -> None:
    """Named as any other, on both sides."""
    async with cluster(2, options=rpc.RpcBackendOptions(**TCP, reconnect_grace=0.2)) as workers:
        assert await workers[0].call("worker1", bodies.add, 1, 2) == 3
        call = workers[0].call("worker1", bodies.ablock)
        await until(lambda: workers[1].statistics().calls_running)
        with away():
            cut()
            why = r"could not be made again within reconnect_grace=0\.2 s: .*Network is unreachable"
            with pytest.raises(rpc.PeerLost, match=rf"worker1.* broke: .*; it {why}") as caught:
                await call
            assert caught.value.worker == "worker1"
            await until(lambda: not workers[1].statistics().calls_running)


async def test_a_listener_that_is_gone_is_a_loss_at_once() -> None:
    """As of a process that has ended: nobody waits for the grace."""
    async with cluster(2, options=rpc.RpcBackendOptions(**TCP, reconnect_grace=1000.0)) as workers:
        assert await workers[0].call("worker1", bodies.add, 1, 2) == 3
        call = workers[0].call("worker1", bodies.ablock)
        await until(lambda: workers[1].statistics().calls_running)
        for listener in workers[1]._node.listeners.sockets():
            listener.shutdown(socket.SHUT_RDWR)
        cut()
        with pytest.raises(rpc.PeerLost, match="worker1"):
            await asyncio.wait_for(call, 60)


SPOKEN = {
    "a web server": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "a mail server": b"220 mail.example ESMTP ready\r\n",
}


@contextlib.asynccontextmanager
async def another_program(said: bytes | None) -> AsyncIterator[socket.socket]:
    """A listener that is no worker: it says that, and closes the connection for None; else it keeps it open."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    held: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(BlockingIOError):
            taken, _ = listener.accept()
            if said is None:
                taken.close()
            else:
                held.append(taken)
                taken.send(said)

    loop.add_reader(listener, accept)
    try:
        yield listener
    finally:
        loop.remove_reader(listener)
        for each in (listener, *held):
            each.close()


class Ways(dict[int, int | None]):
    """Whoever connects to a port that is a key is led to the port that is its value, None: nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: Counter[int] = Counter()  # how often each port was connected to


@contextlib.contextmanager
def led_away() -> Iterator[Ways]:
    """The ways of all TCP connections that are opened here."""
    ways, connect = Ways(), sockets.connect_tcp

    async def connect_there(host: str, port: int) -> socket.socket:
        ways.tried[port] += 1
        there = ways.get(port, port)
        if there is None:
            raise OSError(101, "Network is unreachable")
        return await connect(host, there)

    sockets.connect_tcp = connect_there
    try:
        yield ways
    finally:
        sockets.connect_tcp = connect


def port_of(worker: Worker | socket.socket) -> int:
    return worker._node.engine.record.tcp_port if isinstance(worker, Worker) else int(worker.getsockname()[1])


async def ends_of_a_line(workers: list[Worker], end: str) -> tuple[Worker, Worker]:
    """Of the line that the second worker has opened to the first, which leads: the one at that end, and the other."""
    assert await workers[1].call("worker0", bodies.add, 1, 2) == 3
    return (workers[1], workers[0]) if end == "opener" else (workers[0], workers[1])


async def until_lost(worker: Worker, other: Worker) -> None:
    await until(lambda: worker._node.group.is_lost(other._node.engine.record))


BOTH_ENDS = pytest.mark.parametrize("end", ["opener", "acceptor"])


async def until_both_are_lost(one: Worker, other: Worker, at: Worker | socket.socket) -> None:
    """Their connections break; at the address of the other one somebody else is, and only then at that of the one."""
    with led_away() as ways:
        ways |= {port_of(one): None, port_of(other): port_of(at)}
        cut()
        await until_lost(one, other)
        ways[port_of(one)] = port_of(at)
        await until_lost(other, one)


@BOTH_ENDS
@ALSO_TLS
@pytest.mark.parametrize("who", list(SPOKEN))
async def test_another_program_at_the_port_of_a_worker_is_no_sign_of_life(
    who: str, kind: str, end: str, options: rpc.RpcBackendOptions
) -> None:
    """What it says is not what a worker says: nobody waits for the grace."""
    patient = replace(options, reconnect_grace=1000.0)
    async with cluster(2, options=patient) as workers, another_program(SPOKEN[who]) as program:
        await until_both_are_lost(*await ends_of_a_line(workers, end), program)


@BOTH_ENDS
@ALSO_TLS
async def test_another_worker_at_the_address_of_a_worker_is_no_sign_of_life(
    kind: str, end: str, options: rpc.RpcBackendOptions
) -> None:
    """It says that it is another one, as after a restart: nobody waits for the grace."""
    patient = replace(options, reconnect_grace=1000.0)
    async with cluster(2, options=patient) as workers, cluster(1, options=patient) as (stranger,):
        await until_both_are_lost(*await ends_of_a_line(workers, end), stranger)


@pytest.mark.parametrize("times", [1, 5])
async def test_connections_that_their_opener_never_got_count_for_nothing(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many last words were lost, a worker is served, gets a second connection, and has both go on."""
    async with cluster(2, options=rpc.RpcBackendOptions(**TCP, reconnect_grace=1000.0)) as workers:
        feed, lost = Handshake.feed, list[Frame]()

        def lose(self: Handshake, frame: Frame) -> list[Buffer]:
            opened = self.record.name == "worker0" and not self.pipe
            if opened and frame.kind == Kind.WELCOME and len(lost) < times:
                lost.append(frame)
                raise ConnectionResetError("the network has broken")
            return feed(self, frame)

        monkeypatch.setattr(Handshake, "feed", lose)
        assert await workers[0].call("worker1", count, 1) == 1
        assert len(lost) == times
        mine = [each for each in workers[1]._node.services if each.record.name == "worker0"]
        assert len(mine) == 2  # one of which waits for its opener
        large = torch.ones(2_000_000)
        assert torch.equal(await workers[0].call("worker1", bodies.echo, large), large)
        link = workers[0]._node.peers.find("worker1").link
        assert link is not None
        await until(lambda: link.pipe is not None)
        assert link.pipe is not link.connection
        for _ in range(3):
            cut()
            assert torch.equal(await workers[0].call("worker1", bodies.echo, large), large)
        assert all(not worker._node.group.lost for worker in workers)


@pytest.mark.parametrize("graces", [(0.0, 20.0), (20.0, 0.0)])
async def test_without_a_grace_a_break_is_a_loss(graces: tuple[float, float]) -> None:
    """At either end."""
    options = [rpc.RpcBackendOptions(**TCP, reconnect_grace=grace) for grace in graces]
    async with cluster(2, options=options) as workers:
        assert await workers[0].call("worker1", bodies.add, 1, 2) == 3
        call = workers[0].call("worker1", bodies.ablock)
        await until(lambda: workers[1].statistics().calls_running)
        cut()
        with pytest.raises(rpc.PeerLost, match="worker1"):
            await asyncio.wait_for(call, 10)
        assert workers[0].statistics().connections_suspended == 0


_go_on: dict[str, asyncio.Event] = {}


async def once_told(value: Any) -> Any:
    """Handler: the value, later."""
    await _go_on["it"].wait()
    return value


@pytest.mark.parametrize("size", [1, 2_000_000])
async def test_who_leaves_waits_until_answers_can_be_sent(size: int) -> None:
    """In a group without a size, where nobody else waits for that: the callers get what their calls came to."""
    options, store = rpc.RpcBackendOptions(**TCP), HashStore()
    async with cluster(1, dynamic=True, store=store, options=options) as (worker,):
        guest = await rpc.init("guest", store=store, options=options)
        large = torch.ones(size)
        assert torch.equal(await worker.call("guest", bodies.echo, large), large)
        go_on = _go_on["it"] = asyncio.Event()
        calls = [worker.call("guest", once_told, large) for _ in range(3)]
        await until(lambda: guest.statistics().calls_running == 3)
        with away():
            cut()
            await until(lambda: guest.statistics().connections_suspended)
            go_on.set()
            await until(lambda: not guest.statistics().calls_running)
            leaving = asyncio.ensure_future(guest.shutdown())
            await asyncio.wait([leaving], timeout=0.1)
            assert not leaving.done()
        await leaving
        for call in calls:
            assert torch.equal(await call, large)


async def test_a_goodbye_is_no_break(far: list[Worker]) -> None:
    """A worker that leaves is not waited for, nor said to be suspended."""
    news: list[type] = []

    async def listen() -> None:
        async for event in far[0].events():
            news.append(type(event))

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    began = time.monotonic()
    await asyncio.gather(*(worker.shutdown() for worker in far))
    assert time.monotonic() - began < 10  # of 20 s of grace
    await listening
    assert rpc.events.WorkerSuspended not in news


async def test_what_a_reader_does_not_take_is_bounded() -> None:
    """Results of a flood of calls wait with the callee, and arrive."""
    options = rpc.RpcBackendOptions(**TCP, max_unacknowledged_bytes=4 << 20)
    async with cluster(2, options=options) as workers:
        tensor = torch.zeros(30_000)
        calls = [workers[0].call("worker1", bodies.echo, tensor) for _ in range(300)]
        answers = await under_cuts(asyncio.gather(*calls), 5, pause=0.1)
        assert all(torch.equal(answer, tensor) for answer in answers)


async def test_calls_that_come_together_as_a_connection_goes_on_are_not_too_many() -> None:
    """Where more waits for their caller than may: nothing was sent to it before it has spoken, so it has read none."""
    few = rpc.RpcBackendOptions(**TCP, max_queued_calls=4, max_unsent_bytes=1000)
    async with cluster(2, options=[rpc.RpcBackendOptions(**TCP), few]) as workers:
        go_on = _go_on["it"] = asyncio.Event()
        long = workers[0].call("worker1", once_told, bytes(10_000))
        await until(lambda: workers[1].statistics().calls_running == 1)
        with away():
            cut()
            await until(lambda: all(each.statistics().connections_suspended for each in workers))
            go_on.set()
            await until(lambda: not workers[1].statistics().calls_running)
            calls = [workers[0].call("worker1", bodies.add, each, 1) for each in range(20)]
        assert len(await long) == 10_000
        for each, outcome in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            assert outcome == each + 1 or isinstance(outcome, rpc.Overloaded), outcome
