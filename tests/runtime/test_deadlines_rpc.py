"""Deadlines: where they come from, how they travel, and what happens when one passes."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import aiorpc
from aiorpc import Overloaded, RpcBackendOptions, RpcError, RpcTimeout, RpcUsageError, Worker
from aiorpc.errors import GroupError, WouldBlockLoop
from aiorpc.testing import Faults, cluster
from tests.conftest import LoopFactory
from tests.limits import busy
from tests.runtime.inside import act_as, act_no_more
from tests.runtime.waiting import LIMIT, until, wait_until


def left() -> float | None:
    return aiorpc.deadline()


async def left_async() -> float | None:
    return aiorpc.deadline()


async def for_ever() -> None:
    await asyncio.Event().wait()


def relay(to: str) -> float | None:
    result: float | None = aiorpc.rpc_sync(to, left)
    return result


async def relay_async(to: str, timeout: float | None) -> float | None:
    result: float | None = await aiorpc.peer(to, timeout=timeout).call(left_async)
    return result


async def relay_for_ever(to: str) -> None:
    await aiorpc.peer(to, timeout=0).call(for_ever)


class Flags:
    """What a handler saw, for the test."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.cancelled = threading.Event()
        self.release = threading.Event()


_flags: dict[str, Flags] = {}


@pytest.fixture
def flags() -> Flags:
    _flags["it"] = Flags()
    return _flags["it"]


async def tell_when_cancelled() -> None:
    _flags["it"].entered.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        _flags["it"].cancelled.set()
        raise


def ask_until_cancelled() -> None:
    _flags["it"].entered.set()
    while not aiorpc.cancelled():
        _flags["it"].release.wait(0.002)
    _flags["it"].cancelled.set()


async def block_the_loop() -> str:
    """Until the test says so: the reply is under way before the CANCEL is read."""
    _flags["it"].entered.set()
    assert _flags["it"].release.wait(LIMIT)
    return "late"


# --- where they come from ---------------------------------------------------------------------------------------------


async def test_the_default_is_the_workers_option() -> None:
    """rpc_timeout of the calling worker holds where nothing else is said; 60 s unless it is set."""
    assert RpcBackendOptions().rpc_timeout == 60.0
    async with cluster(2, options=[RpcBackendOptions(rpc_timeout=300), RpcBackendOptions(rpc_timeout=200)]) as workers:
        seconds = await workers[0].call("worker1", left)
        assert seconds is not None and 200 < seconds <= 300
        seconds = await workers[1].call("worker0", left_async)
        assert seconds is not None and 100 < seconds <= 200


async def test_a_peer_handle_has_its_own_timeout(pair: list[Worker]) -> None:
    """peer(timeout=) holds for all calls made through it."""
    peer = pair[0].peer("worker1", timeout=300.0)
    for handler in (left, left_async):
        seconds = await peer.call(handler)
        assert seconds is not None and 200 < seconds <= 300  # type: ignore[operator]
    with pytest.raises(RpcTimeout):
        await pair[0].peer("worker1", timeout=0.01).call(for_ever)


async def test_zero_means_no_limit() -> None:
    """0, for the worker, a handle or one call, sets no deadline; joining works with it too."""
    async with cluster(2, options=RpcBackendOptions(rpc_timeout=0)) as workers:
        assert await workers[0].call("worker1", left) is None
        assert await workers[0].peer("worker1", timeout=0).call(left_async) is None
        assert aiorpc.rpc_async is not None
    async with cluster(2) as workers:
        assert await workers[0].peer("worker1", timeout=0).call(left) is None

        def script() -> Any:
            act_as(workers[0])
            return aiorpc.rpc_sync("worker1", left, timeout=0), aiorpc.rpc_sync("worker1", left, timeout=300)

        unlimited, limited = await asyncio.to_thread(script)
        assert unlimited is None and 200 < limited <= 300


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), "soon", True])
async def test_a_timeout_that_makes_no_sense_is_refused(pair: list[Worker], timeout: Any) -> None:
    """Negative, NaN, and what is no number."""
    with pytest.raises(RpcUsageError, match="timeout must be a number of seconds"):
        pair[0].peer("worker1", timeout=timeout)


