"""What more workers cost: start-up time, one worker calling all in turn, all calling one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from . import clients
from .cohort import Cohort
from .sides import SideName
from .stage import Figures, Stage, column, progress
from .stats import BenchError, Row


def workers(stage: Stage) -> list[Row]:
    """Worlds of growing size: started in turn, the last of each side kept, then measured in turn."""
    rows: list[Row] = []
    for size in stage.plan.sizes:
        progress(f"         {size} workers")
        rows += _one_size(stage, size)
    return rows


def _one_size(stage: Stage, size: int) -> list[Row]:
    names = [f"worker{rank}" for rank in range(size)]
    starts: dict[str, list[float]] = {"aiorpc": [], "torch": []}
    for _ in range(stage.plan.cohort_rounds - 1):
        with stage.start("aiorpc", names) as ours:
            starts["aiorpc"].append(ours.start_up)
        theirs, _note = _start_torch(stage, names)
        if theirs is not None:
            with theirs:
                starts["torch"].append(theirs.start_up)
    with stage.start("aiorpc", names) as ours:
        theirs, note = _start_torch(stage, names)
        if theirs is None:
            return _rows(stage, {"aiorpc": ours}, starts, note)
        with theirs:
            return _rows(stage, {"aiorpc": ours, "torch": theirs}, starts, note)


def _start_torch(stage: Stage, names: Sequence[str]) -> tuple[Cohort | None, str]:
    """torch's cohort, or none and why: it is the one that may not cope with many workers."""
    try:
        return stage.start("torch", names), ""
    except BenchError as error:
        return None, f"torch did not start: {str(error).splitlines()[0]}"


def _rows(stage: Stage, cohorts: dict[SideName, Cohort], starts: dict[str, list[float]], note: str) -> list[Row]:
    size = len(cohorts["aiorpc"].names)
    for side, cohort in cohorts.items():
        starts[side].append(cohort.start_up)
    rows = [_row("start-up, fork to all joined", "s", starts, size, note)]
    for quantity, measure in (("one calls all in turn", _one_to_all), ("all call one", _all_to_one)):
        cases: dict[str, Callable[[], Figures]] = {
            side: partial(measure, stage, cohort) for side, cohort in cohorts.items()
        }
        costs = {side: column(found, "cost") for side, found in stage.alternate(cases).items()}
        rows.append(_row(f"{quantity}, per call", "µs", costs, size, note))
    return rows


def _one_to_all(stage: Stage, cohort: Cohort) -> Figures:
    others = cohort.names[1:]
    found: Figures = stage.activate(cohort).run(
        "worker0", clients.round_robin, names=others, seconds=stage.plan.seconds / 2
    )
    return found


def _all_to_one(stage: Stage, cohort: Cohort) -> Figures:
    stage.activate(cohort)
    callers = cohort.run_many(cohort.names[1:], clients.converge, to="worker0", seconds=stage.plan.seconds / 2)
    elapsed = max(each["end"] for each in callers) - min(each["begin"] for each in callers)
    return {"cost": elapsed / sum(each["calls"] for each in callers) * 1e6}


def _row(quantity: str, unit: str, found: Mapping[str, Sequence[float]], size: int, note: str) -> Row:
    ours, theirs = tuple(found["aiorpc"]), tuple(found.get("torch", ()))
    return Row("workers", quantity, unit, "lower", ours, theirs, None, note, size)
