"""Links: messages whose buffers go by several channels, wait, are given up, fail alone, or lose their connection."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from msgspec import structs

from aiorpc import PeerLost, RpcBackendOptions, RpcCancelled, RpcError, Worker
from aiorpc.channels.bulk import HASTY_SIZE
from aiorpc.protocol.frames import Buffer, Kind
from aiorpc.protocol.messages import ChannelMessage, Parcel
from aiorpc.protocol.packing import pack
from aiorpc.runtime.links.channel_link import PIECES
from aiorpc.runtime.links.link import Link
from aiorpc.runtime.links.messages import DEVICE
from aiorpc.testing import cluster
from aiorpc.transport.connection import Connection
from tests.runtime.bad_member import call_of, say
from tests.runtime.bad_member import calling as calling_connection
from tests.runtime.inside import set_bounds
from tests.runtime.waiting import LIMIT, until, until_no_references

MIB = 1 << 20
MANY = 1000
UNSENT: Callable[[Connection], int] = vars(Connection)["unsent"].fget
COUNT = HASTY_SIZE // 4 + 1000  # of float32: goes in chunks even before there is a connection for them
MIDDLE = 100_000  # of float32: goes in chunks once there is one


def large(seed: int = 0, count: int = COUNT) -> torch.Tensor:
    return torch.arange(seed, seed + count, dtype=torch.float32)


def echo(value: Any) -> Any:
    return value


_served: list[Any] = []


@pytest.fixture(autouse=True)
def served() -> Iterator[list[Any]]:
    """What `note` was called with."""
    _served.clear()
    yield _served
    _served.clear()


def note(*values: Any) -> int:
    _served.append([value if isinstance(value, (int, str)) else None for value in values])
    return len(values)


def make(count: int) -> torch.Tensor:
    return large(count=count)


def take_reference(tensor: torch.Tensor, reference: Any) -> str:
    return str(reference.owner_name())


def count_up(sizes: list[int]) -> Iterator[torch.Tensor]:
    for seed, size in enumerate(sizes):
        yield large(seed, size)


async def acount_up(sizes: list[int]) -> AsyncIterator[torch.Tensor]:
    for seed, size in enumerate(sizes):
        yield large(seed, size)


def count_for_ever(ended: str) -> Iterator[torch.Tensor]:
    """Large items without end; says when it was closed."""
    try:
        while True:
            yield large(0, MIDDLE)
    finally:
        _served.append(ended)


TCP = RpcBackendOptions(transports=("tcp",))
OFF = RpcBackendOptions(shared_memory=0)
WAYS = pytest.mark.parametrize("options", [TCP, OFF], ids=["tcp", "unix"])


def calling(worker: Worker, name: str = "worker1") -> Link:
    """The link that this worker has opened."""
    link = worker._node.peers.find(name).link
    assert link is not None
    return link


def serving(worker: Worker) -> Link:
    """The link that others have opened to it."""
    (service,) = [service for service in worker._node.services if service.record.name != worker.name]
    return service.link


def channels(worker: Worker) -> dict[str, int]:
    """How many buffers it has sent, by channel."""
    return {name: traffic.sent for name, traffic in worker.statistics().channels.items()}


async def until_nothing_under_way(*workers: Worker) -> None:
    """No transfer is kept on any side, and no message waits for one."""

    def left() -> list[tuple[str, int, int, int]]:
        return [
            (worker.name, link.second.bulk.sending, link.second.bulk.receiving, len(link.held))
            for worker in workers
            for link in worker._node.links.all()
            if link.second.bulk.sending or link.second.bulk.receiving or link.held
        ]

    try:
        await until(lambda: not left())
    except AssertionError:
        raise AssertionError(f"under way (worker, sending, receiving, held): {left()}") from None


class Gate:
    """Lets so many chunks of one end pass, and then no more until it is opened: its connection counts as full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, link: Link, after: int) -> None:
        pipe, bulk, unsent, following = link.pipe, link.second.bulk, UNSENT, link.second.bulk.next_frame
        assert pipe is not None
        self.open = False
        self._left = after
        self._bulk = bulk

        def count() -> list[Buffer] | None:
            self._left -= 1
            return following()

        def full(connection: Connection) -> int:
            closed = connection is pipe and not self.open and self._left <= 0
            return MANY if closed else unsent(connection)

        monkeypatch.setattr(bulk, "next_frame", count)
        monkeypatch.setattr(Connection, "unsent", property(full))

    def release(self) -> None:
        """Let all go on."""
        self.open = True
        self._bulk.withdraw([], named=True)  # wakes who writes