# --- how they travel --------------------------------------------------------------------------------------------------


async def test_nested_calls_inherit_what_is_left(trio: list[Worker]) -> None:
    """A nested call has the time its caller has left, blocking or awaited, and may only ask for less."""
    peer = trio[0].peer("worker1", timeout=60.0)
    awaited = [peer.call(relay_async, "worker2", timeout) for timeout in (None, 0)]
    for nested in (peer.call(relay, "worker2"), *awaited):
        seconds = await nested
        assert seconds is not None and 20 < seconds < 60
    seconds = await peer.call(relay_async, "worker2", 1.0)
    assert seconds is not None and seconds <= 1.0
    assert (await trio[0].peer("worker1", timeout=0).call(relay_async, "worker2", 0)) is None


async def test_a_whole_chain_ends_when_the_first_deadline_passes(trio: list[Worker], flags: Flags) -> None:
    """The nested call is cancelled too, though it had no timeout of its own."""
    with pytest.raises(RpcTimeout):
        await trio[0].peer("worker1", timeout=0.05).call(relay_for_ever, "worker2")
    await until(lambda: not any(worker.pending_calls() for worker in trio))


@pytest.mark.parametrize("retries", [0, 3])
async def test_work_that_outlives_its_handler_inherits_nothing(pair: list[Worker], retries: int) -> None:
    """A background task that a handler started makes calls without the handler's deadline, also with retries."""
    await pair[0].peer("worker1", timeout=20.0).call(start_background, retries)
    assert await asyncio.wait_for(_background.pop(), LIMIT) == pytest.approx(60, abs=20)


_background: list[asyncio.Task[Any]] = []


async def start_background(retries: int) -> None:
    async def background() -> Any:
        await until(lambda: not aiorpc.current().statistics().calls_running)
        return await aiorpc.peer("worker0", retries=retries).call(left_async)

    _background.append(asyncio.ensure_future(background()))


# --- when they pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.1])
async def test_short_deadlines_fire_in_time(pair: list[Worker], seconds: float) -> None:
    """Also of 1 ms: not before, and not much later."""
    await pair[0].call("worker1", left)
    late = []
    for _ in range(5):
        start = time.monotonic()
        with pytest.raises(RpcTimeout):
            await pair[0].peer("worker1", timeout=seconds).call(for_ever)
        late.append(time.monotonic() - start - seconds)
    assert min(late) >= -0.001
    assert min(late) < 0.05 * busy(), late  # the best of five: the machine may be busy


async def test_the_error_says_who_what_and_how_long(pair: list[Worker]) -> None:
    """RpcTimeout has fields and is a TimeoutError; its text has the line that made the call."""
    with pytest.raises(RpcTimeout) as caught:
        await pair[0].peer("worker1", timeout=0.02).call(for_ever)
    error = caught.value
    assert error.worker == "worker1" and error.function.endswith("for_ever") and error.seconds == pytest.approx(0.02)
    assert isinstance(error, TimeoutError) and isinstance(error, aiorpc.RpcError)
    assert all(part in str(error) for part in ("for_ever", "'worker1'", "0.02 s", __file__))


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_call_of_a_call_whose_time_was_over_had_none(pair: list[Worker], flags: Flags, retries: int) -> None:
    """The error says that the time was over before, and whose; how long the call had is 0 s, and not less."""
    while not flags.entered.is_set():  # one whose time is up before that, on a busy machine, is not run
        with pytest.raises(RpcTimeout):
            await pair[0].peer("worker1", timeout=0.05).call(call_when_time_is_up, retries)
    await until(lambda: _late)
    error = _late.pop()
    assert isinstance(error, RpcTimeout) and error.seconds == 0.0
    text = r"\(0 s, as the time of the call that it is part of was over before it was made\): the call of .*:left on"
    assert re.search(text, str(error)), str(error)


_late: list[BaseException | None] = []


def call_when_time_is_up(retries: int) -> None:
    _flags["it"].entered.set()
    wait_until(lambda: aiorpc.deadline() == 0.0)
    call = aiorpc.peer("worker0", timeout=30, retries=retries).call(left)
    wait_until(call.done)
    _late.append(call.exception())


