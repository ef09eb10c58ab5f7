"""List the groups and workers of this user on this host, and the members of these groups elsewhere.

It joins no group and opens no port: it asks the processes at their sockets in this user's private directory.
"""

from __future__ import annotations

import argparse

import msgspec

from ..observability import reader
from ..observability.reader import SeenGroup
from ..observability.report import WorkerReport

_COLUMNS = ("WORKER", "ID", "ROLE", "STATE", "PID", "HOST", "UP", "CALLS", "METRICS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the list. Returns 1 if there is no worker."""
    groups = reader.groups()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(groups)).decode())
    else:
        print("\n\n".join(map(as_text, groups)) or "no worker of this user runs on this host")
    return 0 if groups else 1


def as_text(group: SeenGroup) -> str:
    """A group as a table."""
    rows = [_row(report) for report in sorted(group.reports, key=lambda report: report.id)]
    rows += [(each.name, "?", "", "unseen", str(each.pid or "?"), each.hostname, "", "", "") for each in group.unseen]
    rows = [_COLUMNS, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    first = next(iter(group.reports), None)
    title = "" if first is None else f"group at {first.init_method}, {len(group.names)} members\n"
    whys = [f"{each.name}: {each.why}" for each in group.unseen]
    return title + "\n".join(lines + whys)


def _row(report: WorkerReport) -> tuple[str, ...]:
    calls = sum(not call.own for call in report.calls)
    return (
        report.name,
        str(report.id),
        report.role,
        report.state,
        str(report.pid),
        report.hostname,
        f"{report.uptime:.0f} s",
        str(calls),
        report.metrics,
    )
