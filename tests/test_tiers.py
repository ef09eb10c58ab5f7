"""The two tiers of tests have each test once."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests import tiers
from tests.limits import busy

LOOPS = ("asyncio", "uvloop")
ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
from hypothesis import given, strategies


@pytest.fixture(params=["a", "b"])
def way(request):
    pass


@pytest.mark.parametrize("n", range(20))
async def test_on_loops(n):
    pass


@pytest.mark.parametrize(("x", "y"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("z", range(3))
async def test_combined(way, x, y, z):
    pass


def test_runs_loops(loop_factory):
    pass


def test_plain():
    pass


@pytest.mark.long
async def test_long():
    pass


@pytest.mark.parametrize("some", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_partly(some):
    pass


@given(strategies.none())
def test_random(value):
    pass
"""


def cases(*sizes: int, **more: int) -> dict[str, tiers.Case]:
    """All combinations of so many values of parameters; those with names have these names."""
    names = [*map(str, range(len(sizes))), *more]
    chosen = product(*map(range, (*sizes, *more.values())))
    return {f"test[{'-'.join(map(str, values))}]": dict(zip(names, values, strict=True)) for values in chosen}


def test_each_value_is_quick_once() -> None:
    """With whatever value of the others: a case for each value of the parameter that has the most."""
    all_ = cases(3, 7, 2)
    quick = tiers.quick_ones(all_)
    assert len(quick) == 7
    assert {pair for each in quick for pair in all_[each].items()} == {
        pair for case in all_.values() for pair in case.items()
    }


def test_one_loop_will_do() -> None:
    """Of a hundred tests about half on each; the same one whatever else there is."""
    all_ = cases(100, loop_factory=2)
    quick = tiers.quick_ones(all_)
    assert len(quick) == 100 and {all_[each]["0"] for each in quick} == set(range(100))
    assert 30 < sum(all_[each]["loop_factory"] == 0 for each in quick) < 70
    some = {each: case for each, case in all_.items() if case["0"] in range(10, 20)}
    assert tiers.quick_ones(some) == quick & some.keys()
    assert len(tiers.quick_ones(cases(loop_factory=2))) == 1
    assert len(tiers.quick_ones(cases(seed=6, loop_factory=2))) == 1


@pytest.mark.long
def test_the_tiers_have_each_test_once(tmp_path: Path) -> None:
    """But for random cases, which both have."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\nfrom tests.conftest import pytest_configure\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    quick, long = (_collect(tmp_path, marks) for marks in ("not long", "long or random"))
    assert set(quick) & set(long) == {"test_it.py::test_random"}
    assert _counts(quick) == {"combined": 4, "on_loops": 20, "partly": 2, "plain": 1, "random": 1, "runs_loops": 1}
    assert _counts(long) == {"combined": 44, "long": 2, "on_loops": 20, "partly": 1, "random": 1, "runs_loops": 1}
    assert {loop for loop in LOOPS if any(f"[{loop}-" in each for each in quick)} == set(LOOPS)


def _collect(folder: Path, marks: str) -> list[str]:
    """The ids of the tests that are chosen."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-m", marks, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * busy())
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def _counts(ids: list[str]) -> dict[str, int]:
    """How many cases of each test, by its name."""
    names = [each.partition("::test_")[2].partition("[")[0] for each in ids]
    return {name: names.count(name) for name in sorted(set(names))}


def test_few_random_cases_in_the_quick_tier() -> None:
    """A fifth, but some; in the long one as many as are asked for."""
    code = "from tests import tiers; tiers.choose_profile({!r}); print(*map(tiers.examples, (60, 10, 2)))"
    said = [
        subprocess.run([sys.executable, "-c", code.format(marks)], cwd=ROOT, capture_output=True, text=True).stdout
        for marks in ("not long", "long or random")
    ]
    assert said == ["12 4 2\n", "60 10 2\n"]
