"""The check of traces finds what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.observability.trace_format import Event, problems

NAMES: list[Event] = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "worker0"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "calls"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "handlers"}},
]


def made(ts: float, dur: float, tid: int = 1) -> Event:
    return {"ph": "X", "name": "f", "cat": "call", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def flow(phase: str, ts: float, tid: int = 1) -> Event:
    return {"ph": phase, "name": "call", "cat": "arrow", "id": 1, "pid": 1, "tid": tid, "ts": ts, "bp": "e"}


def trace(*events: Event) -> dict[str, Any]:
    return {"traceEvents": [*NAMES, *events]}


def test_a_trace_in_order_has_no_problems() -> None:
    """Slices that nest and follow, and an arrow between two tracks."""
    assert problems(trace(made(0, 10), flow("s", 0), made(2, 3), made(10, 1), made(1, 2, 2), flow("f", 1, 2))) == []


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([made(0, 10), made(5, 10)], "overlaps"),
        ([made(0, 0)], "no length"),
        ([made(5, 1), made(0, 1)], "not in order"),
        ([made(-1, 1)], "not in order"),
        ([made(0, 1, 3)], "has no name"),
        ([made(0, 1), flow("s", 1), made(2, 1), flow("f", 2)], "at no slice"),
        ([made(0, 1), flow("s", 0)], "has 's'"),
        ([made(0, 1), flow("t", 0), flow("f", 0)], "has 'tf'"),
        ([{**made(0, 1), "ph": "b"}], "no phase"),
        ([{**made(0, 1), "pid": None}], "no place"),
    ],
)
def test_each_problem_is_found(events: list[Event], problem: str) -> None:
    """With the words that name it."""
    assert problem in " ".join(problems(trace(*events)))
