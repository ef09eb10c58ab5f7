"""A worker that leaves closes its door first: what begins then is refused, what its program waits for has a grace."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from torch.distributed import HashStore, Store

import aiorpc
from aiorpc import PeerLeft, RpcBackendOptions, RpcError, Worker, WorkerClosed
from aiorpc.errors import NotInitialized
from aiorpc.testing import cluster
from tests.ports import free_port
from tests.runtime.inside import act_as, act_no_more, set_bounds
from tests.runtime.waiting import LIMIT, until

NO_LIMIT = RpcBackendOptions(rpc_timeout=0)  # else a call's own end would hide that it is waited for
KINDS = pytest.mark.parametrize("kind", ["fixed", "free"])
ACTORS = pytest.mark.parametrize("actor", ["task", "thread"])


class Gate:
    """Keeps handlers until it is opened. entered: how many wait there."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = 0

    async def wait(self) -> None:
        self.entered += 1
        await self.open.wait()


_gates: dict[str, Gate] = {}


@pytest.fixture
def gate() -> Gate:
    _gates["it"] = Gate()
    return _gates["it"]


async def wait_at_the_gate() -> str:
    await _gates["it"].wait()
    return "done"


async def for_ever() -> None:
    await asyncio.Event().wait()


async def count(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


async def nothing_comes() -> AsyncIterator[int]:
    await asyncio.Event().wait()
    yield 0


async def relay(to: str) -> int:
    """A handler that calls another worker once the gate opens."""
    await _gates["it"].wait()
    return int(await aiorpc.call(to, abs, -3))


async def call_back(to: str) -> int:
    return int(await aiorpc.call(to, abs, -4))


async def relay_and_back(to: str) -> int:
    """As `relay`, and what it calls calls this worker."""
    await _gates["it"].wait()
    return int(await aiorpc.call(to, call_back, aiorpc.current().name))


class Party:
    """A program that leaves, and the worker that it calls.

    others: all but the first; so there are several, whoever has left, and none is taken for the current one.
    """

    def __init__(self, leaver: Worker, *others: Worker) -> None:
        self.leaver, self.other, self.others = leaver, others[0], others

        self._queues: dict[str, Any] = {}

    def queue(self, name: str) -> Any:
        """Made once: a handle looks for its worker again when that has left."""
        return self._queues.setdefault(name, aiorpc.queue(name, owner=self.other.name))


# What is begun again and again: each gives what is awaited, or waited for.
QUICK: dict[str, Callable[[Party], Any]] = {
    "call": lambda party: party.leaver.call(party.other.name, abs, -3),
    "retried": lambda party: party.leaver.peer(party.other.name, retries=3).call(abs, -3),
    "group": lambda party: party.leaver.group([party.other.name]).call(abs, -3),
    "remote": lambda party: party.leaver.remote(party.other.name, dict),
    "stream": lambda party: party.leaver.stream(party.other.name, count, 3),
    "put": lambda party: party.queue("endless").put(1),
    "get": lambda party: party.queue("full").get(),
    "qsize": lambda party: party.queue("full").qsize(),
    "publish": lambda party: party.leaver.publish("mine", 1),
    "subscribe": lambda party: party.leaver.subscribe("theirs"),
    "wait_for": lambda party: party.leaver.wait_for(party.other.name),
}
# What waits for ever, and what the log calls it; "" for what no leaving waits for.
PARKED: dict[str, tuple[Callable[[Party], Any], str]] = {
    "call": (lambda party: party.leaver.call(party.other.name, for_ever), "for_ever on worker 'worker1'"),
    "retried": (
        lambda party: party.leaver.peer(party.other.name, retries=3).call(for_ever),
        "for_ever on worker 'worker1'",
    ),
    "stream": (lambda party: party.leaver.stream(party.other.name, nothing_comes), "the stream of"),
    "get": (lambda party: party.queue("empty").get(), "get() on queue 'empty' of worker 'worker1'"),
    "put": (lambda party: party.queue("full").put(1), "put() on queue 'full' of worker 'worker1'"),
    "join": (lambda party: party.queue("full").join(), "join_items on worker 'worker1'"),
    "subscription": (lambda party: party.leaver.subscribe("nothing"), ""),
    "barrier": (lambda party: party.leaver.group(["worker0", "worker1"]).barrier(), ""),
}


@contextlib.asynccontextmanager
async def party(kind: str) -> AsyncIterator[Party]:
    """Workers without a limit for calls, queues at the second one, and a name that it publishes."""
    store: Store = HashStore()
    async with cluster(3, dynamic=kind == "free", store=store, options=NO_LIMIT) as (leaver, other, third):
        set_bounds(leaver, grace=0.05)
        token = act_as(other)
        try:
            queues = [aiorpc.Queue[Any]("empty"), aiorpc.Queue("full", maxsize=1), aiorpc.Queue("endless")]
            await queues[1].put(0)
            await other.publish("theirs", 1)
        finally:
            act_no_more(token)
        await leaver.wait_for(other.name)
        yield Party(leaver, other, third)


async def awaited(begun: Any) -> None:
    if hasattr(begun, "__anext__"):
        async with begun if hasattr(begun, "__aenter__") else contextlib.aclosing(begun):
            async for _ in begun:
                break
    else:
        await begun


def waited_for(begun: Any) -> None:
    if hasattr(begun, "__next__"):
        with begun:
            next(begun)
    elif hasattr(begun, "wait"):
        begun.wait()
    else:
        begun.to_here()


def start(actor: str, party: Party, make: Callable[[Party], Any], again: Callable[[], bool]) -> asyncio.Future[Any]:
    """Have a task or a thread of the program begin that again and again; the error that it ends with."""

    async def in_task() -> BaseException:
        act_as(party.leaver)
        try:
            while True:
                await awaited(make(party))
                await asyncio.sleep(0)  # what is there already is given at once
                if not again():
                    raise AssertionError("nothing has stopped it")
        except RpcError as error:
            return error

    def in_thread() -> BaseException:
        act_as(party.leaver)
        try:
            while True:
                waited_for(make(party))
                if not again():
                    raise AssertionError("nothing has stopped it")
        except RpcError as error:
            return error

    return asyncio.ensure_future(in_task() if actor == "task" else asyncio.to_thread(in_thread))


async def leave(party: Party, kind: str) -> None:
    leaving = [party.leaver.shutdown(), *(each.shutdown() for each in party.others if kind == "fixed")]
    for report in await asyncio.wait_for(asyncio.gather(*leaving), LIMIT):
        assert not report.timed_out


@KINDS
@ACTORS
@pytest.mark.parametrize("verb", QUICK)
async def test_what_a_program_begins_back_to_back_keeps_nobody(verb: str, actor: str, kind: str) -> None:
    """Once the door is closed it is refused, whoever begins it and in whatever group."""
    async with party(kind) as here:
        rounds = 0

        def again() -> bool:
            nonlocal rounds
            rounds += 1
            return True

        if verb == "get":
            here.other._node.engine.tasks.spawn(refill(here.other))
        begun = start(actor, here, QUICK[verb], again)
        await until(lambda: rounds > 2 or begun.done())
        assert not begun.done(), begun.result()
        await leave(here, kind)
        # A queue looks for another worker of this process once its own has left.
        assert isinstance(await asyncio.wait_for(begun, LIMIT), (WorkerClosed, NotInitialized))


async def refill(owner: Worker) -> None:
    token = act_as(owner)
    queue = aiorpc.queue("full", owner=owner.name)
    act_no_more(token)
    with contextlib.suppress(RpcError):
        while True:
            await queue.put(0)


@KINDS
@ACTORS
@pytest.mark.parametrize("verb", PARKED)
async def test_what_a_program_waits_for_ends_with_its_worker(
    verb: str, actor: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With WorkerClosed, a grace after its door was closed; the log says what it was, and with whom, and since when."""
    make, name = PARKED[verb]
    if kind == "fixed" and verb in ("call", "retried"):
        return await what_a_fixed_group_runs_is_awaited()
    async with party(kind) as here:
        begun = start(actor, here, make, lambda: False)
        pending = lambda: here.leaver.pending_calls() or not name  # noqa: E731
        await until(pending)
        await asyncio.sleep(0)
        assert not begun.done(), begun.result()
        await leave(here, kind)
        assert isinstance(await asyncio.wait_for(begun, LIMIT), (WorkerClosed, PeerLeft) if not name else WorkerClosed)
        if name:
            assert "worker worker0 leaves. After 0.05 s its program still waited for this" in caplog.text
            assert name in caplog.text and ", since " in caplog.text
    return None


async def what_a_fixed_group_runs_is_awaited() -> None:
    """A function that runs at a member is what that has accepted: all wait for it, and its caller has the value."""
    gate = _gates["it"] = Gate()
    async with party("fixed") as here:
        call = here.leaver.call(here.other.name, wait_at_the_gate)
        await until(lambda: gate.entered)
        leaving = asyncio.ensure_future(leave(here, "fixed"))
        await until(lambda: here.leaver._node.engine.lifetime.shut)
        await asyncio.wait((leaving,), timeout=0.2)  # several times the grace
        assert not leaving.done()
        gate.open.set()
        await leaving
        assert await call == "done"


@KINDS
@pytest.mark.parametrize("handler", [relay, relay_and_back])
async def test_what_was_accepted_goes_on_behind_the_door(handler: Any, kind: str, gate: Gate) -> None:
    """A handler that runs as the door closes calls others, and these call back: that is part of its own call."""
    async with party(kind) as here:
        call = here.other.call(here.leaver.name, handler, here.other.name)
        await until(lambda: gate.entered)
        leaving = asyncio.ensure_future(leave(here, kind))
        await until(lambda: here.leaver._node.engine.lifetime.shut)
        with pytest.raises(WorkerClosed, match="worker 'worker0' is leaving"):
            here.leaver.call(here.other.name, abs, -3)
        gate.open.set()
        await leaving
        assert await call == (3 if handler is relay else 4)


@pytest.mark.parametrize("verb", ["call", "stream", "group", "retried"])
async def test_what_others_send_behind_the_door_is_refused(verb: str, gate: Gate) -> None:
    """In a group without a size: it has not run, retries go on to another worker, and groups count it as gone."""
    async with cluster(3, dynamic=True, options=NO_LIMIT) as (leaver, caller, third):
        assert await caller.call("worker0", abs, -3) == 3
        held = caller.call("worker0", wait_at_the_gate)
        await until(lambda: gate.entered)
        leaving = asyncio.ensure_future(leaver.shutdown())
        await until(lambda: leaver._node.engine.lifetime.parting)
        if verb == "call":
            with pytest.raises(PeerLeft, match=r"worker0 \(rank 0.* is draining: it takes no more calls"):
                await caller.call("worker0", wait_at_the_gate)
        elif verb == "stream":
            with pytest.raises(PeerLeft, match="is draining"):
                async for _ in caller.stream("worker0", count, 3):
                    pass
        elif verb == "group":
            outcomes = await caller.group(["worker0", "worker2"], quorum=1).call(abs, -3)
            everyone = await caller.group(["worker0", "worker2"]).call(abs, -3)
            assert everyone.lost == ("worker0",) and everyone.answers == {"worker2": 3} and outcomes.answers
        else:
            call = caller.peer("worker0", retries=1000, backoff=(0.01, 0.01)).call(abs, -3)
            await until(lambda: caller.statistics().calls_retried >= 2)
            assert not call.done()
            call.cancel()
        assert gate.entered == 1
        gate.open.set()
        await asyncio.wait_for(leaving, LIMIT)
        assert await held == "done" and await third.call("worker1", abs, -1) == 1


async def test_before_all_have_entered_everything_goes_on(gate: Gate) -> None:
    """In a group of fixed size who has entered serves the others, and its own program's threads may go on, too."""
    async with party("fixed") as here:
        leaving = asyncio.ensure_future(here.leaver.shutdown())
        await until(lambda: here.leaver._node.group.departure.entered)
        assert await here.leaver.call("worker1", abs, -3) == 3
        assert await here.other.call("worker0", relay_at_once, "worker1") == 3
        assert not leaving.done()
        await asyncio.gather(leaving, *(each.shutdown() for each in here.others))


async def relay_at_once(to: str) -> int:
    return int(await aiorpc.call(to, abs, -3))


@pytest.mark.usefixtures("server_made_once")
async def test_who_hosts_the_store_serves_until_the_others_have_gone(
    free_host: tuple[Worker, Worker], gate: Gate
) -> None:
    """It stays for their sake, so its door stays open as well; then it closes, and no thread of its own keeps it."""
    host, guest = free_host
    await until(lambda: len(host.worker_infos()) == 2)
    leaving = asyncio.ensure_future(host.shutdown())
    await until(lambda: host.leaving)
    assert await guest.call(host.name, abs, -3) == 3
    assert await host.call(guest.name, abs, -3) == 3
    stuck = host.call(host.name, for_ever)
    await guest.shutdown()
    await asyncio.wait_for(leaving, LIMIT)
    assert isinstance(stuck.exception(), WorkerClosed)


@pytest.fixture
async def free_host() -> AsyncIterator[tuple[Worker, Worker]]:
    where = f"tcp://127.0.0.1:{free_port()}"
    host = await aiorpc.init("host", init_method=where, options=NO_LIMIT)
    set_bounds(host, grace=0.05)
    guest = await aiorpc.init("guest", init_method=where, options=NO_LIMIT)
    try:
        yield host, guest
    finally:
        for each in (guest, host):
            await each.shutdown(graceful=False)


async def test_waits_in_threads_end_when_the_main_program_raises() -> None:
    """The block is left at once: `asyncio.run`, which waits for the threads of `to_thread`, comes to its end."""
    ended = threading.Event()

    def waits(party: Party) -> None:
        act_as(party.leaver)
        try:
            party.queue("empty").get().wait()
        finally:
            ended.set()

    store = HashStore()
    async with cluster(1, dynamic=True, store=store, options=NO_LIMIT) as (owner,):
        token = act_as(owner)
        queue: aiorpc.Queue[Any] = aiorpc.Queue("empty")
        act_no_more(token)
        with pytest.raises(KeyError):
            async with aiorpc.init("leaver", store=store, options=NO_LIMIT) as leaver:
                waiting = asyncio.ensure_future(asyncio.to_thread(waits, Party(leaver, owner)))
                await until(leaver.pending_calls)
                raise KeyError
        with pytest.raises(WorkerClosed):
            await asyncio.wait_for(waiting, LIMIT)
        assert ended.is_set()
        del queue
