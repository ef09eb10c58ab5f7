"""The batch_rl and batch_ps examples, the same programs on either RPC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .cohort import fork_server
from .sides import SIDES, SideName
from .stage import Figures, Plan, Stage, column, progress
from .stats import BenchError, Row

WORLD_SIZE = 6
PS_WORLD_SIZE, PS_STEPS = 3, 8
RUN_SECONDS = 120.0
_BACKENDS: dict[SideName, str] = {"aiorpc": "aiorpc.examples.batch_rl", "torch": "bench.torch_examples"}
_BACKENDS_PS: dict[SideName, str] = {"aiorpc": "aiorpc.examples.batch_ps", "torch": "bench.torch_examples"}


def batch_rl(stage: Stage) -> list[Row]:
    """Whole trainings, started anew in every round; the first episode of each, which warms it up, does not count."""
    stage.pause()
    results = stage.alternate_anew({side: partial(_train, stage.side(side), stage.plan) for side in SIDES})
    ours, theirs = (column(results[side], "rate") for side in SIDES)
    note = f"{WORLD_SIZE - 1} observers, batched"
    return [Row("batch_rl", "steps/s", "1/s", "higher", ours, theirs, 3.0, note)]


def batch_ps(stage: Stage) -> list[Row]:
    """Whole trainings of ResNet-50 on tiny images: 100 MB of gradients and of parameters for each few images."""
    stage.pause()
    results = stage.alternate_anew({side: partial(_train_ps, stage.side(side)) for side in SIDES})
    ours, theirs = (column(results[side], "rate") for side in SIDES)
    note = f"ResNet-50, {PS_WORLD_SIZE - 1} trainers, 2 images of 32x32 a step"
    return [Row("batch_ps", "images/s", "1/s", "higher", ours, theirs, None, note)]


def _result(side: SideName, role: Callable[..., Any], settings: Any, names: list[str]) -> dict[str, Any]:
    """What rank 0 returned, of new processes with one OMP thread and everything imported, as in all measurements."""
    fork_server()
    result = _launched(role, settings, names, tries=3 if side == "torch" else 1)
    if result is None:
        raise BenchError(f"{side}: rank 0 gave no result (is this run under torchrun?)")
    return result


def _launched(role: Callable[..., Any], settings: Any, names: list[str], tries: int) -> dict[str, Any] | None:
    """What rank 0 returned. torch's shutdown now and then fails when the store's host exits first: tried again."""
    from aiorpc.examples._shared import launch
    from aiorpc.run import WorkerFailed

    try:
        result: dict[str, Any] | None = launch.launch(role, settings, names, timeout=RUN_SECONDS)
        return result
    except WorkerFailed as failure:
        if tries <= 1:
            raise
        progress(f"  torch failed, tried again: {str(failure).splitlines()[-1]}")
        return _launched(role, settings, names, tries - 1)


def _train(side: SideName, plan: Plan) -> Figures:
    from aiorpc.examples._shared import rl

    settings = rl.Settings(
        world_size=WORLD_SIZE,
        num_episode=plan.episodes + 1,
        num_steps=plan.steps,
        show=False,
        timeout=RUN_SECONDS,
        backend_module=_BACKENDS[side],
    )
    names = [rl.worker_name(rank) for rank in range(WORLD_SIZE)]
    return {"rate": float(_result(side, rl.blocking_role, settings, names)["median_steps_per_s"])}


def _train_ps(side: SideName) -> Figures:
    from aiorpc.examples._shared import ps

    settings = ps.Settings(
        world_size=PS_WORLD_SIZE,
        num_steps=PS_STEPS,
        batch_size=2,
        image_size=32,
        show=False,
        timeout=RUN_SECONDS,
        backend_module=_BACKENDS_PS[side],
    )
    names = [ps.worker_name(rank) for rank in range(PS_WORLD_SIZE)]
    return {"rate": float(_result(side, ps.role, settings, names)["samples_per_s"])}