async def test_a_blocking_wait_gets_the_same_error(pair: list[Worker]) -> None:
    """rpc_sync in a thread raises RpcTimeout too; Future.wait(timeout) leaves the call alone."""

    def script() -> bool:
        with pytest.raises(RpcTimeout, match="for_ever"):
            pair[0].peer("worker1", timeout=0.02).call(for_ever).wait()
        call = pair[0].call("worker1", for_ever)
        with pytest.raises(RpcTimeout, match=r"waited 0\.01 s"):
            call.wait(0.01)
        return call.done() or not call.cancel()

    assert not await asyncio.to_thread(script)


def blocking(verb: Callable[[Worker, aiorpc.RRef[Any]], Any], worker: Worker, rref: aiorpc.RRef[Any]) -> list[Any]:
    """The errors of a blocking verb, in a thread of its own: before it has ended, this returns."""
    errors: list[Any] = []

    def use() -> None:
        act_as(worker)
        try:
            errors.extend(outcome.error for outcome in verb(worker, rref))
        except RpcError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive() and errors
    return errors


def fail_once(worker: Worker) -> Any:
    """A call with retries whose first try fails: the loop is to end the pause, which is over long before the time."""
    with Faults(worker) as faults:
        faults.fail("call", times=1, error=Overloaded("full"))
        return worker.peer("worker1", timeout=0.3, retries=5, backoff=0.001).call(left)


VERBS: dict[str, Callable[[Worker, aiorpc.RRef[Any]], Any]] = {
    "rpc_sync": lambda worker, rref: aiorpc.rpc_sync("worker1", left, timeout=0.3),
    "oneself": lambda worker, rref: aiorpc.rpc_sync("worker0", left, timeout=0.3),
    "wait": lambda worker, rref: worker.peer("worker1", timeout=0.3).call(left).wait(),
    "wait for longer": lambda worker, rref: worker.peer("worker1", timeout=0.3).call(left).wait(LIMIT),
    "then": lambda worker, rref: (
        worker.peer("worker1", timeout=0.3).call(left).then(lambda future: future.value()).wait()
    ),
    "wait_all": lambda worker, rref: aiorpc.wait_all([worker.peer("worker1", timeout=0.3).call(left)]),
    "retries": lambda worker, rref: worker.peer("worker1", timeout=0.3, retries=3).call(left).wait(),
    "in a pause": lambda worker, rref: fail_once(worker).wait(),
    "to_here": lambda worker, rref: rref.to_here(timeout=0.3),
    "a reference": lambda worker, rref: rref.rpc_sync(timeout=0.3).upper(),
    "an object": lambda worker, rref: worker.peer("worker1", timeout=0.3).object("it").rpc_sync().upper(),
    "a group": lambda worker, rref: worker.group("*", timeout=0.3).rpc_sync(left),
    "objects": lambda worker, rref: worker.group("*", timeout=0.3).object("it").rpc_sync().upper(),
    "references": lambda worker, rref: worker.group(["worker1"]).remote(str).to_here(timeout=0.3),
}


@contextmanager
def two_workers(runner: asyncio.Runner) -> Iterator[list[Worker]]:
    """On that loop, which runs for their joining and leaving only, and where a test has it run."""
    context = cluster(2)
    workers = runner.run(context.__aenter__())
    try:
        yield workers
    finally:
        runner.run(context.__aexit__(None, None, None))


def check_that_all_goes_on(runner: asyncio.Runner, workers: list[Worker]) -> None:
    """Once the loop runs again: no call is under way, and another one is answered."""
    runner.run(until(lambda: not workers[0].pending_calls()))
    assert runner.run(awaited(workers[0].call("worker1", len, "abc"))) == 3
    runner.run(until(workers[1].is_idle))