async def ready(workers: list[Worker]) -> None:
    """Both ends of the pair have their second connection."""
    await workers[0].call("worker1", echo, large())
    await until(lambda: calling(workers[0]).second.bulk.ready and serving(workers[1]).second.bulk.ready)
    await until_nothing_under_way(*workers)


async def until_sharing(workers: list[Worker]) -> None:
    """Both ways of the pair have memory that is warm and mapped."""
    async with asyncio.timeout(LIMIT):
        while not all(channels(worker)["shared memory"] for worker in workers):
            await workers[0].call("worker1", echo, large(0, MIDDLE))
            await asyncio.sleep(0.005)


@pytest.fixture
async def tcp() -> AsyncIterator[list[Worker]]:
    """Two workers whose large buffers go in chunks, over connections that are there."""
    async with cluster(2, options=TCP) as workers:
        await ready(workers)
        yield workers


# --- all channels -----------------------------------------------------------------------------------------------------


async def test_one_message_goes_by_all_channels() -> None:
    """A small tensor in the frame, one in shared memory, one that finds no room there in chunks: both ways, equal."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=4 * MIB)) as workers:
        middle = large(1, MIDDLE)
        await until_sharing(workers)
        before = [channels(worker) for worker in workers]
        values = [torch.ones(2000), middle, large(2, 2 * COUNT), torch.zeros(0), torch.arange(7)]
        back = await workers[0].call("worker1", echo, values)
        assert all(torch.equal(one, other) for one, other in zip(values, back, strict=True))
        for worker, old in zip(workers, before, strict=True):
            new = channels(worker)
            assert new["shared memory"] == old["shared memory"] + 1 and new["bulk"] == old["bulk"] + 1
            assert new["inline"] >= old["inline"] + 1
        del back
        await until_nothing_under_way(*workers)
        await until(lambda: all(worker._node.memory.arena.used == 0 for worker in workers))


@WAYS
async def test_large_values_arrive_before_and_after_there_is_a_second_connection(options: RpcBackendOptions) -> None:
    """The first ones ask for it; many at once, of all lengths, come back equal."""
    async with cluster(2, options=options) as workers:
        sizes = [10, MIDDLE, COUNT, 3 * MIDDLE, 2 * COUNT, 5]
        calls = [workers[0].call("worker1", echo, large(seed, size)) for seed, size in enumerate(sizes * 2)]
        for seed, (call, size) in enumerate(zip(calls, sizes * 2, strict=True)):
            assert torch.equal(await call, large(seed, size))
        await until(lambda: calling(workers[0]).second.bulk.ready and serving(workers[1]).second.bulk.ready)
        before = channels(workers[0])["bulk"]
        assert torch.equal(await workers[0].call("worker1", echo, large(3, MIDDLE)), large(3, MIDDLE))
        assert channels(workers[0])["bulk"] == before + 1
        await until_nothing_under_way(*workers)


# --- order ------------------------------------------------------------------------------------------------------------


async def test_other_calls_overtake_a_message_that_waits(
    monkeypatch: pytest.MonkeyPatch, tcp: list[Worker], served: list[Any]
) -> None:
    """While the chunks of one call are held back, calls before and behind it are served; then it is."""
    gate = Gate(monkeypatch, calling(tcp[0]), 0)
    waiting = tcp[0].call("worker1", note, "waiting", large())
    await until(lambda: serving(tcp[1]).held)
    for number in range(5):
        assert await tcp[0].call("worker1", note, number) == 1
    assert served == [[0], [1], [2], [3], [4]] and not waiting.done()
    gate.release()
    assert await waiting == 2 and served[-1] == ["waiting", None]
    await until_nothing_under_way(*tcp)


async def test_frames_of_the_same_call_wait_behind_its_message(
    monkeypatch: pytest.MonkeyPatch, tcp: list[Worker], served: list[Any]
) -> None:
    """A CANCEL does not overtake its call: it is taken up behind it, and the handler has not run."""
    gate = Gate(monkeypatch, calling(tcp[0]), 1)
    call = tcp[0].call("worker1", note, "given up", large())
    link = serving(tcp[1])
    await until(lambda: link.held)
    call.cancel()
    ((held,),) = [list(link.held.values())]
    await until(lambda: held.behind)
    assert [frame.kind for frame in held.behind] == [Kind.CANCEL]
    assert await tcp[0].call("worker1", note, "other") == 1
    gate.release()
    with pytest.raises(RpcCancelled):
        await call
    await until_nothing_under_way(*tcp)
    assert await tcp[0].call("worker1", note, "later", large()) == 2
    assert served == [["other"], ["later", None]]


@pytest.mark.parametrize("generator", [count_up, acount_up])
@pytest.mark.parametrize("how", ["tcp", "shared memory"])
async def test_streams_of_large_and_small_items_keep_their_order(generator: Any, how: str) -> None:
    """Whatever way each takes, and while the ways change: every item, once, in its place."""
    options = TCP if how == "tcp" else RpcBackendOptions(shared_memory=16 * MIB)
    sizes = [COUNT, 3, MIDDLE, 2000, COUNT + 7, MIDDLE, 1, MIDDLE] * 4
    async with cluster(2, options=options) as workers:
        if how == "shared memory":
            await until_sharing(workers)
        seed = 0
        async for item in workers[0].stream("worker1", generator, sizes):
            assert torch.equal(item, large(seed, sizes[seed]))
            seed += 1
            del item
        assert seed == len(sizes)
        sent = channels(workers[1])
        assert sent["inline"] > 0 and sent["bulk" if how == "tcp" else "shared memory"] > 0
        await until_nothing_under_way(*workers)


# --- given up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, 1, 3])
async def test_a_call_given_up_in_mid_transfer_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tcp: list[Worker], served: list[Any], chunks: int
) -> None:
    """After so many of its chunks: its handler never runs, and neither side keeps any of it."""
    gate = Gate(monkeypatch, calling(tcp[0]), chunks)
    call = tcp[0].call("worker1", note, large())
    await until(lambda: serving(tcp[1]).held and serving(tcp[1]).second.bulk.receiving)
    call.cancel()
    gate.release()
    with pytest.raises(RpcCancelled):
        await call
    await until_nothing_under_way(*tcp)
    assert await tcp[0].call("worker1", echo, 5) == 5
    assert served == [] and not any(
        service.calls for service in tcp[1]._node.services if service.record.name == "worker0"
    )


@pytest.mark.parametrize("chunks", [0, 1, 3])
async def test_an_answer_given_up_in_mid_transfer_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tcp: list[Worker], chunks: int
) -> None:
    """The caller has gone when its result is on its way: the rest is not sent, on neither side anything is kept."""
    gate = Gate(monkeypatch, serving(tcp[1]), chunks)
    call = tcp[0].call("worker1", make, COUNT)
    await until(lambda: calling(tcp[0]).held)
    received = calling(tcp[0]).second.bulk.traffic.received
    call.cancel()
    await until(lambda: not serving(tcp[1]).second.bulk.sending)  # the word has come
    gate.release()
    with pytest.raises(RpcCancelled):
        await call
    await until_nothing_under_way(*tcp)
    assert calling(tcp[0]).second.bulk.traffic.received == received
    assert torch.equal(await tcp[0].call("worker1", make, COUNT), large())


async def test_a_stream_left_in_mid_transfer_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tcp: list[Worker], served: list[Any]
) -> None:
    """Items that are under way when the consumer goes: the producer ends, nothing is kept."""
    gate = Gate(monkeypatch, serving(tcp[1]), 8)
    async with tcp[0].stream("worker1", count_for_ever, "ended") as stream:
        assert torch.equal(await anext(stream), large(0, MIDDLE))
        await until(lambda: calling(tcp[0]).held)
    gate.release()
    await until(lambda: served == ["ended"])
    await until_nothing_under_way(*tcp)


# --- left -------------------------------------------------------------------------------------------------------------


async def test_an_answer_on_its_way_outlives_the_goodbye(tcp: list[Worker]) -> None:
    """What was written to the second connection before the first one ended still arrives."""
    pipe = calling(tcp[0]).pipe
    assert pipe is not None
    tcp[0].loop.remove_reader(pipe._port.fd)
    call = tcp[0].call("worker1", echo, large(0, MIDDLE))
    await until(lambda: calling(tcp[0]).held)
    await until(lambda: not serving(tcp[1]).busy)
    link = calling(tcp[0])
    leaving = asyncio.ensure_future(tcp[1].shutdown(graceful=False))
    await until(lambda: link.connection.closed)
    assert not call.done()
    pipe.start()
    assert torch.equal(await call, large(0, MIDDLE))
    await leaving


# --- failed -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sizes of which there is no memory for what arrives."""
    sizes: set[int] = set()
    empty = numpy.empty

    def allocate(size: Any, *args: Any, **options: Any) -> Any:
        if size in sizes:
            raise MemoryError(f"no room for {size} bytes")
        return empty(size, *args, **options)

    monkeypatch.setattr(numpy, "empty", allocate)
    return sizes


