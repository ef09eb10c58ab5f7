"""Who leaves without a connection on which a goodbye could come: others look into the store before they tell a loss."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc import PeerLeft, PeerLost, RpcBackendOptions, Worker
from aiorpc.errors import RpcError
from aiorpc.testing import cluster
from tests.runtime.inside import set_bounds
from tests.runtime.test_resumption import away
from tests.runtime.waiting import until

LONG = 10.0
TRANSPORTS = pytest.mark.parametrize("transport", ["unix", "tcp"])


def options(transport: str) -> RpcBackendOptions:
    return RpcBackendOptions(transports=(transport,), shutdown_timeout=0.1)


async def error_of(call: Any) -> BaseException:
    try:
        await asyncio.wait_for(asyncio.ensure_future(call), LONG)
    except RpcError as error:
        return error
    raise AssertionError("it was answered")


@TRANSPORTS
async def test_who_has_left_is_not_lost_to_whoever_calls_it_for_the_first_time(transport: str) -> None:
    """In a star members are connected with the leader alone, so nobody else is told of a goodbye."""
    async with cluster(3, options=options(transport)) as (_, leaver, caller):
        set_bounds(caller, refused=0.02)
        await leaver.shutdown(graceful=False)
        error = await error_of(caller.peer("worker1", timeout=0).call(abs, -3))
        assert isinstance(error, PeerLeft) and "worker1" in str(error)
        assert caller._node.group.lost == {}
        assert isinstance(await error_of(caller.call("worker1", abs, -3)), PeerLeft)


async def test_who_has_died_is_lost_whatever_the_store_says_of_others() -> None:
    """Nothing of it stands there, as nothing does where the store does not answer: that is waited for shortly."""
    async with cluster(4, options=options("unix")) as (_, leaver, dead, caller):
        set_bounds(caller, refused=0.02)
        await leaver.shutdown(graceful=False)
        await dead._drop()
        assert isinstance(await error_of(caller.peer("worker2", timeout=0).call(abs, -3)), PeerLost)


@pytest.mark.parametrize("sign", ["the line is given up", "its process ends"])
async def test_who_leaves_while_its_line_is_down_is_not_lost(sign: str) -> None:
    """No goodbye can arrive; the others find that it is gone, by whatever sign, and look into the store."""
    grace = 0.5 if sign == "the line is given up" else 60.0
    three = RpcBackendOptions(transports=("tcp",), reconnect_grace=grace, shutdown_timeout=0.1)
    async with cluster(3, options=three) as (leader, leaver, caller):
        for each in (leader, caller):
            assert await each.call("worker1", abs, -3) == await leaver.call(each.name, abs, -3) == 3
        with away():
            for connection in list(leaver._node.engine.connections):
                connection.break_off(1.0)
            await until(lambda: leader.statistics().connections_suspended + caller.statistics().connections_suspended)
            await leaver.shutdown(graceful=False)
            record = leaver._node.engine.record
            if sign == "its process ends":  # as the kernel says
                for each in (leader, caller):
                    each._node.group.on_process_exit(record)
            await until(lambda: all(each._node.group.is_gone(record) for each in (leader, caller)), LONG)
        assert leader._node.group.lost == caller._node.group.lost == {}
        assert isinstance(await error_of(caller.call("worker1", abs, -3)), PeerLeft)


async def test_a_free_group_tells_who_has_left_from_who_was_struck_off() -> None:
    """Both are off its list; a member that is lost is taken off by others."""
    store = HashStore()
    a, b, c = (Worker(name, store=store) for name in "abc")
    for each in (a, b, c):
        await each.start()
    for each in (a, b):
        assert await each.call("c", abs, -3) == await a.call("b", abs, -3) == 3
    left, lost = b._node.engine.record, c._node.engine.record
    await b.shutdown(graceful=False)
    await c._drop()
    await until(lambda: a._node.group.lost)
    rendezvous = a._node.rendezvous
    await until(lambda: [each.name for each in rendezvous.members()] == ["a"])
    assert rendezvous.has_left(left) and not rendezvous.has_left(lost)
    await a.shutdown()


async def test_a_reference_to_who_has_just_left_is_refused_as_that() -> None:
    """Also while calls to it are not over, as their answers may be on their way."""
    async with cluster(3, options=options("unix")) as (caller, leaver, third):
        reference: aiorpc.RRef[dict[str, int]] = caller.remote("worker1", dict)
        await reference
        waiting = caller.call("worker1", asyncio.sleep, LONG)
        await until(lambda: leaver.statistics().calls_running)
        caller._node.group.on_goodbye(leaver._node.engine.record)  # which came over another connection than they will
        assert not waiting.done()
        assert isinstance(await error_of(caller.call(third.name, len, reference)), PeerLeft)  # type: ignore[call-overload]
        await leaver.shutdown(graceful=False)
        assert isinstance(await error_of(waiting), PeerLeft)


@pytest.mark.parametrize(
    ("error", "said"), [(KeyError("x"), r"left after an error \(KeyError\)"), (asyncio.CancelledError(), "shut down")]
)
async def test_who_leaves_after_an_error_says_which_one(error: BaseException, said: str) -> None:
    """To calls that wait, and to those that come later; to be cancelled is no error of the program's."""
    store = HashStore()
    leaver, caller = (Worker(name, rank=rank, world_size=2, store=store) for rank, name in enumerate("ab"))
    await asyncio.gather(leaver.start(), caller.start())
    waiting = caller.peer("a", timeout=0).call(for_ever)
    await until(lambda: leaver.statistics().calls_running == 1)
    with pytest.raises(type(error)):
        async with leaver:
            raise error
    for call in (waiting, caller.call("a", abs, -3)):
        with pytest.raises(PeerLeft, match=rf"a \(rank 0, pid .*\) has {said}"):
            await call
    await caller.shutdown()


async def for_ever() -> None:
    await asyncio.Event().wait()
