"""Whoever reaches a socket and does not know the secret gets nothing, costs little and is logged once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiorpc as rpc
from tests.ports import free_port
from tests.scripts import set_bounds

from . import bodies
from .attackers import attacks, hello, talk, targets, unfinished
from .workers import Link, Place, group, meeting_file, places, private_directory, processes, until


@contextlib.contextmanager
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings and errors that aiorpc logs in the block."""
    caplog.clear()
    found: list[str] = []
    with caplog.at_level(logging.WARNING, "aiorpc"):
        yield found
        found.extend(entry.getMessage() for entry in caplog.records if entry.name == "aiorpc")


def has_refused(worker: rpc.Worker, count: int) -> bool:
    """Whether the worker has refused so many connections."""
    return worker.statistics().connections_refused >= count


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_stranger_is_closed_and_logged_once_and_the_worker_serves_on(
    transport: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Each attack ends with a closed connection and one warning; nothing of it is run; calls go on working."""
    async with group(2, transports=(transport,)) as (worker, _):
        target = targets(worker._node.engine.record)[transport]
        for name, data in attacks(worker._node.engine.record, str(tmp_path / "bomb"), transport == "tcp").items():
            with warnings_of(caplog) as logged:
                refused = worker.statistics().connections_refused + 1
                answer = await asyncio.to_thread(talk, target, data)
                await until(partial(has_refused, worker, refused))
            assert len(logged) == 1, (name, logged)
            assert len(logged[0]) < 500
            assert worker._node.acceptor.secret not in answer, name
            assert not (tmp_path / "bomb").exists(), name
        assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3


async def test_half_open_connections_do_no_harm() -> None:
    """Connections that say nothing, or half of something, are let go after a while; meanwhile all is served."""
    async with group(2) as (worker, _):
        assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3  # a member on a busy machine is no stranger
        set_bounds(worker, handshake=0.5)
        target = targets(worker._node.engine.record)["unix"]
        beginnings = unfinished(worker._node.engine.record)
        talking = [asyncio.ensure_future(asyncio.to_thread(talk, target, data)) for data in beginnings]
        assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3
        await asyncio.gather(*talking)
        assert worker.statistics().connections_refused == len(beginnings)


async def test_connections_in_their_handshake_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """More than so many at once are closed at once: strangers must not use up the descriptors."""
    async with group(2, shared_memory=0) as (worker, _):  # else each end soon has a segment of the other's
        set_bounds(worker, handshakes=8, handshake=60.0)
        pool = worker._node.engine.pool
        for _ in range(3):  # its thread stands by for the next one then, which takes descriptors once
            assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3
            await until(lambda: pool.idle == pool.threads)
        before = bodies.descriptor_count()
        family, address = targets(worker._node.engine.record)["unix"]
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.socket(family)) for _ in range(30)]
            for sock in strangers:
                sock.settimeout(5)
                await asyncio.to_thread(sock.connect, address)
            await until(partial(has_refused, worker, 22))
            assert bodies.descriptor_count() <= before + 30 + 8
            assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_stranger_that_closes_at_once_is_nothing(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """A port scan, a look at a stale socket or a worker that dies while it connects leaves no line in the log."""
    async with group(2, transports=(transport,)) as (worker, _):
        family, address = targets(worker._node.engine.record)[transport]
        with warnings_of(caplog) as logged:
            for beginning in (b"", hello(worker._node.engine.record.to_wire(), transport == "tcp")) * 3:
                with socket.socket(family) as sock:
                    sock.connect(address)
                    sock.sendall(beginning)
            assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3
        assert logged == []


async def test_directory_and_socket_are_private() -> None:
    """0700, 0600, whatever the umask; the secret is not in the store, and in no file."""
    before = os.umask(0)
    try:
        async with group(2) as (worker, _):
            directory = private_directory()
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            socket_path = Path(worker._node.engine.record.unix_path)
            assert socket_path.parent == directory
            assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
            store = Path(worker.init_method.removeprefix("file://")).read_bytes()
            assert worker._node.acceptor.secret not in store
            assert worker._node.acceptor.secret.hex().encode() not in store
    finally:
        os.umask(before)


async def test_tcp_listens_only_where_the_rendezvous_is() -> None:
    """A group that meets on this host alone cannot be reached from another."""
    async with group(1, transports=("tcp",)) as (worker, _):
        assert worker._node.engine.record.tcp_host == "127.0.0.1"
        assert listening(worker._node.engine.record.tcp_port) == {"0100007F"}


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on that TCP port, as the system writes them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, number in ends if int(number, 16) == port}


async def test_group_on_one_host_does_not_listen_on_tcp() -> None:
    """Where all have unix sockets; calls in all directions go on."""
    async with group(2) as (worker, _):
        ports = [worker._node.engine.record.tcp_port, *(record.tcp_port for record in _members(worker))]
        assert len(set(ports)) == 2 and all(ports)
        assert [listening(port) for port in ports] == [set()] * len(ports)
        assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3


def _members(worker: rpc.Worker) -> list[Any]:
    assert worker._node.rendezvous is not None
    return worker._node.rendezvous.members()


@pytest.mark.usefixtures("server_made_once")
async def test_free_group_that_meets_at_loopback_does_not_listen_on_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can join it. With AIORPC_SECRET the place may be the end of a tunnel: it listens."""
    for secret in ("", "long enough, and random"):
        if secret:
            monkeypatch.setenv("AIORPC_SECRET", secret)
        else:
            monkeypatch.delenv("AIORPC_SECRET", raising=False)
        async with rpc.init("w0", init_method=f"tcp://localhost:{free_port()}") as worker:
            assert bool(worker._node.engine.record.tcp_port) == bool(secret)
            assert await rpc.call("w0", bodies.add, 1, 2) == 3


def join_with_secret(place: Place, link: Link) -> Any:
    """Body: join, call the other; the error of init_rpc instead if there is one."""
    try:
        place.init_rpc(rpc_timeout=20.0)
    except rpc.errors.RendezvousError as error:
        return str(error)
    result = rpc.rpc_sync("w1", bodies.add, args=(1, 2)), bytes(rpc.current()._node.acceptor.secret)
    rpc.shutdown()
    return result


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [("one" * 10, "one" * 10, True), ("one" * 10, "", False)],
    ids=["the same", "only one has it"],
)
def test_secret_of_the_environment(first: str, second: str, together: bool) -> None:
    """AIORPC_SECRET is used where all have it; missing on one it is an error on every rank, not a silent mixture."""
    with processes() as children, meeting_file() as init_method:
        for place, secret in zip(places(2, init_method), (first, second), strict=True):
            children.start(place, join_with_secret, env={"AIORPC_SECRET": secret} if secret else {})
        found = [child.hear() for child in children]
        children.check_ended()
    if together:
        assert found[0] == found[1]
        assert found[0][0] == 3
    else:
        assert all("AIORPC_SECRET must be set for all workers or for none" in text for text in found)


