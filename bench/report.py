"""The table (rich where it is installed), and the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import hardware, machine
from .stats import Outcome, Row, Spread

HEADINGS = ("measurement", "quantity", "aiorpc", "torch.distributed.rpc", "ratio", "target", "")


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, one string per heading."""
    verdict = {None: "", True: "pass", False: "FAIL"}[row.passed]
    at = f" of {row.size} workers" if row.size is not None else ""
    note = f" ({row.note})" if row.note else ""
    return (
        row.measurement,
        f"{row.quantity}{at}{note}",
        _figure(row.aiorpc, row.unit),
        " of ".join(filter(None, (_figure(row.torch, row.unit), row.against))),
        "" if row.ratio is None else f"{_spread(row.ratio)}x",
        _aim(row),
        verdict,
    )


def _aim(row: Row) -> str:
    if row.limit is not None:
        return f"<= {row.limit:g} {row.unit}"
    return "" if row.target is None else f">= {row.target:g}x"


def _figure(values: Sequence[float], unit: str) -> str:
    return f"{_spread(Spread.of(values))} {unit}" if values else "-"


def _spread(spread: Spread) -> str:
    if spread.minimum == spread.maximum:
        return _number(spread.median)
    return f"{_number(spread.median)} [{_number(spread.minimum)}..{_number(spread.maximum)}]"


def _number(value: float) -> str:
    """Three significant digits, thousands separated."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}" if magnitude >= 0.1 else f"{value:.3g}"


def plain_table(rows: Sequence[Row]) -> str:
    """The table in plain text."""
    return aligned([HEADINGS, *(cells(row) for row in rows)])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of as many cells each as text, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def closing_lines(outcome: Outcome) -> list[str]:
    """Targets reached and missed, failures, conditions, and where the time went."""
    judged = [row for row in outcome.rows if row.passed is not None]
    missed = [_name(row) for row in judged if not row.passed]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets reached"]
    lines += [f"missed: {'; '.join(missed)}"] if missed else []
    lines += [f"FAILED {failure.measurement}: {failure.error}" for failure in outcome.failures]
    lines += [hardware.line(outcome.facts), *filter(None, (machine.line(outcome.facts),)), outcome.facts["method"]]
    lines += [f"Seconds of each: {_longest_first(outcome.took)}"] if outcome.took else []
    lines += [f"Fewer rounds than planned, as their time was over: {', '.join(outcome.cut)}"] if outcome.cut else []
    return [*lines, f"{outcome.facts['command']}   ({outcome.seconds:.0f} s)"]


def _longest_first(took: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.0f}" for name, seconds in sorted(took.items(), key=lambda each: -each[1]))


def _name(row: Row) -> str:
    return f"{row.measurement} ({', '.join(filter(None, (row.quantity, row.note, row.against)))})"


def show(outcome: Outcome) -> None:
    """Print the outcome on stdout. Figures are medians of the rounds with [minimum..maximum]."""
    try:
        _show_rich(outcome.rows)
    except ImportError:
        print(plain_table(outcome.rows))
    print("\n".join(closing_lines(outcome)))


def _show_rich(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Median of rounds [minimum..maximum]; ratio: times better than the other side")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("measurement", "quantity", "") else "right")
    for row in rows:
        colour = {None: None, True: "green", False: "red"}[row.passed]
        table.add_row(*cells(row), style=colour)
    console = Console()
    if not console.is_terminal:
        raise ImportError("plain text suits a file better")
    console.print(table)


def write_json(outcome: Outcome, path: Path) -> None:
    """All figures of all rounds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Outcome:
    """The outcome that ``write_json`` wrote."""
    return Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
