"""A buffer that several peers get: one copy of it, which each may write to, and which the last one gives back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from aiorpc.channels.arena import Arena
from aiorpc.channels.segments import Bytes
from aiorpc.channels.shm import Borrower, Copies, Lender

SIZE = 2 << 20


class Pair:
    """A lender and a borrower of this process, as of two ends of a link."""

    def __init__(self, arena: Arena) -> None:
        self.lender = Lender(arena, share=0.9, soft=0.9, most=0.9)
        self.borrower = Borrower(lambda: None)
        segment = arena.segments[0]
        self.borrower.map(0, f"/proc/self/fd/{segment.fd}", segment.size, segment.nonce)

    def take(self, data: memoryview, copies: Copies) -> Bytes:
        """What the borrower has of the data."""
        lent = self.lender.lend(data, copies=copies)
        assert lent is not None, self.lender.refused
        return self.borrower.adopt(list(lent[0]), private=True)

    def give_back(self) -> None:
        """What the borrower has let go of is the lender's again."""
        self.lender.released(self.borrower.drain())


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 << 20, poison=True)
    made.grow(8 << 20)
    yield made
    made.close()


@pytest.fixture
def pairs(arena: Arena) -> Iterator[list[Pair]]:
    made = [Pair(arena) for _ in range(3)]
    yield made
    for pair in made:
        pair.borrower.close()


def test_all_get_one_block(arena: Arena, pairs: list[Pair]) -> None:
    """It is counted once, and free when the last of them has released it, in whatever order."""
    data = numpy.arange(SIZE, dtype=numpy.uint8)
    view = data.data
    copies = Copies(arena)
    taken = {pair: pair.take(view, copies) for pair in pairs}
    assert arena.blocks == 1
    assert SIZE <= arena.used < SIZE + 4096 * 2
    copies.close()
    for pair in (pairs[1], pairs[0], pairs[2]):
        assert arena.blocks == 1
        assert numpy.array_equal(taken[pair], data)
        del taken[pair]
        pair.give_back()
        assert pair.lender.leases == 0
    assert (arena.blocks, arena.used) == (0, 0)


def test_what_one_writes_the_others_do_not_see(arena: Arena, pairs: list[Pair]) -> None:
    """Also not who gets the block later."""
    data = numpy.zeros(SIZE, numpy.uint8).data
    copies = Copies(arena)
    first = pairs[0].take(data, copies)
    second = pairs[1].take(data, copies)
    first[:] = 1
    second[SIZE // 2 :] = 2
    third = pairs[2].take(data, copies)
    assert (first.sum(), second[: SIZE // 2].sum(), third.sum()) == (SIZE, 0, 0)
    copies.close()


def test_a_peer_that_is_lost_gives_back_its_share(arena: Arena, pairs: list[Pair]) -> None:
    """And no more than that: the others still have theirs."""
    copies = Copies(arena)
    data = numpy.ones(SIZE, numpy.uint8).data
    taken = [pair.take(data, copies) for pair in pairs]
    copies.close()
    pairs[0].lender.reclaim()
    pairs[0].lender.reclaim()
    assert arena.blocks == 1
    assert taken[1].all()
    pairs[1].lender.reclaim()
    del taken[2]
    pairs[2].give_back()
    assert arena.blocks == 0
