"""Devices, drivers and workers that fail in the midst of transfers; the devices are those of `tests.fakes`."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Any

import pytest

import aiorpc as rpc
from aiorpc.runtime.links.messages import DEVICE

from ..fakes.cuda import FakeCuda
from . import device_bodies as bodies
from .device_bodies import BOX, RANDOM_SIZES, Group, Home, Setup, drained, on_device, pattern, play, wrong
from .workers import Child, Place, meeting_file, processes, until

pytestmark = [pytest.mark.slow, pytest.mark.long]  # with real processes, and streams that are late on purpose

BOUND = 15.0  # seconds within which everything that waits for a dead worker has to end; it takes far less


def pair(way: str = "auto", **fake: Any) -> tuple[Setup, Setup]:
    """w0 with a map, w1 with its inverse."""
    options = {"device_channel": way}
    return Setup({"w1": {0: 1, 1: 0}}, options, fake), Setup({}, options, fake)


async def exchange(group: Group, count: int = 4, seed: int = 0) -> None:
    """Some transfers, which have to be right."""
    chance = random.Random(seed)
    for _ in range(count):
        size, mark = chance.choice(RANDOM_SIZES), chance.randrange(251)
        assert not wrong(await group.ask("w1", bodies.plus, on_device(size, mark)), pattern(size, mark) + 1)


# --- death ------------------------------------------------------------------------------------------------------------


def shared(fake: FakeCuda) -> int:
    """How many pieces of memory are allocated for others, or opened."""
    assert fake.interprocess is not None
    return len(fake.interprocess.mapped)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "staging"])
async def test_a_worker_killed_at_random_moments(way: str) -> None:
    """Twenty workers ask and are asked, one after the other, each until it is killed: every call ends, the survivor's
    streams go on, its memory comes back, and the next one finds all in order."""
    names = [f"victim-{seed}" for seed in range(6)]
    setup = Setup({name: {0: 1} for name in names}, {"device_channel": way}, {"patience": 10.0})
    with meeting_file() as init_method, setup.make_fake(0) or pytest.fail("it has devices") as fake:
        Home.fake = fake
        with processes() as children:
            worker = setup.make_worker(Place("w0", 0, None, init_method), fake)
            await worker.start()
            try:
                for seed, name in enumerate(names):
                    theirs = Setup({"w0": {0: 1}}, {"device_channel": way})
                    place = Place(name, 0, None, init_method)
                    child = children.start(place, bodies.keep_asking, theirs, seed)
                    assert await child.ahear() == "joined"
                    await until_killed(worker, child, seed)
                    # Nothing waits any more for what the dead have not done.
                    assert await asyncio.to_thread(fake.machine.drain, BOUND)
                    assert await drained(fake) == [0, 0]
                    await until(lambda: not shared(fake), BOUND)
                    assert not fake.violations, (seed, fake.violations[:3])
            finally:
                await worker.shutdown()
    Home.fake = None
    assert not fake.violations, fake.violations[:3]


async def until_killed(worker: rpc.Worker, child: Child, seed: int) -> None:
    """Ask, kill at a random moment, and see how all calls end."""
    chance = random.Random(seed)
    sent: list[tuple[int, int, rpc.Future[Any]]] = []

    async def keep_sending() -> None:
        while True:
            size, mark = chance.choice(RANDOM_SIZES), chance.randrange(251)
            sent.append((size, mark, worker.call(child.place.name, bodies.aplus, on_device(size, mark))))
            await asyncio.sleep(chance.uniform(0, 0.01))

    sending = asyncio.ensure_future(keep_sending())
    await asyncio.sleep(chance.uniform(0, 0.25))
    sending.cancel()
    child.kill(signal.SIGKILL)
    killed = time.monotonic()
    for size, mark, call in sent:
        try:
            answer = await asyncio.wait_for(call, BOUND)
        except rpc.PeerLost:
            continue
        # It came in time; when the device was not done with it, it holds anything.
        assert tuple(answer.shape) == (size,), mark
    assert time.monotonic() - killed < BOUND
    await asyncio.to_thread(child.join)
    assert not child.pipe.poll() or isinstance(child.process.exitcode, int)


async def test_a_worker_killed_before_its_memory_is_proved() -> None:
    """The other one has opened it, and waits for the bytes that prove it: neither its thread nor a stream hangs."""
    patience = 2 * BOUND
    drained = False

    async def scenario(group: Group) -> None:
        nonlocal drained
        call = group.worker.call("w1", bodies.make, 10, 0)
        await until(lambda: group.fake.calls["interprocess.wait"] > 0)
        group.children["w1"].kill(signal.SIGKILL)
        with pytest.raises(rpc.PeerLost):
            await asyncio.wait_for(call, BOUND)
        drained = await asyncio.to_thread(group.fake.machine.drain, BOUND)
        await until(lambda: not shared(group.fake), BOUND)

    options = {"device_channel": "ipc"}
    theirs = Setup({}, options, {"lag": (patience, patience)})
    group = await play(
        scenario, Setup({"w1": {0: 1}}, options, {"patience": patience}), theirs, ended=("w1",), sound=False
    )
    assert drained, "its streams hang"
    assert group.reports["w0"].violations == []


async def test_a_worker_that_stands_still_for_a_while() -> None:
    """Stopped in the midst of transfers, and continued: all are right."""

    async def scenario(group: Group) -> None:
        await exchange(group)
        sizes = [size for size in RANDOM_SIZES for _ in range(2)]
        calls = [group.worker.call("w1", bodies.aplus, on_device(size, mark)) for mark, size in enumerate(sizes)]
        await asyncio.sleep(0)
        group.children["w1"].kill(signal.SIGSTOP)
        try:
            await asyncio.sleep(1)
        finally:
            group.children["w1"].kill(signal.SIGCONT)
        for mark, (size, call) in enumerate(zip(sizes, calls, strict=True)):
            assert not wrong(await asyncio.wait_for(call, 30), pattern(size, mark) + 1)

    await play(scenario, *pair())


# --- the driver -------------------------------------------------------------------------------------------------------

CALLS = ["allocate", "export", "event", "export_event", "open", "open_event", "copy", "record", "interprocess.wait"]
CALLS += ["empty", "pinned", "move", "mark", "wait"]


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False], ids=["here", "there"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_of_the_driver_that_fails(name: str, here: bool) -> None:
    """At the first use, and again when all is open: the message goes another way, or fails with an error that says
    where; the ones after it are right."""

    async def scenario(group: Group) -> None:
        failed = 0
        for round_ in range(2):
            for size in (100, 200_000, BOX + 9):
                if here:
                    group.fake.fail(name)
                else:
                    await group.ask("w1", bodies.fail_next, name, 1)
                source = pattern(size, 5)
                try:
                    answer = await group.ask("w1", bodies.plus, on_device(size, 5))
                    bad = wrong(answer, source + 1)
                except (rpc.RpcError, RuntimeError) as error:  # of a handler's own work: what the driver raised
                    assert not isinstance(error, rpc.PeerLost), error
                    assert "device" in str(error) or "cuda" in str(error), error
                    failed += 1
                else:
                    assert not bad, (round_, size)
                answer = None
                if here:
                    bodies.stop_failing(name)
                else:
                    await group.ask("w1", bodies.stop_failing, name)
                answer = await group.ask("w1", bodies.plus, on_device(size, 6))
                assert not wrong(answer, pattern(size, 6) + 1), (round_, size)
                answer = None
        await exchange(group)

    await play(scenario, *pair(), even=False)


@pytest.mark.parametrize("way", ["auto", "staging"])
async def test_a_handler_that_fails_after_it_gave_work(way: str) -> None:
    """Its error comes; what its stream was given is done; later calls are right."""

    async def scenario(group: Group) -> None:
        for size in (100, 200_000, BOX + 9):
            calls = [group.worker.call("w1", bodies.fail_after_work, on_device(size, mark)) for mark in range(4)]
            for call in calls:
                with pytest.raises(ValueError, match="after work"):
                    await asyncio.wait_for(call, 30)
            await exchange(group, 2)

    await play(scenario, *pair(way))


# --- calls that are given up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["auto", "staging"])
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
async def test_calls_cancelled_in_the_midst_of_transfers(back: bool, way: str) -> None:
    """Whatever has been sent by then: other calls are right, and all memory comes back."""

    async def scenario(group: Group) -> None:
        chance = random.Random(3)
        await exchange(group, 1)
        for _ in range(12):
            size = chance.choice([400_000, 2 * BOX])
            calls = [
                group.worker.call("w1", bodies.make, size, mark, 1)
                if back
                else group.worker.call("w1", bodies.plus, on_device(size, mark))
                for mark in range(3)
            ]
            await asyncio.sleep(chance.uniform(0, 0.04))
            calls[0].cancel()
            calls[2].cancel()
            answer = await asyncio.wait_for(calls[1], 30)
            assert not wrong(answer, pattern(size, 1) + (0 if back else 1))
            del answer, calls
        await exchange(group, 2)

    await play(scenario, *pair(way))


@pytest.mark.parametrize("way", ["auto", "staging"])
async def test_calls_that_run_out_of_time(way: str) -> None:
    """Deadlines in the midst of transfers; the answer that comes too late does no harm."""

    async def scenario(group: Group) -> None:
        await exchange(group, 1)
        late = 0
        for number in range(12):
            quick = group.worker.peer("w1", timeout=0.004 * (number + 1))
            calls = [quick.call(bodies.aplus, on_device(2 * BOX, 1)), quick.call(bodies.astay, 0.1, on_device(10, 2))]
            for call in calls:
                try:
                    await asyncio.wait_for(call, 30)
                except rpc.RpcTimeout:
                    late += 1
            del calls, call
        assert late >= 6
        await exchange(group, 2)

    await play(scenario, *pair(way))


# --- what cannot be said ----------------------------------------------------------------------------------------------

NONSENSE: dict[str, list[Any]] = {
    "unknown": ["what"],
    "no fields": ["slots"],
    "slots that were not lent": ["slots", [[0, 0]]],
    "slots of no box": ["slots", [[7, 0]]],
    "not numbers": ["slots", [["a", None]]],
    "an outbox that was not offered": ["opened", 5],
    "chunks that are none": ["chunks", 1, 7],
    "an answer to nothing": ["refused", 9, "no"],
    "too much": ["got", 1, 2],
    "closed what is not there": ["closed", [8]],
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_what_a_peer_cannot_have_said(what: str) -> None:
    """The connection ends, with all that waits for it; nothing hangs, and nobody breaks a rule."""

    async def scenario(group: Group) -> None:
        await exchange(group, 1)
        waiting = [group.worker.call("w1", bodies.astay, 60.0, on_device(10)) for _ in range(2)]
        bodies.say_by_hand("w1", DEVICE, NONSENSE[what])
        for call in waiting:
            # The other one ends the connection, and leaves as soon as it has seen that.
            with pytest.raises((rpc.PeerLost, rpc.PeerLeft, rpc.errors.ProtocolError)):
                await asyncio.wait_for(call, BOUND)

    group = await play(scenario, *pair(), sound=False)
    for name, report in group.reports.items():
        assert not report.violations, (name, report.violations)
        assert not report.waited
