"""Which tests are quick, and which long: `make test` runs the quick ones (``-m "not long"``), `make testlong` the rest.

Long is what is marked so, and of a test that runs on each kind of loop all but one: which, a hash of its id says, so
that both kinds are met, and a test stays where it is whatever is written beside it. What tries random cases is in both
tiers, with few cases in the quick one, and always the same.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Sequence

import pytest
from hypothesis import is_hypothesis_test, settings

QUICK = "quick"
EXAMPLES = 15  # where a test does not say how many
SHARE = 5
LEAST = 4


def choose_profile(marks: str) -> None:
    """Hypothesis's, by what pytest's ``-m`` says."""
    settings.register_profile(QUICK, max_examples=EXAMPLES, derandomize=True)
    if "not long" in marks:
        settings.load_profile(QUICK)


def examples(count: int) -> int:
    """How many random cases to try for a test that tries ``count`` in the long tier."""
    return count if settings.get_current_profile_name() != QUICK else max(count // SHARE, min(count, LEAST))


def assign(items: Sequence[pytest.Item], loops: Collection[str]) -> None:
    """Mark what is in the long tier, and what is in both."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("random")
    long = on_other_loops((item.nodeid for item in items), loops)
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")


def on_other_loops(ids: Iterable[str], loops: Collection[str]) -> set[str]:
    """Of ids that differ only in the name of a loop, all but one."""
    name = re.compile(rf"(?<=[\[-])(?:{'|'.join(map(re.escape, loops))})(?=[\]-])")
    groups: dict[str, list[str]] = {}
    for each in ids:
        if name.search(each):
            groups.setdefault(name.sub("", each), []).append(each)
    long: set[str] = set()
    for common, group in groups.items():
        group.sort()
        del group[zlib.crc32(common.encode()) % len(group)]
        long.update(group)
    return long
