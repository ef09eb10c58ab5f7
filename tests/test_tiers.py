"""The two tiers of tests have each test once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import tiers

LOOPS = ("asyncio", "uvloop")
ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
from hypothesis import given, strategies

from tests.tiers import examples


@pytest.mark.parametrize("n", range(20))
async def test_on_loops(n):
    pass


def test_runs_loops(loop_factory):
    pass


def test_plain():
    pass


@pytest.mark.long
async def test_long():
    pass


@given(strategies.none())
def test_random(value):
    pass
"""


def test_ids_without_a_loop_are_left_alone() -> None:
    """Also where a loop's name is a part of a word, or of a file's name."""
    ids = ["a-asyncio-b.py::test_uvloop[some]", "a.py::test[no_asyncio]", "a.py::test[asyncio2]", "a.py::test"]
    assert tiers.on_other_loops(ids, LOOPS) == set()


def test_one_of_each_pair_is_long() -> None:
    """The other one is quick; which one, its id alone says."""
    common = [f"a.py::test{n}[%s-{n}]" for n in range(100)]
    ids = [each % loop for each in common for loop in LOOPS]
    long = tiers.on_other_loops(ids, LOOPS)
    assert all(sum(each % loop in long for loop in LOOPS) == 1 for each in common)
    assert 30 < sum("asyncio" in each for each in long) < 70
    assert tiers.on_other_loops(ids[40:60], LOOPS) == long & set(ids[40:60])


def test_what_is_there_on_one_loop_alone_is_quick() -> None:
    """As when one asks for it by its id."""
    assert tiers.on_other_loops(["a.py::test[asyncio]"], LOOPS) == set()


def test_the_tiers_have_each_test_once(tmp_path: Path) -> None:
    """But for random cases, which both have."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\nfrom tests.conftest import pytest_configure\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    quick, long = (_collect(tmp_path, marks) for marks in ("not long", "long or random"))
    assert set(quick) & set(long) == {"test_it.py::test_random"}
    assert len(quick) == 20 + 1 + 1 + 1
    assert len(long) == 20 + 1 + 2 + 1
    assert {loop for loop in LOOPS if any(f"[{loop}-" in each for each in quick)} == set(LOOPS)


def _collect(folder: Path, marks: str) -> list[str]:
    """The ids of the tests that are chosen."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-m", marks, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_few_random_cases_in_the_quick_tier() -> None:
    """A fifth, but some; in the long one as many as are asked for."""
    counts = "from tests import tiers; tiers.choose_profile({!r}); print(*map(tiers.examples, (60, 10, 2)))"
    said = [
        subprocess.run([sys.executable, "-c", counts.format(marks)], cwd=ROOT, capture_output=True, text=True).stdout
        for marks in ("not long", "long or random")
    ]
    assert said == ["12 4 2\n", "60 10 2\n"]
