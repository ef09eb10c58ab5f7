"""What a worker says of strangers who connect to it: a line for each of the first ones, and no more."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import msgpack
import pytest

from aiorpc import RpcBackendOptions, Worker
from aiorpc.errors import PeerRefused
from aiorpc.protocol.frames import FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import Handshake
from aiorpc.runtime.group import accepting
from aiorpc.testing import cluster
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
