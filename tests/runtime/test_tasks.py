"""Tasks of a worker on a loop whose program makes tasks in a way of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc import runtime
from aiorpc.testing import cluster
from tests.runtime.waiting import LIMIT


def where() -> str:
    return aiorpc.get_worker_info().name


async def letters() -> AsyncIterator[str]:
    for letter in "abc":
        yield letter


async def come_and_go() -> None:
    """A free group, calls to somebody who comes too late, and later, and has left, and its end."""
    store = HashStore()
    options = [aiorpc.RpcBackendOptions(newcomer_grace=0.1), aiorpc.RpcBackendOptions()]
    async with cluster(2, dynamic=True, store=store, options=options) as workers:
        with pytest.raises(aiorpc.errors.UnknownWorker):
            await workers[0].call("late", where)
        early = workers[1].call("late", where)
        async with aiorpc.init("late", store=store) as late:
            assert await asyncio.wait_for(early, LIMIT) == "late"
            assert await workers[0].call("late", where) == "late"
            assert await late.call("worker1", where) == "worker1"
            assert [item async for item in late.stream("worker1", letters)] == ["a", "b", "c"]
        with pytest.raises(aiorpc.PeerLeft):
            await workers[1].call("late", where)


async def test_a_factory_of_the_program_makes_no_task_of_the_workers() -> None:
    """It may run what it makes at once, in the midst of whoever asks for it."""
    made: list[str] = []

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        code = getattr(coroutine, "cr_code", None)  # what awaits a Future is a plain generator
        if code and Path(code.co_filename).is_relative_to(Path(runtime.__file__).parent):
            made.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make)
    await come_and_go()
    assert "Runner._run_coroutine" in made, "a handler, which is the program's"
    assert set(made) <= {"Runner._run_coroutine", "Worker.start", "Worker.shutdown"}


if sys.version_info >= (3, 12):

    @pytest.mark.asyncio(loop_factories=["asyncio"])  # uvloop passes what that of Python 3.12 does not take
    async def test_eager_tasks() -> None:
        """A group forms, works and leaves where tasks run as soon as they are made."""
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        await come_and_go()
