"""How far readers are, and what it takes to count it."""

from __future__ import annotations

import random

from aiorpc.protocol.identity import WorkerInfo
from aiorpc.protocol.publication import needed
from aiorpc.runtime.publication.readers import AwaitedVersion, Readers


def info(number: int) -> WorkerInfo:
    """Of a worker."""
    return WorkerInfo(f"reader{number}", number)


def test_counts_are_what_looking_at_all_readers_gives() -> None:
    """Whatever readers say, in whatever order: how many there are, and how many have a version."""
    rng = random.Random(7)
    for _ in range(30):
        readers, have = Readers(), dict[tuple[int, int], int]()
        awaited = [AwaitedVersion(version, quorum) for version in (1, 3, 5) for quorum in (None, 2, 0.5)]
        for each in awaited:
            readers.await_version(each)
        for _ in range(60):
            worker, number = rng.randrange(4), rng.randrange(1, 3)
            match rng.randrange(4):
                case 0:
                    readers.ended(info(worker), number)
                    have.pop((worker, number), None)
                case 1:
                    readers.lost(info(worker), number, have.pop((worker, number), 0), 5)
                case _:
                    have[worker, number] = max(have.get((worker, number), 0), rng.randrange(6))
                    readers.has(info(worker), number, have[worker, number])
            least: dict[int, int] = {}
            for (worker, _), version in have.items():
                least[worker] = min(version, least.get(worker, version))
            for each in awaited:
                delivery = readers.delivery(each)
                assert {reader.id for reader in delivery.has} == {w for w, v in least.items() if v >= each.version}
                assert {reader.id for reader in delivery.missing} == {w for w, v in least.items() if v < each.version}
                assert delivery.reached == (len(delivery.has) >= needed(each.quorum, len(least)))


def test_who_is_expected_counts_until_it_asks_or_need_not() -> None:
    """A worker that was told of the name, and has not asked yet, is missing."""
    readers, awaited = Readers(), AwaitedVersion(1, None)
    readers.await_version(awaited)
    readers.expect(info(1))
    readers.expect(info(2))
    assert not readers.reached(awaited) and readers.delivery(awaited).missing == (info(1), info(2))
    readers.has(info(1), 7, 1)
    readers.expect(info(1))
    readers.expect_no_more(info(1))
    readers.expect_no_more(info(2))
    assert readers.reached(awaited) and readers.delivery(awaited).has == (info(1),)


def test_lost_readers_that_are_remembered_are_bounded() -> None:
    """The last ones are."""
    readers, awaited = Readers(), AwaitedVersion(1, None)
    for number in range(1000):
        readers.lost(info(number), 1, 0, 1)
    assert readers.delivery(awaited).lost == tuple(map(info, range(744, 1000)))
