"""From a name to a proved connection: what may go wrong on the way, and what is no reason to give a worker up."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import PeerLeft, PeerLost, RemoteError, RpcBackendOptions, Worker
from aiorpc.errors import SerializationError
from aiorpc.events import WorkerLeft
from aiorpc.testing import cluster
from tests.leaks import open_descriptors
from tests.runtime.inside import set_bounds
from tests.runtime.observers import standing_still
from tests.runtime.waiting import until

LONG = 30.0
APART = 2048  # elements of a tensor whose bytes are a buffer, not part of the message
TCP = RpcBackendOptions(transports=("tcp",))


async def answer(call: Any) -> Any:
    """Its result, within a bound: what is tested here used to hang."""
    return await asyncio.wait_for(call, LONG)


@pytest.fixture
async def over_tcp() -> AsyncIterator[list[Worker]]:
    """Two workers that meet over TCP alone."""
    async with cluster(2, options=TCP) as workers:
        yield workers


async def for_ever() -> None:
    await asyncio.Event().wait()


def listeners(worker: Worker) -> list[socket.socket]:
    return worker._node.listeners.sockets()


def count(*values: Any) -> int:
    return len(values)


def fail_with(size: int) -> None:
    raise ValueError("x" * size)


def take_no_connections(worker: Worker) -> None:
    """Whoever connects waits, as with a process that is stopped, until `worker._node.acceptor.start`."""
    for sock in listeners(worker):
        worker.loop.remove_reader(sock.fileno())


# --- the handshake ----------------------------------------------------------------------------------------------------


async def test_worker_that_does_not_answer_the_first_contact_is_not_dead(pair: list[Worker]) -> None:
    """Stopped, or with a loop that cannot run, it takes connections and says nothing: calls wait until it goes on."""
    set_bounds(pair[0], handshake=0.02, connect=0.05)
    take_no_connections(pair[1])
    call = asyncio.ensure_future(pair[0].peer("worker1", timeout=0).call(abs, -3))
    done, _ = await asyncio.wait([call], timeout=0.2)
    assert not done
    set_bounds(pair[0])  # a busy machine needs longer for a handshake
    pair[1]._node.acceptor.start()
    assert await answer(call) == 3


async def test_handshake_that_breaks_is_begun_again(pair: list[Worker]) -> None:
    """A connection that ends before it was proved says nothing about the worker at its other end."""
    set_bounds(pair[1], handshake=0.0)  # it lets nobody come that far
    call = pair[0].call("worker1", abs, -3)
    await until(lambda: pair[1].statistics().connections_refused >= 2)
    assert not call.done() and pair[0]._node.group.lost == {}
    set_bounds(pair[1])
    assert await answer(call) == 3


async def test_member_gets_through_a_crowd_of_strangers(over_tcp: list[Worker]) -> None:
    """Strangers who open all the connections that may be in their handshake keep no member out."""
    engine = over_tcp[1]._node.engine
    set_bounds(over_tcp[1], handshakes=4)
    record = engine.record

    def open_connections() -> int:
        return sum(not connection.ended for connection in list(engine.connections))

    await until(lambda: over_tcp[1]._node.peers.find("worker0").state.name == "READY")
    before = open_connections()
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection((record.tcp_host, record.tcp_port), LONG))
        await until(lambda: open_connections() == before + 4)
        assert await answer(over_tcp[0].call("worker1", abs, -3)) == 3
        assert over_tcp[1].statistics().connections_refused == 1


async def test_goodbye_right_behind_the_handshake_is_one() -> None:
    """A worker that leaves as soon as it has taken a connection has left; it is not lost."""
    store = HashStore()
    a, b = (aiorpc.init(f"w{rank}", rank=rank, world_size=2, store=store) for rank in range(2))
    await asyncio.gather(a.start(), b.start())

    def leave_once_connected() -> None:
        """Before a has read the end of the handshake: what is to be called soon comes before the sockets' turn."""
        for service in b._node.services:
            service.say_goodbye()
        if not b._node.services:
            b.loop.call_soon(leave_once_connected)

    leave_once_connected()
    events = a.events()
    heard = asyncio.ensure_future(anext(events))
    await until(lambda: a._node.events.listeners)
    with pytest.raises(PeerLeft, match="w1"):
        await answer(a.call("w1", abs, -3))
    assert await answer(heard) == WorkerLeft(b.info)
    await events.aclose()
    await asyncio.gather(a.shutdown(False), b.shutdown(False))


