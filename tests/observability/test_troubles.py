"""Planted troubles between real processes: each is named from outside, with its function and its line."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from aiorpc.observability import reader
from aiorpc.testing import cluster
from tests.cuts import cut
from tests.limits import busy
from tests.processes.workers import Children, group, until
from tests.runtime.test_resumption import TCP, away

from . import troubles
from .commands import Ran, aiorpc, check_page, lines_of, path_with_py_spy, path_without_py_spy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_own_server")]
SOURCE = troubles.__file__
KINDS = ("def", "async")


@pytest.fixture
def _own_server(_own_temporary_directory: None) -> None:
    from tests.processes.workers import own_fork_server

    own_fork_server()


@asynccontextmanager
async def members(count: int, *, killed: str = "", **options: Any) -> AsyncIterator[Children]:
    """A group of this process, w0, and others. killed: the one that is killed at the end of the block."""
    async with group(count, ended=(killed,) if killed else (), **options) as (_, children):
        yield children
        if killed and children[killed].process.is_alive():
            children[killed].kill()


async def diagnosed(*arguments: str, path: str | None = None) -> tuple[Ran, list[dict[str, Any]]]:
    """What `diagnose` finds."""
    ran = await aiorpc("diagnose", *arguments, "--json", path=path)
    return ran, json.loads(ran.out)["findings"]


async def found_alone(*arguments: str, path: str | None = None) -> tuple[Ran, dict[str, Any]]:
    """What `diagnose` finds, which is one thing."""
    ran, found = await diagnosed(*arguments, path=path)
    assert len(found) == 1, ran
    return ran, found[0]


def held_calls(kind: str) -> list[rpc.Future[None]]:
    hold = troubles.hold if kind == "def" else troubles.hold_on_loop
    names = ("w1", "w2", "w3")
    return [rpc.call(name, hold, names[number - 2]) for number, name in enumerate(names)]


async def are_at_their_locks(take: str) -> None:
    def all_wait() -> bool:
        calls = [call for report in reader.group_of().reports for call in report.calls]
        return sum(call.at_lock and call.function.endswith(take) for call in calls) == 3

    await until(lambda: asyncio.to_thread(all_wait))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadlock_of_three_workers(kind: str) -> None:
    """Named within two seconds: who waits for whom, in which functions, and at which lines."""
    hold, take = ("hold", "take") if kind == "def" else ("hold_on_loop", "take_on_loop")
    calling, locking = lines_of(SOURCE, [f"(after, {take})", "lock:"])
    async with members(4):
        calls = held_calls(kind)
        await are_at_their_locks(take)
        drawn = await aiorpc("wait-graph")
        ran, found = await found_alone()
        text = await aiorpc("diagnose")
        stacks = await aiorpc("stacks", "w1")
        for each in calls:
            each.cancel()
    assert ran.seconds < 2.0 * busy() and drawn.seconds < 2.0 * busy()
    assert (ran.code, drawn.code, text.code, stacks.code) == (1, 1, 1, 0)
    assert "3 workers wait in a circle: w1 -> w2 -> w3 -> w1" in drawn.out
    assert (found["kind"], found["workers"]) == ("deadlock", ["w1", "w2", "w3"])
    assert found["function"].endswith(f":{take}")
    assert found["line"] == f"{SOURCE}:{locking} in {take}"
    for output in (drawn.out, found["text"]):
        assert output.count(f"made at {SOURCE}:{calling} in {hold}") >= 3
        assert output.count(f"it waits for a lock at {SOURCE}:{locking} in {take}") >= 3
    assert f"serves {troubles.__name__}:{take} for w3" in stacks.out
    assert f"waits for {troubles.__name__}:{take} on worker 'w2'" in stacks.out
    if kind == "def":
        check_page("deadlock", "wait-graph", drawn.out)
        check_page("deadlock", "diagnose", text.out)
        check_page("deadlock", "stacks w1", stacks.out)


async def test_a_handler_that_blocks_its_loop() -> None:
    """Named with the line at which it stands."""
    (line,) = lines_of(SOURCE, ["time.sleep(seconds)  #"])
    async with members(2, killed="w1"):
        call = rpc.call("w1", troubles.block_the_loop, 40)
        await until(lambda: asyncio.to_thread(is_silent, 1.0))
        ran, found = await found_alone()
        text = await aiorpc("diagnose")
        stacks = await aiorpc("stacks", "w1")
        call.cancel()
    assert (ran.code, found["kind"], found["worker"]) == (1, "blocked loop", "w1")
    assert found["function"] == f"{troubles.__name__}:block_the_loop"
    assert found["line"] == f"{SOURCE}:{line} in block_the_loop"
    assert f"{SOURCE}:{line} in block_the_loop" in stacks.out
    check_page("blocked loop", "diagnose", text.out)


def is_silent(seconds: float) -> bool:
    return any(report.loop.silent > seconds for report in reader.group_of().reports)


@pytest.mark.parametrize("tool", ["py-spy", "faulthandler"])
async def test_a_handler_that_holds_the_interpreter_lock(tool: str, tmp_path: Path) -> None:
    """The process cannot answer; its stacks come from outside, and the line is named."""
    path = path_with_py_spy() if tool == "py-spy" else path_without_py_spy(tmp_path)
    (line,) = lines_of(SOURCE, ["ctypes.PyDLL(None)"])
    async with members(2, killed="w1"):
        call = rpc.call("w1", troubles.hold_the_interpreter, 40)
        await until(lambda: asyncio.to_thread(lambda: [each.how for each in reader.group_of().unseen] == ["silent"]))
        ran, found = await found_alone(path=path)
        text = await aiorpc("diagnose", path=path)
        stacks = await aiorpc("stacks", "w1", path=path)
        listed = await aiorpc("ps")
        call.cancel()
    assert (ran.code, found["kind"], found["worker"]) == (1, "interpreter lock", "w1")
    assert found["line"] == f"{SOURCE}:{line} in hold_the_interpreter"
    assert stacks.code == 0 and f"by {tool}" in stacks.out
    assert f"{SOURCE}:{line} in hold_the_interpreter" in stacks.out
    assert "holds the interpreter lock" in listed.out
    check_page("interpreter lock", "diagnose", text.out)


async def test_a_process_that_was_stopped(tmp_path: Path) -> None:
    """Named as stopped; its stacks come from py-spy alone, and are not available without it."""
    async with members(2) as children:
        await until(lambda: len(reader.processes()) == 2)
        await children["w1"].stop()
        try:
            ran, found = await found_alone()
            text = await aiorpc("diagnose")
            stacks = await aiorpc("stacks", "w1", path=path_without_py_spy(tmp_path))
            spied = await aiorpc("stacks", "w1", path=path_with_py_spy())
            listed = await aiorpc("ps")
        finally:
            children["w1"].kill(signal.SIGCONT)
    assert (ran.code, found["kind"], found["worker"]) == (1, "stopped process", "w1")
    assert (stacks.code, spied.code) == (1, 0)
    assert "is stopped, by SIGSTOP" in stacks.out and "the stacks of worker 'w1' are not available" in stacks.out
    assert "by py-spy" in spied.out and "in serve" in spied.out
    check_page("stopped process", "diagnose", text.out)
    check_page("stopped process", "ps", listed.out)


async def test_a_process_that_was_killed() -> None:
    """Named as lost, with what was seen of its end."""
    async with members(3, killed="w1") as children:
        assert await rpc.call("w1", troubles.size_of, torch.zeros(3)) == 3
        children["w1"].kill()
        await until(lambda: asyncio.to_thread(lambda: "WorkerLost" in seen_events()))
        ran, found = await found_alone()
        text = await aiorpc("diagnose")
        children["w1"].join()
        drawn = await aiorpc("wait-graph", "w0")
    assert (ran.code, found["kind"], found["worker"]) == (1, "lost worker", "w1")
    assert drawn.code == 0
    check_page("lost worker", "diagnose", text.out)


def seen_events() -> list[str]:
    return [event.what for report in reader.group_of("w0").reports for event in report.events]


async def test_a_reader_that_stopped_reading() -> None:
    """Bytes wait for it, and none has gone: the loop that should read them is named as well."""
    async with members(2, killed="w1", shared_memory=0, min_bulk_bytes=1 << 30):
        blocked = rpc.call("w1", troubles.block_the_loop, 40)
        await until(lambda: asyncio.to_thread(is_silent, 1.0))
        calls = [rpc.call("w1", troubles.size_of, torch.zeros(1 << 20)) for _ in range(8)]
        await asyncio.sleep(0.2)
        ran, found = await diagnosed()
        text = await aiorpc("diagnose")
        blocked.cancel()
        for each in calls:
            each.cancel()
    assert ran.code == 1 and {each["kind"] for each in found} == {"blocked loop", "stalled reader"}
    stalled = next(each for each in found if each["kind"] == "stalled reader")
    assert stalled["worker"] == "w1" and "of worker 'w0' wait for it" in stalled["text"]
    check_page("stalled reader", "diagnose", text.out)


async def test_a_queue_that_nobody_gets_from() -> None:
    """Items lie there for as long as was said, and more come."""
    async with members(2):
        samples: rpc.Queue[int] = rpc.Queue("samples", maxsize=8)
        calm = await aiorpc("diagnose", "--waiting", "1")
        puts = [asyncio.ensure_future(samples.put(number)) for number in range(9)]
        await asyncio.sleep(1.1)
        ran, found = await found_alone("--waiting", "1")
        text = await aiorpc("diagnose", "--waiting", "1")
        _, early = await diagnosed()
        assert await samples.get_many(9) == list(range(8))
        await asyncio.gather(*puts)
        after = await aiorpc("diagnose", "--waiting", "1")
    assert (calm.code, early, after.code) == (0, [], 0)
    assert (ran.code, found["kind"], found["worker"]) == (1, "growing queue", "w0")
    check_page("growing queue", "diagnose --waiting 1", text.out)


async def test_a_subscriber_that_lags_behind() -> None:
    """Versions are there that do not come to it."""
    async with members(2, killed="w1"):
        weights = torch.zeros(1000)
        await rpc.publish("weights", weights)
        assert await rpc.call("w1", troubles.read_weights) == 1
        call = rpc.call("w1", troubles.block_the_loop, 40)
        for _ in range(3):
            await rpc.publish("weights", weights)
        await asyncio.sleep(1.1)
        ran, found = await diagnosed("--waiting", "1")
        text = await aiorpc("diagnose", "--waiting", "1")
        call.cancel()
    assert ran.code == 1 and {each["kind"] for each in found} == {"blocked loop", "stale weights"}
    check_page("stale weights", "diagnose --waiting 1", text.out)


async def test_threads_that_are_all_taken() -> None:
    """Calls wait for a thread, and the calls that have them do not end."""
    (line,) = lines_of(SOURCE, ["time.sleep(seconds)\n"[:-1]])
    async with members(2, killed="w1", num_worker_threads=2):
        calls = [rpc.call("w1", troubles.wait, 40) for _ in range(6)]
        await asyncio.sleep(1.2)
        ran, found = await found_alone()
        text = await aiorpc("diagnose")
        for each in calls:
            each.cancel()
    assert line
    assert (ran.code, found["kind"], found["worker"]) == (1, "overload", "w1")
    assert found["function"] == f"{troubles.__name__}:wait" and "troubles.py" in found["line"]
    check_page("overload", "diagnose", text.out)


async def test_a_connection_that_is_broken() -> None:
    """Named until it is made again."""
    async with cluster(2, options=rpc.RpcBackendOptions(**TCP, reconnect_grace=60.0)) as workers:
        assert await workers[0].call("worker1", abs, -3) == 3
        calm = await aiorpc("diagnose")
        with away():
            cut()
            await until(lambda: all(each.statistics().connections_suspended for each in workers))
            ran, found = await found_alone()
        assert await workers[0].call("worker1", abs, -3) == 3
        after = await aiorpc("diagnose")
    assert (calm.code, after.code) == (0, 0)
    assert (ran.code, found["kind"], found["worker"]) == (1, "lost line", "worker1")
    assert found["workers"] == ["worker0", "worker1"]


async def test_a_busy_group_has_no_troubles() -> None:
    """Nested calls under locks, streams, queues, weights and large tensors: nothing is found, at any look."""
    async with members(4, num_worker_threads=4):
        busy_calls = asyncio.create_task(keep_busy())
        try:
            for _ in range(4):
                ran = await aiorpc("diagnose", "--waiting", "5")
                assert (ran.code, ran.out.startswith("nothing found (workers: 4")) == (0, True), ran
                drawn = await aiorpc("wait-graph")
                assert drawn.code == 0 and f"{troubles.__name__}:" in drawn.out
                assert not busy_calls.done()
        finally:
            busy_calls.cancel()
            await asyncio.gather(busy_calls, return_exceptions=True)


async def keep_busy() -> None:
    """Work of all kinds, until it is cancelled."""
    samples: rpc.Queue[int] = rpc.Queue("samples", maxsize=4)

    async def produce() -> None:
        for number in itertools.count():
            await samples.put(number)
            await asyncio.sleep(0.01)

    async def consume() -> None:
        while True:
            await samples.get()
            samples.task_done()
            await asyncio.sleep(0.02)

    async def call(name: str, after: str) -> None:
        while True:
            await rpc.call(name, troubles.relay, after)
            await rpc.call(name, troubles.size_of, torch.zeros(1 << 18))

    async def take(name: str) -> None:
        async for _ in rpc.stream(name, troubles.count, 1000):
            await asyncio.sleep(0.05)

    async def publish() -> None:
        while True:
            await rpc.publish("weights", torch.zeros(1 << 16))
            await asyncio.sleep(0.03)

    names = ("w1", "w2", "w3")
    readers = [rpc.call(name, troubles.read_weights) for name in names]
    try:
        async with asyncio.TaskGroup() as work:
            for each in (produce(), consume(), publish()):
                work.create_task(each)
            for number, name in enumerate(names):
                work.create_task(take(name))
                for other in names[number:] + names[:number]:
                    work.create_task(call(name, other))
    finally:
        await asyncio.gather(*readers)
        for name in names:
            await rpc.call(name, troubles.end_reading)
