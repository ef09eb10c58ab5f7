"""A recording of a group: one file that says where the time of a step went."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import RpcBackendOptions, RpcUsageError, Worker
from aiorpc.observability import recorder, recording
from aiorpc.observability.recorder import record_group
from aiorpc.observability.recording import WorkerNotes
from aiorpc.testing import blocking_cluster, cluster, process_cluster
from tests.observability.trace_format import arrow, problems, process, slices, span
from tests.runtime.inside import acting_as
from tests.runtime.waiting import LIMIT, until, wait_until

NAP = 0.05  # seconds of the planted slow handler
ONE_THREAD = RpcBackendOptions(num_worker_threads=1, rpc_timeout=LIMIT)


def slow(value: int) -> int:
    """Handler: the planted one, with a range of the profiler."""
    with torch.profiler.record_function("a planted range"):
        time.sleep(NAP)
    return value


async def quick(value: Any) -> Any:
    """Handler on the loop."""
    return value


async def asks(other: str) -> int:
    """Handler that calls another worker."""
    return await rpc.call(other, slow, 1)


def counts(most: int) -> Iterator[int]:
    """Handler of a stream."""
    yield from range(most)


@rpc.functions.batched(max_size=3, max_wait=0.05)
def together(values: list[int]) -> list[int]:
    """Handler of several calls at a time."""
    return values


@rpc.functions.async_execution
def later(value: int) -> torch.futures.Future[int]:
    """Handler whose answer comes from another thread."""
    made: torch.futures.Future[int] = torch.futures.Future()
    threading.Timer(0.01, made.set_result, (value,)).start()
    return made


def fail() -> None:
    """Handler."""
    raise ValueError("wanted")


def recordings() -> int:
    """Handler: how many recordings there are of the worker that it runs on."""
    node = rpc.current()._node
    kept = [each for each in node.engine.kept if isinstance(each, WorkerNotes)]
    assert bool(node.engine.transfer_observers) <= bool(kept) and bool(node.engine.call_observers) <= bool(kept)
    return len(kept)


def forget_begin() -> None:
    """Handler: from now on this process has an aiorpc that knows of no recordings."""
    del recording.begin


async def records(path: str, others: list[str]) -> None:
    """Handler: record, and never come to the end."""
    async with rpc.record(path, seconds=600):
        for each in others:
            await rpc.call(each, quick, 1)
        await asyncio.Event().wait()


async def calls_for(other: str, seconds: float) -> int:
    """Handler: make calls for so long; how many there were."""
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        await rpc.call(other, quick, count)
        count += 1
    return count


def read(path: Path) -> dict[str, Any]:
    """The trace in a file, which is in order."""
    trace: dict[str, Any] = json.loads(path.read_bytes())
    assert problems(trace) == []
    return trace


def find_the_slow_handler(trace: dict[str, Any], caller: str, callee: str) -> None:
    """Two calls of it, of which one has waited for the other: in handlers, queues and arrows."""
    handlers = slices(trace, "handler", ":slow")
    assert len(handlers) == 2 and all(process(trace, each) == callee for each in handlers)
    assert all(each["dur"] >= NAP * 1e6 for each in handlers)
    first, second = handlers
    assert first["tid"] == second["tid"] and span(first)[1] <= span(second)[0]
    calls = slices(trace, "call", ":slow")
    assert len(calls) == 2 and all(process(trace, each) == caller for each in calls)
    (waited,) = (each for each in calls if each["args"]["call"] == second["args"]["call"])
    request, queued, handled, answered = arrow(trace, waited)
    assert (
        request["name"] == "request"
        and request["tid"] == waited["tid"]
        and handled == second
        and process(trace, queued) == callee
    )
    assert queued["name"] == "queued" and queued["args"]["call"] == second["args"]["call"]
    assert queued["dur"] >= NAP * 1e6 / 2 and abs(span(queued)[1] - span(second)[0]) <= 1
    assert answered["name"] == "answer" and answered["tid"] == waited["tid"]
    assert span(second)[1] <= span(answered)[0] and span(answered)[1] == span(waited)[1]
    assert waited["args"]["outcome"] == "value" and waited["args"]["to"] == callee


async def test_a_slow_handler_its_queue_and_its_arrow_are_found(tmp_path: Path) -> None:
    """Several workers in one process; a worker that makes no calls is there, too."""
    async with cluster(3, options=ONE_THREAD) as (worker, other, _):
        async with worker.record(tmp_path / "step.json") as recorded:
            both = [worker.call("worker1", slow, each) for each in range(2)]
            await asyncio.gather(*both, worker.call("worker1", quick, 1))
        trace = read(tmp_path / "step.json")
        find_the_slow_handler(trace, "worker0", "worker1")
        assert len(slices(trace, "handler", ":quick")) == 1
        assert recorded.path == tmp_path / "step.json" and recorded.workers.keys() == {"worker0", "worker1", "worker2"}
        assert [each.trouble for each in recorded.workers.values()] == [""] * 3
        for name, each in recorded.workers.items():
            told = trace["otherData"]["workers"][name]
            assert 0 < each.clock_error < LIMIT and told["clock_error_us"] == pytest.approx(
                each.clock_error * 1e6, 0.01
            )
            assert told["clock"] == "shared" and "trouble" not in told
        await until(lambda: is_free(worker) and is_free(other))
        assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def is_free(worker: Worker) -> bool:
    """Whether nothing of a recording is left at a worker."""
    engine = worker._node.engine
    left = [each for each in engine.kept if isinstance(each, WorkerNotes)]
    return not left and not engine.call_observers and not engine.transfer_observers


@pytest.mark.slow
def test_the_same_in_processes(tmp_path: Path) -> None:
    """From another loop than that of the worker that records."""
    with process_cluster(2, options=ONE_THREAD) as group:

        async def step() -> Any:
            async with group.worker.record(tmp_path / "step.json") as recorded:
                await asyncio.gather(*[group.worker.call("worker1", slow, each) for each in range(2)])
                with pytest.raises(ValueError, match="wanted"):
                    await group.worker.call("worker0", fail)
            return recorded

        recorded = asyncio.run(step())
        trace = read(tmp_path / "step.json")
        find_the_slow_handler(trace, "test", "worker1")
        (failed,) = slices(trace, "call", ":fail")
        assert failed["args"]["outcome"] == "error" and process(trace, arrow(trace, failed)[2]) == "worker0"
        assert {each.trouble for each in recorded.workers.values()} == {""}
        assert len({each["pid"] for each in trace["otherData"]["workers"].values()}) == 3
        wait_until(lambda: group.worker.call("worker1", recordings).wait() == 0)


async def test_a_call_that_a_handler_makes_is_tied_to_it(tmp_path: Path) -> None:
    """An arrow leads from the handler to the call."""
    async with cluster(3) as (worker, _, _):
        async with worker.record(tmp_path / "step.json"):
            await worker.call("worker1", asks, "worker2")
        trace = read(tmp_path / "step.json")
        (outer,) = slices(trace, "handler", ":asks")
        (inner,) = slices(trace, "call", ":slow")
        assert process(trace, outer) == process(trace, inner) == "worker1"
        assert arrow(trace, outer, "calls") == [outer, inner]
        assert process(trace, arrow(trace, inner)[2]) == "worker2"


@pytest.mark.slow
def test_ranges_of_the_profiler_are_inside_of_the_handlers(tmp_path: Path) -> None:
    """In processes of their own, and the operators with them."""
    with process_cluster(1) as group:

        async def step() -> Any:
            async with group.worker.record(tmp_path / "step.json", profile=True) as recorded:
                await group.worker.call("worker0", slow, 1)
                await group.worker.call("worker0", torch.mm, torch.ones(4, 4), torch.ones(4, 4))
            return recorded

        recorded = asyncio.run(step())
        assert [each.trouble for each in recorded.workers.values()] == ["", ""]
        trace = read(tmp_path / "step.json")
        (inside,) = slices(trace, "user_annotation", "a planted range")
        (handler,) = slices(trace, "handler", ":slow")
        assert inside["pid"] == handler["pid"] and inside["tid"] == handler["tid"]
        assert span(handler)[0] <= span(inside)[0] and span(inside)[1] <= span(handler)[1]
        assert slices(trace, "cpu_op", "aten::mm")
        assert 0 < trace["otherData"]["workers"]["worker0"]["profiler_error_us"] < LIMIT * 1e6


async def test_ranges_are_of_the_worker_whose_handler_has_them(tmp_path: Path) -> None:
    """One profiler sees all threads of a process with several workers."""
    async with cluster(3) as (worker, _, _):
        async with worker.record(tmp_path / "step.json", profile=True):
            await worker.call("worker1", slow, 1)
            await worker.call("worker2", slow, 1)
        trace = read(tmp_path / "step.json")
        ranges = slices(trace, "user_annotation", "a planted range")
        assert [process(trace, each) for each in ranges] == ["worker1", "worker2"]
        assert [each["tid"] for each in ranges] == [each["tid"] for each in slices(trace, "handler", ":slow")]


async def test_a_profiler_of_the_program_goes_on(tmp_path: Path) -> None:
    """One that runs keeps ours away, and one that begins later takes over; both have what they saw."""
    async with cluster(2) as (worker, _):
        with torch.profiler.profile() as own:
            async with worker.record(tmp_path / "step.json", profile=True) as recorded:
                torch.ones(3)
        assert "the program runs it itself" in recorded.workers["worker0"].trouble
        assert "aten::ones" in [each.name for each in own.events() or ()]
        async with worker.record(tmp_path / "step.json", profile=True) as recorded:
            with torch.profiler.profile() as own:
                await worker.call("worker1", quick, torch.ones(3))
        assert "which has taken over" in recorded.workers["worker0"].trouble
        assert "aten::ones" in [each.name for each in own.events() or ()]
        assert slices(read(tmp_path / "step.json"), "handler", ":quick")


async def test_copies_are_on_the_axis(tmp_path: Path) -> None:
    """Of a large tensor into shared memory: bytes, channel and how long, within its call."""
    tensor = torch.ones(1 << 20)
    async with cluster(2) as (worker, _):
        async with worker.record(tmp_path / "step.json"):
            await worker.call("worker1", quick, tensor)
        copies = slices(read(tmp_path / "step.json"), "transfer")
        there, back = copies
        for each, to in ((there, "worker1"), (back, "worker0")):
            assert each["name"] == "copy by shared memory" and each["args"]["to"] == to
            assert each["args"]["bytes"] == 4 << 20


@pytest.mark.slow
def test_transfers_are_on_the_axis(tmp_path: Path) -> None:
    """Of a large tensor by the bulk channel, until its last byte has come."""
    options = RpcBackendOptions(shared_memory=0, rpc_timeout=LIMIT)
    with process_cluster(1, options=options) as group:

        async def step() -> None:
            async with group.worker.record(tmp_path / "step.json"):
                await group.worker.call("worker0", quick, torch.ones(4 << 20))

        asyncio.run(step())
        trace = read(tmp_path / "step.json")
        names = [(process(trace, each), each["name"]) for each in slices(trace, "transfer")]
        assert ("test", "hand over by bulk") in names and ("worker0", "transfer by bulk") in names
        assert {each["args"]["bytes"] for each in slices(trace, "transfer")} == {16 << 20}


async def test_calls_of_all_kinds_are_on_the_axis(tmp_path: Path) -> None:
    """Streams, references, batches, deferred handlers, groups, queues and published values, several at a time."""
    async with cluster(3) as (worker, other, _):
        async with worker.record(tmp_path / "step.json") as recorded:
            assert [each async for each in worker.stream("worker1", counts, 3)] == [0, 1, 2]
            made = worker.remote("worker1", slow, 5)
            assert await made == 5
            assert await asyncio.gather(*[worker.call("worker1", together, each) for each in range(3)]) == [0, 1, 2]
            assert await worker.call("worker1", later, 4) == 4
            assert (await worker.group(["worker1", "worker2"]).call(quick, 7)).values() == [7, 7]
            queue: Any = other.Queue("samples")
            await worker.queue("samples", owner="worker1").put(torch.ones(3))
            await queue.get()
            await worker.publish("weights", torch.ones(3))
            waiting = worker.call("worker1", asyncio.sleep, LIMIT)
            await until(lambda: other._node.engine.counters.served > 8)
        waiting.cancel()
        assert {each.trouble for each in recorded.workers.values()} == {""}
        trace = read(tmp_path / "step.json")
        kinds = {each["args"]["kind"] for each in slices(trace, "call")}
        assert kinds == {"call", "stream", "remote", "fetch"}
        for name in (":counts", ":slow", ":together", ":later", ":quick", ":sleep"):
            assert slices(trace, "handler", name), name
        parts = {each["args"]["part_of"][0] for each in slices(trace, "call") if "part_of" in each["args"]}
        assert parts == {"group", "queue"}
        assert {each["args"]["part_of"][0] for each in slices(trace, "handler", ":together")} == {"batch"}
        (going,) = slices(trace, "handler", ":sleep")
        assert going["args"]["unfinished"]
        assert {process(trace, each) for each in slices(trace, "handler", ":quick")} == {"worker1", "worker2"}


def test_a_recording_may_be_made_again_and_again(tmp_path: Path) -> None:
    """Also from threads that have a loop of their own; each replaces the file of the one before."""
    with blocking_cluster(2) as (worker, other):

        async def step(value: int) -> None:
            async with worker.record(tmp_path / "step.json"):
                await worker.call("worker1", quick, value)

        for value in range(5):
            asyncio.run(step(value))
            assert len(slices(read(tmp_path / "step.json"), "handler", ":quick")) == 1
        wait_until(lambda: is_free(worker) and is_free(other))


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing/step.json", "folder"])
async def test_a_file_that_cannot_be_written_is_refused_at_the_beginning(tmp_path: Path, name: str) -> None:
    """No worker has begun by then."""
    (tmp_path / "folder").mkdir()
    async with cluster(2) as (worker, other):
        with pytest.raises(RpcUsageError, match=f"cannot be written to .*{name}"):
            async with worker.record(tmp_path / name):
                pytest.fail("it was entered")
        assert is_free(worker) and is_free(other)
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


async def test_a_file_that_cannot_be_written_any_more_is_told_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an error, or in the log if the block has one of its own."""
    async with cluster(2) as (worker, other):
        (tmp_path / "gone").mkdir()
        with pytest.raises(RpcUsageError, match=r"cannot be written to .*step\.json"):
            async with worker.record(tmp_path / "gone" / "step.json"):
                shutil.rmtree(tmp_path / "gone")
        (tmp_path / "gone").mkdir()
        with pytest.raises(ZeroDivisionError):
            async with worker.record(tmp_path / "gone" / "step.json"):
                shutil.rmtree(tmp_path / "gone")
                await worker.call("worker1", divmod, 1, 0)
        assert "cannot be written to" in caplog.text
        await until(lambda: is_free(worker) and is_free(other))


