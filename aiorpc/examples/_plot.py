"""The figure of a batch_rl sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BATCHED, UNBATCHED = "#1f6fb4", "#c9602c"


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw steps/s over the number of observers, batched and unbatched, into a PNG file at ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    observers = [row["observers"] for row in data["rows"]]
    for name, color, marker in (("batched", BATCHED, "o"), ("unbatched", UNBATCHED, "s")):
        speeds = [row[name]["median_steps_per_s"] for row in data["rows"]]
        axes.plot(observers, speeds, color=color, marker=marker, markersize=5, label=name)
        axes.annotate(name, (observers[-1], speeds[-1]), xytext=(8, -3), textcoords="offset points", color=color)
    if data["batched_wins_from"] is not None:
        axes.axvline(data["batched_wins_from"], color="0.6", linewidth=1, linestyle=":")
        axes.annotate(
            f"batches win\nfrom here on ({data['batched_wins_from']})",
            (data["batched_wins_from"], 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 2),
            textcoords="offset points",
            color="0.35",
            fontsize=8,
        )
    axes.set(xlabel="observers", ylabel="environment steps per second", xticks=observers)
    axes.set_xlim(observers[0] - 0.3, observers[-1] + 1.4)
    axes.set_ylim(bottom=0)
    axes.set_title(f"batch_rl on CartPole-v1 ({data['machine']})", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    figure.savefig(path, dpi=150)
