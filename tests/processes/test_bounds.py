"""Whoever takes what he can get, stranger or member, gets what the bounds allow; all others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import aiorpc as rpc
from aiorpc.testing import cluster

from . import bodies
from .workers import Link, Place, group, until

MB = 1 << 20


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """As training programs like it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- strangers --------------------------------------------------------------------------------------------------------


def visit(path: str, count: int, *, at_once: int = 100) -> None:
    """So many connections that say nothing, in groups, and hang up."""
    for start in range(0, count, at_once):
        with contextlib.ExitStack() as stack:
            for _ in range(min(at_once, count - start)):
                enter(stack.enter_context(socket.socket(socket.AF_UNIX)), path)


def enter(sock: socket.socket, path: str) -> None:
    """Connect, once there is room in the queue of the listener."""
    sock.settimeout(10)
    for _ in range(10_000):
        with contextlib.suppress(BlockingIOError):
            return sock.connect(path)
        time.sleep(0.001)
    raise TimeoutError(path)


@pytest.mark.parametrize("count", [500, pytest.param(12_000, marks=pytest.mark.long)])
async def test_silent_strangers_leave_nothing(count: int) -> None:
    """They cost little while they are there, and nothing once they are gone, although no collector runs."""
    async with group(2) as (worker, _):
        path = worker._node.engine.record.unix_path
        await asyncio.to_thread(visit, path, 300)  # what the allocator keeps
        await rpc.call("w1", bodies.call_back, "w0", 3)
        connections = worker._node.engine.connections
        before = len(connections)
        with no_collector():
            started = bodies.resident()
            await asyncio.to_thread(visit, path, count)
            assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3
            await until(lambda: len(connections) <= before)
            assert bodies.resident() - started < 20 * MB


def serve_with_few_descriptors(place: Place, link: Link, spare: int) -> list[str]:
    """Body: serve, with so many descriptors beside those that the worker has."""
    place.init_rpc()
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1 + spare, most + 1 + spare))
    link.tell(rpc.current()._node.engine.record.unix_path)
    return [info.name for info in rpc.shutdown().lost]


def open_files(count: int) -> int:
    """Handler: so many descriptors at once."""
    with contextlib.ExitStack() as stack:
        return len([stack.enter_context(open("/dev/null")) for _ in range(count)])


async def test_strangers_leave_descriptors_to_handlers() -> None:
    """Where a process may have few: handlers open files while strangers connect as fast as they can, and stay."""
    async with group(2, serve_with_few_descriptors, 20) as (_, children):
        path = await children["w1"].ahear()
        assert await rpc.call("w1", open_files, 4) == 4
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                await asyncio.to_thread(enter, stack.enter_context(socket.socket(socket.AF_UNIX)), path)
                assert await rpc.call("w1", open_files, 4) == 4


# --- members that do not read -----------------------------------------------------------------------------------------

_open = threading.Event()
_waiting: list[asyncio.Future[None]] = []


def open_gate() -> None:
    """Let those go on that wait in this process, and those that come."""
    _open.set()
    for future in _waiting:
        if not future.done():
            future.set_result(None)
    _waiting.clear()


async def pass_gate() -> None:
    """Wait until the gate is open. On the loop of the test."""
    if not _open.is_set():
        _waiting.append(asyncio.get_running_loop().create_future())
        await _waiting[-1]


def give(size: int) -> torch.Tensor:
    """Handler: so many bytes, once the test says so."""
    assert _open.wait(60)
    return torch.ones(size, dtype=torch.uint8)


async def agive(size: int) -> torch.Tensor:
    """The same on the loop."""
    await pass_gate()
    return torch.ones(size, dtype=torch.uint8)


def pour(size: int) -> Iterator[bytes]:
    """A stream without an end, of items that take memory (zeros take none until they are read)."""
    while True:
        yield b"x" * size


async def apour(size: int) -> AsyncIterator[bytes]:
    """The same on the loop."""
    while True:
        yield b"x" * size
        await asyncio.sleep(0)


