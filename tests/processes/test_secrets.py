"""What whoever reaches a worker, or starts beside it, can learn of its group and of the group's secret: nothing."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest

import aiorpc as rpc

from . import bodies
from .attackers import FIELDS, STRANGER, call_first, hello, nested_hello, talk, targets, told_to_log, unproved
from .test_strangers import warnings_of
from .workers import group, until


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_stranger_learns_nothing_of_the_worker(transport: str) -> None:
    """Who says HELLO is answered by a number; neither that nor a refusal has a name, a host, a process or a proof."""
    async with group(1, transports=(transport,)) as (worker, _):
        record = worker._node.engine.record
        target = targets(record)[transport]
        sealed = transport == "tcp"
        for wanted in (record.to_wire(), STRANGER.to_wire()):
            answer = await asyncio.to_thread(talk, target, unproved(wanted, sealed, STRANGER))
            for told in (worker.name, record.hostname, record.host, record.main, record.incarnation):
                assert told.encode() not in answer
            assert len(answer) < 500


async def test_handshakes_that_are_given_up_are_counted() -> None:
    """Whoever collects what a worker says to strangers is seen in its statistics, and not in its log."""
    async with group(2, transports=("tcp",)) as (worker, _):
        record = worker._node.engine.record
        family, address = targets(record)["tcp"]
        before = worker.statistics()

        def collect() -> None:
            with socket.socket(family) as sock:
                sock.settimeout(5)
                sock.connect(address)
                sock.sendall(hello(record.to_wire(), True))
                assert sock.recv(100)

        for _ in range(5):
            await asyncio.to_thread(collect)
        await until(partial(_has_given_up, worker, before.connections_given_up + 5))
        assert worker.statistics().connections_refused == before.connections_refused
        assert worker.statistics().connections_given_up == before.connections_given_up + 5


def _has_given_up(worker: rpc.Worker, count: int) -> bool:
    return worker.statistics().connections_given_up >= count


async def test_a_stranger_does_not_write_in_our_log(caplog: pytest.LogCaptureFixture) -> None:
    """What he says there is one line, short, and has nothing but letters."""
    forged = b"done\n2031-01-01 root logged in \x1b[2J" + b"x" * 12_000
    async with group(1, transports=("tcp",)) as (worker, _):
        record = worker._node.engine.record
        for data in told_to_log(record, forged):
            with warnings_of(caplog) as logged:
                refused = worker.statistics().connections_refused + 1
                await asyncio.to_thread(talk, targets(record)["tcp"], data)
                await until(partial(_has_refused, worker, refused))
            (line,) = logged
            assert line.isprintable() and len(line) < 400


DEEP = 1010  # less than what reads it takes, and more than what Python shows


@pytest.mark.parametrize("place", [*range(FIELDS), None])
async def test_a_stranger_whose_words_are_nested_deeply_does_no_harm(
    place: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever in HELLO that is: he is refused in one line, without a traceback, and the worker serves on."""
    async with group(2, transports=("tcp",)) as (worker, _):
        record = worker._node.engine.record
        with warnings_of(caplog) as logged:
            refused = worker.statistics().connections_refused + 1
            answer = await asyncio.to_thread(talk, targets(record)["tcp"], nested_hello(record, place, DEEP))
            await until(partial(_has_refused, worker, refused))
        (line,) = logged
        assert line.startswith(f"worker {worker.name} refused a connection: ") and len(line) < 400
        assert "RecursionError" not in line and all(entry.exc_info is None for entry in caplog.records)
        assert len(answer) < 500
        assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3


async def test_a_crowd_of_strangers_does_not_fill_our_log(caplog: pytest.LogCaptureFixture) -> None:
    """The first are logged, the last of these says that there are more, and all are counted."""
    async with group(1, transports=("tcp",)) as (worker, _):
        target = targets(worker._node.engine.record)["tcp"]
        crowd = 120
        with warnings_of(caplog) as logged:
            refused = worker.statistics().connections_refused + crowd
            for _stranger in range(crowd):
                await asyncio.to_thread(talk, target, call_first())
            await until(partial(_has_refused, worker, refused))
        assert len(logged) < crowd and [line for line in logged if "only counted" in line] == logged[-1:]


def _has_refused(worker: rpc.Worker, count: int) -> bool:
    return worker.statistics().connections_refused >= count
