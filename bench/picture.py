"""The pictures of a run: ratios with their targets, what more workers cost, time against size. Needs matplotlib."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import hardware, machine
from .stats import Outcome, Row, Spread

OURS, THEIRS = "tab:blue", "tab:orange"


@contextlib.contextmanager
def page(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, which the end of the block writes as a PNG; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw(outcome: Outcome, path: Path) -> None:
    """Write a PNG; ImportError without matplotlib."""
    compared = [row for row in outcome.rows if row.ratio is not None and row.size is None]
    curves = _curves(outcome.rows)
    height = max(3.0, 1.2 + 0.34 * len(compared))
    with page(path, 13, height + (4 if curves else 0)) as figure:
        parts = figure.subfigures(2, 1, height_ratios=[height, 4]) if curves else [figure]
        if compared:
            _draw_ratios(parts[0].subplots(), compared)
        if curves:
            places = parts[1].subplots(1, len(curves), squeeze=False)[0]
            for axes, (title, rows) in zip(places, curves.items(), strict=True):
                _draw_curve(axes, title, rows)
        _say_where(figure, outcome)


def _say_where(figure: Any, outcome: Outcome) -> None:
    """What was compared, on which machine, and how fast that is."""
    figure.suptitle(f"{outcome.facts['sides']}\n{hardware.line(outcome.facts)}", fontsize=9)
    if said := machine.line(outcome.facts):
        figure.supxlabel(said, fontsize=8)


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if row.size is not None:
            curves.setdefault(f"{row.quantity} [{row.unit}]", []).append(row)
    return curves


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator

    for place, row in enumerate(rows):
        ratio = Spread.of(row.ratios)
        colour = {None: "tab:gray", True: "tab:green", False: "tab:red"}[row.passed]
        error = [[ratio.median - ratio.minimum], [ratio.maximum - ratio.median]]
        axes.barh(place, ratio.median, color=colour, xerr=error, ecolor="black", capsize=2)
        axes.text(ratio.maximum * 1.04, place, f"{ratio.median:.1f}x", va="center", fontsize=8)
        if row.target is not None:
            axes.plot([row.target] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    sides = [f", against {row.against}" if row.against else "" for row in rows]
    labels = [f"{row.measurement}: {row.quantity} {row.note}{side}" for row, side in zip(rows, sides, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("times better (bar: median, line: minimum to maximum of rounds; black mark: target)")


def _draw_curve(axes: Any, title: str, rows: Sequence[Row]) -> None:
    for label, colour in (("aiorpc", OURS), ("torch", THEIRS)):
        points = [(row.size, Spread.of(values)) for row in rows if (values := getattr(row, label))]
        if points:
            sizes = [size for size, _ in points]
            axes.plot(sizes, [spread.median for _, spread in points], marker="o", color=colour, label=label)
            axes.fill_between(
                sizes, [s.minimum for _, s in points], [s.maximum for _, s in points], color=colour, alpha=0.2
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.size for row in rows], [str(row.size) for row in rows])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("workers")
    axes.legend(fontsize=8)


#: Measurements that are curves over the size of a tensor: line style, marker, and what the legend adds to the side.
_SIZE_STYLES = {
    "tensors": ("-", "o", ""),
    "tcp_only": ("--", "o", ", TCP only"),
    "first_transfer": (":", "x", ", first"),
}


def draw_sizes(outcome: Outcome, path: Path) -> bool:
    """Write a PNG of time against size, both axes logarithmic; false where nothing was measured of that."""
    panels: dict[str, list[Row]] = {}
    for row in outcome.rows:
        if row.payload is not None and row.measurement in _SIZE_STYLES:
            panels.setdefault(row.quantity.split()[0], []).append(row)
    if not panels:
        return False
    with page(path, 13, 6) as figure:
        places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (title, rows) in zip(places, panels.items(), strict=True):
            _draw_sizes(axes, title, rows)
        _say_where(figure, outcome)
    return True


def _draw_sizes(axes: Any, title: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import EngFormatter, NullLocator

    for name, (style, marker, said) in _SIZE_STYLES.items():
        for label, colour in (("aiorpc", OURS), ("torch", THEIRS)):
            chosen = [row for row in rows if row.measurement == name and getattr(row, label)]
            if not chosen:
                continue
            sizes = [row.payload for row in chosen]
            spreads = [Spread.of(getattr(row, label)) for row in chosen]
            seconds = [spread.median / 1e6 for spread in spreads]
            axes.plot(sizes, seconds, linestyle=style, marker=marker, color=colour, label=f"{label}{said}")
            edges = [spread.minimum / 1e6 for spread in spreads], [spread.maximum / 1e6 for spread in spreads]
            axes.fill_between(sizes, *edges, color=colour, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = {row.payload: row.note for row in rows}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.tick_params(axis="y", labelleft=True)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.set_title(f"{title}: time of one call (line: median of rounds, shade: minimum to maximum)", fontsize=9)
    axes.set_xlabel("size of the tensor")
    axes.legend(fontsize=8)
