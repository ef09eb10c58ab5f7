"""What workers cost that do nothing: processor time per worker while nobody calls."""

from __future__ import annotations

import time
from functools import partial

from . import clients
from .stage import PAIR, Figures, Key, Stage, column
from .stats import Row


def idle(stage: Stage) -> list[Row]:
    """Server and client, connected and quiet."""
    keys: tuple[Key, Key] = ("aiorpc", "torch")
    results = stage.alternate({key: partial(_share, stage, key) for key in keys})
    ours, theirs = (column(results[key], "share") for key in keys)
    return [Row("idle", "processor time per idle worker", "s/s", "lower", ours, theirs)]


def _share(stage: Stage, key: Key) -> Figures:
    cohort = stage.pair(key)
    cohort.run("client", clients.touch, names=["server"])
    before, begin = cohort.processor_seconds(), time.monotonic()
    time.sleep(stage.plan.idle)
    return {"share": (cohort.processor_seconds() - before) / (time.monotonic() - begin) / len(PAIR)}
