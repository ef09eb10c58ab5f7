"""A call to all members of a group, against torch's loop of calls and against as many calls of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import group_clients
from .cohort import Cohort
from .sides import SideName
from .stage import Figures, Stage, column
from .stats import Row

MEMBERS = 32
#: How many times as fast as torch's loop, and as calls of our own.
TARGET, OWN_TARGET = 4.0, 1.5
#: To so many members, a tensor of so many bytes.
LARGE_MEMBERS, LARGE = 8, 64 << 20


def groups(stage: Stage) -> list[Row]:
    """Two worlds of a caller and its members. What a row compares is measured alike: the group by itself, as torch's
    loop is, and in turn with our own calls.
    """
    names = ["caller", *(f"member{number}" for number in range(MEMBERS))]
    theirs: SideName = "torch"
    with stage.start("aiorpc", names, "awaited") as ours, stage.start(theirs, names) as torch:
        cases: dict[str, Callable[[], Figures]] = {
            "aiorpc": partial(_run, stage, ours, group_clients.alone),
            "torch": partial(_run, stage, torch, group_clients.loop_of_calls),
            "in turn": partial(_run, stage, ours, group_clients.in_turn),
            "one by one": partial(_run, stage, ours, group_clients.one_by_one),
        }
        found = stage.alternate(cases)
        large = _run(stage, ours, group_clients.large_in_turn, LARGE_MEMBERS, size=LARGE)
    group, loop = column(found["aiorpc"], "group"), column(found["torch"], "p50")
    own = _share(column(found["in turn"], "group"), column(found["in turn"], "calls"))
    alone = _share(group, column(found["one by one"], "one by one"))
    thread = _share(column(found["in turn"], "group processor"), column(found["in turn"], "calls processor"))
    note = "no-op to all"
    way = "group call : as many calls"
    big = (large["group"] / large["calls"],)
    return [
        Row("groups", f"group of {MEMBERS}, p50", "µs", "lower", group, loop, TARGET, "torch: loop and wait_all"),
        Row("groups", f"{way} under way", "times", "lower", own, note=note, limit=1 / OWN_TARGET),
        Row("groups", f"{way} one after the other", "times", "lower", alone, note=note),
        Row("groups", f"{way} under way, processor time of the caller", "times", "lower", thread, note=note),
        Row("groups", f"{way} under way, {LARGE >> 20} MB to {LARGE_MEMBERS}", "times", "lower", big),
    ]


def _share(part: Sequence[float], whole: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(part, whole, strict=True))


def _run(stage: Stage, cohort: Cohort, measure: Callable[..., Any], members: int = MEMBERS, **more: Any) -> Figures:
    share = {"names": cohort.names[1 : members + 1], "seconds": stage.plan.seconds, **more}
    found: Figures = stage.activate(cohort).run("caller", measure, **share)
    return found
