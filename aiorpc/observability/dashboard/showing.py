"""What the page gets of a group at one look, as JSON. Times are seconds, sizes bytes, rates for a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..comparing import CallRate, Comparison, Flow, WorkerRate
from ..reader import SeenGroup
from ..report import SeenCall, SeenMember, SeenQueue, Unseen, WorkerReport

_MOST_CALLS, _MOST_WAITS = 60, 60
#: A call that waits for less than so many seconds is no edge of the wait graph: it would flicker.
_WAITS = 1.0


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
    stands_at: where the handler of the call stands, as far as is known."""

    worker: str
    by: str
    to: str
    function: str
    since: float
    state: str
    made_at: str
    stands_at: str


class Shown(msgspec.Struct):
    """A group at one look. title: where it meets."""

    title: str
    dynamic: bool
    workers: list[ShownWorker]
    flows: list[Flow]
    calls: list[CallRate]
    queues: list[ShownQueue]
    names: list[ShownName]
    waits: list[ShownWait]


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


def show(group: SeenGroup, seen: Comparison) -> Shown:
    """What the page shows of a look."""
    reports = sorted(group.reports, key=lambda report: report.id)
    first = next(iter(reports), None)
    return Shown(
        title="" if first is None else first.init_method,
        dynamic=first is not None and first.dynamic,
        workers=_workers(reports, group.unseen, seen),
        flows=seen.flows,
        calls=seen.calls[:_MOST_CALLS],
        queues=[ShownQueue(report.name, queue) for report in reports for queue in report.queues],
        names=list(_names(reports)),
        waits=sorted(waits(group), key=lambda wait: -wait.since)[:_MOST_WAITS],
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


def _workers(reports: list[WorkerReport], unseen: list[Unseen], seen: Comparison) -> list[ShownWorker]:
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
    return sorted(rows, key=lambda row: (row.id < 0, row.id, row.name))


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


def waits(group: SeenGroup) -> Iterator[ShownWait]:
    """The calls that have been under way for a while, each with who waits for it."""
    served = {
        (report.name, call.caller, call.call_id): call
        for report in group.reports
        for call in report.calls
        if call.side == "served"
    }
    for report in group.reports:
        for call in report.calls:
            at_queue = call.part_of is not None and call.part_of[0] == "queue"
            if call.side == "made" and call.since >= _WAITS and (at_queue or not call.own):
                yield _wait(report.name, call, served)


def _wait(worker: str, call: SeenCall, served: Mapping[tuple[str, str, int], SeenCall]) -> ShownWait:
    by = served.get((worker, *call.parent)) if call.parent else None
    there = served.get((call.worker, call.caller, call.call_id))
    function, state = call.function, call.state if there is None else there.state
    if call.own and call.part_of is not None:
        function, state = f"queue {call.part_of[1]}", "waits"
    return ShownWait(
        worker,
        "" if by is None else by.function,
        call.worker,
        function,
        call.since,
        state,
        call.made_at,
        there.stands_at[0] if there is not None and there.stands_at else "",
    )