# --- reaching it ------------------------------------------------------------------------------------------------------


async def test_connections_are_made_on_first_use(trio: list[Worker]) -> None:
    """Before the first call between two workers there is nothing between them, and after it one connection."""

    def between() -> list[str]:
        return [service.record.name for service in trio[2]._node.services]

    await until(lambda: trio[1]._node.peers.find("worker0").state.value == "ready")
    assert between() == [] and trio[1]._node.peers.find("worker2").state.value == "idle"
    assert await asyncio.gather(*(trio[1].call("worker2", abs, -n) for n in range(20))) == list(range(20))
    assert between() == ["worker1"]


async def test_address_where_nobody_answers_is_given_up_in_time() -> None:
    """The system would try for minutes; the worker is lost when the time for connecting is up."""
    elsewhere = RpcBackendOptions(transports=("tcp",), address="127.0.0.2", shutdown_timeout=0.1)
    with ExitStack() as stack:
        async with cluster(2, options=[TCP, elsewhere]) as workers:
            address = ("127.0.0.2", workers[1]._node.engine.record.tcp_port)
            full = stack.enter_context(socket.socket())
            full.bind(address)
            full.listen(0)  # it takes one connection, and the system is silent to all others
            stack.enter_context(socket.create_connection(address, LONG))
            set_bounds(workers[0], connect=0.05)
            place = rf"no answer from 127\.0\.0\.2:{address[1]} within 0\.05 s \(a firewall\?.* address and port_range"
            with pytest.raises(PeerLost, match=rf"worker1.*cannot be reached: .*does not take connections: {place}"):
                await answer(workers[0].peer("worker1", timeout=0).call(abs, -3))


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_worker_of_this_host_that_listens_no_more_is_lost_soon(transport: str) -> None:
    """Its process lives on, as it does in tests: that it refuses connections says enough, without the whole time."""
    options = RpcBackendOptions(transports=(transport,), shutdown_timeout=0.1)
    async with cluster(2, options=options) as workers:
        set_bounds(workers[0], connect=100 * LONG, refused=0.1)
        take_no_connections(workers[1])
        for sock in listeners(workers[1]):
            sock.shutdown(socket.SHUT_RDWR)  # it listens no more
        with pytest.raises(PeerLost, match=r"worker1.*cannot be reached.*does not take connections"):
            await answer(workers[0].peer("worker1", timeout=0).call(abs, -3))


async def test_what_goes_wrong_on_the_way_is_told_at_once() -> None:
    """An error that trying again cannot mend is an error of the calls, with the reason, not a hang."""
    ways = [RpcBackendOptions(transports=(each,), shutdown_timeout=0.1) for each in ("unix", "tcp")]
    async with cluster(2, options=ways) as workers:
        with pytest.raises(PeerLost, match=r"worker1.*cannot be reached: .* have no transport in common"):
            await answer(workers[0].peer("worker1", timeout=0).call(abs, -3))


# --- the limits -------------------------------------------------------------------------------------------------------


LIMIT = 1 << 16


@pytest.fixture
async def frugal() -> AsyncIterator[list[Worker]]:
    """Two workers that take messages of 64 KiB, and send tensors beside them over a second connection."""
    options = RpcBackendOptions(max_frame_bytes=LIMIT, shared_memory=0, min_bulk_bytes=4096)
    async with cluster(2, options=options) as workers:
        yield workers


