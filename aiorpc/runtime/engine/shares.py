"""Each caller's share of the pool's threads: at most `num_worker_threads`, and never all of them.

Handlers that never return keep their threads. One caller's handlers must not keep all of them: the pool has more
threads than a share, and other callers' calls can start. A caller's jobs beyond its share wait here. Each goes to the
pool when an earlier job of the caller has ended, after jobs of others: so callers take turns. A pool of one thread, in
which handlers run one after the other, keeps none for others.

No lock is taken. A claim is one entry of a list. A thread that drops a claim looks for waiting jobs afterwards, and a
thread that adds a waiting job looks for a free claim afterwards: one of the two sees the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from ..._typing import T
from ...locks import Lock
from ...undoing import on_error
from .pool import ThreadPool

# One thread is added for others for so many threads of a share.
_FOR_OTHERS = 8

_Job = tuple[Callable[[Any], None], Any, Callable[[Any, BaseException], object]]


def threads_in_all(share: int) -> int:
    """How many threads the pool has for that size of a share."""
    return share + max(1, share // _FOR_OTHERS) if share > 1 else share


class Share:
    """One caller's share. Any thread, but `let_go` and `claim` in threads of the pool.

    most: jobs in the pool at once, running or queued; those that wait for a nested call do not count. waiting: the jobs
    beyond that. claims: one entry for each job in the pool.
    """

    __slots__ = ("__weakref__", "_pool", "claims", "most", "waiting")

    def __init__(self, pool: ThreadPool, most: int) -> None:
        self.most: int = most
        self.claims: list[None] = []
        self.waiting: deque[_Job] = deque()
        self._pool = pool

    def submit(self, run: Callable[[T], None], call: T, refuse: Callable[[T, BaseException], object]) -> None:
        """Run ``run(call)`` in the pool, after earlier jobs of this caller.

        refuse: called with the call and the error if there is no thread at its turn later. Raises the errors of
        `ThreadPool.submit`.
        """
        if self.waiting or len(self.claims) >= self.most:
            self.waiting.append((run, call, refuse))
            self._look_again()
            return
        self.claims.append(None)
        with on_error(self.let_go):
            self._pool.submit(self.run, run, call)

    def run(self, run: Callable[[object], None], call: object) -> None:
        """In the pool: run a job with its claim, and then waiting jobs of the caller while the pool's queue is
        empty."""
        pool = self._pool
        pool.local.share = self
        try:
            run(call)
            while self.waiting and not pool.queued:
                try:
                    run, call, _ = self.waiting.popleft()
                except IndexError:  # another thread took it
                    break
                pool.lookout.let_go()  # as the pool does before each job
                pool.lookout.stance.ready = False
                run(call)
        finally:
            pool.local.share = None
            self.let_go()

    def claim(self) -> None:
        """A job goes on after a wait in which it had no claim. There may be more than `most` claims for a while."""
        self.claims.append(None)

    def let_go(self) -> None:
        """A job has ended, or waits for a nested call: pass its claim to the next waiting job."""
        if not self.waiting or not self._start_next():
            with suppress(IndexError):  # an interrupted `submit` may have dropped it, too
                self.claims.pop()
            self._look_again()

    def _look_again(self) -> None:
        while self.waiting and len(self.claims) < self.most:
            self.claims.append(None)
            if not self._start_next():
                self.claims.pop()

    def _start_next(self) -> bool:
        """Submit the oldest waiting job to the pool, with an existing claim; False if there is none."""
        while True:
            try:
                run, call, refuse = self.waiting.popleft()
            except IndexError:
                return False
            try:
                self._pool.submit(self.run, run, call)
            except Exception as error:
                refuse(call, error)
            else:
                return True


class Shares:
    """The shares of all callers of one worker. Any thread.

    A share lives as long as a connection or a job of its caller.
    """

    def __init__(self, pool: ThreadPool, most: int) -> None:
        self._pool = pool
        self._most = most
        self._shares: WeakValueDictionary[int, Share] = WeakValueDictionary()
        self._lock = Lock()

    def of(self, caller: int) -> Share:
        """The share of the worker with that id."""
        with self._lock:
            share = self._shares.get(caller)
            if share is None:
                share = self._shares[caller] = Share(self._pool, self._most)
        return share

    @property
    def waiting(self) -> int:
        """Jobs that wait for a thread of their caller's share."""
        return sum(len(share.waiting) for share in list(self._shares.values()))
