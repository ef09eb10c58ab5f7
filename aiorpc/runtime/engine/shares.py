"""Which threads of the pool the calls of one caller have: as many as `num_worker_threads`, and never all there are.

Handlers that block for ever keep their threads. Those of one caller must not keep all of them: the pool has some more
threads than one caller gets, so that calls of another one start. What a caller asks for beyond its share waits here. It
goes to the pool when one of its own jobs has ended, behind what others have submitted meanwhile: so callers take turns.
With one thread in all, where handlers are meant to run one after the other, there is none to be kept for others.

No lock is taken. A claim is one entry of a list; who lets go of one looks for what waits afterwards, and who has left
something to wait looks for a free claim afterwards. So one of the two sees the other.
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

# Of so many threads that one caller may have there is one more for others.
_FOR_OTHERS = 8

_Job = tuple[Callable[[Any], None], Any, Callable[[Any, BaseException], object]]


def threads_in_all(share: int) -> int:
    """How many threads the pool has if one caller may have that many."""
    return share + max(1, share // _FOR_OTHERS) if share > 1 else share


class Share:
    """What one caller has of the threads. Any thread, but for `let_go` and `claim`, which are for those of the pool.

    most: jobs that may run, or wait in the pool, at once; those that wait for a nested call not counted. waiting: those
    beyond that. claims: one entry for each job that is in the pool.
    """

    __slots__ = ("__weakref__", "_pool", "claims", "most", "waiting")

    def __init__(self, pool: ThreadPool, most: int) -> None:
        self.most: int = most
        self.claims: list[None] = []
        self.waiting: deque[_Job] = deque()
        self._pool = pool

    def submit(self, run: Callable[[T], None], call: T, refuse: Callable[[T, BaseException], object]) -> None:
        """Have ``run(call)`` run in the pool, behind the jobs that this caller has submitted before.

        refuse: is called with it and the error if there is no thread when it is its turn later. Raises what
        `ThreadPool.submit` raises.
        """
        if self.waiting or len(self.claims) >= self.most:
            self.waiting.append((run, call, refuse))
            self._look_again()
            return
        self.claims.append(None)
        with on_error(self.let_go):
            self._pool.submit(self.run, run, call)

    def run(self, run: Callable[[object], None], call: object) -> None:
        """In the pool: a job that has a claim, and those that wait for one while no other job waits for the thread."""
        pool = self._pool
        pool.local.share = self
        try:
            run(call)
            while self.waiting and not pool.queued:
                try:
                    run, call, _ = self.waiting.popleft()
                except IndexError:  # another thread has come first
                    break
                pool.lookout.let_go()  # as before each job of the pool
                pool.lookout.stance.ready = False
                run(call)
        finally:
            pool.local.share = None
            self.let_go()

    def claim(self) -> None:
        """A job goes on that had let go of its claim while it waited. There may be more than `most` for a while."""
        self.claims.append(None)

    def let_go(self) -> None:
        """A job has ended, or waits for a nested call: its claim goes to the next one that waits."""
        if not self.waiting or not self._start_next():
            with suppress(IndexError):  # who was interrupted as it submitted a job that ran has let go of it, too
                self.claims.pop()
            self._look_again()

    def _look_again(self) -> None:
        while self.waiting and len(self.claims) < self.most:
            self.claims.append(None)
            if not self._start_next():
                self.claims.pop()

    def _start_next(self) -> bool:
        """Hand the job that waits the longest over to the pool, with a claim that is there; False if there is none."""
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

    A share lives as long as a connection of its caller, or a job of it: a caller that connects again has the same.
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
        """Jobs that wait until their caller has a thread."""
        return sum(len(share.waiting) for share in list(self._shares.values()))
