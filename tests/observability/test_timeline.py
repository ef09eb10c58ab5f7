"""The time axis: clocks of other hosts, and slices that find their tracks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from aiorpc.observability.notes import Note, RangeNote, StepNote, Summary
from aiorpc.observability.timeline import Clock, WorkerRecording, as_json
from aiorpc.protocol.identity import WorkerRecord
from tests.observability.trace_format import arrow, problems, slices, span

RECORD = WorkerRecord("worker0", 0, "a", "1@host", "host", 7, "", "", "", 0)
LOOP = 1  # the thread of each loop
EXACT = Clock((0.0, 0.0), (0.0, 0.0), 1e-6, True, 0.0)


def step(name: str, side: str, call: int, time: float, **more: Any) -> StepNote:
    began = more.pop("started", time)
    outcome = "value" if name == "ended" else ""
    note = StepNote(
        name, side, "worker0", "worker1", call, "m:f", "call", False, None, None, began, time, 1, 1, outcome, 5
    )
    for key, value in more.items():
        setattr(note, key, value)
    return note


def recorded(name: str, number: int, notes: list[Note], clock: Clock | None = EXACT) -> WorkerRecording:
    ahead = 0.0 if clock is None else clock.first[1]
    summary = Summary(ahead, ahead + 100.0, len(notes), 0, {}, LOOP, "", 0.0)
    return WorkerRecording(replace(RECORD, name=name, id=number), clock, notes, summary, "")


def trace(by: str, workers: list[WorkerRecording]) -> dict[str, Any]:
    """The file, read again."""
    read: dict[str, Any] = json.loads(as_json(by, workers))
    return read


def made(call: int, start: float, end: float) -> list[Note]:
    return [
        step("started", "made", call, start),
        step("running", "made", call, start),
        step("ended", "made", call, end, started=start),
    ]


def served(call: int, start: float, run: float, end: float, **more: Any) -> list[Note]:
    return [
        step("started", "served", call, start, **more),
        step("running", "served", call, run, started=start, **more),
        step("ended", "served", call, end, started=start, **more),
    ]


def test_clocks_of_two_hosts_are_aligned() -> None:
    """By one offset at the beginning and another one at the end, as they run apart."""
    clock = Clock.of([(10.0, 1000.0, 1e-4), (110.0, 1000.1, 2e-4)], same=False)
    assert clock is not None and not clock.shared and clock.error == 2e-4
    assert clock.ours(1010.0) == pytest.approx(10.0) and clock.ours(1110.1) == pytest.approx(110.0)
    assert clock.ours(1060.05) == pytest.approx(60.0)


def test_the_clock_of_a_host_is_one() -> None:
    """If the round trips agree; a container may have one of its own."""
    shared = Clock.of([(10.0, 1e-5, 1e-4), (11.0, -1e-5, 1e-4)], same=True)
    assert shared is not None and shared.shared and shared.ours(5.0) == 5.0 and shared.error == 1e-4
    apart = Clock.of([(10.0, 3.0, 1e-4)], same=True)
    assert apart is not None and not apart.shared and apart.ours(13.0) == 10.0
    assert Clock.of([], same=True) is None


def test_a_worker_of_another_host_is_on_the_same_axis() -> None:
    """Its handler lies within the call, although its clock shows other times."""
    clock = Clock.of([(0.0, 5000.0, 1e-3)], same=False)
    there = served(1, 5001.1, 5001.2, 5001.8, thread=9)
    found = trace("worker0", [recorded("worker0", 0, made(1, 1.0, 2.0)), recorded("worker1", 1, there, clock)])
    assert problems(found) == []
    (call,), (handler,) = slices(found, "call"), slices(found, "handler")
    assert span(call)[0] < span(handler)[0] and span(handler)[1] < span(call)[1]
    assert handler["ts"] == pytest.approx(1.2e6) and handler["dur"] == pytest.approx(0.6e6)
    assert [each["name"] for each in arrow(found, call)] == ["request", "queued", "m:f", "answer"]
    assert found["otherData"]["workers"]["worker1"]["clock"] == "round trips"


def test_an_error_of_a_clock_moves_no_slice_out_of_its_call() -> None:
    """An answer that seems to have come before it was sent."""
    ahead = served(1, 0.9, 0.95, 2.1, thread=9)
    found = trace("worker0", [recorded("worker0", 0, made(1, 1.0, 2.0)), recorded("worker1", 1, ahead)])
    assert problems(found) == []
    (call,), (answer,) = slices(found, "call"), slices(found, "answer")
    assert span(call)[0] <= span(answer)[0] and span(answer)[1] <= span(call)[1]


def test_calls_without_a_beginning_or_an_end_are_shown_as_far_as_they_were_seen() -> None:
    """One that began before, one that goes on, one that never ran, and one of which the other side is not known."""
    notes: list[Note] = [
        step("ended", "made", 1, 3.0, started=-5.0),
        step("started", "made", 2, 4.0),
        *made(3, 5.0, 6.0),
        *made(4, 7.0, 8.0),
    ]
    there: list[Note] = [
        step("started", "served", 3, 5.1),
        step("ended", "served", 3, 5.9, started=5.1),
        *served(2, 4.1, 4.2, 4.3)[:2],
    ]
    found = trace("worker0", [recorded("worker0", 0, notes), recorded("worker1", 1, there)])
    assert problems(found) == []
    before, going, _, _ = slices(found, "call")
    assert before["ts"] == 0.0 and before["dur"] == 3e6
    assert going["args"]["unfinished"] and span(going)[1] == 100 * 10**9
    assert [each["name"] for each in arrow(found, going)] == ["request", "queued", "m:f"]


def test_ranges_that_end_a_little_after_their_handler_are_cut() -> None:
    """By as much as two clocks may differ; what overlaps by more stands on a track of its own."""
    there = served(1, 1.0, 1.0, 2.0)
    there += [RangeNote("blurred", "user_annotation", 1.5, 0.50005, 5, ""), RangeNote("far", "cpu_op", 1.9, 1.0, 5, "")]
    there += [RangeNote("kernel", "kernel", 1.9, 1.0, 0, "device 0 stream 7")]
    found = trace("worker1", [recorded("worker1", 1, there)])
    assert problems(found) == []
    (handler,), (blurred,), (far,) = slices(found, "handler"), slices(found, "user_annotation"), slices(found, "cpu_op")
    assert handler["tid"] == blurred["tid"] != far["tid"] and span(blurred)[1] == span(handler)[1]


def test_workers_without_a_clock_are_told_alone() -> None:
    """Their notes have no place; an empty recording is a trace, too."""
    lost = WorkerRecording(RECORD, None, [], None, "PeerLost: it was lost")
    found = trace("worker1", [lost, recorded("worker1", 1, served(1, 1.0, 1.1, 1.2), None)])
    assert problems(found) == [] and not slices(found, "handler")
    assert found["otherData"]["workers"]["worker0"]["trouble"] == "PeerLost: it was lost"
    assert problems(trace("worker0", [])) == []


@pytest.mark.random
def test_whatever_was_noted_the_trace_is_in_order() -> None:
    """Steps in any order, of calls of any length, on the loop, in threads and between them, with wrong clocks."""
    chance = random.Random(3)
    for _ in range(50):
        both: list[list[Note]] = [[], []]
        for call in range(40):
            times = sorted(chance.uniform(-1, 101) for _ in range(5))
            blur = chance.uniform(-0.1, 0.1)
            thread = chance.choice((LOOP, 5, 6))
            steps = [made(call, times[0], times[4]), served(call, *(each + blur for each in times[1:4]), thread=thread)]
            for side, notes in enumerate(steps):
                kept = [each for each in notes if chance.random() < 0.9]
                both[side] += kept if chance.random() < 0.9 else kept[::-1]
            both[1].append(RangeNote("r", "cpu_op", times[1], chance.random(), thread, ""))
        workers = [recorded(f"worker{number}", number, notes) for number, notes in enumerate(both)]
        assert problems(trace("worker0", workers)) == []
