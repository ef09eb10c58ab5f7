"""For users' tests: a group of workers in one process, on the running loop; and faults on purpose.

    import aiorpc, aiorpc.testing, pytest_asyncio

    @pytest_asyncio.fixture
    async def workers():
        async with aiorpc.testing.cluster(2) as workers:
            yield workers

    async def test_double(workers):
        assert await workers[0].call("worker1", double, 21) == 42

The workers are real ones: calls travel over sockets, are encoded and decoded, handlers run in their worker's threads.

`Faults` drops, delays and refuses messages that one worker sends, by kind, receiver and function, and kills workers:

    async def test_a_lost_answer_is_a_timeout(workers):
        with aiorpc.testing.Faults(workers[1]) as faults:
            faults.drop("reply", times=1)
            with pytest.raises(aiorpc.RpcTimeout):
                await workers[0].peer("worker1", timeout=0.2).call(double, 21)
            assert await workers[0].call("worker1", double, 21) == 42

Only what that worker sends is concerned, with whatever process it talks to; it works for a worker of `init_rpc` as well
(``Faults(aiorpc.current())``), in programs whose workers are processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from torch.distributed import HashStore, Store

from ..errors import RpcUsageError
from ..options import RpcBackendOptions
from ..worker import Worker
from .faults import Fault, Faults
from .passing import MessageKind, SentMessage

__all__ = ["Fault", "Faults", "MessageKind", "SentMessage", "cluster"]


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
    ``aiorpc.call(...)``. What is no method of a worker (``RRef(value)``, ``autograd.context()``, ``RemoteModule``,
    ``DistributedOptimizer``) is used in a handler: ``await workers[0].call("worker0", body)``. The blocking verbs
    belong in other threads (``asyncio.to_thread``).

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
    return [
        Worker(f"worker{rank}", rank=rank, world_size=world_size, options=each[rank], store=store, role=role_of[rank])
        for rank in range(size)
    ]


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
