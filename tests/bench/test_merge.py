"""The table of figures out of several runs."""

from __future__ import annotations

from pathlib import Path

from bench import merge, report


def test_committed_results_have_the_rows_of_the_table() -> None:
    """No line waits for a row that runs call something else. Both results may be of different machines."""
    results = Path(__file__).parents[2] / "bench/results"
    runs = [report.read_json(results / f"{name}.json") for name in ("2-cores", "several-2-cores")]
    table = "\n".join(merge.markdown([run]) for run in runs)
    missing = [line.said for line in merge.LINES if f"| {line.said} |" not in table]
    assert not missing