@pytest.mark.parametrize("seconds", [0, -1.0, 3601, float("nan"), "long"])
async def test_a_time_out_of_range_is_refused(tmp_path: Path, seconds: Any) -> None:
    """Before anything is done."""
    async with cluster(1) as (worker,):
        with pytest.raises(RpcUsageError, match=r"seconds|lasts"):
            worker.record(tmp_path / "step.json", seconds=seconds)


@pytest.mark.slow
def test_a_worker_that_dies_is_told_and_the_rest_is_there(tmp_path: Path) -> None:
    """Its calls are those that the others have seen."""
    with process_cluster(2) as group:

        async def step() -> Any:
            async with group.worker.record(tmp_path / "step.json") as recorded:
                assert await group.worker.call("worker0", slow, 1) == 1
                assert await group.worker.call("worker1", slow, 1) == 1
                await asyncio.to_thread(group.kill, "worker1")
                with pytest.raises(rpc.PeerLost):
                    await group.worker.call("worker1", slow, 2)
            return recorded

        recorded = asyncio.run(step())
        assert "PeerLost" in recorded.workers["worker1"].trouble and recorded.workers["worker0"].trouble == ""
        trace = read(tmp_path / "step.json")
        assert "PeerLost" in trace["otherData"]["workers"]["worker1"]["trouble"]
        assert [process(trace, each) for each in slices(trace, "handler", ":slow")] == ["worker0"]
        outcomes = sorted((each["args"]["to"], each["args"]["outcome"]) for each in slices(trace, "call", ":slow"))
        assert outcomes == [("worker0", "value"), ("worker1", "lost"), ("worker1", "value")]


