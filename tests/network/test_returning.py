"""Members that come later, or in the place of one that was lost, on another host; with a secret, and without one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import aiorpc as rpc
from bench.hosts import joined

from ..processes import bodies
from ..processes.workers import Link, Place, processes, until
from .hosts import linked, needed
from .members import SECRET, group, serve, take_part

# Without a secret members of several hosts meet only if all say that it may be so.
WAYS = pytest.mark.parametrize(
    ("env", "options"), [(SECRET, {}), ({}, {"require_secret": False})], ids=["secret", "none"]
)
PATIENCE = 60.0


async def pid_of(name: str) -> int:
    """Handler: of the process behind a name, as this worker finds it."""
    return int(await rpc.call(name, bodies.pid))


async def see_a_replacement(worker: rpc.Worker, link: Link) -> tuple[int, int, list[str]]:
    """Lose w2, and call it again by its name, from here and from the other host; and what was heard of it."""
    news = worker.events()
    link.tell(await rpc.call("w2", bodies.pid))
    await until(lambda: worker._node.group.lost)
    link.tell("lost")
    pid = int(await worker.peer("w2", timeout=PATIENCE, retries=1000, backoff=(0.05, 0.2)).call(bodies.pid))
    heard: list[str] = []
    while "WorkerReplaced" not in heard:
        heard.append(type(await anext(news)).__name__)
    await news.aclose()
    return pid, int(await rpc.call("w1", pid_of, "w2")), heard


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_member_is_replaced_on_either_host(env: dict[str, str], options: dict[str, Any], side: str) -> None:
    """It was on the right one; on the left one it is beside the leader, and on the right one far from it."""
    with linked("veth") as network:
        hosts = (network.right, network.right)
        with group(network, see_a_replacement, hosts=hosts, env=env, **options) as children:
            old = children["w2"]
            assert children["w0"].hear() == old.pid
            old.kill()
            assert children["w0"].hear() == "lost"
            host = network.left if side == "left" else network.right
            new = children.start(old.place, take_part, host.namespace, serve, (), None, options, env=env)
            (pid, also, heard), lost = children["w0"].hear()
            assert pid == also == new.pid and "WorkerLost" in heard
            assert lost == children["w1"].hear()[1] == new.hear()[1] == ["w2"]
            children.check_ended(but=("w2",))


async def stay(worker: rpc.Worker, link: Link, *others: str) -> list[int]:
    """Be there, with those others, until the test says that it is enough; the pids of the others."""
    for name in others:
        await rpc.wait_for(name, timeout=PATIENCE)
    link.tell("there")
    await asyncio.to_thread(link.hear)
    return [int(await rpc.call(name, bodies.pid)) for name in others]


@pytest.mark.long
@WAYS
def test_newcomers_of_a_free_group_come_from_either_host(env: dict[str, str], options: dict[str, Any]) -> None:
    """The first one hosts the store; each that comes later finds all others, and is found."""
    names = ("a", "b", "c")
    with linked("veth") as network, processes() as children:
        for rank, (name, host) in enumerate(zip(names, (network.left, network.right, network.left), strict=True)):
            place = Place(name, rank, None, network.meeting)
            children.start(place, take_part, host.namespace, stay, names[:rank], None, options, env=env)
            assert children[name].hear() == "there"
        for name in ("c", "b", "a"):
            children[name].tell("enough")
            pids, lost = children[name].hear()
            assert pids == [children[other].pid for other in names[: names.index(name)]] and lost == []
        children.check_ended()


async def lose(worker: rpc.Worker, link: Link, other: str) -> None:
    """Meet a member, lose it, and be there until the test says that it is enough."""
    await rpc.wait_for(other, timeout=PATIENCE)
    await rpc.call(other, bodies.pid)
    link.tell("met")
    await until(lambda: worker._node.group.lost)
    link.tell("lost")
    await asyncio.to_thread(link.hear)


@pytest.mark.long
@pytest.mark.slow
def test_newcomers_find_members_that_have_lost_each_other() -> None:
    """The network between two hosts is broken; both reach the store, and whoever comes reaches both."""
    with contextlib.ExitStack() as stack:
        with needed("hosts"):
            hosts = stack.enter_context(joined(4, rate=400))
        children = stack.enter_context(processes())
        scripts: dict[str, tuple[Any, tuple[str, ...]]] = {"a": (stay, ()), "b": (lose, ("c",)), "c": (lose, ("b",))}

        def start(rank: int, name: str, script: Any, args: tuple[str, ...]) -> None:
            place, host = Place(name, rank, None, hosts.meeting), hosts.all[rank]
            children.start(place, take_part, host.namespace, script, args, 2, {"reconnect_grace": 1.0}, env=SECRET)

        for rank, (name, (script, args)) in enumerate(scripts.items()):
            start(rank, name, script, args)
            if name == "a":
                assert children["a"].hear() == "there"
        for name in ("b", "c"):
            assert children[name].hear() == "met"
        _, second, third, _ = hosts.all
        second.ip("route", "add", "blackhole", f"{third.address}/32")
        third.ip("route", "add", "blackhole", f"{second.address}/32")
        for name in ("b", "c"):
            assert children[name].hear() == "lost"
        start(3, "d", stay, ("a", "b", "c"))
        assert children["d"].hear() == "there"
        children["d"].tell("enough")
        pids, lost = children["d"].hear()
        assert pids == [children[name].pid for name in ("a", "b", "c")] and lost == []
        for name in ("c", "b", "a"):
            children[name].tell("enough")
        assert (children["b"].hear()[1], children["c"].hear()[1]) == (["c"], ["b"])
        children.check_ended()
