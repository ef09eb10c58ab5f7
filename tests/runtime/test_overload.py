"""Bounded queues: ``Overloaded`` instead of memory without end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from aiorpc import Overloaded, RpcBackendOptions, RpcTimeout, Worker
from aiorpc.protocol.frames import CALL, Kind, encode_frame
from aiorpc.protocol.messages import ByName
from aiorpc.protocol.packing import pack
from aiorpc.runtime.callee import resolver, service
from aiorpc.runtime.callee.backlog import Backlog
from aiorpc.runtime.group.group import present
from aiorpc.testing import cluster
from aiorpc.transport import port
from tests.runtime.bad_member import call_of, calling, say, serving
from tests.runtime.observers import standing_still
from tests.runtime.waiting import LIMIT, until


class Gate:
    def __init__(self) -> None:
        self.open = threading.Event()
        self.ran: list[int] = []


_gates: dict[str, Gate] = {}


@pytest.fixture
def gate() -> Iterator[Gate]:
    _gates["it"] = Gate()
    yield _gates["it"]
    _gates["it"].open.set()


def wait(number: int) -> int:
    assert _gates["it"].open.wait(30)
    _gates["it"].ran.append(number)
    return number


async def wait_async(number: int) -> int:
    await until(_gates["it"].open.is_set)
    return number


async def test_the_caller_is_refused_past_its_limit(gate: Gate) -> None:
    """max_pending_calls calls may be owed by one peer; the next raises at once, and nothing is sent."""
    async with cluster(3, options=RpcBackendOptions(max_pending_calls=5)) as workers:
        calls = [workers[0].call("worker1", wait_async, number) for number in range(5)]
        with pytest.raises(Overloaded, match=r"5 calls to worker 'worker1'.*max_pending_calls"):
            workers[0].call("worker1", wait_async, 5)
        assert await workers[0].call("worker2", len, "abc") == 3
        gate.open.set()
        assert await asyncio.gather(*calls) == list(range(5))
        assert await workers[0].call("worker1", wait_async, 6) == 6


async def test_remote_and_stream_are_refused_alike(gate: Gate) -> None:
    """All verbs count, and a reference that was refused leaves nothing behind."""
    async with cluster(2, options=RpcBackendOptions(max_pending_calls=1)) as workers:
        call = workers[0].call("worker1", wait_async, 1)
        for verb in (workers[0].remote, workers[0].stream):
            with pytest.raises(Overloaded):
                verb("worker1", wait, 1)  # type: ignore[arg-type]
        await until(lambda: not workers[0]._node.references.counts().users)
        gate.open.set()
        assert await call == 1


async def test_the_callee_refuses_one_callers_flood(gate: Gate) -> None:
    """max_queued_calls calls of one caller may wait or run; the others are answered Overloaded, and were not run."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_queued_calls=4, num_worker_threads=1), RpcBackendOptions()]
    async with cluster(3, options=options) as workers:
        calls = [workers[0].call("worker1", wait, number) for number in range(10)]
        await until(lambda: sum(call.done() for call in calls) == 6)
        other = workers[2].call("worker1", wait, 100)
        gate.open.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[:4] == list(range(4)) and await other == 100
        assert all(isinstance(error, Overloaded) for error in results[4:])
        assert "'worker1' has 4 calls of 'worker0'" in str(results[4])
        assert sorted(gate.ran) == [0, 1, 2, 3, 100]
        assert await workers[0].call("worker1", len, "abc") == 3


async def test_one_caller_makes_so_many_calls_a_second(gate: Gate) -> None:
    """max_call_rate: those past it are answered Overloaded, and not run; others, and the runtime itself, may go on."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_call_rate=0.01), RpcBackendOptions()]
    async with cluster(3, options=options) as workers:
        gate.open.set()
        assert await workers[0].call("worker1", wait, 1) == 1
        with pytest.raises(Overloaded, match=r"'worker1' takes 0.01 calls a second of 'worker0' \(max_call_rate\)"):
            await workers[0].call("worker1", wait, 2)
        assert await workers[2].call("worker1", wait, 3) == 3
        assert sorted(gate.ran) == [1, 3]


async def test_calls_of_the_runtime_that_wait_count_too(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Of each member for itself, and beside its users' calls, which they leave their room."""
    monkeypatch.setattr(service, "LEAST_CALLS", 3)
    async with cluster(3, options=RpcBackendOptions(max_queued_calls=2)) as workers:
        assert await workers[1].call("worker0", abs, -1) == 1
        await until(lambda: not any(each.calls for each in workers[0]._node.services))  # those of joining
        barriers = [workers[1].group("worker*").barrier(str(number)) for number in range(5)]
        for each in barriers[3:]:
            with pytest.raises(Overloaded, match=r"3 calls of the runtime of 'worker1' waiting \(max_queued_calls\)"):
                await each
        gate.open.set()
        assert await workers[1].call("worker0", wait, 1) == 1
        assert not any(each.done() for each in barriers[:3])
        coming = [worker.group("worker*").barrier(str(number)) for worker in workers[::2] for number in range(3)]
        await asyncio.gather(*barriers[:3], *coming)


