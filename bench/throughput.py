"""Calls per second with many under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import awaited, clients, functions
from .stage import Figures, Stage, column
from .stats import Row

WINDOW = 512


def in_flight(stage: Stage) -> list[Row]:
    """512 calls of a no-op always under way: from a script with futures on both sides, and by 512 coroutines."""
    share = {"seconds": stage.plan.seconds, "window": WINDOW}
    cases: dict[str, Callable[[], Figures]] = {
        key: partial(stage.client, key, clients.in_flight, function=functions.noop, **share)
        for key in ("aiorpc", "torch")
    }
    if not stage.null:
        for label, function in (("coroutines", functions.async_noop), ("coroutines, def", functions.noop)):
            cases[label] = partial(stage.client, "aiorpc awaited", awaited.in_flight, function=function, **share)
    results = stage.alternate(cases)
    theirs = column(results["torch"], "rate")
    rows = [_row(column(results["aiorpc"], "rate"), theirs, 8.0, "script, rpc_async and wait")]
    if not stage.null:
        rows.append(_row(column(results["coroutines"], "rate"), theirs, 8.0, "512 coroutines, async def handler"))
        rows.append(_row(column(results["coroutines, def"], "rate"), theirs, None, "512 coroutines, def handler"))
    return rows


def _row(ours: tuple[float, ...], theirs: tuple[float, ...], target: float | None, note: str) -> Row:
    return Row("inflight512", "calls/s", "1/s", "higher", ours, theirs, target, note)
