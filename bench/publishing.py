"""Weights for many readers of one host: time, memory, and what it costs the one who publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import publishing_clients as clients
from . import ray_side
from .sides import SIDES, SideName
from .stage import Figures, Stage, column
from .stats import Row

MB = 1 << 20
SIZE, SMALL_SIZE = 256 * MB, 20 * MB
READERS = 8
TIMES, TORCH_TIMES = 5, 2
PERIOD, VERSIONS = 0.1, 20
LARGEST_MEMORY, LARGEST_GROWTH, LARGEST_COST = 1.15, 1.5, 2.0
SPEEDUP = 8.0
#: Ray copies tensors for each reader unless it is asked not to; then what `get` returns must not be written to, and
#: Ray copies as often as aiorpc does: that ratio is shown, and the wanted one is against Ray as it is by itself.
RAY_WAYS = {"Ray": {}, "Ray, zero copies": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}
RAY_SPEEDUPS = {"Ray": 4.0}


def publish(stage: Stage) -> list[Row]:
    """Fresh cohorts in every round, the sides in turn."""
    if stage.null:
        return []
    cases: dict[str, Callable[[], Figures]] = {side: partial(_send, stage, side, READERS) for side in SIDES}
    ways = RAY_WAYS if ray_side.installed("its side") else {}
    many = stage.alternate_anew(cases | {way: partial(_ray, stage, set_) for way, set_ in ways.items()})
    one = stage.alternate_anew({"one": partial(_send, stage, "aiorpc", 1)})["one"]
    rest = stage.alternate_anew({"rest": partial(_rest, stage)})["rest"]
    note = f"{SIZE // MB} MB"
    ours, theirs = (column(many[side], "ms") for side in SIDES)
    alone = column(one, "ms")
    growth = tuple(together / single for together, single in zip(ours, alone, strict=False))
    paced = f"{SMALL_SIZE // MB} MB every {1e3 * PERIOD:g} ms"
    cost = column(rest, "cost")
    last = f"until the last of {READERS} readers has it"
    against = [
        Row("publish", last, "ms", "lower", ours, column(many[way], "ms"), RAY_SPEEDUPS.get(way), note, against=way)
        for way in ways
    ]
    times = partial(Row, "publish", unit="times", better="lower")
    return [
        Row("publish", last, "ms", "lower", ours, theirs, SPEEDUP, note),
        *against,
        Row("publish", "until one reader has it", "ms", "lower", alone, note=note),
        times(f"{READERS} readers against one", aiorpc=growth, note=note, limit=LARGEST_GROWTH),
        times("memory of all readers, by one copy", aiorpc=column(rest, "memory"), note=note, limit=LARGEST_MEMORY),
        times("processor time of the publisher, by a copy", aiorpc=cost, note=paced, limit=LARGEST_COST),
    ]


def _send(stage: Stage, side: SideName, count: int) -> Figures:
    ours = side == "aiorpc"
    function: Callable[..., Any] = clients.publish if ours else clients.send
    with stage.start(side, ["publisher", *_readers(count)]) as cohort:
        readers = cohort.names[1:]
        if ours:
            cohort.run("publisher", clients.begin, readers=readers)
        times = TIMES if ours else TORCH_TIMES
        found = cohort.run("publisher", function, readers=readers, size=SIZE, times=times)
        if ours:
            cohort.run("publisher", clients.end, readers=readers)
    return {"ms": found}


def _ray(stage: Stage, environment: dict[str, str]) -> Figures:
    stage.pause()
    return ray_side.run("publish", environment=environment, size=SIZE, readers=READERS, times=TIMES)


def _rest(stage: Stage) -> Figures:
    with stage.start("aiorpc", ["publisher", *_readers(READERS)]) as cohort:
        run: Callable[..., Any] = partial(cohort.run, "publisher", readers=cohort.names[1:])
        run(clients.begin)
        memory = run(clients.memory, size=SIZE)
        cost = run(clients.pace, size=SMALL_SIZE, period=PERIOD, times=VERSIONS)
        run(clients.end)
    return {"memory": memory, "cost": cost}


def _readers(count: int) -> Sequence[str]:
    return [f"reader{number}" for number in range(count)]
