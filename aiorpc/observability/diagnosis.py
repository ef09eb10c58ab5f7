"""What is wrong with a group, in sentences: functions of a few looks at it (`reader.looks`). Imports no torch.

A finding is something that does not end by itself, or that stood still over all looks. A group that is merely busy has
none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from .reader import SeenGroup
from .report import SeenCall, SeenMember, SeenQueue, WorkerReport
from .wait_graph import Wait, circle, circle_as_text, place_of

#: What may be wrong; causes stand before their effects.
Kind = Literal[
    "deadlock",
    "blocked loop",
    "interpreter lock",
    "stopped process",
    "no answer",
    "stalled reader",
    "overload",
    "growing queue",
    "stale weights",
    "lost line",
    "lost worker",
]
#: Seconds for which the loss of a worker is news in a free group, whose workers come and go.
_NEWS = 600.0


@dataclass(frozen=True)
class Limits:
    """Seconds. blocked: for which a loop, or all threads of a worker, may stand. waiting: for which an item may lie in
    a queue, a reader may lack a newer version, and a call may be queued."""

    blocked: float = 1.0
    waiting: float = 10.0


class Finding(msgspec.Struct, omit_defaults=True):
    """One trouble. text: a sentence or more. worker: where it is. function, line: of the handler in which it is, where
    that is known. workers: all that are part of it, for a deadlock and a line. since: seconds, where that is known."""

    kind: Kind
    worker: str
    text: str
    function: str = ""
    line: str = ""
    workers: list[str] = []
    since: float = 0.0


def findings(looks: Sequence[SeenGroup], limits: Limits | None = None) -> list[Finding]:
    """What is wrong, causes before effects. looks: two or more, the newest last, half a second apart or more in all."""
    limits = limits or Limits()
    seen = _Looks(looks)
    found = list(_deadlock(circle(looks[0], looks[-1])))
    held = {worker for each in found for worker in each.workers}
    found += _silent(seen)
    for report in seen.now.reports:
        found += _blocked(report, limits)
        found += _stalled_readers(seen, report)
        if report.name not in held:
            found += _overload(seen, report, limits)
        found += _queues(seen, report, limits)
        found += _stale(report, limits)
    found += _lost(seen)
    order: tuple[Kind, ...] = get_args(Kind)
    return sorted(found, key=lambda each: order.index(each.kind))


class _Looks:
    """All looks, by the lives of the workers."""

    def __init__(self, looks: Sequence[SeenGroup]) -> None:
        self.now = looks[-1]
        self.all = looks
        self._of = [{report.mark: report for report in look.reports} for look in looks]

    def of(self, report: WorkerReport) -> list[WorkerReport]:
        """The reports of that worker, the newest last; empty if there is one look without it."""
        found = [each.get(report.mark) for each in self._of]
        return [each for each in found if each is not None] if None not in found else []


# --- calls ------------------------------------------------------------------------------------------------------------


def _deadlock(around: Sequence[Wait]) -> Iterator[Finding]:
    if around:
        first = around[0]
        at = place_of(first.served) if first.served is not None else ""
        since = min(wait.made.since for wait in around)
        workers = [wait.source.worker for wait in around]
        yield Finding(
            "deadlock", workers[0], "\n".join(circle_as_text(around)), first.made.function, at, workers, since
        )


def _blocked(report: WorkerReport, limits: Limits) -> Iterator[Finding]:
    loop = report.loop
    if loop.silent < limits.blocked:
        return
    lines = loop.stands_at
    at = lines[0] if lines else ""
    running = [call for call in _served(report, "running") if call.stands_at[:1] == [at] and not call.own]
    handler = running[0] if running else None
    who = "the program" if handler is None else f"{handler.function}, called by {handler.caller!r},"
    where = f" at {at}" if at else ""
    below = "".join(f"\n    called at {line}" for line in lines[1:4])
    yield Finding(
        "blocked loop",
        report.name,
        f"the event loop of worker {report.name!r} has been blocked for {loop.silent:.1f} s: {who} stands{where}, and "
        f"nothing else runs on this loop meanwhile{below}",
        "" if handler is None else handler.function,
        at,
        since=loop.silent,
    )


def _overload(seen: _Looks, report: WorkerReport, limits: Limits) -> Iterator[Finding]:
    """Calls wait for threads that are all taken: since long, or by calls of which none ended."""
    reports = seen.of(report)
    waiting = [[call for call in _served(each, "queued") if not call.own] for each in reports]
    threads = report.statistics.get("threads", 0)
    if not (reports and all(waiting) and threads) or any(each.statistics.get("threads_idle") for each in reports):
        return
    oldest = max(waiting[-1], key=lambda call: call.since)
    running = [{(call.caller, call.call_id) for call in _served(each, "running")} for each in reports]
    stands = all(each == running[0] for each in running) and oldest.since >= limits.blocked
    if not stands and oldest.since < limits.waiting:
        return
    longest = max(_served(report, "running"), key=lambda call: call.since, default=None)
    by = "" if longest is None else f"; {longest.function} is the longest, since {longest.since:.1f} s"
    at = "" if longest is None else place_of(longest)
    where = f", at {at}" if at else ""
    yield Finding(
        "overload",
        report.name,
        f"{len(waiting[-1])} calls wait at worker {report.name!r} for a thread, the first one since "
        f"{oldest.since:.1f} s: all {threads:.0f} threads are taken{by}{where}",
        "" if longest is None else longest.function,
        at,
        since=oldest.since,
    )


def _served(report: WorkerReport, state: str) -> list[SeenCall]:
    return [call for call in report.calls if call.side == "served" and call.state == state]


# --- processes and lines ----------------------------------------------------------------------------------------------


def _silent(seen: _Looks) -> Iterator[Finding]:
    """Processes that were stopped, or have not answered, at all looks."""
    before = [{(each.name, each.pid): each.how for each in look.unseen} for look in seen.all]
    for each in seen.now.unseen:
        if not each.how or any(look.get((each.name, each.pid)) != each.how for look in before):
            continue
        places = "\n    called at ".join(each.stands_at[:4])
        stands = f"; it stands at {places}" if places else ""
        if each.how == "stopped":
            text = f"worker {each.name!r} does nothing: {each.why}"
            yield Finding("stopped process", each.name, text)
        elif each.how == "silent":
            at = each.stands_at[0] if each.stands_at else ""
            text = f"worker {each.name!r} does not answer: {each.why}{stands}"
            yield Finding("interpreter lock", each.name, text, line=at)
        elif each.how == "unanswered":
            text = f"worker {each.name!r}, process {each.pid} on {each.hostname}, does not answer: {each.why}"
            yield Finding("no answer", each.name, text)


def _stalled_readers(seen: _Looks, report: WorkerReport) -> Iterator[Finding]:
    """Bytes wait for a worker, and none has gone to it, although the loop that sends them runs."""
    reports = [] if report.loop.silent else seen.of(report)
    for member in report.members:
        looks = [each for then in reports for each in then.members if each.mark == member.mark]
        if len(looks) < len(reports) or not looks or not all(each.unsent for each in looks):
            continue
        if len({each.sent for each in looks}) == 1 and member.state != "suspended":
            apart = report.made - reports[0].made
            yield Finding(
                "stalled reader",
                member.name,
                f"worker {member.name!r} does not read: {_size(member.unsent)} of worker {report.name!r} wait for it, "
                f"and none went for {apart:.1f} s",
                since=apart,
            )


def _lost(seen: _Looks) -> Iterator[Finding]:
    """Connections that are broken, and workers that are lost and have not come back."""
    there = {report.name for report in seen.now.reports} | {each.name for each in seen.now.unseen if each.how}
    broken: list[set[str]] = []
    lost: dict[str, tuple[str, float]] = {}
    for report in seen.now.reports:
        for member in report.members:
            since, cause = _news(report, member)
            ends = {report.name, member.name}
            if member.state == "suspended" and ends not in broken:  # both ends may tell
                broken.append(ends)
                yield Finding(
                    "lost line",
                    member.name,
                    f"the connection between workers {report.name!r} and {member.name!r} is broken since "
                    f"{since:.1f} s, and is being made again: {cause}",
                    workers=sorted(ends),
                    since=since,
                )
            elif member.state == "lost" and member.name not in there and not (report.dynamic and since > _NEWS):
                known = lost.setdefault(member.name, (cause, since))
                if len(cause) > len(known[0]):  # the parent of a process knows most of its end
                    lost[member.name] = cause, since
    for name, (cause, since) in lost.items():
        when = f" {since:.0f} s ago" if since else ""
        text = f"worker {name!r} was lost{when}, and has not come back{': ' if cause else ''}{cause}"
        yield Finding("lost worker", name, text, since=since)


def _news(report: WorkerReport, member: SeenMember) -> tuple[float, str]:
    """Since when that is so, and what was seen; 0.0 and nothing if the report does not tell."""
    what = "WorkerSuspended" if member.state == "suspended" else "WorkerLost"
    for event in reversed(report.events):
        if event.worker == member.name and event.what == what:
            return max(0.0, report.made - event.time), event.text
    return 0.0, ""


# --- queues and weights -----------------------------------------------------------------------------------------------


def _queues(seen: _Looks, report: WorkerReport, limits: Limits) -> Iterator[Finding]:
    """Items lie in a queue, nobody gets, and more come."""
    reports = seen.of(report)
    before = {queue.name: queue for queue in reports[0].queues} if reports else {}
    for queue in report.queues:
        old = before.get(queue.name, SeenQueue())
        if queue.untaken < limits.waiting or queue.getters or not (queue.putters or 0 < old.length < queue.length):
            continue
        full = f"; it is full, and {queue.putters} calls wait to put more" if queue.putters else ", and it grows"
        yield Finding(
            "growing queue",
            report.name,
            f"nobody gets from queue {queue.name!r} of worker {report.name!r}: of its {queue.length} items none was "
            f"taken for {queue.untaken:.1f} s{full}",
            since=queue.untaken,
        )


def _stale(report: WorkerReport, limits: Limits) -> Iterator[Finding]:
    """A reader of a published name does not get the newer versions that there are."""
    for name in report.published:
        for reader in name.readers:
            if reader.behind > 0 and reader.lacking >= limits.waiting:
                has = f"has version {reader.version}" if reader.version else "has none"
                yield Finding(
                    "stale weights",
                    reader.worker,
                    f"worker {reader.worker!r} {has} of {name.name!r}, {reader.behind} behind version {name.version} "
                    f"of worker {report.name!r}, and none has come for {reader.lacking:.1f} s",
                    since=reader.lacking,
                )


# --- text -------------------------------------------------------------------------------------------------------------


def as_text(found: Sequence[Finding], group: SeenGroup) -> str:
    """Each finding in a paragraph behind its kind, and which members were not seen."""
    lines = [f"{each.kind}: {each.text}" for each in found]
    if not found:
        calls = [call for report in group.reports for call in report.calls if call.side == "made" and not call.own]
        oldest = f", the oldest since {max(call.since for call in calls):.1f} s" if calls else ""
        lines.append(f"nothing found (workers: {len(group.reports)}, calls under way: {len(calls)}{oldest})")
    lines += [f"not seen: {each.name}: {each.why}" for each in group.unseen if not each.how]
    return "\n".join(lines)


def as_json(found: Sequence[Finding], group: SeenGroup) -> bytes:
    """The same for programs."""
    made = {"time": time.time(), "members": group.names, "findings": found, "unseen": group.unseen}
    return msgspec.json.format(msgspec.json.encode(made))


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"
