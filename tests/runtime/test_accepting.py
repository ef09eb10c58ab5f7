"""What a worker says of strangers who connect to it: a line for each of the first ones, and no more."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from pathlib import Path
from typing import Any, NoReturn

import msgpack
import pytest
import torch
from torch.distributed import HashStore

from aiorpc import RpcBackendOptions, Worker
from aiorpc.errors import PeerRefused
from aiorpc.protocol import handshake
from aiorpc.protocol.frames import Buffer, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import Handshake, Hello
from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.runtime.group import accepting, connecting
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.runtime.waiting import LIMIT, until


async def say(worker: Worker, introduction: bytes, times: int) -> None:
    """As a stranger, say HELLO with that so many times, and wait until the worker has refused it."""
    record = worker._node.engine.record
    hello = b"".join(encode_frame(Kind.HELLO, 0, msgpack.packb([introduction, b""])))
    refused = worker.statistics().connections_refused + times
    for _ in range(times):
        reader, writer = await asyncio.open_connection(record.tcp_host, record.tcp_port)
        writer.write(hello)
        await asyncio.wait_for(reader.read(), LIMIT)
        writer.close()
        await writer.wait_closed()
    await until(lambda: worker.statistics().connections_refused >= refused)


async def test_a_stranger_has_no_tracebacks_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What he says may be nested as deep as it can be: it is refused and counted like all else, in one line."""
    crowd = accepting.REFUSALS_LOGGED + 5
    async with cluster(1, options=RpcBackendOptions(transports=("tcp",))) as (worker,):
        with caplog.at_level(logging.INFO, "aiorpc"):
            caplog.clear()
            await say(worker, b"\x91" * 1011 + b"\x01", crowd)
        assert len(caplog.records) == accepting.REFUSALS_LOGGED
        assert not any(each.exc_info or "\n" in each.getMessage() for each in caplog.records)


async def test_what_nobody_has_foreseen_is_a_refusal_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of any kind that a stranger brings about in reading his handshake is told and counted as any refusal."""

    def read_hello(body: Buffer) -> Hello:
        raise RecursionError("maximum recursion depth exceeded\nfor a stranger")

    async with cluster(1, options=RpcBackendOptions(transports=("tcp",))) as (worker,):
        monkeypatch.setattr(handshake, "read_hello", read_hello)
        with caplog.at_level(logging.INFO, "aiorpc"):
            caplog.clear()
            await say(worker, b"", 1)
        (line,) = caplog.records
        assert "its handshake cannot be read: RecursionError: maximum recursion depth" in line.getMessage()
        assert line.exc_info is None and line.getMessage().isprintable()


class Exhausted(socket.socket):
    """A listener of a process that has no descriptor left."""

    def accept(self) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_descriptors_that_have_run_out_are_told_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked twice a second whether there are some again, for as long as that lasts."""
    async with cluster(1) as (worker,):
        acceptor = worker._node.acceptor
        with caplog.at_level(logging.INFO, "aiorpc"), Exhausted() as listener:
            caplog.clear()
            for _ in range(5):
                acceptor._accept(listener)
            (line,) = caplog.messages
            assert "worker worker0 cannot take a connection: [Errno 24] Too many open files" in line
            monkeypatch.setattr(accepting, "UNTAKEN_EVERY", 0.0)  # a minute later
            acceptor._accept(listener)
            assert len(caplog.messages) == 2


async def test_a_second_connection_that_is_long_to_open_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends, with the time that it had: an error of asyncio's has no text."""
    tensor = torch.arange(1_000_000)
    async with cluster(2, options=RpcBackendOptions(transports=("tcp",))) as workers:
        assert await workers[0].call("worker1", len, "abc") == 3

        async def reach(*args: Any) -> NoReturn:
            await asyncio.sleep(LIMIT)
            raise AssertionError("nobody waits as long")

        monkeypatch.setattr(connecting, "_reach", reach)
        workers[0]._node.engine.bounds = Bounds(pipe=0.05)
        with caplog.at_level(logging.INFO, "aiorpc"):
            assert await workers[0].call("worker1", torch.numel, tensor) == tensor.numel()
        said = [line for line in caplog.messages if "no second connection" in line]
        assert len(said) == 2 and all("): it was not open within 0.05 s; large tensors" in line for line in said)


