"""A loop in a thread of its own that ends by itself takes its worker along, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc import PeerLeft, PeerLost, RpcBackendOptions, RpcError, Worker, WorkerClosed
from aiorpc.errors import NotInitialized
from aiorpc.testing import cluster
from aiorpc.types import WorkerState
from tests.conftest import LoopFactory
from tests.limits import busy
from tests.ports import free_port
from tests.runtime import hostile
from tests.runtime.inside import act_as
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
    thread = worker._hosted_by
    assert thread is not None
    with contextlib.suppress(WorkerClosed):
        aiorpc.rpc_sync("alone", exit_later, (SystemExit,), timeout=LIMIT)
    wait_until(lambda: worker.closed)
    with pytest.raises(aiorpc.RpcError):
        aiorpc.rpc_sync("alone", len, ("abc",))
    thread.close()
    assert aiorpc.shutdown().lost == ()
    assert thread.loop.is_closed()


def test_a_shutdown_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    """The worker goes on, with its loop: calls are answered, and it can be shut down as it should be."""
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=LIMIT)
    wrong: Any = "soon"
    aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(aiorpc.RpcUsageError, match="timeout must be a number of seconds"):
            aiorpc.shutdown(timeout=wrong)
        worker = aiorpc.current()
        assert worker._thread is not None and worker._thread.loop.is_running()
        assert aiorpc.rpc_sync("alone", len, ("abc",)) == 3
    finally:
        aiorpc.shutdown()
    assert worker.closed


def ctrl_c(_: str = "") -> BaseException:
    signal.raise_signal(signal.SIGINT)
    return AssertionError("its handler raises KeyboardInterrupt")


async def interrupt() -> None:
    ctrl_c()


async def give_interrupting() -> Any:
    return hostile.Bomb(ctrl_c)


async def take(value: object) -> None: ...


@pytest.mark.parametrize(
    ("handler", "args"),
    [(interrupt, ()), (give_interrupting, ()), (take, (hostile.Late(ctrl_c),))],
)
def test_ctrl_c_still_ends_a_program_on_the_loop_of_the_main_thread(
    loop_factory: LoopFactory, handler: Any, args: Any
) -> None:
    """There KeyboardInterrupt may be the user's: it is answered, and goes on to who runs the loop."""

    async def main() -> None:
        async with cluster(2) as workers:
            with contextlib.suppress(aiorpc.RpcError):
                await workers[0].call("worker1", handler, *args)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.get_loop().run_until_complete(main())  # `runner.run` would handle the signal itself


# --- a loop that is closed, with a worker on it -----------------------------------------------------------------------

WATCHED, UNWATCHED = RpcBackendOptions(rpc_timeout=LIMIT), RpcBackendOptions(rpc_timeout=LIMIT, lag_warning=0.0)


async def forgotten(options: RpcBackendOptions) -> Worker:
    worker = await aiorpc.init("alone", rank=0, world_size=1, store=HashStore(), options=options)
    assert await aiorpc.call("alone", len, "abc") == 3
    assert await asyncio.to_thread(aiorpc.rpc_sync, "alone", len, ("abc",)) == 3
    return worker


def run_and_forget(loop_factory: LoopFactory, options: RpcBackendOptions = UNWATCHED) -> Worker:
    """A worker whose loop has ended as that of `asyncio.run` does."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(forgotten(options))


def threads_of(worker: Worker) -> list[str]:
    return [thread.name for thread in threading.enumerate() if f"-{worker.name}" in thread.name]


def test_a_worker_whose_loop_was_closed_ends_by_itself(
    loop_factory: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that watches the loop notices; all that the worker had is free, though somebody still has it."""
    worker = run_and_forget(loop_factory, WATCHED)
    wait_until(lambda: worker.state is WorkerState.CLOSED and not threads_of(worker))
    assert [r.getMessage()[:53] for r in caplog.records if r.name == "aiorpc" and r.levelno >= logging.WARNING] == [
        "worker 'alone' is closed, as its event loop has ended"
    ]
    for verb in (
        aiorpc.current,
        lambda: aiorpc.rpc_sync("alone", len, ("abc",)),
        lambda: worker.call("alone", len, ""),
    ):
        with pytest.raises(WorkerClosed, match="its event loop has ended: start a new worker"):
            verb()
    assert aiorpc.shutdown() == aiorpc.types.ShutdownReport()
    with pytest.raises(NotInitialized, match="has not been initialized"):
        aiorpc.current()


