"""Signals that drain the workers of this process. The model:

1. A worker that has joined in the main thread installs a handler for each signal of its option ``drain_on`` that has
   its default disposition. A handler of the program's stays. The last worker gives the disposition back.
2. The first signal begins the drain of all workers, by a thread of its own. The signals that follow change nothing.
3. `REST` seconds after the bound of the drain that thread sends the signal again; then the handler restores the default
   disposition, and the signal ends the program. The kernel spares process 1 of a container, and a main thread in a
   function of C runs no handler: after `_LAST` more seconds the thread ends the process itself.
4. While no worker has joined, and in forked children, the signal does what it did before.

The handler runs in the main thread, between two instructions of Python or in a wait that Python can interrupt. So it
takes no locks and waits for nothing. A main thread in a function of C that does not return runs no handler: nothing
drains then.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from .errors import RpcUsageError
from .logs import logger
from .options import RpcBackendOptions
from .protocol.states import WorkerState
from .runtime.node import registry

#: Seconds that a program has to end after the bound of its drain.
REST = 4.0
#: The variable by which a launcher says how many seconds there are between its SIGTERM and its SIGKILL.
GRACE = "AIORPC_GRACE"
# Those seconds of torchrun, always; and of Slurm (KillWait) unless the site has set others.
_USUAL_GRACE = 30.0
# Seconds for the signal that ends a program to do so.
_LAST = 0.5
# Seconds between two looks at the workers.
_LOOK = 0.02


class _Drains:
    """The handler. `handle` and what changes handlers run in the main thread."""

    def __init__(self) -> None:
        self._installed: tuple[int, ...] = ()
        self._begun = False  # whether a signal has come
        self._ends = False  # whether the next signal ends the program
        self._forks_told = False
        self._masks: dict[int, set[int]] = {}  # of threads that fork, from before that; by their numbers

    def follow(self) -> None:
        """Install the handler for the signals of the living workers, or restore the default. Any thread; does nothing
        but in the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        wanted = {int(signal.Signals[name]) for node in registry.nodes() for name in node.engine.options.drain_on}
        with contextlib.suppress(ValueError):  # this is not the main interpreter
            for number in wanted.difference(self._installed):
                if signal.getsignal(number) is signal.SIG_DFL:
                    if not self._forks_told:
                        self._forks_told = True
                        os.register_at_fork(
                            before=self._before_fork, after_in_parent=self._unmask, after_in_child=self._after_fork
                        )
                    self._installed = (*self._installed, number)
                    signal.signal(number, self.handle)
            if not self._begun:  # otherwise the program is about to end, and a second signal shall not hurry it
                for number in set(self._installed).difference(wanted):
                    self._restore(number)

    def _restore(self, number: int) -> None:
        if signal.getsignal(number) == self.handle:
            signal.signal(number, signal.SIG_DFL)
        self._installed = tuple(each for each in self._installed if each != number)

    def handle(self, number: int, _: FrameType | None) -> None:
        """Begin to drain; or end the process as the signal would have."""
        if self._ends:
            self._restore(number)
            os.kill(os.getpid(), number)
        elif not self._begun:
            _thread.start_new_thread(self._drain, (number,))  # `threading` takes locks that this thread may hold
            self._begun = True

    def _drain(self, number: int) -> None:
        """Drain all workers; when the time is up, end the process. In a thread of its own."""
        began, name = time.monotonic(), signal.Signals(number).name
        workers: list[Any] = []  # each a Worker
        while True:
            for node in registry.nodes():
                if node.worker not in workers:  # it may join while others drain
                    workers.append(node.worker)
                    node.worker._begin_to_drain(name)
            closed = [worker for worker in workers if worker.state is WorkerState.CLOSED]
            for worker in closed:
                if worker._thread is not None:
                    worker._thread.close()  # its loop must not run when the interpreter ends
            bounds = [worker.options.drain_timeout for worker in workers]
            if not all(bounds):
                if len(closed) == len(workers):
                    self._ends = True
                    return
            elif time.monotonic() > began + (max(bounds) + REST if bounds else 0.0):
                break
            time.sleep(_LOOK)
        if workers:
            logger.warning(
                "%s came %.1f s ago, and the program goes on: it is ended now, %g s after drain_timeout",
                name,
                time.monotonic() - began,
                REST,
            )
        self._ends = True
        os.kill(os.getpid(), number)
        time.sleep(_LAST)
        os._exit(128 + number)

    def _before_fork(self) -> None:
        # A child forgets what it was sent before it was told of the fork: `Process.terminate` would wait for ever.
        self._masks[threading.get_ident()] = {*signal.pthread_sigmask(signal.SIG_BLOCK, self._installed)}

    def _unmask(self) -> None:
        mask = self._masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _after_fork(self) -> None:
        self._begun = self._ends = False
        for number in self._installed:
            with contextlib.suppress(ValueError):
                self._restore(number)
        self._unmask()


_drains = _Drains()
follow: Callable[[], None] = _drains.follow


def check_bound(options: RpcBackendOptions, environ: Mapping[str, str]) -> None:
    """RpcUsageError if the launcher kills a worker before its drain is over; a warning if it may do so.

    Raises RpcUsageError, too, for a variable AIORPC_GRACE that is no number of seconds.
    """
    said = environ.get(GRACE)
    grace = _USUAL_GRACE
    if said:
        try:
            grace = float(said)
        except ValueError:
            grace = float("nan")
        if not grace >= 0:
            raise RpcUsageError(f"{GRACE} must be the seconds between SIGTERM and SIGKILL, as 60, and not {said!r:.80}")
    seconds, most = options.drain_timeout, grace - REST
    if "SIGTERM" not in options.drain_on or (seconds or float("inf")) <= most:
        return
    bound = f"drain_timeout is {seconds:g} s" if seconds else "drain_timeout is 0 (no limit)"
    if said or environ.get("TORCHELASTIC_RUN_ID"):
        launcher = f"the launcher, as {GRACE} says," if said else "torchrun"
        lower = f"set at most {most:g} s, which leaves the program {REST:g} s to end; or " if most > 0 else "set "
        raise RpcUsageError(
            f"{bound}, and {launcher} kills a process {grace:g} s after SIGTERM: {lower}drain_on=() to let SIGTERM end "
            "it at once"
        )
    if environ.get("SLURM_JOB_ID"):
        logger.warning(
            "%s, and Slurm kills a process KillWait after SIGTERM, which is %g s unless the site has set more "
            "(`scontrol show config`): set at most KillWait - %g s, or %s to what the site has set",
            bound,
            grace,
            REST,
            GRACE,
        )
