"""batch_rl over the number of observers, batched and unbatched: from how many on do batches win?"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .plot import draw
from .rl import Settings

WORLD_SIZES = range(2, 12)
#: How often each variant is run with each world size.
ROUNDS = 2

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
        "rounds": ROUNDS,
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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure(run: Run, settings: Settings, world_size: int) -> dict[str, Any]:
    """One row: both variants with this many workers, in turn: other load of the machine affects both."""
    variants = {
        name: replace(settings, world_size=world_size, batch=name == "batched", show=False)
        for name in ("batched", "unbatched")
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, variant in variants.items():
            rates[name] += _rates(run, variant)
    row: dict[str, Any] = {"world_size": world_size, "observers": world_size - 1}
    for name in variants:
        row[name] = {"median_steps_per_s": median(rates[name]), "steps_per_s": rates[name]}
        print(f"{world_size - 1:2d} observers {name:9s} {median(rates[name]):8,.0f} steps/s", flush=True)
    row["ratio"] = median(rates["batched"]) / median(rates["unbatched"])
    return row


def _rates(run: Run, settings: Settings) -> list[float]:
    """Steps per second in each episode but the first one, which warms up (unless it is the only one)."""
    result = run(settings)
    if result is None:
        raise RuntimeError("a sweep needs the results of its runs; torchrun gives them to rank 0 only")
    steps = result["observers"] * settings.num_steps
    return [steps / seconds for seconds in result["seconds"][1:] or result["seconds"]]


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
