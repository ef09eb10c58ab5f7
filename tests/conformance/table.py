"""The table of results kept in the repository: reading, writing, comparing with a run, counting.

``results.json`` has one line for each test, sorted. A test passes, or it fails for a reason of `REASONS`, or it fails
without one: that is a gap, and the counts say so. A test that needs more GPUs than there are keeps the result it had
where there were enough.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .processes import FAIL, PASS, SKIP, Outcome
from .suites import Case

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
README = HERE / "README.md"
SAMPLE = HERE / "sample.txt"

GPUS, UPSTREAM = "gpus", "skipped-by-torch"
# Why a test may be left out.
REASONS = {
    "torchscript": "makes calls, uses RRefs or goes backward inside TorchScript, which is bound to torch's C++ agent",
    "tensorpipe": "asserts internals of TensorPipe",
    "cpp": "asserts internals of torch's C++ runtime, or its wording",
    "profiler": "reads remote events of the legacy autograd profiler",
    GPUS: "needs more GPUs than the machine had that made the table",
    "torch-defect": "asserts a defect or limitation of torch that aiorpc does not share",
    UPSTREAM: "torch itself skips it on this platform",
}
_EARLY = "a race of its own: a call may come before the trainer has its process group"
# Seen to fail without aiorpc's doing when the machine is busy.
FLAKY = {
    "TensorPipeDdpComparisonTest.test_ddp_comparison_uneven_inputs": "deadlock in c10d over the interpreter's lock",
    "TensorPipeTensorPipeAgentRpcTest.test_rref_proxy_timeout": "torch's shutdown may hang under load",
    "TensorPipeDdpUnderDistAutogradTest.test_backward_ddp_inside": _EARLY,
    "TensorPipeDdpUnderDistAutogradTest.test_backward_ddp_outside": _EARLY,
    "TensorPipeDdpUnderDistAutogradTest.test_backward_ddp_outside_uneven_inputs": _EARLY,
}
_UNCLASSIFIED = "UNCLASSIFIED"
_BEGIN, _END = "<!-- counts -->", "<!-- end of counts -->"
_NEEDS = re.compile(r"Need at least (\d+) CUDA device|(CUDA is not available)")


class Row(NamedTuple):
    """One test. kind: CORE, INTERNAL, TORCHSCRIPT, PROFILER, FAULTY; reason: of REASONS; gpus: how many it needs."""

    id: str
    kind: str
    result: str
    reason: str = ""
    gpus: int = 0


class Table(NamedTuple):
    """All rows by id, and the release of torch that they belong to."""

    torch: str
    rows: dict[str, Row]

    def here(self, torch: str) -> bool:
        """Whether it is about that release; builds of one release (``2.13.0+cpu``) have the same tests."""
        return self.torch == release(torch)


class Changes(NamedTuple):
    """How a run differs from the table; all but the first two are no failures."""

    lost: list[Outcome]  # passed before
    broken: list[Outcome]  # not in the table, and does not pass
    gained: list[Outcome]  # did not pass before
    flaky: list[Outcome]  # failed, as with torch itself now and then
    gone: list[str]  # this torch does not have them

    @property
    def ok(self) -> bool:
        return not self.lost and not self.broken


def release(torch: str) -> str:
    """``2.13.0`` of ``2.13.0+cpu``."""
    return torch.partition("+")[0]


def read(path: Path = RESULTS) -> Table:
    """The table; empty if there is none yet."""
    if not path.exists():
        return Table("", {})
    data = json.loads(path.read_text())
    return Table(data["torch"], {each["id"]: Row(**each) for each in data["tests"]})


def write(table: Table, path: Path = RESULTS) -> None:
    """One line for each test, sorted by id; fields at their defaults are left out."""
    lines = []
    for row in sorted(table.rows.values()):
        fields = {key: value for key, value in row._asdict().items() if value not in ("", 0)}
        lines.append("    " + json.dumps(fields))
    body = ",\n".join(lines)
    path.write_text(f'{{\n  "torch": {json.dumps(table.torch)},\n  "tests": [\n{body}\n  ]\n}}\n')


def read_sample(path: Path = SAMPLE) -> list[str]:
    """Ids of the tests that every run of the test suite includes."""
    return [line for line in path.read_text().split("\n") if line and not line.startswith("#")]


def compare(table: Table, outcomes: Iterable[Outcome], existing: Iterable[str], gpus: int) -> Changes:
    """What a run says that the table does not. existing: all tests of this torch; gpus: how many there are here."""
    changes = Changes([], [], [], [], sorted(table.rows.keys() - set(existing)))
    for outcome in sorted(outcomes):
        row = table.rows.get(outcome.id)
        if outcome.result == PASS:
            if row is not None and row.result != PASS:
                changes.gained.append(outcome)
        elif outcome.result == SKIP and _gpus_needed(outcome) > gpus:
            continue
        elif outcome.id in FLAKY:
            changes.flaky.append(outcome)
        elif row is None and outcome.result == FAIL:
            changes.broken.append(outcome)
        elif row is not None and row.result == PASS:
            changes.lost.append(outcome)
    return changes


def update(table: Table, outcomes: Iterable[Outcome], existing: Mapping[str, Case], torch: str, gpus: int) -> Table:
    """The table with what a run showed. What did not run keeps its row, unless this torch does not have it."""
    rows = {id: row for id, row in table.rows.items() if id in existing}
    for outcome in outcomes:
        rows[outcome.id] = _row(rows.get(outcome.id), existing[outcome.id], outcome, gpus)
    return Table(release(torch), rows)


def _row(old: Row | None, case: Case, outcome: Outcome, gpus: int) -> Row:
    row = old or Row(case.id, _kind(case), FAIL)
    needs = _gpus_needed(outcome)
    if needs > gpus:
        return row._replace(gpus=needs) if row.result == PASS else row._replace(result=SKIP, reason=GPUS, gpus=needs)
    if outcome.result == FAIL and row.result == PASS and case.id in FLAKY:
        return row
    if outcome.result == PASS:
        return row._replace(result=PASS, reason="")
    if outcome.result == SKIP:
        return row._replace(result=SKIP, reason=UPSTREAM)
    return row._replace(result=FAIL, reason="" if row.reason in (GPUS, UPSTREAM) else row.reason)


def _gpus_needed(outcome: Outcome) -> int:
    found = _NEEDS.search(outcome.detail) if outcome.result == SKIP else None
    return 0 if found is None else int(found[1] or 1)


def _kind(case: Case) -> str:
    """A guess for a test that nobody has looked at."""
    if case.group == "faulty":
        return "FAULTY"
    return "TORCHSCRIPT" if case.suite.startswith("Jit") else _UNCLASSIFIED


def summary(table: Table) -> str:
    """The counts as a Markdown table: by kind, and why tests are left out."""
    kinds = sorted({row.kind for row in table.rows.values()})
    used = [reason for reason in REASONS if any(row.reason == reason for row in table.rows.values())]
    lines = [
        f"With torch {table.torch}, {len(table.rows)} tests:",
        "",
        f"| | tests | pass | {' | '.join(used)} | fail without a reason |",
        f"|---|{'---|' * (len(used) + 3)}",
    ]
    for kind in [*kinds, ""]:
        rows = [row for row in table.rows.values() if kind in ("", row.kind)]
        passed = sum(row.result == PASS for row in rows)
        reasons = Counter(row.reason for row in rows if row.result != PASS)
        counts = [len(rows), passed, *(reasons[reason] for reason in used), reasons[""]]
        lines.append(f"| {kind or '**all**'} | {' | '.join(str(count or '') for count in counts)} |")
    lines += ["", *(f"- `{reason}`: {REASONS[reason]}" for reason in used)]
    return "\n".join(lines)


def with_summary(text: str, table: Table) -> str:
    """A text with the counts between its two marks replaced. ValueError if it has no marks."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the text has no place for the counts: {_BEGIN} and {_END}")
    return f"{before}{begin}\n{summary(table)}\n{end}{after}"