@pytest.mark.parametrize("verb", VERBS)
def test_the_time_of_a_blocking_verb_passes_without_the_loop(loop_factory: LoopFactory, verb: str) -> None:
    """Where nobody runs the loop, the thread that waits ends the call itself, and says so; then all goes on."""
    with asyncio.Runner(loop_factory=loop_factory) as runner, two_workers(runner) as workers:
        rref = runner.run(confirmed(workers[0].remote("worker1", str, "value")))
        errors = blocking(VERBS[verb], workers[0], rref)
        for error in errors:
            assert isinstance(error, RpcTimeout) and (error.seconds, error.function != "") == (0.3, True), errors
            assert error.worker in ("worker0", "worker1")
            assert "set timeout (0.3 s)" in str(error) and "'worker0', which takes the answers, does not" in str(error)
        check_that_all_goes_on(runner, workers)
        del rref


async def confirmed(rref: aiorpc.RRef[Any]) -> aiorpc.RRef[Any]:
    """Once its value is there."""
    assert await rref == "value"
    return rref


async def awaited(future: aiorpc.Future[Any]) -> Any:
    """Its value."""
    return await future


async def first(outcomes: AsyncIterable[tuple[str, aiorpc.types.Outcome[Any]]]) -> Any:
    """The first value of a group's call."""
    async for _, outcome in outcomes:
        return outcome.result()


AWAITED: dict[str, Callable[[Worker, aiorpc.RRef[Any]], Any]] = {
    "a call": lambda worker, rref: worker.peer("worker1", timeout=0.3).call(left),
    "oneself": lambda worker, rref: worker.peer("worker0", timeout=0.3).call(left),
    "then": lambda worker, rref: worker.peer("worker1", timeout=0.3).call(left).then(lambda future: future.value()),
    "gather": lambda worker, rref: asyncio.gather(worker.peer("worker1", timeout=0.3).call(left)),
    "collect_all": lambda worker, rref: aiorpc.collect_all([worker.peer("worker1", timeout=0.3).call(left)]).then(
        lambda future: future.value()[0].value()
    ),
    "retries": lambda worker, rref: worker.peer("worker1", timeout=0.3, retries=3).call(left),
    "in a pause": lambda worker, rref: fail_once(worker),
    "a reference": lambda worker, rref: rref.rpc_async(timeout=0.3).upper(),
    "an object": lambda worker, rref: worker.peer("worker1", timeout=0.3).object("it").upper(),
    "a group": lambda worker, rref: worker.group("*", timeout=0.3).call(left).then(lambda done: done.value().values()),
    "outcomes": lambda worker, rref: first(worker.group("*", timeout=0.3).call(left)),
}


@pytest.mark.parametrize("verb", AWAITED)
def test_the_time_of_a_call_passes_where_it_is_awaited_on_another_loop(loop_factory: LoopFactory, verb: str) -> None:
    """As a test does that is given workers of another loop, which nobody runs: it is told so, and does not hang."""

    async def use(worker: Worker, rref: aiorpc.RRef[Any]) -> Any:
        async with asyncio.timeout(LIMIT):
            return await AWAITED[verb](worker, rref)

    runners = asyncio.Runner(loop_factory=loop_factory), asyncio.Runner(loop_factory=loop_factory)
    with runners[0] as runner, runners[1] as other, two_workers(runner) as workers:
        rref = runner.run(confirmed(workers[0].remote("worker1", str, "value")))
        with pytest.raises((RpcTimeout, GroupError)) as caught:
            other.run(use(workers[0], rref))
        for error in caught.value.exceptions if isinstance(caught.value, GroupError) else [caught.value]:
            assert isinstance(error, RpcTimeout) and error.seconds == 0.3
            assert "'worker0', which takes the answers, does not run" in str(error)
        check_that_all_goes_on(runner, workers)
        del rref


async def one(items: AsyncIterable[Any]) -> Any:
    """The first of them."""
    async for item in items:
        return item


async def joined(queue: Any) -> None:
    """Once all is done that was put, which is nothing."""
    await queue.put(1)
    await queue.join()


