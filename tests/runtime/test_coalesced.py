"""What the loop has to do soon is asked for once, and not lost when a signal handler raises in who asks for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from torch.distributed import HashStore

import aiorpc
from aiorpc.protocol.frames import Kind, encode_frame
from aiorpc.protocol.states import PeerState
from aiorpc.runtime.caller import addressee as addressee_module
from aiorpc.runtime.caller.waiting import WaitingFrame
from aiorpc.runtime.engine import coalesced as soon_module
from aiorpc.runtime.engine import deadlines as deadlines_module
from aiorpc.runtime.engine import engine as engine_module
from aiorpc.runtime.engine.coalesced import CoalescedCallback
from aiorpc.runtime.engine.deadlines import Deadlines
from tests.runtime.test_deadlines import FakeLoop
from tests.runtime.waiting import until
from tests.transport.ends import interrupted

MOST = 2000  # instructions: more than any of this takes


class Loop:
    """Takes what is to be run, and runs it when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def post(self, job: Callable[[], Any]) -> None:
        self.jobs.append(job)

    def turn(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


def test_many_ask_and_it_runs_once() -> None:
    """Until it has run; after that it can be asked for again, also by itself."""
    loop, ran = Loop(), list[int]()

    def work() -> None:
        ran.append(len(ran))
        if len(ran) == 1:
            soon()

    soon = CoalescedCallback(loop.post, work)
    for _ in range(3):
        soon()
    assert len(loop.jobs) == 1
    loop.turn()
    assert ran == [0] and len(loop.jobs) == 1
    loop.turn()
    assert ran == [0, 1] and not loop.jobs and not soon.asked


def test_nobody_who_asked_is_forgotten_when_interrupted() -> None:
    """Whatever instruction the signal comes at: either it was not asked for yet, or it runs, and once."""
    places = []
    for at in range(MOST):
        loop, ran = Loop(), list[int]()
        soon = CoalescedCallback(loop.post, partial(ran.append, 1))
        where = interrupted(soon, at, soon_module.__file__, __file__)
        asked = soon.asked
        soon()  # the next one who asks
        loop.turn()
        assert ran == [1] and not soon.asked, where
        if where is None:
            break
        places.append((where, asked))
    assert len(places) > 10 and {asked for _, asked in places} == {False, True}


def test_a_deadline_is_not_forgotten_when_interrupted() -> None:
    """A call that was interrupted as it was added costs later ones nothing: these are looked at in time."""
    places = []
    for at in range(MOST):
        loop, looks = FakeLoop(), list[float]()

        def scan(now: float, looks: list[float] = looks) -> float:
            looks.append(now)
            return math.inf

        deadlines = Deadlines(loop, scan, clock=lambda loop=loop: loop.now)  # type: ignore[arg-type, misc]  # a loop of the test
        where = interrupted(partial(deadlines.add, loop.now + 1.0), at, deadlines_module.__file__)
        deadlines.add(loop.now + 2.0)
        loop.advance(3.0)
        assert looks, where
        if where is None:
            break
        places.append(where)
    assert len(places) > 5


async def test_a_first_message_that_is_interrupted_does_not_keep_later_ones_from_connecting() -> None:
    """A signal handler raises as the loop is asked to look for the worker: it looks, and once."""
    files = addressee_module.__file__, engine_module.__file__
    states = set()
    worker = await aiorpc.init("alone", store=HashStore())
    try:
        node = worker._node
        for at in range(MOST):
            peer = node.peers.find(f"nobody{at}")
            message = WaitingFrame(Kind.CANCEL, at, encode_frame(Kind.CANCEL, at, b""))
            with mock.patch.object(node.connector, "_connect", wraps=node.connector._connect) as connect:
                where = interrupted(partial(peer._wait, message), at, *files)
                states.add(peer.state)
                peer._wait(message)
                await until(lambda: connect.call_count)
                await asyncio.sleep(0)
                connect.assert_called_once_with(peer)
            if where is None:
                break
    finally:
        await worker.shutdown()
    assert at > 20 and states == {PeerState.IDLE, PeerState.CONNECTING}
