"""Roles for the tests of the launcher: each does one thing that a worker's role may do."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
import time
from typing import Any

from aiorpc.examples._shared.launch import Place


def describe(place: Place, settings: str) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {"rank": place.rank, "settings": settings, "cpu_seconds": time.process_time()} | {
        name: os.environ.get(name) for name in names
    }


def raise_on_one(place: Place, settings: str) -> None:
    """Rank 1 raises; the others wait for it for ever."""
    if place.rank == 1:
        raise ValueError(settings)
    threading.Event().wait()


def die_on_two(place: Place, settings: str) -> None:
    """Rank 2 is killed; rank 1 notices and raises; rank 0 waits for ever."""
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if place.rank == 1:
        raise ConnectionError(settings)
    threading.Event().wait()


def exit_on_one(place: Place, settings: str) -> None:
    """Rank 1 leaves without a word."""
    if place.rank == 1:
        os._exit(7)
    threading.Event().wait()


def wait_for_ever(place: Place, settings: str) -> None:
    """Deaf to SIGTERM as well."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def fail_at_exit(place: Place, settings: str) -> str:
    """Everything is done, and then the process ends badly."""
    if place.rank == 1:
        # What runs when a process of multiprocessing ends; atexit's functions do not.
        multiprocessing.util.Finalize(None, os._exit, args=(9,), exitpriority=1)
    return settings
