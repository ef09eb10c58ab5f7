"""A worker that dies is seen at once, by name; one that is only busy is not taken for dead."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import aiorpc as rpc
from tests.limits import busy

from . import bodies
from .workers import (
    LIMIT,
    Child,
    Link,
    Place,
    group,
    meeting_file,
    places,
    process_state,
    processes,
    until,
    wait_for,
    wait_for_async,
)

SOON = 4.0  # seconds within which a death has to be known: far fewer than the 20 after which silence counts as one


async def fails_soon(awaitable: Any, killed: float, child: Child) -> rpc.PeerLost:
    """The error of something that waits for a killed worker; checks that it is complete and in time."""
    with pytest.raises(rpc.PeerLost) as caught:
        await asyncio.wait_for(awaitable, LIMIT)
    assert time.monotonic() - killed < SOON * busy()
    error = caught.value
    expected = (child.place.name, child.place.rank, socket.gethostname(), child.pid)
    assert (error.worker, error.rank, error.host, error.pid) == expected
    for part in expected:
        assert re.search(rf"\b{re.escape(str(part))}\b", str(error)), error
    return error


async def running(worker: str, count: int) -> None:
    """Wait until a worker says that it runs so many calls."""

    async def are_running() -> bool:
        return int(await rpc.call(worker, served_calls)) >= count

    await until(are_running)


def served_calls() -> int:
    """Calls under way at this worker, this one apart."""
    return sum(call.direction == "served" for call in rpc.current().pending_calls()) - 1


async def test_kill_fails_pending_calls_at_once_and_names_the_worker() -> None:
    """Calls of threads, tasks and by value that wait for a killed worker fail within seconds; a third goes on."""
    async with group(3, ended=("w1",)) as (worker, children):
        calls = [
            rpc.call("w1", bodies.block),
            rpc.call("w1", bodies.ablock),
            rpc.call(1, lambda: time.sleep(60)),
            rpc.peer("w1", timeout=0).call(bodies.ablock),
        ]
        await running("w1", 4)
        children["w1"].kill()
        killed = time.monotonic()
        errors = [await fails_soon(call, killed, children["w1"]) for call in calls]
        assert len({id(error) for error in errors}) == len(errors)
        assert "block" in str(errors[0])
        assert await rpc.call("w2", bodies.add, 1, 2) == 3
        with pytest.raises(rpc.PeerLost):
            await rpc.call("w1", bodies.add, 1, 2)
        started = time.monotonic()
        report = await worker.shutdown()
        assert [info.name for info in report.lost] == ["w1"]
        assert not report.timed_out
        assert time.monotonic() - started < 5 * busy()
        assert await children["w2"].ahear() == ["w1"]


@pytest.mark.parametrize(
    ("exits", "number", "how"),
    [
        (False, signal.SIGKILL, r"ended by signal 9 \(SIGKILL\)"),
        (False, signal.SIGSEGV, r"ended by signal 11 \(SIGSEGV\)"),
        (True, 3, "ended with exit code 3"),
    ],
    ids=["kill", "crash", "exit"],
)
async def test_a_loss_tells_how_the_process_has_ended(exits: bool, number: int, how: str) -> None:
    """By which signal or with which code, as long as the kernel shows it; not that a connection broke."""
    async with group(2, ended=("w1",)) as (worker, children):
        call = rpc.call("w1", end_so, exits, int(number))
        with pytest.raises(rpc.PeerLost) as caught:
            await asyncio.wait_for(call, LIMIT)
        assert re.search(rf"was lost: its process \(pid {children['w1'].pid}\) ({how}|has ended)", str(caught.value))
        assert caught.value.cause in str(caught.value)
        await until(lambda: worker._node.peers.find("w1").gone is not None)
        with pytest.raises(rpc.PeerLost, match="its process"):
            await rpc.call("w1", bodies.add, 1, 2)


def end_so(exits: bool, number: int) -> None:
    if exits:
        os._exit(number)
    os.kill(os.getpid(), number)
    time.sleep(LIMIT)


async def test_kill_ends_streams_and_references() -> None:
    """Streams raise after their items, and every user of a reference that lived there is told."""
    async with group(2, ended=("w1",)) as (_, children):
        ref = rpc.remote("w1", bodies.Counter, 5)
        assert await ref.rpc_async().add(1) == 6
        method = ref.rpc_async().block()
        streams = [rpc.stream("w1", bodies.acount, 3), rpc.stream("w1", bodies.count, 3)]
        for stream in streams:
            assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        children["w1"].kill()
        killed = time.monotonic()
        for stream in streams:
            await fails_soon(anext(stream), killed, children["w1"])
        await fails_soon(method, killed, children["w1"])
        with pytest.raises(rpc.PeerLost):
            await asyncio.wait_for(ref, LIMIT)
        with pytest.raises(rpc.PeerLost):
            await ref.rpc_async().add(1)


async def test_blocked_threads_learn_of_a_death() -> None:
    """`rpc_sync`, `to_here` and `wait` in threads end with the same error."""
    async with group(2, ended=("w1",)) as (worker, children):
        ref = worker.remote("w1", bodies.Counter)
        assert await ref.rpc_async().add(1) == 1
        slow = worker.remote("w1", bodies.block)
        verbs: list[Callable[[], Any]] = [
            lambda: rpc.rpc_sync("w1", bodies.block),
            lambda: slow.to_here(),
            lambda: rpc.rpc_async("w1", bodies.ablock).wait(),
            lambda: ref.rpc_sync().block(),
        ]
        waiting = [asyncio.ensure_future(asyncio.to_thread(verb)) for verb in verbs]
        await running("w1", 4)
        children["w1"].kill()
        killed = time.monotonic()
        for future in waiting:
            await fails_soon(future, killed, children["w1"])


async def test_nested_call_to_a_dead_worker_reaches_the_first_caller() -> None:
    """The error of a handler whose own call was lost travels on, and names the one that died."""
    async with group(3, ended=("w2",)) as (_, children):
        call = rpc.call("w1", bodies.call_other, "w2", 60.0)
        await running("w2", 1)
        children["w2"].kill()
        killed = time.monotonic()
        await fails_soon(call, killed, children["w2"])


async def test_members_without_a_connection_learn_of_a_death() -> None:
    """The leader tells the others, also of a worker that never called or was called."""
    async with group(3, ended=("w2",)) as (worker, children):
        events = worker.events()
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        children["w2"].kill()
        event = await asyncio.wait_for(waiting, SOON * busy())
        assert isinstance(event, rpc.events.WorkerLost)
        assert event.worker.name == "w2"
        await events.aclose()
        assert await rpc.call("w1", lost_here_soon) == ["w2"]
        await worker.shutdown()
        assert await children["w1"].ahear() == ["w2"]


def lost_here_soon() -> list[str]:
    """Names of the lost, once there are any."""
    lost = rpc.current()._node.group.lost
    wait_for(lambda: lost, SOON * busy())
    return [info.name for info in lost.values()]


async def test_death_of_the_leader_is_survived() -> None:
    """The others still call each other, leave in bounded time and say who was lost."""
    with processes() as children, meeting_file() as init_method:
        for place in places(3, init_method):
            children.start(place, leave_after_the_leader)
        for child in children:
            assert await child.ahear() == "ready"
        children["w0"].kill()
        killed = time.monotonic()
        for name in ("w1", "w2"):
            assert await children[name].ahear() == (["w0"], 3)
        assert time.monotonic() - killed < 5 * busy()
        await asyncio.to_thread(lambda: children.check_ended(but=("w0",)))


def leave_after_the_leader(place: Place, link: Link) -> tuple[list[str], int]:
    """Body: wait for the leader's death, call the other survivor, leave."""
    place.init_rpc()
    rpc.rpc_sync("w0", bodies.add, args=(1, 1))
    link.tell("ready")
    with pytest.raises(rpc.PeerLost):
        rpc.rpc_sync("w0", bodies.block)
    result = rpc.rpc_sync({"w1": "w2", "w2": "w1"}[place.name], bodies.add, args=(1, 2))
    return [info.name for info in rpc.shutdown().lost], result


