"""What a worker says of strangers who connect to it: a line for each of the first ones, and no more."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import Any, NoReturn

import msgpack
import pytest
import torch

from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol import handshake
from aiorpc.protocol.frames import Buffer, Kind, encode_frame
from aiorpc.protocol.handshake import Hello
from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.runtime.group import accepting, connecting
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


class Exhausted(socket.socket):
    """A listener of a process that has no descriptor left."""

    def accept(self) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_descriptors_that_have_run_out_are_told_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked twice a second whether there are some again, for as long as that lasts."""
    async with cluster(1) as (worker,):
        acceptor = worker.node.acceptor
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
        workers[0].node.engine.bounds = Bounds(pipe=0.05)
        with caplog.at_level(logging.INFO, "aiorpc"):
            assert await workers[0].call("worker1", torch.numel, tensor) == tensor.numel()
        said = [line for line in caplog.messages if "no second connection" in line]
        assert len(said) == 2 and all("): it was not open within 0.05 s; large tensors" in line for line in said)
