"""The table of figures out of several runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import hardware, merge, report
from bench.__main__ import main
from bench.stats import BenchError, Outcome, Row

OPTIONS = "awaited, def handler"


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


def test_a_row_that_only_one_run_has_is_there(runs: list[Outcome]) -> None:
    """Its figures are that run's."""
    more = Row("noop_options", "p50", "µs", "lower", (1500.0,), (3000.0,), note=OPTIONS)
    runs[1] = replace(runs[1], rows=(*runs[1].rows, more))
    assert (
        "| the same with a `def` handler, which needs a thread | 1,500 | 3,000 | **2x** | 2 to 2 |"
        in merge.markdown(runs)
    )


def test_another_side_than_torch_is_named(runs: list[Outcome]) -> None:
    """Of rows that differ in nothing else, each is a line of its own."""
    row = Row("publish", "until the last of 8 readers has it", "ms", "lower", (40.0,), (500.0,), note="256 MB")
    theirs = [
        replace(row, torch=(ms,), against=against) for ms, against in ((1500.0, "Ray"), (280.0, "Ray, zero copies"))
    ]
    lines = merge.markdown([replace(runs[0], rows=(row, *theirs))]).splitlines()
    assert [line.partition(" | ")[2] for line in lines[2:5]] == [
        "40 | 500 | **12.5x** | 12.5 to 12.5 |",
        "40 | 1,500 of Ray | **37.5x** | 37.5 to 37.5 |",
        "40 | 280 of Ray, zero copies | **7x** | 7 to 7 |",
    ]


def test_runs_of_different_machines_are_not_merged(runs: list[Outcome]) -> None:
    """The error names both."""
    runs[2] = replace(runs[2], facts=runs[2].facts | {"cpu": "another CPU"})
    with pytest.raises(BenchError, match=r"no runs of one machine.*another CPU"):
        merge.markdown(runs)


def test_command_prints_the_table(runs: list[Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads the files that runs have written, and measures nothing."""
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for run, path in zip(runs, paths, strict=True):
        report.write_json(run, path)
    assert main(["--merge", *map(str, paths)]) == 0
    assert capsys.readouterr().out == merge.markdown(runs) + "\n"


@pytest.mark.parametrize(
    ("text", "further", "said"),
    [
        (None, [], "no.json is no result of a run: FileNotFoundError"),
        ("[]", [], "no.json is no result of a run: TypeError"),
        ("{", [], "no.json is no result of a run: JSONDecodeError"),
        ("{}", ["--quick"], "no other option"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    text: str | None, further: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is not there or is no result, and options that would measure."""
    path = tmp_path / "no.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["--merge", str(path), *further])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_committed_results_have_the_rows_of_the_table() -> None:
    """No line waits for a row that runs call something else. Both results may be of different machines."""
    results = Path(__file__).parents[2] / "bench/results"
    runs = [report.read_json(results / f"{name}.json") for name in ("2-cores", "several-2-cores")]
    table = "\n".join(merge.markdown([run]) for run in runs)
    missing = [line.said for line in merge.LINES if f"| {line.said} |" not in table]
    assert not missing
