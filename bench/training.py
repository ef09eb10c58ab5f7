"""The batch_rl example, the same program on either RPC: steps per second with 5 observers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .cohort import fork_server
from .sides import SideName
from .stage import Figures, Plan, Stage, column, progress
from .stats import BenchError, Row

WORLD_SIZE = 6
RUN_SECONDS = 120.0
_BACKENDS: dict[SideName, str] = {"aiorpc": "aiorpc.examples.batch_rl", "torch": "aiorpc.examples._torch"}


def batch_rl(stage: Stage) -> list[Row]:
    """Whole trainings, started anew in every round; the first episode of each, which warms it up, does not count."""
    stage.pause()
    cases: dict[str, Callable[[], Figures]] = {
        side: partial(_train, stage.side(side), stage.plan) for side in ("aiorpc", "torch")
    }
    results = stage.alternate_anew(cases)
    rates = {side: column(results[side], "rate") for side in ("aiorpc", "torch")}
    note = f"{WORLD_SIZE - 1} observers, batched"
    return [Row("batch_rl", "steps/s", "1/s", "higher", rates["aiorpc"], rates["torch"], 3.0, note)]


def _launched(settings: Any, names: list[str], tries: int) -> dict[str, Any] | None:
    """What the agent returned. torch's shutdown now and then fails when the store's host exits first: tried again."""
    from aiorpc.examples import _launch, _rl

    try:
        result: dict[str, Any] | None = _launch.launch(_rl.blocking_role, settings, names, timeout=RUN_SECONDS)
        return result
    except _launch.WorkerFailed as failure:
        if tries <= 1:
            raise
        progress(f"  torch's batch_rl failed, tried again: {str(failure).splitlines()[-1]}")
        return _launched(settings, names, tries - 1)


def _train(side: SideName, plan: Plan) -> Figures:
    from aiorpc.examples import _rl

    fork_server()  # with one OMP thread and everything imported, as for all other measurements
    settings = _rl.Settings(
        world_size=WORLD_SIZE,
        num_episode=plan.episodes + 1,
        num_steps=plan.steps,
        show=False,
        timeout=RUN_SECONDS,
        backend_module=_BACKENDS[side],
    )
    names = [_rl.worker_name(rank) for rank in range(WORLD_SIZE)]
    result = _launched(settings, names, tries=3 if side == "torch" else 1)
    if result is None:
        raise BenchError(f"{side}: the agent of batch_rl gave no result (is this run under torchrun?)")
    return {"rate": float(result["median_steps_per_s"])}
