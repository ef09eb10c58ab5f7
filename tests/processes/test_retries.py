"""Calls with retries, where a process dies and another one takes its name."""

from __future__ import annotations

import asyncio
import os

import pytest

import aiorpc as rpc
from tests.limits import busy

from .workers import LIMIT, Link, Place, meeting_file, processes


def serve_until_told(place: Place, link: Link) -> None:
    """Body: join a group without a size, and serve."""
    place.init_rpc()
    link.tell("there")
    link.hear(60 * busy())
    rpc.shutdown()


async def pid_unless(pid: int) -> int:
    """The id of the process that runs this; never from that one."""
    if os.getpid() == pid:
        await asyncio.Event().wait()
    return os.getpid()


@pytest.mark.long  # tests/runtime/test_retrying.py has the same in one process
@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_call_is_made_again_in_the_process_that_takes_the_name(idempotent: bool) -> None:
    """The first one is killed with the call under way; the second one knows nothing of it, and answers."""
    with processes() as children, meeting_file() as init_method:
        place = Place("server", -1, None, init_method)
        async with rpc.init("caller", init_method=init_method) as worker:
            first = children.start(place, serve_until_told)
            assert await first.ahear() == "there"
            peer = worker.peer("server", timeout=60 * busy(), retries=1000, backoff=(0.05, 0.2), idempotent=idempotent)
            assert await peer.call(pid_unless, 0) == first.pid
            call = peer.call(pid_unless, first.pid)
            first.kill()
            second = children.start(place, serve_until_told)
            assert await second.ahear() == "there"
            assert await asyncio.wait_for(call, LIMIT) == second.pid
            assert worker.statistics().calls_retried >= 1
            second.tell("enough")
        await asyncio.to_thread(lambda: children.check_ended(but=("server",)))
