"""Handlers: where each kind runs, and what it may do there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import (
    Future,
    RpcBackendOptions,
    RpcError,
    RpcUsageError,
    Worker,
    async_execution,
    batched,
)
from aiorpc.testing import cluster
from tests.runtime.waiting import LIMIT, until, wait_until


def thread_name() -> str:
    return threading.current_thread().name


async def loop_thread() -> int:
    return threading.get_ident()


def hands_back_a_coroutine() -> Any:
    return loop_thread()


class Box:
    """Methods of every kind, called through RRefs and by themselves."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, x: int) -> int:
        self.value += x
        return self.value

    async def add_later(self, x: int) -> int:
        await asyncio.sleep(0)
        self.value += x
        return self.value

    @async_execution
    def add_deferred(self, x: int) -> Future[int]:
        return later(self.value + x)

    @staticmethod
    @async_execution
    def static(x: int) -> Future[int]:
        return later(2 * x)

    @async_execution
    @staticmethod
    def static_outside(x: int) -> Future[int]:
        return later(3 * x)

    @classmethod
    @async_execution
    def make(cls, x: int) -> Future[str]:
        return later(f"{cls.__name__} {x}")

    @async_execution
    @classmethod
    def make_outside(cls, x: int) -> Future[str]:
        return later(f"{cls.__name__} {x}!")

    @batched(max_size=3)
    def both(self, xs: list[int]) -> list[int]:
        return [self.value + x for x in xs]

    def __call__(self, x: int) -> int:
        return self.value * x


def later(value: Any) -> Future[Any]:
    """A Future that another thread completes."""
    future: Future[Any] = Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@async_execution
def deferred(value: Any) -> Future[Any]:
    return later(value)


@async_execution
def deferred_torch(value: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@async_execution
def deferred_then(to: str, x: int) -> Any:
    return aiorpc.rpc_async(to, Box.static, (x,)).then(lambda done: done.value() + 1)


# --- where ------------------------------------------------------------------------------------------------------------


async def test_def_runs_in_a_thread_and_async_def_on_the_loop(pair: list[Worker]) -> None:
    """``def`` in the worker's pool, ``async def`` in the loop's thread; a coroutine handed back by ``def`` too."""
    assert (await pair[0].call("worker1", thread_name)).startswith("aiorpc-worker1-")
    assert await pair[0].call("worker1", loop_thread) == threading.get_ident()
    assert await pair[0].call("worker1", hands_back_a_coroutine) == threading.get_ident()


async def test_handlers_run_beside_each_other(pair: list[Worker]) -> None:
    """As many ``def`` handlers as there are threads run at once, and any number of coroutines."""
    barrier = threading.Barrier(16)
    _barriers["it"] = barrier
    results = await asyncio.gather(*(pair[0].call("worker1", meet) for _ in range(16)))
    assert sorted(results) == list(range(16))


_barriers: dict[str, threading.Barrier] = {}


def meet() -> int:
    return _barriers["it"].wait(30)


async def test_no_more_threads_than_the_option_says() -> None:
    """num_worker_threads bounds how many handlers run at once."""
    running: list[int] = []
    _running["now"], _running["most"] = 0, 0
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=3)) as workers:
        running += await asyncio.gather(*(workers[0].call("worker1", count_running) for _ in range(30)))
        assert workers[1].statistics().threads <= 3
    assert max(running) <= 3


async def test_one_caller_leaves_threads_to_others() -> None:
    """Its handlers block for ever in all threads that it may have, and more wait; another caller's call is run."""
    async with cluster(3, options=RpcBackendOptions(num_worker_threads=2)) as workers:
        with held() as (entered, release):
            blocking = [workers[0].call("worker2", hold_thread) for _ in range(8)]
            for _ in range(2):
                await asyncio.to_thread(entered.acquire, True, 30)
            statistics = workers[2].statistics()
            assert (statistics.threads, statistics.jobs_queued) == (2, 6)
            assert await workers[1].call("worker2", len, "abc") == 3
            assert not entered.acquire(False)
            release.set()
            assert await asyncio.gather(*blocking) == [True] * 8


