"""Keeps the processor cores from halting while workers are measured that sleep as they wait.

Waking a halted core costs a virtual machine tens of microseconds, more than everything else in a small call, and
comes and goes with whatever else happens to run. torch's workers never let their cores halt: each polls shared
memory with a whole core, also while nobody calls (see the measurement ``idle``). So that both sides are measured on
cores that are awake, a process of the scheduling class SCHED_IDLE spins on each core while callers of aiorpc await;
the kernel gives it only time that nobody wants. It is stopped while torch's workers run, and while callers of aiorpc
block: both stay awake by themselves as they wait, and give way with sched_yield, of which such a process takes
milliseconds. Where each wait is longer than that, as for large layers, callers that block are kept awake for as well.
The measurements ``noop_halting`` and ``autograd_shards`` show the same without it.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.context import ForkServerProcess

from .cohort import JOIN_SECONDS, fork_server


class Keepers:
    """One spinning process per core, stopped until ``resume``. Without SCHED_IDLE (not Linux) there are none."""

    def __init__(self) -> None:
        self._processes: list[ForkServerProcess] = []
        self._running = False

    def _start(self) -> None:
        if hasattr(os, "SCHED_IDLE"):
            for core in sorted(os.sched_getaffinity(0)):
                process = fork_server().Process(target=spin, args=(core,), name=f"keeper of core {core}", daemon=True)
                process.start()
                self._processes.append(process)

    def resume(self) -> None:
        """Keep all cores awake from now on."""
        if not self._running:
            self._running = True
            if not self._processes:
                self._start()
            self._signal(signal.SIGCONT)

    def pause(self) -> None:
        """Let cores halt again."""
        if self._running:
            self._running = False
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._running = False
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join(JOIN_SECONDS)
        self._processes = []

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)


def spin(core: int) -> None:
    """Entry of a keeper: use what is left of one core until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(10_000):
            pass
