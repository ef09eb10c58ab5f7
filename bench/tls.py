"""What TLS costs: aiorpc by TLS against aiorpc by plain TCP without seals, between two processes over loopback.

Times of calls depend on whether both ends have a core to themselves. What does not, or less so, stands beside them: the
processor time of both processes together, and the functions of Python that a short call runs.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import awaited, bulk_clients, clients, counting, functions
from .bulk import LARGEST, LARGEST_LAG, MB, TCP_OPTIONS, TCP_WARM_UP, label
from .cohort import Cohort
from .sides import CLIENT, PAIR, Style
from .stage import Figures, Stage, column, progress
from .stats import Row

#: Bytes of a tensor, and how many times as long it may take.
LIMITS = {64 << 10: None, MB: 2.0, 16 * MB: None, LARGEST: 2.0}
SHORT_LIMIT = 1.3
TICK = 0.01  # seconds, in which the system counts processor time
OPEN: dict[str, Any] = {**TCP_OPTIONS["aiorpc"], "authenticate_frames": False}


@contextlib.contextmanager
def _files() -> Iterator[dict[str, Any]]:
    """Options with a certificate for both workers."""
    from aiorpc import Tls
    from aiorpc.commands.certificates import make

    with tempfile.TemporaryDirectory(prefix="bench-tls-") as folder:
        make(Path(folder), [*PAIR])
        # One certificate for both: what is measured does not depend on names.
        tls = Tls(f"{folder}/server.pem", f"{folder}/server.key", f"{folder}/ca.pem", verify_names=False)
        yield {**OPEN, "tls": tls}


def tls(stage: Stage) -> list[Row]:
    """Both kinds in turn, so that what disturbs the machine disturbs both; each round is one ratio."""
    if stage.null:
        return []
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        kinds = {"tls": stack.enter_context(_files()), "open": OPEN}
        blocking, by_await = (
            {kind: stack.enter_context(stage.start("aiorpc", PAIR, style, each)) for kind, each in kinds.items()}
            for style in ("blocking", "awaited")
        )
        seconds = stage.plan.seconds / 2
        rows += _short(stage, blocking, "blocking no-op", clients.latency, functions.noop, seconds)
        rows += _short(stage, by_await, "awaited no-op", awaited.latency, functions.async_noop, seconds)
        for size, limit in LIMITS.items():
            progress(f"         {label(size)}")
            for cohort in blocking.values():
                stage.activate(cohort).run(CLIENT, bulk_clients.warm_up, size=size, **TCP_WARM_UP)
            for direction, function in (("send", functions.sink), ("echo", functions.echo)):
                share = {"function": function, "size": size, "seconds": seconds, "least": stage.plan.transfers}
                found = _in_turn(stage, blocking, bulk_clients.latency, **share)
                rows += _rows(found, direction, limit, label(size), size)
        share = {"size": LARGEST, "seconds": seconds, "least": stage.plan.transfers}
        lag = _in_turn(stage, by_await, awaited.loop_lag, **share)
        for end in ("caller", "callee"):
            for kind, limit in (("tls", LARGEST_LAG), ("open", None)):
                name = f"largest lag, {end}, {'TLS' if kind == 'tls' else 'plain'}"
                rows.append(Row("tls", name, "ms", "lower", column(lag[kind], end), note=label(LARGEST), limit=limit))
        rows += [_functions(stage, style, kinds) for style in ("awaited", "blocking")]
    return rows


def _functions(stage: Stage, style: Style, kinds: dict[str, dict[str, Any]]) -> Row:
    """How many functions of Python a no-op runs with TLS that it does not run without."""
    found = {}
    for kind, options in kinds.items():
        with counting.pair(stage, style, options) as cohort:
            found[kind] = counting.totals(cohort, counting.choose(style), stage.plan)
    more = tuple(round(a - b, 2) for a, b in zip(found["tls"], found["open"], strict=True))
    return Row("tls", f"{style} no-op, TLS - plain", "functions", "lower", more)


def _short(
    stage: Stage,
    cohorts: dict[str, Cohort],
    name: str,
    measure: Callable[..., Any],
    function: Callable[..., Any],
    seconds: float,
) -> list[Row]:
    return _rows(_in_turn(stage, cohorts, measure, function=function, seconds=seconds), name, SHORT_LIMIT)


def _in_turn(stage: Stage, cohorts: dict[str, Cohort], measure: Callable[..., Any], **share: Any) -> Any:
    cases: dict[str, Callable[[], Figures]] = {
        kind: partial(_run, stage, cohort, measure, **share) for kind, cohort in cohorts.items()
    }
    return stage.alternate(cases)


def _run(stage: Stage, cohort: Cohort, measure: Callable[..., Any], /, **share: Any) -> Figures:
    before = stage.activate(cohort).processor_seconds()
    figures: Figures = cohort.run(CLIENT, measure, **share)
    # The system counts it in ticks: at least one, as it is divided by. One call before the samples is no sample.
    used = max(cohort.processor_seconds() - before, TICK)
    return {**figures, "processor": used * 1e6 / (figures["samples"] + bulk_clients.AGAIN_CALLS)}


def _rows(
    found: dict[str, list[Figures]], name: str, limit: float | None, note: str = "", payload: int | None = None
) -> list[Row]:
    """How many times as long, in how many times the processor time of both ends; and how long with TLS."""
    rows = []
    for quantity, most in (("p50", limit), ("processor", None)):
        with_tls, without = column(found["tls"], quantity), column(found["open"], quantity)
        times = tuple(a / b for a, b in zip(with_tls, without, strict=True))
        rows.append(Row("tls", f"{name} {quantity}, TLS : plain", "times", "lower", times, note=note, limit=most))
    with_tls = column(found["tls"], "p50")
    return [*rows, Row("tls", f"{name} p50, TLS", "µs", "lower", with_tls, note=note, payload=payload)]
