"""Large tensors: over sizes, the first of each, by TCP alone, several at once; and what they do to loops and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from . import awaited, bulk_clients, functions
from .cohort import Cohort
from .sides import CLIENT, PAIR, SIDES, SideName
from .stage import Figures, Stage, column, progress
from .stats import Row

KB, MB = 1 << 10, 1 << 20
Places = Mapping[SideName, Callable[[], Cohort]]

#: Bytes of a tensor, and how many times faster than torch it must be sent and echoed.
TARGETS: dict[int, float | None] = {4 * KB: None, 64 * KB: 3.0, MB: 4.0, 16 * MB: 3.0, 256 * MB: 8.0}
LARGEST = 256 * MB
SHORT = MB  # up to here waking threads takes a good part of the time
SHORT_WARM_UP = {"seconds": 0.25, "least": 8}
FIRST_SIZES = (MB, 16 * MB, 256 * MB)
TCP_SIZES = (64 * KB, MB, 16 * MB, 256 * MB)
TCP_OPTIONS: dict[SideName, dict[str, Any]] = {
    "aiorpc": {"transports": ("tcp",), "shared_memory": 0},
    "torch": {"_transports": ["uv"], "_channels": ["basic"]},
}
TCP_WARM_UP = {"seconds": 0.1, "least": 2}  # nothing to be warmed but sockets and the allocator
DIRECTIONS = (("send", functions.sink), ("echo", functions.echo))

LARGEST_LAG = 20.0  # milliseconds
CONCURRENT, CONCURRENT_SIZE = 4, 64 * MB
BURST, BURST_SIZE = 8, 32 * MB


def label(size: int) -> str:
    """A number of bytes as it is said."""
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def tensors(stage: Stage) -> list[Row]:
    """One tensor after another, blocking: sent with a tiny reply, and echoed; everything warm."""
    rows = _short_transfers(stage)
    places: Places = {side: partial(stage.pair, side) for side in SIDES}
    for size, target in TARGETS.items():
        if size > SHORT:
            rounds = stage.plan.large_rounds if size == LARGEST else stage.plan.rounds
            rows += _rows("tensors", _transfers(stage, places, size, rounds), size, target)
    return rows


def _short_transfers(stage: Stage) -> list[Row]:
    """New processes for each round: which threads share a core is settled when they start, and decides short calls."""
    sizes = [size for size in TARGETS if size <= SHORT]
    results: dict[int, dict[str, list[Figures]]] = {size: {} for size in sizes}
    for _ in stage.rounds(stage.plan.rounds):
        with contextlib.ExitStack() as stack:
            places = {side: partial(stage.activate, stack.enter_context(stage.start(side, PAIR))) for side in SIDES}
            for size in sizes:
                for case, figures in _transfers(stage, places, size, 1, first=0, **SHORT_WARM_UP).items():
                    results[size].setdefault(case, []).extend(figures)
    return [row for size in sizes for row in _rows("tensors", results[size], size, TARGETS[size])]


def tcp_only(stage: Stage) -> list[Row]:
    """The same with nothing but TCP between the two, as between hosts (over the loopback interface)."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        places: dict[SideName, Callable[[], Cohort]] = {}
        for side in SIDES:
            pair = stage.start(side, PAIR, options=TCP_OPTIONS[stage.side(side)])
            places[side] = partial(stage.activate, stack.enter_context(pair))
        for size in TCP_SIZES:
            found = _transfers(stage, places, size, stage.plan.tcp_rounds, first=0, **TCP_WARM_UP)
            rows += _rows("tcp_only", found, size)
    return rows


def _transfers(
    stage: Stage, places: Places, size: int, rounds: int, *, first: int = 1, **warm_up: Any
) -> dict[str, list[Figures]]:
    """Sends and echoes of that size, by direction and side. first: rounds that do not count."""
    progress(f"         {label(size)}")
    for place in places.values():
        place().run(CLIENT, bulk_clients.warm_up, size=size, **warm_up)
    cases: dict[str, Callable[[], Figures]] = {}
    for direction, function in DIRECTIONS:
        for side, place in places.items():
            share = {"function": function, "size": size, **_box(stage)}
            cases[f"{direction} {side}"] = partial(_in_client, place, bulk_clients.latency, **share)
    return stage.alternate(cases, rounds, first)


def _rows(name: str, results: dict[str, list[Figures]], size: int, target: float | None = None) -> list[Row]:
    return [
        Row(name, f"{direction} p50", "µs", "lower", ours, theirs, target, label(size), payload=size)
        for direction, _ in DIRECTIONS
        for ours, theirs in [[column(results[f"{direction} {side}"], "p50") for side in SIDES]]
    ]


