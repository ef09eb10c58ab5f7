"""What a user does with `aiorpc.launch.ray`, as programs that check themselves: `python -m ... NAME`.

Ray's cluster is that of RAY_ADDRESS. At the line `now` the test acts: it ends Ray's second node, or interrupts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import ray
import ray.util

import aiorpc as rpc
from aiorpc.errors import RendezvousError
from aiorpc.events import WorkerJoined, WorkerLost
from aiorpc.launch import ray as on_ray

LIMIT = 60.0  # seconds for a wait that takes about five, or fifteen where a node has to be found dead


class Place(NamedTuple):
    """Where a function runs. made: by `begin`."""

    worker: str
    pid: int
    node: str
    made: int
    environment: str


def place() -> Place:
    """This process."""
    node, made = ray.get_runtime_context().get_node_id(), int(os.environ.get("MADE", "0"))
    return Place(rpc.current().name, os.getpid(), node, made, os.environ.get("AIORPC_SECRET", ""))


async def begin() -> None:
    """The setup of an actor: on the loop of its worker, as it is a coroutine function."""
    os.environ["MADE"] = str(rpc.current().id)
    assert asyncio.get_running_loop() is rpc.current().loop


def refuse() -> None:
    """The setup of an actor that cannot begin."""
    raise ValueError(f"{rpc.current().name} has no weights")


async def node_dies() -> None:
    """An actor goes with its node, and comes back under its name on the other one; calls before and after."""
    async with on_ray.start("actor{rank}", workers=2, strategy="SPREAD", max_restarts=1, setup=begin) as group:
        assert rpc.current() is group.worker and group.names == ["actor0", "actor1"]
        before = [await rpc.call(name, place) for name in group.names]
        assert [each.worker for each in before] == group.names
        assert [each.made for each in before] == [(await rpc.wait_for(name)).id for name in group.names]
        assert [each.environment for each in before] == ["", ""] and len({each.node for each in before}) == 2
        here = ray.get_runtime_context().get_node_id()
        [victim] = [each for each in before if each.node != here]
        [other] = [each for each in before if each.node == here]
        events = group.worker.events()
        waiting = rpc.peer(victim.worker, timeout=LIMIT).call(asyncio.sleep, LIMIT)
        print("now", flush=True)
        with contextlib.suppress(rpc.PeerLost):
            await waiting
            raise AssertionError("the call should have ended with its callee")
        assert (await rpc.call(other.worker, place)).pid == other.pid  # the others go on
        async with asyncio.timeout(LIMIT):
            seen = [await anext(events), await anext(events)]
        assert [type(each) for each in seen] == [WorkerLost, WorkerJoined], seen
        after = await rpc.peer(victim.worker, wait=True).call(place)
        assert (after.worker, after.node) == (victim.worker, here) and after.pid != victim.pid
        assert after.made > victim.made  # its setup has run again, and it is a new member
        assert group.lost == {}
    assert await asyncio.to_thread(_all_is_gone)


def guests() -> None:
    """A task of Ray joins by the invitation; nothing joins without it. A script without a loop, and the end of actors
    that Ray does not start again."""
    options = rpc.RpcBackendOptions(allow={"driver": "*", "guest": ["platform:node"]})
    with on_ray.start("{role}{rank}", workers=1, role="server", options=options) as group:
        server = rpc.rpc_sync("server0", place)
        assert ray.get(ray.remote(guest).remote(group.invitation)) == platform.node()
        asyncio.run(strangers(group.invitation.place))
        pid = server.pid
        rpc.rpc_async("server0", os.kill, args=(pid, 9))
        _wait_for(lambda: "server0" in group.lost)
        try:
            rpc.rpc_sync("server0", place)
            raise AssertionError("the actor has ended")
        except rpc.PeerLost:
            pass
    assert _all_is_gone()


def guest(invitation: on_ray.Invitation) -> str:
    """A task that is a member for a while."""

    async def ask() -> str:
        async with invitation.init("visitor", role="guest"):
            try:
                await rpc.call("server0", place)
                raise AssertionError("its role may not call that")
            except rpc.NotAllowed:
                return await rpc.call("server0", platform.node)

    return asyncio.run(ask())


async def strangers(meeting: str) -> None:
    """Without the secret of the group, and with another one."""
    for secret in ("", "not the secret of this group"):
        if secret:
            os.environ["AIORPC_SECRET"] = secret
        try:
            async with rpc.init("stranger", init_method=meeting, options=rpc.RpcBackendOptions(rpc_timeout=20)):
                raise AssertionError("a stranger has joined")
        except RendezvousError as error:
            print(f"refused: {error}")
    del os.environ["AIORPC_SECRET"]


async def refusals() -> None:
    """What cannot be is an error, and leaves nothing behind."""
    await _expect(RendezvousError, "worker 'actor0' cannot join: ValueError: actor0 has no weights", setup=refuse)
    await _expect(RendezvousError, "found no room for 1 workers with CPU 99 each", timeout=3, num_cpus=99)
    await _expect(rpc.RpcUsageError, "does not take these options for an actor", num_cpu=1)
    os.environ["AIORPC_SECRET"] = "short"
    await _expect(RendezvousError, "AIORPC_SECRET has 5 bytes")
    os.environ["AIORPC_SECRET"] = "a secret that the user has chosen"
    try:
        async with on_ray.start("actor{rank}", workers=1) as group:
            assert (await rpc.call("actor0", place)).environment == ""
            async with rpc.init("friend", init_method=group.invitation.place) as friend:
                assert (await friend.call("actor0", place)).worker == "actor0"
            raise KeyError("of the program")
    except KeyError:
        pass
    assert await asyncio.to_thread(_all_is_gone)


async def _expect(kind: type[Exception], said: str, **arguments: object) -> None:
    try:
        async with on_ray.start("actor{rank}", workers=1, **arguments):  # type: ignore[arg-type]
            raise AssertionError("it has begun")
    except kind as error:
        assert said in str(error), error
    assert await asyncio.to_thread(_all_is_gone)


async def interrupted() -> None:
    """Ctrl-C while it runs: the program ends, with all that it has started."""
    try:
        async with on_ray.start("actor{rank}", workers=2):
            print("now", flush=True)
            await asyncio.sleep(LIMIT)
    finally:
        assert await asyncio.to_thread(_all_is_gone)
        print("gone", flush=True)


def _all_is_gone() -> bool:
    """Whether Ray has all its CPUs back, soon, and no placement group."""
    _wait_for(lambda: all(each["state"] == "REMOVED" for each in ray.util.placement_group_table().values()))
    _wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
    return True


def _wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    if sys.argv[1] == "guests":
        guests()
    else:
        asyncio.run({"node_dies": node_dies, "refusals": refusals, "interrupted": interrupted}[sys.argv[1]]())