async def shake(opener: Handshake, worker: Worker) -> None:
    """Say to a worker what that side of a handshake says, until the worker closes the connection."""
    record = worker._node.engine.record
    reader, writer = await asyncio.open_connection(record.tcp_host, record.tcp_port)
    decoder = FrameDecoder(max_body=1 << 20)
    writer.write(b"".join(opener.start()))
    try:
        while data := await asyncio.wait_for(reader.read(1 << 16), LIMIT):
            for frame in decoder.feed(data):
                writer.write(b"".join(opener.feed(frame)))
    except PeerRefused:
        pass
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_second_connection_of_who_has_just_left_is_no_intruder(caplog: pytest.LogCaptureFixture) -> None:
    """It may be under way as its first one ends, and is given up; one that cannot prove whose it is is refused."""
    options, store = RpcBackendOptions(transports=("tcp",), authenticate_frames=False), HashStore()
    async with cluster(1, dynamic=True, store=store, options=options) as (worker,):
        async with Worker("short", store=store, options=options) as short:
            assert await short.call("worker0", abs, -3) == 3
            record, link = short._node.engine.record, short._node.peers.find("worker0").link
            assert link is not None
            session, number = link.connection.session, link.number
        await until(lambda: worker._node.links.find(record, number, opener=False) is None)

        def opener(secret: bytes, number: int) -> Handshake:
            return Handshake(record, secret, expect=worker._node.engine.record, link=number, pipe=True)

        def turned_away() -> tuple[int, int]:
            statistics = worker.statistics()
            return statistics.connections_given_up, statistics.connections_refused

        given_up, refused = turned_away()
        with caplog.at_level(logging.INFO, "aiorpc"):
            caplog.clear()
            await shake(opener(session, number), worker)
            await until(lambda: turned_away() == (given_up + 1, refused))
            assert not caplog.messages
            await shake(opener(worker._node.acceptor.secret, number), worker)
            await shake(opener(worker._node.acceptor.secret, number + 99), worker)
            await until(lambda: turned_away() == (given_up + 1, refused + 2))
        assert ["secret does not match" in line for line in caplog.messages] == [True, False]
        assert "the connection whose second one this is to be has ended here" in caplog.messages[1]


async def test_who_looks_whether_a_socket_is_alive_is_not_counted() -> None:
    """Each worker that starts looks at all sockets of its user; whoever says something and goes away has given up."""
    async with cluster(1) as (worker,):
        path = worker._node.engine.record.unix_path
        for _ in range(5):
            sockets.remove_if_stale(Path(path))
        before = worker.statistics()
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"".join(encode_frame(Kind.HELLO, 0, b"much more than comes"))[:9])
        writer.close()
        await writer.wait_closed()
        await until(lambda: worker.statistics().connections_given_up > before.connections_given_up)
        after = worker.statistics()
        assert (after.connections_given_up, after.connections_refused) == (1, 0)


async def prove(sock: socket.socket, by: Worker, to: Worker, link: int, session: bytes | None = None) -> None:
    """The handshake of one member with another one, for a connection that its runtime knows nothing of.

    session: of that link, whose second connection it is to be.
    """
    loop, mine, theirs = asyncio.get_running_loop(), by._node.engine.record, to._node.engine.record
    secret = by._node.acceptor.secret if session is None else session
    shaking = Handshake(mine, secret, expect=theirs, link=link, pipe=session is not None)
    decoder = FrameDecoder(max_body=1 << 16)
    await loop.sock_sendall(sock, b"".join(shaking.start()))
    while shaking.peer is None:
        for frame in decoder.feed(await loop.sock_recv(sock, 65536)):
            if shaking.peer is None and (reply := b"".join(shaking.feed(frame))):
                await loop.sock_sendall(sock, reply)