def test_workers_with_different_secrets_do_not_meet() -> None:
    """Each sees that what the other wrote into the store was not written with its own AIORPC_SECRET."""
    with processes() as children, meeting_file() as init_method:
        for place, secret in zip(places(2, init_method), ("one" * 10, "two" * 10), strict=True):
            children.start(place, join_with_secret, env={"AIORPC_SECRET": secret})
        for child, other in zip(children, ("w1", "w0"), strict=True):
            text = child.hear()
            assert f"says of {other} " in text and "not written by a worker with our AIORPC_SECRET" in text
        children.check_ended()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_process_of_another_user_is_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    """Even where the directory lets it in, the socket asks the kernel who connects."""
    async with group(1) as (worker, _):
        directory = private_directory()
        path = Path(worker._node.engine.record.unix_path)
        code = (
            "import os, socket, sys\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "sock = socket.socket(socket.AF_UNIX)\n"
            "sock.settimeout(5)\n"
            "try:\n"
            "    sock.connect(sys.argv[1])\n"
            "    print(repr(sock.recv(100)))\n"
            "except (PermissionError, ConnectionResetError) as error:\n"
            "    print(type(error).__name__)\n"
        )
        command = [sys.executable, "-S", "-c", code, str(path)]

        def visit() -> str:
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

        assert await asyncio.to_thread(visit) == "PermissionError"
        parents = [directory, directory.parent]
        modes = [parent.stat().st_mode for parent in parents]
        try:
            for parent in parents:
                parent.chmod(0o755)
            path.chmod(0o666)
            with warnings_of(caplog) as logged:
                assert await asyncio.to_thread(visit) in ("b''", "ConnectionResetError")
                await until(partial(has_refused, worker, 1))
            assert len(logged) == 1
            assert "another user" in logged[0]
        finally:
            for parent, mode in zip(parents, modes, strict=True):
                parent.chmod(stat.S_IMODE(mode))
