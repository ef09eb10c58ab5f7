"""A launcher for one machine: ``python -m aiorpc.run --workers 4 script.py ARGS`` starts so many workers, and watches
them.

Each worker is a process with the variables of torchrun, so ``rpc.init(f"w{os.environ['RANK']}")`` needs nothing else.
The store where they meet is here: the death of a worker does not take it along. Processes, their files and the tailing
of these are those of `torch.distributed.elastic.multiprocessing`, which itself ends all workers when one fails;
`LocalWorkers` can start that one again. It is the Python interface, with which programs start workers of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO, cast

from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from .draining import GRACE
from .errors import RendezvousError
from .runtime.meeting.stores import serve

#: Seconds between two looks at the workers, and the longest pause before one is started again (1, 2, 4 ... before).
LOOK, LONGEST_PAUSE = 0.05, 30.0
_HOST = "127.0.0.1"
_USUAL_GRACE = 30.0  # seconds, as torchrun's
_LAST_LINES = 5


class LocalProcess(Protocol):
    """A worker's process, as `LocalWorkers` sees it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, to the processes that it has started as well. Does nothing if it has ended."""

    def error(self) -> str:
        """What it has left about its failure; "" if nothing. Called once, after its end."""


#: Starts the worker of that rank with these variables.
Start = Callable[[int, Mapping[str, str]], LocalProcess]


class WorkerFailed(RuntimeError):
    """Workers died or failed; the text says which, how, and what they left. workers: their names, the cause first.
    status: the exit status for a launcher, 128 and the number for a signal."""

    def __init__(self, message: str, workers: Sequence[str], status: int = 1) -> None:
        super().__init__(message)
        self.workers: tuple[str, ...] = tuple(workers)
        self.status = status


def how_it_ended(exitcode: int) -> str:
    """An exit status in words."""
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    known = -exitcode in [*signal.Signals]  # of the real-time ones most have no name
    return f"was killed by {signal.Signals(-exitcode).name if known else f'signal {-exitcode}'}"


