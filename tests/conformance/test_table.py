"""The table of results: what a run changes in it, what counts as a loss, and that the repository's own is in order."""

from __future__ import annotations

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


def test_a_crash_of_any_rank_fails_a_test() -> None:
    """PyTorch looks at rank 0 alone. Codes that mean "skipped" are none."""
    assert _judge(_Verdict(), [0, 0, -11, 0]) == (FAIL, "rank 2 ended with exit code -11")
    assert _judge(_Verdict(), [0, 77]) == (PASS, "")


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