async def test_callers_take_turns_with_threads() -> None:
    """With one thread in all a call of another worker does not come behind a hundred that are ahead of it."""
    async with cluster(3, options=RpcBackendOptions(num_worker_threads=1)) as workers:
        with held() as (entered, release):
            blocking = workers[0].call("worker2", hold_thread)
            await asyncio.to_thread(entered.acquire, True, 30)
            _running["now"] = 0
            many = [workers[0].call("worker2", count_running) for _ in range(100)]
            await until(lambda: workers[2].statistics().jobs_queued == 100)
            other = workers[1].call("worker2", len, "abc")
            await until(lambda: workers[2].statistics().jobs_queued == 101)
            release.set()
            await blocking
            await other
            assert sum(each.done() for each in many) < 100
            await asyncio.gather(*many)


async def test_who_waits_for_a_nested_call_leaves_its_thread() -> None:
    """Also to calls of the same worker: chains of blocking calls go deeper than one caller has threads."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=2)) as workers:
        assert await workers[0].call("worker1", nest, 12) == 12
        assert await asyncio.gather(*(workers[0].call("worker1", nest, 5) for _ in range(6))) == [5] * 6
        share = workers[1]._node.engine.shares.of(workers[0].id)
        await until(lambda: not share.claims)  # a thread answers before it has ended its job


_held: dict[str, Any] = {}


@contextlib.contextmanager
def held() -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Handlers that stay in their threads until they are released."""
    _held["entered"], _held["release"] = threading.Semaphore(0), threading.Event()
    try:
        yield _held["entered"], _held["release"]
    finally:
        _held["release"].set()


def hold_thread() -> bool:
    _held["entered"].release()
    return bool(_held["release"].wait(60))


def nest(depth: int) -> int:
    return 0 if not depth else 1 + aiorpc.rpc_sync("worker1", nest, (depth - 1,))


_running: dict[str, int] = {}
_running_lock = threading.Lock()


def count_running() -> int:
    with _running_lock:
        _running["now"] += 1
        now = _running["now"]
    threading.Event().wait(0.002)
    with _running_lock:
        _running["now"] -= 1
    return now


# --- async_execution --------------------------------------------------------------------------------------------------


async def test_async_execution_of_functions_static_and_class_methods(pair: list[Worker]) -> None:
    """The reply goes out when the Future completes, whichever decorator is outside; torch's own Futures do too."""
    call = pair[0].call
    assert await call("worker1", deferred, 5) == 5
    assert await call("worker1", deferred_torch, 6) == 6
    assert await call("worker1", Box.static, 2) == 4
    assert await call("worker1", Box.static_outside, 2) == 6
    assert await call("worker1", Box.make, 1) == "Box 1"
    assert await call("worker1", Box.make_outside, 1) == "Box 1!"
    assert await call("worker1", Box(3).add_deferred, 4) == 7


async def test_async_execution_may_chain_calls(trio: list[Worker]) -> None:
    """A handler may return ``rpc_async(...).then(...)``; it gives its thread up meanwhile."""
    assert await trio[0].call("worker1", deferred_then, "worker2", 5) == 11