def call_and_stop(place: Place, link: Link, function: Any, count: int, size: int, warm: int = 0) -> None:
    """Body: make so many calls; once told, wait for all of them, and tell what became of each. warm: calls before."""
    place.init_rpc(shared_memory=0)
    for _ in range(warm):
        assert len(rpc.rpc_sync("w0", torch.ones, args=(size,))) == size
    calls = [rpc.rpc_async("w0", function, args=(size,), timeout=60.0) for _ in range(count)]
    link.tell("called")
    link.hear()
    found = []
    for call in calls:
        try:
            found.append(str(len(call.wait())))
        except rpc.Overloaded as error:
            found.append(str(error))
    found.append(str(rpc.rpc_sync("w0", bodies.add, args=(1, 2))))
    link.tell(found)
    rpc.shutdown()


async def most_resident(worker: rpc.Worker, done: Callable[[], bool], before: int) -> int:
    """By how many bytes this process grows until that holds."""
    most = 0

    def grown() -> bool:
        nonlocal most
        most = max(most, bodies.resident() - before)
        return done()

    await until(grown, 60)
    return most


BUDGET = 64 * MB
NOISE = 24 * MB  # of an allocator, and of many calls


@pytest.mark.parametrize("transports", [("unix",), pytest.param(("tcp",), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("function", [give, pytest.param(agive, marks=pytest.mark.long)])
async def test_a_caller_that_is_stopped_costs_no_more_than_its_budget(function: Any, transports: tuple[str]) -> None:
    """300 answers of 1 MB for a caller that is stopped; the budget holds, others are served, and it goes on later."""
    _open.clear()
    options: dict[str, Any] = {"shared_memory": 0, "max_unsent_bytes": BUDGET, "transports": transports}
    count = 300
    async with group(2, call_and_stop, function, count, MB, **options) as (worker, children):
        child = children["w1"]
        await child.ahear()
        await until(lambda: worker.statistics().calls_running == count)
        await child.stop()
        try:
            gc.collect()
            before = bodies.resident()
            open_gate()
            unsent: list[int] = []

            def settled() -> bool:
                """Nothing changes any more."""
                unsent.append(worker.statistics().calls_running)
                return len(unsent) > 200 and len(set(unsent[-200:])) == 1

            most = await most_resident(worker, settled, before)
            assert most < 1.1 * BUDGET + NOISE
            assert await rpc.call("w0", bodies.aadd, 1, 2) == 3
        finally:
            child.kill(signal.SIGCONT)
        child.tell("go on")
        found = await child.ahear(60)
        assert found[-1] == "3"
        answered = [each for each in found[:-1] if each == str(MB)]
        refused = [each for each in found[:-1] if each != str(MB)]
        assert len(answered) >= BUDGET // (4 * MB)
        assert all("max_unsent_bytes" in each and "'w1' reads them" in each for each in refused)
        if function is give:  # those that had not begun have waited
            assert len(refused) <= 16


async def test_a_caller_that_has_acknowledged_nothing_is_read_again() -> None:
    """Both bounds are reached: of what may wait for him, so he is not read, and of what is kept until he has it."""
    _open.clear()
    options: dict[str, Any] = {"shared_memory": 0, "max_unsent_bytes": BUDGET, "transports": ("tcp",)}
    options["max_unacknowledged_bytes"] = 4 * MB
    async with group(2, call_and_stop, give, 100, MB, 5, **options) as (worker, children):
        child = children["w1"]
        await child.ahear()
        await until(lambda: worker.statistics().calls_running == 100)
        await child.stop()
        try:
            open_gate()
            await until(lambda: any(each._port.paused for each in worker._node.engine.connections))
        finally:
            child.kill(signal.SIGCONT)
        child.tell("go on")
        assert await child.ahear(30) == [str(MB)] * 100 + ["3"]


def ask_too_much(place: Place, link: Link, function: Any, size: int, window: int) -> str:
    """Body: a stream with so much credit, of which nothing is read once this is stopped."""
    place.init_rpc(shared_memory=0, stream_window=window)
    link.hear()
    stream = rpc.current().stream("w0", function, size)
    link.tell("opened")
    link.hear()
    error = ""
    try:
        asyncio.run(first_of(stream))
    except rpc.Overloaded as refused:
        error = str(refused)
    rpc.shutdown(graceful=False)
    return error


async def first_of(stream: rpc.types.Stream[Any]) -> None:
    async with stream:
        async for _ in stream:
            return


@pytest.mark.parametrize("function", [pour, apour])
async def test_a_stream_is_bounded_by_bytes_and_not_by_its_credit(function: Any) -> None:
    """A consumer that asks for 60,000 items of 1 MB, and is stopped."""
    options: dict[str, Any] = {"shared_memory": 0, "max_unsent_bytes": BUDGET}
    async with group(2, ask_too_much, function, MB, 60_000, ended=("w1",), **options) as (worker, children):
        gc.collect()
        before = bodies.resident()
        child = children["w1"]
        child.tell("open")
        await child.ahear()
        await until(lambda: worker.statistics().calls_running == 1)
        await child.stop()
        sent: list[int] = []

        def settled() -> bool:
            sent.append(bodies.resident())
            return len(sent) > 100 and max(sent[-100:]) - min(sent[-100:]) < MB // 2

        most = await most_resident(worker, settled, before)
        assert most < 1.1 * BUDGET + NOISE
        assert worker.statistics().messages_sent > BUDGET // (4 * MB)  # there were items to be held
        assert await rpc.call("w0", bodies.aadd, 1, 2) == 3
        child.kill(signal.SIGCONT)
        child.tell("go on")
        assert await child.ahear() == ""


async def test_credit_has_a_limit() -> None:
    """A consumer that asks for more than that is answered Overloaded, which says what to do."""
    options: dict[str, Any] = {"max_stream_window": 100}
    async with group(2, ask_too_much, pour, 1, 101, ended=("w1",), **options) as (_, children):
        child = children["w1"]
        child.tell("open")
        await child.ahear()
        child.tell("go on")
        said = await child.ahear()
        assert "'w1' asks for 101 items" in said and "max_stream_window" in said


async def test_arguments_of_a_flood_of_calls_have_a_budget() -> None:
    """Calls past it are answered Overloaded, those before run; a single one may be as long as it likes."""
    _open.clear()
    options = rpc.RpcBackendOptions(max_queued_bytes=10 * MB)
    async with cluster(2, options=options) as workers:
        calls = [workers[0].call("worker1", wait_with, bytes(3 * MB)) for _ in range(8)]
        await until(lambda: sum(call.done() for call in calls) == 5)
        open_gate()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[:3] == [3 * MB] * 3
        assert all(isinstance(each, rpc.Overloaded) and "max_queued_bytes" in str(each) for each in results[3:])
        assert await workers[0].call("worker1", len, bytes(30 * MB)) == 30 * MB


async def test_a_call_beyond_the_budget_is_not_kept_out_by_small_ones() -> None:
    """One that is longer than all may be together runs beside a stream, but not behind another such call."""
    _open.clear()
    async with cluster(2, options=rpc.RpcBackendOptions(max_queued_bytes=MB)) as workers:
        stream = workers[0].stream("worker1", apour, 1)
        assert await anext(stream) == b"x"
        assert await workers[0].call("worker1", len, bytes(3 * MB)) == 3 * MB
        held = workers[0].call("worker1", wait_with, bytes(3 * MB))
        with pytest.raises(rpc.Overloaded, match=r"has 3\d{6} bytes .*, and this one has 3\d{6} \(max_queued_bytes"):
            await workers[0].call("worker1", len, bytes(3 * MB))
        open_gate()
        assert await held == 3 * MB
        await stream.aclose()


async def fill_a_queue(count: int, size: int) -> list[int]:
    """Handler: so many items into a queue for one of another worker, from so many places, and then they are got."""
    await rpc.queue("samples", owner="worker1").put(bytes(size))  # it is full now
    puts = [rpc.queue("samples", owner="worker1").put(bytes([number]) * size) for number in range(1, count)]
    await asyncio.sleep(0.05)
    got = [(await rpc.queue("samples", owner="worker1").get())[0] for _ in range(count)]
    await asyncio.gather(*puts)
    return got


async def own_a_queue() -> None:
    _queues.append(rpc.Queue("samples", maxsize=1))


_queues: list[rpc.Queue[Any]] = []


async def test_a_get_finds_room_beside_puts_that_wait_for_it() -> None:
    """Of the same caller, whose items at a full queue have taken all that he may have: three of them, but one."""
    async with cluster(2, options=rpc.RpcBackendOptions(max_queued_bytes=40_260)) as workers:
        await workers[1].call("worker1", own_a_queue)
        assert sorted(await workers[0].call("worker0", fill_a_queue, 3, 20_000)) == [0, 1, 2]
        _queues.pop().close()


async def test_streams_of_one_consumer_are_counted() -> None:
    """One more than he may have is answered Overloaded; one that has ended makes room for another."""
    async with cluster(2, options=rpc.RpcBackendOptions(max_streams=3)) as workers:
        streams = [workers[0].stream("worker1", apour, 1) for _ in range(3)]
        for stream in streams:
            assert await anext(stream) == b"x"
        with pytest.raises(rpc.Overloaded, match="max_streams"):
            await anext(workers[0].stream("worker1", apour, 1))
        await streams.pop().aclose()
        await until(lambda: workers[1].statistics().calls_running == 2)
        streams.append(workers[0].stream("worker1", apour, 1))
        assert await anext(streams[-1]) == b"x"
        for stream in streams:
            await stream.aclose()


@pytest.mark.parametrize("least", [1 << 40, 256 * 1024], ids=["in the frame", "in chunks"])
async def test_tensors_under_way_have_a_limit(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends more than that at once loses the connection, with the option as the reason; others are served."""
    monkeypatch.setattr(
        "aiorpc.runtime.links.distribution.Distribution.check_length", lambda *_: None
    )  # as of a sender that ignores it
    options = rpc.RpcBackendOptions(max_incoming_bytes=16 * MB, min_bulk_bytes=least, shared_memory=0)
    async with cluster(3, options=options) as workers:
        # Not the leader: where that one has lost a member, and it the leader, all others lose it as well.
        assert await workers[2].call("worker1", torch.numel, torch.zeros(4 * MB, dtype=torch.uint8)) == 4 * MB
        with pytest.raises(rpc.PeerLost):
            await workers[2].call("worker1", torch.numel, torch.zeros(17 * MB, dtype=torch.uint8))
        assert await workers[0].call("worker1", len, "abc") == 3


async def give_some(*sizes: int) -> list[torch.Tensor]:
    """Handler: tensors of so many bytes."""
    return [torch.ones(size, dtype=torch.uint8) for size in sizes]


async def pour_some(*sizes: int) -> AsyncIterator[list[torch.Tensor]]:
    """Handler: one item of nothing, and one with tensors of so many bytes."""
    yield []
    yield await give_some(*sizes)


@pytest.mark.parametrize("least", [1 << 40, 256 * 1024], ids=["in the frame", "in chunks"])
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("sizes", [(17 * MB,), (9 * MB, 9 * MB), (*[100_000] * 200,)], ids=["one", "two", "many"])
async def test_a_message_that_is_longer_than_the_other_end_takes_is_not_sent(
    least: int, transport: str, sizes: Sequence[int]
) -> None:
    """It fails alone, with its size and the option as the reason: a call, a result, an item, and what a group gets."""
    options = [
        rpc.RpcBackendOptions(max_incoming_bytes=limit, min_bulk_bytes=least, shared_memory=0, transports=(transport,))
        for limit in (16 * MB, 16 * MB, 1 << 30)
    ]
    said = rf"{sum(sizes)} bytes of tensors, and worker\d .* takes no more than {16 * MB} .*max_incoming_bytes"
    async with cluster(3, options=options) as workers:
        waiting = workers[0].call("worker1", asyncio.sleep, 30)
        tensors = await give_some(*sizes)
        with pytest.raises(
            rpc.errors.SerializationError, match=rf"a call to worker 'worker1' cannot be sent: it has {said}"
        ):
            await workers[0].call("worker1", give_some, *tensors)  # type: ignore[call-overload]
        with pytest.raises(
            rpc.errors.SerializationError, match=rf"a call to worker 'worker1' cannot be sent: it has {said}"
        ):
            workers[0].remote("worker1", give_some, *tensors)  # type: ignore[call-overload]  # at once, as there is a link
        with pytest.raises(
            rpc.errors.SerializationError, match=rf"the result of .*give_some on worker 'worker1' has {said}"
        ):
            await workers[0].call("worker1", give_some, *sizes)
        stream = workers[0].stream("worker1", pour_some, *sizes)
        assert await anext(stream) == []
        with pytest.raises(
            rpc.errors.SerializationError, match=rf"an item of .*pour_some on worker 'worker1' has {said}"
        ):
            await anext(stream)
        refused, served = await workers[0].group(["worker1", "worker2"]).call(count, *tensors)
        assert isinstance(refused.error, rpc.errors.SerializationError) and served.value == len(sizes)
        assert await workers[0].call("worker1", count, torch.zeros(16 * MB - 4096, dtype=torch.uint8)) == 1
        assert len(await workers[2].call("worker1", give_some, *sizes)) == len(sizes)
        assert not waiting.done()
        waiting.cancel()
        with contextlib.suppress(rpc.RpcCancelled):
            await waiting


async def test_what_lies_in_shared_memory_is_not_counted_as_sent() -> None:
    """A tensor that is longer than the other end takes of one message goes there, once both share memory."""
    async with cluster(2, options=rpc.RpcBackendOptions(max_incoming_bytes=4 * MB)) as workers:
        assert await workers[0].call("worker1", count, torch.zeros(MB, dtype=torch.uint8)) == 1
        link = workers[0]._node.peers.find("worker1").link
        assert link is not None
        await until(lambda: bool(link.distribution.sharing))
        large = torch.ones(9 * MB, dtype=torch.uint8)

        async def comes() -> bool:
            with contextlib.suppress(rpc.errors.SerializationError):  # the first offers of memory may be under way
                return torch.equal((await workers[0].call("worker1", echo_one, large)), large)
            return False

        for _ in range(100):
            if await comes():
                break
        else:
            pytest.fail("it was refused each time")


async def echo_one(tensor: torch.Tensor) -> torch.Tensor:
    """Handler: the same again."""
    return tensor


async def count(*tensors: torch.Tensor) -> int:
    """Handler: how many there are."""
    return len(tensors)


async def wait_with(data: bytes) -> int:
    """Handler: how long that is, once the test says so."""
    await pass_gate()
    return len(data)


async def test_two_that_fill_each_others_budget_go_on() -> None:
    """Both have stopped reading calls of the other, and read answers all the same: nobody waits for ever."""
    options = rpc.RpcBackendOptions(max_unsent_bytes=2 * MB, shared_memory=0, dedicated_loop=True)
    _open.set()
    async with cluster(2, options=options) as workers:
        for _ in range(3):
            there = [workers[0].call("worker1", give, MB) for _ in range(100)]
            back = [workers[1].call("worker0", give, MB) for _ in range(100)]
            results = await asyncio.wait_for(asyncio.gather(*there, *back, return_exceptions=True), 60)
            assert any(not isinstance(each, BaseException) for each in results)
            assert all(isinstance(each, (torch.Tensor, rpc.Overloaded)) for each in results)
        assert await workers[0].call("worker1", len, "abc") == 3
        assert await workers[1].call("worker0", len, "abc") == 3


# --- the sum of all that --------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "shared_memory": 32 * MB,
    "max_unsent_bytes": 32 * MB,
    "max_queued_bytes": 16 * MB,
    "max_queued_calls": 2000,
    "max_incoming_bytes": 32 * MB,
    "max_frame_bytes": 16 * MB,
    "max_references": 2000,
    "max_streams": 20,
}


def keep_waiting(*values: Any) -> None:
    """Handler: hold its arguments until the test says so."""
    _open.wait(60)


def flood_calls() -> None:
    """Small calls that are not answered, as many as can be made."""
    calls = [rpc.rpc_async("w1", keep_waiting, args=(number,), timeout=30.0) for number in range(20_000)]
    wait_for_any(calls[2000:])


def flood_arguments() -> None:
    """Long arguments for calls that are not answered."""
    calls = [rpc.rpc_async("w1", keep_waiting, args=(bytes(MB),), timeout=30.0) for _ in range(200)]
    wait_for_any(calls[100:])


def flood_tensors() -> None:
    """Many tensors at once."""
    tensor = torch.zeros(8 * MB, dtype=torch.uint8)
    wait_for_any([rpc.rpc_async("w1", keep_waiting, args=(tensor,), timeout=30.0) for _ in range(50)])


def flood_streams() -> None:
    """Streams without an end, with much credit, of which nothing is taken."""
    streams = [rpc.current().stream("w1", apour, MB) for _ in range(100)]
    time.sleep(2)
    del streams


def flood_references() -> None:
    """Values that are made there and never dropped, until that is refused."""
    kept = []
    with contextlib.suppress(rpc.RpcError):
        for number in range(20_000):
            kept.append(rpc.remote("w1", int, args=(number,)))
            kept[-1].to_here(30.0)


def flood_answers() -> None:
    """Long answers, of which this process reads none: its interpreter is held."""
    calls = [rpc.rpc_async("w1", bodies.echo, args=("x" * MB,), timeout=60.0) for _ in range(4)]
    calls += [rpc.rpc_async("w1", bodies.marked, args=(MB, {}), timeout=60.0) for _ in range(300)]
    bodies.hold_the_interpreter(3.0)
    wait_for_any(calls)


def wait_for_any(calls: list[Any]) -> None:
    """Until each has ended in some way, or the first that takes too long."""
    for call in calls:
        try:
            call.wait()
        except rpc.RpcTimeout:
            return
        except rpc.RpcError:
            continue


def flood(place: Place, link: Link, kind: Callable[[], None]) -> None:
    """Body: join, do that, and tell when it is done; leave without a word."""
    place.init_rpc(stream_window=10_000, **{**SMALL, "max_pending_calls": 100_000})
    link.hear()
    kind()
    link.tell("done")
    link.hear()
    rpc.shutdown(graceful=False)


def take_part(place: Place, link: Link, kind: Callable[[], None]) -> Any:
    """Body: w1 serves with small bounds, w2 floods it."""
    if place.name == "w2":
        return flood(place, link, kind)
    place.init_rpc(**SMALL)
    return [info.name for info in rpc.shutdown().lost]


FLOODS = [flood_calls, flood_arguments, flood_tensors, flood_streams, flood_references, flood_answers]


@pytest.mark.long
@pytest.mark.parametrize("kind", FLOODS)
async def test_memory_stays_below_the_sum_of_the_options(kind: Callable[[], None]) -> None:
    """Whatever one member floods another one with; a third one is served meanwhile."""
    async with group(3, take_part, kind, ended=("w1", "w2"), **SMALL) as (_, children):
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        before = await rpc.call("w1", bodies.resident)
        bound = (
            1.1 * SMALL["max_unsent_bytes"]
            + SMALL["max_queued_bytes"]
            + 2 * SMALL["max_incoming_bytes"]
            + 2 * SMALL["max_frame_bytes"]
            + SMALL["max_streams"] * MB
            + SMALL["max_queued_calls"] * 2048
            + SMALL["max_references"] * 1024
            + 0.75 * SMALL["shared_memory"]
        )
        children["w2"].tell("go")
        done = asyncio.ensure_future(children["w2"].ahear(100))
        most = 0
        while not done.done():
            most = max(most, await rpc.call("w1", bodies.aresident) - before)
            await asyncio.sleep(0.02)
        await done
        assert most < bound + NOISE
        assert await rpc.call("w1", bodies.aadd, 1, 2) == 3
        children["w2"].tell("leave")
        children["w1"].kill()
