"""Measurements of gradients across workers: what a client does, what is judged, and a small run of the real thing."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import aiorpc
from aiorpc import Future
from bench import gradient_clients, gradients
from bench.bulk_clients import AGAIN_CALLS
from bench.memory import ENDS
from bench.report import read_json
from bench.stage import Figures, Plan, Stage
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


def test_slope_is_that_of_the_nearest_line() -> None:
    """A constant does not count, and what lies beside the line counts as far as it turns it."""
    assert gradient_clients.slope((1, 5, 25), (103.0, 115.0, 175.0)) == pytest.approx(3.0)
    assert gradient_clients.slope((0, 1, 2), (0.0, 3.0, 0.0)) == pytest.approx(0.0)


def test_cases_are_timed_in_turn() -> None:
    """However long they take, each has its least number of samples; what warms up is no sample."""
    order: list[str] = []
    cases = {name: lambda name=name: order.append(name) for name in ("one", "other")}
    found = gradient_clients.interleaved(cases, seconds=0.0, least=2)
    assert order == ["one", "other"] * (2 + AGAIN_CALLS)
    assert set(found) == {"one", "other"} and all(value > 0 for value in found.values())


def test_result_is_dropped_before_the_next_case() -> None:
    """Its memory can be used again."""
    results: list[weakref.ref[torch.Tensor]] = []

    def case() -> torch.Tensor:
        assert all(result() is None for result in results)
        made = torch.ones(2)
        results.append(weakref.ref(made))
        return made

    gradient_clients.interleaved({"one": case, "other": case}, seconds=0.0, least=2)
    assert len(results) == 2 * (2 + AGAIN_CALLS)


def test_layers_are_the_same_everywhere() -> None:
    """A seed makes one layer, whatever was drawn before, and draws nothing from anybody else's numbers."""
    torch.manual_seed(5)
    first = gradient_clients.layer(4, seed=1)
    drawn = torch.rand(1)
    again, other = gradient_clients.layer(4, seed=1), gradient_clients.layer(4, seed=2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not any(map(torch.equal, first.parameters(), other.parameters()))


def test_exchange_does_not_answer_with_what_came() -> None:
    """Its answer has to be copied like any other: it has the size, and not the memory."""
    came = torch.zeros(8, 4)
    answer = gradient_clients.exchange(came)
    assert answer.shape == came.shape
    assert answer.data_ptr() != came.data_ptr()


def test_copies_of_a_pass_are_as_large_as_what_it_sends(other_side: Any) -> None:
    """Two calls, each with a tensor of the activations' size in both directions."""
    model = gradient_clients.Shards(other_side, 8, 6)
    sizes: list[tuple[int, int]] = []
    call = other_side.rpc_sync

    def noted(to: str, function: Callable[..., Any], args: tuple[torch.Tensor]) -> Any:
        answer = call(to, function, args=args)
        sizes.append((args[0].nbytes, answer.nbytes))
        return answer

    other_side.rpc_sync = noted
    model.copies()
    assert sizes == [(8 * 6 * 4, 8 * 6 * 4)] * 2


def test_steps_give_rates(alone: Any) -> None:
    """With and without the optimizer, and with both verbs in one."""
    found = gradient_clients.steps(alone, **MODEL, **SMALL)
    assert set(found) == {"step", "at once", "pass"} and all(rate > 0 for rate in found.values())


def test_shards_give_a_share(alone: Any) -> None:
    """A pass, over what its parts take."""
    found = gradient_clients.shards(alone, size=4, batch=3, **SMALL)
    assert found["times"] == pytest.approx(found["pass"] / (found["compute"] + found["copies"]))


def test_chains_give_a_slope(alone: Any) -> None:
    """Of their lengths."""
    found = gradient_clients.chains(alone, (1, 3), **SMALL)
    assert found["slope"] == pytest.approx((found["3"] - found["1"]) / 2)


def test_side_with_wrong_gradients_is_not_measured(doubled: Any) -> None:
    """Whatever the measurement, it ends with what was wrong."""
    with pytest.raises(BenchError, match="parameters after some steps are not those"):
        gradient_clients.steps(doubled, **MODEL, **SMALL)
    with pytest.raises(BenchError, match="gradients are not those"):
        gradient_clients.shards(doubled, size=4, batch=3, **SMALL)
    with pytest.raises(BenchError, match="a chain's results are not those"):
        gradient_clients.chains(doubled, (1, 3), **SMALL)


def test_optimizer_that_does_nothing_is_not_measured(other_side: Any) -> None:
    """Parameters that stay as they were are wrong."""

    class Idle(aiorpc.optim.DistributedOptimizer):
        def step(self, context_id: int) -> Future[None]:
            done: Future[None] = Future()
            done.set_result(None)
            return done

    other_side.optim.DistributedOptimizer = Idle
    with pytest.raises(BenchError, match="parameters after some steps"):
        gradient_clients.steps(other_side, **MODEL, **SMALL)


def test_memory_that_steps_leave_behind_is_seen(other_side: Any) -> None:
    """48 MiB kept by each step show; without them there is little.

    Blocks as large as that are always new memory: glibc maps what is above 32 MiB by itself
    (DEFAULT_MMAP_THRESHOLD_MAX, mallopt(3)). Smaller ones may find what other tests of this process freed.
    """
    leaked: list[torch.Tensor] = []

    class Leaking(aiorpc.optim.DistributedOptimizer):
        def step(self, context_id: int) -> Future[None]:
            leaked.append(torch.ones(12 << 20))
            return super().step(context_id)

    sound = gradient_clients.growth(other_side, **MODEL, iterations=20)
    other_side.optim.DistributedOptimizer = Leaking
    found = gradient_clients.growth(other_side, **MODEL, iterations=3)
    assert found["caller"] > 72 and found["callee"] > 72
    assert sound["caller"] < found["caller"] / 4


def test_context_that_is_left_open_is_counted(alone: Any) -> None:
    """On both ends, here one process; none is left once all were left."""
    with alone.autograd.context():
        found = gradient_clients.growth(alone, **MODEL, iterations=1, patience=0.0)
    assert (found["contexts, caller"], found["contexts, callee"]) == (1.0, 1.0)
    found = gradient_clients.growth(alone, **MODEL, iterations=1)
    assert (found["contexts, caller"], found["contexts, callee"]) == (0.0, 0.0)


class MadeUpStage:
    """A stage without processes: each case gives the same figure, whatever it is asked for."""

    client = new_client = float  # in no case is it called

    def __init__(self, value: float) -> None:
        self.plan = Plan()
        self._value = value

    def alternate(self, cases: Mapping[str, object]) -> dict[str, list[Figures]]:
        return {name: [_Any(self._value)] for name in cases}

    alternate_anew = alternate


class _Any(dict[str, float]):
    def __init__(self, value: float) -> None:
        self._value = value

    def __getitem__(self, name: str) -> float:
        return self._value


@pytest.mark.parametrize(
    ("measure", "judged"),
    [
        (gradients.step, {"steps/s": (2.0, None)}),
        (gradients.shards, {"that by one process and copies together": (None, 1.2)}),
        (gradients.chain, {}),
        (
            gradients.memory,
            {f"growth, {end}": (None, 4.0) for end in ENDS} | {f"contexts left, {end}": (None, 0.0) for end in ENDS},
        ),
    ],
)
def test_what_must_hold_is_judged(
    measure: Callable[[Stage], list[Any]], judged: dict[str, tuple[float | None, float | None]]
) -> None:
    """Twice torch's steps, 1.2 times computation and copies, a few megabytes, no context; the rest is for reading."""
    rows = measure(cast(Stage, MadeUpStage(100.0)))
    found = {row.quantity: (row.target, row.limit) for row in rows if row.passed is not None}
    assert found == judged
    assert all(row.passed is False for row in rows if row.quantity in judged)


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
