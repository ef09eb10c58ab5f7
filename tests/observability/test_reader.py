"""Looks at groups from outside: several in a process, members elsewhere, members that may not be asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc.observability import reader
from aiorpc.observability.reader import CannotLook, Process, SeenGroup
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.processes import bodies
from tests.processes.workers import Children, meeting_file, own_fork_server, places, processes, serve

from .commands import aiorpc

ASKED = "aiorpc.observability.asked"
SECRET = "a secret for groups whose members have other directories"


@pytest.fixture
def _own_server(_own_temporary_directory: None) -> None:
    own_fork_server()


async def seen(name: str | None = None) -> SeenGroup:
    return await asyncio.to_thread(reader.group_of, name)


@contextlib.asynccontextmanager
async def with_member_elsewhere(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> AsyncIterator[Children]:
    """A group of this process, w0, and of w1, whose private directory is another one, as that of another host or user.

    options: of w1.
    """
    monkeypatch.setenv("AIORPC_SECRET", SECRET)
    with processes() as children, meeting_file() as init_method:
        first, other = places(2, init_method)
        env = {"TMPDIR": str(folder), "AIORPC_SECRET": SECRET}
        children.start(other, serve, options, env=env)
        async with rpc.init("w0", rank=0, world_size=2, init_method=first.init_method):
            yield children
        await asyncio.to_thread(children.check_ended)


async def test_workers_of_one_process_are_seen_together() -> None:
    """A group is what its members know of each other, and not what lives in one process."""
    async with cluster(2), cluster(3) as workers:
        first, second = sorted(await asyncio.to_thread(reader.groups), key=lambda each: len(each.names))
        assert first.names == ["worker0", "worker1"] and second.names == ["worker0", "worker1", "worker2"]
        assert {report.pid for report in second.reports} == {os.getpid()}
        (process,) = reader.processes()
        assert len(process.names) == 5
        with pytest.raises(CannotLook, match="2 groups here have a worker 'worker1'"):
            await seen("worker1")
        with pytest.raises(CannotLook, match="2 groups here, so name a worker"):
            await seen()
        assert (await seen("worker2")).names == second.names
        with pytest.raises(CannotLook, match="no worker 'nobody' here; there are"):
            await seen("nobody")
        assert await workers[0].call("worker2", bodies.add, 1, 2) == 3


async def test_without_a_worker_it_says_where_it_has_looked() -> None:
    """And that TMPDIR counts."""
    with pytest.raises(CannotLook, match="TMPDIR must be the workers'"):
        await seen()
    assert reader.groups() == [] and reader.processes() == []


async def test_a_free_group_that_grows_and_shrinks() -> None:
    """Its members are those that are there."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        async with rpc.init("guest", store=store) as guest:
            await workers[0].wait_for("guest")
            assert await guest.call("worker1", bodies.add, 1, 2) == 3
            assert (await seen()).names == ["guest", "worker0", "worker1"]
        assert (await seen()).names == ["worker0", "worker1"]
        report = (await seen()).reports[0]
        assert report.dynamic and "WorkerLeft" in [event.what for event in report.events]


