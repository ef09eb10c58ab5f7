"""Memory that is kept in the arena until somebody asks for it: lent where it lies, and free when nobody has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from aiorpc.channels.arena import POISON, Arena, Block
from aiorpc.channels.keeping import Keeper
from aiorpc.channels.segments import Bytes
from aiorpc.channels.shm import Borrower, Lender
from aiorpc.channels.space import MIB

LIMIT = 64 * MIB
SIZE = 300_000


class Kept:
    """A keeper with warm memory, a lender of the same arena, and what the keeper has said."""

    def __init__(self, warm: int = 32 * MIB, **options: Any) -> None:
        self.arena = Arena(LIMIT, segment_size=LIMIT, poison=True)
        if warm:
            self.arena.grow(warm)
        self.cold: list[int] = []
        self.told: list[int] = []
        self.keeper = Keeper(self.arena, lambda: self.told.append(1), self.cold.append, **options)
        self.lender = Lender(self.arena)
        self.borrower = Borrower(lambda: None)
        for segment in self.arena.segments:
            self.borrower.map(segment.index, f"/proc/{os.getpid()}/fd/{segment.fd}", segment.size, segment.nonce)

    def keep(self, size: int = SIZE) -> Bytes:
        """Memory with some bytes in it."""
        array = self.keeper.keep(size)
        assert array is not None
        array[:] = numpy.arange(size, dtype=numpy.uint8)
        return array

    def lend(self, array: Bytes) -> Block:
        """As a message would."""
        lent = self.lender.lend(array.data, kept=self.keeper.find(array.data))
        assert lent is not None, self.lender.refused
        return lent[0]

    def give_back(self) -> None:
        """What the borrower has no more."""
        self.lender.released(self.borrower.drain())


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.keeper.close()
    made.borrower.close()
    made.arena.close()


@pytest.mark.parametrize("first", ["here", "there"])
def test_it_is_free_when_neither_end_has_it(kept: Kept, first: str) -> None:
    """Whoever lets go of it first: the bytes stay as long as the other one has them."""
    array = kept.keep()
    expected = bytes(array)
    there = kept.borrower.adopt(list(kept.lend(array)))
    if first == "here":
        del array
        assert kept.keeper.collect()
        assert bytes(there) == expected
        del there
        kept.give_back()
    else:
        del there
        kept.give_back()
        assert bytes(array) == expected
        del array
        assert kept.keeper.collect()
    assert (kept.arena.used, kept.arena.blocks, kept.keeper.keeps, kept.lender.leases) == (0, 0, {}, 0)


def test_any_view_keeps_it(kept: Kept) -> None:
    """Also one that numpy makes of another."""
    array = kept.keep()
    view = array[10:20].reshape(2, 5)
    expected = bytes(view)
    del array
    assert not kept.keeper.collect()
    assert bytes(view) == expected != bytes([POISON] * 10)
    del view
    assert kept.keeper.collect()
    assert not kept.keeper.collect()
    assert kept.arena.used == 0


def test_a_peer_gets_a_copy_as_long_as_it_has_it_already(kept: Kept) -> None:
    """A block is lent to one peer once at a time, as each is given back once; another peer gets it meanwhile."""
    array = kept.keep()
    first, second = kept.lend(array), kept.lend(array)
    assert first.offset != second.offset
    other = Lender(kept.arena).lend(array.data, kept=kept.keeper.find(array.data))
    assert other is not None and other[0] == first
    for block in (first, second):
        assert bytes(kept.borrower.adopt(list(block))) == bytes(array)
    kept.give_back()
    assert kept.lender.leases == 0
    assert kept.lend(array) == first


def test_nothing_is_kept_beyond_its_share() -> None:
    """Of the limit, and of what is in use by anybody; what has died makes room at once."""
    kept = Kept(share=0.1, soft=0.2)
    try:
        arrays = [kept.keep(MIB) for _ in range(6)]
        assert kept.keeper.keep(MIB) is None
        arrays.pop()
        assert kept.keep(MIB) is not None
        arrays.clear()
        blocks = [kept.arena.allocate(MIB) for _ in range(12)]
        assert None not in blocks
        assert kept.keeper.keep(MIB) is None
        assert kept.cold == []
    finally:
        kept.arena.close()


def test_what_is_kept_outlives_the_arena(kept: Kept) -> None:
    """Its memory is mapped as long as somebody has it, and nothing is given back to an arena that is closed."""
    array = kept.keep()
    expected = bytes(array)
    kept.arena.close()
    assert bytes(array) == expected
    del array
    assert kept.keeper.collect()
    kept.keeper.close()
    assert not kept.keeper.collect()
