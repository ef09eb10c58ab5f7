"""What has happened between two looks at a group: rates, latencies and traffic. Imports no torch.

A count that has become smaller has begun anew in between, with a connection or after a pause: it then counts whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from .reader import SeenGroup
from .report import SeenFunction, SeenMember, Side, WorkerReport


class CallRate(msgspec.Struct):
    """Calls of a function between two looks. side, peer: as of `report.SeenFunction`. rate, failed: how many ended in
    a second, and without a value. p50, p99: seconds; None if none ended."""

    worker: str
    side: Side
    function: str
    peer: str
    rate: float
    failed: float
    p50: float | None
    p99: float | None


class WorkerRate(msgspec.Struct):
    """A worker between two looks. Numbers are for a second, unless the name says otherwise.

    made, served, failed: calls of users that ended. pending, running, queued: calls at the second look. sent, received:
    bytes, on all ways. lag: seconds that its loop is late; silent: since when it stands still.
    """

    name: str
    mark: str
    made: float = 0.0
    served: float = 0.0
    failed: float = 0.0
    pending: int = 0
    running: int = 0
    queued: int = 0
    sent: float = 0.0
    received: float = 0.0
    lag: float = 0.0
    silent: float = 0.0
    memory: int = 0


class Flow(msgspec.Struct):
    """What one worker sends to another. rate: bytes in a second. unsent: bytes that wait for the reader."""

    sender: str
    receiver: str
    rate: float
    unsent: int


class Comparison(msgspec.Struct):
    """Two looks at a group. seconds: between them; 0.0 for the first look. p50, p99: of all calls made."""

    seconds: float
    workers: list[WorkerRate]
    calls: list[CallRate]
    flows: list[Flow]
    p50: float | None
    p99: float | None


def compare(before: Mapping[str, WorkerReport], now: SeenGroup) -> Comparison:
    """Compare a look with the reports of the one before, by their marks. A worker that is new has no rates yet."""
    calls: list[CallRate] = []
    workers: list[WorkerRate] = []
    flows: dict[tuple[str, str], Flow] = {}
    total: list[int] = []
    longest = 0.0
    for report in now.reports:
        old = before.get(report.mark)
        seconds = 0.0 if old is None else report.made - old.made
        longest = max(longest, seconds)
        workers.append(_worker(old, report, seconds))
        _flows(flows, old, report, seconds)
        if old is not None and seconds > 0:
            calls += _calls(old, report, seconds, total)
    bounds = next((report.bounds for report in now.reports if report.bounds), [])
    calls.sort(key=lambda call: -call.rate)
    return Comparison(
        longest, workers, calls, list(flows.values()), quantile(bounds, total, 0.5), quantile(bounds, total, 0.99)
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Of durations that are counted in buckets; None for none. Within a bucket they are taken to lie evenly."""
    wanted = sum(counts) * share
    if not wanted:
        return None
    below = 0.0
    for bound, lower, count in zip(bounds, (0.0, *bounds), counts, strict=False):
        if count and wanted <= count:
            return lower + (bound - lower) * wanted / count
        wanted -= count
        below = bound
    return below  # longer than all bounds


# --- parts --------------------------------------------------------------------------------------------------------


def _worker(old: WorkerReport | None, new: WorkerReport, seconds: float) -> WorkerRate:
    def rate(name: str) -> float:
        if old is None or seconds <= 0:
            return 0.0
        return _grown(old.statistics.get(name, 0), new.statistics.get(name, 0)) / seconds

    apart = [name for name in new.traffic if not name.startswith(("inline.", "bulk."))]
    sent = [name for name in apart if name.endswith(".bytes_sent")]
    received = [name for name in apart if name.endswith(".bytes_received")]
    ours = [call for call in new.calls if not call.own]
    return WorkerRate(
        name=new.name,
        mark=new.mark,
        made=rate("calls_answered"),
        served=rate("calls_served"),
        failed=rate("calls_failed"),
        pending=sum(call.side == "made" for call in ours),
        running=sum(call.side == "served" and call.state == "running" for call in ours),
        queued=sum(call.side == "served" and call.state != "running" for call in ours),
        sent=rate("bytes_sent") + _traffic(old, new, sent, seconds),
        received=rate("bytes_received") + _traffic(old, new, received, seconds),
        lag=new.loop.lag_mean,
        silent=new.loop.silent,
        memory=new.memory,
    )


def _traffic(old: WorkerReport | None, new: WorkerReport, names: Iterable[str], seconds: float) -> float:
    if old is None or seconds <= 0:
        return 0.0
    return sum(_grown(old.traffic.get(name, 0), new.traffic[name]) for name in names) / seconds


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def _flows(flows: dict[tuple[str, str], Flow], old: WorkerReport | None, new: WorkerReport, seconds: float) -> None:
    """Add what this worker sends and receives. Both ends tell of it; what the sender says counts."""
    before = {member.name: member for member in old.members} if old is not None else {}
    for member in new.members:
        was = before.get(member.name)
        if member.name == new.name or (was is not None and was.mark != member.mark):
            continue
        out, back = _moved(member), _moved(was) if was is not None else (0, 0)
        rates = [_grown(was_one, one) / seconds if seconds > 0 else 0.0 for one, was_one in zip(out, back, strict=True)]
        flows[new.name, member.name] = Flow(new.name, member.name, rates[0], member.unsent)
        flows.setdefault((member.name, new.name), Flow(member.name, new.name, rates[1], 0))


def _moved(member: SeenMember) -> tuple[int, int]:
    return member.sent + member.apart_sent, member.received + member.apart_received


def _calls(old: WorkerReport, new: WorkerReport, seconds: float, total: list[int]) -> Iterable[CallRate]:
    """The rates of calls. total: buckets of all calls made, to which those of this worker are added."""
    before = {_key(each): each for each in old.tally}
    for each in new.tally:
        was = before.get(_key(each))
        if was is None or was.ended > each.ended:
            was = SeenFunction()
        ended = each.ended - was.ended
        if not ended:
            continue
        counts = [one - (was.buckets[place] if was.buckets else 0) for place, one in enumerate(each.buckets)]
        if each.side == "made":
            total[:] = [sum(pair) for pair in zip(total or [0] * len(counts), counts, strict=False)]
        yield CallRate(
            new.name,
            each.side,
            each.function,
            each.peer,
            ended / seconds,
            (each.failed - was.failed) / seconds,
            quantile(new.bounds, counts, 0.5),
            quantile(new.bounds, counts, 0.99),
        )


def _key(row: SeenFunction) -> tuple[Side, str, str]:
    return row.side, row.function, row.peer
