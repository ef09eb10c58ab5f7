"""A group whose workers are processes, for tests of their death, memory and modules."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from ..errors import RendezvousError, RpcUsageError
from ..options import RpcBackendOptions
from ..sync import init_rpc, shutdown
from ..worker import Worker
from .clusters import helping_loop

_ENDING = 10.0  # seconds that a process has to end by itself


class ProcessCluster:
    """What `process_cluster` gives. From one thread.

    worker: the worker of this process, ``test``. processes: those of the others, by their names.
    """

    def __init__(self, worker: Worker, options: RpcBackendOptions, timeout: float) -> None:
        self.worker = worker
        self.processes: dict[str, SpawnProcess] = {}
        self._options = options
        self._timeout = timeout
        self._pipes: dict[str, Connection] = {}

    def start(self, *names: str) -> None:
        """Start a process for each name, and wait until they have joined. A name whose process was killed is free.

        RendezvousError for a process that ends before, or does not join in time; RpcUsageError for a name in use.
        """
        context = multiprocessing.get_context("spawn")
        for name in names:
            if name in self.processes and self.processes[name].is_alive():
                raise RpcUsageError(f"the process of {name!r} lives: kill it before another one takes its name")
            self._forget(name)
            self._pipes[name], theirs = context.Pipe()
            process = context.Process(target=_live, args=(name, self._options, theirs), name=name, daemon=True)
            process.start()
            theirs.close()
            self.processes[name] = process
        for name in names:
            self._expect(name)

    def _expect(self, name: str) -> None:
        # Its process has joined, and the worker here knows.
        pipe = self._pipes[name]
        if not pipe.poll(self._timeout):
            raise RendezvousError(f"{name!r} has not joined within {self._timeout:g} s")
        try:
            failure = pipe.recv()
        except EOFError:
            self.processes[name].join(_ENDING)
            failure = f"its process ended with exit code {self.processes[name].exitcode}"
        if failure:
            raise RendezvousError(f"{name!r} cannot join: {failure}")
        self.worker.wait_for(name, timeout=self._timeout).wait()

    def kill(self, name: str) -> None:
        """End a worker's process by SIGKILL, and wait for its end. Calls to it fail with PeerLost."""
        process = self.processes[name]
        process.kill()
        process.join()

    def end(self) -> None:
        """End all processes: each leaves the group, and is killed if it has not ended after 10 s."""
        for pipe in self._pipes.values():
            pipe.close()
        for name, process in self.processes.items():
            process.join(_ENDING)
            if process.is_alive():
                self.kill(name)
        for name in list(self.processes):
            self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self.processes:
            self._pipes.pop(name).close()
            self.processes.pop(name).close()


@contextlib.contextmanager
def process_cluster(
    size: int = 2, *, options: RpcBackendOptions | None = None, timeout: float = 120.0
) -> Iterator[ProcessCluster]:
    """``with process_cluster(2) as group``: processes ``worker0``, ``worker1``..., and ``group.worker`` in this one.

    The group has no fixed size: workers may be killed, and others may join. The processes are spawned, so they import
    the modules that functions which are called there come from, by the ``sys.path`` of this process. In a process its
    worker is that of ``init_rpc``. options: for all of them. timeout: seconds for a process to start and to join.

    At the end all leave at once: calls still under way fail with WorkerClosed or PeerLeft. Blocks; not on a running
    loop. Raises RpcUsageError for a size below 1, and RendezvousError for a process that cannot join.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise RpcUsageError(f"a cluster has at least 1 worker, not {size!r}")
    with tempfile.TemporaryDirectory(prefix="aiorpc-") as folder, helping_loop() as loop:
        chosen = RpcBackendOptions() if options is None else options.copy()
        chosen.init_method = f"file://{folder}/meet"
        worker = Worker("test", options=chosen)
        worker.options.dedicated_loop = True
        group = ProcessCluster(worker, chosen, timeout)
        try:
            loop.run(worker.start())
            group.start(*(f"worker{number}" for number in range(size)))
            yield group
        finally:
            group.end()
            loop.run(worker.shutdown(graceful=False))


def _live(name: str, options: RpcBackendOptions, pipe: Connection) -> None:
    """The main function of a process: join, report it, and serve until the other end of the pipe is closed."""
    try:
        init_rpc(name, rpc_backend_options=options)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send("")
    with contextlib.suppress(EOFError):
        pipe.recv()
    shutdown(graceful=False)
