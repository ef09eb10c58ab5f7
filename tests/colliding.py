"""Keys that collide in the tables of Python: each is chosen, as a sender could choose it."""

from __future__ import annotations

import itertools
import random
from typing import Any

#: The modulus of Python's hashes of numbers.
MODULUS = (1 << 61) - 1


def equal_hashes(length: int) -> list[tuple[int, ...]]:
    """2^length tuples, all with the same hash: that of -1 is that of -2."""
    return [*itertools.product((-1, -2), repeat=length)]


def multiples(count: int) -> list[int]:
    """Whole numbers whose hash is 0."""
    return [number * MODULUS for number in range(count)]


def walkers(bits: int) -> list[int]:
    """Whole numbers of 60 bits, with hashes of their own, that fill a dict of 2^bits places in quadratic time.

    The first half lies along the way of which each goes from place to place once the bits of its hash are used up; the
    others step on that way with each of these bits.
    """
    chance, mask = random.Random(1), (1 << bits) - 1
    way = [7]
    while len(way) < (1 << bits) * 3 // 10:
        way.append((5 * way[-1] + 1) & mask)
    taken, found = frozenset(way), list[int]()
    while len(found) < len(way):
        place = number = chance.choice(way)
        known, shift = bits, 5
        while known < 60:  # five more bits decide on the next place
            more = chance.randrange(32)
            step = (5 * place + ((number | more << known) >> shift) + 1) & mask
            if step in taken:
                number, place = number | more << known, step
                known, shift = known + 5, shift + 5
        rest = number >> shift
        while rest and place in taken:
            place = (5 * place + rest + 1) & mask
            rest >>= 5
        if place in taken and number > mask:
            found.append(number)
    return way + found


def nested(depth: int) -> Any:
    """A list of itself, twice, in itself: it has 2^depth parts, and takes no room."""
    made: Any = [1]
    for _ in range(depth):
        made = [made, made]
    return made
