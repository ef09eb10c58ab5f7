"""The live view of ``python -m aiorpc top``. Imports textual, and no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Header, Static

from . import reader
from .comparing import CallRate, Comparison, compare
from .reader import SeenGroup
from .report import Look, WorkerReport
from .wording import duration, rate, size

_WORKERS = (
    *("worker", "state", "up", "made/s", "served/s", "failed/s", "under way", "queued"),
    *("sent/s", "received/s", "loop late", "memory"),
)
_CALLS = ("worker", "", "peer", "function", "calls/s", "failed/s", "p50", "p99")
_QUEUES = ("queue", "owner", "items", "room for", "getters wait", "putters wait", "unfinished")
_MOST_CALLS = 100

Cell = str | Text


class Top(App[None]):
    """Shows groups of this user on this host; looks at them anew again and again."""

    TITLE: str | None = "aiorpc top"
    ENABLE_COMMAND_PALETTE: ClassVar[bool] = False
    CSS: ClassVar[str] = """
    Static { color: $text-muted; padding: 0 1; height: auto; }
    #trouble { color: $warning; }
    DataTable { height: auto; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort calls"),
    ]

    def __init__(self, name: str | None = None, interval: float = 1.0) -> None:
        """name: of a worker of the group to show; None for all groups. interval: seconds between two looks."""
        super().__init__()
        self._name = name
        self._interval = interval
        self._before: dict[str, WorkerReport] = {}
        self._looking = asyncio.Lock()
        self._paused = False
        self._slowest_first = False
        self._calls: list[CallRate] = []

    def compose(self) -> ComposeResult:
        """The parts of the screen."""
        yield Header(show_clock=True, icon=" ")
        yield Static("looking for workers", id="trouble", markup=False)
        with VerticalScroll():
            for name, columns in (("workers", _WORKERS), ("calls", _CALLS), ("queues", _QUEUES)):
                table: DataTable[Cell] = DataTable(id=name, cursor_type="none", zebra_stripes=True, show_cursor=False)
                table.add_columns(*columns)
                yield table
        yield Footer()

    def on_mount(self) -> None:
        """Look now, and again and again."""
        self.set_interval(self._interval, self._refresh)
        self.call_later(self._refresh)

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._paused = not self._paused
        self.sub_title = "paused" if self._paused else ""

    def action_sort(self) -> None:
        """The calls that take longest first, or those that are most often made."""
        self._slowest_first = not self._slowest_first
        self._show_calls()

    async def _refresh(self) -> None:
        if self._paused or self._looking.locked():  # of a look that takes longer than the interval
            return
        async with self._looking:
            groups = await asyncio.to_thread(reader.groups, question=Look(tally=True))
        groups = [group for group in groups if self._name is None or self._name in group.names]
        compared = [(group, compare(self._before, group)) for group in groups]
        self._before = {report.mark: report for group in groups for report in group.reports}
        self._show(compared)

    # --- showing ------------------------------------------------------------------------------------------------------

    def _show(self, groups: Sequence[tuple[SeenGroup, Comparison]]) -> None:
        trouble = [f"{each.name}: {each.why}" for group, _ in groups for each in group.unseen]
        if not groups:
            which = "" if self._name is None else f" in a group with {self._name!r}"
            trouble = [f"no worker of this user runs on this host{which}; it will show here when one does"]
        line = self.query_one("#trouble", Static)
        line.update("\n".join(trouble))
        line.display = bool(trouble)
        self._fill("workers", [row for group, seen in groups for row in _workers(group, seen)])
        self._calls = [call for _, seen in groups for call in seen.calls]
        self._show_calls()
        self._fill("queues", [row for group, _ in groups for report in group.reports for row in _queues(report)])

    def _show_calls(self) -> None:
        calls = self._calls
        if self._slowest_first:
            calls = sorted(calls, key=lambda call: -(call.p99 or 0.0))
        self._fill("calls", [_call(call) for call in calls[:_MOST_CALLS]])

    def _fill(self, name: str, rows: Sequence[Sequence[Cell]]) -> None:
        table: DataTable[Cell] = self.query_one(f"#{name}", DataTable)
        table.clear()
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))  # a str would be markup
        table.display = bool(rows)


def _workers(group: SeenGroup, seen: Comparison) -> list[list[Cell]]:
    reports = {report.mark: report for report in group.reports}
    rates = sorted(seen.workers, key=lambda each: reports[each.mark].id)
    rows: list[list[Cell]] = []
    for each in rates:
        late: Cell = duration(each.lag)
        if each.silent:
            late = Text(f"stands still, {duration(each.silent)}", "bold red")
        rows.append(
            [
                Text(each.name, "bold"),
                reports[each.mark].state,
                duration(reports[each.mark].uptime),
                *map(rate, (each.made, each.served, each.failed)),
                str(each.pending + each.running),
                str(each.queued),
                *map(size, (each.sent, each.received)),
                late,
                size(each.memory),
            ]
        )
    rows += [[Text(each.name, "bold"), Text("unseen", "bold red"), *[""] * 10] for each in group.unseen]
    return rows


def _queues(report: WorkerReport) -> list[list[Cell]]:
    return [
        [
            Text(each.name, "bold"),
            report.name,
            str(each.length),
            str(each.maxsize or "any"),
            *map(str, (each.getters, each.putters, each.unfinished)),
        ]
        for each in report.queues
    ]


def _call(call: CallRate) -> list[Cell]:
    failed: Cell = Text(rate(call.failed), "bold red") if call.failed else ""
    way = "calls" if call.side == "made" else "serves"
    name = Text(call.worker, "bold")
    return [name, way, call.peer, call.function, rate(call.rate), failed, duration(call.p50), duration(call.p99)]
