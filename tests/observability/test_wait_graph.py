"""Who waits for whom, as it is read from reports."""

from __future__ import annotations

import pytest

from aiorpc.observability.report import Unseen
from aiorpc.observability.wait_graph import as_mermaid, as_text, build, circle

from .made import group, made, ring, served


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_workers_that_wait_in_a_circle_are_named_in_order(count: int) -> None:
    """From the first one by name; a worker may wait for itself."""
    names = [f"w{number}" for number in range(count)]
    seen = group(*ring(*names))
    around = circle(seen, seen)
    assert [each.source.worker for each in around] == names
    assert [each.target.worker for each in around] == [*names[1:], names[0]]
    text = as_text(build(seen), around)
    assert ("waits for itself" in text) if count == 1 else (f"{count} workers wait in a circle: w0 -> w1" in text)


def test_handlers_that_are_not_at_a_lock_wait_in_no_circle() -> None:
    """They run, and will answer."""
    seen = group(*ring("a", "b", "c", at_lock=False))
    assert circle(seen, seen) == []


def test_a_lock_that_a_running_handler_may_hold_is_no_deadlock() -> None:
    """It may let go of the lock."""
    calls = ring("a", "b", "c")
    seen = group(*calls, made("driver", "b", 50), served("driver", "b", 50, "job.py:30 in compute"))
    assert circle(seen, seen) == []


def test_calls_that_have_moved_are_no_deadlock() -> None:
    """Other calls, or other lines, than at the look before."""
    before = group(*ring("a", "b", "c"))
    calls = ring("a", "b", "c")
    calls[3].stands_at = ["job.py:8 in take"]
    assert circle(before, group(*calls)) == []
    calls = ring("a", "b", "c")
    for each in calls:
        each.call_id += 1000
        each.parent = None if each.parent is None else ("driver", each.parent[1] + 1000)
    assert circle(group(*calls), group(*calls)) and circle(before, group(*calls)) == []


def test_a_chain_that_waits_for_a_handler_at_work_is_no_deadlock() -> None:
    """Nor one whose last worker cannot be seen."""
    calls = [
        made("driver", "a", 1),
        served("driver", "a", 1, "job.py:5 in hold"),
        made("a", "b", 2, ("driver", 1)),
        served("a", "b", 2, "job.py:5 in hold"),
        made("b", "a", 3, ("a", 2)),
    ]
    working = group(*calls, served("b", "a", 3, "job.py:40 in compute"))
    assert circle(working, working) == []
    assert circle(group(*calls), group(*calls)) == []


def test_a_queued_call_waits_for_those_that_have_the_threads() -> None:
    """If these wait for it, nothing goes on."""
    calls = [
        made("driver", "a", 1),
        served("driver", "a", 1, "job.py:5 in hold"),
        made("a", "a", 2, ("driver", 1)),
        served("a", "a", 2, state="queued"),
    ]
    seen = group(*calls)
    assert [each.made.function for each in circle(seen, seen)] == ["f2"]


def test_the_drawing_goes_from_programs_to_the_innermost_handlers() -> None:
    """Each call with its time and places, indented below who waits for it."""
    calls = [made("a", "b", 1, since=5.0), served("a", "b", 1, "x.py:1 in f"), made("b", "c", 2, ("a", 1), 4.0)]
    calls[0].made_at = "main.py:7 in main"
    text = as_text(build(group(*calls)))
    assert text.splitlines() == [
        "the program of worker 'a' waits",
        "    for f1 on worker 'b', since 5.0 s",
        "        made at main.py:7 in main",
        "        it stands at x.py:1 in f",
        "        for f2 on worker 'c', since 4.0 s",
        "            the call or its answer is on its way, or worker 'c' does not read it",
    ]


def test_the_drawing_says_why_a_call_is_not_served() -> None:
    """Its worker is lost, cannot be looked at, or is not there yet; or the call waits at a queue."""
    queued = made("a", "b", 4)
    queued.part_of = ("queue", "samples")
    connecting = made("a", "new", 3)
    connecting.state = "connecting"
    seen = group(made("a", "dead", 1), made("a", "far", 2), connecting, queued, lost=("dead",))
    seen.reports = [each for each in seen.reports if each.name == "a"]
    seen.unseen = [Unseen("far", why="it is far")]
    text = as_text(build(seen))
    for part in ("'dead' is lost", "it is far", "no connection to worker 'new'", "at queue 'samples'"):
        assert part in text


def test_many_calls_that_are_alike_are_one_line() -> None:
    """And of many that are not, the oldest are drawn."""
    alike = [made("a", "b", 1) for _ in range(100)]
    for number, call in enumerate(alike):
        call.call_id = 1000 + number
    text = as_text(build(group(*alike)))
    assert "and for 99 more such calls" in text and len(text.splitlines()) == 3
    text = as_text(build(group(*(made("a", "b", number) for number in range(100)))))
    assert text.splitlines()[-1] == "    and for 80 other calls"


def test_a_handler_that_calls_its_caller_is_drawn_once() -> None:
    """Reports of broken or hostile workers may have circles of parents."""
    calls = [made("a", "b", 1, ("b", 2)), served("a", "b", 1), made("b", "a", 2, ("a", 1)), served("b", "a", 2)]
    assert as_text(build(group(*calls))) == "no program and no handler waits for a call"
    assert len(as_text(build(group(*calls, made("c", "b", 3), served("c", "b", 3)))).splitlines()) == 3


def test_nothing_waits() -> None:
    """That is said."""
    assert as_text(build(group())) == "no program and no handler waits for a call"


def test_a_flowchart_for_mermaid() -> None:
    """Each program and served call is a box, each call an arrow with its time."""
    calls = [made("a", "b", 1, since=5.0), served("a", "b", 1, '/x/y.py:1 in f"<lambda>'), made("b", "c", 2, ("a", 1))]
    lines = as_mermaid(build(group(*calls))).splitlines()
    assert lines[0] == "flowchart TD"
    assert '    n0["program of a"]' in lines
    assert '    n1["b: f1<br>y.py:1 in f<lambda>"]' in lines
    assert "    n0 -->|5.0 s| n1" in lines and "    n1 -->|3.0 s| n2" in lines
