"""What more workers cost: start-up time, calls of one to all and of all to one, memory of each; and how flat it is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from . import clients, functions
from .cohort import JOIN_SECONDS, Cohort, process_of
from .rank import settle
from .sides import SIDES, SideName
from .stage import Figures, Stage, column, progress
from .stats import BenchError, Better, Row

MB = 1 << 20


@dataclass(frozen=True)
class Curve:
    """A figure over the number of workers. of_all: it is of all of them together, and flat if it grows as they do."""

    quantity: str
    unit: str
    better: Better = "lower"
    of_all: bool = False


START_UP, LATENCY, RATE, MEMORY = CURVES = (
    Curve("start-up, fork to all joined", "s", of_all=True),
    Curve("one calls all in turn, p50", "µs"),
    Curve("all call one, calls/s", "1/s", "higher"),
    Curve("memory that a worker adds", "MB"),
)
#: By curve and side, the figures of one size.
Found = dict[Curve, dict[SideName, tuple[float, ...]]]


def workers(stage: Stage) -> list[Row]:
    """Worlds of growing size: started in turn, the last of each side kept, then measured in turn."""
    bare = _bare_process()
    found: dict[int, Found] = {}
    notes: dict[int, str] = {}
    for size in stage.plan.sizes:
        progress(f"         {size} workers")
        found[size], notes[size] = _one_size(stage, size, bare)
    rows = [_row(curve, size, found[size][curve], notes[size]) for size in found for curve in CURVES]
    return rows + flatness(found)


def flatness(found: Mapping[int, Found]) -> list[Row]:
    """For each curve of aiorpc's, how many times its first figure the last one is, round by round: 1 is flat."""
    first, last = min(found), max(found)
    rows = []
    for curve in CURVES:
        growth = last / first if curve.of_all else 1.0
        pairs = zip(found[first][curve]["aiorpc"], found[last][curve]["aiorpc"], strict=False)
        times = tuple(end / begin / growth for begin, end in pairs)
        share = ", for each worker" if curve.of_all else ""
        rows.append(Row("workers", f"{curve.quantity}{share}, {last} workers by {first}", "x", curve.better, times))
    return rows


def _one_size(stage: Stage, size: int, bare: int) -> tuple[Found, str]:
    """bare: bytes of a process without a worker. Gives also why torch has no figures, where it has none."""
    names = [f"worker{rank}" for rank in range(size)]
    starts: dict[SideName, list[float]] = {side: [] for side in SIDES}
    for _ in stage.rounds(stage.plan.cohort_rounds, first=-1):
        with stage.start("aiorpc", names) as ours:
            starts["aiorpc"].append(ours.start_up)
        theirs, _note = _start_torch(stage, names)
        if theirs is not None:
            with theirs:
                starts["torch"].append(theirs.start_up)
    with stage.start("aiorpc", names) as ours:
        theirs, note = _start_torch(stage, names)
        if theirs is None:
            return _measured(stage, {"aiorpc": ours}, starts, bare), note
        with theirs:
            return _measured(stage, {"aiorpc": ours, "torch": theirs}, starts, bare), note


def _start_torch(stage: Stage, names: Sequence[str]) -> tuple[Cohort | None, str]:
    """torch's cohort, or none and why: it is the one that may not cope with many workers."""
    try:
        return stage.start("torch", names), ""
    except BenchError as error:
        return None, f"torch did not start: {str(error).splitlines()[0]}"


def _measured(
    stage: Stage, cohorts: Mapping[SideName, Cohort], starts: Mapping[SideName, list[float]], bare: int
) -> Found:
    found: Found = {curve: dict.fromkeys(SIDES, ()) for curve in CURVES}
    for side, cohort in cohorts.items():
        found[START_UP][side] = (*starts[side], cohort.start_up)
    for curve, measure in ((LATENCY, _one_to_all), (RATE, _all_to_one)):
        results = stage.alternate({side: partial(measure, stage, cohort) for side, cohort in cohorts.items()})
        for side in cohorts:
            found[curve][side] = column(results[side], "figure")
    for side, cohort in cohorts.items():  # by now all are connected with the first
        sizes = stage.activate(cohort).run_many(cohort.names, clients.private_bytes)
        found[MEMORY][side] = ((statistics.median(sizes) - bare) / MB,)
    return found


def _one_to_all(stage: Stage, cohort: Cohort) -> Figures:
    found: Figures = stage.activate(cohort).run(
        "worker0", clients.round_robin, names=cohort.names[1:], seconds=stage.plan.seconds / 2
    )
    return {"figure": found["p50"]}


def _all_to_one(stage: Stage, cohort: Cohort) -> Figures:
    stage.activate(cohort)
    callers = cohort.run_many(cohort.names[1:], clients.converge, to="worker0", seconds=stage.plan.seconds / 2)
    elapsed = max(each["end"] for each in callers) - min(each["begin"] for each in callers)
    return {"figure": sum(each["calls"] for each in callers) / elapsed}


def _bare_process() -> int:
    """What a process of the same fork server has for itself that is no worker, but was treated like one."""
    with process_of(_tell_size, "process without a worker") as pipe:
        if not pipe.poll(JOIN_SECONDS):
            raise BenchError("a process without a worker did not say how large it is")
        size: int = pipe.recv()
        return size


def _tell_size(pipe: Connection) -> None:
    settle(None)
    pipe.send(functions.private_bytes())


def _row(curve: Curve, size: int, found: Mapping[SideName, tuple[float, ...]], note: str) -> Row:
    return Row("workers", curve.quantity, curve.unit, curve.better, found["aiorpc"], found["torch"], None, note, size)
