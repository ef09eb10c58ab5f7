"""Workers in this process, and pools of threads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from aiorpc import Worker
from aiorpc.runtime.engine.pool import ThreadPool
from aiorpc.testing import cluster
from tests.runtime.pools import LIMIT_S, Source


@pytest.fixture
async def pair() -> AsyncIterator[list[Worker]]:
    """Two workers on the test's loop."""
    async with cluster(2) as workers:
        yield workers


@pytest.fixture
async def trio() -> AsyncIterator[list[Worker]]:
    """Three workers on the test's loop."""
    async with cluster(3) as workers:
        yield workers


@pytest.fixture
def pools() -> Iterator[Callable[..., ThreadPool]]:
    """Makes pools that are closed at the end, all their jobs done."""
    made: list[ThreadPool] = []

    def make(limit: int, linger: float = 0.05, busy: float = 0.0) -> ThreadPool:
        made.append(ThreadPool("test", limit, linger=linger, busy=busy))
        return made[-1]

    yield make
    for pool in made:
        assert pool.close(LIMIT_S) == 0
        assert pool.threads == 0


@pytest.fixture
def sources(pools: Callable[..., ThreadPool]) -> Iterator[Callable[..., Source]]:
    """Makes sources that are closed at the end. Asked for behind `pools`, they are closed first."""
    made: list[Source] = []

    def make(pool: ThreadPool, job: Callable[[], object] = lambda: None) -> Source:
        made.append(Source(pool, job))
        return made[-1]

    yield make
    for source in made:
        source.close()