@pytest.mark.parametrize("profile", [False, True])
async def test_a_block_that_is_cancelled_leaves_nothing(tmp_path: Path, profile: bool) -> None:
    """No file, and no notes and no profiler at any worker."""
    async with cluster(2) as (worker, other):
        inside = asyncio.Event()

        async def block() -> None:
            async with worker.record(tmp_path / "step.json", profile=profile):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await inside.wait()
        assert not is_free(other)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: is_free(worker) and is_free(other))
        await until(lambda: not [each for each in threading.enumerate() if "profiler" in each.name])
        assert list(tmp_path.iterdir()) == [] and not torch.autograd.profiler._is_profiler_enabled


async def test_an_error_in_the_block_passes_and_the_file_is_there(tmp_path: Path) -> None:
    """It is what one wants to look at then."""
    async with cluster(2) as (worker, _):
        with pytest.raises(ZeroDivisionError):
            async with worker.record(tmp_path / "step.json"):
                await worker.call("worker1", divmod, 1, 0)
        (call,) = slices(read(tmp_path / "step.json"), "call", ":divmod")
        assert call["args"]["outcome"] == "error"


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_that_is_stopped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for no longer than it may take to answer."""
    monkeypatch.setattr(recorder, "_PATIENCE", 1.0)
    monkeypatch.setattr(recorder, "_CLOCK_PATIENCE", 1.0)
    with process_cluster(2) as group:
        stopped = group.processes["worker1"].pid
        assert stopped is not None

        async def step() -> Any:
            async with group.worker.record(tmp_path / "step.json") as recorded:
                await group.worker.call("worker1", quick, 1)
                os.kill(stopped, signal.SIGSTOP)
                await group.worker.call("worker0", quick, 1)
            return recorded

        try:
            recorded = asyncio.run(step())
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert "RpcTimeout" in recorded.workers["worker1"].trouble and recorded.workers["worker0"].trouble == ""
        trace = read(tmp_path / "step.json")
        assert [process(trace, each) for each in slices(trace, "handler", ":quick")] == ["worker0"]
        assert len(slices(trace, "call", ":quick")) == 2
        wait_until(lambda: group.worker.call("worker1", recordings).wait() == 0)


@pytest.mark.long
@pytest.mark.slow
def test_recorders_that_are_killed_and_stopped_do_no_harm_under_load(tmp_path: Path) -> None:
    """At random moments, again and again: no call between others fails, and nothing of the recordings is left."""
    chance = random.Random(5)
    with process_cluster(2) as group:
        load = group.worker.call("worker0", calls_for, "worker1", 12.0)
        for number in range(3):
            name = f"recorder{number}"
            group.start(name)
            asked = group.worker.call(name, records, str(tmp_path / f"{number}.json"), ["worker0", "worker1"])
            time.sleep(chance.uniform(0.0, 1.0))
            stopped = group.processes[name].pid
            assert stopped is not None
            if chance.random() < 0.5:
                os.kill(stopped, signal.SIGSTOP)
                time.sleep(chance.uniform(0.0, 1.0))
            group.kill(name)
            with pytest.raises(rpc.PeerLost):
                asked.wait()
        assert load.wait() > 100
        for each in ("worker0", "worker1"):
            wait_until(lambda each=each: group.worker.call(each, recordings).wait() == 0)  # type: ignore[misc]


@pytest.mark.long
@pytest.mark.slow
def test_a_recorder_that_dies_leaves_no_notes(tmp_path: Path) -> None:
    """The others drop theirs as soon as they know of its death."""
    with process_cluster(2) as group:
        group.worker.call("worker0", records, str(tmp_path / "step.json"), ["worker1"])
        wait_until(lambda: group.worker.call("worker1", recordings).wait() == 1)
        group.kill("worker0")
        wait_until(lambda: group.worker.call("worker1", recordings).wait() == 0)


async def test_it_ends_after_its_seconds(tmp_path: Path) -> None:
    """The file is written although the block goes on; what comes later is not in it."""
    async with cluster(2) as (worker, other):
        async with worker.record(tmp_path / "step.json", seconds=0.2):
            await worker.call("worker1", quick, 1)
            await until((tmp_path / "step.json").exists)
            await until(lambda: is_free(worker) and is_free(other))
            await worker.call("worker1", slow, 1)
        trace = read(tmp_path / "step.json")
        assert slices(trace, "handler", ":quick") and not slices(trace, "handler", ":slow")


async def test_an_abandoned_recording_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker neither fetches it nor goes: it notes no more after its seconds, and is dropped somewhat later."""
    monkeypatch.setattr(recording, "KEEP", 0.3)
    monkeypatch.setattr(recording, "_LOOK", 0.01)
    async with cluster(2) as (worker, other):
        peer = worker._node.peers.find("worker1")
        await peer.call(recording.begin, (1, 0.2, 100, False), None, LIMIT, system=True)
        (notes,) = (each for each in other._node.engine.kept if isinstance(each, WorkerNotes))
        await until(lambda: not other._node.engine.call_observers)
        assert notes in other._node.engine.kept
        await until(lambda: is_free(other))
        with pytest.raises(RpcUsageError, match="no such recording"):
            await peer.call(recording.end, (1,), None, LIMIT, system=True)


