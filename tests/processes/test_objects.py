"""Named objects, where their process dies and another one takes its name."""

from __future__ import annotations

import asyncio
import os

import pytest

import aiorpc as rpc
from tests.limits import busy

from .workers import LIMIT, Link, Place, meeting_file, processes


class Home:
    """Says where it lives."""

    def where(self) -> int:
        return os.getpid()

    async def stays(self) -> None:
        await asyncio.Event().wait()


def serve_until_told(place: Place, link: Link) -> None:
    """Body: join a group without a size, and serve an object by and by."""
    place.init_rpc()
    link.tell("there")
    link.hear(60 * busy())
    rpc.serve("home", Home())
    link.tell("serves")
    link.hear(60 * busy())
    rpc.shutdown()


@pytest.mark.long  # tests/runtime/test_objects.py has the same in one process
async def test_an_object_of_a_killed_process_is_found_in_the_one_that_takes_the_name() -> None:
    """Calls under way end with PeerLost; a handle with retries goes on as soon as the new process serves the object."""
    with processes() as children, meeting_file() as init_method:
        place = Place("owner", -1, None, init_method)
        async with rpc.init("caller", init_method=init_method) as worker:
            first = children.start(place, serve_until_told)
            assert await first.ahear() == "there"
            plain = worker.peer("owner").object("home")
            with pytest.raises(rpc.errors.UnknownObject):
                await plain.where()
            first.tell("serve")
            assert await first.ahear() == "serves"
            assert await plain.where() == first.pid
            call = plain.stays()
            first.kill()
            with pytest.raises(rpc.PeerLost):
                await asyncio.wait_for(call, LIMIT)
            patient = worker.peer("owner", timeout=60 * busy(), retries=1000, backoff=(0.05, 0.2)).object("home")
            later = patient.where()
            second = children.start(place, serve_until_told)
            assert await second.ahear() == "there"
            second.tell("serve")
            assert await asyncio.wait_for(later, LIMIT) == second.pid
            assert await plain.where() == second.pid
            assert await second.ahear() == "serves"
            second.tell("enough")
        await asyncio.to_thread(lambda: children.check_ended(but=("owner",)))
