"""What is wrong, as it is read from a few looks at a group: what stands still, and nothing that is merely busy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest

from aiorpc.observability.diagnosis import Finding, Limits, as_json, as_text, findings
from aiorpc.observability.reader import SeenGroup
from aiorpc.observability.report import (
    SeenEvent,
    SeenLoop,
    SeenMember,
    SeenName,
    SeenQueue,
    SeenReader,
    Unseen,
    WorkerReport,
)

from .made import group, ring, served

Change = Callable[[WorkerReport], object]


def looks(of: SeenGroup, *later: Change) -> list[SeenGroup]:
    """Three looks at a group; `later` changes its first report in the second one, and in the third."""
    found = [of]
    for number in range(2):
        found.append(copy.deepcopy(found[-1]))
        for report in found[-1].reports:
            report.made += 0.5
        if number < len(later):
            later[number](found[-1].reports[0])
    return found


def one(report: WorkerReport) -> SeenGroup:
    report.name = report.mark = report.name or "w"
    return SeenGroup([report])


def kinds(found: list[Finding]) -> list[str]:
    return [each.kind for each in found]


def test_a_deadlock_has_its_workers_and_its_line() -> None:
    """And no overload beside it, which is one of its effects."""
    (found,) = findings(looks(group(*ring("a", "b"))))
    assert (found.kind, found.workers, found.line, found.since) == ("deadlock", ["a", "b"], "job.py:9 in take", 3.0)


def test_a_blocked_loop_has_the_handler_whose_line_it_is() -> None:
    """Or says that it is the program's own step; a loop that is late by less is none."""
    loop = SeenLoop(silent=2.0, stands_at=["job.py:4 in f", "job.py:9 in g"])
    report = WorkerReport("w", loop=loop, calls=[served("a", "w", 1, "job.py:4 in f")])
    (found,) = findings(looks(one(report)))
    assert (found.kind, found.function, found.line) == ("blocked loop", "f1", "job.py:4 in f")
    assert "called by 'a'" in found.text and "called at job.py:9 in g" in found.text
    report.calls = []
    (found,) = findings(looks(one(report)))
    assert found.function == "" and "the program stands at job.py:4 in f" in found.text
    report.loop.silent = 0.9
    assert findings(looks(one(report))) == []


@pytest.mark.parametrize(
    ("second", "third", "found"),
    [
        ((5000, 10), (5000, 10), ["stalled reader"]),
        ((6000, 10), (9000, 10), ["stalled reader"]),  # more comes, and none goes
        ((5000, 10), (5000, 11), []),
        ((0, 10), (5000, 10), []),
        ((5000, 10), (0, 10), []),
    ],
)
def test_a_reader_stalls_if_bytes_wait_and_none_goes(
    second: tuple[int, int], third: tuple[int, int], found: list[str]
) -> None:
    """At all looks."""

    def set_to(unsent: int, sent: int) -> Change:
        def change(report: WorkerReport) -> None:
            report.members[0].unsent, report.members[0].sent = unsent, sent

        return change

    member = SeenMember("r", mark="r", state="ready", unsent=5000, sent=10)
    seen = looks(one(WorkerReport("w", members=[member])), set_to(*second), set_to(*third))
    assert kinds(findings(seen)) == found


@pytest.mark.parametrize(
    ("since", "idle", "moved", "found"),
    [
        (2.0, 0, False, ["overload"]),
        (0.5, 0, False, []),  # for so short a time any call may wait
        (2.0, 1, False, []),
        (2.0, 0, True, []),  # calls end: it is merely busy
        (20.0, 0, True, ["overload"]),
    ],
)
def test_an_overload_is_calls_that_wait_for_threads_which_are_not_let_go(
    since: float, idle: int, moved: bool, found: list[str]
) -> None:
    """Or calls that have waited for long."""
    queued = served("a", "w", 2, state="queued")
    queued.since = since
    report = WorkerReport("w", statistics={"threads": 4, "threads_idle": idle})
    report.calls = [served("a", "w", 1, "job.py:4 in f"), queued]

    def move(report: WorkerReport) -> None:
        report.calls[0].call_id += 1

    assert kinds(findings(looks(one(report), *([move, move] if moved else [])))) == found


