"""Start the workers of one machine as torchrun would, from a server process that imported torch once.

Importing torch costs a process seconds; forking from a process with torch costs milliseconds. The server is
multiprocessing's fork server: it has one thread, so forking it is safe, unlike forking a program that already computes.
Each worker gets the variables that torchrun would set, and meets its peers in the same way (``env://``).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

import torch

Settings = TypeVar("Settings")
T = TypeVar("T")

#: Examples share a machine with their peers: one thread of arithmetic for each process, set before numpy is imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Variables with the rank and the number of workers: those of torchrun, of mpirun, of srun.
PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
#: Seconds in which the other workers may say what went wrong for them, once the first has failed.
GRACE = 1.0
#: Seconds the other workers have to leave after rank 0 returned its result.
LEAVE_TIMEOUT = 30.0
#: Seconds a finished or terminated process has to end before it is killed.
EXIT_TIMEOUT = 5.0


@dataclass(frozen=True)
class Place:
    """Which of how many workers this process is."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class _Meeting:
    """Where the workers of a run meet: the port of rank 0's store, and a folder for their sockets."""

    port: int
    folder: str


class WorkerFailed(RuntimeError):
    """A worker died or raised; the text names it and has its traceback. workers: all that failed, the cause first."""

    def __init__(self, message: str, workers: Sequence[str]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


def place_from_environment() -> Place | None:
    """The place that a launcher (torchrun, mpirun, srun) gave this process, or None when it was started by hand.

    SystemExit, with the reason, if what the launcher has set are no numbers.
    """
    names = next((names for names in PLACES if all(name in os.environ for name in names)), None)
    if names is None:
        return None
    rank, world_size = (os.environ[name] for name in names)
    try:
        place = Place(int(rank), int(world_size))
    except ValueError:
        raise SystemExit(
            f"error: {names[0]} and {names[1]} have to be numbers, as a launcher sets them, not {rank!r} and "
            f"{world_size!r}; unset them to have the workers started here"
        ) from None
    # `srun program` and a shell in a job are one task: it starts its own workers there.
    return None if names[0] != "RANK" and place.world_size == 1 else place


def launch(
    role: Callable[[Place, Settings], T],
    settings: Settings,
    names: Sequence[str],
    *,
    timeout: float,
    preload: Sequence[str] = (),
    exit_timeout: float = EXIT_TIMEOUT,
) -> T:
    """Run ``role(place, settings)`` in one process for each name and return what rank 0 returned.

    Under a launcher (torchrun, mpirun, srun) nothing is started: the role of this process runs here, and what it
    returned is returned on every rank.

    role, settings: travel to the processes by pickle, so the role must be importable. names: the workers' names by
    rank, for messages. timeout: seconds for the whole run. preload: modules that the server imports once. exit_timeout:
    seconds that processes have to end once they are told to, before they are killed.
    Raises: WorkerFailed when a worker raised, died or did not end in time. On this and on KeyboardInterrupt, all
    processes have ended before the call returns. Call it from the main thread.
    """
    place = place_from_environment()
    if place is not None:
        torch.set_num_threads(1)
        return role(place, settings)
    with contextlib.ExitStack() as stack:
        workers = _start(stack, role, settings, names, preload, exit_timeout)
        result: T = _Supervisor(workers, timeout).result()
        return result


@dataclass
class _Worker:
    """A started process, the pipe its outcome comes through, and the outcome once known."""

    name: str
    rank: int
    process: ForkServerProcess
    pipe: connection.Connection[Any, Any]
    settled: bool = False
    result: Any = None
    error: str = ""
    died: bool = False

    def read(self) -> None:
        """Take the outcome from the pipe, or find that the process ended without one."""
        self.settled = True
        try:
            self.result, self.error = self.pipe.recv()
        except (EOFError, OSError):  # it has ended before it began to say something, or in the midst of it
            self.died = True
            self.process.join(EXIT_TIMEOUT)
            self.error = how_it_ended(self.process.exitcode)
        self.pipe.close()

    @property
    def title(self) -> str:
        return f"{self.name} (rank {self.rank}, pid {self.process.pid})"


def _stop(workers: Sequence[_Worker], patience: float) -> None:
    """End all processes in bounded time, even if they hang."""
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()
    deadline = time.monotonic() + patience
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(EXIT_TIMEOUT)
        worker.pipe.close()


def how_it_ended(exitcode: int | None) -> str:
    """What became of a process that should still be there, in words."""
    if exitcode is None:
        return "closed its pipe without a result and still runs"
    if exitcode < 0:
        known = -exitcode in [*signal.Signals]  # of the real-time ones most have no name
        return f"was killed by {signal.Signals(-exitcode).name if known else f'signal {-exitcode}'}"
    return f"exited with code {exitcode} before it had a result"


def _start(
    stack: contextlib.ExitStack,
    role: Callable[[Place, Settings], Any],
    settings: Settings,
    names: Sequence[str],
    preload: Sequence[str],
    exit_timeout: float,
) -> list[_Worker]:
    """Start all processes; the stack ends them again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *preload])
    # Sockets of workers that were killed lie in here, and go with it. A short name: paths of sockets are limited.
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rpc-", ignore_cleanup_errors=True))
    meeting = _Meeting(stack.enter_context(_reserved_port()), folder)
    workers: list[_Worker] = []
    stack.callback(_stop, workers, exit_timeout)
    with environment(ONE_THREAD):
        for rank, name in enumerate(names):
            ours, theirs = context.Pipe(duplex=False)
            place = Place(rank, len(names))
            process = context.Process(target=_child, args=(role, place, settings, meeting, theirs), name=name)
            process.start()
            theirs.close()
            workers.append(_Worker(name, rank, process, ours))
    return workers


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the fork server, which inherits them, and give ours back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free TCP port of the loopback interface, for the store of rank 0.

    The socket stays bound: the system gives the port to no other process. It does not listen: the store, which sets
    SO_REUSEADDR as well, can.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


class _Supervisor:
    """Waits for the outcomes of all workers, within bounds."""

    def __init__(self, workers: Sequence[_Worker], timeout: float) -> None:
        self._workers = workers
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._failed: list[_Worker] = []

    def result(self) -> Any:
        """What rank 0 returned; raises WorkerFailed."""
        while pending := {worker.pipe: worker for worker in self._workers if not worker.settled}:
            ready = connection.wait(list(pending), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                self._settle(pending[pipe])  # type: ignore[index]  # wait() is typed to give sockets too
        self._check_all_ended()
        return self._workers[0].result

    def _settle(self, worker: _Worker) -> None:
        worker.read()
        if worker.error:
            self._failed.append(worker)
            self._sooner(GRACE)
        elif worker.rank == 0:
            self._sooner(LEAVE_TIMEOUT)

    def _sooner(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _check_all_ended(self) -> None:
        if self._failed:
            raise self._failure(self._failed)
        late = [worker for worker in self._workers if not worker.settled]
        for worker in late:
            worker.error = f"had not ended when its time was over (the run had {self._timeout:g} s)"
        for worker in self._workers:
            if not worker.error:
                worker.process.join(EXIT_TIMEOUT)
                if worker.process.exitcode != 0:
                    worker.error = f"after its work was done, {how_it_ended(worker.process.exitcode)}"
                    late.append(worker)
        if late:
            raise self._failure(late)

    @staticmethod
    def _failure(failed: Sequence[_Worker]) -> WorkerFailed:
        # One death makes the calls of all others fail: the worker that left silently is the cause.
        failed = sorted(failed, key=lambda worker: not worker.died)
        parts = [f"{worker.title}: {worker.error}" for worker in failed]
        return WorkerFailed("\n".join(parts), [worker.name for worker in failed])


def _child(
    role: Callable[[Place, Settings], object],
    place: Place,
    settings: Settings,
    meeting: _Meeting,
    pipe: connection.Connection[Any, Any],
) -> None:
    """What a started process does: become one worker, run its role, report the outcome."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(meeting.port), TMPDIR=meeting.folder)
    tempfile.tempdir = None  # found anew, from TMPDIR
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size))
    settle_in(meeting.folder)
    try:
        pipe.send((role(place, settings), ""))
    except Exception:
        pipe.send((None, traceback.format_exc()))
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # No orderly exit: what failed may be waited for by what an exit would wait for.
        os._exit(1)
    pipe.close()


def settle_in(folder: str) -> None:
    """Let a process that was just started end with its launcher, and remove the folder of the run then."""
    # Ctrl-C reaches the whole process group; the launcher ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_launcher, args=(folder,), name="end-with-launcher", daemon=True).start()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's many objects live as long as the process: no collection need visit them


def _end_with_launcher(folder: str) -> None:
    """End this process when the launcher is gone, even by SIGKILL: no workers or files may be left."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