async def test_a_long_tmpdir_is_not_where_workers_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use /tmp then, and so does the reader."""
    for folder in (tmp_path / "short", tmp_path / ("long" * 30)):
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        own = sockets.private_directory()
        assert own in reader.directories()


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[Process]:
    """A process of this host, this one, whose endpoint gives that answer and goes away."""
    base = sockets.private_directory() / f"look-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(base.with_suffix(".sock")))
        listening.listen()
        base.with_suffix(".json").write_bytes(b'[{"name": "w"}]')

        def serve_one() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve_one)
        thread.start()
        try:
            yield reader.processes()[0]
        finally:
            thread.join()
            for end in (".sock", ".json"):
                base.with_suffix(end).unlink()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "it has closed the connection"),
        (struct.pack("!I", 100) + b"x", "it has closed the connection"),
        (struct.pack("!I", 1) + b"\xc1", "cannot be asked"),
        (struct.pack("!I", 0xFFFFFFFF), "an answer of 4294967295 bytes"),
    ],
)
def test_a_process_that_dies_while_it_is_asked_is_unseen(answer: bytes, said: str) -> None:
    """With the reason, and so is one that is no aiorpc, or of another version."""
    with answering(answer):
        (group,) = reader.groups()
    (unseen,) = group.unseen
    assert unseen.name == "w" and said in unseen.why and not unseen.how


def test_files_that_are_none_of_ours_are_passed_over() -> None:
    """Also if their names look so."""
    folder = sockets.private_directory()
    made = {"look-x.json": b"[]", f"look-{os.getpid()}.json": b"{", "look-1.json": b"\xff"}
    for name, content in made.items():
        (folder / name).write_bytes(content)
    try:
        assert reader.processes() == []
    finally:
        for name in made:
            (folder / name).unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("_own_server")
async def test_a_member_elsewhere_is_asked_through_one_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its report, its stacks, and its calls in the wait graph."""
    async with with_member_elsewhere(monkeypatch, tmp_path) as children:
        call = rpc.call("w1", bodies.ablock, 60.0)
        group = await seen()
        assert [process.names for process in reader.processes()] == [("w0",)]
        assert sorted((report.name, report.pid) for report in group.reports) == [
            ("w0", os.getpid()),
            ("w1", children["w1"].pid),
        ]
        stacks = await aiorpc("stacks", "w1")
        assert stacks.code == 0 and "serves tests.processes.bodies:ablock for w0" in stacks.out
        drawn = await aiorpc("wait-graph")
        assert "it stands at" in drawn.out and "in ablock" in drawn.out
        assert (await aiorpc("diagnose")).code == 0
        call.cancel()


@pytest.mark.slow
@pytest.mark.usefixtures("_own_server")
@pytest.mark.parametrize("allowed", [[], [f"{ASKED}:report"], [f"{ASKED}:*"]])
async def test_a_member_elsewhere_may_refuse(
    allowed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a group with rights a role needs the right to ask for reports, and that to ask for stacks."""
    async with with_member_elsewhere(monkeypatch, tmp_path, allow=["tests.processes.bodies:add", *allowed]):
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        group = await seen()
        listed, stacks, found = await aiorpc("ps"), await aiorpc("stacks", "w1"), await aiorpc("diagnose")
    if allowed:
        assert group.unseen == [] and len(group.reports) == 2
    else:
        (unseen,) = group.unseen
        assert unseen.name == "w1" and "NotAllowed" in unseen.why and not unseen.how
        assert "unseen" in listed.out and "NotAllowed" in listed.out
        assert "not seen: w1: " in found.out
    assert (listed.code, found.code) == (0, 0)
    if allowed == [f"{ASKED}:*"]:
        assert stacks.code == 0 and "thread MainThread" in stacks.out
    else:
        assert stacks.code == 1 and "NotAllowed" in stacks.out


@pytest.mark.slow
@pytest.mark.usefixtures("_own_server")
async def test_a_member_elsewhere_that_is_stopped_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That is found, in bounded time, although no process here can see how it stands."""
    async with with_member_elsewhere(monkeypatch, tmp_path) as children:
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        await children["w1"].stop()
        found = await aiorpc("diagnose")
        children["w1"].kill(18)
    assert found.code == 1 and "no answer: worker 'w1', process" in found.out


@pytest.mark.slow
@pytest.mark.usefixtures("_own_server")
async def test_a_member_whose_own_loop_stands_says_nothing_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It cannot ask, so a member elsewhere is not found to be silent."""
    async with with_member_elsewhere(monkeypatch, tmp_path):
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        looking = asyncio.create_task(aiorpc("diagnose", "--json"))
        await asyncio.sleep(0.05)  # it has started
        time.sleep(12.0)  # noqa: ASYNC251
        found = await looking
    assert [each["kind"] for each in json.loads(found.out)["findings"]] in ([], ["blocked loop"])
