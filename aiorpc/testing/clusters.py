"""Groups of workers in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from torch.distributed import HashStore, Store

from ..errors import RpcUsageError
from ..options import RpcBackendOptions
from ..runtime.engine.loops import LoopThread
from ..worker import Worker


@contextlib.asynccontextmanager
async def cluster(
    size: int = 2,
    *,
    options: RpcBackendOptions | Sequence[RpcBackendOptions] | None = None,
    dynamic: bool = False,
    store: Store | None = None,
    roles: Sequence[str] | None = None,
) -> AsyncIterator[list[Worker]]:
    """``async with cluster(3) as workers``: workers ``worker0``, ``worker1``... with ids 0, 1... on the running loop.

    options: for all of them, or one for each. dynamic: a group without a world size, which others may join at `store`.
    store: where they meet; a new ``torch.distributed.HashStore`` if None. roles: one for each, see `aiorpc.init`.
    Several workers live here, so outside of handlers say which one is meant: ``workers[0].call(...)``, not
    ``aiorpc.call(...)``. Use functions that are not methods of a worker (``RRef(value)``, ``autograd.context()``,
    ``RemoteModule``, ``DistributedOptimizer``) in a handler: ``await workers[0].call("worker0", body)``. Call the
    blocking verbs in other threads (``asyncio.to_thread``).

    At the end all leave together and gracefully, so calls still under way are served to their end. If the block raises
    they leave at once, and calls under way fail with WorkerClosed or PeerLeft. Nothing of them is left afterwards.
    Raises RpcUsageError for a size below 1 or a wrong number of options or roles, and what joining raises.
    """
    workers = _make(size, options, dynamic, HashStore() if store is None else store, roles)
    graceful = False
    try:
        await _start(workers, dynamic)
        yield workers
        graceful = True
    finally:
        await _leave(workers, graceful)


@contextlib.contextmanager
def blocking_cluster(
    size: int = 2,
    *,
    options: RpcBackendOptions | Sequence[RpcBackendOptions] | None = None,
    dynamic: bool = False,
    store: Store | None = None,
    roles: Sequence[str] | None = None,
) -> Iterator[list[Worker]]:
    """`cluster` for code without a loop: ``with blocking_cluster(2) as (here, there)``, then ``here.call(...).wait()``.

    Each worker has a loop in a thread of its own (option ``dedicated_loop``), so their Futures can be waited for and
    awaited, on any loop. At the end all leave at once: calls still under way fail with WorkerClosed or PeerLeft.
    """
    workers = _make(size, options, dynamic, HashStore() if store is None else store, roles)
    for worker in workers:
        worker.options.dedicated_loop = True
    with helping_loop() as loop:
        try:
            loop.run(_start(workers, dynamic))
            yield workers
        finally:
            loop.run(_leave(workers, graceful=False))


@contextlib.contextmanager
def helping_loop() -> Iterator[LoopThread]:
    """A loop in a thread, for blocking code that starts and ends workers."""
    loop = LoopThread("testing")
    try:
        yield loop.start()
    finally:
        loop.close()


def _make(
    size: int,
    options: RpcBackendOptions | Sequence[RpcBackendOptions] | None,
    dynamic: bool,
    store: Store,
    roles: Sequence[str] | None,
) -> list[Worker]:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise RpcUsageError(f"a cluster has at least 1 worker, not {size!r}")
    each = list(options) if isinstance(options, Sequence) else [options] * size
    if len(each) != size:
        raise RpcUsageError(f"options must be one for all workers or one for each: {len(each)} for {size} workers")
    role_of = [""] * size if roles is None else roles
    if isinstance(role_of, str) or len(role_of) != size:
        raise RpcUsageError(f"roles must be a list with one for each worker: {role_of!r:.80} for {size} workers")
    world_size = None if dynamic else size
    workers = [
        Worker(f"worker{rank}", rank=rank, world_size=world_size, options=each[rank], store=store, role=role_of[rank])
        for rank in range(size)
    ]
    for worker in workers:
        worker.options.drain_on = ()  # a signal is meant for the program that runs the tests
    return workers


async def _start(workers: list[Worker], dynamic: bool) -> None:
    if dynamic:
        for worker in workers:
            await worker.start()
        return
    starts = [asyncio.ensure_future(worker.start()) for worker in workers]
    try:
        # If one cannot start, the others would wait for it.
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _leave(workers: list[Worker], graceful: bool) -> None:
    outcomes = await asyncio.gather(*(worker.shutdown(graceful) for worker in workers), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
