"""A served call goes the ways of its table, which no code on that path asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiorpc import PeerLeft, PeerLost, RpcCancelled, Worker
from aiorpc.protocol.frames import Kind
from aiorpc.protocol.messages import ByName, Call, Values, write
from aiorpc.protocol.states import SERVED, ServedEvent, ServedState
from aiorpc.runtime.calls.current import ServedCall, current_call
from tests.observed import Observed
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


def state_of(worker: Worker, context: ServedCall) -> ServedState:
    """What the code has instead of an attribute."""
    if any(each is context for service in list(worker._node.services) for each in service.calls.values()):
        return ServedState.RUNNING
    assert context.cancelled != context.replied, "it ended in one way, and not in both"
    return ServedState.CANCELLED if context.cancelled else ServedState.ANSWERED


@pytest.mark.parametrize(("what", "event"), [("return", ServedEvent.RETURNED), ("raise", ServedEvent.RAISED)])
async def test_an_end_of_the_handler_answers(
    pair: list[Worker], served: list[ServedCall], what: str, event: ServedEvent
) -> None:
    """Whether the handler returns or raises, its call is ANSWERED."""
    call = pair[0].call("worker1", handler, what)
    if what == "raise":
        with pytest.raises(ValueError, match="wanted"):
            await call
    else:
        assert await call == "done"
    (context,) = served
    assert state_of(pair[1], context) is SERVED.next(ServedState.RUNNING, event)


@pytest.mark.parametrize("event", [ServedEvent.GIVEN_UP, ServedEvent.DISCONNECTED, ServedEvent.CLOSED])
async def test_an_end_of_whoever_waits_cancels(
    pair: list[Worker], served: list[ServedCall], event: ServedEvent
) -> None:
    """Whether the caller gives up, its connection ends or we shut down, the call is CANCELLED, and not before."""
    observed = Observed(SERVED)
    call = pair[0].call("worker1", handler, "wait")
    await until(lambda: served)
    (context,) = served
    state = state_of(pair[1], context)
    observed.begun(state)
    if event is ServedEvent.GIVEN_UP:
        call.cancel()
    elif event is ServedEvent.CLOSED:
        await pair[1].shutdown(graceful=False)
    else:
        (service,) = (each for each in pair[1]._node.services if context in each.calls.values())
        service.connection.abort()
    with pytest.raises((RpcCancelled, PeerLeft, PeerLost)):
        await call
    await until(lambda: state_of(pair[1], context) is not ServedState.RUNNING)
    observed.moved(state, state_of(pair[1], context))
    observed.check()
    assert state_of(pair[1], context) is SERVED.next(state, event)


async def test_a_call_that_comes_twice_breaks_the_connection(pair: list[Worker], served: list[ServedCall]) -> None:
    """The second would take the place of the first one, which would run on unseen: both end, and nothing more runs."""
    call = pair[0].call("worker1", handler, "wait")
    await until(lambda: served)
    (context,) = served
    again = Call(ByName(0, "time:sleep"), Values([0]))
    pair[0]._node.peers.find("worker1").send(Kind.CALL, context.call_id, write(again))
    with pytest.raises(PeerLost):
        await asyncio.wait_for(call, 30)
    await until(lambda: state_of(pair[1], context) is ServedState.CANCELLED)
