"""Dicts and sets of keys that a peer chose."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aiorpc.errors import SerializationError
from aiorpc.protocol.tables import Tables
from tests import colliding


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        (dict, colliding.equal_hashes(14)),
        (set, colliding.multiples(15_000)),
        (set, [*map(frozenset, zip(colliding.multiples(15_000), strict=True))]),
    ],
    ids=["tuples of one hash", "numbers of one hash", "sets of one hash"],
)
def test_keys_that_collide_are_refused(table: type, keys: list[Any]) -> None:
    """Those of a message of less than a megabyte, after a second; filling the table would take much longer."""
    tables = Tables(len(keys) * 10)
    with pytest.raises(SerializationError, match="hashes collide"):
        if table is set:
            tables.members(keys)
        else:
            tables.mapping([(key, None) for key in keys])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_numbers_that_walk_through_a_dict_are_refused() -> None:
    """Each of them has a hash of its own."""
    keys = colliding.walkers(16)
    assert len({*map(hash, keys)}) > len(keys) * 0.9
    with pytest.raises(SerializationError, match="hashes collide"):
        Tables(len(keys) * 2).mapping([(key, None) for key in keys])


def test_tables_of_one_message_have_one_time() -> None:
    """Many that are small take no more than a large one may."""
    tables, keys = Tables(1000), colliding.equal_hashes(10)
    with pytest.raises(SerializationError, match="hashes collide"):
        for _ in range(1000):
            tables.members(keys)


@pytest.mark.parametrize(
    "keys",
    [
        [*range(50_000)],
        [number << 40 for number in range(20_000)],
        [number / 1024 for number in range(20_000)],
        [*map(random.Random(1).getrandbits, [62] * 50_000)],
        [(x, y) for x in range(-150, 150) for y in range(-150, 150)],
        ["word", b"bytes", None, True, 7, 1.5, (1, "a"), frozenset((1, 2))],
        [f"word {number}" for number in range(1000)],
    ],
    ids=["range", "steps", "fractions", "random", "grid", "few", "text"],
)
def test_honest_keys_are_taken(keys: list[Any]) -> None:
    """In a dict, and in a set, each of which has them all."""
    assert Tables(len(keys)).mapping([(key, str(key)) for key in keys]) == {key: str(key) for key in keys}
    assert Tables(len(keys)).members(keys) == {*keys}


def test_what_has_no_hash_is_no_key() -> None:
    """As in Python."""
    with pytest.raises(TypeError):
        Tables(1).members([[]])
    with pytest.raises(TypeError):
        Tables(1).mapping([({}, 1)])
