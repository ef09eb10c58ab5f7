"""The table of results: what a run changes in it, what counts as a loss, and that the repository's own is in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import table
from .processes import FAIL, PASS, SKIP, Outcome, _judge, _Verdict
from .suites import Case
from .table import GPUS, REASONS, UPSTREAM, Row, Table

FLAKY = next(iter(table.FLAKY))
KNOWN = Table(
    "2.13.0",
    {
        row.id: row
        for row in (
            Row("A.good", "CORE", PASS),
            Row("A.bad", "PROFILER", FAIL, "profiler"),
            Row("A.gap", "CORE", FAIL),
            Row("A.gpu", "CORE", SKIP, GPUS, 2),
            Row("A.tried", "CORE", PASS, "", 1),
            Row("A.off", "CORE", SKIP, UPSTREAM),
            Row(FLAKY, "CORE", PASS),
        )
    },
)
CASES = {id: Case(id, "generic", "A") for id in [*KNOWN.rows, "A.new"]}


def outcome(id: str, result: str, detail: str = "") -> Outcome:
    return Outcome(id, result, detail, 0.1)


def ids(outcomes: list[Outcome]) -> list[str]:
    return [each.id for each in outcomes]


@pytest.mark.parametrize("result", [FAIL, SKIP])
def test_a_test_that_passed_and_does_not_is_a_loss(result: str) -> None:
    """Failing is one way, skipping itself another."""
    changes = table.compare(KNOWN, [outcome("A.good", result), outcome("A.bad", FAIL)], CASES, 0)
    assert ids(changes.lost) == ["A.good"]
    assert not changes.ok


def test_a_new_test_must_pass() -> None:
    """One that the table does not know and that fails is no success; one that passes is."""
    assert ids(table.compare(KNOWN, [outcome("A.new", FAIL)], CASES, 0).broken) == ["A.new"]
    assert table.compare(KNOWN, [outcome("A.new", PASS)], CASES, 0).ok


def test_what_is_no_loss() -> None:
    """A failure that is known, one more success, a test that torch itself fails, one that needs more GPUs."""
    few = "Need at least 1 CUDA device"
    run = [outcome("A.bad", FAIL), outcome("A.gap", PASS), outcome(FLAKY, FAIL), outcome("A.tried", SKIP, few)]
    changes = table.compare(KNOWN, run, CASES, 0)
    assert changes.ok
    assert (ids(changes.gained), ids(changes.flaky)) == (["A.gap"], [FLAKY])


def test_gpus_that_are_there_are_no_excuse() -> None:
    """A test that needs one, with one there, has to pass."""
    changes = table.compare(KNOWN, [outcome("A.tried", SKIP, "Need at least 1 CUDA device")], CASES, 1)
    assert ids(changes.lost) == ["A.tried"]


def test_tests_of_another_release_are_named() -> None:
    """Those that this torch does not have are no loss."""
    changes = table.compare(KNOWN, [], [id for id in CASES if id != "A.bad"], 0)
    assert changes.ok
    assert changes.gone == ["A.bad"]


def test_an_update_keeps_reasons_and_what_did_not_run() -> None:
    """A reason lasts while its test fails; what cannot run here keeps the result it had elsewhere."""
    run = [
        outcome("A.good", FAIL),
        outcome("A.bad", FAIL),
        outcome("A.gap", PASS),
        outcome("A.tried", SKIP, "Need at least 1 CUDA device"),
        outcome("A.new", SKIP, "Need at least 4 CUDA devices"),
        outcome(FLAKY, FAIL),
    ]
    cases = {id: case for id, case in CASES.items() if id != "A.off"}
    changed = table.update(KNOWN, run, cases, "2.14.1+cu130", 0)
    assert changed.torch == "2.14.1"
    assert set(changed.rows.values()) == {
        Row("A.good", "CORE", FAIL),
        Row("A.bad", "PROFILER", FAIL, "profiler"),
        Row("A.gap", "CORE", PASS),
        Row("A.gpu", "CORE", SKIP, GPUS, 2),
        Row("A.tried", "CORE", PASS, "", 1),
        Row("A.new", "UNCLASSIFIED", SKIP, GPUS, 4),
        Row(FLAKY, "CORE", PASS),
    }


def test_a_reason_ends_when_its_test_passes() -> None:
    """And one that skipped for want of GPUs and fails where there are some fails without a reason."""
    changed = table.update(KNOWN, [outcome("A.bad", PASS), outcome("A.gpu", FAIL)], CASES, "2.13.0", 2)
    assert changed.rows["A.bad"] == Row("A.bad", "PROFILER", PASS)
    assert changed.rows["A.gpu"] == Row("A.gpu", "CORE", FAIL, "", 2)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """One line for each test, sorted."""
    path = tmp_path / "results.json"
    table.write(KNOWN, path)
    assert table.read(path) == KNOWN
    lines = [line for line in path.read_text().splitlines() if '"id"' in line]
    assert lines == sorted(lines)
    assert len(lines) == len(KNOWN.rows)
    assert table.read(tmp_path / "none") == Table("", {})


def test_builds_of_a_release_have_one_table() -> None:
    """What stands behind the plus sign says for which device torch was built."""
    assert KNOWN.here("2.13.0")
    assert KNOWN.here("2.13.0+cu130")
    assert not KNOWN.here("2.12.0")


def test_a_crash_of_any_rank_fails_a_test() -> None:
    """PyTorch looks at rank 0 alone. Codes that mean "skipped" are none."""
    assert _judge(_Verdict(), [0, 0, -11, 0]) == (FAIL, "rank 2 ended with exit code -11")
    assert _judge(_Verdict(), [0, 77]) == (PASS, "")


def test_the_line_that_says_most_is_shown() -> None:
    """torch's own words about processes that ended come last in its errors."""
    detail = "RuntimeError: Process 1 exited with error code 10\n  File x\nValueError: no\n\nTo execute this, run\n"
    assert outcome("A.good", FAIL, detail).summary == "ValueError: no"
    assert outcome("A.good", FAIL, "killed").summary == "killed"
    assert outcome("A.good", FAIL).summary == ""


def test_the_repositorys_table_is_in_order() -> None:
    """What does not pass has a reason of the list, and the counts in README.md are those of the table."""
    known = table.read()
    for row in known.rows.values():
        assert row.result in (PASS, FAIL, SKIP)
        assert row.reason in ("", *REASONS)
        assert bool(row.reason) == (row.result != PASS), row
        assert row.reason in (GPUS, UPSTREAM) or row.result != SKIP, row
    text = table.README.read_text()
    assert table.with_summary(text, known) == text, "python -m tests.conformance --update writes them"


def test_the_sample_is_a_tenth_of_everything() -> None:
    """Tests that exist, of every suite and kind that runs without a GPU, once each, and none that is flaky."""
    known, sample = table.read(), table.read_sample()
    here = {id: row for id, row in known.rows.items() if not row.gpus}
    assert len(set(sample)) == len(sample)
    assert set(sample) <= set(here)
    assert not set(sample) & set(table.FLAKY)
    assert 0.09 <= len(sample) / len(here) <= 0.15
    for part in (_suite, lambda row: row.kind):
        assert {part(here[id]) for id in sample} == {part(row) for row in here.values()}


def _suite(row: Row) -> str:
    return row.id.partition(".")[0]


def test_a_text_without_a_place_for_the_counts_is_refused() -> None:
    """The marks are what `--update` looks for."""
    with pytest.raises(ValueError, match="no place for the counts"):
        table.with_summary("nothing", KNOWN)
