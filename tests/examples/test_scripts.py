"""The scripts under examples/, each run as a reader would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.programs import ROOT, run_program, torchrun

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples"
LIMIT = 100.0  # seconds for a script that takes about four

#: What each script must print, in this order, lines of its other worker aside.
PRINTS = {
    "hello.py": (
        "blocking: tensor([2., 2.])", "three at once: [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]", "awaited: tensor",
    ),
    "async_loop.py": (
        "gathered: ['call 0', 'call 1', 'call 2']", "asyncio.timeout: gave up", "deadline: ", "cancelled: ",
    ),
    "streams.py": ("token0", "token1", "token2", "enough", "sum of 100 tensors: tensor([4950., 4950.])"),
    "batching.py": ("means: [0, 1, 2, 3,",),
}  # fmt: skip
#: What its other worker must print, sooner or later.
OTHER_PRINTS = {
    "async_loop.py": ("  helper: 'too long' was given up, stopping", "  helper: 'past its deadline' was given up"),
    "streams.py": ("  producer: done\n",),
    "batching.py": ("  server: one run for 32 callers",),
}


def _appears_in_order(lines: list[str], starts: tuple[str, ...]) -> bool:
    rest = iter(lines)
    return all(any(line.startswith(start) for line in rest) for start in starts)


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTS)
def test_a_script_runs_from_any_folder(tmp_path: Path, name: str) -> None:
    """It prints what it is about, says nothing on stderr, and leaves nothing behind."""
    outcome = run_program([str(FOLDER / name)], tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.err) == (0, "")
    assert _appears_in_order(outcome.out.splitlines(), PRINTS[name]), outcome.out
    for words in OTHER_PRINTS.get(name, ()):
        assert words in outcome.out


@pytest.mark.long
def test_the_torchrun_script_runs_under_torchrun(tmp_path: Path) -> None:
    """Three processes find each other; one object counts the calls of all."""
    outcome = run_program(torchrun(3, str(FOLDER / "torchrun.py")), tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    expected = ("worker1 runs on ", "worker2 runs on ", "counted: tensor([10., 10.])")
    assert _appears_in_order(outcome.out.splitlines(), expected), outcome.out


def test_every_script_is_tried_and_listed() -> None:
    """No script without a test, none that the README of the folder leaves out, none too long to copy."""
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts == {*PRINTS, "torchrun.py", "inference_service.py"}  # the last one in tests/neighbours
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in scripts)
    assert all(len((FOLDER / name).read_text().splitlines()) <= 90 for name in scripts)
