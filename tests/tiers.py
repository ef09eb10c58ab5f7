"""Which tests are quick, and which long: `make test` runs the quick ones (``-m "not long"``), `make testlong` the rest.

Long is what is marked so; and of a test with many cases all but so few that each value of each of its parameters is
tried once, whatever it is combined with. Of some parameters (`ONE_OF`: loops, seeds, ways of tensors to devices) any
value will do. Which cases these are, hashes of their ids say: they are the same each time, whatever is written beside
the test. What tries random cases is in both tiers, with few cases in the quick one, and always the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

QUICK = "quick"
EXAMPLES = 15  # where a test does not say how many
SHARE = 5
LEAST = 4
#: The first is pytest-asyncio's loop, the second that of our own fixture.
ONE_OF = ("_asyncio_loop_factory", "loop_factory", "seed", "way")

#: By what a test is parametrized with, one name or several at once: which of its values a case has.
Case = Mapping[str, Hashable]


def choose_profile(marks: str) -> None:
    """Hypothesis's, by what pytest's ``-m`` says; neither has a bound of time, which a busy machine would miss."""
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("all", patient)
    settings.register_profile(QUICK, patient, max_examples=EXAMPLES, derandomize=True)
    settings.load_profile(QUICK if "not long" in marks else "all")


def examples(count: int) -> int:
    """How many random cases to try for a test that tries ``count`` in the long tier."""
    return count if settings.get_current_profile_name() != QUICK else max(count // SHARE, min(count, LEAST))


def assign(items: Sequence[pytest.Item]) -> None:
    """Mark what is in the long tier, and what is in both."""
    tests: dict[str, dict[str, Case]] = {}
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("random")
        if hasattr(item, "callspec") and not item.get_closest_marker("long"):
            tests.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = _case(item)
    long = {each for cases in tests.values() for each in cases.keys() - quick_ones(cases)}
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")


def quick_ones(cases: Mapping[str, Case]) -> set[str]:
    """Of the cases of a test, by id: so few that no value of a parameter is left out, but those that stand for all."""
    alike: dict[frozenset[tuple[str, Hashable]], list[str]] = {}
    for each, case in cases.items():
        alike.setdefault(frozenset(pair for pair in case.items() if pair[0] not in ONE_OF), []).append(each)
    order = sorted(alike, key=lambda values: (_hash(min(alike[values])), min(alike[values])))
    left = set().union(*order)
    chosen: list[frozenset[tuple[str, Hashable]]] = []
    while left or not chosen:
        chosen.append(max(order, key=lambda values: len(values & left)))
        left -= chosen[-1]
    return {min(alike[values], key=_hash) for values in chosen}


def _case(item: Any) -> Case:
    values: dict[str, Hashable] = {name: id(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = [name.strip() for name in names.split(",")] if isinstance(names := mark.args[0], str) else names
        values[",".join(names)] = tuple(values.pop(name) for name in names)
    return values


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
