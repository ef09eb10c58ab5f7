"""A served call goes the ways of its table, which no code on that path asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiorpc import PeerLost, Worker
from aiorpc.protocol.frames import Kind
from aiorpc.protocol.messages import ByName, Call, Values, write
from aiorpc.runtime.calls.current import ServedCall, current_call
from tests.runtime.waiting import until

_served: list[ServedCall] = []


@pytest.fixture
def served() -> Iterator[list[ServedCall]]:
    """The calls whose handlers have run."""
    yield _served
    _served.clear()


async def handler(what: str) -> str:
    """Return, raise, or wait to be cancelled."""
    context = current_call.get()
    assert context is not None
    _served.append(context)
    if what == "raise":
        raise ValueError("wanted")
    if what == "wait":
        await asyncio.Event().wait()
    return "done"


async def test_a_call_that_comes_twice_breaks_the_connection(pair: list[Worker], served: list[ServedCall]) -> None:
    """The second would take the place of the first one, which would run on unseen: both end, and nothing more runs."""
    call = pair[0].call("worker1", handler, "wait")
    await until(lambda: served)
    (context,) = served
    again = Call(ByName(0, "time:sleep"), Values([0]))
    pair[0]._node.peers.find("worker1").send(Kind.CALL, context.call_id, write(again))
    with pytest.raises(PeerLost):
        await asyncio.wait_for(call, 30)
    await until(lambda: context.cancelled)
