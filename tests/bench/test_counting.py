"""Counting Python functions: what counts, what is made of it, and a small run of the real thing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import counting, messages
from bench.counter import FunctionCounter
from bench.memory import ENDS
from bench.report import read_json
from bench.stats import Row

ROOT = Path(__file__).resolve().parents[2]
MOST_APART = 0.03
#: Of calls that threads serve: on busy cores the loop now and then reads what a thread reads else.
MOST_APART_IN_THREADS = 0.1
IN_THREADS = {each.quantity for each in counting.OPERATIONS if each.style == "blocking"}


@pytest.fixture
def counter() -> Iterator[FunctionCounter]:
    """One that counts until the test is over."""
    before, threads_before = sys.getprofile(), threading.getprofile()
    made = FunctionCounter()
    made.install()
    yield made
    sys.setprofile(before)
    threading.setprofile(threads_before)


def run(*arguments: str) -> str:
    """What the command prints, as a process of its own, like the fork server that it starts."""
    command = [sys.executable, "-m", "bench", "--quick", "--only", "functions", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """What a small run of two rounds has written, by quantity and note."""
    out = tmp_path_factory.mktemp("bench") / "counts"
    run("--rounds", "2", "--out", str(out))
    return {f"{row.quantity}, {row.note}": row for row in read_json(out.with_suffix(".json")).rows}


@pytest.mark.long
@pytest.mark.slow
def test_counts_are_the_same_in_two_rounds(rows: dict[str, Row]) -> None:
    """All figures are there, positive, and close to those of the other round; but over TCP, where they go by time.

    How many messages are in one piece there, and whether the thread that waits or the loop comes first, is chance.
    """
    of_aiorpc = len(counting.OPERATIONS) + len(counting.TCP) * len(counting.OVER_TCP) + len(ENDS)
    assert len(rows) == of_aiorpc + len(messages.STEPS)
    for row in rows.values():
        one, other = row.aiorpc
        apart = MOST_APART_IN_THREADS if row.quantity in IN_THREADS else MOST_APART
        apart = 2.0 if row.note in counting.TCP else apart
        assert one > 0 and one == pytest.approx(other, rel=apart), row.quantity


@pytest.mark.long
@pytest.mark.slow
def test_the_measurements_say_how_many_messages_a_step_takes(rows: dict[str, Row]) -> None:
    """As many as were counted."""
    one, two, chain = (
        f"{rows[f'{each.quantity}: messages, {each.note}'].aiorpc[0]:.0f}"
        for each in map(counting.choose, ("training", "two_layers", "chain"))
    )
    text = " ".join((ROOT / "docs/inside/measurements.md").read_text(encoding="utf-8").split())
    assert (
        f"a step with one remote layer takes {one} messages, one with two layers, of which one is remote, takes {two}"
        in text
    )
    assert f"a round trip in a graph, forward and backward, takes {chain}." in text


@pytest.mark.long
@pytest.mark.slow
def test_listing_names_the_functions_of_an_operation(rows: dict[str, Row]) -> None:
    """Their number is that of another run, and that of all lines; the handler ran once for each call, at the callee."""
    title, *lines = run("--rounds", "1", "--list", "blocking").splitlines()
    total = float(title.split()[-2])
    assert total == pytest.approx(rows["blocking no-op, "].aiorpc[0], rel=MOST_APART_IN_THREADS)
    both = [float(line.split()[0]) for line in lines]
    assert both == sorted(both, reverse=True)
    assert sum(both) == pytest.approx(total, rel=MOST_APART)
    (handler,) = [line.split() for line in lines if line.endswith(" noop")]
    assert handler[:3] == ["1.00", "0.00", "1.00"] and handler[3].startswith("bench/functions.py:")