async def test_calls_of_the_runtime_that_come_too_fast_are_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_call_rate holds for them, but none is refused: nothing is read from that member for so long."""
    monkeypatch.setattr(service, "LEAST_RATE", 500.0)
    held: list[float] = []
    hold_off = Backlog.hold_off

    def seen(backlog: Backlog, seconds: float) -> None:
        held.append(seconds)
        hold_off(backlog, seconds)

    monkeypatch.setattr(Backlog, "hold_off", seen)
    async with cluster(2, options=[RpcBackendOptions(max_call_rate=10.0), RpcBackendOptions()]) as workers:
        peer = workers[1]._node.peers.find("worker0")
        for _ in range(3):
            asked = [peer.call(present, (), None, LIMIT, system=True) for _ in range(400)]
            assert await asyncio.gather(*asked) == [None] * 400
        assert held and max(held) < 3.0
        assert await workers[1].call("worker0", abs, -1) == 1


@pytest.mark.parametrize("known", [False, True])
async def test_what_is_refused_is_told_at_the_callee(gate: Gate, caplog: pytest.LogCaptureFixture, known: bool) -> None:
    """By a DEBUG line for each, with the function, the caller and the option, as its program sees no error."""
    async with cluster(2, options=[RpcBackendOptions(), RpcBackendOptions(max_queued_calls=1)]) as workers:
        if known:
            assert await workers[0].call("worker1", abs, -1) == 1
        busy = workers[0].call("worker1", wait_async, 1)
        with caplog.at_level("DEBUG", "aiorpc"), pytest.raises(Overloaded):
            await workers[0].call("worker1", abs, -1)
        gate.open.set()
        assert await busy == 1
    (line,) = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert line.startswith("worker worker1 refused builtins:abs, called by worker worker0: ")
    assert "max_queued_calls" in line


async def test_shutdown_is_not_held_up_by_a_full_queue(gate: Gate, pair: list[Worker]) -> None:
    """The runtime's own calls do not count: a worker at its limit still leaves with the others."""
    async with cluster(2, options=RpcBackendOptions(max_pending_calls=1)) as workers:
        calls = [workers[1].call("worker0", wait_async, 1)]
        leaving = [asyncio.ensure_future(worker.shutdown()) for worker in workers]
        await asyncio.sleep(0)
        gate.open.set()
        assert await calls[0] == 1
        await asyncio.gather(*leaving)


async def test_users_calls_do_not_refuse_the_runtimes(gate: Gate) -> None:
    """A callee whose queue is full still hears who enters shutdown: the group does not end under those who work."""
    async with cluster(2, options=RpcBackendOptions(max_queued_calls=2)) as workers:
        calls = []
        for number in range(2):
            calls.append(workers[1].call("worker0", wait_async, number))
            await until(lambda: workers[0].statistics().calls_running == len(calls))
        leaving = asyncio.ensure_future(workers[1].shutdown())
        await until(lambda: leaving.done() or workers[1].id in workers[0]._node.group.departure.entered)
        assert not leaving.done()
        gate.open.set()
        assert await asyncio.gather(*calls) == [0, 1]
        await asyncio.gather(leaving, workers[0].shutdown())


async def test_a_refused_first_call_does_not_spoil_its_function(gate: Gate) -> None:
    """The callee had not looked at its name yet, so the next call brings it again."""
    async with cluster(2, options=RpcBackendOptions(max_queued_calls=1)) as workers:
        busy = workers[0].call("worker1", wait_async, 1)
        with pytest.raises(Overloaded):
            await workers[0].call("worker1", abs, -1)
        gate.open.set()
        assert await busy == 1
        assert await workers[0].call("worker1", abs, -3) == 3


async def test_calls_given_up_before_their_worker_joined_are_taken_back() -> None:
    """What timed out waiting for a name is neither kept nor sent, and nobody goes on looking for the name."""
    async with cluster(1, dynamic=True) as (worker,):
        peer, kept = worker._node.peers.find("nobody"), list[weakref.ref[Any]]()
        for _ in range(3):
            arrays = [numpy.zeros(10_000) for _ in range(5)]
            kept += [weakref.ref(array) for array in arrays]
            calls = [worker.peer("nobody", timeout=0.02).call(len, array) for array in arrays]
            del arrays
            assert all(each() is not None for each in kept[-5:])
            for call in calls:
                with pytest.raises(RpcTimeout):
                    await call
            del calls, call
        await until(lambda: gc.collect() < 0 or not any(each() is not None for each in kept))
        await until(lambda: peer.state.value == "idle")