@pytest.mark.parametrize("verb", ["current", "rpc_sync", "rpc_sync elsewhere", "call", "remote"])
def test_verbs_say_that_the_loop_has_ended(loop_factory: LoopFactory, verb: str) -> None:
    """Also where nothing watches the loop: each time, and the process is free for a new worker."""

    async def call() -> None:
        await aiorpc.call("alone", len, "abc")

    def elsewhere() -> None:
        with asyncio.Runner() as runner:
            runner.run(asyncio.to_thread(aiorpc.rpc_sync, "alone", len, ("abc",)))

    verbs: dict[str, Callable[[], object]] = {
        "current": aiorpc.current,
        "rpc_sync": lambda: aiorpc.rpc_sync("alone", len, ("abc",)),
        "rpc_sync elsewhere": elsewhere,
        "call": lambda: asyncio.run(call()),
        "remote": lambda: aiorpc.remote("alone", len, "abc"),
    }
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        # Without a call, whose deadline would stand for those that follow.
        worker = runner.run(aiorpc.init("alone", rank=0, world_size=1, store=HashStore(), options=UNWATCHED).start())
    for _ in range(2):
        with pytest.raises(WorkerClosed, match="its event loop has ended"):
            verbs[verb]()
    run_and_forget(loop_factory)
    assert worker.state is WorkerState.CLOSED
    aiorpc.shutdown()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_worker_whose_loop_was_closed_can_be_shut_down(loop_factory: LoopFactory, elsewhere: bool) -> None:
    """By either shutdown, as often as anybody likes; a plain `loop.close()` with tasks under way is an end, too."""
    worker = run_and_forget(loop_factory)
    report = asyncio.run(worker.shutdown()) if elsewhere else aiorpc.shutdown()
    assert report == aiorpc.types.ShutdownReport()
    assert worker.state is WorkerState.CLOSED
    assert asyncio.run(worker.shutdown()) == aiorpc.shutdown() == report
    with pytest.raises(NotInitialized):
        aiorpc.current()


def test_a_worker_can_be_started_after_one_whose_loop_was_closed(loop_factory: LoopFactory, tmp_path: Path) -> None:
    """It is the only one then, in another `asyncio.run` and with `init_rpc`."""
    first = run_and_forget(loop_factory)
    second = run_and_forget(loop_factory)  # its calls would not know which worker is meant
    assert first.state is WorkerState.CLOSED
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=LIMIT)
    aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert second.state is WorkerState.CLOSED
        assert aiorpc.rpc_sync("alone", len, ("abc",)) == 3
    finally:
        aiorpc.shutdown()


@pytest.mark.usefixtures("server_made_once")
def test_a_worker_meets_where_one_hosted_the_store_whose_loop_was_closed(loop_factory: LoopFactory) -> None:
    """A notebook's cell that failed, run again and again; nobody has noticed yet that the loop is closed."""

    async def fail(place: str) -> None:
        await aiorpc.init("alone", rank=0, world_size=1, init_method=place, options=UNWATCHED)
        raise KeyError

    place = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(3):
        with asyncio.Runner(loop_factory=loop_factory) as runner, pytest.raises(KeyError):
            runner.run(fail(place))
    with pytest.raises(WorkerClosed, match="its event loop has ended"):
        aiorpc.current()


def test_the_others_see_a_goodbye_of_a_worker_whose_loop_was_closed(loop_factory: LoopFactory) -> None:
    """And what it owed them, or was owed, ends at once; so does what it was about to make."""
    store, options = HashStore(), RpcBackendOptions(rpc_timeout=LIMIT, shutdown_timeout=1.0)
    ready, pending = threading.Event(), []
    over.clear()

    async def forget() -> Worker:
        worker = await aiorpc.init("first", rank=0, world_size=2, store=store, options=options)
        pending.append(worker.call("second", block))
        await until(lambda: any(call.direction == "served" for call in worker.pending_calls()))
        ready.set()
        return worker

    async def stay() -> None:
        async with aiorpc.init("second", rank=1, world_size=2, store=store, options=options) as worker:
            with pytest.raises(PeerLeft):
                await worker.call("first", block)

    staying = threading.Thread(target=lambda: staid.append(asyncio.run(stay())))
    staid: list[None] = []
    staying.start()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        worker = runner.run(forget())
    asyncio.run(worker.shutdown())
    with pytest.raises(WorkerClosed, match="its event loop has ended"):
        pending[0].wait()
    over.set()
    staying.join(LIMIT)
    assert staid == [None]


