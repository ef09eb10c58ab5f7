"""Calls one after another: no-ops and echoes, blocking and awaited, and calls beside a computing handler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import awaited, clients, functions
from .sides import SIDES
from .stage import Figures, Stage, column, style_of
from .stats import Row


def _case(stage: Stage, key: str, function: Callable[..., Any], elements: int | None = None) -> Callable[[], Figures]:
    measure = awaited.latency if style_of(key) == "awaited" else clients.latency
    return partial(stage.client, key, measure, function=function, seconds=stage.plan.seconds, elements=elements)


def noop_blocking(stage: Stage) -> list[Row]:
    """A Python function that does nothing, through a handler thread, by ``rpc_sync``."""
    results = stage.alternate({side: _case(stage, side, functions.noop) for side in SIDES})
    return [_row("noop_blocking", quantity, results, target) for quantity, target in (("p50", 3.0), ("p99", None))]


def noop_options(stage: Stage) -> list[Row]:
    """No-ops again, by the kind of the handler and the options that have to do with waiting."""
    if stage.null:
        return []
    cases = {
        "awaited, def handler": _case(stage, "aiorpc awaited", functions.noop),
        "awaited, async def handler, busy_wait=0": _case(stage, "aiorpc awaited, sleepy", functions.async_noop),
        "awaited, async def handler, dedicated_loop": _case(stage, "aiorpc dedicated", functions.async_noop),
        "blocking, def handler, busy_wait=0": _case(stage, "aiorpc sleepy", functions.noop),
        "blocking, async def handler": _case(stage, "aiorpc", functions.async_noop),
        "torch": _case(stage, "torch", functions.noop),
    }
    results = stage.alternate(cases)
    theirs = results.pop("torch")
    return [
        _row("noop_options", "p50", {"aiorpc": ours, "torch": theirs}, None, note) for note, ours in results.items()
    ]


def noop_awaited(stage: Stage) -> list[Row]:
    """An awaited call of an ``async def`` that does nothing, against torch's ``rpc_sync`` of a ``def``."""
    if stage.null:
        return []
    cases = {
        "aiorpc": _case(stage, "aiorpc awaited", functions.async_noop),
        "torch": _case(stage, "torch", functions.noop),
        "def": _case(stage, "aiorpc awaited", functions.noop),
    }
    results = stage.alternate(cases)
    threaded = {"aiorpc": results["def"], "torch": results["torch"]}
    return [
        _row("noop_awaited", "p50", results, 4.0, "async def handler"),
        _row("noop_awaited", "p99", results, None, "async def handler"),
        _row("noop_awaited", "p50", threaded, None, "def handler"),
    ]


def tensor_2x2(stage: Stage) -> list[Row]:
    """A 2x2 tensor sent and sent back, blocking and awaited."""
    cases: dict[str, Callable[[], Figures]] = {side: _case(stage, side, functions.echo, 4) for side in SIDES}
    if not stage.null:
        cases["awaited"] = _case(stage, "aiorpc awaited", functions.async_echo, 4)
    results = stage.alternate(cases)
    rows = [_row("tensor_2x2", "p50", results, 3.0, "echo, blocking")]
    if not stage.null:
        by_await = {"aiorpc": results["awaited"], "torch": results["torch"]}
        rows.append(_row("tensor_2x2", "p50", by_await, 4.0, "echo, awaited, async def handler"))
    return rows


def beside_compute(stage: Stage) -> list[Row]:
    """Blocking no-ops while another handler thread of the server computes in pure Python without a pause."""
    keys = SIDES if stage.null else (*SIDES, "aiorpc patient")
    measure = clients.beside_compute
    results = stage.alternate({key: partial(stage.client, key, measure, seconds=stage.plan.beside) for key in keys})
    rows = _beside(results, "")
    if "aiorpc patient" in results:
        patient = {"aiorpc": results["aiorpc patient"], "torch": results["torch"]}
        rows += _beside(patient, "aiorpc with switch_interval=None")
    return rows


def _beside(results: dict[str, list[Figures]], note: str) -> list[Row]:
    rows = [_row("beside_compute", quantity, results, None, note) for quantity in ("p50", "p99")]
    ours, theirs = column(results["aiorpc"], "turns"), column(results["torch"], "turns")
    rows.append(Row("beside_compute", "what the handler computes", "turns/s", "higher", ours, theirs, None, note))
    return rows


def _row(name: str, quantity: str, results: dict[str, list[Figures]], target: float | None, note: str = "") -> Row:
    ours, theirs = column(results["aiorpc"], quantity), column(results["torch"], quantity)
    return Row(name, quantity, "µs", "lower", ours, theirs, target, note)