@pytest.mark.parametrize(
    ("queue", "grown", "found"),
    [
        (SeenQueue("q", 5, 8, untaken=20.0), 1, ["growing queue"]),
        (SeenQueue("q", 8, 8, putters=2, untaken=20.0), 0, ["growing queue"]),
        (SeenQueue("q", 5, 8, untaken=20.0), 0, []),  # it was filled and is read later
        (SeenQueue("q", 5, 8, untaken=9.0), 1, []),
        (SeenQueue("q", 5, 8, getters=1, untaken=20.0), 1, []),
    ],
)
def test_a_queue_grows_that_nobody_gets_from(queue: SeenQueue, grown: int, found: list[str]) -> None:
    """It gets more items, or calls wait to put some."""

    def grow(report: WorkerReport) -> None:
        report.queues[0].length += grown

    assert kinds(findings(looks(one(WorkerReport("w", queues=[queue])), grow))) == found


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (SeenReader("r", 1, behind=3, lacking=20.0), ["stale weights"]),
        (SeenReader("r", 0, behind=4, lacking=20.0), ["stale weights"]),
        (SeenReader("r", 1, behind=3, lacking=2.0), []),
        (SeenReader("r", 4), []),
    ],
)
def test_weights_are_stale_if_newer_ones_do_not_come(reader: SeenReader, found: list[str]) -> None:
    """However many versions that are, for a while."""
    seen = findings(looks(one(WorkerReport("w", published=[SeenName("weights", 4, readers=[reader])]))))
    assert kinds(seen) == found and all(each.worker == "r" for each in seen)


def test_a_worker_whose_own_loop_stands_tells_of_no_stalled_reader() -> None:
    """Its loop does not send what waits."""
    member = SeenMember("r", mark="r", state="ready", unsent=5000, sent=10)
    report = WorkerReport("w", members=[member], loop=SeenLoop(silent=3.0))
    assert kinds(findings(looks(one(report)))) == ["blocked loop"]


def test_a_broken_line_and_a_lost_worker_have_what_was_seen() -> None:
    """A lost worker once, in the words of who knows most; not if it is back."""
    first = WorkerReport("a", made=100.0, members=[SeenMember("c", state="lost"), SeenMember("d", state="suspended")])
    first.events = [SeenEvent(90.0, "WorkerLost", "c", "ended"), SeenEvent(98.0, "WorkerSuspended", "d", "timeout")]
    second = WorkerReport("b", made=100.0, members=[SeenMember("c", state="lost")])
    second.events = [SeenEvent(91.0, "WorkerLost", "c", "ended by signal 9")]
    seen = SeenGroup([first, second])
    line, lost = findings([seen, seen])
    assert (line.kind, line.worker, line.since) == ("lost line", "d", 2.0) and "timeout" in line.text
    assert (lost.kind, lost.worker, lost.since) == ("lost worker", "c", 9.0) and "signal 9" in lost.text
    seen.reports.append(WorkerReport("c"))
    assert kinds(findings([seen, seen])) == ["lost line"]


def test_in_a_free_group_a_loss_is_news_for_ten_minutes() -> None:
    """Its workers come and go, and others take their work."""
    report = WorkerReport("a", made=1000.0, dynamic=True, members=[SeenMember("c", state="lost")])
    report.events = [SeenEvent(900.0, "WorkerLost", "c")]
    assert kinds(findings(looks(one(report)))) == ["lost worker"]
    report.events[0].time = 100.0
    assert findings(looks(one(report))) == []


HOW = {"stopped": "stopped process", "silent": "interpreter lock", "unanswered": "no answer"}


@pytest.mark.parametrize("how", HOW)
def test_a_process_that_has_not_answered_once_is_merely_slow(how: str) -> None:
    """It counts if it was so at all looks."""
    unseen = Unseen("w", 7, why="why", how=how, stands_at=["x.c:1 in f"])
    (found,) = findings([SeenGroup(unseen=[unseen])] * 3)
    assert found.kind == HOW[how]
    assert findings([SeenGroup([WorkerReport("w")]), SeenGroup(unseen=[unseen])]) == []
    assert findings([SeenGroup(unseen=[Unseen("w", why="NotAllowed")])] * 2) == []


def test_the_limits_can_be_others() -> None:
    """Seconds for loops and threads, and for items, versions and queued calls."""
    report = WorkerReport("w", loop=SeenLoop(silent=0.5), queues=[SeenQueue("q", 8, 8, putters=1, untaken=1.0)])
    assert kinds(findings(looks(one(report)), Limits(blocked=0.4, waiting=0.5))) == ["blocked loop", "growing queue"]


def test_text_and_json_have_the_same_findings() -> None:
    """And the members that were not seen."""
    seen = looks(group(*ring("a", "b")))
    seen[-1].unseen.append(Unseen("far", why="NotAllowed: no"))
    found = findings(seen)
    assert as_text(found, seen[-1]).startswith("deadlock: 2 workers wait in a circle: a -> b -> a\n")
    assert as_text(found, seen[-1]).endswith("\nnot seen: far: NotAllowed: no")
    decoded = msgspec.json.decode(as_json(found, seen[-1]))
    assert [each["kind"] for each in decoded["findings"]] == ["deadlock"]
    assert decoded["members"] == ["a", "b", "driver", "far"] and decoded["unseen"][0]["name"] == "far"
    assert as_text([], seen[0]) == "nothing found (workers: 3, calls under way: 4, the oldest since 3.0 s)"
