"""``python -m aiorpc record``: a recording of a real group from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiorpc import Worker
from aiorpc.observability.recording import WorkerNotes
from aiorpc.testing import cluster
from tests.observability.commands import aiorpc
from tests.observability.trace_format import problems, slices
from tests.runtime.waiting import LIMIT, until


async def quick(value: int) -> int:
    """Handler."""
    return value


async def work(worker: Worker) -> None:
    """Make calls without an end."""
    while True:
        await worker.call("worker1", quick, 1)
        await asyncio.sleep(0.01)


def is_recorded(worker: Worker) -> bool:
    """Whether it notes what it does, or keeps notes."""
    return any(isinstance(each, WorkerNotes) for each in worker._node.engine.kept)


@pytest.mark.parametrize("name", [(), ("worker1",)])
async def test_it_records_the_group(name: tuple[str, ...], tmp_path: Path) -> None:
    """The file is in order, and has all workers with what they did, whichever worker is named."""
    path = tmp_path / "step.json"
    path.write_text("of an earlier time")
    async with cluster(2) as (first, second):
        working = asyncio.create_task(work(first))
        ran = await aiorpc("record", *name, "--seconds", "0.5", "--output", str(path))
        working.cancel()
        await until(lambda: not is_recorded(first) and not is_recorded(second))
    assert (ran.code, ran.err) == (0, "") and ran.seconds >= 0.5
    assert ran.out.startswith(f"{path}: {path.stat().st_size} bytes")
    trace = json.loads(path.read_bytes())
    assert problems(trace) == []
    assert sorted(trace["otherData"]["workers"]) == ["worker0", "worker1"]
    assert slices(trace, "call", ":quick") and slices(trace, "handler", ":quick")


@pytest.mark.parametrize("to", ["a folder", "no folder"])
async def test_an_output_that_cannot_be_written_is_told_at_once(to: str, tmp_path: Path) -> None:
    """Before anything is recorded."""
    path = tmp_path if to == "a folder" else tmp_path / "missing" / "step.json"
    async with cluster(1):
        ran = await aiorpc("record", "--seconds", "600", "-o", str(path))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"python -m aiorpc record: cannot write {path}: ")


async def test_without_such_a_group_nothing_is_recorded(tmp_path: Path) -> None:
    """Neither where no worker runs, nor where none has that name."""
    output = "--output", str(tmp_path / "step.json")
    nothing = await aiorpc("record", *output)
    async with cluster(1):
        unknown = await aiorpc("record", "nobody", *output)
    assert (nothing.code, unknown.code) == (1, 1)
    assert "no worker of this user runs on this host" in nothing.err
    assert "there is no worker 'nobody' here; there are worker0" in unknown.err


@pytest.mark.parametrize("seconds", ["0", "601", "nan"])
async def test_a_time_that_cannot_be_is_refused(seconds: str) -> None:
    """With the bounds."""
    ran = await aiorpc("record", "--seconds", seconds)
    assert ran.code == 2 and "more than 0, and 600 at most" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
async def test_the_recording_ends_with_the_command(number: signal.Signals, status: int, tmp_path: Path) -> None:
    """The workers note no more, and can be recorded again."""
    path = tmp_path / "step.json"
    async with cluster(2) as workers:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiorpc", "record", "--seconds", "600", "--output", str(path)),
            stderr=subprocess.PIPE,
        )
        await until(lambda: all(map(is_recorded, workers)))
        os.kill(process.pid, number)
        _, err = await asyncio.wait_for(process.communicate(), LIMIT)
        assert process.returncode == status
        assert err.decode() == ("" if number is signal.SIGKILL else "python -m aiorpc record: interrupted\n")
        await until(lambda: not any(map(is_recorded, workers)))
        assert path.read_bytes() == b""
        again = await aiorpc("record", "--seconds", "0.1", "--output", str(path))
    assert again.code == 0 and problems(json.loads(path.read_bytes())) == []
