"""What workers cost that do nothing: processor time per worker while nobody calls."""

from __future__ import annotations

import time
from functools import partial

from . import clients
from .sides import CLIENT, PAIR, SERVER, SIDES, SideName
from .stage import Figures, Stage, column
from .stats import Row


def idle(stage: Stage) -> list[Row]:
    """Server and client, connected and quiet."""
    results = stage.alternate({side: partial(_share, stage, side) for side in SIDES})
    ours, theirs = (column(results[side], "share") for side in SIDES)
    return [Row("idle", "processor time per idle worker", "s/s", "lower", ours, theirs)]


def _share(stage: Stage, side: SideName) -> Figures:
    cohort = stage.pair(side)
    cohort.run(CLIENT, clients.touch, names=[SERVER])
    before, begin = cohort.processor_seconds(), time.monotonic()
    time.sleep(stage.plan.idle)
    return {"share": (cohort.processor_seconds() - before) / (time.monotonic() - begin) / len(PAIR)}
