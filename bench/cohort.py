"""The worker processes of one side, forked from one server that has torch imported and no threads."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from .hosts import Hosts
from .rank import Command, Failed, RankSpec, Ready, settle, start
from .sides import SideName, Style
from .stats import BenchError

JOIN_SECONDS = 20.0
START_SECONDS = 60.0
COMMAND_SECONDS = 60.0
_PRELOAD = ["torch", "torch.distributed.rpc", "uvloop", "aiorpc.api", "aiorpc.sync", "bench.rank"]
_PRELOAD += [
    "bench.clients",
    "bench.bulk_clients",
    "bench.awaited",
    "bench.count_clients",
    "bench.message_clients",
    "bench.group_clients",
    "bench.publishing_clients",
    "bench.host_clients",
]
_PRELOAD += ["gymnasium.envs.classic_control", "aiorpc.examples._shared.rl"]  # what the batch_rl example needs
_SINGLE_THREADED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@functools.cache
def fork_server() -> ForkServerContext:
    """The context all workers are started from. A fork server without threads is what makes forking safe."""
    for name in _SINGLE_THREADED:
        os.environ[name] = "1"
    os.environ["PYTHONWARNINGS"] = "ignore:You are using a Backend"  # torch warns of itself when its RPC shuts down
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    first = context.Process(target=os.getpid)  # waits until the server has imported everything
    first.start()
    first.join(START_SECONDS)
    return context


@contextlib.contextmanager
def process_of(target: Callable[[Connection], object], name: str) -> Iterator[Connection]:
    """The pipe to a process of the fork server that runs `target` with its own end; both end with the block."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), name=name, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(JOIN_SECONDS)


def free_address() -> str:
    """A ``tcp://`` rendezvous on a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Cohort:
    """All workers of one world of one side. Every wait has a bound; a worker that dies is named in the error.

    side: whose. start_up: seconds from the first fork until the last worker had joined. counted: the workers count the
    Python functions that they run (see `counter`).
    """

    def __init__(
        self,
        side: SideName,
        names: Sequence[str],
        style: Style = "blocking",
        options: dict[str, Any] | None = None,
        *,
        counted: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self.label = f"{side} ({style})"
        self.names = list(names)
        self.side = side
        self.style = style
        self.start_up = 0.0
        address = free_address() if hosts is None else hosts.meeting
        places = [""] * len(names) if hosts is None else [host.namespace for host in hosts.all]
        self._specs = [
            RankSpec(side, style, name, rank, len(names), address, options or {}, counted, place)
            for rank, (name, place) in enumerate(zip(names, places, strict=True))
        ]
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def start(self) -> Cohort:
        """Start all workers and wait until they have joined; BenchError, with none left, when one did not."""
        context = fork_server()
        begin = time.monotonic()
        try:
            for spec in self._specs:
                self._fork(context, spec)
            joined = [self._receive(rank, START_SECONDS) for rank in range(len(self._specs))]
            self.start_up = max(self._checked(ready).at for ready in joined) - begin
            self.run_many(self.names, settle)
        except BaseException:
            self.kill()
            raise
        return self

    def _fork(self, context: ForkServerContext, spec: RankSpec) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=start, args=(spec, theirs), name=f"{spec.name} of {self.label}", daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _checked(self, ready: Any) -> Ready:
        if not isinstance(ready, Ready):
            raise BenchError(f"{self.label}: a worker answered {ready!r} instead of having joined")
        if not ready.warm:
            raise BenchError("the fork server could not import torch beforehand; start-up would measure the import")
        return ready

    def pause(self) -> None:
        """Stop all workers where they are. An idle worker of torch polls with a whole core, which others would miss."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all workers go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def processor_seconds(self) -> float:
        """Processor time all workers have used so far."""
        return sum(_processor_seconds(process.pid) for process in self._processes if process.pid is not None)

    def run(self, name: str, function: Callable[..., Any], /, **kwargs: Any) -> Any:
        """Run ``function(rpc, **kwargs)`` in the named worker and return its result."""
        return self.run_many([name], function, **kwargs)[0]

    def run_many(self, names: Sequence[str], function: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        """Run the same in several workers at once; results in the order of the names."""
        ranks = [self.names.index(name) for name in names]
        for rank in ranks:
            self._pipes[rank].send(Command(function, kwargs))
        return [self._receive(rank, COMMAND_SECONDS) for rank in ranks]

    def _receive(self, rank: int, timeout: float) -> Any:
        """The answer of one worker; BenchError when it failed, when any worker died, or after ``timeout`` seconds."""
        pipe = self._pipes[rank]
        ready = wait([pipe, *(process.sentinel for process in self._processes)], timeout)
        if pipe not in ready:
            raise BenchError(self._who_died() if ready else self._who_hangs(rank, timeout))
        try:
            answer = pipe.recv()
        except EOFError:
            raise BenchError(self._who_died()) from None
        if isinstance(answer, Failed):
            raise BenchError(f"{self._processes[rank].name} failed:\n{answer.traceback}")
        return answer

    def _who_died(self) -> str:
        for process in self._processes:
            process.join(0.1)
        ended = [each for each in self._processes if not each.is_alive()]
        dead = [f"{each.name} (pid {each.pid}, exit {each.exitcode})" for each in ended]
        return "\n".join([f"died: {', '.join(dead) or 'a pipe closed'}", *self._last_words()])

    def _last_words(self) -> list[str]:
        """Of the workers that have failed, and said so."""
        found = []
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll() and isinstance(said := pipe.recv(), Failed):
                    found.append(f"{process.name}:\n{said.traceback}")
        return found

    def _who_hangs(self, rank: int, timeout: float) -> str:
        process = self._processes[rank]
        if process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)  # its stacks go to stderr
            process.join(0.5)
        return f"{process.name} gave no answer within {timeout:g} s (its stacks are on stderr)"

    def __enter__(self) -> Cohort:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        self.kill()

    def close(self) -> None:
        """Have all workers leave together; BenchError when one of aiorpc's does not end well in time.

        torch's are killed: its graceful shutdown races with the exit of the process that hosts the store (seen:
        "Connection reset by peer" in TensorPipeAgent::join), and nothing is measured after it.
        """
        if self.side == "torch":
            return self.kill()
        self.resume()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        end = time.monotonic() + JOIN_SECONDS
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        wrong = [f"{each.name} (exit {each.exitcode})" for each in self._processes if each.exitcode != 0]
        if wrong:
            told = self._last_words()
            self.kill()
            raise BenchError("\n".join([f"did not leave well: {', '.join(wrong)}", *told]))

    def kill(self) -> None:
        """End whatever is left, at once. Idempotent."""
        self._signal(signal.SIGSTOP)  # first, so that none reports the death of another
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join(JOIN_SECONDS)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _processor_seconds(pid: int) -> float:
    """Time all threads of a process have run: the first field of schedstat, in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text(encoding="utf-8").split()[0]) for each in threads) / 1e9