async def test_arguments_without_memory_fail_their_call_only(
    tcp: list[Worker], short: set[int], served: list[Any]
) -> None:
    """An error that says so; its handler has not run, calls beside it are served."""
    short.add(4 * (COUNT + 1))
    bad = tcp[0].call("worker1", note, large(0, COUNT + 1), "bad")
    good = tcp[0].call("worker1", note, large(), "good")
    with pytest.raises(RpcError, match=r"arguments did not arrive at worker 'worker1': no room"):
        await bad
    assert await good == 2 and served == [[None, "good"]]
    await until_nothing_under_way(*tcp)


async def test_references_in_arguments_that_failed_are_taken(tcp: list[Worker], short: set[int]) -> None:
    """Nobody waits for them for ever: all tables are empty in the end."""
    reference = tcp[0].remote("worker1", make, 10)
    await reference
    short.add(4 * (COUNT + 1))
    with pytest.raises(RpcError, match="did not arrive"):
        await tcp[0].call("worker1", take_reference, large(0, COUNT + 1), reference)
    assert await tcp[0].call("worker1", take_reference, large(), reference) == "worker1"
    del reference
    gc.collect()
    await until_no_references(tcp)


async def test_results_without_memory_fail_their_call_only(tcp: list[Worker], short: set[int]) -> None:
    """The caller is told why; its other calls go on."""
    short.add(4 * (COUNT + 1))
    bad, good = tcp[0].call("worker1", make, COUNT + 1), tcp[0].call("worker1", make, COUNT)
    with pytest.raises(RpcError, match=r"the result of .* did not arrive: no room"):
        await bad
    assert torch.equal(await good, large())
    await until_nothing_under_way(*tcp)