async def test_a_thousand_pending_deferred_calls_hold_no_thread() -> None:
    """With two threads, and one that is kept for other callers, 1,000 pending ``@async_execution`` calls leave room."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=2)) as workers:
        calls = [workers[0].call("worker1", park, number) for number in range(1000)]
        await until(lambda: len(_parked) == 1000)
        assert await workers[0].call("worker1", len, "abc") == 3
        assert workers[1].statistics().threads <= 3
        assert not any(call.done() for call in calls)
        for number, future in list(_parked.items()):
            future.set_result(number)
        assert await asyncio.gather(*calls) == list(range(1000))
    _parked.clear()


_parked: dict[int, Future[Any]] = {}


@async_execution
def park(number: int) -> Future[int]:
    future: Future[int] = Future()
    _parked[number] = future
    return future


async def test_a_deferred_tensor_is_taken_when_the_future_completes(pair: list[Worker]) -> None:
    """Whoever completes the Future may change the tensor right afterwards."""
    shared = torch.zeros(1000)
    _tensors["it"] = shared
    calls = [pair[0].call("worker1", park, number) for number in range(5)]
    await until(lambda: len(_parked) == 5)

    def settle() -> None:
        for number in range(5):
            shared.fill_(number)
            _parked[number].set_result(shared)
        shared.fill_(-1)

    await asyncio.to_thread(settle)
    assert [int(result[0]) for result in await asyncio.gather(*calls)] == list(range(5))  # type: ignore[index]
    _parked.clear()


_tensors: dict[str, torch.Tensor] = {}


async def length(values: list[int]) -> int:
    return len(values)


def occupy() -> None:
    _gate["entered"].set()
    assert _gate["open"].wait(2 * LIMIT)


_gate = {"entered": threading.Event(), "open": threading.Event()}


@contextlib.asynccontextmanager
async def occupied(worker: Worker, caller: Worker) -> AsyncIterator[None]:
    """The one thread for handlers of a worker waits for something that comes only after the block."""
    call = caller.call(worker.name, occupy)
    await until(_gate["entered"].is_set)
    try:
        yield
    finally:
        _gate["open"].set()
        await call
        for event in _gate.values():
            event.clear()


async def test_handlers_that_block_hold_up_no_large_answer() -> None:
    """The answer may be what such a handler waits for: it is unpickled apart from handlers."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=1)) as (a, b), occupied(a, b):
        assert len(await asyncio.wait_for(a.call("worker1", list, range(50_000)), LIMIT)) == 50_000


async def test_handlers_that_block_hold_up_no_coroutine() -> None:
    """One with large arguments and one that travels by value start all the same."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=1)) as (a, b), occupied(b, a):
        assert await asyncio.wait_for(a.call("worker1", length, list(range(50_000))), LIMIT) == 50_000

        async def here() -> int:
            return 5

        assert await asyncio.wait_for(a.call("worker1", here), LIMIT) == 5


# --- through references -----------------------------------------------------------------------------------------------


async def test_methods_through_a_reference(pair: list[Worker]) -> None:
    """All kinds of methods run on the owner's object, through all three proxies."""
    box = pair[0].remote("worker1", Box, 1)
    assert await box.rpc_async().add(2) == 3
    assert await box.rpc_async().add_later(x=2) == 5
    assert await box.rpc_async().add_deferred(1) == 6
    assert await box.rpc_async().static(4) == 8
    assert await box.rpc_async().make(4) == "Box 4"
    assert await box.rpc_async()(2) == 10
    assert await asyncio.to_thread(lambda: box.rpc_sync().add(1)) == 6
    assert await box.remote().add(4) == 10
    assert await box.remote().add_deferred(1) == 11


async def test_a_blocking_proxy_is_refused_on_the_loop(pair: list[Worker]) -> None:
    """The error names the awaitable; the method was not run."""
    box = pair[0].remote("worker1", Box, 1)
    with pytest.raises(aiorpc.errors.WouldBlockLoop, match=r"await rref\.rpc_async\(\)\.add\(\)"):
        box.rpc_sync().add(5)
    assert await box.rpc_async().add(0) == 1


class Lazy:
    """Looking an attribute up may take its time."""

    @property
    def slow(self) -> Callable[[], tuple[str, str]]:
        looked_up = thread_name()
        return lambda: (looked_up, thread_name())

    def __getattr__(self, name: str) -> Callable[[], tuple[str, str]]:
        if name != "made":
            raise AttributeError(name)
        looked_up = thread_name()
        return lambda: (looked_up, thread_name())


