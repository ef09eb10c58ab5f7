"""Worker processes for tests: forked in milliseconds from a server that has torch, always ended, waited for in bounds.

The test's own process is usually rank 0 (`group`), so that a test is written as a user writes a program; the others run
a body from `bodies`. All of them meet in a file in a temporary folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import aiorpc as rpc
from aiorpc.transport import sockets
from aiorpc.transport.sockets import private_directory as private_directory
from tests.conditions import unmet

# Seconds; of use only to a test that fails, on however slow a machine.
END = 30.0  # that a process has to end by itself before the test fails
LIMIT = 30.0  # for a condition to come true
PARENTLESS = 77  # exit code of a child whose parent is gone
Body = Callable[..., Any]


def rounds(usual: int) -> range:
    """The seeds of a test that kills processes at random moments: so many, or as many as AIORPC_ROUNDS says."""
    return range(int(os.environ.get("AIORPC_ROUNDS", usual)))


@dataclass(frozen=True)
class Place:
    """Who a process is, and where its group meets."""

    name: str
    rank: int
    world_size: int | None
    init_method: str

    def init_rpc(self, **options: Any) -> None:
        """Join, with a loop in a thread."""
        options.setdefault("init_method", self.init_method)
        rpc.init_rpc(
            self.name,
            rank=self.rank,
            world_size=self.world_size,
            rpc_backend_options=rpc.RpcBackendOptions(**options),
        )


class Link:
    """A body's pipe to the test."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe

    def tell(self, value: Any) -> None:
        """Send a value to the test."""
        self._pipe.send((None, value))

    def hear(self, timeout: float = 50.0) -> Any:
        """The next value that the test tells this process; TimeoutError after so many seconds."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the test said nothing for {timeout:g} s")
        return self._pipe.recv()


@dataclass
class Child:
    """One started process."""

    place: Place
    process: Any
    pipe: Connection[Any, Any]

    @property
    def pid(self) -> int:
        """Its process id."""
        pid: int = self.process.pid
        return pid

    def tell(self, value: Any) -> None:
        """Send the body a value; see `Link.hear`."""
        self.pipe.send(value)

    def hear(self, timeout: float = 50.0) -> Any:
        """The next value the body told, or what it returned at last; raises AssertionError with its traceback."""
        if not self.pipe.poll(timeout):
            raise AssertionError(f"{self.place.name} (pid {self.pid}) said nothing for {timeout:g} s")
        try:
            failure, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self.join()
            raise AssertionError(f"{self.place.name} (pid {self.pid}) ended without a word, with {code}") from None
        if failure is not None:
            raise AssertionError(f"{self.place.name}: {failure}")
        return value

    async def ahear(self, timeout: float = 50.0) -> Any:
        """`hear`, without keeping the running loop from its work."""
        return await asyncio.to_thread(self.hear, timeout)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """Have it stand still: no thread of it runs any more, until it is told to go on (SIGCONT)."""
        self.kill(signal.SIGSTOP)
        await until(lambda: has_stopped(self.pid))

    def join(self, timeout: float = END) -> int:
        """Wait for its end; its exit code, negative for a signal. Fails the test when it does not end in time."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            raise AssertionError(f"{self.place.name} (pid {self.pid}) did not end within {timeout:g} s")
        return int(code)


