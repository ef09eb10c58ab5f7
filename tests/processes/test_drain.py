"""A worker that is asked to go finishes what it has accepted: real processes, real signals."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import draining

from . import bodies
from .workers import LIMIT, Child, Link, Place, meeting_file, places, processes, until

NAMES = [f"s{number}" for number in range(10)]
#: Calls under way at each server; each item of a queue is one more that it has accepted.
PLAIN, NESTED, AWAITED, BATCHED, STREAMS, SMALL, LARGE = 30, 15, 15, 15, 10, 12, 3
CALLS = PLAIN + NESTED + AWAITED + BATCHED + STREAMS


# --- what servers run -------------------------------------------------------------------------------------------------


def server(place: Place, link: Link, **options: Any) -> str:
    """Body: serve until the worker is asked to go; what the report says."""
    place.init_rpc(**options)
    queue: rpc.Queue[Any] = rpc.Queue("q")
    link.tell("up")
    report = rpc.drained()
    del queue
    return f"{report.timed_out} {report.unfinished}"


def plain(x: int) -> int:
    """A thread that takes its time."""
    time.sleep(0.1)
    return -x


def nested(to: str, x: int) -> int:
    """Works, and then calls its caller: a call that begins behind the closed door."""
    time.sleep(0.1)
    return int(rpc.rpc_sync(to, bodies.add, args=(x, 1)))


async def awaited(x: int) -> int:
    """A task that takes its time."""
    await asyncio.sleep(0.4)
    return 2 * x


@rpc.batched(4, 0.2)
def together(numbers: list[int]) -> list[int]:
    """Several calls at once."""
    time.sleep(0.1)
    return [3 * each for each in numbers]


def numbers(count: int) -> Iterator[int]:
    """A stream that takes its time."""
    for number in range(count):
        time.sleep(0.03)
        yield number


def served() -> int:
    """How many calls of users this worker has under way, without this one."""
    return sum(call.direction == "served" for call in rpc.current().pending_calls()) - 1


# --- nothing is lost --------------------------------------------------------------------------------------------------


async def ask_all(name: str, caller: str) -> tuple[list[Any], list[Any]]:
    """Make calls of all kinds; returns the Futures and tasks of the answers, and what these have to be.

    All of them have arrived then: a call that was made after them is answered.
    """
    made: list[tuple[Any, Any]] = []
    made += [(rpc.call(name, plain, x), -x) for x in range(PLAIN)]
    made += [(rpc.call(name, nested, caller, x), x + 1) for x in range(NESTED)]
    made += [(rpc.call(name, awaited, x), 2 * x) for x in range(AWAITED)]
    made += [(rpc.call(name, together, x), 3 * x) for x in range(BATCHED)]

    async def items() -> list[int]:
        return [item async for item in rpc.stream(name, numbers, 20)]

    made += [(asyncio.ensure_future(items()), list(range(20))) for _ in range(STREAMS)]
    await asyncio.sleep(0)  # the tasks open their streams
    assert await rpc.call(name, served)
    return [each for each, _ in made], [value for _, value in made]


@pytest.mark.slow
async def test_nothing_that_was_accepted_is_lost() -> None:
    """A thousand calls and items at ten workers, which SIGTERM drains one after the other: all are answered, all items
    are got, each process ends with 0. Calls to any of the group go on meanwhile, by one that stays in the end."""
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("caller", init_method=init_method) as caller:
            started = [children.start(Place(name, -1, None, init_method), server) for name in (*NAMES, "stays")]
            for child in started:
                assert await child.ahear() == "up"
            *servers, stays = started
            over = asyncio.Event()
            users = [asyncio.create_task(call_any(over)) for _ in range(4)]
            answers, values = [], []
            for child in servers:
                name = child.place.name
                queue = caller.queue("q", owner=name)
                await asyncio.gather(*(queue.put(number) for number in range(SMALL)))
                await asyncio.gather(*(queue.put(torch.full((20_000,), float(number))) for number in range(LARGE)))
                made, expected = await ask_all(name, "caller")
                answers += made
                values += expected
                child.kill(signal.SIGTERM)
            got = await asyncio.gather(*(get_all(caller, name) for name in NAMES))
            assert await asyncio.gather(*answers) == values
            assert all(each == [*range(SMALL), *range(LARGE)] for each in got)
            assert len(values) + sum(map(len, got)) == len(NAMES) * (CALLS + SMALL + LARGE) >= 1000
            assert [await child.ahear() for child in servers] == ["False ()"] * len(NAMES)
            over.set()
            assert all(await asyncio.gather(*users))
            stays.kill(signal.SIGTERM)
        children.check_ended()


async def call_any(over: asyncio.Event) -> int:
    """Call any of the servers until it is over; how often."""
    group, count = rpc.group("s*", retries=5), 0
    while not over.is_set():
        assert await group.any(plain, count) == -count
        count += 1
    return count


async def get_all(caller: rpc.Worker, name: str) -> list[int]:
    """Slowly, the items of its queue."""
    queue = caller.queue("q", owner=name)
    got = []
    for _ in range(SMALL + LARGE):
        item = await queue.get()
        got.append(int(item[0]) if isinstance(item, torch.Tensor) else item)
        await asyncio.sleep(0.01)
    return got


# --- how a program ends -----------------------------------------------------------------------------------------------


def serves_in_a_block(place: Place, link: Link, kind: str) -> str:
    """Body: `async with`, and nothing but to serve."""

    async def main() -> str:
        async with rpc.init(place.name, init_method=place.init_method) as worker:
            link.tell("up")
            await worker.drained()
        return worker.state.value

    if kind == "uvloop":
        import uvloop

        return str(uvloop.run(main()))
    return asyncio.run(main())


def calls_in_a_block(place: Place, link: Link, kind: str) -> str:
    """Body: `async with`, and calls without end: WorkerClosed ends the block, and not the drain."""

    async def main() -> None:
        async with rpc.init(place.name, init_method=place.init_method):
            link.tell("up")
            while True:
                await rpc.call(place.name, bodies.add, 1, 2)
                await asyncio.sleep(0.01)

    try:
        asyncio.run(main())
    except rpc.WorkerClosed as error:
        assert "SIGTERM has asked it to" in str(error)
    return "closed"


def serves_by_a_script(place: Place, link: Link, kind: str) -> str:
    """Body: `init_rpc`, and the main thread waits for the drain."""
    place.init_rpc(dedicated_loop=False)
    link.tell("up")
    rpc.drained()
    try:
        rpc.current()
    except rpc.errors.NotInitialized:
        return "closed"
    return "there"


def works_in_a_script(place: Place, link: Link, kind: str) -> str:
    """Body: `init_rpc`, and the main thread waits for something else, and for its worker at the end."""
    place.init_rpc()
    link.tell("up")
    while not rpc.current().leaving:
        time.sleep(0.01)
    rpc.shutdown()
    return "closed"


def serves_two(place: Place, link: Link, kind: str) -> str:
    """Body: two workers, one with a loop of its own; both drain."""

    async def main() -> str:
        options = rpc.RpcBackendOptions(dedicated_loop=True)
        async with rpc.init(place.name, init_method=place.init_method) as one:
            async with rpc.init("second", init_method=place.init_method, options=options) as two:
                link.tell("up")
                await asyncio.gather(one.drained(), two.drained())
            return two.state.value

    return asyncio.run(main())


def drains_by_its_own_handler(place: Place, link: Link, kind: str) -> str:
    """Body: a program with a handler of asyncio's, which drains, twice, and says why it has ended."""

    async def main() -> str:
        async with rpc.init(place.name, init_method=place.init_method) as worker:
            came = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, came.set)
            link.tell("up")
            await came.wait()
            reports = await asyncio.gather(worker.drain(), worker.drain(5.0))
            assert reports[0] is reports[1] is await worker.drain()
        return "closed"

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "way"),
    [
        (serves_in_a_block, "asyncio"),
        (serves_in_a_block, "uvloop"),
        (calls_in_a_block, "asyncio"),
        (serves_by_a_script, "script"),
        (works_in_a_script, "script"),
        (serves_two, "asyncio"),
        (drains_by_its_own_handler, "own"),
    ],
)
async def test_a_program_that_ends_then_exits_with_0(body: Callable[..., str], way: str) -> None:
    """However it waits; a call that its worker serves is answered, and a second SIGTERM changes nothing."""
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("caller", init_method=init_method):
            child = children.start(Place("w1", -1, None, init_method), body, way)
            assert await child.ahear() == "up"
            call = rpc.call("w1", awaited, 21)
            await until(lambda: rpc.call("w1", served))
            child.kill(signal.SIGTERM)
            await until(lambda: is_refused("w1"))
            child.kill(signal.SIGTERM)
            assert await call == 42
            assert await child.ahear() == "closed"
        children.check_ended()