@pytest.mark.parametrize("name", ["slow", "made"])
async def test_properties_of_a_value_run_in_the_pool(pair: list[Worker], name: str) -> None:
    """Looking a method up may run users' code, a property or `__getattr__`: it must not block the loop."""
    lazy = pair[0].remote("worker1", Lazy)
    looked_up, run = await getattr(lazy.rpc_async(), name)()
    assert looked_up.startswith("aiorpc-worker1") and run.startswith("aiorpc-worker1")
    with pytest.raises(AttributeError, match="nothing"):
        await lazy.rpc_async().nothing()


async def test_a_method_that_is_not_there(pair: list[Worker]) -> None:
    """An attribute that is missing, or is not callable, is the caller's error."""
    box = pair[0].remote("worker1", Box, 1)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        await box.rpc_async().nothing_of_the_kind()
    with pytest.raises(RpcUsageError, match="'value' of Box is not callable"):
        await box.rpc_async().value()


# --- nested -----------------------------------------------------------------------------------------------------------


def descend(names: list[str], depth: int) -> int:
    """Blocking calls, one inside the other, over all workers in turn."""
    if depth == 0:
        return 0
    return 1 + int(aiorpc.rpc_sync(names[depth % len(names)], descend, (names, depth - 1)))


async def test_blocking_calls_nested_50_deep_finish_with_two_threads() -> None:
    """A thread that waits for a nested call does not count: no deadlock, whatever the depth."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=2, rpc_timeout=20)) as workers:
        assert await workers[0].call("worker1", descend, ["worker0", "worker1"], 50) == 50
        await until(lambda: all(worker.statistics().threads_blocked == 0 for worker in workers))


# --- batched ----------------------------------------------------------------------------------------------------------

sizes: list[int] = []


@batched(max_size=4)
def square(xs: list[int]) -> list[int]:
    sizes.append(len(xs))
    return [x * x for x in xs]


@batched(max_size=4, max_wait=0.1)
async def square_async(xs: list[int], plus: list[int]) -> list[int]:
    sizes.append(len(xs))
    await asyncio.sleep(0)
    return [x * x + p for x, p in zip(xs, plus, strict=True)]


@batched(max_size=64, max_wait=0.01)
def rows(xs: list[torch.Tensor]) -> torch.Tensor:
    sizes.append(len(xs))
    return torch.stack(xs) * 2


@batched(max_size=3)
def some_fail(xs: list[int]) -> list[Any]:
    return [ValueError(f"not {x}") if x < 0 else x for x in xs]


@batched(max_size=2)
def all_fail(xs: list[int]) -> list[int]:
    raise KeyError("the batch")


@batched(max_size=2)
def too_few(xs: list[int]) -> list[int]:
    return xs[1:]


@batched(max_size=lambda: len(aiorpc.current().worker_infos()) - 1)
def from_all(xs: list[int]) -> list[int]:
    sizes.append(len(xs))
    return [sum(xs)] * len(xs)


@batched(max_size=2)
def who_serves(xs: list[int]) -> list[str]:
    return [aiorpc.current().name] * len(xs)


@batched(max_size=100, max_wait=0.01)
async def who_serves_async(xs: list[int]) -> list[str]:
    return [aiorpc.current().name] * len(xs)


@batched(max_size=1)
def exits(kinds: list[type[BaseException]]) -> list[int]:
    raise kinds[0]


@batched(max_size=1)
async def exits_async(kinds: list[type[BaseException]]) -> list[int]:
    raise kinds[0]


gates: list[Gate] = []


class Gate:
    """Batches that go on when the test says so, and how many ran at once at most."""

    def __init__(self) -> None:
        gates.append(self)
        self.open = threading.Event()
        self.running = 0
        self.most = 0
        self.sizes: list[int] = []

    def enter(self, size: int) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.sizes.append(size)

    @batched(max_size=4, max_wait=0.001)
    def one(self, xs: list[int]) -> list[int]:
        self.enter(len(xs))
        self.open.wait(LIMIT)
        self.running -= 1
        return xs

    @batched(max_size=4, max_wait=0.001)
    async def one_async(self, xs: list[int]) -> list[int]:
        self.enter(len(xs))
        await until(self.open.is_set)
        self.running -= 1
        return xs

    @batched(max_size=1, concurrency=3)
    def three(self, xs: list[int]) -> list[int]:
        self.enter(len(xs))
        self.open.wait(LIMIT)
        self.running -= 1
        return xs


@pytest.fixture(autouse=True)
def _forget_sizes() -> None:
    sizes.clear()
    gates.clear()


async def made_gate() -> Gate:
    """The one that a call has made on a worker of this process."""
    await until(lambda: gates)
    return gates[0]


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("function", [exits, exits_async])
async def test_an_exit_in_a_batch_is_an_error_of_its_callers_alone(
    pair: list[Worker], function: Any, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """As in any handler: nothing else hears of it, and the next batch runs."""
    worse: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: worse.append(context))
    for _ in range(2):
        with pytest.raises(RpcError):
            await pair[0].call("worker1", function, kind)
    gc.collect()
    await asyncio.sleep(0)
    loop.set_exception_handler(None)
    assert not worse and not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_one_call_of_the_function_serves_many_callers(pair: list[Worker]) -> None:
    """Each caller gets the result of its own row."""
    assert await asyncio.gather(*(pair[0].call("worker1", square, x) for x in range(12))) == [x * x for x in range(12)]
    assert sizes == [4, 4, 4]


async def test_an_incomplete_batch_goes_after_max_wait(pair: list[Worker]) -> None:
    """Coroutine functions too; arguments by position and by name make one batch."""
    calls = [pair[0].call("worker1", square_async, 2, 1), pair[0].call("worker1", square_async, xs=3, plus=0)]
    assert await asyncio.gather(*calls) == [5, 9]
    assert sizes == [2]


async def test_rows_of_a_tensor_go_to_their_callers(trio: list[Worker]) -> None:
    """Callers on several workers share batches; each gets its row."""
    calls = [worker.call("worker0", rows, torch.full((2,), float(x))) for x in range(10) for worker in trio]
    results = await asyncio.gather(*calls)
    assert [row.tolist() for row in results] == [[2.0 * x] * 2 for x in range(10) for _ in trio]
    assert sum(sizes) == 30 and len(sizes) < 30


async def test_errors_for_one_caller_or_for_all(pair: list[Worker]) -> None:
    """An exception among the results is raised at that caller; what the function raises at every caller."""
    calls = [pair[0].call("worker1", some_fail, x) for x in (1, -2, 3)]
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, third) == (1, 3)
    assert isinstance(second, ValueError) and str(second) == "not -2"
    both = await asyncio.gather(*(pair[0].call("worker1", all_fail, x) for x in (1, 2)), return_exceptions=True)
    assert [type(error) for error in both] == [KeyError, KeyError]
    short = await asyncio.gather(*(pair[0].call("worker1", too_few, x) for x in (1, 2)), return_exceptions=True)
    assert all(isinstance(error, RpcUsageError) and "expected 2 results, got 1" in str(error) for error in short)


async def test_a_batch_of_all_current_peers(trio: list[Worker]) -> None:
    """A size may be a function: of the workers that there are now."""
    calls = [worker.call("worker0", from_all, worker.id) for worker in trio[1:]]
    assert await asyncio.gather(*calls) == [3, 3]
    assert sizes == [2]


async def test_a_batched_function_serves_each_worker_by_itself(trio: list[Worker]) -> None:
    """Callers of two workers in one process do not share a batch, and nested verbs act on the right worker."""
    calls = [trio[0].call(f"worker{to}", who_serves, 0) for to in (1, 2, 1, 2)]
    assert await asyncio.gather(*calls) == ["worker1", "worker2", "worker1", "worker2"]
    later_calls = [trio[0].call(f"worker{to}", who_serves_async, 0) for to in (1, 2)]
    assert await asyncio.gather(*later_calls) == ["worker1", "worker2"]


async def test_a_worker_leaves_while_batches_wait_for_their_turn() -> None:
    """Their callers are told, and nothing of them runs later."""
    async with cluster(2) as workers:
        box = workers[0].remote("worker1", Gate)
        gate = await made_gate()
        calls = [box.rpc_async().one_async(x) for x in range(9)]
        await until(lambda: workers[1].statistics().calls_running == 9 and gate.sizes)
        await workers[1].shutdown(graceful=False)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, aiorpc.RpcError) for error in errors)
        assert len(gate.sizes) == 1


async def test_a_caller_that_gives_up_leaves_its_batch(pair: list[Worker]) -> None:
    """A cancelled caller is not counted any more: the others' batch waits for another."""
    calls = [pair[0].call("worker1", square, x) for x in range(3)]
    await until(lambda: pair[1].statistics().calls_running == 3 and not pair[1].statistics().jobs_queued)
    calls[1].cancel()
    await until(lambda: pair[1].statistics().calls_cancelled == 1)
    calls += [pair[0].call("worker1", square, x) for x in (8, 9)]
    assert await asyncio.gather(calls[0], calls[2], *calls[3:]) == [0, 4, 64, 81]
    assert sizes == [4]