@dataclass
class Children:
    """The processes of one test, in the order in which they were started; by name, the latest of that name."""

    started: list[Child] = field(default_factory=list)

    def start(self, place: Place, body: Body, *args: Any, env: dict[str, str] | None = None) -> Child:
        """Start a process that runs ``body(place, link, *args)``."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(body, place, theirs, args, env or {}), name=place.name)
        first = _server() is None
        process.start()
        if first:
            _OURS.add(_server())
        theirs.close()
        child = Child(place, process, ours)
        self.started.append(child)
        return child

    def __getitem__(self, name: str) -> Child:
        return next(child for child in reversed(self.started) if child.place.name == name)

    def __iter__(self) -> Iterator[Child]:
        return iter(self.started)

    def check_ended(self, *, but: tuple[str, ...] = ()) -> None:
        """All have ended by themselves and in good order; those in `but` in any way."""
        codes = [(child.place.name, child.join()) for child in self]
        bad = [(name, code) for name, code in codes if code != 0 and name not in but]
        assert not bad, f"exit codes: {bad}"


_OURS: set[int | None] = set()  # process ids of the fork servers that were started here


def _server() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # not in typeshed
    return pid


def own_fork_server() -> None:
    """End the one that other tests have started: what a server imports is settled by who starts it.

    With one that lacks aiorpc each of the workers here would import it anew, for longer than most tests take. Ours
    stays, whatever tests come in between: to start it takes seconds.
    """
    if _server() not in _OURS:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nor is that; without one it does nothing


@contextlib.contextmanager
def processes() -> Iterator[Children]:
    """A place for processes; those that still run at the end of the block are killed."""
    # All that the workers import: what is missing here costs each of them again (pytest alone 130 ms, and the last one,
    # which torch imports for the first gradient, 600 ms).
    preload = ["torch", "aiorpc.sync", "cloudpickle", "uvloop", "pytest", "torch.fx.experimental.symbolic_shapes"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    children = Children()
    try:
        with one_thread():
            yield children
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join(5.0)
            child.pipe.close()
            child.process.close()
        # The killed could not do it themselves; the next worker of this user would.
        sockets.remove_stale(private_directory())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The fork server inherits this: arithmetic of many processes on few cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def meeting_file() -> Iterator[str]:
    """An init_method that nobody else uses."""
    with tempfile.TemporaryDirectory(prefix="meet-") as folder:
        yield f"file://{folder}/store"


def places(count: int, init_method: str, world_size: int | None = -1) -> list[Place]:
    """The places w0, w1, ... of one group."""
    size = count if world_size == -1 else world_size
    return [Place(f"w{rank}", rank, size, init_method) for rank in range(count)]


@contextlib.asynccontextmanager
async def group(
    count: int, body: Body | None = None, *args: Any, ended: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[tuple[rpc.Worker, Children]]:
    """This process is w0 on the running loop; w1 to w<count - 1> run ``body(place, link, *args)`` or just serve.

    options: RpcBackendOptions of w0, and of those that just serve. ended: who is expected to be killed.
    """
    with processes() as children, meeting_file() as init_method:
        first, *others = places(count, init_method)
        for place in others:
            children.start(place, body or serve, *(args if body else (options,)))
        chosen = rpc.RpcBackendOptions(**options)
        async with rpc.init("w0", rank=0, world_size=count, init_method=first.init_method, options=chosen) as worker:
            yield worker, children
        await asyncio.to_thread(lambda: children.check_ended(but=ended))


def serve(place: Place, link: Link, options: dict[str, Any] | None = None) -> list[str]:
    """Join, call `shutdown` at once, and serve from inside it; returns the names of the lost."""
    place.init_rpc(**(options or {}))
    return [info.name for info in rpc.shutdown().lost]


def _run(body: Body, place: Place, pipe: Connection[Any, Any], args: tuple[Any, ...], env: dict[str, str]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True, name="end-with-parent").start()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        value = body(place, Link(pipe), *args)
        with contextlib.suppress(BrokenPipeError):
            pipe.send((None, value))
    except BaseException:
        with contextlib.suppress(BrokenPipeError):
            pipe.send((traceback.format_exc(), None))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(PARENTLESS)


def wait_for(condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """Poll until the condition holds, and return it; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, unmet(condition, value, seconds)
        time.sleep(0.01)
    return value


async def wait_for_async(condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """`wait_for` beside a running loop."""
    return await asyncio.to_thread(wait_for, condition, seconds)


async def until(condition: Callable[[], Any], seconds: float = LIMIT) -> None:
    """Poll on this loop until the condition, plain or async, holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if inspect.isawaitable(held):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline, unmet(condition, held, seconds)
        await asyncio.sleep(0.005)


def has_stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more: the signal stops them one by one, on a busy machine not soon."""
    states = [stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def process_state(pid: int) -> str:
    """The state letter of a process, as in ``ps``; empty when there is none."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