@pytest.mark.slow
async def test_stopped_process_and_handler_that_keeps_the_interpreter_are_not_dead() -> None:
    """SIGSTOP for seconds, or a loop that cannot run for seconds, with connections coming in meanwhile, only delays."""
    async with group(4) as (worker, children):
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        held = rpc.call("w2", bodies.hold_the_interpreter, 4.0)
        await children["w1"].stop()
        try:
            late = [rpc.call(name, bodies.add, 2, 2) for name in ("w1", "w2")]
            through = [rpc.call("w3", bodies.call_other, name, 0.0) for name in ("w1", "w2")]
            assert await rpc.call("w3", bodies.add, 3, 3) == 6
            assert await asyncio.wait_for(held, LIMIT) >= 4.0
            assert not late[0].done() and not through[0].done()
        finally:
            children["w1"].kill(signal.SIGCONT)
        assert await asyncio.wait_for(asyncio.gather(*late), LIMIT) == [4, 4]
        await asyncio.wait_for(asyncio.gather(*through), LIMIT)
        assert (await worker.shutdown()).lost == ()


async def test_death_is_seen_although_a_forked_child_holds_the_sockets() -> None:
    """A grandchild that has copies of all descriptors does not hide the death of its parent."""
    async with group(2, ended=("w1",)) as (_, children):
        grandchild = await rpc.call("w1", bodies.fork_and_hold_sockets, 60.0)
        try:
            call = rpc.call("w1", bodies.ablock)
            await running("w1", 1)
            children["w1"].kill()
            killed = time.monotonic()
            error = await fails_soon(call, killed, children["w1"])
            assert "process" in error.cause
            assert process_state(grandchild) not in ("", "Z")
        finally:
            os.kill(grandchild, signal.SIGKILL)
            await wait_for_async(lambda: process_state(grandchild) in ("", "Z"))


