"""Resident memory per connection and per pending call, in worlds made for it so that nothing else is counted."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import clients, functions
from .cohort import Cohort
from .sides import CLIENT, PAIR, SERVER, SIDES, RpcModule, SideName
from .stage import Figures, Stage, column
from .stats import BenchError, Row

CONNECTIONS = 8
ENDS = ("caller", "callee")
WARM_UP_CALLS = 200
SETTLE_SECONDS = 30.0


def memory(stage: Stage) -> list[Row]:
    """Fresh cohorts in every round, the sides in turn."""
    connections = stage.alternate_anew({side: partial(_connections, stage, side) for side in SIDES})
    pending = stage.alternate_anew(_pending_cases(stage))
    note = "callee returned an unset Future"
    return [
        *(_row(f"per connection, {end}", connections, end) for end in ENDS),
        *(_row(f"per pending call, {end}", pending, end, note) for end in ENDS),
        *_coroutine_rows(pending),
    ]


def _pending_cases(stage: Stage) -> dict[str, Callable[[], Figures]]:
    cases: dict[str, Callable[[], Figures]] = {
        side: partial(_pending, stage, side, f"bench.{stage.side(side)}_functions:hold", stage.plan.pending_calls)
        for side in SIDES
    }
    if not stage.null:
        awaiting = "bench.functions:wait_for_release"
        cases["coroutine"] = partial(_pending, stage, "aiorpc", awaiting, stage.plan.pending_calls)
    return cases


def _coroutine_rows(pending: dict[str, list[Figures]]) -> list[Row]:
    if "coroutine" not in pending:
        return []
    only_ours = {"aiorpc": pending["coroutine"], "torch": []}
    note = "async def handler that awaits an event"
    return [_row(f"per pending call, {end}", only_ours, end, note) for end in ENDS]


def _row(quantity: str, results: dict[str, list[Figures]], end: str, note: str = "") -> Row:
    ours, theirs = (column(results[side], end) for side in SIDES)
    return Row("memory", quantity, "bytes", "lower", ours, theirs, None, note)


def _connections(stage: Stage, side: SideName) -> Figures:
    """Growth of a caller that meets CONNECTIONS new workers, and of a callee that as many meet."""
    names = ["leader", "first", "second", *(f"worker{number}" for number in range(CONNECTIONS))]
    others = names[3:]
    with stage.start(side, names) as cohort:
        cohort.run("first", clients.touch, names=["leader", "second"], calls=WARM_UP_CALLS)
        cohort.run("second", clients.touch, names=["leader", "first"], calls=WARM_UP_CALLS)
        cohort.run("leader", clients.warm_threads, to="first", calls=WARM_UP_CALLS)
        cohort.run_many(others, clients.touch, names=["leader"], calls=WARM_UP_CALLS)
        calling = _growth(cohort, "second", partial(cohort.run, "second", clients.touch, names=others))
        called = _growth(cohort, "first", partial(cohort.run_many, others, clients.touch, names=["first"]))
    return {"caller": calling / CONNECTIONS, "callee": called / CONNECTIONS}


def _growth(cohort: Cohort, name: str, act: Callable[[], object]) -> float:
    before = cohort.run(name, clients.resident_bytes)
    act()
    return float(cohort.run(name, clients.resident_bytes) - before)


def _pending(stage: Stage, side: SideName, handler: str, calls: int) -> Figures:
    with stage.start(side, PAIR) as cohort:
        warm = cohort.run(CLIENT, pend, handler=handler, calls=WARM_UP_CALLS)
        if warm["pending"]:
            raise BenchError(f"{side}: warm-up calls were left pending")
        figures: Figures = cohort.run(CLIENT, pend, handler=handler, calls=calls)
    return {end: figures[end] / calls for end in ENDS}


def pend(rpc: RpcModule, handler: str, calls: int, gauge: Callable[[], int] = functions.resident_bytes) -> Figures:
    """Runs in the client: have so many calls pending at the server, and see both processes grow. All are then ended.

    handler: ``module:function``, by name because torch's side must not import aiorpc's decorated functions. gauge: says
    how large the process is that runs it.
    """
    module, _, name = handler.partition(":")
    hold = getattr(importlib.import_module(module), name)
    before = (gauge(), rpc.rpc_sync(SERVER, gauge))
    futures = [rpc.rpc_async(SERVER, hold) for _ in range(calls)]
    _await_held(rpc, calls)
    after = (gauge(), rpc.rpc_sync(SERVER, gauge))
    _release(rpc, name, futures)
    left = rpc.rpc_sync(SERVER, functions.held_count)
    return {"caller": float(after[0] - before[0]), "callee": float(after[1] - before[1]), "pending": float(left)}


def _await_held(rpc: RpcModule, calls: int) -> None:
    end = time.monotonic() + SETTLE_SECONDS
    while (held := rpc.rpc_sync(SERVER, functions.held_count)) < calls:
        if time.monotonic() > end:
            raise BenchError(f"only {held} of {calls} calls are pending at the server after {SETTLE_SECONDS:g} s")
        time.sleep(0.01)


def _release(rpc: RpcModule, name: str, futures: Sequence[Any]) -> None:
    ended = functions.release_waiting if name == functions.wait_for_release.__name__ else functions.release_held
    rpc.rpc_sync(SERVER, ended)
    for future in futures:
        future.wait()
