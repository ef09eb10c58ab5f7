"""Whoever takes what he can get, stranger or member, gets what the bounds allow; all others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

import aiorpc as rpc
from aiorpc.protocol import handshake
from aiorpc.transport.connection import Connection

from . import bodies
from .workers import Link, Place, group, until

MB = 1 << 20


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """As training programs like it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- strangers --------------------------------------------------------------------------------------------------------


def visit(path: str, count: int, *, at_once: int = 100) -> None:
    """So many connections that say nothing, in groups, and hang up."""
    for start in range(0, count, at_once):
        with contextlib.ExitStack() as stack:
            for _ in range(min(at_once, count - start)):
                enter(stack.enter_context(socket.socket(socket.AF_UNIX)), path)


def enter(sock: socket.socket, path: str) -> None:
    """Connect, once there is room in the queue of the listener."""
    sock.settimeout(10)
    for _ in range(10_000):
        with contextlib.suppress(BlockingIOError):
            return sock.connect(path)
        time.sleep(0.001)
    raise TimeoutError(path)


@pytest.mark.parametrize("count", [500, pytest.param(12_000, marks=pytest.mark.long)])
async def test_silent_strangers_leave_nothing(count: int) -> None:
    """They cost little while they are there, and nothing once they are gone, although no collector runs."""
    async with group(2) as (worker, _):
        path = worker.node.engine.record.unix_path
        await asyncio.to_thread(visit, path, 300)  # what the allocator keeps
        await rpc.call("w1", bodies.call_back, "w0", 3)
        connections = worker.node.engine.connections
        before = len(connections)
        with no_collector():
            started = bodies.resident()
            await asyncio.to_thread(visit, path, count)
            assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3
            await until(lambda: len(connections) <= before)
            assert bodies.resident() - started < 20 * MB


async def test_a_stranger_gets_16_kib_before_his_proof() -> None:
    """What is kept to read into, as long as nothing is proved; those who stay cost no more than that."""
    async with group(2) as (worker, _):
        path = worker.node.engine.record.unix_path

        def strangers() -> list[Connection]:
            return [each for each in worker.node.engine.connections if each.decoder.max_body == handshake.MAX_BODY]

        with contextlib.ExitStack() as stack:
            for _ in range(50):
                enter(stack.enter_context(socket.socket(socket.AF_UNIX)), path)
            await until(lambda: len(strangers()) == 50)
            for connection in strangers():
                assert memoryview(connection.decoder.get_buffer().obj).nbytes <= 16 * 1024


def serve_with_few_descriptors(place: Place, link: Link, spare: int) -> list[str]:
    """Body: serve, with so many descriptors beside those that the worker has."""
    place.init_rpc()
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1 + spare, most + 1 + spare))
    link.tell(rpc.current().node.engine.record.unix_path)
    return [info.name for info in rpc.shutdown().lost]


def open_files(count: int) -> int:
    """Handler: so many descriptors at once."""
    with contextlib.ExitStack() as stack:
        return len([stack.enter_context(open("/dev/null")) for _ in range(count)])


async def test_strangers_leave_descriptors_to_handlers() -> None:
    """Where a process may have few: handlers open files while strangers connect as fast as they can, and stay."""
    async with group(2, serve_with_few_descriptors, 20) as (_, children):
        path = await children["w1"].ahear()
        assert await rpc.call("w1", open_files, 4) == 4
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                await asyncio.to_thread(enter, stack.enter_context(socket.socket(socket.AF_UNIX)), path)
                assert await rpc.call("w1", open_files, 4) == 4