#: What is awaited on another loop, without a limit that would pass there.
IDLE: dict[str, Callable[[Worker, aiorpc.RRef[Any], Any], Any]] = {
    "a call": lambda worker, rref, queue: worker.call("worker1", left),
    "without a deadline": lambda worker, rref, queue: worker.peer("worker1", timeout=0).call(left),
    "retries": lambda worker, rref, queue: worker.peer("worker1", retries=3).call(left),
    "then": lambda worker, rref, queue: worker.call("worker1", left).then(lambda future: future.value()),
    "collect_all": lambda worker, rref, queue: aiorpc.collect_all([worker.call("worker1", left)]),
    "a reference": lambda worker, rref, queue: rref,
    "its own value": lambda worker, rref, queue: worker.remote("worker0", left),
    "a group": lambda worker, rref, queue: worker.group("*").call(left),
    "outcomes": lambda worker, rref, queue: first(worker.group("*").call(left)),
    "map": lambda worker, rref, queue: one(worker.group("*").map(len, ["a", "b"])),
    "any": lambda worker, rref, queue: worker.group("*").any(left),
    "a barrier": lambda worker, rref, queue: worker.group("*").barrier(),
    "a stream": lambda worker, rref, queue: one(worker.stream("worker1", range, 3)),
    "a stream of a group": lambda worker, rref, queue: one(worker.group("*").stream(range, 3)),
    "publish": lambda worker, rref, queue: worker.publish("policy", 1),
    "unpublish": lambda worker, rref, queue: worker.unpublish("policy"),
    "subscribe": lambda worker, rref, queue: one(worker.subscribe("policy", timeout=0)),
    "put": lambda worker, rref, queue: queue.put(1),
    "get": lambda worker, rref, queue: queue.get(),
    "get_many": lambda worker, rref, queue: queue.get_many(2),
    "join": lambda worker, rref, queue: joined(queue),
}


@pytest.mark.parametrize("verb", IDLE)
def test_what_can_never_come_on_another_loop_is_refused(loop_factory: LoopFactory, verb: str) -> None:
    """The loop that has to bring it is this thread's, which runs another one: that is said, and nobody hangs."""

    async def make(worker: Worker) -> Any:
        token = act_as(worker)
        try:
            return aiorpc.Queue("items")
        finally:
            act_no_more(token)

    async def use(worker: Worker, rref: aiorpc.RRef[Any], queue: Any) -> Any:
        async with asyncio.timeout(LIMIT):
            return await IDLE[verb](worker, rref, queue)

    runners = asyncio.Runner(loop_factory=loop_factory), asyncio.Runner(loop_factory=loop_factory)
    with runners[0] as runner, runners[1] as other, two_workers(runner) as workers:
        rref = runner.run(confirmed(workers[0].remote("worker1", str, "value")))
        queue = runner.run(make(workers[0]))
        with pytest.raises(WouldBlockLoop, match="would never end"):
            other.run(use(workers[0], rref, queue))
        check_that_all_goes_on(runner, workers)
        del rref


async def test_the_time_of_a_blocking_verb_passes_while_the_loop_is_blocked(pair: list[Worker]) -> None:
    """The thread that waits says that it is late; the callee is told as soon as the loop goes on."""
    rref = pair[0].remote("worker1", str, "value")
    (error,) = blocking(VERBS["rpc_sync"], pair[0], rref)  # this blocks the loop
    assert isinstance(error, RpcTimeout) and error.seconds == 0.3
    assert "'worker0', which takes the answers, has not come to it for " in str(error)
    assert pair[0].statistics().calls_timed_out == 1 and await rref == "value"
    await until(pair[1].is_idle)
    (error,) = blocking(lambda worker, _: worker.wait_for("worker1", timeout=0.3).wait(), pair[0], rref)
    assert "has joined, and has not answered within 0.3 s. The event loop of worker 'worker0'" in str(error)


async def test_the_callee_is_told(pair: list[Worker], flags: Flags) -> None:
    """A coroutine is cancelled; a thread that asks learns of it; nothing is left running."""
    for handler in (tell_when_cancelled, ask_until_cancelled):
        flags.entered.clear()
        flags.cancelled.clear()
        while not flags.entered.is_set():  # one whose time is up before that, on a busy machine, is not run
            with pytest.raises(RpcTimeout):
                await pair[0].peer("worker1", timeout=0.05).call(handler)
        await until(flags.cancelled.is_set)
    await until(lambda: pair[1].is_idle())


