"""Workers that speak TCP alone, as between hosts: everything works the same, the listener is where it is told."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from aiorpc.testing import cluster
from tests.limits import busy
from tests.ports import free_range

from . import bodies
from .test_death import SOON
from .workers import LIMIT, Link, Place, group, meeting_file, places, processes

TCP: dict[str, Any] = {"transports": ("tcp",)}


def listening() -> set[tuple[str, int]]:
    """Address and port of each TCP listener of this host's IPv4 interfaces."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    pairs = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in pairs}


def where() -> tuple[str, str, int]:
    """In a handler: where this worker can be reached."""
    record = rpc.current()._node.engine.record
    return record.unix_path, record.tcp_host, record.tcp_port


def fail(text: str) -> None:
    """A handler that raises."""
    raise LookupError(text)


def numbers(n: int) -> Any:
    """A stream that ends, of tensors."""
    for i in range(n):
        yield torch.full((1000,), i)


async def test_everything_works_over_tcp_alone() -> None:
    """Calls both ways, errors, cancellation, streams, references and tensors; no unix socket exists."""
    async with group(3, **TCP) as (worker, _):
        assert worker._node.engine.record.unix_path == ""
        assert (await rpc.call("w1", where))[0] == ""
        assert await rpc.call("w1", bodies.aadd, 1, 2) == 3
        assert await rpc.call("w1", bodies.call_back, "w2", 5) == 5
        with pytest.raises(LookupError, match="not here"):
            await rpc.call("w2", fail, "not here")
        with pytest.raises(rpc.RpcTimeout):
            await rpc.peer("w1", timeout=0.1).call(bodies.ablock)
        tensor = torch.arange(2_000_000, dtype=torch.float32).reshape(1000, 2000)
        assert torch.equal(await rpc.call("w1", bodies.echo, tensor.t()), tensor.t())
        assert torch.equal(await rpc.call("w1", bodies.call_back, "w2", tensor), tensor)
        items = [int(item[-1]) async for item in rpc.stream("w1", numbers, 40)]
        assert items == list(range(40))
        ref = rpc.remote("w1", bodies.Counter, 5)
        assert await ref.rpc_async().add(1) == 6
        assert (await rpc.call("w2", value_of, ref)) == 6
        assert await asyncio.to_thread(rpc.rpc_sync, "w1", bodies.add, (1, 2)) == 3


def value_of(ref: rpc.RRef[bodies.Counter]) -> int:
    """At a third worker: use somebody else's object."""
    return int(ref.rpc_sync().add(0))


async def test_death_is_seen_over_tcp() -> None:
    """A killed process ends its connections: pending calls fail at once, the others go on and leave."""
    async with group(3, ended=("w1",), **TCP) as (worker, children):
        call = rpc.call("w1", bodies.ablock)
        assert await rpc.call("w1", bodies.add, 1, 2) == 3  # so the call before it has been sent
        children["w1"].kill()
        killed = time.monotonic()
        with pytest.raises(rpc.PeerLost) as caught:
            await asyncio.wait_for(call, LIMIT)
        assert time.monotonic() - killed < SOON * busy()
        assert (caught.value.worker, caught.value.pid) == ("w1", children["w1"].pid)
        assert await rpc.call("w2", bodies.add, 1, 2) == 3
        assert [info.name for info in (await worker.shutdown()).lost] == ["w1"]


@pytest.mark.parametrize(
    ("bind", "address", "listens", "advertised"),
    [
        ("127.0.0.2", None, "127.0.0.2", "127.0.0.2"),
        ("0.0.0.0", "localhost", "0.0.0.0", "localhost"),
        ("0.0.0.0", None, "0.0.0.0", "127.0.0.1"),
    ],
    ids=["one interface", "a name", "all interfaces"],
)
async def test_listener_is_bound_and_advertised_as_told(
    bind: str, address: str | None, listens: str, advertised: str
) -> None:
    """bind_address is where the listener is, address what the others are told; a wildcard is never told to anyone."""
    ports = free_range(21)
    options = {**TCP, "bind_address": bind, "address": address, "port_range": ports}
    async with group(3, **options):
        found = [await rpc.call(name, where) for name in ("w0", "w1", "w2")]
        assert {host for _, host, _ in found} == {advertised}
        used = [port for _, _, port in found]
        assert len(set(used)) == 3
        assert all(ports[0] <= port <= ports[1] for port in used)
        assert {(listens, port) for port in used} <= listening()
        assert await rpc.call("w1", bodies.call_back, "w2", 5) == 5
        assert await rpc.call("w2", bodies.call_back, "w0", 5) == 5


async def test_port_range_without_a_free_port_is_an_error() -> None:
    """It names the range; nothing is left of the worker, and another one can start."""
    with socket.socket() as holder, meeting_file() as init_method:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        options = rpc.RpcBackendOptions(**TCP, port_range=(port, port), rpc_timeout=20.0)
        with pytest.raises(rpc.errors.RendezvousError, match=rf"no port to listen on.*{port}"):
            await rpc.init("w0", rank=0, world_size=1, init_method=init_method, options=options)
        async with rpc.init("w0", rank=0, world_size=1, init_method=init_method):
            assert await rpc.call("w0", bodies.add, 1, 2) == 3


async def test_workers_without_a_transport_in_common_say_so() -> None:
    """The error names the worker that cannot be reached and why, at once; leaving is bounded."""
    mixed = [rpc.RpcBackendOptions(transports=(kind,), shutdown_timeout=0.2) for kind in ("unix", "tcp")]
    started = time.monotonic()
    async with cluster(2, options=mixed) as workers:
        with pytest.raises(rpc.PeerLost, match=r"worker1.*no transport in common"):
            await workers[0].call("worker1", bodies.add, 1, 2)
    assert time.monotonic() - started < 10


def rejoin(place: Place, link: Link, rounds: int) -> list[int]:
    """Body: several lives on the same single port; returns the ports."""
    ports = []
    for _ in range(rounds):
        place.init_rpc(**TCP, port_range=(place_port(place), place_port(place)))
        others = range(place.world_size or 0)
        assert [rpc.rpc_sync(other, bodies.add, args=(other, 1)) for other in others] == [rank + 1 for rank in others]
        ports.append(rpc.current()._node.engine.record.tcp_port)
        rpc.shutdown()
    return ports


def place_port(place: Place) -> int:
    """The one port that this rank may use: the meeting place's, and so many after it."""
    return int(place.init_method.rpartition(":")[2]) + 1 + place.rank


def test_fixed_ports_are_free_again_after_shutdown() -> None:
    """As behind a firewall with one port for each rank: the next life gets the same port at once."""
    method = f"tcp://127.0.0.1:{free_range(3)[0]}"
    with processes() as children:
        for place in places(2, method):
            children.start(place, rejoin, 3)
        for child in children:
            assert child.hear() == [place_port(child.place)] * 3
        children.check_ended()