async def test_errors_longer_than_a_message_may_be_are_errors_of_their_calls(frugal: list[Worker]) -> None:
    """The limit is for what users send; the other calls to that worker go on."""
    other = frugal[0].call("worker1", for_ever)
    for size in (LIMIT // 2, LIMIT, 32 * LIMIT):  # the last one travels as text
        with pytest.raises((ValueError, RemoteError), match="x" * 100):
            await answer(frugal[0].call("worker1", fail_with, size))
    assert not other.done() and frugal[0]._node.group.lost == {}
    other.cancel()


async def test_the_longest_message_may_have_tensors_beside_it(frugal: list[Worker]) -> None:
    """What the runtime says of their way comes on top of what may be sent, and breaks no connection."""
    tensors = [torch.ones(APART) for _ in range(100)]

    async def is_taken(length: int) -> bool:
        try:
            return bool(await answer(frugal[0].call("worker1", count, "y" * length, *tensors)) == 101)
        except SerializationError:  # refused here; the longest one that is not is what this is about
            return False

    def beside() -> int:
        return frugal[0].statistics().channels["bulk"].sent

    while not beside():
        assert await is_taken(0)
    low, high = 0, LIMIT
    while high - low > 1:
        middle, before = (low + high) // 2, beside()
        if await is_taken(middle):
            low = middle
            assert beside() == before + 100
        else:
            high = middle
    assert low > LIMIT // 2 and frugal[0]._node.group.lost == {}


# --- the listeners ----------------------------------------------------------------------------------------------------


async def test_forked_child_keeps_no_socket_of_its_parent() -> None:
    """Neither listeners nor connections, also after some have ended: a child must not keep ports and peers waiting."""
    others = open_sockets()  # the loop's
    async with cluster(2, options=TCP) as (a, b):
        assert await a.call("worker1", abs, -3) == 3
        await b.shutdown(graceful=False)
        await until(lambda: a._node.group.is_gone(b._node.engine.record) and not a._node.services)
        host, port = a._node.engine.record.tcp_host, a._node.engine.record.tcp_port
        assert await a.call("worker0", abs, -3) == 3
        with socket.create_connection((host, port), LONG) as stranger:
            others.add(os.fstat(stranger.fileno()).st_ino)
            # The listener, both ends of the connection to itself, and the one that is in its handshake.
            await until(lambda: len(open_sockets() - others) == 4)
            assert still_open_in_a_child(open_sockets() - others) == set()
        assert await a.call("worker0", abs, -3) == 3


def open_sockets() -> set[int]:
    """The inodes of this process's sockets."""
    return {int(name[8:-1]) for name in open_descriptors().values() if name.startswith("socket:[")}


def still_open_in_a_child(inodes: set[int]) -> set[int]:
    """Those of the sockets that a forked child has open once its hooks have run."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            found = []
            for name in os.listdir("/proc/self/fd"):
                target = os.readlink(f"/proc/self/fd/{name}") if os.path.exists(f"/proc/self/fd/{name}") else ""
                found += [number for number in inodes if target == f"socket:[{number}]"]
            os.write(write, repr(set(found)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answered = file.read()
    os.waitpid(child, 0)
    left: set[int] = eval(answered)
    return left


async def test_a_worker_that_stands_still_in_the_midst_of_its_handshake_tries_again() -> None:
    """For longer than the other side waits for its proof, and than it tries itself: that is no sign of a death."""
    apart = RpcBackendOptions(dedicated_loop=True, lag_warning=0.0)
    async with cluster(2, options=[apart, RpcBackendOptions()]) as (still, worker):
        assert await worker.call("worker0", abs, -3) == 3
        set_bounds(still, connect=0.1)
        set_bounds(worker, handshake=0.3)
        call = still.call("worker1", abs, -3)
        # This loop does not run until the other one stands, so the handshake is not over by then.
        assert select.select(worker._node.listeners.sockets(), [], [], LONG)[0]
        with standing_still(still):
            await until(lambda: worker.statistics().connections_refused)
        assert await answer(call) == 3
        assert not still._node.group.lost
