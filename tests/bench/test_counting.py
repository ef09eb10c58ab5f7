"""Counting Python functions: what counts, what is made of it, and a small run of the real thing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import counting, messages
from bench.__main__ import main
from bench.counter import FunctionCounter
from bench.memory import ENDS
from bench.report import read_json
from bench.stage import Plan
from bench.stats import Row
from bench.suite import choose

ROOT = Path(__file__).resolve().parents[2]
MOST_APART = 0.03
#: Of calls that threads serve: on busy cores the loop now and then reads what a thread reads else.
MOST_APART_IN_THREADS = 0.1
IN_THREADS = {each.quantity for each in counting.OPERATIONS if each.style == "blocking"}


def leaf() -> None:
    """Counted once for each call."""


def caller(times: int) -> None:
    """Counted once, with so many calls of another."""
    for _ in range(times):
        leaf()


async def pausing(times: int) -> None:
    """Counted when it starts, and each time it goes on."""
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.fixture
def counter() -> Iterator[FunctionCounter]:
    """One that counts until the test is over."""
    before, threads_before = sys.getprofile(), threading.getprofile()
    made = FunctionCounter()
    made.install()
    yield made
    sys.setprofile(before)
    threading.setprofile(threads_before)


def times(counts: Counter[str], name: str) -> int:
    """How often the functions of this file with that name ran."""
    return sum(count for each, count in counts.items() if "test_counting.py" in each and each.endswith(f" {name}"))


def test_functions_between_two_marks_count(counter: FunctionCounter) -> None:
    """What runs before the first mark, between two pairs, or after the last does not; functions in C never do."""
    caller(5)
    for calls in (2, 3):
        counter.mark()
        caller(calls)
        len("in C")
        counter.mark()
        caller(7)
    found = counter.between_marks()
    assert [(times(each, "caller"), times(each, "leaf"), each.total()) for each in found] == [(1, 2, 4), (1, 3, 5)]
    assert counter.between_marks() == []


def test_threads_that_are_started_later_count(counter: FunctionCounter) -> None:
    """None of the calls of several threads at once is lost."""
    threads = [threading.Thread(target=caller, args=(2_000,)) for _ in range(4)]
    counter.mark()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    counter.mark()
    (found,) = counter.between_marks()
    assert (times(found, "caller"), times(found, "leaf")) == (4, 8_000)


def test_coroutines_count_whenever_they_go_on(counter: FunctionCounter) -> None:
    """Started once, resumed three times."""
    counter.mark()
    asyncio.run(pausing(3))
    counter.mark()
    (found,) = counter.between_marks()
    assert times(found, "pausing") == 1 + 3


def test_what_marking_takes_is_not_counted() -> None:
    """A batch less the one of no operations, for each operation."""
    empty, full = Counter(mark=2, timer=1), Counter(mark=2, call=20)
    assert counting.differences([empty, full], 10) == [{"mark": 0.0, "call": 2.0, "timer": -0.1}]


def test_a_round_gives_the_median_of_its_batches() -> None:
    """A timer that fires during one of them does not show."""
    assert counting.in_rounds([5.0, 5.0, 8.5, 6.0, 5.0, 5.0]) == [5.0, 5.0]


def test_every_operation_is_repeated_at_least_once() -> None:
    """Also those with a small share of a small plan."""
    assert all(each.turns(Plan(operations=1)) == 1 for each in counting.OPERATIONS)


def test_functions_are_taken_only_when_named() -> None:
    """They compare nothing with torch."""
    assert "functions" not in [each.name for each in choose(None)]
    assert [each.name for each in choose(["functions"])] == ["functions"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "functions", "--list", "awaitd"], "no operation awaitd; there are awaited,"),
        (["--list", "awaited"], "--only functions"),
        (["--only", "burst", "--list", "awaited"], "--only functions"),
    ],
)
def test_listing_of_what_is_not_counted_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped operation, or another measurement."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


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
