"""Pools of threads, and what their threads stand by for."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from aiorpc.runtime.engine.busy_poll import BackOff
from aiorpc.runtime.engine.pool import ThreadPool

LIMIT_S = 20.0


class Gate:
    """A job that counts its runs and holds its thread until opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self) -> None:
        self.entered.release()
        assert self.open.wait(LIMIT_S)

    def wait_entered(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=LIMIT_S)


class Source:
    """Bytes in a pipe, each of which becomes a job of the pool: it notes its thread, and stands by again.

    While no thread waits, somebody else has to read: `drain`. brought: how many bytes a thread has brought by itself.
    keeps: whether a thread may look without sleeping. kept: how often one did; left: how often one has said its end.
    """

    def __init__(self, pool: ThreadPool, job: Callable[[], object] = lambda: None) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.threads: list[str] = []
        self.brought = 0
        self.keeps = True
        self.kept = self.left = 0
        self.back_off = BackOff()
        self._pool, self._job = pool, job

    def keep(self) -> bool:
        self.kept += self.keeps
        return self.keeps

    def leave(self) -> None:
        self.left += 1

    def attach(self, epoll: select.epoll) -> bool:
        epoll.register(self.read, select.EPOLLIN)
        return True

    def bring(self) -> None:
        self.brought += self.drain()

    def drain(self) -> int:
        try:
            count = len(os.read(self.read, 1000))
        except BlockingIOError:
            return 0
        for _ in range(count):
            self._pool.submit(self.run)
        return count

    def run(self) -> None:
        self._pool.lookout.stand_by(self)
        self._job()
        self.threads.append(threading.current_thread().name)
        self._pool.lookout.get_ready()  # as before an answer is sent

    def put(self) -> None:
        os.write(self.write, b"x")

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


def standing(pool: ThreadPool) -> int:
    return len(pool._standing)
