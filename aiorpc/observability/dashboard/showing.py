"""What the page gets of a group at one look, as JSON. Times are seconds, sizes bytes, rates for a second."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from ..comparing import CallRate, Comparison, Flow, WorkerRate
from ..diagnosis import Finding, findings
from ..reader import SeenGroup
from ..report import SeenMember, SeenQueue, Unseen, WorkerReport
from ..wait_graph import build, circle, place_of

_MOST_CALLS, _MOST_WAITS = 60, 60
#: A call that waits for less than so many seconds is no edge of the wait graph: it would flicker.
_LEAST_WAIT = 1.0


class ShownWorker(msgspec.Struct):
    """A row of the table. state: as its report says, "unseen" without a report, or "lost". rates: None without two
    reports. metrics: where Prometheus finds it."""

    name: str
    id: int
    role: str
    state: str
    pid: int
    host: str
    why: str = ""
    uptime: float = 0.0
    made_calls: int = 0
    metrics: str = ""
    rates: WorkerRate | None = None


class ShownQueue(msgspec.Struct):
    """A queue, with its owner."""

    owner: str
    queue: SeenQueue


class ShownReader(msgspec.Struct):
    """A reader of a published name. age: since its version came; None if it gives no report."""

    worker: str
    version: int
    behind: int
    age: float | None


class ShownName(msgspec.Struct):
    """A published name."""

    owner: str
    name: str
    version: int
    age: float
    readers: list[ShownReader]


class ShownWait(msgspec.Struct):
    """A call that one worker waits for. worker: who waits; by: the function whose handler does, empty for the program.
    stands_at: where the handler of the call stands, as far as is known. circle: whether it is one of those that wait
    for each other in a circle."""

    worker: str
    by: str
    to: str
    function: str
    since: float
    state: str
    made_at: str
    stands_at: str
    circle: bool


class Shown(msgspec.Struct):
    """A group at one look. title: where it meets. findings: what is wrong, as `diagnosis` says it."""

    title: str
    dynamic: bool
    workers: list[ShownWorker]
    flows: list[Flow]
    calls: list[CallRate]
    queues: list[ShownQueue]
    names: list[ShownName]
    waits: list[ShownWait]
    findings: list[Finding]


class Point(msgspec.Struct):
    """A group at one time, for the curves. time: since the epoch. queues: lengths by owner and name. ages: in versions,
    by reader and name. lag: of the loop that is latest."""

    time: float
    calls: float
    failed: float
    p50: float | None
    p99: float | None
    sent: float
    lag: float
    queues: dict[str, int]
    ages: dict[str, int]


def show(looks: Sequence[SeenGroup], seen: Comparison) -> Shown:
    """What the page shows of the last of these looks. seen: its comparison with the one before."""
    group = looks[-1]
    reports = sorted(group.reports, key=lambda report: report.id)
    first = next(iter(reports), None)
    return Shown(
        title="" if first is None else first.init_method,
        dynamic=first is not None and first.dynamic,
        workers=_workers(reports, group.unseen, seen, first is None or first.dynamic),
        flows=seen.flows,
        calls=seen.calls[:_MOST_CALLS],
        queues=[ShownQueue(report.name, queue) for report in reports for queue in report.queues],
        names=list(_names(reports)),
        waits=sorted(_waits(looks[0], group), key=lambda wait: -wait.since)[:_MOST_WAITS],
        findings=findings(looks) if len(looks) > 1 else [],
    )


def point(time: float, shown: Shown, seen: Comparison) -> Point:
    """The same for the curves."""
    made = [call for call in seen.calls if call.side == "made"]
    return Point(
        time,
        sum(call.rate for call in made),
        sum(call.failed for call in made),
        seen.p50,
        seen.p99,
        sum(worker.sent for worker in seen.workers),
        max((max(worker.lag, worker.silent) for worker in seen.workers), default=0.0),
        {f"{each.queue.name} of {each.owner}": each.queue.length for each in shown.queues},
        {f"{each.name} at {reader.worker}": reader.behind for each in shown.names for reader in each.readers},
    )


def _workers(reports: list[WorkerReport], unseen: list[Unseen], seen: Comparison, dynamic: bool) -> list[ShownWorker]:
    rates = {each.mark: each for each in seen.workers}
    rows = [
        ShownWorker(
            report.name,
            report.id,
            report.role,
            report.state,
            report.pid,
            report.hostname,
            uptime=report.uptime,
            made_calls=int(report.statistics.get("calls_made", 0)),
            metrics=report.metrics,
            rates=rates.get(report.mark),
        )
        for report in reports
    ]
    members: dict[str, SeenMember] = {each.name: each for report in reports for each in report.members}
    for each in unseen:
        known = members.get(each.name) or SeenMember(id=-1)
        rows.append(ShownWorker(each.name, known.id, known.role, "unseen", each.pid, each.hostname, each.why))
    names = {row.name for row in rows}
    rows += [
        ShownWorker(each.name, each.id, each.role, "lost", each.pid, each.hostname)
        for each in members.values()
        if each.state == "lost" and each.name not in names
    ]
    return sorted(rows, key=lambda row: (dynamic or row.id, _natural(row.name)))  # ids of returned workers are new


def _natural(name: str) -> list[tuple[int, str]]:
    """For a sort by name in which 10 comes after 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"([0-9]+)", name)]


def _names(reports: list[WorkerReport]) -> Iterator[ShownName]:
    ages = {(report.name, each.name): each.age for report in reports for each in report.subscriptions}
    for report in reports:
        for each in report.published:
            readers = [
                ShownReader(reader.worker, reader.version, reader.behind, ages.get((reader.worker, each.name)))
                for reader in sorted(each.readers, key=lambda reader: reader.worker)
            ]
            yield ShownName(report.name, each.name, each.version, each.age, readers)


# --- who waits for whom -----------------------------------------------------------------------------------------------


def _waits(before: SeenGroup, group: SeenGroup) -> Iterator[ShownWait]:
    """The calls that have been under way for a while, each with who waits for it."""
    graph = build(group)
    around = {wait.target for wait in circle(before, group)}
    for source, waits in graph.waits.items():
        by = graph.served.get(source)
        for wait in waits:
            if wait.made.since < _LEAST_WAIT:
                continue
            there = wait.served
            yield ShownWait(
                source.worker,
                "" if by is None else by.function,
                wait.target.worker,
                wait.made.function,
                wait.made.since,
                wait.why if there is None else there.state,
                wait.made.made_at,
                "" if there is None else place_of(there),
                wait.target in around,
            )