@pytest.mark.parametrize("verb", ["call", "get", "back to back", "wait_for"])
def test_a_runner_comes_to_its_end_though_a_thread_waits(verb: str, loop_factory: LoopFactory, tmp_path: Path) -> None:
    """The main program raises before it has shut down: `asyncio.run` waits for the threads of `to_thread`."""
    options, place = RpcBackendOptions(rpc_timeout=0), f"file://{tmp_path / 'store'}"
    ready, end, made = threading.Event(), threading.Event(), threading.Event()
    over.clear()
    errors: list[RpcError] = []

    async def stay() -> None:
        async with aiorpc.init("second", init_method=place, options=options):
            queue: aiorpc.Queue[Any] = aiorpc.Queue("q")
            ready.set()
            await asyncio.to_thread(end.wait, LIMIT)
            del queue

    def wait(worker: Worker) -> None:
        try:
            if verb == "call":
                worker.call("second", block).wait()
            elif verb == "get":
                aiorpc.queue("q", owner="second").get().wait()
            elif verb == "wait_for":
                worker.wait_for("third").wait()
            while True:
                worker.call("second", abs, -3).wait()
                made.set()
        except RpcError as error:
            errors.append(error)

    async def fail() -> None:
        worker = await aiorpc.init("first", init_method=place, options=options)
        await worker.wait_for("second")
        waiting = asyncio.ensure_future(asyncio.to_thread(in_context, worker, wait))
        if verb != "wait_for":
            await until(lambda: made.is_set() if verb == "back to back" else worker.pending_calls())
        else:
            await until(lambda: any(peer.name == "third" for peer in worker._node.peers.all()))
        assert not waiting.done()
        raise KeyError

    staying = threading.Thread(target=lambda: asyncio.run(stay()))
    staying.start()
    assert ready.wait(LIMIT)
    with asyncio.Runner(loop_factory=loop_factory) as runner, pytest.raises(KeyError):
        runner.run(fail())
    (error,) = errors
    assert isinstance(error, WorkerClosed) and "its event loop has ended" in str(error)
    over.set()
    end.set()
    staying.join(LIMIT)


def in_context(worker: Worker, function: Callable[[Worker], None]) -> None:
    act_as(worker)
    function(worker)


def test_a_worker_that_was_joining_when_its_loop_was_closed(loop_factory: LoopFactory) -> None:
    """There is nobody whom it could meet, and it lets go of its sockets."""
    loop = loop_factory()
    worker = aiorpc.init("alone", rank=0, world_size=2, store=HashStore(), options=UNWATCHED)

    async def main() -> asyncio.Task[Worker]:
        joining = asyncio.ensure_future(worker.start())
        await until(lambda: worker.state is WorkerState.STARTING)
        await asyncio.sleep(0.1)
        return joining

    joining = loop.run_until_complete(main())
    loop.close()
    assert asyncio.run(worker.shutdown()) == aiorpc.types.ShutdownReport()
    assert worker.state is WorkerState.CLOSED
    keep.append(joining)


# --- a handler that shuts down the worker of `init_rpc` ---------------------------------------------------------------


async def shut_down() -> None:
    await aiorpc.current().shutdown(graceful=False)


def shut_down_in_thread() -> None:
    aiorpc.shutdown(graceful=False)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("handler", [shut_down, shut_down_in_thread])
def test_a_shutdown_by_a_handler_of_the_worker_of_init_rpc(
    handler: Callable[[], Any], again: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`shutdown` and `init_rpc` wait for it and end the thread; nobody waits for the handler that waits itself."""
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=LIMIT)
    aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    worker = aiorpc.current()
    thread = worker._hosted_by
    assert thread is not None
    with contextlib.suppress(RpcError):
        aiorpc.rpc_sync("alone", handler)
    if again:
        aiorpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    else:
        assert aiorpc.shutdown() is worker._report()
    assert worker.state is WorkerState.CLOSED
    assert thread.loop.is_closed()
    if again:
        assert aiorpc.rpc_sync("alone", len, ("abc",)) == 3
        aiorpc.shutdown()
    assert aiorpc.shutdown() == aiorpc.types.ShutdownReport()
    assert not [r.getMessage() for r in caplog.records if "still running" in r.getMessage()]


@pytest.mark.slow
def test_a_script_without_stdin_and_stdout(tmp_path: Path) -> None:
    """Started with ``<&-``: the loop closes descriptors in good order, where libuv would abort the process."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\n"
        "import aiorpc as rpc\n"
        "free = [each for each in (0, 1) if not os.path.lexists(f'/proc/self/fd/{each}')]  # a library may have one\n"
        f"options = rpc.RpcBackendOptions(init_method='file://{tmp_path}/place')\n"
        "rpc.init_rpc('me', rank=0, world_size=1, rpc_backend_options=options)\n"
        "said = rpc.rpc_sync('me', abs, args=(-3,))\n"
        "rpc.shutdown()\n"
        "print(said, [(os.readlink(f'/proc/self/fd/{each}'), os.get_inheritable(each)) for each in free][-1:],\n"
        "    file=sys.stderr)\n"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(aiorpc.__file__).parents[1])}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120 * busy())
    assert (done.returncode, done.stderr) == (0, "3 [('/dev/null', True)]\n")
