"""Queues between processes: of different scripts; and where one is killed, nothing hangs, comes twice or stays lent."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.limits import busy

from .test_scripts import HEADER, run_ranks
from .workers import LIMIT, Link, Place, meeting_file, processes, rounds, until

LARGE = 200_000  # bytes: such an item stays with its producer, and goes to its consumer by shared memory
MANY = 4  # items that one consumer asks for, and that one producer has under way


def item(producer: str, number: int) -> Any:
    name = f"{producer}:{number}"
    return (name, torch.ones(LARGE, dtype=torch.uint8)) if number % 3 == 0 else (name, None)


def produce(place: Place, link: Link) -> None:
    """Body: put items until the test says something; then tell which were put, and stay until it does so again."""
    asyncio.run(_produce(place, link))


async def _produce(place: Place, link: Link) -> None:
    put: list[str] = []
    async with rpc.init(place.name, init_method=place.init_method):
        queue = rpc.queue("q", owner="owner", timeout=60 * busy())
        told = asyncio.ensure_future(asyncio.to_thread(link.hear, 120 * busy()))
        link.tell("there")
        number = 0
        try:
            while not told.done():
                items = [item(place.name, number + each) for each in range(MANY)]
                number += MANY
                await asyncio.gather(*(queue.put(each) for each in items))
                put += [name for name, _ in items]
            link.tell(put)
        except (rpc.PeerLost, rpc.errors.UnknownObject, rpc.QueueShutDown) as error:
            link.tell(type(error).__name__)
            await told
        del items
        await asyncio.to_thread(link.hear, 120 * busy())
        await until(nothing_left_of(rpc.current()))
        link.tell("nothing left")


def nothing_left_of(worker: rpc.Worker) -> Any:
    """Asks whether that worker refers to nothing and lends nothing."""

    def check() -> bool:
        return not any(astuple(worker._node.references.counts())) and worker.statistics().shared_lent == 0

    return check


def consume(place: Place, link: Link, path: str) -> None:
    """Body: get items until the queue ends, and write the name of each down at once; then tell what ended it."""
    asyncio.run(_consume(place, link, path))


async def _consume(place: Place, link: Link, path: str) -> None:
    lost: Counter[str] = Counter()
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    losses = os.open(f"{path}.lost", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with rpc.init(place.name, init_method=place.init_method):
        queue = rpc.queue("q", owner="owner", timeout=60 * busy())
        link.tell("there")
        while True:
            try:
                items = await queue.get_many(MANY)
            except rpc.errors.ItemLost as error:
                lost[error.worker] += error.count
                os.write(losses, f"{place.name}: {error}\n".encode())
                continue
            except (rpc.PeerLost, rpc.errors.UnknownObject, rpc.QueueShutDown) as error:
                link.tell((type(error).__name__, dict(lost)))
                break
            for name, tensor in items:
                os.write(file, f"{name}\n".encode())
                assert (tensor is not None) == (int(name.partition(":")[2]) % 3 == 0)
                assert tensor is None or tensor.sum().item() == LARGE
            del items
            tensor = None
        os.close(file)
        os.close(losses)
        await asyncio.to_thread(link.hear, 120 * busy())
        await until(nothing_left_of(rpc.current()))
        link.tell("nothing left")


def told_of(log: Path) -> str:
    """What consumers have heard of items that were lost, those that are dead by now as well."""
    return log.with_name(f"{log.name}.lost").read_text()


def own(place: Place, link: Link) -> None:
    """Body: own the queue."""
    place.init_rpc()
    rpc.Queue("q", 8)
    link.tell("there")
    link.hear(120 * busy())
    rpc.shutdown()


@pytest.mark.long  # tests/queues/test_queue.py has each of these deaths once, in one process
@pytest.mark.parametrize("seed", rounds(2))
@pytest.mark.parametrize("victim", ["producer0", "consumer0", "owner"])
async def test_a_death_at_a_random_moment_harms_nobody_else(victim: str, seed: int, tmp_path: Path) -> None:
    """Whoever it is: the others end in good order, and what they have got and put adds up."""
    log = tmp_path / "got"
    log.touch()
    names = [f"{kind}{number}" for kind in ("producer", "consumer") for number in range(2)]
    when = random.Random(seed).randrange(0, 200)

    def got() -> list[str]:
        return log.read_text().split()

    with processes() as children, meeting_file() as init_method:
        async with rpc.init("test" if victim == "owner" else "owner", init_method=init_method) as worker:
            if victim == "owner":
                assert await children.start(Place("owner", -1, None, init_method), own).ahear() == "there"
            else:
                queue: rpc.Queue[Any] = rpc.Queue("q", 8)
            for name in names:
                body, args = (produce, ()) if name.startswith("producer") else (consume, (str(log),))
                children.start(Place(name, -1, None, init_method), body, *args)
            for name in names:
                assert await children[name].ahear() == "there"
            await until(lambda: len(got()) >= when)
            children[victim].kill()
            alive = [name for name in names if name != victim]
            if victim == "owner":
                for name in alive:
                    told = await children[name].ahear()
                    assert "PeerLost" in told, (name, told)
                    if name.startswith("producer"):
                        children[name].tell("enough")
            else:
                before = len(got())
                await until(lambda: len(got()) >= before + 50)
                put: list[str] = []
                for name in alive:
                    if name.startswith("producer"):
                        children[name].tell("enough")
                        put += await children[name].ahear()
                await queue.shutdown()
                lost: Counter[str] = Counter()
                for name in alive:
                    if name.startswith("consumer"):
                        ended, gone = await children[name].ahear()
                        assert ended == "QueueShutDown"
                        lost.update(gone)
                missing = set(put) - set(got())
                if victim == "consumer0":  # it has taken along what it was given, and not more
                    assert len(missing) <= MANY and not lost, (missing, told_of(log))
                else:
                    assert not missing and set(lost) <= {victim}, (missing, told_of(log))
            assert max(Counter(got()).values(), default=1) == 1
            for name in alive:
                children[name].tell("end")
                assert await asyncio.wait_for(children[name].ahear(), LIMIT) == "nothing left"
            await until(nothing_left_of(worker))
        await asyncio.to_thread(lambda: children.check_ended(but=(victim,)))


# What each of the scripts has in its main module. A queue is named after the worker that reads it.
COMMON = f"""{HEADER}
import torch

