"""A loop in a thread of its own that ends by itself takes its worker along, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc
from aiorpc import PeerLost, RpcBackendOptions, Worker, WorkerClosed
from aiorpc.runtime.engine.loops import LoopThread
from aiorpc.testing import cluster
from tests.conftest import LoopFactory
from tests.runtime import hostile
from tests.runtime.waiting import LIMIT, until, wait_until


async def exit_later(kind: type[BaseException]) -> None:
    """Not in the handler itself, whose exits are answers: in a task that it leaves behind."""

    async def task() -> None:
        raise kind("enough")

    keep.append(asyncio.get_running_loop().create_task(task()))


async def stop(_: type[BaseException]) -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.stop)


keep: list[Any] = []


@pytest.fixture(autouse=True)
def _forget_tasks() -> Iterator[None]:
    """asyncio says of a task when it is collected that nobody looked at its error: here, and not in another test."""
    yield
    keep.clear()
    gc.collect()


def block() -> None:
    """Until the test is over."""
    over.wait(LIMIT)


over = threading.Event()


@pytest.mark.parametrize(
    ("end", "kind", "cause"),
    [
        (exit_later, SystemExit, "SystemExit: enough"),
        (exit_later, KeyboardInterrupt, "KeyboardInterrupt: enough"),
        (stop, SystemExit, "it was stopped"),
    ],
)
async def test_a_loop_that_ends_closes_its_worker(
    end: Callable[..., Any], kind: type[BaseException], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Verbs raise at once, what was pending fails, one line says why, and the other worker sees a loss."""
    options = RpcBackendOptions(dedicated_loop=True, rpc_timeout=LIMIT, shutdown_timeout=0.1)
    async with cluster(2, options=options) as (first, second):
        over.clear()
        pending = second.call("worker0", block)
        await until(lambda: any(call.direction == "served" for call in first.pending_calls()))
        with contextlib.suppress(PeerLost):  # its answer may not have left
            await first.call("worker1", end, kind)
        await until(lambda: second.closed)
        with pytest.raises(WorkerClosed):
            second.call("worker0", len, "abc")
        with pytest.raises(WorkerClosed, match="its event loop has ended"):
            await pending
        over.set()
        with pytest.raises(PeerLost):
            await first.call("worker1", len, "abc")
        lines = [r for r in caplog.records if r.levelno == logging.ERROR and r.name == "aiorpc"]
        assert [line.getMessage() for line in lines] == [
            f"worker worker1 is closed, as its event loop has ended: {cause}"
        ]


@pytest.mark.parametrize("again", [False, True])
def test_blocking_verbs_after_the_loop_of_init_rpc_has_ended(again: bool, tmp_path: Any) -> None:
    """`rpc_sync` raises, `shutdown` has nothing left to do, and a new worker can be started."""
    for number in range(1 + again):
        options = RpcBackendOptions(init_method=f"file://{tmp_path}/{number}")
        aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        end_the_loop(aiorpc.current())


def end_the_loop(worker: Worker) -> None:
    thread = worker.hosted_by
    assert thread is not None
    with contextlib.suppress(WorkerClosed):
        aiorpc.rpc_sync("alone", exit_later, (SystemExit,), timeout=LIMIT)
    wait_until(lambda: worker.closed)
    with pytest.raises(aiorpc.RpcError):
        aiorpc.rpc_sync("alone", len, ("abc",))
    thread.close()
    assert aiorpc.shutdown().lost == ()
    assert thread.loop.is_closed()


def test_whoever_waits_for_a_loop_that_ends_is_told() -> None:
    """What was handed to it fails, and so does what comes later; nothing waits for ever."""
    thread = LoopThread("short")
    started = threading.Event()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    def end() -> None:
        started.wait(LIMIT)
        thread.loop.call_soon_threadsafe(thread.loop.stop)

    ender = threading.Thread(target=end)
    ender.start()
    with pytest.raises(WorkerClosed, match="the loop of worker 'short' has ended"):
        thread.run(wait())
    ender.join()
    with pytest.raises(WorkerClosed):
        thread.run(wait())
    thread.close()
    assert thread.loop.is_closed()


@pytest.mark.parametrize("kind", [TimeoutError, SystemExit, KeyboardInterrupt])
def test_what_a_signal_handler_raises_ends_a_wait_for_a_loop(kind: type[BaseException]) -> None:
    """Whatever it is, also what waits raise themselves; the coroutine has ended by then, and the loop goes on."""
    thread, began, ended = LoopThread("waited-for"), threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def interrupt() -> None:
        began.wait(LIMIT)
        signal.pthread_kill(main, signal.SIGUSR1)

    def handler(*_: object) -> None:
        raise kind("of a signal handler")

    async def alive() -> bool:
        return True

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, handler)
    interrupter = threading.Thread(target=interrupt)
    late = threading.Timer(LIMIT, thread.close)
    late.start()
    try:
        interrupter.start()
        with pytest.raises(kind, match="of a signal handler"):
            thread.run(wait())
        assert ended.is_set()
        assert thread.run(alive())
    finally:
        late.cancel()
        late.join()
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)
        thread.close()


def test_a_shutdown_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    """The worker goes on, with its loop: calls are answered, and it can be shut down as it should be."""
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=LIMIT)
    wrong: Any = "soon"
    aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(aiorpc.RpcUsageError, match="timeout must be a number of seconds"):
            aiorpc.shutdown(timeout=wrong)
        worker = aiorpc.current()
        assert worker.thread is not None and worker.thread.loop.is_running()
        assert aiorpc.rpc_sync("alone", len, ("abc",)) == 3
    finally:
        aiorpc.shutdown()
    assert worker.closed


async def test_a_shutdown_that_is_refused_changes_nothing_of_a_dedicated_loop() -> None:
    """The same for a worker whose loop is in a thread of its own beside the program's."""
    options = RpcBackendOptions(dedicated_loop=True, rpc_timeout=LIMIT)
    wrong: Any = "soon"
    async with cluster(2, options=options) as (first, _):
        with pytest.raises(aiorpc.RpcUsageError, match="timeout must be a number of seconds"):
            await first.shutdown(timeout=wrong)
        assert first.loop.is_running()
        assert await first.call("worker1", len, "abc") == 3


async def interrupt() -> None:
    raise KeyboardInterrupt


async def give_interrupting() -> Any:
    return hostile.Bomb(KeyboardInterrupt)


async def take(value: object) -> None: ...


@pytest.mark.parametrize(
    ("handler", "args"),
    [(interrupt, ()), (give_interrupting, ()), (take, (hostile.Late(KeyboardInterrupt),))],
)
def test_ctrl_c_still_ends_a_program_on_the_loop_of_the_main_thread(
    loop_factory: LoopFactory, handler: Any, args: Any
) -> None:
    """There KeyboardInterrupt may be the user's: it is answered, and goes on."""

    async def main() -> None:
        async with cluster(2) as workers:
            with contextlib.suppress(aiorpc.RpcError):
                await workers[0].call("worker1", handler, *args)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