class _Seat:
    """One worker: its process, how often that was started again, and when it is to be."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.process: LocalProcess | None = None
        self.restarts = 0
        self.due: float | None = 0.0  # None: it runs, or has ended for good
        self.exitcode: int | None = None
        self.before = 0  # its exit status, before it was to be started again
        self.error = ""

    @property
    def running(self) -> bool:
        return self.process is not None and self.exitcode is None

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, pid {self.process.pid if self.process else None})"


class LocalWorkers:
    """Workers on this machine, and the store where they meet. A context manager, whose end ends them all.

    start: starts one; raises what it likes. names: by rank, for messages. free: where they form a group without a size,
    as init_method; else they form one of fixed size. max_restarts: how often each is started again after it has failed.
    grace: seconds between the signals that end one. tell: gets a line for each one that is started again.
    Raises RendezvousError if the store cannot listen. Methods are for one thread at a time, `send` and `end` as well.
    """

    def __init__(
        self,
        start: Start,
        names: Sequence[str],
        *,
        free: str = "",
        max_restarts: int = 0,
        grace: float = _USUAL_GRACE,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._start = start
        self._max_restarts = max_restarts
        self._grace = grace
        self._tell = tell
        self._seats = [_Seat(rank, name) for rank, name in enumerate(names)]
        self._failed: list[_Seat] = []
        self._store, port = serve(_HOST, 0)
        size = str(len(names))
        self._variables = {
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RUN_ID": f"aiorpc-{os.getpid()}-{port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "AIORPC_INIT_METHOD": free,  # empty: not that of a launcher around this one
            **({} if free else {"WORLD_SIZE": size}),
            # Of a shorter one the default of drain_timeout does not fit: it cuts drains short, as was asked for.
            **({GRACE: f"{grace:g}"} if grace > _USUAL_GRACE else {}),
        }

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    @property
    def running(self) -> bool:
        """Whether a worker runs, or is to be started again."""
        return any(seat.running or seat.due is not None for seat in self._seats)

    @property
    def failed(self) -> bool:
        """Whether a worker has failed that is not started again."""
        return bool(self._failed)

    def status(self, rank: int) -> int | None:
        """The exit status of that worker, negative for a signal; None if it runs, or is to be started again."""
        return self._seats[rank].exitcode

    def look(self) -> None:
        """Start those whose time has come, at first all, and see who has ended. Call it now and then."""
        for seat in self._seats:
            self._see(seat)
            if seat.due is not None and time.monotonic() >= seat.due:
                self._launch(seat)

    def _see(self, seat: _Seat) -> None:
        code = seat.process.poll() if seat.running and seat.process is not None else None
        if code is None or seat.process is None:
            return
        if code == 0:
            seat.exitcode = 0
        elif seat.restarts < self._max_restarts:
            pause = min(2.0**seat.restarts, LONGEST_PAUSE)
            seat.restarts += 1
            count = f"{seat.restarts} of {self._max_restarts}"
            self._tell(f"{seat} {how_it_ended(code)}; it is started again in {pause:g} s ({count})")
            seat.process, seat.due, seat.before = None, time.monotonic() + pause, code
        else:
            seat.exitcode, seat.error = code, seat.process.error()
            self._failed.append(seat)

    def _launch(self, seat: _Seat) -> None:
        rank, count = str(seat.rank), str(seat.restarts)
        own = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": count}
        seat.process = self._start(seat.rank, {**self._variables, **own})
        seat.due = seat.exitcode = None

    def replace(self, rank: int) -> None:
        """Kill that worker and start it again at once, which does not count as a failure."""
        seat = self._seats[rank]
        if seat.running and seat.process is not None:
            seat.process.send(signal.SIGKILL)
            self._wait([seat], self._grace)
        self._launch(seat)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all that run; from now on none is started again. One that was to be has failed."""
        for seat in self._seats:
            if seat.due is not None:
                seat.due, seat.exitcode = None, seat.before or -number
                self._failed.append(seat)
            if seat.running and seat.process is not None:
                seat.process.send(number)
        self._max_restarts = 0

    def end(self) -> None:
        """End all: SIGTERM, and SIGKILL to those that are there when the grace is over."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send(number)
            self._wait(self._seats, self._grace)

    def _wait(self, seats: Sequence[_Seat], seconds: float) -> None:
        """Until these have ended, which is no failure of theirs."""
        deadline = time.monotonic() + seconds
        while (left := [seat for seat in seats if seat.running]) and time.monotonic() < deadline:
            for seat in left:
                seat.exitcode = seat.process.poll() if seat.process is not None else None
            time.sleep(0.01)

    def failure(self) -> WorkerFailed:
        """The error for those that have failed. One death makes the calls of all others fail: those that a signal has
        killed come first."""
        failed = sorted(self._failed, key=lambda seat: (seat.exitcode or 0) > 0)
        lines = [f"{seat}: {seat.error or how_it_ended(seat.exitcode or 0)}" for seat in failed]
        first = failed[0].exitcode or 0
        status = first if first >= 0 else 128 - first
        return WorkerFailed("\n".join(lines), [seat.name for seat in failed], status)


class _Lines:
    """Writes whole lines with a prefix. TailLog hands on what it has found, which may end within a line."""

    def __init__(self, prefix: str, stream: TextIO) -> None:
        self._prefix = prefix
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> None:
        self._begun += text
        if text.endswith("\n"):
            with contextlib.suppress(BrokenPipeError):  # SIGPIPE ends all
                self._stream.write(f"{self._prefix}{self._begun}")
                self._stream.flush()
            self._begun = ""

    def close(self) -> None:
        """Write a last line that has no end."""
        if self._begun:
            self.write("\n")


class _Command:
    """A process that runs a command. What it writes goes into files, and from there to our output."""

    def __init__(self, command: Sequence[str], name: str, folder: Path, variables: Mapping[str, str]) -> None:
        stem = f"{name}.{variables['TORCHELASTIC_RESTART_COUNT']}"
        out, self._err, self._error = (folder / f"{stem}.{end}" for end in ("out", "err", "error.json"))
        self._error.unlink(missing_ok=True)
        environment = {**variables, "TORCHELASTIC_ERROR_FILE": str(self._error)}
        rank = int(variables["LOCAL_RANK"])
        entry, *arguments = command
        self._handler = get_subprocess_handler(entry, tuple(arguments), environment, str(out), str(self._err), rank)
        self._tails = []
        for path, stream in ((out, sys.stdout), (self._err, sys.stderr)):
            lines = _Lines(f"[{name}] ", stream)
            self._tails.append((TailLog(name, {0: str(path)}, cast("TextIO", lines), {0: ""}).start(), lines))

    @property
    def pid(self) -> int:
        return self._handler.proc.pid

    def poll(self) -> int | None:
        """Also ends what the process has started and left, and writes the rest of its output."""
        if self._handler.proc.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            # Not waited for yet, so the number of its group is no other's.
            well = ended.si_code == os.CLD_EXITED and ended.si_status == 0
            self._handler.close(signal.SIGTERM if well else signal.SIGKILL)
            self._handler.proc.wait()
            for tail, lines in self._tails:
                tail.stop()
                lines.close()
        return self._handler.proc.returncode

    def send(self, number: signal.Signals) -> None:
        if self._handler.proc.returncode is None:
            self._handler.close(number)

    def error(self) -> str:
        """How it ended, and the traceback that torch's `record` has left, or the last lines of its errors."""
        how = how_it_ended(self._handler.proc.returncode)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return f"{how}\n{json.loads(self._error.read_text())['message']['extraInfo']['py_callstack'].rstrip()}"
        last = self._err.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"{how}, after" if last else how, *last])


