"""The picture of a soak: each figure over time, one line for each member. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import hardware
from ..picture import page
from .verdict import WARM_UP

COLUMNS = 2


def draw(found: dict[str, Any], path: Path) -> None:
    """Write a PNG; ImportError without matplotlib."""
    units = found["units"]
    rows = -(-len(units) // COLUMNS)
    grew = {(verdict["member"], verdict["gauge"]) for verdict in found["verdicts"] if verdict["grew"]}
    with page(path, 14, 2.6 * rows) as figure:
        places = figure.subplots(rows, COLUMNS, sharex=True).flat
        for axes, (name, unit) in zip(places, units.items(), strict=False):
            for member, series in found["members"].items():
                if name in series:
                    minutes = [seconds / 60 for seconds in series["time"]]
                    values = [float("nan") if value is None else value for value in series[name]]
                    label = f"{member} (grew)" if (member, name) in grew else member
                    axes.plot(minutes, values, linewidth=1.0, label=label)
            axes.axvline(found["seconds"] * WARM_UP / 60, color="black", linewidth=0.8, linestyle=":")
            axes.set_ylim(bottom=0)
            axes.set_title(f"{name} [{unit}]" if unit else name, fontsize=9)
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize=7, loc="lower right", ncols=3)
        for axes in list(places)[-COLUMNS:]:
            axes.set_xlabel("minutes (dotted: end of the warm-up)")
        figure.suptitle(hardware.line(found["facts"]), fontsize=9)
