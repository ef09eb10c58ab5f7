"""Two looks at a group, and what happened in between: counts that are on only while a program looks."""

from __future__ import annotations

import logging

import pytest
import torch

from aiorpc.observability.comparing import compare, quantile
from aiorpc.runtime.engine import tally
from aiorpc.testing import cluster
from aiorpc.worker import Worker

from .looks import look

SIZE = 250_000  # floats: a megabyte


def counts(worker: Worker) -> bool:
    """Whether it counts calls by function."""
    return worker._node.engine.tally is not None


async def test_calls_are_counted_by_function_and_worker() -> None:
    """Between two looks: how many of each, those that failed, how long they took, and what went which way."""
    async with cluster(3) as (a, b, _):
        before = {report.mark: report for report in (await look(tally=True)).reports}
        for _ in range(20):
            await a.call("worker1", abs, -1)
        with pytest.raises(ZeroDivisionError):
            await b.call("worker0", divmod, 1, 0)
        await a.call("worker2", torch.numel, torch.zeros(SIZE))
        found = compare(before, await look(tally=True))
    calls = {(call.worker, call.side, call.function, call.peer): call for call in found.calls}
    assert sorted(calls) == [
        ("worker0", "made", "builtins:abs", "worker1"),
        ("worker0", "made", "torch:numel", "worker2"),
        ("worker0", "served", "builtins:divmod", "worker1"),
        ("worker1", "made", "builtins:divmod", "worker0"),
        ("worker1", "served", "builtins:abs", "worker0"),
        ("worker2", "served", "torch:numel", "worker0"),
    ]
    latency = calls["worker0", "made", "builtins:abs", "worker1"]
    assert latency.rate / 20 == pytest.approx(calls["worker0", "made", "torch:numel", "worker2"].rate)
    assert [call.failed > 0 for call in found.calls] == ["divmod" in call.function for call in found.calls]
    assert latency.p50 is not None and latency.p99 is not None and 0 < latency.p50 <= latency.p99 < 60
    flows = {(flow.sender, flow.receiver): flow.rate * found.seconds for flow in found.flows}
    assert flows["worker0", "worker2"] > 4 * SIZE > 10_000 > flows["worker2", "worker0"] > 0
    assert flows["worker1", "worker2"] == 0


async def test_counting_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call after the time since the last look takes the counters away; a look begins anew."""
    async with cluster(2) as (a, b):
        assert not counts(a)
        await look(tally=True)
        await a.call("worker1", abs, -1)
        assert [row.ended for row in (await look(tally=True)).reports[0].tally] == [1]
        monkeypatch.setattr(tally, "WATCHED", -1.0)
        await look(tally=True)
        assert counts(a)
        await a.call("worker1", abs, -1)
        assert not counts(a) and not counts(b)
        monkeypatch.undo()
        assert (await look(tally=True)).reports[0].tally == []


async def test_a_group_that_is_not_counted_has_no_counters() -> None:
    """An ordinary look leaves calls as they are."""
    async with cluster(2) as (a, _):
        await look()
        await a.call("worker1", abs, -1)
        assert not counts(a)


async def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions beyond the first are counted together."""
    monkeypatch.setattr(tally, "MOST_PAIRS", 2)
    async with cluster(2) as (a, _):
        await look(tally=True)
        for function in (abs, float, int, bool, hash):
            await a.call("worker1", function, 1)
        (report,) = [each for each in (await look(tally=True)).reports if each.name == "worker0"]
    rows = {(row.function, row.peer): row.ended for row in report.tally}
    assert rows == {("builtins:abs", "worker1"): 1, ("builtins:float", "worker1"): 1, (tally.OTHER, tally.OTHER): 3}


async def test_the_log_is_kept() -> None:
    """The last lines, as text, without objects of the program; and not after the last worker has left."""
    log = logging.getLogger("aiorpc")
    before = list(log.filters)
    async with cluster(2):
        for number in range(150):
            log.warning("line %d", number)
        log.warning("long %s", "x" * 10_000)
        report = (await look(log=True)).reports[0]
        assert (await look()).reports[0].log == []
        assert len(log.filters) == len(before) + 1
    assert len(report.log) == 100
    assert report.log[0].endswith(" WARNING line 51") and report.log[-2].endswith(" WARNING line 149")
    assert report.log[-1].endswith("x...") and len(report.log[-1]) < 600
    assert log.filters == before


def test_quantiles() -> None:
    """Within a bucket durations lie evenly; those longer than all bounds count as the last bound."""
    bounds, counts = [1.0, 2.0, 4.0], [0, 10, 10, 0]
    assert quantile(bounds, counts, 0.5) == 2.0
    assert quantile(bounds, counts, 0.75) == 3.0
    assert quantile(bounds, [0, 0, 0, 3], 0.5) == 4.0
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile([], [], 0.5) is None
