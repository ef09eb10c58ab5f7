"""Leader/followers: a thread of a pool stands by for its next job, and one thread at a time polls for it.

Each thread changes its own `Stance` only. A sleeping thread keeps no source alive (`ThreadPool._stand_by`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sized
from typing import Protocol

from .busy_poll import LEAST_TAKEN, BackOff, give_way
from .wakeup import Source, WakeUp

# With more sources than that among the last `_RECENT` jobs no thread begins to stand by: the loop reads for all sources
# at once, and no thread would get two jobs of one source in a row.
_MOST_SOURCES = 8
_RECENT = 32


class JobSource(Source, Protocol):
    """A source of jobs, such as a connection."""

    @property
    def bring(self) -> Callable[[], None]:
        """Called when the descriptor is ready: reads, and submits jobs."""

    @property
    def back_off(self) -> BackOff:
        """Whether polling before sleeping pays (busy_poll.py)."""

    def keep(self) -> bool:
        """Reserve the source for this thread until `leave`: its descriptor wakes no other thread. False if not now."""

    @property
    def leave(self) -> Callable[[], None]:
        """Called when the thread stops polling, after `bring`."""


class Stance(threading.local):
    """A thread's own state.

    source: it stands by for this when it finds no job. wakeup: its own, after the first time. ready: whether its
    running job has called `stand_by`, and so is done but for its answer. kept: the source reserved for it, which it is
    going to poll.
    """

    source: JobSource | None = None
    wakeup: WakeUp | None = None
    ready = False
    kept: JobSource | None = None


class Lookout:
    """See the module. Its methods are for threads of the pool, and do nothing in others.

    moment: seconds that a thread polls at most before it sleeps; 0 for no polling. jobs: of the pool.
    """

    def __init__(self, moment: float, jobs: Sized) -> None:
        self.stance: Stance = Stance()
        self._moment = moment
        self._jobs = jobs
        self._lock = threading.Lock()  # of the polling thread, from `get_ready` on
        # Whether a thread polls, or is about to. Any thread. A method in C, because loops ask it often.
        self.looks: Callable[[], bool] = self._lock.locked
        self._sources: deque[int] = deque(maxlen=_RECENT)  # ids of the last jobs' sources

    def crowded(self) -> bool:
        """Whether jobs come from too many sources for a thread to begin to stand by."""
        return len({*self._sources}) > _MOST_SOURCES

    def stand_by(self, source: JobSource) -> None:
        """The calling thread of the pool waits for jobs of that source, too, the next time it finds none."""
        stance = self.stance
        stance.source = source
        stance.ready = True
        self._sources.append(id(source))

    def get_ready(self) -> None:
        """The calling thread is about to send the answer, which the next job of its source follows.

        If it is going to poll, the source is reserved for it from now on, also until its running job ends: so nothing
        long may follow. Any thread; does nothing unless the running job itself has called `stand_by`.
        """
        stance = self.stance
        source = stance.source
        if source is None or not stance.ready or not self._moment or stance.kept is not None or self._jobs:
            return
        if source.back_off.worth() and self._lock.acquire(False):
            self._keep(stance, source)

    def _keep(self, stance: Stance, source: JobSource) -> None:
        try:
            if source.keep():
                stance.kept = source
        finally:
            if stance.kept is None:
                self._lock.release()

    def let_go(self) -> None:
        """The calling thread gives its reserved source back."""
        stance = self.stance
        source, stance.kept = stance.kept, None
        if source is not None:
            self._lock.release()
            source.leave()

    def look(self, wakeup: WakeUp, source: JobSource) -> list[tuple[int, int]]:
        """Poll for a moment; the ready descriptors. If there are none, the source was given back."""
        poll, back_off = wakeup.epoll.poll, source.back_off
        until = time.monotonic() + self._moment
        while True:
            found = poll(0, 2)
            if found:
                back_off.succeeded()
                return found
            now = time.monotonic()
            if now >= until:
                back_off.failed()
                break
            if give_way(now) is None:
                back_off.failed(LEAST_TAKEN)
                break
        self.let_go()
        return []