async def opened(by: Worker, to: Worker, link: int, session: bytes | None = None) -> socket.socket:
    """One more connection of a member, once that is proved. Raises what `prove` does."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, to._node.engine.record.unix_path)
        await prove(sock, by, to, link, session)
    except BaseException:
        sock.close()
        raise
    return sock


async def test_a_member_has_few_connections() -> None:
    """However many it opens, also at once, two are served; the others are told so or closed."""
    async with cluster(3) as workers:
        worker, _, member = workers
        loop, services = asyncio.get_running_loop(), worker._node.services
        assert await member.call("worker0", len, "abc") == 3
        made = await asyncio.gather(*(opened(member, worker, 1000 + at) for at in range(20)), return_exceptions=True)
        assert len([each for each in services if each.record.name == "worker2"]) <= 2
        with pytest.raises(PeerRefused, match="worker 'worker2' has 2 connections here already"):
            await opened(member, worker, 2000)
        socks = [each for each in made if isinstance(each, socket.socket)]
        ended = [asyncio.ensure_future(loop.sock_recv(sock, 1)) for sock in socks]
        await until(lambda: len([each for each in ended if not each.done()]) == 1)
        assert await workers[1].call("worker0", len, "abc") == await member.call("worker0", len, "abc") == 3
        for each in ended:
            each.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for sock in socks:
            sock.close()


async def test_a_link_has_one_connection_for_large_tensors() -> None:
    """One that comes in place of another, of which no use was made yet, ends that."""
    async with cluster(2) as (worker, member):
        assert await member.call("worker0", len, "abc") == 3
        link = member._node.peers.find("worker0").link
        assert link is not None
        loop, socks = asyncio.get_running_loop(), []
        for _ in range(5):
            socks.append(await opened(member, worker, link.number, link.connection.session))
        for sock in socks[:-1]:
            assert await asyncio.wait_for(loop.sock_recv(sock, 1), LIMIT) == b""
        for sock in socks:
            sock.close()
        assert await member.call("worker0", len, "abc") == 3


async def test_a_member_does_not_fill_our_log(caplog: pytest.LogCaptureFixture) -> None:
    """One that breaks a connection after the other over TCP, and is there when it is asked."""
    options = RpcBackendOptions(transports=("tcp",), authenticate_frames=False, reconnect_grace=0.0)
    loop, crowd = asyncio.get_running_loop(), accepting.REFUSALS_LOGGED + 20
    async with cluster(3, options=options) as workers:
        record = workers[0]._node.engine.record
        for number in range(crowd):
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, (record.tcp_host, record.tcp_port))
                await prove(sock, workers[2], workers[0], 1000 + number)
                await loop.sock_sendall(sock, 50 * b"x")
                await asyncio.wait_for(loop.sock_recv(sock, 1), LIMIT)
        assert await workers[2].call("worker0", len, "abc") == 3
    said = [each.getMessage() for each in caplog.records if "ended a connection of worker2" in each.getMessage()]
    assert len(said) == accepting.REFUSALS_LOGGED and "only counted" in said[-1]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_the_log_says_where_a_stranger_was(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """By what the system knows, as he may say of himself what he likes: so an operator knows where to look."""
    async with cluster(1, options=RpcBackendOptions(transports=(transport,))) as (worker,):
        record = worker._node.engine.record
        if transport == "tcp":
            reader, writer = await asyncio.open_connection(record.tcp_host, record.tcp_port)
        else:
            reader, writer = await asyncio.open_unix_connection(record.unix_path)
        host, port = writer.get_extra_info("sockname") if transport == "tcp" else ("", 0)
        writer.write(b"".join(encode_frame(Kind.CALL, 0, b"")))
        await asyncio.wait_for(reader.read(), LIMIT)
        writer.close()
        await writer.wait_closed()
        await until(lambda: worker.statistics().connections_refused)
    (said,) = [each for each in caplog.messages if "refused a connection: " in each]
    assert said.endswith(f" (from {host}:{port})" if transport == "tcp" else f" (from process {os.getpid()})")
