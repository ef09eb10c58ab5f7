"""Broken inputs out of good ones, for where there is no fuzzer that follows the coverage."""

from __future__ import annotations

import random
from collections.abc import Sequence

EXTREMES = (b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7))


def mutate(data: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A few of the usual accidents: changed, lost, doubled and foreign bytes, extreme numbers, pieces of others."""
    broken = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(broken) + 1)
        match chance.randrange(7):
            case 0 if broken:
                broken[at % len(broken)] = chance.randrange(256)
            case 1 if broken:
                broken[at % len(broken)] ^= 1 << chance.randrange(8)
            case 2:
                del broken[at : at + chance.randint(1, 8)]
            case 3:
                broken[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                extreme = chance.choice(EXTREMES)
                broken[at : at + len(extreme)] = extreme
            case 5:
                broken[at:] = broken[: chance.randint(0, 40)]
            case 6 if others:
                other = chance.choice(others)
                start = chance.randrange(len(other) + 1)
                broken[at:at] = other[start : start + chance.randint(1, 64)]
    return bytes(broken)