LIMIT = {60 * busy()}
READERS = dict(owner=("owner", "twin", "consumer"), producer=("twin", "consumer"))  # by the owners of their queues

def find(name, owner):
    queue = rpc.queue(name, owner=owner, timeout=LIMIT)
    while True:
        try:
            queue.qsize().wait()
            return queue
        except rpc.errors.UnknownObject:  # its owner is about to make it
            pass

def read(name):
    for owner, readers in READERS.items():
        if name not in readers:
            continue
        queue = find(name, owner)
        by_name = name == "twin"
        for number in range(5):
            point, *others = queue.get().wait()
            kind = "Weighted" if number == 4 else "Point"
            assert type(point).__name__ == kind and point.total() == 42, (name, number, point)
            assert (type(point) is globals().get(kind)) == by_name, (name, number)
            assert all(each.sum() == 100_000 for each in others if isinstance(each, torch.Tensor)), (name, number)
        function = queue.get().wait()
        assert function(point) == 84 and (function is globals().get("doubled")) == by_name
        assert queue.get().wait() == "plain"
        queue.task_done(7).wait()
"""

OWNER = f"""{COMMON}
if __name__ == "__main__":
    rpc.init_rpc("owner")
    for name in READERS["owner"]:
        rpc.Queue(name)
    read("owner")
    rpc.shutdown()
"""

PRODUCER = f"""{COMMON}
SCALE = 10

class Point:
    def __init__(self, x):
        self.x = x

    def total(self):
        return self.x * SCALE + 2

class Weighted(Point):
    weights = torch.full((20_000,), 2.0)  # they travel with the class, where that goes by value

    def __init__(self, x):
        super().__init__(x)
        self.mine = torch.full((20_000,), 40.0)

    def total(self):
        return int(self.mine.mean() + self.weights.mean())

def doubled(point):
    return 2 * point.total()

def write(queue):
    large = torch.ones(100_000, dtype=torch.uint8)
    for copy, item in (
        (True, [Point(4)]),
        (True, [Point(4), large]),
        (False, [Point(4), large]),
        (True, [Point(4), rpc.RRef(1)]),
        (True, [Weighted(4)]),
        (True, doubled),
        (True, "plain"),
    ):
        queue.put(item, copy=copy).wait()

if __name__ == "__main__":
    name = ("owner", "producer", "twin")[int(os.environ["RANK"])]
    rpc.init_rpc(name)
    if name == "twin":
        read("twin")
    else:
        for reader in READERS["producer"]:
            rpc.Queue(reader)
        queues = [find(reader, owner) for owner, readers in READERS.items() for reader in readers]
        for queue in queues:
            write(queue)
        for queue in queues:
            queue.join().wait()
    rpc.shutdown()
"""

CONSUMER = f"""{COMMON}
if __name__ == "__main__":
    rpc.init_rpc("consumer")
    read("consumer")
    rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.long  # tests/queues/test_queue.py has the same in one process
def test_whichever_script_gets_an_item_can_read_what_the_script_of_its_producer_defines(tmp_path: Path) -> None:
    """By name where it is the same script, else by value, whatever the owner of the queue runs."""
    paths = [tmp_path / name for name in ("owner.py", "producer.py", "consumer.py")]
    for path, text in zip(paths, (OWNER, PRODUCER, CONSUMER), strict=True):
        path.write_text(text)
    owner, producer, consumer = paths
    run_ranks([owner, producer, producer, consumer])
