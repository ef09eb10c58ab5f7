"""Workers on the hosts of `hosts.py`: one follows a script, the others serve; and what they tell each other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch.distributed import TCPStore

import aiorpc as rpc
from aiorpc.transport import sockets
from bench.hosts import PORT, Host, enter

from .. import leaks
from ..processes.workers import Children, Link, Place, places, processes
from .hosts import Network

MIB = 1 << 20
SECRET = {"AIORPC_SECRET": "one for all hosts of a test"}  # without one workers of several hosts do not meet
Script = Callable[..., Awaitable[Any]]


@contextlib.contextmanager
def group(
    network: Network,
    script: Script,
    *args: Any,
    hosts: tuple[Host, ...] = (),
    patience: int | None = None,
    env: dict[str, str] = SECRET,
    **options: Any,
) -> Iterator[Children]:
    """w0 runs ``await script(worker, link, *args)`` on the left host; the others, one for each of `hosts`, serve.

    hosts: the right one if not given. patience: seconds after which a silent network counts as broken. env: what
    all have in their environment. options: RpcBackendOptions of all. Each process returns what its script returned and
    the names of the lost.
    """
    with processes() as children:
        others = hosts or (network.right,)
        for place, host in zip(places(1 + len(others), network.meeting), (network.left, *others), strict=True):
            own = script if place.rank == 0 else serve
            own_args = args if place.rank == 0 else ()
            children.start(place, take_part, host.namespace, own, own_args, patience, options, env=env)
        yield children


def take_part(
    place: Place,
    link: Link,
    namespace: str,
    script: Script,
    args: tuple[Any, ...],
    patience: int | None,
    options: dict[str, Any],
) -> tuple[Any, list[str]]:
    """Body: a whole life on that host, until the group leaves together. Nothing of it may be left then."""
    enter(namespace)
    if patience is not None:
        sockets.TCP_TIMEOUT = patience
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # libuv opens a pipe for signals that lives as long as the process; uvloop and torch have one each.
        runner.run(asyncio.sleep(0))
        TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
        return runner.run(_live(place, link, script, args, rpc.RpcBackendOptions(**options)))


async def _live(
    place: Place, link: Link, script: Script, args: tuple[Any, ...], options: rpc.RpcBackendOptions
) -> tuple[Any, list[str]]:
    # In a thread, which stays and is counted: what is closed late needs the loop.
    before = await asyncio.to_thread(leaks.take_snapshot)
    who: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size, "init_method": place.init_method}
    async with rpc.init(place.name, options=options, **who) as worker:
        value = await script(worker, link, *args)
        lost = [info.name for info in (await worker.shutdown()).lost]
    # Files: other workers of this machine have theirs in the same place.
    left = await asyncio.to_thread(leaks.wait_until_clean, before, allowed=("files",))
    assert not left, left
    return value, lost


async def serve(worker: rpc.Worker, link: Link) -> None:
    """Nothing: shutdown serves until all have entered it."""


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    """So many bytes (a multiple of 8) without any regularity; the same on each host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(size // 8, dtype=torch.int64).random_(generator=generator)


def is_pattern(tensor: torch.Tensor, size: int, seed: int = 0) -> bool:
    """Handler: whether that is what arrived."""
    return torch.equal(tensor, pattern(size, seed))


def length(tensor: torch.Tensor) -> int:
    """Handler: bytes of a tensor; quick, whatever its size."""
    return tensor.nbytes


def host_and_partners() -> tuple[str, set[str]]:
    """Handler: the worker's host identity, and the other ends of this host's TCP connections, its own end left out.

    Without those of the meeting place, which is reached over TCP from everywhere.
    """
    ends = [[parsed(end) for end in line.split()[1:3]] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    partners = {far[0] for near, far in ends if far[1] != 0 and PORT not in (near[1], far[1])}
    return rpc.current()._node.engine.record.host, partners


def parsed(end: str) -> tuple[str, int]:
    """Address and port as /proc/net/tcp writes them."""
    address, port = end.split(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(address))), int(port, 16)


async def timed(call: Awaitable[Any], began: float) -> tuple[Any, float]:
    """A call's result, and seconds from that moment until it was there."""
    value = await call
    return value, time.monotonic() - began


def retransmitted(pid: int) -> int:
    """TCP segments that the host of that process has sent again so far."""
    lines = Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])