@pytest.mark.parametrize("generator", [count_up, acount_up])
async def test_a_stream_ends_at_an_item_without_memory(tcp: list[Worker], short: set[int], generator: Any) -> None:
    """The items before it, then the error: none behind the gap, and the producer is told to stop."""
    sizes = [COUNT, 3, COUNT + 1, 4, COUNT] + [5] * 200
    short.add(4 * (COUNT + 1))
    stream = tcp[0].stream("worker1", generator, sizes)
    items = []
    with pytest.raises(RpcError, match="no room"):
        async for item in stream:
            items.append(item)
    assert [len(item) for item in items] == sizes[:2]
    await until(lambda: not any(service.user_calls() for service in tcp[1]._node.services))
    await until_nothing_under_way(*tcp)


# --- the second connection --------------------------------------------------------------------------------------------


async def test_without_a_second_connection_chunks_go_over_the_first(
    caplog: pytest.LogCaptureFixture, served: list[Any]
) -> None:
    """It is refused: said once, and everything arrives, both ways, with other calls between."""
    caplog.set_level(logging.INFO, "aiorpc")
    async with cluster(2, options=TCP) as workers:
        await workers[0].call("worker1", note, 0)
        for sock in workers[1]._node.listeners.sockets():
            workers[1].loop.remove_reader(sock.fileno())
            sock.shutdown(socket.SHUT_RDWR)  # whoever connects is refused from now on
        calls = [workers[0].call("worker1", echo, large(seed, COUNT + seed)) for seed in range(4)]
        assert await workers[0].call("worker1", note, 1) == 1
        for seed, call in enumerate(calls):
            assert torch.equal(await call, large(seed, COUNT + seed))
        assert calling(workers[0]).pipe is calling(workers[0]).connection
        assert serving(workers[1]).pipe is serving(workers[1]).connection
        assert channels(workers[0])["bulk"] == channels(workers[1])["bulk"] == 4
        said = [message for message in caplog.messages if "second connection" in message]
        assert len(said) == 2 and all("ConnectionRefusedError" in message for message in said)  # once at either end
        await until_nothing_under_way(*workers)