async def test_what_there_is_no_room_for_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told."""
    monkeypatch.setattr(recording, "MOST_NOTES", 100)
    async with cluster(2) as (worker, _):
        async with worker.record(tmp_path / "step.json") as recorded:
            for each in range(50):
                await worker.call("worker1", quick, each)
        there = recorded.workers["worker0"]
        assert there.events == 100 and there.dropped >= 100 and "no room for" in there.trouble
        read(tmp_path / "step.json")


async def test_a_worker_is_in_few_recordings_at_a_time(tmp_path: Path) -> None:
    """One more is told that it is missing there; those before it go on."""
    async with cluster(1) as (worker,):
        paths = [tmp_path / f"{number}.json" for number in range(recording.MOST_RECORDINGS + 1)]
        running = [worker.record(path) for path in paths]
        for each in running:
            await each.__aenter__()
        await worker.call("worker0", quick, 1)
        for each in running:
            await each.__aexit__(None, None, None)
        assert "Overloaded" in running[-1].workers["worker0"].trouble
        for path in paths[:-1]:
            assert slices(read(path), "handler", ":quick")


async def test_who_may_not_call_it_gets_nothing_of_that_worker(tmp_path: Path) -> None:
    """A group with rights: a role that may, and one that may not, which is told."""
    rule = [f"{__name__}:*"]
    options = RpcBackendOptions(allow={"watcher": [*rule, "aiorpc.observability.recording:*"], "*": rule})
    async with cluster(3, options=options, roles=["watcher", "", ""]) as (watcher, other, _):
        async with watcher.record(tmp_path / "all.json") as recorded, other.record(tmp_path / "own.json") as own:
            await watcher.call("worker2", quick, 1)
        assert {each.trouble for each in recorded.workers.values()} == {""}
        assert slices(read(tmp_path / "all.json"), "handler", ":quick")
        assert "NotAllowed" in own.workers["worker2"].trouble and own.workers["worker1"].trouble == ""
        assert not slices(read(tmp_path / "own.json"), "handler", ":quick")


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_of_an_aiorpc_without_recordings_is_told(tmp_path: Path) -> None:
    """The others are recorded."""
    with process_cluster(2) as group:
        group.worker.call("worker1", forget_begin).wait()

        async def step() -> Any:
            async with group.worker.record(tmp_path / "step.json") as recorded:
                await group.worker.call("worker0", quick, 1)
                await group.worker.call("worker1", quick, 1)
            return recorded

        recorded = asyncio.run(step())
        assert "has no such function" in recorded.workers["worker1"].trouble
        trace = read(tmp_path / "step.json")
        assert [process(trace, each) for each in slices(trace, "handler", ":quick")] == ["worker0"]


async def test_a_worker_that_joins_later_is_named(tmp_path: Path) -> None:
    """It is not in the file, which says so."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (worker,):
        async with worker.record(tmp_path / "step.json") as recorded, rpc.init("late", store=store):
            await worker.wait_for("late")
            await worker.call("late", quick, 1)
        assert recorded.workers.keys() == {"worker0"}  # it has left by then
        async with worker.record(tmp_path / "step.json") as recorded, rpc.init("later", store=store):
            await worker.wait_for("later")
            await recorded.__aexit__(None, None, None)
            assert "joined after" in recorded.workers["later"].trouble


async def test_a_node_gives_the_trace_as_bytes() -> None:
    """For those who ask from outside."""
    async with cluster(2) as (worker, _):
        task = asyncio.create_task(record_group(worker._node, 0.5))
        await until(lambda: worker._node.engine.call_observers)
        while not task.done():
            await worker.call("worker1", quick, 1)
        trace = json.loads(await task)
        assert problems(trace) == [] and slices(trace, "handler", ":quick")
        assert trace["otherData"]["recorded_by"] == "worker0"


async def test_the_verb_is_of_the_current_worker(tmp_path: Path) -> None:
    """And of its `Worker`."""
    async with cluster(1) as (worker,):
        with acting_as(worker):
            async with rpc.record(tmp_path / "step.json"):
                await rpc.call("worker0", quick, 1)
        assert slices(read(tmp_path / "step.json"), "handler", ":quick")
