"""Weights for readers on several hosts, against one transfer of the same bytes over a link as fast as theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import host_clients
from . import publishing_clients as clients
from .hosts import NoHostsError, joined
from .stage import Figures, Stage, column, progress
from .stats import Row

MB = 1 << 20
#: With links of so many Mbit/s: so slow that two cores can do what all hosts have to.
HOSTS, RATE, SIZE = 4, 200.0, 32 * MB
LARGEST_SLOWDOWN = 1.3


def publish(stage: Stage) -> list[Row]:
    """One worker for each host; all ways in turn. No rows, and a line on stderr, where there can be no such hosts."""
    if stage.null:
        return []
    try:
        found = _measure(stage)
    except NoHostsError as error:
        progress(f"without rows of several hosts, which need root and network namespaces: {error}")
        return []
    bare, published, called = (column(found[way], "ms") for way in ("bare", "published", "called"))
    last = f"{HOSTS} hosts, until the last has it"
    slowdown, against_call = (tuple(a / b for a, b in zip(published, other, strict=True)) for other in (bare, called))
    note = f"{SIZE // MB} MB, {RATE:g} Mbit/s"
    times = partial(Row, "publish", unit="times", better="lower", note=note)
    return [
        Row("publish", last, "ms", "lower", published, note=note),
        times(f"{last}, by one transfer on a bare socket", aiorpc=slowdown, limit=LARGEST_SLOWDOWN),
        times(f"{last}, by one call to one of them", aiorpc=against_call),
    ]


def _measure(stage: Stage) -> dict[str, list[Figures]]:
    names = ["publisher", *(f"reader{number}" for number in range(1, HOSTS))]
    options = {"require_secret": False}  # nobody else is on these hosts
    with joined(HOSTS, RATE) as hosts, stage.start("aiorpc", names, options=options, hosts=hosts) as cohort:
        run: Callable[..., Any] = partial(cohort.run, "publisher", readers=names[1:])
        ways: dict[str, Callable[[], float]] = {
            "bare": partial(run, host_clients.bare, address=hosts.all[1].address, size=SIZE),
            "published": partial(run, clients.publish, size=SIZE, times=1),
            "called": partial(run, host_clients.call, size=SIZE),
        }
        run(clients.begin)
        found = stage.alternate({name: partial(_figures, way) for name, way in ways.items()})
        run(clients.end)
    return found


def _figures(way: Callable[[], float]) -> Figures:
    return {"ms": way()}
