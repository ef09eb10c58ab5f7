"""What a worker says of strangers who connect to it: a line for each of the first ones, and no more."""

from __future__ import annotations

import asyncio
import logging

import msgpack
import pytest

from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol import handshake
from aiorpc.protocol.frames import Buffer, Kind, encode_frame
from aiorpc.protocol.handshake import Hello
from aiorpc.runtime.group import accepting
from aiorpc.testing import cluster
from tests.runtime.waiting import LIMIT, until


async def say(worker: Worker, introduction: bytes, times: int) -> None:
    """As a stranger, say HELLO with that so many times, and wait until the worker has refused it."""
    record = worker.node.engine.record
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
