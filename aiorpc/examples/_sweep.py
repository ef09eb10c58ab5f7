"""batch_rl over the number of observers, batched and unbatched: from how many on do batches win?"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ._plot import draw
from ._rl import Settings

WORLD_SIZES = range(2, 12)

Run = Callable[[Settings], "dict[str, Any] | None"]


def sweep(run: Run, settings: Settings, out: str, world_sizes: Sequence[int] = WORLD_SIZES) -> dict[str, Any]:
    """Run everything, print the table, write ``out``.json and ``out``.png; returns what the JSON file holds."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_measure(run, settings, world_size) for world_size in world_sizes]
    data = {
        "program": "batch_rl --sweep",
        "num_episode": settings.num_episode,
        "num_steps": settings.num_steps,
        "seed": settings.seed,
        "use_async": settings.use_async,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {_cores()} cores",
        "batched_wins_from": wins_from(rows),
        "rows": rows,
    }
    json_path, picture_path = Path(f"{path}.json"), Path(f"{path}.png")
    json_path.write_text(json.dumps(data, indent=1) + "\n")
    draw(data, picture_path)
    _tell(data)
    print(f"wrote {json_path} and {picture_path}")
    return data


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure(run: Run, settings: Settings, world_size: int) -> dict[str, Any]:
    """One row: both variants with this many workers, one right after the other."""
    row: dict[str, Any] = {"world_size": world_size, "observers": world_size - 1}
    for name, batch in (("batched", True), ("unbatched", False)):
        result = run(replace(settings, world_size=world_size, batch=batch, show=False))
        assert result is not None
        row[name] = {key: result[key] for key in ("median_steps_per_s", "steps_per_s", "total_s", "rewards")}
        print(f"{world_size - 1:2d} observers {name:9s} {result['median_steps_per_s']:8,.0f} steps/s", flush=True)
    row["ratio"] = row["batched"]["median_steps_per_s"] / row["unbatched"]["median_steps_per_s"]
    return row


def wins_from(rows: Sequence[dict[str, Any]]) -> int | None:
    """The number of observers from which on batches are always faster; None when they are not at the end."""
    result: int | None = None
    for row in reversed(rows):
        if row["ratio"] <= 1.0:
            break
        result = int(row["observers"])
    return result


def verdict(data: dict[str, Any]) -> str:
    first = data["batched_wins_from"]
    if first is None:
        return "batches do not win at the largest number of observers"
    return f"batches win from {first} observer{'s' if first > 1 else ''} on"


def _tell(data: dict[str, Any]) -> None:
    table = Table(title="batch_rl: steps/s of all observers together (median of the episodes)", caption=verdict(data))
    for heading in ("observers", "batched", "unbatched", "ratio"):
        table.add_column(heading, justify="right")
    for row in data["rows"]:
        speeds = (f"{row[name]['median_steps_per_s']:,.0f}" for name in ("batched", "unbatched"))
        table.add_row(str(row["observers"]), *speeds, f"{row['ratio']:.2f}")
    Console().print(table)
