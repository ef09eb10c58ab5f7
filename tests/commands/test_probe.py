"""``python -m aiorpc probe``: what it says of real workers, also of those that cannot say anything themselves."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc as rpc
from aiorpc.commands import probe
from aiorpc.observability import heartbeat
from aiorpc.observability.heartbeat import FORMAT, MAGIC, READY, Heart
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.limits import busy
from tests.observability import troubles
from tests.observability.commands import Ran, aiorpc
from tests.processes import bodies
from tests.processes.workers import group, own_fork_server, places, serve, until
from tests.runtime.waiting import LIMIT

HEAVY = """
import sys
from aiorpc.__main__ import main
status = main(sys.argv[1:])
heavy = {"torch", "msgspec", "asyncio", "typing", "dataclasses", "pathlib", "tempfile", "logging"} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


@pytest.fixture
def _own_server(_own_temporary_directory: None) -> None:
    own_fork_server()


processes = pytest.mark.usefixtures("_own_server")


async def said(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the answer."""
    ran = await aiorpc("probe", *arguments, "--json")
    assert ran.err == ""
    return ran.code, json.loads(ran.out)


async def state(*arguments: str) -> tuple[int, str]:
    """The exit status, and the state."""
    code, answer = await said(*arguments)
    assert answer["ok"] is (code == 0)
    return code, answer["state"]


async def until_state(expected: str, *arguments: str) -> None:
    """Wait until a worker is in a state."""
    end = time.monotonic() + LIMIT
    while (seen := (await state(*arguments))[1]) != expected:
        assert time.monotonic() < end, f"{arguments} is {seen}, not {expected}"
        await asyncio.sleep(0.05)


async def linger(seconds: float) -> None:
    """Handler that takes its time."""
    await asyncio.sleep(seconds)


async def test_a_worker_that_takes_calls_lives_and_is_ready() -> None:
    """With a sentence on stdout."""
    async with cluster(2):
        await until_state("ready", "worker1")
        lives, ready = await aiorpc("probe", "worker1"), await aiorpc("probe", "worker1", "--ready")
    assert (lives.code, ready.code, lives.err + ready.err) == (0, 0, "")
    assert lives.out == ready.out == f"worker 'worker1' (process {os.getpid()}) is ready for calls\n"
    code, answer = await said("worker1")
    assert (code, answer["state"], answer["pid"]) == (1, "unknown", None)


@processes
async def test_it_answers_within_100_milliseconds_of_its_start() -> None:
    """More than the interpreter itself needs, as it imports next to nothing."""

    async def fastest(*arguments: str) -> float:
        times = []
        for _ in range(7):
            begin = time.monotonic()
            process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
            assert (await asyncio.wait_for(process.communicate(), LIMIT), process.returncode)[1] == 0
            times.append(time.monotonic() - begin)
        return min(times)

    async with group(2):
        await until_state("ready", "w1")
        command = "probe", "w1", "--ready"
        assert await fastest("-m", "aiorpc", *command) - await fastest("-c", "pass") < 0.1 * busy()
        await fastest("-c", HEAVY, *command)


@processes
@pytest.mark.slow
async def test_a_handler_that_holds_the_interpreter_lock_is_told_with_its_time() -> None:
    """The worker lives meanwhile, unless that lasts for longer than is allowed; afterwards it is ready again."""
    async with group(2):
        await until_state("ready", "w1")
        begin = time.monotonic()
        call = rpc.call("w1", troubles.hold_the_interpreter, 5)
        await until_state("stuck", "w1")
        code, answer = await said("w1")
        elapsed = time.monotonic() - begin
        impatient = await aiorpc("probe", "w1", "--stuck-after", "1")
        ready = await state("w1", "--ready", "--stuck-after", "1")
        patient = await state("w1", "--ready", "--stuck-after", str(LIMIT))
        assert not call.done(), "the machine is too slow for this test"
        await call
        await until_state("ready", "w1", "--ready")
    assert code == 0 and heartbeat.LATE < answer["seconds"] < elapsed + heartbeat.LATE
    assert f"stuck: its loop has not run for {answer['seconds']:.1f} s" in answer["text"]
    assert impatient.code == 1 and impatient.out.endswith(" s (allowed: 1 s)\n")
    assert ready == (1, "stuck") and patient == (0, "stuck")


@processes
@pytest.mark.slow
async def test_a_stopped_process_is_told() -> None:
    """It lives until it has stood for too long, takes no calls, and goes on."""
    async with group(2) as (_, children):
        await until_state("ready", "w1")
        try:
            await children["w1"].stop()
            lives, ready = await aiorpc("probe", "w1"), await state("w1", "--ready")
            await asyncio.sleep(1.1)
            late = await aiorpc("probe", "w1", "--stuck-after", "1")
        finally:
            children["w1"].kill(signal.SIGCONT)
        await until_state("ready", "w1", "--ready")
    assert (lives.code, ready) == (0, (1, "stopped"))
    assert "is stopped by a signal or a debugger, and has not run for" in lives.out
    assert late.code == 1 and "(allowed: 1 s)" in late.out


@processes
async def test_a_killed_process_has_ended_until_another_takes_its_place() -> None:
    """It is told by its link, which the next worker removes."""
    async with group(2, ended=("w1",)) as (worker, children):
        await until_state("ready", "w1")
        first, pid = children["w1"], children["w1"].pid
        first.kill()
        first.join()
        ended = await aiorpc("probe", "w1")
        replacing = children.start(places(2, worker.init_method)[1], serve)
        await until_state("ready", "w1", "--ready")
        code, answer = await said("w1")
        new = replacing.pid
        left = [heart.pid for heart in heartbeat.hearts([str(sockets.private_directory())]) if heart.name == "w1"]
    assert ended.code == 1 and f"worker 'w1' (process {pid}) has ended without leaving its group" in ended.out
    assert code == 0 and answer["pid"] == new and left == [new]


@pytest.mark.parametrize("leave", [rpc.Worker.shutdown, rpc.Worker.drain])
async def test_a_leaving_worker_is_draining_while_it_finishes_its_calls(
    leave: Callable[[rpc.Worker], Coroutine[Any, Any, Any]],
) -> None:
    """It lives, and is not ready."""
    async with cluster(2, dynamic=True) as (caller, leaving):
        await until_state("ready", "worker1")
        call = caller.call("worker1", linger, 3.0)
        await until(leaving.pending_calls)
        left = asyncio.ensure_future(leave(leaving))
        await until_state("draining", "worker1")
        assert (await state("worker1"), await state("worker1", "--ready")) == ((0, "draining"), (1, "draining"))
        await asyncio.gather(call, left)
        assert await state("worker1") == (1, "unknown")


async def test_a_worker_that_waits_for_its_group_lives_and_is_not_ready(tmp_path: Path) -> None:
    """Also for longer than its loop could be stuck: it is as its options say."""
    init = rpc.init("early", rank=0, world_size=2, init_method=f"file://{tmp_path}/store")
    joining = asyncio.create_task(init.start())
    await until_state("joining", "early")
    await asyncio.sleep(1.1)
    assert await state("early", "--stuck-after", "1") == (0, "joining")
    ran = await aiorpc("probe", "early", "--ready")
    assert ran.code == 1 and ran.out.endswith("is joining its group\n")
    joining.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await joining
    assert await state("early") == (1, "unknown")


async def test_an_unknown_name_is_told_with_the_names_that_there_are() -> None:
    """And with what else may be wrong."""
    nothing = await aiorpc("probe", "worker0")
    async with cluster(2):
        unknown = await aiorpc("probe", "learner")
    assert (nothing.code, unknown.code) == (1, 1)
    assert "there is no worker at all" in nothing.out
    assert f"user {os.getuid()} has no worker 'learner' on this host; there are worker0, worker1 (" in unknown.out
    assert f"looked into {sockets.private_directory()}; user and TMPDIR must be the worker's" in unknown.out


@processes
async def test_a_name_in_several_groups(tmp_path: Path) -> None:
    """Of one process the worker counts that fares worse; several processes are told apart by their numbers."""
    async with group(2) as (_, children):
        async with rpc.init("w1", rank=0, world_size=1, init_method=f"file://{tmp_path}/store"):
            await until_state("ready", "w1", "--pid", str(os.getpid()))
            ran: Ran = await aiorpc("probe", "w1")
            assert await state("w1", "--pid", str(children["w1"].pid)) == (0, "ready")
        assert await state("w1") == (0, "ready")
    assert ran.code == 1 and "have a worker 'w1': add --pid" in ran.out
    async with cluster(1), cluster(1):
        await until_state("ready", "worker0", "--ready")


@contextlib.contextmanager
def beating(content: bytes, *, title: str = "aiorpc-beat:odd", uid: int | None = None) -> Iterator[Heart]:
    """A heartbeat of this process with that content."""
    file = os.memfd_create(title)
    os.write(file, content)
    if uid is not None:
        os.fchown(file, uid, -1)
    heart = Heart("odd", os.getpid(), file)
    link = sockets.private_directory() / heart.link
    link.symlink_to(heart.path)
    try:
        yield heart
    finally:
        link.unlink()
        os.close(file)


GOOD = FORMAT.pack(MAGIC, time.monotonic_ns(), READY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\0",
        GOOD[:7] + b"2" + GOOD[8:],
        FORMAT.pack(MAGIC, time.monotonic_ns(), 0),
        FORMAT.pack(MAGIC, time.monotonic_ns(), 99),
        FORMAT.pack(MAGIC, -1, READY),
        FORMAT.pack(MAGIC, (1 << 63) - 1, READY),
        bytes(1 << 20),
    ],
    ids=["empty", "short", "long", "version", "state", "unknown-state", "before-the-start", "in-the-future", "large"],
)
async def test_a_heartbeat_with_unknown_content_is_an_error(content: bytes) -> None:
    """Not a crash, and no life."""
    with beating(content):
        ran = await aiorpc("probe", "odd")
    assert (ran.code, ran.err) == (1, "")
    assert f"the heartbeat of worker 'odd' (process {os.getpid()}) has unknown content" in ran.out


async def test_another_file_under_that_number_is_no_heartbeat() -> None:
    """The process has another number of descriptors by now, or is another one."""
    with beating(GOOD, title="aiorpc-beat:other"):
        assert await state("odd") == (1, "ended")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which needs root")
async def test_a_heartbeat_of_another_user_is_an_error() -> None:
    """A process of root can open it, and does not believe it."""
    with beating(GOOD, uid=65534):
        ran = await aiorpc("probe", "odd")
    assert ran.code == 1 and "is of another user (uid 65534): run this as that user" in ran.out


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_the_number_of_a_killed_worker_may_be_that_of_another_users_process() -> None:
    """Its worker has ended, and the next one comes: looking at its link is forbidden, and no error."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which every user can reach
        stranger = subprocess.Popen(["sleep", "60"])
        heart = Heart("w1", stranger.pid, 0)
        (Path(folder) / heart.link).symlink_to(heart.path)
        os.chown(folder, 65534, -1)
        os.setresuid(65534, 65534, 0)
        try:
            with pytest.raises(PermissionError):
                os.readlink(heart.path)
            verdict = heartbeat.judge(heart, ready=False, stuck_after=30)
            sockets.remove_stale(Path(folder))
        finally:
            os.setresuid(0, 0, 0)
            stranger.kill()
            stranger.wait()
    assert verdict.state == "ended"


async def test_a_directory_that_others_may_enter_is_not_looked_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another user may have made it; links of other names are passed over."""
    with beating(GOOD) as heart, tempfile.TemporaryDirectory() as short:
        folder = Path(short) / f"aiorpc-{os.getuid()}"
        folder.mkdir(mode=0o700)
        for name in (heart.link, "x.beat", "odd.x.1.0.beat", "....", "odd.1.2.beat", heart.link.replace(".beat", "")):
            (folder / name).symlink_to(heart.path)
        monkeypatch.setenv("TMPDIR", short)
        assert [each.pid for each in heartbeat.hearts([str(folder)])] == [os.getpid()]
        assert (await state("odd"))[1] != "unknown"
        folder.chmod(0o755)
        assert await state("odd") == (1, "unknown")


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", None])
@pytest.mark.parametrize("there", [True, False])
def test_it_looks_where_python_puts_temporary_files(
    name: str | None, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, since the module for that is slow to import."""
    for each in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(each, raising=False)
    if name is not None:
        monkeypatch.setenv(name, str(tmp_path if there else tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert probe.temporary_folder() == tempfile.gettempdir()


def test_a_worker_that_found_no_room_for_temporary_files_is_looked_for_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes another folder than TMPDIR if nothing can be written there, as where the disk is full."""
    assert tempfile.gettempdir() != str(tmp_path)
    with beating(GOOD):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert probe.temporary_folder() == str(tmp_path)
        assert probe.probe("odd", None, ready=False, stuck_after=LIMIT).state in ("ready", "stuck")
        unknown = probe.probe("even", None, ready=False, stuck_after=LIMIT)
        assert unknown.state == "unknown" and str(sockets.private_directory()) in unknown.text


@pytest.mark.parametrize("seconds", ["0", "0.9", "inf", "nan", "soon"])
async def test_a_time_that_cannot_be_is_refused(seconds: str) -> None:
    """A loop that runs beats four times a second, and may be late."""
    assert (await aiorpc("probe", "w1", "--stuck-after", seconds)).code == 2


async def test_a_heartbeat_that_cannot_be_made_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker works, and its log says so."""

    def full(name: str) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", full)
        async with cluster(2) as (worker, _):
            assert await worker.call("worker1", bodies.add, 1, 2) == 3
    assert "worker worker0 cannot be probed from outside: [Errno 24] Too many open files" in caplog.text


def fork_and_exit() -> int:
    """Handler: fork a child that runs Python's exit functions; its exit status."""
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@processes
async def test_a_forked_child_leaves_the_heartbeat_alone() -> None:
    """It ends, and the worker is seen as before."""
    async with group(2):
        await until_state("ready", "w1", "--ready")
        assert await rpc.call("w1", fork_and_exit) == 0
        assert await state("w1", "--ready") == (0, "ready")
