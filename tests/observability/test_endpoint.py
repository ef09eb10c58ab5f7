"""Where a process answers those who look at it: bad questions, slow and stopped clients, forks and crashes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

import aiorpc as rpc
from aiorpc.observability import outside, reader
from aiorpc.observability.endpoint import SIGNAL
from aiorpc.observability.reader import Process
from aiorpc.observability.report import LONGEST_QUESTION, Look, LookAround, Refused, Reports, Stacks, Text
from aiorpc.testing import cluster
from aiorpc.transport import sockets
from tests.limits import busy
from tests.processes import bodies
from tests.processes.workers import group, own_fork_server, until

from . import troubles
from .commands import aiorpc

LIMIT = 30.0


@pytest.fixture
def _own_server(_own_temporary_directory: None) -> None:
    own_fork_server()


@asynccontextmanager
async def alone() -> AsyncIterator[tuple[rpc.Worker, Process]]:
    """A worker in this process, and how it is seen from outside."""
    async with cluster(1) as (worker,):
        (process,) = reader.processes()
        assert process.pid == os.getpid() and process.names == ("worker0",)
        yield worker, process


@contextmanager
def connected(process: Process) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        reader._connect(made, process, time.monotonic() + LIMIT)
        yield made


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


async def look(process: Process, patience: float = LIMIT) -> Reports:
    answer = await asyncio.to_thread(reader.ask, process, Look(), patience)
    assert isinstance(answer, Reports)
    return answer


def answering() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "aiorpc-endpoint-answers"]


BAD = {
    "nothing": b"",
    "half a length": b"\0\0",
    "too long": struct.pack("!I", LONGEST_QUESTION + 1),
    "longest": struct.pack("!I", 0xFFFFFFFF) + b"x",
    "incomplete": struct.pack("!I", 100) + b"x",
    "no MessagePack": framed(b"\xc1\xff"),
    "no question": framed(msgspec.msgpack.encode({"type": "run", "code": "exit()"})),
    "of a wrong type": framed(msgspec.msgpack.encode({"type": "stacks", "patience": "long"})),
    "of HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_question_ends_its_connection(name: str) -> None:
    """Without an answer; the next question gets one."""
    async with alone() as (_, process):
        with connected(process) as connection:
            connection.sendall(BAD[name])
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # there is more of it than was read
                assert await asyncio.to_thread(connection.recv, 1) == b""
        assert [report.name for report in (await look(process)).reports] == ["worker0"]


@pytest.mark.parametrize("seed", range(3))
async def test_random_bytes_harm_nothing(seed: int) -> None:
    """However many."""
    drawn = random.Random(seed)
    async with alone() as (_, process):
        for _ in range(200):
            data = drawn.randbytes(drawn.choice((1, 4, 30, 3000)))
            with connected(process) as connection:
                try:
                    connection.sendall(framed(data) if drawn.random() < 0.7 else data)
                except (BrokenPipeError, ConnectionResetError):
                    continue
        assert (await look(process)).reports
        await until(lambda: not answering())


async def test_clients_that_say_nothing_hold_up_no_other() -> None:
    """They are let go after two seconds, also if they send a byte now and then."""
    async with alone() as (_, process):
        with connected(process) as silent, connected(process) as slow:
            slow.sendall(struct.pack("!I", 1000))
            begin = time.monotonic()
            assert (await look(process)).reports
            assert time.monotonic() - begin < 1.0 * busy()

            def drip() -> float:
                try:
                    while True:
                        slow.sendall(b"x")
                        time.sleep(0.1)
                except OSError:
                    return time.monotonic() - begin

            assert await asyncio.to_thread(silent.recv, 1) == b""
            assert await asyncio.to_thread(drip) < 10.0 * busy()


async def test_a_client_that_does_not_take_its_answer_is_let_go() -> None:
    """Its thread ends."""
    async with alone() as (worker, process):
        calls = [worker.call("worker0", bodies.ablock, 60.0) for _ in range(1000)]  # for a long report
        await until(lambda: worker.statistics().calls_running == 1000)
        with connected(process) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(framed(msgspec.msgpack.encode(Look())))
            await until(answering)
            assert len((await look(process)).reports[0].calls) == 2000
            await until(lambda: not answering())
        for each in calls:
            each.cancel()


async def test_more_questions_than_are_answered_at_once_wait() -> None:
    """All of them get an answer."""
    async with alone() as (_, process):
        held = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(40)]
        try:
            for each in held:
                each.connect(str(process.base.with_suffix(".sock")))
            await until(lambda: len(answering()) == 32)
            answers = await asyncio.gather(*(look(process) for _ in range(8)))
            assert all(each.reports for each in answers)
        finally:
            for each in held:
                each.close()


async def test_many_that_ask_for_others_at_once_are_told() -> None:
    """A member that does not answer must not take all threads."""
    options = [rpc.RpcBackendOptions(), rpc.RpcBackendOptions(dedicated_loop=True, lag_warning=0.0)]
    async with cluster(2, options=options) as (worker, _):
        (process,) = reader.processes()
        blocking = worker.call("worker1", troubles.block_the_loop, 6.0)

        async def is_blocked() -> bool:
            return any(report.loop.silent for report in (await look(process)).reports)

        await until(is_blocked)
        question = LookAround("worker0", ["worker1"], 2.0)
        with ThreadPoolExecutor(12) as pool:
            loop = asyncio.get_running_loop()
            asked = [loop.run_in_executor(pool, reader.ask, process, question, LIMIT) for _ in range(12)]
            answers = await asyncio.gather(*asked)
        await blocking
    told = [each for each in answers if isinstance(each, Refused)]
    assert told and all("ask again later" in each.why for each in told)
    seen = [each for each in answers if isinstance(each, Reports)]
    assert seen and all(each.unseen[0].how == "unanswered" for each in seen)


async def test_a_process_without_that_worker_says_so() -> None:
    """Nothing is asked then."""
    async with alone() as (_, process):
        answer = await asyncio.to_thread(reader.ask, process, Stacks("other", "worker0"), LIMIT)
        assert isinstance(answer, Refused) and "no worker 'other'" in answer.why


async def test_a_process_with_too_many_open_files_answers_when_it_has_less() -> None:
    """The endpoint goes on."""
    async with alone() as (_, process):
        with connected(process), connected(process):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
                resource.setrlimit(resource.RLIMIT_NOFILE, (made.fileno() + 1, hard))
                try:
                    made.connect(str(process.base.with_suffix(".sock")))
                    await asyncio.sleep(0.3)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await look(process)).reports


async def test_its_files_are_there_as_long_as_a_worker_is() -> None:
    """Of several workers in a process, until the last one has left."""

    def files() -> list[str]:
        return sorted(path.suffix for path in sockets.private_directory().glob(f"look-{os.getpid()}*"))

    async with cluster(1):
        assert files() == [".json", ".sock", ".stacks"]
        async with cluster(2):
            (process,) = reader.processes()
            assert sorted(process.names) == ["worker0", "worker0", "worker1"]
        (process,) = reader.processes()
        assert process.names == ("worker0",)
        assert (await look(process)).reports
    assert files() == [] and reader.processes() == []


async def test_a_program_that_handles_the_signal_keeps_it() -> None:
    """And is not asked by it."""
    before = signal.signal(SIGNAL, lambda *_: None)
    try:
        async with alone() as (_, process):
            assert not process.base.with_suffix(".stacks").exists()
            assert await asyncio.to_thread(outside.dump, process) == ""
        assert signal.getsignal(SIGNAL) not in (signal.SIG_DFL, None)
    finally:
        signal.signal(SIGNAL, before)


async def test_stacks_by_the_signal_do_not_grow_without_end() -> None:
    """What was written for earlier looks is dropped."""
    async with alone() as (_, process):
        path = process.base.with_suffix(".stacks")
        first = await asyncio.to_thread(outside.dump, process)
        assert "in test_stacks_by_the_signal" in first or "File" in first
        with path.open("a") as file:
            file.write("x" * (2 << 20))
        again = await asyncio.to_thread(outside.dump, process)
        assert "File" in again and "x" * 100 not in again
        assert path.stat().st_size < 1 << 20


async def test_a_directory_that_cannot_be_written_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged."""

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    async with cluster(1) as (worker,):  # the directory is needed for more than that
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", fail)
            async with cluster(1) as (other,):
                assert await other.call("worker0", bodies.add, 1, 2) == 3
        assert await worker.call("worker0", bodies.add, 1, 2) == 3
    assert any("cannot be looked at from outside" in each.getMessage() for each in caplog.records)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("_own_server")
