"""The plugin for pytest: its fixtures in a run of their own, as a user's tests have them; and what it costs others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import pytest_aiorpc

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "howto" / "testing.md").read_text(encoding="utf-8")
#: By name, as well where it is installed: then this is the name of its entry point.
PLUGIN = ("-p", "pytest_aiorpc")


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    """Run tests in a folder of their own, by another pytest."""
    pytester.makepyfile(source)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nasyncio_default_fixture_loop_scope = 'function'\n")
    return pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", "-p", "no:randomly", *arguments)


def test_the_tests_of_the_page_pass(pytester: pytest.Pytester) -> None:
    """What docs/howto/testing.md shows to copy: workers here, workers in processes, faults, and an async test."""
    blocks = re.findall(r"^```py\n(.+?)^```", PAGE, re.DOTALL | re.MULTILINE)
    tests = sum(block.count("def test_") for block in blocks)
    assert tests >= 5
    outcome = run(pytester, "\n".join(blocks))
    outcome.assert_outcomes(passed=tests)


def test_a_failed_test_leaves_no_worker(pytester: pytest.Pytester) -> None:
    """Faults and workers end with the test, whichever was asked for first, and though calls are still under way."""
    outcome = run(
        pytester,
        """
        import asyncio, threading

        async def never():
            await asyncio.sleep(3600)

        def test_fails(rpc_faults, rpc_workers):
            here, there = rpc_workers(2)
            rpc_faults(here).delay(0.01)
            here.call(there.name, never)
            assert False, "on purpose"

        def test_nothing_is_left():
            assert threading.enumerate() == [threading.main_thread()]
        """,
    )
    outcome.assert_outcomes(passed=1, failed=1)
    outcome.stdout.fnmatch_lines(["*AssertionError: on purpose*"])


def test_it_costs_nothing_where_it_is_not_used(pytester: pytest.Pytester) -> None:
    """Neither torch nor aiorpc is imported before a fixture is; where one is, both are."""
    outcome = run(
        pytester,
        """
        import sys

        def test_without(request):
            assert request.config.pluginmanager.has_plugin("pytest_aiorpc")
            assert {"torch", "aiorpc"}.isdisjoint(sys.modules)

        def test_with(rpc_workers):
            assert {"torch", "aiorpc"} <= set(sys.modules)
        """,
    )
    outcome.assert_outcomes(passed=2)


def test_its_fixtures_are_listed_with_what_they_do(pytester: pytest.Pytester) -> None:
    """`pytest --fixtures` shows them, each with its first line."""
    outcome = run(pytester, "", "--fixtures")
    for name in ("rpc_workers", "rpc_processes", "rpc_faults"):
        outcome.stdout.fnmatch_lines([f"{name} -- *", "    A function that *"])


def test_it_is_installed_with_the_package() -> None:
    """An entry point names it, under the name by which `-p no:` turns it off, and the wheel has its file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_aiorpc": pytest_aiorpc.__name__}
    assert "pytest_aiorpc.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
