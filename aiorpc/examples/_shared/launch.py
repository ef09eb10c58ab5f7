"""Start the workers of one machine as `aiorpc.run` does, from a server process that imported torch once.

Importing torch costs a process seconds; forking from a process with torch costs milliseconds. The server is
multiprocessing's fork server: it has one thread, so forking it is safe, unlike forking a program that already computes.
Each worker gets the variables that torchrun would set, and meets its peers in the same way (``env://``).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from aiorpc.run import LOOK, LocalWorkers, WorkerFailed, how_it_ended

Settings = TypeVar("Settings")
T = TypeVar("T")

#: Examples share a machine with their peers: one thread of arithmetic for each process, set before numpy is imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Variables with the rank and the number of workers: of torchrun, mpirun, srun, an Indexed Job, SkyPilot.
PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
)
#: Seconds in which the other workers may say what went wrong for them, once the first has failed.
GRACE = 1.0
#: Seconds the other workers have to leave after rank 0 has ended.
LEAVE_TIMEOUT = 30.0
#: Seconds a finished or terminated process has to end before it is killed.
EXIT_TIMEOUT = 5.0


@dataclass(frozen=True)
class Place:
    """Which of how many workers this process is."""

    rank: int
    world_size: int


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
) -> T:
    """Run ``role(place, settings)`` in one process for each name and return what rank 0 returned.

    Under a launcher (torchrun, mpirun, srun) nothing is started: the role of this process runs here, and what it
    returned is returned on every rank.

    role, settings: travel to the processes by pickle, so the role must be importable. names: the workers' names by
    rank, for messages. timeout: seconds for the whole run. preload: modules that the server imports once.
    Raises: WorkerFailed when a worker raised, died or did not end in time. On this and on KeyboardInterrupt, all
    processes have ended before the call returns. Call it from the main thread.
    """
    place = place_from_environment()
    if place is not None:
        torch.set_num_threads(1)
        return role(place, settings)

    def start(rank: int, variables: Mapping[str, str]) -> Forked:
        work = partial(role, Place(rank, len(names)), settings)
        return Forked(work, names[rank], folder, {**variables, "TMPDIR": folder}, preload)

    # Sockets of workers that were killed lie in here, and go with it. A short name: paths of sockets are limited.
    with tempfile.TemporaryDirectory(prefix="rpc-", ignore_cleanup_errors=True) as folder:
        with LocalWorkers(start, names, grace=EXIT_TIMEOUT) as workers:
            _wait(workers, names, timeout)
        result: T = pickle.loads((Path(folder) / f"{names[0]}.outcome").read_bytes())[0]
        return result


def _wait(workers: LocalWorkers, names: Sequence[str], timeout: float) -> None:
    """Until all have ended; raises WorkerFailed if one fails, or is late."""
    deadline, sooner = time.monotonic() + timeout, False
    while workers.running and time.monotonic() < deadline:
        workers.look()
        if not sooner and (workers.failed or workers.status(0) is not None):
            sooner = True
            deadline = min(deadline, time.monotonic() + (GRACE if workers.failed else LEAVE_TIMEOUT))
        time.sleep(LOOK)
    if workers.failed:
        raise workers.failure()
    late = [name for rank, name in enumerate(names) if workers.status(rank) is None]
    if late:
        verb = f"had not ended when {'its' if len(late) == 1 else 'their'} time was over"
        raise WorkerFailed(f"{', '.join(late)} {verb} (the run had {timeout:g} s)", late)


class Forked:
    """A process, forked from the server, that calls a function (see `aiorpc.run.LocalProcess`).

    folder: that of the run; what the function returned is there, in NAME.outcome. preload: what the server imports.
    """

    def __init__(
        self,
        function: Callable[[], object],
        name: str,
        folder: str,
        variables: Mapping[str, str],
        preload: Sequence[str] = (),
    ) -> None:
        self._outcome = Path(folder) / f"{name}.outcome"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", *preload])
        self._process = context.Process(target=_child, args=(function, self._outcome, dict(variables)), name=name)
        with _environment(ONE_THREAD):
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def error(self) -> str:
        """Its traceback, or how it ended without one."""
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            error: str = pickle.loads(self._outcome.read_bytes())[1]
            return error or f"after its work was done, {how_it_ended(self._process.exitcode or 0)}"
        return how_it_ended(self._process.exitcode or 0)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
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


def _child(function: Callable[[], object], outcome: Path, variables: dict[str, str]) -> None:
    """What a started process does: become one worker, call the function, leave the outcome."""
    os.environ.update(variables)
    tempfile.tempdir = None  # found anew, from TMPDIR
    # Ctrl-C reaches the whole process group; the launcher ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_launcher, args=(outcome.parent,), name="end-with-launcher", daemon=True).start()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's many objects live as long as the process: no collection need visit them
    left: tuple[Any, str] = None, ""
    try:
        left = function(), ""
    except Exception:
        left = None, traceback.format_exc()
    outcome.write_bytes(pickle.dumps(left))
    if left[1]:
        sys.stdout.flush()
        sys.stderr.flush()
        # No orderly exit: what failed may be waited for by what an exit would wait for.
        os._exit(1)


def _end_with_launcher(folder: Path) -> None:
    """End this process when the launcher is gone, even by SIGKILL: no workers or files may be left."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
