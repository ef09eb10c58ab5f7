"""Workers in this process; the first of them is the current one of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from aiorpc import Worker
from aiorpc.testing import cluster
from tests.runtime.waiting import until
from tests.scripts import make_current


@pytest.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    """Three workers on the test's loop."""
    async with cluster(3) as workers:
        make_current(workers[0])
        yield workers
        await until(lambda: not any(len(worker._node.gradients) for worker in workers))  # contexts were left


@pytest.fixture
async def four() -> AsyncIterator[list[Worker]]:
    """Four workers on the test's loop."""
    async with cluster(4) as workers:
        make_current(workers[0])
        yield workers
        await until(lambda: not any(len(worker._node.gradients) for worker in workers))
