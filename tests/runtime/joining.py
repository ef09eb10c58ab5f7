"""Workers that join a group in ways that are rare."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

from torch.distributed import Store

import aiorpc
from aiorpc import Worker
from aiorpc.runtime.group.group import Group


@asynccontextmanager
async def unheard_of(name: str, store: Store) -> AsyncIterator[Worker]:
    """A worker of a free group that stands in the list, and of whom those who were there before have not heard yet."""
    with mock.patch.object(Group, "start", lambda self: None):
        worker = await aiorpc.init(name, store=store)
    try:
        yield worker
    finally:
        await worker.shutdown()
