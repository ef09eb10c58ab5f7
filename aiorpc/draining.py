"""Signals that drain the workers of this process. The model:

1. A worker that is started in the main thread installs a handler for each signal of its option ``drain_on`` that has
   its default disposition. A handler of the program's stays. The last worker gives the disposition back.
2. The first signal begins the drain of all workers, by a thread of its own. The signals that follow change nothing.
3. `REST` seconds after the bound of the drain that thread sends the signal again; then the handler restores the default
   disposition, and the signal ends the program.
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
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Protocol

from .errors import RpcUsageError
from .logs import logger
from .options import RpcBackendOptions
from .protocol.states import WorkerState
from .runtime.engine.loops import LoopThread

#: Seconds that a program has to end after the bound of its drain.
REST = 5.0
# Seconds between SIGTERM and SIGKILL: of torchrun always; of Slurm (KillWait) unless the site has set others.
_KILLED_AFTER = 30.0
# Seconds between two looks whether a worker has left.
_LOOK = 0.02
_JOINED = (WorkerState.RUNNING, WorkerState.LEAVING, WorkerState.DRAINING, WorkerState.CLOSING)


class DrainedWorker(Protocol):
    """A `Worker`."""

    name: str
    options: RpcBackendOptions

    @property
    def state(self) -> WorkerState: ...

    @property
    def _thread(self) -> LoopThread | None: ...

    def _begin_to_drain(self, asked_by: str) -> None:
        """Drain within the option ``drain_timeout``. Any thread; does not wait."""


class _Drains:
    """The handler, and the workers that it drains. `handle` runs in the main thread."""

    def __init__(self) -> None:
        # Replaced, not changed: the handler may interrupt a change.
        self._workers: weakref.WeakSet[DrainedWorker] = weakref.WeakSet()
        self._installed: tuple[int, ...] = ()
        self._begun = self._over = False  # whether a signal has come, and whether the time of the program is up
        self._forks_told = False
        self._masks: dict[int, set[int]] = {}  # of threads that fork, from before that; by their numbers

    def follow(self, worker: DrainedWorker | None = None) -> None:
        """Install the handler for the signals of the living workers, or restore the default. Any thread; only in the
        main thread it does something to signals.

        worker: one that is started.
        """
        workers = [each for each in list(self._workers) if each.state is not WorkerState.CLOSED]
        self._workers = weakref.WeakSet(workers if worker is None else [*workers, worker])
        if threading.current_thread() is not threading.main_thread():
            return
        wanted = {int(signal.Signals[name]) for each in self._workers for name in each.options.drain_on}
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
        joined = any(each.state in _JOINED for each in list(self._workers))
        if self._over or not (self._begun or joined):
            self._restore(number)
            os.kill(os.getpid(), number)
        elif not self._begun:
            self._begun = True
            _thread.start_new_thread(self._drain, (number,))  # `threading` takes locks that this thread may hold

    def _drain(self, number: int) -> None:
        """Drain all workers; when the time is up, end the process. In a thread of its own."""
        began, name = time.monotonic(), signal.Signals(number).name
        workers = list(self._workers)
        for worker in workers:
            worker._begin_to_drain(name)
        bounds = [worker.options.drain_timeout for worker in workers]
        for worker in workers:
            while worker.state is not WorkerState.CLOSED:
                if self._is_over(began, bounds):
                    break
                time.sleep(_LOOK)
            else:
                if (thread := worker._thread) is not None:
                    thread.close()  # its loop must not run when the interpreter ends
        if not all(bounds):
            return
        while not self._is_over(began, bounds):
            time.sleep(_LOOK)
        logger.warning(
            "%s came %.1f s ago, and the program goes on: it is ended now, %g s after drain_timeout",
            name,
            time.monotonic() - began,
            REST,
        )
        self._over = True
        os.kill(os.getpid(), number)

    def _is_over(self, began: float, bounds: Sequence[float]) -> bool:
        return all(bounds) and time.monotonic() > began + max(bounds, default=0.0) + REST

    def _before_fork(self) -> None:
        # A child forgets what it was sent before it was told of the fork: `Process.terminate` would wait for ever.
        self._masks[threading.get_ident()] = {*signal.pthread_sigmask(signal.SIG_BLOCK, self._installed)}

    def _unmask(self) -> None:
        mask = self._masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _after_fork(self) -> None:
        self._workers, self._begun, self._over = weakref.WeakSet(), False, False
        for number in self._installed:
            with contextlib.suppress(ValueError):
                self._restore(number)
        self._unmask()


_drains = _Drains()
follow: Callable[..., None] = _drains.follow


def check_bound(options: RpcBackendOptions, environ: Mapping[str, str]) -> None:
    """RpcUsageError if the launcher kills a worker before its drain is over; a warning if it may do so."""
    seconds = options.drain_timeout
    if "SIGTERM" not in options.drain_on or 0 < seconds <= _KILLED_AFTER - REST:
        return
    bound = f"drain_timeout is {seconds:g} s" if seconds else "drain_timeout is 0 (no limit)"
    most = _KILLED_AFTER - REST
    if environ.get("TORCHELASTIC_RUN_ID"):
        raise RpcUsageError(
            f"{bound}, and torchrun kills a process {_KILLED_AFTER:g} s after SIGTERM: set at most {most:g} s, which "
            f"leaves the program {REST:g} s to end; or drain_on=() to let SIGTERM end it at once"
        )
    if environ.get("SLURM_JOB_ID"):
        logger.warning(
            "%s, and Slurm kills a process KillWait after SIGTERM, which is %g s unless the site has set more "
            "(`scontrol show config`): set at most KillWait - %g s",
            bound,
            _KILLED_AFTER,
            REST,
        )