def verbs_in_fork() -> dict[str, str]:
    """In a forked child: what each verb does; one line each."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, repr(try_verbs()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answer = file.read()
    assert os.waitpid(child, 0)[1] == 0
    found: dict[str, str] = eval(answer)
    return found


def try_verbs() -> dict[str, str]:
    """What each verb raises here, by name."""
    worker = rpc.current()
    verbs: dict[str, Callable[[], Any]] = {
        "call": lambda: rpc.call("w0", bodies.pid),
        "rpc_sync": lambda: rpc.rpc_sync("w0", bodies.pid),
        "rpc_async": lambda: rpc.rpc_async("w0", bodies.pid),
        "remote": lambda: rpc.remote("w0", bodies.pid),
        "stream": lambda: rpc.stream("w0", bodies.count, 1),
        "peer": lambda: rpc.peer("w0").call(bodies.pid),
        "worker.call": lambda: worker.call("w0", bodies.pid),
        "get_worker_info": lambda: rpc.get_worker_info("w0"),
    }
    found = {}
    for name, verb in verbs.items():
        try:
            found[name] = repr(verb())
        except Exception as error:
            found[name] = type(error).__name__
    return found


async def test_verbs_raise_in_a_forked_child_and_the_parent_is_well() -> None:
    """os.fork in a handler: every verb in the child raises, none hangs; the parent's connections are untouched."""
    async with group(2) as (_, children):
        found = await rpc.call("w1", verbs_in_fork)
        assert set(found.values()) <= {"WorkerClosed", "NotInitialized"}, found
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        assert await rpc.call("w1", bodies.pid) == children["w1"].pid


def children_of_a_handler() -> tuple[list[int], float]:
    """multiprocessing and a DataLoader with workers, forked from a handler."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(square, range(5))
    numbers: Any = torch.arange(8.0)  # a Dataset is whatever has a length and items
    loader: DataLoader[Any] = DataLoader(numbers, batch_size=4, num_workers=2, multiprocessing_context="fork")
    return squares, float(sum(batch.sum() for batch in loader))


def square(n: int) -> int:
    """Of n."""
    return n * n


@pytest.mark.slow
async def test_multiprocessing_and_data_loader_in_a_handler() -> None:
    """Forked children of a handler come and go without harm to its worker."""
    async with group(2):
        for _ in range(2):
            assert await rpc.call("w1", children_of_a_handler) == ([0, 1, 4, 9, 16], 28.0)
        assert await rpc.call("w1", bodies.add, 1, 2) == 3


async def test_handler_still_running_for_a_dead_caller_is_told() -> None:
    """A handler whose caller died can ask, and its worker leaves in good order."""
    async with group(2, call_and_wait, ended=("w1",)) as (_, children):
        assert await children["w1"].ahear() == "calling"
        await until(Asked.started.is_set)
        children["w1"].kill()
        await until(Asked.cancelled.is_set, SOON * busy())
        Asked.started.clear()
        Asked.cancelled.clear()


class Asked:
    """What the handler below has seen, in the test's process."""

    started = threading.Event()
    cancelled = threading.Event()


def until_cancelled() -> None:
    """Run until the caller has given up."""
    Asked.started.set()
    wait_for(rpc.cancelled)
    Asked.cancelled.set()


def call_and_wait(place: Place, link: Link) -> None:
    """Body: make a call that does not end."""
    place.init_rpc()
    call = rpc.rpc_async("w0", until_cancelled)
    link.tell("calling")
    call.wait()