async def is_refused(name: str) -> bool:
    """Whether a worker takes no more calls."""
    try:
        await rpc.call(name, abs, -1)
    except rpc.PeerLeft:
        return True
    return False


def goes_on(place: Place, link: Link, kind: str) -> None:
    """Body: nothing of the program ends at the signal."""
    draining.REST = 0.3
    options = rpc.RpcBackendOptions(init_method=place.init_method, drain_timeout=0.5)

    async def main() -> None:
        async with rpc.init(place.name, options=options):
            link.tell("up")
            await asyncio.Event().wait()

    if kind == "block":
        asyncio.run(main())
    rpc.init_rpc(place.name, rpc_backend_options=options)
    link.tell("up")
    while not rpc.current().leaving:
        time.sleep(0.01)
    if kind == "script":
        threading.Event().wait()
    HashStore().wait(["none"], timedelta(hours=1))  # a function of C, in which no handler runs


@pytest.mark.parametrize(
    ("kind", "status"), [("block", -signal.SIGTERM), ("script", -signal.SIGTERM), ("C", 128 + signal.SIGTERM)]
)
async def test_a_program_that_goes_on_is_ended_by_the_signal(kind: str, status: int) -> None:
    """After the bound, as it would have been at once; a call that is not over then ends with PeerLeft."""
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("caller", init_method=init_method):
            child = children.start(Place("w1", -1, None, init_method), goes_on, kind)
            assert await child.ahear() == "up"
            quick, endless = rpc.call("w1", awaited, 1), rpc.call("w1", bodies.ablock)
            await until(lambda: rpc.call("w1", served))
            began = time.monotonic()
            child.kill(signal.SIGTERM)
            assert await quick == 2
            with pytest.raises(rpc.PeerLeft):
                await endless
            assert await asyncio.to_thread(child.join) == status
            assert time.monotonic() - began >= 0.8