async def test_calls_given_up_count_as_long_as_they_wait_to_be_sent() -> None:
    """A worker that does not read cannot fill our memory with calls that timed out; once it reads, calls go on."""
    limit = 3
    # What goes in chunks, or through shared memory, is dropped with its call, and fills nothing.
    caller = RpcBackendOptions(max_pending_calls=limit, min_bulk_bytes=1 << 40, shared_memory=0)
    async with cluster(2, options=[caller, RpcBackendOptions(dedicated_loop=True, lag_warning=0.0)]) as pair:
        assert await pair[0].call("worker1", abs, -1) == 1
        connection = pair[0]._node.peers.find("worker1").connection
        assert connection is not None
        large = torch.zeros(1 << 22)
        with standing_still(pair[1]):
            with pytest.raises(Overloaded, match="given up wait to be sent"):
                for _ in range(20):
                    with pytest.raises(RpcTimeout):
                        await pair[0].peer("worker1", timeout=0.005).call(torch.numel, large)
            assert connection.unsent <= 2 * limit + 2  # each with its CANCEL
        await until(lambda: not connection.unsent)
        assert await pair[0].call("worker1", abs, -2) == 2


async def test_a_burst_far_beyond_the_threads_is_served(pair: list[Worker]) -> None:
    """5,000 calls at once with 16 threads are all answered: queues hold them."""
    assert await asyncio.gather(*(pair[0].call("worker1", abs, -n) for n in range(5000))) == list(range(5000))


@pytest.mark.parametrize("called", [77_777, "aiorpc.runtime.group.group:present"])
async def test_a_caller_that_takes_no_answers_is_not_read_from(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its calls are answered: errors, and what the runtime's own calls give, would fill the memory."""
    monkeypatch.setattr(port, "SEND_BUFFER", 64 * 1024)
    limit = 100_000
    async with cluster(3, options=[RpcBackendOptions(max_unsent_bytes=limit), *[RpcBackendOptions()] * 2]) as workers:
        assert await workers[2].call("worker0", len, "abc") == 3
        connection, answers = calling(workers[2], "worker0"), serving(workers[0], "worker2").queue
        connection.pause()
        most = 0
        for number in range(100):
            for each in range(100):
                connection.send(encode_frame(CALL, (1 << 40) + 100 * number + each, pack(call_of(called))))
            await asyncio.sleep(0)
            most = max(most, answers.size)
        assert await workers[1].call("worker0", len, "abc") == 3
        assert limit < most < 40 * limit
        connection.resume()
        await until(lambda: not connection.queue and not answers)
        assert await workers[2].call("worker0", len, "abc") == 3


def fails() -> None:
    gate = _gates["it"]
    assert gate.open.wait(30)
    gate.ran.append(0)
    raise ValueError("late")


async def waits_for_other() -> None:
    await until(_gates["other"].open.is_set)


async def test_a_number_that_is_used_again_is_that_of_another_call(gate: Gate, pair: list[Worker]) -> None:
    """What has become of the call that was given up ends no other: it would run on, and be counted no longer."""
    assert await pair[1].call("worker0", len, "abc") == 3
    other = _gates["other"] = Gate()
    connection, number = calling(pair[1], "worker0"), 1 << 40
    (service,) = [each for each in pair[0]._node.services if each.record.name == "worker1"]
    answers = service.calls

    def runs(function: str) -> bool:
        call = answers.get(number)
        return call is not None and call.begun and call.function.endswith(function)

    say(connection, CALL, number, call_of(f"{__name__}:fails"))
    await until(lambda: runs("fails"))
    say(connection, Kind.CANCEL, number, [False])
    say(
        connection,
        CALL,
        number,
        call_of(ByName(5, f"{__name__}:waits_for_other")),
    )
    await until(lambda: runs("waits_for_other"))
    gate.open.set()
    await until(lambda: gate.ran and not pair[0].statistics().threads - pair[0].statistics().threads_idle)
    assert await pair[1].call("worker0", len, "abc") == 3
    assert runs("waits_for_other")
    other.open.set()
    await until(lambda: not answers)


async def test_functions_of_one_caller_have_a_limit(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that it names stays known; beyond the limit its calls of further ones are refused, and of those go on."""
    monkeypatch.setattr(resolver, "MOST_FUNCTIONS", 10)
    for function in (len, str, int, float, abs, min, max, sum, repr, hash):
        with contextlib.suppress(TypeError, Overloaded):
            await pair[1].call("worker0", function, 5)  # type: ignore[call-overload]
    with pytest.raises(Overloaded, match="'worker1' has named 10 functions"):
        await pair[1].call("worker0", bool, 1)
    assert await pair[1].call("worker0", len, "abc") == 3