@pytest.mark.parametrize("side", [0, 1])
async def test_a_second_connection_that_breaks_ends_the_pair(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """What was on it is lost: calls under way fail with PeerLost, whichever side it breaks at."""
    options = RpcBackendOptions(transports=("tcp",), shutdown_timeout=0.1)
    with pytest.raises(PeerLost) as caught:
        async with cluster(2, options=options) as workers:
            await ready(workers)
            for worker in workers:
                set_bounds(worker, pipe_grace=0.05, drain=0.05)
            Gate(monkeypatch, calling(workers[0]), 1)
            call = workers[0].call("worker1", note, large())
            await until(lambda: serving(workers[1]).held)
            link = calling(workers[0]) if side == 0 else serving(workers[1])
            assert link.pipe is not None and link.pipe is not link.connection
            link.pipe.abort(ConnectionResetError("cut"))
            await asyncio.wait_for(call, LIMIT)
    assert "worker1" in str(caught.value)


async def test_a_pair_that_leaves_closes_both_connections(tcp: list[Worker]) -> None:
    """In good order: no loss, also with transfers under way."""
    call = tcp[0].call("worker1", note, large(0, 4 * COUNT))
    pipes = [calling(tcp[0]).pipe, serving(tcp[1]).pipe]
    assert await call == 1
    await asyncio.gather(*(worker.shutdown() for worker in tcp))
    assert all(pipe is not None and pipe.closed for pipe in pipes)
    assert [worker._node.group.lost for worker in tcp] == [type(tcp[0]._node.group.lost)()] * 2


# --- who shares memory ------------------------------------------------------------------------------------------------


async def test_calls_from_many_threads_keep_their_data() -> None:
    """Workers on loops of their own; some calls are given up: the others come back equal, nothing is left."""
    options = RpcBackendOptions(dedicated_loop=True, transports=("tcp",))
    failures: list[BaseException] = []

    def work(workers: list[Worker], number: int) -> None:
        try:
            for turn in range(8):
                seed = 10 * number + turn
                value = large(seed, COUNT if turn % 3 else MIDDLE)
                call = workers[number % 2].call(f"worker{1 - number % 2}", echo, value)
                if turn % 4 == 3:
                    call.cancel()
                else:
                    assert torch.equal(call.wait(), value)
        except BaseException as error:
            failures.append(error)

    async with cluster(2, options=options) as workers:
        threads = [threading.Thread(target=work, args=(workers, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, 30)
        assert failures == []
        await until_nothing_under_way(*workers)


# --- a member that says what none says --------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [True, False])
async def test_what_waits_for_a_buffer_takes_no_more_than_may_be_under_way(behind: bool) -> None:
    """Messages whose buffers never come, and what comes behind one of them, would fill the memory."""
    options = RpcBackendOptions(transports=("tcp",), max_incoming_bytes=1 << 20)
    async with cluster(3, options=options) as workers:
        assert await workers[2].call("worker0", len, "abc") == 3
        connection, link = calling_connection(workers[2], "worker0"), None
        (link,) = [each.link for each in workers[0]._node.services if each.record.name == "worker2"]
        call = call_of("builtins:len", 10_000 * "x")
        parcel = Parcel(Kind.CALL, [(2, [1, 1000])], pack(call))
        say(connection, Kind.PARCEL, 1 << 40, parcel)
        await until(lambda: link.held)
        most = 0
        for number in range(1000):
            if behind:
                say(connection, Kind.CALL, 1 << 40, call)
            else:
                say(
                    connection,
                    Kind.PARCEL,
                    (1 << 40) + number + 1,
                    structs.replace(parcel, wires=[(2, [number + 2, 10])]),
                )
            await asyncio.sleep(0)
            most = max(most, sum(len(each.behind) + 1 for each in link.held.values()))
        await until(lambda: link.closed)
        assert 20 < most <= (1 << 20) // 10_000
        assert await workers[0].call("worker1", len, "abc") == 3


async def test_a_piece_without_its_buffer_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """As any other message that cannot be, with the reason: it is no mistake of the worker that gets it."""
    async with cluster(3) as workers:
        assert await workers[2].call("worker0", len, "abc") == 3
        piece = ChannelMessage(DEVICE, ["piece"])
        say(calling_connection(workers[2], "worker0"), Kind.CHANNEL, PIECES, piece)
        await until(lambda: [info.name for info in workers[0].worker_infos()] == ["worker0", "worker1"])
        assert "a piece of a tensor that has not one buffer" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
