"""A buffer that several peers get: one copy of it, which each may write to, and which the last one gives back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from aiorpc.channels import shared, shm
from aiorpc.channels.arena import Arena
from aiorpc.channels.segments import Bytes
from aiorpc.channels.shm import Borrower, Copies, Lender
from aiorpc.errors import ProtocolError

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


def test_a_block_is_freed_as_often_as_it_is_held(arena: Arena) -> None:
    """Once more is an error, as ever."""
    block = arena.allocate(100)
    assert block is not None
    arena.share(block)
    arena.free(block)
    assert arena.blocks == 1
    arena.free(block)
    for method in (arena.free, arena.share):
        with pytest.raises(ValueError, match="not in use"):
            method(block)


def test_other_buffers_get_blocks_of_their_own(arena: Arena, pairs: list[Pair]) -> None:
    """A copy is of the very buffers that it was made of."""
    copies = Copies(arena)
    one, other = numpy.full(SIZE, 1, numpy.uint8), numpy.full(SIZE, 2, numpy.uint8)
    views = one.data, other.data
    for view in views:
        assert copies.find((view,)) is None
        assert pairs[0].lender.lend(view, copies=copies) is not None
    assert arena.blocks == 2
    assert copies.find(views) is None
    copies.close()


def test_where_nothing_more_can_be_mapped_it_is_copied(
    arena: Arena, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is given back at once then."""

    def refuse(*_: Any) -> Bytes:
        raise OSError(12, "no memory")

    monkeypatch.setattr(shm, "map_private", refuse)
    copies = Copies(arena)
    taken = pairs[0].take(numpy.ones(SIZE, numpy.uint8).data, copies)
    copies.close()
    pairs[0].give_back()
    assert arena.blocks == 0
    assert taken.all()


def test_a_block_that_is_in_use_is_not_lent_again(arena: Arena, pairs: list[Pair]) -> None:
    """Of one lender, as without copies."""
    copies = Copies(arena)
    data = numpy.ones(SIZE, numpy.uint8)
    view = data.data
    lent = pairs[0].lender.lend(view, copies=copies)
    assert lent is not None
    taken = pairs[0].borrower.adopt(list(lent[0]), private=True)
    with pytest.raises(ProtocolError, match="in use here"):
        pairs[0].borrower.adopt(list(lent[0]), private=True)
    assert taken.all()
    copies.close()


def test_the_words_for_copying_out_are_numbers_of_the_wire() -> None:
    """They stand in messages, so they do not change."""
    assert (shared.IN_PLACE, shared.COPY_OUT, shared.PRIVATE) == (0, 1, 2)
