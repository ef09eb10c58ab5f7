"""Workers in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from aiorpc import Worker
from aiorpc.testing import cluster


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
