"""The table of figures out of several runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import hardware, merge, report
from bench.stats import BenchError, Outcome, Row


@pytest.fixture
def runs() -> list[Outcome]:
    """Three of two rounds each, in which torch takes four, five and six times as long."""
    found = hardware.facts(["--quick"], 2, 0.25) | {"date": "some day"}
    rows = [
        (
            Row("noop_blocking", "p50", "µs", "lower", (100.0, 200.0), (100.0 * times, 200.0 * (times + 1))),
            Row("noop_blocking", "p99", "µs", "lower", (500.0,), (500.0,)),
            Row("idle", "processor time per idle worker", "s/s", "lower", (times / 1000,)),
        )
        for times in (4.0, 6.0, 5.0)
    ]
    return [Outcome(found, each, (), 12.0) for each in rows]


def test_figures_are_medians_of_medians_and_the_spread_is_of_all_rounds(runs: list[Outcome]) -> None:
    """A row that no run has is left out; one that torch has not has no ratio."""
    lines = merge.markdown(runs).splitlines()
    assert lines[:4] == [
        "| | aiorpc | torch.distributed.rpc | ratio | least to most |",
        "| --- | --- | --- | --- | --- |",
        "| blocking call of a Python no-op (`def`), p50 in µs | 150 | 850 | **5.5x** | 4 to 7 |",
        "| processor time of an idle worker, s/s | 0.005 | - | | |",
    ]
    assert lines[4:] == ["", hardware.line(runs[0].facts), "some day", "some day", "some day"]


def test_runs_of_different_machines_are_not_merged(runs: list[Outcome]) -> None:
    """The error names both."""
    runs[2] = replace(runs[2], facts=runs[2].facts | {"cpu": "another CPU"})
    with pytest.raises(BenchError, match=r"no runs of one machine.*another CPU"):
        merge.markdown(runs)


def test_committed_results_have_the_rows_of_the_table() -> None:
    """No line waits for a row that runs call something else. Both results may be of different machines."""
    results = Path(__file__).parents[2] / "bench/results"
    runs = [report.read_json(results / f"{name}.json") for name in ("2-cores", "several-2-cores")]
    table = "\n".join(merge.markdown([run]) for run in runs)
    missing = [line.said for line in merge.LINES if f"| {line.said} |" not in table]
    assert not missing