async def test_callers_of_an_open_batch_are_told_when_the_worker_leaves() -> None:
    """A batch that never fills does not keep its callers waiting."""
    async with cluster(2) as workers:
        call = workers[0].call("worker1", square, 1)
        await until(lambda: workers[1].statistics().calls_running == 1)
        await workers[1].shutdown(graceful=False)
        with pytest.raises(aiorpc.RpcError, match="worker1"):
            await call
    async with cluster(2) as workers:
        assert await asyncio.gather(*(workers[0].call("worker1", square, x) for x in range(4))) == [0, 1, 4, 9]
    assert sizes == [4]


# --- bad manners ------------------------------------------------------------------------------------------------------


def leaves() -> None:
    sys.exit(3)


async def leaves_async() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("handler", [leaves, leaves_async, interrupts])
async def test_a_handler_cannot_end_its_worker(pair: list[Worker], handler: Callable[[], Any]) -> None:
    """``sys.exit`` in a handler is an error of that call; the worker serves on."""
    with pytest.raises(aiorpc.RemoteError, match=r"SystemExit|KeyboardInterrupt"):
        await pair[0].call("worker1", handler)
    assert await pair[0].call("worker1", len, "abc") == 3


async def test_a_handler_may_stop_its_own_task(pair: list[Worker]) -> None:
    """CancelledError raised by a handler itself is RpcCancelled at the caller, not a cancellation there."""
    with pytest.raises(aiorpc.RpcCancelled):
        await pair[0].call("worker1", cancel_myself)


async def cancel_myself() -> None:
    raise asyncio.CancelledError


async def test_timeout_and_task_group_work_in_handlers(pair: list[Worker]) -> None:
    """Coroutine handlers are tasks, as ``asyncio.timeout`` and TaskGroup need."""

    async def handler() -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(0, "done"))
        return task.result()

    assert await pair[0].call("worker1", handler) == "done"


async def test_threads_end_with_their_worker() -> None:
    """After shutdown no thread of the pool is left."""
    before = set(threading.enumerate())
    async with cluster(2) as workers:
        await asyncio.gather(*(workers[0].call("worker1", thread_name) for _ in range(20)))

    def ours() -> list[threading.Thread]:
        return [thread for thread in set(threading.enumerate()) - before if "aiorpc" in thread.name]

    await asyncio.to_thread(wait_until, lambda: not ours())
