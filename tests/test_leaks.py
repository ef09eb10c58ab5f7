"""The leak checks fire on each kind of leak, and only then."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import leaks

SHORT = 0.05  # seconds of grace where the leak is there to stay
ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def private_file(name: str) -> Iterator[Path]:
    """A file in a private socket directory, removed at the end."""
    folder = Path(tempfile.gettempdir(), f"aiorpc-{os.getuid()}-test")
    folder.mkdir()
    path = folder / name
    path.touch()
    try:
        yield path
    finally:
        path.unlink()
        folder.rmdir()


def idle_child() -> subprocess.Popen[bytes]:
    """A process that ends when its standard input closes."""
    return subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def stop(child: subprocess.Popen[bytes]) -> None:
    with child:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(timeout=30)


def test_open_file_is_named_with_its_target(tmp_path: Path) -> None:
    """An open descriptor is reported with the path behind it."""
    before = leaks.take_snapshot()
    with (tmp_path / "left-open").open("w") as left:
        assert leaks.wait_until_clean(before, grace=SHORT) == [f"descriptor {left.fileno()} -> {tmp_path}/left-open"]


@pytest.mark.parametrize("daemon", [False, True])
def test_running_thread_is_named(daemon: bool) -> None:
    """A live thread is reported by name, also a daemon."""
    before = leaks.take_snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(30,), name="forgotten", daemon=daemon)
    thread.start()
    try:
        assert leaks.wait_until_clean(before, grace=SHORT) == [f"thread 'forgotten' (daemon={daemon})"]
    finally:
        end.set()
        thread.join()


def test_running_child_is_named_with_its_command() -> None:
    """A child process is reported with its id and command line."""
    before = leaks.take_snapshot()
    child = idle_child()
    try:
        found = leaks.wait_until_clean(before, grace=SHORT, allowed=["descriptors"])
        assert len(found) == 1
        assert found[0].startswith(f"child {child.pid}: ")
    finally:
        stop(child)


def test_child_nobody_waited_for_is_seen() -> None:
    """A process that ended but was not reaped still counts."""
    before = leaks.take_snapshot()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        (line,) = leaks.leaks_since(before)["children"]
        assert line.startswith(f"child {pid}: ")
        assert "not waited for" in line
    finally:
        os.waitpid(pid, 0)


def test_file_in_private_directory_is_named() -> None:
    """What stays in a private socket directory is reported by path."""
    before = leaks.take_snapshot()
    with private_file("left.sock") as path:
        assert leaks.wait_until_clean(before, grace=SHORT) == [f"file {path}"]
    assert leaks.wait_until_clean(before, grace=SHORT) == []


def test_leak_held_by_a_cycle_only_is_none(tmp_path: Path) -> None:
    """Unreachable cycles are collected before judgement."""

    class Holder:
        def __init__(self) -> None:
            self.fd = os.open(tmp_path, os.O_RDONLY)
            self.me = self

        def __del__(self) -> None:
            os.close(self.fd)

    before = leaks.take_snapshot()
    Holder()
    assert leaks.wait_until_clean(before, grace=30) == []


async def test_pending_task_is_named() -> None:
    """A task that goes on is reported by name."""
    before = asyncio.all_tasks()
    task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
    (line,) = await leaks.tasks_left(before, grace=SHORT)
    assert line.startswith("task 'forgotten': ")
    task.cancel()
    assert await leaks.tasks_left(before) == []


def test_loops_leave_nothing_behind(loop_factory: object) -> None:
    """Running and closing a loop of each kind is clean, its default executor included."""
    assert callable(loop_factory)
    before = leaks.take_snapshot()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.to_thread(time.monotonic))
        assert leaks.leaks_since(before)
    assert leaks.wait_until_clean(before) == []


LEAKY = """
import asyncio, os, threading, time
import pytest
kept = []
pytestmark = pytest.mark.filterwarnings("ignore")

def test_descriptor_and_thread():
    kept.append(os.open("/", os.O_RDONLY))
    threading.Thread(target=time.sleep, args=(20,), daemon=True, name="forgotten").start()

@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_task():
    kept.append(asyncio.create_task(asyncio.sleep(20), name="forgotten"))

@pytest.mark.allow_leaks("descriptors", reason="proves the marker")
def test_allowed():
    kept.append(os.open("/", os.O_RDONLY))

@pytest.mark.time_limit(0.2)
async def test_hangs():
    await asyncio.sleep(20)

async def test_clean():
    await asyncio.to_thread(time.monotonic)
"""


@pytest.mark.long
@pytest.mark.slow
def test_checks_are_wired_into_every_test(tmp_path: Path) -> None:
    """In a real run leaking tests end in an error that says what was left, a hanging one fails, clean ones pass."""
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-c", f"{ROOT}/pyproject.toml", "--rootdir", str(tmp_path)]
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-rEf", str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)
    # test_hangs and test_clean run on both loops; a leak is an error beside the test that passed.
    assert "5 passed, 2 failed, 2 errors" in _counts(done.stdout), done.stdout + done.stderr
    assert "thread 'forgotten' (daemon=True)" in done.stdout
    assert done.stdout.count("task 'forgotten'") >= 1
    assert "-> /\n" in done.stdout
    assert "ran for more than " in done.stdout


def _counts(output: str) -> str:
    """The closing line's numbers in a fixed order."""
    words = output.strip().splitlines()[-1].replace("=", "").replace(",", "").split()
    by_word = dict(zip(words[1::2], words[::2], strict=False))
    return ", ".join(f"{by_word.get(word, '0')} {word}" for word in ("passed", "failed", "errors"))
