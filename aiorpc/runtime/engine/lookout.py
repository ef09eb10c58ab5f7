"""Where a thread of a pool stands by for its next job, and looks for that without sleeping, one thread at a time.

What a thread knows of its own (`Stance`) is changed by that thread alone. A thread that sleeps keeps no source alive
(`ThreadPool._stand_by`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sized
from typing import Protocol

from .busy_poll import LEAST_TAKEN, BackOff, give_way
from .wakeup import Source, WakeUp

# None begins to stand by where jobs come from more sources than that: the loop reads for all of them at once, and no
# thread would get two jobs of one in a row. It goes by the last jobs, so many of them.
_MOST_SOURCES = 8
_RECENT = 32


class JobSource(Source, Protocol):
    """Where jobs come from, for a thread that has none."""

    @property
    def bring(self) -> Callable[[], None]:
        """Called when there is something, for which jobs are to be submitted now."""

    @property
    def back_off(self) -> BackOff:
        """How it goes with looking for a moment before the thread sleeps (busy_poll.py)."""

    def keep(self) -> bool:
        """Called before that, by `get_ready`: nobody else is told of what comes until `leave`. False if not now."""

    @property
    def leave(self) -> Callable[[], None]:
        """Called when the thread looks no more, once it has brought what there was."""


class Stance(threading.local):
    """What a thread knows of that for which it stands by.

    source: what it is to stand by for when it finds no job. wakeup: of its own, once it did. ready: whether the job
    that it runs has asked for that source, and so is done but for its answer. kept: the source that it is going to look
    for without sleeping, of which nobody else is told.
    """

    source: JobSource | None = None
    wakeup: WakeUp | None = None
    ready = False
    kept: JobSource | None = None


class Lookout:
    """See the module. Its methods are for the threads of the pool, and do nothing in others.

    moment: seconds that a thread looks at most before it sleeps; 0 if none ever looks. jobs: those of the pool.
    """

    def __init__(self, moment: float, jobs: Sized) -> None:
        self.stance: Stance = Stance()
        self._moment = moment
        self._jobs = jobs
        self._lock = threading.Lock()  # of the thread that looks, from `get_ready` on
        # Whether a thread looks without sleeping, or is about to. Any thread. Not in Python, as loops ask it often.
        self.looks: Callable[[], bool] = self._lock.locked
        self._sources: deque[int] = deque(maxlen=_RECENT)  # of the last jobs, by their ids

    def crowded(self) -> bool:
        """Whether jobs come from too many sources for a thread to begin to stand by."""
        return len({*self._sources}) > _MOST_SOURCES

    def stand_by(self, source: JobSource) -> None:
        """Have the calling thread of the pool wait for jobs from there, too, the next time it finds none."""
        stance = self.stance
        stance.source = source
        stance.ready = True
        self._sources.append(id(source))

    def get_ready(self) -> None:
        """The calling thread is about to send what the next job of the source follows that it is to stand by for.

        If it is going to look for that without sleeping, nobody else is told of it: not even of what comes before the
        thread is done with the job that it runs. So nothing may follow that takes long. Any thread; nothing unless that
        job has said `stand_by` itself: what an earlier job has asked for waits until this one ends.
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
        """The calling thread looks no more for what its source has, or does not although it was ready to."""
        stance = self.stance
        source, stance.kept = stance.kept, None
        if source is not None:
            self._lock.release()
            source.leave()

    def look(self, wakeup: WakeUp, source: JobSource) -> list[tuple[int, int]]:
        """Look for a moment what comes, without sleeping: what there is. If it is nothing, the source was let go."""
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
