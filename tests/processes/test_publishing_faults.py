"""Publishers and readers that are killed at random moments: nothing hangs, nothing stays lent, nobody sees half."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

import pytest
import torch

import aiorpc as rpc
from tests.runtime.test_publishing import number_of, weights

from .workers import Link, Place, meeting_file, processes, rounds, until

SIZE = 1 << 18  # floats: 1 MiB
KILLS = 12


def read_forever(place: Place, link: Link) -> None:
    """Read every version until the process is killed; each has to be whole, and newer than the one before."""
    place.init_rpc()
    last = 0
    kept: list[dict[str, torch.Tensor]] = []
    rng = random.Random(place.name)
    for got in rpc.subscribe("policy", timeout=60):
        assert number_of(got.value) == float(got.version % 1000)
        assert got.version > last
        if last == 0:
            link.tell("begun")
        last = got.version
        kept = [*kept, got.value][-rng.randrange(1, 4) :]
        if rng.random() < 0.3:
            kept[-1]["w"].fill_(-1.0)  # its own: nobody sees it
            kept[-1] = weights(0)
        time.sleep(rng.random() * 0.01)


def publish_forever(place: Place, link: Link) -> None:
    """Publish until the process is killed, whatever is lost; version after version of whatever number comes next."""
    place.init_rpc()
    version = 0
    while True:
        try:
            # The version that it becomes is known only afterwards; so a reader looks whether it is whole alone.
            version = rpc.publish("policy", {"w": torch.full((SIZE,), float(version))}).wait().version
        except rpc.RpcUsageError:  # the one before is not known to be gone yet
            time.sleep(0.02)
            continue
        if version % 5 == 0:
            link.tell(version)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", rounds(1))
async def test_readers_killed_at_random_leave_nothing_lent(seed: int) -> None:
    """Others come in their places; the publisher waits for none of them."""
    rng = random.Random(seed)
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("w0", init_method=init_method) as worker:
            alive = [children.start(Place(f"r{n}", -1, None, init_method), read_forever) for n in range(3)]
            ended = False

            async def publish() -> int:
                version = 0
                while not ended:
                    version += 1
                    await worker.publish("policy", weights(version % 1000, SIZE))
                    await asyncio.sleep(rng.random() * 0.01)
                return version

            publishing = asyncio.ensure_future(publish())
            for number in range(KILLS):
                victim = alive.pop(rng.randrange(len(alive)))
                assert await victim.ahear() == "begun"
                await asyncio.sleep(rng.random() * 0.2)
                victim.kill()
                await asyncio.to_thread(victim.join)
                alive.append(children.start(Place(f"n{number}", -1, None, init_method), read_forever))
            for child in alive:
                assert await child.ahear() == "begun"
            ended = True
            version = await publishing
            last = await worker.publish("policy", weights((version + 1) % 1000, SIZE))
            delivery = await last.delivered(timeout=30)
            assert delivery.reached and len(delivery.has) == 3
            for child in alive:
                child.kill()
            await until(lambda: worker._node.memory.slots.used == 1)
            delivery = await last.delivered(timeout=30)
            assert delivery.reached and not delivery.has


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", rounds(1))
async def test_publishers_killed_at_random_are_followed_by_others(seed: int) -> None:
    """A reader gets whole versions that go up, from one publisher after the other."""
    rng = random.Random(seed)
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("w0", init_method=init_method) as worker:
            seen: list[tuple[int, str]] = []

            async def read() -> None:
                async for got in worker.subscribe("policy", timeout=60):
                    assert number_of(got.value) >= 0
                    assert not seen or got.version > seen[-1][0]
                    seen.append((got.version, got.publisher.name))

            def has_come_from(name: str) -> bool:
                return any(publisher == name for _, publisher in seen)

            reading = asyncio.ensure_future(read())
            for number in range(KILLS):
                name = f"p{number}"
                child = children.start(Place(name, -1, None, init_method), publish_forever)
                await until(partial(has_come_from, name))
                await asyncio.sleep(rng.random() * 0.1)
                child.kill()
                await asyncio.to_thread(child.join)
            assert not reading.done()
            async with worker.subscribe("policy", timeout=20) as late:
                got = await anext(late)
                assert got.publisher.name == f"p{KILLS - 1}" and number_of(got.value) >= 0
            reading.cancel()


def publish_and_unpublish_forever(place: Place, link: Link) -> None:
    """Publish a few versions, end the name, and so on, until the process is killed."""
    place.init_rpc()
    rng = random.Random(place.name)
    while True:
        try:
            for number in range(rng.randrange(1, 4)):
                rpc.publish("policy", {"w": torch.full((SIZE,), float(number))}).wait().delivered(timeout=1).wait()
            rpc.unpublish("policy").wait()
        except rpc.RpcUsageError:  # the one before is not known to be gone yet
            time.sleep(0.02)
        else:
            link.tell("unpublished")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", rounds(1))
async def test_publishers_killed_while_they_end_names_are_followed_by_others(seed: int) -> None:
    """A reader that subscribes again whenever the name ends gets whole versions of each, and nothing of them stays."""
    rng = random.Random(seed)
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("w0", init_method=init_method) as worker:
            seen: set[str] = set()

            async def read() -> None:
                while True:
                    last = 0
                    async with worker.subscribe("policy", timeout=60) as versions:
                        async for got in versions:
                            assert number_of(got.value) >= 0 and got.version > last
                            last = got.version
                            seen.add(got.publisher.name)
                            del got  # the error that ends the task has this frame

            reading = asyncio.ensure_future(read())
            for number in range(KILLS):
                name = f"p{number}"
                child = children.start(Place(name, -1, None, init_method), publish_and_unpublish_forever)
                await until(partial(seen.__contains__, name))
                assert await child.ahear() == "unpublished"
                await asyncio.sleep(rng.random() * 0.05)
                child.kill()
                await asyncio.to_thread(child.join)
                assert not reading.done()
            reading.cancel()
            await asyncio.wait([reading])
            await until(lambda: not worker._node.publications.prefetchers)
            await until(lambda: len(worker.worker_infos()) == 1)
            published = await worker.publish("policy", weights(1))
            async with worker.subscribe("policy", timeout=20) as versions:
                assert (await anext(versions)).version == published.version
