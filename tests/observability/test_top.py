"""``python -m aiorpc top``: what it shows of a real group, by textual's pilot and in a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

import aiorpc as rpc
from aiorpc.observability import reader
from aiorpc.observability.top import Top
from aiorpc.testing import cluster

LIMIT = 30.0
ABS = ["worker0", "calls", "worker1", "builtins:abs"]


def rows(app: Top, name: str) -> list[list[str]]:
    """The rows of a table, as text."""
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


def trouble(app: Top) -> str:
    """The line of what is wrong; empty if it does not show."""
    line = app.query_one("#trouble", Static)
    return str(line.render()) if line.display else ""


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait until something is on the screen."""
    ends = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < ends, pilot.app.export_screenshot()
        await pilot.pause(0.05)


async def own_a_queue() -> None:
    """Handler: this worker has a queue with one item."""
    jobs: rpc.Queue[int] = rpc.Queue("jobs", maxsize=9)
    await jobs.put(1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the workers of this test are looked at: other processes of this user have their files elsewhere."""
    found = reader.processes
    monkeypatch.setattr(reader, "processes", lambda: [each for each in found() if each.pid == os.getpid()])


@pytest.mark.slow
async def test_it_shows_workers_calls_and_queues() -> None:
    """Members with their figures, calls with rates and latencies, queues; sorted and paused by keys."""
    app = Top("worker0", 0.2)
    async with cluster(2) as (a, _), app.run_test(size=(200, 50)) as pilot:
        await a.call("worker0", own_a_queue)
        while not (made := [row for row in rows(app, "calls") if row[:4] == ABS]):
            await a.call("worker1", abs, -1)
            await pilot.pause(0.01)
        workers = {row[0]: row for row in rows(app, "workers")}
        assert list(workers) == ["worker0", "worker1"] and workers["worker0"][1] == "running"
        assert workers["worker0"][-1].endswith(("MB", "GB"))
        assert float(made[0][4]) > 0 and made[0][5] == "" and made[0][6].endswith("s")
        assert rows(app, "queues") == [["jobs", "worker0", "1", "9", "0", "0", "1"]]
        assert trouble(app) == ""
        await pilot.press("s")
        await pilot.press("p")
        await pilot.pause(0.5)  # of a look under way
        shown = rows(app, "workers")
        await pilot.pause(1.0)
        assert rows(app, "workers") == shown and app.sub_title == "paused"


@pytest.mark.slow
async def test_a_group_that_goes_away_does_not_end_it() -> None:
    """It says that there is none, and shows the next one."""
    app = Top(None, 0.2)
    async with app.run_test() as pilot:
        await until(pilot, lambda: "no worker of this user runs" in trouble(app))
        for size in (2, 3):
            async with cluster(size):
                await until(pilot, lambda size=size: len(rows(app, "workers")) == size)  # type: ignore[misc]
            await until(pilot, lambda: rows(app, "workers") == [])
            assert "it will show here" in trouble(app)
        await pilot.press("q")
    assert app.return_code == 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, without a terminal."""
    command = [sys.executable, "-m", "aiorpc", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)


def test_without_a_terminal_it_says_so() -> None:
    """And names the command for a list; an interval that makes no sense is refused as well."""
    done = run()
    assert done.returncode == 1 and "needs a terminal" in done.stderr and "aiorpc ps" in done.stderr
    done = run("--interval", "0")
    assert done.returncode == 1 and "--interval takes 0.2 to 60 seconds" in done.stderr


def test_without_textual_it_says_what_to_install(tmp_path: Path) -> None:
    """In a terminal, too."""
    (tmp_path / "textual").mkdir()
    (tmp_path / "textual" / "__init__.py").write_text("raise ImportError('no textual here')")
    done, said = in_terminal(tmp_path, b"")
    assert done == 1 and "pip install 'aiorpc-torch[top]'" in said and "no textual here" in said


@pytest.mark.slow
def test_it_runs_in_a_terminal(tmp_path: Path) -> None:
    """Drawn on a real one, and ended by a key; torch is not imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    done, said = in_terminal(tmp_path, b"q")
    assert done == 0 and "aiorpc top" in said


def in_terminal(first: Path, keys: bytes) -> tuple[int, str]:
    """Exit status and output of the command on a terminal. first: a folder of modules. keys: pressed when it shows."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": f"{first}{os.pathsep}{Path.cwd()}", "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "aiorpc", "top"], stdin=slave, stdout=slave, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        said = b""
        while True:
            try:
                said += os.read(master, 65536)
            except OSError:  # it has ended
                break
            if keys and b"Quit" in said:
                os.write(master, keys)
                keys = b""
        os.close(master)
        process.wait(LIMIT)
    return process.returncode, said.decode(errors="replace")
