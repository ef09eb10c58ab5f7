"""Published values on a chain of hosts with slow links, of which one dies or stops while it hands a version on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import aiorpc as rpc
from bench.hosts import Hosts, enter, joined
from tests.runtime.test_publishing import weights

from ..processes.workers import Child, Children, Link, Place, processes, rounds, until, wait_for
from .hosts import needed
from .members import SECRET

RATE = 100.0  # Mbit/s
PIECES = 8  # in which a version is handed on
SIZE = PIECES << 20  # bytes: 0.7 s at that rate
STALLED = 1.0  # seconds in which nothing comes, until whoever does not hand on is passed by
#: On which host each reader lives, in the order of the chain; "also" lives beside one that may be killed or stopped.
READERS = {"first": 1, "second": 2, "third": 3, "also": 2}
CHAIN = ("first", "second", "third")


async def take_part(place: Place, link: Link) -> None:
    """Do what the test says, and tell what came of it, until it says "end"."""
    options = rpc.RpcBackendOptions(init_method=place.init_method)
    async with rpc.init(place.name, options=options) as worker:
        engine = worker._node.engine
        engine.bounds = replace(engine.bounds, stalled=STALLED)
        slots, here = worker._node.memory.slots, worker._node.publications
        link.tell("there")
        with contextlib.ExitStack() as stack:
            while (told := await asyncio.to_thread(link.hear, 200)) != "end":
                match told:
                    case "subscribe":
                        subscription = worker.subscribe("policy", timeout=100)
                        stack.callback(subscription.close)
                        reading = asyncio.ensure_future(read(subscription, link))
                        stack.callback(reading.cancel)
                    case "memory":
                        await until(lambda: slots.used == len(here.publishers) + len(here.relays))
                        link.tell("clean")
                    case int():
                        published = await worker.publish("policy", weights(told, SIZE // 4))
                        assert published.version == told
                        link.tell(told)
                    case "delivered":
                        delivery = await published.delivered(timeout=30)
                        link.tell(({info.name for info in delivery.has}, delivery.missing))


async def read(subscription: rpc.types.Subscription[Any], link: Link) -> None:
    """Tell each version that has come, or what is wrong with it."""
    async for got in subscription:
        elements = {float(limit) for tensor in got.value.values() for limit in tensor.aminmax()}
        link.tell(got.version if elements == {float(got.version)} else (got.version, elements))
        del got


def live(place: Place, link: Link, namespace: str) -> None:
    """Body: see `take_part`."""
    enter(namespace)
    asyncio.run(take_part(place, link))


@contextlib.contextmanager
def chain() -> Iterator[tuple[Children, Hosts]]:
    """A publisher on the first host, and the readers, each of which has got the first version in its turn."""
    with contextlib.ExitStack() as stack:
        with needed("hosts"):
            hosts = stack.enter_context(joined(4, RATE))
        children = stack.enter_context(processes())
        for name, number in {"publisher": 0, **READERS}.items():
            child = children.start(Place(name, -1, None, hosts.meeting), live, hosts.all[number].namespace, env=SECRET)
            assert child.hear() == "there"
        children["publisher"].tell(1)
        assert children["publisher"].hear() == 1
        for name in READERS:
            children[name].tell("subscribe")
            assert children[name].hear() == 1
        yield children, hosts


def gets(child: Child, version: int) -> None:
    """The version comes, or has come; older ones may be skipped."""
    while (told := child.hear()) != version:
        assert type(told) is int and told < version, told


def publish(children: Children, version: int) -> None:
    """Returns when it is published, which waits for nobody."""
    children["publisher"].tell(version)
    assert children["publisher"].hear() == version


def end(children: Children, but: tuple[str, ...] = ()) -> None:
    """All that are left have the newest version, no memory is held but for that, and they end in good order."""
    left = [child for child in children if child.place.name not in but]
    children["publisher"].tell("delivered")
    assert children["publisher"].hear() == (READERS.keys() - {*but}, ())
    for say in ("memory", "end"):
        for child in left:
            child.tell(say)
        for child in left if say == "memory" else ():
            assert child.hear() == "clean"
    children.check_ended(but=but)


@contextlib.contextmanager
def struck(seed: int, how: signal.Signals) -> Iterator[tuple[Children, str]]:
    """A chain of which one member got that signal when it had a part of the second version, and which one that is.

    All others have that version and the next one: those of its host, and those of the hosts behind it.
    """
    rng = random.Random(seed)
    victim = rng.choice(CHAIN)
    with chain() as (children, hosts):
        host = hosts.all[READERS[victim]]
        enough = host.received() + rng.randrange(SIZE)
        publish(children, 2)
        wait_for(lambda: host.received() > enough)
        children[victim].kill(how)
        others = [children[name] for name in READERS if name != victim]
        for child in others:
            gets(child, 2)
        publish(children, 3)
        for child in others:
            gets(child, 3)
        yield children, victim


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", rounds(2))
def test_a_host_that_dies_is_cut_out(seed: int) -> None:
    """Nobody waits for it, and nobody keeps anything for it."""
    with struck(seed, signal.SIGKILL) as (children, victim):
        end(children, but=(victim,))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", rounds(2))
def test_a_host_that_stalls_is_passed_by_and_comes_back(seed: int) -> None:
    """It gets the newest version when it goes on."""
    with struck(seed, signal.SIGSTOP) as (children, victim):
        children[victim].kill(signal.SIGCONT)
        gets(children[victim], 3)
        end(children)
