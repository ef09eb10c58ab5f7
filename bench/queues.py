"""A queue: small items, and items of 1 MB against a bare send; producer, owner and consumer are three processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from . import queue_clients, ray_side
from .cohort import Cohort
from .stage import Figures, Stage, column
from .stats import Row

NAMES = ("owner", "producer", "consumer")
UNDER_WAY = 256  # small items at a time
LARGE = 16  # items of 1 MB at a time
SPEEDUP = 10.0  # against Ray's Queue
LONGER = 1.5  # an item of 1 MB, at most, than a bare send


def queue(stage: Stage) -> list[Row]:
    """Items a second, small ones also of Ray. Nothing of torch's is compared: it has no queue."""
    if stage.null:
        return []
    with_ray = ray_side.installed("its Queue")
    with stage.start("aiorpc", NAMES, "awaited") as cohort:
        cohort.run("owner", queue_clients.own, small=4 * UNDER_WAY, large=2 * LARGE)
        cases: dict[str, Callable[[], Figures]] = {
            "one": partial(_both, stage, cohort, queue_clients.small, under_way=1),
            "many": partial(_both, stage, cohort, queue_clients.small, under_way=UNDER_WAY),
            "copied": partial(_both, stage, cohort, queue_clients.large, under_way=LARGE, copy=True),
            "kept": partial(_both, stage, cohort, queue_clients.large, under_way=LARGE, copy=False),
            "bare": partial(_bare, stage, cohort, under_way=LARGE),
        }
        if with_ray:
            cases["ray"] = partial(_ray, stage, under_way=UNDER_WAY)
        results = stage.alternate(cases)
    theirs = results.pop("ray", [])
    rate = {label: column(figures, "rate") for label, figures in results.items()}
    rows = [
        _small("small items, one at a time", rate["one"], column(theirs, "one")),
        _small(f"small items, {UNDER_WAY} under way", rate["many"], column(theirs, "many")),
        Row("queue", f"bare sends of 1 MB, {LARGE} under way", "1/s", "higher", rate["bare"]),
    ]
    for case, note in (("copied", "copied as it is put"), ("kept", "copy=False")):
        times = tuple(bare / queued for bare, queued in zip(rate["bare"], rate[case], strict=True))
        rows.append(Row("queue", f"items of 1 MB, {LARGE} under way", "1/s", "higher", rate[case], note=note))
        same = "the same, times as long as a bare send"
        rows.append(Row("queue", same, "x", "lower", times, note=note, limit=LONGER))
    return rows


def _small(quantity: str, ours: tuple[float, ...], theirs: tuple[float, ...]) -> Row:
    row = Row("queue", quantity, "1/s", "higher", ours)
    return replace(row, torch=theirs, target=SPEEDUP, against="Ray's Queue") if theirs else row


def _ray(stage: Stage, under_way: int) -> Figures:
    stage.pause()
    return ray_side.run("queue", seconds=stage.plan.seconds, under_way=under_way)


def _both(stage: Stage, cohort: Cohort, function: Callable[..., Any], under_way: int, **options: Any) -> Figures:
    stage.activate(cohort)
    _, found = cohort.run_many(
        ["producer", "consumer"], function, seconds=stage.plan.seconds, under_way=under_way, **options
    )
    figures: Figures = found
    return figures


def _bare(stage: Stage, cohort: Cohort, under_way: int) -> Figures:
    figures: Figures = stage.activate(cohort).run(
        "producer", queue_clients.send, seconds=stage.plan.seconds, under_way=under_way
    )
    return figures