def first_process(init_method: str) -> None:
    """A program that goes on, as process 1 of a container."""
    assert os.getpid() == 1
    ours, theirs = multiprocessing.Pipe()
    goes_on(Place("w1", -1, None, init_method), Link(theirs), "block")
    ours.close()


@pytest.mark.slow
async def test_process_1_is_ended_although_the_kernel_spares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spares a first process without a handler. The signal comes from outside, as the kubelet sends it."""
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root")
    monkeypatch.setenv("AIORPC_SECRET", "of a container and its caller")
    code = "import sys; from tests.processes import test_drain; test_drain.first_process(sys.argv[1])"
    command = ["--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", code]
    with meeting_file() as init_method:
        async with rpc.init("caller", init_method=init_method):
            outer = await asyncio.create_subprocess_exec("unshare", *command, init_method)
            try:
                await rpc.wait_for("w1", timeout=LIMIT)
                call = rpc.call("w1", awaited, 21)
                await until(lambda: rpc.call("w1", served))
                children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
                os.kill(int(children.read_text()), signal.SIGTERM)
                assert await call == 42
                assert await asyncio.wait_for(outer.wait(), LIMIT) == 128 + signal.SIGTERM
            finally:
                if outer.returncode is None:
                    outer.kill()
                    await outer.wait()


def goes_on_without_limit(place: Place, link: Link) -> None:
    """Body: a drain without a bound, and a program that stays when it is over."""
    place.init_rpc(drain_timeout=0)
    link.tell("up")
    link.tell(rpc.drained().timed_out)
    threading.Event().wait()


def test_without_a_limit_the_next_signal_ends_the_program() -> None:
    """Once the drain is over; the program may go on until then."""
    with processes() as children, meeting_file() as init_method:
        child = children.start(Place("w1", -1, None, init_method), goes_on_without_limit)
        assert child.hear() == "up"
        child.kill(signal.SIGTERM)
        assert child.hear() is False
        for _ in range(100):  # the first ones come while it still notes the end of the drain
            child.kill(signal.SIGTERM)
            child.process.join(0.1)
            if not child.process.is_alive():
                break
        assert child.join() == -signal.SIGTERM


# --- whose signals ----------------------------------------------------------------------------------------------------


def keeps_its_handler(place: Place, link: Link) -> str:
    """Body: a program with a handler of its own."""
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    place.init_rpc()
    link.tell("up")
    while not came.is_set():
        time.sleep(0.01)
    state = rpc.current().state.value
    rpc.shutdown()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    return state


def drains_on_another(place: Place, link: Link) -> str:
    """Body: a site whose signal is SIGUSR1."""
    place.init_rpc(drain_on=["SIGUSR1"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    link.tell("up")
    rpc.drained()
    return "drained"


def gives_back(place: Place, link: Link) -> str:
    """Body: after a shutdown SIGTERM is as it was before, and so it is in a forked child."""
    place.init_rpc()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    rpc.shutdown()
    found = signal.getsignal(signal.SIGTERM)
    place.init_rpc(drain_on=())
    assert found is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    rpc.shutdown()
    link.tell("up")
    link.hear()
    return f"{child.exitcode}"


@pytest.mark.parametrize(
    ("body", "number", "said"),
    [
        (keeps_its_handler, signal.SIGTERM, "running"),
        (drains_on_another, signal.SIGUSR1, "drained"),
        (gives_back, None, "-15"),
    ],
)
def test_signals_belong_to_the_program(body: Callable[..., str], number: int | None, said: str) -> None:
    """A handler of its own stays, other signals are named by `drain_on`, and what was changed is given back."""
    with processes() as children, meeting_file() as init_method:
        child = children.start(Place("w0", -1, None, init_method), body)
        assert child.hear() == "up"
        if number is None:
            child.tell("end")
        else:
            child.kill(number)
        assert child.hear() == said
        children.check_ended()


def joins_for_ever(place: Place, link: Link) -> None:
    """Body: the others do not come."""
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    link.tell("up")
    place.init_rpc()


def test_a_worker_that_joins_is_ended_at_once() -> None:
    """It has accepted nothing."""
    with processes() as children, meeting_file() as init_method:
        child = children.start(places(2, init_method)[0], joins_for_ever)
        assert child.hear() == "up"
        assert child.join() == -signal.SIGTERM


# --- in a fixed group -------------------------------------------------------------------------------------------------


def serve_in_shutdown(place: Place, link: Link) -> tuple[bool, list[str]]:
    """Body: a member that serves from inside of `shutdown`, as programs of torch do."""
    place.init_rpc()
    report = rpc.shutdown()
    return report.timed_out, [info.name for info in report.lost]


@pytest.mark.parametrize("leads", [False, True])
async def test_a_member_of_a_fixed_group_drains_and_another_takes_its_place(leads: bool) -> None:
    """It leaves alone, also if it leads; the others go on, and a call with retries waits for the next process."""
    with processes() as children, meeting_file() as init_method:
        where = places(3, init_method)
        own, (drained, other) = (where[1], (where[0], where[2])) if leads else (where[0], (where[1], where[2]))
        for place in (drained, other):
            children.start(place, serve_in_shutdown)
        async with rpc.init(own.name, rank=own.rank, world_size=3, init_method=init_method) as worker:
            old = children[drained.name]
            await until(lambda: rpc.call(drained.name, is_leaving))
            call = rpc.call(drained.name, awaited, 21)
            await until(lambda: rpc.call(drained.name, served))
            old.kill(signal.SIGTERM)
            await until(lambda: is_refused(drained.name))
            patient = rpc.peer(drained.name, timeout=30, retries=100, backoff=(0.1, 0.3)).call(os.getpid)
            assert await call == 42
            assert await old.ahear() == (False, [])
            assert await rpc.call(other.name, bodies.add, 1, 2) == 3
            new = children.start(drained, serve_in_shutdown)
            assert await patient == new.pid
            assert await rpc.call(other.name, bodies.call_other, drained.name, 0.0) is None
            assert worker._node.group.lost == {}
        await asyncio.to_thread(children.check_ended)


def is_leaving() -> bool:
    """Whether this worker is in shutdown()."""
    return rpc.current().leaving


# --- under a launcher -------------------------------------------------------------------------------------------------


async def slow(x: int) -> int:
    """Runs when torchrun has handed its signal on, to both."""
    await asyncio.sleep(2.0)
    return x


async def launched() -> None:
    """A program of torchrun: w0 has calls under way at w1 when both get the signal."""
    async with rpc.init(f"w{os.environ['RANK']}") as worker:
        if worker.name == "w1":
            await worker.drained()
        else:
            calls = [rpc.call("w1", slow, x) for x in range(20)]
            await rpc.call("w1", served)
            print("under way", flush=True)
            print(f"answers: {len(await asyncio.gather(*calls))}", flush=True)
    print(f"left: {worker.name}", flush=True)


@pytest.mark.slow
async def test_all_that_torchrun_ends_answer_each_other() -> None:
    """It sends SIGTERM to all at once, when it gets it itself; nothing that was accepted is lost."""
    code = "import asyncio; from tests.processes import test_drain; asyncio.run(test_drain.launched())"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
    pipe = asyncio.subprocess.PIPE
    torchrun = await asyncio.create_subprocess_exec(sys.executable, *command, "-c", code, stdout=pipe, stderr=pipe)
    assert torchrun.stdout is not None
    try:
        async with asyncio.timeout(LIMIT):
            assert await torchrun.stdout.readline() == b"under way\n"
        torchrun.terminate()
        said, errors = await asyncio.wait_for(torchrun.communicate(), LIMIT)
        assert sorted(said.split(b"\n")) == [b"", b"answers: 20", b"left: w0", b"left: w1"], errors.decode()
    finally:
        if torchrun.returncode is None:
            torchrun.kill()
            await torchrun.wait()


# --- others choose ----------------------------------------------------------------------------------------------------


async def test_a_group_chooses_another_worker() -> None:
    """While one drains, calls to any of a group go to the other, also without retries; those that it has are
    answered."""
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("caller", init_method=init_method):
            pids = {}
            for name in ("s0", "s1"):
                child: Child = children.start(Place(name, -1, None, init_method), server)
                assert await child.ahear() == "up"
                pids[child.pid] = name
            held = [rpc.call("s0", awaited, x) for x in range(3)]
            await until(lambda: rpc.call("s0", served))
            children["s0"].kill(signal.SIGTERM)
            patient = [rpc.group("s*", retries=3).any(os.getpid) for _ in range(20)]
            await until(lambda: is_refused("s0"))
            chosen = {pids[pid] for pid in await asyncio.gather(*(rpc.group("s*").any(os.getpid) for _ in range(50)))}
            assert chosen == {"s1"}
            assert {pids[pid] for pid in await asyncio.gather(*patient)} <= {"s0", "s1"}
            assert await asyncio.gather(*held) == [0, 2, 4]
            children["s1"].kill(signal.SIGTERM)
        children.check_ended()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
async def test_callers_notice_nothing_of_workers_that_come_and_go(seed: int) -> None:
    """Three servers are drained and started anew at random moments; calls with retries all succeed."""
    chance = random.Random(seed)
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("caller", init_method=init_method):
            for name in NAMES[:3]:
                await children.start(Place(name, -1, None, init_method), server).ahear()
            over = asyncio.Event()

            users = [asyncio.create_task(call_any(over)) for _ in range(8)]
            for _ in range(6):
                await asyncio.sleep(chance.uniform(0.0, 0.3))
                child = children[chance.choice(NAMES[:3])]
                child.kill(signal.SIGTERM)
                assert await child.ahear() == "False ()"
                await children.start(child.place, server).ahear()
            over.set()
            assert all(await asyncio.gather(*users))
            for name in NAMES[:3]:
                children[name].kill(signal.SIGTERM)
        children.check_ended()