def commands(command: Sequence[str], names: Sequence[str], folder: Path) -> Start:
    """Starts that command for each worker, with a secret of their own unless there is one. The files of their output
    are in the folder: NAME.ATTEMPT.out, .err and .error.json (torch's `record`)."""
    more = {"PYTHONUNBUFFERED": "1"}
    if not any(os.environ.get(name) for name in ("AIORPC_SECRET", "AIORPC_SECRET_FILE")):
        more["AIORPC_SECRET"] = secrets.token_hex()
    if len(names) > 1 and "OMP_NUM_THREADS" not in os.environ:
        more["OMP_NUM_THREADS"] = "1"  # as torchrun: the workers share the cores
    return lambda rank, variables: _Command(command, names[rank], folder, {**variables, **more})


def _tell(line: str) -> None:
    print(f"aiorpc.run: {line}", file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m aiorpc.run", description="Start workers on this machine.")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--restart", choices=["on-failure"], help="start a worker that fails again, not end all")
    parser.add_argument("--max-restarts", type=int, metavar="N", help="of each worker (3)")
    parser.add_argument("--free", action="store_true", help="they form a group without a size")
    parser.add_argument("--log-dir", metavar="DIR", help="keep the output of each worker in files there")
    parser.add_argument(
        "--grace",
        type=float,
        default=_USUAL_GRACE,
        metavar="SECONDS",
        help="between the signals that end a worker (30)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    given = parser.parse_args(argv)
    if given.workers < 1:
        parser.error(f"--workers must be at least 1, not {given.workers}")
    if given.max_restarts is not None and given.restart is None:
        parser.error("--max-restarts says how often --restart on-failure starts a worker again: give both")
    if given.max_restarts is not None and given.max_restarts < 0:
        parser.error(f"--max-restarts must not be negative, but is {given.max_restarts}")
    if not 0 <= given.grace <= 86_400:
        parser.error(f"--grace must be between 0 and 86400 seconds, not {given.grace:g}")
    if given.module:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        found = None
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(given.script)
        if found is None:
            parser.error(f"there is no module {given.script}")
    elif not os.path.isfile(given.script):
        parser.error(f"there is no file {given.script}")
    try:
        if given.log_dir:
            os.makedirs(given.log_dir, exist_ok=True)
            tempfile.TemporaryFile(dir=given.log_dir).close()  # and that it can be written to
    except OSError as error:
        parser.error(f"--log-dir: {error}")
    return given


def _supervise(workers: LocalWorkers, asked: Sequence[signal.Signals], grace: float) -> int:
    """Until all have ended by themselves, or one has failed or a signal came, and so all were ended."""
    while workers.running and not workers.failed and not asked:
        time.sleep(LOOK)
        workers.look()
    failure = workers.failure() if workers.failed else None
    if failure is not None:
        _tell(f"failed, so all are ended:\n{failure}")
    # The next signal, or the end of the grace, brings the next stronger one.
    strength = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    for number in strength[strength.index(signal.SIGTERM if failure or not asked else asked[0]) :]:
        workers.send(number)
        count, deadline = len(asked), time.monotonic() + grace
        while workers.running and len(asked) == count and time.monotonic() < deadline:
            time.sleep(LOOK)
            workers.look()
    if failure is not None:
        return failure.status
    return 128 + asked[0] if workers.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 0 if all workers ended with 0, else that of the first failure, or 128 and
    the number of the signal that ended all. Call it from the main thread; it takes over SIGINT, SIGTERM and SIGHUP."""
    given = _arguments(argv)
    names = [f"worker{rank}" for rank in range(given.workers)]
    asked: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        if number == signal.SIGPIPE or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            meaning = number if number == signal.SIGINT else signal.SIGTERM
            signal.signal(number, lambda *_, meaning=meaning: asked.append(meaning))
    os.environ.pop("WORLD_SIZE", None)  # of a launcher around this one
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # workers would take their input from each other
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(tempfile.TemporaryDirectory(prefix="aiorpc-run-"))
        command = [sys.executable, *(["-m"] if given.module else []), given.script, *given.arguments]
        restarts = 0 if given.restart is None else 3 if given.max_restarts is None else given.max_restarts
        try:
            workers = LocalWorkers(
                commands(command, names, Path(given.log_dir or here)),
                names,
                free=f"file://{here}/meet" if given.free else "",
                max_restarts=restarts,
                grace=given.grace,
                tell=_tell,
            )
        except RendezvousError as error:
            _tell(str(error))
            return 1
        return _supervise(stack.enter_context(workers), asked, given.grace)


if __name__ == "__main__":
    sys.exit(main())
