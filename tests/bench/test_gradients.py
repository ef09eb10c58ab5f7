"""Measurements of gradients across workers: what a client does, what is judged, and a small run of the real thing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import aiorpc
from bench import gradient_clients
from bench.memory import ENDS
from bench.report import read_json
from bench.stats import BenchError

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"seconds": 0.0, "least": 2}
MODEL: dict[str, Any] = {"width": 4, "batch": 3, "warm_up": 2}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """aiorpc, with this process as the only worker: it calls itself."""
    options = aiorpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    aiorpc.init_rpc("server", rank=0, world_size=1, rpc_backend_options=options)
    yield aiorpc
    aiorpc.shutdown()
    gradient_clients.examples.cache_clear()


@pytest.fixture
def other_side(alone: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A side of its own, which has all from aiorpc until a test gives it something else."""
    made: dict[str, Any] = {}
    for name in ("other_side", "other_side.autograd", "other_side.optim"):
        made[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
    rpc, autograd, optim = made.values()
    for module, original in ((rpc, alone), (autograd, alone.autograd), (optim, alone.optim)):
        vars(module).update({name: getattr(original, name) for name in original.__all__})
    # Whoever is not aiorpc counts contexts as torch does.
    vars(autograd)["_get_debug_info"] = lambda: {"num_autograd_contexts": gradient_clients.open_contexts("aiorpc")}
    rpc.autograd, rpc.optim = autograd, optim
    return rpc


@pytest.fixture
def doubled(other_side: Any) -> Any:
    """A side whose backward passes give twice the gradients."""
    backward = aiorpc.autograd.backward

    def twice(context_id: int, roots: Sequence[torch.Tensor]) -> None:
        backward(context_id, [2 * root for root in roots])

    other_side.autograd.backward = twice
    return other_side


def test_side_with_wrong_gradients_is_not_measured(doubled: Any) -> None:
    """Whatever the measurement, it ends with what was wrong."""
    with pytest.raises(BenchError, match="parameters after some steps are not those"):
        gradient_clients.steps(doubled, **MODEL, **SMALL)
    with pytest.raises(BenchError, match="gradients are not those"):
        gradient_clients.shards(doubled, size=4, batch=3, **SMALL)
    with pytest.raises(BenchError, match="a chain's results are not those"):
        gradient_clients.chains(doubled, (1, 3), **SMALL)


SMALL_RUN = """
import sys
from dataclasses import replace
from pathlib import Path
from bench import gradients, report, suite
from bench.stage import Plan
gradients.WIDTH = gradients.BATCH = gradients.SHARD_WIDTH = gradients.SHARD_BATCH = 8
gradients.WARM_UP = gradients.MEMORY_WARM_UP = 3
gradients.CHAINS = (1, 3)
plan = replace(Plan.quick(), rounds=1, cohort_rounds=1, seconds=0.02, transfers=2, iterations=20)
names = [each.name for each in suite.MEASUREMENTS if each.name.startswith("autograd_")]
outcome = suite.run(suite.choose(names), plan, [])
report.write_json(outcome, Path(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_small_run_of_both_sides_gives_figures(tmp_path: Path) -> None:
    """A tiny run of the real thing: both sides compared in everything, and no context left."""
    out = tmp_path / "gradients.json"
    # A process of its own: the fork server it starts ends with it.
    command = [sys.executable, "-c", SMALL_RUN, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = read_json(out)
    assert outcome.failures == ()
    rows = {(row.measurement, row.quantity): row for row in outcome.rows}
    assert {name for name, _ in rows} == {f"autograd_{name}" for name in ("step", "shards", "chain", "memory")}
    assert all(len(row.aiorpc) == len(row.torch) == 1 for row in rows.values())
    assert all(row.ratio is not None for (name, _), row in rows.items() if name in ("autograd_step", "autograd_shards"))
    for end in ENDS:
        left = rows["autograd_memory", f"contexts left, {end}"]
        assert (left.aiorpc, left.passed) == ((0.0,), True)