async def test_a_crash_leaves_files_that_the_next_worker_removes() -> None:
    """`ps` does not show them; a fork that lives on holds no endpoint open."""
    async with group(3, ended=("w1",)) as (_, children):
        await rpc.call("w1", troubles.fork, 30.0)
        left = sockets.private_directory() / f"look-{children['w1'].pid}"
        assert left.with_suffix(".sock").exists()
        children["w1"].kill()
        children["w1"].join()
        assert [process.names for process in reader.processes() if process.pid == children["w1"].pid] == []
        listed = await aiorpc("ps")
        assert "w2" in listed.out and str(children["w1"].pid) not in listed.out
        assert left.with_suffix(".sock").exists() and left.with_suffix(".json").exists()
    async with group(2):
        assert list(left.parent.glob(f"{left.name}.*")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("_own_server")
async def test_watchers_killed_and_stopped_at_random_harm_no_call() -> None:
    """No call fails, the group grows by nothing, and afterwards it is seen as before."""
    drawn = random.Random(4)

    async def watch(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = drawn.choice(("diagnose", "wait-graph", "ps"))
            command = [sys.executable, "-m", "aiorpc", name]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            await asyncio.sleep(drawn.uniform(0.05, 0.6))
            if drawn.random() < 0.5 and process.returncode is None:
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(drawn.uniform(0.1, 1.0))
            if process.returncode is None:
                process.kill()
            await process.wait()

    async with group(3) as (worker, _):
        watching = [asyncio.create_task(watch(6.0)) for _ in range(3)]
        calls = 0
        while not all(each.done() for each in watching):
            assert await asyncio.gather(*(rpc.call("w1", bodies.aadd, 1, n) for n in range(20))) == [*range(1, 21)]
            assert await rpc.call("w2", bodies.add, 1, 2) == 3
            calls += 21
            await asyncio.sleep(0)
        await asyncio.gather(*watching)
        assert calls > 100 and worker.statistics().calls_timed_out == 0
        await until(lambda: not answering())

        async def is_calm() -> bool:
            seen = await asyncio.to_thread(reader.group_of, "w0")
            threads = [report.statistics["threads"] for report in seen.reports]
            return len(threads) == 3 and max(threads) < 20

        await until(is_calm)
        answer = await asyncio.to_thread(reader.ask, reader.processes()[0], Stacks(), LIMIT)
        assert isinstance(answer, Text) and "aiorpc-endpoint-answers" not in answer.text