def _box(stage: Stage) -> dict[str, Any]:
    """How long a case may take: half of what calls without tensors get, or so many calls."""
    return {"seconds": stage.plan.seconds / 2, "least": stage.plan.transfers}


def _in_client(place: Callable[[], Cohort], measure: Callable[..., Any], /, **kwargs: Any) -> Figures:
    found: Figures = place().run(CLIENT, measure, **kwargs)
    return found


def first_transfer(stage: Stage) -> list[Row]:
    """The first tensor of each size between two new processes, small ones first; nothing is warm but the connection."""
    results = stage.alternate_anew(
        {side: partial(stage.new_client, side, bulk_clients.first_sends, sizes=FIRST_SIZES) for side in SIDES},
        stage.plan.first_rounds,
    )
    rows: list[Row] = []
    for size in FIRST_SIZES:
        ours, theirs = (column(results[side], str(size)) for side in SIDES)
        rows.append(Row("first_transfer", "send", "µs", "lower", ours, theirs, 1.0, label(size), payload=size))
    return rows


def concurrent(stage: Stage) -> list[Row]:
    """Several large tensors under way at once: bytes per second of all together."""
    results = _in_pairs(stage, bulk_clients.concurrent, size=CONCURRENT_SIZE, ways=CONCURRENT)
    ours, theirs = (column(results[side], "rate") for side in SIDES)
    return [Row("concurrent", "sent", "GB/s", "higher", ours, theirs, None, f"{CONCURRENT} x {label(CONCURRENT_SIZE)}")]


def state_dict(stage: Stage) -> list[Row]:
    """The weights of a ResNet-50, 320 tensors of 102 MB in all, as one argument."""
    results = _in_pairs(stage, bulk_clients.state_dict)
    ours, theirs = (column(results[side], "rate") for side in SIDES)
    return [Row("state_dict", "sent", "1/s", "higher", ours, theirs, None, "ResNet-50, 320 tensors, 102 MB")]


def _in_pairs(stage: Stage, function: Callable[..., Any], **kwargs: Any) -> dict[str, list[Figures]]:
    return stage.alternate({side: partial(stage.client, side, function, **kwargs, **_box(stage)) for side in SIDES})


def loop_lag(stage: Stage) -> list[Row]:
    """How late the event loops of both ends run while a coroutine sends large tensors. torch has no loop."""
    if stage.null:
        return []
    warm = stage.alternate(
        {"aiorpc": partial(stage.client, "aiorpc awaited", awaited.loop_lag, size=LARGEST, **_box(stage))}
    )
    once = {"size": LARGEST, "seconds": 0.0, "least": 1, "warm_up": 0}
    anew = partial(stage.new_client, "aiorpc", awaited.loop_lag, style="awaited", **once)
    first = stage.alternate_anew({"aiorpc": anew}, stage.plan.first_rounds)
    note = label(LARGEST)
    return [
        _lag_row(warm["aiorpc"], "caller", note),
        _lag_row(warm["aiorpc"], "callee", note),
        _lag_row(warm["aiorpc"], "alone", "nothing sent", limit=None),
        _lag_row(first["aiorpc"], "caller", f"first {note}"),
        _lag_row(first["aiorpc"], "callee", f"first {note}"),
    ]


def _lag_row(results: Sequence[Figures], end: str, note: str, limit: float | None = LARGEST_LAG) -> Row:
    quantity = f"largest, {'caller' if end == 'alone' else end}"
    return Row("loop_lag", quantity, "ms", "lower", column(results, end), note=note, limit=limit)


def burst(stage: Stage) -> list[Row]:
    """Memory of the arena before, during and after a burst of large tensors, from new processes each time."""
    if stage.null:
        return []
    anew = partial(stage.new_client, "aiorpc", bulk_clients.burst, size=BURST_SIZE, ways=BURST)
    found = stage.alternate_anew({"aiorpc": anew})["aiorpc"]
    note = f"{BURST} x {label(BURST_SIZE)} at once"
    sizes = [
        Row("burst", f"arena, {moment}", "MB", "lower", column(found, moment), note=note)
        for moment in ("new", "before", "during", "after")
    ]
    used = Row("burst", "arena's pages in memory, after", "MB", "lower", column(found, "pages"), note=note)
    most = Row("burst", "lent, most", "MB", "lower", column(found, "lent most"), note=note)
    left = Row("burst", "lent, after", "bytes", "lower", column(found, "lent after"), note=note, limit=0.0)
    return [*sizes, used, most, left]