async def time_out_beside(worker: Worker, handler: Any, flags: Flags) -> int:
    """Calls of a handler that blocks its loop, until the time of one is up that runs; how many. It may answer then."""
    calls = 0
    while not flags.entered.is_set():  # one whose time is up before that, on a busy machine, is not run
        calls += 1
        with pytest.raises(RpcTimeout):
            await worker.peer("worker1", timeout=0.05).call(handler)
    flags.release.set()
    return calls


async def test_a_late_answer_is_dropped_and_counted(apart: list[Worker], flags: Flags) -> None:
    """An answer that comes after the deadline changes nothing but a counter."""
    await apart[0].call("worker1", left)
    calls = await time_out_beside(apart[0], block_the_loop, flags)
    await until(lambda: apart[0].statistics().late_answers >= 1)
    assert apart[0].statistics().calls_timed_out == calls
    assert await apart[0].call("worker1", len, "abc") == 3


async def test_references_in_a_late_answer_are_released(apart: list[Worker], flags: Flags) -> None:
    """The owner does not keep a value for an answer that nobody took."""
    await apart[0].call("worker1", left)
    await time_out_beside(apart[0], late_reference, flags)
    await until(lambda: apart[0].statistics().late_answers >= 1)
    await until(lambda: all(worker._node.references.counts().owned == 0 for worker in apart))


async def late_reference() -> Any:
    await block_the_loop()
    return aiorpc.RRef("late")


async def test_thousands_of_deadlines_cost_no_task_each(pair: list[Worker]) -> None:
    """Many calls with different deadlines all end in time, in the order of their deadlines."""
    ended: list[int] = []

    async def wait_for(number: int) -> None:
        with pytest.raises(RpcTimeout):
            await pair[0].peer("worker1", timeout=0.3 - number * 0.0001).call(for_ever)
        ended.append(number)

    tasks = [asyncio.ensure_future(wait_for(number)) for number in range(0, 2000, 40)]
    await asyncio.gather(*tasks)
    assert sorted(ended) == list(range(0, 2000, 40))
    await until(lambda: not pair[1].pending_calls())


async def test_a_call_that_was_never_started_is_not_run(flags: Flags) -> None:
    """A call whose deadline passed in the queue does not run its function."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=1)) as workers:
        busy = workers[0].call("worker1", hold)
        await until(flags.entered.is_set)
        with pytest.raises(RpcTimeout):
            await workers[0].peer("worker1", timeout=0.02).call(set_cancelled)
        flags.release.set()
        await busy
        assert await workers[0].call("worker1", len, "abc") == 3
        assert not flags.cancelled.is_set()


async def test_who_waits_for_a_value_hears_that_the_time_for_making_it_was_up(flags: Flags) -> None:
    """At once, whatever time it has itself, and whatever it wants of the value: the owner may never answer."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=1, rpc_timeout=LIMIT)) as workers:
        busy = workers[0].call("worker1", hold)
        await until(flags.entered.is_set)
        with Faults(workers[0]) as faults:
            faults.drop("cancel")
            value = workers[0].peer("worker1", timeout=0.02).remote(set_cancelled)

            async def fetched() -> Any:
                return await value

            async def streamed() -> Any:
                return [each async for each in value.stream().items()]

            waits = [asyncio.ensure_future(wait()) for wait in (fetched, streamed)]
            waits.append(asyncio.ensure_future(value.rpc_async(timeout=0).method()))
            waits.append(asyncio.ensure_future(value.remote().method().rpc_async(timeout=0).another()))
            for each in waits:
                with pytest.raises(RpcTimeout, match=r"never created: .*set timeout \(0\.02 s\)") as raised:
                    await each
                assert (raised.value.worker, raised.value.seconds) == ("worker1", 0.02)
            assert not busy.done()
            flags.release.set()
        await busy
        assert not flags.cancelled.is_set()


def hold() -> bool:
    _flags["it"].entered.set()
    return _flags["it"].release.wait(30)


def set_cancelled() -> None:
    _flags["it"].cancelled.set()
