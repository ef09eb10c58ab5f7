"""What TLS costs: aiorpc by TLS against aiorpc by plain TCP without seals, between two processes over loopback."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import awaited, bulk_clients, clients, functions
from .bulk import LARGEST, LARGEST_LAG, MB, TCP_OPTIONS, TCP_WARM_UP, label
from .cohort import Cohort
from .stage import PAIR, Figures, Stage, column, progress
from .stats import Row

#: Bytes of a tensor, and how many times as long it may take.
LIMITS = {64 << 10: None, MB: 2.0, 16 * MB: None, LARGEST: 2.0}
SHORT_LIMIT = 1.3
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
        rows.append(_short(stage, blocking, "blocking no-op", clients.latency, functions.noop, seconds))
        rows.append(_short(stage, by_await, "awaited no-op", awaited.latency, functions.async_noop, seconds))
        for size, limit in LIMITS.items():
            progress(f"         {label(size)}")
            for cohort in blocking.values():
                stage.activate(cohort).run("client", bulk_clients.warm_up, size=size, **TCP_WARM_UP)
            for direction, function in (("send", functions.sink), ("echo", functions.echo)):
                share = {"function": function, "size": size, "seconds": seconds, "least": stage.plan.transfers}
                found = _in_turn(stage, blocking, bulk_clients.latency, **share)
                rows += _rows(found, f"{direction} p50", limit, label(size), size)
        share = {"size": LARGEST, "seconds": seconds, "least": stage.plan.transfers}
        lag = stage.alternate({"tls": partial(_run, stage, by_await["tls"], awaited.loop_lag, **share)})["tls"]
        rows += [
            Row("tls", f"largest lag, {end}", "ms", "lower", column(lag, end), note=label(LARGEST), limit=LARGEST_LAG)
            for end in ("caller", "callee")
        ]
    return rows


def _short(
    stage: Stage,
    cohorts: dict[str, Cohort],
    name: str,
    measure: Callable[..., Any],
    function: Callable[..., Any],
    seconds: float,
) -> Row:
    found = _in_turn(stage, cohorts, measure, function=function, seconds=seconds)
    return _rows(found, f"{name} p50", SHORT_LIMIT)[0]


def _in_turn(stage: Stage, cohorts: dict[str, Cohort], measure: Callable[..., Any], **share: Any) -> Any:
    cases: dict[str, Callable[[], Figures]] = {
        kind: partial(_run, stage, cohort, measure, **share) for kind, cohort in cohorts.items()
    }
    return stage.alternate(cases)


def _run(stage: Stage, cohort: Cohort, measure: Callable[..., Any], /, **share: Any) -> Figures:
    figures: Figures = stage.activate(cohort).run("client", measure, **share)
    return figures


def _rows(
    found: dict[str, list[Figures]], quantity: str, limit: float | None, note: str = "", payload: int | None = None
) -> list[Row]:
    """How many times as long, and what both took."""
    with_tls, without = column(found["tls"], "p50"), column(found["open"], "p50")
    times = tuple(a / b for a, b in zip(with_tls, without, strict=True))
    return [
        Row("tls", f"{quantity}, TLS : plain", "times", "lower", times, note=note, limit=limit),
        Row("tls", f"{quantity}, TLS", "µs", "lower", with_tls, note=note, payload=payload),
    ]
